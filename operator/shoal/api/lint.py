"""The API linter: rules that every generated CustomResourceDefinition follows (after kube-api-linter).

It checks the generated schema, which is what the cluster gets, not the Python types.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from shoal.api.meta import JsonObject

_ACRONYMS: Final = ("GPU", "ID", "GB", "URI", "CPU")
_PRODUCTS: Final = frozenset({"vLLM"})
"""Values that are names of other projects, written as these write them."""
_DURATION_NAMES: Final = ("duration", "timeout", "interval", "period", "delay")
_UNITS: Final = ("Seconds", "Millis")


@dataclass(frozen=True, slots=True)
class SchemaFinding:
    """One broken rule."""

    where: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.message}"


def lint(crd: JsonObject) -> list[SchemaFinding]:
    """Findings of a CustomResourceDefinition; empty: none."""
    found: list[SchemaFinding] = []
    kind = crd["spec"]["names"]["kind"]
    for version in crd["spec"]["versions"]:
        if "status" not in version.get("subresources", {}):
            found.append(SchemaFinding(kind, "statussubresource", "the status subresource is off"))
        root = version["schema"]["openAPIV3Schema"]
        found += _root(kind, root)
        for part in ("spec", "status"):
            found += _node(f"{kind}.{part}", part, root["properties"][part], in_spec=part == "spec")
    return found


def _root(kind: str, root: JsonObject) -> Iterator[SchemaFinding]:
    if "status" in root.get("required", []):
        yield SchemaFinding(kind, "statusoptional", "status must be optional: an object is born without one")
    status = root["properties"]["status"]["properties"]
    if next(iter(status), None) != "conditions":
        yield SchemaFinding(f"{kind}.status", "conditions", "`conditions` must be the first field")
        return
    conditions = status["conditions"]
    if (conditions.get("x-kubernetes-list-type"), conditions.get("x-kubernetes-list-map-keys")) != ("map", ["type"]):
        yield SchemaFinding(f"{kind}.status.conditions", "conditions", "must be a list map with the key `type`")
    needed = {"type", "status", "lastTransitionTime", "reason", "message"}
    if set(conditions["items"].get("required", [])) != needed:
        yield SchemaFinding(f"{kind}.status.conditions", "conditions", f"required must be {', '.join(sorted(needed))}")
    if "observedGeneration" not in status:
        yield SchemaFinding(f"{kind}.status", "conditions", "`observedGeneration` is missing")


def _node(where: str, name: str, node: JsonObject, *, in_spec: bool) -> Iterator[SchemaFinding]:
    yield from _description(where, node)
    if node.get("nullable"):
        yield SchemaFinding(where, "nonullable", "absent is the only way to say nothing")
    kind: Any = "quantity" if node.get("x-kubernetes-int-or-string") else node.get("type")
    match kind:
        case "object":
            yield from _object(where, node, in_spec=in_spec)
        case "array":
            yield from _array(where, node, in_spec=in_spec)
        case "string":
            if not ("enum" in node or node.get("format") == "date-time" or "maxLength" in node):
                yield SchemaFinding(where, "maxlength", "a string must have maxLength: it bounds the cost of its rules")
            if node.get("format") == "duration":
                yield SchemaFinding(where, "nodurations", "write an integer `...Seconds`")
            for value in node.get("enum", ()):
                if not value[:1].isupper() and value not in _PRODUCTS:
                    yield SchemaFinding(where, "enums", f"{value!r} is not PascalCase")
        case "integer":
            yield from _integer(where, name, node, in_spec=in_spec)
        case "quantity":
            if "maxLength" not in node:
                yield SchemaFinding(where, "maxlength", "a Quantity must have maxLength")
        case "boolean":
            pass
        case "number":
            yield SchemaFinding(where, "nofloats", "write an integer in a small unit, or a Quantity")
        case _:
            yield SchemaFinding(where, "types", f"type {kind!r} is not allowed")


def _object(where: str, node: JsonObject, *, in_spec: bool) -> Iterator[SchemaFinding]:
    if "additionalProperties" in node:
        values = node["additionalProperties"]
        if "maxProperties" not in node:
            yield SchemaFinding(where, "maxitems", "a map must have maxProperties")
        if values.get("type") in ("object", "array"):
            yield SchemaFinding(where, "nomaps", "write a list with named entries instead of a map of objects")
        yield from _node_values(f"{where}.*", values, in_spec=in_spec)
    required = set(node.get("required", ()))
    for name, child in node.get("properties", {}).items():
        here = f"{where}.{name}"
        if not _is_camel_case(name):
            yield SchemaFinding(here, "jsontags", "the name is not camelCase")
        if name == "phase" or name.endswith("Phase"):
            yield SchemaFinding(here, "nophase", "say it with conditions")
        if name.endswith(("Stamp", "Timestamp")):
            yield SchemaFinding(here, "notimestamp", "call it `...Time`")
        if name in required and "default" in child:
            yield SchemaFinding(here, "optionalorrequired", "a field with a default cannot be required")
        if "description" not in child:
            yield SchemaFinding(here, "commentstart", "the field has no description")
        yield from _node(here, name, child, in_spec=in_spec)
    for name in required - set(node.get("properties", {})):
        yield SchemaFinding(f"{where}.{name}", "optionalorrequired", "required, but not a field")


def _array(where: str, node: JsonObject, *, in_spec: bool) -> Iterator[SchemaFinding]:
    if "maxItems" not in node:
        yield SchemaFinding(where, "maxitems", "a list must have maxItems")
    items = node["items"]
    match node.get("x-kubernetes-list-type"):
        case "map":
            keys = node.get("x-kubernetes-list-map-keys", [])
            fields = items.get("properties", {})
            for key in keys:
                if key not in items.get("required", []) and "default" not in fields.get(key, {}):
                    yield SchemaFinding(
                        where, "ssatags", f"the list's key `{key}` must be a required field of its items"
                    )
            if not keys:
                yield SchemaFinding(where, "ssatags", "a list map must name its keys")
        case "set":
            if items.get("type") in ("object", "array"):
                yield SchemaFinding(where, "ssatags", "a set must have scalar items")
        case "atomic":
            pass
        case other:
            yield SchemaFinding(where, "ssatags", f"list type {other!r}: say atomic, set or map")
    yield from _node_values(f"{where}[]", items, in_spec=in_spec)


def _node_values(where: str, node: JsonObject, *, in_spec: bool) -> Iterator[SchemaFinding]:
    # The description of a scalar item or value is that of its list or map.
    yield from _node(where, "", {"description": "Value.", **node}, in_spec=in_spec)


def _integer(where: str, name: str, node: JsonObject, *, in_spec: bool) -> Iterator[SchemaFinding]:
    if node.get("format") not in ("int32", "int64"):
        yield SchemaFinding(where, "integers", "an integer must be int32 or int64")
    if "minimum" not in node:
        yield SchemaFinding(where, "integers", "an integer must have a minimum")
    if in_spec and "maximum" not in node:
        yield SchemaFinding(where, "integers", "an integer that people write must have a maximum")
    if any(word in name.lower() for word in _DURATION_NAMES) and not name.endswith(_UNITS):
        yield SchemaFinding(where, "nodurations", "a length of time says its unit in its name: `...Seconds`")


def _description(where: str, node: JsonObject) -> Iterator[SchemaFinding]:
    text = node.get("description")
    if text is None:
        return
    if not text or not (text[0].isupper() and text.endswith(".")):
        yield SchemaFinding(
            where, "commentstart", "a description begins with a capital letter and ends with a full stop"
        )


def _is_camel_case(name: str) -> bool:
    for acronym in _ACRONYMS:
        name = name.replace(acronym, acronym.capitalize())
    return name[:1].islower() and name.isalnum()
