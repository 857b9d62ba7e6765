"""LoRAPool: slots for LoRA adapters on the replicas of one Model. Namespaced."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import (
    NAME_IS_LABEL,
    CELRule,
    Column,
    Conditions,
    Count,
    CustomResource,
    K8s,
    LabelValue,
    Object,
    SecretReference,
)
from shoal.api.model import LocalObjectReference

TargetModule = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=32,
        pattern=r"^(all|[qkvo]_proj|(gate|up|down)_proj|qkv_proj|gate_up_proj|embed_tokens|lm_head"
        r"|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)$",
    ),
    K8s(
        pattern_message="must be q_proj, k_proj, v_proj, o_proj, qkv_proj, gate_proj, up_proj, down_proj, "
        "gate_up_proj, embed_tokens, lm_head, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj or all"
    ),
]
LINEAR: tuple[TargetModule, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that most fine-tunes train: all linear layers of attention and feed-forward."""


class NamespaceSelector(Object):
    """Selects namespaces by label."""

    match_labels: Annotated[dict[str, LabelValue], Field(min_length=1, max_length=16)]
    """Labels that a namespace must have. All must match."""


class AllowedNamespaces(Object):
    """Namespaces whose adapters may use the pool, as in the Gateway API."""

    from_: Annotated[Literal["Same", "All", "Selector"], Field(alias="from"), K8s(default_in_code=True)] = "Same"
    """Same: the pool's namespace. All: all namespaces. Selector: namespaces that match `selector`. Default: Same."""
    selector: NamespaceSelector | None = None
    """Selects the namespaces; required with `from: Selector`."""

    cel: ClassVar = (
        CELRule(
            "(has(self.from) && self.from == 'Selector') == has(self.selector)",
            "`selector` is set with `from: Selector`, and only then",
        ),
    )


class SourceCredentials(Object):
    """Credentials for adapter sources whose URI has a certain prefix."""

    uri_prefix: Annotated[
        str,
        StringConstraints(
            min_length=6,
            max_length=512,
            pattern=r"^((hf|s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*|https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?)"
            r"(/[A-Za-z0-9_,;=+~][A-Za-z0-9._,;=+~-]*)*/?$",
        ),
        K8s(
            pattern_message="must be a source's scheme and host (or bucket, or owner) and perhaps folders, such as "
            "'s3://adapters/', 'hf://acme/' or 'https://files.example.com/adapters/'"
        ),
    ]
    """Prefix of source URIs: scheme, host (or bucket, or owner) and optional folders. It matches whole folders only:
    `s3://adapters` does not match `s3://adapters-of-others/a`. The longest matching prefix applies."""
    secret_ref: SecretReference
    """Secret in the pool's namespace, with the keys of a Model's `source.secretRef`. It is used for every adapter of
    the pool with a matching source, of any namespace: grant it no more than what the pool may read."""


class LoRAPoolSpec(Object):
    """Desired state of the pool."""

    model_ref: LocalObjectReference
    """Model in the same namespace whose replicas load the adapters. A Model has one pool; if several name it, the
    oldest applies."""
    max_rank: Annotated[int, Field(ge=1, le=1024), K8s(default_in_code=True)] = 64
    """Largest rank of an adapter. Every slot reserves GPU memory for it. Default: 64."""
    target_modules: Annotated[
        tuple[TargetModule, ...], Field(min_length=1, max_length=16), K8s(list_type="set", default_in_code=True)
    ] = LINEAR
    """Modules that adapters may change; `all` excludes other values. Default: the linear layers of attention and
    feed-forward."""
    slots_per_replica: Annotated[int, Field(ge=2, le=256), K8s(default_in_code=True)] = 8
    """Adapters in the GPU memory of one replica at the same time, including one slot for the base model. Default: 8."""
    cached_per_replica: Annotated[int, Field(ge=2, le=4096)] | None = None
    """Adapters in the host memory of one replica. Default: 8 times `slotsPerReplica`."""
    allowed_namespaces: AllowedNamespaces = AllowedNamespaces()
    """Namespaces whose adapters may use the pool."""
    base_names: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
        Field(max_length=16),
        K8s(list_type="set"),
    ] = ()
    """Further names of the base model, as adapters' configs may have them in `base_model_name_or_path`. An adapter that
    names another base than the Model's source, the Model or one of these gets the warning BaseNameDiffers. Only the
    last part of a path is compared."""
    credentials: Annotated[
        tuple[SourceCredentials, ...], Field(max_length=16), K8s(list_type="map", keys=("uriPrefix",))
    ] = ()
    """Credentials for the adapters' sources. Changing them rolls the Model's replicas, because a running pod cannot
    mount another Secret."""

    cel: ClassVar = (
        CELRule(
            "!has(self.targetModules) || self.targetModules.size() == 1 || !('all' in self.targetModules)",
            "`all` in `targetModules` stands alone: it means every module",
        ),
        CELRule(
            "!has(self.cachedPerReplica) || self.cachedPerReplica >= (has(self.slotsPerReplica) ? "
            "self.slotsPerReplica : 8)",
            "`cachedPerReplica` may not be smaller than `slotsPerReplica`: what is on the GPU is in host memory too",
        ),
    )

    @property
    def cached(self) -> int:
        """Adapters in the host memory of one replica."""
        return self.cached_per_replica or 8 * self.slots_per_replica

    @property
    def slots(self) -> int:
        """Distinct adapters that requests can use at the same time on one replica."""
        return self.slots_per_replica - 1


class AdapterCounts(Object):
    """Counts of the pool's adapters."""

    total: Count
    """Adapters that name the pool and are allowed to."""
    available: Count
    """Adapters that can serve requests, at once or after being loaded."""
    failed: Count
    """Adapters that cannot be used."""


class LoRAPoolStatus(Object):
    """Observed state of the pool."""

    conditions: Conditions = ()
    """Conditions Accepted and Ready."""
    observed_generation: Count | None = None
    """Generation of the spec that this status describes."""
    adapters: AdapterCounts | None = None
    """Counts of the pool's adapters."""


class LoRAPool(CustomResource):
    """LoRAPool provides slots for LoRA adapters on the replicas of a Model."""

    kind_name: ClassVar = "LoRAPool"
    plural: ClassVar = "lorapools"
    singular: ClassVar = "lorapool"
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Model", ".spec.modelRef.name"),
        Column("Adapters", ".status.adapters.total", "integer"),
        Column("Available", ".status.adapters.available", "integer"),
        Column("Failed", ".status.adapters.failed", "integer"),
        Column("Message", '.status.conditions[?(@.type=="Ready")].message', "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
    )

    cel: ClassVar = (NAME_IS_LABEL,)

    spec: LoRAPoolSpec
    status: LoRAPoolStatus | None = None

    @property
    def model_key(self) -> str:
        """`namespace/name` of its Model."""
        return f"{self.metadata.namespace}/{self.spec.model_ref.name}"
