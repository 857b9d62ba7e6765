"""Condition types and reasons. The reason of a condition is also the reason of the event that tells of it."""

from typing import Final

# --- condition types ------------------------------------------------------------------------------------------------
ACCEPTED: Final = "Accepted"
PLACED: Final = "Placed"
AVAILABLE: Final = "Available"
READY: Final = "Ready"
RECONCILING: Final = "Reconciling"
STALLED: Final = "Stalled"
LOGGING_READY: Final = "LoggingReady"
"""Of a Tenant that asks for a request log."""
BUDGET_READY: Final = "BudgetReady"
"""Of a Tenant with a budget in money."""
ADAPTERS_READY: Final = "AdaptersReady"
"""Of a Tenant that grants adapters by `spec.adapters`."""

SCALING_ACTIVE: Final = "ScalingActive"
"""Of a Model whose driver is KEDA: KEDA and its HPA carry out what was decided."""

# --- any kind -------------------------------------------------------------------------------------------------------
INVALID: Final = "Invalid"
"""The stored object does not pass this version's validation."""
PENDING: Final = "Pending"
"""Seen, not yet worked on."""
PAUSED: Final = "Paused"
"""shoal.dev/paused is set: decided, not applied."""
INTERNAL_ERROR: Final = "InternalError"
"""Shoal itself failed on this object, which keeps what it has; others are not concerned. Please report it."""

# --- GPUClass -------------------------------------------------------------------------------------------------------
NODES_FOUND: Final = "NodesFound"
NO_NODES: Final = "NoNodes"
LABELS_DISAGREE: Final = "LabelsDisagree"
"""A node's own labels say something else than the class: less memory, another resource."""
OVERLAPS: Final = "Overlaps"
"""A node belongs to two classes; its GPUs count for the class that is first by name."""

# --- Model: Accepted ------------------------------------------------------------------------------------------------
VALID: Final = "Valid"
CLASS_NOT_FOUND: Final = "ClassNotFound"
TOO_EXPENSIVE: Final = "TooExpensive"
"""Deciding about it would take more steps than one Model may cause; the message says what to change."""
ARGUMENTS_REFUSED: Final = "ArgumentsRefused"
VERSION_UNKNOWN: Final = "VersionUnknown"
NAME_CLAIMED: Final = "NameClaimed"
"""A short name belongs to an older one, or an adapter's to a Model; namespace/name still works."""
SECRET_NOT_FOUND: Final = "SecretNotFound"  # noqa: S105

# --- Model: the facts of its source ---------------------------------------------------------------------------------
READING_ARTIFACT: Final = "ReadingArtifact"
"""The Job that reads the source's metadata has not ended yet."""
SIZE_UNKNOWN: Final = "SizeUnknown"
"""Shoal does not know this architecture: spec.sizing has to say what it needs."""
SOURCE_CHANGED: Final = "SourceChanged"
"""The source is not what it was when it was pinned: a force-pushed revision, files that were overwritten."""

# --- Model: Placed --------------------------------------------------------------------------------------------------
PLACED_ON: Final = "Placed"
NO_CAPACITY: Final = "NoCapacity"
NO_FIT: Final = "NoFit"
"""No class is large enough, whatever is free."""
OUTRANKED: Final = "Outranked"
"""The GPUs went to a Model of higher priority."""
DRAINING_OTHERS: Final = "DrainingOthers"
"""Waits for GPUs that replicas which are going still hold."""
MOVING: Final = "Moving"
"""Placed; replicas move to a cheaper class."""
NO_CLASS: Final = "NoClass"
"""There is no GPUClass at all."""

# --- Model: Available, Ready ----------------------------------------------------------------------------------------
REPLICAS_READY: Final = "ReplicasReady"
STARTING: Final = "Starting"
FETCHING: Final = "Fetching"
LOADING: Final = "Loading"
NO_REPLICA: Final = "NoReplica"
UNSCHEDULABLE: Final = "Unschedulable"
ENGINE_FAILED: Final = "EngineFailed"
"""The engine's container keeps exiting; the message has its own last lines."""
PODS_REFUSED: Final = "PodsRefused"
"""The API server refuses the pods (quota, admission)."""
IMAGE_UNAVAILABLE: Final = "ImageUnavailable"
"""A container's image cannot be pulled."""
NAME_TAKEN: Final = "NameTaken"
"""An object that Shoal needs to make exists already and is not Shoal's."""
REFUSED: Final = "Refused"
"""The API server refuses an object that Shoal makes (admission, RBAC)."""

SCALED_TO_ZERO: Final = "ScaledToZero"
"""Ready: no replica, and the next request wakes one."""
SCALING_UP: Final = "ScalingUp"
SCALING_DOWN: Final = "ScalingDown"
WAKING: Final = "Waking"
"""From zero: somebody asked."""
ROLLOUT_STALLED: Final = "RolloutStalled"
"""A new revision does not become ready; the old one goes on serving."""
REPLACING_IN_PLACE: Final = "ReplacingInPlace"
"""A rollout without a free GPU: a replica goes before its successor comes."""
SIGNALS_UNKNOWN: Final = "SignalsUnknown"
"""Signals of a gateway or a replica are stale: nothing scales down meanwhile. Also a condition type, present while
true."""
SIGNALS_STALE: Final = "SignalsStale"
"""Reason of the condition SignalsUnknown."""

ROGUE_POD: Final = "RoguePod"
"""Of an event: a pod carries the labels of the Model's replicas and does not belong to it."""

# --- Model: ScalingActive (driver KEDA) -----------------------------------------------------------------------------
DRIVEN_BY_KEDA: Final = "DrivenByKEDA"
SWITCHING_DRIVER: Final = "SwitchingDriver"
"""From one driver to the other: whoever writes now stays until the other one is ready."""
KEDA_NOT_INSTALLED: Final = "KEDANotInstalled"
"""The API server does not know ScaledObjects."""
KEDA_NOT_POLLING: Final = "KEDANotPolling"
"""KEDA's operator has not asked for longer than it should."""
METRICS_UNAVAILABLE: Final = "MetricsUnavailable"
"""The HPA gets no metric: KEDA's metrics adapter, or its APIService, is away."""
SCALED_OBJECT_PAUSED: Final = "ScaledObjectPaused"
"""Somebody paused it by an annotation."""
SCALED_OBJECT_REFUSED: Final = "ScaledObjectRefused"
"""KEDA says that the ScaledObject is not Ready, with its own words."""
OTHER_AUTOSCALER: Final = "OtherAutoscaler"
"""Another HPA or ScaledObject scales the same Deployment."""

# --- staging (also in the stage container's termination message) ----------------------------------------------------
SOURCE_UNREACHABLE: Final = "SourceUnreachable"
SOURCE_NOT_FOUND: Final = "SourceNotFound"
SOURCE_REFUSED: Final = "SourceRefused"
"""The platform's rules do not let it be fetched: a host, an address, a redirect (core/network.py)."""
SOURCE_INVALID: Final = "SourceInvalid"
"""Fetched, but not a model: no config.json, no weights, a broken archive."""
TOO_LARGE: Final = "TooLarge"
"""More bytes, files or memory than the source may take: an archive that unpacks to a multiple of itself, an adapter
larger than its pool allows."""
GATED: Final = "Gated"
"""The repository needs credentials that were not given or not accepted."""
DIGEST_MISMATCH: Final = "DigestMismatch"
DISK_FULL: Final = "DiskFull"
CACHE_UNAVAILABLE: Final = "CacheUnavailable"
"""The node cache of the pod's node does not answer."""
STAGE_FAILED: Final = "StageFailed"
"""The stage container ended without saying why (killed for memory, for instance)."""
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
"""The same key hash stands on an older Tenant, which keeps it."""
RULE_REFUSED: Final = "RuleRefused"
"""A redaction rule cannot be used: nothing that it should take out is written."""
OTHER_CURRENCY: Final = "OtherCurrency"
"""The price list is in another currency than the budget, which therefore counts as unknown."""
ADAPTER_NOT_FOUND: Final = "AdapterNotFound"
"""A grant of adapters matches none that lists the Tenant."""
PRICES_UNKNOWN: Final = "PricesUnknown"
"""No gateway has said in which currency the price list is: there is none, or no ledger."""

# --- LoRAPool -------------------------------------------------------------------------------------------------------
POOL_READY: Final = "PoolReady"
ENGINE_REFUSES: Final = "EngineRefuses"
"""The Model's arguments and adapters do not go together."""
POOL_CLAIMED: Final = "PoolClaimed"
"""An older pool has the Model."""
ROLLING: Final = "Rolling"
"""The Model's replicas are being replaced: their engines start with the pool's arguments."""

# --- LoRAAdapter ----------------------------------------------------------------------------------------------------
POOL_NOT_FOUND: Final = "PoolNotFound"
NAMESPACE_NOT_ALLOWED: Final = "NamespaceNotAllowed"
NOT_GRANTED: Final = "NotGranted"
"""A tenant that the adapter lists does not grant it: to that tenant it does not exist."""
READING_ADAPTER: Final = "ReadingAdapter"
"""The Job that reads the adapter's metadata has not ended yet."""
RANK_TOO_HIGH: Final = "RankTooHigh"
MODULES_NOT_IN_POOL: Final = "ModulesNotInPool"
BASE_MISMATCH: Final = "BaseMismatch"
CORRUPT: Final = "Corrupt"
UNSUPPORTED: Final = "Unsupported"
"""A kind of adapter that SGLang refuses, or takes and then answers with other weights (DoRA, rsLoRA, new tokens)."""
NO_ROOM: Final = "NoRoom"
"""More is pinned than the replicas have places for."""
RESIDENT: Final = "Resident"
"""Ready: loaded on as many replicas as it should be."""
ON_DEMAND: Final = "OnDemand"
"""Ready: loaded with its first request."""
LOADING_ADAPTER: Final = "LoadingAdapter"
SWITCHING: Final = "Switching"
"""A newer revision is being loaded beside the one that answers."""
SWITCHED: Final = "Switched"
"""Of an event: gateways are sent to the newer revision from now on."""
LOAD_FAILED: Final = "LoadFailed"
"""An engine refuses to load it; the message has the engine's words."""
LOAD_HANGS: Final = "LoadHangs"
ADAPTER_REASONS: Final = STAGE_REASONS | {
    RANK_TOO_HIGH,
    MODULES_NOT_IN_POOL,
    BASE_MISMATCH,
    CORRUPT,
    UNSUPPORTED,
}
"""What reading or staging an adapter can find wrong with it."""

# --- an agent's refusals --------------------------------------------------------------------------------------------
SLOTS_FULL: Final = "SlotsFull"
DRAINING: Final = "Draining"
ENGINE_RESTARTED: Final = "EngineRestarted"
ENGINE_NOT_READY: Final = "EngineNotReady"
NOT_LISTENING: Final = "NotListening"
"""The caller has no stream to this agent, or to a former one: it could not hear of a retirement."""
