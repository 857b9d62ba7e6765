"""An operator that hears real streams: a gateway's demand and an agent's load decide on replicas."""

import asyncio
from itertools import repeat

import pytest

from shoal.agent.stream import AgentStream
from shoal.api import names, reasons
from shoal.kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.addresses import pod_ip
from tests.support.controlplane import Fleet
from tests.support.operators import NAMESPACE, eventually, model, model_with, running_operator
from tests.support.signals import IDLE, gateway_pod
from tests.support.streams import agent, told_gateway, until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
]

GATEWAY_IP, ENGINE_IP = pod_ip(2), pod_ip(3)


async def test_to_zero_only_while_all_are_heard_and_back_for_one_held_request(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    hub = AgentStream()
    hub.update(IDLE)

    async def replicas() -> int:
        return (await client.get(DEPLOYMENTS, "chat-l4", ns))["spec"]["replicas"]

    async with (
        told_gateway(GATEWAY_IP, names.OPS_PORT) as gateway,
        agent(hub, ENGINE_IP, names.AGENT_PORT),
        running_operator(client, fleet.kubeconfig, identity="first") as first,
        running_operator(client, fleet.kubeconfig, identity="second") as second,
    ):
        # The gateway is not told the install key yet: it lets nobody in, so its signals are stale.
        fleet.kubelet.pod_ips = repeat(GATEWAY_IP)
        await client.apply(PODS, gateway_pod(), manager="person")
        await eventually(
            lambda: client.get(PODS, "shoal-gateway-0", NAMESPACE),
            lambda pod: pod["status"].get("podIP") == GATEWAY_IP,
            what="the gateway's address",
        )
        fleet.kubelet.pod_ips = repeat(ENGINE_IP)
        await fleet.apply(model("chat", ns, scaling={"idleSeconds": 2, "stabilizationSeconds": 1}))
        await model_with(client, ns, "chat", "Ready", "True", reasons.REPLICAS_READY)
        await until(lambda: hub.readers == 2, 60)  # both operators listen, whoever leads

        def missed() -> bool:
            """The leader has decided, and says whose signals are stale."""
            found = [operator.history.model(f"{ns}/chat") for operator in (first, second)]
            return any(f is not None and f.stale == ("shoal-gateway-0",) for f in found)

        await until(missed, 60)
        await asyncio.sleep(5)  # more than twice the idle time
        assert await replicas() == 1

        await until(lambda: first.install.keys is not None and second.install.keys is not None)
        assert first.install.keys is not None
        gateway.ring.known = (first.install.keys.current.value,)
        await until(lambda: gateway.hub.readers == 2, 60)
        await eventually(replicas, lambda n: n == 0, what="zero replicas")

        uid = (await client.get(MODELS, "chat", ns))["metadata"]["uid"]
        gateway.book.arrived(uid)
        gateway.book.held(uid, 100, 0.0)
        await eventually(replicas, lambda n: n == 1, what="a replica for the request that waits")
