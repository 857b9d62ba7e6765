"""Shoal with one protection switched off: a storm that finds nothing then proves nothing.

`tests/storm/bin/shoal` runs this in the lab's containers instead of `shoal`, when the storm was started with
`--mutation`. Each mutation changes a pure function before any process loads it, and then the real entry point runs.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

ENVIRONMENT: Final = "SHOAL_STORM_MUTATION"
HURRY: Final = "SHOAL_STORM_HURRY"
"""Not empty: the operator takes less time to judge GPUs, and waits less from one node that it empties to the next. No
protection is off."""


def no_drain() -> None:
    """An engine is stopped as soon as its pod is deleted, and gateways do not turn away from it before."""
    from shoal.core import drain

    def at_once(_state: drain.DrainState, _now: float) -> drain.Stop:
        return drain.Stop("idle", "mutation: nobody is waited for")

    drain.decide = at_once
    _never_turn_away()


def no_ack() -> None:
    """Gateways say that they turned away and do not, and the agent takes their silence for a yes."""
    from shoal.core import drain

    real = drain.decide

    def without_claims(state: drain.DrainState, now: float) -> drain.Wait | drain.Stop:
        return real(replace(state, gateways=()), now)

    drain.decide = without_claims
    _never_turn_away()


def unknown_is_zero() -> None:
    """The decider reads what it does not know as nothing: no load, no demand."""
    from shoal.core import scaling
    from shoal.core.scaling import types

    real = scaling.decide
    arrivals: dict[str, int] = {}

    def load(known: types.Load | None) -> types.Load:
        known = known or types.Load(phase="ready")
        zero = dict.fromkeys(("running", "waiting", "waiting_tokens", "kv_tokens_used"), 0)
        return replace(known, **{name: value for name, value in zero.items() if getattr(known, name) is None})

    def source(known: types.SignalSource) -> types.SignalSource:
        if known.demand is not None:
            arrivals[known.name] = known.demand.arrivals
            return known
        return replace(known, demand=types.Demand(arrivals.get(known.name, 0), 0, 0, 0, 0.0))

    def decide(snapshot: types.ModelSnapshot, memory: types.ScalingMemory | None, now: float) -> Any:
        known = replace(
            snapshot,
            replicas=tuple(replace(r, load=load(r.load)) for r in snapshot.replicas),
            sources=tuple(source(v) for v in snapshot.sources or ()),
        )
        return real(known, memory, now)

    scaling.decide = decide


def no_lora_path() -> None:
    """A request for an adapter goes to the engine without the adapter's name."""
    from shoal.gateway import adaptertarget

    target: Any = adaptertarget.AdapterTarget
    target.adapter_name = None


def no_retry() -> None:
    """What a replica could not take is its client's problem: no other one is asked."""
    from shoal.gateway import dispatch
    from shoal.net.errors import ApiError

    real = dispatch.Dispatch._attempt

    async def once(self: dispatch.Dispatch, replica: Any) -> None:
        try:
            await real(self, replica)
        except dispatch.Retry as retry:
            raise ApiError(502, f"mutation: {retry.reason}", "replica_lost") from None

    dispatch.Dispatch._attempt = once


def sends_again() -> None:
    """A gateway forgets that something of an answer is out, and asks another replica when the rest does not come."""
    from shoal.gateway.relay import AnswerRelay

    forgotten: Any = property(lambda _self: False, lambda _self, _value: None)
    AnswerRelay.answering = forgotten


def no_halt() -> None:
    """A gateway does not see how the requests to a canary ended."""
    from shoal.gateway.canaries import Canaries

    Canaries.ended = lambda self, canary, meter, *, doubtful=False: None


def keeps_model() -> None:
    """The record of a request that went to a fallback names the Model that it left."""
    from shoal.metering.meter import Meter

    def reroute(self: Meter, model: Any) -> None:
        del model
        self.forget_counts()
        self.outcome = self.status = None

    Meter.reroute = reroute


def keeps_dear() -> None:
    """The record of a request that went to a cheaper fallback names the target that was too dear."""
    from shoal.gateway.preparation import Preparation

    real = Preparation._count

    def count(self: Preparation, identity: Any, asked: Any, model: Any, routed: Any, *, resumed: bool) -> None:
        if routed is None or routed.role != "fallback":
            real(self, identity, asked, model, routed, resumed=resumed)

    Preparation._count = count


def bills_copies() -> None:
    """The copy for a mirror is recorded as a request that its tenant pays for."""
    from shoal.metering.meter import Meter

    real = Meter.attempt_row
    Meter.attempt_row = lambda self: self.final_row() if "mirrorOf" in self._base else real(self)


def no_close_open() -> None:
    """A gateway does not close what a killed one left open in its spool."""
    from shoal.metering import spoolfile

    spoolfile.SpoolFile._close_open_rows = lambda self: 0


def early_mark() -> None:
    """A gateway marks a batch as shipped before the ledger has answered."""
    from shoal.metering.shipper import NotTaken, Shipper

    async def ship(self: Shipper, session: Any, batch: Any, compressed: bytes) -> None:
        self._shipped = batch.last
        self._spool.mark(batch.last)
        try:
            await self._send(session, compressed or batch.body, compressed=bool(compressed))
        except NotTaken as error:
            self._failed(str(error))

    Shipper._ship = ship


def no_dedupe() -> None:
    """The ledger takes each record for a new one."""
    from shoal.ledger import bulk, schema

    real = bulk.insert

    def insert(connection: Any, table: Any, rows: Any, clause: str) -> Any:
        found = real(connection, table, rows, clause)
        return [SimpleNamespace(source=row[0], id=row[1]) for row in rows] if table is schema.records else found

    bulk.insert = insert
    bulk.select = lambda *_: []


def no_share() -> None:
    """Every GPU that is said to be sick is taken out of use, however many are."""
    _set("shoal.core.health.decide", SHARE_PERCENT=100)


def no_replacement() -> None:
    """A replica on a sick GPU goes at once, and another one comes later."""
    from shoal.controllers.children.replicas import ScaleWriter
    from shoal.controllers.replicastates import is_sick
    from shoal.core.goesfirst import GOES_FIRST

    real = ScaleWriter.scale

    async def scale(self: ScaleWriter, model: Any, gpu_class: str, target: Callable[[], int]) -> int:
        found = [p for p in self._world.pods.by("model", model.metadata.uid) if p.gpu_class == gpu_class]
        serving = [p for p in found if not p.deleting and not p.finished]
        sick = [p for p in serving if is_sick(self._world, p)]
        for pod in sick:
            await self._mark(pod, GOES_FIRST)
        return await real(self, model, gpu_class, (lambda: len(serving) - len(sick)) if sick else target)

    ScaleWriter.scale = scale


def no_coming() -> None:
    """Placement counts no nodes that an autoscaler would add, so nothing is pending and none comes."""
    from shoal.core import candidates

    real = candidates.supplies

    def supplies(*args: Any, **kwargs: Any) -> Any:
        return tuple(replace(supply, coming=0) for supply in real(*args, **kwargs))

    candidates.supplies = supplies


def moves_busy() -> None:
    """For consolidation no replica has a request, whatever its engine says."""
    from shoal.controllers import consolidation

    real = consolidation.decide

    def decide(seen: Any, memory: Any, now: Any) -> Any:
        def resting(replica: Any) -> Any:
            zero = {"running": 0, "waiting": 0, "prompt_tokens_total": 0, "generation_tokens_total": 0}
            model = replace(replica.model, held=0)
            return replace(replica, model=model, load=replica.load and replace(replica.load, **zero))

        nodes = tuple(replace(n, replicas=tuple(map(resting, n.replicas))) for n in seen.nodes)
        return real(replace(seen, nodes=nodes), memory, now)

    consolidation.decide = decide


def hurry() -> None:
    """Windows and rounds that a storm can wait for; what counts as slow, garbled, healed or at rest stays as it is."""
    _set("shoal.core.health.decide", HOLD_SECONDS=15.0, OWN_WORD_SECONDS=15.0, LONGEST_HOLD_SECONDS=30.0, FADES=0.5)
    _set("shoal.core.health.slow", WINDOW_SECONDS=10.0, WINDOWS=3, LEAST_TOKENS=20)
    _set("shoal.controllers.healthprobes", ROUND_SECONDS=10.0, TEST_SECONDS=5.0)
    _set("shoal.core.consolidation.decide", REST_SECONDS=10.0, GIVEN_BACK_REST_SECONDS=10.0)


def _set(module: str, **values: float) -> None:
    """Constants of a module. (Some packages export a function of the same name.) Raises AttributeError where one is
    not there any more."""
    found = importlib.import_module(module)
    for name, value in values.items():
        getattr(found, name)
        setattr(found, name, value)


def _never_turn_away() -> None:
    """Neither at `draining` nor at the pod's deletion."""
    from shoal.core.routing import choice
    from shoal.gateway import directory

    choice._TURNED_AWAY = frozenset({"stalled"})  # pyright: ignore[reportAttributeAccessIssue]
    real = directory.project_pod

    def project_pod(obj: dict[str, Any]) -> choice.Replica | None:
        found = real(obj)
        return None if found is None else replace(found, deleting=False)

    directory.project_pod = project_pod


MUTATIONS: Final[dict[str, Callable[[], None]]] = {
    "no-drain": no_drain,
    "no-ack": no_ack,
    "unknown-is-zero": unknown_is_zero,
    "no-lora-path": no_lora_path,
    "no-retry": no_retry,
    "sends-again": sends_again,
    "no-halt": no_halt,
    "keeps-model": keeps_model,
    "keeps-dear": keeps_dear,
    "bills-copies": bills_copies,
    "early-mark": early_mark,
    "no-close-open": no_close_open,
    "no-dedupe": no_dedupe,
    "no-share": no_share,
    "no-replacement": no_replacement,
    "no-coming": no_coming,
    "moves-busy": moves_busy,
}


def main() -> None:
    if os.environ.get(HURRY) and "operator" in sys.argv[1:2]:  # others would only start later
        hurry()
    if mutation := os.environ.get(ENVIRONMENT):
        MUTATIONS[mutation]()
    from shoal.cli.main import main as shoal

    shoal()


if __name__ == "__main__":
    main()
