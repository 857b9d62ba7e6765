"""Faults of a second round that was written down before the rules of `core/layers` were read again, as snapshots."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

from shoal.api.gpuclass import devices_of
from shoal.core.layers.types import BudgetView, ExternalTargetView, GPUHolder, WhySnapshot
from tests.faults.further import STARTS, node_says, not_started, rejected
from tests.faults.test_faults import (
    CLASS,
    FULL,
    Fault,
    engine_world,
    failed,
    image_world,
    waits_for_gpus,
)
from tests.faults.worlds import (
    CLASS_LABELS,
    GPU,
    adapter,
    condition,
    crashed,
    engine,
    event,
    node,
    not_ready,
    pending,
    pod,
    seen,
    tenant,
)

PREEMPTION = "preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."
SHORT = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
SET = "llama-h100-80gb-7c9"
"""A ReplicaSet."""


def on_node(text: str) -> WhySnapshot:
    """An engine with a CUDA error, on a node of which a monitor reports an event."""
    return node_says(event("Node", "gpu-1", "MonitorSays", text))


def disrupted(reason: str, text: str, **more: Any) -> WhySnapshot:
    """A pod that something takes away."""
    target = condition("DisruptionTarget", "True", reason, text)
    gone = pod(engine(), phase="Failed", conditions=[target, condition("Ready", "False", "PodFailed")])
    return seen(STARTS, pods=(gone,), nodes=(node(),), **more)


def unset(reason: str, text: str) -> WhySnapshot:
    """A container that the runtime cannot make."""
    return seen(STARTS, pods=(pod(engine(waiting=(reason, text))),), nodes=(node(),))


def taken(reason: str, text: str) -> WhySnapshot:
    """A replica that went, and whose successor finds no GPU."""
    waits = pending(SHORT, f"{SET}-new")
    waits["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": SET, "controller": True}]
    return seen(not_ready("Unschedulable", f"pod chat/{SET}-new: {SHORT}"), pods=(waits,),
                events=(event("Pod", f"{SET}-old", reason, text),))  # fmt: skip


def stays(*finalizers: str) -> WhySnapshot:
    """A pod that was to end ten minutes ago."""
    there = pod(engine(running=True))
    there["metadata"] |= {"deletionTimestamp": "2026-11-26T11:50:00Z", "finalizers": list(finalizers)}
    return replace(seen(pods=(there,), nodes=(node(),)), kind="pod")


def wrong_slices() -> WhySnapshot:
    counted = replace(CLASS, spec={"nodeSelector": CLASS_LABELS, "resourceName": "nvidia.com/mig-3g.40gb"})
    short = f"0/4 nodes are available: 4 Insufficient nvidia.com/mig-3g.40gb. {PREEMPTION}"
    slices = node(gpus=0, devices={"nvidia.com/mig-1g.10gb": (7, 7)})
    return waits_for_gpus(short, related=(counted,), nodes=(slices,))


OTHERS = GPUHolder("ml-train/train-0", "gpu-1", {GPU: 6})
OF_DEVICES = replace(CLASS, spec={"device": {"deviceClassName": "gpu.nvidia.com"}})
TEAM = {"key": "team", "value": "ml", "effect": "NoSchedule"}
ON_NODE = {"h100-80gb": {"gpu-1": 8}}
CLAIMS = GPUHolder("ml-train/train-0", "gpu-1", {devices_of("h100-80gb"): 6})


def fails(outcome: str) -> WhySnapshot:
    """A route with an external target."""
    failed = ExternalTargetView("chat/best/outside", "shoal-gateway-1", outcome, 3, rests=False)
    return replace(seen(kind="route"), externals=(failed,))


def spent(used: str, **spec: Any) -> WhySnapshot:
    """A Tenant that may use 50 EUR in the month."""
    budget = BudgetView(Decimal(used), Decimal(50), "EUR", "2026-11")
    granted = {"models": [{"namespace": "chat", "name": "llama"}]} | spec
    return replace(seen(tenant(condition("Ready", "True", "Active"), spec=granted)), budget=budget)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
DBE = "ErrorCode:DCGM_FR_VOLATILE_DBE_DETECTED GPU:4 Detected 2 volatile double-bit ECC error(s) in GPU 4."
SICK = "0/6 nodes are available: 2 node(s) had untolerated taint {nvidia.com/gpu.unhealthy: true}, 4 Insufficient GPUs"
CAPTURE = "Not enough memory; Please try to increase --mem-fraction-static. loading the model weights left 0.4 GB"
TEMPLATE = "Chat template /m/chat.jinja is not a built-in template name or a valid chat template file path."
CDI = "failed to create containerd task: failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=GPU-1"
READ_ONLY = 'error mounting "/x" to rootfs at "/models": mkdirat /run/containerd/models: read-only file system'
HOOK = 'failed calling webhook "v.corp.io": Post "https://v.hooks.svc:443/": x509: certificate has expired'
SPREAD = f"0/4 nodes are available: 4 node(s) didn't match pod topology spread constraints. {PREEMPTION}"
APART = "0/4 nodes are available: 1 node(s) didn't match pod anti-affinity rules, 3 node(s) didn't match Pod's node"
LEAVING = "0/4 nodes are available: 4 node(s) had untolerated taint {ToBeDeletedByClusterAutoscaler: 1764230400}."
NEW = "0/4 nodes are available: 4 node(s) had untolerated taint {node.cloudprovider.kubernetes.io/uninitialized: true}."
PIDS = "0/4 nodes are available: 4 node(s) had untolerated taint {node.kubernetes.io/pid-pressure: }."
FABRIC = condition("FabricManagerNotRunning", "True", "ServiceDown", "nvidia-fabricmanager.service is not active")
OLD_TOKENIZER = "Exception: data did not match any variant of untagged enum ModelWrapper at line 757479 column 3"
BUSY = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
TOOLCHAIN = "RuntimeError: the provided PTX was compiled with an unsupported toolchain."
REPEATED = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000"

UNSEEN = [
    # --- L0
    Fault("a kernel that failed", on_node("BUG: unable to handle kernel NULL pointer dereference"), "L0",
          "KernelFault", "restart the machine", ("CUDAError",)),
    Fault("a file system with errors", on_node("EXT4-fs error (device nvme0n1p1): I/O error"), "L0", "NodeDiskFault",
          "disk checked", ("CUDAError",)),
    Fault("a PCIe error that was not corrected",
          on_node("pcieport 0000:00:01.1: AER: Uncorrected (Fatal) error received"), "L0", "MachineFault",
          "machine's memory", ("CUDAError",)),
    Fault("weights on a disk that cannot be read",
          engine_world("OSError: [Errno 5] Input/output error: '/m/a.bin'"), "L0", "NodeDiskFault", "disk checked"),
    Fault("a GPU that the driver cannot initialize",
          on_node("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x0)"), "L0", "GPUFellOffBus", "slot checked",
          ("CUDAError",)),
    Fault("GPUs that a health agent finds with double-bit errors",
          node_says(conditions=(condition("GpuMemWatch", "True", "GpuMemWatchIsNotHealthy", DBE),)), "L0",
          "GPUUncorrectableECC", "reset the GPU", ("CUDAError",)),
    Fault("sick GPUs beside others that are in use", waits_for_gpus(SICK), "L0", "GPUUnhealthy", "Cordon the node"),
    # --- L0.5, L1
    Fault("an error of an NVSwitch", on_node("nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 12028, Non-fatal, Link 32"),
          "L0.5", "NVLinkFault", "NVLinks checked", ("CUDAError",)),
    Fault("a failure of the fabric in words that nobody knows",
          engine_world("RuntimeError: [SymmDeviceMemory] Device does not support multicasting."), "L0.5",
          "FabricFailed", "NVLink"),
    Fault("a multicast that NCCL cannot bind",
          engine_world("NCCL WARN NVLS: Call to cuMulticastBindMem failed : invalid argument"), "L0.5", "FabricFailed",
          "NVLink"),
    Fault("a fabric manager whose health a monitor reports",
          node_says(conditions=(condition("GpuFabricManager", "True", "Unhealthy", "x"),)), "L0.5", "NVLinkFault",
          "fabric manager", ("CUDAError",)),
    Fault("a cable that was unplugged", on_node("mlx5_core 0000:ca:00.0: Port module event: Cable unplugged"), "L0.5",
          "RDMADeviceLost", "cables", ("CUDAError",)),
    Fault("a driver that cannot be initialized",
          engine_world("RuntimeError: CUDA unknown error - this may be due to x"), "L1", "DriverFault",
          "Restart the machine"),
    Fault("a driver whose parts do not go together",
          engine_world("CUDA error: system has unsupported display driver / cuda driver combination"), "L1",
          "DriverFault", "another driver version"),
    Fault("claims of a driver that does not answer",
          waits_for_gpus("0/4 nodes are available: waiting for resource driver to allocate resource."), "L1",
          "NoDevices", "resourceslices"),
    Fault("a fabric manager that a node's monitor reports",
          seen(failed("x"), pods=(pod(crashed("RuntimeError: Error 802: system not yet initialized")),),
               nodes=(node(FABRIC),)), "L0.5", "NVLinkFault", "fabric manager", ("EngineFailed",),
          "FabricManagerNotRunning=True"),
    Fault("a GPU of which the runtime has no CDI specification", unset("RunContainerError", CDI), "L1",
          "DeviceSpecMissing", "CDI specification", ("Starting",)),
    Fault("a GPU that the node does not have any more",
          engine_world("nvidia-container-cli: device error: GPU-4bf: unknown device: unknown", 128), "L1",
          "DeviceAllocationFailed", "device plugin"),
    Fault("a class of MIG slices whose nodes are cut otherwise", wrong_slices(), "L1", "GPUsPartitioned",
          "nvidia.com/mig.config", ("InsufficientGPUs",)),
    Fault("kernels of a CUDA that the driver does not know", engine_world(TOOLCHAIN), "L1", "DriverTooOld",
          "new enough"),
    # --- L2
    Fault("a node whose container runtime is down",
          node_says(conditions=(condition("Ready", "False", "KubeletNotReady", "container runtime is down"),)), "L2",
          "ContainerRuntimeFault", "container runtime", ("CUDAError",)),
    Fault("an etcd without space", seen(not_ready("PodsRefused", "etcdserver: mvcc: database space exceeded")), "L2",
          "ControlPlaneFault", "etcd"),
    Fault("a shared memory that is full beside a collective",
          engine_world("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030528 bytes: No space left on device"),
          "L2", "NoSpaceInContainer", "/dev/shm"),
    Fault("a volume whose server went away", engine_world("OSError: [Errno 116] Stale file handle: '/m/config.json'"),
          "L2", "MountFailed", "volume and its driver"),
    Fault("a process of the engine that the kernel killed",
          engine_world("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9"),
          "L2", "OutOfHostMemory", "Raise the memory"),
    Fault("a library of another version than the engine needs",
          engine_world("AttributeError: module 'torch' has no attribute 'float8_e8m0fnu'"), "L2", "ImageIncomplete",
          "not in this one"),
    Fault("a path of the node that is not there",
          unset("CreateContainerError", 'failed to generate spec: failed to stat "/data/m": no such file or directory'),
          "L2", "MountFailed", "path"),
    Fault("a table of connections that is full",
          on_node("nf_conntrack: table full, dropping packet"), "L2", "ProcessLimitReached",
          "Raise the limit", ("CUDAError",)),
    Fault("a spread that leaves no node", waits_for_gpus(SPREAD), "L2", "PodRulesUnmatched", "topology spread"),
    Fault("an anti-affinity that leaves no node", waits_for_gpus(APART), "L2", "PodRulesUnmatched", "affinity"),
    Fault("nodes that an autoscaler takes away", waits_for_gpus(LEAVING), "L2", "NodeLeaves", "autoscaler"),
    Fault("nodes that the cloud has not set up", waits_for_gpus(NEW), "L2", "NodeNotSetUp",
          "cloud-controller-manager"),
    Fault("nodes without process numbers", waits_for_gpus(PIDS), "L2", "PIDPressure", "so many processes"),
    Fault("an eviction for want of process numbers",
          rejected("Evicted", "The node was low on resource: pids. Threshold quantity: 3276, available: 120."), "L2",
          "PIDPressure", "so many processes"),
    Fault("an eviction for want of inodes",
          rejected("Evicted", "The node was low on resource: inodes. Threshold quantity: 5%, available: 1200."), "L2",
          "DiskPressure", "inodes"),
    Fault("a pod that the scheduler preempts",
          disrupted("PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod"),
          "L2", "Preempted", "PriorityClass", ("Starting",)),
    Fault("a replica that was preempted and whose successor finds no GPU",
          taken("Preempted", "Preempted by pod 0c1f5c56 on node gpu-1"), "L2", "Preempted", "PriorityClass",
          ("InsufficientGPUs",)),
    Fault("a pod that a taint drives off",
          disrupted("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"), "L2",
          "TaintNotTolerated", "toleration"),
    Fault("a pod that a drain evicts", disrupted("EvictionByEvictionAPI", "Eviction API: evicting"), "L2",
          "EvictedByRequest", "drains"),
    Fault("a pod that does not end", stays(), "L2", "PodDoesNotEnd", "out-of-service"),
    Fault("a subPath that cannot be made",
          unset("CreateContainerConfigError", 'failed to prepare subPath for volumeMount "models"'), "L2",
          "MountFailed", "volume and its driver"),
    Fault("a mount on a read-only root", unset("RunContainerError", READ_ONLY), "L2", "MountFailed", "read-only"),
    Fault("a volume of a Secret that does not exist",
          not_started("FailedMount", 'MountVolume.SetUp failed for volume "c" : secret "llama-c" not found'), "L2",
          "ContainerConfigError", "Create the Secret"),
    Fault("a volume whose server has no name",
          not_started("FailedMount", "mount failed: mount.nfs: Failed to resolve nfs: Name or service not known"),
          "L2", "NameResolutionFailed", "DNS pods"),
    Fault("a webhook whose certificate has expired", seen(not_ready("PodsRefused", HOOK)), "L2",
          "WebhookCertificateRefused", "Renew the certificate"),
    Fault("an image for another GPU vendor", engine_world("AssertionError: Torch not compiled with CUDA enabled"), "L2",
          "ImageIncomplete", "not in this one"),
    Fault("an engine with an instruction that the processor lacks", engine_world("", 132), "L2", "WrongArchitecture",
          "processor architecture"),
    Fault("an engine whose shared memory is full", engine_world("", 135), "L2", "NoSpaceInContainer", "/dev/shm"),
    Fault("GPUs that a pod of others holds",
          replace(seen(FULL, nodes=(node(),), related=(CLASS,)), holders=(OTHERS,)), "L2", "GPUsHeldByOthers",
          "pods that the message names", ("NoCapacity",), "6 nvidia.com/gpu"),
    Fault("a replica that waits for GPUs that a pod of others holds",
          replace(waits_for_gpus(SHORT, related=(CLASS,), nodes=(node(),)), holders=(OTHERS,)), "L2",
          "GPUsHeldByOthers", "pods that the message names", ("InsufficientGPUs",)),
    Fault("a quota that has refused the Job that reads the source for so long that the Job is over",
          seen(not_ready("StageFailed", "reading the source's metadata: Job chat/llama-facts-1 failed: "
                         "DeadlineExceeded: Job was active longer than specified deadline; it is tried again"),
               events=(event("Job", "llama-facts-1", "FailedCreate", 'Error creating: pods "llama-facts-1-x" is '
                             "forbidden: exceeded quota: pods, requested: pods=1, used: pods=4, limited: pods=4"),)),
          "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota", ("StageFailed",), "exceeded quota"),
    Fault("devices that a pod of others claims",
          replace(seen(FULL, nodes=(node(),), related=(OF_DEVICES,)), holders=(CLAIMS,), devices=ON_NODE),
          "L2", "GPUsHeldByOthers", "pods that the message names", ("NoCapacity",), "6 devices"),
    Fault("a class of devices whose only node is cordoned",
          replace(seen(FULL, nodes=(node(unschedulable=True),), related=(OF_DEVICES,)), devices=ON_NODE), "L2",
          "NodeCordoned", "Uncordon", ("NoCapacity",), "spec.unschedulable"),
    Fault("a class of devices that does not tolerate a taint of its only node",
          replace(seen(FULL, nodes=(node(taints=[TEAM]),), related=(OF_DEVICES,)), devices=ON_NODE), "L2",
          "TaintNotTolerated", "Add a toleration", ("NoCapacity",), "team=ml"),
    Fault("a compiler that is missed in words that nobody knows",
          engine_world("torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Set CC."), "L2",
          "ImageIncomplete", "not in this one"),
    Fault("a container runtime that does not listen",
          not_started("FailedCreatePodSandBox", "dial unix /run/containerd/containerd.sock: connect: refused"), "L2",
          "ContainerRuntimeFault", "container runtime"),
    Fault("a sandbox that the runtime cannot make",
          not_started("FailedCreatePodSandBox", "failed to create shim task: OCI runtime create failed: runc: EOF"),
          "L2", "ContainerRuntimeFault", "container runtime"),
    Fault("an entry point that may not be executed",
          unset("RunContainerError", 'OCI runtime create failed: exec: "/entrypoint.sh": permission denied'), "L2",
          "PathNotPermitted", "container's user"),
    Fault("nodes whose driver is being upgraded",
          waits_for_gpus("0/2 nodes are available: 2 node(s) had untolerated taint {nvidia.com/gpu-driver-upgrade: }."),
          "L2", "NodeNotSetUp", "agent that the taint names"),
    Fault("a proxy before the registry that wants a password",
          image_world(("ErrImagePull", "unexpected status from HEAD: 407 Proxy Authentication Required")), "L2",
          "RegistryUnreachable", "proxy"),
    # --- L2.5
    Fault("a hub's store that does not answer",
          engine_world("RuntimeError: Data processing error: CAS service error : Request failed after 5 retries"),
          "L2.5", "SourceUnreachable", "network, proxy"),
    Fault("a tokenizer's error in words that nobody knows",
          engine_world("ValueError: tokenizer has 128256 entries and none of them is the end of a turn"), "L2.5",
          "WeightsIncomplete", "Add the files"),
    Fault("a tokenizer that is damaged",
          engine_world("RuntimeError: Internal: could not parse ModelProto from /m/tokenizer.model"), "L2.5",
          "WeightsCorrupt", "fetch again"),
    Fault("weights with scales that the config does not have",
          engine_world("KeyError: 'layers.0.mlp.gate_proj.weight_scale'"), "L2.5", "WeightsMismatch", "quantization"),
    Fault("a draft model that the hub does not have",
          engine_world("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. for url"), "L2.5",
          "SourceNotFound", "no such repository"),
    Fault("an adapter whose rank the engine refuses",
          seen(adapter(condition("Ready", "False", "LoadFailed", "LoRA rank 64 is greater than max_lora_rank 16"))),
          "L2.5", "RankTooHigh", "maximum rank"),
    Fault("a hub that limits the engine's requests",
          engine_world("HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://hub/api"), "L2.5",
          "SourceLimitsRequests", "token or a mirror"),
    Fault("a hub whose certificate has expired", engine_world("ssl.SSLError: certificate verify failed: has expired"),
          "L2.5", "SourceCertificateRefused", "renewed"),
    Fault("an adapter with the sizes of another base",
          seen(adapter(condition("Ready", "False", "LoadFailed", "expected hidden size 4096, got 5120"))), "L2.5",
          "BaseMismatch", "trained on"),
    # --- L3
    Fault("results that are no numbers",
          engine_world("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"), "L3",
          "CUDAError", "GPUs diagnosed"),
    Fault("a kernel's Xid 13 beside an engine that says that it has no memory",
          node_says(event("Node", "gpu-1", "GPUXid", "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception"), text=OOM),
          "L3", "OutOfGPUMemory", "more memory", ("CUDAError",)),
    Fault("a collective without memory",
          engine_world("ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'"), "L3",
          "OutOfGPUMemory", "more memory"),
    Fault("kernels for newer GPUs only",
          engine_world("RuntimeError: FlashAttention only supports Ampere GPUs or newer."), "L3", "NoKernelForGPU",
          "another class"),
    Fault("weights that leave no room for a cache", engine_world(CAPTURE), "L3", "NoMemoryForCache",
          "larger memory fraction"),
    Fault("a GPU that another process has for itself", engine_world(BUSY), "L3", "GPUMemoryInUse", "nvidia-smi"),
    Fault("a kernel that needs more shared memory than the GPU has",
          engine_world("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072"), "L3",
          "NoKernelForGPU", "another class"),
    # --- L4
    Fault("a backend that the engine does not have",
          engine_world("ValueError: Unknown attention backend: 'FLASHINFER_X'. Valid options are: FLASHINFER"), "L4",
          "EngineArguments", "extraArgs"),
    Fault("a draft model of another vocabulary",
          engine_world("ValueError: Draft model and target model must have the same vocabulary size, 32000"), "L4",
          "EngineArguments", "speculation"),
    Fault("a parser's error in words that nobody knows",
          engine_world("ValueError: think_end_token '</think>' must encode to exactly one token."), "L4",
          "EngineArguments", "parsers, speculation"),
    Fault("a message about arguments in words of its own",
          engine_world("ValueError: Speculative decoding is not supported with pipeline parallelism"), "L4",
          "EngineArguments", "extraArgs"),
    Fault("an architecture that cannot be inspected",
          engine_world("ValueError: Model architectures ['FooForCausalLM'] failed to be inspected."), "L4",
          "ArchitectureUnknown", "engine version"),
    Fault("a type of cache that the weights do not go with",
          engine_world("ValueError: KV cache dtype fp8_e5m2 is not supported with fp8 checkpoints."), "L4",
          "QuantizationUnsupported", "quantization"),
    Fault("a chat template that is no template",
          engine_world("jinja2.exceptions.TemplateSyntaxError: unexpected '}'\nScheduler hit an exception"), "L4",
          "ChatTemplateInvalid", "chat template", (), "TemplateSyntaxError"),
    Fault("a chat template that is not there", engine_world(f"RuntimeError: {TEMPLATE}"), "L4", "ChatTemplateInvalid",
          "--chat-template"),
    Fault("a parser that the engine does not have",
          engine_world("KeyError: 'invalid tool call parser: deepseek_v31 (chose from { hermes,llama3_json })'"), "L4",
          "EngineArguments", "parsers, speculation"),
    Fault("a port that another process has",
          engine_world("[Errno 98] error while attempting to bind on ('0.0.0.0', 30000): address already in use"),
          "L4", "PortTaken", "--port"),
    Fault("an engine that crashes", engine_world("", 139), "L4", "EngineCrashed", "another engine version"),
    Fault("a tokenizer that is newer than the engine", engine_world(OLD_TOKENIZER), "L4", "ArchitectureUnknown",
          "engine version"),
    Fault("two ranks on one GPU", engine_world(REPEATED), "L4", "ParallelismImpossible", "parallelism"),
    # --- L5
    *(Fault(f"an external target whose last request came to {outcome}", fails(outcome), "L5", reason, do)
      for outcome, reason, do in (
          ("certificate", "ExternalCertificateRefused", "caBundle"),
          ("connect", "ExternalTargetUnreachable", "egress NetworkPolicies"),
          ("unauthorized", "ExternalKeyRefused", "a key that the provider accepts"),
          ("busy", "ExternalTargetBusy", "larger limit"),
          ("too_slow", "ExternalTargetSlow", "timeouts"),
          ("failed", "ExternalTargetFails", "fallback"))),
    # --- L6
    Fault("a budget that is used up", spent("50.02"), "L6", "BudgetUsedUp", "spec.budget"),
    # --- control
    Fault("a pod that a finalizer holds", stays("example.com/backup"), "control", "DeletionHeld", "finalizer", (),
          "deletionTimestamp"),
]  # fmt: skip
