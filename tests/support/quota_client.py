"""A client that sends one request after the other to gateways that tell each other once a second. In virtual time."""

from shoal.core.quota.account import may_learn
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
        self.reports_at = {gate.pod: self.world.now + i / gateways for i, gate in enumerate(self.world.gates)}
        self.longest = 0.0
        self.pass_time(3.0)

    def pass_time(self, seconds: float) -> None:
        ends = self.world.now + seconds
        while self.world.now < ends - STEP / 2:
            self.world.pass_time(STEP)
            for gate in self.world.gates:
                if self.world.now >= self.reports_at.setdefault(gate.pod, self.world.now):
                    self.reports_at[gate.pod] += 1.0
                    self.world.tell(gate, [self.late] * len(self.world.gates))

    def connect(self) -> None:
        """Each gateway sends a first message to those that it has sent none, as at once after they have connected."""
        for gate in self.world.gates:
            self.world.connect(gate, self.late)

    def ask(self, gate: Gate, tokens: int) -> bool:
        """Whether the request passed, at once or after a wait, as `Quota.wait_for_reports` waits."""
        began = self.world.now
        while not self.world.ask(gate, tokens):
            over, waited = self.world.over, self.world.now - began
            if over is None or over.why not in ("share", "elsewhere") or waited >= SHARE_WAIT_SECONDS:
                return False
            known = not may_learn(began, self.world.peers(gate)) or waited >= ROUND_SECONDS
            if over.why == "elsewhere" and known:
                return False
            self.pass_time(STEP)
        self.longest = max(self.longest, self.world.now - began)
        return True
