"""A container's environment: values, references, and $(NAME)."""

import re
from collections.abc import Mapping
from typing import Any

from shoal_dev.lab.node import fields
from shoal_dev.lab.node.quantity import ceiling

Json = dict[str, Any]

_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z0-9]+)\))")


class ConfigError(Exception):
    """The container cannot be made of what its spec refers to: reason CreateContainerConfigError."""


def expand(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) where NAME is known; $$ is a dollar sign; anything else stays as it is."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(replace, text)


def field_value(pod: Json, path: str, address: str, node: str, host: str) -> str:
    """The downward API's fieldRef. Raises ConfigError."""
    metadata, spec = pod["metadata"], pod["spec"]
    simple: dict[str, str] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": node,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": address,
        "status.podIPs": address,
        "status.hostIP": host,
        "status.hostIPs": host,
    }
    if path in simple:
        return simple[path]
    for kind in ("labels", "annotations"):
        values: dict[str, str] = metadata.get(kind) or {}
        if path == f"metadata.{kind}":
            return "\n".join(f'{key}="{value}"' for key, value in sorted(values.items()))
        if path.startswith(f"metadata.{kind}['") and path.endswith("']"):
            return values.get(path[len(f"metadata.{kind}['") : -2], "")
    raise ConfigError(f"unsupported fieldPath {path}")


def resource_value(container: Json, reference: Json, allocatable: Mapping[str, str]) -> str:
    """The downward API's resourceFieldRef: whole units of the divisor, rounded up; without a limit, the node's."""
    kind, _, resource = reference["resource"].partition(".")
    resources: Json = fields.mapping(container, "resources")
    value: Any = fields.mapping(resources, kind).get(resource)
    if value is None and kind == "limits":
        value = allocatable.get(resource)
    return str(ceiling(str(value or "0"), str(reference.get("divisor") or "1")))
