"""When an adapter that is to go may be unloaded (streams.md, "Acknowledgement"): pure, asked again at every change.

A retirement begins with a barrier: the `seq` of the message that calls the adapter `retiring`, after which gateways
choose it no more. Unloading it under a request would hold up every other load and unload, and the next request would
make the engine load it again unseen, so whoever may still send, or has something of it in flight, holds a claim:

    a gateway that acknowledged the barrier with none of it running     none
    one whose stream is open                                            until 13 s after its last word, or the barrier
    one whose stream closed                                             until 13 s after that
    those whom an agent that has just started may not know              until 15 s after its start

13 s, because a gateway goes on choosing a replica for 12 s after the last message that it heard, and a request may be
on its way for one more. What it sent in its last seconds it may never have told, so after that it is over when the
engine was seen idle, when the gateway has started anew, or else after a minute: gateways say what they run every five
seconds, and an engine ends the requests of one that is gone. So it is with those whom an agent that started beside a
running engine may not know. Of one whose last word was that the adapter runs it is over after drainSeconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.core import drain
from shoal.core.drain import GatewayProgress

LINGER_SECONDS: Final = 60.0
"""How long the requests of a gateway that is not heard any more may run without its ever having told."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """An adapter that no gateway may choose any more."""

    name: str
    barrier: int
    """`seq` of the message that said so."""
    published_at: float
    """When."""


def holders(
    retirement: Retirement,
    gateways: Iterable[GatewayProgress],
    now: float,
    *,
    drain_seconds: float,
    idle_at: float | None = None,
) -> list[GatewayProgress]:
    """The gateways for which the adapter has to stay in the engine at `now`. `idle_at`: when the engine was last seen
    with nothing running or waiting."""
    known = tuple(gateways)
    return [
        gateway
        for gateway in known
        if not through(gateway, retirement) and _holds(gateway, known, retirement, now, drain_seconds, idle_at)
    ]


def knows_all(started: float, now: float, *, joined: bool, idle_at: float | None) -> bool:
    """Whether an agent that started at `started` knows whoever may have requests in its engine; `joined`: the engine
    ran already."""
    told = started + drain.RESTART_SECONDS
    if now < told or not joined:
        return now >= told
    return (idle_at is not None and idle_at >= told) or now >= started + LINGER_SECONDS


def through(gateway: GatewayProgress, retirement: Retirement) -> bool:
    """Whether it acts on the retirement and has none of the adapter left."""
    acts = gateway.seq is not None and gateway.seq >= retirement.barrier
    return acts and retirement.name not in gateway.adapters


def last_notice(gateway: GatewayProgress, retirement: Retirement) -> float:
    """When a gateway that is not through could last have heard that it may choose the adapter."""
    return (
        max(gateway.last_message, retirement.published_at)
        if gateway.closed is None
        else max(gateway.last_message, gateway.closed)
    )


def _holds(
    gateway: GatewayProgress,
    known: tuple[GatewayProgress, ...],
    retirement: Retirement,
    now: float,
    drain_seconds: float,
    idle_at: float | None,
) -> bool:
    last = last_notice(gateway, retirement)
    arrived = last + drain.CLAIM_SECONDS + drain.IDLE_SECONDS
    if now < arrived:
        return True
    if _started_anew(gateway, known) or (idle_at is not None and idle_at >= arrived):
        return False
    return now < last + (drain_seconds if retirement.name in gateway.adapters else LINGER_SECONDS)


def _started_anew(gateway: GatewayProgress, known: tuple[GatewayProgress, ...]) -> bool:
    """Its requests ended with its former process."""
    closed = gateway.closed
    return closed is not None and any(
        other is not gateway and other.name == gateway.name and other.last_message >= closed for other in known
    )
