"""What all kinds share: the base model, conditions, and the markers from which the CRDs are generated.

A kind is a pydantic model whose `spec` and `status` are `Object`s. What JSON schema cannot express (list types, CEL
rules, immutability, printer columns) is a `K8s` marker on the field, so that schema, documentation and validation have
one source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

GROUP = "shoal.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "shoal"


@dataclass(frozen=True, slots=True)
class CELRule:
    """One CEL validation. `message` is shown by `kubectl apply`: it states the rule and the remedy."""

    rule: str
    message: str
    field_path: str | None = None

    def as_validation(self) -> dict[str, str]:
        """The rule as an entry of `x-kubernetes-validations`."""
        entry = {"rule": self.rule, "message": self.message}
        return entry | {"fieldPath": self.field_path} if self.field_path else entry


@dataclass(frozen=True, slots=True)
class K8s:
    """Kubernetes properties of a field or a model that JSON schema cannot express.

    `list_type` is atomic, set or map (with `keys`); `cel` are rules on this node; `immutable` adds `self == oldSelf`;
    `quantity` makes the field a Kubernetes Quantity (`x-kubernetes-int-or-string`). `pattern_message` is shown when the
    pattern of the field does not match. `default_in_code` keeps the default out of the schema, so that it is not stored
    in objects and a later version can change it. `pattern_in_rules` leaves the pattern to a CEL rule of the enclosing
    object.
    """

    list_type: Literal["atomic", "set", "map"] | None = None
    keys: Sequence[str] = ()
    cel: Sequence[CELRule] = ()
    immutable: bool = False
    quantity: bool = False
    pattern_message: str | None = None
    default_in_code: bool = False
    pattern_in_rules: bool = False

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the marker to pydantic's schema of the field; `schema.py` makes a structural schema of both."""
        node = handler.resolve_ref_schema(handler(schema))
        if self.list_type:
            node["x-kubernetes-list-type"] = self.list_type
        if self.keys:
            node["x-kubernetes-list-map-keys"] = list(self.keys)
        if self.quantity:
            node["x-shoal-quantity"] = True
        if self.pattern_message:
            node["x-shoal-pattern-message"] = self.pattern_message
        if self.default_in_code:
            node["x-shoal-default-in-code"] = True
        if self.pattern_in_rules:
            node.pop("pattern", None)
        rules = [rule.as_validation() for rule in self.cel]
        if self.immutable:
            rules.append({"rule": "self == oldSelf", "message": "may not be changed; make a new object instead"})
        if rules:
            node["x-kubernetes-validations"] = [*node.get("x-kubernetes-validations", []), *rules]
        return node


@dataclass(frozen=True, slots=True)
class Column:
    """A printer column of `kubectl get`. `priority=1`: only with `-o wide`."""

    name: str
    json_path: str
    type: Literal["string", "integer", "date", "boolean", "number"] = "string"
    priority: int = 0


JsonObject = dict[str, Any]
"""A decoded JSON object from the API server or an engine."""
_IN_STATUS: Final = 2
"""Parts of the place of a field in a status, at least: `status` and its name."""


class Object(BaseModel):
    """Base of all types inside a custom resource. Unknown fields are ignored: versions mix during an upgrade."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )

    cel: ClassVar[Sequence[CELRule]] = ()
    """CEL rules on the whole object."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        node = handler.resolve_ref_schema(handler(schema))
        if cls.cel:
            node["x-kubernetes-validations"] = [rule.as_validation() for rule in cls.cel]
        return node


# Quantities stay strings: money and memory are never floats. `core` parses them.
Quantity = Annotated[
    str,
    Field(max_length=32, pattern=r"^([0-9]+|[0-9]*\.[0-9]+)(m|k|Ki|Mi|Gi|Ti|M|G|T)?$", coerce_numbers_to_str=True),
    K8s(quantity=True, pattern_message="must be a quantity, such as '80Gi', '500m' or '2.49'"),
]
Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
    K8s(pattern_message="must be lower-case letters, digits and '-', with a letter or digit at both ends"),
]
ResourceName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
    K8s(pattern_message="must be lower-case letters, digits, '-' and '.', with a letter or digit at both ends"),
]
LabelValue = Annotated[
    str,
    StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"),
    K8s(pattern_message="must be a label's value: letters, digits, '-', '_', '.', with a letter or digit at both ends"),
]
NAME_IS_LABEL = CELRule(
    "self.metadata.name.size() <= 63",
    "`metadata.name` may not be longer than 63 characters: it becomes a label of every pod",
)
MOST_COUNT = 2**53 - 1
"""Largest integer that every JSON parser reads exactly."""
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Bytes = Count

ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Object):
    """Condition as in metav1.Condition. `lastTransitionTime` changes only with `status`."""

    type: Annotated[str, StringConstraints(max_length=64)]
    """Type of the condition in CamelCase."""
    status: ConditionStatus
    """Status of the condition: True, False or Unknown."""
    observed_generation: Count | None = None
    """Generation of the spec that the condition describes."""
    last_transition_time: datetime
    """Last time at which `status` changed."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Reason for the status as one CamelCase word. It is also the reason of the event."""
    message: Annotated[str, StringConstraints(max_length=4096)]
    """Explanation for people: what is missing and what to do."""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16), K8s(list_type="map", keys=("type",))]


class SecretReference(Object):
    """A Secret in the same namespace."""

    name: ResourceName
    """Name of the Secret."""


class ObjectMeta(BaseModel):
    """The part of metadata that Shoal reads."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    name: str
    namespace: str | None = None
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class CustomResource(Object):
    """Base of the custom resources. The class variables describe the kind in its CustomResourceDefinition."""

    kind_name: ClassVar[str]
    plural: ClassVar[str]
    singular: ClassVar[str]
    short_names: ClassVar[Sequence[str]] = ()
    scope: ClassVar[Literal["Namespaced", "Cluster"]] = "Namespaced"
    columns: ClassVar[Sequence[Column]] = ()
    description: ClassVar[str] = ""
    scale: ClassVar[tuple[str, str] | None] = None
    """JSON paths of the replicas in spec and status, for `kubectl scale`; None: the kind has no scale subresource."""

    metadata: ObjectMeta

    @classmethod
    def crd_name(cls) -> str:
        return f"{cls.plural}.{GROUP}"

    @classmethod
    def read(cls, raw: JsonObject) -> Self:
        """An object of the API server. Fields of its status that this version does not understand are left out:
        another version wrote them, before an upgrade is complete or after a rollback, and the object serves on. Raises
        ValidationError for anything else."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            places = [each["loc"] for each in error.errors(include_url=False, include_context=False)]
            if any(len(place) < _IN_STATUS or place[0] != "status" for place in places):
                raise
            strange = {place[1] for place in places}
            known = {name: value for name, value in raw["status"].items() if name not in strange}
            return cls.model_validate({**raw, "status": known})

    @property
    def key(self) -> str:
        """`namespace/name`, or `name` for a cluster-scoped kind."""
        return f"{self.metadata.namespace}/{self.metadata.name}" if self.metadata.namespace else self.metadata.name
