"""A nearly empty node is emptied, with a real scheduler: a replacement first, then the drain, and never under a
stream."""

from dataclasses import replace

import pytest

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.kube.resources import DEPLOYMENTS, EVENTS, GPUCLASSES, MODELS, NODES, PODS
from tests.support.controlplane import Fleet, add_node
from tests.support.operators import eventually, gpu_class, model, model_with, running_operator, settled, with_condition
from tests.support.signals import QUIET, FakeSignals

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

LABEL = f"{names.QUARANTINE_PREFIX}spot"
LABELS = {"nvidia.com/gpu.product": "spot"}


async def replicas(fleet: Fleet) -> dict[str, str | None]:
    """Name of each engine pod that is not going -> its node."""
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    pods = await fleet.all(PODS, namespace=fleet.namespace, label_selector=selector)
    return {p["metadata"]["name"]: p["spec"].get("nodeName") for p in pods if "deletionTimestamp" not in p["metadata"]}


async def pod_of(fleet: Fleet, model_name: str) -> JsonObject:
    """The only engine pod of a Model."""
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={model_name}"
    [pod] = await fleet.all(PODS, namespace=fleet.namespace, label_selector=selector)
    return pod


async def two_nodes_half_used(fleet: Fleet) -> None:
    """Nodes spot-0 and spot-1 with two GPUs each; the only replica of Model `a` on the one, of `b` on the other."""
    spot = gpu_class("spot", "spot", cost="0.43", memory="24Gi")
    autoscaled = {"max": 2, "gpusPerNode": 2, "consolidate": {"afterSeconds": 10}}
    spot["spec"]["nodes"] = {"autoscaled": autoscaled}
    await add_node(fleet.client, "spot-0", LABELS, 2)
    await fleet.apply(spot)
    for name in ("a", "other"):
        await fleet.apply(model(name, fleet.namespace, variants=[{"class": "spot"}], scaling={"minReplicas": 1}))
        await model_with(fleet.client, fleet.namespace, name, "Ready", "True")
    await add_node(fleet.client, "spot-1", LABELS, 2)
    await fleet.apply(model("b", fleet.namespace, variants=[{"class": "spot"}], scaling={"minReplicas": 1}))
    await model_with(fleet.client, fleet.namespace, "b", "Ready", "True")
    assert (await pod_of(fleet, "a"))["spec"]["nodeName"] == "spot-0"
    assert (await pod_of(fleet, "b"))["spec"]["nodeName"] == "spot-1"


async def remove(fleet: Fleet, name: str) -> None:
    await fleet.client.delete(MODELS, name, fleet.namespace)
    await eventually(
        lambda: fleet.all(DEPLOYMENTS, namespace=fleet.namespace), lambda found: len(found) == 2, what="two Models"
    )


async def consolidation(fleet: Fleet) -> JsonObject | None:
    found = await fleet.client.get(GPUCLASSES, "spot")
    return (found.get("status") or {}).get("consolidation")


async def events(fleet: Fleet) -> dict[str, str]:
    """Reason -> note, of the class."""
    uid = (await fleet.client.get(GPUCLASSES, "spot"))["metadata"]["uid"]
    found = [e async for e in fleet.client.list(EVENTS, namespace="default")]
    return {e["reason"]: e["note"] for e in found if e["regarding"].get("uid") == uid and e["action"] == "Consolidate"}


async def test_the_replica_of_a_half_used_node_is_replaced_on_the_other_and_the_node_is_left_to_the_autoscaler(
    fleet: Fleet,
) -> None:
    client, signals = fleet.client, FakeSignals()
    async with running_operator(client, fleet.kubeconfig, signals=signals):
        await two_nodes_half_used(fleet)
        old = (await pod_of(fleet, "a"))["metadata"]["name"]
        fleet.kubelet.hold = True  # the replacement starts, and is not ready yet
        await remove(fleet, "other")
        chosen = await eventually(lambda: consolidation(fleet), bool, what="a node that is emptied")
        assert chosen["node"] == "spot-0"
        assert chosen["message"].endswith("which saves 0.86 USD per hour")
        both = await eventually(lambda: replicas(fleet), lambda now: len(now) == 3, what="a replacement")
        assert both[old] == "spot-0", "the old one serves meanwhile"
        bound = await eventually(lambda: replicas(fleet), lambda now: None not in now.values(), what="its node")
        assert [node for name, node in bound.items() if name != old] == ["spot-1", "spot-1"]
        fleet.kubelet.hold = False
        await eventually(
            lambda: replicas(fleet), lambda now: list(now.values()) == ["spot-1", "spot-1"], what="one node in use"
        )
        empty = await eventually(lambda: consolidation(fleet), lambda now: bool(now and "emptySince" in now))
        assert empty["node"] == "spot-0"
        assert (await client.get(NODES, "spot-0"))["metadata"]["labels"][LABEL] == "Consolidation"
        # As the autoscaler does it.
        await client.delete(NODES, "spot-0")
        await eventually(lambda: consolidation(fleet), lambda now: now is None, what="the end")
        said = await eventually(lambda: events(fleet), lambda found: "Consolidated" in found, what="an event")
        assert said["Consolidating"].startswith("node spot-0 is being emptied: 1 of its 2 GPUs are free")
        assert said["Consolidated"] == "node spot-0 is gone: it was removed"


async def test_a_replica_with_a_request_stays_and_a_move_ends_when_one_comes(fleet: Fleet) -> None:
    client, signals = fleet.client, FakeSignals()
    async with running_operator(client, fleet.kubeconfig, signals=signals):
        await two_nodes_half_used(fleet)
        a, b = await pod_of(fleet, "a"), await pod_of(fleet, "b")
        busy = replace(QUIET, running=1)
        for pod in (a, b):
            signals.loads[pod["metadata"]["uid"]] = busy
        await remove(fleet, "other")
        there = {a["metadata"]["name"]: "spot-0", b["metadata"]["name"]: "spot-1"}
        await eventually(lambda: replicas(fleet), lambda now: now == there, what="two replicas")
        assert await settled(lambda: replicas(fleet), still=25) == there
        assert await consolidation(fleet) is None
        waits = await with_condition(client, GPUCLASSES, "", "spot", "Consolidating", "False", "NothingEmptied")
        (why,) = (c["message"] for c in waits["status"]["conditions"] if c["type"] == "Consolidating")
        assert f"spot-0: {a['metadata']['namespace']}/{a['metadata']['name']} has requests" in why
        # One of them ends its stream: that one moves, though the other's node comes first.
        fleet.kubelet.hold = True
        signals.loads[b["metadata"]["uid"]] = QUIET
        chosen = await eventually(lambda: consolidation(fleet), bool, what="a node that is emptied")
        assert chosen["node"] == "spot-1"
        await eventually(lambda: replicas(fleet), lambda now: len(now) == 3, what="a replacement")
        signals.loads[b["metadata"]["uid"]] = busy
        await eventually(lambda: consolidation(fleet), lambda now: now is None, what="the end")
        await eventually(lambda: replicas(fleet), lambda now: now == there, what="the replicas as they were")
        said = await eventually(lambda: events(fleet), lambda found: "ConsolidationEnded" in found, what="an event")
        assert said["ConsolidationEnded"].endswith("has requests")
        await eventually(
            lambda: client.get(NODES, "spot-1"), lambda node: LABEL not in node["metadata"]["labels"], what="no label"
        )
