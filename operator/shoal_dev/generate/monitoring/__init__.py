"""Rules and scrape jobs for Prometheus, from one source: the chart's PrometheusRule, and the same rules and jobs for a
Prometheus without the Prometheus operator.

recording.py  sums and ratios that alerts share;  alerts.py  the alerts, each with its page in docs/runbooks
scrape.py     scrape jobs for a Prometheus with Kubernetes discovery
render.py     the files
"""

from shoal_dev.generate.monitoring.alerts import ALERTS, Alert
from shoal_dev.generate.monitoring.recording import RECORDED
from shoal_dev.generate.monitoring.render import alerts_table, chart_rules, plain_rules
from shoal_dev.generate.monitoring.scrape import scrape_config

__all__ = ["ALERTS", "RECORDED", "Alert", "alerts_table", "chart_rules", "plain_rules", "scrape_config"]
