"""LoRAAdapter: one fine-tune of a pool's base model. Namespaced; short name `lora`."""

import hashlib
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
from shoal.api.model import ServedName

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
    """Namespace of the pool, which must allow the adapter's. Default: the adapter's own."""


class AdapterSource(Object):
    """Where the adapter's files are: adapter_config.json and its weights, as PEFT saves them."""

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
    """Address of the files: hf://owner/repo[@revision], s3://bucket/prefix (gs://, az://),
    https://host/archive.tar[.gz], or file:///path (a path inside the agent's image: for tests and demos). Another
    address is another revision: it is loaded beside the present one before it takes over."""
    digest: Annotated[Digest, K8s(pattern_message="must be 'sha256:' and 64 lower-case hex digits")] | None = None
    """Digest that the source must have, as of a Model's source."""


class LoRAAdapterSpec(Object):
    """What is loaded, where it may be kept, who may use it."""

    pool_ref: PoolReference
    """The pool on whose replicas it is loaded."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Names that clients put in `model`. Default: the object's name. `namespace/name` works too. Among what a tenant
    may use, a name belongs to the oldest Model that claims it, and where there is none to the oldest adapter."""
    source: AdapterSource
    """The adapter's files."""
    residency: Annotated[Literal["OnDemand", "Warm", "Pinned"], K8s(default_in_code=True)] = "OnDemand"
    """OnDemand: loaded where requests come, gone when others need the place. Warm: kept in the host memory of
    `minCopies` replicas. Pinned: kept there and never evicted. Default: OnDemand."""
    min_copies: Annotated[int, Field(ge=1, le=1000), K8s(default_in_code=True)] = 1
    """With Warm and Pinned: replicas that keep it, or all where there are fewer. Default: 1."""
    tenants: Annotated[tuple[TenantName, ...], Field(min_length=1, max_length=256), K8s(list_type="set")]
    """Tenants that may use it, if they grant it: by `models` of the Tenant (the pool's Model, where the adapter is in
    its namespace) or by `adapters`. '*' says everyone who may use the pool's Model and grants the adapter."""

    cel: ClassVar = (
        CELRule(
            "!has(self.minCopies) || self.minCopies == 1 || (has(self.residency) && self.residency != 'OnDemand')",
            "`minCopies` needs `residency` Warm or Pinned: copies of an adapter on demand follow its traffic",
        ),
    )


class AdapterRevision(Object):
    """One revision of the files, as the source was when it was read."""

    revision: Digest
    """Digest of the manifest: names, sizes and validators of all files."""
    uri: Annotated[str, StringConstraints(max_length=1024)]
    """The source that it was read from; a hub's branch is resolved to its commit."""
    rank: Positive
    """Rank of the adapter."""
    size_bytes: Bytes
    """Bytes of its weights' file."""


class LoRAAdapterStatus(Object):
    """What was found, and which revision answers."""

    conditions: Conditions = ()
    """Accepted, Available and Ready: RankTooHigh, ModulesNotInPool, BaseMismatch, SourceUnreachable, TooLarge, Corrupt,
    NoRoom say what is wrong."""
    observed_generation: Count | None = None
    """The generation that this status is about."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Short names that it owns; a name that a Model or an older adapter claims is not among them."""
    revision: Digest | None = None
    """The revision that answers requests: gateways send to no other."""
    uri: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Where that revision was read from."""
    rank: Positive | None = None
    """Its rank."""
    size_bytes: Bytes | None = None
    """Bytes of its weights."""
    next: AdapterRevision | None = None
    """A newer revision that was read and is being loaded beside it."""
    read_by: Annotated[str, StringConstraints(max_length=16)] | None = None
    """Names what was read last: the source as it was declared, and what its pool and base asked of it. While these are
    the same, nothing is read again."""


class LoRAAdapter(CustomResource):
    """A LoRA fine-tune that a pool's replicas serve."""

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
        # namespace (63) + '.' + name + '@' + 12 digits: what an engine is told, and a file's name
        CELRule(
            "self.metadata.name.size() <= 128",
            "`metadata.name` may not be longer than 128 characters: it is a part of a file's name",
        ),
    )

    spec: LoRAAdapterSpec
    status: LoRAAdapterStatus | None = None

    @property
    def claimed_names(self) -> tuple[str, ...]:
        """Short names that the adapter asks for; an object's name that is no served name is none."""
        return self.spec.served_names or (self.metadata.name,)

    @property
    def pool_key(self) -> str:
        """`namespace/name` of its pool."""
        return f"{self.spec.pool_ref.namespace or self.metadata.namespace}/{self.spec.pool_ref.name}"

    @property
    def current(self) -> AdapterRevision | None:
        """The revision that answers; None: none does yet."""
        status = self.status
        if status is None or status.revision is None or status.uri is None or status.rank is None:
            return None
        return AdapterRevision(
            revision=status.revision, uri=status.uri, rank=status.rank, size_bytes=status.size_bytes or 0
        )


def engine_name(key: str, revision: str) -> str:
    """What an engine calls one revision of the adapter `namespace/name`: `<namespace>.<name>@<12 hex of the digest>`.

    Neither '.' nor '@' is in a namespace, and '@' in no name, so two adapters never share one.
    """
    namespace, _, name = key.partition("/")
    return f"{namespace}.{name}@{revision.removeprefix('sha256:')[:12]}"


def source_key(uri: str, digest: str | None) -> str:
    """Names a source as it is declared: what was read of another one says nothing of this one. 16 hex digits."""
    return hashlib.sha256(f"{uri}\n{digest or ''}".encode()).hexdigest()[:16]
