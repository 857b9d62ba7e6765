"""Reasons and messages of a plan. The message of a placed Model does not depend on other Models: its status is written
only when something of its own changes."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from shoal.api import reasons
from shoal.core import quantity
from shoal.core.placement import phrases
from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.contenders import Contenders
from shoal.core.placement.leaving import forced, leaving, others
from shoal.core.placement.modelplan import ModelPlan
from shoal.core.placement.phrases import capacity_text, gpus
from shoal.core.placement.types import Candidate, Excluded, Moves, Placement, VariantPlan

NOT_NEEDED: Final = "NotNeeded"
IN_BACKOFF: Final = "InBackoff"
LIMITED: Final = "Limited"
LAST_CHOICE: Final = "; it is the last choice for a while"
"""End of the text of a class in backoff."""
_SHOWN: Final = 4
"""Classes named in a message; the status has an entry for each."""


class PlacementMessages:
    """Builds the `Placement` of each Model of one plan."""

    def __init__(self, plans: Sequence[ModelPlan], capacities: dict[str, ClassCapacity], moves: Moves) -> None:
        self._capacities, self._moves = capacities, moves
        self._outages = {name: each.supply.outage for name, each in capacities.items() if each.supply.outage}
        self._contenders = Contenders(plans, capacities)
        self._money: dict[Decimal, str] = {}
        self._capacity_texts: dict[tuple[str, int], str] = {}

    def placement(self, plan: ModelPlan) -> Placement:
        variants = self._variants(plan)
        cost: Decimal | None = Decimal(0)
        for variant in variants:
            if variant.replicas and cost is not None:
                cost = cost + Decimal(variant.hourly_cost) if variant.hourly_cost is not None else None
        reason, message = self._summary(plan, variants)
        return Placement(
            variants=variants,
            excluded=self._excluded(plan),
            missing=plan.missing,
            reason=reason,
            message=message,
            hourly_cost=None if cost is None else self._amount(cost),
        )

    # --- variants ---------------------------------------------------------------------------------------------------

    def _variants(self, plan: ModelPlan) -> tuple[VariantPlan, ...]:
        found: list[VariantPlan] = []
        states = plan.demand.replica_states
        for candidate in plan.order:
            name = candidate.gpu_class
            replicas = plan.replicas(name)
            there = states.get(name)
            # At zero replicas the empty Deployment stays: a wake is faster when it exists.
            unused = there is None or (not there.by_node and plan.demand.wanted)
            if not replicas and unused and name not in plan.asking_again:
                continue
            capacity = self._capacities.get(name)
            gone = () if plan.unchanged else leaving(plan, name, capacity)
            found.append(
                VariantPlan(
                    gpu_class=name,
                    replicas=replicas,
                    gpus=candidate.gpus,
                    hourly_cost=self._cost(candidate, replicas),
                    waiting=plan.waiting.get(name, 0),
                    leaving=gone,
                    forced=forced(plan, name, capacity) if gone else (),
                    others=others(plan, name, capacity) if gone else (),
                    relocated=name == plan.relocated and replicas > 0,
                )
            )
        if not plan.unchanged:
            known = {c.gpu_class for c in plan.order}
            sums = {r.gpu_class: r.why for r in plan.demand.rejected}
            for name in sorted(n for n in states if n not in known and plan.replicas(n)):
                gone = leaving(plan, name, self._capacities.get(name))
                why = "" if plan.demand.frozen else sums.get(name, "the Model may not use this class any more")
                found.append(
                    VariantPlan(name, plan.replicas(name), states[name].gpus, None, 0, gone, retired=True, why=why)
                )
        return tuple(found)

    def _cost(self, candidate: Candidate, replicas: int) -> str | None:
        return None if candidate.hourly_cost is None else self._amount(candidate.hourly_cost * replicas)

    def _amount(self, amount: Decimal) -> str:
        text = self._money.get(amount)
        if text is None:
            text = self._money[amount] = quantity.money(amount)
        return text

    # --- classes that are not used ----------------------------------------------------------------------------------

    def _excluded(self, plan: ModelPlan) -> tuple[Excluded, ...]:
        used = [bool(plan.replicas(c.gpu_class)) for c in plan.order]
        dearest = max((i for i, in_use in enumerate(used) if in_use), default=-1)
        found: list[Excluded] = []
        for i, c in enumerate(plan.order):
            if not used[i]:
                reason, why = self._why_not(plan, c, cheaper=i < dearest)
                found.append(Excluded(c.gpu_class, why, reason, c.gpus, c.kv_tokens, self._cost(c, 1)))
        retired = plan.held  # a rejected class that still serves is listed among the variants
        found.extend(Excluded(r.gpu_class, r.why, r.reason) for r in plan.demand.rejected if r.gpu_class not in retired)
        return tuple(found)

    def _why_not(self, plan: ModelPlan, candidate: Candidate, *, cheaper: bool) -> tuple[str, str]:
        capacity = self._capacities.get(candidate.gpu_class)
        if capacity is None or capacity.largest < candidate.gpus:
            return reasons.NO_CAPACITY, self._capacity_text(candidate)  # whatever its price, however full it is
        if candidate.gpu_class in plan.demand.backoffs:
            return IN_BACKOFF, f"{plan.demand.backoffs[candidate.gpu_class]}{LAST_CHOICE}"
        if capacity.supply.outage and not capacity.fits(candidate.gpus) and (cheaper or plan.missing):
            return IN_BACKOFF, f"{capacity.supply.outage}; nodes there are the last choice for a while"
        if not cheaper and not plan.missing:
            return NOT_NEEDED, "not needed: what is used is not dearer"
        limit = phrases.limit(plan, candidate)
        if limit is not None:
            return LIMITED, limit
        if plan.missing:
            return reasons.NO_CAPACITY, self._capacity_text(candidate)
        if keeps := next((state.keeps for state in plan.demand.replica_states.values() if state.keeps), ""):
            return reasons.NO_CAPACITY, f"no room when the replicas were placed; {keeps} forbids to move them"
        if candidate.hourly_cost is None or not self._moves.in_flight:
            return reasons.NO_CAPACITY, "no room when the replicas were placed"
        return (
            reasons.NO_CAPACITY,
            f"no room when the replicas were placed; they move here, a few at a time, when there is and it saves "
            f"{self._moves.min_saving_percent} % or more",
        )

    def _capacity_text(self, candidate: Candidate) -> str:
        key = (candidate.gpu_class, candidate.gpus)
        text = self._capacity_texts.get(key)
        if text is None:
            text = self._capacity_texts[key] = capacity_text(self._capacities.get(candidate.gpu_class), candidate.gpus)
        return text

    # --- reason and message -----------------------------------------------------------------------------------------

    def _summary(self, plan: ModelPlan, variants: Sequence[VariantPlan]) -> tuple[str, str]:
        demand = plan.demand
        placed = phrases.placed(plan)
        if demand.frozen and plan.missing:
            return reasons.PENDING, f"keeps what it has: {placed or 'no replica'}"
        if not demand.candidates and not demand.frozen:
            return self._fits_nowhere(plan, placed)
        if plan.missing:
            return self._no_capacity(plan, placed)
        if plan.asking_again:
            text = phrases.asks_again(plan)
            return reasons.PENDING, f"{text}; placed: {placed}" if placed else text
        if plan.waiting:
            text = self._waits(plan)
            return reasons.DRAINING_OTHERS, f"{text}; placed: {placed}" if placed else text
        text = phrases.with_gpus(plan, placed) if placed else "no replica is wanted"
        if plan.adding:
            text += f"; {phrases.waits_for_nodes(plan)}"
        if plan.gated:
            text = f"{phrases.held_back(plan)}; {text}" if placed else phrases.held_back(plan)
        text += phrases.backed_off(plan) + phrases.outages(plan, self._outages)
        if plan.yielding:
            return reasons.MOVING, f"{text}; {self._yields(plan)}"
        if plan.relocated in plan.held:
            return reasons.MOVING, f"{text}; {phrases.relocation(plan)}"
        if plan.moving_from is not None:
            return reasons.MOVING, (
                f"{text}; moving to {plan.moving_to}, which is cheaper: a replica on {plan.moving_from} goes "
                "when its replacement is ready"
            )
        if plan.replacing:
            text += f"; {phrases.staying(plan)}, until others are ready in their place"
        return reasons.PLACED_ON, text

    def _fits_nowhere(self, plan: ModelPlan, placed: str) -> tuple[str, str]:
        rejected = plan.demand.rejected
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
        return reason, f"{message}; {phrases.staying(plan)} meanwhile" if plan.held else message

    def _no_capacity(self, plan: ModelPlan, placed: str) -> tuple[str, str]:
        demand = plan.demand
        sizes = {c.gpus for c in demand.candidates}
        what = "a replica" if plan.missing == demand.wanted else f"{plan.missing} of {demand.wanted} replicas"
        of = f" of {gpus(next(iter(sizes)))}" if len(sizes) == 1 else ""

        def one(candidate: Candidate) -> str:
            name = candidate.gpu_class if of else f"{candidate.gpu_class} ({gpus(candidate.gpus)})"
            return f"{name}: {phrases.limit(plan, candidate) or self._capacity_text(candidate)}"

        text = f"no room for {what}{of}: {phrases.listing([one(c) for c in plan.order[:_SHOWN]], of=len(plan.order))}"
        if demand.rejected:
            text += f"; does not fit on {', '.join(r.gpu_class for r in demand.rejected)}"
        if plan.waiting:
            text += f"; {self._waits(plan)}"
        if placed:
            text += f"; placed: {placed}"
        if staying := phrases.staying(plan):
            text += f"; {staying} meanwhile"
        contenders = self._contenders.outranking(plan)
        if contenders:
            return reasons.OUTRANKED, f"waits for {contenders}; {text}"
        return reasons.NO_CAPACITY, text

    def _yields(self, plan: ModelPlan) -> str:
        """For which Models an evicted replica goes that still serves."""
        names = sorted(f"{d.key} (priority {d.priority})" for d in plan.evicted_by)
        verb = "needs" if len(names) == 1 else "need"
        classes = " and ".join(sorted(plan.yielding))
        return (
            f"{' and '.join(names)} {verb} its GPUs on {classes}: the replica there goes when its replacement is ready"
        )

    def _waits(self, plan: ModelPlan) -> str:
        parts: list[str] = []
        for candidate in plan.order:
            replicas = plan.waiting.get(candidate.gpu_class, 0)
            if replicas:
                who = self._contenders.releasing(plan, candidate.gpu_class)
                parts.append(f"waits for {gpus(replicas * candidate.gpus)} on {candidate.gpu_class} that {who}")
        return "; ".join(parts)
