"""The request log of tenants that asked for one: apart from usage records in everything, and never in serving's way.

    request -> capture -> queue (bounded) -> writer thread: redact, compress, encrypt -> files -> bucket

capture.py     what is kept of one request while it runs, bounded
entry.py       one request's line: metadata, and with Full the redacted text
writer.py      the thread: gathers lines and writes them as frames; drops and counts
growing.py     the files that grow: rotation, fsync, what is left of a write that broke off
frames.py      the format of a file: frames that stand alone, compressed and perhaps encrypted
logkeys.py     the keys of encryption
store.py       where files are, in a folder; bucket.py  the same in a bucket
query.py       the newest entries that somebody asks for
erase.py       retention, and deletion by tenant or user
book.py        all of it together: what the request path calls, and what the process runs
api.py         GET and DELETE /v1/logs, also among gateways; parameters.py  what may be asked
figures.py     metrics
"""
