"""The operator's configuration file, written by the chart (`SHOAL_CONFIG`, default /etc/shoal/config.yaml).

It contains everything that determines engine pods: engine versions, proxy, hub mirror, security defaults.
"""

import ipaddress
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from shoal.api.model import Driver

SOURCES_ENV: Final = "SHOAL_SOURCES"
"""`Sources` as JSON, for every process that fetches. Unset: the defaults."""
HUB_STORES: Final = ("huggingface.co", ".huggingface.co", ".hf.co")
"""Hosts to which the public Hugging Face hub redirects for file contents."""


SecretName = Annotated[str, StringConstraints(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
"""Name of a Secret; empty: none."""
HubEndpoint = Annotated[str, StringConstraints(pattern=r"^(https?://[^ ]+)?$")]


class _Section(BaseModel):
    # forbid: a misspelt chart value must not be ignored
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class NamedValue(_Section):
    name: str
    value: str = ""


class EngineVersion(_Section):
    """One supported version of an engine."""

    image: str
    """The engine's image."""
    command: tuple[str, ...] = ()
    """Command that starts the server; Shoal's arguments follow it. Empty: that of the engine's own image."""
    args: tuple[str, ...] = ()
    """Platform arguments for every Model, such as --device cpu. A Model's own extraArgs come after these."""
    env: tuple[NamedValue, ...] = ()
    """Environment variables of every engine of this version."""


class EngineTable(_Section):
    """The supported versions of one engine."""

    default_version: str = ""
    """Version of Models that name none."""
    versions: dict[str, EngineVersion] = {}


class Engines(_Section):
    default_version: str
    versions: dict[str, EngineVersion]
    """Versions of SGLang."""
    vllm: EngineTable = EngineTable()
    """Versions of vLLM."""
    cpu_per_gpu: str = Field("4", alias="cpuPerGPU")
    """CPU request of an engine per GPU (a Quantity)."""
    memory_per_gpu: str = Field("32Gi", alias="memoryPerGPU")
    """Memory request and limit of an engine per GPU (a Quantity); /dev/shm counts towards it."""

    def undefined_default(self) -> str | None:
        """What is wrong with the default versions; None: each is in its table, or its table is empty."""
        tables = {"engines": EngineTable(default_version=self.default_version, versions=self.versions)}
        for section, table in (tables | {"engines.vllm": self.vllm}).items():
            if table.default_version not in table.versions and (table.default_version or table.versions):
                have = ", ".join(table.versions)
                return f"{section}.defaultVersion {table.default_version!r} is not one of {section}.versions: {have}"
        return None


class AgentImage(_Section):
    image: str
    """Shoal's image, for agent and stage containers."""
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
    """Key of the ConfigMap that contains the certificates."""


_HOST = r"^(\.?[A-Za-z0-9_]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:.]+(/[0-9]{1,3})?)$"
SourceHost = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=_HOST)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Sources(_Section):
    """Sources from which weights and adapters may be fetched. Metadata servers and link-local addresses are always
    refused."""

    allowed_hosts: tuple[SourceHost, ...] = ()
    """Hosts and networks with private addresses that sources may use, such as minio.storage.svc, ".example.com" (every
    name below it) or a CIDR. The mirror of the hub and the proxies are allowed implicitly."""
    allow_private_addresses: bool = False
    """Allows sources on every host with a private address, including your network and the cluster's Services."""
    redirect_hosts: tuple[SourceHost, ...] = HUB_STORES
    """Hosts to which a source's server may redirect, besides itself. Credentials are never sent to them."""
    folders: tuple[Annotated[str, StringConstraints(pattern=r"^/")], ...] = ("/opt/shoal",)
    """Folders of Shoal's image that `file://` sources may use. The default contains the models of the demo."""
    ports: tuple[Port, ...] = (443,)
    """TCP ports of sources, for the NetworkPolicies of pods that fetch. The ports of `hubEndpoint` and of the proxies
    are added. For a Service in the cluster most network plugins compare the port of its pods."""


_EXTERNAL_HOST = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.)+[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def _network(text: str) -> str:
    ipaddress.ip_network(text, strict=False)
    return text


class ExternalHost(_Section):
    """A host to which external targets of ModelRoutes may send requests."""

    host: Annotated[str, StringConstraints(max_length=253, pattern=_EXTERNAL_HOST)]
    """Name of the host, in lower case, with its domain."""
    port: Port = 443
    """Its port."""
    networks: tuple[Annotated[str, StringConstraints(max_length=64), AfterValidator(_network)], ...] = ()
    """Networks (CIDR) of private addresses that the host may have, such as 10.20.0.0/16. Public addresses are always
    allowed; the gateway itself, link-local addresses and metadata servers never are."""
    plain_http: bool = False
    """Allows targets without TLS. Prompts and API keys are then readable on the way."""


class ExternalConfig(_Section):
    """External targets of ModelRoutes."""

    allowed_hosts: tuple[ExternalHost, ...] = ()
    """Hosts that they may have; none: every external target is refused."""


class PriorityBand(_Section):
    """A PriorityClass for the engine pods of Models from a certain priority on."""

    name: str
    """Name of the PriorityClass."""
    minimum: int
    """The lowest `spec.priority` of the band."""
    value: int = Field(0, ge=-1_000_000_000, le=1_000_000_000)
    """Value of the PriorityClass that the chart makes. Kubernetes does not allow it to change: choose another name
    together with another value."""


class Pods(_Section):
    """Settings of all engine pods."""

    run_as_user: int = 65532
    """Numeric user and group of all containers of an engine pod."""
    run_as_root: bool = False
    """Runs engines as root, for an image that does not work with a numeric user. The pods then violate the restricted
    Pod Security Standard."""
    read_only_root: bool = True
    """Mounts the root file system of engines read-only; they write to /tmp, HOME and /dev/shm. Off: for an engine image
    that writes elsewhere."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of image pull secrets that exist in the namespace of each Model."""
    priority_class_name: str = ""
    """PriorityClass of all engine pods, in place of `priorityBands`."""
    priority_bands: tuple[PriorityBand, ...] = ()
    """PriorityClasses that the chart makes. The pods of a Model get the band with the highest `minimum` that does not
    exceed the Model's priority. The classes never preempt."""
    network_policy: bool = True
    """Makes a NetworkPolicy per Model: the engine port accepts gateways; the agent port accepts gateways, operators and
    the ledger."""
    scraper_namespaces: tuple[str, ...] = ()
    """Namespaces from which engine pods may be scraped; empty: none. If set, only these namespaces reach the metrics of
    Shoal's own processes."""


class Cache(_Section):
    """Settings of the node cache that the operator's objects depend on."""

    enabled: bool = False
    """Stage containers use the node cache. Off: each pod fetches into an emptyDir of its own."""
    host_path: str = "/var/lib/shoal/cache"
    """Folder of the cache on each node."""
    size: str = "500Gi"
    """Size limit of the cache on each node (a Quantity)."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that have a cache; empty: every Linux node. Engine pods that use the cache run only on these
    nodes."""


class Prometheus(_Section):
    """A Prometheus that scrapes agents and gateways."""

    url: str = Field(default="", pattern=r"^(https?://[^ ]+)?$")
    """Its URL, such as http://prometheus.monitoring.svc:9090."""
    scrape_seconds: int = Field(default=15, ge=1, le=300)
    """Scrape interval of agents and gateways. A sample that is older than three intervals counts as unknown."""
    timeout_seconds: int = Field(default=5, ge=1, le=60)
    """Timeout of a query, in seconds."""
    token_file: str = Field(default="", pattern=r"^(/[^ ]+)?$")
    """File with a bearer token for Prometheus, such as /var/run/secrets/kubernetes.io/serviceaccount/token; empty:
    none."""
    match: str = ""
    """Label matchers for all queries, such as cluster="east", for a Prometheus that covers several clusters."""


class Signals(_Section):
    """Where the operator gets load and demand from."""

    source: Literal["Streams", "Prometheus"] = "Streams"
    """Streams: directly from each agent and gateway, within milliseconds. Prometheus: from its samples, so a wake from
    zero waits for the next scrape; needs `prometheus.url`."""
    prometheus: Prometheus = Prometheus()
    """The Prometheus to query."""

    @model_validator(mode="after")
    def _has_a_url(self) -> Self:
        if self.source == "Prometheus" and not self.prometheus.url:
            raise ValueError("source Prometheus needs prometheus.url, such as http://prometheus.monitoring.svc:9090")
        return self


class DCGM(_Section):
    """Metrics of NVIDIA's DCGM exporter, in the Prometheus of `signals`."""

    match: str = ""
    """Label matchers of the exporter's own series, such as job="nvidia-dcgm-exporter". Who may write series with these
    labels can have GPUs taken out of use. Empty: the metrics are not read."""


class HealthSources(_Section):
    """What says that GPUs are not healthy, besides Kubernetes."""

    dcgm: DCGM = DCGM()
    """Metrics of NVIDIA's DCGM exporter, in the Prometheus of `signals`."""


class KEDA(_Section):
    """Connection between KEDA and the operator's external scaler, and settings of ScaledObjects."""

    address: str = ""
    """Host and port of the operator's external scaler, as KEDA reaches it. Empty: the Service shoal-scaler in Shoal's
    namespace."""
    tls: bool = True
    """Serves TLS; KEDA is given the CA certificate. Off: plain HTTP/2."""
    tls_secret_name: SecretName = ""
    """Secret of type kubernetes.io/tls with a ca.crt in the release's namespace, such as cert-manager makes, for the
    name shoal-scaler.NAMESPACE.svc. It is read again when it changes. Empty: the operator makes shoal-scaler-tls, and
    renews it."""
    polling_seconds: int = Field(default=5, ge=1, le=300)
    """Interval at which KEDA polls whether a Model has demand, in addition to the changes that the operator pushes."""


class Scaling(_Section):
    """What writes the replicas of Models."""

    driver: Driver = "BuiltIn"
    """Default driver of Models. KEDA: replicas are written by KEDA and its HPA, through ScaledObjects."""
    keda: KEDA = KEDA()
    """Settings of Models whose driver is KEDA."""


Sampler = Literal[
    "always_on",
    "always_off",
    "parentbased_always_on",
    "parentbased_always_off",
    "traceidratio",
    "parentbased_traceidratio",
]


def _decimal(pattern: str) -> JsonDict:
    """Schema of a number that may also be text: `helm --set a=0.5` passes decimals as strings."""
    return {"type": ["number", "string"], "pattern": f"^({pattern})$"}


class TracingConfig(_Section):
    """OpenTelemetry traces of requests and decisions."""

    endpoint: str = Field(default="", pattern=r"^(https?://[^ ]+)?$")
    """Endpoint of a collector that takes OTLP over HTTP, such as http://otel-collector.monitoring:4318. Empty: no
    traces."""
    sampler: Sampler = "parentbased_always_on"
    """Sampler of requests (OTEL_TRACES_SAMPLER). The parent-based samplers follow the client's `traceparent`, where a
    client sends one."""
    ratio: float = Field(default=1.0, ge=0, le=1, json_schema_extra=_decimal(r"0(\.[0-9]+)?|1(\.0+)?"))
    """Share of requests to trace, for the samplers with a ratio (OTEL_TRACES_SAMPLER_ARG)."""
    per_second: float = Field(default=100.0, gt=0, json_schema_extra=_decimal(r"[0-9]+(\.[0-9]+)?"))
    """Limit of traces per second and pod, whatever clients request."""
    engines: bool = False
    """Engines, SGLang and vLLM, send spans that join the trace of the gateway's request. Changing this setting rolls
    the engine pods. A custom image without OpenTelemetry does not start with it. vLLM's spans are not tested."""

    @model_validator(mode="after")
    def _has_an_endpoint(self) -> Self:
        if self.engines and not self.endpoint:
            raise ValueError("engines need endpoint, such as http://otel-collector.monitoring:4318")
        return self


class MTLS(_Section):
    """Mutual TLS between Shoal's processes, and in front of each engine."""

    enabled: bool = False
    """Processes present certificates that the operator issues. Turn it off where a service mesh already does this.
    Changing this setting rolls the engine pods."""
    trust_domain: str = Field(default="shoal.internal", pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")
    """Trust domain of the certificates' URIs (spiffe://TRUST DOMAIN/...)."""
    ca_secret_name: SecretName = ""
    """Secret of type kubernetes.io/tls in the release's namespace with a certificate authority (tls.crt, tls.key), such
    as a cert-manager Certificate with isCA. When it changes, the new authority is trusted before certificates of it are
    issued. Empty: the operator makes and renews an authority in the Secret shoal-ca."""
    certificate_hours: int = Field(default=168, ge=1, le=8760)
    """Lifetime of a certificate in hours. A certificate is renewed after a third of it, so the operator may be down for
    the other two thirds."""
    authority_days: int = Field(default=365, ge=1, le=3650)
    """Lifetime of the authority that the operator makes, in days. The next authority is made after two thirds of it."""


class Sidecar(_Section):
    """The TLS sidecar of each engine pod: Envoy, from Shoal's image."""

    cpu: str = "50m"
    """CPU request in each engine pod (a Quantity)."""
    memory: str = "256Mi"
    """Memory request and limit in each engine pod (a Quantity): 70 MiB, plus 128 KiB for each stream that its client
    reads too slowly."""


class TransportConfig(_Section):
    """Connections between Shoal's processes and engines."""

    mtls: MTLS = MTLS()
    """Mutual TLS between Shoal's processes, and in front of each engine."""
    sidecar: Sidecar = Sidecar()
    """The TLS sidecar of each engine pod: Envoy, from Shoal's image."""


class ExtProc(_Section):
    """Envoys that carry requests (docs/other-doors.md)."""

    enabled: bool = False
    """Engine pods with mutual TLS have a port for proxies, and each Model an InferencePool where that kind exists."""
    proxy_namespaces: tuple[str, ...] = ()
    """Namespaces from which that port is reached."""


class OperatorConfig(_Section):
    """The whole configuration file."""

    engines: Engines
    agent: AgentImage
    proxy: Proxy = Proxy()
    ca_bundle: CABundle = CABundle()
    hub_endpoint: HubEndpoint = ""
    """HF_ENDPOINT of the stage containers: a mirror of the Hugging Face hub. Empty: the hub."""
    sources: Sources = Sources()
    """Sources from which weights and adapters may be fetched."""
    pods: Pods = Pods()
    cache: Cache = Cache()
    signals: Signals = Signals()
    health: HealthSources = HealthSources()
    scaling: Scaling = Scaling()
    tracing: TracingConfig = TracingConfig()
    ext_proc: ExtProc = ExtProc()
    scope_namespaces: tuple[str, ...] = ()
    """Namespaces that Shoal reads and writes, including its own; empty: all."""
    metrics_auth: bool = False
    """Restricts the operator's /metrics to callers whose Kubernetes token is allowed to `get` it. /v1/decisions and
    /v1/adapters always need such a token, or one of a role."""
    role_tokens: bool = False
    """Whether /v1/decisions and /v1/adapters also answer people with a token of a role (docs/roles.md)."""
    transport: TransportConfig = TransportConfig()
    external: ExternalConfig = ExternalConfig()
    """External targets of ModelRoutes."""
    resync_seconds: float = 600.0
    log_level: str = "info"

    @model_validator(mode="after")
    def _has_metrics_of_gpus(self) -> Self:
        if self.health.dcgm.match and not self.signals.prometheus.url:
            raise ValueError(
                "health.dcgm.match needs signals.prometheus.url, such as http://prometheus.monitoring.svc:9090"
            )
        return self
