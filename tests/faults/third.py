"""Of a third round of 200 faults, written down before the rules of `core/layers` were read again: those that the rules
told wrongly, and some beside them."""

from typing import Final

from tests.faults.further import node_says, not_started
from tests.faults.test_faults import Fault, engine_world
from tests.faults.unseen import on_node
from tests.faults.worlds import condition


def monitor(kind: str, reason: str, text: str, status: str = "True") -> Fault:
    """A condition of a node's monitor, beside an engine with a CUDA error."""
    layer, found, do = _OF_MONITORS[kind, reason]
    name = f"a condition {kind} of a node's monitor ({reason})"
    seen = node_says(conditions=(condition(kind, status, reason, text),))
    return Fault(name, seen, layer, found, do, ("CUDAError",))


_XID, _SXID, _EKS = "SysLogsXIDError", "SysLogsSXIDError", "AcceleratedHardwareReady"
_OF_MONITORS = {
    (_XID, "SysLogsXIDErrorIsNotHealthy"): ("L1", "DriverFault", "Restart the machine"),
    (_SXID, "SysLogsSXIDErrorIsNotHealthy"): ("L0.5", "NVLinkFault", "NVLinks checked"),
    (_EKS, "NvidiaDoubleBitError"): ("L0", "GPUUncorrectableECC", "reset the GPU"),
    (_EKS, "DCGMHealthCode"): ("L0", "GPUUnhealthy", "vendor's diagnosis"),
    (_EKS, "NvidiaNVLinkError"): ("L0.5", "NVLinkFault", "NVLinks checked"),
    (_EKS, "NvidiaDeviceCountMismatch"): ("L0", "GPUFellOffBus", "slot checked"),
    ("GpuNvlinkWatch", "GpuNvlinkWatchIsNotHealthy"): ("L0.5", "NVLinkFault", "NVLinks checked"),
}
MISMATCH = "NVRM: API mismatch: the client has the version 580.65.06, but this kernel module has the version 570.124.06"
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:525] Read error [10.0.0.4]:20345: Connection reset by peer"
NO_GPU = 'could not select device driver "nvidia" with capabilities: [[gpu]]'
RESTRICTED = "huggingface_hub.errors.GatedRepoError: 403 Client Error. Access to model meta/llama is restricted"
LFS = "safetensors: version https://git-lfs.github.com/spec/v1 is no header"
S3 = "botocore.exceptions.ClientError: An error occurred (403) when calling the HeadObject operation: Forbidden"
UNPREPARED = (
    "NodePrepareResources failed for ResourceClaim llama-gpu: rpc error: code = Unavailable desc = connection error"
)
SILENT = "RuntimeError: Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."

THIRD: Final = [
    # --- L0, L0.5
    monitor(_EKS, "NvidiaDoubleBitError", "GPU 3", "False"),
    monitor(_EKS, "NvidiaDeviceCountMismatch", "7 of 8 GPUs", "False"),
    monitor(_EKS, "DCGMHealthCode", "clocks", "False"),
    Fault("a processor that is too hot", on_node("thermal thermal_zone0: critical temperature reached (105 C)"), "L0",
          "MachinePowerOrCooling", "fans and cooling", ("CUDAError",)),
    monitor(_EKS, "NvidiaNVLinkError", "Link 3 is inactive", "False"),
    monitor(_SXID, "SysLogsSXIDErrorIsNotHealthy", "ErrorCode:20034 NVSWITCH:0 PCI:0000:c5:00 NVLINK:30"),
    monitor("GpuNvlinkWatch", "GpuNvlinkWatchIsNotHealthy", "ErrorCode:DCGM_FR_NVLINK_DOWN GPU:0 NVLink 4 is down"),
    Fault("a link of a network card that is down", on_node("bnxt_en 0000:17:00.0 eth2: NIC Link is Down"), "L0.5",
          "RDMADeviceLost", "cables", ("CUDAError",)),
    # --- L1
    monitor(_XID, "SysLogsXIDErrorIsNotHealthy", "ErrorCode:119 PCI:0000:3b:00"),
    Fault("a kernel module of another version than the driver", on_node(MISMATCH), "L1", "DriverFault",
          "another driver version", ("CUDAError",)),
    Fault("a kernel module of another kernel", on_node("nvidia: disagrees about version of symbol module_layout"), "L1",
          "DriverFault", "another driver version", ("CUDAError",)),
    Fault("a driver that is not initialized",
          engine_world("RuntimeError: cuDriverGetVersion failed: CUDA_ERROR_NOT_INITIALIZED"), "L1", "DriverFault",
          "Restart the machine"),
    Fault("a runtime without the vendor's hook", engine_world(NO_GPU, 125), "L1", "DriverMissing", "driver"),
    Fault("a driver that shows no GPU", engine_world("error: cuInit(0) returned 100 CUDA_ERROR_NO_DEVICE"), "L1",
          "DriverMissing", "driver"),
    Fault("a GPU of another vendor without its device file", engine_world("rocm: error: unable to open /dev/kfd"), "L1",
          "DriverMissing", "driver"),
    Fault("a DRA driver that does not prepare a claim", not_started("FailedPrepareDynamicResources", UNPREPARED), "L1",
          "DeviceAllocationFailed", "device plugin"),
    # --- L2
    Fault("an engine that may start no further process",
          engine_world("BlockingIOError: [Errno 11] Resource temporarily unavailable"), "L2", "ProcessLimitReached",
          "Raise the limit"),
    # --- L2.5
    Fault("a model whose owner has not agreed", engine_world(RESTRICTED), "L2.5", "Gated", "secretRef"),
    Fault("a store for which there are no credentials",
          engine_world("botocore.exceptions.NoCredentialsError: Unable to locate credentials"), "L2.5", "Gated",
          "secretRef"),
    Fault("a store that refuses the credentials", engine_world(S3), "L2.5", "Gated", "secretRef"),
    Fault("a name that no model has",
          engine_world("OSError: o/x is not a local folder and is not a valid model identifier listed on the hub"),
          "L2.5", "SourceNotFound", "no such repository"),
    Fault("weights that end at once", engine_world("EOFError: Ran out of input"), "L2.5", "WeightsCorrupt",
          "fetch again"),
    Fault("weights that are no GGUF", engine_world("ValueError: GGUF magic invalid"), "L2.5", "WeightsCorrupt",
          "fetch again"),
    Fault("pointers in place of weights", engine_world(LFS), "L2.5", "WeightsCorrupt", "fetch again"),
    # --- L3
    Fault("a kernel that the compiler cannot make for the GPU",
          engine_world("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"), "L3", "NoKernelForGPU",
          "another class"),
    Fault("a kernel of another vendor's GPU that faults",
          engine_world("Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f. Page not present"),
          "L3", "CUDAError", "GPUs diagnosed"),
    Fault("a rank that went away under the others", engine_world(GLOO), "L3", "NCCLError", "rank"),
    # --- L4
    Fault("a process of the engine that is silent", engine_world(SILENT), "L4", "EngineFailed", "engine"),
]  # fmt: skip
