"""API server and code agree on what is valid: by the generated schema on one side, by pydantic on the other.

What only one of them takes would be stored and never work, or work and never be stored.
"""

import re
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.meta import CustomResource
from shoal.api.schema import KINDS, root_schema

_MATCHES = re.compile(r"^(?:string\(self\)|self)\.matches\('(.*)'\)$")
GOOD: dict[str, Any] = {
    "currency": "EUR",
    "method": "NGram",
    "max": 3,
    "gpusPerNode": 4,
    "uri": "hf://owner/repo",
    "class": "h100",
    "name": "x",
    "namespace": "x",
    "sha256": "a" * 64,
    "nodeSelector": {"k": "v"},
    "memoryPerGPU": "80Gi",
    "amount": "1",
    "source": {"uri": "hf://owner/repo"},
    "poolRef": {"name": "x"},
    "modelRef": {"name": "x"},
    "secretRef": {"name": "x"},
    "uriPrefix": "s3://bucket/",
    "matchLabels": {"k": "v"},
    "tenants": ["x"],
    "type": "Header",
    "value": "x",
    "target": {"model": {"name": "x"}},
    "targets": [{"model": {"name": "x"}}],
    "rules": [{"targets": [{"model": {"name": "x"}}]}],
    "deviceClassName": "gpu.example.com",
    "cel": {"expression": "true"},
    "expression": "true",
    "percent": 5,
    "nodes": 2,
    "model": {"name": "x"},
    "url": "https://api.example.com/v1",
}
"""Values of required fields."""
UNLESS: dict[str, tuple[str, ...]] = {
    "nodeSelector": ("device",),
    "memoryPerGPU": ("device",),
    "model": ("adapter", "external"),
}
"""Fields that a rule on the object requires unless it has one of the others."""
_PLAIN = "|a|a-b|A|a.b|-a|a_b|a:b|a/b|80Gi|2.49|1e3|-5|9.0|USD|usd|0.5.23|SGLang|NVLink|--a=b|nvidia.com/gpu|a b"
_URIS = "hf://a/b|hf://a|https://h/a.tar|https://u:p@h/a|pvc://c|pvc://C|file:///a|file://a|s3://b"
WORDS = st.sampled_from(
    [*_PLAIN.split("|"), *_URIS.split("|"), "sha256:" + "a" * 64, "2027-01-01T00:00:00Z"]
    + [letter * length for letter in "aA" for length in (63, 64, 65, 128, 129, 254)]
)


def refuses(node: dict[str, Any], value: Any) -> bool:
    """Whether a structural schema refuses a value; of CEL only what replaces a pattern."""
    if node.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            return True
        if isinstance(value, int) and value < 0:
            return True
        return len(str(value)) > node["maxLength"] or not _rules_hold(node, str(value))
    match node["type"]:
        case "object":
            return not isinstance(value, dict) or _object_refuses(node, value)
        case "array":
            return (
                not isinstance(value, list)
                or not node.get("minItems", 0) <= len(value) <= node.get("maxItems", 2**31)
                or any(refuses(node["items"], one) for one in value)
            )
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return not whole or not node.get("minimum", value) <= value <= node.get("maximum", value)
        case "boolean":
            return not isinstance(value, bool)
        case _:
            return not isinstance(value, str) or _text_refuses(node, value)


def _object_refuses(node: dict[str, Any], value: dict[str, Any]) -> bool:
    if "additionalProperties" in node:
        bounds = node.get("minProperties", 0) <= len(value) <= node["maxProperties"]
        return not bounds or any(refuses(node["additionalProperties"], one) for one in value.values())
    missing = set(node.get("required", ())) - set(value)
    return bool(missing) or any(refuses(node["properties"][name], one) for name, one in value.items())


def _text_refuses(node: dict[str, Any], value: str) -> bool:
    if "enum" in node:
        return value not in node["enum"]
    if node.get("format") == "date-time":
        return re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value) is None
    if not node.get("minLength", 0) <= len(value) <= node["maxLength"]:
        return True
    return not _rules_hold(node, value) or bool("pattern" in node and not re.search(node["pattern"], value))


def _rules_hold(node: dict[str, Any], value: str) -> bool:
    for rule in node.get("x-kubernetes-validations", ()):
        if found := _MATCHES.match(rule["rule"]):
            pattern = found.group(1).replace("\\'", "'").replace("\\\\", "\\")
            if not re.search(pattern, value):
                return False
    return True


def near(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that are valid but for one field, which may be anything of about the right type."""
    if node.get("x-kubernetes-int-or-string"):
        return st.one_of(WORDS, st.integers(-5, 1000))
    match node["type"]:
        case "object" if "additionalProperties" in node:
            return near(node["additionalProperties"]).map(lambda value: {"k": value})
        case "object":
            properties = node["properties"]
            ruled = [
                name
                for name, others in UNLESS.items()
                if name in properties and not properties.keys().isdisjoint(others)
            ]
            base = {name: _good(name, properties[name]) for name in [*node.get("required", ()), *ruled]}
            fields = [_with(_without(base, name), name, child) for name, child in properties.items()]
            return st.one_of(st.just(base), *fields)
        case "array":
            return st.one_of(st.just([]), near(node["items"]).map(lambda value: [value]))
        case "integer":
            return st.one_of(st.integers(-1, 200), st.integers())
        case "boolean":
            return st.booleans()
        case _ if node.get("format") == "date-time":
            # Not numbers in quotes: pydantic takes them for seconds since 1970, and the API server stores none.
            return st.sampled_from(["2027-01-01T00:00:00Z", "next year", ""])
        case _:
            return WORDS


def _without(base: dict[str, Any], name: str) -> dict[str, Any]:
    """What stands beside a field: not what the field is there instead of."""
    return {other: value for other, value in base.items() if name not in UNLESS.get(other, ())}


def _good(name: str, node: dict[str, Any]) -> Any:
    """A value of a required field. A field that is an object elsewhere may be a name here."""
    value = GOOD[name]
    return "x" if node.get("type") == "string" and isinstance(value, dict) else value


def _with(base: dict[str, Any], name: str, node: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return near(node).map(lambda value: base | {name: value})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind_name)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_schema_and_code_agree(kind: type[CustomResource], data: st.DataObject) -> None:
    schema = root_schema(kind)["properties"]["spec"]
    spec = data.draw(near(schema))

    try:
        kind.model_validate({"metadata": {"name": "x"}, "spec": spec})
        code_refuses = False
    except pydantic.ValidationError:
        code_refuses = True

    by_rule_on_the_object = any(not re.fullmatch("[0-9a-f]{64}", key["sha256"]) for key in spec.get("keys", ()))
    assert code_refuses == (refuses(schema, spec) or by_rule_on_the_object)
