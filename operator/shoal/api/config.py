"""The operator's configuration file, as the chart writes it (`SHOAL_CONFIG`, default /etc/shoal/config.yaml).

One file, because it decides the shape of every engine pod: the engine table, proxy, hub mirror, security defaults.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from shoal.api.model import Driver


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
    image_pull_secrets: tuple[str, ...] = ()
    """Names of pull secrets that each Model's namespace has."""
    priority_class_name: str = ""
    """PriorityClass of all engine pods, instead of those of `priorityBands`."""
    priority_bands: tuple[PriorityBand, ...] = ()
    """PriorityClasses that the chart makes, by a Model's priority: its pods get that of the band with the highest
    minimum that the priority reaches. They never preempt."""
    network_policy: bool = True
    """A NetworkPolicy per Model: engine port from gateways; agent port from gateways and operators."""
    scraper_namespaces: tuple[str, ...] = ()
    """Namespaces from which metrics may be scraped; empty: all."""


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


class Tracing(_Section):
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


class OperatorConfig(_Section):
    """The whole file."""

    engines: Engines
    agent: AgentImage
    proxy: Proxy = Proxy()
    ca_bundle: CABundle = CABundle()
    hub_endpoint: str = ""
    """HF_ENDPOINT of the stage containers: a mirror of the Hugging Face hub."""
    pods: Pods = Pods()
    cache: Cache = Cache()
    signals: Signals = Signals()
    scaling: Scaling = Scaling()
    tracing: Tracing = Tracing()
    resync_seconds: float = 600.0
    log_level: str = "info"
