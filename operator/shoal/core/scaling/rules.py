"""The scaling rules, one function each; the table is in `decide.py`."""

import math

from shoal.core.scaling.messages import count, percent, seconds
from shoal.core.scaling.view import RuleOutput, View

HYSTERESIS = 0.9
"""Replicas go only where the remaining ones would be below this share of the target."""
_TRUSTED_COLD_STARTS = 3.0
"""Cold starts for which a queue may last before the rates are doubted: one to start a replica, one to clear the queue,
one for the unforeseen."""
_ADAPTER_SLOTS_SHARE = 0.8
"""Share of the slots that adapters in use may take. Adapters never spread quite evenly, and with more adapters than
slots requests wait for slots instead of for the GPU."""


def kv_cache(view: View) -> RuleOutput:
    """KV tokens in use and the prompts that wait, against the target share of the replicas' KV caches."""
    load, policy = view.load, view.snapshot.policy
    demand = float(load.used + load.waiting_tokens)
    inputs = {
        "kvTokensUsed": load.used,
        "waitingTokens": load.waiting_tokens,
        "targetPercent": policy.kv_percent,
        "replicasUnknown": len(load.load_unknown),
    }
    if not view.fleet.kv_tokens:
        return RuleOutput("kvCache", None, None, inputs, "what a replica's KV cache holds is not known")
    # A replica with unknown load counts as loaded to its target: it neither helps the others nor asks for more.
    # A replica beyond `wanted`, which replaces another one, counts for nothing (the last ones, since supply is counted
    # from the first): otherwise a move between classes of different size would ask for more replicas.
    reporting = max(0, view.fleet.ready - len(load.load_unknown))
    loaded = [s.kv_tokens or 0 for s in view.fleet.placed if not s.load_known]
    demand += sum(loaded[: max(0, view.snapshot.wanted - reporting)]) * policy.kv_percent / 100
    held = sum(s.kv_tokens or 0 for s in view.fleet.placed if s.ready_in == 0)
    up = view.fleet.needed(demand, view.tokens)
    keep = view.fleet.needed(demand / HYSTERESIS, view.tokens)
    use = f"KV use {percent(demand, held)} on {count(view.fleet.ready, 'replica')}" if held else "no replica is ready"
    return RuleOutput(
        "kvCache",
        up,
        max(up, keep),
        {**inputs, "kvTokensTotal": held},
        f"{use}, target {policy.kv_percent} %",
        _kv_with(view, demand, up - 1),
    )


def _kv_with(view: View, demand: float, replicas: int) -> str:
    total = sum(s.kv_tokens or 0 for s, _ in zip(view.fleet.slots(), range(replicas), strict=False))
    if replicas < 1 or not total:
        return ""
    return f"{count(replicas, 'replica')} would hold KV use at {percent(demand, total)}"


def queue(view: View) -> RuleOutput:
    """Requests that wait in engines, against the target per replica; no more replicas than surely clear them."""
    waiting, target = view.load.waiting, view.snapshot.policy.queued_per_replica
    up = min(view.fleet.limit, math.ceil(waiting / target))
    keep = min(view.fleet.limit, math.ceil(waiting / (HYSTERESIS * target)))
    sentence = f"{waiting} queued on {count(view.fleet.ready, 'replica')}, target {target}"
    fewer = f"{count(up - 1, 'replica')} would have {waiting / (up - 1):.1f} queued each" if up > 1 else ""
    enough = None
    if up > view.placed:
        enough = view.placed if view.now < view.memory.settled else _clearing(view)
    if enough is not None and enough < up:
        fewer = f"{up} for the target at once would come when the queue is gone"
        up = enough
    inputs = {"waiting": waiting, "queuedRequestsPerReplica": target, "replicasReady": view.fleet.ready}
    return RuleOutput("queue", up, max(up, keep), inputs, sentence, fewer)


def _clearing(view: View) -> int | None:
    """Replicas that clear the queue by known rates, never fewer than placed. None: the rates are unknown, or wrong, as
    the queue remains although the replicas had the time to clear it."""
    since, sure = view.memory.queue_since, view.speed_at_least
    if since is None or view.now - since > _TRUSTED_COLD_STARTS * view.fleet.cold_start or not view.fleet.ready:
        return None
    if not any(sure(s) for s in view.fleet.placed):
        return None
    enough = view.sufficient(sure)
    return None if enough is None else max(view.placed, enough)


def rate(view: View) -> RuleOutput:
    """The work that requests bring, against the learned rate of the replicas."""
    arriving, share = view.arriving, view.snapshot.policy.rate_percent / 100
    inputs = {
        "requestsPerSecond": _rounded(view.memory.arrival_rate),
        "workPerRequest": _rounded(view.memory.work_per_request),
        "workPerSecondOfReplica": _rounded(view.any_speed),
        "targetPercent": view.snapshot.policy.rate_percent,
    }
    if arriving is None or view.any_speed is None:
        return RuleOutput(
            "rate", None, _proven(view), inputs, "what a replica can do is not known before requests have waited"
        )
    up = view.fleet.needed(arriving / share, view.speed)
    keep = view.fleet.needed(arriving / (HYSTERESIS * share), view.speed)
    supply = sum(view.speed(s) for s in view.fleet.placed if s.ready_in == 0)
    use = f"{percent(arriving, supply)} of what {count(view.fleet.ready, 'replica')} can do" if supply else "work"
    fewer = ""
    less = sum(view.speed(s) for s, _ in zip(view.fleet.slots(), range(up - 1), strict=False))
    if less:
        fewer = f"{count(up - 1, 'replica')} would be at {percent(arriving, less)} of what they can do"
    sentence = f"{view.memory.arrival_rate or 0:.2g} requests/s are {use}, target {view.snapshot.policy.rate_percent} %"
    return RuleOutput("rate", up, max(up, keep), inputs, sentence, fewer)


def _proven(view: View) -> int | None:
    """Replicas that must stay while the limit of a replica is unknown: as many as are known to do the work, or one less
    than now, to find out."""
    arriving, one_less = view.arriving, max(0, view.placed - 1)
    if arriving == 0.0:
        return 0
    if arriving is None or not any(s.proven for s in view.memory.speeds.values()):
        return one_less
    return min(one_less, view.fleet.needed(arriving, view.speed_at_least))


def backlog(view: View) -> RuleOutput:
    """What will still wait when a further replica could serve, to be done in one cold start more."""
    end = view.fleet.cold_start
    then = None if view.any_speed is None else view.backlog_then(view.speed)
    inputs = {
        "requestsWaiting": view.load.waiting,
        "requestsHeld": view.load.held,
        "workThen": _rounded(then),
        "coldStartSeconds": _rounded(end),
    }
    if then is None:
        return RuleOutput("backlog", None, 0, inputs, "what requests cost and replicas can do is not known yet")
    if then == 0.0 or not view.load.waiting + view.load.held:
        return RuleOutput("backlog", 0, 0, inputs, f"nothing will wait in {seconds(end)}")
    up = view.sufficient(view.speed)
    cost = view.memory.work_per_request or 1.0
    sentence = f"{count(round(then / cost), 'request')} would still wait in {seconds(end)}, to be gone in as long again"
    return RuleOutput("backlog", up, up or 0, inputs, sentence)


def held(view: View) -> RuleOutput:
    """Requests held at gateways: one replica at least, and enough for their tokens."""
    load = view.load
    inputs = {"requestsHeld": load.held, "heldTokens": load.held_tokens}
    if not load.held:
        return RuleOutput("held", 0, 0, inputs, "no request is held")
    up = 1
    if (view.any_speed is None or view.backlog_then(view.speed) is None) and view.fleet.kv_tokens:
        up = max(1, view.fleet.needed(load.used + load.waiting_tokens + load.held_tokens, view.tokens))
    return RuleOutput("held", up, up, inputs, f"{count(load.held, 'request')} held, {count(load.held_tokens, 'token')}")


def adapters(view: View) -> RuleOutput:
    """Distinct adapters in use at once, against the slots of the replicas."""
    load, slots = view.load, view.load.adapter_slots
    if slots is None:
        return RuleOutput("adapters", 0, 0, {}, "no replica says that it serves adapters")
    each = math.ceil(_ADAPTER_SLOTS_SHARE * slots)
    up = min(view.fleet.limit, math.ceil(load.adapters / each))
    keep = min(view.fleet.limit, math.ceil(load.adapters / (HYSTERESIS * each)))
    if load.adapters and not load.adapters_known:
        keep = max(keep, view.placed)
    inputs = {"adaptersInUse": load.adapters, "slotsPerReplica": slots, "targetPerReplica": each}
    sentence = f"{count(load.adapters, 'adapter')} in use at once, target {each} per replica of {count(slots, 'slot')}"
    fewer = ""
    if up > 1:
        fewer = f"{count(up - 1, 'replica')} would have {load.adapters / (up - 1):.1f} adapters in use each"
    return RuleOutput("adapters", up, max(up, keep), inputs, sentence, fewer)


def minimum(view: View) -> RuleOutput:
    least = view.snapshot.policy.minimum
    return RuleOutput("minimum", least, least, {"minReplicas": least}, f"minReplicas is {least}")


def recent_requests(view: View) -> RuleOutput:
    """One replica while the last request, or the last call to wake the Model, is younger than the idle window."""
    idle = view.snapshot.policy.idle_seconds
    times = [t for t in (view.memory.last_request, view.snapshot.last_wake) if t is not None and t <= view.now]
    last = max(times, default=None)
    inputs = {"secondsSinceRequest": None if last is None else _rounded(view.now - last), "idleSeconds": idle}
    if last is None or view.now - last >= idle:
        return RuleOutput("recentRequests", 0, 0, inputs, f"no request for {seconds(idle)}")
    return RuleOutput("recentRequests", 1, 1, inputs, "a recent request")


def initial(view: View) -> RuleOutput:
    """One replica of a new Model, so that faults of placement or download show instead of looking idle. Once a replica
    was requested, the Model is no longer new and may go to zero."""
    if view.snapshot.new:
        return RuleOutput("initial", 1, 1, {}, "the Model is new")
    return RuleOutput("initial", 0, 0, {}, "the Model is not new")


RULES = (kv_cache, queue, rate, backlog, adapters, held, recent_requests, initial, minimum)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
