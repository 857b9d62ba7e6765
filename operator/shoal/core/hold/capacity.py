"""How many of the waiting requests a replica takes now: this gateway's share of the replica's free room.

Room is what the agent reports: the requests that the engine runs at a time, less those that run and wait, and the
tokens of its KV cache up to the Model's target, less those in use and those that wait for prefill. A report is old by
the time it is read, so what this gateway has sent since is counted in.
"""

import math
from dataclasses import dataclass
from typing import Final

from shoal.api.replica import ReplicaKeys

UNKNOWN_CAPACITY: Final = 4
"""Requests that go to a replica in one round when its room is not known."""
ANSWER_TOKENS: Final = 256
"""Assumed length of an answer where the client set no bound."""
ANSWER_TOKENS_MOST: Final = 1024
"""What an answer counts at most: bounds are rarely reached."""
BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class OwnInFlight:
    """What this gateway has at a replica: requests, and tokens of those that it released from waiting."""

    requests: int = 0
    tokens: int = 0
    requests_when_reported: int = 0
    """In flight when the last report came."""
    tokens_when_reported: int = 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may go to one replica in this round: so many requests, as long as any of the tokens are left (None: no
    bound). A request that is larger than what is left still goes: it would otherwise never."""

    requests: int
    tokens: int | None


def estimated_tokens(body_bytes: int, answer_bound: int | None, choices: int = 1) -> int:
    """Tokens that a request will hold: its body's bytes over 4, and its answers, bounded."""
    answer = ANSWER_TOKENS if answer_bound is None else max(1, min(answer_bound, ANSWER_TOKENS_MOST))
    return body_bytes // BYTES_PER_TOKEN + answer * max(1, choices)


def share_of(held_here: int, held_elsewhere: int | None) -> float:
    """This gateway's share of the room: what it holds of all that is held. Unknown peers count as holding nothing."""
    return held_here / (held_here + held_elsewhere) if held_here and held_elsewhere else 1.0


def allowance(reported: ReplicaKeys | None, own: OwnInFlight, *, kv_percent: int, share: float) -> Allowance:
    """What this gateway may release to a replica now. `reported` None: its signal is stale.

    Rounded up, so that the smallest share is still one request, and a round always releases a request. An
    engine whose queue is empty always gets a next request, however many tokens it has: it knows best what fits.
    """
    if reported is None:
        return Allowance(UNKNOWN_CAPACITY, None)
    requests = _requests(reported, own, share)
    tokens = _tokens(reported, own, kv_percent, share)
    if requests is None or tokens is None:
        requests = UNKNOWN_CAPACITY if requests is None else min(UNKNOWN_CAPACITY, requests)
    if tokens is not None and tokens <= 0 and requests > 0:
        sent = own.requests - own.requests_when_reported
        return Allowance(1, None) if reported.waiting == 0 and sent <= 0 else Allowance(0, 0)
    return Allowance(requests, tokens)


def _requests(reported: ReplicaKeys, own: OwnInFlight, share: float) -> int | None:
    if reported.max_running is None or reported.running is None or reported.waiting is None:
        return None
    # A report may be from before the engine counted what we sent: it has at least that.
    busy = max(reported.running + reported.waiting, own.requests_when_reported)
    free = math.ceil(share * max(0, reported.max_running - busy))
    return max(0, free - (own.requests - own.requests_when_reported))


def _tokens(reported: ReplicaKeys, own: OwnInFlight, kv_percent: int, share: float) -> int | None:
    if reported.kv_tokens_total is None or reported.kv_tokens_used is None:
        return None
    target = reported.kv_tokens_total * kv_percent // 100
    busy = max(reported.kv_tokens_used + (reported.waiting_tokens or 0), own.tokens_when_reported)
    return math.floor(share * max(0, target - busy)) - (own.tokens - own.tokens_when_reported)
