"""Of a fourth round of 390 faults, which examiners wrote down without a sight of the rules of `core/layers`:
those that the rules told wrongly, or with a next step that does not help."""

from typing import Any, Final

from shoal.core.layers.types import WhySnapshot
from tests.faults.further import STARTS, node_says, not_started, rejected
from tests.faults.test_faults import Fault, engine_world, stage_world
from tests.faults.unseen import SET, disrupted, on_node, unset
from tests.faults.worlds import condition, event, seen


def refused(text: str) -> WhySnapshot:
    """A Model that starts, whose ReplicaSet may create no pod: the operator has not told it yet."""
    return seen(STARTS, events=(event("ReplicaSet", SET, "FailedCreate", f'Error creating: pods "{SET}-x" {text}'),))


def told(reason: str, note: str, **more: Any) -> WhySnapshot:
    """An engine that ends, on a node of which an event tells."""
    return node_says(event("Node", "gpu-1", reason, note), **more)


SIGQUIT = "[2026-11-26 11:59:31] Received sigquit from a child process. It usually means the child failed."
COMPILER = (
    "(EngineCore_DP0 pid=212) ERROR InductorError: RuntimeError: Failed to find C compiler\n"
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
CONTEXT = (
    "ValueError: User-specified context_length (131072) is greater than the derived context_length (32768). This may "
    "lead to incorrect model outputs or CUDA errors."
)
CALICO = (
    'Failed to create pod sandbox: plugin type="calico" failed (add): stat /var/lib/calico/nodename: no such file or '
    "directory: check that the calico/node container is running"
)
LOST = "Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation: nvml: GPU is lost"
HOOK = "Exec lifecycle hook ([/bin/sh -c curl localhost]) failed - error: exited with 127: /bin/sh: 1: curl: not found"
QUOTA = "is forbidden: exceeded quota: team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=16"
WEBHOOK = 'failed calling webhook "inject.istio.io": Post "https://istiod.svc/inject": context deadline exceeded'
GATED = "huggingface_hub.errors.GatedRepoError: 403 Client Error. Access to model meta/llama is restricted"
MANY = "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://hub/api/models/o/x"
SHORT_FILE = "OSError: Consistency check failed: file should be of size 9860464979 but has size 4277965032"
UNSIGNED = "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service"
NO_MODULE = "modprobe: FATAL: Module nvidia not found in directory /lib/modules/6.8.0-1029-aws"
FULL_DISK = "OSError: [Errno 28] No space left on device: '/cache/x'"
DEVICE_TAINT = "Device Taint manager: deleting due to NoExecute taint gpu.nvidia.com/xid=79:NoExecute on device gpu-3"
FIRMWARE = (
    "nvidia 0000:17:00.0: Direct firmware load for nvidia/570.133.20/gsp_ga10x.bin failed with error -2\n"
    "NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x61:0x56:1697)"
)
NO_RUNTIME = (
    "Failed to create pod sandbox: OCI runtime create failed: fork/exec "
    "/usr/local/nvidia/toolkit/nvidia-container-runtime: no such file or directory"
)
NO_LEADER = (
    "[c10d] The IPv6 network addresses of (llama-0.llama, 20000) cannot be retrieved (gai error: -2 - Name or service "
    "not known).\ntorch.distributed.DistNetworkError: The client socket has timed out after 60000ms"
)
BROKEN = (
    "requests.exceptions.ChunkedEncodingError: ('Connection broken: IncompleteRead(32 bytes read, 17 more expected)')"
)
MIG = "nvidia-mig-manager: error setting MIG mode: In use by another client"
RAS = "amdgpu 0000:c3:00.0: amdgpu: socket: 2, die: 0, 1 new uncorrectable hardware errors detected in umc block"
MPS = "RuntimeError: Error 805: MPS client failed to connect to the MPS control daemon or the MPS server"
SPOT = "Spot interruption warning was triggered for the node"

FOURTH: Final = [
    # --- L0, L0.5
    Fault("a power supply of the machine that is lost", told("HardwareFault", "Power Supply PSU3 AC lost"), "L0",
          "MachinePowerOrCooling", "power supplies", ("CUDAError",)),
    Fault("a power supply that fails, in a condition of an unknown monitor",
          node_says(conditions=(condition("ChassisProblem", "True", "Power", "PSU 2 of 4 failed"),)), "L0",
          "MachinePowerOrCooling", "power supplies"),
    Fault("a fan that stands still", on_node("fan FAN_MOD_4A reads 0 RPM (BMC: lower non-recoverable going low)"), "L0",
          "MachinePowerOrCooling", "fans", ("CUDAError",)),
    Fault("a GPU whose link to the machine repeats itself", told("NvidiaPCIeError", "PCI replay rate of 14 per minute"),
          "L0", "GPUUnhealthy", "vendor's diagnosis", ("CUDAError",)),
    Fault("memory of another vendor's GPU that is damaged", told("AMDGPURASError", RAS), "L0", "GPUUncorrectableECC",
          "reset the GPU", ("CUDAError",)),
    Fault("a lost GPU because of which a kubelet admits no pod", rejected("UnexpectedAdmissionError", LOST), "L0",
          "GPUFellOffBus", "restart the machine"),
    Fault("a leak of coolant, in words that no rule knows",
          told("BMCSystemEvent", "Redfish LeakDetector Chassis_0_ColdPlate: state Critical"), "L0",
          "MachinePowerOrCooling", "cooling", ("CUDAError",)),
    Fault("a taint of a DRA driver that ends the replica", disrupted("DeletionByDeviceTaintManager", DEVICE_TAINT),
          "L0", "GPUUnhealthy", "vendor's diagnosis"),
    Fault("a network card whose driver does not get through, in words that no rule knows",
          on_node("mlx5_core 0000:5e:00.0: wait_func:1195: ACCESS_REG(0x805) timeout"), "L0.5", "RDMADeviceLost",
          "RDMA adapters", ("CUDAError",)),
    # --- L1
    Fault("a card that an open driver holds", on_node("NVRM: GPU 0000:65:00.0 is already bound to nouveau."), "L1",
          "DriverNotLoaded", "driver's module", ("CUDAError",)),
    Fault("a driver without its firmware", on_node(FIRMWARE), "L1", "DriverNotLoaded", "driver's module",
          ("CUDAError",)),
    Fault("a driver's own trouble, in words that no rule knows", on_node("NVRM: BAR1 is 0M @ 0x0 (PCI:0000:41:00.0)"),
          "L1", "DriverFault", "another driver version", ("CUDAError",)),
    Fault("a toolkit whose runtime is gone", not_started("FailedCreatePodSandBox", NO_RUNTIME), "L1", "DriverMissing",
          "container toolkit"),
    Fault("a library of the driver that does not fit", engine_world("pynvml.NVMLError_LibRmVersionMismatch: RM"), "L1",
          "DriverFault", "Restart the machine"),
    Fault("a driver's module that is not signed", on_node(UNSIGNED), "L1", "DriverNotLoaded", "Secure Boot",
          ("CUDAError",)),
    Fault("a driver without a module for the kernel",
          told("DriverFailed", NO_MODULE, text="RuntimeError: No CUDA GPUs are available"), "L1", "DriverNotLoaded",
          "kernel that the node runs"),
    Fault("a MIG manager that cannot cut the GPUs", told("MIGConfigFailed", MIG), "L1", "MIGConfigFailed",
          "MIG manager", ("CUDAError",)),
    Fault("a daemon of MPS that is away", engine_world(MPS), "L1", "MPSDaemonFails", "MPS daemon"),
    Fault("a vGPU without a licence", on_node("nvidia-gridd[1422]: Failed to acquire license from 10.2.0.15"), "L1",
          "VGPUUnlicensed", "licence server", ("CUDAError",)),
    # --- L2
    Fault("a rank that does not find the leader's name", engine_world(NO_LEADER), "L2", "NameResolutionFailed", "DNS"),
    Fault("a node that a cloud takes back, which ends its engine",
          told("SpotInterrupted", SPOT, text="Received SIGTERM, shutting down gracefully", code=143), "L2",
          "NodeLeaves", "another node", ("EngineStopped",)),
    Fault("a network plugin whose agent does not run", not_started("FailedCreatePodSandBox", CALICO), "L2",
          "PodNetworkFailed", "CNI agent"),
    Fault("a hook after the start whose program the image lacks", unset("PostStartHookError", HOOK), "L2",
          "LifecycleHookFailed", "postStart hook", ("Starting",)),
    Fault("a quota that is used up, before the operator tells it", refused(QUOTA), "L2", "ResourceQuotaExceeded",
          "Raise the ResourceQuota", ("Starting",)),
    Fault("a webhook that does not answer, before the operator tells it",
          refused(f"is forbidden: Internal error occurred: {WEBHOOK}"), "L2", "WebhookUnreachable",
          "Start the admission webhook", ("Starting",)),
    Fault("a compiler that the image lacks, above the line that says to look there", engine_world(COMPILER), "L2",
          "ImageIncomplete", "Use an image"),
    # --- L2.5
    Fault("a hub that refuses a fetch, in its client's words", stage_world("StageFailed", GATED), "L2.5", "Gated",
          "secretRef"),
    Fault("a hub that limits a fetch, in its client's words", stage_world("StageFailed", MANY), "L2.5",
          "SourceLimitsRequests", "token"),
    Fault("a fetched file that is too short", stage_world("StageFailed", SHORT_FILE), "L2.5", "DigestMismatch", ""),
    Fault("a cache without room, in a client's words", stage_world("StageFailed", FULL_DISK), "L2.5", "DiskFull", ""),
    Fault("a download that breaks off, in a client's words", stage_world("StageFailed", BROKEN), "L2.5",
          "SourceUnreachable", ""),
    # --- L3, L4
    Fault("a KV cache that has no room for a prompt",
          engine_world(f"RuntimeError: Prefill out of memory. Try to lower your batch size.\n{SIGQUIT}"), "L3",
          "NoMemoryForCache", "memory"),
    Fault("ranks that do not reach each other",
          engine_world(f"RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error\n{SIGQUIT}"), "L3",
          "NCCLError", "network"),
    Fault("a context that is longer than the model's, with a warning of CUDA errors", engine_world(CONTEXT), "L4",
          "ContextTooLong", "context length"),
    Fault("a scheduler that stands still", engine_world(f"[TP0] Scheduler watchdog timeout (300)\n{SIGQUIT}", 137),
          "L4", "EngineStalled", "progress"),
]  # fmt: skip
