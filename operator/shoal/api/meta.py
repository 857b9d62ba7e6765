"""What all kinds share: the base model, conditions, and the markers from which the CRDs are generated.

A kind is a pydantic model whose `spec` and `status` are `Object`s. What OpenAPI cannot say (list types, CEL rules,
immutability, printer columns) stands beside the field as a `K8s` marker, so that the schema, the documentation and the
validation in the operator come from one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

GROUP = "shoal.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "shoal"


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL validation. `message` is what a person reads at `kubectl apply`: say what must hold and what to do."""

    rule: str
    message: str
    field_path: str | None = None


@dataclass(frozen=True, slots=True)
class K8s:
    """Kubernetes facts of a field or a model that JSON schema has no word for.

    `list_type` is atomic, set or map (with `keys`); `cel` are rules on this node; `immutable` adds `self == oldSelf`;
    `quantity` makes the field a Kubernetes Quantity (`x-kubernetes-int-or-string`).
    """

    list_type: Literal["atomic", "set", "map"] | None = None
    keys: Sequence[str] = ()
    cel: Sequence[Rule] = ()
    immutable: bool = False
    quantity: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A printer column of `kubectl get`. `priority=1` shows it with `-o wide` only."""

    name: str
    json_path: str
    type: Literal["string", "integer", "date", "boolean", "number"] = "string"
    priority: int = 0


class Object(BaseModel):
    """Base of everything inside a custom resource. Unknown fields are ignored when read: versions mix in an upgrade."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )

    cel: ClassVar[Sequence[Rule]] = ()
    """CEL rules on the whole object."""


# Quantities stay strings: money and memory are never floats. `core` parses them.
Quantity = Annotated[
    str,
    Field(max_length=32, pattern=r"^([0-9]+|[0-9]*\.[0-9]+)(m|k|Ki|Mi|Gi|Ti|M|G|T)?$", coerce_numbers_to_str=True),
    K8s(quantity=True),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ResourceName = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(max_length=63)]
Bytes = Annotated[int, Field(ge=0)]

ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Object):
    """metav1.Condition. `lastTransitionTime` moves only when `status` flips."""

    type: Annotated[str, StringConstraints(max_length=64)]
    """Type of condition in CamelCase."""
    status: ConditionStatus
    """True, False or Unknown."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec that this condition was computed from."""
    last_transition_time: datetime
    """When the status last flipped."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Why, in one CamelCase word. It is also the reason of the event."""
    message: Annotated[str, StringConstraints(max_length=4096)]
    """Why, for a person: what is missing and what to do."""


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


class Kind(Object):
    """Base of the custom resources. The class variables hold what the CustomResourceDefinition says about the kind."""

    kind_name: ClassVar[str]
    plural: ClassVar[str]
    singular: ClassVar[str]
    short_names: ClassVar[Sequence[str]] = ()
    scope: ClassVar[Literal["Namespaced", "Cluster"]] = "Namespaced"
    columns: ClassVar[Sequence[Column]] = ()
    description: ClassVar[str] = ""

    metadata: ObjectMeta

    @classmethod
    def crd_name(cls) -> str:
        return f"{cls.plural}.{GROUP}"

    @property
    def key(self) -> str:
        """`namespace/name`, or `name` for a cluster-scoped kind."""
        return f"{self.metadata.namespace}/{self.metadata.name}" if self.metadata.namespace else self.metadata.name


JsonObject = dict[str, Any]
"""A decoded JSON object at the border to the API server or an engine."""
