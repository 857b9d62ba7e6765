"""When a retiring adapter may be unloaded (streams.md, "Acknowledgement"). Pure; evaluated again at every change.

A retirement begins with a barrier: the `seq` of the message that reports the adapter as `retiring`, after which
gateways no longer choose it. An unload during a request would delay all other loads and unloads, and the next request
would make the engine load the adapter again unnoticed. So each gateway that may still send, or has requests in flight,
holds it:

    a gateway that acknowledged the barrier with none of it running  does not hold
    a gateway whose stream is open                                   until 13 s after its last message, or the barrier
    a gateway whose stream closed                                    until 13 s after that
    gateways that an agent may not know just after its start         until 15 s after its start

13 s, because a gateway chooses a replica for up to 12 s after the last message that it received, and a request may be
on its way for one more second. Requests of a gateway's last seconds may be unreported. They are over when the engine
was seen idle after that time, when the gateway has started again, or after a minute: gateways report running adapters
every five seconds, and an engine aborts the requests of a gateway that is gone. The same holds for gateways that an
agent that started beside a running engine may not know. If a gateway's last message lists the adapter as running, it
holds the adapter for drainSeconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.core import drain
from shoal.core.drain import GatewayProgress

LINGER_SECONDS: Final = 60.0
"""Seconds for which unreported requests of a gateway may run after it fell silent."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """A retiring adapter, which no gateway may choose any more."""

    name: str
    barrier: int
    """`seq` of the message that reported it."""
    published_at: float
    """When that message was published."""


def holders(
    retirement: Retirement,
    gateways: Iterable[GatewayProgress],
    now: float,
    *,
    drain_seconds: float,
    idle_at: float | None = None,
) -> list[GatewayProgress]:
    """The gateways for which the adapter must stay in the engine at `now`. `idle_at`: when the engine was last seen
    without running or waiting requests."""
    known = tuple(gateways)
    return [
        gateway
        for gateway in known
        if not through(gateway, retirement) and _holds(gateway, known, retirement, now, drain_seconds, idle_at)
    ]


def knows_all(started: float, now: float, *, joined: bool, idle_at: float | None) -> bool:
    """Whether an agent that started at `started` knows all gateways with requests in its engine; `joined`: the engine
    ran before the agent."""
    told = started + drain.RESTART_SECONDS
    if now < told or not joined:
        return now >= told
    return (idle_at is not None and idle_at >= told) or now >= started + LINGER_SECONDS


def through(gateway: GatewayProgress, retirement: Retirement) -> bool:
    """Whether the gateway acts on the retirement and runs none of the adapter."""
    acts = gateway.seq is not None and gateway.seq >= retirement.barrier
    return acts and retirement.name not in gateway.adapters


def last_notice(gateway: GatewayProgress, retirement: Retirement) -> float:
    """The latest time at which a gateway that is not through may have learned that it may choose the adapter."""
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
    """Whether the gateway's process was replaced, which ended its requests."""
    closed = gateway.closed
    return closed is not None and any(
        other is not gateway and other.name == gateway.name and other.last_message >= closed for other in known
    )
