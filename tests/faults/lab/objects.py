"""The objects that the lab's faults are made of."""

from typing import Any, Final

from tests.faults.lab.cluster import WELL

Json = dict[str, Any]
API: Final = "shoal.dev/v1alpha1"
CHAT: Final = "file:///opt/shoal/models/tiny-chat"
POET: Final = "file:///opt/shoal/adapters/poet"
SPACE: Final = "faults"


def named(kind: str, name: str, space: str | None = SPACE, **spec: Any) -> Json:
    """An object of Shoal's."""
    metadata: Json = {"name": name} | ({"namespace": space} if space else {})
    return {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec}


def model(name: str, space: str = SPACE, *, on: str | None = WELL, env: dict[str, str] | None = None, **spec: Any) \
        -> Json:  # fmt: skip
    """A Model of one replica, of the class `on` (None: of none in particular)."""
    if on is not None:
        spec.setdefault("variants", [{"class": on}])
    if env:
        spec["pod"] = {"env": [{"name": key, "value": value} for key, value in env.items()]} | spec.get("pod", {})
    usual = {"source": {"uri": CHAT}, "scaling": {"minReplicas": 1, "maxReplicas": 1}, "drainSeconds": 1}
    return named("Model", name, space, **(usual | spec))


def from_hub(name: str, repository: str, **spec: Any) -> Json:
    """A Model of a repository of the hub."""
    secret = spec.pop("secret", None)
    source = {"uri": f"hf://team/{repository}"} | ({"secretRef": {"name": secret}} if secret else {})
    return model(name, source=source, **spec)


def pool(name: str, model: str, **spec: Any) -> Json:
    return named("LoRAPool", name, modelRef={"name": model}, **spec)


def other_pod(name: str, node: str, gpus: int) -> Json:
    """A pod that is not Shoal's, on a node's GPUs."""
    made = {"name": "train", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    spec = {"nodeName": node, "containers": [made], "tolerations": [{"operator": "Exists"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": SPACE, "name": name}, "spec": spec}


def adapter(name: str, pool: str = "pool", uri: str = POET, space: str = SPACE, **spec: Any) -> Json:
    reference = {"name": pool} | ({"namespace": SPACE} if space != SPACE else {})
    usual = {"source": {"uri": uri}, "tenants": ["*"], "residency": "Warm"}
    return named("LoRAAdapter", name, space, poolRef=reference, **(usual | spec))


def tenant(name: str, *, uses: tuple[str, ...] = ("base",), keys: dict[str, Any] | None = None, **spec: Any) -> Json:
    """A Tenant with one key, which nobody has."""
    spec["models"] = [{"namespace": SPACE, "name": each} for each in uses]
    key = {"name": "k", "sha256": name.encode().hex().ljust(64, "0"), **(keys or {})}
    return named("Tenant", name, None, keys=[key], **spec)


def of_namespace(kind: str, name: str, space: str, **spec: Any) -> Json:
    """A ResourceQuota or a LimitRange."""
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": space}, "spec": spec}


def within(*spaces: str) -> Json:
    """A selector of namespaces."""
    return {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(spaces)}]}


def admission(kind: str, name: str, **more: Any) -> Json:
    return {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}, **more}


def _creates(group: str, resource: str) -> Json:
    return {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}


def no_engines(space: str) -> tuple[Json, ...]:
    """A policy that refuses engines' pods in a namespace."""
    rules = {"resourceRules": [_creates("", "pods")]}
    refuse = [
        {"expression": "!('shoal.dev/model' in object.metadata.?labels.orValue({}))", "message": "no engines here"}
    ]
    bound = {"policyName": "no-engines", "validationActions": ["Deny"],
             "matchResources": {"namespaceSelector": within(space)}}  # fmt: skip
    return (
        admission("ValidatingAdmissionPolicy", "no-engines",
                  spec={"failurePolicy": "Fail", "matchConstraints": rules, "validations": refuse}),
        admission("ValidatingAdmissionPolicyBinding", "no-engines", spec=bound),
    )  # fmt: skip


def no_deployments(space: str) -> tuple[Json, ...]:
    """A policy that refuses Deployments in a namespace, whoever writes them."""
    rules = {"resourceRules": [_creates("apps", "deployments")]}
    refuse = [{"expression": "false", "message": "workloads need a cost centre"}]
    bound = {"policyName": "no-deployments", "validationActions": ["Deny"],
             "matchResources": {"namespaceSelector": within(space)}}  # fmt: skip
    return (
        admission("ValidatingAdmissionPolicy", "no-deployments",
                  spec={"failurePolicy": "Fail", "matchConstraints": rules, "validations": refuse}),
        admission("ValidatingAdmissionPolicyBinding", "no-deployments", spec=bound),
    )  # fmt: skip


def secret(name: str, **data: str) -> Json:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": SPACE}, "stringData": data}


def claim(name: str, storage_class: str) -> Json:
    """A PersistentVolumeClaim."""
    resources = {"requests": {"storage": "1Gi"}}
    return of_namespace("PersistentVolumeClaim", name, SPACE, storageClassName=storage_class,
                        accessModes=["ReadWriteOnce"], resources=resources)  # fmt: skip


def autoscaler(name: str, deployment: str) -> Json:
    """A HorizontalPodAutoscaler of somebody's, that wants more replicas than the Model."""
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment}
    usage = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
    }
    found = of_namespace("HorizontalPodAutoscaler", name, SPACE, scaleTargetRef=target, minReplicas=3, maxReplicas=5,
                         metrics=[usage])  # fmt: skip
    return found | {"apiVersion": "autoscaling/v2"}


def silent_webhook(space: str) -> Json:
    """A webhook for pods of a namespace whose Service is not there."""
    hook = {
        "name": "policy.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 1,
        "failurePolicy": "Fail", "clientConfig": {"service": {"name": "away", "namespace": space}},
        "namespaceSelector": within(space), "rules": [_creates("", "pods")],
    }  # fmt: skip
    return admission("ValidatingWebhookConfiguration", "away", webhooks=[hook])


_MESH: Final = """[JSONPatch{op: "add", path: "/spec/initContainers/0", value: Object.spec.initContainers{
  name: "mesh-init", image: "shoal:lab", command: ["sh", "-c", "echo cannot set up the redirection; exit 3"],
  securityContext: Object.spec.initContainers.securityContext{
    capabilities: Object.spec.initContainers.securityContext.capabilities{add: ["NET_ADMIN"]}}}}]"""


def mesh(*spaces: str) -> tuple[Json, ...]:
    """A policy that puts an init container into each engine's pod of these namespaces, as a service mesh does."""
    engines = "object.metadata.?labels['app.kubernetes.io/component'].orValue('') == 'engine'"
    spec = {
        "failurePolicy": "Fail", "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": [_creates("", "pods")]},
        "matchConditions": [{"name": "engines", "expression": engines}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": _MESH}}],
    }  # fmt: skip
    bound = {"policyName": "mesh", "matchResources": {"namespaceSelector": within(*spaces)}}
    return (
        admission("MutatingAdmissionPolicy", "mesh", spec=spec),
        admission("MutatingAdmissionPolicyBinding", "mesh", spec=bound),
    )


def device_class(driver: str) -> Json:
    """Devices of a DRA driver."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": driver},
            "spec": {"selectors": [selector]}}  # fmt: skip


def no_egress_to(space: str, shoal: str) -> Json:
    """A NetworkPolicy by which gateways reach everything but one namespace."""
    others = [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [space]}]
    to = [{"namespaceSelector": {"matchExpressions": others}}, {"ipBlock": {"cidr": "10.96.0.0/16"}},
          {"ipBlock": {"cidr": "10.200.0.1/32"}}]  # fmt: skip
    gateways = {"matchLabels": {"app.kubernetes.io/component": "gateway"}}
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "team-rules", "namespace": shoal},
        "spec": {"podSelector": gateways, "policyTypes": ["Egress"], "egress": [{"to": to}]},
    }  # fmt: skip
