"""An installation for some namespaces: it serves them, and can neither read nor write the others."""

import asyncio
from pathlib import Path

import pytest
import yaml

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden
from shoal.kube.resources import DEPLOYMENTS, EVENTS, MODELS, NAMESPACES, PODS, SECRETS
from tests.e2e.operator.test_operator_rbac import may, service_account_kubeconfig
from tests.support.charts import rendered
from tests.support.controlplane import Fleet
from tests.support.operators import CONFIG, NAMESPACE, eventually, model, model_with, running_operator

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

KINDS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
OTHER = "another-team"


async def grant(fleet: Fleet, **values: object) -> None:
    """The chart's roles for these values, and none of another test's."""
    kinds = "clusterrolebinding,clusterrole,rolebinding,role"
    fleet.plane.run_kubectl("delete", kinds, "-A", "-l", "app.kubernetes.io/part-of=shoal", "--ignore-not-found")
    roles = [o for o in rendered(dict(values)) if o["kind"] in KINDS]
    await asyncio.to_thread(fleet.plane.run_kubectl, "apply", "-f", "-", stdin=yaml.safe_dump_all(roles))


async def test_it_serves_its_namespaces_and_cannot_reach_others(fleet: Fleet, tmp_path: Path) -> None:
    client, ns = fleet.client, fleet.namespace
    body: JsonObject = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OTHER}}
    await client.apply(NAMESPACES, body, manager="test")
    await grant(fleet, scope={"namespaces": [ns]})
    await eventually(lambda: may(fleet, "list", "models.shoal.dev", f"-n={ns}"), bool, what="its Roles are known")
    await eventually(lambda: may(fleet, "list", "models.shoal.dev", "-A"), lambda yes: not yes, what="nor others")
    kubeconfig = service_account_kubeconfig(fleet, tmp_path / "kubeconfig")
    scope = (ns, NAMESPACE)
    config = CONFIG.model_copy(update={"scope_namespaces": scope})
    async with (
        await KubeClient.from_environment(kubeconfig=kubeconfig, scope=scope) as own,
        running_operator(own, kubeconfig, config=config),
    ):
        await fleet.apply(model("theirs", OTHER))
        await fleet.apply(model("ours", ns))
        await model_with(client, ns, "ours", "Ready", "True")
        # Deleted objects are missed by nobody, and a change is heard by a watch of that namespace.
        await fleet.apply(model("ours", ns, variants=[{"class": "h100"}]))
        await eventually(
            lambda: fleet.all(DEPLOYMENTS, namespace=ns),
            lambda all_: [d["metadata"]["name"] for d in all_] == ["ours-h100"],
        )
        assert await fleet.all(EVENTS, namespace=ns)
        theirs = await client.get(MODELS, "theirs", OTHER)
        assert not (theirs.get("status") or {}).get("conditions")
        assert await fleet.all(DEPLOYMENTS, namespace=OTHER) == []
        # What an attacker who has the operator's token can do elsewhere: nothing.
        for resource in (SECRETS, PODS, MODELS):
            with pytest.raises(Forbidden):
                await own.get(resource, "x", OTHER)
        with pytest.raises(Forbidden):
            await own.create(SECRETS, {"metadata": {"name": "x", "namespace": OTHER}})
        await client.delete(MODELS, "ours", ns)
    await client.delete(MODELS, "theirs", OTHER)


async def test_without_a_scope_the_same_token_reaches_every_namespace(fleet: Fleet, tmp_path: Path) -> None:
    """The mutation: the wall is the scope."""
    await grant(fleet)
    await eventually(lambda: may(fleet, "create", "secrets", f"-n={OTHER}"), bool, what="its ClusterRole is known")
    assert await may(fleet, "list", "models.shoal.dev", "-A")
