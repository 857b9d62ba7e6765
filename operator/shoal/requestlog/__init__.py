"""The request log of tenants that enabled it: fully separate from usage records, and it never delays serving.

    request -> capture -> queue (bounded) -> writer thread: redact, compress, encrypt -> files -> bucket

capture.py     what is kept of one request while it runs, bounded
entry.py       one request's line: metadata, and with Full the redacted text
writer.py      the writer thread: gathers lines and writes them as frames; counts dropped entries
growing.py     files being written: rotation, fsync, repair after a failed write
frames.py      the format of a file: frames that stand alone, compressed and perhaps encrypted
logkeys.py     the keys of encryption
store.py       stores the files in a folder;  bucket.py  stores them in a bucket
query.py       finds the newest entries of a query
erase.py       retention, and deletion by tenant or user
logger.py      the entry point: what the request path calls, and what the process runs
api.py         GET and DELETE /v1/logs, also among gateways; parameters.py  query parameters
logmetrics.py  metrics
"""
