"""The last decisions of each Model with their inputs, and its present signals: `kubectl shoal why` and `top`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from shoal.api import reasons
from shoal.api.decisions import DecisionRecord, DriverStats, ModelScaling, ReplicaStats, RuleResult
from shoal.api.model import Model
from shoal.controllers.scaling.signals import ScalingSignals
from shoal.controllers.state import DecisionEntry, FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.layers.faults import layer_of
from shoal.core.layers.obstacle import obstacle
from shoal.core.scaling import Demand, ScalingDecision


def enter(history: deque[DecisionEntry], decision: ScalingDecision, now: datetime) -> None:
    """One decision. The same one again only counts; its inputs are the newest."""
    last = history[-1] if history else None
    if last is not None and _same(last.decision, decision):
        last.time, last.decision, last.count = now, decision, last.count + 1
    else:
        history.append(DecisionEntry(now, decision))


def records(history: Iterable[DecisionEntry]) -> tuple[DecisionRecord, ...]:
    """What was decided on a Model, newest first."""
    return tuple(_record(entry) for entry in reversed(tuple(history)))


def _record(entry: DecisionEntry) -> DecisionRecord:
    said = entry.decision
    return DecisionRecord(
        time=entry.time,
        before=said.before,
        wanted=said.wanted,
        reason=said.reason,
        layer=layer_of(said.reason),
        message=said.message,
        rules=tuple(
            RuleResult(rule=r.name, replicas=r.replicas, inputs=dict(r.inputs), sentence=r.sentence) for r in said.rules
        ),
        alternative=said.alternative,
        count=entry.count,
    )


class DecisionHistory:
    """Decisions are kept as they are made, in the Models' records, and described only when they are requested."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        signals: ScalingSignals,
        driven: Callable[[Model], DriverStats | None],
    ) -> None:
        """`driven`: the message about a Model whose replicas KEDA writes."""
        self._world, self._state, self._signals, self._driven = world, state, signals, driven

    def stats(self, namespace: str | None = None) -> Iterator[ModelScaling]:
        """Every Model of which something was decided, or those of a namespace; without their decisions, and of one
        that no replica serves with what stands in the way."""
        for custom in list(self._world.models.values()):
            if custom.object is not None and namespace in (None, custom.metadata.namespace):
                found = self._describe(custom.object, decisions=False)
                if found is not None:
                    yield found

    def model(self, key: str) -> ModelScaling | None:
        """One Model with its last decisions, newest first. None: there is no such Model, or nothing was decided."""
        custom = self._world.models.get(key)
        return self._describe(custom.object, decisions=True) if custom is not None and custom.object else None

    def _describe(self, model: Model, *, decisions: bool) -> ModelScaling | None:
        uid = model.metadata.uid
        record = self._state.record(uid)
        entries = tuple(record.history)
        if not entries:
            return None
        last = entries[-1].decision
        gateways = [g for g in self._world.gateways() if g.was_ready and not self._world.is_lost(g)]
        demands = {g.name: self._signals.demand(g.uid, uid) for g in gateways}
        pods = [p for p in self._world.pods.by("model", uid) if not p.finished and not self._world.is_lost(p)]
        stale = [name for name, said in demands.items() if said is None or not said.complete]
        stale += [p.name for p in pods if p.was_ready and not p.deleting and self._signals.load(p.uid) is None]
        cost = record.placement.placement.hourly_cost if record.placement is not None else None
        ready = sum(p.ready and not p.deleting for p in pods)
        reason, message = current_message([e.decision for e in entries], ready)
        # `why` reads the conditions itself, and tells the decision beside them.
        if not decisions and last.wanted and not ready and (fault := obstacle(model)) is not None:
            reason, message = fault.reason, fault.message
        return ModelScaling(
            model=model.key,
            wanted=last.wanted,
            ready_replicas=ready,
            reason=reason,
            layer=layer_of(reason),
            message=message,
            held=_total(demands, lambda d: d.held),
            in_flight=_total(demands, lambda d: d.in_flight),
            arrivals_per_second=self._signals.arrivals_per_second(uid),
            stale=tuple(sorted(stale)),
            driven=self._driven(model),
            hourly_cost=cost,
            currency=self._currency() if cost is not None else None,
            replicas=tuple(self._replica(p) for p in sorted(pods, key=lambda p: p.name)),
            decisions=records(entries) if decisions else (),
        )

    def _replica(self, pod: facts.Pod) -> ReplicaStats:
        load = self._signals.load(pod.uid)
        if load is None:
            return ReplicaStats(pod=pod.name, gpu_class=pod.gpu_class)
        return ReplicaStats(
            pod=pod.name,
            gpu_class=pod.gpu_class,
            phase=load.phase,
            age_seconds=self._signals.age(pod.uid),
            running=load.running,
            waiting=load.waiting,
            kv_tokens_used=load.kv_tokens_used,
            kv_tokens_total=load.kv_tokens_total,
            tokens_per_second=self._signals.tokens_per_second(pod.uid),
            tokens_per_step=load.tokens_per_step,
        )

    def _currency(self) -> str | None:
        """The one of all classes; None where they differ."""
        found = {c.spec.hourly_cost.currency for c in self._world.accepted_classes().values() if c.spec.hourly_cost}
        return found.pop() if len(found) == 1 else None


def current_message(decisions: Sequence[ScalingDecision], ready: int) -> tuple[str, str]:
    """Reason and message of now: until the number that was decided last is there, those of its decision."""
    last = decisions[-1]
    if last.reason == reasons.REPLICAS_READY and ready != last.wanted:
        last = next((d for d in reversed(decisions) if d.before != d.wanted), last)
    return last.reason, last.message


def _same(one: ScalingDecision, other: ScalingDecision) -> bool:
    """A number that changed is always worth an entry of its own, and keeps the metrics that changed it."""
    changed = one.before != one.wanted or other.before != other.wanted
    return not changed and (one.wanted, one.reason) == (other.wanted, other.reason)


def _total(demands: dict[str, Demand | None], of: Callable[[Demand], int]) -> int | None:
    """The sum over the gateways with a live stream; None when gateways exist and no stream is live."""
    heard = [d for d in demands.values() if d is not None]
    return sum(of(d) for d in heard) if heard or not demands else None
