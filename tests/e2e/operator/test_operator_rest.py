"""A fleet that is too small for its Models comes to rest: nobody is moved round and round, and nothing is written."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

import pytest

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.resources import MODELS, PODS
from tests.support.controlplane import Fleet, add_node
from tests.support.operators import condition, model, running_operator
from tests.support.signals import FakeSignals

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
]

PRIORITIES = (0, 10, 20)
MODELS_EACH = 10
GPUS = 2 + 8 + 4 + 8
"""The fixture's two nodes and two more: eight Models find no room."""
QUIET_SECONDS = 8.0
REST_SECONDS = 360.0


@dataclass
class Seen:
    """Of the Models, by priority: which are ready, which are not."""

    ready: Counter[int]
    waiting: Counter[int]
    reasons: Counter[str]


async def see(fleet: Fleet) -> Seen:
    seen = Seen(Counter(), Counter(), Counter())
    for found in await fleet.all(MODELS, namespace=fleet.namespace):
        priority = found["spec"].get("priority", 0)
        if condition(found, "Ready").get("status") == "True":
            seen.ready[priority] += 1
        else:
            seen.waiting[priority] += 1
            seen.reasons[condition(found, "Placed").get("reason", "none")] += 1
    return seen


def writes(client: KubeClient) -> int:
    return sum(count for (_, what), count in client.writes.items() if what != "leases")


async def rest(fleet: Fleet, own: KubeClient, places: int) -> Seen:
    """When as many Models as there are places are ready and nothing was written for a while; fails when it goes on."""
    end, still_since, before = time.monotonic() + REST_SECONDS, time.monotonic(), -1
    seen = await see(fleet)
    while time.monotonic() - still_since < QUIET_SECONDS or seen.ready.total() != places:
        assert time.monotonic() < end, f"does not come to rest: {seen}, {writes(own)} writes"
        if (now := writes(own)) != before:
            before, still_since = now, time.monotonic()
        await asyncio.sleep(0.5)
        seen = await see(fleet)
    return seen


async def bound_gpus(fleet: Fleet) -> int:
    def gpus(pod: JsonObject) -> int:
        limits = [c.get("resources", {}).get("limits", {}) for c in pod["spec"]["containers"]]
        return sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)

    pods = await fleet.all(PODS, namespace=fleet.namespace)
    return sum(gpus(pod) for pod in pods if pod["spec"].get("nodeName"))


async def test_thirty_models_on_a_full_fleet_come_to_rest(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await add_node(client, "l4-1", {"nvidia.com/gpu.product": "L4"}, 4)
    await add_node(client, "h100-1", {"nvidia.com/gpu.product": "H100"}, 8)
    async with (
        await KubeClient.from_environment(kubeconfig=fleet.kubeconfig) as own,
        running_operator(own, fleet.kubeconfig, signals=FakeSignals()),
    ):
        for i in range(MODELS_EACH):
            for priority in PRIORITIES:  # the lowest first: those who come later take its GPUs
                stays = {"idleSeconds": 86400}  # however long it takes
                await fleet.apply(model(f"m{priority}-{i}", ns, priority=priority, drainSeconds=2, scaling=stays))
            await asyncio.sleep(0.3)
        full = await rest(fleet, own, GPUS)
        assert full.ready == {20: 10, 10: 10, 0: 2}, "nobody has what a higher priority lacks"
        assert full.reasons == {"Outranked": 8}
        assert await bound_gpus(fleet) == GPUS

        for i in range(3):
            await client.delete(MODELS, f"m20-{i}", ns)
        again = await rest(fleet, own, GPUS)
        assert again.ready == {20: 7, 10: 10, 0: 5}
