"""Condition types and reasons. The reason of a condition is also the reason of its event."""

from typing import Final

# --- condition types ------------------------------------------------------------------------------------------------
ACCEPTED: Final = "Accepted"
PLACED: Final = "Placed"
AVAILABLE: Final = "Available"
READY: Final = "Ready"
RECONCILING: Final = "Reconciling"
STALLED: Final = "Stalled"
LOGGING_READY: Final = "LoggingReady"
"""Condition of a Tenant with a request log."""
BUDGET_READY: Final = "BudgetReady"
"""Condition of a Tenant with a budget in money."""
ADAPTERS_READY: Final = "AdaptersReady"
"""Condition of a Tenant that grants adapters by `spec.adapters`."""

SCALING_ACTIVE: Final = "ScalingActive"
"""Condition of a Model whose driver is KEDA: KEDA and its HPA apply Shoal's decisions."""

# --- any kind -------------------------------------------------------------------------------------------------------
INVALID: Final = "Invalid"
"""The stored object does not pass this version's validation."""
PENDING: Final = "Pending"
"""Not reconciled yet."""
PAUSED: Final = "Paused"
"""The annotation shoal.dev/paused is set: decisions are made but not applied."""
INTERNAL_ERROR: Final = "InternalError"
"""An error in Shoal while reconciling this object. The object keeps its children; other objects are not affected.
Please report it."""

# --- GPUClass -------------------------------------------------------------------------------------------------------
NODES_FOUND: Final = "NodesFound"
NO_NODES: Final = "NoNodes"
AUTOSCALED: Final = "Autoscaled"
"""The class has no nodes with GPUs now. An autoscaler adds them for pending replicas."""
LABELS_DISAGREE: Final = "LabelsDisagree"
"""The labels of a node contradict the class: less memory, another resource."""
OVERLAPS: Final = "Overlaps"
"""A node or a device belongs to two classes. It counts for the class that is first by name."""
SHARED_GPUS: Final = "SharedGPUs"
"""Nodes advertise each GPU several times (time-slicing, MPS). Such GPUs are not counted. Also a condition type, present
while true."""
DRA_UNAVAILABLE: Final = "DRAUnavailable"
"""The API server does not serve resource.k8s.io/v1, so there are no devices."""
DEVICE_CLASS_NOT_FOUND: Final = "DeviceClassNotFound"
SELECTOR_INVALID: Final = "SelectorInvalid"
"""A selector does not compile, or has no result for a device. The scheduler places no pod with it."""
NO_DEVICES: Final = "NoDevices"
"""No device of a ready pool is selected."""
MEMORY_UNKNOWN: Final = "MemoryUnknown"
"""Neither the devices nor the class say how much memory a GPU has."""

GPUS_HEALTHY: Final = "GPUsHealthy"
"""Condition of a GPUClass, present while GPUs of it are out of use or should be."""
GPUS_QUARANTINED: Final = "GPUsQuarantined"
"""GPUs are out of use: they are not healthy, or a person said so."""
QUARANTINE_WITHHELD: Final = "QuarantineWithheld"
"""GPUs that are not healthy stay in use: they are the last ones, or too many are out of use already."""
CORDON_INVALID: Final = "CordonInvalid"
"""An annotation of `shoal cordon` cannot be read, or names what the class does not have."""
GPU_METRICS: Final = "GPUMetricsMissing"
"""DCGM's metrics of GPUs are to be read, and Prometheus has none: whether these GPUs are healthy is unknown."""
QUARANTINE_ENDED: Final = "QuarantineEnded"
"""Reason of an event: GPUs are in use again."""
CONSOLIDATING: Final = "Consolidating"
"""A nearly empty node is being emptied, so that an autoscaler removes it. Also a condition type of a GPUClass, present
while the class asks for it."""
NOTHING_EMPTIED: Final = "NothingEmptied"
"""No node is being emptied; the message says why."""
CONSOLIDATED: Final = "Consolidated"
"""Reason of an event: a node that was emptied is gone."""
CONSOLIDATION_ENDED: Final = "ConsolidationEnded"
"""Reason of an event: a node that was being emptied is in use again."""
NODES_AVAILABLE: Final = "NodesAvailable"
"""Condition of a GPUClass, present while no further node of it is expected."""
STOCK_OUT: Final = "StockOut"
"""The autoscaler's cloud has no such machine now."""
LIMIT_REACHED: Final = "LimitReached"
"""The autoscaler may add no more nodes: a limit of its pool, or a quota."""
SCALE_UP_FAILED: Final = "ScaleUpFailed"
"""The autoscaler tries no more for a while, since a node did not come."""
NO_NODE_CAME: Final = "NoNodeCame"
"""No node came in twice its time, and the autoscaler does not say why."""

# --- Model: Accepted ------------------------------------------------------------------------------------------------
VALID: Final = "Valid"
CLASS_NOT_FOUND: Final = "ClassNotFound"
TOO_EXPENSIVE: Final = "TooExpensive"
"""A decision about this Model would take more steps than one Model is allowed; the message says what to change."""
ARGUMENTS_REFUSED: Final = "ArgumentsRefused"
VERSION_UNKNOWN: Final = "VersionUnknown"
ENGINE_NEEDS_MTLS: Final = "EngineNeedsMTLS"
"""The engine does not check a key on every path, and mutual TLS, which would close them, is off or not yet spoken by
all of Shoal's processes."""
NAME_CLAIMED: Final = "NameClaimed"
"""A short name belongs to an older object, or an adapter's name to a Model; namespace/name still works."""
SECRET_NOT_FOUND: Final = "SecretNotFound"  # noqa: S105

# --- Model: the facts of its source ---------------------------------------------------------------------------------
READING_ARTIFACT: Final = "ReadingArtifact"
"""The Job that reads the source's metadata has not finished yet."""
SIZE_UNKNOWN: Final = "SizeUnknown"
"""Shoal does not know this architecture: spec.sizing must contain the sizes."""
SOURCE_CHANGED: Final = "SourceChanged"
"""The source changed after its revision was pinned: a force-pushed revision, or overwritten files."""

# --- Model: Placed --------------------------------------------------------------------------------------------------
PLACED_ON: Final = "Placed"
NO_CAPACITY: Final = "NoCapacity"
NO_FIT: Final = "NoFit"
"""No GPU class is large enough, even if all its GPUs were free."""
OUTRANKED: Final = "Outranked"
"""The GPUs went to a Model of higher priority."""
DRAINING_OTHERS: Final = "DrainingOthers"
"""Waits for GPUs of replicas that are draining."""
MOVING: Final = "Moving"
"""Placed; replicas are moving to a cheaper class."""
NO_CLASS: Final = "NoClass"
"""There is no GPUClass."""

# --- Model: Available, Ready ----------------------------------------------------------------------------------------
REPLICAS_READY: Final = "ReplicasReady"
STARTING: Final = "Starting"
FETCHING: Final = "Fetching"
LOADING: Final = "Loading"
NO_REPLICA: Final = "NoReplica"
UNSCHEDULABLE: Final = "Unschedulable"
ENGINE_FAILED: Final = "EngineFailed"
"""The engine's container keeps exiting; the message contains the last lines of its log."""
PODS_REFUSED: Final = "PodsRefused"
"""The API server refuses the pods (quota, admission)."""
RESOURCE_QUOTA: Final = "ResourceQuotaExceeded"
"""A ResourceQuota of the namespace has no room for a replica's pod, or for its ResourceClaim."""
LIMIT_RANGE: Final = "LimitRangeExceeded"
"""A LimitRange of the namespace refuses the pods."""
CLAIM_NOT_CREATED: Final = "ResourceClaimNotCreated"
"""A pod has no ResourceClaim for its GPUs: the API server refuses it, or nobody makes it from its template."""
QUOTA_WAIT: Final = "QuotaWait"
"""Kueue holds pods back until their queue has quota. Also a condition type, present while a queue is named or a quota
refuses pods."""
ADMISSION_CHECK: Final = "AdmissionCheckPending"
"""The queue has quota for the pods, and an admission check of Kueue holds them back: a ProvisioningRequest, for
example, until its nodes are there."""
ADMISSION_REJECTED: Final = "AdmissionRejected"
"""Kueue has given up on a pod: an admission check was rejected, or its Workload was deactivated."""
ADMITTED: Final = "Admitted"
"""Reason of the condition QuotaWait: the queue has given the pods quota."""
QUEUE_IGNORED: Final = "QueueIgnored"
"""Reason of the condition QuotaWait: the pods name a queue, and no Kueue looks at them."""
SCHEDULING_GATED: Final = "SchedulingGated"
"""Another controller than Kueue holds the pods back by a scheduling gate."""
IMAGE_UNAVAILABLE: Final = "ImageUnavailable"
"""A container's image cannot be pulled."""
NAME_TAKEN: Final = "NameTaken"
"""An object that Shoal needs to create already exists and is not Shoal's. Of a ModelRoute: other objects have all its
names, so nothing means it."""
REFUSED: Final = "Refused"
"""The API server refuses an object that Shoal creates (admission, RBAC)."""

SCALED_TO_ZERO: Final = "ScaledToZero"
"""Ready: no replica is running; the next request wakes one."""
SCALING_UP: Final = "ScalingUp"
SCALING_DOWN: Final = "ScalingDown"
WAKING: Final = "Waking"
"""Scaling up from zero because of a request."""
ROLLOUT_STALLED: Final = "RolloutStalled"
"""A new revision does not become ready; the old revision continues to serve."""
REPLACING_IN_PLACE: Final = "ReplacingInPlace"
"""A rollout without free GPUs: each replica is deleted before its successor starts."""
SIGNALS_UNKNOWN: Final = "SignalsUnknown"
"""Signals of a gateway or a replica are stale: nothing scales down. Also a condition type, present while true."""
SIGNALS_STALE: Final = "SignalsStale"
"""Reason of the condition SignalsUnknown."""
CLASS_GARBLED: Final = "ClassAnswersGarbled"
"""The GPUs of a class repeat one or two characters, where another class answers with the same weights. Also a condition
type, present while true."""

ROGUE_POD: Final = "RoguePod"
"""Reason of an event: a pod has the labels of the Model's replicas but does not belong to the Model."""

# --- Model: ScalingActive (driver KEDA) -----------------------------------------------------------------------------
DRIVEN_BY_KEDA: Final = "DrivenByKEDA"
SWITCHING_DRIVER: Final = "SwitchingDriver"
"""The Model switches drivers: the old driver writes replicas until the new driver is ready."""
KEDA_NOT_INSTALLED: Final = "KEDANotInstalled"
"""The API server does not know ScaledObjects."""
KEDA_NOT_POLLING: Final = "KEDANotPolling"
"""KEDA's operator has not called the external scaler for longer than its polling interval allows."""
METRICS_UNAVAILABLE: Final = "MetricsUnavailable"
"""The HPA gets no metric: KEDA's metrics adapter, or its APIService, is unavailable."""
SCALED_OBJECT_PAUSED: Final = "ScaledObjectPaused"
"""The ScaledObject is paused by an annotation."""
SCALED_OBJECT_REFUSED: Final = "ScaledObjectRefused"
"""KEDA reports the ScaledObject as not Ready; the message is KEDA's."""
OTHER_AUTOSCALER: Final = "OtherAutoscaler"
"""Another HPA or ScaledObject scales the same Deployment."""

# --- staging (also in the stage container's termination message) ----------------------------------------------------
SOURCE_UNREACHABLE: Final = "SourceUnreachable"
SOURCE_NOT_FOUND: Final = "SourceNotFound"
SOURCE_REFUSED: Final = "SourceRefused"
"""The platform's rules forbid the source: a host, an address or a redirect (core/network.py)."""
SOURCE_INVALID: Final = "SourceInvalid"
"""Fetched, but not a model: no config.json, no weights, or a broken archive."""
TOO_LARGE: Final = "TooLarge"
"""The source exceeds a limit of bytes, files or memory: an archive that unpacks to a multiple of its size, or an
adapter larger than its pool allows."""
GATED: Final = "Gated"
"""The repository requires credentials, which are missing or were not accepted."""
DIGEST_MISMATCH: Final = "DigestMismatch"
DISK_FULL: Final = "DiskFull"
CACHE_UNAVAILABLE: Final = "CacheUnavailable"
"""The node cache of the pod's node does not respond."""
STAGE_FAILED: Final = "StageFailed"
"""The stage container ended without a reason, for instance because it was OOM-killed."""
STAGE_REASONS: Final = frozenset(
    {
        SOURCE_UNREACHABLE,
        SOURCE_NOT_FOUND,
        SOURCE_REFUSED,
        SOURCE_INVALID,
        SOURCE_CHANGED,
        TOO_LARGE,
        GATED,
        DIGEST_MISMATCH,
        DISK_FULL,
        CACHE_UNAVAILABLE,
    }
)

# --- Tenant ---------------------------------------------------------------------------------------------------------
ACTIVE: Final = "Active"
SUSPENDED: Final = "Suspended"
NO_USABLE_KEY: Final = "NoUsableKey"
MODEL_NOT_FOUND: Final = "ModelNotFound"
KEY_CLAIMED: Final = "KeyClaimed"
"""The same key hash is listed in a Tenant that came first, which keeps it."""
RULE_REFUSED: Final = "RuleRefused"
"""A redaction rule is not usable. Text that it would redact is not written at all."""
OTHER_CURRENCY: Final = "OtherCurrency"
"""The currencies of price list and budget differ, so the state of the budget is unknown."""
ADAPTER_NOT_FOUND: Final = "AdapterNotFound"
"""A grant of adapters matches no adapter that lists the Tenant."""
PRICES_UNKNOWN: Final = "PricesUnknown"
"""No gateway has reported the currency of the price list: there is no price list, it is refused, or there is
no ledger."""

# --- LoRAPool -------------------------------------------------------------------------------------------------------
POOL_READY: Final = "PoolReady"
ENGINE_REFUSES: Final = "EngineRefuses"
"""The Model's engine arguments cannot be combined with adapters."""
POOL_CLAIMED: Final = "PoolClaimed"
"""Another pool, which came first, already has the Model."""
ROLLING: Final = "Rolling"
"""The Model's replicas are being replaced, so that their engines start with the pool's arguments."""

# --- LoRAAdapter ----------------------------------------------------------------------------------------------------
POOL_NOT_FOUND: Final = "PoolNotFound"
NAMESPACE_NOT_ALLOWED: Final = "NamespaceNotAllowed"
BASE_NAME_DIFFERS: Final = "BaseNameDiffers"
"""The adapter's config names another base model than the pool's. It may be another name of the same model."""
NOT_GRANTED: Final = "NotGranted"
"""A tenant that the adapter lists does not grant the adapter, so the adapter does not exist for that tenant."""
READING_ADAPTER: Final = "ReadingAdapter"
"""The Job that reads the adapter's metadata has not finished yet."""
RANK_TOO_HIGH: Final = "RankTooHigh"
MODULES_NOT_IN_POOL: Final = "ModulesNotInPool"
BASE_MISMATCH: Final = "BaseMismatch"
CORRUPT: Final = "Corrupt"
UNSUPPORTED: Final = "Unsupported"
"""A type of adapter that SGLang refuses, or accepts and then serves with wrong weights (DoRA, rsLoRA, new tokens)."""
NO_ROOM: Final = "NoRoom"
"""More adapters are pinned than the replicas have slots for."""
RESIDENT: Final = "Resident"
"""Ready: loaded on the desired number of replicas."""
ON_DEMAND: Final = "OnDemand"
"""Ready: loaded by its first request."""
WAITS_FOR_REPLICA: Final = "WaitsForReplica"
"""Ready, of a Warm or Pinned adapter: its pool has no replica, and the first one loads it."""
LOADING_ADAPTER: Final = "LoadingAdapter"
SWITCHING: Final = "Switching"
"""A newer revision is being loaded beside the one in service."""
SWITCHED: Final = "Switched"
"""Reason of an event: gateways now use the newer revision."""
LOAD_FAILED: Final = "LoadFailed"
"""An engine refuses to load it; the message is the engine's."""
LOAD_HANGS: Final = "LoadHangs"
LOAD_ENDED_ENGINE: Final = "LoadEndedEngine"
"""A replica's engine ended each time that it loaded the adapter."""
ADAPTER_REASONS: Final = STAGE_REASONS | {
    RANK_TOO_HIGH,
    MODULES_NOT_IN_POOL,
    BASE_MISMATCH,
    CORRUPT,
    UNSUPPORTED,
}
"""Errors of an adapter that reading or staging can find."""

# --- ModelRoute -----------------------------------------------------------------------------------------------------
WEIGHTS_SUM_TO_ZERO: Final = "WeightsSumToZero"
"""All targets of a rule have the weight 0, and it has no fallback, so its requests go nowhere."""
TARGET_NOT_FOUND: Final = "TargetNotFound"
CIRCULAR_ROUTE: Final = "CircularRoute"
"""A target is a ModelRoute: only Models and adapters can be targets."""
NOT_PERMITTED: Final = "NotPermitted"
"""A target in another namespace does not list the route's namespace, or does not exist."""
EXTERNAL_NOT_ALLOWED: Final = "ExternalNotAllowed"
"""The installation does not allow the host of an external target (chart value `gateway.external.allowedHosts`)."""
SECRET_REFUSED: Final = "SecretRefused"  # noqa: S105
"""The Secret of an external target is of another type, or for another host."""
TARGETS_READY: Final = "TargetsReady"
CANARY_HALTED: Final = "CanaryHalted"
"""Ready: a canary gets no requests any more, because too many failed or began too late."""
TARGETS_NOT_READY: Final = "TargetsNotReady"
"""No target of a rule can serve now."""

# --- an agent's refusals --------------------------------------------------------------------------------------------
SLOTS_FULL: Final = "SlotsFull"
DRAINING: Final = "Draining"
ENGINE_RESTARTED: Final = "EngineRestarted"
ENGINE_NOT_READY: Final = "EngineNotReady"
NOT_LISTENING: Final = "NotListening"
"""The caller has no stream to this agent, or its stream is to an earlier start of the agent. It would therefore miss a
retirement."""
