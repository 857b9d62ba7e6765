"""The operator's configuration without a cluster: a file, or the defaults of the chart."""

from importlib.metadata import version
from pathlib import Path

import click
import pydantic

from shoal.api.chartvalues import Values
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.cli.explain import inputs


def read_config(path: Path | None) -> OperatorConfig:
    """Reads the operator's configuration file, or a ConfigMap that contains it; without a path: the chart's defaults.

    Raises click.UsageError with the errors in the file.
    """
    if path is None:
        return chart_defaults()
    raw = inputs.document(path)
    if raw.get("kind") == "ConfigMap":
        data: JsonObject = raw.get("data") or {}
        if "config.yaml" not in data:
            raise click.UsageError(f"{path}: this ConfigMap has no key config.yaml; the operator's is shoal-operator")
        raw = inputs.parse_text(str(data["config.yaml"]), f"{path}, config.yaml")
    try:
        config = OperatorConfig.model_validate(raw)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise click.UsageError(
            f"{path}: not the operator's configuration, which is in the ConfigMap shoal-operator: {problems}"
        ) from None
    if (problem := config.engines.undefined_default()) is not None:
        raise click.UsageError(f"{path}: {problem}")
    return config


def chart_defaults() -> OperatorConfig:
    """The configuration that the chart makes of its default values; a test compares the two."""
    values = Values()
    given = values.model_dump(mode="json", by_alias=True)
    image = f"{values.image.repository}:{values.image.tag or version('shoal')}"
    own = {
        "agent": given["agent"] | {"image": image, "pullPolicy": values.image.pull_policy},
        "scopeNamespaces": values.scope.namespaces,
        "metricsAuth": values.metrics.auth.enabled,
        "roleTokens": values.rbac.roles.enabled,
        "resyncSeconds": values.operator.resync_seconds,
        "logLevel": values.operator.log_level,
    }
    return OperatorConfig.model_validate(_known(OperatorConfig, given | own))


def _known(section: type[pydantic.BaseModel], given: JsonObject) -> JsonObject:
    """The part of the chart's values that the operator's configuration also has."""
    fields = {str(field.alias or name): field.annotation for name, field in section.model_fields.items()}
    return {
        name: _known(kind, given[name])
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
        else given[name]
        for name, kind in fields.items()
        if name in given
    }
