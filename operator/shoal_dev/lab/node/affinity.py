"""A PersistentVolume's nodeAffinity, which the kubelet checks again when it mounts. Pure functions."""

from collections.abc import Mapping
from typing import Any

from shoal_dev.lab.node import fields

Json = dict[str, Any]


def admits(volume: Json, node: str, labels: Mapping[str, str]) -> bool:
    """Whether the volume may be mounted on this node; without nodeAffinity, on every one."""
    required: Json = fields.mapping(fields.mapping(volume["spec"], "nodeAffinity"), "required")
    terms: list[Json] = fields.items(required, "nodeSelectorTerms")
    return not required or any(_term(term, node, labels) for term in terms)


def _term(term: Json, node: str, labels: Mapping[str, str]) -> bool:
    expressions: list[Json] = fields.items(term, "matchExpressions")
    on_fields: list[Json] = fields.items(term, "matchFields")
    if not expressions and not on_fields:
        return False  # an empty term selects nothing
    return all(_matches(each, labels) for each in expressions) and all(
        _matches(each, {"metadata.name": node}) for each in on_fields
    )


def _matches(requirement: Json, values: Mapping[str, str]) -> bool:
    value = values.get(requirement["key"])
    wanted: list[str] = fields.words(requirement, "values")
    match requirement["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                number, bound = int(value or ""), int(wanted[0])
            except ValueError:
                return False
            return number > bound if operator == "Gt" else number < bound
        case _:
            return False
