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


@pytest.mark.parametrize(
    ("gateways", "at", "most"), [(4, 1, 1), (2, 2, 1), (4, 4, 1), (4, 4, 2)], ids=["one", "two", "four", "limit of two"]
)
async def test_a_client_with_one_request_at_a_time_is_not_refused_and_hardly_waits(
    tmp_path: Path, gateways: int, at: int, most: int
):
    """Whichever gateway its connection leads to. Each request once waited 2 s for a share, or got a 429 for the one
    before, which had ended at another gateway."""
    async with crew(tmp_path, gateways) as it:
        it.release.set()
        it.limit(limits={"concurrentRequests": most})
        loop = asyncio.get_running_loop()
        began, turn = loop.time(), 0
        while loop.time() - began < 5:
            asked = loop.time()
            response = await it.members[turn % at].it.post(BODY)
            assert response.status == 200, await response.text()
            await response.read()
            assert loop.time() - asked < ROUND_SECONDS / 2 + it.longest_pause
            turn += 1
            await asyncio.sleep(0.03)
        assert it.most_running == 1
        waits = sum(member.it.metric("shoal_gateway_share_waits_total") for member in it.members)
        assert waits <= (0 if at == 1 else turn / 4)


async def test_more_at_a_time_than_the_limit_are_refused_at_whichever_gateways(tmp_path: Path):
    async with crew(tmp_path, 2) as it:
        it.limit(limits={"concurrentRequests": 1})
        first = asyncio.create_task(it.members[0].it.post(BODY))
        await until(lambda: it.running == 1)
        await until(lambda: known(it.members[1]) == 1)
        async with asyncio.timeout(10):
            statuses = [(await member.it.post(BODY)).status for member in it.members]
        assert statuses == [429, 429]
        it.release.set()
        assert (await first).status == 200


@pytest.mark.parametrize("gone", [False, True], ids=["the others run", "one of the others is gone"])
async def test_a_client_near_its_limit_gets_the_rest_of_it_at_a_gateway_that_has_just_started(
    tmp_path: Path, *, gone: bool
):
    """It got a 429 after limit / gateways requests. What a gateway had used that is gone, the others tell."""
    async with crew(tmp_path, 2) as it:
        it.release.set()
        it.limit(limits={"requestsPerMinute": 9})
        for member in it.members:
            assert (await member.it.post(BODY)).status == 200
        await until(lambda: all(known(member) == 2 for member in it.members))
        first, second = it.members
        new = await it.start()
        it.limit(limits={"requestsPerMinute": 9})
        others = [second] if gone else [first, second]
        if gone:
            await first.stop()
            await until(lambda: not second.streams.live())
        for member in others:
            member.follow([*others, new])
        new.follow([*others, new])
        assert [(await new.it.post(BODY)).status for _ in range(8)] == [200] * 7 + [429]


def known(member: Member) -> int:
    """Requests that a gateway knows of."""
    account = member.it.app.demand.tenants.of("acme")
    return account.own_use().requests + sum(heard._last[0] for heard in account.peer_usage._gateways.values())  # pyright: ignore[reportPrivateUsage]
