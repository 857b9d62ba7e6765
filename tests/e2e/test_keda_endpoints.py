"""The EndpointSlice by which KEDA finds the operator that leads: on a real API server, with the chart's permissions."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api import names
from shoal.controllers.keda import endpoints as endpoints_module
from shoal.controllers.keda.endpoints import Endpoints, OwnAddress
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden
from shoal.kube.resources import ENDPOINTSLICES, NAMESPACES
from tests.support.apiserver import ApiServer
from tests.support.charts import rendered
from tests.support.kedaclient import Leadership
from tests.support.operators import NAMESPACE
from tests.support.waiting import until, until_async

pytestmark = pytest.mark.apiserver

FIRST = OwnAddress("10.1.0.7", names.SCALER_PORT, "shoal-operator-a", "11111111-1111-1111-1111-111111111111")
SECOND = OwnAddress("10.1.0.8", names.SCALER_PORT, "shoal-operator-b", "22222222-2222-2222-2222-222222222222")


@pytest.fixture
async def person(apiserver: ApiServer) -> AsyncIterator[KubeClient]:
    async with await KubeClient.from_environment(kubeconfig=str(apiserver.kubeconfig)) as client:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await client.apply(NAMESPACES, space, manager="person")
        yield client
        await client.delete(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE)


@pytest.fixture
async def operator(apiserver: ApiServer, person: KubeClient, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """With the operator's own ServiceAccount, and nothing more than the chart gives it."""
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    roles = [o for o in rendered({}) if o["kind"] in kinds and o["metadata"]["name"] == "shoal-operator"]
    apiserver.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(roles))
    until(lambda: allowed(apiserver), 30)
    token = apiserver.kubectl("create", "token", "shoal-operator", f"--namespace={NAMESPACE}").strip()
    config = yaml.safe_load(apiserver.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    async with await KubeClient.from_environment(kubeconfig=str(path)) as client:
        yield client


def allowed(apiserver: ApiServer) -> bool:
    """Whether the API server has heard of what was granted or taken away: by a watch, a moment after it was stored."""
    what = f"endpointslices.discovery.k8s.io/{names.SCALER_SERVICE}"
    who = f"--as=system:serviceaccount:{NAMESPACE}:shoal-operator"
    return apiserver.run("auth", "can-i", "patch", what, f"--namespace={NAMESPACE}", who).returncode == 0


async def slice_of(client: KubeClient) -> dict[str, Any]:
    return await client.get(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE)


async def addresses(client: KubeClient) -> list[str]:
    return [address for one in (await slice_of(client))["endpoints"] for address in one["addresses"]]


async def test_the_service_leads_to_the_leader_and_a_quiet_one_writes_nothing(
    person: KubeClient, operator: KubeClient
) -> None:
    writer = Endpoints(operator, NAMESPACE, FIRST, Leadership())
    await writer.check()
    live = await slice_of(person)
    assert live["metadata"]["labels"]["kubernetes.io/service-name"] == names.SCALER_SERVICE
    assert live["addressType"] == "IPv4"
    assert await addresses(person) == ["10.1.0.7"]
    assert [(p["name"], p["port"]) for p in live["ports"]] == [("grpc", names.SCALER_PORT)]
    # It goes with the pod.
    assert [o["name"] for o in live["metadata"]["ownerReferences"]] == [FIRST.pod]

    written = operator.writes.total()
    for _ in range(3):
        await writer.check()
    assert operator.writes.total() == written


async def test_the_next_leader_takes_the_old_ones_place(person: KubeClient, operator: KubeClient) -> None:
    await Endpoints(operator, NAMESPACE, FIRST, Leadership()).check()
    await Endpoints(operator, NAMESPACE, SECOND, Leadership()).check()

    assert await addresses(person) == ["10.1.0.8"]
    owners = (await slice_of(person))["metadata"]["ownerReferences"]
    assert [o["uid"] for o in owners] == [SECOND.pod_uid]


async def test_edited_or_deleted_by_hand_it_is_written_again(person: KubeClient, operator: KubeClient) -> None:
    writer = Endpoints(operator, NAMESPACE, FIRST, Leadership())
    await writer.check()
    by_hand = {"endpoints": [{"addresses": ["10.9.9.9"]}, {"addresses": ["10.1.0.7"]}], "ports": None}
    await person.merge_patch(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE, by_hand, manager="person")
    await writer.check()
    assert await addresses(person) == ["10.1.0.7"]
    assert [p["port"] for p in (await slice_of(person))["ports"]] == [names.SCALER_PORT]

    await person.delete(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE)
    await writer.check()
    assert await addresses(person) == ["10.1.0.7"]


async def test_who_may_lead_no_more_writes_nothing(person: KubeClient, operator: KubeClient) -> None:
    leads = Leadership()
    await Endpoints(operator, NAMESPACE, SECOND, leads).check()
    leads.certain = False
    await Endpoints(operator, NAMESPACE, FIRST, leads).check()
    assert await addresses(person) == ["10.1.0.8"]


async def test_an_address_of_the_other_family(person: KubeClient, operator: KubeClient) -> None:
    await Endpoints(operator, NAMESPACE, OwnAddress("fd00::7", names.SCALER_PORT), Leadership()).check()
    live = await slice_of(person)
    assert live["addressType"] == "IPv6"
    assert await addresses(person) == ["fd00::7"]


async def test_why_it_cannot_be_written_is_told(
    person: KubeClient, operator: KubeClient, apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints_module, "CHECK_SECONDS", 0.1)
    apiserver.kubectl("delete", "rolebinding", "shoal-operator", f"--namespace={NAMESPACE}")
    until(lambda: not allowed(apiserver), 30)
    writer = Endpoints(operator, NAMESPACE, FIRST, Leadership())
    with pytest.raises(Forbidden):
        await writer.check()

    task = asyncio.ensure_future(writer.run())
    await until_async(lambda: writer.problem is not None)
    assert writer.problem is not None
    assert writer.problem.startswith("EndpointSlice shoal-system/shoal-scaler cannot be written: ")
    assert "forbidden" in writer.problem
    task.cancel()
    await asyncio.wait([task])


def test_what_is_no_address_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        Endpoints(None, NAMESPACE, OwnAddress("shoal-operator-0", 1), Leadership())  # pyright: ignore[reportArgumentType]
