"""Decides how many replicas each Model has: when a signal or an object changed, or when a decision is due.

A decision is a short computation without I/O, so that two of one Model never overlap; nothing runs while nothing
changes. The planner reads the number; only the way from zero goes ahead of it.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import prometheus_client
import structlog

from shoal.api import reasons
from shoal.api.model import Model
from shoal.controllers.isolation import internal_error
from shoal.controllers.scaling.history import enter
from shoal.controllers.scaling.observe import ModelObserver
from shoal.controllers.scaling.stalesignals import StaleSignals
from shoal.controllers.scaling.wake import Waker
from shoal.controllers.state import FleetState, ScalingRecord
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.scaling import ScalingDecision, decide, describe_stale
from shoal.core.status import modelstatus
from shoal.kube.events import Event
from shoal.kube.projections import Child, Custom
from shoal.kube.resources import MODELS

log = structlog.get_logger()

PACE_SECONDS: Final = 1.0
"""Between two decisions of a Model that has replicas, where nothing urgent happened."""
_BATCH: Final = 20
"""Decisions in a row, before others get a turn."""
DECISIONS = prometheus_client.Counter(
    "shoal_scaling_decisions", "Scaling decisions by outcome: up, down, same, error.", ["outcome"]
)
SECONDS = prometheus_client.Histogram(
    "shoal_scaling_decision_seconds",
    "Duration of one scaling decision.",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1),
)


class Scaler:
    """`run` while this operator leads. What it decides stands in the Models' records."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        observer: ModelObserver,
        waker: Waker,
        stale_signals: StaleSignals,
        notify: Callable[[str, float], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notify` is called with the key of a Model whose status must change, and the delay in seconds that its
        reconcile may have."""
        self._world, self._state, self._observer, self._waker = world, state, observer, waker
        self._stale_signals, self._notify, self._clock = stale_signals, notify, clock
        self._urgent: OrderedDict[str, None] = OrderedDict()
        self._dirty: OrderedDict[str, None] = OrderedDict()
        self._some = asyncio.Event()
        self._term_began = clock()
        self._leads = False
        self.decided: list[Callable[[Model, ScalingDecision, int], None]] = []
        """Called with a decision that changes the number, and the number before."""

    # --- what is read -----------------------------------------------------------------------------------------------

    def wanted(self, model: Model) -> int:
        """Replicas that the Model is to have. Decides where nothing was decided in this term."""
        scaling = self._state.record(model.metadata.uid).scaling
        if scaling is None:
            if not self._leads:
                return modelstatus.first_wanted(model)
            scaling = self._decide(model)
        return scaling.wanted

    def current(self, model_uid: str) -> int | None:
        """Replicas that were decided for in this term; None: nothing was yet."""
        scaling = self._state.record(model_uid).scaling
        return scaling.wanted if scaling is not None else None

    # --- what wakes it ----------------------------------------------------------------------------------------------

    def changed(self, model_uid: str | None, urgent: bool) -> None:
        """The signals of a Model changed, or with None perhaps those of every Model."""
        if not self._leads:
            return
        if model_uid is None:
            for uid, record in self._state.records():
                if record.scaling is not None:
                    self._dirty[uid] = None
            self._some.set()
            return
        scaling = self._state.record(model_uid).scaling
        if scaling is None:
            return  # the planner asks for the first decision
        if urgent or not scaling.wanted:
            self._urgent[model_uid] = None
            self._some.set()
        elif (left := scaling.at + PACE_SECONDS - self._clock()) <= 0:
            self._dirty[model_uid] = None
            self._some.set()
        else:
            self._schedule(model_uid, scaling, left)

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is None or after is None or before.object is None or after.object is None:
            return
        was, now = before.object, after.object
        if was.spec.scaling != now.spec.scaling or was.metadata.annotations != now.metadata.annotations:
            self.changed(now.metadata.uid, True)

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        pod = after or before
        if pod is None or (not pod.gateway and pod.model_uid is None):
            return
        one, other = (
            None if p is None else (p.uid, p.model_uid, p.ready, p.was_ready, p.deleting) for p in (before, after)
        )
        if one == other:
            return
        if pod.gateway:
            if pod.namespace == self._world.namespace:
                self.changed(None, False)
        elif pod.model_uid is not None:
            self.changed(pod.model_uid, False)

    def on_deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        found = after or before
        if found is not None and _size(before) != _size(after):
            self.changed(found.model_uid, False)

    # --- deciding ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decides until cancelled. Each run is a term: what an earlier one remembered is not trusted."""
        for _, record in self._state.records():
            record.close_scaling()
        self._term_began = self._clock()
        self._leads = True
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                await self._work_off()
        finally:
            self._leads = False
            self._stale_signals.clear()
            for _, record in self._state.records():
                if record.scaling is not None:
                    record.scaling.close()

    async def _work_off(self) -> None:
        done = 0
        while self._urgent or self._dirty:
            uid, _ = (self._urgent or self._dirty).popitem(last=False)
            self._dirty.pop(uid, None)
            record = self._state.record(uid)
            if record.request is not None and record.scaling is not None:
                custom = self._world.model_by_uid(uid)
                if custom is not None and custom.object is not None:
                    try:
                        self._decide(custom.object)
                    except Exception as error:
                        log.exception("a listener failed on a scaling decision", model=custom.object.key)
                        self._fail(custom.object, error)
            done += 1
            if done % _BATCH == 0:
                await asyncio.sleep(0)

    def _decide(self, model: Model) -> ScalingRecord:
        uid, now = model.metadata.uid, self._clock()
        record = self._state.record(uid)
        scaling = record.scaling
        known = scaling.wanted if scaling is not None else None
        begin = time.perf_counter()
        try:
            snapshot = self._observer.snapshot(model, wanted=known, term_began=self._term_began)
            decision, memory = decide(snapshot, scaling.memory if scaling is not None else None, now)
        except Exception as error:
            # One Model that cannot be decided keeps what it has, and must not end the operator.
            log.exception("no decision on replicas; what there is stays", model=model.key)
            DECISIONS.labels("error").inc()
            self._fail(model, error)
            if scaling is None:
                scaling = record.scaling = ScalingRecord(self._observer.replicas(uid), at=now)
            return scaling
        SECONDS.observe(time.perf_counter() - begin)
        if record.scaling_failure is not None:
            record.scaling_failure = None
            self._notify(model.key, 0.0)
        if scaling is None:
            scaling = record.scaling = ScalingRecord(snapshot.wanted)
        before, scaling.wanted, scaling.memory, scaling.at = scaling.wanted, decision.wanted, memory, now
        enter(record.history, decision, self._world.now())
        if known is None and snapshot.new:
            before = decision.wanted  # a Model that was just made: its status tells that it starts
        self._publish(model, scaling, decision, before)
        scaling.close()
        if decision.recheck_seconds is not None:
            self._schedule(uid, scaling, decision.recheck_seconds)
        self._stale_signals.update(model, describe_stale(decision, snapshot.policy))
        return scaling

    def _fail(self, model: Model, error: Exception) -> None:
        record = self._state.record(model.metadata.uid)
        problem = internal_error(error, "on the number of this Model's replicas")
        if record.scaling_failure != problem:
            record.scaling_failure = problem
            self._notify(model.key, 0.0)

    def _publish(self, model: Model, scaling: ScalingRecord, decision: ScalingDecision, before: int) -> None:
        uid = model.metadata.uid
        if decision.wanted == before:
            DECISIONS.labels("same").inc()
            serving = sum(p.ready and not p.deleting for p in self._world.pods.by("model", uid))
            if scaling.wanted and serving >= scaling.wanted:
                scaling.decision = None  # the decision is published and carried out
            elif not scaling.wanted and scaling.decision is None:
                scaling.decision = decision
            return
        DECISIONS.labels("up" if decision.wanted > before else "down").inc()
        log.info(
            "replicas", model=model.key, before=before, wanted=decision.wanted, reason=decision.reason,
            message=decision.message,
        )  # fmt: skip
        scaling.decision = decision
        for listener in self.decided:
            listener(model, decision, before)
        # The first decision of a term is asked for by the plan that is made just now.
        woken = not before and bool(decision.wanted) and self._waker.begin(model, decision.wanted)
        self._state.replan(hurry=not woken and not before)
        custom = self._world.model_by_uid(uid)
        if custom is not None:
            note = f"{before} -> {decision.wanted}: {decision.message}"
            kind = "Warning" if decision.reason in (reasons.SIGNALS_UNKNOWN, reasons.NO_CAPACITY) else "Normal"
            self._world.recorder.emit(Event(MODELS, custom.metadata, kind, decision.reason, note, "Scale"))

    def _schedule(self, uid: str, scaling: ScalingRecord, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        if scaling.timer is not None and scaling.timer.when() <= due:
            return
        scaling.close()
        scaling.timer = loop.call_at(due, self._due, uid)

    def _due(self, uid: str) -> None:
        scaling = self._state.record(uid).scaling
        if scaling is not None:
            scaling.timer = None
            self._dirty[uid] = None
            self._some.set()


def _size(child: Child | None) -> tuple[int, bool] | None:
    found = child.deployment if child is not None else None
    return None if found is None else (found.replicas, found.rolled_out)
