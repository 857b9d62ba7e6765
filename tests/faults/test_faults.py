"""One row per fault: on which layer it is found, as what, and what a person is told to do."""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.core.layers.advice import REASONS
from shoal.core.layers.causes import causes
from shoal.core.layers.types import DecisionView, ObjectView, Unread, WhySnapshot
from shoal.kube import layerviews
from tests.faults.worlds import (
    GPU,
    NOW,
    adapter,
    condition,
    crashed,
    engine,
    event,
    gated,
    gateway,
    gpu_class,
    model,
    node,
    not_ready,
    pending,
    pod,
    policy,
    ready_gateway,
    seen,
    stage,
    tenant,
    unclaimed,
)


@dataclass(frozen=True)
class Fault:
    """A cluster with a fault, and what is said of it first."""

    name: str
    world: WhySnapshot
    layer: str
    reason: str
    do: str
    """Words of the next step."""
    hides: tuple[str, ...] = ()
    """Reasons that are shown as its consequences, and not as causes."""
    evidence: str = ""
    """Words of its evidence."""


def serves() -> dict[str, Any]:
    """A pod that is ready."""
    return pod(engine(running=True), conditions=[condition("Ready", "True", "")])


def failed(text: str) -> ObjectView:
    """The Model's condition when its engine keeps ending."""
    return not_ready("EngineFailed", f"the engine of pod chat/llama-1 ended with exit code 1 (3 restarts): {text}")


def engine_world(text: str, code: int = 1) -> WhySnapshot:
    """A Model whose engine keeps ending with this text, on a node where nothing is wrong."""
    return seen(failed(text), pods=(pod(crashed(text, code)),), nodes=(node(),))


def stage_world(reason: str, message: str) -> WhySnapshot:
    text = f'{{"reason": "{reason}", "message": "{message}"}}'
    return seen(
        not_ready(reason, f"{message} (pod chat/llama-1, attempt 4)"), pods=(pod(stage(text)),), nodes=(node(),)
    )


def image_world(waiting: tuple[str, str], *events: str) -> WhySnapshot:
    return seen(
        not_ready("ImageUnavailable", f"container engine of pod chat/llama-1: {waiting[0]}: {waiting[1]}"),
        pods=(pod(engine(waiting=waiting)),),
        nodes=(node(),),
        events=tuple(event("Pod", "llama-1", "Failed", text) for text in events),
    )


def waits_for_gpus(message: str, **more: Any) -> WhySnapshot:
    return seen(not_ready("Unschedulable", f"pod chat/llama-1: {message}"), pods=(pending(message),), **more)


CUDA = "RuntimeError: CUDA error: unspecified launch failure"
READY = condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready")
CLASS = gpu_class(condition("Ready", "True", "NodesFound"))
FULL = not_ready("NoCapacity", "class h100-80gb has 0 of 8 GPUs free")
STARTS = not_ready("Starting", "1 replica is being created")
CLAIMS_FULL = (
    'resourceclaims.resource.k8s.io "llama-1-gpus-7x2kd" is forbidden: exceeded quota: devices, requested: '
    "gpu.nvidia.com.deviceclass.resource.k8s.io/devices=8, used: gpu.nvidia.com.deviceclass.resource.k8s.io/devices=8, "
    "limited: gpu.nvidia.com.deviceclass.resource.k8s.io/devices=8"
)
NO_CLAIM = '0/4 nodes are available: waiting for resource claim: cannot find ResourceClaim of pod "llama-1".'
INSUFFICIENT = "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node affinity"

FAULTS = [
    # --- L0 hardware
    Fault(
        "a node whose kubelet is silent",
        seen(
            failed("nothing"),
            pods=(pod(crashed("", 137)),),
            nodes=(node(condition("Ready", "Unknown", "NodeStatusUnknown", "Kubelet stopped posting", 90)),),
        ),
        "L0", "NodeSilent", "Check the machine", ("EngineStopped", "EngineFailed"), "Ready=Unknown",
    ),
    Fault(
        "a node that was removed",
        seen(failed("x"), pods=(pod(crashed("x")),), removed=("gpu-1",)),
        "L0", "NodeGone", "check the machine", ("EngineFailed",), "there is no such node",
    ),
    Fault(
        "an ECC error that a node problem detector reports",
        seen(
            failed(CUDA),
            pods=(pod(crashed(CUDA)),),
            nodes=(node(condition("GpuEccErrors", "True", "DoubleBitError", "GPU 3 has errors", 200)),),
        ),
        "L0", "GPUUncorrectableECC", "Cordon the node", ("CUDAError",), "GpuEccErrors=True",
    ),
    Fault(
        "an Xid 79 in a node's condition",
        seen(
            failed(CUDA),
            pods=(pod(crashed(CUDA)),),
            nodes=(node(condition("XIDErrors", "True", "XIDError", "NVRM: Xid (PCI:0000:3b:00): 79, lost", 9)),),
        ),
        "L0", "GPUFellOffBus", "restart the machine", ("CUDAError",), "XIDErrors=True",
    ),
    Fault(
        "an Xid 48 in a node's event",
        seen(
            failed(CUDA),
            pods=(pod(crashed(CUDA)),),
            nodes=(node(),),
            events=(event("Node", "gpu-1", "XidError", "NVRM: Xid (PCI:0000:3b:00): 48, DBE"),),
        ),
        "L0", "GPUUncorrectableECC", "reset the GPU", ("CUDAError",), "Xid",
    ),
    Fault(
        "an Xid 95 in the engine's own log",
        engine_world("NVRM: Xid (PCI:0000:3b:00): 95, Uncontained ECC error\nCUDA error: uncorrectable ECC error"),
        "L0", "GPUUncorrectableECC", "Cordon the node", (), "Xid 95: an error of the GPU's memory",
    ),
    Fault(
        "a memory error that was contained to the engine (Xid 94)",
        engine_world("NVRM: Xid (PCI:0000:3b:00): 94, Contained ECC error\nCUDA error: uncorrectable ECC error"),
        "L0", "GPUContainedECC", "reset it when convenient", (), "Xid 94",
    ),
    Fault(
        "a memory error that was contained to the engine, and remapped (Xid 94 and 63 in a node's events)",
        seen(
            failed(CUDA),
            pods=(pod(crashed(CUDA)),),
            nodes=(node(),),
            events=(
                event("Node", "gpu-1", "XidError", "NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: New row marked"),
                event("Node", "gpu-1", "XidError", "NVRM: Xid (PCI:0000:3b:00): 94, pid=7, Contained: CE"),
            ),
        ),
        "L0", "GPUContainedECC", "Let the engine start again", ("CUDAError",), "Xid",
    ),
    Fault(
        "a row of memory that could not be remapped (Xid 64)",
        seen(
            failed(CUDA),
            pods=(pod(crashed(CUDA)),),
            nodes=(node(condition("XIDErrors", "True", "XIDError", "NVRM: Xid (PCI:0000:3b:00): 64, not remapped")),),
        ),
        "L0", "GPUUncorrectableECC", "replace it if the error comes back", ("CUDAError",), "XIDErrors=True",
    ),
    Fault(
        "an engine without memory beside a row that was remapped (Xid 63)",
        seen(
            failed("torch.OutOfMemoryError: CUDA out of memory"),
            pods=(pod(crashed("torch.OutOfMemoryError: CUDA out of memory")),),
            nodes=(node(),),
            events=(event("Node", "gpu-1", "XidError", "NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper"),),
        ),
        "L3", "OutOfGPUMemory", "", (), "out of memory",
    ),
    Fault(
        "a health agent that finds the GPUs not ready",
        seen(
            failed(CUDA),
            pods=(pod(crashed(CUDA)),),
            nodes=(node(condition("AcceleratedHardwareReady", "False", "DCGMHealth", "thermal violation")),),
        ),
        "L0", "GPUUnhealthy", "vendor's diagnosis", ("CUDAError",), "AcceleratedHardwareReady=False",
    ),
    Fault(
        "a GPU that the device plugin took out",
        seen(failed(CUDA), pods=(pod(crashed(CUDA)),), nodes=(node(usable=7),), related=(CLASS,)),
        "L0", "GPUUnhealthy", "Cordon the node", ("CUDAError",), "7 of 8 nvidia.com/gpu are allocatable",
    ),
    Fault(
        "a device of the pod that the kubelet reports as unhealthy",
        seen(
            failed(CUDA),
            pods=(
                pod(
                    crashed(
                        CUDA,
                        more={
                            "allocatedResourcesStatus": [
                                {"name": GPU, "resources": [{"resourceID": "GPU-7", "health": "Unhealthy"}]}
                            ]
                        },
                    )
                ),
            ),
            nodes=(node(),),
        ),
        "L0", "GPUUnhealthy", "Cordon the node", ("CUDAError",), "GPU-7",
    ),
    Fault(
        "a read-only filesystem",
        seen(
            failed("OSError: Read-only file system"),
            pods=(pod(crashed("OSError: Read-only file system")),),
            nodes=(node(condition("ReadonlyFilesystem", "True", "FilesystemIsReadOnly", "remounted")),),
        ),
        "L0", "NodeDiskFault", "disk checked", ("PathNotPermitted",),
    ),
    # --- L0.5 fabric
    Fault(
        "an RDMA adapter that went down",
        seen(
            failed("NCCL error: unhandled system error"),
            pods=(pod(crashed("torch.distributed.DistBackendError: NCCL error: unhandled system error")),),
            nodes=(node(devices={"rdma/hca": (8, 7)}),),
        ),
        "L0.5", "RDMADeviceLost", "RDMA", ("NCCLError",), "7 of 8 rdma/hca",
    ),
    Fault(
        "an InfiniBand link that flaps",
        seen(
            failed("NCCL error"),
            pods=(pod(crashed("NCCL error: remote process exited")),),
            nodes=(node(condition("IBLinkFlapping", "True", "IBLinkFlapping", "mlx5_2")),),
        ),
        "L0.5", "RDMADeviceLost", "cables", ("NCCLError",),
    ),
    Fault(
        "a collective that failed in its transport",
        engine_world("NCCL WARN NET/IB : Got completion from peer with error 12, opcode 0, vendor err 129\nNCCL error"),
        "L0.5", "FabricFailed", "InfiniBand", (), "NET/IB",
    ),
    Fault(
        "a fabric manager that does not run",
        engine_world("RuntimeError: Error 802: system not yet initialized"),
        "L0.5", "NVLinkFault", "fabric manager",
    ),
    Fault(
        "a fabric manager that is not as new as the driver",
        engine_world("fabricmanager: version mismatch with the kernel driver"),
        "L0.5", "NVLinkFault", "fabric manager",
    ),
    Fault(
        "GPUs that cannot reach each other's memory",
        engine_world("RuntimeError: peer access is not supported between these two devices"),
        "L0.5", "FabricFailed", "NVLink",
    ),
    Fault(
        "a taint of a health agent",
        seen(FULL, nodes=(node(taints=[{"key": "health.example/gpu", "value": "unhealthy", "effect": "NoSchedule"}]),),
             related=(CLASS,)),
        "L0", "GPUUnhealthy", "vendor's diagnosis", ("NoCapacity",), "taint health.example/gpu",
    ),
    # --- L1 driver
    Fault(
        "nodes without a device plugin",
        seen(
            FULL,
            pods=(pending(INSUFFICIENT),),
            nodes=(node(gpus=0),),
            related=(
                gpu_class(
                    condition("Ready", "False", "NoNodes", "1 nodes match, none has nvidia.com/gpu: does the device "
                              "plugin run there?")
                ),
            ),
        ),
        "L1", "DevicePluginMissing", "device plugin", ("NoCapacity", "InsufficientGPUs"), "capacity has no nvidia.com",
    ),
    Fault(
        "a node whose device plugin has died",
        seen(FULL, pods=(pending(INSUFFICIENT),), nodes=(node(usable=0),), related=(CLASS,)),
        "L1", "DevicePluginMissing", "read its log", ("NoCapacity", "InsufficientGPUs"), "0 of 8",
    ),
    Fault(
        "a class whose GPUs are all time-sliced",
        seen(not_ready("NoCapacity", "its 1 node(s) have none of the resource"), nodes=(node(),), related=(gpu_class(
            condition("Ready", "False", "SharedGPUs", "time-slicing, 4 parts of each GPU"),
            condition("SharedGPUs", "True", "SharedGPUs", "time-slicing, 4 parts of each GPU")),)),
        "L1", "SharedGPUs", "time-slicing", ("NoCapacity",),
    ),
    Fault(
        "a class of devices that several claims may share",
        seen(
            not_ready("NoCapacity", "its 1 node(s) have none of the resource"),
            nodes=(node(gpus=0),),
            related=(
                replace(
                    gpu_class(condition("Ready", "False", "SharedGPUs", "8 of 8 devices do not count: several claims")),
                    spec={"device": {"deviceClassName": "gpu.nvidia.com"}},
                ),
            ),
        ),
        "L1", "SharedGPUs", "allowMultipleAllocations", ("NoCapacity",),
    ),
    Fault(
        "a container toolkit that finds no driver",
        seen(
            not_ready("EngineFailed", "container engine of pod chat/llama-1: RunContainerError"),
            pods=(pod(engine(waiting=("RunContainerError", "nvidia-container-cli: initialization error: nvml"))),),
            nodes=(node(),),
        ),
        "L1", "DriverMissing", "container toolkit", ("EngineFailed",),
    ),
    Fault(
        "a driver that is too old",
        engine_world("RuntimeError: The NVIDIA driver on your system is too old (found version 11040)"),
        "L1", "DriverTooOld", "new enough",
    ),
    Fault(
        "a driver that was updated under a running node",
        engine_world("Failed to initialize NVML: Driver/library version mismatch"),
        "L1", "DriverFault", "Restart the machine",
    ),
    Fault(
        "a device plugin that gives an admitted pod no GPU",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed due to requested "
                      "number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0"),),
            nodes=(node(),),
        ),
        "L1", "DeviceAllocationFailed", "device plugin", ("Starting",), "Available: 0",
    ),
    # --- L2 container
    Fault(
        "a kubelet that says its node is not ready",
        seen(
            failed("x"),
            pods=(pod(crashed("x")),),
            nodes=(node(condition("Ready", "False", "KubeletNotReady", "failed to initialize CSINode")),),
        ),
        "L2", "NodeNotReady", "kubelet's log", ("EngineFailed",),
    ),
    Fault(
        "a node under disk pressure that evicts pods",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(phase="Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage"),),
            nodes=(node(condition("DiskPressure", "True", "KubeletHasDiskPressure", "kubelet has disk pressure")),),
        ),
        "L2", "DiskPressure", "Free disk", ("Evicted", "Starting"),
    ),
    Fault(
        "an eviction whose pressure is over",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory"),),
            nodes=(node(),),
        ),
        "L2", "Evicted", "larger request", ("Starting",), "low on resource: memory",
    ),
    Fault(
        "an image whose registry asks for credentials",
        image_world(
            ("ImagePullBackOff", 'Back-off pulling image "r/engine:1"'), "Failed to pull image: 401 Unauthorized"
        ),
        "L2", "ImageAccessDenied", "pull secret", ("ImageUnavailable",),
    ),
    Fault(
        "an image that does not exist",
        image_world(("ErrImagePull", "manifest unknown: manifest unknown")),
        "L2", "ImageNotFound", "name or tag", ("ImageUnavailable",),
    ),
    Fault(
        "a registry that does not answer",
        image_world(("ErrImagePull", 'failed to do request: dial tcp: lookup r: no such host')),
        "L2", "RegistryUnreachable", "proxy", ("ImageUnavailable",),
    ),
    Fault(
        "an image that cannot be pulled for a reason that nobody knows",
        image_world(("ImagePullBackOff", "Back-off pulling image")),
        "L2", "ImageUnavailable", "access to its registry",
    ),
    Fault(
        "a container that is killed at its memory limit",
        seen(
            failed("OOMKilled"),
            pods=(pod(crashed("", 137, reason="OOMKilled")),),
            nodes=(node(),),
        ),
        "L2", "OutOfHostMemory", "engines.memoryPerGPU", ("EngineFailed",), "OOMKilled",
    ),
    Fault(
        "an image for another processor",
        engine_world("exec /usr/bin/python3: exec format error"),
        "L2", "WrongArchitecture", "processor architecture",
    ),
    Fault(
        "a Secret that a container needs and that is not there",
        seen(
            not_ready("EngineFailed", 'container engine of pod chat/llama-1: secret "llama-keys" not found'),
            pods=(pod(engine(waiting=("CreateContainerConfigError", 'secret "llama-keys" not found'))),),
            nodes=(node(),),
        ),
        "L2", "ContainerConfigError", "Secret or ConfigMap", ("EngineFailed",),
    ),
    Fault(
        "a volume that cannot be mounted",
        seen(
            not_ready("Starting", "0 of 1 replicas ready; 1 scheduled"),
            pods=(pod(),),
            nodes=(node(),),
            events=(event("Pod", "llama-1", "FailedMount", "MountVolume.SetUp failed for volume cache"),),
        ),
        "L2", "MountFailed", "volume and its driver", ("Starting",),
    ),
    Fault(
        "a network plugin that gives pods no network",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(),),
            nodes=(node(),),
            events=(event("Pod", "llama-1", "FailedCreatePodSandBox", "failed to setup network for sandbox: cni"),),
        ),
        "L2", "PodNetworkFailed", "network plugin", ("Starting",),
    ),
    Fault(
        "a taint that nothing tolerates",
        waits_for_gpus("0/4 nodes are available: 4 node(s) had untolerated taint {gpu: true}.", nodes=(node(),)),
        "L2", "TaintNotTolerated", "toleration", (), "untolerated taint",
    ),
    Fault(
        "a selector that matches no node",
        waits_for_gpus("0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector.",
                       nodes=(node(),)),
        "L2", "NodeSelectorUnmatched", "nodeSelector",
    ),
    Fault(
        "GPUs that are all taken",
        waits_for_gpus(INSUFFICIENT, nodes=(node(),)),
        "L2", "InsufficientGPUs", "Free or add GPUs",
    ),
    Fault(
        "devices that are all claimed",
        waits_for_gpus("0/4 nodes are available: 1 cannot allocate all claims, 3 node(s) had untolerated taint."),
        "L2", "InsufficientGPUs", "Free or add GPUs", (), "cannot allocate all claims",
    ),
    Fault(
        "nodes with GPUs and without CPU",
        waits_for_gpus("0/4 nodes are available: 4 Insufficient cpu.", nodes=(node(),)),
        "L2", "InsufficientCPUOrMemory", "engines.cpuPerGPU",
    ),
    Fault(
        "a claim that is not there",
        waits_for_gpus('persistentvolumeclaim "weights" not found', nodes=(node(),)),
        "L2", "VolumeMissing", "PersistentVolumeClaim",
    ),
    Fault(
        "a ResourceQuota that refuses the pods",
        seen(not_ready("PodsRefused", 'pods "llama-1" is forbidden: exceeded quota: team, requested: '
                       "requests.nvidia.com/gpu=1, used: 8, limited: 8")),
        "L2", "ResourceQuotaExceeded", "ResourceQuota", ("PodsRefused",), "exceeded quota",
    ),
    Fault(
        "a ResourceQuota on devices that refuses the ResourceClaim of a pod",
        seen(not_ready("ResourceQuotaExceeded", "pod chat/llama-1 gets no ResourceClaim: ResourceQuota devices has no "
                       "room for a replica"), **unclaimed(CLAIMS_FULL)),
        "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota", (), "exceeded quota: devices",
    ),
    Fault(
        "a ResourceQuota on devices, before the operator tells it",
        seen(STARTS, **unclaimed(CLAIMS_FULL)),
        "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota", ("Starting",), "exceeded quota: devices",
    ),
    Fault(
        "a ResourceQuota on devices, where the scheduler says that it waits for the claim",
        seen(STARTS, **unclaimed(CLAIMS_FULL, waits=NO_CLAIM)),
        "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota", ("Starting",), "exceeded quota: devices",
    ),
    Fault(
        "a policy that refuses the ResourceClaims of pods",
        seen(STARTS, **unclaimed('resourceclaims.resource.k8s.io "llama-1-gpus-7x2kd" is forbidden: '
                                 "ValidatingAdmissionPolicy 'no-devices' with binding 'all' denied request: not here")),
        "L2", "WebhookRefused", "policy", ("Starting",), "no-devices",
    ),
    Fault(
        "a ResourceClaim that cannot be made, in words that no rule knows",
        seen(STARTS, **unclaimed('ResourceClaim "llama-1-gpus-7x2kd" is invalid: spec.devices.requests: Too many: 33')),
        "L2", "ResourceClaimNotCreated", "API server's own words", ("Starting",), "Too many: 33",
    ),
    Fault(
        "a ResourceClaim that nobody makes",
        seen(STARTS, **unclaimed()),
        "L2", "ResourceClaimNotCreated", "kube-controller-manager", ("Starting",), "no ResourceClaim",
    ),
    Fault(
        "two quotas: a ResourceQuota refuses what a queue would admit",
        seen(not_ready("ResourceQuotaExceeded", "ResourceQuota team has no room for a replica: requested "
                       "requests.nvidia.com/gpu=1, used requests.nvidia.com/gpu=8, limited requests.nvidia.com/gpu=8"),
             pods=(gated(),)),
        "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota", (), "ResourceQuota team",
    ),
    Fault(
        "a LimitRange that refuses the pods",
        seen(not_ready("PodsRefused", 'pods "llama-1" is forbidden: maximum memory usage per Container is 8Gi, but '
                       "limit is 32Gi")),
        "L2", "LimitRangeExceeded", "LimitRange", ("PodsRefused",),
    ),
    Fault(
        "a namespace with a restricted Pod Security level",
        seen(not_ready("PodsRefused", 'pods "llama-1" is forbidden: violates PodSecurity "restricted:latest": '
                       "runAsNonRoot != true")),
        "L2", "PodSecurityRefused", "Pod Security level", ("PodsRefused",),
    ),
    Fault(
        "an admission webhook that refuses",
        seen(not_ready("Refused", 'admission webhook "policy.example.com" denied the request: no latest tags')),
        "L2", "WebhookRefused", "policy", ("Refused",),
    ),
    Fault(
        "an admission webhook that does not answer",
        seen(not_ready("PodsRefused", 'Internal error occurred: failed calling webhook "policy.example.com": '
                       "context deadline exceeded")),
        "L2", "WebhookUnreachable", "admission webhook", ("PodsRefused",),
    ),
    Fault(
        "a ServiceAccount that does not exist",
        seen(not_ready("PodsRefused", 'pods "llama-1" is forbidden: error looking up service account chat/reader: '
                       'serviceaccount "reader" not found')),
        "L2", "RequiredObjectMissing", "Create the ServiceAccount", ("PodsRefused",),
    ),
    Fault(
        "a PriorityClass that does not exist",
        seen(not_ready("PodsRefused", 'pods "llama-1" is forbidden: no PriorityClass with name serving was found')),
        "L2", "RequiredObjectMissing", "PriorityClass", ("PodsRefused",),
    ),
    Fault(
        "a namespace that is being deleted",
        seen(not_ready("Refused", 'deployments.apps "llama" is forbidden: unable to create new content in namespace '
                       "chat because it is being terminated")),
        "L2", "NamespaceTerminating", "another namespace", ("Refused",),
    ),
    Fault(
        "a node that has shut down",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(phase="Failed", reason="Terminated", message="Pod was terminated in response to imminent node "
                      "shutdown."),),
            nodes=(node(),),
        ),
        "L2", "NodeShutsDown", "until the node is back", ("Starting",),
    ),
    Fault(
        "a kubelet that has no room for what the scheduler bound to it",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(phase="Failed", reason="OutOfnvidia.com/gpu", message="Node didn't have enough resource"),),
            nodes=(node(),),
        ),
        "L2", "InsufficientGPUs", "Free or add GPUs", ("Starting",),
    ),
    Fault(
        "a scheduler that is away",
        seen(not_ready("Starting", "0 of 1 replicas ready"), pods=(pod(node=None, conditions=[]),), nodes=(node(),)),
        "L2", "SchedulerAway", "kube-scheduler", ("Starting",), "no condition PodScheduled",
    ),
    Fault(
        "a controller manager that is away",
        seen(model(condition("Placed", "True", "Placed", ago=300),
                   condition("Ready", "False", "Starting", "0 of 1 replicas ready", ago=300))),
        "L2", "PodsNotCreated", "kube-controller-manager", ("Starting",), "no pods",
    ),
    Fault(
        "a pod that had to go for one of a higher priority",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(phase="Failed", reason="Preempting", message="Preempted in order to admit critical pod"),),
            nodes=(node(),),
        ),
        "L2", "Preempted", "PriorityClass", ("Starting",),
    ),
    Fault(
        "an image without the engine",
        seen(
            not_ready("EngineFailed", "container engine of pod chat/llama-1: CreateContainerError: ..."),
            pods=(pod(engine(waiting=("CreateContainerError", 'failed to create containerd task: OCI runtime create '
                             'failed: exec: "sglang": executable file not found in $PATH: unknown'))),),
            nodes=(node(),),
        ),
        "L2", "ImageIncomplete", "image that has the engine", ("EngineFailed",),
    ),
    Fault(
        "an image in which the shell does not find the engine",
        seen(
            not_ready("EngineFailed", "the engine of pod chat/llama-1 ended with exit code 127 (3 restarts): engine: "
                      "2: sglang: not found"),
            pods=(pod(crashed("engine: 2: sglang: not found", 127)),),
            nodes=(node(),),
        ),
        "L2", "ImageIncomplete", "image that has the engine", (), "sglang: not found",
    ),
    Fault(
        "an image whose libraries do not fit together",
        engine_world("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory"),
        "L2", "ImageIncomplete", "libraries",
    ),
    Fault(
        "an image that runs as root",
        seen(
            not_ready("EngineFailed", "container engine of pod chat/llama-1: CreateContainerConfigError: ..."),
            pods=(pod(engine(waiting=("CreateContainerConfigError", "container has runAsNonRoot and image will run as "
                                      "root (pod: ...)"))),),
            nodes=(node(),),
        ),
        "L2", "ImageRunsAsRoot", "numeric user", ("EngineFailed",),
    ),
    Fault(
        "a container that the runtime cannot create",
        seen(
            not_ready("EngineFailed", "container engine of pod chat/llama-1: CreateContainerError: ..."),
            pods=(pod(engine(waiting=("CreateContainerError", "context deadline exceeded"))),),
            nodes=(node(),),
        ),
        "L2", "ContainerRuntimeFault", "container runtime", ("EngineFailed",),
    ),
    Fault(
        "a machine without memory for the engine",
        engine_world("OSError: [Errno 12] Cannot allocate memory"),
        "L2", "OutOfHostMemory", "memory of the container",
    ),
    Fault(
        "a shared memory that is too small",
        engine_world("RuntimeError: DataLoader worker is killed by signal: Bus error. insufficient shared memory"),
        "L2", "NoSpaceInContainer", "/dev/shm",
    ),
    Fault(
        "a class whose only node is cordoned",
        seen(FULL, pods=(pending("0/1 nodes are available: 1 node(s) were unschedulable."),),
             nodes=(node(unschedulable=True),), related=(CLASS,)),
        "L2", "NodeCordoned", "Uncordon", ("NoCapacity",), "spec.unschedulable",
    ),
    Fault(
        "a class whose only node is cordoned under a replica that stays",
        seen(FULL, pods=(serves(),), nodes=(node(unschedulable=True),), related=(CLASS,)),
        "L2", "NodeCordoned", "Uncordon", ("NoCapacity",),
    ),
    Fault(
        "a taint of the only node that the class does not tolerate",
        seen(FULL, nodes=(node(taints=[{"key": "maintenance", "value": "true", "effect": "NoExecute"}]),),
             related=(CLASS,)),
        "L2", "TaintNotTolerated", "toleration", ("NoCapacity",), "maintenance=true:NoExecute",
    ),
    Fault(
        "a quota that refuses the Job that reads the source",
        seen(
            not_ready("ReadingArtifact", "Job llama-facts-1 reads the source's metadata: it has no pod yet"),
            events=(event("Job", "llama-facts-1", "FailedCreate", 'Error creating: pods "llama-facts-1-x" is '
                          "forbidden: exceeded quota: pods, requested: pods=1, used: pods=4, limited: pods=4"),),
        ),
        "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota", ("ReadingArtifact",), "exceeded quota",
    ),
    Fault(
        "an image of the Job that reads the source",
        seen(not_ready("ReadingArtifact", "Job llama-facts-1 reads the source's metadata: container facts of pod "
                       "chat/llama-facts-1-x: ErrImagePull: failed to pull: manifest unknown")),
        "L2", "ImageNotFound", "name or tag", ("ReadingArtifact",),
    ),
    Fault(
        "a Job that reads the source and has too little memory",
        seen(not_ready("StageFailed", "reading the source's metadata ended with exit code 137: OOMKilled")),
        "L2", "OutOfHostMemory", "memory of the container", ("StageFailed",),
    ),
    Fault(
        "an init container that a mesh has put into the pod",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(crashed("iptables: Permission denied", 3, name="mesh-init")),),
            nodes=(node(),),
        ),
        "L2", "InjectedContainerFailed", "a webhook, policy or mesh", ("Starting",), "Permission denied",
    ),
    Fault(
        "an injected container that is killed at its own memory limit",
        seen(
            not_ready("Starting", "0 of 1 replicas ready"),
            pods=(pod(crashed("", 137, name="istio-proxy", reason="OOMKilled")),),
            nodes=(node(),),
        ),
        "L2", "InjectedContainerFailed", "this container's log", ("Starting",), "OOMKilled",
    ),
    Fault(
        "a NetworkPolicy that lets gateways reach nothing",
        seen(
            model(READY), pods=(serves(),), gateways=(ready_gateway(),),
            policies=(policy("shoal-system", "no-egress", podSelector={}, policyTypes=["Egress"]),),
            decision=DecisionView(NOW, "SignalsUnknown", "", "", stale=("chat/llama-1",)),
        ),
        "L2", "NetworkPolicyBlocks", "NetworkPolicy", ("SignalsStale",),
        "Egress of NetworkPolicy shoal-system/no-egress",
    ),
    Fault(
        "a NetworkPolicy that lets nobody reach engines",
        seen(
            model(READY), pods=(serves(),), gateways=(ready_gateway(),),
            policies=(policy("chat", "deny-all", podSelector={}, policyTypes=["Ingress"]),),
        ),
        "L2", "NetworkPolicyBlocks", "Allow gateways", (), "chat/deny-all",
    ),
    Fault(
        "a source whose name no server resolves",
        stage_world("SourceUnreachable", "no name server answered for hub.example: check the cluster's DNS"),
        "L2", "NameResolutionFailed", "DNS pods",
    ),
    Fault(
        "an engine that cannot resolve a name",
        engine_world("socket.gaierror: [Errno -3] Temporary failure in name resolution"),
        "L2", "NameResolutionFailed", "DNS pods",
    ),
    # --- L2.5 artifact
    Fault(
        "a gated repository",
        stage_world("Gated", "the repository needs a token that may read it (403)"),
        "L2.5", "Gated", "secretRef",
    ),
    Fault(
        "a source that does not exist",
        stage_world("SourceNotFound", "there is no repository owner/lama (404)"),
        "L2.5", "SourceNotFound", "spec.source.uri",
    ),
    Fault(
        "a source that cannot be reached",
        stage_world("SourceUnreachable", "huggingface.co does not answer"),
        "L2.5", "SourceUnreachable", "proxy",
    ),
    Fault(
        "files with another checksum",
        stage_world("DigestMismatch", "model-00001.safetensors has another sha256"),
        "L2.5", "DigestMismatch", "fetch again",
    ),
    Fault("a full disk", stage_world("DiskFull", "no space left"), "L2.5", "DiskFull", "Free disk"),
    Fault(
        "a node cache that does not answer",
        stage_world("CacheUnavailable", "cache.sock does not answer"),
        "L2.5", "CacheUnavailable", "shoal-cache",
    ),
    Fault(
        "weights that are corrupt",
        engine_world("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
        "L2.5", "WeightsCorrupt", "compare checksums", ("EngineFailed",), "HeaderTooLarge",
    ),
    Fault(
        "weights of another model than the config",
        engine_world("RuntimeError: size mismatch for model.embed_tokens.weight: copying a param"),
        "L2.5", "WeightsMismatch", "same model",
    ),
    Fault(
        "a source without a tokenizer",
        engine_world("OSError: /shoal/models/model does not appear to have a file named tokenizer.json"),
        "L2.5", "WeightsIncomplete", "Add the files",
    ),
    Fault(
        "an adapter that is damaged",
        seen(adapter(condition("Ready", "False", "Corrupt", "adapter_model.safetensors ends early"))),
        "L2.5", "Corrupt", "Upload the adapter again",
    ),
    Fault(
        "an adapter whose Model's engine does not start",
        seen(
            adapter(condition("Ready", "False", "LoadingAdapter", "loaded on 0 of 1 replica")),
            related=(failed("CUDA out of memory"),),
            pods=(pod(crashed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")),),
            nodes=(node(),),
        ),
        "L3", "OutOfGPUMemory", "more memory", ("LoadingAdapter", "EngineFailed"),
    ),
    Fault(
        "a hub that the engine asks and that does not answer",
        engine_world("OSError: We couldn't connect to 'https://huggingface.co' to load the files"),
        "L2.5", "SourceUnreachable", "network",
    ),
    Fault(
        "a config that is no JSON",
        engine_world("OSError: It looks like the config file at '/m/config.json' is not a valid JSON file."),
        "L2.5", "WeightsCorrupt", "compare checksums",
    ),
    # --- L3 execution
    Fault(
        "an engine that runs out of GPU memory at its start",
        engine_world("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB"),
        "L3", "OutOfGPUMemory", "smaller memory fraction", ("EngineFailed",), "Tried to allocate",
    ),
    Fault(
        "a GPU for which the image has no kernels",
        engine_world("RuntimeError: CUDA error: no kernel image is available for execution on the device"),
        "L3", "NoKernelForGPU", "built for this GPU",
    ),
    Fault("a CUDA error", engine_world(CUDA, 134), "L3", "CUDAError", "another engine version", ("EngineFailed",)),
    Fault(
        "a collective that times out",
        engine_world("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"),
        "L3", "NCCLError", "NCCL_DEBUG=INFO",
    ),
    Fault(
        "a KV cache for which no memory is left",
        engine_world("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        "L3", "NoMemoryForCache", "a larger memory fraction",
    ),
    Fault(
        "a GPU whose memory another process has",
        engine_world("ValueError: Free memory on device (3.1/79.2 GiB) on startup is less than desired GPU memory"),
        "L3", "GPUMemoryInUse", "what else uses the GPU",
    ),
    Fault(
        "ranks that do not find each other",
        engine_world("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 joined"),
        "L3", "NCCLError", "ranks",
    ),
    # --- L4 engine
    Fault(
        "an argument that the engine does not know",
        engine_world("sglang: error: unrecognized arguments: --tp-sise 2", 2),
        "L4", "EngineArguments", "spec.engine.extraArgs",
    ),
    Fault(
        "an engine that is too old for the model",
        engine_world("ValueError: Model architectures ['NewForCausalLM'] are not supported for now."),
        "L4", "ArchitectureUnknown", "engine version",
    ),
    Fault(
        "a context that is longer than the cache",
        engine_world("ValueError: The model's max seq len (131072) is larger than the maximum number of tokens"),
        "L4", "ContextTooLong", "context length",
    ),
    Fault(
        "an engine that hangs",
        seen(
            failed("no message"),
            pods=(pod(crashed("", 137)),),
            nodes=(node(),),
            events=(event("Pod", "llama-1", "Unhealthy", "Liveness probe failed: the engine is stalled"),),
        ),
        "L4", "EngineStalled", "log before the restart", ("EngineFailed",),
    ),
    Fault(
        "an engine that a signal ended without a word",
        seen(failed("no message"), pods=(pod(crashed("", 137)),), nodes=(node(),)),
        "L4", "EngineStopped", "events of node and pod", ("EngineFailed",),
    ),
    Fault(
        "an engine that a signal ended in the middle of its log",
        seen(
            failed("INFO: loading safetensors shards"),
            pods=(pod(crashed("INFO: loading safetensors shards: 40 %", 137)),),
            nodes=(node(),),
        ),
        "L4", "EngineStopped", "events of node and pod", ("EngineFailed",), "exit code 137",
    ),
    Fault(
        "an engine that ends with words that nobody knows",
        engine_world("ValueError: something new"),
        "L4", "EngineFailed", "last lines", (), "something new",
    ),
    Fault(
        "arguments that Shoal refuses",
        seen(model(condition("Accepted", "False", "ArgumentsRefused", "spec.engine.extraArgs: --host is Shoal's"))),
        "L4", "ArgumentsRefused", "spec.engine.extraArgs",
    ),
    Fault(
        "a new revision that does not start",
        seen(
            not_ready("RolloutStalled", "the new revision on h100-80gb does not become ready, the one before goes on "
                      "serving with 1 of 1 replicas: the engine of pod chat/llama-2 ended: error: unrecognized "
                      "arguments: --x"),
        ),
        "L4", "EngineArguments", "extraArgs", ("RolloutStalled",),
    ),
    Fault(
        "a model with code of its own",
        engine_world("ValueError: The repository contains custom code. Please pass `trust_remote_code=True`."),
        "L4", "RemoteCodeNeeded", "code of the model's own",
    ),
    Fault(
        "heads that cannot be divided",
        engine_world("AssertionError: num_attention_heads 14 must be divisible by tensor parallel size 4"),
        "L4", "ParallelismImpossible", "spec.engine.parallelism",
    ),
    Fault(
        "a quantization that the engine does not have",
        engine_world("ValueError: Quantization method mxfp9 is not supported for the current GPU"),
        "L4", "QuantizationUnsupported", "quantization",
    ),
    Fault(
        "an engine that loads for an hour",
        seen(
            not_ready("Loading", "0 of 1 replicas ready; 1 loading"),
            pods=(pod(engine(running=True), conditions=[condition("Initialized", "True", "", ago=3600)]),),
            nodes=(node(),),
        ),
        "L4", "LoadsTooLong", "kubectl logs", ("Loading",), "running, not ready",
    ),
    Fault(
        "an engine that was ready in no time that it had",
        seen(
            failed("no message"),
            pods=(pod(crashed("", 137)),),
            nodes=(node(),),
            events=(event("Pod", "llama-1", "Killing", "Container engine failed startup probe, will be restarted"),),
        ),
        "L4", "StartTimeout", "--previous", ("EngineFailed",),
    ),
    Fault(
        "an engine that runs and stops answering",
        seen(
            not_ready("Loading", "0 of 1 replicas ready"),
            pods=(pod(engine(running=True, more={"started": True})),),
            nodes=(node(),),
            events=(event("Pod", "llama-1", "Unhealthy", "Readiness probe failed: context deadline exceeded"),),
        ),
        "L4", "EngineUnresponsive", "readiness probe", ("Loading",),
    ),
    # --- L5 gateway
    Fault(
        "gateways that are not ready",
        seen(model(READY), gateways=(gateway(), gateway("shoal-gateway-2"))),
        "L5", "GatewaysNotReady", "gateways' pods", (), "0 of 2 pods ready",
    ),
    Fault(
        "gateways whose image cannot be pulled",
        seen(model(READY), gateways=(gateway(waiting=("ImagePullBackOff", "manifest unknown")),)),
        "L2", "ImageNotFound", "name or tag", ("GatewaysNotReady",),
    ),
    Fault(
        "gateways that cannot write usage records",
        replace(seen(model(READY)), gateways=(replace(layerviews.pod(gateway(running=True)), not_ready=("spool",)),)),
        "L5", "UsageSpoolRefuses", "gateway.persistence", (), "not ready: spool",
    ),
    # --- L6 client
    Fault(
        "a tenant whose keys have expired",
        seen(tenant(condition("Ready", "False", "NoUsableKey", "none of 2 keys can be used: 0 disabled, 2 expired"))),
        "L6", "NoUsableKey", "shoal keys create",
    ),
    Fault(
        "a suspended tenant",
        seen(tenant(condition("Ready", "False", "Suspended", "suspended: every request is refused"))),
        "L6", "Suspended", "spec.suspended",
    ),
    Fault(
        "a tenant that may use nothing",
        seen(tenant(condition("Ready", "True", "Active", "1 key, 0 models: it may use nothing"), spec={})),
        "L6", "NothingGranted", "spec.models",
    ),
    # --- control
    Fault(
        "no operator",
        seen(
            model(condition("Ready", "Unknown", "Pending", "seen, not yet worked on")), lease_ago=900
        ),
        "control", "OperatorNotLeading", "operator's pods", ("Pending",), "renewed it last",
    ),
    Fault(
        "a Lease that nobody holds",
        seen(model(), lease_ago=None),
        "control", "OperatorNotLeading", "operator's pods", ("Pending",), "nobody holds it",
    ),
    Fault(
        "an operator without a permission",
        seen(not_ready("Refused", 'deployments.apps is forbidden: User "system:serviceaccount:shoal-system:operator" '
                       'cannot create resource "deployments"')),
        "control", "PermissionMissing", "chart's roles", ("Refused",),
    ),
    Fault(
        "a class that does not exist",
        seen(not_ready("ClassNotFound", "spec.variants: there is no GPUClass 'h200'")),
        "control", "ClassNotFound", "create the class",
    ),
    Fault(
        "a fleet that is full",
        seen(
            FULL, nodes=(node(),), related=(CLASS,),
            decision=DecisionView(NOW - timedelta(seconds=9), "NoCapacity", "0 of 8 GPUs free", "not l40s: too small"),
        ),
        "control", "NoCapacity", "free GPUs", (), "0 of 8 GPUs free",
    ),
    Fault(
        "KEDA that is not installed",
        seen(model(READY, condition("ScalingActive", "False", "KEDANotInstalled", "no ScaledObjects"))),
        "control", "KEDANotInstalled", "Install KEDA",
    ),
    Fault(
        "KEDA that is not installed, of a Model that has no replica yet",
        seen(model(
            condition("Placed", "True", "Placed", ago=300),
            condition("Ready", "False", "Starting", "0 of 1 replicas ready", ago=300),
            condition("ScalingActive", "False", "KEDANotInstalled", "the API server knows no ScaledObjects"),
        )),
        "control", "KEDANotInstalled", "Install KEDA",
    ),
    Fault(
        "KEDA that does not call",
        seen(model(READY, condition("ScalingActive", "False", "KEDANotPolling", "no call for 90 s"))),
        "control", "KEDANotPolling", "certificate, network",
    ),
    Fault(
        "a budget in another currency than the prices",
        seen(tenant(condition("BudgetReady", "False", "OtherCurrency", "the budget is in EUR"))),
        "control", "OtherCurrency", "currency of the price list",
    ),
    Fault(
        "an error of Shoal's own",
        seen(not_ready("InternalError", "KeyError: 'x'")),
        "control", "InternalError", "shoal support bundle",
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_on_its_layer_with_what_to_do(fault: Fault) -> None:
    found = causes(fault.world, NOW)
    assert found.state == "failing"
    first, *others = found.causes
    assert (first.layer, first.reason) == (fault.layer, fault.reason), found.causes
    assert fault.do in first.do
    assert first.evidence
    assert all(each.where for each in first.evidence)
    assert fault.evidence in " ".join(each.what for each in first.evidence)
    for reason in fault.hides:
        assert any(f" {reason}" in line for line in first.consequences), first.consequences
        assert reason not in {cause.reason for cause in others}
    assert [cause for cause in others if cause.state == "fault"] == [], "one fault has one cause"


@pytest.mark.parametrize("reason", sorted(name for name, row in REASONS.items() if row.state == "fault"))
def test_each_reason_of_a_condition_is_found_on_its_layer(reason: str) -> None:
    (cause,) = causes(seen(not_ready(reason, "what happened")), NOW).causes
    assert (cause.reason, cause.layer, cause.do) == (reason, REASONS[reason].layer, REASONS[reason].do)
    assert cause.evidence[0].age_seconds == 60


def test_every_layer_that_conditions_and_pods_can_show_has_faults() -> None:
    assert len(FAULTS) >= 40
    assert {fault.layer for fault in FAULTS} == {
        "L0", "L0.5", "L1", "L2", "L2.5", "L3", "L4", "L5", "L6", "control",
    }  # fmt: skip


def test_evidence_has_its_age_and_where_it_was_seen() -> None:
    world = seen(failed(CUDA), pods=(pod(crashed(CUDA, ago=34)),), nodes=(node(),))
    (cause,) = causes(world, NOW).causes
    ages = {each.where: each.age_seconds for each in cause.evidence}
    assert ages["container engine of pod chat/llama-1"] == 34
    assert ages["condition of Model chat/llama"] == 60


def test_what_was_tried_is_told() -> None:
    world = seen(
        model(
            condition("Ready", "False", "EngineFailed", "the engine of pod chat/llama-1 ended; at zero now, the next "
                      "request tries again"),
            variants=[{"class": "l4-24gb", "excluded": "its engine ended 3 times; it is the last choice for a while"}],
        ),
        pods=(pod(crashed("ValueError: x", restarts=5)),),
    )  # fmt: skip
    (cause,) = causes(world, NOW).causes
    told = "\n".join(cause.tried)
    assert "restarted container engine of pod chat/llama-1 5 times" in told
    assert "waits before it restarts" in told
    assert "gave the GPUs back" in told
    assert "class l4-24gb last for a while" in told


def test_what_an_autoscaler_did_is_told() -> None:
    world = waits_for_gpus(
        INSUFFICIENT, events=(event("Pod", "llama-1", "NotTriggerScaleUp", "pod didn't trigger scale-up: max reached"),)
    )
    (cause,) = causes(world, NOW).causes
    assert any("max reached (NotTriggerScaleUp)" in line for line in cause.tried)


def test_a_fault_on_one_node_does_not_explain_a_pod_on_another() -> None:
    world = seen(
        pods=(pod(crashed("ValueError: y")), pod(crashed(CUDA), name="llama-2", node="gpu-2")),
        nodes=(node(condition("DiskPressure", "True", "x", "full"), name="gpu-2"), node()),
    )
    found = causes(world, NOW).causes
    assert [cause.reason for cause in found] == ["DiskPressure", "EngineFailed"]
    assert any("CUDAError" in line for line in found[0].consequences)
    assert "pod chat/llama-1" in found[1].message


def test_one_cordoned_node_of_several_is_a_note() -> None:
    world = seen(FULL, nodes=(node(), node(name="gpu-2", unschedulable=True)), related=(CLASS,))
    assert [(c.reason, c.state) for c in causes(world, NOW).causes] == [
        ("NoCapacity", "fault"),
        ("NodeCordoned", "note"),
    ]


def test_a_cordoned_node_whose_model_serves_is_no_fault() -> None:
    world = seen(model(READY), pods=(serves(),), nodes=(node(unschedulable=True),), related=(CLASS,))
    assert causes(world, NOW).state == "ok"
    alone = seen(kind="node", nodes=(node(unschedulable=True),), related=(CLASS,))
    assert [(c.reason, c.state) for c in causes(alone, NOW).causes] == [("NodeCordoned", "note")]


def test_a_taint_that_the_class_tolerates_or_kubernetes_sets_is_none() -> None:
    tolerant = replace(CLASS, spec={**CLASS.spec, "tolerations": [{"key": GPU, "operator": "Exists"}, {"bad": 1}]})
    taints = [{"key": GPU, "value": "present", "effect": "NoSchedule"},
              {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
              {"key": "soft", "effect": "PreferNoSchedule"}]  # fmt: skip
    world = seen(FULL, nodes=(node(taints=taints),), related=(tolerant,))
    assert [c.reason for c in causes(world, NOW).causes] == ["NoCapacity"]


def test_one_class_without_gpus_does_not_explain_that_another_is_full() -> None:
    absent = replace(gpu_class(condition("Ready", "False", "NoNodes", "no node has the labels")), name="absent")
    found = causes(seen(FULL, nodes=(node(),), related=(CLASS, absent)), NOW).causes
    assert [c.reason for c in found] == ["NoNodes", "NoCapacity"]


def test_gateways_and_a_replica_that_fail_at_once_are_two_causes() -> None:
    """Replicas start and load without gateways: neither explains the other."""
    world = seen(failed("ValueError: y"), pods=(pod(crashed("ValueError: y")),), nodes=(node(),), gateways=(gateway(),))
    assert [c.reason for c in causes(world, NOW).causes] == ["EngineFailed", "GatewaysNotReady"]


def test_an_engine_that_has_loaded_for_minutes_is_waited_for() -> None:
    begun = condition("Initialized", "True", "", ago=600)
    world = seen(not_ready("Loading", "1 loading"), pods=(pod(engine(running=True), conditions=[begun]),))
    assert causes(world, NOW).state == "waiting"


def test_a_tenant_of_routes_only_may_use_something() -> None:
    """A route may have external targets, which need no grant."""
    world = seen(tenant(condition("Ready", "True", "Active"), spec={"routes": [{"namespace": "chat"}]}))
    assert causes(world, NOW).state == "ok"


def test_one_sick_node_of_several_does_not_explain_that_all_gpus_are_taken() -> None:
    world = seen(
        FULL,
        nodes=(node(), node(condition("Ready", "Unknown", "NodeStatusUnknown", "silent"), name="gpu-2")),
        related=(CLASS,),
    )
    found = causes(world, NOW).causes
    assert [(cause.layer, cause.reason) for cause in found] == [("L0", "NodeSilent"), ("control", "NoCapacity")]


def test_nodes_of_a_class_of_devices_need_no_device_plugin() -> None:
    """A DRA driver publishes its GPUs in ResourceSlices, not in the node's capacity."""
    devices = gpu_class(condition("Ready", "True", "NodesFound"))
    devices = replace(devices, spec={**devices.spec, "resourceName": None, "device": {"deviceClassName": "gpu"}})
    found = causes(seen(FULL, nodes=(node(gpus=0),), related=(devices,)), NOW)
    assert [cause.reason for cause in found.causes] == ["NoCapacity"]


@pytest.mark.parametrize("reason", ["NoDevices", "DRAUnavailable", "DeviceClassNotFound", "SelectorInvalid"])
def test_a_class_without_devices_explains_that_nothing_is_free(reason: str) -> None:
    world = seen(FULL, pods=(pending(INSUFFICIENT),), related=(gpu_class(condition("Ready", "False", reason, "none")),))
    (cause,) = causes(world, NOW).causes
    assert cause.reason == reason
    assert {"NoCapacity", "InsufficientGPUs"} <= {line.split(": ")[0].split()[-1] for line in cause.consequences}


OURS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shoal-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}},
}
NAMESPACE = "kubernetes.io/metadata.name"
DENY = policy("chat", "deny-all", podSelector={}, policyTypes=["Ingress"])


def names(each: dict[str, Any]) -> str:
    return each["metadata"]["name"]


@pytest.mark.parametrize(
    "allowing",
    [
        policy("chat", "llama", podSelector={"matchLabels": {"shoal.dev/model": "llama"}},
               ingress=[{"from": [OURS], "ports": [{"protocol": "TCP", "port": 30000}, {"port": 30443}]}]),
        policy("chat", "range", podSelector={}, ingress=[{"ports": [{"port": 29000, "endPort": 30500}]}]),
        policy("chat", "named", podSelector={}, ingress=[{"ports": [{"port": "engine"}]}]),
        policy("chat", "block", podSelector={}, ingress=[{"from": [{"ipBlock": {"cidr": "10.244.0.0/16"}}]}]),
        policy("chat", "team", podSelector={},
               ingress=[{"from": [{"namespaceSelector": {"matchLabels": {"a-label-that-was-not-read": "x"}}}]}]),
        policy("chat", "few", podSelector={"matchExpressions": [{"key": "shoal.dev/model", "operator": "Exists"}]},
               ingress=[{"from": [{"namespaceSelector": {"matchExpressions": [
                   {"key": NAMESPACE, "operator": "NotIn", "values": ["other"]}]}}]}]),
    ],
    ids=names,
)  # fmt: skip
def test_policies_add_up_and_what_is_not_known_counts_as_allowed(allowing: dict[str, Any]) -> None:
    world = seen(model(READY), pods=(serves(),), gateways=(ready_gateway(),), policies=(DENY, allowing))
    assert causes(world, NOW).state == "ok"


@pytest.mark.parametrize(
    "other",
    [
        policy("chat", "port", podSelector={}, ingress=[{"from": [OURS], "ports": [{"port": 8080}]}]),
        policy("chat", "udp", podSelector={}, ingress=[{"ports": [{"protocol": "UDP", "port": 30000}]}]),
        policy("chat", "block", podSelector={},
               ingress=[{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.244.0.0/16"]}}]}]),
        policy("chat", "same-space", podSelector={}, ingress=[{"from": [{"podSelector": {}}]}]),
        policy("chat", "other-space", podSelector={},
               ingress=[{"from": [{"namespaceSelector": {"matchLabels": {NAMESPACE: "monitoring"}}}]}]),
        policy("other", "elsewhere", podSelector={}, ingress=[{}]),
        policy("chat", "of-another-pod", podSelector={"matchLabels": {"app": "web"}}, ingress=[{}]),
    ],
    ids=names,
)  # fmt: skip
def test_a_policy_that_allows_something_else_does_not_help(other: dict[str, Any]) -> None:
    world = seen(model(READY), pods=(serves(),), gateways=(ready_gateway(),), policies=(DENY, other))
    (cause,) = causes(world, NOW).causes
    assert (cause.reason, cause.state) == ("NetworkPolicyBlocks", "fault")


def test_a_policy_says_nothing_of_replicas_and_gateways_that_are_not_ready() -> None:
    world = seen(not_ready("Loading", ""), pods=(pod(engine(running=True)),), gateways=(ready_gateway(),),
                 policies=(DENY,))  # fmt: skip
    assert causes(world, NOW).state == "waiting"
    alone = seen(model(READY), pods=(serves(),), gateways=(gateway(),), policies=(DENY,))
    assert [c.reason for c in causes(alone, NOW).causes] == ["GatewaysNotReady"]


def test_a_sick_node_that_the_model_does_not_need_is_not_told() -> None:
    world = seen(model(READY), nodes=(node(condition("Ready", "Unknown", "x", "silent"), name="gpu-9"),))
    assert causes(world, NOW).state == "ok"


def test_a_model_that_serves_has_no_cause() -> None:
    found = causes(seen(model(READY, condition("Placed", "True", "Placed")), nodes=(node(),)), NOW)
    assert (found.state, found.causes) == ("ok", ())


def test_a_step_that_ends_by_itself_is_no_fault() -> None:
    found = causes(seen(not_ready("Fetching", "0 of 1 replicas ready; 1 staging"), pods=(pod(),)), NOW)
    assert found.state == "waiting"
    assert [(cause.layer, cause.reason) for cause in found.causes] == [("L2.5", "Fetching")]


@pytest.mark.parametrize(
    ("xid", "reason", "meaning"),
    [(63, "GPUMemoryRepaired", "marked for remapping"), (92, "GPUCorrectedECC", "all corrected")],
)
def test_an_xid_after_which_nothing_fails_is_a_note(xid: int, reason: str, meaning: str) -> None:
    wrong = condition("XIDErrors", "True", "XIDError", f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=1")
    found = causes(seen(model(READY), pods=(serves(),), nodes=(node(wrong),)), NOW)
    (note,) = found.causes
    assert (note.reason, note.state, note.layer.value) == (reason, "note", "L0")
    assert meaning in note.message
    assert found.state == "ok"


def test_a_note_comes_after_the_faults() -> None:
    world = seen(
        model(
            condition("Accepted", "True", "NameClaimed", "llama is another's"),
            condition("Ready", "False", "NoFit", "no class is large enough"),
        )
    )
    assert [(cause.reason, cause.state) for cause in causes(world, NOW).causes] == [
        ("NoFit", "fault"),
        ("NameClaimed", "note"),
    ]


def test_a_pause_that_holds_a_decision_back_is_the_cause_and_not_a_wait() -> None:
    said = "annotation shoal.dev/paused is set: decided, nothing applied. keeps what it has: 1 on h100-80gb"
    held = model(
        condition("Placed", "False", "Pending", "keeps what it has: 1 on h100-80gb"),
        condition("Ready", "False", "Paused", said),
        condition("Stalled", "True", "Paused", said),
    )
    found = causes(seen(held), NOW)
    assert found.state == "failing"
    (cause,) = found.causes
    assert (cause.reason, cause.state, cause.layer.value) == ("Paused", "fault", "control")
    assert "Remove the annotation shoal.dev/paused" in cause.do
    assert any("Pending" in each for each in cause.consequences)


def test_a_pause_that_holds_nothing_back_is_a_note() -> None:
    driven = condition("Ready", "False", "Paused", "decided, replicas are those of KEDA. 0 of 1 replicas ready")
    for ready in (condition("Ready", "True", "Paused", "decided, nothing applied. 1 of 1 replicas ready"), driven):
        found = causes(seen(model(ready)), NOW)
        assert [(cause.reason, cause.state) for cause in found.causes] == [("Paused", "note")]


def test_without_a_sight_of_everything_nothing_is_called_well() -> None:
    missing = Unread("nodes", 'nodes is forbidden: User "me" cannot list resource "nodes"')
    found = causes(seen(model(READY), unread=(missing,)), NOW)
    assert found.state == "unknown"
    assert found.unread == (missing,)


def test_stale_signals_are_a_note_beside_serving() -> None:
    stale = DecisionView(NOW, "SignalsUnknown", "", "", stale=("shoal-gateway-1",))
    found = causes(seen(model(READY), decision=stale), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [("SignalsStale", "note")]
    assert found.state == "ok"


def test_a_reason_of_a_later_version_is_shown_as_it_is() -> None:
    found = causes(seen(not_ready("SomethingNew", "of version 9")), NOW)
    (cause,) = found.causes
    assert (cause.layer, cause.reason, cause.state) == ("control", "UnknownReason", "fault")
    assert "SomethingNew" in cause.evidence[0].what


def test_a_tenant_hears_of_its_models_that_do_not_serve() -> None:
    found = causes(seen(tenant(condition("Ready", "True", "Active", "1 key")), related=(FULL,)), NOW)
    (cause,) = found.causes
    assert (cause.reason, cause.state) == ("TargetNotServing", "note")
    assert "NoCapacity" in cause.message


def test_each_model_of_a_tenant_that_does_not_serve_is_a_cause_with_its_name_in_the_advice() -> None:
    broken = [model(condition("Ready", "False", "NoFit", "none"), name=f"m{n:02}") for n in range(12)]
    found = causes(seen(tenant(condition("Ready", "True", "Active")), related=tuple(broken)), NOW)
    first, second, *_ = listed = found.causes
    assert (first.message, first.do) == (
        "Model chat/m00 does not serve: NoFit: none",
        "Run `shoal why model/m00 -n chat`.",
    )
    assert second.message.startswith("Model chat/m01 does not serve")
    assert len(listed) == 11
    assert listed[-1].message == "2 more do not serve, or not as specified"
    assert listed[-1].evidence[0].what == "Model chat/m10, Model chat/m11"


def test_a_model_that_still_serves_as_before_is_not_said_not_to_serve() -> None:
    broken = condition("Ready", "False", "SourceNotFound", "hf://owner/x: there is none")
    found = causes(
        seen(tenant(condition("Ready", "True", "Active")), related=(model(broken, replicas={"ready": 1}),)), NOW
    )
    (cause,) = found.causes
    assert cause.message.startswith("Model chat/llama serves with 1 replica, but not as specified: SourceNotFound")


def test_a_pod_is_explained_by_its_node() -> None:
    world = seen(
        kind="pod",
        pods=(pod(crashed(CUDA)),),
        nodes=(node(condition("Ready", "Unknown", "NodeStatusUnknown", "silent")),),
    )
    (cause,) = causes(world, NOW).causes
    assert cause.reason == "NodeSilent"
    assert any("CUDAError" in line for line in cause.consequences)


@pytest.mark.parametrize("alone", [False, True])
def test_a_queue_of_kueue_without_quota_is_a_wait_with_the_queue_and_what_ends_it(alone: bool) -> None:
    text = "pod chat/llama-1 waits for quota of queue chat/serving: insufficient unused quota for nvidia.com/gpu"
    of_model = seen(not_ready("QuotaWait", text), pods=(gated(),), nodes=(node(),))
    found = causes(seen(pods=(gated(),), kind="pod") if alone else of_model, NOW)
    assert found.state == "waiting"
    first = found.causes[0]
    assert (first.layer.label, first.reason) == ("control", "QuotaWait")
    assert "kubectl get workloads" in first.do
    assert "serving" in first.message


@pytest.mark.parametrize(
    ("reason", "said", "state", "do"),
    [
        (
            "AdmissionCheckPending",
            "has quota of queue chat/serving, which waits for admission check nodes: ProvisioningRequest chat/r-1: "
            "no autoscaler has answered it yet",
            "waiting",
            "ProvisioningRequest",
        ),
        (
            "AdmissionRejected",
            "is not admitted by queue chat/serving: The workload is deactivated (ProvisioningRequest chat/r-1: Failed, "
            "no stock); delete the pod to ask again",
            "failing",
            "delete the pod to ask again",
        ),
    ],
)
def test_a_replica_whose_nodes_are_asked_for_does_not_wait_for_quota(
    reason: str, said: str, state: str, do: str
) -> None:
    held = gated()
    key = f"{held['metadata']['namespace']}/{held['metadata']['name']}"
    found = causes(seen(not_ready(reason, f"pod {key} {said}"), pods=(held,), nodes=(node(),)), NOW)
    assert found.state == state
    (cause,) = found.causes
    assert (cause.layer.label, cause.reason) == ("control", reason)
    assert "ProvisioningRequest chat/r-1" in cause.message
    assert do in cause.do


def test_a_claim_that_was_refused_and_is_made_now_is_no_cause() -> None:
    world = seen(STARTS, **unclaimed(CLAIMS_FULL, made=True, waits=INSUFFICIENT))
    assert {cause.reason for cause in causes(world, NOW).causes} == {"InsufficientGPUs"}
    starts = unclaimed(CLAIMS_FULL, made=True)
    starts["pods"][0]["spec"]["nodeName"] = "gpu-1"
    found = causes(seen(STARTS, nodes=(node(),), **starts), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [("Starting", "waits")]


def test_a_claim_that_is_being_made_is_no_cause_yet() -> None:
    new = unclaimed()
    new["pods"][0]["metadata"]["creationTimestamp"] = (NOW - timedelta(seconds=5)).isoformat()
    assert [cause.reason for cause in causes(seen(STARTS, **new), NOW).causes] == ["Starting"]


def test_of_a_pod_the_quota_that_refuses_its_claim_is_told_too() -> None:
    (cause,) = causes(seen(kind="pod", **unclaimed(CLAIMS_FULL)), NOW).causes
    assert (cause.layer, cause.reason) == ("L2", "ResourceQuotaExceeded")
    assert "pod chat/llama-1 gets no ResourceClaim" in cause.message
