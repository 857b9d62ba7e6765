"""From a request to a usage record to the ledger, in the gateway's process.

meter.py        counts one request's usage and writes its record's rows;  checkpoints.py  rows of running requests
spool.py        keeps rows on disk until the ledger has them (spoolfile.py: its tables and bounds)
shipper.py      sends them, at least once, in order;  tokenfile.py  the pod's own token
spoolreader.py  reads a spool while its gateway writes it;  spoolsalvage.py  recovers a damaged one
spoolmetrics.py metrics of spool and shipper
"""
