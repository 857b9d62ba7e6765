"""Nodes that come when a pod is pending, by the real Karpenter. Machines are Node objects (its kwok provider), pods are
bound by the real scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.kube.reflector import Reflector
from shoal.kube.resources import GPUCLASSES, MODELS, NODES, PODS
from tests.support.controlplane import Fleet
from tests.support.karpenter import (
    NODE_CLAIMS,
    NODE_POOLS,
    instance_type,
    node_pool,
    run_nodes,
    running_karpenter,
)
from tests.support.operators import condition, eventually, gpu_class, model, model_with, running_operator
from tests.support.signals import FakeSignals

pytestmark = [pytest.mark.karpenter, pytest.mark.timeout(600)]

TYPES = [instance_type("gpu-2", 2, 1.0), instance_type("gpu-8", 8, 4.0)]


@pytest.fixture
async def cloud(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet whose cluster has Karpenter, without node pools."""
    nodes = asyncio.create_task(run_nodes(fleet.client))
    with running_karpenter(fleet.plane, tmp_path, TYPES) as log:
        yield fleet
        print(log.read_text()[-6000:])  # shown when the test fails
        assert not nodes.done(), nodes
        # Karpenter itself takes its machines away; without it their finalizers would stay.
        async for pool in fleet.client.list(NODE_POOLS):
            await fleet.client.delete(NODE_POOLS, pool["metadata"]["name"])
        await eventually(lambda: fleet.all(NODE_CLAIMS), lambda left: not left, seconds=120, what="machines that go")
    nodes.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await nodes


async def pool(
    fleet: Fleet,
    name: str,
    *,
    cost: str,
    gpus: int = 2,
    limits: dict[str, str] | None = None,
    consolidation: str = "WhenEmpty",
    by_shoal: bool = False,
) -> None:
    """A node pool, and the class of its nodes. `by_shoal`: Shoal empties nodes."""
    wanted = node_pool(name, {}, f"gpu-{gpus}", limits=limits, consolidation=consolidation)
    await fleet.client.apply(NODE_POOLS, wanted, manager="person")
    found = gpu_class(name, "", cost=cost)
    consolidate = {"consolidate": {"afterSeconds": 10}} if by_shoal else {}
    found["spec"] |= {
        "nodeSelector": {"karpenter.sh/nodepool": name},
        "nodes": {"autoscaled": {"max": 3, "gpusPerNode": gpus, "provisionSeconds": 30} | consolidate},
    }
    await fleet.apply(found)


async def nodes_of(fleet: Fleet, name: str) -> list[JsonObject]:
    return await fleet.all(NODES, label_selector=f"karpenter.sh/nodepool={name}")


async def test_a_pending_replica_brings_a_node_and_an_empty_node_goes(cloud: Fleet) -> None:
    client, ns = cloud.client, cloud.namespace
    async with running_operator(client, cloud.kubeconfig):
        await pool(cloud, "spot", cost="0.10")
        await eventually(
            lambda: client.get(GPUCLASSES, "spot"), lambda c: condition(c, "Ready").get("reason") == "Autoscaled"
        )
        on_spot = [{"class": "spot"}]
        await cloud.apply(model("chat", ns, variants=on_spot))
        await model_with(client, ns, "chat", "Ready", "True")
        assert len(await nodes_of(cloud, "spot")) == 1
        await cloud.apply(model("second", ns, variants=on_spot))
        await model_with(client, ns, "second", "Ready", "True")
        assert len(await nodes_of(cloud, "spot")) == 1, "the first node had a free GPU"
        await cloud.apply(model("third", ns, variants=on_spot))
        await model_with(client, ns, "third", "Ready", "True")
        assert len(await nodes_of(cloud, "spot")) == 2
        for name in ("chat", "second", "third"):
            await client.delete(MODELS, name, ns)
        await eventually(
            lambda: nodes_of(cloud, "spot"), lambda left: not left, seconds=120, what="empty nodes that go"
        )


async def test_the_reason_of_the_autoscaler_is_shown_and_the_next_class_is_tried(cloud: Fleet) -> None:
    client, ns = cloud.client, cloud.namespace
    async with running_operator(client, cloud.kubeconfig):
        await pool(cloud, "used-up", cost="0.10", limits={"nvidia.com/gpu": "0"})
        await cloud.apply(model("chat", ns, variants=[{"class": "used-up"}]))
        waits = await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: "karpenter: " in condition(m, "Ready").get("message", ""),
            what="Karpenter's own event in the Model's status",
        )
        message = condition(waits, "Ready")["message"]
        assert "limit" in message, message
        await pool(cloud, "spot", cost="0.20")
        await cloud.apply(model("chat", ns, variants=[{"class": "used-up"}, {"class": "spot"}]))
        ready = await model_with(client, ns, "chat", "Ready", "True")
        assert [v["class"] for v in ready["status"]["variants"] if v["desired"]] == ["spot"]
        placed = condition(ready, "Placed")["message"]
        assert "; not on used-up: for " in placed, placed
        assert " no autoscaler added a node for a replica there: karpenter: " in placed, placed


async def test_a_machine_that_is_taken_away_is_replaced(cloud: Fleet) -> None:
    """What Karpenter does at an interruption notice of a spot machine: it deletes the NodeClaim."""
    client, ns = cloud.client, cloud.namespace
    async with running_operator(client, cloud.kubeconfig):
        await pool(cloud, "spot", cost="0.10")
        await cloud.apply(model("chat", ns, variants=[{"class": "spot"}]))
        await model_with(client, ns, "chat", "Ready", "True")

        async def replicas() -> list[JsonObject]:
            return await cloud.all(PODS, namespace=ns, label_selector=names.LABEL_GPU_CLASS)

        [pod] = await replicas()
        [claim] = await cloud.all(NODE_CLAIMS)
        await client.delete(NODE_CLAIMS, claim["metadata"]["name"])
        await eventually(
            replicas,
            lambda pods: (
                [p["metadata"]["uid"] for p in pods] not in ([], [pod["metadata"]["uid"]])
                and all(condition(p, "Ready").get("status") == "True" for p in pods)
            ),
            seconds=120,
            what="a replica on another machine",
        )
        await model_with(client, ns, "chat", "Ready", "True")
        await eventually(lambda: cloud.all(NODE_CLAIMS), lambda left: len(left) == 1)
        [node] = await nodes_of(cloud, "spot")
        assert node["metadata"]["name"] != pod["spec"]["nodeName"]


@pytest.mark.parametrize("forbidden", [False, True])
async def test_replicas_are_moved_together_by_the_autoscaler_unless_they_forbid_it(
    cloud: Fleet, forbidden: bool
) -> None:
    client, ns = cloud.client, cloud.namespace
    stays: dict[str, Any] = {"pod": {"annotations": {"karpenter.sh/do-not-disrupt": "true"}}} if forbidden else {}

    async def replicas() -> dict[str, JsonObject]:
        pods = await cloud.all(PODS, namespace=ns, label_selector=names.LABEL_GPU_CLASS)
        return {pod["metadata"]["labels"][names.LABEL_MODEL]: pod for pod in pods}

    async with running_operator(client, cloud.kubeconfig):
        await pool(cloud, "spot", cost="0.10", consolidation="WhenEmptyOrUnderutilized")
        for name in ("first", "second", "third"):
            await cloud.apply(model(name, ns, variants=[{"class": "spot"}], **stays))
            await model_with(client, ns, name, "Ready", "True")
        # Two nodes with two GPUs each: of the two replicas that share a node, one goes.
        nodes = {name: pod["spec"]["nodeName"] for name, pod in (await replicas()).items()}
        goes = next(name for name, node in nodes.items() if list(nodes.values()).count(node) == 2)
        await client.delete(MODELS, goes, ns)
        await eventually(replicas, lambda pods: len(pods) == 2)
        if forbidden:
            await asyncio.sleep(40)  # beyond consolidateAfter, and several looks of Karpenter
            assert len(await nodes_of(cloud, "spot")) == 2
        else:
            await eventually(
                lambda: nodes_of(cloud, "spot"), lambda found: len(found) == 1, seconds=180, what="one node"
            )
        for name in nodes.keys() - {goes}:
            await model_with(client, ns, name, "Ready", "True")
            await client.delete(MODELS, name, ns)  # or its replica would keep its machine
        await eventually(replicas, lambda pods: not pods)


async def replicas_of(fleet: Fleet, name: str) -> list[JsonObject]:
    """Those that are not on their way out."""
    pods = await fleet.all(PODS, namespace=fleet.namespace, label_selector=f"{names.LABEL_MODEL}={name}")
    return [
        p for p in pods if names.LABEL_GPU_CLASS in p["metadata"]["labels"] and "deletionTimestamp" not in p["metadata"]
    ]


async def test_the_replica_goes_whose_node_becomes_empty_and_its_node_goes(cloud: Fleet) -> None:
    """Of three replicas on two nodes, one node is left after the number falls by one."""
    client, ns = cloud.client, cloud.namespace

    def chat(replicas: int) -> JsonObject:
        scaling = {"minReplicas": replicas, "maxReplicas": replicas, "stabilizationSeconds": 0}
        return model("chat", ns, variants=[{"class": "spot"}], scaling=scaling)

    async with running_operator(client, cloud.kubeconfig, signals=FakeSignals()):
        await pool(cloud, "spot", cost="0.10")
        await cloud.apply(chat(3))
        await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: m.get("status", {}).get("replicas", {}).get("ready") == 3,
            seconds=120,
            what="three replicas",
        )
        nodes = [pod["spec"]["nodeName"] for pod in await replicas_of(cloud, "chat")]
        [stays] = {node for node in nodes if nodes.count(node) == 2}
        await cloud.apply(chat(2))
        left = await eventually(
            lambda: replicas_of(cloud, "chat"), lambda pods: len(pods) == 2, seconds=120, what="two replicas"
        )
        assert {pod["spec"]["nodeName"] for pod in left} == {stays}
        found = await eventually(
            lambda: nodes_of(cloud, "spot"), lambda found: len(found) == 1, seconds=180, what="the empty node that goes"
        )
        assert found[0]["metadata"]["name"] == stays
        await client.delete(MODELS, "chat", ns)


async def test_a_replica_that_karpenter_moves_ends_its_answers_while_the_next_one_serves(
    cloud: Fleet,
) -> None:
    """The kubelet stands for an engine with a running answer: its pod lingers. The drain itself is tested with real
    streams in `tests/e2e/test_drain.py`."""
    client, ns = cloud.client, cloud.namespace
    cloud.kubelet.linger = 15.0
    async with running_operator(client, cloud.kubeconfig):
        await pool(cloud, "spot", cost="0.10", consolidation="WhenEmptyOrUnderutilized")
        for name in ("first", "second", "third"):
            await cloud.apply(model(name, ns, variants=[{"class": "spot"}]))
            await model_with(client, ns, name, "Ready", "True")
        nodes = {n: (await replicas_of(cloud, n))[0]["spec"]["nodeName"] for n in ("first", "second", "third")}
        shared = [name for name, node in nodes.items() if list(nodes.values()).count(node) == 2]
        left = [name for name in nodes if name != shared[0]]
        before = {name: (await replicas_of(cloud, name))[0]["metadata"]["uid"] for name in left}
        seen = Watched(cloud, before)
        watching = asyncio.create_task(seen.run())
        await client.delete(MODELS, shared[0], ns)
        await eventually(lambda: nodes_of(cloud, "spot"), lambda found: len(found) == 1, seconds=240, what="one node")
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert seen.went, "one of both was moved"
        assert seen.unserved == [], "its machine went before another replica was ready"
        assert all(grace >= 900 for grace in seen.graces), "its answers have their time"
        for name in left:
            await model_with(client, ns, name, "Ready", "True")
            await client.delete(MODELS, name, ns)


async def test_shoal_empties_a_node_without_a_gap_and_karpenter_removes_it(cloud: Fleet) -> None:
    """Karpenter by itself would evict the only replica of a Model at once, and its requests would wait."""
    client, ns, signals = cloud.client, cloud.namespace, FakeSignals()
    async with running_operator(client, cloud.kubeconfig, signals=signals):
        await pool(cloud, "spot", cost="0.10", by_shoal=True)
        for name in ("first", "second", "third"):
            floor = {"minReplicas": 1}
            await cloud.apply(model(name, ns, variants=[{"class": "spot"}], scaling=floor))
            await model_with(client, ns, name, "Ready", "True")
        nodes = {n: (await replicas_of(cloud, n))[0]["spec"]["nodeName"] for n in ("first", "second", "third")}
        shared = [name for name, node in nodes.items() if list(nodes.values()).count(node) == 2]
        left = [name for name in nodes if name != shared[0]]
        seen = Watched(cloud, {name: (await replicas_of(cloud, name))[0]["metadata"]["uid"] for name in left})
        watching = asyncio.create_task(seen.run())
        await client.delete(MODELS, shared[0], ns)
        await eventually(lambda: nodes_of(cloud, "spot"), lambda found: len(found) == 1, seconds=240, what="one node")
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert len(seen.went) == 1, "one of both was moved"
        assert seen.gaps == [], "another replica was ready before it began to drain"
        assert len(await cloud.all(NODE_CLAIMS)) == 1
        for name in left:
            await model_with(client, ns, name, "Ready", "True")
            await client.delete(MODELS, name, ns)


async def test_a_rollout_on_full_nodes_has_a_node_more_and_where_none_comes_goes_in_place(cloud: Fleet) -> None:
    client, ns = cloud.client, cloud.namespace

    async def rolled(name: str, seed: str) -> Watched:
        """The replica of the Model is of another revision, and its former one is gone."""
        seen = Watched(cloud, {name: (await replicas_of(cloud, name))[0]["metadata"]["uid"]})
        watching = asyncio.create_task(seen.run())
        changed = {"env": [{"name": "SHOAL_SIM_SEED", "value": seed}]}

        async def went() -> set[str]:
            return seen.went

        await cloud.apply(model(name, ns, variants=[{"class": "spot"}], pod=changed))
        await eventually(went, bool, seconds=180, what="the former replica that goes")
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await model_with(client, ns, name, "Ready", "True")
        return seen

    async with running_operator(client, cloud.kubeconfig, signals=FakeSignals()):
        await pool(cloud, "spot", cost="0.10", limits={"nvidia.com/gpu": "4"})
        for name in ("first", "second"):
            await cloud.apply(model(name, ns, variants=[{"class": "spot"}]))
            await model_with(client, ns, name, "Ready", "True")
        assert len(await nodes_of(cloud, "spot")) == 1, "both GPUs of it are in use"
        assert (await rolled("first", "1")).gaps == [], "its successor was ready on another node"
        assert len(await nodes_of(cloud, "spot")) == 2

        await cloud.apply(model("third", ns, variants=[{"class": "spot"}]))
        await cloud.apply(model("fourth", ns, variants=[{"class": "spot"}]))
        for name in ("third", "fourth"):
            await model_with(client, ns, name, "Ready", "True")
        # The class says that a third node may come; the pool's limit forbids it.
        assert (await rolled("second", "1")).gaps == ["second"]
        for name in ("first", "second", "third", "fourth"):
            await client.delete(MODELS, name, ns)


class Watched:
    """What becomes of some replicas, as a watch of their pods shows it."""

    def __init__(self, fleet: Fleet, pods: dict[str, str]) -> None:
        """`pods`: Model -> uid."""
        self._pods = pods
        self._ready: dict[str, set[str]] = {name: {uid} for name, uid in pods.items()}
        self.went: set[str] = set()
        self.unserved: list[str] = []
        """Models that had no other ready replica when theirs was gone, after its last answer."""
        self.gaps: list[str] = []
        """The same when theirs began to drain."""
        self.graces: list[int] = []
        self._reflector = Reflector(fleet.client, PODS, on_event=self._heard)

    async def run(self) -> None:
        await self._reflector.run()

    def _heard(self, kind: str, pod: JsonObject) -> None:
        metadata = pod["metadata"]
        name, uid = metadata.get("labels", {}).get(names.LABEL_MODEL, ""), metadata["uid"]
        if name not in self._pods or names.LABEL_GPU_CLASS not in metadata["labels"]:
            return
        going = kind != "upsert" or "deletionTimestamp" in metadata
        ready = not going and condition(pod, "Ready").get("status") == "True"
        (self._ready[name].add if ready else self._ready[name].discard)(uid)
        if going and uid == self._pods[name] and name not in self.went:
            self.went.add(name)
            self.gaps += [] if self._ready[name] else [name]
            self.graces.append(metadata.get("deletionGracePeriodSeconds") or 0)
        if kind != "upsert" and uid == self._pods[name] and not self._ready[name]:
            self.unserved.append(name)
