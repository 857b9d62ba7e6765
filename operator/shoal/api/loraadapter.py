"""LoRAAdapter: one fine-tune of a pool's base model. Namespaced; short name `lora`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import (
    Bytes,
    CELRule,
    Column,
    Conditions,
    Count,
    CustomResource,
    K8s,
    Name,
    Object,
    Positive,
    ResourceName,
)
from shoal.api.model import RouteNamespace, ServedName

Digest = Annotated[str, StringConstraints(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]

TenantName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$"),
    K8s(pattern_message="must be the name of a Tenant, or '*' for everyone who may use the pool's Model"),
]


class PoolReference(Object):
    """A LoRAPool."""

    name: ResourceName
    """Name of the pool."""
    namespace: Name | None = None
    """Namespace of the pool. The pool must allow the adapter's namespace. Default: the adapter's own."""


class AdapterSource(Object):
    """Location of the adapter's files: adapter_config.json and the weights, as saved by PEFT."""

    uri: Annotated[
        str,
        StringConstraints(
            max_length=1024,
            pattern=r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?"
            r"|https://[^/\s@]+/\S+|(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/\S*)?|file:///\S+)$",
        ),
        K8s(
            pattern_message="must be 'hf://owner/repo[@revision]', 's3://bucket/prefix' (or gs://, az://), "
            "'https://host/archive.tar[.gz]' or 'file:///path'"
        ),
    ]
    """URI of the files: hf://owner/repo[@revision], s3://bucket/prefix (gs://, az://), https://host/archive.tar[.gz],
    or file:///path (a path inside the agent's image: for tests and demos). Changing it makes a new revision, which is
    loaded beside the present one before it takes over."""
    digest: Annotated[Digest, K8s(pattern_message="must be 'sha256:' and 64 lower-case hex digits")] | None = None
    """Required digest of the source, as for the source of a Model."""


class LoRAAdapterSpec(Object):
    """Desired state of the adapter: its files, where they are kept, and which tenants may use it."""

    pool_ref: PoolReference
    """Pool whose replicas load the adapter."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Names by which clients request the adapter in `model`. Default: the object's name. `namespace/name` works too. If
    several objects that a tenant may use claim a name, the oldest Model gets it, or else the oldest adapter."""
    route_namespaces: Annotated[tuple[RouteNamespace, ...], Field(max_length=64), K8s(list_type="set")] = ()
    """Other namespaces whose ModelRoutes may have the adapter as a target. '*': all. Default: only ModelRoutes of the
    adapter's own namespace."""
    source: AdapterSource
    """Location of the adapter's files."""
    residency: Annotated[Literal["OnDemand", "Warm", "Pinned"], K8s(default_in_code=True)] = "OnDemand"
    """OnDemand: loaded by requests, and evicted when other adapters need the slot. Warm: kept in the host memory of
    `minCopies` replicas. Pinned: like Warm, and never evicted. Default: OnDemand."""
    min_copies: Annotated[int, Field(ge=1, le=1000), K8s(default_in_code=True)] = 1
    """Number of replicas that keep the adapter with Warm and Pinned, or all replicas if there are fewer. Default: 1."""
    tenants: Annotated[tuple[TenantName, ...], Field(min_length=1, max_length=256), K8s(list_type="set")]
    """Tenants that may use the adapter. The Tenant must grant it too: by `models` (the pool's Model, for an adapter in
    the Model's namespace) or by `adapters`. '*': every tenant that may use the pool's Model and grants the adapter."""

    cel: ClassVar = (
        CELRule(
            "!has(self.minCopies) || self.minCopies == 1 || (has(self.residency) && self.residency != 'OnDemand')",
            "`minCopies` needs `residency` Warm or Pinned: copies of an adapter on demand follow its traffic",
        ),
    )


class AdapterRevision(Object):
    """One revision of the files, fixed when the source was read."""

    revision: Digest
    """Digest of the manifest: names, sizes and validators of all files."""
    uri: Annotated[str, StringConstraints(max_length=1024)]
    """URI that the revision was read from. A branch of the hub is resolved to its commit."""
    rank: Positive
    """Rank of the adapter."""
    size_bytes: Bytes
    """Size of the weights file in bytes."""
    base: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Base model that the adapter's config names."""


class LoRAAdapterStatus(Object):
    """Observed state of the adapter."""

    conditions: Conditions = ()
    """Conditions Accepted, Available and Ready. Reasons for failure: RankTooHigh, ModulesNotInPool, BaseMismatch,
    SourceUnreachable, TooLarge, Corrupt, NoRoom."""
    observed_generation: Count | None = None
    """Generation of the spec that this status describes."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Short names that the adapter owns. A name that a Model or an older adapter claims is left out."""
    revision: Digest | None = None
    """Revision in service: gateways send requests to this revision only."""
    uri: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """URI that this revision was read from."""
    rank: Positive | None = None
    """Rank of this revision."""
    size_bytes: Bytes | None = None
    """Size of the weights of this revision in bytes."""
    base: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Base model that the config of this revision names. A name that differs from the pool's base is a warning
    (BaseNameDiffers), since it may be another copy of the same model."""
    next: AdapterRevision | None = None
    """Newer revision that was read and is being loaded."""
    read_by: Annotated[str, StringConstraints(max_length=16)] | None = None
    """Fingerprint of the last read: the declared source, and the requirements of pool and base model. The source is
    read again only when it changes."""


class LoRAAdapter(CustomResource):
    """LoRAAdapter is a LoRA fine-tune that the replicas of a pool serve."""

    kind_name: ClassVar = "LoRAAdapter"
    plural: ClassVar = "loraadapters"
    singular: ClassVar = "loraadapter"
    short_names: ClassVar = ("lora",)
    columns: ClassVar = (
        Column("Available", '.status.conditions[?(@.type=="Available")].status'),
        Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Pool", ".spec.poolRef.name"),
        Column("Rank", ".status.rank", "integer"),
        Column("Revision", ".status.revision"),
        Column("Source", ".spec.source.uri", "string", 1),
        Column("Message", '.status.conditions[?(@.type=="Ready")].message', "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
    )

    cel: ClassVar = (
        # namespace (63) + '.' + name + '@' + 12 digits: the engine's name of the adapter, and a file name
        CELRule(
            "self.metadata.name.size() <= 128",
            "`metadata.name` may not be longer than 128 characters: it is a part of a file's name",
        ),
    )

    spec: LoRAAdapterSpec
    status: LoRAAdapterStatus | None = None

    @property
    def claimed_names(self) -> tuple[str, ...]:
        """Short names that the adapter claims."""
        return self.spec.served_names or (self.metadata.name,)

    @property
    def pool_key(self) -> str:
        """`namespace/name` of its pool."""
        return f"{self.spec.pool_ref.namespace or self.metadata.namespace}/{self.spec.pool_ref.name}"

    @property
    def current(self) -> AdapterRevision | None:
        """The revision in service; None: none yet."""
        status = self.status
        if status is None or status.revision is None or status.uri is None or status.rank is None:
            return None
        return AdapterRevision(
            revision=status.revision,
            uri=status.uri,
            rank=status.rank,
            size_bytes=status.size_bytes or 0,
            base=status.base,
        )


def engine_name(key: str, revision: str) -> str:
    """Name of one revision of the adapter `namespace/name` at the engine: `<namespace>.<name>@<12 hex of the digest>`.

    A namespace contains neither '.' nor '@', and a name no '@', so the names of two adapters never collide.
    """
    namespace, _, name = key.partition("/")
    return f"{namespace}.{name}@{revision.removeprefix('sha256:')[:12]}"
