"""Every name that two parts of Shoal must agree on: labels, annotations, ports, paths, field managers.

One file, so that a reader finds both ends of each agreement, and a rename is one line.
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
"""Name of the Model, on every object made for it. An engine pod is one that has this and LABEL_COMPONENT=engine."""
LABEL_MODEL_UID: Final = f"{GROUP}/model-uid"
LABEL_GPU_CLASS: Final = f"{GROUP}/gpu-class"
LABEL_POOL: Final = f"{GROUP}/lora-pool"
"""Name of the LoRAPool, on the Jobs that read its adapters' metadata."""
COMPONENT_ENGINE: Final = "engine"
COMPONENT_GATEWAY: Final = "gateway"
COMPONENT_OPERATOR: Final = "operator"
COMPONENT_FACTS: Final = "facts"
"""The Job that reads a source's metadata."""
COMPONENT_ADAPTER_FACTS: Final = "adapter-facts"
"""The Job that reads the metadata of a batch of adapters."""
COMPONENT_LEDGER: Final = "ledger"
COMPONENT_CACHE: Final = "cache"
"""The node cache: a DaemonSet in Shoal's namespace."""

# --- annotations ----------------------------------------------------------------------------------------------------
ANNOTATION_INSTALL_KEY: Final = f"{GROUP}/install-key"
"""On engine pods: fingerprint of the install key from which the pod's keys were derived (`keys.fingerprint`)."""
ANNOTATION_KEYS: Final = f"{GROUP}/keys"
"""On gateways: which keys they know. Absent: only the install key of before (up to 0.1)."""
ANNOTATION_ENGINE_VERSION: Final = f"{GROUP}/engine-version"
ANNOTATION_PAUSED: Final = f"{GROUP}/paused"
"""On a Model, "true": Shoal decides but applies nothing and says so."""
ANNOTATION_WAKE: Final = f"{GROUP}/wake"
"""On a Model, a time (RFC 3339): counts as a request that came at that time (`kubectl shoal wake`)."""
ANNOTATION_READS: Final = f"{GROUP}/reads"
"""On a Job that reads adapters: the `read_by` of each, separated by blanks: a restarted operator finds what is being
read already."""

ANNOTATION_TRANSPORT: Final = f"{GROUP}/transport"
"""On pods of Shoal and of engines, TRANSPORT_MTLS: they speak mutual TLS, on ports of their own. Without it: plain
HTTP."""
TRANSPORT_MTLS: Final = "mtls"
ANNOTATION_CERTIFICATE: Final = f"{GROUP}/certificate"
"""On Secrets with a certificate: its dates, names and authorities (`certificates.Leaf`), so that whoever renews it need
not read the key."""

ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: of the pods of a Deployment that shrinks, those with the lowest cost go first."""


def key_secret(role: str) -> str:
    """Name of the Secret with a role's keys, in Shoal's namespace."""
    return f"shoal-key-{role}"


# --- field managers (architecture, section 5) -----------------------------------------------------------------------
MANAGER_MODEL: Final = "shoal-model"
MANAGER_GPUCLASS: Final = "shoal-gpuclass"
MANAGER_TENANT: Final = "shoal-tenant"
MANAGER_LORAPOOL: Final = "shoal-lorapool"
MANAGER_LORAADAPTER: Final = "shoal-loraadapter"
MANAGER_SCALER: Final = "shoal-scaler"
MANAGER_INSTALL: Final = "shoal-install"

# --- Shoal's own objects --------------------------------------------------------------------------------------------
ROOT_KEY_SECRET: Final = "shoal-root-key"  # noqa: S105 - a name, not a secret
"""The install key, for the operator alone. Others have what `key_secret` names."""
INSTALL_KEY_SECRET: Final = "shoal-install-key"  # noqa: S105 - a name, not a secret
"""The install key of before: up to 0.1 every process had it."""
"""Secret in Shoal's namespace, made by the operator, mounted by gateways. Data: `current`, and `previous` while two
are valid."""
AUTHORITY_SECRET: Final = "shoal-ca"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace, made by the operator, read by nobody else: the authority of every certificate."""
LEASE_NAME: Final = "shoal-operator"
DECISIONS_ACCOUNT: Final = "shoal-decisions"
"""ServiceAccount in Shoal's namespace that may read the operator's decisions and nothing else: the command line asks
the API server for a token of it."""
SCALER_SERVICE: Final = "shoal-scaler"
"""Service without a selector in Shoal's namespace: the operator that leads writes its own address into the one
EndpointSlice of the same name."""
SCALER_TLS_SECRET: Final = "shoal-scaler-tls"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace: tls.crt, tls.key, ca.crt of the external scaler."""
CACHE_CLAIM: Final = "shoal-cache"
"""How the name of a PersistentVolumeClaim begins in each namespace that has Models: that namespace's folder of the node
cache."""
CACHE_SOCKET: Final = "cache.sock"
"""In a namespace's folder of the node cache: who can reach it is of that namespace."""

# --- containers, ports and paths of an engine pod -------------------------------------------------------------------
CONTAINER_ENGINE: Final = "engine"
CONTAINER_AGENT: Final = "agent"
CONTAINER_STAGE: Final = "stage"
CONTAINER_TLS: Final = "tls"
"""Native sidecar: ends mutual TLS in front of the engine."""

ENGINE_PORT: Final = 30000
AGENT_PORT: Final = 8400
"""The agent's API: /v1/replica (keys), /healthz, /metrics."""
GATEWAY_PORT: Final = 8080
"""The OpenAI API."""
OPS_PORT: Final = 9090
"""Of gateway and operator: /healthz, /readyz, /metrics."""
SCALER_PORT: Final = 9666
"""Of the operator that leads: KEDA's external scaler, gRPC."""

ENGINE_TLS_PORT: Final = 30443
"""Of an engine pod with TRANSPORT_MTLS: the serving paths of its engine, which itself listens on localhost only."""
ENGINE_PROBE_PORT: Final = 30001
"""Of an engine pod with TRANSPORT_MTLS, plain: /ready for the kubelet, /metrics for scrapers."""
AGENT_TLS_PORT: Final = 8443
"""Of an agent with TRANSPORT_MTLS: everything that takes a key."""
OPS_TLS_PORT: Final = 9443
"""Of a gateway with TRANSPORT_MTLS: what takes a key on OPS_PORT."""
LEDGER_TLS_PORT: Final = 8543
"""Of a ledger with TRANSPORT_MTLS: what LEDGER_PORT has."""

SERVING_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Of an engine: what gateways call. Nothing else of it can be reached from outside a pod with TRANSPORT_MTLS."""
HEADER_SIDECAR: Final = "x-shoal-sidecar"
"""On answers that are not the engine's but of what ends mutual TLS in front of it: Envoy's response flags, which say
why (UF: the engine took no connection; UC: it ended it)."""
REPLICA_PATH: Final = "/v1/replica"
ACK_PATH: Final = "/v1/replica/ack"
ABORT_PATH: Final = "/v1/replica/abort"
"""Of the agent, for gateways: `replica.Abort`."""
ADAPTERS_PATH: Final = "/v1/adapters"
"""Of the agent (streams.md); `/v1/adapters/{name}/ensure` for one."""
DEMAND_PATH: Final = "/v1/demand"
"""Of the gateway, on OPS_PORT."""
LEDGER_PORT: Final = 8500
"""Of the ledger: RECORDS_PATH, TOTALS_PATH, USAGE_PATH and the other queries (keys)."""
RECORDS_PATH: Final = "/v1/records"
TOTALS_PATH: Final = "/v1/totals"
USAGE_PATH: Final = "/v1/usage"
"""Of the ledger, and of the gateway for a tenant's own key."""
UNATTRIBUTED_PATH: Final = "/v1/unattributed"
"""Of the ledger: what engines counted themselves beside what was billed (`reconciliation.Unattributed`)."""
BILL_PATH: Final = "/v1/bill"
CREDITS_PATH: Final = "/v1/credits"
MARGIN_PATH: Final = "/v1/margin"
FOCUS_PATH: Final = "/v1/focus"
"""Of the ledger: questions on money (`billing.py`)."""
LOGS_PATH: Final = "/v1/logs"
"""Of the gateway, for a tenant's own key: its request log."""
HEADER_KEY: Final = "x-shoal-key"
"""Instead of `Authorization`, through the API server's proxy, which keeps that one for itself."""
HEADER_POD_TOKEN: Final = "x-shoal-pod-token"  # noqa: S105 - a name, not a secret
"""With a gateway's batch of records: the token that the kubelet made for its pod, for LEDGER_AUDIENCE."""
LEDGER_AUDIENCE: Final = "shoal-ledger"
"""Who takes that token: the API server itself does not."""
DECISIONS_PATH: Final = "/v1/decisions"
"""Of the operator, on OPS_PORT: `decisions.Decisions`; `/v1/decisions/<namespace>/<name>` for one Model."""
HEADER_CALLER: Final = "x-shoal-caller"
"""Who opens a stream: the name of its pod."""
HEADER_BOOT: Final = "x-shoal-boot"
"""The caller's boot id, random per start of its process; a gateway's begins with its pod (`usage.gateway_boot`)."""

RUN_DIR: Final = "/shoal/run"
"""emptyDir shared by agent and engine: `boot` (the engine's boot id), `stalled` (liveness), the two of the drain."""
BOOT_FILE: Final = f"{RUN_DIR}/boot"
STALLED_FILE: Final = f"{RUN_DIR}/stalled"
DRAIN_FILE: Final = f"{RUN_DIR}/drain"
"""Made by the engine's preStop hook, which waits until the agent removes it."""
DRAIN_STATE_FILE: Final = f"{RUN_DIR}/draining"
"""Written by the agent every second of a drain: a number that changes, and what the drain waits for."""
STAGE_PROGRESS_FILE: Final = f"{RUN_DIR}/stage.json"
"""Written by the stage container, read by the agent: `replica.StageProgress`."""
MODELS_DIR: Final = "/shoal/models"
"""emptyDir: written by the stage container, read-only for the engine."""
MODEL_PATH: Final = f"{MODELS_DIR}/model"
"""The engine's --model-path: where the stage container puts the weights (renamed into place when whole)."""
ADAPTERS_DIR: Final = "/shoal/adapters"
"""emptyDir: one folder per adapter and revision, named as the engine calls it; written by the agent, read-only for the
engine."""
ADAPTER_SECRETS_DIR: Final = "/shoal/adapter-secrets"
"""In the agent, and in the Job that reads adapters' metadata: a folder `0`, `1`, ... for each of the pool's
credentials, in the order of their prefixes in the agent's settings."""
SOURCE_DIR: Final = "/shoal/source"
"""Where a pvc:// source is mounted, read-only, in stage and engine; the engine's --model-path then points into it."""
SOURCE_SECRET_DIR: Final = "/shoal/source-secret"  # noqa: S105
"""The Secret of `source.secretRef`, mounted in the stage container only."""
CACHE_DIR: Final = "/shoal/cache"
"""The namespace's folder of the node cache, read-only, in agent, stage and engine: its socket and its models."""
CACHE_MODEL_FILE: Final = f"{RUN_DIR}/cache-model"
"""Written by the stage container, read by the agent: the key of the cached model that this pod uses."""
KEYS_DIR: Final = "/shoal/keys"
"""The Model's key Secret. The engine mounts `engine.yaml` only, the agent `agent.json` only."""
ENGINE_CONFIG_FILE: Final = f"{KEYS_DIR}/engine.yaml"
"""SGLang's --config: api-key and admin-api-key."""
AGENT_KEYS_FILE: Final = f"{KEYS_DIR}/agent.json"
"""`keys.AgentKeys` as JSON."""
HOME_DIR: Final = "/shoal/home"
"""emptyDir: HOME and the engine's compile caches."""
TLS_DIR: Final = "/shoal/tls"
"""Where a process of Shoal, or the agent of an engine pod, has its certificate: CERTIFICATE_FILE, CERTIFICATE_KEY_FILE,
TRUST_FILE."""
CERTIFICATE_FILE: Final = "tls.crt"
CERTIFICATE_KEY_FILE: Final = "tls.key"
TRUST_FILE: Final = "ca.crt"
"""Every authority that is trusted: the one in force, the next one, the one before."""
STRICT_FILE: Final = "strict"
"""There once every process of Shoal speaks mutual TLS: nobody is answered without from then on."""
SCALER_TLS_DIR: Final = "/shoal/scaler-tls"
"""Where the operator mounts SCALER_TLS_SECRET."""
ROLE_KEYS_DIR: Final = "/shoal/role-keys"
"""Of gateways and the ledger: their Secret of `key_secret`."""
INSTALL_KEY_DIR: Final = "/shoal/install-key"
"""Of the same: the install key of before, while there is one."""
"""Where gateways mount the install key's Secret."""
PRICES_DIR: Final = "/shoal/prices"
"""Where the ledger mounts the price lists."""
LEDGER_TOKEN_FILE: Final = "/shoal/ledger-token/token"  # noqa: S105 - a path
"""Where a gateway has the token of HEADER_POD_TOKEN; the kubelet renews it."""
LEDGER_DIR: Final = "/var/lib/shoal-ledger"
"""The ledger's persistent volume: its SQLite file, where no PostgreSQL is set."""
LOGS_DIR: Final = "/var/lib/shoal-logs"
"""The gateway's persistent volume of request logs, where no object store is set."""
SPOOL_DIR: Final = "/var/lib/shoal"
"""The gateway's persistent volume: the spool of usage records."""
