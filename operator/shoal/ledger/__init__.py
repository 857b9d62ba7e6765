"""From usage records to a tenant's bill. (From a request to its record, and to the ledger: `shoal/metering`.)

`process` puts it together, `service` is its API on the HTTP shell, with `settings` and `metrics`.
A record's way: `records` (POST /v1/records), `parse`, `sink` (what takes records), `store` and its `writer`, `ingest`
(the transaction), `sums` (what it changes), `bulk` (many rows), `schema`, `database`, `migrations`.
What is told of them: `totals` and `monthly` (GET /v1/totals), `queries`, `prices`, `reconcile`.
What keeps it in order: `maintenance`, `backup`, `listing`.
"""
