"""The ledger: from usage records to a tenant's bill. (`shoal/metering` makes the record of a request and
ships it to the ledger.)

`process` runs the parts; `service` is the API on the HTTP shell; `settings`, `metrics`, `tracing`. Ingestion: `records`
(POST /v1/records, and the sink that takes records), `parse`, `store` and its `writer`, `ingest` (the transaction),
`sums` (its effect on sums), `bulk` (many rows), `schema`, `database`, `migrations`. Output: `totals` and `monthly` (GET
/v1/totals), `queries`, `prices`, `reconcile`. Maintenance: `maintenance`, `backup`, `listing`.
"""
