"""Fairness in the gateway's own room, with more requests in it than any Model's limits allow by default."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.core.hold.limits import Limits
from shoal.gateway.waiter import Ticket
from tests.support.gateway import MODEL, GatewayUnderTest, gateway, replica
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until_async

BURST = 10_000
ROUND = 8
"""Requests that the only replica runs at a time."""


@contextmanager
def waiting(it: GatewayUnderTest) -> Generator[list[Ticket]]:
    """So many of one tenant."""
    tickets = [enter(it, "many") for _ in range(BURST)]
    try:
        yield tickets
    finally:
        for ticket in tickets:
            ticket.close()


def enter(it: GatewayUnderTest, tenant: str) -> Ticket:
    model = it.app.directory.snapshot.models[MODEL.key]
    return it.app.holds.enter(model, tenant, "llama", 900, 300, (), 50, is_retry=False)


def end(it: GatewayUnderTest, tickets: list[Ticket]) -> None:
    """Their answers are over: there is room for another round."""
    for ticket in tickets:
        it.app.leave(ticket.take(), ticket.tokens)


@pytest.mark.parametrize(("tenant", "goes_next"), [("single", True), ("many", False)])
async def test_a_tenant_with_ten_thousand_held_delays_anothers_single_request_by_at_most_a_round(
    tmp_path: Path, tenant: str, goes_next: bool
) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.pods.clear()
        it.fleet.update("pod-1", None)
        it.model(limits=Limits(max_requests=2 * BURST, max_bytes=2**40, max_tenant_percent=100))
        with waiting(it) as burst:
            it.pods["chat/llama-1"] = replica(1)
            it.changed()
            it.hear(1, running=0, waiting=0, max_running=ROUND, kv_tokens_used=0, kv_tokens_total=10**6)
            await until_async(lambda: sum(t.decided for t in burst) == ROUND)

            single = enter(it, tenant)
            end(it, [t for t in burst if t.decided])
            await until_async(lambda: sum(t.decided for t in [*burst, single]) == 2 * ROUND)

            assert single.decided == goes_next
            single.close()
