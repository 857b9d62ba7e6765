"""Replicas by what agents and gateways say: out, in, to zero and back, on a real API server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.core.scaling import sources
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
from shoal.kube.resources import DEPLOYMENTS, EVENTS, GPUCLASSES, MODELS, PODS
from shoal.runtime.operator import OperatorProcess
from tests.support.controlplane import Fleet
from tests.support.operators import (
    NAMESPACE,
    condition,
    eventually,
    model,
    model_with,
    running_operator,
    writes,
    writes_at_rest,
)
from tests.support.signals import QUIET, FakeSignals, ready_gateway
from tests.support.waiting import until_async

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
]

_FAST = {"idleSeconds": 2, "stabilizationSeconds": 1}


@contextlib.asynccontextmanager
async def scaling_operator(
    fleet: Fleet, signals: FakeSignals, *, client: KubeClient | None = None, identity: str = "test"
) -> AsyncGenerator[OperatorProcess]:
    """An operator that hears one gateway, and what the test says."""
    async with running_operator(
        client or fleet.client, fleet.kubeconfig, signals=signals, identity=identity
    ) as operator:
        signals.attach(operator)
        try:
            yield operator
        finally:
            signals.heard.remove(operator.signal_changed)


@pytest.fixture
async def signals(fleet: Fleet) -> FakeSignals:
    await ready_gateway(fleet)
    return FakeSignals()


async def uid_of(fleet: Fleet, name: str) -> str:
    return (await fleet.client.get(MODELS, name, fleet.namespace))["metadata"]["uid"]


async def replicas(fleet: Fleet, name: str) -> int | None:
    """Of a Deployment; None while there is none."""
    try:
        return (await fleet.client.get(DEPLOYMENTS, name, fleet.namespace))["spec"]["replicas"]
    except NotFound:
        return None


async def until_replicas(fleet: Fleet, name: str, wanted: int, *, seconds: float = 90) -> None:
    await eventually(
        lambda: replicas(fleet, name), lambda n: n == wanted, seconds=seconds, what=f"{name} with {wanted} replicas"
    )


async def at_zero(fleet: Fleet, name: str = "chat") -> JsonObject:
    return await model_with(fleet.client, fleet.namespace, name, "Ready", "True", reasons.SCALED_TO_ZERO)


async def engine_pods(fleet: Fleet) -> list[JsonObject]:
    pods = await fleet.all(PODS, namespace=fleet.namespace, label_selector=f"{names.LABEL_COMPONENT}=engine")
    return [p for p in pods if "deletionTimestamp" not in p["metadata"]]


async def test_a_new_model_starts_goes_to_zero_when_idle_and_wakes_when_asked(
    fleet: Fleet, signals: FakeSignals
) -> None:
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals):
        await fleet.apply(model("chat", ns, scaling=_FAST))
        await model_with(client, ns, "chat", "Ready", "True", reasons.REPLICAS_READY)
        asleep = await at_zero(fleet)
        assert condition(asleep, "Ready")["message"] == "no request for 2 s; the next one wakes class l4"
        assert asleep["status"]["replicas"] == {"desired": 0, "ready": 0}
        assert condition(asleep, "Placed")["status"] == "True"
        assert await replicas(fleet, "chat-l4") == 0  # the Deployment stays: it wakes faster

        fleet.kubelet.hold = True  # its engine takes its time
        signals.ask(await uid_of(fleet, "chat"))
        await until_replicas(fleet, "chat-l4", 1)
        waking = await model_with(client, ns, "chat", "Ready", "False", reasons.WAKING)
        assert condition(waking, "Ready")["message"].startswith("1 request held, 100 tokens; wakes class l4")
        assert waking["status"]["coldStartSeconds"] >= 0

        def scalings(events: list[JsonObject]) -> dict[str, str]:
            return {e["reason"]: e["note"].split(":")[0] for e in events if e.get("action") == "Scale"}

        events = await eventually(lambda: fleet.all(EVENTS, namespace=ns), lambda e: len(scalings(e)) > 1)
        assert scalings(events) == {reasons.SCALED_TO_ZERO: "1 -> 0", reasons.WAKING: "0 -> 1"}


async def test_load_scales_out_and_in_and_the_cheapest_loss_goes(fleet: Fleet, signals: FakeSignals) -> None:
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals):
        await fleet.apply(model("chat", ns, variants=[{"class": "h100"}], scaling=_FAST | {"maxReplicas": 3}))
        await model_with(client, ns, "chat", "Ready", "True")
        uid = await uid_of(fleet, "chat")
        signals.ask(uid, held=0, in_flight=20)
        signals.everything = replace(QUIET, running=10, waiting=14)
        signals.tell(uid)
        await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: m["status"]["replicas"] == {"desired": 3, "ready": 3},
            what="three replicas",
        )
        await model_with(client, ns, "chat", "Ready", "True", reasons.REPLICAS_READY)
        pods = sorted(await engine_pods(fleet), key=lambda p: p["metadata"]["name"])
        busy, least, most = (p["metadata"]["uid"] for p in pods)
        signals.everything = QUIET
        signals.loads = {
            busy: replace(QUIET, running=9),
            least: replace(QUIET, running=1),
            most: replace(QUIET, running=20),
        }
        signals.tell(uid)
        await until_replicas(fleet, "chat-h100", 1)
        left = await eventually(lambda: engine_pods(fleet), lambda found: len(found) == 1)
        assert left[0]["metadata"]["uid"] == most


async def test_nothing_goes_down_while_one_signal_source_is_silent(
    fleet: Fleet, signals: FakeSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "STEADY_SECONDS", 2.0)
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals) as operator:
        (gateway,) = await fleet.all(PODS, namespace=NAMESPACE)
        uid = (await fleet.apply(model("chat", ns, scaling=_FAST)))["metadata"]["uid"]
        signals.ask(uid, held=0, in_flight=1)  # until the gateway falls silent: else it may be at zero before
        await model_with(client, ns, "chat", "Ready", "True", reasons.REPLICAS_READY)
        signals.silent = {gateway["metadata"]["uid"]}
        signals.answered(uid)
        await asyncio.sleep(5)  # more than twice the idle time
        signals.tell()
        assert await replicas(fleet, "chat-l4") == 1
        stats = operator.history.model(f"{ns}/chat")
        assert stats is not None
        assert stats.stale == ("shoal-gateway-0",)
        assert stats.decisions[0].reason == reasons.SIGNALS_UNKNOWN
        told = await model_with(client, ns, "chat", reasons.SIGNALS_UNKNOWN, "True", reasons.SIGNALS_STALE)
        assert (
            condition(told, reasons.SIGNALS_UNKNOWN)["message"]
            == "no live signals from shoal-gateway-0: nothing scales down"
        )
        assert condition(told, "Ready")["status"] == "True"

        # Mutation: the gateway that is silent read as one that has nothing.
        signals.silent = set()
        signals.tell()
        await at_zero(fleet)
        await eventually(
            lambda: client.get(MODELS, "chat", ns),
            lambda m: not condition(m, reasons.SIGNALS_UNKNOWN),
            what="the condition taken back",
        )


async def test_another_operator_does_not_lower_what_it_finds(fleet: Fleet, signals: FakeSignals) -> None:
    client, ns = fleet.client, fleet.namespace
    scaling = {"idleSeconds": 2, "stabilizationSeconds": 600}
    async with scaling_operator(fleet, signals, identity="one"):
        made = await fleet.apply(model("chat", ns, variants=[{"class": "h100"}], scaling=scaling))
        uid = made["metadata"]["uid"]
        signals.ask(uid, held=0, in_flight=2)  # before it may go to zero
        await model_with(client, ns, "chat", "Ready", "True")
        signals.everything = replace(QUIET, running=10, waiting=8)
        signals.tell(uid)
        await until_replicas(fleet, "chat-h100", 2)
    signals.everything = QUIET
    async with scaling_operator(fleet, signals, identity="two") as operator:
        await until_async(lambda: operator.scaler.current(uid) is not None)
        await asyncio.sleep(4)
        assert await replicas(fleet, "chat-h100") == 2


async def test_without_a_free_gpu_it_says_so_and_comes_when_there_is_one(fleet: Fleet, signals: FakeSignals) -> None:
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals):
        for name in ("a", "b"):
            await fleet.apply(model(name, ns, variants=[{"class": "l4"}]))
            await model_with(client, ns, name, "Ready", "True")
        signals.ask(await uid_of(fleet, "a"), held=0, in_flight=1)
        signals.ask(await uid_of(fleet, "b"), held=0, in_flight=1)
        await fleet.apply(model("late", ns, variants=[{"class": "l4"}], scaling=_FAST))
        told = await model_with(client, ns, "late", "Ready", "False", reasons.NO_CAPACITY)
        assert "l4: 0 of 2 GPUs free" in condition(told, "Ready")["message"]
        await asyncio.sleep(4)  # longer than its idle time: a new Model still waits for its first replica
        await model_with(client, ns, "late", "Ready", "False", reasons.NO_CAPACITY)
        await client.delete(MODELS, "a", ns)
        await model_with(client, ns, "late", "Ready", "True", reasons.REPLICAS_READY)


async def test_a_model_is_woken_by_hand(fleet: Fleet, signals: FakeSignals) -> None:
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals) as operator:
        await fleet.apply(model("chat", ns, scaling=_FAST | {"idleSeconds": 5}))  # it may be heard of later
        await at_zero(fleet)
        annotations = {names.ANNOTATION_WAKE: operator.world.now().isoformat()}
        await client.merge_patch(MODELS, "chat", ns, {"metadata": {"annotations": annotations}}, manager="person")
        await until_replicas(fleet, "chat-l4", 1)
        await until_replicas(fleet, "chat-l4", 0)  # a request at that time, no more
        await at_zero(fleet)


async def test_a_fleet_at_zero_and_one_under_changing_load_cost_no_writes(fleet: Fleet, signals: FakeSignals) -> None:
    client, ns = fleet.client, fleet.namespace
    async with (
        await KubeClient.from_environment(kubeconfig=fleet.kubeconfig) as own,
        scaling_operator(fleet, signals, client=own) as operator,
    ):
        await fleet.apply(model("idle", ns, scaling=_FAST))
        await fleet.apply(model("busy", ns, variants=[{"class": "h100"}]))
        await at_zero(fleet, "idle")
        await model_with(client, ns, "busy", "Ready", "True")
        uid = await uid_of(fleet, "busy")
        before = await writes_at_rest(own)
        operator._compare_all()
        for i in range(40):
            signals.everything = replace(QUIET, running=i % 7, waiting=i % 3, kv_tokens_used=20 * i)
            signals.ask(uid, held=0, in_flight=i % 5)
            await asyncio.sleep(0.1)
        assert writes(own) == before


async def test_a_wake_does_not_wait_for_a_plan(
    fleet: Fleet, signals: FakeSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals) as operator:
        await fleet.apply(model("chat", ns, scaling=_FAST))
        await at_zero(fleet)
        with monkeypatch.context() as patch:
            patch.setattr(operator.planner, "_steps", lambda: iter(()))
            signals.ask(await uid_of(fleet, "chat"))
            await until_replicas(fleet, "chat-l4", 1)
            operator._compare_all()  # every reconcile carries out what was decided before: zero
            await asyncio.sleep(2)
            assert await replicas(fleet, "chat-l4") == 1
        operator.state.replan()
        await model_with(client, ns, "chat", "Ready", "True", reasons.REPLICAS_READY)


async def test_a_class_that_disappears_at_zero_leaves_the_model_to_the_next_one(
    fleet: Fleet, signals: FakeSignals
) -> None:
    client, ns = fleet.client, fleet.namespace
    async with scaling_operator(fleet, signals):
        await fleet.apply(model("chat", ns, scaling=_FAST))
        await fleet.apply(model("listed", ns, variants=[{"class": "l4"}], scaling=_FAST))
        for name in ("chat", "listed"):
            await at_zero(fleet, name)
        await fleet.apply(model("both", ns, variants=[{"class": "l4"}, {"class": "h100"}], scaling=_FAST))
        await at_zero(fleet, "both")
        await client.delete(GPUCLASSES, "l4")
        await model_with(client, ns, "listed", "Ready", "False", reasons.CLASS_NOT_FOUND)
        told = await model_with(client, ns, "both", "Accepted", "True", reasons.CLASS_NOT_FOUND)
        assert condition(told, "Accepted")["message"] == (
            "spec.variants: there is no GPUClass 'l4'; the others that are listed are used"
        )
        for name in ("chat", "listed", "both"):
            signals.ask(await uid_of(fleet, name))
        for name in ("chat", "both"):
            await until_replicas(fleet, f"{name}-h100", 1)
            await model_with(client, ns, name, "Ready", "True", reasons.REPLICAS_READY)
        assert await replicas(fleet, "listed-l4") == 0


async def test_an_engine_that_keeps_ending_sends_the_model_to_the_next_class_and_then_waits_for_a_person(
    fleet: Fleet, signals: FakeSignals
) -> None:
    client, ns = fleet.client, fleet.namespace
    fleet.kubelet.hold = True  # this test is the kubelet

    async def crash_on(gpu_class: str) -> None:
        async def bound() -> JsonObject | None:
            found = [p for p in await engine_pods(fleet) if p["metadata"]["labels"][names.LABEL_GPU_CLASS] == gpu_class]
            return found[0] if found and found[0]["spec"].get("nodeName") else None

        pod = await eventually(bound, bool, seconds=60, what=f"a pod on {gpu_class}")
        ended = {"exitCode": 1, "reason": "Error", "message": f"CUDA out of memory on {gpu_class}"}
        engine = {
            "name": "engine",
            "image": "i",
            "imageID": "",
            "ready": False,
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
        status = {"status": {"phase": "Running", "containerStatuses": [engine]}}
        where = (pod["metadata"]["name"], ns)
        await client.merge_patch(PODS, *where, status, manager="kubelet", subresource="status")

    async with scaling_operator(fleet, signals):
        await fleet.apply(model("chat", ns))
        await crash_on("l4")
        await crash_on("h100")
        told = await model_with(client, ns, "chat", "Stalled", "True", reasons.ENGINE_FAILED)
        assert "CUDA out of memory on h100" in condition(told, "Ready")["message"]

        def l4(obj: JsonObject) -> str:
            return next((v.get("excluded", "") for v in obj["status"]["variants"] if v["class"] == "l4"), "")

        await eventually(lambda: client.get(MODELS, "chat", ns), lambda m: "CUDA out of memory on l4" in l4(m))
    fleet.kubelet.hold = False
