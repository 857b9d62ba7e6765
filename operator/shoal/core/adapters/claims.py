"""When an adapter that is to go may be unloaded (streams.md, "Acknowledgement"): pure, asked again at every change.

A retirement begins with a barrier: the `seq` of the message that calls the adapter `retiring`, after which gateways
choose it no more. Unloading it under a request would hold up every other load and unload, and the next request would
make the engine load it again unseen, so whoever may still send, or has something of it in flight, holds a claim:

    a gateway that acknowledged the barrier with none of it running     none
    one whose stream is open, and which last said that some runs        until drainSeconds after its last word
    one whose stream is open                                            until 12 s after its last word, or the barrier
    one whose stream closed                                             until 12 s after that
    those whom an agent that restarted beside its engine may not know   until 15 s after its start

An engine ends the requests of a gateway that is gone within those 12 s. Of one that is only not heard it does not,
which is why its word that some run counts for longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core import drain
from shoal.core.drain import Gateway


@dataclass(frozen=True, slots=True)
class Retirement:
    """An adapter that no gateway may choose any more."""

    name: str
    barrier: int
    """`seq` of the message that said so."""
    told: float
    """When."""


def holders(retirement: Retirement, gateways: Iterable[Gateway], drain_seconds: float, now: float) -> list[Gateway]:
    """The gateways for which the adapter has to stay in the engine at `now`."""
    return [
        gateway
        for gateway in gateways
        if not through(gateway, retirement) and now < claim_end(gateway, retirement, drain_seconds)
    ]


def through(gateway: Gateway, retirement: Retirement) -> bool:
    """Whether it acts on the retirement and has none of the adapter left."""
    acts = gateway.seq is not None and gateway.seq >= retirement.barrier
    return acts and retirement.name not in gateway.adapters


def claim_end(gateway: Gateway, retirement: Retirement, drain_seconds: float) -> float:
    """Until when a gateway that is not through may have requests of the adapter here."""
    if gateway.closed is not None:
        return max(gateway.heard, gateway.closed) + drain.CLAIM_SECONDS
    last = max(gateway.heard, retirement.told)
    return last + (drain_seconds if retirement.name in gateway.adapters else drain.CLAIM_SECONDS)
