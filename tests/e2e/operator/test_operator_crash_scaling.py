"""The operator is killed before and after each write of a wake and of the way back to zero: it always ends at the same
objects, and a request that waits is always served."""

import asyncio
import contextlib

import pytest

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.kube.resources import DEPLOYMENTS, MODELS, PODS
from shoal.runtime.operator import OperatorProcess
from tests.e2e.operator.test_operator_crash import _objects
from tests.support.controlplane import Fleet
from tests.support.mortal import Killed, MortalClient
from tests.support.operators import (
    CONFIG,
    NAMESPACE,
    condition,
    ends_as,
    eventually,
    model,
    running_operator,
    settled,
)
from tests.support.signals import FakeSignals, ready_gateway

pytestmark = [
    pytest.mark.lab,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

_SCALING = {"idleSeconds": 1, "stabilizationSeconds": 0}
_MOST_WRITES = 20


async def _engines(fleet: Fleet) -> list[JsonObject]:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    return await fleet.all(PODS, namespace=fleet.namespace, label_selector=selector)


async def _serves(fleet: Fleet) -> None:
    """Until a replica is Ready, whoever says so."""

    async def pods() -> int:
        return sum(condition(p, "Ready").get("status") == "True" for p in await _engines(fleet))

    await eventually(pods, bool, what="a replica")


async def _at_zero(fleet: Fleet) -> None:
    async def zero() -> bool:
        found = await fleet.client.get(MODELS, "chat", fleet.namespace)
        return condition(found, "Ready").get("reason") == reasons.SCALED_TO_ZERO and not await _engines(fleet)

    await eventually(zero, bool, what="zero replicas, and the status of them")


async def _left(fleet: Fleet) -> str:
    """An operator that finds a Model at zero has not seen for how long nobody asked, and does not say so."""
    return (await _objects(fleet)).replace("no request for 1 s;", "no request;")


async def _cycle(fleet: Fleet, signals: FakeSignals, uid: str) -> None:
    """A request at zero waits, is answered when there is a replica, and the Model goes back to zero."""
    signals.ask(uid)
    await _serves(fleet)
    signals.answered(uid)
    await _at_zero(fleet)


async def _cycle_with_a_mortal(
    fleet: Fleet, signals: FakeSignals, uid: str, die_at: int, undisturbed: str, *, after: bool
) -> bool:
    """Returns whether the operator died on the way; then another one finished it. All is as ever in the end."""
    client = await MortalClient.from_environment(kubeconfig=fleet.kubeconfig)
    client.die_at, client.after = die_at, after
    async with client:
        operator = OperatorProcess(
            client, CONFIG, NAMESPACE, identity="test", kubeconfig=fleet.kubeconfig, signals=signals
        )
        signals.attach(operator)
        running, cycle = asyncio.create_task(operator.run()), asyncio.create_task(_cycle(fleet, signals, uid))
        await asyncio.wait([running, cycle], return_when=asyncio.FIRST_COMPLETED)
        died = running.done()
        running.cancel()
        with contextlib.suppress(BaseExceptionGroup, asyncio.CancelledError, Killed):
            await running
        signals.heard.remove(operator.signal_changed)
    async with running_operator(fleet.client, fleet.kubeconfig, signals=signals) as other:
        signals.attach(other)
        await cycle
        await ends_as(lambda: _left(fleet), undisturbed, f"killed {'after' if after else 'before'} write {die_at}")
        signals.heard.remove(other.signal_changed)
    return died


async def test_killed_at_every_write_of_a_wake_and_of_the_way_back_it_ends_the_same(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controllers.artifacts.KEEP_SECONDS", 3600)  # the Job is one of the objects
    ns, signals = fleet.namespace, FakeSignals()
    await ready_gateway(fleet)
    await fleet.apply(model("chat", ns, variants=[{"class": "l4"}], scaling=_SCALING))
    async with running_operator(fleet.client, fleet.kubeconfig, signals=signals) as operator:
        signals.attach(operator)
        await _at_zero(fleet)
        uid = (await fleet.client.get(MODELS, "chat", ns))["metadata"]["uid"]
        await _cycle(fleet, signals, uid)
        undisturbed = await settled(lambda: _left(fleet))
        signals.heard.remove(operator.signal_changed)
    made = (await fleet.client.get(DEPLOYMENTS, "chat-l4", ns))["metadata"]["uid"]
    deaths = 0
    for after in (False, True):
        for k in range(1, _MOST_WRITES):
            died = await _cycle_with_a_mortal(fleet, signals, uid, k, undisturbed, after=after)
            deaths += died
            assert (await fleet.client.get(DEPLOYMENTS, "chat-l4", ns))["metadata"]["uid"] == made
            if not died:
                break
        else:
            pytest.fail(f"the operator wrote {_MOST_WRITES} times and was not done")
    # /scale to 1, statuses on the way to Ready, /scale to 0, the status at zero.
    assert deaths >= 2 * 4
