"""What people have in their clusters beside Shoal, for a lab: `shoal lab up --with keda,prometheus`.

`choice` says what there is; `keda` installs the real KEDA as pods, with KEDA's own manifests; `prometheus` runs the
real Prometheus, which follows the cluster's ServiceMonitors, PodMonitors and PrometheusRules through `monitors` and
`scraping`.
"""
