"""Four gateways that hear each other over their streams, and a tenant that asks all of them at once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.core.quota.share import ROUND_SECONDS, overshoot
from tests.support.quota_gateways import Member, crew
from tests.support.streams import until

BODY: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
COST = 21 + 50
"""Tokens that are reserved for it."""
AT_ONCE = 300


@pytest.mark.parametrize(
    ("spec", "most", "cost"),
    [
        ({"limits": {"requestsPerMinute": 101}}, 101, 1),
        ({"limits": {"tokensPerMinute": 101 * COST}}, 101 * COST, COST),
        ({"limits": {"concurrentRequests": 101}}, 101, 1),
        ({"budget": {"tokens": 101 * COST}}, 101 * COST, COST),
    ],
    ids=["requests", "tokens", "concurrent", "budget"],
)
async def test_a_burst_at_all_gateways_stays_within_the_bound(
    tmp_path: Path, spec: dict[str, Any], most: int, cost: int
):
    async with crew(tmp_path) as it:
        it.limit(**spec)
        first = asyncio.create_task(it.burst(AT_ONCE, BODY))
        await until(lambda: it.running >= 90)
        # What is left goes to those who come again, once everybody has heard what the others let pass.
        await asyncio.sleep(ROUND_SECONDS)
        await until(lambda: all(known(member) == it.used for member in it.members))
        again = asyncio.create_task(it.burst(40, BODY))
        await until(lambda: it.refused >= AT_ONCE + 40 - it.running)
        it.release.set()
        statuses = await first + await again
        assert set(statuses) == {200, 429}
        assert it.used == statuses[200]
        assert statuses[200] * cost - most <= overshoot(most, 4, cost, it.shares)
        assert statuses[200] >= most // cost - 3
        assert it.most_running == statuses[200]


def known(member: Member) -> int:
    """Requests that a gateway knows of."""
    account = member.it.app.demand.tenants.of("acme")
    return account.own_use().requests + sum(heard._last[0] for heard in account.peer_usage._gateways.values())  # pyright: ignore[reportPrivateUsage]
