"""Which GPUs of one class are out of use.

    plan, memory = decide(snapshot, memory, now)

- A signal has to last: its evidence grows by a second per second while it is there and fades twenty times slower. So a
  short disturbance takes nothing out of use, and a signal that keeps coming and going does.
- At most a quarter of the class's GPUs is out of use at once, or one unit where a unit is more than that. The last GPUs
  that take pods stay in use. What is left in use for one of these reasons is `withheld`.
- A unit stays out of use while its signal lasts and for a while after it, twice as long each time. Then it is on
  probation: replicas are placed there again, and the first one is tested. Only a test that it passed ends the
  quarantine; one that it failed begins it anew. A replica that no other can be compared with has passed when it
  answered, and no signal came, for the time of a probation. A unit on which no replica runs stays on probation, and
  holds no other up for longer than that.
- People take units out of use and put them back, whatever the signals say. What they asked for last counts.
- A unit that left the cluster while its node stayed, as a GPU that its driver does not publish any more, may come back:
  for a day after its time it is waited for, and is tested then.
- A monitor that is silent about a unit says neither that it is healthy nor that it is not: what it said last neither
  grows nor fades, and a quarantine that rests on it does not begin to end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, Literal

from shoal.core.health.requests import CordonRequest
from shoal.core.health.types import HealthSignal, Monitor, Quarantine, Unit, Withheld
from shoal.core.layers import faults

CONFIRM_SECONDS: Final = 15.0
"""Evidence with which a unit is taken out of use."""
FADES: Final = 0.05
"""Seconds of evidence that a second without the signal takes away."""
MOST_EVIDENCE: Final = 16.0
"""Evidence does not grow beyond: a signal that is gone is forgotten within six minutes."""
LONGEST_STEP: Final = 60.0
"""Seconds between two decisions that count as evidence at most."""
RECHECK_SECONDS: Final = 5.0
"""After which a decision is made again while evidence grows or fades."""
HOLD_SECONDS: Final = 600.0
"""A quarantine's time after its signal is gone, the first time."""
LONGEST_HOLD_SECONDS: Final = 86_400.0
GONE_SECONDS: Final = 86_400.0
"""For so long after its time, a unit that is gone is waited for, while the cluster has its node."""
PROBATION_SECONDS: Final = 3600.0
"""After which a replica that answers its tests has passed, though no other can be compared with it."""
OWN_WORD_SECONDS: Final = 3600.0
"""The same where only replicas of one Model say that the unit is not healthy."""
SHARE_PERCENT: Final = 25
"""Of a class's GPUs that may be out of use at once."""
OVERRULE_SECONDS: Final = 86_400.0
"""For so long after `shoal uncordon`, signals about the unit do not count."""
SKEW_SECONDS: Final = 300.0
"""By which clocks of people and operators may differ."""
MOST: Final = 64
"""Quarantines of one class."""
CORDONED: Final = faults.CORDONED_BY_PERSON
"""Reason of a quarantine that a person asked for."""

Tested = Literal["passed", "failed", "answered"]
"""answered: the replica wrote something, and nobody can say whether it is right."""


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """One class at one moment."""

    capacity: Mapping[str, int]
    """Node that takes pods -> its GPUs, whatever state they are in."""
    usable: Mapping[str, int]
    """Node that takes pods -> GPUs that it offers, whether or not they are out of use."""
    nodes: frozenset[str]
    """All nodes of the class."""
    devices: Mapping[str, frozenset[str]] | None
    """Node -> its devices, where each of them has a name (DRA); None: a device plugin hands them out."""
    quarantined: tuple[Quarantine, ...] = ()
    """As the status of the class has them."""
    signals: tuple[HealthSignal, ...] = ()
    """All that are there now. A signal that is not listed is gone, unless its monitor is silent."""
    silent: frozenset[Unit] = frozenset()
    """Units with evidence or quarantines of a monitor, of which it says nothing now."""
    cordons: tuple[CordonRequest, ...] = ()
    uncordons: tuple[CordonRequest, ...] = ()
    tested: Mapping[Unit, Tested] = field(default_factory=dict[Unit, Tested])
    """Units on probation whose replica was tested since the probation began."""
    hosts: frozenset[str] = frozenset()
    """Nodes of units that are out of use, of those that the cluster has, whether or not the class has them."""
    tainted: frozenset[str] = frozenset()
    """Devices that are no part of `usable` whatever is decided, since a taint keeps pods off them."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """How long a signal was there of late."""

    seconds: float
    present: bool
    """At the last decision."""
    monitor: Monitor | None = None


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """Passed from each decision of this term to the next."""

    at: datetime
    evidence: Mapping[tuple[Unit, str], Evidence]
    """(unit, reason)."""


@dataclass(frozen=True, slots=True)
class HealthPlan:
    """What was decided for one class."""

    quarantined: tuple[Quarantine, ...]
    withheld: tuple[Withheld, ...] = ()
    released: tuple[tuple[Quarantine, str], ...] = ()
    """Those that ended now, and why."""
    recheck_seconds: float | None = None
    """After which the same snapshot may give another decision; None: never."""


def decide(seen: HealthSnapshot, memory: HealthMemory | None, now: datetime) -> tuple[HealthPlan, HealthMemory]:
    """Quarantines of the class at `now`, in the order of their units. None as memory: the first decision of a term."""
    overruled = {
        each.unit
        for each in seen.uncordons
        if each.at - timedelta(seconds=SKEW_SECONDS) <= now < each.at + timedelta(seconds=OVERRULE_SECONDS)
    }
    signals = _one_each(each for each in seen.signals if each.unit not in overruled and _is_of(seen, each.unit))
    evidence = _evidence(seen, signals, memory, now)
    confirmed = {key: signal for key, signal in signals.items() if evidence[key].seconds >= CONFIRM_SECONDS}
    there = {unit for (unit, _), known in evidence.items() if known.seconds > 0}

    kept, released = _kept(seen, signals, {unit for unit, _ in confirmed}, there, now)
    kept = _asked_for(seen, kept, now)
    taken, withheld = _taken(seen, kept, confirmed, now)
    quarantined = tuple(sorted((kept | taken).values(), key=lambda each: each.unit))
    plan = HealthPlan(quarantined, withheld, tuple(released), _recheck(seen, evidence, quarantined, now))
    return plan, HealthMemory(now, evidence)


def holding(quarantined: Iterable[Quarantine]) -> frozenset[Unit]:
    """Units on which nothing is placed."""
    return frozenset(each.unit for each in quarantined if each.state == "Quarantined")


def _is_of(seen: HealthSnapshot, unit: Unit) -> bool:
    if unit.node not in seen.nodes:
        return False
    return not unit.device or seen.devices is None or unit.device in seen.devices.get(unit.node, ())


def _is_unknown(seen: HealthSnapshot, unit: Unit, rests_on: "Evidence | Quarantine") -> bool:
    """Its monitor says nothing of the unit. A unit that is not in the cluster any more is not waited for."""
    return rests_on.monitor is not None and unit in seen.silent and _is_of(seen, unit)


def _one_each(signals: Iterable[HealthSignal]) -> dict[tuple[Unit, str], HealthSignal]:
    """One of several that say the same, whatever their order; what a node or a driver says counts before a replica's
    own word."""
    found: dict[tuple[Unit, str], HealthSignal] = {}
    for each in sorted(signals, key=lambda s: (s.model is not None, s.model or "", s.monitor is None, s.message)):
        found.setdefault((each.unit, each.reason), each)
    return found


def _evidence(
    seen: HealthSnapshot,
    signals: Mapping[tuple[Unit, str], HealthSignal],
    memory: HealthMemory | None,
    now: datetime,
) -> dict[tuple[Unit, str], Evidence]:
    found: dict[tuple[Unit, str], Evidence] = {}
    before: Mapping[tuple[Unit, str], Evidence] = memory.evidence if memory is not None else {}
    step = 0.0 if memory is None else min(LONGEST_STEP, max(0.0, (now - memory.at).total_seconds()))
    known = {(each.unit, each.reason) for each in seen.quarantined if each.state == "Quarantined"}
    for key, signal in signals.items():
        was = before.get(key)
        if memory is None and key in known:
            seconds = MOST_EVIDENCE  # confirmed in an earlier term
        elif was is None:
            seconds = 0.0
        else:
            seconds = was.seconds + (step if was.present else -FADES * step)
        found[key] = Evidence(min(MOST_EVIDENCE, max(0.0, seconds)), present=True, monitor=signal.monitor)
    for key, was in before.items():
        if key in signals:
            continue
        if _is_unknown(seen, key[0], was):
            found[key] = replace(was, present=False)
        elif (seconds := was.seconds - FADES * step) > 0:
            found[key] = Evidence(seconds, present=False, monitor=was.monitor)
    return found


def _kept(
    seen: HealthSnapshot,
    signals: Mapping[tuple[Unit, str], HealthSignal],
    again: set[Unit],
    there: set[Unit],
    now: datetime,
) -> tuple[dict[Unit, Quarantine], list[tuple[Quarantine, str]]]:
    """What goes on of the quarantines before, and what ends. `there`: units about which a signal has been there of
    late; `again`: units about which one is confirmed. What begins anew is in `_taken`."""
    kept: dict[Unit, Quarantine] = {}
    released: list[tuple[Quarantine, str]] = []
    put_back = {each.unit: each.at for each in seen.uncordons}
    asked = _last(seen.cordons)
    present = {unit for unit, _ in signals}
    # One at a time, unless nothing becomes of it: where no replica runs, there is no test. One that failed waits for a
    # place among those out of use, which another one's probation gives it.
    on_probation = sum(
        each.state == "Probation"
        and (each.until is None or now < each.until)
        and each.unit not in again
        and seen.tested.get(each.unit) != "failed"
        for each in seen.quarantined
    )
    for each in sorted(seen.quarantined, key=lambda q: q.unit):
        unit = each.unit
        if unit in put_back and put_back[unit] >= each.since:
            released.append((each, "a person put it back into use"))
        elif each.by == "Person":
            request = asked.get(unit)
            if request is not None and (request.until is None or now < request.until):
                kept[unit] = replace(each, message=_words(request), until=request.until)
            else:
                released.append((each, "the time for which a person took it out of use is over"))
        elif each.state == "Probation":
            if unit in again or seen.tested.get(unit) == "failed":
                kept[unit] = each
            elif seen.tested.get(unit) == "passed":
                released.append((each, "a replica there passed its test"))
            elif each.until is None:
                kept[unit] = replace(each, until=_after(now, PROBATION_SECONDS))  # of an operator of before
            elif seen.tested.get(unit) == "answered" and now >= each.until and unit not in there:
                released.append((each, "a replica there answered its tests, and no signal came"))
            else:
                kept[unit] = each
        elif unit in present or unit in there:
            kept[unit] = each if unit not in present or each.until is None else replace(each, until=None)
        elif each.until is None and _is_unknown(seen, unit, each):
            kept[unit] = each
        elif each.until is None:
            kept[unit] = replace(each, until=_end(each, now))
        elif now < each.until or _may_come_back(seen, unit, each.until, now):
            kept[unit] = each
        elif not _is_of(seen, unit):
            released.append((each, "it is not in the cluster any more"))
        elif on_probation:
            kept[unit] = each  # one at a time
        else:
            on_probation += 1
            kept[unit] = replace(each, state="Probation", until=_after(now, PROBATION_SECONDS))
    return kept, released


def _may_come_back(seen: HealthSnapshot, unit: Unit, until: datetime, now: datetime) -> bool:
    """It is gone, its node is not, and its time is not over for long."""
    return not _is_of(seen, unit) and unit.node in seen.hosts and now < _after(until, GONE_SECONDS)


def _failed_test(each: Quarantine) -> HealthSignal:
    """What a test on probation says of a unit that goes on serving."""
    text = (
        "a replica there failed its test: it answers canaries otherwise than is known of its Model; "
        f"out of use before for {each.reason}: {each.message}"
    )
    return HealthSignal(each.unit, faults.REPLICA_GARBLED, text, each.model)


def _once_more(each: Quarantine, failed_at: datetime | None) -> Quarantine:
    """Back into quarantine, for twice as long."""
    more = replace(each, state="Quarantined", times=min(each.times + 1, 16), until=None)
    return more if failed_at is None else replace(more, until=_end(more, failed_at))


def _end(each: Quarantine, now: datetime) -> datetime:
    first = HOLD_SECONDS if each.model is None else OWN_WORD_SECONDS
    seconds = min(LONGEST_HOLD_SECONDS, first * 2.0 ** (each.times - 1))
    return _after(now, seconds)


def _after(now: datetime, seconds: float) -> datetime:
    return now.replace(microsecond=0) + timedelta(seconds=seconds)


def _asked_for(seen: HealthSnapshot, kept: Mapping[Unit, Quarantine], now: datetime) -> dict[Unit, Quarantine]:
    """With what people ask for. No bound holds them up."""
    found = dict(kept)
    put_back = {each.unit: each.at for each in seen.uncordons}
    for unit, each in _last(seen.cordons).items():
        over = each.until is not None and now >= each.until
        if over or put_back.get(unit, each.at) > each.at or unit.node not in seen.nodes:
            continue
        full = len(found) >= MOST and unit not in found  # the status has no room for more
        if not full and (unit not in found or found[unit].by != "Person"):
            since = now.replace(microsecond=0)
            found[unit] = Quarantine(unit, CORDONED, _words(each), since, until=each.until, by="Person")
    return found


def _last(requests: Iterable[CordonRequest]) -> dict[Unit, CordonRequest]:
    """The newest request about each unit, in the order of the requests: an annotation by hand may have several."""
    found: dict[Unit, CordonRequest] = {}
    for each in requests:
        if each.unit not in found or found[each.unit].at <= each.at:
            found[each.unit] = each
    return found


def _words(request: CordonRequest) -> str:
    return request.reason or "a person took it out of use"


def _taken(
    seen: HealthSnapshot,
    kept: Mapping[Unit, Quarantine],
    confirmed: Mapping[tuple[Unit, str], HealthSignal],
    now: datetime,
) -> tuple[dict[Unit, Quarantine], tuple[Withheld, ...]]:
    """Units that are taken out of use, newly or once more after a probation, and those that are not though they should
    be. Those on probation come first: their signal is not the first one."""
    bounds = _Bounds(seen, kept)
    taken: dict[Unit, Quarantine] = {}
    withheld: list[Withheld] = []
    signals: dict[Unit, HealthSignal] = {}
    for (unit, _), signal in sorted(confirmed.items(), key=lambda item: (item[1].model is not None, *item[0])):
        signals.setdefault(unit, signal)
    for unit, each in sorted(kept.items()):
        signal = signals.get(unit)
        if each.state != "Probation" or (signal is None and seen.tested.get(unit) != "failed"):
            continue
        why = bounds.why_not(unit, each.model)
        if why is None:
            taken[unit] = _once_more(each, None if signal is not None else now)
            bounds.take(unit, each.model)
        else:
            withheld.append(Withheld(signal or _failed_test(each), why))
    new = 0
    for unit, signal in signals.items():
        if unit in kept or Unit(unit.node) in bounds.out:
            continue
        why = bounds.why_not(unit, signal.model)
        if len(kept) + new >= MOST:
            why = f"{MOST} others are out of use already"
        if why is None:
            since = now.replace(microsecond=0)
            taken[unit] = Quarantine(
                unit, signal.reason, signal.message, since, model=signal.model, monitor=signal.monitor
            )
            bounds.take(unit, signal.model)
            new += 1
        else:
            withheld.append(Withheld(signal, why))
    return taken, tuple(withheld)


class _Bounds:
    """What may be out of use at once, while more is taken."""

    def __init__(self, seen: HealthSnapshot, kept: Mapping[Unit, Quarantine]) -> None:
        # What is gone is no part of the class's GPUs, and leaves no less of them.
        self.out = {unit for unit in holding(kept.values()) if _is_of(seen, unit)}
        self._seen = seen
        self._own_word = sum(each.model is not None and each.state == "Quarantined" for each in kept.values())

    def why_not(self, unit: Unit, model: str | None) -> str | None:
        """Why the unit has to stay in use; `model`: the Model on whose replicas' own word it would go."""
        total, offered = sum(self._seen.capacity.values()), sum(self._seen.usable.values())
        before, after = _gpus(self._seen.capacity, self.out), _gpus(self._seen.capacity, self.out | {unit})
        offering = {each for each in self.out if each.device not in self._seen.tainted}
        lost = _gpus(self._seen.usable, offering)
        losing = lost if unit.device in self._seen.tainted else _gpus(self._seen.usable, offering | {unit})
        if losing >= offered and losing > lost:
            return "no GPU of the class would be left"
        if before and after > before and after * 100 > total * SHARE_PERCENT:
            return f"{before} of {total} GPUs are out of use already, and more than {SHARE_PERCENT} % may not be"
        if model is not None and self._own_word:
            return "another one is out of use on the word of replicas alone, and only one may be"
        return None

    def take(self, unit: Unit, model: str | None) -> None:
        self.out.add(unit)
        self._own_word += model is not None


def _gpus(by_node: Mapping[str, int], units: Iterable[Unit]) -> int:
    """GPUs of these units, on nodes that have so many."""
    single: dict[str, int] = {}
    whole: set[str] = set()
    for unit in units:
        if unit.device:
            single[unit.node] = single.get(unit.node, 0) + 1
        else:
            whole.add(unit.node)
    return sum(gpus if node in whole else min(gpus, single.get(node, 0)) for node, gpus in by_node.items())


def _recheck(
    seen: HealthSnapshot,
    evidence: Mapping[tuple[Unit, str], Evidence],
    quarantined: Sequence[Quarantine],
    now: datetime,
) -> float | None:
    # What is over waits for a test, or for another one's probation.
    times = [max(1.0, (each.until - now).total_seconds()) for each in quarantined if each.until and each.until > now]
    if any(each.state == "Quarantined" and each.until and each.until <= now for each in quarantined):
        times.append(LONGEST_STEP)
    changes = (each for (unit, _), each in evidence.items() if each.present or not _is_unknown(seen, unit, each))
    if any(not each.present or each.seconds < MOST_EVIDENCE for each in changes):
        times.append(RECHECK_SECONDS)
    return min(times, default=None)
