"""A mixed fleet: which class, who waits for whom, what is replaced, what moves, and never more than there is."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.kube.reflector import Reflector
from shoal.kube.resources import DEPLOYMENTS, EVENTS, GPUCLASSES, JOBS, MODELS, NODES, PDBS, PODS
from shoal.kube.resync import object_key
from tests.support.controlplane import FACTS, Fleet, add_node
from tests.support.operators import condition, eventually, gpu_class, model, model_with, running_operator
from tests.support.signals import FakeSignals

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

LARGE = FACTS | {"weightBytes": 141_107_412_992, "parameters": 70_553_706_496, "attentionHeads": 64} | {
    "kv": {"kind": "Full", "layers": 80, "kvHeads": 8, "headDim": 128}, "kvBytesPerToken": 327680,
}  # fmt: skip
HUGE = LARGE | {"weightBytes": 2_000_000_000_000, "parameters": 1_000_000_000_000}


def variant(found: JsonObject, name: str) -> JsonObject:
    return next((v for v in (found.get("status") or {}).get("variants", []) if v["class"] == name), {})


async def engine_pods(fleet: Fleet, **labels: str) -> list[JsonObject]:
    wanted = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE} | {k.replace("_", "-"): v for k, v in labels.items()}
    pods = await fleet.all(PODS, namespace=fleet.namespace)
    return [p for p in pods if wanted.items() <= p["metadata"]["labels"].items()]


async def until_model(
    fleet: Fleet, name: str, holds: Callable[[JsonObject], bool], *, seconds: float = 90
) -> JsonObject:
    return await eventually(lambda: fleet.client.get(MODELS, name, fleet.namespace), holds, seconds=seconds)


def stands(found: JsonObject, **ready: int) -> bool:
    """Exactly these replicas are wanted and ready, by class."""
    variants = (found.get("status") or {}).get("variants", [])
    wanted = {v["class"]: v["desired"] for v in variants if v.get("desired")}
    return wanted == ready and all(variant(found, c).get("ready") == n for c, n in ready.items())


async def test_a_model_that_does_not_fit_the_cheap_class_says_the_sum_and_takes_the_next(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": LARGE})
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("large", fleet.namespace))
        await model_with(fleet.client, fleet.namespace, "large", "Ready", "True")
        # A Deployment may tell of a replica that is ready before its pod does.
        found = await until_model(fleet, "large", lambda m: variant(m, "h100").get("step") == "Ready")
    assert stands(found, h100=1)
    assert variant(found, "h100")["gpusPerReplica"] == 4  # two hold the weights and nothing else
    assert variant(found, "h100")["hourlyCost"] == "9.96"
    assert variant(found, "h100")["kvTokensPerReplica"]["predicted"] > 8192
    assert "GiB" in variant(found, "l4")["excluded"]
    assert found["status"]["artifact"]["weightBytes"] == LARGE["weightBytes"]


async def test_a_model_that_fits_nowhere_says_what_is_missing(fleet: Fleet) -> None:
    fleet.kubelet.said = (0, {"facts": HUGE})
    async with running_operator(fleet.client, fleet.kubeconfig):
        await fleet.apply(model("huge", fleet.namespace))
        found = await model_with(fleet.client, fleet.namespace, "huge", "Placed", "False", "NoFit")
        assert await fleet.all(DEPLOYMENTS, namespace=fleet.namespace) == []
    for name in ("l4", "h100"):
        assert "weights" in variant(found, name)["excluded"]
    assert "GiB" in condition(found, "Ready")["message"]


async def test_a_source_is_read_once_for_all_models_that_name_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.controllers.artifacts.KEEP_SECONDS", 3600)  # it is counted at the end
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await asyncio.gather(*(fleet.apply(model(f"m{i}", ns)) for i in range(3)))
        for i in range(3):
            await model_with(client, ns, f"m{i}", "Ready", "True")
        assert len(await fleet.all(JOBS, namespace=ns)) == 1
        await fleet.apply(model("late", ns))
        await model_with(client, ns, "late", "Ready", "True")
        assert len(await fleet.all(JOBS, namespace=ns)) == 1


async def test_a_source_that_cannot_be_read_is_told_and_found_when_it_can(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controllers.artifacts.KEEP_SECONDS", 1)
    monkeypatch.setattr("shoal.manifests.facts.ATTEMPTS", 1)
    client, ns = fleet.client, fleet.namespace
    said = {"reason": "SourceNotFound", "message": "hf://org/m does not exist: check spec.source.uri"}
    fleet.kubelet.said = (1, said)
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, source={"uri": "hf://org/m"}))
        found = await model_with(client, ns, "chat", "Placed", "Unknown", "SourceNotFound")
        assert condition(found, "Ready")["message"] == said["message"]
        assert condition(found, "Stalled")["reason"] == "SourceNotFound"
        assert await fleet.all(DEPLOYMENTS, namespace=ns) == []
        fleet.kubelet.said = (0, {"facts": FACTS | {"source": "hf://org/m", "revision": "c0ffee"}})
        await model_with(client, ns, "chat", "Ready", "True", seconds=90)
        (pod,) = await engine_pods(fleet)
        stage = pod["spec"]["initContainers"][1]
        assert {"name": "SHOAL_STAGE_REVISION", "value": "c0ffee"} in stage["env"]


async def test_what_runs_goes_on_while_another_source_is_read(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        (before,) = await engine_pods(fleet)
        fleet.kubelet.said = (1, {"reason": "SourceUnreachable", "message": "no answer"})
        await fleet.apply(model("chat", ns, source={"uri": "hf://org/other"}))
        found = await model_with(client, ns, "chat", "Ready", "False", "SourceUnreachable")
        assert condition(found, "Available")["status"] == "True"
        (after,) = await engine_pods(fleet)
        assert after["metadata"]["uid"] == before["metadata"]["uid"]


async def test_an_older_operators_pods_stay_when_their_facts_are_read_later(fleet: Fleet) -> None:
    """A Deployment without facts, as before there were any, is left alone until they are known."""
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
    (before,) = await engine_pods(fleet)
    for job in await fleet.all(JOBS, namespace=ns):
        await client.delete(JOBS, job["metadata"]["name"], ns)
    # What it has said is forgotten with its pod.
    await eventually(lambda: fleet.all(PODS, namespace=ns), lambda left: len(left) == 1, what="the engine alone")
    gone = [{"op": "remove", "path": "/status/artifact"}]
    fleet.plane.run_kubectl(
        "patch", "model", "chat", f"-n={ns}", "--subresource=status", "--type=json", f"-p={gone}".replace("'", '"')
    )
    fleet.kubelet.said = (1, {"reason": "SourceUnreachable", "message": "no answer"})
    async with running_operator(client, fleet.kubeconfig):
        found = await model_with(client, ns, "chat", "Placed", "Unknown", "SourceUnreachable")
        assert condition(found, "Ready")["status"] == "True"
    (after,) = await engine_pods(fleet)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


async def test_the_higher_priority_gets_the_gpus_and_the_other_says_whom_it_waits_for(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig), never_more_than_there_is(fleet):
        for name in ("low-a", "low-b"):
            await fleet.apply(model(name, ns, variants=[{"class": "l4"}], priority=0))
            await model_with(client, ns, name, "Ready", "True")
            await asyncio.sleep(1.1)  # objects are as old as the second in which they were made
        await fleet.apply(model("high", ns, variants=[{"class": "l4"}], priority=100))
        await model_with(client, ns, "high", "Ready", "True")
        await model_with(client, ns, "high", "Placed", "True")  # as the next plan sees it
        # The youngest of the lowest.
        loser = await model_with(client, ns, "low-b", "Placed", "False", "Outranked")
        assert f"{ns}/high" in condition(loser, "Placed")["message"]
        models = {m["metadata"]["name"]: m for m in await fleet.all(MODELS, namespace=ns)}
        losers = [name for name, m in models.items() if condition(m, "Placed")["status"] == "False"]
        assert losers == ["low-b"]
        assert condition(models["low-a"], "Ready")["status"] == "True"
        await client.delete(MODELS, "high", ns)
        await model_with(client, ns, "low-b", "Ready", "True", seconds=60)


async def test_a_model_over_two_classes_fills_the_cheap_one_first(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig, signals=FakeSignals()), never_more_than_there_is(fleet):
        variants = [{"class": "h100"}, {"class": "l4", "maxReplicas": 1}]
        at_once = {"stabilizationSeconds": 0}
        await fleet.apply(model("chat", ns, variants=variants, scaling={"minReplicas": 3} | at_once))
        await until_model(fleet, "chat", lambda m: stands(m, l4=1, h100=2))
        await fleet.apply(model("chat", ns, variants=variants, scaling={"minReplicas": 1} | at_once))
        await until_model(fleet, "chat", lambda m: stands(m, l4=1))  # the dearest is the first to shrink


@pytest.mark.parametrize("trouble", ["cordoned", "NotReady", "unhealthy"])
async def test_a_replica_on_a_node_in_trouble_is_replaced_elsewhere(fleet: Fleet, trouble: str) -> None:
    client, ns = fleet.client, fleet.namespace
    await add_node(client, "l4-1", {"nvidia.com/gpu.product": "L4"}, 2)
    async with running_operator(client, fleet.kubeconfig), never_more_than_there_is(fleet):
        await fleet.apply(model("chat", ns, variants=[{"class": "l4"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        (before,) = await engine_pods(fleet)
        node = before["spec"]["nodeName"]
        await break_node(fleet, node, trouble)

        async def moved() -> bool:
            pods = await engine_pods(fleet)
            return len(pods) == 1 and pods[0]["spec"].get("nodeName") not in (None, node)

        await eventually(moved, bool, seconds=60, what=f"the replica on another node than {node}")
        await until_model(fleet, "chat", lambda m: stands(m, l4=1) and condition(m, "Ready")["status"] == "True")
        free = 2  # of the four GPUs two are on the node in trouble, or one of them is broken
        counted = await eventually(
            lambda: client.get(GPUCLASSES, "l4"),
            lambda c: (c["status"].get("gpus") or {}).get("free", 99) <= free,
        )
        assert counted["status"]["gpus"]["capacity"] == 4


async def break_node(fleet: Fleet, node: str, trouble: str) -> None:
    client = fleet.client
    if trouble == "cordoned":
        await client.merge_patch(NODES, node, None, {"spec": {"unschedulable": True}}, manager="person")
    elif trouble == "NotReady":
        found = await client.get(NODES, node)
        for one in found["status"]["conditions"]:
            one["status"] = "Unknown" if one["type"] == "Ready" else one["status"]
        status = {"status": {"conditions": found["status"]["conditions"]}}
        await client.merge_patch(NODES, node, None, status, manager="kubelet", subresource="status")
        taints = [*found["spec"]["taints"], {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]
        await client.merge_patch(NODES, node, None, {"spec": {"taints": taints}}, manager="node-lifecycle")
    else:
        status = {"status": {"allocatable": {"nvidia.com/gpu": "0"}}}
        await client.merge_patch(NODES, node, None, status, manager="kubelet", subresource="status")


async def test_a_replica_moves_to_a_cheaper_class_when_it_gets_room(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig), never_more_than_there_is(fleet):
        for name in ("a", "b"):
            await fleet.apply(model(name, ns, variants=[{"class": "l4"}]))
            await model_with(client, ns, name, "Ready", "True")
        await fleet.apply(model("mover", ns))
        await until_model(fleet, "mover", lambda m: stands(m, h100=1))
        below = asyncio.Event()

        def heard(kind: str, obj: JsonObject) -> None:
            if obj["metadata"]["name"] == "mover" and obj.get("status", {}).get("replicas", {}).get("ready") == 0:
                below.set()

        watch = asyncio.create_task(Reflector(client, MODELS, on_event=heard).run())
        await client.delete(MODELS, "a", ns)
        await until_model(fleet, "mover", lambda m: stands(m, l4=1), seconds=90)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        assert not below.is_set(), "it served all the time"
        events = await eventually(
            lambda: fleet.all(EVENTS, namespace=ns),
            lambda found: any(e.get("action") == "Place" and e["regarding"]["name"] == "mover" for e in found),
        )
        assert [e["note"] for e in events if e.get("action") == "Place"]


async def test_replicas_of_a_class_that_selects_other_nodes_move_there(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await add_node(client, "new-0", {"pool": "new", "nvidia.com/gpu.product": "L4-new"}, 2)
    async with running_operator(client, fleet.kubeconfig), never_more_than_there_is(fleet):
        await fleet.apply(model("chat", ns, variants=[{"class": "l4"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        edited = gpu_class("l4", "L4", cost="0.43", memory="24Gi")
        edited["spec"]["nodeSelector"] = {"pool": "new"}
        await fleet.apply(edited)

        async def moved() -> bool:
            pods = await engine_pods(fleet)
            return [p["spec"].get("nodeName") for p in pods] == ["new-0"]

        await eventually(moved, bool, seconds=90, what="the replica on the class's new node")


async def test_classes_that_share_a_node_and_labels_that_disagree_are_told(fleet: Fleet) -> None:
    client = fleet.client
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(gpu_class("all-l4", "L4", memory="24Gi"))

        async def ready(name: str, reason: str) -> str:
            found = await eventually(
                lambda: client.get(GPUCLASSES, name), lambda c: condition(c, "Ready").get("reason") == reason
            )
            return condition(found, "Ready")["message"]

        assert "l4-0 also has the labels of all-l4 and counts there" in await ready("l4", "Overlaps")
        labels = {"metadata": {"labels": {"nvidia.com/gpu.memory": "81559"}}}
        await client.merge_patch(NODES, "l4-0", None, labels, manager="gfd")
        assert "l4-0: label nvidia.com/gpu.memory says 81559 MiB" in await ready("all-l4", "LabelsDisagree")
        await eventually(
            lambda: fleet.all(EVENTS, namespace="default"),
            lambda found: "Warning" in [e["type"] for e in found if e.get("reason") == "LabelsDisagree"],
            what="a warning",
        )


@contextlib.asynccontextmanager
async def never_more_than_there_is(fleet: Fleet) -> AsyncGenerator[None]:
    """Records every pod and Model as the API server tells them, and checks at the end: engine pods never asked for more
    GPUs of a class than its nodes have, but for replicas whose Model's status said at that time that they wait."""
    told: list[tuple[str, JsonObject]] = []
    capacity: dict[str, int] = {}
    for node in await fleet.all(NODES):
        product = node["metadata"]["labels"].get("nvidia.com/gpu.product", "")
        count = int(node["status"].get("capacity", {}).get("nvidia.com/gpu", 0))
        name = "l4" if product.startswith("L4") else "h100"
        capacity[name] = capacity.get(name, 0) + count

    watched = {
        kind: Reflector(fleet.client, kind, on_event=lambda what, obj: told.append((what, obj)))
        for kind in (PODS, MODELS)
    }
    watches = [asyncio.create_task(reflector.run()) for reflector in watched.values()]

    async def heard_all() -> bool:
        for kind, reflector in watched.items():
            for obj in await fleet.all(kind):
                known = reflector.objects.get(object_key(obj))
                if known is None or _version(known) < _version(obj):
                    return False
        return True

    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(reflector.synced.wait() for reflector in watched.values()))
        yield
        await eventually(heard_all, bool, what="all that has happened")
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
    assert _surplus(told, capacity) == []


def _version(obj: JsonObject) -> int:
    return int(obj["metadata"]["resourceVersion"])


def _surplus(told: list[tuple[str, JsonObject]], capacity: dict[str, int]) -> list[str]:
    """When more GPUs of a class were asked for than there are. Two watches overtake each other: what they told counts
    in the order in which it was written, which the versions of one etcd are."""
    tables: dict[str, dict[str, JsonObject]] = {"Pod": {}, "Model": {}}
    found: list[str] = []
    for what, obj in sorted(told, key=lambda event: _version(event[1])):
        table = tables[obj["kind"]]
        if what == "upsert":
            table[obj["metadata"]["uid"]] = obj
        else:
            table.pop(obj["metadata"]["uid"], None)
        for name, has in capacity.items():
            pods = tables["Pod"].values()
            asked = sum(_gpus(p) for p in pods if p["metadata"].get("labels", {}).get(names.LABEL_GPU_CLASS) == name)
            waits = sum(
                v.get("waiting", 0) * v.get("gpusPerReplica", 1)
                for m in tables["Model"].values()
                for v in (m.get("status") or {}).get("variants", [])
                if v["class"] == name
            )
            if asked > has + waits:
                found.append(f"{name}: {asked} asked for, {has} there, {waits} waiting")
    return found


def _gpus(pod: JsonObject) -> int:
    if pod["metadata"].get("labels", {}).get(names.LABEL_COMPONENT) != names.COMPONENT_ENGINE:
        return 0
    requests = pod["spec"]["containers"][0]["resources"].get("requests", {})
    return int(requests.get("nvidia.com/gpu", 0))


async def test_a_node_that_is_drained_keeps_its_only_replica_until_the_next_one_is_ready(fleet: Fleet) -> None:
    """Else every request would wait for the start of an engine, although the drain could have waited for it."""
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        [old] = await engine_pods(fleet)
        assert await least(fleet) == 0, "nothing is on its way: it may go at once"
        await add_node(client, "h100-1", {"nvidia.com/gpu.product": "H100"}, 8)
        fleet.kubelet.hold = True  # the next engine loads
        await asyncio.to_thread(fleet.plane.run_kubectl, "cordon", old["spec"]["nodeName"])
        await eventually(lambda: least(fleet), lambda found: found == 1, what="a budget that keeps it")
        await eventually(lambda: engine_pods(fleet), lambda pods: len(pods) == 2, what="the replacement")
        refused = await asyncio.to_thread(drain, fleet, old["spec"]["nodeName"], "5s")
        assert "disruption budget" in refused
        assert "deletionTimestamp" not in (await client.get(PODS, old["metadata"]["name"], ns))["metadata"]
        fleet.kubelet.hold = False
        await asyncio.to_thread(drain, fleet, old["spec"]["nodeName"], "50s")
        left = await eventually(lambda: engine_pods(fleet), lambda pods: len(pods) == 1, what="one replica")
        assert left[0]["spec"]["nodeName"] == "h100-1"
        await eventually(lambda: least(fleet), lambda found: found == 0, what="the budget of one replica")


async def test_a_drain_does_not_wait_for_a_replica_that_has_no_gpus(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}]))
        await model_with(client, ns, "chat", "Ready", "True")
        await asyncio.to_thread(fleet.plane.run_kubectl, "cordon", "h100-0")
        await model_with(client, ns, "chat", "Placed", "False")
        assert await least(fleet) == 0
        await asyncio.to_thread(drain, fleet, "h100-0", "50s")
        await model_with(client, ns, "chat", "Ready", "False")


async def test_a_budget_that_was_raised_before_a_restart_falls_again(fleet: Fleet) -> None:
    """Else a drain waits for ever, where the replica that it waits for does not come."""
    client, ns = fleet.client, fleet.namespace
    scaling = {"minReplicas": 1, "maxReplicas": 2}
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}], scaling=scaling))
        await model_with(client, ns, "chat", "Ready", "True")
        fleet.kubelet.hold = True  # the next engine loads
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}], scaling=scaling | {"minReplicas": 2}))
        await eventually(lambda: least(fleet), lambda found: found == 1, what="a budget that keeps the only one")
    async with running_operator(client, fleet.kubeconfig):
        await until_model(fleet, "chat", lambda m: variant(m, "h100").get("desired") == 2)
        interruptible = gpu_class("h100", "H100", cost="2.49")
        interruptible["spec"]["interruptible"] = True  # its machine goes, ready or not: nothing is kept there
        await fleet.apply(interruptible)
        await eventually(lambda: least(fleet), lambda found: found == 0, what="a budget that lets it go")


async def least(fleet: Fleet) -> int:
    """`minAvailable` of the only PodDisruptionBudget."""
    [budget] = await fleet.all(PDBS, namespace=fleet.namespace)
    return budget["spec"]["minAvailable"]


def drain(fleet: Fleet, node: str, seconds: str) -> str:
    options = ("--force", "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={seconds}")
    return fleet.plane.run_kubectl("drain", node, *options, check=False)
