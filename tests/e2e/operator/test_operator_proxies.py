"""Models that proxies of the Gateway API may route to: what the operator makes where the kind exists, on a real API
server and with the chart's rights."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from shoal.api import names, permissions
from shoal.api.config import ExtProc
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
from shoal.kube.resources import DEPLOYMENTS, ENDPOINTSLICES, INFERENCEPOOLS, LEASES, SERVICES
from tests.e2e.operator.test_operator_rbac import may, service_account_kubeconfig, used_by
from tests.support.charts import rendered
from tests.support.controlplane import Fleet, remove_crds
from tests.support.inferencepools import install_inference_pools
from tests.support.operators import CONFIG, NAMESPACE, eventually, model, running_operator
from tests.support.signals import ready_gateway

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PROXIES = CONFIG.model_copy(update={"ext_proc": ExtProc(enabled=True, proxy_namespaces=("ingress",))})
CHART = {"gateway": {"extProc": {"enabled": True, "proxyNamespaces": ["ingress"]}}}


@pytest.fixture
async def pools(fleet: Fleet) -> AsyncIterator[None]:
    """The cluster has the kind."""
    await install_inference_pools(fleet.client)
    yield
    # The rights of this test are no other's.
    for kind in ("clusterrolebinding", "clusterrole"):
        fleet.plane.run_kubectl("delete", kind, "shoal-operator-proxies", "--ignore-not-found")
    await remove_crds(fleet.client, INFERENCEPOOLS.group, f"{INFERENCEPOOLS.plural}.{INFERENCEPOOLS.group}")


async def test_a_model_gets_an_inference_pool_and_its_way_to_the_gateways(
    fleet: Fleet, pools: None, tmp_path: Path
) -> None:
    client, ns = fleet.client, fleet.namespace
    since = len(fleet.plane.audited())
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    roles = [o for o in rendered(CHART) if o["kind"] in kinds]
    fleet.plane.run_kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(roles))
    await eventually(lambda: may(fleet, "create", "inferencepools.inference.networking.k8s.io", "-A"), bool)
    kubeconfig = service_account_kubeconfig(fleet, tmp_path / "kubeconfig")
    await ready_gateway(fleet)
    with contextlib.suppress(NotFound):
        await client.delete(LEASES, names.LEASE_NAME, NAMESPACE)
    async with (
        await KubeClient.from_environment(kubeconfig=kubeconfig) as own,
        running_operator(own, kubeconfig, config=PROXIES),
    ):
        await fleet.apply(model("chat", ns))
        pool = (await eventually(lambda: fleet.all(INFERENCEPOOLS, namespace=ns), bool))[0]
        picker = pool["spec"]["endpointPickerRef"]
        assert (pool["metadata"]["name"], picker["failureMode"]) == ("chat", "FailClose")
        service = await client.get(SERVICES, picker["name"], ns)
        assert service["spec"]["ports"][0]["port"] == picker["port"]["number"]

        async def addresses() -> list[str]:
            found = await client.get(ENDPOINTSLICES, picker["name"], ns)
            return [address for each in found["endpoints"] or [] for address in each["addresses"]]

        known = await eventually(addresses, bool)
        # An edit by hand is undone.
        await client.merge_patch(ENDPOINTSLICES, picker["name"], ns, {"endpoints": []}, manager="somebody")
        await eventually(addresses, lambda found: found == known)
        assert await fleet.all(DEPLOYMENTS, namespace=ns)
    # A watch is in the log when it has ended.
    rows = permissions.OPERATOR_PROXIES
    granted = {(resource, verb) for row in rows for resource in row.resources for verb in row.verbs}

    async def unused() -> set[tuple[str, str]]:
        return granted - used_by(fleet, since=since)

    await eventually(unused, lambda left: not left, what="every right is used")
