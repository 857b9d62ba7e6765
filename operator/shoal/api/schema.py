"""Makes CustomResourceDefinitions: structural schemas (OpenAPI 3.0 as Kubernetes reads it) from pydantic's JSON
schemas.

Constructs that a structural schema does not allow are rewritten: references are inlined, `X | None` becomes an optional
field (never nullable), titles are removed, constants become enums, a Quantity becomes an integer or a string.
Constructs that cannot be rewritten without loss (floats, free unions, tuples of mixed types) raise SchemaError.

Defaults in the schema are stored in objects, so the schema contains only scalar defaults that no later version will
change. Empty lists, maps and objects mean "not set" and are left out, and so are fields with
`K8s(default_in_code=True)`.
"""

import copy
from typing import Any, Final, cast, get_args

from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import CATEGORY, GROUP, VERSION, CustomResource, JsonObject, Object
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute
from shoal.api.tenant import Tenant

KINDS: Final[tuple[type[CustomResource], ...]] = (GPUClass, LoRAAdapter, LoRAPool, Model, ModelRoute, Tenant)

_REFUSED: Final = {
    "prefixItems": "a tuple of mixed types",
    "patternProperties": "a map with constrained keys; use a CEL rule on the keys",
    "uniqueItems": "a set; use a tuple with K8s(list_type='set')",
    "oneOf": "a union; use a `type` enum with optional members and a CEL rule",
    "allOf": "an intersection",
}
_INT32_MAX: Final = 2**31 - 1


class SchemaError(Exception):
    """A kind contains a construct that a structural schema cannot express."""


def custom_resource_definition(kind: type[CustomResource]) -> JsonObject:
    """The CustomResourceDefinition of a kind, as applied to a cluster.

    Raises:
        SchemaError: a field of the kind has no structural schema.
    """
    version: JsonObject = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": c.name, "type": c.type, "jsonPath": c.json_path} | ({"priority": c.priority} if c.priority else {})
            for c in kind.columns
        ],
        "schema": {"openAPIV3Schema": root_schema(kind)},
        "subresources": {"status": {}},
    }
    if kind.scale is not None:
        in_spec, in_status = kind.scale
        version["subresources"]["scale"] = {"specReplicasPath": in_spec, "statusReplicasPath": in_status}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.crd_name()},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind_name,
                "listKind": f"{kind.kind_name}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": list(kind.short_names),
                "categories": [CATEGORY],
            },
            "scope": kind.scope,
            "versions": [version],
        },
    }


def root_schema(kind: type[CustomResource]) -> JsonObject:
    """`openAPIV3Schema` of a kind."""
    schema: JsonObject = {
        "description": _one_line(kind.__doc__ or ""),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": object_schema(_member(kind, "spec")),
            "status": object_schema(_member(kind, "status")),
        },
    }
    if kind.cel:
        schema["x-kubernetes-validations"] = [rule.as_validation() for rule in kind.cel]
    return schema


def object_schema(model: type[Object]) -> JsonObject:
    """The structural schema of an object and all that is in it."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(raw, raw.get("$defs", {}), model.__name__, ())


def _member(kind: type[CustomResource], name: str) -> type[Object]:
    annotation = kind.model_fields[name].annotation
    candidates = [annotation, *get_args(annotation)]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Object):
            return candidate
    raise SchemaError(f"{kind.__name__}.{name} is not an Object")


def _structural(node: JsonObject, defs: JsonObject, path: str, inside: tuple[str, ...]) -> JsonObject:
    node, inside = _resolve(node, defs, path, inside)
    for keyword, what in _REFUSED.items():
        if keyword in node:
            raise SchemaError(f"{path}: {what} has no structural schema")
    quantity = node.pop("x-shoal-quantity", False)
    hidden_default = node.pop("x-shoal-default-in-code", False)
    pattern_message = node.pop("x-shoal-pattern-message", None)
    validations: list[JsonObject] = node.pop("x-kubernetes-validations", [])
    kind: Any = node.get("type")
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if pattern_message is not None:
        # Kubernetes' message for a pattern is the regular expression; a CEL rule has a readable message.
        pattern = node.pop("pattern").replace("\\", "\\\\").replace("'", "\\'")
        subject = "self" if not quantity else "string(self)"
        validations = [*validations, {"rule": f"{subject}.matches('{pattern}')", "message": pattern_message}]
    if kind not in ("object", "array", "string", "integer", "boolean"):
        raise SchemaError(f"{path}: type {kind!r} is not allowed")
    out: JsonObject = {}
    if "description" in node:
        out["description"] = _one_line(node["description"])
    if quantity:
        out["x-kubernetes-int-or-string"] = True
        out["minimum"] = 0
    else:
        out["type"] = kind
    if kind == "integer":
        out["format"] = "int32" if node.get("maximum", _INT32_MAX + 1) <= _INT32_MAX else "int64"
        if "exclusiveMinimum" in node:
            node["minimum"] = node.pop("exclusiveMinimum") + 1
        if "exclusiveMaximum" in node:
            node["maximum"] = node.pop("exclusiveMaximum") - 1
    for keyword in ("enum", "format", "pattern", "minLength", "maxLength", "minimum", "maximum"):
        if keyword in node:
            out[keyword] = node[keyword]
    for keyword in ("minItems", "maxItems", "minProperties", "maxProperties"):
        if keyword in node:
            out[keyword] = node[keyword]
    default = node.get("default")
    if isinstance(default, bool | int | str) and default != "" and not hidden_default:
        out["default"] = default
    if kind == "object":
        _fill_object(out, node, defs, path, inside)
    elif kind == "array":
        out["items"] = _structural(node.get("items", {}), defs, f"{path}[]", inside)
    out |= {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}
    if validations:
        out["x-kubernetes-validations"] = validations
    return out


def _fill_object(out: JsonObject, node: JsonObject, defs: JsonObject, path: str, inside: tuple[str, ...]) -> None:
    extra = node.get("additionalProperties")
    if "properties" in node:
        if node.get("required"):
            out["required"] = node["required"]
        out["properties"] = {
            name: _structural(child, defs, f"{path}.{name}", inside) for name, child in node["properties"].items()
        }
    elif isinstance(extra, dict):
        out["additionalProperties"] = _structural(extra, defs, f"{path}.*", inside)  # pyright: ignore[reportUnknownArgumentType]
    else:
        raise SchemaError(f"{path}: an object without declared fields")


def _resolve(
    node: JsonObject, defs: JsonObject, path: str, inside: tuple[str, ...]
) -> tuple[JsonObject, tuple[str, ...]]:
    """Inlines references and unwraps `X | None`. A description at the reference overrides the description of the
    referenced type.

    `inside` are the enclosing objects: a structural schema cannot be recursive.
    """
    node = copy.deepcopy(node)
    while True:
        if "$ref" in node:
            name = cast("str", node.pop("$ref")).removeprefix("#/$defs/")
            if name in inside:
                raise SchemaError(f"{path}: {name} contains itself")
            inside = (*inside, str(name))
            node = {**copy.deepcopy(defs[name]), **node}
        elif "anyOf" in node:
            members: list[JsonObject] = [member for member in node.pop("anyOf") if member.get("type") != "null"]
            if len(members) != 1:
                raise SchemaError(f"{path}: {_REFUSED['oneOf']}")
            node = {**members[0], **node}
            if node.get("default", ...) is None:
                del node["default"]
        else:
            return node, inside


def _one_line(text: str) -> str:
    return " ".join(text.split())
