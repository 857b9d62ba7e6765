"""The kinds that Shoal talks about with the API server, and their URLs."""

from dataclasses import dataclass
from urllib.parse import quote

from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import GROUP, VERSION, CustomResource
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute
from shoal.api.tenant import Tenant


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind as the API server serves it. An empty group is the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, *, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of the collection, an object or its subresource. Without a namespace: over all namespaces."""
        parts = [self.root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            if self.namespaced and namespace is None:
                raise ValueError(f"{self.kind} {name}: a namespace is needed")
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


def of_kind(kind: type[CustomResource]) -> Resource:
    """The resource of one of Shoal's own kinds."""
    return Resource(GROUP, VERSION, kind.plural, kind.kind_name, kind.scope == "Namespaced")


MODELS = of_kind(Model)
GPUCLASSES = of_kind(GPUClass)
TENANTS = of_kind(Tenant)
LORA_POOLS = of_kind(LoRAPool)
LORA_ADAPTERS = of_kind(LoRAAdapter)
MODEL_ROUTES = of_kind(ModelRoute)

PODS = Resource("", "v1", "pods", "Pod")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICES = Resource("", "v1", "services", "Service")
SERVICEACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICASETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
JOBS = Resource("batch", "v1", "jobs", "Job")
PDBS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORKPOLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
RESOURCESLICES = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False)
DEVICETAINTRULES = Resource("resource.k8s.io", "v1", "devicetaintrules", "DeviceTaintRule", namespaced=False)
"""From Kubernetes 1.37 on."""
DEVICETAINTRULES_BETA = Resource("resource.k8s.io", "v1beta2", "devicetaintrules", "DeviceTaintRule", namespaced=False)
"""Of Kubernetes 1.36, where it is switched on, and of some time after."""
DEVICECLASSES = Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", namespaced=False)
RESOURCECLAIMS = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim")
RESOURCECLAIMTEMPLATES = Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
PERSISTENTVOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
PERSISTENTVOLUMECLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
ENDPOINTSLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
HPAS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
PROVISIONINGREQUESTS = Resource("autoscaling.x-k8s.io", "v1", "provisioningrequests", "ProvisioningRequest")
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
"""Of Kueue up to the release that stops serving it."""
WORKLOADS_BETA2 = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
"""From Kueue 0.15 on. What Shoal reads of a Workload is the same in both."""
INFERENCEPOOLS = Resource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
SCALEDOBJECTS = Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")
TRIGGERAUTHENTICATIONS = Resource("keda.sh", "v1alpha1", "triggerauthentications", "TriggerAuthentication")
