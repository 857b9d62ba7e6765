"""Model: what is served. Namespaced; short name `mdl`."""

from datetime import datetime
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

RouteNamespace = Annotated[
    # No pattern message: the CEL rule for it would exceed the API server's cost limit here.
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^(\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?)$"),
]
ServedName = Annotated[
    # No colon: SGLang reads what follows one as the name of an adapter. No slash: `namespace/name` always means that
    # object.
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
    K8s(pattern_message="must be the name of a parser of the engine: lower-case letters, digits, '_', '.' and '-'"),
]
MediaHost = Annotated[
    str,
    # As in `core/fields/remote.py`. The last label begins with a letter, so that no IP address matches.
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
    """Location of the weights."""

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
    """URI of the weights: hf://owner/repo[@revision], s3://bucket/prefix (gs://, az://), https://host/archive.tar[.gz],
    oci://registry/image:tag, pvc://claim[/path], or file:///path (a path inside the stage container's image: for tests
    and demos)."""
    digest: (
        Annotated[
            str,
            StringConstraints(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$"),
            K8s(pattern_message="must be 'sha256:' and 64 lower-case hex digits"),
        ]
        | None
    ) = None
    """Required digest of the source: of an https archive its SHA-256; of a directory the SHA-256 of the output of `find
    . -type f | LC_ALL=C sort | xargs sha256sum`."""
    secret_ref: SecretReference | None = None
    """Secret with credentials in the Model's namespace: key `token` for hf:// and for https:// (sent as a bearer
    token); for s3://, gs:// and az:// keys named like the environment variables of the provider, such as
    AWS_ACCESS_KEY_ID."""

    cel: ClassVar = (
        CELRule(
            "!self.uri.startsWith('pvc://') || self.uri.split('/').all(part, part != '..')",
            "a path of `uri` may not contain '..'",
        ),
    )


class Parallelism(Object):
    """Parallelism of one replica over GPUs."""

    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tensor parallelism: GPUs that share each layer. They are the GPUs of a replica, or of each of its stages.
    Default: the smallest number that fits, per GPU class."""
    pipeline: Annotated[int, Field(ge=1, le=64), K8s(default_in_code=True)] = 1
    """Pipeline parallelism: stages of one replica, each with a part of the layers. The replica has `tensor` times as
    many GPUs, all on one node. Default: 1."""
    attention_data: Annotated[int, Field(ge=1, le=64), K8s(default_in_code=True)] = 1
    """Data parallelism of attention: groups of `tensor` GPUs, each with the attention and the KV cache of its own
    requests, while all of them share the experts. It must divide `tensor`. Default: 1."""
    expert: Annotated[bool, K8s(default_in_code=True)] = False
    """Expert parallelism: each GPU of a replica holds whole experts instead of a part of each. It lets a model whose
    experts cannot be cut run on more GPUs. Default: false."""

    cel: ClassVar = (
        CELRule(
            "!has(self.tensor) || !has(self.attentionData) || self.tensor % self.attentionData == 0",
            "`attentionData` must divide `tensor`",
        ),
        CELRule(
            "(has(self.tensor) ? self.tensor : 1) * (has(self.pipeline) ? self.pipeline : 1) <= 64",
            "`tensor` times `pipeline` may not be more than 64 GPUs",
        ),
    )


class Speculation(Object):
    """Speculative decoding: the engine guesses several tokens, and the model checks them in one step. The answers are
    those of the model alone."""

    method: Literal["NGram", "MTP", "EAGLE", "EAGLE3", "DraftModel"]
    """Source of the guesses. NGram: text that was seen before, without a draft model. MTP: the checkpoint's own layers
    for multi-token prediction. EAGLE and EAGLE3: a head made for the model. DraftModel: a smaller model with the same
    vocabulary. The last three need `draftPath`."""
    draft_tokens: Annotated[int, Field(ge=1, le=32)] | None = None
    """Guessed tokens per step. Default: SGLang's own, by method and architecture; 4 with vLLM."""
    draft_path: (
        Annotated[
            str,
            StringConstraints(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$"),
            K8s(pattern_message="must be a folder inside the source, such as 'draft' or 'heads/eagle3'"),
        ]
        | None
    ) = None
    """Folder of the draft inside the source. Other sources for drafts are not supported."""
    isolation: Annotated[Literal["Tenant", "Shared"], K8s(default_in_code=True)] = "Tenant"
    """Whose text may be guessed from. Tenant: a method that guesses from the text of other tenants is refused. Shared:
    it is accepted, and a tenant can find out from response times whether another tenant's answer contained a text. Only
    NGram with SGLang guesses from other tenants' text. Default: Tenant."""

    cel: ClassVar = (
        CELRule(
            "has(self.draftPath) == (self.method in ['EAGLE', 'EAGLE3', 'DraftModel'])",
            "`draftPath` belongs to the methods EAGLE, EAGLE3 and DraftModel, which need it",
        ),
    )


class Quantization(Object):
    """Quantization by the engine."""

    weights: Literal["FP8"] | None = None
    """Quantizes the weights at load time, for a checkpoint that is not quantized. A variant's `quantization` takes
    precedence. Default: the checkpoint's own type."""
    kv_cache: Literal["FP8"] | None = None
    """Type of the KV cache. FP8 (e4m3) halves its size, at the price of some accuracy. Default: the checkpoint's own
    type."""


class Engine(Object):
    """The engine and its arguments."""

    type: Literal["SGLang", "vLLM"] = "SGLang"
    """Type of the engine. vLLM needs mutual TLS (`transport.mtls.enabled` of the chart, on by default)."""
    version: (
        Annotated[
            str,
            StringConstraints(max_length=32, pattern=r"^[0-9]+\.[0-9]+\.[0-9]+([.a-z0-9-]*)$"),
            K8s(pattern_message="must be a version, such as '0.5.23'"),
        ]
        | None
    ) = None
    """Version of the engine. It selects the image from the chart's engine table. Default: the chart's default version
    of this type."""
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Custom image of the engine; requires `version`, since arguments differ between versions."""
    context_length: Annotated[int, Field(ge=128, le=10_000_000)] | None = None
    """Context length: longest prompt plus output, in tokens. Default: from the model's config."""
    parallelism: Parallelism = Parallelism()
    """Parallelism of one replica."""
    speculation: Speculation | None = None
    """Speculative decoding. Default: none."""
    quantization: Quantization = Quantization()
    """Quantization by the engine."""
    tool_call_parser: ParserName | None = None
    """Parser of tool calls (--tool-call-parser of the engine, whose names differ between engines)."""
    reasoning_parser: ParserName | None = None
    """Parser that separates reasoning from the answer (--reasoning-parser of the engine)."""
    extra_args: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
        Field(max_length=64),
        K8s(list_type="atomic"),
    ] = ()
    """Additional engine arguments, `--name=value` or `--flag`. Refused: arguments that Shoal sets, abbreviations, and
    names that this version does not know."""

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
    """A GPU class that the Model may run on."""

    gpu_class: Annotated[ResourceName, Field(alias="class")]
    """Name of a GPUClass."""
    quantization: Literal["FP8"] | None = None
    """Quantizes the weights at load time, for a checkpoint that is not quantized."""
    max_replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Limit of replicas on this class. Default: the Model's limit."""
    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tensor parallelism on this class. Default: `engine.parallelism.tensor`."""


Driver = Literal["BuiltIn", "KEDA"]
"""What writes the replicas of a Model."""


class Scaling(Object):
    """How the number of replicas is decided."""

    driver: Driver | None = None
    """What writes the replicas: BuiltIn, or KEDA with its HPA, through a ScaledObject per variant. The decision is the
    same. It can change while the Model serves. Default: the chart's `operator.scaling.driver`, which is BuiltIn."""
    min_replicas: Annotated[int, Field(ge=0, le=1000), K8s(default_in_code=True)] = 0
    """Lower limit of replicas. With 0, an idle Model scales to zero and the next request wakes it. A new Model always
    starts with one replica, so that errors show at once. Default: 0."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Upper limit of replicas over all variants. Default: 10, or `minReplicas` if that is larger."""
    kv_utilization_percent: Annotated[int, Field(ge=1, le=100), K8s(default_in_code=True)] = 80
    """Target utilization of the KV cache in percent, on average over the replicas. Default: 80."""
    queued_requests_per_replica: Annotated[int, Field(ge=1, le=10_000), K8s(default_in_code=True)] = 4
    """Target length of an engine's queue, in requests, on average over the replicas. Default: 4."""
    idle_seconds: Annotated[int, Field(ge=1, le=2_592_000), K8s(default_in_code=True)] = 600
    """Time without any request after which the Model scales down to `minReplicas`. Default: 600."""
    stabilization_seconds: Annotated[int, Field(ge=0, le=86_400), K8s(default_in_code=True)] = 120
    """Time for which fewer replicas must have sufficed before the Model scales down. Default: 120."""

    cel: ClassVar = (
        CELRule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "`minReplicas` may not be larger than `maxReplicas`",
        ),
    )


class Prefetch(Object):
    """Weights that node caches keep before a replica asks for them."""

    nodes: Annotated[int, Field(ge=1, le=32)]
    """Nodes of each class whose cache shall have the weights. Nodes where a replica runs count."""
    classes: Annotated[tuple[ResourceName, ...], Field(max_length=8), K8s(list_type="set")] = ()
    """Names of GPUClasses. Default: the classes of `variants`, or every GPUClass if there are none."""


class Hold(Object):
    """Requests on hold: they wait at a gateway while no replica can take them. The limits apply per gateway."""

    max_requests: Annotated[int, Field(ge=0, le=1_000_000), K8s(default_in_code=True)] = 2000
    """Limit of held requests; further requests get 503 with Retry-After. 0: requests are never held. Default: 2000."""
    max_bytes: Annotated[Quantity, K8s(default_in_code=True)] = "256Mi"
    """Limit for the total size of held request bodies. Default: 256Mi."""
    max_tenant_percent: Annotated[int, Field(ge=1, le=100), K8s(default_in_code=True)] = 50
    """Share of both limits, in percent, that one tenant may use. Default: 50."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3600), K8s(default_in_code=True)] = 600
    """Longest time that a request is held. It is less when cold starts were measured to be short: at most two cold
    starts plus 30 s. Default: 600."""


class Sizing(Object):
    """Sizes of a model that Shoal cannot compute. They override what Shoal computes."""

    weight_bytes: Quantity | None = None
    """Total size of the weights on the GPUs of one replica, such as 15Gi."""
    kv_bytes_per_token: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Size of one token in the KV cache on each GPU of a replica, in bytes."""


class LocalObjectReference(Object):
    """Reference to an object in the same namespace."""

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
    """Value of the variable. Everyone who can read the Model can read it: do not put secrets here."""


class Resources(Object):
    """Resource requests and limits of the engine container, except GPUs."""

    requests: Annotated[dict[str, Quantity], Field(max_length=8)] = {}
    """Requests by resource name, such as cpu and memory."""
    limits: Annotated[dict[str, Quantity], Field(max_length=8)] = {}
    """Limits by resource name, such as memory."""

    cel: ClassVar = (
        CELRule(
            "(!has(self.requests) || self.requests.all(k, !k.startsWith('nvidia.com/'))) && "
            "(!has(self.limits) || self.limits.all(k, !k.startsWith('nvidia.com/')))",
            "GPUs may not be set here: they come from the GPUClass and `engine.parallelism`",
        ),
    )


OutputTokens = Annotated[int, Field(ge=1, le=10_000_000)]
RequestSeconds = Annotated[int, Field(ge=1, le=86400)]


class RequestLimits(Object):
    """Limits of a single request."""

    max_output_tokens: OutputTokens | None = None
    """Longest output in tokens. It applies to requests that set no limit or a higher one. Default: what the context
    length leaves."""
    request_seconds: RequestSeconds | None = None
    """Longest time that a request may take at replicas, to the last byte. The gateway's own limit applies too. Default:
    the gateway's limit."""


class PrefixCache(Object):
    """The engines' prefix cache: KV cache entries of earlier prompts that are reused for requests with the same
    beginning."""

    isolation: Annotated[Literal["Tenant", "Shared"], K8s(default_in_code=True)] = "Tenant"
    """Who shares cache entries. Tenant: requests of one tenant, or of Tenants with the same `prefixCacheGroup`. Shared:
    all requests to this Model. With Shared, a tenant can find out from response times and from `cached_tokens` whether
    another tenant has sent a prompt with the same beginning. Default: Tenant."""


class Media(Object):
    """Images and audio in requests."""

    allowed_hosts: Annotated[tuple[MediaHost, ...], Field(max_length=32), K8s(list_type="set")] = ()
    """Hosts from which gateways fetch media that a client references by https URL. Names must match exactly. Redirects
    are not followed, and private addresses are refused. It also requires the chart's `gateway.media.egress`. Empty:
    such URLs are refused, and clients send `data:` URLs. Engines always get `data:` URLs."""


class PodTemplate(Object):
    """Additional settings of the engine pods."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=32)] = {}
    """Labels of the pods. Keys below shoal.dev/ and app.kubernetes.io/ are reserved."""
    annotations: Annotated[dict[str, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=32)] = {}
    """Annotations of the pods. Keys below shoal.dev/ are reserved."""
    image_pull_secrets: Annotated[
        tuple[LocalObjectReference, ...], Field(max_length=8), K8s(list_type="map", keys=("name",))
    ] = ()
    """Image pull secrets in the Model's namespace, in addition to the chart's."""
    service_account_name: ResourceName | None = None
    """ServiceAccount of the Model's pods, in its namespace. Its cloud identity is used to read a bucket when
    `source.secretRef` has no key for it. Its token for the Kubernetes API is not mounted. Default: the namespace's
    default ServiceAccount, whose identity is not used."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64), K8s(list_type="map", keys=("name",))] = ()
    """Environment variables of the engine container."""
    resources: Resources = Resources()
    """CPU and memory of the engine container. Default: the chart's values per GPU."""

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
    """Desired state of the Model."""

    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Names by which clients request the Model in `model`. Default: the object's name. `namespace/name` always works.
    If several objects that a tenant may use claim a name, the oldest Model gets it; Models come before adapters,
    and adapters before ModelRoutes."""
    route_namespaces: Annotated[tuple[RouteNamespace, ...], Field(max_length=64), K8s(list_type="set")] = ()
    """Other namespaces whose ModelRoutes may have the Model as a target. '*': all. Default: only ModelRoutes of the
    Model's own namespace."""
    source: Source
    """Location of the weights."""
    engine: Engine = Engine()
    """The engine and its arguments."""
    variants: Annotated[tuple[Variant, ...], Field(max_length=8), K8s(list_type="map", keys=("class",))] = ()
    """GPU classes to use. The operator tries the cheapest first, in whatever order they are listed. Default: every
    class on which the Model fits."""
    priority: Annotated[int, Field(ge=-1000, le=1000), K8s(default_in_code=True)] = 0
    """Priority of the Model when GPUs are short. A higher number wins. Default: 0."""
    scaling: Scaling = Scaling()
    """How the number of replicas is decided."""
    prefetch: Prefetch | None = None
    """Weights that node caches fetch in advance, so that a cold start does not wait for them. Default: a cache fetches
    when a replica needs them."""
    hold: Hold = Hold()
    """Requests that are held while no replica can take them."""
    interruptible_percent: Annotated[int, Field(ge=0, le=100), K8s(default_in_code=True)] = 100
    """Share of the replicas, in percent, that may run on interruptible classes. Default: 100."""
    sizing: Sizing = Sizing()
    """Sizes of a model that Shoal cannot compute."""
    drain_seconds: Annotated[int, Field(ge=0, le=86400), K8s(default_in_code=True)] = 900
    """Time that a draining replica has to finish its requests. Default: 900."""
    stall_seconds: Annotated[int, Field(ge=30, le=3600), K8s(default_in_code=True)] = 180
    """Time without progress (no token, no prefill) after which an engine with requests is restarted. Default: 180."""
    limits: RequestLimits = RequestLimits()
    """Limits of a single request, for all tenants."""
    prefix_cache: PrefixCache = PrefixCache()
    """Sharing of the engines' prefix cache between tenants."""
    media: Media = Media()
    """Images and audio in requests."""
    pod: PodTemplate = PodTemplate()
    """Additional settings of the engine pods."""


class KVTokens(Object):
    """Size of the KV cache of one replica, in tokens."""

    predicted: Count | None = None
    """Computed by Shoal."""
    engine: Count | None = None
    """Reported by the engine, once one has started on this class."""


class StartStages(Object):
    """Seconds of each stage of a replica's start."""

    schedule: Count
    """Until the pod is bound to a node, without the time that a queue held it back."""
    pull: Count
    """Images and volumes."""
    fetch: Count
    """Until the weights are on the node, complete and checked."""
    load: Count
    """From the engine's start to Ready: weights to the GPU, graph capture."""
    graph_capture: Count | None = None
    """Part of `load` in which the engine captured CUDA graphs. Absent: it does not say, as vLLM."""
    first_token: Count | None = None
    """After `load`: from the engine's readiness, or from when the first request is sent if that is later, to the first
    token of its answer, as the gateway gets it. Absent: nobody has asked yet, or the first answer was not a stream."""


class ColdStartStatus(Object):
    """Stages of the cold starts on one GPU class."""

    last: StartStages
    """Of the last start."""
    median: StartStages
    """Of the last few starts, stage by stage."""
    starts: Annotated[int, Field(ge=1, le=5)]
    """How many starts the median is of."""
    advice: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Which stage of the median takes most, and what would shorten it. Absent: all of it takes at most 10 seconds."""


AnswerDigest = Annotated[str, StringConstraints(max_length=16, pattern=r"^([0-9a-f]{16}|-)$")]


class KnownAnswerStatus(Object):
    """An answer that several GPUs gave."""

    answer: AnswerDigest
    """SHA-256 of its first 12 characters, the first 16 hex digits."""
    since: datetime
    """When the second GPU gave it."""
    gpus: Annotated[int, Field(ge=2, le=64)]
    """Most GPUs that were seen to give it at once."""


class GPUAnswer(Object):
    """The last answer of one GPU."""

    gpu: Annotated[str, StringConstraints(max_length=16, pattern=r"^[0-9a-f]{16}$")]
    """SHA-256 of node and device, the first 16 hex digits."""
    answer: AnswerDigest
    """As in `known`; `-`: it repeats one or two characters."""


class PromptAnswers(Object):
    """Answers to one prompt of the canary."""

    prompt: Annotated[str, StringConstraints(max_length=64)]
    """The prompt."""
    known: Annotated[tuple[KnownAnswerStatus, ...], Field(max_length=3), K8s(list_type="atomic")] = ()
    """Answers that count as right, the newest first."""
    last: Annotated[tuple[GPUAnswer, ...], Field(max_length=3), K8s(list_type="atomic")] = ()
    """What the last GPUs answered, the latest first: two that answer alike make an answer known."""


class CanaryAnswers(Object):
    """What healthy GPUs of one class answer to the canary of this Model."""

    key: Annotated[str, StringConstraints(max_length=16, pattern=r"^[0-9a-f]{16}$")]
    """Digest of all that the answers depend on: weights, class, and the engine's image, arguments and environment. When
    it changes, answers are learned anew."""
    image: Annotated[str, StringConstraints(max_length=512)]
    """Image of the engine."""
    weights: Annotated[str, StringConstraints(max_length=71)] | None = None
    """Digest of the weights' manifest or content; absent: they are a folder of an image of Shoal's."""
    quantization: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Quantization of the weights; absent: none."""
    prompts: Annotated[tuple[PromptAnswers, ...], Field(max_length=4), K8s(list_type="map", keys=("prompt",))] = ()
    """Answers by prompt."""


class VariantStatus(Object):
    """Decisions and observations for one GPU class."""

    gpu_class: Annotated[ResourceName, Field(alias="class")]
    """Name of the GPUClass."""
    gpus_per_replica: Count | None = Field(None, alias="gpusPerReplica")
    """GPUs of one replica."""
    kv_tokens_per_replica: KVTokens | None = None
    """Size of the KV cache of one replica, in tokens."""
    desired: Count = 0
    """Desired replicas."""
    ready: Count = 0
    """Replicas that are ready to serve."""
    waiting: Count | None = None
    """Desired replicas that wait for GPUs which other replicas still hold; absent: none."""
    step: Literal["Waiting", "Fetching", "Loading", "Ready"] | None = None
    """Progress of the replica that is the least far: Waiting for GPUs, Fetching its weights, Loading its engine, Ready
    to serve. `kubectl shoal status` shows percentages."""
    hourly_cost: Quantity | None = None
    """Cost per hour of the desired replicas, or of one replica if none is desired."""
    cold_start_seconds: Count | None = None
    """Cold start of the latest replica on this class, measured from the creation of the pod to Ready."""
    node_wait_seconds: Count | None = None
    """On a class whose nodes an autoscaler adds: how much longer the next replica may take than the latest one, because
    it waits for a node. Absent: no longer."""
    cold_start: ColdStartStatus | None = None
    """Stages of the last cold starts on this class, and what would shorten them."""
    canary: CanaryAnswers | None = None
    """What replicas on this class answer to the canary. A replica that answers otherwise is on a GPU that computes
    wrong."""
    excluded: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Why this class is not used."""


class PrefetchStatus(Object):
    """Weights in the node caches of one GPU class."""

    gpu_class: Annotated[ResourceName, Field(alias="class")]
    """Name of the GPUClass."""
    nodes: Count
    """Nodes whose cache shall have the weights: at most `spec.prefetch.nodes`."""
    ready: Count = 0
    """Of these, nodes whose cache has them."""
    message: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Why there are fewer nodes than asked for, or what failed."""


class ReplicaCounts(Object):
    """Replicas over all variants."""

    desired: Count
    """Desired replicas."""
    ready: Count
    """Replicas that are ready to serve."""


class ModelStatus(Object):
    """Observed state of the Model."""

    conditions: Conditions = ()
    """Conditions Accepted, Placed, Available and Ready. Reconciling, Stalled, SignalsUnknown and ClassAnswersGarbled
    are present only while they are true, QuotaWait only while a queue or a quota matters."""
    observed_generation: Count | None = None
    """Generation of the spec that this status describes."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Short names that the Model owns. A name that an older Model claims is left out."""
    artifact: ArtifactFacts | None = None
    """Facts of the weights."""
    capabilities: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=32)], ...], Field(max_length=16), K8s(list_type="set")
    ] = ()
    """What the Model can do, as `GET /v1/models` lists it for clients: such as generate, embed, transcribe, vision,
    tools."""
    variants: Annotated[tuple[VariantStatus, ...], Field(max_length=32), K8s(list_type="map", keys=("class",))] = ()
    """One entry per GPU class that is used or was considered."""
    replicas: ReplicaCounts | None = None
    """Replicas over all variants."""
    cold_start_seconds: Count | None = None
    """Longest measured cold start of the classes in use, with the wait for a node that has to be added."""
    prefetch: Annotated[tuple[PrefetchStatus, ...], Field(max_length=8), K8s(list_type="map", keys=("class",))] = ()
    """Weights that were fetched in advance, per GPU class."""


class Model(CustomResource):
    """Model is a model that the fleet serves."""

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
        Column("Capabilities", ".status.capabilities", "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column("Message", '.status.conditions[?(@.type=="Ready")].message'),  # last: it is long
    )

    scale: ClassVar = (".spec.scaling.minReplicas", ".status.replicas.desired")
    cel: ClassVar = (NAME_IS_LABEL,)

    spec: ModelSpec
    status: ModelStatus | None = None

    @property
    def claimed_names(self) -> tuple[str, ...]:
        """Short names that the Model claims."""
        return self.spec.served_names or (self.metadata.name,)

    @property
    def engine_model_name(self) -> str:
        """The engine's name of the base model. It never contains a colon."""
        return self.key
