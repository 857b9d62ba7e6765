"""What the offline commands take for the operator's configuration is what the chart makes of its defaults."""

import yaml

from shoal.api.config import OperatorConfig
from shoal.cli.explain.settings import chart_defaults
from tests.support.charts import rendered


def test_the_charts_defaults_are_the_same_without_helm() -> None:
    (found,) = [o for o in rendered({}) if (o["kind"], o["metadata"]["name"]) == ("ConfigMap", "shoal-operator")]
    assert chart_defaults() == OperatorConfig.model_validate(yaml.safe_load(found["data"]["config.yaml"]))
