"""Reasons that no condition of Shoal has: what nodes, pods, engines and the API server show of the cause."""

from collections.abc import Mapping
from typing import Final

from shoal.core.layers.advice import REASONS, LayerAdvice
from shoal.core.layers.layer import Layer

# --- L0 hardware ------------------------------------------------------------------------------------------------------
GPU_ECC_ERROR: Final = "GPUUncorrectableECC"
GPU_ECC_CONTAINED: Final = "GPUContainedECC"
"""An error of a GPU's memory ended one process. The GPU goes on."""
GPU_ECC_CORRECTED: Final = "GPUCorrectedECC"
"""A GPU corrects many errors of its memory."""
GPU_MEMORY_REPAIRED: Final = "GPUMemoryRepaired"
"""A GPU has set a damaged part of its memory aside."""
GPU_LOST: Final = "GPUFellOffBus"
GPU_UNHEALTHY: Final = "GPUUnhealthy"
"""The device plugin or the kubelet says that a GPU is not healthy."""
CORDONED_BY_PERSON: Final = "CordonedByPerson"
"""A person took GPUs out of Shoal's use."""
REPLICA_SLOW: Final = "ReplicaFarSlower"
"""A replica is far slower than the others of its Model and class."""
REPLICA_GARBLED: Final = "ReplicaAnswersDiffer"
"""A replica answers greedy requests otherwise than other GPUs of its class do."""
NODE_SILENT: Final = "NodeSilent"
"""The node's kubelet does not answer any more: the machine is off, hangs, or its network is cut."""
NODE_REBOOTED: Final = "NodeRebooted"
NODE_GONE: Final = "NodeGone"
"""A pod is bound to a node that does not exist any more."""
NODE_DISK_FAULT: Final = "NodeDiskFault"
MACHINE_FAULT: Final = "MachineFault"
"""The machine's own memory or processor reports an error that was not corrected."""
MACHINE_SUPPLY: Final = "MachinePowerOrCooling"
"""A power supply or fan of the machine fails, or it is too hot."""
KERNEL_FAULT: Final = "KernelFault"
"""The node's kernel hangs or is damaged."""
NODE_PROBLEM: Final = "NodeProblem"
"""A monitor of the node reports a problem of a kind that this program does not know."""
# --- L0.5 fabric ------------------------------------------------------------------------------------------------------
NVLINK_FAULT: Final = "NVLinkFault"
RDMA_DEVICE_LOST: Final = "RDMADeviceLost"
FABRIC_FAILED: Final = "FabricFailed"
"""A collective failed in its transport between machines or GPUs."""
# --- L1 driver --------------------------------------------------------------------------------------------------------
DRIVER_MISSING: Final = "DriverMissing"
DRIVER_TOO_OLD: Final = "DriverTooOld"
DRIVER_FAULT: Final = "DriverFault"
DRIVER_NOT_LOADED: Final = "DriverNotLoaded"
"""The node's kernel does not take the driver's module: there is none for this kernel, or it is not signed."""
VGPU_UNLICENSED: Final = "VGPUUnlicensed"
MIG_FAILED: Final = "MIGConfigFailed"
"""The node's MIG manager could not cut the GPUs."""
MPS_FAILED: Final = "MPSDaemonFails"
"""A process cannot reach the MPS daemon that shares the GPU."""
GPU_MONITOR: Final = "GPUMonitorFails"
"""What watches the GPUs of a node does not get through to them."""
DEVICE_PLUGIN_MISSING: Final = "DevicePluginMissing"
"""Nodes of the class offer no GPU: the device plugin does not run there, or finds no driver."""
DEVICE_ALLOCATION: Final = "DeviceAllocationFailed"
"""The kubelet admitted a pod, and the device plugin or DRA driver gave it no GPU."""
DEVICE_SPEC_MISSING: Final = "DeviceSpecMissing"
"""The container runtime finds no CDI specification of the GPU that the pod was given."""
GPUS_PARTITIONED: Final = "GPUsPartitioned"
"""Nodes of the class offer MIG slices in place of the GPUs that the class counts."""
# --- L2 container -----------------------------------------------------------------------------------------------------
NODE_NOT_READY: Final = "NodeNotReady"
"""The kubelet says that its node is not ready."""
NODE_CORDONED: Final = "NodeCordoned"
DISK_PRESSURE: Final = "DiskPressure"
MEMORY_PRESSURE: Final = "MemoryPressure"
PID_PRESSURE: Final = "PIDPressure"
NETWORK_UNAVAILABLE: Final = "NodeNetworkUnavailable"
RUNTIME_FAULT: Final = "ContainerRuntimeFault"
EVICTED: Final = "Evicted"
NODE_SHUTS_DOWN: Final = "NodeShutsDown"
PREEMPTED: Final = "Preempted"
"""A pod of a higher priority took the place."""
NO_SPACE: Final = "NoSpaceInContainer"
"""A volume of the pod, /dev/shm or its writable layer is full."""
OUT_OF_MEMORY: Final = "OutOfHostMemory"
"""A container was killed at its memory limit."""
SCHEDULER_AWAY: Final = "SchedulerAway"
"""No scheduler has looked at a pod."""
CONTROL_PLANE: Final = "ControlPlaneFault"
"""The API server or its etcd cannot do its work."""
PODS_NOT_MADE: Final = "PodsNotCreated"
"""A Deployment wants pods, nothing refuses them, and there are none."""
IMAGE_DENIED: Final = "ImageAccessDenied"
IMAGE_NOT_FOUND: Final = "ImageNotFound"
REGISTRY_UNREACHABLE: Final = "RegistryUnreachable"
IMAGE_LIMITED: Final = "ImagePullsLimited"
REGISTRY_CERTIFICATE: Final = "RegistryCertificateRefused"
PULL_SECRET_MISSING: Final = "PullSecretMissing"  # noqa: S105
WRONG_ARCHITECTURE: Final = "WrongArchitecture"
IMAGE_INCOMPLETE: Final = "ImageIncomplete"
"""The image lacks the program that is to be run, or a library."""
RUNS_AS_ROOT: Final = "ImageRunsAsRoot"
CONTAINER_CONFIG: Final = "ContainerConfigError"
HOOK_FAILED: Final = "LifecycleHookFailed"
"""A hook that runs after the start of a container failed, and the kubelet ended the container."""
MOUNT_FAILED: Final = "MountFailed"
SANDBOX_FAILED: Final = "PodNetworkFailed"
OBJECT_MISSING: Final = "RequiredObjectMissing"
"""Pods name a ServiceAccount, PriorityClass or RuntimeClass that does not exist."""
NAMESPACE_ENDS: Final = "NamespaceTerminating"
POD_SECURITY: Final = "PodSecurityRefused"
NETWORK_POLICY: Final = "NetworkPolicyBlocks"
"""NetworkPolicies keep gateways from a replica that is ready."""
NAMES_UNRESOLVED: Final = "NameResolutionFailed"
"""No name server answers: the cluster's DNS is away, or cut off."""
INJECTED_FAILED: Final = "InjectedContainerFailed"
"""A container of an engine's pod that Shoal has not put there ends with an error."""
WEBHOOK_REFUSED: Final = "WebhookRefused"
WEBHOOK_UNREACHABLE: Final = "WebhookUnreachable"
WEBHOOK_CERTIFICATE: Final = "WebhookCertificateRefused"
PATH_REFUSED: Final = "PathNotPermitted"
"""The container's user may not read or write a path."""
PROCESS_LIMIT: Final = "ProcessLimitReached"
"""A limit of the container's processes: open files, threads, locked memory."""
POD_STAYS: Final = "PodDoesNotEnd"
"""A pod was deleted, and its kubelet has not ended it in time."""
POD_REJECTED: Final = "PodRejectedByNode"
"""The kubelet refused or ended a pod for a reason that this program does not know."""
START_FAILED: Final = "PodDoesNotStart"
"""No container of a scheduled pod has started, for a reason that this program does not know."""
NODE_LEAVES: Final = "NodeLeaves"
"""An autoscaler or the cloud takes a node away."""
NODE_NOT_SET_UP: Final = "NodeNotSetUp"
"""A new node has a taint until its cloud provider or an agent has set it up."""
EVICTED_BY_REQUEST: Final = "EvictedByRequest"
"""A drain, a descheduler or an autoscaler evicted the pod over the API."""
GPUS_HELD: Final = "GPUsHeldByOthers"
"""Pods that are not Shoal's hold GPUs of the class."""
POD_RULES: Final = "PodRulesUnmatched"
"""Topology spread or rules about other pods leave no node."""
TAINT: Final = "TaintNotTolerated"
AFFINITY: Final = "NodeSelectorUnmatched"
TOO_FEW_GPUS: Final = "InsufficientGPUs"
TOO_FEW_RESOURCES: Final = "InsufficientCPUOrMemory"
VOLUME_MISSING: Final = "VolumeMissing"
VOLUME_UNBOUND: Final = "VolumeNotBound"
"""A claim exists, and no volume is bound to it."""
VOLUME_ELSEWHERE: Final = "VolumeElsewhere"
"""A volume can be used on other nodes only: it is local to them, or attached to one."""
# --- L2.5 artifact ----------------------------------------------------------------------------------------------------
WEIGHTS_CORRUPT: Final = "WeightsCorrupt"
WEIGHTS_INCOMPLETE: Final = "WeightsIncomplete"
WEIGHTS_MISMATCH: Final = "WeightsMismatch"
"""The weights do not fit the model's config."""
SOURCE_LIMITED: Final = "SourceLimitsRequests"
SOURCE_CERTIFICATE: Final = "SourceCertificateRefused"
SOURCE_ERRORS: Final = "SourceAnswersErrors"
"""The source is reached, and answers with errors of its own."""
# --- L3 execution -----------------------------------------------------------------------------------------------------
OUT_OF_GPU_MEMORY: Final = "OutOfGPUMemory"
NO_CACHE_MEMORY: Final = "NoMemoryForCache"
"""The weights fit on the GPUs, and leave no room for a KV cache."""
GPU_IN_USE: Final = "GPUMemoryInUse"
"""Another process has the GPU, or much of its memory."""
CUDA_ERROR: Final = "CUDAError"
NO_KERNEL: Final = "NoKernelForGPU"
NCCL_ERROR: Final = "NCCLError"
# --- L4 engine --------------------------------------------------------------------------------------------------------
ENGINE_ARGUMENTS: Final = "EngineArguments"
CHAT_TEMPLATE: Final = "ChatTemplateInvalid"
PORT_TAKEN: Final = "PortTaken"
ENGINE_CRASHED: Final = "EngineCrashed"
"""A signal of a program's own fault ended the engine: SIGSEGV, SIGABRT, SIGFPE."""
ARCHITECTURE_UNKNOWN: Final = "ArchitectureUnknown"
CONTEXT_TOO_LONG: Final = "ContextTooLong"
"""The engine refuses to start: the configured context is longer than the model's, or than its KV cache."""
REMOTE_CODE: Final = "RemoteCodeNeeded"
"""The model brings code of its own, and the engine may not run it."""
PARALLELISM: Final = "ParallelismImpossible"
"""The model cannot be cut into so many parts."""
QUANTIZATION: Final = "QuantizationUnsupported"
LOADS_TOO_LONG: Final = "LoadsTooLong"
"""The engine runs, and does not become ready."""
START_TIMEOUT: Final = "StartTimeout"
"""The kubelet ended the engine, because it was not ready in its time."""
UNRESPONSIVE: Final = "EngineUnresponsive"
"""An engine that was ready runs, and fails its readiness probe."""
ENGINE_STALLED: Final = "EngineStalled"
ENGINE_STOPPED: Final = "EngineStopped"
"""A signal ended the engine, and nothing says why."""
# --- L5 gateway -------------------------------------------------------------------------------------------------------
GATEWAYS_NOT_READY: Final = "GatewaysNotReady"
GATEWAY_ALONE: Final = "GatewayWithoutPeers"
EXTERNAL_UNREACHABLE: Final = "ExternalTargetUnreachable"
EXTERNAL_CERTIFICATE: Final = "ExternalCertificateRefused"
EXTERNAL_KEY: Final = "ExternalKeyRefused"
EXTERNAL_BUSY: Final = "ExternalTargetBusy"
EXTERNAL_SLOW: Final = "ExternalTargetSlow"
EXTERNAL_ERRORS: Final = "ExternalTargetFails"
SPOOL_FULL: Final = "UsageSpoolRefuses"
"""No gateway can write usage records to its disk: it is full, read-only or gone."""
# --- L6 client --------------------------------------------------------------------------------------------------------
NOTHING_GRANTED: Final = "NothingGranted"
BUDGET_USED: Final = "BudgetUsedUp"
BUDGET_LOW: Final = "BudgetNearlyUsed"
KEY_EXPIRED: Final = "KeyExpired"
"""A key of a Tenant has expired; others may be usable."""
TARGET_NOT_SERVING: Final = "TargetNotServing"
"""A Model or adapter that a tenant may use, or that a route leads to, does not serve."""
# --- control ----------------------------------------------------------------------------------------------------------
OPERATOR_AWAY: Final = "OperatorNotLeading"
DELETION_HELD: Final = "DeletionHeld"
"""An object is being deleted, and finalizers hold it."""
OUT_OF_DATE: Final = "StatusOutOfDate"
"""The status describes an earlier generation of the spec."""
PERMISSION_MISSING: Final = "PermissionMissing"
PRICES_REFUSED: Final = "PriceListsRefused"
"""The ledger refuses the price lists in its folder, all together."""
CONTAINER_FAILED: Final = "ContainerFailed"
"""Another container than the engine's keeps ending."""
UNKNOWN_REASON: Final = "UnknownReason"


def _fault(layer: Layer, do: str) -> LayerAdvice:
    return LayerAdvice(layer, "fault", do)


_HW, _FABRIC, _DRIVER, _CONTAINER = Layer.HARDWARE, Layer.FABRIC, Layer.DRIVER, Layer.CONTAINER
_ARTIFACT, _EXECUTION, _ENGINE, _CONTROL = Layer.ARTIFACT, Layer.EXECUTION, Layer.ENGINE, Layer.CONTROL

FAULTS: Final[Mapping[str, LayerAdvice]] = {
    GPU_ECC_ERROR: _fault(_HW, "Cordon the node and reset the GPU; replace it if the error comes back."),
    GPU_ECC_CONTAINED: _fault(
        _HW, "Let the engine start again: the GPU may go on; reset it when convenient, and replace it if this repeats."
    ),
    GPU_ECC_CORRECTED: LayerAdvice(
        _HW, "note", "Watch the GPU: nothing fails; run the vendor's diagnosis if the errors go on."
    ),
    GPU_MEMORY_REPAIRED: LayerAdvice(
        _HW, "note", "Nothing at once: the GPU goes on; reset it at the next maintenance, which completes the repair."
    ),
    GPU_LOST: _fault(_HW, "Cordon the node and restart the machine; have the GPU and its slot checked."),
    GPU_UNHEALTHY: _fault(_HW, "Cordon the node and run the vendor's diagnosis of its GPUs."),
    CORDONED_BY_PERSON: LayerAdvice(_HW, "note", "Put them back with `shoal uncordon` when they may be used again."),
    REPLICA_SLOW: _fault(_HW, "Look at the GPU's clocks, power and temperature; compare it with its neighbours."),
    REPLICA_GARBLED: _fault(_HW, "Run the vendor's diagnosis of the GPU's memory: its results are wrong."),
    NODE_SILENT: _fault(_HW, "Check the machine: power, console, network; delete the Node object if it is gone."),
    NODE_REBOOTED: LayerAdvice(
        _HW, "note", "Find out what restarted the machine, if nobody meant to: all that ran there has started anew."
    ),
    NODE_GONE: _fault(
        _HW, "Wait until Kubernetes has deleted the node's pods; if nobody removed it, check the machine."
    ),
    NODE_DISK_FAULT: _fault(_HW, "Cordon the node and have its disk checked: its filesystem is read-only or damaged."),
    MACHINE_FAULT: _fault(_HW, "Cordon the node, and have the machine's memory and processors checked."),
    MACHINE_SUPPLY: _fault(_HW, "Cordon the node, and have the machine's power supplies, fans and cooling checked."),
    KERNEL_FAULT: _fault(_HW, "Cordon the node and restart the machine; its kernel's log says what hangs."),
    NODE_PROBLEM: _fault(
        _HW, "Ask whoever runs the node what its monitor means; cordon the node until the report has gone."
    ),
    NVLINK_FAULT: _fault(_FABRIC, "Cordon the node, restart its fabric manager, and have the NVLinks checked."),
    RDMA_DEVICE_LOST: _fault(_FABRIC, "Check the RDMA adapters of the node, their cables, and the RDMA device plugin."),
    FABRIC_FAILED: _fault(
        _FABRIC, "Check links between the GPUs and machines of the replica: NVLink, InfiniBand, NICs."
    ),
    DRIVER_MISSING: _fault(_DRIVER, "Install the GPU driver and the container toolkit on the node."),
    DRIVER_TOO_OLD: _fault(_DRIVER, "Install a driver that is new enough for the CUDA version of the engine's image."),
    DRIVER_FAULT: _fault(_DRIVER, "Restart the machine; install another driver version if the error comes back."),
    DRIVER_NOT_LOADED: _fault(
        _DRIVER,
        "Build the driver's module for the kernel that the node runs (driver pod, DKMS, headers), and sign it where "
        "Secure Boot asks for that.",
    ),
    VGPU_UNLICENSED: _fault(
        _DRIVER, "Give the node's vGPU a licence: its token, and the way to the licence server; see nvidia-gridd's log."
    ),
    MIG_FAILED: _fault(
        _DRIVER,
        "Drain the node so that no process uses its GPUs; then let the MIG manager try again, or restart the machine.",
    ),
    MPS_FAILED: _fault(
        _DRIVER, "Restart the MPS daemon on the node (with its device plugin or DRA driver), or turn MPS off there."
    ),
    GPU_MONITOR: LayerAdvice(
        _DRIVER,
        "note",
        "Look at DCGM and its monitor on the node; where nvidia-smi hangs there too, restart the machine.",
    ),
    DEVICE_PLUGIN_MISSING: _fault(_DRIVER, "Start the GPU device plugin on these nodes, and read its log."),
    DEVICE_ALLOCATION: _fault(
        _DRIVER,
        "Restart the GPU device plugin on the node (or its DRA driver), and read its log: it gave a pod no GPU; "
        "then delete the pod.",
    ),
    DEVICE_SPEC_MISSING: _fault(
        _DRIVER, "Generate the node's CDI specification again: restart its device plugin, DRA driver or toolkit."
    ),
    GPUS_PARTITIONED: _fault(
        _DRIVER,
        "Turn MIG off or cut it as the class counts (nvidia.com/mig.config), or name the slices in a GPUClass's "
        "resourceName.",
    ),
    NODE_NOT_READY: _fault(_CONTAINER, "Read the kubelet's log on the node: its condition says what is missing."),
    NODE_CORDONED: LayerAdvice(_CONTAINER, "note", "Uncordon the node when it may take pods again."),
    DISK_PRESSURE: _fault(
        _CONTAINER, "Free disk or inodes on the node: unused images, logs, many small files, the node cache's quota."
    ),
    MEMORY_PRESSURE: _fault(_CONTAINER, "Find what uses the node's memory, and give its pods limits."),
    PID_PRESSURE: _fault(_CONTAINER, "Find what starts so many processes on the node."),
    NETWORK_UNAVAILABLE: _fault(_CONTAINER, "Look at the network plugin's pod on the node."),
    RUNTIME_FAULT: _fault(_CONTAINER, "Restart the container runtime on the node, and read its log."),
    EVICTED: _fault(_CONTAINER, "Give the node more of what it ran short of, or the pod a larger request."),
    NODE_SHUTS_DOWN: _fault(_CONTAINER, "Wait until the node is back, or find out who shuts it down."),
    PREEMPTED: _fault(
        _CONTAINER, "Give the engines a PriorityClass as high as that of the pod that took the place, or add GPUs."
    ),
    NO_SPACE: _fault(
        _CONTAINER,
        "Give the pod's volumes, its limit of ephemeral-storage, /dev/shm or the node's disk more room: one of them "
        "is full.",
    ),
    OUT_OF_MEMORY: _fault(
        _CONTAINER,
        "Raise the memory of the container: of engines spec.pod.resources or engines.memoryPerGPU, of Shoal's own "
        "pods `resources` in the chart.",
    ),
    SCHEDULER_AWAY: _fault(
        _CONTAINER, "Look at kube-scheduler: it has not looked at the pod, and binds none to a node."
    ),
    CONTROL_PLANE: _fault(
        _CONTAINER, "Look at the cluster's API server and its etcd: space, leader, health; they refuse the work."
    ),
    PODS_NOT_MADE: _fault(
        _CONTAINER, "Look at kube-controller-manager and the ReplicaSet: replicas are wanted, and no pod is created."
    ),
    IMAGE_DENIED: _fault(_CONTAINER, "Give the pods a pull secret that the registry accepts."),
    IMAGE_NOT_FOUND: _fault(_CONTAINER, "Correct the image's name or tag, or push the image."),
    REGISTRY_UNREACHABLE: _fault(_CONTAINER, "Check the node's network and proxy on the way to the registry."),
    IMAGE_LIMITED: _fault(
        _CONTAINER, "Pull with an account of the registry (a pull secret), or through a mirror: it limits pulls."
    ),
    REGISTRY_CERTIFICATE: _fault(
        _CONTAINER,
        "Let the nodes' container runtime trust the registry's CA (or its plain HTTP), or have its certificate "
        "renewed.",
    ),
    PULL_SECRET_MISSING: _fault(
        _CONTAINER, "Create the pull secret that the message names in the pod's namespace, or correct its name."
    ),
    WRONG_ARCHITECTURE: _fault(_CONTAINER, "Use an image for the node's processor architecture."),
    IMAGE_INCOMPLETE: _fault(
        _CONTAINER, "Use an image that has the engine and its libraries: what the message names is not in this one."
    ),
    RUNS_AS_ROOT: _fault(_CONTAINER, "Use an image with a numeric user other than 0: the pods may not run as root."),
    CONTAINER_CONFIG: _fault(
        _CONTAINER,
        "Create the Secret or ConfigMap that the message names, or what else it misses on the node, such as a seccomp "
        "or AppArmor profile.",
    ),
    HOOK_FAILED: _fault(
        _CONTAINER, "Correct the container's postStart hook: who put it there, or the image that lacks its program."
    ),
    MOUNT_FAILED: _fault(
        _CONTAINER,
        "Look at the volume and its driver (server, path, permissions, read-only, file system): the kubelet cannot "
        "mount it.",
    ),
    SANDBOX_FAILED: _fault(
        _CONTAINER,
        "Look at the network plugin's pod on the node (CNI agent), its free addresses, and networks that "
        "annotations name.",
    ),
    OBJECT_MISSING: _fault(
        _CONTAINER,
        "Create the ServiceAccount, PriorityClass or RuntimeClass that the message names, or correct its name.",
    ),
    NAMESPACE_ENDS: _fault(
        _CONTAINER,
        "Use another namespace: this one is being deleted; if that hangs, see its conditions for what remains.",
    ),
    POD_SECURITY: _fault(
        _CONTAINER,
        "Relax the namespace's Pod Security level, or take out what the message names: chart value pods, or a webhook.",
    ),
    NETWORK_POLICY: _fault(
        _CONTAINER, "Allow gateways to connect to replicas in the NetworkPolicy that the message names, or delete it."
    ),
    NAMES_UNRESOLVED: _fault(
        _CONTAINER, "Look at the cluster's DNS pods, and at network and NetworkPolicies on the pod's way to them."
    ),
    INJECTED_FAILED: _fault(
        _CONTAINER,
        "Read this container's log; a webhook, policy or mesh put it into the pod, and sets its memory and arguments.",
    ),
    WEBHOOK_REFUSED: _fault(_CONTAINER, "Change the policy behind the admission webhook, or what it objects to."),
    WEBHOOK_UNREACHABLE: _fault(_CONTAINER, "Start the admission webhook that the message names: it does not answer."),
    WEBHOOK_CERTIFICATE: _fault(
        _CONTAINER, "Renew the certificate of the admission webhook that the message names, or its caBundle."
    ),
    PATH_REFUSED: _fault(
        _CONTAINER,
        "Let the container's user use the path that the message names: the image's or volume's permissions "
        "(fsGroup), or a volume of its own there.",
    ),
    PROCESS_LIMIT: _fault(
        _CONTAINER, "Raise the limit that the message names on the node or its container runtime: files, threads."
    ),
    POD_STAYS: _fault(
        _CONTAINER,
        "Look at the node's kubelet and runtime; if the machine is off, taint it node.kubernetes.io/out-of-service.",
    ),
    POD_REJECTED: _fault(_CONTAINER, "Change on the node, or in the pod, what the kubelet's message names."),
    START_FAILED: _fault(_CONTAINER, "Repair what the event names: until then no container of the pod starts."),
    NODE_LEAVES: _fault(
        _CONTAINER, "Wait for another node; if it was to stay, see why its autoscaler or the cloud takes it away."
    ),
    NODE_NOT_SET_UP: _fault(
        _CONTAINER, "Look at what takes the taint off: cloud-controller-manager, or the agent that the taint names."
    ),
    EVICTED_BY_REQUEST: _fault(
        _CONTAINER, "Wait for its successor on another node; if unwanted, see who drains the node or evicts its pods."
    ),
    GPUS_HELD: LayerAdvice(
        _CONTAINER,
        "note",
        "End or move the pods that the message names, or give them a resourceName or nodes of their own.",
    ),
    POD_RULES: _fault(
        _CONTAINER,
        "Relax the topology spread, (anti-)affinity or host port that a webhook or policy wrote, or add nodes.",
    ),
    TAINT: _fault(_CONTAINER, "Add a toleration to the GPUClass, or remove the taint from the nodes."),
    AFFINITY: _fault(_CONTAINER, "Correct the nodeSelector of the GPUClass: no node has these labels."),
    TOO_FEW_GPUS: _fault(
        _CONTAINER,
        "Free or add GPUs, or the other devices that the message names (RDMA), on one node of the class: no node has "
        "enough left.",
    ),
    TOO_FEW_RESOURCES: _fault(
        _CONTAINER,
        "Add CPU or memory to the nodes, or lower requests: engines.cpuPerGPU, engines.memoryPerGPU, of Shoal's "
        "pods `resources` in the chart.",
    ),
    VOLUME_MISSING: _fault(_CONTAINER, "Create the PersistentVolumeClaim that the message names."),
    VOLUME_UNBOUND: _fault(
        _CONTAINER,
        "Let the PersistentVolumeClaim bind: correct its StorageClass, start its provisioner, or make a "
        "volume that fits.",
    ),
    VOLUME_ELSEWHERE: _fault(
        _CONTAINER,
        "Use a volume that many nodes may mount (ReadOnlyMany), or free it there: it is local or attached to "
        "another node.",
    ),
    WEIGHTS_CORRUPT: _fault(_ARTIFACT, "Delete the cached copy, compare checksums with the source, and fetch again."),
    WEIGHTS_INCOMPLETE: _fault(_ARTIFACT, "Add the files that the engine misses to the source."),
    WEIGHTS_MISMATCH: _fault(_ARTIFACT, "Use weights and config.json of the same model and quantization."),
    SOURCE_LIMITED: _fault(
        _ARTIFACT, "Wait, or give the source a token or a mirror (hubEndpoint): it limits how often it is asked."
    ),
    SOURCE_CERTIFICATE: _fault(
        _ARTIFACT, "Add the CA of the source to the chart's caBundle, or have the source's certificate renewed."
    ),
    SOURCE_ERRORS: _fault(
        _ARTIFACT, "Look at the source or its mirror: it is reached and answers with errors; Shoal tries again."
    ),
    OUT_OF_GPU_MEMORY: _fault(
        _EXECUTION, "Use a class with more memory or more GPUs, a shorter context, or a smaller memory fraction."
    ),
    NO_CACHE_MEMORY: _fault(
        _EXECUTION, "Use more GPUs, a class with more memory, quantized weights, or a larger memory fraction."
    ),
    GPU_IN_USE: _fault(
        _EXECUTION, "Find what else uses the GPU (nvidia-smi on the node): a process that was left, or a pod beside it."
    ),
    CUDA_ERROR: _fault(
        _EXECUTION, "Try another engine version; if it happens on one node only, have its GPUs diagnosed."
    ),
    NO_KERNEL: _fault(_EXECUTION, "Use an engine image that was built for this GPU, or another class."),
    NCCL_ERROR: _fault(
        _EXECUTION,
        "Read the first error of the replica's ranks with NCCL_DEBUG=INFO; check /dev/shm, links, and the network of "
        "its pods (GLOO_SOCKET_IFNAME).",
    ),
    ENGINE_ARGUMENTS: _fault(
        _ENGINE,
        "Correct or remove what the message names, in spec.engine.extraArgs or elsewhere in spec.engine (parsers, "
        "speculation).",
    ),
    CHAT_TEMPLATE: _fault(
        _ENGINE, "Correct the chat template in the model's files, or the one that `--chat-template` names."
    ),
    PORT_TAKEN: _fault(
        _ENGINE, "Take `--port` out of extraArgs, or the container out of the pod that listens on the engine's port."
    ),
    ENGINE_CRASHED: _fault(
        _ENGINE, "Try another engine version; report the crash to its makers with the log (`kubectl logs --previous`)."
    ),
    ARCHITECTURE_UNKNOWN: _fault(_ENGINE, "Use an engine version that knows the model's architecture."),
    CONTEXT_TOO_LONG: _fault(_ENGINE, "Lower the context length of the Model, or use a class with more memory."),
    REMOTE_CODE: _fault(
        _ENGINE,
        "Add the engine's argument for code of the model's own, if you trust the source; else use another model.",
    ),
    PARALLELISM: _fault(
        _ENGINE,
        "Choose spec.engine.parallelism so that the replica has so many GPUs, and the model's heads and layers can "
        "be divided by it.",
    ),
    QUANTIZATION: _fault(
        _ENGINE, "Use a quantization that the weights, the engine version and the GPU support, or another class."
    ),
    LOADS_TOO_LONG: _fault(
        _ENGINE, "Read the engine's log (`kubectl logs POD -c engine`): it hangs while loading; then delete the pod."
    ),
    START_TIMEOUT: _fault(
        _ENGINE,
        "Read the log before the restart (`kubectl logs POD -c engine --previous`): loading took too long; a cache "
        "near the node makes it shorter.",
    ),
    UNRESPONSIVE: _fault(
        _ENGINE, "Read the engine's log: it runs and does not answer its readiness probe; delete the pod if it hangs."
    ),
    ENGINE_STALLED: _fault(_ENGINE, "Read the log before the restart: the engine stopped making progress."),
    ENGINE_STOPPED: _fault(
        _ENGINE, "Look at events of node and pod: a signal ended the engine, and it wrote no reason."
    ),
    GATEWAYS_NOT_READY: _fault(Layer.GATEWAY, "Look at the gateways' pods and logs: none is ready to take requests."),
    GATEWAY_ALONE: LayerAdvice(
        Layer.GATEWAY, "note", "Start the other gateways: alone, one does not know what others count towards quotas."
    ),
    EXTERNAL_UNREACHABLE: _fault(
        Layer.GATEWAY,
        "Check the target's url, and the gateways' way to it: DNS, firewall, egress NetworkPolicies.",
    ),
    EXTERNAL_CERTIFICATE: _fault(
        Layer.GATEWAY, "Have the target's certificate renewed, or give the CA that signed it in the target's caBundle."
    ),
    EXTERNAL_KEY: _fault(
        Layer.GATEWAY, "Put a key that the provider accepts into the Secret that the target's credentials name."
    ),
    EXTERNAL_BUSY: _fault(
        Layer.GATEWAY, "Ask the provider for a larger limit, raise maxConcurrentRequests, or give the route a fallback."
    ),
    EXTERNAL_SLOW: _fault(
        Layer.GATEWAY, "Raise the target's timeouts, ask its provider why it is slow, or give the route a fallback."
    ),
    EXTERNAL_ERRORS: _fault(
        Layer.GATEWAY, "Compare url and model of the target with the provider's, see its status, or add a fallback."
    ),
    SPOOL_FULL: _fault(
        Layer.GATEWAY,
        "Make the ledger take the records, or give gateway.persistence more room; see df in the gateway's pod.",
    ),
    NOTHING_GRANTED: _fault(Layer.CLIENT, "Grant Models in spec.models of the Tenant, or adapters in spec.adapters."),
    BUDGET_USED: _fault(Layer.CLIENT, "Raise spec.budget of the Tenant, or wait for the next calendar month (UTC)."),
    BUDGET_LOW: LayerAdvice(Layer.CLIENT, "note", "Raise spec.budget of the Tenant before it is used up."),
    KEY_EXPIRED: LayerAdvice(
        Layer.CLIENT,
        "note",
        "Create a key in its place: `shoal keys create --tenant TENANT`; `shoal keys remove` removes the old one.",
    ),
    TARGET_NOT_SERVING: LayerAdvice(
        Layer.CLIENT, "note", "Run `shoal why` for the Model or adapter that does not serve."
    ),
    PRICES_REFUSED: _fault(
        _CONTROL,
        "Correct the files at the named lines (`kubectl shoal prices check` tells the same), or take them out.",
    ),
    OPERATOR_AWAY: _fault(
        _CONTROL, "Look at the operator's pods: no operator leads, so nothing is decided or repaired."
    ),
    DELETION_HELD: _fault(
        _CONTROL, "Let the owner of the finalizer that the message names finish, or remove it if that has gone."
    ),
    OUT_OF_DATE: LayerAdvice(_CONTROL, "waits", "Wait a few seconds; if it stays, run `shoal doctor`."),
    PERMISSION_MISSING: _fault(_CONTROL, "Grant the process what the message names; the chart's roles have it."),
    CONTAINER_FAILED: _fault(
        _CONTROL, "Read the container's log before its end: `kubectl logs POD -c NAME --previous`."
    ),
    UNKNOWN_REASON: LayerAdvice(_CONTROL, "note", "Use a version of this command that is as new as the operator."),
}
"""Reason -> its layer and what to do."""


def advice(reason: str) -> LayerAdvice:
    """The row of a reason. A reason of another version is `UNKNOWN_REASON`'s."""
    return REASONS.get(reason) or FAULTS.get(reason) or FAULTS[UNKNOWN_REASON]


def layer_of(reason: str) -> Layer | None:
    """The layer of a reason; None: it is a reason of another version."""
    row = REASONS.get(reason) or FAULTS.get(reason)
    return row.layer if row is not None else None


def layer_label(reason: str) -> str:
    """The layer of a reason as a metric's label; "": it is a reason of another version."""
    layer = layer_of(reason)
    return "" if layer is None else layer.value
