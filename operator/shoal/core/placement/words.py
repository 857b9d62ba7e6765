"""What a plan says to people. A sentence about a Model that is placed does not change when other Models come and go: a
status is written only when something of its own changes."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from shoal.api import reasons
from shoal.core import quantity
from shoal.core.placement import phrases
from shoal.core.placement.case import Case
from shoal.core.placement.leaving import forced, leaving
from shoal.core.placement.phrases import gpus, room_sentence
from shoal.core.placement.rivals import Rivals
from shoal.core.placement.room import Room
from shoal.core.placement.types import Candidate, Excluded, Moves, Placement, VariantPlan

NOT_NEEDED: Final = "NotNeeded"
SET_BACK: Final = "SetBack"
LIMITED: Final = "Limited"
_SHOWN: Final = 4
"""Classes that a message goes into; the status has an entry for each."""


class Words:
    """One plan's sentences."""

    def __init__(self, cases: Sequence[Case], rooms: dict[str, Room], moves: Moves) -> None:
        self._rooms, self._moves = rooms, moves
        self._rivals = Rivals(cases, rooms)
        self._money: dict[Decimal, str] = {}
        self._rooms_said: dict[tuple[str, int], str] = {}

    def placement(self, case: Case) -> Placement:
        variants = self._variants(case)
        cost: Decimal | None = Decimal(0)
        for variant in variants:
            if variant.replicas and cost is not None:
                cost = cost + Decimal(variant.hourly_cost) if variant.hourly_cost is not None else None
        reason, message = self._summary(case, variants)
        return Placement(
            variants=variants,
            excluded=self._excluded(case),
            missing=case.missing,
            reason=reason,
            message=message,
            hourly_cost=None if cost is None else self._say(cost),
        )

    # --- variants ---------------------------------------------------------------------------------------------------

    def _variants(self, case: Case) -> tuple[VariantPlan, ...]:
        found: list[VariantPlan] = []
        standing = case.demand.standing
        for candidate in case.order:
            name = candidate.gpu_class
            replicas = case.replicas(name)
            there = standing.get(name)
            # At zero an empty Deployment stays: what is there already wakes faster.
            if not replicas and (there is None or (not there.on and case.demand.wanted)):
                continue
            found.append(
                VariantPlan(
                    gpu_class=name,
                    replicas=replicas,
                    gpus=candidate.gpus,
                    hourly_cost=self._cost(candidate, replicas),
                    waiting=case.waiting.get(name, 0),
                    leaving=() if case.quiet else leaving(case, name, self._rooms.get(name)),
                    forced=() if case.quiet else forced(case, name, self._rooms.get(name)),
                )
            )
        if not case.quiet:
            known = {c.gpu_class for c in case.order}
            sums = {r.gpu_class: r.why for r in case.demand.rejected}
            for name in sorted(n for n in standing if n not in known and case.replicas(n)):
                gone = leaving(case, name, self._rooms.get(name))
                why = "" if case.demand.frozen else sums.get(name, "the Model may not use this class any more")
                found.append(
                    VariantPlan(name, case.replicas(name), standing[name].gpus, None, 0, gone, retired=True, why=why)
                )
        return tuple(found)

    def _cost(self, candidate: Candidate, replicas: int) -> str | None:
        return None if candidate.hourly_cost is None else self._say(candidate.hourly_cost * replicas)

    def _say(self, amount: Decimal) -> str:
        text = self._money.get(amount)
        if text is None:
            text = self._money[amount] = quantity.money(amount)
        return text

    # --- classes that are not used ----------------------------------------------------------------------------------

    def _excluded(self, case: Case) -> tuple[Excluded, ...]:
        used = [bool(case.replicas(c.gpu_class)) for c in case.order]
        dearest = max((i for i, in_use in enumerate(used) if in_use), default=-1)
        found: list[Excluded] = []
        for i, c in enumerate(case.order):
            if not used[i]:
                reason, why = self._why_not(case, c, cheaper=i < dearest)
                found.append(Excluded(c.gpu_class, why, reason, c.gpus, c.kv_tokens, self._cost(c, 1)))
        retired = case.held  # a class that is ruled out and still serves is told among the variants
        found.extend(Excluded(r.gpu_class, r.why, r.reason) for r in case.demand.rejected if r.gpu_class not in retired)
        return tuple(found)

    def _why_not(self, case: Case, candidate: Candidate, *, cheaper: bool) -> tuple[str, str]:
        room = self._rooms.get(candidate.gpu_class)
        if room is None or room.largest < candidate.gpus:
            return reasons.NO_CAPACITY, self._room(candidate)  # whatever it costs, and however full it is
        if candidate.gpu_class in case.demand.setbacks:
            return SET_BACK, f"{case.demand.setbacks[candidate.gpu_class]}; it is the last choice for a while"
        if not cheaper and not case.missing:
            return NOT_NEEDED, "not needed: what is used is not dearer"
        limit = phrases.limit(case, candidate)
        if limit is not None:
            return LIMITED, limit
        if case.missing:
            return reasons.NO_CAPACITY, self._room(candidate)
        if candidate.hourly_cost is None or not self._moves.in_flight:
            return reasons.NO_CAPACITY, "no room when the replicas were placed"
        return (
            reasons.NO_CAPACITY,
            f"no room when the replicas were placed; they move here, a few at a time, when there is and it saves "
            f"{self._moves.min_saving_percent} % or more",
        )

    def _room(self, candidate: Candidate) -> str:
        key = (candidate.gpu_class, candidate.gpus)
        text = self._rooms_said.get(key)
        if text is None:
            text = self._rooms_said[key] = room_sentence(self._rooms.get(candidate.gpu_class), candidate.gpus)
        return text

    # --- reason and message -----------------------------------------------------------------------------------------

    def _summary(self, case: Case, variants: Sequence[VariantPlan]) -> tuple[str, str]:
        demand = case.demand
        placed = phrases.placed(case)
        if demand.frozen and case.missing:
            return reasons.PENDING, f"keeps what it has: {placed or 'no replica'}"
        if not demand.candidates and not demand.frozen:
            return self._fits_nowhere(case, placed)
        if case.missing:
            return self._no_room(case, placed)
        if case.waiting:
            text = self._waits(case)
            return reasons.DRAINING_OTHERS, f"{text}; placed: {placed}" if placed else text
        text = phrases.with_gpus(case, placed) if placed else "no replica is wanted"
        text += phrases.set_back(case)
        if case.yielding:
            return reasons.MOVING, f"{text}; {self._yields(case)}"
        if case.moving_from is not None:
            return reasons.MOVING, (
                f"{text}; moving to {case.moving_to}, which is cheaper: a replica on {case.moving_from} goes "
                "when its replacement is ready"
            )
        if case.replacing:
            text += f"; {phrases.staying(case)}, until others are ready in their place"
        return reasons.PLACED_ON, text

    def _fits_nowhere(self, case: Case, placed: str) -> tuple[str, str]:
        rejected = case.demand.rejected
        if not rejected:
            return reasons.NO_CLASS, "there is no GPUClass: create one for your GPU nodes"
        given = {r.reason for r in rejected}
        reason = reasons.SIZE_UNKNOWN if reasons.SIZE_UNKNOWN in given else reasons.NO_FIT
        if len(given) == 1:
            reason = next(iter(given))
        sums = {r.why for r in rejected}
        text = (
            next(iter(sums))
            if len(sums) == 1 and len(rejected) > 1
            else phrases.listing([f"{r.gpu_class}: {r.why}" for r in rejected[:_SHOWN]], of=len(rejected))
        )
        message = f"fits on no GPU class: {text}"
        return reason, f"{message}; {phrases.staying(case)} meanwhile" if case.held else message

    def _no_room(self, case: Case, placed: str) -> tuple[str, str]:
        demand = case.demand
        sizes = {c.gpus for c in demand.candidates}
        what = "a replica" if case.missing == demand.wanted else f"{case.missing} of {demand.wanted} replicas"
        of = f" of {gpus(next(iter(sizes)))}" if len(sizes) == 1 else ""

        def one(candidate: Candidate) -> str:
            name = candidate.gpu_class if of else f"{candidate.gpu_class} ({gpus(candidate.gpus)})"
            return f"{name}: {phrases.limit(case, candidate) or self._room(candidate)}"

        text = f"no room for {what}{of}: {phrases.listing([one(c) for c in case.order[:_SHOWN]], of=len(case.order))}"
        if demand.rejected:
            text += f"; does not fit on {', '.join(r.gpu_class for r in demand.rejected)}"
        if case.waiting:
            text += f"; {self._waits(case)}"
        if placed:
            text += f"; placed: {placed}"
        if staying := phrases.staying(case):
            text += f"; {staying} meanwhile"
        rivals = self._rivals.before(case)
        if rivals:
            return reasons.OUTRANKED, f"waits for {rivals}; {text}"
        return reasons.NO_CAPACITY, text

    def _yields(self, case: Case) -> str:
        """Whom a replica makes room for that still serves."""
        names = sorted(f"{d.key} (priority {d.priority})" for d in case.evicted_by)
        verb = "needs" if len(names) == 1 else "need"
        classes = " and ".join(sorted(case.yielding))
        return (
            f"{' and '.join(names)} {verb} its GPUs on {classes}: the replica there goes when its replacement is ready"
        )

    def _waits(self, case: Case) -> str:
        parts: list[str] = []
        for candidate in case.order:
            replicas = case.waiting.get(candidate.gpu_class, 0)
            if replicas:
                who = self._rivals.going(case, candidate.gpu_class)
                parts.append(f"waits for {gpus(replicas * candidate.gpus)} on {candidate.gpu_class} that {who}")
        return "; ".join(parts)
