"""The faults of the lab: how each comes into a cluster, and what `shoal why` must say of it first."""

from dataclasses import dataclass
from typing import Any, Final

from tests.faults.lab.cluster import WELL, gpu_class

SPACE: Final = "faults"
QUOTA, LIMITED, GUARDED, HOOKED, CROWDED = (
    "faults-quota",
    "faults-limits",
    "faults-guarded",
    "faults-hooked",
    "faults-jobs",
)
SPACES: Final = (SPACE, QUOTA, LIMITED, GUARDED, HOOKED, CROWDED)
"""The first, and those in which something refuses pods."""
CHAT: Final = "file:///opt/shoal/models/tiny-chat"
API: Final = "shoal.dev/v1alpha1"
Json = dict[str, Any]


@dataclass(frozen=True)
class LabFault:
    """One fault. `layer`, `reason` and `do` (words of the next step) are those of the first cause."""

    name: str
    subject: str
    """As `shoal why` takes it."""
    layer: str
    reason: str
    do: str
    objects: tuple[Json, ...] = ()
    """What is applied."""
    state: str = "failing"
    space: str = SPACE
    broken: str | None = None
    """Class whose node is broken meanwhile."""
    serves: bool = False
    """The subject serves before."""
    explains: str = ""
    """A reason that is shown as its consequence."""


def model(name: str, space: str = SPACE, *, on: str | None = WELL, env: dict[str, str] | None = None, **spec: Any) \
        -> Json:  # fmt: skip
    if on is not None:
        spec.setdefault("variants", [{"class": on}])
    if env:
        spec["pod"] = {"env": [{"name": key, "value": value} for key, value in env.items()]} | spec.get("pod", {})
    return {
        "apiVersion": API,
        "kind": "Model",
        "metadata": {"name": name, "namespace": space},
        "spec": {"source": {"uri": CHAT}, "scaling": {"minReplicas": 1, "maxReplicas": 1}, "drainSeconds": 1} | spec,
    }


def named(kind: str, name: str, space: str | None = SPACE, **spec: Any) -> Json:
    metadata: Json = {"name": name} | ({"namespace": space} if space else {})
    return {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec}


def says(name: str, text: str, layer: str, reason: str, do: str) -> LabFault:
    """An engine that ends at its start with this text: the simulator repeats the name of a GPU that it does not
    know."""
    made = model(name, env={"SHOAL_SIM_GPU": text})
    return LabFault(f"an engine that ends with: {text[:60]}", f"model/{name}", layer, reason, do, (made,))


def of_model(title: str, layer: str, reason: str, do: str, made: Json, **more: Any) -> LabFault:
    name, space = made["metadata"]["name"], made["metadata"]["namespace"]
    objects = (*more.pop("besides", ()), made)
    return LabFault(title, f"model/{name}", layer, reason, do, objects, space=space, **more)


def adapter(name: str, pool: str = "pool", uri: str = "file:///opt/shoal/adapters/poet") -> Json:
    return named("LoRAAdapter", name, poolRef={"name": pool}, source={"uri": uri}, tenants=["*"], residency="Warm")


def serving(title: str, node: str, layer: str, reason: str, do: str, **more: Any) -> LabFault:
    """A Model that serves on a node which then breaks."""
    made = model(f"on-{node}", on=node, **more.pop("spec", {}))
    return of_model(title, layer, reason, do, made, broken=node, serves=True, **more)


ENGINES: Final = (
    says("ecc", "CUDA error: uncorrectable ECC error encountered", "L0", "GPUUncorrectableECC", "Cordon the node"),
    says("fabric", "RuntimeError: Error 802: system not yet initialized", "L0.5", "NVLinkFault", "fabric manager"),
    says("old-driver", "The NVIDIA driver on your system is too old", "L1", "DriverTooOld", "new enough"),
    says("header", "SafetensorError: Error while deserializing header", "L2.5", "WeightsCorrupt", "compare checksums"),
    says("nccl", "Watchdog caught collective operation timeout", "L3", "NCCLError", "NCCL_DEBUG=INFO"),
    says("argument", "error: unrecognized arguments: --tp-sise", "L4", "EngineArguments", "extraArgs"),
    says("unknown", "abacus", "L4", "EngineFailed", "last lines"),
    of_model("a GPU with less memory than the weights take", "L3", "OutOfGPUMemory", "more memory",
             model("small-gpu", env={"SHOAL_SIM_GPU_MEMORY_MIB": "3"})),
    of_model("a speculative argument that Shoal owns", "L4", "ArgumentsRefused", "extraArgs",
             model("owned", engine={"extraArgs": ["--tp=2"]})),
    of_model("an engine version that nobody has", "L4", "VersionUnknown", "engine table",
             model("no-version", engine={"version": "9.9.9"})),
    of_model("an engine that loads for ever", "L4", "Loading", "kubectl logs", state="waiting",
             made=model("loads", env={"SHOAL_SIM_LOAD_SECONDS": "3000"})),
)  # fmt: skip

CONTAINERS: Final = (
    of_model("an image that is not there", "L2", "ImageNotFound", "name or tag",
             model("no-image", engine={"image": "registry.example/team/none:1", "version": "0.5.23-next"})),
    of_model("a ServiceAccount that is not there", "L2", "RequiredObjectMissing", "Create the ServiceAccount",
             model("no-account", pod={"serviceAccountName": "nobody"})),
    of_model("more CPU than a node has", "L2", "InsufficientCPUOrMemory", "Add CPU or memory",
             model("hungry", pod={"resources": {"requests": {"cpu": "500"}}})),
    of_model("a node with GPUs and no CPU", "L2", "InsufficientCPUOrMemory", "cpuPerGPU",
             model("on-small", on="small", pod={"resources": {"requests": {"cpu": "2"}}})),
    of_model("a ResourceQuota without GPUs", "L2", "ResourceQuotaExceeded", "Raise the ResourceQuota",
             model("quota", QUOTA), besides=(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team", "namespace": QUOTA},
         "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}},)),
    of_model("a ResourceQuota that has no room for the Job that reads the source", "L2", "ResourceQuotaExceeded",
             "Raise the ResourceQuota", model("crowded", CROWDED, source={"uri": "hf://team/moving"}), besides=(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods", "namespace": CROWDED},
         "spec": {"hard": {"pods": "0"}}},)),
    of_model("a LimitRange below what the engine needs", "L2", "LimitRangeExceeded", "LimitRange",
             model("limits", LIMITED, pod={"resources": {"limits": {"memory": "8Gi"}}}), besides=(
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small", "namespace": LIMITED},
         "spec": {"limits": [{"type": "Container", "max": {"memory": "4Gi"}}]}},)),
    of_model("an admission policy that refuses engines", "L2", "WebhookRefused", "policy",
             model("guarded", GUARDED), besides=(
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
         "metadata": {"name": "no-engines"},
         "spec": {"failurePolicy": "Fail",
                  "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"],
                                                          "operations": ["CREATE"], "resources": ["pods"]}]},
                  "validations": [{"expression": "!('shoal.dev/model' in object.metadata.?labels.orValue({}))",
                                   "message": "no engines here"}]}},
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
         "metadata": {"name": "no-engines"},
         "spec": {"policyName": "no-engines", "validationActions": ["Deny"],
                  "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": GUARDED}}}}},
    )),
    of_model("an admission webhook that does not answer", "L2", "WebhookUnreachable", "admission webhook",
             model("hooked", HOOKED), besides=(
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
         "metadata": {"name": "away"},
         "webhooks": [{"name": "policy.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
                       "timeoutSeconds": 1, "failurePolicy": "Fail",
                       "clientConfig": {"service": {"name": "away", "namespace": HOOKED}},
                       "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": HOOKED}},
                       "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
                                  "resources": ["pods"]}]}]},)),
    of_model("a claim that is not there", "L2", "VolumeMissing", "PersistentVolumeClaim",
             model("no-claim", source={"uri": "pvc://weights/model"})),
)  # fmt: skip

ARTIFACTS: Final = (
    of_model("a folder that is not there", "L2.5", "SourceNotFound", "spec.source.uri",
             model("no-path", source={"uri": "file:///opt/shoal/models/absent"})),
    of_model("a host that does not resolve", "L2.5", "SourceUnreachable", "network",
             model("no-host", source={"uri": "https://nowhere.invalid/model.tar"})),
    of_model("another checksum than the Model's", "L2.5", "DigestMismatch", "fetch again",
             model("bad-digest", source={"uri": CHAT, "digest": "sha256:" + "0" * 64})),
    of_model("a Secret that is not there", "L2.5", "SecretNotFound", "Create the Secret",
             model("no-secret", source={"uri": "hf://team/gated", "secretRef": {"name": "hub-token"}})),
    of_model("a gated repository", "L2.5", "Gated", "secretRef", model("gated", source={"uri": "hf://team/gated"})),
    of_model("a repository that is not there", "L2.5", "SourceNotFound", "no such repository",
             model("missing", source={"uri": "hf://team/missing"})),
    of_model("a repository without config.json", "L2.5", "SourceInvalid", "config.json",
             model("no-config", source={"uri": "hf://team/no-config"})),
    of_model("weights that end early", "L2.5", "SourceInvalid", "one folder",
             model("truncated", source={"uri": "hf://team/truncated"})),
    of_model("weights that arrive corrupt", "L2.5", "DigestMismatch", "fetch again",
             model("corrupt", source={"uri": "hf://team/corrupt"})),
    of_model("an architecture that nobody knows", "L2.5", "SizeUnknown", "spec.sizing",
             model("unknown-arch", source={"uri": "hf://team/unknown"})),
    LabFault("an adapter of a higher rank than its pool", "adapter/high", "L2.5", "RankTooHigh", "maximum rank",
             (model("base"), named("LoRAPool", "pool", modelRef={"name": "base"}, maxRank=1, slotsPerReplica=2),
              adapter("high"))),
    LabFault("an adapter that is not there", "adapter/absent", "L2.5", "SourceNotFound", "source",
             (adapter("absent", uri="file:///opt/shoal/adapters/absent"),)),
    LabFault("an adapter whose pool is not there", "adapter/lost", "control", "PoolNotFound", "spec.poolRef",
             (adapter("lost", "nowhere"),)),
    LabFault("an adapter whose Model's engine ends", "adapter/behind", "L3", "CUDAError", "engine version",
             (model("ends", env={"SHOAL_SIM_GPU": "CUDA error: an illegal memory access"}),
              named("LoRAPool", "ends", modelRef={"name": "ends"}), adapter("behind", "ends"))),
)  # fmt: skip

PLACES: Final = (
    of_model("a class that does not exist", "control", "ClassNotFound", "create the class",
             model("classless", on="b300")),
    of_model("a class of no node", "L2", "NoNodes", "nodeSelector", model("nowhere", on="absent"),
             besides=(gpu_class("absent", {"no": "such-label"}),)),
    LabFault("a GPUClass of no node", "gpuclass/absent", "L2", "NoNodes", "nodeSelector"),
    of_model("a Model that fits on no class", "control", "NoFit", "more memory",
             model("too-wide", on="single", engine={"parallelism": {"tensor": 4}})),
    of_model("a class whose GPUs are all in use", "control", "NoCapacity", "Add GPUs",
             model("second", on="single"), besides=(
        model("first", on="single", scaling={"minReplicas": 2, "maxReplicas": 2}),)),
)  # fmt: skip

NODES: Final = (
    serving("a machine that is off", "silent", "L0", "NodeSilent", "Check the machine"),
    serving("an Xid 79 that a problem detector reports", "xid", "L0", "GPUFellOffBus", "restart the machine"),
    serving("an ECC error that a problem detector reports", "ecc", "L0", "GPUUncorrectableECC", "reset the GPU"),
    serving("an InfiniBand link that flaps", "link", "L0.5", "RDMADeviceLost", "RDMA adapters"),
    serving("a device plugin that has gone", "unplugged", "L1", "DevicePluginMissing", "device plugin"),
    serving("a disk that is full", "pressure", "L2", "DiskPressure", "Free disk"),
    serving("a taint that the class does not tolerate", "tainted", "L2", "TaintNotTolerated", "toleration"),
    serving("a cordoned node", "cordoned", "L2", "NodeCordoned", "Uncordon"),
    of_model("a GPU that fell off the bus under an engine that ends with a CUDA error", "L0", "GPUFellOffBus",
             "restart the machine", model("on-both", on="both", env={"SHOAL_SIM_GPU": "CUDA error: launch failure"}),
             broken="both", explains="CUDAError"),
    of_model("time-sliced GPUs", "L1", "SharedGPUs", "time-slicing", model("on-shared", on="shared"),
             broken="shared"),
)  # fmt: skip

CLIENTS: Final = (
    LabFault("a suspended Tenant", "tenant/suspended", "L6", "Suspended", "spec.suspended",
             (named("Tenant", "suspended", None, suspended=True, models=[{"namespace": SPACE, "name": "base"}],
                    keys=[{"name": "k", "sha256": "1" * 64}]),)),
    LabFault("a Tenant whose keys are disabled", "tenant/keyless", "L6", "NoUsableKey", "shoal keys create",
             (named("Tenant", "keyless", None, models=[{"namespace": SPACE, "name": "base"}],
                    keys=[{"name": "k", "sha256": "2" * 64, "disabled": True}]),)),
    LabFault("a Tenant that may use nothing", "tenant/nothing", "L6", "NothingGranted", "spec.models",
             (named("Tenant", "nothing", None, keys=[{"name": "k", "sha256": "3" * 64}]),)),
    LabFault("a Tenant of a Model that does not exist", "tenant/typo", "L6", "ModelNotFound", "Correct the names",
             (named("Tenant", "typo", None, models=[{"namespace": SPACE, "name": "lama"}],
                    keys=[{"name": "k", "sha256": "4" * 64}]),)),
    LabFault("a route to a Model that does not exist", "route/typo", "control", "TargetNotFound", "target's name",
             (named("ModelRoute", "typo", rules=[{"name": "r", "targets": [{"model": {"name": "lama"}}]}]),)),
    LabFault("a route whose weights are zero", "route/zero", "control", "WeightsSumToZero", "weight above 0",
             (named("ModelRoute", "zero",
                    rules=[{"name": "r", "targets": [{"model": {"name": "base"}, "weight": 0}]}]),)),
)  # fmt: skip

ROWS: Final = (*ENGINES, *CONTAINERS, *ARTIFACTS, *PLACES, *NODES, *CLIENTS)
