"""A client that sends one request after the other, each to the next gateway, while these tell each other once a second:
it gets all of its limit per minute and of its month's budget, and no 429 before. In virtual time."""

import pytest

from shoal.core.quota.limits import Limit
from shoal.core.quota.share import ROUND_SECONDS
from tests.support.quota_client import Client


@pytest.mark.parametrize("late", [0.05, 0.4])
@pytest.mark.parametrize("lasts", [0.1, 1.5])
@pytest.mark.parametrize("gateways", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("limit", "most", "reserved", "used"),
    [
        ("requests", 8, 1, 1),
        ("requests", 61, 1, 1),
        ("tokens", 1050, 100, 100),
        ("tokens", 1000, 100, 30),
        ("budget", 1050, 100, 100),
        ("budget", 1000, 100, 30),
    ],
    ids=["few requests", "many requests", "tokens", "tokens reserved", "budget", "budget reserved"],
)
def test_a_client_that_goes_from_gateway_to_gateway_gets_all_of_its_limit(
    limit: Limit, most: int, reserved: int, used: int, gateways: int, lasts: float, late: float
) -> None:
    client = Client(limit, most, gateways, late)
    world, turn, began = client.world, 0, client.world.now
    amount = 1 if limit == "requests" else reserved
    while world.now - began < 61.0 and client.ask(gate := world.gates[turn % gateways], reserved):
        client.pass_time(lasts)
        world.end(gate, used)
        turn += 1
    if world.now - began < 61.0:
        assert world.over is not None
        assert world.over.why in ("over", "elsewhere")
        assert world.used() + amount > most, "refused, although all that was really used leaves room"
    assert client.longest <= ROUND_SECONDS
