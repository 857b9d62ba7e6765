"""How well requests for adapters find them loaded."""

from dataclasses import dataclass

from shoal.core.advice.replay import LeastInFlight, Placement, Replay


@dataclass(frozen=True, slots=True)
class AdapterLocality:
    """Over the requests for adapters. None is unknown."""

    requests: int
    adapters: int
    resident: float | None
    """Share of requests that found their adapter loaded at some replica, from 0 to 1."""
    pairs: int
    """Pairs of an adapter and a replica that served it: the least number of loads."""
    pairs_least_in_flight: int
    """The same if each request had gone to the replica with the fewest."""


def adapter_locality(replay: Replay) -> AdapterLocality | None:
    """None: no request was for an adapter."""
    asked = [one for one in replay.requests if one.adapter is not None]
    if not asked:
        return None
    known = [one.adapter_resident for one in asked if one.adapter_resident is not None]
    return AdapterLocality(
        len(asked),
        len({one.adapter for one in asked}),
        sum(known) / len(known) if known else None,
        len({(one.adapter, one.replica) for one in asked}),
        _pairs(replay, LeastInFlight()),
    )


def _pairs(replay: Replay, choose: Placement) -> int:
    return len({(one.adapter, place) for one, place in replay.places(choose) if one.adapter is not None})
