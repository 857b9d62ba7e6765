"""The values of charts/shoal, as models: values.yaml, its comments, its JSON schema and a table for the docs.

What the operator's configuration file has too is taken from `api/config.py`, so that chart and operator cannot differ.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from shoal.api.config import (
    MTLS,
    CABundle,
    EngineVersion,
    NamedValue,
    Pods,
    PriorityBand,
    Proxy,
    Scaling,
    Signals,
    Sources,
    TracingConfig,
    TransportConfig,
)

RUNBOOKS: Final = "https://github.com/shoal-dev/shoal/blob/main/docs/runbooks"
"""Where the alerts' pages are, unless a value says otherwise."""
Free = dict[str, Any]
"""Something that goes into an object as it is; Kubernetes' own API checks it."""
_SIZE: Final = r"^[1-9][0-9]*(Mi|Gi|Ti|M|G|T)$"


class Section(BaseModel):
    # forbid: a misspelt value must not be ignored
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class ImageValues(Section):
    repository: str = Field(default="ghcr.io/shoal-dev/shoal", min_length=1)
    """Shoal's image, of operator, gateway, ledger, agent and stage containers."""
    tag: str = ""
    """Tag. Default: the chart's appVersion."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Digest, `sha256:...`; wins over the tag."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of Shoal's image."""
    pull_secrets: tuple[str, ...] = ()
    """Names of pull secrets in the release's namespace. For engine pods see `pods.imagePullSecrets`."""


class PodValues(Section):
    """What the pods of operator, gateway and ledger have in common."""

    resources: Free
    """Requests and limits of the container."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes."""
    tolerations: tuple[Free, ...] = ()
    """Tolerations."""
    affinity: Free = {}
    """Affinity. Default: replicas prefer different nodes."""
    topology_spread_constraints: tuple[Free, ...] = ()
    """Topology spread constraints."""
    priority_class_name: str = ""
    """PriorityClass."""
    pod_labels: dict[str, str] = {}
    """Further labels of the pods."""
    pod_annotations: dict[str, str] = {}
    """Further annotations of the pods."""
    extra_env: tuple[Free, ...] = ()
    """Further environment variables, as in a container."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the ServiceAccount."""


class OperatorValues(PodValues):
    replicas: int = Field(default=2, ge=1, le=5)
    """Pods; one leads by a Lease, the others stand by."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    resync_seconds: int = Field(default=600, ge=10)
    """How often everything is listed anew, against missed watch events."""
    signals: Signals = Signals()
    """Where the operator hears of load and demand."""
    scaling: Scaling = Scaling()
    """Who writes replicas."""
    resources: Free = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Requests and limits of the container."""


class ServiceValues(Section):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    port: int = Field(default=80, ge=1, le=65535)
    """Port of the Service; 443 fits when `gateway.tls` is set."""
    annotations: dict[str, str] = {}
    """Annotations, such as those of a cloud's load balancer."""


class Persistence(Section):
    enabled: bool = True
    """Keep usage records on a volume. Without it a deleted pod's records that nobody took are lost."""
    size: str = "2Gi"
    """Size of each gateway's volume."""
    storage_class_name: str = ""
    """StorageClass; empty: the cluster's default."""


class Tls(Section):
    secret_name: str = ""
    """Secret of type kubernetes.io/tls in the release's namespace. Empty: plain HTTP. Reread when it changes."""


class Ingress(Section):
    enabled: bool = False
    """Make an Ingress."""
    class_name: str = ""
    """IngressClass."""
    annotations: dict[str, str] = {}
    """Annotations; streams need a long read timeout and no response buffering at the proxy."""
    host: str = ""
    """Host name; empty: every one."""
    tls_secret_name: str = ""
    """Secret with the certificate for the Ingress; empty: no TLS there."""


class HTTPRoute(Section):
    enabled: bool = False
    """Make an HTTPRoute of the Gateway API."""
    annotations: dict[str, str] = {}
    """Annotations."""
    parent_refs: tuple[Free, ...] = ()
    """Gateways that it attaches to."""
    hostnames: tuple[str, ...] = ()
    """Host names; empty: every one."""


class LogPersistence(Section):
    enabled: bool = False
    """Keep request logs on a volume of their own. Without it they are on an emptyDir and go with the pod. Choose at
    installation: Kubernetes adds no volume to a StatefulSet that is there (docs/chart.md says how to go about it)."""
    size: str = Field(default="5Gi", pattern=_SIZE)
    """Size of each gateway's volume; without `enabled`, bound of the emptyDir."""
    storage_class_name: str = ""
    """StorageClass; empty: the cluster's default."""


class LogBucket(Section):
    url: str = Field(default="", pattern=r"^((s3|gs|az)://[^ ]+)?$")
    """Where finished files go, such as s3://bucket/prefix (gs://, az://). Empty: they stay on the gateways."""
    secret_name: str = ""
    """Secret in the release's namespace that opens the bucket, with keys as in docs/sources.md. Empty: the identity of
    the gateways' ServiceAccount does."""


class LogEncryption(Section):
    secret_name: str = ""
    """Secret in the release's namespace: its key `current` (32 bytes) encrypts, each other one of it still reads.
    Empty: request logs are not encrypted."""


class RequestLogValues(Section):
    persistence: LogPersistence = LogPersistence()
    """Where the files are; nine tenths of it are used."""
    bucket: LogBucket = LogBucket()
    """An object store for them."""
    encryption: LogEncryption = LogEncryption()
    """Keys of their own for them."""


class GatewayMedia(Section):
    egress: bool = False
    """Gateways fetch the images and sounds that clients name by https, from the hosts that a Model's
    `media.allowedHosts` names (docs/models.md). Off: only `data:` URLs are taken. With `networkPolicy.gatewayEgress` it
    also opens port 443 of public addresses to gateways."""


class GatewayValues(PodValues):
    replicas: int = Field(default=2, ge=1)
    """Pods."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    installation: str = Field(default="shoal", min_length=1, max_length=128)
    """Names this installation: `source` of every usage record. Give each cluster its own, and never change it."""
    request_seconds: int = Field(default=900, ge=1)
    """Longest that one request may take at replicas; also decides the pods' termination grace period."""
    hold_seconds: int = Field(default=600, ge=0, le=3600)
    """Longest that a request waits for a replica, whatever its Model's `hold.timeoutSeconds` allows; also part of the
    grace period, because a gateway that stops keeps what waits until it is served or due."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Largest request body in bytes."""
    max_body_values: int = Field(default=1024 * 1024, ge=1024)
    """Most values of one request body; each token of a prompt that is sent as numbers is one. A decoded value takes up
    to 80 bytes of memory."""
    replica_header: bool = False
    """Tell clients which pod answered, in the header x-shoal-replica."""
    media: GatewayMedia = GatewayMedia()
    """Images and sounds of requests."""
    resources: Free = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Requests and limits of the container. What requests, answers and connections may hold follows from the memory
    limit (docs/gateway.md)."""
    service: ServiceValues = ServiceValues()
    """The Service `shoal-gateway`."""
    persistence: Persistence = Persistence()
    """The spool of usage records."""
    when_spool_full: Literal["Refuse", "Serve"] = "Refuse"
    """When usage can no longer be kept. Refuse: requests get a 503. Serve: they are served, and the records that are
    lost are counted."""
    request_log: RequestLogValues = RequestLogValues()
    """The request logs of those Tenants that ask for one with `logging`."""
    tls: Tls = Tls()
    """TLS at the gateway itself."""
    ingress: Ingress = Ingress()
    """An Ingress in front of the gateway."""
    http_route: HTTPRoute = HTTPRoute()
    """A route of the Gateway API in front of the gateway."""


class LedgerDatabase(Section):
    secret_name: str = ""
    """Secret in the release's namespace with the URL of a PostgreSQL database, such as
    postgresql://shoal:password@postgres.db.svc/shoal. Empty: SQLite on the ledger's volume."""
    key: str = Field(default="url", min_length=1)
    """Key of the Secret that holds the URL."""


class LedgerPersistence(Section):
    enabled: bool = True
    """Keep the SQLite file on a volume. Without it a deleted pod's usage records are lost, also those that gateways
    have taken off their spools. Not asked for with `ledger.database.secretName`."""
    size: str = Field(default="20Gi", pattern=_SIZE)
    """Size of the volume; docs/ledger.md says how much a record takes."""
    storage_class_name: str = ""
    """StorageClass; empty: the cluster's default. Not a network file system: SQLite needs locks that hold."""


class GatewayTokens(Section):
    enabled: bool = True
    """A gateway proves to the ledger from which pod it sends usage records (TokenReview of a token that the kubelet
    makes for the pod), and can send only its own. Off: who has the gateways' key can send records in the name of any
    gateway."""


class LedgerValues(PodValues):
    enabled: bool = True
    """Run the ledger. Without it usage records stay on the gateways' volumes, and nothing sums them up: budgets and
    `kubectl shoal usage` do not work, limits do."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    database: LedgerDatabase = LedgerDatabase()
    """PostgreSQL instead of SQLite."""
    persistence: LedgerPersistence = LedgerPersistence()
    """The volume of the SQLite file; it outlives the release."""
    gateway_tokens: GatewayTokens = GatewayTokens()
    """Whose records a gateway can send."""
    prices: dict[str, str] = {}
    """Price lists: file name -> text of the file. A change reaches the ledger within a minute or two, without a
    restart. `--set-file 'ledger.prices.2027\\.yaml=prices/2027.yaml'` takes a file as it is."""
    prices_config_map: str = Field(default="", alias="pricesConfigMap")
    """Instead: a ConfigMap in the release's namespace with a price list per key, such as GitOps makes."""
    retention_days: int = Field(default=92, ge=1, le=36500)
    """Days that single usage records are kept."""
    hours_retention_days: int = Field(default=1100, ge=32, le=36500)
    """Days that hourly sums are kept, from which bills are made."""
    resources: Free = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
    """Requests and limits of the container."""


class Simulator(Section):
    enabled: bool = False
    """Run `shoal sim engine` from Shoal's image instead of every engine of the table: for clusters without GPUs. That
    image must have been built with `make image DEV=1`."""
    args: tuple[str, ...] = ()
    """Arguments for each simulated engine, such as --sim-speed=4."""
    env: tuple[NamedValue, ...] = ()
    """Environment of each simulated engine."""


class Engines(Section):
    default_version: str = Field(default="0.5.23", min_length=1)
    """Version for Models that name none; a row of the table below."""
    versions: dict[str, EngineVersion] = {"0.5.23": EngineVersion(image="lmsysorg/sglang:v0.5.23")}
    """The engine table: version -> image, command, args (for every Model), env."""
    cpu_per_gpu: str = Field(default="4", alias="cpuPerGPU", min_length=1)
    """CPU request of an engine per GPU."""
    memory_per_gpu: str = Field(default="32Gi", alias="memoryPerGPU", min_length=1)
    """Memory request and limit of an engine per GPU; /dev/shm counts towards it."""
    simulator: Simulator = Simulator()
    """The engine simulator."""


class AgentValues(Section):
    cpu: str = Field(default="50m", min_length=1)
    """CPU request of the agent in each engine pod."""
    memory: str = Field(default="128Mi", min_length=1)
    """Memory request and limit of the agent in each engine pod."""


class NodeCache(Section):
    enabled: bool = True
    """Run the node cache, and let stage containers ask it. Needs a namespace that allows hostPath volumes. Off, each
    pod fetches into an emptyDir of its own and asks for ephemeral storage of 1.1 times its model."""
    host_path: str = Field(default="/var/lib/shoal/cache", pattern=r"^/[^ ]+$")
    """The cache's folder on each node."""
    size: str = Field(default="500Gi", pattern=r"^[1-9][0-9]*(Mi|Gi|Ti|M|G|T)?$")
    """Bound of what is kept on each node; the least recently used of what no pod uses goes first."""
    free_percent: int = Field(default=15, ge=0, le=90)
    """Share of the folder's disk that is left free. With less, a kubelet evicts pods: below 10 % of its own disk, or
    15 % of the images'. A disk that only the cache uses can do with 1."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that have a cache; empty: every Linux node. Engine pods run on these only."""
    tolerations: tuple[Free, ...] = ({"operator": "Exists"},)
    """Tolerations. GPU nodes are often tainted."""
    resources: Free = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Requests and limits of the container."""
    priority_class_name: str = ""
    """PriorityClass, such as system-node-critical: no engine starts on a node without its cache."""
    se_linux_options: Free = {}
    """For nodes that enforce SELinux: options by which the container may write the folder."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    pod_labels: dict[str, str] = {}
    """Further labels of the pods."""
    pod_annotations: dict[str, str] = {}
    """Further annotations of the pods."""
    extra_env: tuple[Free, ...] = ()
    """Further environment variables, as in a container."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the ServiceAccount."""


class NetworkPolicy(Section):
    enabled: bool = True
    """NetworkPolicies for operator, gateway and ledger. For engine pods see `pods.networkPolicy`."""
    api_servers: tuple[str, ...] = ()
    """Networks (CIDR) of the API servers, through whose proxy `kubectl shoal` reaches operator, gateways and ledger.
    Given: besides gateways nobody else reaches the ledger's port; empty: everyone, and the key alone decides. With
    `pods.scraperNamespaces`, or without `metrics.auth`, they are needed for `kubectl shoal top`, `why`, `adapters` and
    `logs`."""
    gateway_egress: bool = False
    """Gateways reach names, pods, private networks and `apiServers`, and beyond these what other values name: port 443
    of public addresses with `gateway.media.egress`, the port of `tracing.endpoint`, the bucket of request logs. An API
    server with a public address must stand in `apiServers`, by the address that pods call. Off: nothing bounds where
    gateways call but the gateways themselves."""


class ReaderValues(Section):
    name: str = Field(min_length=1)
    """Name of the ServiceAccount."""
    namespace: str = Field(min_length=1)
    """Its namespace."""


class Scope(Section):
    namespaces: tuple[str, ...] = ()
    """The namespaces whose Models, pools and adapters Shoal serves; empty: all. Given, operator, gateways and ledger
    get Roles there and in the release's namespace, and of the cluster they may read only what is in no namespace. They
    must exist."""


class MetricsAuth(Section):
    enabled: bool = True
    """The metrics of operator, gateway, ledger and node cache, and the operator's decisions, are for those alone whose
    Kubernetes token may `get` them (TokenReview and SubjectAccessReview, as kube-rbac-proxy does). Off: where a mesh
    does that; then only operator, gateways, `networkPolicy.apiServers` and `pods.scraperNamespaces` reach them."""
    readers: tuple[ReaderValues, ...] = ()
    """ServiceAccounts that may read the metrics: that of the Prometheus, `{name: ..., namespace: ...}`."""


class MetricsValues(Section):
    auth: MetricsAuth = MetricsAuth()
    """Who may read them."""


class DisruptionBudget(Section):
    enabled: bool = True
    """PodDisruptionBudgets for operator and gateway: a drain of nodes takes one pod at a time."""


class Rbac(Section):
    aggregate: bool = True
    """Let the cluster's own view, edit and admin roles cover Models (and view GPUClasses and Tenants)."""


class LoRAPoolPolicies(Section):
    enabled: bool = True
    """Refuse, when they are applied, a LoRAPool and a Model whose engine arguments do not go together, and a second
    pool for one Model. Off: their status says so."""


class ChildrenPolicy(Section):
    enabled: bool = True
    """Refuse that anybody but Shoal and the cluster's own controllers writes what Shoal made for a Model, or passes a
    pod off as an engine."""


class Admission(Section):
    lora_pools: LoRAPoolPolicies = LoRAPoolPolicies()
    """On LoRAPools and their Models."""
    children: ChildrenPolicy = ChildrenPolicy()
    """On what Shoal makes for a Model."""


class Monitor(Section):
    enabled: bool = False
    """Needs the CustomResourceDefinitions of the Prometheus operator."""
    interval: str = "15s"
    """Interval between scrapes."""
    labels: dict[str, str] = {}
    """Labels by which your Prometheus finds it."""


class ServiceMonitor(Monitor):
    bearer_token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    """With `metrics.auth`: where Prometheus has the token of its own ServiceAccount."""
    authorization: Free = {}
    """Instead of that file, an `authorization` of the endpoint, such as a Secret with a token."""


class PrometheusRule(Section):
    enabled: bool = False
    """Needs the CustomResourceDefinitions of the Prometheus operator."""
    labels: dict[str, str] = {}
    """Labels by which your Prometheus finds it."""
    runbook_base_url: str = RUNBOOKS
    """Where the alerts' pages are (`docs/runbooks`); your own copies, perhaps."""


class Dashboards(Section):
    enabled: bool = False
    """Make a ConfigMap of each Grafana board, as the sidecar of Grafana's chart reads them."""
    labels: dict[str, str] = {"grafana_dashboard": "1"}
    """Labels by which your Grafana finds them."""
    annotations: dict[str, str] = {"grafana_folder": "Shoal"}
    """Annotations: the sidecar puts the boards into this folder, where its `folderAnnotation` is `grafana_folder`."""


class Values(Section):
    image: ImageValues = ImageValues()
    """Shoal's own image."""
    common_labels: dict[str, str] = {}
    """Labels for every object of the chart."""
    operator: OperatorValues = OperatorValues()
    """The operator."""
    gateway: GatewayValues = GatewayValues()
    """The gateway: the OpenAI API."""
    ledger: LedgerValues = LedgerValues()
    """The ledger: what each tenant used."""
    engines: Engines = Engines()
    """Which engines there are."""
    agent: AgentValues = AgentValues()
    """The agent, beside each engine."""
    cache: NodeCache = NodeCache()
    """The node cache: each model is fetched once per node."""
    pods: Pods = Pods(
        priority_bands=(
            PriorityBand(name="shoal-low", minimum=-1000, value=1000),
            PriorityBand(name="shoal-default", minimum=0, value=2000),
            PriorityBand(name="shoal-high", minimum=100, value=3000),
        )
    )
    """What every engine pod gets."""
    proxy: Proxy = Proxy()
    """HTTP proxy for staging weights."""
    ca_bundle: CABundle = CABundle()
    """Further CA certificates for staging weights."""
    hub_endpoint: str = ""
    """A mirror of the Hugging Face hub, such as https://hub.example.com. Empty: the hub."""
    sources: Sources = Sources()
    """From where weights and adapters may be fetched (docs/sources.md)."""
    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces (docs/tracing.md)."""
    transport: TransportConfig = TransportConfig(mtls=MTLS(enabled=True))
    """How Shoal's processes reach each other and the engines (docs/transport.md)."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach Shoal's own pods."""
    pod_disruption_budget: DisruptionBudget = DisruptionBudget()
    """Drains of nodes."""
    rbac: Rbac = Rbac()
    """Roles for people."""
    admission: Admission = Admission()
    """ValidatingAdmissionPolicies, which the API server itself evaluates (policies/admission)."""
    scope: Scope = Scope()
    """Which namespaces Shoal may read and write."""
    metrics: MetricsValues = MetricsValues()
    """Metrics of Shoal's own processes."""
    service_monitor: ServiceMonitor = ServiceMonitor()
    """A ServiceMonitor for operator, gateway, ledger and node cache."""
    pod_monitor: Monitor = Monitor()
    """A PodMonitor for the agents of all engine pods."""
    prometheus_rule: PrometheusRule = PrometheusRule()
    """Recording rules and alerts."""
    dashboards: Dashboards = Dashboards()
    """Grafana boards: fleet, Model, gateway, tenant, adapters, GPU classes and cost."""
    extra_objects: tuple[Free, ...] = ()
    """Further objects to install with the chart, rendered as templates."""
