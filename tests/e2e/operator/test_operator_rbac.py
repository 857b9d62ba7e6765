"""The operator under the role that the chart gives it: enough for its work, and no verb that it never uses."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from shoal.api import names, permissions
from shoal.api.config import Cache
from shoal.api.meta import JsonObject
from shoal.core.health import Unit
from shoal.core.health.requests import CordonRequest, write
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
from shoal.kube.resources import (
    DEPLOYMENTS,
    DEVICECLASSES,
    ENDPOINTSLICES,
    EVENTS,
    GPUCLASSES,
    LEASES,
    MODEL_ROUTES,
    MODELS,
    NODES,
    PERSISTENTVOLUMECLAIMS,
    PERSISTENTVOLUMES,
    PODS,
    RESOURCECLAIMTEMPLATES,
    RESOURCESLICES,
    SCALEDOBJECTS,
    SECRETS,
    TENANTS,
    TRIGGERAUTHENTICATIONS,
)
from shoal.runtime.scaler import ScalerPlace
from tests.support.charts import rendered
from tests.support.controlplane import Fleet, free_ports
from tests.support.devices import class_of_devices, clear_devices, device_class, resource_slice
from tests.support.kedaclient import write_certificate
from tests.support.kedastandin import install_keda_crds, remove_keda_crds
from tests.support.lora_fleet import adapter, adapter_with, pool, ready_for_adapters
from tests.support.operators import (
    CONFIG,
    NAMESPACE,
    condition,
    eventually,
    gpu_class,
    model,
    model_with,
    running_operator,
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

USER = f"system:serviceaccount:{NAMESPACE}:shoal-operator"

RARE = {
    ("models/finalizers", "update"): "the API server's own check, where the admission plugin is on",
    ("secrets", "delete"): "the end of a rotation of the install key",
    ("networkpolicies", "delete"): "NetworkPolicies switched off",
    ("events", "patch"): "the same event again",
    ("workloads", "list"): "Kueue holds a pod back: test_operator_kueue.py, under this role",
    ("provisioningrequests", "list"): "an admission check of Kueue holds a pod back: there too, under this role",
    ("pods", "patch"): "which of several replicas goes first",
}
"""Granted, not exercised by this test; and when it is used."""


def service_account_kubeconfig(fleet: Fleet, path: Path, account: str = "shoal-operator") -> str:
    """A kubeconfig that holds nothing but a token, as a pod has one."""
    token = fleet.plane.run_kubectl("create", "token", account, f"--namespace={NAMESPACE}").strip()
    config = yaml.safe_load(fleet.plane.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path.write_text(json.dumps(config))
    return str(path)


def requests(fleet: Fleet, user: str = USER, since: int = 0) -> list[JsonObject]:
    """Of an account, from that line of the log on."""
    return [line for line in fleet.plane.audited()[since:] if line["user"]["username"] == user]


def used_by(fleet: Fleet, user: str = USER, since: int = 0) -> set[tuple[str, str]]:
    """What an account asked for, by resource and verb; it was refused nothing."""
    made = requests(fleet, user, since)
    assert made
    refused = [r for r in made if r["responseStatus"]["code"] == 403]
    assert not refused, [(r["verb"], r["requestURI"], r["responseStatus"].get("message")) for r in refused]
    used = {
        ("/".join(filter(None, (r["objectRef"]["resource"], r["objectRef"].get("subresource")))), r["verb"])
        for r in made
        if "objectRef" in r
    }
    # Server-side apply of an object that is not there yet is a patch in the audit log, and asks for `create` as well.
    return used | {(resource, "create") for resource, verb in used if verb == "patch"}


async def may(fleet: Fleet, *what: str) -> bool:
    said = await asyncio.to_thread(fleet.plane.run_kubectl, "auth", "can-i", *what, f"--as={USER}", check=False)
    return said.startswith("yes")


async def test_the_charts_role_is_enough_and_not_more(fleet: Fleet, tmp_path: Path) -> None:
    client, ns = fleet.client, fleet.namespace
    since = len(fleet.plane.audited())
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    roles = [o for o in rendered({}) if o["kind"] in kinds]
    fleet.plane.run_kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(roles))
    # The API server hears of its own rules a moment later.
    lease = f"leases.coordination.k8s.io/{names.LEASE_NAME}"
    for what in (("list", "models.shoal.dev", "-A"), ("update", lease, f"-n={NAMESPACE}")):
        await eventually(lambda w=what: may(fleet, *w), bool, what=f"may {' '.join(what)}")
    kubeconfig = service_account_kubeconfig(fleet, tmp_path / "kubeconfig")
    await install_keda_crds(client)
    write_certificate(tmp_path / "certificate")
    place = ScalerPlace("127.0.0.1", free_ports(1)[0], "10.1.0.1", certificate=tmp_path / "certificate")
    config = CONFIG.model_copy(update={"cache": Cache(enabled=True)})
    with contextlib.suppress(NotFound):  # an operator of an earlier test left it, and then nobody creates it here
        await client.delete(LEASES, names.LEASE_NAME, NAMESPACE)

    async with (
        await KubeClient.from_environment(kubeconfig=kubeconfig) as own,
        running_operator(own, kubeconfig, config=config, scaler=place),
    ):
        ready_for_adapters(fleet)
        await fleet.apply(model("chat", ns))
        tenant: JsonObject = {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": "acme"},
            "spec": {"keys": [{"name": "a", "sha256": "0" * 64}], "models": [{"namespace": ns, "name": "chat"}]},
        }
        await fleet.apply(tenant)
        await model_with(client, ns, "chat", "Ready", "True")
        await fleet.apply(
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "ModelRoute",
                "metadata": {"name": "front", "namespace": ns},
                "spec": {"rules": [{"targets": [{"model": {"name": "chat"}}]}]},
            }
        )
        await eventually(
            lambda: client.get(MODEL_ROUTES, "front", ns),
            lambda found: condition(found, "Ready").get("status") == "True",
            what="the route is ready",
        )
        # A pool that takes adapters of namespaces by their labels, and one of them.
        chosen = {"from": "Selector", "selector": {"matchLabels": {"kubernetes.io/metadata.name": ns}}}
        await fleet.apply(pool(ns, model="chat", allowedNamespaces=chosen))
        await fleet.apply(adapter(ns, "poet"))
        await adapter_with(client, ns, "poet", "Ready", "True")
        # Another class: the old variant's Deployment is deleted.
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}]))
        await eventually(
            lambda: fleet.all(DEPLOYMENTS, namespace=ns),
            lambda all_: [d["metadata"]["name"] for d in all_] == ["chat-h100"],
        )
        # A node whose GPUs a person takes out of use.
        taken = write([CordonRequest(Unit("l4-0"), datetime.now(UTC))])
        body = {"metadata": {"annotations": {names.ANNOTATION_CORDON: taken}}}
        await client.merge_patch(GPUCLASSES, "l4", None, body, manager="test")
        await eventually(
            lambda: client.get(NODES, "l4-0"), lambda node: f"{names.QUARANTINE_PREFIX}l4" in node["metadata"]["labels"]
        )
        # GPUs that are devices; with another selector the old ResourceClaimTemplate goes.
        await client.apply(DEVICECLASSES, device_class(), manager="test")
        await client.apply(RESOURCESLICES, resource_slice("h100-0", "gpu-0", "gpu-1"), manager="test")
        await fleet.apply(class_of_devices("devices"))
        await fleet.apply(model("claims", ns, variants=[{"class": "devices"}]))
        await model_with(client, ns, "claims", "Ready", "True")
        [old] = await fleet.all(RESOURCECLAIMTEMPLATES, namespace=ns)
        await fleet.apply(class_of_devices("devices", "true"))
        await eventually(
            lambda: fleet.all(RESOURCECLAIMTEMPLATES, namespace=ns),
            lambda all_: len(all_) == 1 and all_[0]["metadata"]["name"] != old["metadata"]["name"],
        )
        # A replica that waits for an autoscaler's node, and what the autoscaler says of it.
        cloud = gpu_class("cloud", "CLOUD")
        cloud["spec"]["nodes"] = {"autoscaled": {"max": 1, "gpusPerNode": 1}}
        await fleet.apply(cloud)
        await fleet.apply(model("waits", ns, variants=[{"class": "cloud"}]))
        [pending] = await eventually(
            lambda: fleet.all(PODS, namespace=ns, label_selector=f"{names.LABEL_GPU_CLASS}=cloud"), bool
        )
        await client.create(EVENTS, autoscaler_event(pending, "no machine is left"))
        await eventually(
            lambda: client.get(MODELS, "waits", ns),
            lambda m: "karpenter: no machine is left" in condition(m, "Ready").get("message", ""),
        )
        # A Model that KEDA is to drive, and then not.
        await fleet.apply(model("driven", ns, scaling={"driver": "KEDA"}))
        await eventually(lambda: fleet.all(SCALEDOBJECTS, namespace=ns), bool)
        await eventually(lambda: fleet.all(ENDPOINTSLICES, namespace=NAMESPACE), bool, what="where KEDA finds it")
        await fleet.apply(model("driven", ns, scaling={"driver": "BuiltIn"}))
        for resource in (SCALEDOBJECTS, TRIGGERAUTHENTICATIONS):
            await eventually(lambda r=resource: fleet.all(r, namespace=ns), lambda left: not left)
        # A source's Secret is looked for.
        await fleet.apply(model("gated", ns, source={"uri": "hf://owner/repo", "secretRef": {"name": "nowhere"}}))
        await model_with(client, ns, "gated", "Accepted", "False", "SecretNotFound")
        await eventually(lambda: client.get(TENANTS, "acme"), lambda t: (t.get("status") or {}).get("activeKeys") == 1)
        await eventually(lambda: fleet.all(EVENTS, namespace=ns), bool)
        assert await fleet.all(SECRETS, namespace=NAMESPACE)
        # A namespace with a Model that is fetched has a share in the node cache, until the last of them goes.
        await eventually(lambda: fleet.all(PERSISTENTVOLUMECLAIMS, namespace=ns), bool)
        for name in ("chat", "claims", "driven", "gated", "waits"):
            await client.delete(MODELS, name, ns)
        await eventually(lambda: fleet.all(PERSISTENTVOLUMES), lambda left: not left)
    await remove_keda_crds(client)
    await clear_devices(client)
    await client.delete(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE)

    used = used_by(fleet, since=since)
    granted = granted_to(*permissions.OPERATOR, *permissions.OPERATOR_OWN_NAMESPACE)
    assert granted - used - set(RARE) == set(), "a verb that nothing uses"
    # The mutation: a verb too many is found.
    generous = granted_to(*permissions.OPERATOR, permissions.Permission("", "", ("secrets",), ("list",)))
    assert generous - used - set(RARE) == {("secrets", "list")}


def autoscaler_event(pod: JsonObject, note: str) -> JsonObject:
    """As Karpenter reports it."""
    metadata = pod["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.1", "namespace": metadata["namespace"]},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": "karpenter",
        "reportingInstance": "karpenter-1",
        "action": "FailedScheduling",
        "reason": "FailedScheduling",
        "type": "Warning",
        "note": note,
        "regarding": {
            "kind": "Pod",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }


def granted_to(*rows: permissions.Permission) -> set[tuple[str, str]]:
    return {(resource, verb) for row in rows for resource in row.resources for verb in row.verbs}
