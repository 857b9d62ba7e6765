"""What a Prometheus is told of Shoal, from one source: the chart's PrometheusRule, the same rules for a Prometheus
without the Prometheus operator, and how it finds what to scrape.

recording.py  sums and ratios that alerts share;  alerts.py  when to wake somebody, each with its page in docs/runbooks
scrape.py     what to scrape, for a Prometheus with Kubernetes discovery
render.py     the files
"""

from shoal_dev.generate.monitoring.alerts import ALERTS, Alert
from shoal_dev.generate.monitoring.recording import RECORDED
from shoal_dev.generate.monitoring.render import alerts_table, chart_rules, plain_rules
from shoal_dev.generate.monitoring.scrape import scrape_config

__all__ = ["ALERTS", "RECORDED", "Alert", "alerts_table", "chart_rules", "plain_rules", "scrape_config"]
