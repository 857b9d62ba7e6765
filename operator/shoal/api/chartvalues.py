"""The values of charts/shoal as models. values.yaml, its comments, its JSON schema and a table in the docs are
generated from them.

Settings that the operator's configuration file also has are taken from `api/config.py`, so chart and operator agree.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from shoal.api.config import (
    MTLS,
    CABundle,
    EngineVersion,
    ExternalHost,
    HealthSources,
    HubEndpoint,
    NamedValue,
    Pods,
    PriorityBand,
    Proxy,
    Scaling,
    SecretName,
    Signals,
    Sources,
    TracingConfig,
    TransportConfig,
)

RUNBOOKS: Final = "https://github.com/shoal-dev/shoal/blob/main/docs/runbooks"
"""Default location of the runbooks of alerts."""
Free = dict[str, Any]
"""Part of a Kubernetes object, passed through unchanged and validated by the API server."""
_SIZE: Final = r"^[1-9][0-9]*(Mi|Gi|Ti|M|G|T)$"


class Section(BaseModel):
    # forbid: a misspelt value must not be ignored
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class ImageValues(Section):
    repository: str = Field(default="ghcr.io/shoal-dev/shoal", min_length=1)
    """Repository of Shoal's image, for operator, gateway, ledger, agent and stage containers."""
    tag: str = ""
    """Tag of the image. Default: the chart's appVersion."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Digest of the image, `sha256:...`; overrides the tag."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of Shoal's image."""
    pull_secrets: tuple[str, ...] = ()
    """Names of image pull secrets in the release's namespace. For engine pods see `pods.imagePullSecrets`."""


class PodValues(Section):
    """Settings that the pods of operator, gateway and ledger have in common."""

    resources: Free
    """Resource requests and limits of the container."""
    node_selector: dict[str, str] = {}
    """Node selector of the pods."""
    tolerations: tuple[Free, ...] = ()
    """Tolerations of the pods."""
    affinity: Free = {}
    """Affinity of the pods. Default: prefers different nodes for replicas."""
    topology_spread_constraints: tuple[Free, ...] = ()
    """Topology spread constraints of the pods."""
    priority_class_name: str = ""
    """PriorityClass of the pods."""
    pod_labels: dict[str, str] = {}
    """Additional labels of the pods."""
    pod_annotations: dict[str, str] = {}
    """Additional annotations of the pods."""
    extra_env: tuple[Free, ...] = ()
    """Additional environment variables, as in a container."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the ServiceAccount."""


class OperatorValues(PodValues):
    replicas: int = Field(default=2, ge=1, le=5)
    """Number of pods. One is the leader, by a Lease; the others are on standby."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    resync_seconds: int = Field(default=600, ge=10)
    """Interval in seconds at which everything is listed again, in case watch events were missed."""
    signals: Signals = Signals()
    """Where the operator gets load and demand from."""
    health: HealthSources = HealthSources()
    """What says that GPUs are not healthy, besides Kubernetes."""
    scaling: Scaling = Scaling()
    """What writes the replicas of Models."""
    resources: Free = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Resource requests and limits of the container."""


class ServiceValues(Section):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    port: int = Field(default=80, ge=1, le=65535)
    """Port of the Service; use 443 with `gateway.tls`."""
    annotations: dict[str, str] = {}
    """Annotations, such as those of a cloud's load balancer."""


class Persistence(Section):
    enabled: bool = True
    """Keeps usage records on a volume. Off: records that the ledger does not have yet are lost with the pod."""
    size: str = Field(default="2Gi", pattern=_SIZE)
    """Size of each gateway's volume."""
    storage_class_name: str = ""
    """StorageClass; empty: the cluster's default."""


class Tls(Section):
    secret_name: SecretName = ""
    """Secret of type kubernetes.io/tls in the release's namespace, read again when it changes. Empty: plain HTTP."""


class Ingress(Section):
    enabled: bool = False
    """Creates an Ingress."""
    class_name: str = ""
    """IngressClass."""
    annotations: dict[str, str] = {}
    """Annotations of the Ingress. Streams need a long read timeout and no response buffering at the proxy."""
    host: str = ""
    """Host name; empty: all hosts."""
    tls_secret_name: SecretName = ""
    """Secret with the certificate of the Ingress; empty: no TLS."""


class HTTPRoute(Section):
    enabled: bool = False
    """Creates an HTTPRoute of the Gateway API."""
    annotations: dict[str, str] = {}
    """Annotations."""
    parent_refs: tuple[Free, ...] = ()
    """Gateways that the route attaches to."""
    hostnames: tuple[str, ...] = ()
    """Host names; empty: all hosts."""
    request_timeout: str = Field(default="0s", pattern=r"^(([0-9]{1,5}(h|m|s|ms)){1,4})?$")
    """Time after which the proxy ends a request; 0s: none, since gateways have limits of their own. Empty: the field
    `timeouts` is left out, for implementations that refuse it; their own default then cuts long answers."""


class LogPersistence(Section):
    enabled: bool = False
    """Keeps request logs on a volume of their own. Off: they are on an emptyDir and are deleted with the pod. Choose at
    installation: Kubernetes cannot add a volume to an existing StatefulSet (docs/chart.md describes a way around
    this)."""
    size: str = Field(default="5Gi", pattern=_SIZE)
    """Size of each gateway's volume; without `enabled`, size limit of the emptyDir."""
    storage_class_name: str = ""
    """StorageClass; empty: the cluster's default."""


class LogBucket(Section):
    url: str = Field(default="", pattern=r"^((s3|gs|az)://[^ ]+)?$")
    """Bucket for finished log files, such as s3://bucket/prefix (gs://, az://). Empty: they stay on the gateways."""
    secret_name: SecretName = ""
    """Secret in the release's namespace with credentials of the bucket; keys as in docs/sources.md. Empty: the identity
    of the gateways' ServiceAccount is used."""


class LogEncryption(Section):
    secret_name: SecretName = ""
    """Secret in the release's namespace. Its key `current` (32 bytes) encrypts; all its keys decrypt. Empty: request
    logs are not encrypted."""


class RequestLogValues(Section):
    persistence: LogPersistence = LogPersistence()
    """Storage of the log files; at most nine tenths of it are used."""
    bucket: LogBucket = LogBucket()
    """Object store for the log files."""
    encryption: LogEncryption = LogEncryption()
    """Encryption of the log files."""


class GatewayMedia(Section):
    egress: bool = False
    """Gateways fetch images and audio that clients reference by https URL, from the hosts in a Model's
    `media.allowedHosts` (docs/models.md). Off: only `data:` URLs are accepted. With `networkPolicy.gatewayEgress` it
    also opens port 443 of public addresses to gateways."""


class GatewayExternal(Section):
    allowed_hosts: tuple[ExternalHost, ...] = ()
    """Hosts to which gateways may send requests for external targets of ModelRoutes (docs/modelroutes.md). Empty: every
    external target is refused. With `networkPolicy.gatewayEgress` it also opens their ports to gateways."""


class GatewayAutoscaling(Section):
    enabled: bool = False
    """Creates a HorizontalPodAutoscaler for the gateways, which then writes their number."""
    min_replicas: int = Field(default=2, ge=1)
    """Least number of pods."""
    max_replicas: int = Field(default=10, ge=1)
    """Largest number of pods."""
    cpu: str = Field(default="700m", pattern=r"^([0-9]+m|[0-9]+(\.[0-9]+)?)$")
    """Target of the average CPU use of a pod, in cores. A gateway is one process and uses at most one core. Needs the
    metrics server."""
    in_flight: int = Field(default=0, ge=0)
    """Target of the average number of requests in progress per pod, `shoal_gateway_requests_in_flight`. Needs an
    adapter that serves this metric of the pods, such as prometheus-adapter. 0: not used."""


class ExtProcTLS(Section):
    enabled: bool = True
    """Serves TLS. Off: plain HTTP/2, where a mesh encrypts it."""
    secret_name: SecretName = ""
    """Secret of type kubernetes.io/tls in the release's namespace, read again when it changes. Empty: the gateways' own
    certificate (Secret shoal-gateway-tls), which needs `transport.mtls`."""
    client_certificates: bool = False
    """Requires of proxies a certificate that the ca.crt of `secretName` signed."""


class ExtProcValues(Section):
    enabled: bool = False
    """Gateways also answer Envoy's external processing (port 9002), and the operator makes an InferencePool per Model
    where that kind exists (docs/other-doors.md)."""
    proxy_namespaces: tuple[str, ...] = ()
    """Namespaces of the proxies. With network policies only they reach this port and the engines' port for proxies.
    A caller that reaches both and has a tenant's key can be served without being metered: name no namespace of
    tenants."""
    tls: ExtProcTLS = ExtProcTLS()
    """TLS of the port that proxies ask on."""


class GatewayValues(PodValues):
    replicas: int = Field(default=2, ge=1)
    """Number of pods. With `gateway.autoscaling` only the number at installation by Helm; tools that render the chart
    without a cluster (Argo CD) start with one, and need a setting when it is turned on (docs/gitops.md)."""
    autoscaling: GatewayAutoscaling = GatewayAutoscaling()
    """Number of gateways by their load."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    installation: str = Field(default="shoal", min_length=1, max_length=128)
    """Name of this installation: `source` of every usage record. Use a different name in each cluster, and never change
    it."""
    request_seconds: int = Field(default=900, ge=1)
    """Longest time that a request may take at replicas, in seconds. It also determines the pods' termination grace
    period."""
    hold_seconds: int = Field(default=600, ge=0, le=3600)
    """Longest time that a request is held, in seconds. A Model's `hold.timeoutSeconds` may be shorter. It is added to
    the termination grace period, because a terminating gateway keeps held requests until they are served or time
    out."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Limit for the size of a request body in bytes."""
    max_form_bytes: int = Field(default=26 * 1024 * 1024, ge=1024)
    """Limit for a form with a sound file in bytes: a file of 25 MiB, and the fields beside it. Or
    `maxBodyBytes`, where that is larger."""
    max_body_values: int = Field(default=1024 * 1024, ge=1024)
    """Limit of JSON values in a request body; each token of a prompt sent as numbers is one. A decoded value takes up
    to 80 bytes of memory."""
    routing: Literal["Seconds", "PrefixHeads"] = "Seconds"
    """How a request to a Model with several replicas gets one. Seconds: where it costs least, by predicted seconds
    until its first token. PrefixHeads: by the beginning of its prompt, within the replica's share of the load."""
    replica_header: bool = False
    """Tells clients which pod answered, in the header x-shoal-replica."""
    media: GatewayMedia = GatewayMedia()
    """Images and audio in requests."""
    external: GatewayExternal = GatewayExternal()
    """External targets of ModelRoutes."""
    resources: Free = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Resource requests and limits of the container. Buffers for requests, answers and connections are derived from the
    memory limit (docs/gateway.md)."""
    service: ServiceValues = ServiceValues()
    """The Service `shoal-gateway`."""
    persistence: Persistence = Persistence()
    """The spool of usage records."""
    when_spool_full: Literal["Refuse", "Serve"] = "Refuse"
    """Behaviour when the spool of usage records is full. Refuse: requests get a 503. Serve: requests are served, and
    the lost records are counted."""
    request_log: RequestLogValues = RequestLogValues()
    """Request logs of Tenants that enable `logging`."""
    tls: Tls = Tls()
    """TLS at the gateway itself."""
    ingress: Ingress = Ingress()
    """An Ingress in front of the gateway."""
    http_route: HTTPRoute = HTTPRoute()
    """A route of the Gateway API in front of the gateway."""
    ext_proc: ExtProcValues = ExtProcValues()
    """Envoy, Istio or kgateway carry the requests, and gateways decide on them."""


class LedgerDatabase(Section):
    secret_name: SecretName = ""
    """Secret in the release's namespace with the URL of a PostgreSQL database, such as
    postgresql://shoal:password@postgres.db.svc/shoal. Empty: SQLite on the ledger's volume."""
    key: str = Field(default="url", min_length=1)
    """Key of the Secret that holds the URL."""


class LedgerPersistence(Section):
    enabled: bool = True
    """Keeps the SQLite file on a volume. Off: usage records are lost with the pod, including those that gateways have
    already deleted from their spools. Not used with `ledger.database.secretName`."""
    size: str = Field(default="20Gi", pattern=_SIZE)
    """Size of the volume; docs/ledger.md states the size of a record."""
    storage_class_name: str = ""
    """StorageClass; empty: the cluster's default. Do not use a network file system: SQLite needs reliable locks."""


class GatewayTokens(Section):
    enabled: bool = True
    """Each gateway proves to the ledger from which pod it sends usage records (TokenReview of the pod's projected
    token), and can send only its own records. Off: anyone with the gateways' key can send records in the name of any
    gateway."""


class LedgerValues(PodValues):
    enabled: bool = True
    """Runs the ledger. Off: usage records stay on the gateways' volumes and are not summed up; budgets and `kubectl
    shoal usage` do not work, rate limits do."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    database: LedgerDatabase = LedgerDatabase()
    """PostgreSQL in place of SQLite."""
    persistence: LedgerPersistence = LedgerPersistence()
    """The volume of the SQLite file; it is kept when the release is deleted."""
    gateway_tokens: GatewayTokens = GatewayTokens()
    """Verification of the gateway that sends usage records."""
    prices: dict[str, str] = {}
    """Price lists: file name -> content. A change reaches the ledger within two minutes, without a restart. `--set-file
    'ledger.prices.2027\\.yaml=prices/2027.yaml'` sets a file."""
    prices_config_map: str = Field(default="", alias="pricesConfigMap")
    """ConfigMap in the release's namespace with one price list per key, in place of `prices`, for instance made by
    GitOps."""
    retention_days: int = Field(default=92, ge=1, le=36500)
    """Days for which single usage records are kept."""
    hours_retention_days: int = Field(default=1100, ge=32, le=36500)
    """Days for which hourly sums are kept. Bills are made from them."""
    resources: Free = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
    """Resource requests and limits of the container."""


class Simulator(Section):
    enabled: bool = False
    """Runs `shoal sim engine` from Shoal's image in place of every engine, for clusters without GPUs. The image must be
    built with `make image DEV=1`."""
    args: tuple[str, ...] = ()
    """Arguments for each simulated engine, such as --sim-speed=4."""
    env: tuple[NamedValue, ...] = ()
    """Environment variables of each simulated engine."""


class VLLMVersions(Section):
    default_version: str = Field(default="0.32.0", min_length=1)
    """Version of vLLM for Models that name none; must be a key of `versions`."""
    versions: dict[str, EngineVersion] = {"0.32.0": EngineVersion(image="vllm/vllm-openai:v0.32.0")}
    """Versions of vLLM: version -> image, command, args (for every Model) and env."""


class Engines(Section):
    default_version: str = Field(default="0.5.23", min_length=1)
    """Version of SGLang for Models that name none; must be a key of `versions`."""
    versions: dict[str, EngineVersion] = {"0.5.23": EngineVersion(image="lmsysorg/sglang:v0.5.23")}
    """Versions of SGLang: version -> image, command, args (for every Model) and env."""
    vllm: VLLMVersions = VLLMVersions()
    """Versions of vLLM, for Models with `spec.engine.type: vLLM`."""
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
    """Runs the node cache and lets stage containers use it. It needs a namespace that allows hostPath volumes. Off:
    each pod fetches into an emptyDir of its own and requests ephemeral storage of 1.1 times the size of its model."""
    host_path: str = Field(default="/var/lib/shoal/cache", pattern=r"^/[^ ]+$")
    """Folder of the cache on each node."""
    size: str = Field(default="500Gi", pattern=r"^[1-9][0-9]*(Mi|Gi|Ti|M|G|T)?$")
    """Size limit of the cache on each node. Models that no pod uses are evicted, least recently used first."""
    free_percent: int = Field(default=15, ge=0, le=90)
    """Share of the folder's disk, in percent, that is kept free. The kubelet evicts pods when less than 10 % of its own
    disk or 15 % of the image disk is free. Use 1 for a disk that only the cache uses."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that have a cache; empty: every Linux node. Engine pods run only on these nodes."""
    tolerations: tuple[Free, ...] = ({"operator": "Exists"},)
    """Tolerations of the pods. GPU nodes are often tainted."""
    resources: Free = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    """Resource requests and limits of the container."""
    priority_class_name: str = ""
    """PriorityClass of the pods, such as system-node-critical: without the cache no engine starts on a node."""
    se_linux_options: Free = {}
    """SELinux options of the container, for nodes that enforce SELinux: they must allow it to write the folder."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    pod_labels: dict[str, str] = {}
    """Additional labels of the pods."""
    pod_annotations: dict[str, str] = {}
    """Additional annotations of the pods."""
    extra_env: tuple[Free, ...] = ()
    """Additional environment variables, as in a container."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the ServiceAccount."""


class NetworkPolicy(Section):
    enabled: bool = True
    """Creates NetworkPolicies for operator, gateway and ledger. For engine pods see `pods.networkPolicy`."""
    api_servers: tuple[str, ...] = ()
    """Networks (CIDR) of the API servers, through whose proxy `kubectl shoal` reaches operator, gateways and ledger. If
    set, only they and gateways reach the ledger's port; if empty, everyone does, and access depends on the key alone.
    With `pods.scraperNamespaces`, or without `metrics.auth`, they are required for `kubectl shoal top`, `why`,
    `adapters` and `logs`."""
    gateway_egress: bool = False
    """Restricts the egress of gateways to DNS, pods, private networks and `apiServers`, and to targets that other
    values require: port 443 of public addresses with `gateway.media.egress`, the ports of
    `gateway.external.allowedHosts`, the port of `tracing.endpoint`, the bucket of request logs. An API server with a
    public address must be in `apiServers`, with the address that pods connect to. Off: egress is not restricted."""


class ReaderValues(Section):
    name: str = Field(min_length=1)
    """Name of the ServiceAccount."""
    namespace: str = Field(min_length=1)
    """Namespace of the ServiceAccount."""


class Scope(Section):
    namespaces: tuple[str, ...] = ()
    """Namespaces whose Models, pools and adapters Shoal serves; empty: all. If set, operator, gateways and ledger get
    Roles there and in the release's namespace, and their ClusterRoles only read cluster-scoped objects. The namespaces
    must exist."""


class MetricsAuth(Section):
    enabled: bool = True
    """Restricts the metrics of operator, gateway, ledger and node cache to callers whose Kubernetes token is allowed to
    `get` them (TokenReview and SubjectAccessReview, as kube-rbac-proxy does). Turn it off where a mesh does this; then
    only operator, gateways, `networkPolicy.apiServers` and `pods.scraperNamespaces` reach the ports of metrics. The
    operator's decisions need a token in any case."""
    readers: tuple[ReaderValues, ...] = ()
    """ServiceAccounts that may read the metrics, such as that of Prometheus: `{name: ..., namespace: ...}`."""


class MetricsValues(Section):
    auth: MetricsAuth = MetricsAuth()
    """Access to the metrics."""


class DisruptionBudget(Section):
    enabled: bool = True
    """Creates PodDisruptionBudgets for operator and gateway: a node drain evicts one pod at a time."""


class RoleValues(Section):
    enabled: bool = True
    """Creates ClusterRoles for people who see usage, bills, request logs, load and decisions without a key
    (docs/roles.md). Ledger, operator and gateways then ask the API server who calls (TokenReview and
    SubjectAccessReview)."""
    viewer_namespaces: tuple[str, ...] = ()
    """Namespaces with a ServiceAccount `shoal-viewer`. Users bound to the ClusterRole `shoal-viewer` there see
    that namespace in `kubectl shoal top`, `why`, `adapters` and `usage`. The namespaces must exist."""
    reach_groups: tuple[str, ...] = ()
    """Groups that may call the ledger, the operator and the gateways' ports for operations through the API server's
    proxy, such as `system:authenticated`; all of them answer only those who have a role. Needed by people who see
    single namespaces."""


class Rbac(Section):
    roles: RoleValues = RoleValues()
    """Roles for people who use `kubectl shoal`."""
    aggregate: bool = True
    """Aggregates permissions on Models to the cluster's view, edit and admin roles (view also covers GPUClasses and
    Tenants)."""


class LoRAPoolPolicies(Section):
    enabled: bool = True
    """Refuses on apply a LoRAPool and a Model whose engine arguments are incompatible, and a second pool for one Model.
    Off: only their status reports it."""


class ChildrenPolicy(Section):
    enabled: bool = True
    """Refuses writes to objects that Shoal made for a Model, and pods that pose as engines, except from Shoal and the
    cluster's own controllers."""


class NodesPolicy(Section):
    enabled: bool = True
    """Lets the operator change labels `quarantine.shoal.dev/CLASS` of nodes and nothing else of them: RBAC cannot
    narrow its right to patch nodes."""


class Admission(Section):
    lora_pools: LoRAPoolPolicies = LoRAPoolPolicies()
    """Policies on LoRAPools and their Models."""
    children: ChildrenPolicy = ChildrenPolicy()
    """Policies on objects that Shoal makes for a Model."""
    nodes: NodesPolicy = NodesPolicy()
    """Policies on what the operator may do to nodes."""


class Monitor(Section):
    enabled: bool = False
    """Creates the object. It needs the CustomResourceDefinitions of the Prometheus operator."""
    interval: str = "15s"
    """Scrape interval."""
    labels: dict[str, str] = {}
    """Labels by which your Prometheus selects the object."""


class ServiceMonitor(Monitor):
    bearer_token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    """With `metrics.auth`: path of the token of Prometheus' own ServiceAccount."""
    authorization: Free = {}
    """`authorization` of the endpoint, such as a Secret with a token, in place of that file."""


class PrometheusRule(Section):
    enabled: bool = False
    """Creates the object. It needs the CustomResourceDefinitions of the Prometheus operator."""
    labels: dict[str, str] = {}
    """Labels by which your Prometheus selects the object."""
    runbook_base_url: str = RUNBOOKS
    """URL of the alerts' runbooks (`docs/runbooks`), such as that of your own copies."""


class Dashboards(Section):
    enabled: bool = False
    """Creates a ConfigMap for each Grafana dashboard, in the format of the sidecar of Grafana's chart."""
    labels: dict[str, str] = {"grafana_dashboard": "1"}
    """Labels by which your Grafana selects them."""
    annotations: dict[str, str] = {"grafana_folder": "Shoal"}
    """Annotations. The sidecar puts the dashboards into this folder if its `folderAnnotation` is `grafana_folder`."""


class Values(Section):
    image: ImageValues = ImageValues()
    """Shoal's image."""
    common_labels: dict[str, str] = {}
    """Labels for every object of the chart."""
    operator: OperatorValues = OperatorValues()
    """The operator."""
    gateway: GatewayValues = GatewayValues()
    """The gateway: the OpenAI API."""
    ledger: LedgerValues = LedgerValues()
    """The ledger: usage and bills of tenants."""
    engines: Engines = Engines()
    """The engines."""
    agent: AgentValues = AgentValues()
    """The agent in each engine pod."""
    cache: NodeCache = NodeCache()
    """The node cache, which fetches each model once per node."""
    pods: Pods = Pods(
        priority_bands=(
            PriorityBand(name="shoal-low", minimum=-1000, value=1000),
            PriorityBand(name="shoal-default", minimum=0, value=2000),
            PriorityBand(name="shoal-high", minimum=100, value=3000),
        )
    )
    """Settings of all engine pods."""
    proxy: Proxy = Proxy()
    """HTTP proxy for fetching weights."""
    ca_bundle: CABundle = CABundle()
    """Additional CA certificates for fetching weights."""
    hub_endpoint: HubEndpoint = ""
    """A mirror of the Hugging Face hub, such as https://hub.example.com. Empty: the hub."""
    sources: Sources = Sources()
    """Sources from which weights and adapters may be fetched (docs/sources.md)."""
    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces (docs/tracing.md)."""
    transport: TransportConfig = TransportConfig(mtls=MTLS(enabled=True))
    """Connections between Shoal's processes and engines (docs/transport.md)."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Network access to Shoal's own pods."""
    pod_disruption_budget: DisruptionBudget = DisruptionBudget()
    """Protection during node drains."""
    rbac: Rbac = Rbac()
    """Roles for users."""
    admission: Admission = Admission()
    """ValidatingAdmissionPolicies, evaluated by the API server (policies/admission)."""
    scope: Scope = Scope()
    """Namespaces that Shoal may read and write."""
    metrics: MetricsValues = MetricsValues()
    """Metrics of Shoal's own processes."""
    service_monitor: ServiceMonitor = ServiceMonitor()
    """A ServiceMonitor for operator, gateway, ledger and node cache."""
    pod_monitor: Monitor = Monitor()
    """A PodMonitor for the agents of all engine pods."""
    prometheus_rule: PrometheusRule = PrometheusRule()
    """Recording rules and alerts."""
    dashboards: Dashboards = Dashboards()
    """Grafana dashboards: fleet, Model, gateway, tenant, adapters, GPU classes and cost."""
    extra_objects: tuple[Free, ...] = ()
    """Additional objects to install with the chart, rendered as templates."""
