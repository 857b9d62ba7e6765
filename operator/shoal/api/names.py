"""Names that two parts of Shoal agree on: labels, annotations, ports, paths, field managers.

They are in one file so that both ends of each agreement are found, and renamed, in one place.
"""

from typing import Final

from shoal.api.meta import GROUP

# --- labels ---------------------------------------------------------------------------------------------------------
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "shoal"

LABEL_MODEL: Final = f"{GROUP}/model"
"""Name of the Model, on every object made for it. A pod with this label and LABEL_COMPONENT=engine is an engine pod."""
LABEL_MODEL_UID: Final = f"{GROUP}/model-uid"
LABEL_GPU_CLASS: Final = f"{GROUP}/gpu-class"
LABEL_POOL: Final = f"{GROUP}/lora-pool"
"""Name of the LoRAPool, on the Jobs that read its adapters' metadata."""
QUARANTINE_PREFIX: Final = f"quarantine.{GROUP}/"
"""On nodes: the GPUs of the GPUClass whose name follows are out of use there. Engine pods of the class avoid the node;
other pods do not. The value is the reason."""
COMPONENT_ENGINE: Final = "engine"
COMPONENT_GATEWAY: Final = "gateway"
COMPONENT_OPERATOR: Final = "operator"
COMPONENT_FACTS: Final = "facts"
"""The Job that reads a source's metadata."""
COMPONENT_ADAPTER_FACTS: Final = "adapter-facts"
"""The Job that reads the metadata of a batch of adapters."""
COMPONENT_PREFETCH: Final = "prefetch"
"""The Job that asks a node's cache for weights before a replica does."""
COMPONENT_LEDGER: Final = "ledger"
COMPONENT_CACHE: Final = "cache"
"""The node cache: a DaemonSet in Shoal's namespace."""

# --- annotations ----------------------------------------------------------------------------------------------------
ANNOTATION_INSTALL_KEY: Final = f"{GROUP}/install-key"
"""On engine pods: fingerprint of the install key from which the pod's keys were derived (`keys.fingerprint`)."""
ANNOTATION_KEYS: Final = f"{GROUP}/keys"
"""On gateways: the generation of keys that they know. Absent: only the install key of version 0.1."""
ANNOTATION_ENGINE: Final = f"{GROUP}/engine"
"""On engine pods: type of the engine, as in `spec.engine.type`. Absent: SGLang."""
ANNOTATION_ENGINE_VERSION: Final = f"{GROUP}/engine-version"
ANNOTATION_TOOLS: Final = f"{GROUP}/tools"
"""On engine pods, "compiled": the engine may make a grammar of the schemas of all tools that it is sent."""
TOOLS_COMPILED: Final = "compiled"
ANNOTATION_MEDIA: Final = f"{GROUP}/media"
"""On engine pods, "none": the engine reads text only, though one reads images or sound with such weights, by its type
or its arguments."""
MEDIA_NONE: Final = "none"
ANNOTATION_PAUSED: Final = f"{GROUP}/paused"
"""On a Model, "true": Shoal makes decisions, does not apply them, and reports that in the status."""
ANNOTATION_WAKE: Final = f"{GROUP}/wake"
"""On a Model, a time (RFC 3339): counts as a request at that time (`kubectl shoal wake`)."""
ANNOTATION_NODE: Final = f"{GROUP}/node"
"""On a Job that asks a node's cache for weights: the node's name."""
ANNOTATION_READS: Final = f"{GROUP}/reads"
"""On a Job that reads adapters: the `read_by` of each, separated by blanks. A restarted operator thereby knows which
adapters are being read."""

ANNOTATION_LAYER: Final = f"{GROUP}/layer"
"""On Shoal's events: the layer of the reason, such as `L4` (core/layers/layer.py)."""

ANNOTATION_TRANSPORT: Final = f"{GROUP}/transport"
"""On pods of Shoal and of engines, TRANSPORT_MTLS: the pod serves mutual TLS on separate ports. Absent: plain HTTP."""
TRANSPORT_MTLS: Final = "mtls"
ANNOTATION_CERTIFICATE: Final = f"{GROUP}/certificate"
"""On Secrets with a certificate: its dates, names and authorities (`certificates.Leaf`). Renewal therefore does not
have to read the private key."""
ANNOTATION_DEVICES: Final = f"{GROUP}/devices"
"""On engine pods of a GPUClass with `device`: how many devices the pod claims."""

ANNOTATION_CORDON: Final = f"{GROUP}/cordon"
"""On a GPUClass: GPUs and nodes that a person took out of use (`kubectl shoal cordon`), as `core/health/requests.py` of
the operator has it."""
ANNOTATION_UNCORDON: Final = f"{GROUP}/uncordon"
"""On a GPUClass: those that a person put back into use."""

ANNOTATION_MIN_AVAILABLE: Final = f"{GROUP}/min-available"
"""On a PodDisruptionBudget of engine pods: `minAvailable` by the replicas that have become ready. The budget says more
while the only replica that serves waits for another one."""

ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Of Kubernetes: when a Deployment scales down, the pods with the lowest cost are deleted first."""
ANNOTATION_NOT_DISRUPTED: Final = "karpenter.sh/do-not-disrupt"
"""On nodes and pods: Karpenter neither removes the node nor evicts the pod."""
ANNOTATION_NOT_REMOVED: Final = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
"""On nodes: Cluster Autoscaler does not remove the node."""
ANNOTATION_SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""On pods: with "false" Cluster Autoscaler does not evict the pod."""

KUEUE_PREFIX: Final = "kueue.x-k8s.io/"
"""Of Kueue: prefix of its labels and of the scheduling gates by which it holds pods back."""
LABEL_QUEUE: Final = f"{KUEUE_PREFIX}queue-name"
"""On a Model and its pods: the LocalQueue, in the Model's namespace, whose quota they take."""
QUEUE_LABELS: Final = (LABEL_QUEUE, f"{KUEUE_PREFIX}priority-class")
LABEL_QUEUE_MANAGED: Final = f"{KUEUE_PREFIX}managed"
"""On pods that Kueue has taken charge of."""


def key_secret(role: str) -> str:
    """Name of the Secret with a role's keys, in Shoal's namespace."""
    return f"shoal-key-{role}"


# --- field managers (architecture, section 5) -----------------------------------------------------------------------
MANAGER_MODEL: Final = "shoal-model"
MANAGER_GPUCLASS: Final = "shoal-gpuclass"
MANAGER_TENANT: Final = "shoal-tenant"
MANAGER_LORAPOOL: Final = "shoal-lorapool"
MANAGER_LORAADAPTER: Final = "shoal-loraadapter"
MANAGER_MODELROUTE: Final = "shoal-modelroute"
MANAGER_SCALER: Final = "shoal-scaler"
MANAGER_INSTALL: Final = "shoal-install"

# --- Shoal's own objects --------------------------------------------------------------------------------------------
ROOT_KEY_SECRET: Final = "shoal-root-key"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace with the install key, for the operator only. Other processes use the Secret of
`key_secret`."""
INSTALL_KEY_SECRET: Final = "shoal-install-key"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace with the install key of version 0.1, where every process had it. Data: `current`, and
`previous` while two are valid."""
EXTERNAL_KEYS_SECRET: Final = "shoal-external-keys"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace with the API keys of external targets, for gateways."""
AUTHORITY_SECRET: Final = "shoal-ca"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace with the authority of all certificates, made and read by the operator only."""
AUTHORITY_CONFIG_MAP: Final = "shoal-mtls-ca"
"""ConfigMap in Shoal's namespace with the certificates of all trusted authorities, without a key: TRUST_FILE. People
and programs verify gateways and ledger with it."""
LEASE_NAME: Final = "shoal-operator"
DECISIONS_ACCOUNT: Final = "shoal-decisions"
"""ServiceAccount in Shoal's namespace that may only read the operator's decisions. The command line requests a token
for it from the API server."""
REACH_ROLE: Final = "shoal-reach"
"""Role in Shoal's namespace for people who see one namespace only: it lets them call the Services below through the API
server's proxy, and grants nothing that those would answer."""
LEDGER_SERVICE: Final = "shoal-ledger"
OPERATOR_SERVICE: Final = "shoal-operator"
GATEWAY_OPS_SERVICE: Final = "shoal-gateway-pods"
PRICES_CONFIG_MAP: Final = "shoal-prices"
SCALER_SERVICE: Final = "shoal-scaler"
"""Service without a selector in Shoal's namespace. The leading operator writes its own address into the EndpointSlice
of the same name."""
SCALER_TLS_SECRET: Final = "shoal-scaler-tls"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace: tls.crt, tls.key, ca.crt of the external scaler."""
CACHE_CLAIM: Final = "shoal-cache"
"""Prefix of the PersistentVolumeClaim in each namespace that has Models: the namespace's folder of the node cache."""
CACHE_SOCKET: Final = "cache.sock"
"""Unix socket in a namespace's folder of the node cache. Only pods of that namespace can reach it."""

# --- containers, ports and paths of an engine pod -------------------------------------------------------------------
CONTAINER_ENGINE: Final = "engine"
CONTAINER_AGENT: Final = "agent"
CONTAINER_STAGE: Final = "stage"
CONTAINER_TLS: Final = "tls"
"""Native sidecar that terminates mutual TLS in front of the engine."""

STAGE_URI_ENV: Final = "SHOAL_STAGE_URI"
STAGE_DIGEST_ENV: Final = "SHOAL_STAGE_DIGEST"
STAGE_REVISION_ENV: Final = "SHOAL_STAGE_REVISION"
STAGE_MANIFEST_ENV: Final = "SHOAL_STAGE_MANIFEST"
"""Environment of containers that read a source: its address, and what its content is pinned to."""

CANARY_PATH: Final = "/v1/canary"
"""Of an agent, for operators: has the engine answer a fixed greedy request (`api/replica.py: CanaryAnswer`)."""
ENGINE_PORT: Final = 30000
AGENT_PORT: Final = 8400
"""Port of the agent's API: /v1/replica (keys), /healthz, /metrics."""
EXT_PROC_PORT: Final = 9002
"""Port of a gateway where Envoys ask for decisions on their requests (docs/other-doors.md)."""
EXT_PROC_SERVICE: Final = "shoal-gateway-extproc"
"""Service of that port. In a Model's namespace with an InferencePool, the one that leads there."""
GATEWAY_PORT: Final = 8080
"""The OpenAI API."""
OPS_PORT: Final = 9090
"""Port of gateway and operator: /healthz, /readyz, /metrics."""
SCALER_PORT: Final = 9666
"""Port of the leading operator: KEDA's external scaler, gRPC."""

ENGINE_TLS_PORT: Final = 30443
"""Port of an engine pod with TRANSPORT_MTLS: the engine's SERVING_PATHS. The engine itself listens on localhost
only."""
ENGINE_PROXY_PORT: Final = 30444
"""Port of an engine pod with TRANSPORT_MTLS: the SERVING_PATHS, for requests that a proxy brings and a gateway
admitted (docs/other-doors.md). Only where the installation has it switched on."""
ADMISSION_PORT: Final = 8402
"""Port of an agent, on localhost: whether a gateway admitted a request."""
ADMISSION_PREFIX: Final = "/admit"
ADMISSION_ENV: Final = "SHOAL_AGENT_ADMISSION"
ENGINE_PROBE_PORT: Final = 30001
"""Plain-HTTP port of an engine pod with TRANSPORT_MTLS: /ready for the kubelet, /metrics for scrapers."""
AGENT_TLS_PORT: Final = 8443
"""Port of an agent with TRANSPORT_MTLS: every endpoint that requires a key."""
OPS_TLS_PORT: Final = 9443
"""Port of a gateway with TRANSPORT_MTLS: the endpoints of OPS_PORT that require a key."""
LEDGER_TLS_PORT: Final = 8543
"""Port of a ledger with TRANSPORT_MTLS: the endpoints of LEDGER_PORT."""

ENGINE_ENV: Final = "SHOAL_AGENT_ENGINE"
"""Environment of an agent: type of its engine. Unset: the default kind."""
MAX_RUNNING_ENV: Final = "SHOAL_AGENT_MAX_RUNNING"
"""Environment of an agent: requests that its engine runs at once at most, if the engine does not say so itself."""

SERVING_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/audio/transcriptions",
    "/v1/tokenize",
    "/v1/detokenize",
)
"""Paths of an engine that gateways call. No other path is reachable from outside a pod with TRANSPORT_MTLS."""
HEADER_SIDECAR: Final = "x-shoal-sidecar"
"""On responses that the TLS sidecar made in place of the engine: Envoy's response flags, which give the cause (UF: the
engine accepted no connection; UC: it closed the connection)."""
HEADER_HOPS: Final = "x-shoal-hops"
"""On requests to external targets of routes: how many gateways of Shoal have sent the request on."""
REPLICA_PATH: Final = "/v1/replica"
ACK_PATH: Final = "/v1/replica/ack"
ABORT_PATH: Final = "/v1/replica/abort"
"""Path of the agent, for gateways: `replica.Abort`."""
ADAPTERS_PATH: Final = "/v1/adapters"
"""Path of the agent (streams.md); `/v1/adapters/{name}/ensure` for one adapter."""
DEMAND_PATH: Final = "/v1/demand"
PREFIXES_PATH: Final = "/v1/prefixes"
"""Path of the gateway, on OPS_PORT."""
TRAFFIC_PATH: Final = "/v1/traffic"
"""Path of the gateway, on OPS_PORT: facts of the last requests (`traffic.TrafficPage`)."""
LEDGER_PORT: Final = 8500
"""Port of the ledger: RECORDS_PATH, TOTALS_PATH, USAGE_PATH and the other queries. All require a key."""
RECORDS_PATH: Final = "/v1/records"
TOTALS_PATH: Final = "/v1/totals"
USAGE_PATH: Final = "/v1/usage"
"""Path of the ledger; at the gateway with a tenant's own API key."""
UNATTRIBUTED_PATH: Final = "/v1/unattributed"
"""Path of the ledger: tokens that engines counted and that were not billed (`reconciliation.UnattributedPage`)."""
BILL_PATH: Final = "/v1/bill"
CREDITS_PATH: Final = "/v1/credits"
MARGIN_PATH: Final = "/v1/margin"
PRICES_PATH: Final = "/v1/prices"
FOCUS_PATH: Final = "/v1/focus"
"""Paths of the ledger: queries about money (`billing.py`)."""
LOGS_PATH: Final = "/v1/logs"
"""Path of the gateway, with a tenant's own API key: the tenant's request log."""
CHOICES_PATH: Final = "/v1/choices"
"""Path of the gateway, on OPS_PORT: `choices.RequestChoices`, why a request went to its replica."""
ROUTE_STATS_PATH: Final = "/v1/routestats"
"""Path of the gateway, on OPS_PORT: the last minute of routes (`routestats.RouteStatsPage`)."""
HEADER_KEY: Final = "x-shoal-key"
"""Header for the key in place of `Authorization`, which the API server's proxy uses itself."""
HEADER_POD_TOKEN: Final = "x-shoal-pod-token"  # noqa: S105 - a name, not a secret
"""Header of a gateway's batch of records: the pod's projected ServiceAccount token for LEDGER_AUDIENCE."""
LEDGER_AUDIENCE: Final = "shoal-ledger"
"""Audience of that token; the API server itself does not accept it."""
DECISIONS_PATH: Final = "/v1/decisions"
"""Path of the operator, on OPS_PORT: `decisions.Decisions`; `/v1/decisions/<namespace>/<name>` for one Model."""
HEADER_CALLER: Final = "x-shoal-caller"
"""Header of a stream request: the name of the calling pod."""
HEADER_BOOT: Final = "x-shoal-boot"
"""Header of a stream request: the caller's boot id, random per start of its process. A gateway's boot id begins with
the name of its pod (`usage.gateway_boot`)."""

RUN_DIR: Final = "/shoal/run"
"""emptyDir shared by agent and engine: `boot` (the engine's boot id), `stalled` (liveness), and the two files of the
drain."""
BOOT_FILE: Final = f"{RUN_DIR}/boot"
STALLED_FILE: Final = f"{RUN_DIR}/stalled"
DRAIN_FILE: Final = f"{RUN_DIR}/drain"
"""Created by the engine's preStop hook, which waits until the agent removes it."""
DRAIN_STATE_FILE: Final = f"{RUN_DIR}/draining"
"""Written by the agent every second of a drain: a counter, and what the drain waits for."""
STAGE_PROGRESS_FILE: Final = f"{RUN_DIR}/stage.json"
"""Written by the stage container, read by the agent: `replica.StageProgress`."""
MODELS_DIR: Final = "/shoal/models"
"""emptyDir: written by the stage container, read-only for the engine."""
MODEL_PATH: Final = f"{MODELS_DIR}/model"
"""The engine's --model-path: the stage container writes the weights elsewhere and renames them to this path when they
are complete."""
ADAPTERS_DIR: Final = "/shoal/adapters"
"""emptyDir: one folder per adapter and revision, named as the engine calls it; written by the agent, read-only for the
engine."""
ADAPTER_SECRETS_DIR: Final = "/shoal/adapter-secrets"
"""In the agent, and in the Job that reads adapters' metadata: one folder (`0`, `1`, ...) per credential of the pool, in
the order of the prefixes in the agent's settings."""
SOURCE_DIR: Final = "/shoal/source"
"""Read-only mount of a pvc:// source, in stage container and engine. The engine's --model-path is inside it."""
SOURCE_SECRET_DIR: Final = "/shoal/source-secret"  # noqa: S105
"""The Secret of `source.secretRef`, mounted in the stage container only."""
CACHE_DIR: Final = "/shoal/cache"
"""Read-only mount of the namespace's folder of the node cache, in agent, stage container and engine: the socket and the
models."""
CACHE_MODEL_FILE: Final = f"{RUN_DIR}/cache-model"
"""Written by the stage container, read by the agent: the key of the cached model that this pod uses."""
KEYS_DIR: Final = "/shoal/keys"
"""Mount of the Model's key Secret. The engine mounts only `engine.yaml`, the agent only `agent.json`."""
ENGINE_CONFIG_FILE: Final = f"{KEYS_DIR}/engine.yaml"
"""SGLang's --config: api-key and admin-api-key."""
AGENT_KEYS_FILE: Final = f"{KEYS_DIR}/agent.json"
"""`keys.AgentKeys` as JSON."""
HOME_DIR: Final = "/shoal/home"
"""emptyDir: HOME and the engine's compile caches."""
TLS_DIR: Final = "/shoal/tls"
"""Certificate of a process of Shoal, or of the agent of an engine pod: CERTIFICATE_FILE, CERTIFICATE_KEY_FILE,
TRUST_FILE."""
CERTIFICATE_FILE: Final = "tls.crt"
CERTIFICATE_KEY_FILE: Final = "tls.key"
TRUST_FILE: Final = "ca.crt"
"""All trusted authorities: current, next and previous."""
STRICT_FILE: Final = "strict"
"""Present once every process of Shoal uses mutual TLS. From then on plain HTTP is refused."""
SCALER_TLS_DIR: Final = "/shoal/scaler-tls"
"""Where the operator mounts SCALER_TLS_SECRET."""
ROLE_KEYS_DIR: Final = "/shoal/role-keys"
"""Mount of the Secret of `key_secret`, in gateways and the ledger."""
INSTALL_KEY_DIR: Final = "/shoal/install-key"
"""Mount of the install key of version 0.1, in gateways and the ledger, while there is one."""
PRICES_DIR: Final = "/shoal/prices"
"""Where the ledger mounts the price lists."""
LEDGER_TOKEN_FILE: Final = "/shoal/ledger-token/token"  # noqa: S105 - a path
"""The gateway's token for HEADER_POD_TOKEN; the kubelet renews it."""
LEDGER_DIR: Final = "/var/lib/shoal-ledger"
"""The ledger's persistent volume: its SQLite file, where PostgreSQL is not used."""
LOGS_DIR: Final = "/var/lib/shoal-logs"
"""The gateway's persistent volume of request logs, where no object store is used."""
SPOOL_DIR: Final = "/var/lib/shoal"
"""The gateway's persistent volume: the spool of usage records."""
