"""Sums over the replicas of a Model and over Models. What is not known is never counted as zero."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from shoal.api.decisions import ModelScaling, ReplicaStats

STARTING = ("fetching", "loading")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of which parts may be missing."""

    known: float | None
    """Of the parts that are known; None: of none is."""
    whole: bool
    """No part is missing."""

    def text(self, format: Callable[[float], str] = lambda value: f"{value:,.0f}") -> str:
        """`12`; `12+?` where a part is not known; `?` where none is."""
        if self.known is None:
            return "?"
        return format(self.known) + ("" if self.whole else "+?")


def add(parts: Iterable[float | None]) -> Sum:
    """The sum of what is known. Of nothing at all it is 0."""
    listed = list(parts)
    known = [part for part in listed if part is not None]
    if listed and not known:
        return Sum(None, False)
    return Sum(sum(known), len(known) == len(listed))


def serving(model: ModelScaling) -> list[ReplicaStats]:
    """Replicas of which load is to be expected: not those that start, nor those that end and say nothing any more."""
    return [
        replica
        for replica in model.replicas
        if replica.phase not in STARTING and (replica.phase is not None or replica.pod in model.stale)
    ]


def kv_percent(models: Iterable[ModelScaling]) -> float | str | None:
    """KV tokens in use of all there are, in per cent; "-" without a replica that serves; None as soon as one replica
    does not say both."""
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
    """"" where Models differ."""


def line(models: Iterable[ModelScaling]) -> TopLine:
    """Over these Models."""
    chosen = list(models)
    replicas = [replica for model in chosen for replica in serving(model)]
    currencies = {model.currency for model in chosen if model.currency}
    return TopLine(
        wanted=sum(model.wanted for model in chosen),
        ready=sum(model.ready for model in chosen),
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
    """What the gateways that are heard say together, and a part that is missing where one is not."""
    silent = set(model.stale) - {replica.pod for replica in model.replicas}
    return (value, None) if silent else (value,)


def _amount(text: str | None) -> float | None:
    try:
        return None if text is None else float(Decimal(text))
    except InvalidOperation:
        return None
