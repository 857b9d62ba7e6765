"""Models whose replicas KEDA writes: a stand-in of KEDA on a real API server, and the operator in this process."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator

import pytest

from shoal.api import names, reasons
from shoal.api.config import KEDA, Scaling
from shoal.api.meta import JsonObject
from shoal.kube.resources import DEPLOYMENTS, HPAS, MODELS, SCALEDOBJECTS
from shoal.runtime.operator import OperatorProcess
from tests.e2e.operator.test_operator_scaling import at_zero, replicas, uid_of, until_replicas
from tests.support.controlplane import Fleet
from tests.support.kedastandin import StandIn, install_keda_crds, remove_keda_crds
from tests.support.operators import CONFIG, condition, eventually, model, model_with, running_operator
from tests.support.signals import FakeSignals, ready_gateway

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(900),
]

_FAST = {"driver": "KEDA", "idleSeconds": 2, "stabilizationSeconds": 1}
_STEADY = {"driver": "KEDA", "minReplicas": 2, "idleSeconds": 600}
DRIVEN = CONFIG.model_copy(update={"scaling": Scaling(keda=KEDA(tls=False, polling_seconds=1))})


@pytest.fixture
async def signals(fleet: Fleet) -> FakeSignals:
    await ready_gateway(fleet)
    return FakeSignals()


@pytest.fixture
async def keda(fleet: Fleet) -> AsyncIterator[StandIn]:
    """Installed; not running yet."""
    await install_keda_crds(fleet.client)
    yield StandIn(fleet.client)
    await remove_keda_crds(fleet.client)


@contextlib.contextmanager
def impatient() -> Generator[None]:
    """A KEDA that does not poll for three seconds is silent. Only where that is waited for: whatever else there is
    to tell could be over before it is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.core.keda.verdict.SHORTEST_SILENCE_SECONDS", 1.0)
        patch.setattr("shoal.core.keda.verdict.HPA_SECONDS", 1.0)
        patch.setattr("shoal.controllers.keda.conditions.SWEEP_SECONDS", 0.5)
        yield


@contextlib.asynccontextmanager
async def operator(fleet: Fleet, signals: FakeSignals, keda: StandIn | None = None) -> AsyncGenerator[OperatorProcess]:
    async with running_operator(fleet.client, fleet.kubeconfig, config=DRIVEN, signals=signals) as running:
        signals.attach(running)
        if keda is not None:
            keda.answers = running.driver.targets
        try:
            yield running
        finally:
            if keda is not None:
                keda.answers = None
            signals.heard.remove(running.signal_changed)


@contextlib.asynccontextmanager
async def never_below(fleet: Fleet, name: str, least: int) -> AsyncGenerator[None]:
    """Follows a Deployment; fails when it is ever asked for fewer."""
    seen: list[int] = []
    live = await fleet.client.get(DEPLOYMENTS, name, fleet.namespace)

    async def look() -> None:
        async for event in fleet.client.watch(DEPLOYMENTS, live["metadata"]["resourceVersion"]):
            ours = event.object["metadata"].get("name") == name
            seen.extend([event.object["spec"]["replicas"]] if ours else [])

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert all(n >= least for n in seen), f"{name} went to {min(seen)}: {seen}"


async def scaled_object(fleet: Fleet, name: str = "chat-l4") -> JsonObject:
    return await fleet.client.get(SCALEDOBJECTS, name, fleet.namespace)


async def active(fleet: Fleet, status: str, reason: str, *, name: str = "chat") -> str:
    """Waits for the condition ScalingActive; its message."""
    found = await model_with(fleet.client, fleet.namespace, name, reasons.SCALING_ACTIVE, status, reason)
    return condition(found, reasons.SCALING_ACTIVE)["message"]


async def set_scaling(fleet: Fleet, scaling: JsonObject) -> None:
    await fleet.apply(model("chat", fleet.namespace, scaling=scaling))


async def owners(fleet: Fleet, name: str = "chat-l4") -> set[str]:
    live = await fleet.client.get(DEPLOYMENTS, name, fleet.namespace)
    return {
        m["manager"]
        for m in live["metadata"]["managedFields"]
        if "f:replicas" in m.get("fieldsV1", {}).get("f:spec", {})
    }


async def test_keda_starts_a_new_model_and_takes_it_to_zero_and_back(
    fleet: Fleet, signals: FakeSignals, keda: StandIn
) -> None:
    async with keda.running(), operator(fleet, signals, keda):
        await set_scaling(fleet, _FAST)
        await model_with(fleet.client, fleet.namespace, "chat", "Ready", "True", reasons.REPLICAS_READY)
        assert await active(fleet, "True", reasons.DRIVEN_BY_KEDA) == "KEDA and its HPA carry out what is decided"
        await at_zero(fleet)
        await until_replicas(fleet, "chat-l4", 0)
        assert (await scaled_object(fleet))["spec"]["minReplicaCount"] == 0

        signals.ask(await uid_of(fleet, "chat"))
        await until_replicas(fleet, "chat-l4", 1)
        await model_with(fleet.client, fleet.namespace, "chat", "Ready", "True", reasons.REPLICAS_READY)
        await eventually(
            lambda: scaled_object(fleet), lambda s: s["spec"]["minReplicaCount"] == 1, what="one is kept while wanted"
        )
        assert keda.written["chat-l4"][:3] == [1, 0, 1]
        assert names.MANAGER_SCALER not in await owners(fleet), "one writer: Shoal never wrote these replicas"


@pytest.mark.parametrize("tolerant", [False, True])
async def test_many_replicas_land_on_the_number(
    fleet: Fleet, signals: FakeSignals, keda: StandIn, tolerant: bool
) -> None:
    keda.tolerant = tolerant
    async with keda.running(), operator(fleet, signals, keda):
        for least in (1, 2, 7, 8, 5):
            scaling = {"driver": "KEDA", "minReplicas": least, "maxReplicas": least, "stabilizationSeconds": 1}
            await fleet.apply(model("chat", fleet.namespace, variants=[{"class": "h100"}], scaling=scaling))
            await until_replicas(fleet, "chat-h100", least)
    assert 0 not in keda.written["chat-h100"]


async def test_changing_the_driver_both_ways_never_lowers_replicas(
    fleet: Fleet, signals: FakeSignals, keda: StandIn
) -> None:
    builtin = _STEADY | {"driver": "BuiltIn"}
    async with operator(fleet, signals, keda):
        await set_scaling(fleet, builtin)
        await until_replicas(fleet, "chat-l4", 2)
        assert await owners(fleet) == {names.MANAGER_SCALER}
        async with never_below(fleet, "chat-l4", 2):
            await set_scaling(fleet, _STEADY)
            said = await active(fleet, "Unknown", reasons.SWITCHING_DRIVER)
            assert said == "waits for ScaledObject chat-l4 and its HPA; Shoal writes replicas until then"
            await set_scaling(fleet, _STEADY | {"maxReplicas": 3})
            await set_scaling(fleet, _STEADY)
            async with keda.running():
                await active(fleet, "True", reasons.DRIVEN_BY_KEDA)
            # KEDA's operator has stopped: its finalizer stays, and nobody may write.
            await set_scaling(fleet, builtin)
            with impatient():
                said = await active(fleet, "False", reasons.SWITCHING_DRIVER)
            assert "stays until KEDA's operator takes its finalizer off" in said
            assert f"kubectl patch scaledobject chat-l4 -n {fleet.namespace} --type merge" in said
            async with keda.running():
                await eventually(
                    lambda: fleet.client.get(MODELS, "chat", fleet.namespace),
                    lambda m: not condition(m, reasons.SCALING_ACTIVE),
                    what="nothing of KEDA is left",
                )
        await set_scaling(fleet, builtin | {"minReplicas": 1, "maxReplicas": 1, "stabilizationSeconds": 1})
        await until_replicas(fleet, "chat-l4", 1)
        assert await owners(fleet) == {names.MANAGER_SCALER}


async def test_without_keda_it_is_told_and_running_replicas_stay(fleet: Fleet, signals: FakeSignals) -> None:
    async with operator(fleet, signals) as running:
        await set_scaling(fleet, {"driver": "BuiltIn", "minReplicas": 2})
        await until_replicas(fleet, "chat-l4", 2)
        async with never_below(fleet, "chat-l4", 2):
            await set_scaling(fleet, _STEADY)
            assert "install KEDA" in await active(fleet, "False", reasons.KEDA_NOT_INSTALLED)
            assert running.unready() == []
        scaling = {"driver": "KEDA", "idleSeconds": 600}
        await fleet.apply(model("new", fleet.namespace, variants=[{"class": "h100"}], scaling=scaling))
        await active(fleet, "False", reasons.KEDA_NOT_INSTALLED, name="new")
        await until_replicas(fleet, "new-h100", 0)
        await install_keda_crds(fleet.client)
        standin = StandIn(fleet.client)
        standin.answers = running.driver.targets
        try:
            async with standin.running():  # it comes later, and is found without a restart
                await active(fleet, "True", reasons.DRIVEN_BY_KEDA, name="new")
                await until_replicas(fleet, "new-h100", 1)
        finally:
            await remove_keda_crds(fleet.client)


async def test_a_keda_that_is_silent_or_broken_is_told_and_replicas_stay(
    fleet: Fleet, signals: FakeSignals, keda: StandIn
) -> None:
    async with operator(fleet, signals, keda):
        await set_scaling(fleet, _STEADY)
        async with keda.running():
            await active(fleet, "True", reasons.DRIVEN_BY_KEDA)
            await until_replicas(fleet, "chat-l4", 2)
        async with never_below(fleet, "chat-l4", 2):
            with impatient():
                said = await active(fleet, "False", reasons.KEDA_NOT_POLLING)
            assert "Look whether its operator runs and reaches shoal-scaler.shoal-system.svc:9666" in said
            keda.metrics = False
            async with keda.running():
                said = await active(fleet, "False", reasons.METRICS_UNAVAILABLE)
                assert "kubectl get apiservice v1beta1.external.metrics.k8s.io" in said
                keda.metrics, keda.refusing = True, "no metric specs returned from scalers"
                said = await active(fleet, "False", reasons.SCALED_OBJECT_REFUSED)
                assert said.endswith("chat-l4: no metric specs returned from scalers")


async def test_a_scaled_object_changed_or_deleted_by_hand_is_put_right(
    fleet: Fleet, signals: FakeSignals, keda: StandIn
) -> None:
    client, ns = fleet.client, fleet.namespace
    async with keda.running(), operator(fleet, signals, keda):
        await set_scaling(fleet, _STEADY)
        await until_replicas(fleet, "chat-l4", 2)
        await active(fleet, "True", reasons.DRIVEN_BY_KEDA)
        async with never_below(fleet, "chat-l4", 2):
            before = await scaled_object(fleet)
            body = {"spec": {"minReplicaCount": 0, "cooldownPeriod": 77}}
            await client.merge_patch(SCALEDOBJECTS, "chat-l4", ns, body, manager="person")
            await eventually(
                lambda: scaled_object(fleet),
                lambda s: (s["spec"]["minReplicaCount"], s["spec"]["cooldownPeriod"]) == (2, 0),
                what="put right",
            )
            await client.delete(SCALEDOBJECTS, "chat-l4", ns)

            async def uid() -> str:
                found = await fleet.all(SCALEDOBJECTS, namespace=ns)
                return found[0]["metadata"]["uid"] if found else ""

            await eventually(uid, lambda now: now not in ("", before["metadata"]["uid"]), what="made again")
            await active(fleet, "True", reasons.DRIVEN_BY_KEDA)
            pause = {"metadata": {"annotations": {"autoscaling.keda.sh/paused": "true"}}}
            await client.merge_patch(SCALEDOBJECTS, "chat-l4", ns, pause, manager="person")
            said = await active(fleet, "False", reasons.SCALED_OBJECT_PAUSED)
            assert f"kubectl annotate scaledobject chat-l4 -n {ns} autoscaling.keda.sh/paused-" in said
            pause["metadata"]["annotations"]["autoscaling.keda.sh/paused"] = None  # type: ignore[assignment]
            await client.merge_patch(SCALEDOBJECTS, "chat-l4", ns, pause, manager="person")
            await active(fleet, "True", reasons.DRIVEN_BY_KEDA)
            await client.apply(HPAS, _other_hpa(ns), manager="person")
            said = await active(fleet, "False", reasons.OTHER_AUTOSCALER)
            assert said.startswith("HorizontalPodAutoscaler mine scales Deployment chat-l4 too")
            await client.delete(HPAS, "mine", ns)
            await active(fleet, "True", reasons.DRIVEN_BY_KEDA)


def _other_hpa(namespace: str) -> JsonObject:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "mine", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-l4"},
            "maxReplicas": 3,
        },
    }


async def test_a_keda_too_old_for_the_scaled_object_is_told(fleet: Fleet, signals: FakeSignals) -> None:
    await install_keda_crds(fleet.client, without="initialCooldownPeriod")
    try:
        async with operator(fleet, signals):
            await set_scaling(fleet, _FAST)
            said = await active(fleet, "False", reasons.SCALED_OBJECT_REFUSED)
            assert "initialCooldownPeriod" in said
            assert "KEDA 2.18 or later is needed" in said
    finally:
        await remove_keda_crds(fleet.client)


@pytest.mark.parametrize(("priority", "reason"), [(0, reasons.NO_CAPACITY), (-1, reasons.OUTRANKED)])
async def test_what_keda_was_told_and_did_not_write_yet_holds_its_gpus(
    fleet: Fleet, signals: FakeSignals, keda: StandIn, priority: int, reason: str
) -> None:
    """Two GPUs; the first Model was promised both while its HPA has not looked yet. The second gets none of them."""
    async with keda.running(), operator(fleet, signals, keda) as running:
        await set_scaling(fleet, {"driver": "KEDA", "minReplicas": 1})
        await until_replicas(fleet, "chat-l4", 1)
        keda.slow.set()
        await set_scaling(fleet, {"driver": "KEDA", "minReplicas": 2})
        await eventually(_number(running, fleet, "chat-l4"), lambda n: n == 2, what="two are answered")
        assert await replicas(fleet, "chat-l4") == 1
        await asyncio.sleep(1)  # the older of two goes first, and of one second the one that the uid puts first
        scaling = {"minReplicas": 1}
        await fleet.apply(
            model("late", fleet.namespace, variants=[{"class": "l4"}], scaling=scaling, priority=priority)
        )
        await model_with(fleet.client, fleet.namespace, "late", "Placed", "False", reason)
        assert not await replicas(fleet, "late-l4")
        keda.slow.clear()
        await until_replicas(fleet, "chat-l4", 2)


def _number(running: OperatorProcess, fleet: Fleet, name: str) -> Callable[[], object]:
    async def read() -> int | None:
        return running.driver.targets.number((fleet.namespace, name))

    return read
