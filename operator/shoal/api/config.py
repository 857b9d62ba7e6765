"""The operator's configuration file, as the chart writes it (`SHOAL_CONFIG`, default /etc/shoal/config.yaml).

One file, because it decides the shape of every engine pod: the engine table, proxy, hub mirror, security defaults.
"""

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from shoal.api.model import Driver

SOURCES_ENV: Final = "SHOAL_SOURCES"
"""`Sources` as JSON, for whatever fetches; without it, the defaults hold."""
HUB_STORES: Final = ("huggingface.co", ".huggingface.co", ".hf.co")
"""Where the public hub redirects to for the content of files."""


class _Section(BaseModel):
    # forbid: a misspelt chart value must not be ignored
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class NamedValue(_Section):
    name: str
    value: str = ""


class EngineVersion(_Section):
    """One row of the engine table."""

    image: str
    """The engine's image."""
    command: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
    """What starts the server; Shoal's arguments follow."""
    args: tuple[str, ...] = ()
    """Platform arguments for every Model, such as --device cpu. A Model's own extraArgs come after these."""
    env: tuple[NamedValue, ...] = ()
    """Environment of every engine of this version."""


class Engines(_Section):
    default_version: str
    versions: dict[str, EngineVersion]
    cpu_per_gpu: str = Field("4", alias="cpuPerGPU")
    """CPU request of an engine per GPU (a Quantity)."""
    memory_per_gpu: str = Field("32Gi", alias="memoryPerGPU")
    """Memory request and limit of an engine per GPU (a Quantity); /dev/shm counts towards it."""


class AgentImage(_Section):
    image: str
    """Shoal's own image: agent and stage containers."""
    pull_policy: str = "IfNotPresent"
    cpu: str = "50m"
    memory: str = "128Mi"
    facts_memory: str = "256Mi"
    """Memory request and limit of the Job that reads a source's metadata (a Quantity)."""


class Proxy(_Section):
    http: str = ""
    """HTTP_PROXY of the stage containers."""
    https: str = ""
    """HTTPS_PROXY of the stage containers."""
    no_proxy: str = ""
    """NO_PROXY of the stage containers."""


class CABundle(_Section):
    """A ConfigMap in each Model's namespace with further CA certificates."""

    config_map: str = ""
    """Name of the ConfigMap; empty: none."""
    key: str = "ca.crt"
    """Its key that holds the certificates."""


_HOST = r"^(\.?[A-Za-z0-9_]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:.]+(/[0-9]{1,3})?)$"
SourceHost = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_HOST)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Sources(_Section):
    """From where weights and adapters may be fetched. Metadata servers and link-local addresses never are sources."""

    allowed_hosts: tuple[SourceHost, ...] = ()
    """Hosts (".example.com": every name below it) and networks (CIDR) with private addresses that sources may name,
    such as minio.storage.svc. The hub's mirror and the proxies need not be named again."""
    allow_private_addresses: bool = False
    """Sources may name any host with a private address: of your network, and of the cluster's own Services."""
    redirect_hosts: tuple[SourceHost, ...] = HUB_STORES
    """Hosts to which a source's server may redirect, beside itself. Credentials are never sent along."""
    folders: tuple[Annotated[str, StringConstraints(pattern=r"^/")], ...] = ("/opt/shoal",)
    """Folders of Shoal's own image that `file://` may name: those of the demo's models, as it ships them."""
    ports: tuple[Port, ...] = (443,)
    """TCP ports of sources, for the NetworkPolicies of what fetches; those of hubEndpoint and proxies are added. Of a
    Service in the cluster it is mostly the pods' port that counts."""


class PriorityBand(_Section):
    """A PriorityClass for engine pods, for Models from this priority on."""

    name: str
    """Name of the PriorityClass."""
    minimum: int
    """The lowest `spec.priority` of the band."""
    value: int = Field(0, ge=-1_000_000_000, le=1_000_000_000)
    """Value of the PriorityClass that the chart makes. Kubernetes does not let it change: take another name with it."""


class Pods(_Section):
    """What every engine pod gets."""

    run_as_user: int = 65532
    """Numeric user and group of all containers of an engine pod."""
    run_as_root: bool = False
    """For an engine image that does not work as a numeric user; leaves the restricted pod standard."""
    read_only_root: bool = True
    """Engines write to volumes alone: /tmp, their HOME, /dev/shm. Off: for an engine image that writes elsewhere."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of pull secrets that each Model's namespace has."""
    priority_class_name: str = ""
    """PriorityClass of all engine pods, instead of those of `priorityBands`."""
    priority_bands: tuple[PriorityBand, ...] = ()
    """PriorityClasses that the chart makes, by a Model's priority: its pods get that of the band with the highest
    minimum that the priority reaches. They never preempt."""
    network_policy: bool = True
    """A NetworkPolicy per Model: engine port from gateways; agent port from gateways, operators and the ledger."""
    scraper_namespaces: tuple[str, ...] = ()
    """Namespaces from which engine pods may be scraped; empty: none. Given, nobody else reaches Shoal's own metrics."""


class Cache(_Section):
    """The node cache, as far as the objects that the operator makes need it."""

    enabled: bool = False
    """Stage containers ask the node cache; off, each pod fetches into an emptyDir of its own."""
    host_path: str = "/var/lib/shoal/cache"
    """The cache's folder on each node."""
    size: str = "500Gi"
    """Bound of the cache on each node (a Quantity)."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that have a cache; empty: every Linux node. Engine pods that use it run on these only."""


class Prometheus(_Section):
    """A Prometheus that scrapes agents and gateways."""

    url: str = Field(default="", pattern=r"^(https?://[^ ]+)?$")
    """Its address, such as http://prometheus.monitoring.svc:9090."""
    scrape_seconds: int = Field(default=15, ge=1, le=300)
    """How often it scrapes agents and gateways. What is older than three of these is unknown."""
    timeout_seconds: int = Field(default=5, ge=1, le=60)
    """Longest that an answer may take."""
    token_file: str = Field(default="", pattern=r"^(/[^ ]+)?$")
    """File with a bearer token for it, such as /var/run/secrets/kubernetes.io/serviceaccount/token; empty: none."""
    match: str = ""
    """Label matchers for all queries, where one Prometheus has several clusters, such as cluster="east"."""


class Signals(_Section):
    """Where the operator hears of load and demand."""

    source: Literal["Streams", "Prometheus"] = "Streams"
    """Streams: from each agent and gateway within milliseconds. Prometheus: from its samples, so that a wake from zero
    waits for a scrape. It needs `prometheus.url`."""
    prometheus: Prometheus = Prometheus()
    """The Prometheus that is asked."""

    @model_validator(mode="after")
    def _has_a_url(self) -> Self:
        if self.source == "Prometheus" and not self.prometheus.url:
            raise ValueError("source Prometheus needs prometheus.url, such as http://prometheus.monitoring.svc:9090")
        return self


class KEDA(_Section):
    """How KEDA asks the operator for decisions, and what ScaledObjects say."""

    address: str = ""
    """Host and port of the operator's external scaler, as KEDA reaches it. Empty: its Service in Shoal's namespace."""
    tls: bool = True
    """Answer with a certificate, whose CA KEDA is given. Off: plain HTTP/2."""
    tls_secret_name: str = ""
    """Secret of type kubernetes.io/tls in the release's namespace with a ca.crt, such as cert-manager makes, for the
    name shoal-scaler.NAMESPACE.svc; read again when it changes. Empty: the chart makes shoal-scaler-tls and keeps it
    over upgrades. Name one where manifests are rendered without a cluster (GitOps): each rendering would make
    another."""
    polling_seconds: int = Field(default=5, ge=1, le=300)
    """How often KEDA looks at whether a Model has demand, besides what is pushed to it."""


class Scaling(_Section):
    """Who writes replicas."""

    driver: Driver = "BuiltIn"
    """Of Models that name none. KEDA: through ScaledObjects, which KEDA and its HPA act on."""
    keda: KEDA = KEDA()
    """Of Models whose driver is KEDA."""


Sampler = Literal[
    "always_on",
    "always_off",
    "parentbased_always_on",
    "parentbased_always_off",
    "traceidratio",
    "parentbased_traceidratio",
]


class TracingConfig(_Section):
    """OpenTelemetry traces of requests and decisions."""

    endpoint: str = Field(default="", pattern=r"^(https?://[^ ]+)?$")
    """A collector's address for OTLP over HTTP, such as http://otel-collector.monitoring:4318. Empty: no traces."""
    sampler: Sampler = "parentbased_always_on"
    """Which requests are traced (OTEL_TRACES_SAMPLER). Parent-based: as the client's `traceparent` says, where it
    sends one."""
    ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that the samplers with a ratio trace (OTEL_TRACES_SAMPLER_ARG)."""
    per_second: float = Field(default=100.0, gt=0)
    """Traces per second and pod at most, whatever clients ask for."""
    engines: bool = False
    """Engines send spans of their own, which join the gateway's. SGLang's images can; turning it on or off rolls the
    engine pods. An image of your own without OpenTelemetry does not start then."""

    @model_validator(mode="after")
    def _has_an_endpoint(self) -> Self:
        if self.engines and not self.endpoint:
            raise ValueError("engines need endpoint, such as http://otel-collector.monitoring:4318")
        return self


class MTLS(_Section):
    """Mutual TLS between Shoal's processes, and in front of each engine."""

    enabled: bool = False
    """Processes show certificates that the operator issues. Off where a service mesh does it already; turning it on or
    off rolls the engine pods."""
    trust_domain: str = Field(default="shoal.internal", pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")
    """First part of the names in the certificates (spiffe://TRUST DOMAIN/...)."""
    ca_secret_name: str = ""
    """Secret of type kubernetes.io/tls in the release's namespace with an authority (tls.crt, tls.key), such as a
    Certificate of cert-manager's with isCA. When it changes, trust moves to the new one first. Empty: the operator
    makes and renews one, in the Secret shoal-ca."""
    certificate_hours: int = Field(default=168, ge=1, le=8760)
    """Life of a certificate. Each is renewed after a third of it: the operator may be away for the rest."""
    authority_days: int = Field(default=365, ge=1, le=3650)
    """Life of the authority that the operator makes. The next one is made after two thirds of it."""


class Sidecar(_Section):
    """What ends mutual TLS in front of each engine: Envoy, of Shoal's own image."""

    cpu: str = "50m"
    """CPU request in each engine pod (a Quantity)."""
    memory: str = "256Mi"
    """Memory request and limit in each engine pod (a Quantity): 70 MiB, and 128 KiB for each stream whose client does
    not take it."""


class TransportConfig(_Section):
    """How Shoal's processes reach each other and the engines."""

    mtls: MTLS = MTLS()
    """Mutual TLS between Shoal's processes, and in front of each engine."""
    sidecar: Sidecar = Sidecar()
    """What ends mutual TLS in front of each engine: Envoy, of Shoal's own image."""


class OperatorConfig(_Section):
    """The whole file."""

    engines: Engines
    agent: AgentImage
    proxy: Proxy = Proxy()
    ca_bundle: CABundle = CABundle()
    hub_endpoint: str = ""
    """HF_ENDPOINT of the stage containers: a mirror of the Hugging Face hub."""
    sources: Sources = Sources()
    """From where weights may be fetched."""
    pods: Pods = Pods()
    cache: Cache = Cache()
    signals: Signals = Signals()
    scaling: Scaling = Scaling()
    tracing: TracingConfig = TracingConfig()
    scope_namespaces: tuple[str, ...] = ()
    """The only namespaces that Shoal reads and writes, its own among them; empty: all."""
    metrics_auth: bool = False
    """Whether the operator's pages (/metrics, /v1/decisions, /v1/adapters) are for those alone whose Kubernetes token
    may `get` them."""
    transport: TransportConfig = TransportConfig()
    resync_seconds: float = 600.0
    log_level: str = "info"
