"""A client that sends one request after the other, each to the next gateway, while these tell each other once a second:
it gets all of its limit per minute and of its month's budget, and no 429 before. In virtual time."""

import pytest

from shoal.core.quota.account import reports_cover
from shoal.core.quota.limits import Limit
from shoal.core.quota.share import ROUND_SECONDS
from shoal.gateway.quota import SHARE_WAIT_SECONDS
from tests.support.quota_world import Gate, World

STEP = 0.05
"""As often does a gateway look whether a request that waits fits."""


class Client:
    """`late`: seconds that a message takes."""

    def __init__(self, limit: Limit, most: int, gateways: int, late: float) -> None:
        self.world = World(limit, most, gateways)
        self.late = late
        self.reports_at = [self.world.now + gate / gateways for gate in range(gateways)]
        self.longest = 0.0
        self.pass_time(3.0)

    def pass_time(self, seconds: float) -> None:
        ends = self.world.now + seconds
        while self.world.now < ends - STEP / 2:
            self.world.pass_time(STEP)
            for i, gate in enumerate(self.world.gates):
                if self.world.now >= self.reports_at[i]:
                    self.reports_at[i] += 1.0
                    self.world.tell(gate, [self.late] * len(self.world.gates))

    def ask(self, gate: Gate, tokens: int) -> bool:
        """Whether the request passed, at once or after a wait, as `Quota.wait_for_reports` waits."""
        began = self.world.now
        while not self.world.ask(gate, tokens):
            over, waited = self.world.over, self.world.now - began
            if over is None or over.why not in ("share", "elsewhere") or waited >= SHARE_WAIT_SECONDS:
                return False
            known = reports_cover(began, self.world.peers(gate)) or waited >= ROUND_SECONDS
            if over.why == "elsewhere" and known:
                return False
            self.pass_time(STEP)
        self.longest = max(self.longest, self.world.now - began)
        return True


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
