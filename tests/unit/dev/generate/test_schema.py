"""The generator of the custom resources, its linter, and the files that are made from the code."""

import copy
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, StringConstraints

from shoal.api.lint import lint
from shoal.api.meta import CELRule, K8s, Object, Quantity
from shoal.api.schema import KINDS, SchemaError, custom_resource_definition, object_schema
from shoal_dev.generate.command import repository_root
from shoal_dev.generate.files import generated_files


class Inner(Object):
    """Inner words."""

    size: Quantity | None = None
    """Size of it."""


class Sample(Object):
    """Sample words."""

    name: Annotated[str, StringConstraints(max_length=8, pattern=r"^[a-z']+\.$"), K8s(pattern_message="must be so")]
    """Name of it,
    in two lines."""
    mode: Literal["Only"] = "Only"
    """Mode of it."""
    count: Annotated[int, Field(gt=0, le=5), K8s(immutable=True)] | None = None
    """Count of it."""
    hidden: Annotated[int, Field(ge=0, le=5), K8s(default_in_code=True)] = 3
    """Hidden default."""
    on: bool = False
    """Switch of it."""
    inner: Inner = Inner()
    """Inner of it."""
    things: Annotated[tuple[Inner, ...], Field(max_length=3), K8s(list_type="atomic")] = ()
    """Things of it."""

    cel: ClassVar = (CELRule("self.count > 1", "must be more", field_path=".count"),)


def test_every_generated_file_is_what_the_code_says() -> None:
    root = repository_root()
    for name, text in generated_files(root).items():
        assert (root / name).read_text(encoding="utf-8") == text, f"{name} is stale: run `shoal generate`"


def test_an_object_becomes_a_structural_schema() -> None:
    quantity = {
        "x-kubernetes-int-or-string": True,
        "minimum": 0,
        "maxLength": 32,
        "x-kubernetes-validations": [
            {
                "rule": r"string(self).matches('^([0-9]+|[0-9]*\\.[0-9]+)(m|k|Ki|Mi|Gi|Ti|M|G|T)?$')",
                "message": "must be a quantity, such as '80Gi', '500m' or '2.49'",
            }
        ],
    }
    size = {"description": "Size of it.", **quantity}
    assert object_schema(Sample) == {
        "description": "Sample words.",
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {
                "description": "Name of it, in two lines.",
                "type": "string",
                "maxLength": 8,
                "x-kubernetes-validations": [{"rule": r"self.matches('^[a-z\']+\\.$')", "message": "must be so"}],
            },
            "mode": {"description": "Mode of it.", "type": "string", "enum": ["Only"], "default": "Only"},
            "count": {
                "description": "Count of it.",
                "type": "integer",
                "format": "int32",
                "minimum": 1,
                "maximum": 5,
                "x-kubernetes-validations": [
                    {"rule": "self == oldSelf", "message": "may not be changed; make a new object instead"}
                ],
            },
            "hidden": {
                "description": "Hidden default.",
                "type": "integer",
                "format": "int32",
                "minimum": 0,
                "maximum": 5,
            },
            "on": {"description": "Switch of it.", "type": "boolean", "default": False},
            "inner": {"description": "Inner of it.", "type": "object", "properties": {"size": size}},
            "things": {
                "description": "Things of it.",
                "type": "array",
                "maxItems": 3,
                "items": {"description": "Inner words.", "type": "object", "properties": {"size": size}},
                "x-kubernetes-list-type": "atomic",
            },
        },
        "x-kubernetes-validations": [{"rule": "self.count > 1", "message": "must be more", "fieldPath": ".count"}],
    }


class Recursive(Object):
    child: "Recursive | None" = None


class Union(Object):
    either: int | str


class Untyped(Object):
    anything: Any


class Open(Object):
    anything: dict[str, Any]


class Float(Object):
    share: float


class Mixed(Object):
    pair: tuple[int, str]


class Unique(Object):
    names: set[str]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Recursive, "contains itself"),
        (Union, "a union"),
        (Untyped, "type None is not allowed"),
        (Open, "without declared fields"),
        (Float, "type 'number' is not allowed"),
        (Mixed, "a tuple of mixed types"),
        (Unique, "a set"),
    ],
)
def test_what_no_structural_schema_can_say_is_refused(bad: type[Object], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        object_schema(bad)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind_name)
def test_our_kinds_pass_the_linter(kind: Any) -> None:
    assert [str(finding) for finding in lint(custom_resource_definition(kind))] == []


def _broken(path: str, **fields: Any) -> dict[str, Any]:
    """Tenant's CRD with fields of one node changed; None removes."""
    crd = copy.deepcopy(custom_resource_definition(next(k for k in KINDS if k.kind_name == "Tenant")))
    node: Any = crd["spec"]["versions"][0]
    for name in path.split("/"):
        node = node[name]
    for name, value in fields.items():
        key = name.replace("__", "-")
        if value is None:
            del node[key]
        else:
            node[key] = value
    return crd


_ROOT = "schema/openAPIV3Schema"
_SPEC = f"{_ROOT}/properties/spec/properties"
_STATUS = f"{_ROOT}/properties/status/properties"
_TEXT = {"type": "string", "maxLength": 5, "description": "Text."}


@pytest.mark.parametrize(
    ("rule", "crd"),
    [
        ("statussubresource", _broken("subresources", status=None)),
        ("statusoptional", _broken(_ROOT, required=["spec", "status"])),
        ("conditions", _broken(f"{_STATUS}/conditions", **{"x-kubernetes-list-map-keys": ["reason"]})),
        ("conditions", _broken(f"{_STATUS}/conditions/items", required=["type"])),
        ("conditions", _broken(_STATUS, observedGeneration=None)),
        ("commentstart", _broken(f"{_SPEC}/suspended", description=None)),
        ("commentstart", _broken(f"{_SPEC}/suspended", description="no capital")),
        ("nonullable", _broken(f"{_SPEC}/suspended", nullable=True)),
        ("maxlength", _broken(f"{_SPEC}/externalID", maxLength=None)),
        ("maxitems", _broken(f"{_SPEC}/keys", maxItems=None)),
        ("ssatags", _broken(f"{_SPEC}/keys", **{"x-kubernetes-list-type": None})),
        ("ssatags", _broken(f"{_SPEC}/keys", **{"x-kubernetes-list-map-keys": ["expires"]})),
        ("nofloats", _broken(_SPEC, share={"type": "number", "description": "Share."})),
        ("nodurations", _broken(_SPEC, wait={**_TEXT, "format": "duration"})),
        ("nodurations", _broken(_SPEC, timeout={"type": "integer", "format": "int32", "description": "T."})),
        ("integers", _broken(_SPEC, size={"type": "integer", "format": "int32", "minimum": 0, "description": "S."})),
        ("enums", _broken(_SPEC, mode={"type": "string", "enum": ["lower"], "description": "Mode."})),
        ("nophase", _broken(_STATUS, phase=_TEXT)),
        ("notimestamp", _broken(_STATUS, startTimestamp=_TEXT)),
        ("jsontags", _broken(_SPEC, Name=_TEXT)),
        ("optionalorrequired", _broken(f"{_ROOT}/properties/spec", required=["suspended"])),
        ("optionalorrequired", _broken(f"{_ROOT}/properties/spec", required=["nowhere"])),
        (
            "nomaps",
            _broken(
                _SPEC,
                limits={
                    "type": "object",
                    "maxProperties": 2,
                    "description": "Limits.",
                    "additionalProperties": {"type": "object", "properties": {}},
                },
            ),
        ),
        ("types", _broken(_SPEC, thing={"description": "Thing."})),
    ],
)
def test_the_linter_finds(rule: str, crd: dict[str, Any]) -> None:
    assert rule in {finding.rule for finding in lint(crd)}


def test_durations_have_no_schema() -> None:
    """A timedelta would become ISO 8601 text; the linter tells to write seconds."""

    class Timed(Object):
        wait: timedelta
        """Wait for it."""

    assert object_schema(Timed)["properties"]["wait"]["format"] == "duration"
