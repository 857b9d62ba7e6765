"""Every number, text, list and map of a custom resource has an end: its schema bounds what an API server takes."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from shoal.api.meta import CustomResource
from shoal.api.schema import KINDS, root_schema

BOUNDS = ("minimum", "maximum", "maxLength", "maxItems", "maxProperties", "enum", "format", "pattern")
HUGE = 100_000
"""Characters, items and entries of what each attack sends."""


def unbounded(node: dict[str, Any], path: str) -> Iterator[str]:
    kind = node.get("type")
    if node.get("x-kubernetes-int-or-string") and "maxLength" not in node:
        yield f"{path}: a quantity of any length"
    if kind == "integer" and not {"minimum", "maximum"} <= set(node):
        yield f"{path}: a number without both ends"
    if kind == "string" and not {"maxLength", "enum", "format"} & set(node):
        yield f"{path}: a text of any length"
    if kind == "array":
        if "maxItems" not in node:
            yield f"{path}: a list of any length"
        yield from unbounded(node["items"], f"{path}[]")
    for name, child in node.get("properties", {}).items():
        yield from unbounded(child, f"{path}.{name}")
    if isinstance(extra := node.get("additionalProperties"), dict):
        if "maxProperties" not in node:
            yield f"{path}: a map of any size"
        yield from unbounded(extra, f"{path}.*")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind_name)
def test_everything_has_an_end(kind: type[CustomResource]) -> None:
    properties = root_schema(kind)["properties"]
    assert [fault for part in ("spec", "status") for fault in unbounded(properties[part], part)] == []


def test_what_has_none_is_noticed() -> None:
    node = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer", "minimum": 0}}}}
    assert list(unbounded(node, "spec")) == ["spec.a: a list of any length", "spec.a[]: a number without both ends"]
    assert list(unbounded({"x-kubernetes-int-or-string": True}, "a")) == ["a: a quantity of any length"]


# --- the attack -----------------------------------------------------------------------------------------------------


def huge(node: dict[str, Any], name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """For each field below `node`: its name, a value without sense for it, and the schema that has to refuse it."""
    kind = node.get("type")
    if kind == "integer":
        yield name, 10**30, node
    elif kind == "string" or node.get("x-kubernetes-int-or-string"):
        yield name, "9" * HUGE, node
    elif kind == "array":
        yield name, [_least(node["items"])] * HUGE, node | {"items": {}}
        yield from huge(node["items"], f"{name}[]")
    for child, schema in node.get("properties", {}).items():
        yield from huge(schema, f"{name}.{child}")
    if isinstance(extra := node.get("additionalProperties"), dict):
        yield name, {f"k{number}": _least(extra) for number in range(HUGE)}, node | {"additionalProperties": {}}
        yield from huge(extra, f"{name}.*")


def _least(node: dict[str, Any]) -> Any:
    return {"object": {}, "array": [], "integer": 0, "boolean": False}.get(node.get("type", ""), "")


def without_bounds(node: Any) -> Any:
    """The same schema with the wall switched off: types only."""
    if isinstance(node, list):
        return [without_bounds(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        # The names of properties are not keywords.
        key: {name: without_bounds(each) for name, each in value.items()}
        if key == "properties"
        else without_bounds(value)
        for key, value in node.items()
        if key not in BOUNDS
    }


def taken(kind: type[CustomResource], *, walls: bool) -> list[str]:
    """The fields in which something huge passes."""
    properties = root_schema(kind)["properties"]
    attacks = [attack for part in ("spec", "status") for attack in huge(properties[part], part)]
    assert len(attacks) > 5
    # Times are no texts: an API server reads them as times, whatever the schema says of their length.
    return [
        name
        for name, value, schema in attacks
        if jsonschema.Draft202012Validator(schema if walls else without_bounds(schema)).is_valid(value)
        and not (walls and schema.get("format") == "date-time")
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind_name)
def test_nothing_huge_is_taken(kind: type[CustomResource]) -> None:
    assert taken(kind, walls=True) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind_name)
def test_without_the_bounds_every_field_takes_it(kind: type[CustomResource]) -> None:
    properties = root_schema(kind)["properties"]
    assert taken(kind, walls=False) == [
        name for part in ("spec", "status") for name, _, _ in huge(properties[part], part)
    ]
