"""Faults that an examiner wrote down before the rules of `core/layers` were read, as snapshots."""

from dataclasses import replace
from typing import Any

from shoal.core.layers.types import AutoscalerView, ClaimView, WhySnapshot
from shoal.kube import layerviews
from tests.faults.test_faults import (
    CLASS,
    CUDA,
    READY,
    Fault,
    engine_world,
    failed,
    image_world,
    serves,
    stage_world,
    waits_for_gpus,
)
from tests.faults.worlds import (
    NOW,
    condition,
    crashed,
    engine,
    event,
    gateway,
    model,
    node,
    not_ready,
    pending,
    pod,
    seen,
)

CREATING = engine(waiting=("ContainerCreating", ""))
STARTS = not_ready("Starting", "1 replica is being created")


def not_started(reason: str, text: str) -> WhySnapshot:
    """A pod of which no container has started, with the kubelet's event."""
    return seen(STARTS, pods=(pod(CREATING),), nodes=(node(),), events=(event("Pod", "llama-1", reason, text),))


def rejected(reason: str, text: str) -> WhySnapshot:
    """A pod that its kubelet refused or ended."""
    ended = pod(engine(), phase="Failed", reason=reason, message=text)
    return seen(STARTS, pods=(ended,), nodes=(node(),))


def node_says(*events: dict[str, Any], conditions: tuple[dict[str, Any], ...] = (), text: str = CUDA, code: int = 1) \
        -> WhySnapshot:  # fmt: skip
    """An engine that keeps ending on a node of which something is reported."""
    return seen(failed(text), pods=(pod(crashed(text, code)),), nodes=(node(*conditions),), events=events)


def unbound_claim() -> WhySnapshot:
    text = "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    waits = pending(text)
    waits["spec"]["volumes"] = [{"name": "w", "persistentVolumeClaim": {"claimName": "weights"}}]
    said = event("PersistentVolumeClaim", "weights", "ProvisioningFailed", 'storageclass "fast" not found')
    return seen(not_ready("Unschedulable", f"pod chat/llama-1: {text}"), pods=(waits,), events=(said,))


def source_on_a_claim() -> WhySnapshot:
    raw = {
        "metadata": {"namespace": "chat", "name": "llama", "generation": 1},
        "spec": {"source": {"uri": "pvc://weights/llama"}},
        "status": {"observedGeneration": 1, "conditions": [
            condition("Ready", "False", "StageFailed", "Job chat/facts-1 failed: DeadlineExceeded")]},
    }  # fmt: skip
    claim = ClaimView("chat/weights", "Pending", "fast", NOW)
    return replace(seen(layerviews.shoal_object("model", raw)), claim=claim)


def secret_of_pulls() -> WhySnapshot:
    text = 'Back-off pulling image "registry.corp/e:1": failed to authorize: 401 Unauthorized'
    said = event("Pod", "llama-1", "FailedToRetrieveImagePullSecret",
                 "Unable to retrieve some image pull secrets (regcred)")  # fmt: skip
    return replace(image_world(("ImagePullBackOff", text)), events=(layerviews.event(said),))


def held() -> WhySnapshot:
    there = model(READY)
    return seen(replace(there, generation=2, deleting=NOW.replace(hour=11), finalizers=("example.com/inventory",)))


def other_autoscaler() -> WhySnapshot:
    there = replace(model(READY), spec={"variants": [{"class": "h100-80gb"}]})
    other = AutoscalerView("chat", "team", "llama-h100-80gb", NOW)
    return replace(seen(there, pods=(serves(),)), autoscalers=(other,))


def pending_gateway() -> WhySnapshot:
    waits = condition("PodScheduled", "False", "Unschedulable", "0/9 nodes are available: 9 Insufficient cpu.", 90)
    there = gateway()
    there["spec"] = {}
    there["status"]["conditions"] = [waits]
    return seen(model(READY), pods=(serves(),), nodes=(node(),), gateways=(there,))


LIMIT = "failed to pull image: 429 Too Many Requests - toomanyrequests: You have reached your pull rate limit"
X509 = 'Head "https://registry.corp/v2/": tls: failed to verify certificate: x509: signed by unknown authority'
SECCOMP = 'cannot load seccomp profile "/var/lib/kubelet/seccomp/e.json": open e.json: no such file or directory'
NO_ROUTE = "ncclRemoteError: socketPollConnect connect to 10.2.0.7<53211> returned No route to host"
GATED = "OSError: You are trying to access a gated repo. 403 Client Error."
ELSEWHERE = "0/4 nodes are available: 1 node(s) had volume node affinity conflict, 3 node(s) didn't match"
MCE = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: uncorrected DRAM error"
CNI = "container runtime network not ready: NetworkPluginNotReady message:Network plugin returns error: cni plugin"
DRA = "NodePrepareResources: DRA driver gpu.nvidia.com is not registered"
MIG = {"nvidia.com/mig-1g.10gb": (7, 7)}
NOT_SIZED = "ValueError: max_num_batched_tokens (512) is smaller than max_model_len (8192)."

FURTHER = [
    # --- L0
    Fault("a kernel that hangs", node_says(conditions=(condition("KernelDeadlock", "True", "TaskHung", "kworker"),)),
          "L0", "KernelFault", "restart the machine", ("CUDAError",)),
    Fault("a machine whose memory has an error that was not corrected",
          node_says(event("Node", "gpu-1", "MachineCheck", MCE)), "L0", "MachineFault", "memory and processors",
          ("CUDAError",), "Hardware Error"),
    # --- L0.5
    Fault("a rank that has no route to another's host", engine_world(NO_ROUTE), "L0.5", "FabricFailed", "NICs"),
    Fault("an Xid 74 in a node's event", node_says(event("Node", "gpu-1", "XidError", "NVRM: Xid (PCI:3b): 74, x")),
          "L0.5", "NVLinkFault", "NVLinks checked", ("CUDAError",)),
    # --- L1
    Fault("GPUs that were cut into MIG slices",
          seen(not_ready("NoCapacity", "class h100-80gb has 0 GPUs"), related=(CLASS,),
               nodes=(node(gpus=0, devices=MIG),)), "L1", "GPUsPartitioned", "Turn MIG off", ("NoCapacity",)),
    Fault("a DRA driver that is not registered", not_started("FailedPrepareDynamicResources", DRA), "L1",
          "DeviceAllocationFailed", "DRA driver"),
    Fault("a container runtime without the GPU vendor's handler",
          not_started("FailedCreatePodSandBox", 'no runtime for "nvidia" is configured'), "L1", "DriverMissing",
          "container toolkit"),
    # --- L2
    Fault("a registry that limits pulls", image_world(("ErrImagePull", LIMIT)), "L2", "ImagePullsLimited", "mirror"),
    Fault("a registry whose certificate the node does not trust", image_world(("ErrImagePull", X509)), "L2",
          "RegistryCertificateRefused", "registry's CA"),
    Fault("a pull secret that is not in the namespace", secret_of_pulls(), "L2", "PullSecretMissing",
          "Create the pull secret", (), "regcred"),
    Fault("a claim whose StorageClass does not exist", unbound_claim(), "L2", "VolumeNotBound", "StorageClass", (),
          "ProvisioningFailed"),
    Fault("a Model's source on a claim that is not bound", source_on_a_claim(), "L2", "VolumeNotBound", "StorageClass",
          ("StageFailed",), "phase Pending"),
    Fault("a volume of another node or zone", waits_for_gpus(ELSEWHERE), "L2", "VolumeElsewhere", "many nodes"),
    Fault("a volume that is attached to another node",
          not_started("FailedAttachVolume", "Multi-Attach error for volume pvc-1: it is attached to one node"), "L2",
          "VolumeElsewhere", "free it there"),
    Fault("a pod over its own limit of ephemeral storage",
          rejected("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi."), "L2",
          "NoSpaceInContainer", "limit of ephemeral-storage"),
    Fault("an emptyDir over its limit", rejected("Evicted", 'Usage of EmptyDir volume "t" exceeds the limit "1Gi".'),
          "L2", "NoSpaceInContainer", "volumes"),
    Fault("a kubelet that refuses a pod for its topology",
          rejected("TopologyAffinityError", "Resources cannot be allocated with Topology locality"), "L2",
          "PodRejectedByNode", "kubelet's message", (), "TopologyAffinityError"),
    Fault("a kubelet's warning that nobody knows", not_started("FailedNewThing", "the thing is not there"), "L2",
          "PodDoesNotStart", "the event names", (), "the thing is not there"),
    Fault("a seccomp profile that is not on the node",
          seen(STARTS, pods=(pod(engine(waiting=("CreateContainerError", SECCOMP))),), nodes=(node(),)), "L2",
          "ContainerConfigError", "misses on the node"),
    Fault("a path that the engine's user may not write", engine_world("PermissionError: [Errno 13] Permission denied"),
          "L2", "PathNotPermitted", "fsGroup"),
    Fault("an engine with too many open files", engine_world("OSError: [Errno 24] Too many open files"), "L2",
          "ProcessLimitReached", "Raise the limit"),
    Fault("an image without the compiler that kernels need", engine_world("RuntimeError: Could not find nvcc"), "L2",
          "ImageIncomplete", "not in this one"),
    Fault("a node whose kernel ends engines for want of memory",
          node_says(event("Node", "gpu-1", "SystemOOM", "System OOM encountered, victim process: python3"), text="",
                    code=137), "L2", "MemoryPressure", "node's memory", ("EngineStopped",), "System OOM"),
    Fault("a node whose network plugin is not ready",
          node_says(conditions=(condition("Ready", "False", "KubeletNotReady", CNI),)), "L2",
          "NodeNetworkUnavailable", "network plugin", ("CUDAError",)),
    Fault("a gateway that is killed at its memory limit",
          seen(model(READY), pods=(serves(),), nodes=(node(),),
               gateways=(gateway(waiting=("CrashLoopBackOff", "x"), ended=(137, "OOMKilled", ""), restarts=4),)),
          "L2", "OutOfHostMemory", "Shoal's own pods", ("GatewaysNotReady",)),
    Fault("gateways for which no node has CPU", pending_gateway(), "L2", "InsufficientCPUOrMemory",
          "`resources` in the chart", ("GatewaysNotReady",)),
    # --- L2.5
    Fault("a source that limits requests", stage_world("SourceUnreachable", "the hub answered 429 for o/l"), "L2.5",
          "SourceLimitsRequests", "token or a mirror"),
    Fault("a source that answers with errors", stage_world("SourceUnreachable", "the hub answered 503 for o/l"),
          "L2.5", "SourceAnswersErrors", "its mirror"),
    Fault("a source whose certificate is not trusted",
          stage_world("SourceUnreachable", "the certificate of s3://b/m is not trusted: add its CA"), "L2.5",
          "SourceCertificateRefused", "caBundle"),
    Fault("a gated repository that the engine itself asks for", engine_world(GATED), "L2.5", "Gated", "secretRef"),
    # --- L3, L4
    Fault("a quantization for which the GPU is too old",
          engine_world("ValueError: FP8 is only supported on GPUs with compute capability >= 8.9"), "L3",
          "NoKernelForGPU", "another class"),
    Fault("more parts than the replica has GPUs", engine_world("CUDA error: invalid device ordinal"), "L4",
          "ParallelismImpossible", "so many GPUs"),
    Fault("arguments that contradict each other", engine_world(NOT_SIZED), "L4", "EngineArguments", "extraArgs"),
    # --- control
    Fault("a Model whose deletion a foreign finalizer holds", held(), "control", "DeletionHeld", "finalizer",
          (), "example.com/inventory"),
    Fault("another autoscaler of a Model's Deployment", other_autoscaler(), "control", "OtherAutoscaler",
          "Delete the other HPA"),
]  # fmt: skip
