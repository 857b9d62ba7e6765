"""What one decision passes to the next: when the last request came, the rate and cost of requests, and the rate of a
replica."""

import math
from collections.abc import Mapping
from dataclasses import replace

from shoal.core.scaling.load import FleetLoad, live
from shoal.core.scaling.types import Load, ModelSnapshot, ScalingMemory, SourceMark, Speed, WorkMeter

GENERATED_WEIGHT = 4.0
"""Work is counted in prompt tokens; one generated token costs as much as this many. On the measured kernel tables of 8
GPUs (Llama-3.1-8B) a decode step of a full batch takes 3 to 6 times as long per token as prefill, so one learned rate
holds when the mix of prompts and answers changes."""
ARRIVALS_SECONDS = 30.0
"""Time constant of the arrival rate."""
ARRIVALS_NOW_SECONDS = 10.0
"""Time constant of the arrival rate used with queues."""
LATE_SECONDS = 30.0
"""A decision later than due by more than this means that the clock leapt or the process was stopped: earlier signals
may be old, so windows begin anew."""
SETTLE_SECONDS = 10.0
"""Seconds after a wake until the queue counts: by then the replica's rate is known, and no replica is requested for a
queue that it clears alone."""
_MEMORY_SECONDS = 300.0
"""Time constant of the cost of a request."""
_METER_SECONDS = 5.0
"""Seconds over which a replica's rate is measured."""
_TOO_LONG = 4.0
"""Times `_METER_SECONDS` between two decisions, after which it is unknown whether requests waited all the time."""
_FADE_SECONDS = 3600.0
"""Time constant with which a proven rate fades."""
_RISE, _FALL = 0.5, 0.15
"""Weights of a new rate above or below the learned one: while a batch fills, a replica does less than it can."""


def work(load: Load | None) -> float | None:
    """Work done so far by one engine, in prompt tokens; None: unknown."""
    if load is None or load.prompt_tokens_total is None or load.generation_tokens_total is None:
        return None
    return load.prompt_tokens_total + GENERATED_WEIGHT * load.generation_tokens_total


def begin(snapshot: ModelSnapshot, load: FleetLoad, now: float) -> ScalingMemory:
    """The memory of a new term. Windows start at the replicas wanted now, so that nothing goes down early."""
    return ScalingMemory(
        began=now,
        now=now,
        due=None,
        window=((now, snapshot.wanted),),
        quiet_since=now,
        woken=now,
        served=_serves(snapshot),
        settled=now,
        fresh_since=now,
        source_marks=_marks(snapshot, {}, now),
        meters=_meters(snapshot, {}, {}, now)[0],
        progress=_progress(snapshot, load),
    )


def recall(snapshot: ModelSnapshot, memory: ScalingMemory | None, load: FleetLoad, now: float) -> ScalingMemory:
    """The memory at `now`. If it is of another term, or the clock leapt, windows start anew; what was learned of
    requests and replicas stays."""
    if memory is None or memory.began < snapshot.term_began:
        learned = begin(snapshot, load, now)
        return learned if memory is None else replace(learned, speeds=memory.speeds)
    if now < memory.now or (memory.due is not None and now > memory.due + LATE_SECONDS):
        anew = begin(snapshot, load, now)
        return replace(
            anew,
            began=min(memory.began, now),
            speeds=memory.speeds,
            arrival_rate=memory.arrival_rate,
            arrival_rate_now=memory.arrival_rate_now,
            done=memory.done,
            worked=memory.worked,
            last_request=now if _arrived(snapshot, memory) else None,
        )
    return _advance(snapshot, memory, load, now)


def _advance(snapshot: ModelSnapshot, memory: ScalingMemory, load: FleetLoad, now: float) -> ScalingMemory:
    elapsed = now - memory.now
    arrived = _arrived(snapshot, memory) > 0
    disturbed = arrived or _busy(load) or _uncertain(snapshot, memory)
    serves = _serves(snapshot)
    first = serves and not memory.served and snapshot.wanted > 0
    meters, speeds = _meters(snapshot, memory.meters, memory.speeds, now)
    progress = _progress(snapshot, load)
    done, worked = memory.done, memory.worked
    if elapsed > 0:
        fade = math.exp(-elapsed / _MEMORY_SECONDS)
        done, worked = done * fade, worked * fade
    if progress is not None and memory.progress is not None and _same_sources(snapshot, memory):
        done = max(0.0, done + progress - memory.progress)
        worked += sum(
            max(0.0, meters[uid].work - old.work)
            for uid, old in memory.meters.items()
            if uid in meters and meters[uid].engine_boot == old.engine_boot
        )
    return replace(
        memory,
        now=now,
        quiet_since=now if disturbed or first else memory.quiet_since,
        woken=now if snapshot.wanted == 0 else memory.woken,
        served=snapshot.wanted > 0 and (memory.served or serves),
        settled=now + SETTLE_SECONDS if first else memory.settled,
        last_request=now if arrived else memory.last_request,
        source_marks=_marks(snapshot, memory.source_marks, now),
        meters=meters,
        speeds=speeds,
        arrival_rate=_rate(snapshot, memory, memory.arrival_rate, ARRIVALS_SECONDS, now),
        arrival_rate_now=_rate(snapshot, memory, memory.arrival_rate_now, ARRIVALS_NOW_SECONDS, now),
        queue_since=_queue_since(snapshot, memory, load, now),
        progress=progress,
        done=done,
        worked=worked,
    )


# --- requests -------------------------------------------------------------------------------------------------------


def _busy(load: FleetLoad) -> bool:
    return load.in_flight > 0 or load.held > 0 or load.running > 0 or load.waiting > 0


def _arrived(snapshot: ModelSnapshot, memory: ScalingMemory) -> int:
    """Requests since the last report of each known gateway. A smaller count is a restart, whatever the boot id says."""
    count = 0
    for source in snapshot.sources or ():
        mark = memory.source_marks.get(source.name)
        if source.demand is None or mark is None:
            continue
        restarted = source.boot != mark.boot or source.demand.arrivals < mark.arrivals
        count += max(0, source.demand.arrivals - (0 if restarted else mark.arrivals))
    return count


def _uncertain(snapshot: ModelSnapshot, memory: ScalingMemory) -> bool:
    """Whether requests may have come or run unreported: a gateway went away while stale, a new one already had
    requests, or a gateway was busy in its last report and is live again."""
    names = {v.name for v in snapshot.sources or ()}
    if snapshot.sources is not None and any(not m.live for name, m in memory.source_marks.items() if name not in names):
        return True
    for source in snapshot.sources or ():
        mark = memory.source_marks.get(source.name)
        if source.demand is None:
            continue
        if mark is None:
            if source.demand.arrivals > 0:
                return True
        elif mark.busy and not mark.live:
            return True
    return False


def _marks(snapshot: ModelSnapshot, former: Mapping[str, SourceMark], now: float) -> dict[str, SourceMark]:
    if snapshot.sources is None:
        return {name: replace(mark, live=False) for name, mark in former.items()}
    marks: dict[str, SourceMark] = {}
    for source in snapshot.sources:
        demand, mark = source.demand, former.get(source.name)
        if demand is not None:
            marks[source.name] = SourceMark(
                source.boot, demand.arrivals, demand.in_flight > 0 or demand.held > 0, live=True, at=now
            )
        elif mark is not None:
            marks[source.name] = replace(mark, live=False)
        else:
            # No report in this term yet: whatever the first report counts is new.
            marks[source.name] = SourceMark(None, 0, busy=True, live=False, at=None)
    return marks


def _same_sources(snapshot: ModelSnapshot, memory: ScalingMemory) -> bool:
    sources = snapshot.sources or ()
    return len(sources) == len(memory.source_marks) and all(
        (mark := memory.source_marks.get(v.name)) is not None and mark.live and mark.boot == v.boot for v in sources
    )


def _rate(
    snapshot: ModelSnapshot, memory: ScalingMemory, before: float | None, seconds: float, now: float
) -> float | None:
    """Requests per second, exponentially smoothed; unchanged while no gateway reports. Requests that came while a
    gateway was stale are spread over that time: they are no burst."""
    known = [v for v in snapshot.sources or () if v.demand is not None]
    if not known:
        return before
    last = max((mark.at for mark in memory.source_marks.values() if mark.at is not None), default=memory.now)
    rate = (before or 0.0) * math.exp(-_passed(last, now) / seconds)
    for source in known:
        mark = memory.source_marks.get(source.name)
        if source.demand is not None and mark is not None and mark.at is not None and mark.boot == source.boot:
            passed = _passed(mark.at, now)
            came = max(0, source.demand.arrivals - mark.arrivals)
            rate += came / passed * (1 - math.exp(-passed / seconds))
    return rate


def _passed(since: float, now: float) -> float:
    # Two decisions at the same instant: arrivals between them are counted as if a moment had passed.
    return max(1e-3, now - since)


def _queue_since(snapshot: ModelSnapshot, memory: ScalingMemory, load: FleetLoad, now: float) -> float | None:
    ready = sum(1 for r in snapshot.replicas if r.ready and live(r))
    if load.waiting <= snapshot.policy.queued_per_replica * max(1, ready):
        return None
    return now if memory.queue_since is None else memory.queue_since


def _progress(snapshot: ModelSnapshot, load: FleetLoad) -> float | None:
    """Requests done so far; those in progress count half, those waiting in an engine not at all."""
    if snapshot.sources is None or load.stale:
        return None
    arrivals = sum(v.demand.arrivals for v in snapshot.sources if v.demand is not None)
    return arrivals - load.held - (load.in_flight + load.waiting) / 2


# --- replicas -------------------------------------------------------------------------------------------------------


def _serves(snapshot: ModelSnapshot) -> bool:
    return any(r.ready and live(r) for r in snapshot.replicas)


def _meters(
    snapshot: ModelSnapshot, former: Mapping[str, WorkMeter], speeds: Mapping[str, Speed], now: float
) -> tuple[dict[str, WorkMeter], dict[str, Speed]]:
    """Meters at `now`, and speeds updated by meters that have run long enough."""
    meters: dict[str, WorkMeter] = {}
    found = dict(speeds)
    for replica in snapshot.replicas:
        done = work(replica.load)
        if done is None or replica.load is None or not replica.ready or not live(replica):
            continue
        boot, queued = replica.load.engine_boot, (replica.load.waiting or 0) > 0
        meter = former.get(replica.uid)
        went_on = meter is not None and meter.engine_boot == boot and done >= meter.work and now >= meter.marked
        if meter is None or not went_on or not _alike(meter, queued, now):
            meters[replica.uid] = WorkMeter(boot, done, now, done, queued)
        elif now - meter.marked >= _METER_SECONDS:
            rate = (done - meter.work_then) / (now - meter.marked)
            found[replica.gpu_class] = _with_rate(
                found.get(replica.gpu_class, Speed()), rate, queued, now - meter.marked
            )
            meters[replica.uid] = WorkMeter(boot, done, now, done, queued)
        else:
            meters[replica.uid] = replace(meter, work=done)
    return meters, found


def _alike(meter: WorkMeter, queued: bool, now: float) -> bool:
    """Whether the time since the mark is of one kind: a queue all the time, or none."""
    return meter.queued == queued and not (queued and now - meter.marked > _TOO_LONG * _METER_SECONDS)


def _with_rate(speed: Speed, rate: float, queued: bool, seconds: float) -> Speed:
    if not queued:
        proven = max(rate, speed.proven * math.exp(-seconds / _FADE_SECONDS))
        # Above the learned limit without a queue: the limit is higher.
        learned = speed.learned if speed.learned is None else max(speed.learned, rate)
        return Speed(learned, proven)
    if rate <= 0:
        return speed
    if speed.learned is None:
        return replace(speed, learned=rate)
    weight = _RISE if rate > speed.learned else _FALL
    return replace(speed, learned=speed.learned + weight * (rate - speed.learned))
