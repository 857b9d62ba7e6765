"""The faults of the lab by layer: how each comes into a cluster, and what `shoal why` must say of it first."""

import signal
from dataclasses import dataclass, replace
from typing import Any, Final

from shoal_dev.demo.clusters import NAMESPACE
from tests.faults.lab import injections as inject
from tests.faults.lab import objects as make
from tests.faults.lab.cluster import BARE, WELL, gpu_class
from tests.faults.lab.injections import Injection
from tests.faults.lab.objects import SPACE, Json, adapter, from_hub, model, named, pool, tenant
from tests.support import faultyhub

QUOTA, LIMITED, GUARDED, HOOKED = "faults-quota", "faults-limits", "faults-guarded", "faults-hooked"
CROWDED, MESHED, RESTRICTED, CUT = "faults-jobs", "faults-meshed", "faults-restricted", "faults-cut"
DENIED: Final = "faults-denied"
SPACES: Final = (SPACE, QUOTA, LIMITED, GUARDED, HOOKED, CROWDED, MESHED, RESTRICTED, CUT, DENIED)
"""The first, and those in which something refuses or changes pods, or cuts them off."""
DEVICES: Final = "gpu.example.com"
"""A DRA driver that publishes none."""
LABELS: Final[dict[str, dict[str, str]]] = {RESTRICTED: {"pod-security.kubernetes.io/enforce": "restricted"}}


@dataclass(frozen=True)
class LabFault:
    """One fault. `layer`, `reason` and `do` (words of the next step) are those of the first cause."""

    name: str
    subject: str
    """As `shoal why` takes it."""
    reason: str
    do: str
    objects: tuple[Json, ...] = ()
    """What is applied."""
    layer: str = ""
    state: str = "failing"
    space: str = SPACE
    injected: Injection | None = None
    """What is done after that."""
    before: bool = False
    """It is done before anything is applied."""
    serves: bool = False
    """The subject serves before."""
    heals: bool = False
    """When the injection is undone, it is no cause any more."""
    explains: str = ""
    """A reason that is shown as its consequence."""
    tried: str = ""
    """Words of what was done about it."""


def on_layer(layer: str, *faults: LabFault) -> tuple[LabFault, ...]:
    return tuple(replace(fault, layer=layer) for fault in faults)


def of_model(title: str, reason: str, do: str, made: Json, *besides: Json, **more: Any) -> LabFault:
    """A Model that does not serve. `besides` are applied before it."""
    name, space = made["metadata"]["name"], made["metadata"]["namespace"]
    return LabFault(title, f"model/{name}", reason, do, (*besides, made), space=space, **more)


def says(name: str, text: str, reason: str, do: str) -> LabFault:
    """An engine that ends at its start with this text: the simulator repeats the name of a GPU that it does not
    know."""
    return of_model(f"an engine that ends with: {text[:60]}", reason, do, model(name, env={"SHOAL_SIM_GPU": text}))


def serving(title: str, on: str, reason: str, do: str, injected: Injection, *, heals: bool = True) -> LabFault:
    """A Model that serves on a node which then breaks."""
    made = model(f"on-{on}", on=on)
    return of_model(title, reason, do, made, injected=injected, serves=True, heals=heals)


def served(title: str, reason: str, do: str, made: Json, injected: Injection, **more: Any) -> LabFault:
    """A Model that serves, and to which something then happens."""
    return of_model(title, reason, do, made, injected=injected, serves=True, **more)


def reported(title: str, name: str, reason: str, do: str, injected: Injection) -> LabFault:
    """What is reported of the only node of a class, on which nothing runs."""
    return LabFault(title, f"gpuclass/{name}", reason, do, injected=injected)


def of_class(title: str, name: str, reason: str, do: str, **device: Any) -> LabFault:
    """A class of devices of a DRA driver."""
    made = named("GPUClass", name, None, device={"deviceClassName": DEVICES} | device)
    return LabFault(title, f"gpuclass/{name}", reason, do, (make.device_class(DEVICES), made))


def later(title: str, name: str, **becomes: Any) -> LabFault:
    """An adapter that one replica has loaded, whose repository then becomes another one, and which a second replica
    needs, on a node whose cache never had it."""

    def base(replicas: int) -> Json:
        spread = [{"class": WELL, "maxReplicas": 1}, {"class": "later"}]
        scaling = {"minReplicas": replicas, "maxReplicas": replicas}
        return model(f"{name}-base", on=None, variants=spread, scaling=scaling)

    made = adapter(name, name, uri=f"hf://team/adapter-{name}", minCopies=2)
    return LabFault(title, f"adapter/{name}", "SourceChanged", "an address of their own",
                    (base(1), pool(name, f"{name}-base"), made),
                    injected=inject.rewritten(f"adapter-{name}", name, SPACE, base(2), **becomes))  # fmt: skip


XID_79: Final = ("XIDErrors", "XidError", "Xid 79: GPU has fallen off the bus")
TAINT: Final = "maintenance=true:NoExecute"
TIME_SLICED: Final = "nvidia.com/gpu.replicas=4", "nvidia.com/gpu.sharing-strategy=time-slicing"
NOT_SLICED: Final = "nvidia.com/gpu.replicas=1", "nvidia.com/gpu.sharing-strategy=none"

HARDWARE: Final = on_layer(
    "L0",
    says("ecc", "CUDA error: uncorrectable ECC error encountered", "GPUUncorrectableECC", "Cordon the node"),
    serving("a machine that is off", "silent", "NodeSilent", "Check the machine", inject.silent("silent-1")),
    serving("an Xid 79 that a problem detector reports", "xid", "GPUFellOffBus", "restart the machine",
            inject.condition("xid-1", *XID_79)),
    serving("an ECC error that a problem detector reports", "ecc", "GPUUncorrectableECC", "reset the GPU",
            inject.condition("ecc-1", "GpuEccErrors", "DoubleBitError", "GPU 0 has double bit errors")),
    serving("a GPU that the device plugin took out under an engine", "partial", "GPUUnhealthy", "vendor's diagnosis",
            inject.healthy_gpus("partial-1", 1)),
    of_model("a GPU that fell off the bus under an engine that ends with a CUDA error", "GPUFellOffBus",
             "restart the machine", model("on-both", on="both", env={"SHOAL_SIM_GPU": "CUDA error: launch failure"}),
             injected=inject.condition("both-1", *XID_79), explains="CUDAError"),
    reported("an Xid 48 in an event of the only node of a class", "logged", "GPUUncorrectableECC", "reset the GPU",
             inject.node_event("logged-1", "XidError", "NVRM: Xid (PCI:0000:3b:00): 48, DBE")),
    reported("a health agent that finds the GPUs not ready", "monitored", "GPUUnhealthy", "vendor's diagnosis",
             inject.condition("monitored-1", "AcceleratedHardwareReady", "DCGMHealth", "clocks", bad="False")),
    reported("a taint of a health agent", "sick", "GPUUnhealthy", "vendor's diagnosis",
             inject.kubectl(("taint", "node", "sick-1", "health.example/gpu=unhealthy:NoSchedule"),
                            ("taint", "node", "sick-1", "health.example/gpu-"))),
    reported("a read-only filesystem", "readonly", "NodeDiskFault", "disk checked",
             inject.condition("readonly-1", "ReadonlyFilesystem", "FilesystemIsReadOnly", "remounted read-only")),
)  # fmt: skip

FABRIC: Final = on_layer(
    "L0.5",
    says("fabric", "RuntimeError: Error 802: system not yet initialized", "NVLinkFault", "fabric manager"),
    serving("an InfiniBand link that flaps", "link", "RDMADeviceLost", "RDMA adapters",
            inject.condition("link-1", "IBLinkFlapping", "IBLinkFlapping", "mlx5_2")),
    reported("an RDMA adapter that went down", "rdma", "RDMADeviceLost", "RDMA adapters",
             inject.devices("rdma-1", "rdma/hca", 8, 7)),
)  # fmt: skip

DRIVER: Final = on_layer(
    "L1",
    says("old-driver", "The NVIDIA driver on your system is too old", "DriverTooOld", "new enough"),
    serving("a device plugin that has gone", "unplugged", "DevicePluginMissing", "device plugin",
            inject.healthy_gpus("unplugged-1", 0)),
    of_model("time-sliced GPUs", "SharedGPUs", "time-slicing", model("on-shared", on="shared"),
             injected=inject.kubectl(("label", "node", "shared-1", "--overwrite", *TIME_SLICED),
                                     ("label", "node", "shared-1", "--overwrite", *NOT_SLICED))),
    of_class("a class of a DeviceClass that is not there", "no-driver", "DeviceClassNotFound", "DRA driver",
             deviceClassName="gpu.absent.example"),
    of_class("a class of devices that no driver publishes", "no-devices", "NoDevices", "resourceslices"),
)  # fmt: skip

CONTAINER: Final = on_layer(
    "L2",
    of_model("an image that is not there", "ImageNotFound", "name or tag",
             model("no-image", engine={"image": "registry.example/team/none:1", "version": "0.5.23-next"})),
    of_model("an image without the engine", "ImageIncomplete", "image that has the engine",
             model("no-engine", engine={"image": f"{BARE}:1", "version": "0.5.23-next"})),
    of_model("a ServiceAccount that is not there", "RequiredObjectMissing", "Create the ServiceAccount",
             model("no-account", pod={"serviceAccountName": "nobody"})),
    of_model("more CPU than a node has", "InsufficientCPUOrMemory", "Add CPU or memory",
             model("hungry", pod={"resources": {"requests": {"cpu": "500"}}})),
    of_model("a node with GPUs and no CPU", "InsufficientCPUOrMemory", "cpuPerGPU",
             model("on-small", on="small", pod={"resources": {"requests": {"cpu": "2"}}})),
    of_model("a container that is killed at its memory limit", "OutOfHostMemory", "spec.pod.resources",
             model("fat", pod={"annotations": {"lab.shoal.dev/enforce-memory": "engine"},
                               "resources": {"requests": {"memory": "16Mi"}, "limits": {"memory": "24Mi"}}}),
             explains="EngineFailed"),
    of_model("a ResourceQuota without GPUs", "ResourceQuotaExceeded", "Raise the ResourceQuota", model("quota", QUOTA),
             make.of_namespace("ResourceQuota", "team", QUOTA, hard={"requests.nvidia.com/gpu": "0"})),
    of_model("a ResourceQuota that has no room for the Job that reads the source", "ResourceQuotaExceeded",
             "Raise the ResourceQuota", model("crowded", CROWDED, source={"uri": "hf://team/moving"}),
             make.of_namespace("ResourceQuota", "pods", CROWDED, hard={"pods": "0"})),
    of_model("a LimitRange below what the engine needs", "LimitRangeExceeded", "LimitRange",
             model("limits", LIMITED, pod={"resources": {"limits": {"memory": "8Gi"}}}),
             make.of_namespace("LimitRange", "small", LIMITED,
                               limits=[{"type": "Container", "max": {"memory": "4Gi"}}])),
    of_model("an admission policy that refuses engines", "WebhookRefused", "policy", model("guarded", GUARDED),
             *make.no_engines(GUARDED)),
    of_model("an admission webhook that does not answer", "WebhookUnreachable", "admission webhook",
             model("hooked", HOOKED), make.silent_webhook(HOOKED)),
    of_model("an init container of a mesh that ends with an error", "InjectedContainerFailed", "a webhook, policy or",
             model("meshed", MESHED), *make.mesh(MESHED, RESTRICTED)),
    of_model("a namespace with a restricted Pod Security level, and a mesh that wants more", "PodSecurityRefused",
             "Pod Security level", model("restricted", RESTRICTED), *make.mesh(MESHED, RESTRICTED)),
    served("a NetworkPolicy that cuts gateways and engine", "NetworkPolicyBlocks", "Allow gateways", model("cut", CUT),
           inject.cut_off("cut", CUT, make.no_egress_to(CUT, NAMESPACE)), heals=True),
    of_model("a node from which no name server answers", "NameResolutionFailed", "DNS pods",
             from_hub("on-nameless", "moving", on="nameless"), before=True,
             injected=inject.no_name_server("nameless-1")),
    of_model("a claim that is not there", "VolumeMissing", "PersistentVolumeClaim",
             model("no-claim", source={"uri": "pvc://weights/model"})),
    of_model("a class of no node", "NoNodes", "nodeSelector", model("nowhere", on="absent"),
             gpu_class("absent", {"no": "such-label"})),
    LabFault("a GPUClass of no node", "gpuclass/absent", "NoNodes", "nodeSelector"),
    serving("a disk that is full", "pressure", "DiskPressure", "Free disk",
            inject.condition("pressure-1", "DiskPressure", "KubeletHasDiskPressure", "kubelet has disk pressure")),
    serving("a taint that the class does not tolerate", "tainted", "TaintNotTolerated", "toleration",
            inject.kubectl(("taint", "node", "tainted-1", TAINT), ("taint", "node", "tainted-1", "maintenance-"))),
    serving("a cordoned node", "cordoned", "NodeCordoned", "Uncordon",
            inject.kubectl(("cordon", "cordoned-1"), ("uncordon", "cordoned-1"))),
    of_model("a class whose GPUs a pod of others holds", "GPUsHeldByOthers", "pods that the message names",
             model("too-late", on="held"), make.other_pod("train-0", "held-1", 2), explains="NoCapacity"),
)  # fmt: skip

ARTIFACT: Final = on_layer(
    "L2.5",
    says("header", "SafetensorError: Error while deserializing header", "WeightsCorrupt", "compare checksums"),
    of_model("a folder that is not there", "SourceNotFound", "spec.source.uri",
             model("no-path", source={"uri": "file:///opt/shoal/models/absent"})),
    of_model("a host that does not resolve", "SourceUnreachable", "network",
             model("no-host", source={"uri": "https://nowhere.invalid/model.tar"})),
    of_model("another checksum than the Model's", "DigestMismatch", "fetch again",
             model("bad-digest", source={"uri": make.CHAT, "digest": "sha256:" + "0" * 64})),
    of_model("a Secret that is not there", "SecretNotFound", "Create the Secret",
             from_hub("no-secret", "gated", secret="hub-token")),
    of_model("a gated repository", "Gated", "secretRef", from_hub("gated", "gated")),
    of_model("a repository that is not there", "SourceNotFound", "no such repository", from_hub("missing", "missing")),
    of_model("a repository without config.json", "SourceInvalid", "config.json", from_hub("no-config", "no-config")),
    of_model("weights that end early", "SourceInvalid", "one folder", from_hub("truncated", "truncated")),
    of_model("weights that arrive corrupt", "DigestMismatch", "fetch again", from_hub("corrupt", "corrupt")),
    of_model("an architecture that nobody knows", "SizeUnknown", "spec.sizing", from_hub("unknown-arch", "unknown")),
    of_model("a node cache whose disk is full", "DiskFull", "Free disk", from_hub("on-full", "moving", on="full"),
             injected=inject.full_cache("full-1"), before=True),
    LabFault("an adapter of a higher rank than its pool", "adapter/high", "RankTooHigh", "maximum rank",
             (model("base"), pool("pool", "base", maxRank=1, slotsPerReplica=2), adapter("high"))),
    LabFault("an adapter that is not there", "adapter/absent", "SourceNotFound", "source",
             (adapter("absent", uri="file:///opt/shoal/adapters/absent"),)),
    LabFault("an adapter whose file ends early", "adapter/cut", "Corrupt", "Upload the adapter again",
             (adapter("cut", uri="hf://team/adapter-cut"),)),
    later("an adapter whose files are others under the same name when a second replica wants them", "stale",
          changed=True),
    later("an adapter whose commit is gone when a second replica wants it", "forced",
          branches={"main": faultyhub.REWRITTEN}),
)  # fmt: skip

EXECUTION: Final = on_layer(
    "L3",
    says("nccl", "Watchdog caught collective operation timeout", "NCCLError", "NCCL_DEBUG=INFO"),
    of_model("weights that leave no room for a KV cache", "NoMemoryForCache", "more memory",
             model("small-gpu", env={"SHOAL_SIM_GPU_MEMORY_MIB": "3"})),
    LabFault("an adapter whose Model's engine ends", "adapter/behind", "CUDAError", "engine version",
             (model("ends", env={"SHOAL_SIM_GPU": "CUDA error: an illegal memory access"}), pool("ends", "ends"),
              adapter("behind", "ends"))),
)  # fmt: skip

ENGINE: Final = on_layer(
    "L4",
    says("argument", "error: unrecognized arguments: --tp-sise", "EngineArguments", "extraArgs"),
    says("unknown", "abacus", "EngineFailed", "last lines"),
    of_model("a speculative argument that Shoal owns", "ArgumentsRefused", "extraArgs",
             model("owned", engine={"extraArgs": ["--tp=2"]})),
    of_model("an engine version that nobody has", "VersionUnknown", "engine table",
             model("no-version", engine={"version": "9.9.9"})),
    of_model("an engine that loads for ever", "Loading", "kubectl logs",
             model("loads", env={"SHOAL_SIM_LOAD_SECONDS": "3000"}), state="waiting"),
    of_model("an engine that a signal ends without a word", "EngineStopped", "events of node and pod",
             model("killed", env={"SHOAL_SIM_LOAD_SECONDS": "3000"}),
             injected=inject.signalled("killed", signal.SIGKILL, SPACE)),
    served("an engine that runs and stops answering", "EngineUnresponsive", "readiness probe", model("frozen"),
           inject.signalled("frozen", signal.SIGSTOP, SPACE), heals=True),
    served("a new revision that does not start", "EngineArguments", "extraArgs", model("revised"),
           inject.applied(model("revised", env={"SHOAL_SIM_GPU": "error: unrecognized arguments: --tp-sise"})),
           explains="RolloutStalled", tried="keeps the old revision"),
)  # fmt: skip

CLIENT: Final = on_layer(
    "L6",
    LabFault("a suspended Tenant", "tenant/suspended", "Suspended", "spec.suspended",
             (tenant("suspended", suspended=True),)),
    LabFault("a Tenant whose keys are disabled", "tenant/keyless", "NoUsableKey", "shoal keys create",
             (tenant("keyless", keys={"disabled": True}),)),
    LabFault("a Tenant whose keys have expired", "tenant/expired", "NoUsableKey", "shoal keys create",
             (tenant("expired", keys={"expires": "2026-01-01T00:00:00Z"}),)),
    LabFault("a Tenant that may use nothing", "tenant/nothing", "NothingGranted", "spec.models",
             (tenant("nothing", uses=()),)),
    LabFault("a Tenant of a Model that does not exist", "tenant/typo", "ModelNotFound", "Correct the names",
             (tenant("typo", uses=("lama",)),)),
)  # fmt: skip

CONTROL: Final = on_layer(
    "control",
    LabFault("an adapter whose pool is not there", "adapter/lost", "PoolNotFound", "spec.poolRef",
             (adapter("lost", "nowhere"),)),
    LabFault("an adapter of a namespace that its pool does not allow", "adapter/stranger", "NamespaceNotAllowed",
             "Allow the adapter's namespace", (
        model("base"), pool("pool", "base", maxRank=1, slotsPerReplica=2), adapter("stranger", space=LIMITED),
    ), space=LIMITED),
    of_class("a class whose selector is no expression", "no-expression", "SelectorInvalid", "Correct the expression",
             selectors=[{"cel": {"expression": "device.attributes["}}]),
    of_model("a class that does not exist", "ClassNotFound", "create the class", model("classless", on="b300")),
    of_model("a Model that fits on no class", "NoFit", "more memory",
             model("too-wide", on="single", engine={"parallelism": {"tensor": 4}})),
    of_model("a class whose GPUs are all in use", "NoCapacity", "Add GPUs", model("second", on="single"),
             model("first", on="single", priority=100, scaling={"minReplicas": 2, "maxReplicas": 2})),
    of_model("KEDA that is not installed", "KEDANotInstalled", "Install KEDA",
             model("scaled", scaling={"driver": "KEDA", "minReplicas": 0, "maxReplicas": 1})),
    LabFault("a budget in another currency than the prices", "tenant/abroad", "OtherCurrency",
             "currency of the price list", (tenant("abroad", budget={"amount": "500", "currency": "JPY"}),)),
    LabFault("a route to a Model that does not exist", "route/typo", "TargetNotFound", "target's name",
             (named("ModelRoute", "typo", rules=[{"name": "r", "targets": [{"model": {"name": "lama"}}]}]),)),
    LabFault("a route whose weights are zero", "route/zero", "WeightsSumToZero", "weight above 0",
             (named("ModelRoute", "zero",
                    rules=[{"name": "r", "targets": [{"model": {"name": "base"}, "weight": 0}]}]),)),
)  # fmt: skip

NARROW: Final = (model("narrow"), pool("narrow", "narrow", targetModules=["q_proj"], slotsPerReplica=2))
"""A pool that takes changes of one module only."""
FURTHER: Final = (
    *on_layer(
        "L0",
        reported("a kernel that hangs", "deadlocked", "KernelFault", "restart the machine",
                 inject.condition("deadlocked-1", "KernelDeadlock", "TaskHung", "task kworker/7 blocked")),
        reported("a machine whose memory has an error that was not corrected", "checked", "MachineFault", "memory and",
                 inject.node_event("checked-1", "MachineCheck", "mce: [Hardware Error]: uncorrected DRAM error")),
    ),
    *on_layer(
        "L0.5",
        reported("an Xid 74 in an event of the only node of a class", "bridged", "NVLinkFault", "NVLinks checked",
                 inject.node_event("bridged-1", "XidError", "NVRM: Xid (PCI:0000:3b:00): 74, NVLink: fatal error")),
        says("no-route", "NCCL socketPollConnect returned No route to host", "FabricFailed", "NICs"),
    ),
    *on_layer(
        "L1",
        reported("GPUs that were cut into MIG slices", "repartitioned", "GPUsPartitioned", "Turn MIG off",
                 inject.partitioned("repartitioned-1")),
    ),
    *on_layer(
        "L2",
        of_model("a policy that refuses Deployments", "WebhookRefused", "policy", model("denied", DENIED),
                 *make.no_deployments(DENIED)),
        of_model("a claim of a StorageClass that does not exist", "VolumeNotBound", "StorageClass",
                 model("unbound", source={"uri": "pvc://fast-weights/m"}), make.claim("fast-weights", "fast")),
        says("no-permission", "[Errno 13] Permission denied: /opt/cache", "PathNotPermitted", "fsGroup"),
        says("no-compiler", "RuntimeError: Could not find nvcc", "ImageIncomplete", "not in this one"),
    ),
    *on_layer(
        "L2.5",
        of_model("a token that the hub does not accept", "Gated", "secretRef",
                 from_hub("bad-token", "gated", secret="wrong-token"), make.secret("wrong-token", token="wrong")),
        of_model("a Secret without the token's key", "Gated", "secretRef",
                 from_hub("no-token", "gated", secret="empty-token"), make.secret("empty-token", password="x")),
        of_model("a revision that is not there", "SourceNotFound", "spec.source.uri",
                 from_hub("no-revision", "moving@nope")),
        of_model("a hub that limits requests", "SourceLimitsRequests", "token or a mirror", from_hub("busy", "busy")),
        of_model("a hub that answers with errors", "SourceAnswersErrors", "its mirror", from_hub("broken", "broken")),
        of_model("a folder that sources may not name", "SourceRefused", "chart value sources",
                 model("not-allowed", source={"uri": "file:///etc/model"})),
        LabFault("an adapter with modules that its pool does not have", "adapter/narrowed", "ModulesNotInPool",
                 "Add the named modules",
                 (*NARROW, adapter("narrowed", "narrow"))),
        LabFault("a DoRA adapter", "adapter/dora", "Unsupported", "plain LoRA",
                 (*NARROW, adapter("dora", "narrow", uri="hf://team/adapter-dora"))),
    ),
    *on_layer("L4", says("ordinal", "CUDA error: invalid device ordinal", "ParallelismImpossible", "so many GPUs")),
    *on_layer(
        "L6",
        LabFault("a Tenant whose key an older Tenant has", "tenant/copied", "KeyClaimed", "one of the two",
                 (tenant("original"),),
                 injected=inject.applied_later(tenant("copied", keys={"sha256": b"original".hex().ljust(64, "0")}))),
    ),
    *on_layer(
        "control",
        served("a Model whose deletion a foreign finalizer holds", "DeletionHeld", "finalizer", model("held"),
               inject.held("held", SPACE)),
        served("another autoscaler of a Model's Deployment", "OtherAutoscaler", "Delete the other HPA",
               model("scaled-twice"), inject.applied(make.autoscaler("team", "scaled-twice-well"))),
        LabFault("a route to another namespace's Model that does not allow it", "route/stranger", "NotPermitted",
                 "spec.routeNamespaces",
                 (named("ModelRoute", "stranger",
                        rules=[{"name": "r", "targets": [{"model": {"namespace": QUOTA, "name": "quota"}}]}]),)),
    ),
)  # fmt: skip
"""Those that an examiner wrote down."""

ROWS: Final = (
    *HARDWARE, *FABRIC, *DRIVER, *CONTAINER, *ARTIFACT, *EXECUTION, *ENGINE, *CLIENT, *CONTROL, *FURTHER,
)  # fmt: skip
