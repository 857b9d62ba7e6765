"""The reported load of replicas and gateways, summed. Stale sources are named; impossible values are clamped and
named."""

from dataclasses import dataclass

from shoal.core.scaling.types import Demand, Load, ModelSnapshot, Replica, ScalingVariant

_STARTING = frozenset({"fetching", "loading"})
_LARGER_THAN_PREDICTED = 2
"""A reported KV cache larger than this many times the predicted one is not believed."""


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Sums over live sources, in requests and tokens."""

    used: int
    """KV tokens."""
    waiting: int
    waiting_tokens: int
    running: int
    in_flight: int
    held: int
    held_tokens: int
    load_unknown: tuple[Replica, ...]
    """Ready replicas whose load is unknown: they count as loaded to their target."""
    stale: tuple[str, ...]
    """Names of sources that are not fresh. While there is one, nothing goes down."""
    invalid: tuple[str, ...]
    """Reported values that are impossible, as phrases."""
    kv_tokens: dict[str, int]
    """Of one replica, by class, as engines report; the smallest where they differ."""
    adapters: int = 0
    """Distinct adapters in flight or held."""
    adapters_known: bool = True
    """Every live gateway reports its adapters."""
    adapter_slots: int | None = None
    """Distinct adapters that one replica serves at once, the smallest where replicas differ; None: no replica serves
    adapters."""


def live(replica: Replica) -> bool:
    """Whether a replica is supply, now or once it has started."""
    return not replica.deleting and not replica.lost


def fleet_load(snapshot: ModelSnapshot) -> FleetLoad:
    """Sums the reported load. O(replicas + gateways)."""
    known = {v.gpu_class: v for v in snapshot.variants}
    used = waiting = waiting_tokens = running = 0
    load_unknown: list[Replica] = []
    stale: list[str] = []
    invalid: list[str] = []
    kv_tokens: dict[str, int] = {}
    for replica in snapshot.replicas:
        if not live(replica):
            continue
        load = _validated(replica, known.get(replica.gpu_class), invalid)
        if load is None or load.waiting is None or load.running is None or load.kv_tokens_used is None:
            idle = load is not None and load.phase in _STARTING
            if replica.ready:
                load_unknown.append(replica)
            if (replica.ready or replica.was_ready) and not (idle and not replica.ready):
                stale.append(replica.pod)
        if load is None:
            continue
        used += load.kv_tokens_used or 0
        waiting += load.waiting or 0
        waiting_tokens += load.waiting_tokens or 0
        running += load.running or 0
        if load.kv_tokens_total is not None:
            total = load.kv_tokens_total
            kv_tokens[replica.gpu_class] = min(kv_tokens.get(replica.gpu_class, total), total)
    demands = [v.demand for v in snapshot.sources or () if v.demand is not None]
    stale += [v.name for v in snapshot.sources or () if v.demand is None or not v.demand.complete]
    if snapshot.sources is None:
        stale.append("the gateways")
    adapters = [d.adapters for d in demands]
    slots = [r.load.adapter_slots for r in snapshot.replicas if live(r) and r.load is not None]
    return FleetLoad(
        used=used,
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        running=running,
        in_flight=_total(demands, "in_flight"),
        held=_total(demands, "held"),
        held_tokens=_total(demands, "held_tokens"),
        load_unknown=tuple(load_unknown),
        stale=tuple(stale),
        invalid=tuple(invalid),
        kv_tokens=kv_tokens,
        adapters=len(frozenset[str]().union(*(a for a in adapters if a is not None))),
        adapters_known=None not in adapters,
        adapter_slots=min((s for s in slots if s is not None and s > 0), default=None),
    )


def _total(demands: list[Demand], key: str) -> int:
    return sum(max(0, getattr(d, key)) for d in demands)


def _validated(replica: Replica, variant: ScalingVariant | None, invalid: list[str]) -> Load | None:
    """The load of a replica without impossible values: a negative one is unknown, one above its bound is the bound."""
    load = replica.load
    if load is None:
        return None

    def natural(value: int | None, what: str) -> int | None:
        if value is not None and value < 0:
            invalid.append(f"{replica.pod} reports {value} {what}")
            return None
        return value

    def bounded(value: int | None, bound: int | None, what: str) -> int | None:
        if value is not None and bound is not None and value > bound:
            invalid.append(f"{replica.pod} reports {value} {what} of {bound}")
            return bound
        return value

    total = natural(load.kv_tokens_total, "KV tokens in all") or None
    predicted = variant.kv_tokens if variant else None
    if predicted is not None:
        total = bounded(total, _LARGER_THAN_PREDICTED * predicted, "KV tokens in all")
    size = total if total is not None else predicted
    return Load(
        engine_boot=load.engine_boot,
        phase=load.phase,
        running=bounded(natural(load.running, "running"), load.max_running, "running"),
        max_running=load.max_running,
        waiting=natural(load.waiting, "waiting"),
        waiting_tokens=natural(load.waiting_tokens, "waiting tokens"),
        kv_tokens_used=bounded(natural(load.kv_tokens_used, "KV tokens in use"), size, "KV tokens in use"),
        kv_tokens_total=total,
        prompt_tokens_total=load.prompt_tokens_total,
        generation_tokens_total=load.generation_tokens_total,
        adapter_slots=load.adapter_slots,
    )
