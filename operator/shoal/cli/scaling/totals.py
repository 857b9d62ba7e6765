"""Sums over replicas of a Model and over Models. Unknown values are never counted as zero."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from shoal.api.decisions import ModelScaling, ReplicaStats

STARTING = ("fetching", "loading")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum with possibly unknown parts."""

    known: float | None
    """Sum of the known parts; None: no part is known."""
    whole: bool
    """Whether all parts are known."""

    def text(self, format: Callable[[float], str] = lambda value: f"{value:,.0f}") -> str:
        """`12`; `12+?` with unknown parts; `?` if all parts are unknown."""
        if self.known is None:
            return "?"
        return format(self.known) + ("" if self.whole else "+?")


def add(parts: Iterable[float | None]) -> Sum:
    """Adds the known parts. The sum of no parts is 0."""
    listed = list(parts)
    known = [part for part in listed if part is not None]
    if listed and not known:
        return Sum(None, False)
    return Sum(sum(known), len(known) == len(listed))


def serving(model: ModelScaling) -> list[ReplicaStats]:
    """Replicas that should report load: not those that are starting, nor those that have ended and are silent."""
    return [
        replica
        for replica in model.replicas
        if replica.phase not in STARTING and (replica.phase is not None or replica.pod in model.stale)
    ]


def kv_percent(models: Iterable[ModelScaling]) -> float | str | None:
    """KV cache utilization in percent; "-" without a serving replica; None if a replica does not report both values."""
    replicas = [replica for model in models for replica in serving(model)]
    if not replicas:
        return "-"
    used, total = 0, 0
    for replica in replicas:
        if replica.kv_tokens_used is None or not replica.kv_tokens_total:
            return None
        used += replica.kv_tokens_used
        total += replica.kv_tokens_total
    return 100 * used / total


@dataclass(frozen=True, slots=True)
class TopLine:
    """One line of `top`: a Model, or the totals."""

    wanted: int
    ready: int
    kv_percent: float | str | None
    queue: Sum
    held: Sum
    in_flight: Sum
    requests: Sum
    """Per second."""
    tokens: Sum
    """Per second."""
    cost: Sum
    """Per hour, in `currency`."""
    currency: str
    """"" if Models have different currencies."""


def line(models: Iterable[ModelScaling]) -> TopLine:
    """Totals of these Models."""
    chosen = list(models)
    replicas = [replica for model in chosen for replica in serving(model)]
    currencies = {model.currency for model in chosen if model.currency}
    return TopLine(
        wanted=sum(model.wanted for model in chosen),
        ready=sum(model.ready_replicas for model in chosen),
        kv_percent=kv_percent(chosen),
        queue=add(replica.waiting for replica in replicas),
        held=add(part for model in chosen for part in _of_gateways(model, model.held)),
        in_flight=add(part for model in chosen for part in _of_gateways(model, model.in_flight)),
        requests=add(part for model in chosen for part in _of_gateways(model, model.arrivals_per_second)),
        tokens=add(replica.tokens_per_second for replica in replicas),
        cost=add(_amount(model.hourly_cost) for model in chosen) if len(currencies) < 2 else Sum(None, False),
        currency=next(iter(currencies)) if len(currencies) == 1 else "",
    )


def _of_gateways(model: ModelScaling, value: float | None) -> tuple[float | None, ...]:
    """The sum over the gateways that report, and an unknown part if a gateway is stale."""
    silent = set(model.stale) - {replica.pod for replica in model.replicas}
    return (value, None) if silent else (value,)


def _amount(text: str | None) -> float | None:
    try:
        return None if text is None else float(Decimal(text))
    except InvalidOperation:
        return None
