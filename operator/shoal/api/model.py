"""Model: what is served. Namespaced; short name `mdl`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from shoal.api.artifact import ArtifactFacts
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
    Quantity,
    ResourceName,
    SecretReference,
)

ServedName = Annotated[
    # No colon: SGLang reads what follows one as an adapter's name. No slash: `namespace/name` always means that object.
    str,
    StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"),
    K8s(
        pattern_message="must be letters, digits, '.', '_' and '-', with a letter or digit at both ends; "
        "':' and '/' have a meaning of their own in a model's name"
    ),
]
ParserName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9_.-]+$"),
    K8s(pattern_message="must be the name of an SGLang parser: lower-case letters, digits, '_', '.' and '-'"),
]
MediaHost = Annotated[
    str,
    # As in `core/fields/remote.py`. The last part begins with a letter, so that no address is a name.
    StringConstraints(
        min_length=1,
        max_length=253,
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.)+[a-z]([-a-z0-9]{0,61}[a-z0-9])?$",
    ),
    K8s(
        pattern_message="must be a host's whole name in lower case, such as 'images.example.com' (a foreign one as "
        "'xn--...'): no address, no '*', no port"
    ),
]


class Source(Object):
    """Where the weights are."""

    uri: Annotated[
        str,
        StringConstraints(
            max_length=1024,
            pattern=r"^(hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?"
            r"|https://[^/\s@]+/\S+|(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/\S*)?|oci://[^/\s]+/\S+"
            r"|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/\S*)?|file:///\S+)$",
        ),
        K8s(
            pattern_message="must be 'hf://owner/repo[@revision]', 's3://bucket/prefix' (or gs://, az://), "
            "'https://host/archive.tar[.gz]', 'oci://registry/image:tag', 'pvc://claim[/path]' or 'file:///path'"
        ),
    ]
    """Address of the weights: hf://owner/repo[@revision], s3://bucket/prefix (gs://, az://),
    https://host/archive.tar[.gz], oci://registry/image:tag, pvc://claim[/path], or file:///path (a path inside the
    stage container's image: for tests and demos)."""
    digest: (
        Annotated[
            str,
            StringConstraints(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$"),
            K8s(pattern_message="must be 'sha256:' and 64 lower-case hex digits"),
        ]
        | None
    ) = None
    """Digest that the source must have: of an https archive its SHA-256; of a directory the SHA-256 of the output of
    `find . -type f | LC_ALL=C sort | xargs sha256sum`."""
    secret_ref: SecretReference | None = None
    """Credentials in the Model's namespace: key `token` for hf:// and for https:// (sent as a bearer token); for
    s3://, gs:// and az:// keys named like their environment variables, such as AWS_ACCESS_KEY_ID."""

    cel: ClassVar = (
        CELRule(
            "!self.uri.startsWith('pvc://') || self.uri.split('/').all(part, part != '..')",
            "a path of `uri` may not contain '..'",
        ),
    )


class Parallelism(Object):
    """How one replica is spread over GPUs."""

    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tensor parallelism: GPUs of one replica. Default: for each class the smallest number that fits."""


class Engine(Object):
    """The engine and its arguments."""

    type: Literal["SGLang"] = "SGLang"
    """The engine's kind."""
    version: (
        Annotated[
            str,
            StringConstraints(max_length=32, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+([.a-z0-9-]*)$"),
            K8s(pattern_message="must be a version, such as '0.5.23'"),
        ]
        | None
    ) = None
    """Engine version: the image is looked up in the chart's table. Default: the chart's default."""
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """An image of your own; `version` must stand beside it, since arguments differ between versions."""
    context_length: Annotated[int, Field(ge=128, le=10_000_000)] | None = None
    """Longest prompt plus answer, in tokens. Default: what the model's config says."""
    parallelism: Parallelism = Parallelism()
    """GPUs of one replica."""
    tool_call_parser: ParserName | None = None
    """Name of the parser that reads tool calls out of the answer (SGLang's --tool-call-parser)."""
    reasoning_parser: ParserName | None = None
    """Name of the parser that tells reasoning from the answer (SGLang's --reasoning-parser)."""
    extra_args: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
        Field(max_length=64),
        K8s(list_type="atomic"),
    ] = ()
    """Further engine arguments, `--name=value` or `--flag`. Those that Shoal owns, abbreviations and names that this
    version does not know are refused."""

    cel: ClassVar = (
        CELRule(
            "!has(self.image) || has(self.version)",
            "`version` must be set when `image` is: arguments differ by version",
        ),
        CELRule(
            "!has(self.extraArgs) || self.extraArgs.all(a, a.startsWith('--'))",
            "each of `extraArgs` must be '--name=value' or '--flag'",
        ),
    )


class Variant(Object):
    """One GPU class that the Model may run on."""

    gpu_class: Annotated[ResourceName, Field(alias="class")]
    """Name of a GPUClass."""
    quantization: Literal["FP8"] | None = None
    """Quantizes the weights while they are loaded: for a checkpoint that is not quantized itself."""
    max_replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Replicas that may run on this class. Default: as many as the Model has."""
    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs of one replica on this class. Default: what `engine.parallelism` says."""


Driver = Literal["BuiltIn", "KEDA"]
"""Who writes a Model's replicas."""


class Scaling(Object):
    """How many replicas, and by what they are counted."""

    driver: Driver | None = None
    """Who writes the replicas, by the same decision: BuiltIn, or KEDA with its HPA, through a ScaledObject per variant.
    It may change while the Model serves. Default: what the chart says (`operator.scaling.driver`), which is BuiltIn."""
    min_replicas: Annotated[int, Field(ge=0, le=1000), K8s(default_in_code=True)] = 0
    """Replicas that are kept without any request. Default: 0, so an idle Model goes to zero and the next request wakes
    it. A new Model starts with one replica in any case, so that a fault shows at once."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Replicas at most, over all variants. Default: 10, or `minReplicas` where that is more."""
    kv_utilization_percent: Annotated[int, Field(ge=1, le=100), K8s(default_in_code=True)] = 80
    """Share of the KV cache that requests may fill, on average over the replicas. Default: 80."""
    queued_requests_per_replica: Annotated[int, Field(ge=1, le=10_000), K8s(default_in_code=True)] = 4
    """Requests that may wait in an engine's queue, on average over the replicas. Default: 4."""
    idle_seconds: Annotated[int, Field(ge=1, le=2_592_000), K8s(default_in_code=True)] = 600
    """How long no request may have come before the last replicas go. Default: 600."""
    stabilization_seconds: Annotated[int, Field(ge=0, le=86_400), K8s(default_in_code=True)] = 120
    """How long fewer replicas must have been enough before one goes. Default: 120."""

    cel: ClassVar = (
        CELRule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "`minReplicas` may not be larger than `maxReplicas`",
        ),
    )


class Hold(Object):
    """Requests that wait at a gateway while no replica can take them. The limits are those of each gateway."""

    max_requests: Annotated[int, Field(ge=0, le=1_000_000), K8s(default_in_code=True)] = 2000
    """Requests that wait at most; further ones are refused with 503 and Retry-After. 0: none waits. Default: 2000."""
    max_bytes: Annotated[Quantity, K8s(default_in_code=True)] = "256Mi"
    """Bytes of their bodies at most. Default: 256Mi."""
    max_tenant_percent: Annotated[int, Field(ge=1, le=100), K8s(default_in_code=True)] = 50
    """Share of both that one tenant may take. Default: 50."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3600), K8s(default_in_code=True)] = 600
    """How long a request waits at most; less where the measured cold start is short: never more than two cold starts
    and 30 s. Default: 600."""


class Sizing(Object):
    """Figures for a model that Shoal cannot size by itself; they win over what it computes."""

    weight_bytes: Quantity | None = None
    """Bytes of the weights on the GPUs of one replica, all together, such as 15Gi."""
    kv_bytes_per_token: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Bytes of the KV cache of one token on each GPU of a replica."""


class LocalObjectReference(Object):
    """An object in the same namespace."""

    name: ResourceName
    """Name of the object."""


class EnvVar(Object):
    """An environment variable of the engine container."""

    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
        K8s(pattern_message="must be letters, digits and '_', not beginning with a digit"),
    ]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Value of the variable. It is readable by whoever may read the Model: no secrets here."""


class Resources(Object):
    """Requests and limits of the engine container besides GPUs."""

    requests: Annotated[dict[str, Quantity], Field(max_length=8)] = {}
    """Requests by resource, such as cpu and memory."""
    limits: Annotated[dict[str, Quantity], Field(max_length=8)] = {}
    """Limits by resource, such as memory."""

    cel: ClassVar = (
        CELRule(
            "(!has(self.requests) || self.requests.all(k, !k.startsWith('nvidia.com/'))) && "
            "(!has(self.limits) || self.limits.all(k, !k.startsWith('nvidia.com/')))",
            "GPUs may not be set here: they come from the GPUClass and `engine.parallelism`",
        ),
    )


class RequestLimits(Object):
    """Caps for one request."""

    max_output_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Longest answer in tokens: the bound of a request that names none, and a smaller one where it names more.
    Default: what the context length leaves."""
    request_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """Longest time at replicas, to the last byte; the gateway's own bound holds too. Default: the gateway's."""


class PrefixCache(Object):
    """What engines keep of prompts that they have read, so as not to read the same beginning twice."""

    isolation: Annotated[Literal["Tenant", "Shared"], K8s(default_in_code=True)] = "Tenant"
    """Tenant: a request finds only what its own tenant, or a Tenant of the same `prefixCacheGroup`, asked before.
    Shared: what anybody asked this Model. With Shared a tenant can find out, by the time that an answer takes and by
    `cached_tokens`, whether another tenant has sent a prompt that begins like its own. Default: Tenant."""


class Media(Object):
    """Images and sound of requests."""

    allowed_hosts: Annotated[tuple[MediaHost, ...], Field(max_length=32), K8s(list_type="set")] = ()
    """Hosts from which gateways fetch what a client names by an https URL, by exactly these names: redirects are not
    followed, and private addresses are refused. It takes the chart's `gateway.media.egress` too. Empty: such URLs are
    refused, and media come as `data:` URLs. Engines get `data:` URLs in any case."""


class PodTemplate(Object):
    """Additions to the engine pods."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=32)] = {}
    """Labels of the pods; shoal.dev/ and app.kubernetes.io/ keys are Shoal's."""
    annotations: Annotated[dict[str, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=32)] = {}
    """Annotations of the pods; shoal.dev/ keys are Shoal's."""
    image_pull_secrets: Annotated[
        tuple[LocalObjectReference, ...], Field(max_length=8), K8s(list_type="map", keys=("name",))
    ] = ()
    """Pull secrets in the Model's namespace, besides the chart's."""
    service_account_name: ResourceName | None = None
    """ServiceAccount of the Model's pods, in its namespace. As its cloud identity a bucket is read that no key of
    `source.secretRef` opens. It brings no token of the Kubernetes API. Default: the namespace's own, whose identity is
    not used."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64), K8s(list_type="map", keys=("name",))] = ()
    """Environment of the engine container."""
    resources: Resources = Resources()
    """CPU and memory of the engine container. Default: the chart's amounts per GPU."""

    cel: ClassVar = (
        CELRule(
            "!has(self.labels) || "
            "self.labels.all(k, !k.startsWith('shoal.dev/') && !k.startsWith('app.kubernetes.io/'))",
            "`labels` may not use keys of 'shoal.dev/' or 'app.kubernetes.io/'",
        ),
        CELRule(
            "!has(self.annotations) || self.annotations.all(k, !k.startsWith('shoal.dev/'))",
            "`annotations` may not use keys of 'shoal.dev/'",
        ),
    )


class ModelSpec(Object):
    """What is served, from where, on what."""

    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Names that clients put in `model`. Default: the object's name. `namespace/name` always works. Among what a tenant
    may use, a short name belongs to the oldest Model that claims it; a Model comes before every adapter."""
    source: Source
    """Where the weights are."""
    engine: Engine = Engine()
    """The engine and its arguments."""
    variants: Annotated[tuple[Variant, ...], Field(max_length=8), K8s(list_type="map", keys=("class",))] = ()
    """GPU classes to use, filled cheapest first; empty: every class on which the Model fits."""
    priority: Annotated[int, Field(ge=-1000, le=1000), K8s(default_in_code=True)] = 0
    """Which Model gets GPUs when they are short: the higher number. Default: 0."""
    scaling: Scaling = Scaling()
    """How many replicas."""
    hold: Hold = Hold()
    """Requests that wait at a gateway while no replica can take them."""
    interruptible_percent: Annotated[int, Field(ge=0, le=100), K8s(default_in_code=True)] = 100
    """Share of the replicas that may run on interruptible classes. Default: 100."""
    sizing: Sizing = Sizing()
    """Figures for a model that Shoal cannot size by itself."""
    drain_seconds: Annotated[int, Field(ge=0, le=86400), K8s(default_in_code=True)] = 900
    """How long a replica that is to go may finish its answers. Default: 900."""
    stall_seconds: Annotated[int, Field(ge=30, le=3600), K8s(default_in_code=True)] = 180
    """An engine that has requests and makes no progress for so long (no token, no prefill) is restarted. Default:
    180."""
    limits: RequestLimits = RequestLimits()
    """Caps for one request, whoever asks."""
    prefix_cache: PrefixCache = PrefixCache()
    """Whether tenants find each other's prompts in the engines' caches."""
    media: Media = Media()
    """Images and sound of requests."""
    pod: PodTemplate = PodTemplate()
    """Additions to the engine pods."""


class KVTokens(Object):
    """Tokens that the KV cache of one replica holds."""

    predicted: Count | None = None
    """As Shoal computes them."""
    engine: Count | None = None
    """As the engine itself says, once one has started on this class."""


class VariantStatus(Object):
    """What was decided and found for one GPU class."""

    gpu_class: Annotated[ResourceName, Field(alias="class")]
    """Name of the GPUClass."""
    gpus_per_replica: Count | None = Field(None, alias="gpusPerReplica")
    """GPUs of one replica."""
    kv_tokens_per_replica: KVTokens | None = None
    """Tokens that the KV cache of one replica holds."""
    desired: Count = 0
    """Replicas wanted."""
    ready: Count = 0
    """Replicas that serve."""
    waiting: Count | None = None
    """Replicas that are wanted and wait for GPUs which others still hold; absent: none."""
    step: Literal["Waiting", "Fetching", "Loading", "Ready"] | None = None
    """How far the replica that is the least far is: it waits for GPUs, its weights are fetched, its engine loads, it
    serves. `kubectl shoal status` shows the per cent."""
    hourly_cost: Quantity | None = None
    """Cost of one replica per hour where none is wanted, else of the wanted replicas."""
    cold_start_seconds: Count | None = None
    """Measured from the pod's creation to Ready, of the last replica that started on this class."""
    excluded: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Why the class is not used."""


class ReplicaCounts(Object):
    """Replicas over all variants."""

    desired: Count
    """Replicas wanted."""
    ready: Count
    """Replicas that serve."""


class ModelStatus(Object):
    """What was decided and found."""

    conditions: Conditions = ()
    """Conditions Accepted, Placed, Available and Ready; Reconciling, Stalled and SignalsUnknown only while true."""
    observed_generation: Count | None = None
    """The generation that this status is about."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Short names that this Model owns; a name that an older Model claims is not among them."""
    artifact: ArtifactFacts | None = None
    """What is known of the weights."""
    variants: Annotated[tuple[VariantStatus, ...], Field(max_length=32), K8s(list_type="map", keys=("class",))] = ()
    """One entry per GPU class that is used or was looked at."""
    replicas: ReplicaCounts | None = None
    """Replicas over all variants."""
    cold_start_seconds: Count | None = None
    """The longest of the measured cold starts of the classes in use."""


class Model(CustomResource):
    """A model that the fleet serves."""

    kind_name: ClassVar = "Model"
    plural: ClassVar = "models"
    singular: ClassVar = "model"
    short_names: ClassVar = ("mdl",)
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Desired", ".status.replicas.desired", "integer"),
        Column("Up", ".status.replicas.ready", "integer"),
        Column("Class", ".status.variants[?(@.desired>0)].class"),
        Column("Source", ".spec.source.uri", "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column("Message", '.status.conditions[?(@.type=="Ready")].message'),  # last: it is long
    )

    cel: ClassVar = (NAME_IS_LABEL,)

    spec: ModelSpec
    status: ModelStatus | None = None

    @property
    def claimed_names(self) -> tuple[str, ...]:
        """Short names that the Model asks for."""
        return self.spec.served_names or (self.metadata.name,)

    @property
    def engine_model_name(self) -> str:
        """The name under which the engine serves the base model. Never contains a colon."""
        return self.key
