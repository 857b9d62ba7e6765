"""Every reason of a condition: its layer, and what to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from shoal.api import reasons as r
from shoal.core.layers.layer import Layer

State = Literal["fault", "waits", "note", "fine"]
"""fault: something is wrong. waits: a step that ends by itself. note: worth knowing, and nothing fails because of it.
fine: as it should be."""


@dataclass(frozen=True, slots=True)
class LayerAdvice:
    """What a reason means for a person."""

    layer: Layer
    state: State
    do: str
    """What to do, in one sentence."""


_DRIVER, _CONTAINER, _ARTIFACT, _ENGINE = Layer.DRIVER, Layer.CONTAINER, Layer.ARTIFACT, Layer.ENGINE
_GATEWAY, _CLIENT, _CONTROL = Layer.GATEWAY, Layer.CLIENT, Layer.CONTROL
_NO_SIGNALS: Final = (
    "Check network policies, certificates and agents on the way to the named pods; nothing scales down meanwhile."
)
_NOTHING: Final = "Nothing."


def _fault(layer: Layer, do: str) -> LayerAdvice:
    return LayerAdvice(layer, "fault", do)


def _waits(layer: Layer, do: str) -> LayerAdvice:
    return LayerAdvice(layer, "waits", do)


def _note(layer: Layer, do: str) -> LayerAdvice:
    return LayerAdvice(layer, "note", do)


def _fine(layer: Layer) -> LayerAdvice:
    return LayerAdvice(layer, "fine", _NOTHING)


REASONS: Final[Mapping[str, LayerAdvice]] = {
    # --- any kind
    r.INVALID: _fault(_CONTROL, "Correct the fields that the message names, and apply the object again."),
    r.PENDING: _waits(_CONTROL, "Wait a few seconds; if it stays, run `shoal doctor`: no operator may be leading."),
    r.PAUSED: _note(_CONTROL, "Remove the annotation shoal.dev/paused when Shoal is to act on the object again."),
    r.INTERNAL_ERROR: _fault(
        _CONTROL, "Report it with the output of `shoal support bundle`; other objects are not affected."
    ),
    # --- GPUClass
    r.NODES_FOUND: _fine(_CONTAINER),
    r.NO_NODES: _fault(_CONTAINER, "Correct the class's nodeSelector, or add nodes with these labels."),
    r.AUTOSCALED: _fine(_CONTAINER),
    r.LABELS_DISAGREE: _note(_DRIVER, "Compare memoryPerGPU and resourceName of the class with the node's labels."),
    r.OVERLAPS: _note(_CONTROL, "Change the selectors so that no node and no device belongs to two classes."),
    r.SHARED_GPUS: _note(
        _DRIVER,
        "Turn off time-slicing or MPS there, use MIG, or leave shared devices out: "
        "`!device.allowMultipleAllocations` in spec.device.selectors.",
    ),
    r.DRA_UNAVAILABLE: _fault(_CONTROL, "Upgrade Kubernetes to 1.34, or use resourceName with a device plugin."),
    r.DEVICE_CLASS_NOT_FOUND: _fault(_DRIVER, "Install the DRA driver, or name a DeviceClass that exists."),
    r.SELECTOR_INVALID: _fault(_CONTROL, "Correct the expression; test with has() whether a device has an attribute."),
    r.NO_DEVICES: _fault(
        _DRIVER, "See what `kubectl get resourceslices` shows, and whether the DRA driver runs on the nodes."
    ),
    r.GPUS_QUARANTINED: _note(
        Layer.HARDWARE, "Repair or replace the named GPUs; `shoal uncordon` puts them back into use at once."
    ),
    r.QUARANTINE_WITHHELD: _fault(
        Layer.HARDWARE, "Add healthy GPUs, or take the named ones out of use with `shoal cordon`."
    ),
    r.CORDON_INVALID: _note(_CONTROL, "Correct the annotation that the message names, or use `shoal cordon`."),
    r.GPU_METRICS: _note(
        _DRIVER,
        "Look at the DCGM exporter's pods on these nodes, whether Prometheus scrapes them, and whether it answers.",
    ),
    r.QUARANTINE_ENDED: _fine(Layer.HARDWARE),
    r.CONSOLIDATING: _waits(_CONTROL, "Wait: replacements start on other nodes before the replicas there drain."),
    r.NOTHING_EMPTIED: _fine(_CONTROL),
    r.CONSOLIDATED: _fine(_CONTROL),
    r.CONSOLIDATION_ENDED: _note(_CONTROL, "Nothing, unless it repeats: then remove what the message names."),
    r.STOCK_OUT: _waits(
        _CONTROL, "Wait, or give the Models another class; more zones or machine types in the node pool help."
    ),
    r.LIMIT_REACHED: _note(_CONTROL, "Raise the limit that the message names: of the node pool, or the cloud's quota."),
    r.SCALE_UP_FAILED: _note(_CONTROL, "See the autoscaler's log for why the last node did not come."),
    r.NO_NODE_CAME: _note(
        _CONTROL, "See whether an autoscaler runs, and whether its node pool has the class's labels."
    ),
    r.MEMORY_UNKNOWN: _fault(_CONTROL, "Set memoryPerGPU of the class: its devices do not say it."),
    # --- Model: Accepted
    r.VALID: _fine(_CONTROL),
    r.CLASS_NOT_FOUND: _fault(_CONTROL, "Name an existing GPUClass in spec.variants, or create the class."),
    r.TOO_EXPENSIVE: _fault(_CONTROL, "Shorten the Model as the message says: fewer variants, or fewer replicas."),
    r.ARGUMENTS_REFUSED: _fault(_ENGINE, "Remove or correct the named arguments in spec.engine.extraArgs."),
    r.VERSION_UNKNOWN: _fault(
        _ENGINE, "Choose a version of the engine table (chart value engines.versions), or set spec.engine.image."
    ),
    r.ENGINE_NEEDS_MTLS: _fault(
        _CONTROL, "Turn mutual TLS on for the installation, or use an engine that checks keys."
    ),
    r.NAME_CLAIMED: _note(_CONTROL, "Use namespace/name as the model's name, or rename one of the two objects."),
    r.SECRET_NOT_FOUND: _fault(_ARTIFACT, "Create the Secret that the message names, in the namespace of the object."),
    # --- Model: the facts of its source
    r.READING_ARTIFACT: _waits(_ARTIFACT, "Wait until the Job has read the source's metadata."),
    r.SIZE_UNKNOWN: _fault(_ARTIFACT, "Write the sizes into spec.sizing: Shoal does not know this architecture."),
    r.SOURCE_CHANGED: _fault(
        _ARTIFACT, "Put back what was there, or name the new files in spec.source.uri, at an address of their own."
    ),
    # --- Model: Placed
    r.PLACED_ON: _fine(_CONTROL),
    r.NO_CAPACITY: _fault(
        _CONTROL,
        "Add GPUs of a class that fits, allow another class in spec.variants, or free GPUs: of other "
        "Models, or of pods that are not Shoal's.",
    ),
    r.NO_FIT: _fault(
        _CONTROL, "Add a GPUClass with more memory, or reduce the Model: quantization, a shorter context, more GPUs."
    ),
    r.OUTRANKED: _fault(_CONTROL, "Add GPUs, or raise spec.priority above that of the Model that took them."),
    r.DRAINING_OTHERS: _waits(_CONTROL, "Wait until the replicas that are leaving have finished their requests."),
    r.MOVING: _note(
        _CONTROL, "Wait: replicas move a few at a time, to a cheaper class or away from one without room for a rollout."
    ),
    r.NO_CLASS: _fault(_CONTROL, "Create a GPUClass for the GPU nodes of the cluster."),
    # --- Model: Available, Ready
    r.REPLICAS_READY: _fine(_ENGINE),
    r.STARTING: _waits(_CONTAINER, "Wait: replicas are being created; `shoal status -w` shows their steps."),
    r.FETCHING: _waits(_ARTIFACT, "Wait: the weights are being fetched; `shoal status -w` shows the percentage."),
    r.LOADING: _waits(_ENGINE, "Wait: the engine loads the weights; `kubectl logs -c engine` shows how far it is."),
    r.NO_REPLICA: _waits(_CONTROL, "Wait for the replica that is being started, or wake the Model by a request."),
    r.UNSCHEDULABLE: _fault(_CONTAINER, "Look at what the scheduler says of each node, and change nodes or Model."),
    r.ENGINE_FAILED: _fault(
        _ENGINE,
        "Read the engine's last lines (`kubectl logs POD -c engine --previous`); correct the spec or revert it.",
    ),
    r.PODS_REFUSED: _fault(_CONTAINER, "Change what refuses the pods: the message has the API server's own words."),
    r.RESOURCE_QUOTA: _fault(
        _CONTAINER, "Raise the ResourceQuota that the message names, free what uses it, or use fewer replicas."
    ),
    r.LIMIT_RANGE: _fault(
        _CONTAINER, "Raise the LimitRange of the namespace, or lower what the engine asks for in spec.pod.resources."
    ),
    r.CLAIM_NOT_CREATED: _fault(
        _CONTAINER,
        "Change what keeps the ResourceClaim from being made: the message has the API server's own words; "
        "kube-controller-manager makes it.",
    ),
    r.QUOTA_WAIT: _waits(
        _CONTROL, "Wait until the queue has quota; `kubectl get workloads` shows its order; more quota ends the wait."
    ),
    r.ADMISSION_CHECK: _waits(
        _CONTROL, "Wait until the check is ready; of a ProvisioningRequest, the autoscaler's answer is in its status."
    ),
    r.ADMISSION_REJECTED: _fault(
        _CONTROL,
        "See to what rejected it, such as stock or a limit of an autoscaler; then delete the pod to ask again at once.",
    ),
    r.ADMITTED: _fine(_CONTROL),
    r.QUEUE_IGNORED: _note(
        _CONTROL, "Install Kueue with the integration `pod` for this namespace, or remove the label of the queue."
    ),
    r.SCHEDULING_GATED: _waits(_CONTAINER, "Look at the controller that sets the gate: it removes it from the pod."),
    r.IMAGE_UNAVAILABLE: _fault(_CONTAINER, "Correct the image's name, or give the nodes access to its registry."),
    r.NAME_TAKEN: _fault(_CONTROL, "Delete or rename the object that the message names, if it may go."),
    r.REFUSED: _fault(_CONTROL, "Allow what the API server refuses: an admission policy or the operator's RBAC."),
    r.SCALED_TO_ZERO: _fine(_CONTROL),
    r.SCALING_UP: _waits(_CONTROL, "Wait: more replicas are starting."),
    r.SCALING_DOWN: _fine(_CONTROL),
    r.WAKING: _waits(_CONTROL, "Wait for the first replica; requests are held until then."),
    r.ROLLOUT_STALLED: _fault(_ENGINE, "Correct the new revision or revert it; the old revision goes on serving."),
    r.REPLACING_IN_PLACE: _waits(_CONTROL, "Wait; with one GPU more a rollout would not interrupt the Model."),
    r.SIGNALS_UNKNOWN: _note(_CONTROL, _NO_SIGNALS),
    r.CLASS_GARBLED: _fault(
        Layer.EXECUTION,
        "Compare driver, image and quantization of the named classes; leave the one that repeats itself out of "
        "spec.variants meanwhile.",
    ),
    r.SIGNALS_STALE: _note(_CONTROL, _NO_SIGNALS),
    r.ROGUE_POD: _note(_CONTROL, "Delete the pod: it has an engine's labels and belongs to no Model."),
    # --- Model: ScalingActive
    r.DRIVEN_BY_KEDA: _fine(_CONTROL),
    r.SWITCHING_DRIVER: _waits(_CONTROL, "Wait: the old driver scales until the new one is ready."),
    r.KEDA_NOT_INSTALLED: _fault(_CONTROL, "Install KEDA, or set spec.scaling.driver to BuiltIn."),
    r.KEDA_NOT_POLLING: _fault(
        _CONTROL, "Look at KEDA's operator: it does not call Shoal's scaler (certificate, network)."
    ),
    r.METRICS_UNAVAILABLE: _fault(
        _CONTROL, "Repair KEDA's metrics adapter, or the APIService external.metrics.k8s.io."
    ),
    r.SCALED_OBJECT_PAUSED: _note(_CONTROL, "Remove KEDA's pause annotation from the ScaledObject."),
    r.SCALED_OBJECT_REFUSED: _fault(_CONTROL, "Follow KEDA's message on the ScaledObject."),
    r.OTHER_AUTOSCALER: _fault(_CONTROL, "Delete the other HPA or ScaledObject of the Deployment."),
    # --- staging
    r.SOURCE_UNREACHABLE: _fault(_ARTIFACT, "Check network, proxy and NetworkPolicies between the pod and the source."),
    r.SOURCE_NOT_FOUND: _fault(
        _ARTIFACT, "Correct spec.source.uri: the source has no such repository, revision or file."
    ),
    r.SOURCE_REFUSED: _fault(
        _ARTIFACT, "Allow the source's host or folder in the chart value sources, or use another source."
    ),
    r.SOURCE_INVALID: _fault(_ARTIFACT, "Point the source at a model: config.json and weights in one folder."),
    r.TOO_LARGE: _fault(_ARTIFACT, "Use a smaller source, or raise the limit that the message names."),
    r.GATED: _fault(
        _ARTIFACT, "Put a token or key with access to the source into the Secret of spec.source.secretRef."
    ),
    r.DIGEST_MISMATCH: _fault(_ARTIFACT, "Do not use these files; compare source and mirror, then fetch again."),
    r.DISK_FULL: _fault(_ARTIFACT, "Free disk on the node, or give the cache or the pod's volume more room."),
    r.CACHE_UNAVAILABLE: _fault(_ARTIFACT, "Look at the node cache's pod on that node (DaemonSet shoal-cache)."),
    r.STAGE_FAILED: _fault(_ARTIFACT, "Read the log of the stage container: `kubectl logs POD -c stage --previous`."),
    # --- Tenant
    r.ACTIVE: _fine(_CLIENT),
    r.SUSPENDED: _fault(_CLIENT, "Set spec.suspended to false when the tenant may send requests again."),
    r.NO_USABLE_KEY: _fault(
        _CLIENT,
        "Create a key: `shoal keys create --tenant TENANT`; `shoal keys list --tenant TENANT` shows those it has.",
    ),
    r.MODEL_NOT_FOUND: _fault(_CLIENT, "Correct the names in spec.models of the Tenant, or create the Model."),
    r.KEY_CLAIMED: _fault(_CLIENT, "Remove the key from one of the two Tenants; the one that came first has it."),
    r.RULE_REFUSED: _fault(_CONTROL, "Correct the named rule in spec.logging.redact; until then no text is logged."),
    r.OTHER_CURRENCY: _fault(_CONTROL, "Write the budget in the currency of the price list."),
    r.ADAPTER_NOT_FOUND: _fault(_CLIENT, "Correct spec.adapters of the Tenant, or list the tenant in the adapter."),
    r.PRICES_UNKNOWN: _note(
        _CONTROL,
        "Correct the price list that the message names; if it names none, give the ledger one, or write the budget in "
        "tokens.",
    ),
    # --- LoRAPool
    r.POOL_READY: _fine(_ENGINE),
    r.ENGINE_REFUSES: _fault(_ENGINE, "Remove the argument of the Model that cannot be combined with adapters."),
    r.POOL_CLAIMED: _fault(_CONTROL, "Delete one of the two pools: a Model has one, the first."),
    r.ROLLING: _waits(_CONTROL, "Wait: the Model's replicas are replaced to get the pool's arguments."),
    # --- LoRAAdapter
    r.POOL_NOT_FOUND: _fault(_CONTROL, "Create the pool that spec.poolRef names, or correct the name."),
    r.NAMESPACE_NOT_ALLOWED: _fault(_CONTROL, "Allow the adapter's namespace in the pool, or move the adapter."),
    r.BASE_NAME_DIFFERS: _note(_ARTIFACT, "Check that the adapter was trained on the pool's model."),
    r.NOT_GRANTED: _note(_CLIENT, "Grant the adapter in the Tenant too: spec.models or spec.adapters."),
    r.READING_ADAPTER: _waits(_ARTIFACT, "Wait until the Job has read the adapter's metadata."),
    r.RANK_TOO_HIGH: _fault(_ARTIFACT, "Raise the pool's maximum rank, or train the adapter with a lower one."),
    r.MODULES_NOT_IN_POOL: _fault(_ARTIFACT, "Add the named modules to the pool."),
    r.BASE_MISMATCH: _fault(_ARTIFACT, "Put the adapter into a pool of the model that it was trained on."),
    r.CORRUPT: _fault(_ARTIFACT, "Upload the adapter again: its file is damaged or incomplete."),
    r.UNSUPPORTED: _fault(_ARTIFACT, "Merge the adapter into a model, or train it as plain LoRA."),
    r.NO_ROOM: _fault(_ENGINE, "Give the pool more slots, or make fewer adapters Pinned."),
    r.RESIDENT: _fine(_ENGINE),
    r.ON_DEMAND: _fine(_ENGINE),
    r.WAITS_FOR_REPLICA: _fine(_ENGINE),
    r.LOADING_ADAPTER: _waits(_ENGINE, "Wait: replicas are loading the adapter."),
    r.SWITCHING: _note(_ENGINE, "Wait: the newer revision is loaded beside the one in service."),
    r.SWITCHED: _fine(_ENGINE),
    r.LOAD_FAILED: _fault(_ENGINE, "Read the engine's message; correct the adapter or its pool."),
    r.LOAD_HANGS: _fault(
        _ENGINE, "Look at the replica's engine: it has not answered a load; Shoal replaces the replica."
    ),
    r.LOAD_ENDED_ENGINE: _fault(
        _ENGINE,
        "Read the engine's log before the restart (`kubectl logs POD -c engine --previous`); correct the adapter, or "
        "delete it.",
    ),
    # --- ModelRoute
    r.WEIGHTS_SUM_TO_ZERO: _fault(_CONTROL, "Give one target of the rule that the message names a weight above 0."),
    r.TARGET_NOT_FOUND: _fault(_CONTROL, "Correct the target's name in the route, or create the Model or adapter."),
    r.CIRCULAR_ROUTE: _fault(_CONTROL, "Name Models and adapters as targets, not another route."),
    r.NOT_PERMITTED: _fault(_CONTROL, "List the route's namespace in spec.routeNamespaces of the target."),
    r.EXTERNAL_NOT_ALLOWED: _fault(
        _CONTROL, "Ask whoever runs the installation to add the host to gateway.external.allowedHosts."
    ),
    r.SECRET_REFUSED: _fault(_CONTROL, "Create a Secret of type shoal.dev/external-target for this host."),
    r.TARGETS_READY: _fine(_CONTROL),
    r.CANARY_HALTED: _fault(
        _CONTROL, "Run `shoal why` for the canary's target; change or remove `canary` in the route."
    ),
    r.TARGETS_NOT_READY: _fault(_CONTROL, "Run `shoal why` for the targets: none of a rule can serve."),
    # --- an agent's refusals
    r.SLOTS_FULL: _fault(_ENGINE, "Give the pool more slots, or more replicas: all slots are in use."),
    r.DRAINING: _waits(_ENGINE, "Wait: the replica finishes its requests and leaves; others take new ones."),
    r.ENGINE_RESTARTED: _waits(_ENGINE, "Wait: the engine has restarted and loads its adapters again."),
    r.ENGINE_NOT_READY: _waits(_ENGINE, "Wait until the engine is ready."),
    r.NOT_LISTENING: _waits(_GATEWAY, "Wait: the gateway opens its stream to the agent again."),
}
"""Reason -> its layer and what to do. A test compares the rows with `api/reasons.py`."""
