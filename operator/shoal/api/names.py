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
ANNOTATION_ENGINE_VERSION: Final = f"{GROUP}/engine-version"
ANNOTATION_PAUSED: Final = f"{GROUP}/paused"
"""On a Model, "true": Shoal decides but applies nothing and says so."""
ANNOTATION_WAKE: Final = f"{GROUP}/wake"
"""On a Model, a time (RFC 3339): counts as a request that came at that time (`kubectl shoal wake`)."""
ANNOTATION_READS: Final = f"{GROUP}/reads"
"""On a Job that reads adapters: the `read_by` of each, separated by blanks: a restarted operator finds what is being
read already."""

ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: of the pods of a Deployment that shrinks, those with the lowest cost go first."""

# --- field managers (architecture, section 5) -----------------------------------------------------------------------
MANAGER_MODEL: Final = "shoal-model"
MANAGER_GPUCLASS: Final = "shoal-gpuclass"
MANAGER_TENANT: Final = "shoal-tenant"
MANAGER_LORAPOOL: Final = "shoal-lorapool"
MANAGER_LORAADAPTER: Final = "shoal-loraadapter"
MANAGER_SCALER: Final = "shoal-scaler"
MANAGER_INSTALL: Final = "shoal-install"

# --- Shoal's own objects --------------------------------------------------------------------------------------------
INSTALL_KEY_SECRET: Final = "shoal-install-key"  # noqa: S105 - a name, not a secret
"""Secret in Shoal's namespace, made by the operator, mounted by gateways. Data: `current`, and `previous` while two
are valid."""
LEASE_NAME: Final = "shoal-operator"
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

ENGINE_PORT: Final = 30000
AGENT_PORT: Final = 8400
"""The agent's API: /v1/replica (keys), /healthz, /metrics."""
GATEWAY_PORT: Final = 8080
"""The OpenAI API."""
OPS_PORT: Final = 9090
"""Of gateway and operator: /healthz, /readyz, /metrics."""
SCALER_PORT: Final = 9666
"""Of the operator that leads: KEDA's external scaler, gRPC."""

REPLICA_PATH: Final = "/v1/replica"
ACK_PATH: Final = "/v1/replica/ack"
DRAIN_PATH: Final = "/v1/drain"
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
DECISIONS_PATH: Final = "/v1/decisions"
"""Of the operator, on OPS_PORT: `decisions.Decisions`; `/v1/decisions/<namespace>/<name>` for one Model."""
HEADER_CALLER: Final = "x-shoal-caller"
"""Who opens a stream: the name of its pod."""
HEADER_BOOT: Final = "x-shoal-boot"
"""The caller's boot id, random per start of its process."""

HEADER_DRAIN: Final = "x-shoal-drain"
"""The token of the kubelet's hook (`keys.drain_token`)."""

RUN_DIR: Final = "/shoal/run"
"""emptyDir shared by agent and engine: `boot` (the engine's boot id), `stalled` (liveness)."""
BOOT_FILE: Final = f"{RUN_DIR}/boot"
STALLED_FILE: Final = f"{RUN_DIR}/stalled"
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
SCALER_TLS_DIR: Final = "/shoal/scaler-tls"
"""Where the operator mounts SCALER_TLS_SECRET."""
INSTALL_KEY_DIR: Final = "/shoal/install-key"
"""Where gateways mount the install key's Secret."""
PRICES_DIR: Final = "/shoal/prices"
"""Where the ledger mounts the price lists."""
LEDGER_DIR: Final = "/var/lib/shoal-ledger"
"""The ledger's persistent volume: its SQLite file, where no PostgreSQL is set."""
LOGS_DIR: Final = "/var/lib/shoal-logs"
"""The gateway's persistent volume of request logs, where no object store is set."""
SPOOL_DIR: Final = "/var/lib/shoal"
"""The gateway's persistent volume: the spool of usage records."""
