"""Decides how many replicas each Model has: when something that is heard or seen of it changed, or when it is due.

A decision is a short computation without I/O, so that two of one Model never overlap; nothing runs while nothing
changes. The planner reads the number; only the way from zero goes ahead of it.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import prometheus_client
import structlog

from shoal.api import reasons
from shoal.api.model import Model
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.isolation import internal_error
from shoal.controllers.planner import Planner
from shoal.controllers.scaling.history import DecisionHistory
from shoal.controllers.scaling.observe import ModelObserver, Past, no_past
from shoal.controllers.scaling.signals import ScalingSignals
from shoal.controllers.scaling.stalesignals import StaleSignals
from shoal.controllers.scaling.wake import Waker
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.scaling import ScalingDecision, ScalingMemory, decide, describe_stale
from shoal.core.status import modelstatus
from shoal.core.status.observed import ModelProblem
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


@dataclass(slots=True)
class _State:
    """One Model in this term."""

    wanted: int
    decision: ScalingDecision | None = None
    """The last one that changed the number, until that number serves."""
    memory: ScalingMemory | None = None
    at: float = float("-inf")
    """When it was decided last."""
    timer: asyncio.TimerHandle | None = None


class Scaler:
    """`run` while this operator leads; `wanted` is what the planner asks."""

    def __init__(
        self,
        world: World,
        planner: Planner,
        cold: ColdStarts,
        signals: ScalingSignals,
        waker: Waker,
        *,
        past: Past = no_past,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._planner, self._waker, self._clock = world, planner, waker, clock
        self._observer = ModelObserver(world, planner, cold, signals, clock, past)
        self.history = DecisionHistory(world, planner, signals)
        self.stale_signals = StaleSignals(clock)
        self._states: dict[str, _State] = {}
        self._failed: dict[str, ModelProblem] = {}
        self._urgent: OrderedDict[str, None] = OrderedDict()
        self._dirty: OrderedDict[str, None] = OrderedDict()
        self._some = asyncio.Event()
        self._term_began = clock()
        self._leads = False
        self.decided: list[Callable[[Model, ScalingDecision, int], None]] = []
        """Heard with a decision that changes the number, and the number before."""
        planner.wanted = self.wanted
        world.models.listeners.append(self._model)
        world.pods.listeners.append(self._pod)
        world.deployments.listeners.append(self._deployment)

    # --- what is read -----------------------------------------------------------------------------------------------

    def wanted(self, model: Model) -> int:
        """Replicas that the Model is to have."""
        state = self._states.get(model.metadata.uid)
        if state is None:
            if not self._leads:
                return modelstatus.first_wanted(model)
            state = self._decide(model)
        return state.wanted

    def current(self, model_uid: str) -> int | None:
        """Replicas that were decided for in this term; None: nothing was yet."""
        state = self._states.get(model_uid)
        return state.wanted if state is not None else None

    def decision(self, model_uid: str) -> ScalingDecision | None:
        """The decision that changed the number last, while that number does not serve yet; at zero, why it is zero."""
        state = self._states.get(model_uid)
        return state.decision if state is not None else None

    def failed(self, model_uid: str) -> ModelProblem | None:
        """Why there is no decision on the Model's replicas, which stay as many as they are; None: there is one."""
        return self._failed.get(model_uid)

    # --- what wakes it ----------------------------------------------------------------------------------------------

    def changed(self, model_uid: str | None, urgent: bool) -> None:
        """Something else is heard of a Model, or with None perhaps of every Model."""
        if not self._leads:
            return
        if model_uid is None:
            for uid in self._states:
                self._dirty[uid] = None
            self._some.set()
            return
        state = self._states.get(model_uid)
        if state is None:
            return  # the planner asks for the first decision
        if urgent or not state.wanted:
            self._urgent[model_uid] = None
            self._some.set()
        elif (left := state.at + PACE_SECONDS - self._clock()) <= 0:
            self._dirty[model_uid] = None
            self._some.set()
        else:
            self._schedule(model_uid, state, left)

    def _model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is not None and (after is None or after.metadata.uid != before.metadata.uid):
            self._forget(before.metadata.uid)
        if before is None or after is None or before.object is None or after.object is None:
            return
        was, now = before.object, after.object
        if was.spec.scaling != now.spec.scaling or was.metadata.annotations != now.metadata.annotations:
            self.changed(now.metadata.uid, True)

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
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

    def _deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        found = after or before
        if found is not None and _size(before) != _size(after):
            self.changed(found.model_uid, False)

    def _forget(self, uid: str) -> None:
        state = self._states.pop(uid, None)
        if state is not None and state.timer is not None:
            state.timer.cancel()
        self._dirty.pop(uid, None)
        self._urgent.pop(uid, None)
        self._failed.pop(uid, None)
        self.history.forget(uid)
        self.stale_signals.forget(uid)

    # --- deciding ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decides until cancelled. Each run is a term: what an earlier one remembered is not trusted."""
        for uid in list(self._states):
            self._forget(uid)
        self.history.clear()
        self._term_began = self._clock()
        self._leads = True
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                await self._work_off()
        finally:
            self._leads = False
            self.stale_signals.clear()
            for state in self._states.values():
                if state.timer is not None:
                    state.timer.cancel()
                    state.timer = None

    async def _work_off(self) -> None:
        done = 0
        while self._urgent or self._dirty:
            uid, _ = (self._urgent or self._dirty).popitem(last=False)
            self._dirty.pop(uid, None)
            request = self._planner.request(uid)
            if request is not None and uid in self._states:
                custom = self._world.model_by_uid(uid)
                if custom is not None and custom.object is not None:
                    try:
                        self._decide(custom.object)
                    except Exception as error:
                        log.exception("a decision on replicas was not told to everybody", model=custom.object.key)
                        self._fail(custom.object, error)
            done += 1
            if done % _BATCH == 0:
                await asyncio.sleep(0)

    def _decide(self, model: Model) -> _State:
        uid, now = model.metadata.uid, self._clock()
        state = self._states.get(uid)
        known = state.wanted if state is not None else None
        begin = time.perf_counter()
        try:
            snapshot = self._observer.snapshot(model, wanted=known, term_began=self._term_began)
            decision, memory = decide(snapshot, state.memory if state is not None else None, now)
        except Exception as error:
            # One Model that cannot be decided keeps what it has, and must not end the operator.
            log.exception("no decision on replicas; what there is stays", model=model.key)
            DECISIONS.labels("error").inc()
            self._fail(model, error)
            standing = self._observer.replicas(uid)
            return self._states.setdefault(uid, _State(standing if known is None else known, at=now))
        SECONDS.observe(time.perf_counter() - begin)
        if self._failed.pop(uid, None) is not None:
            self._notify(model)
        if state is None:
            state = self._states[uid] = _State(snapshot.wanted)
        before, state.wanted, state.memory, state.at = state.wanted, decision.wanted, memory, now
        self.history.record(uid, decision)
        if known is None and snapshot.new:
            before = decision.wanted  # a Model that was just made: its status tells that it starts
        self._publish(model, state, decision, before)
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        if decision.recheck_seconds is not None:
            self._schedule(uid, state, decision.recheck_seconds)
        self.stale_signals.update(model, describe_stale(decision, snapshot.policy))
        return state

    def _fail(self, model: Model, error: Exception) -> None:
        uid, problem = model.metadata.uid, internal_error(error, "on the number of this Model's replicas")
        if self._failed.get(uid) != problem:
            self._failed[uid] = problem
            self._notify(model)

    def _notify(self, model: Model) -> None:
        for listener in self._planner.wake:
            listener(model.key, 0.0)

    def _publish(self, model: Model, state: _State, decision: ScalingDecision, before: int) -> None:
        uid = model.metadata.uid
        if decision.wanted == before:
            DECISIONS.labels("same").inc()
            serving = sum(p.ready and not p.deleting for p in self._world.pods.by("model", uid))
            if state.wanted and serving >= state.wanted:
                state.decision = None  # told, and done
            elif not state.wanted and state.decision is None:
                state.decision = decision
            return
        DECISIONS.labels("up" if decision.wanted > before else "down").inc()
        log.info(
            "replicas", model=model.key, before=before, wanted=decision.wanted, reason=decision.reason,
            message=decision.message,
        )  # fmt: skip
        state.decision = decision
        for listener in self.decided:
            listener(model, decision, before)
        # The first decision of a term is asked for by the plan that is made just now.
        woken = not before and bool(decision.wanted) and self._waker.begin(model, decision.wanted)
        self._planner.changed(hurry=not woken and not before)
        custom = self._world.model_by_uid(uid)
        if custom is not None:
            note = f"{before} -> {decision.wanted}: {decision.message}"
            kind = "Warning" if decision.reason in (reasons.SIGNALS_UNKNOWN, reasons.NO_CAPACITY) else "Normal"
            self._world.recorder.emit(Event(MODELS, custom.metadata, kind, decision.reason, note, "Scale"))

    def _schedule(self, uid: str, state: _State, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        if state.timer is not None:
            if state.timer.when() <= due:
                return
            state.timer.cancel()
        state.timer = loop.call_at(due, self._due, uid)

    def _due(self, uid: str) -> None:
        state = self._states.get(uid)
        if state is not None:
            state.timer = None
            self._dirty[uid] = None
            self._some.set()


def _size(child: Child | None) -> tuple[int, bool] | None:
    found = child.deployment if child is not None else None
    return None if found is None else (found.replicas, found.rolled_out)
