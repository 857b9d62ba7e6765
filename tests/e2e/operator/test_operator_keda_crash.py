"""A Model driven by KEDA: the operator is killed before and after each write of a wake and of the way back to zero, and
it always ends at the same objects. And where nothing happens nothing is written."""

import asyncio
import contextlib
import json

import pytest

from shoal.kube.client import KubeClient
from shoal.kube.resources import MODELS, SCALEDOBJECTS
from shoal.runtime.operator import OperatorProcess
from shoal.runtime.scaler import ScalerPlace
from tests.e2e.operator.test_operator_crash import _objects
from tests.e2e.operator.test_operator_crash_scaling import _at_zero, _cycle
from tests.e2e.operator.test_operator_keda import DRIVEN, keda, operator, signals
from tests.e2e.operator.test_operator_scaling import at_zero
from tests.support.controlplane import Fleet
from tests.support.kedastandin import StandIn
from tests.support.mortal import Killed, MortalClient
from tests.support.operators import (
    NAMESPACE,
    ends_as,
    model,
    model_with,
    running_operator,
    settled,
    writes,
    writes_at_rest,
)
from tests.support.signals import FakeSignals

__all__ = ["keda", "signals"]

pytestmark = [
    pytest.mark.lab,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

_SCALING = {"driver": "KEDA", "idleSeconds": 1, "stabilizationSeconds": 0}
_MOST_WRITES = 20
_QUIET_SECONDS = 12.0


async def _left(fleet: Fleet) -> str:
    found = (await _objects(fleet)).replace("no request for 1 s;", "no request;")
    scaled = await fleet.client.get(SCALEDOBJECTS, "chat-l4", fleet.namespace)
    return found + json.dumps(scaled["spec"], indent=1)


async def _cycle_with_a_mortal(
    fleet: Fleet, signals: FakeSignals, keda: StandIn, uid: str, die_at: int, undisturbed: str, *, after: bool
) -> bool:
    """Returns whether the operator died on the way; then another one finished it. All is as ever in the end."""
    client = await MortalClient.from_environment(kubeconfig=fleet.kubeconfig)
    client.die_at, client.after = die_at, after
    async with client:
        mortal = OperatorProcess(
            client, DRIVEN, NAMESPACE, identity="test", kubeconfig=fleet.kubeconfig, signals=signals,
            scaler=ScalerPlace(port=0),
        )  # fmt: skip
        signals.attach(mortal)
        keda.answers = mortal.driver.targets
        running, cycle = asyncio.create_task(mortal.run()), asyncio.create_task(_cycle(fleet, signals, uid))
        await asyncio.wait([running, cycle], return_when=asyncio.FIRST_COMPLETED)
        died, keda.answers = running.done(), None
        running.cancel()
        with contextlib.suppress(BaseExceptionGroup, asyncio.CancelledError, Killed):
            await running
        signals.heard.remove(mortal.signal_changed)
    async with operator(fleet, signals, keda):
        await cycle
        await ends_as(lambda: _left(fleet), undisturbed, f"killed {'after' if after else 'before'} write {die_at}")
    return died


async def test_killed_at_every_write_with_keda_it_ends_the_same(
    fleet: Fleet, signals: FakeSignals, keda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.controllers.artifacts.KEEP_SECONDS", 3600)  # the Job is one of the objects
    ns = fleet.namespace
    async with keda.running():
        await fleet.apply(model("chat", ns, variants=[{"class": "l4"}], scaling=_SCALING))
        async with operator(fleet, signals, keda):
            await _at_zero(fleet)
            uid = (await fleet.client.get(MODELS, "chat", ns))["metadata"]["uid"]
            await _cycle(fleet, signals, uid)
            undisturbed = await settled(lambda: _left(fleet))
        deaths = 0
        for after in (False, True):
            for k in range(1, _MOST_WRITES):
                died = await _cycle_with_a_mortal(fleet, signals, keda, uid, k, undisturbed, after=after)
                deaths += died
                if not died:
                    break
            else:
                pytest.fail(f"the operator wrote {_MOST_WRITES} times and was not done")
        # The ScaledObject's minimum up and down, statuses on the way to Ready, the status at zero.
        assert deaths >= 2 * 4


async def test_a_quiet_fleet_with_keda_costs_no_write(fleet: Fleet, signals: FakeSignals, keda: StandIn) -> None:
    """Neither where replicas stand nor at zero. KEDA looks all the while."""
    ns = fleet.namespace
    own = await KubeClient.from_environment(kubeconfig=fleet.kubeconfig)
    async with own, keda.running(), running_operator(own, fleet.kubeconfig, config=DRIVEN, signals=signals) as running:
        signals.attach(running)
        keda.answers = running.driver.targets
        kept = {"driver": "KEDA", "minReplicas": 2}
        await fleet.apply(model("kept", ns, variants=[{"class": "h100"}], scaling=kept))
        await fleet.apply(model("chat", ns, variants=[{"class": "l4"}], scaling=_SCALING))
        await model_with(fleet.client, ns, "kept", "Ready", "True")
        await at_zero(fleet)
        before = await writes_at_rest(own)
        await asyncio.sleep(_QUIET_SECONDS)
        assert writes(own) == before
        keda.answers = None
        signals.heard.remove(running.signal_changed)
