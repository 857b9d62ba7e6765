"""The scaling decision: up at once to the most that any rule asks for; down only after all signals allow it for a
while.

| rule | asks for |
|---|---|
| kvCache | tokens in use and waiting prompts, within `kvUtilizationPercent` of the KV caches |
| queue | at most `queuedRequestsPerReplica` waiting requests each, unless they are done before a replica could start |
| rate | the work that arrives, within `rate_percent` of the learned rate of the replicas |
| backlog | what will still wait after one cold start, done in one cold start more |
| adapters | the distinct adapters in use, within 80 % of the replicas' slots |
| held | from zero one, and enough for the tokens of requests held at gateways |
| recentRequests | one, while the last request is younger than `idleSeconds` |
| initial | one, while a Model is new: no replica of it was ever requested |
| minimum | `minReplicas` |

Up: one rule is enough; a starting replica counts as supply from when it will be ready. Down: signals of every gateway
and of every replica that was ever ready are fresh, no rollout is under way, and fewer were enough for all of
`stabilizationSeconds`. To zero: no request came, ran or was held for `idleSeconds`, all of them in this leader's term.
"""

from dataclasses import replace

from shoal.api import reasons
from shoal.core.scaling.fleet import ASSUMED_COLD_START, fleet
from shoal.core.scaling.learn import ARRIVALS_SECONDS, recall
from shoal.core.scaling.load import fleet_load
from shoal.core.scaling.messages import count, names, seconds
from shoal.core.scaling.rules import RULES
from shoal.core.scaling.types import ModelSnapshot, ScalingDecision, ScalingMemory, ScalingRule
from shoal.core.scaling.view import RuleOutput, View
from shoal.core.scaling.window import expires, highest, push

_START_COLD_STARTS = 3.0
"""Cold starts in which a replica may become ready before a Model without requests goes to zero anyway."""
_DOWN_PACE = 15.0
"""Seconds between two steps down, so that steps are few and each shows its effect."""
_MAX_STABILIZATION_FACTOR = 2.0
"""At most so many times `stabilization_seconds`."""
_REGRET_FACTOR = 5.0
"""Times `stabilization_seconds` after a step down: a higher need within this time means that the step was a mistake.
The window then doubles, until a higher need comes later than that. For a load that returns every few minutes, keeping
the replica costs less than starting it again (the ski rental rule)."""
_MIN_RECHECK_SECONDS = 0.05
"""Seconds between two decisions at least."""


def decide(snapshot: ModelSnapshot, memory: ScalingMemory | None, now: float) -> tuple[ScalingDecision, ScalingMemory]:
    """Replicas wanted at `now` (monotonic seconds), why, and the memory for the next decision. `memory` None: a new
    term begins, and nothing goes down before its windows are over."""
    load = fleet_load(snapshot)
    known = recall(snapshot, memory, load, now)
    view = View(snapshot, load, fleet(snapshot, load, now), known, now)
    outputs = [rule(view) for rule in RULES]
    policy, before = snapshot.policy, snapshot.wanted
    idle_at = _idle_at(view)
    quiet = now >= _quiet_at(view)
    # The smoothed rate fades long after the last request, and would keep or wake a replica without any request.
    need = min(policy.maximum, max(a.up or 0 for a in outputs if not (quiet and a.rule == "rate")))
    idle = now >= idle_at and need == 0
    keep = min(policy.maximum, max(need, 0 if idle else 1, *(before if a.keep is None else a.keep for a in outputs)))
    blocked = snapshot.rolling or bool(load.stale)
    known = replace(
        known, stabilization_factor=_stabilization_factor(known, need > before > 0, policy.stabilization_seconds, now)
    )
    span = known.stabilization_factor * policy.stabilization_seconds
    window = push(known.window, keep, now, span)
    known = replace(known, window=window, fresh_since=now if blocked else known.fresh_since)
    view = replace(view, memory=known)
    low = 0 if idle else min(policy.maximum, max(need, highest(window)))
    if need > before:
        decision = _up(view, outputs, need)
    elif before == 0:
        decision = _unchanged(view, outputs, keep)
    elif low < before and blocked:
        decision = _blocked(view, low)
    elif low < before <= policy.maximum and not idle and now < _down_at(view):
        decision = _unchanged(view, outputs, keep)
    elif low < before:
        decision = _down(view, outputs, low, idle)
    else:
        decision = _unchanged(view, outputs, keep)
    recheck = _recheck_seconds(view, decision.wanted, keep, idle_at, blocked)
    decision = replace(
        decision,
        rules=_rules(view, outputs, decision, highest(window)),
        recheck_seconds=recheck,
        stale=load.stale,
        invalid=load.invalid,
    )
    if load.invalid:
        decision = replace(decision, message=f"{decision.message}; invalid: {names(load.invalid)}")
    lowered = None if decision.wanted > before else now if decision.wanted < before else known.lowered
    return decision, replace(known, due=None if recheck is None else now + recheck, lowered=lowered)


# --- the four ends --------------------------------------------------------------------------------------------------


def _up(view: View, outputs: list[RuleOutput], need: int) -> ScalingDecision:
    policy, before = view.snapshot.policy, view.snapshot.wanted
    wanted = min(need, before + max(policy.max_step, before))
    output = _deciding(outputs, view.snapshot)
    parts = [output.sentence]
    if output.up is not None and output.up >= policy.maximum:
        parts.append(f"maxReplicas is {policy.maximum}")
    if wanted < need:
        parts.append(f"{count(wanted - before, 'replica')} at a time")
    reason = reasons.SCALING_UP
    if before == 0 and output.rule in ("held", "recentRequests"):
        reason = reasons.WAKING
        if view.fleet.next_class is not None:
            parts.append(f"wakes class {view.fleet.next_class}")
    if view.snapshot.variants and view.fleet.headroom == 0 and wanted > view.placed:
        reason = reasons.NO_CAPACITY
        parts.insert(0, _no_capacity(view))
    return ScalingDecision(wanted, before, reason, "; ".join(parts), alternative=output.fewer)


def _down(view: View, outputs: list[RuleOutput], low: int, idle: bool) -> ScalingDecision:
    policy, before = view.snapshot.policy, view.snapshot.wanted
    if low == 0 and idle:
        wakes = view.fleet.next_class or (view.snapshot.variants[0].gpu_class if view.snapshot.variants else None)
        then = f"the next one wakes class {wakes}" if wakes else "the next one wakes it"
        message = f"no request for {seconds(policy.idle_seconds)}; {then}"
        return ScalingDecision(0, before, reasons.SCALED_TO_ZERO, message)
    if before > policy.maximum:
        message = f"maxReplicas is {policy.maximum}"
    else:
        enough = f"{count(low, 'replica')} {'is' if low == 1 else 'are'} enough"
        message = f"{enough} since {seconds(view.span)}"
    keeps = max(outputs, key=lambda a: a.keep or 0)
    return ScalingDecision(low, before, reasons.SCALING_DOWN, message, alternative=f"no fewer: {keeps.sentence}")


def _blocked(view: View, low: int) -> ScalingDecision:
    before = view.snapshot.wanted
    stale = view.load.stale
    if stale:
        message = f"no live signals from {names(stale)}: nothing scales down"
        return ScalingDecision(before, before, reasons.SIGNALS_UNKNOWN, message, alternative=f"else {low} would do")
    message = "a rollout is under way: nothing scales down"
    return ScalingDecision(before, before, reasons.REPLICAS_READY, message, alternative=f"else {low} would do")


def _unchanged(view: View, outputs: list[RuleOutput], keep: int) -> ScalingDecision:
    before = view.snapshot.wanted
    if before == 0:
        wakes = view.fleet.next_class
        then = f"the next one wakes class {wakes}" if wakes else _no_capacity(view)
        return ScalingDecision(0, 0, reasons.SCALED_TO_ZERO, f"no request; {then}")
    if view.snapshot.variants and view.fleet.headroom == 0 and view.placed < before:
        return ScalingDecision(before, before, reasons.NO_CAPACITY, _no_capacity(view))
    if not view.snapshot.variants and not view.snapshot.replicas:
        # Its source is not read, or its sizes fit nowhere: the condition Ready says which.
        said = f"{count(before, 'replica')} wanted, and no class is known to fit"
        return ScalingDecision(before, before, reasons.SCALING_UP, said)
    alternative = ""
    if keep < before:
        left = _down_at(view) - view.now
        alternative = f"{keep} would do; fewer in {seconds(max(0.0, left))} at the earliest"
    elif keep == before:
        alternative = _deciding(outputs, view.snapshot).fewer
    enough = f"{count(before, 'replica')} {'is' if before == 1 else 'are'} enough"
    return ScalingDecision(before, before, reasons.REPLICAS_READY, enough, alternative=alternative)


# --- parts ----------------------------------------------------------------------------------------------------------


def _down_at(view: View) -> float:
    """When fewer will have been enough, and all signals fresh, for the span, and the pace of steps down is kept."""
    known, wanted = view.memory, view.snapshot.wanted
    enough = max(expires(known.window, wanted, view.span), known.fresh_since + view.span)
    return enough if known.lowered is None else max(enough, known.lowered + _DOWN_PACE)


def _stabilization_factor(known: ScalingMemory, more: bool, stabilization: float, now: float) -> float:
    if known.lowered is None:
        return known.stabilization_factor
    if more:
        return (
            min(_MAX_STABILIZATION_FACTOR, 2 * known.stabilization_factor)
            if now - known.lowered < _REGRET_FACTOR * stabilization
            else 1.0
        )
    return known.stabilization_factor


def _quiet_at(view: View) -> float:
    """When an idle window without requests ends, if no request comes until then."""
    known, woken = view.memory, view.snapshot.last_wake
    quiet = max(known.quiet_since, known.began, view.snapshot.term_began)
    if woken is not None and woken <= view.now:
        quiet = max(quiet, woken)
    return quiet + view.snapshot.policy.idle_seconds


def _idle_at(view: View) -> float:
    """When the Model may go to zero, if nothing happens until then."""
    known, at = view.memory, _quiet_at(view)
    if not known.served and view.placed:
        cold = max((v.cold_start_seconds or ASSUMED_COLD_START for v in view.snapshot.variants), default=0.0)
        at = max(at, known.woken + _START_COLD_STARTS * cold)
    return at


def _deciding(outputs: list[RuleOutput], snapshot: ModelSnapshot) -> RuleOutput:
    """The rule that asks for most; of equals the one whose sentence explains most."""
    order = (
        ("held", "recentRequests", "queue", "kvCache", "rate", "backlog")
        if snapshot.wanted == 0
        else ("queue", "kvCache")
    )
    return max(outputs, key=lambda a: (a.up or 0, -order.index(a.rule) if a.rule in order else -len(order)))


def _no_capacity(view: View) -> str:
    classes = tuple(v.gpu_class for v in view.snapshot.variants)
    if not classes:
        return "no class fits"
    return f"class {classes[0]} has 0 free" if len(classes) == 1 else f"classes {names(classes)} have 0 free"


def _rules(view: View, outputs: list[RuleOutput], decision: ScalingDecision, low: int) -> tuple[ScalingRule, ...]:
    policy = view.snapshot.policy
    rules = [ScalingRule(a.rule, a.up, a.inputs, a.sentence) for a in outputs]
    rules.sort(key=lambda r: -1 if r.replicas is None else r.replicas, reverse=True)
    if decision.wanted >= decision.before:
        first = _deciding(outputs, view.snapshot).rule
        rules.sort(key=lambda r: r.name != first)
    sentence = f"so many were enough over the last {seconds(view.span)}"
    stable = ScalingRule("stabilization", low, {"stabilizationSeconds": policy.stabilization_seconds}, sentence)
    return (*rules, stable) if decision.wanted >= decision.before else (stable, *rules)


def _recheck_seconds(view: View, wanted: int, keep: int, idle_at: float, blocked: bool) -> float | None:
    """Seconds until a window ends, or a smoothed rate has faded somewhat; None: only other input changes the result."""
    policy, now = view.snapshot.policy, view.now
    if wanted == 0:
        return None
    times: list[float] = []
    if policy.minimum == 0 and not blocked and idle_at > now:
        times.append(idle_at - now)
    if keep < wanted and not blocked:
        left = _down_at(replace(view, snapshot=replace(view.snapshot, wanted=wanted))) - now
        times.append(left if left > 0 else _DOWN_PACE)
    if wanted > max(1, policy.minimum):
        times.append(ARRIVALS_SECONDS / 2)
    return max(_MIN_RECHECK_SECONDS, min(times)) if times else None
