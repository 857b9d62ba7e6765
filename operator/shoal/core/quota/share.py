"""How gateways share a limit without a coordinator: each may use its share until the other gateways have reported
again.

At a renewal a gateway g knows its own use W_g, and of each other gateway j the reported use H_gj. It computes

    remaining R_g = limit - W_g - sum of H_gj        cap C_g = W_g + R_g // n        n: gateways, g included

and uses no more than its cap until the next renewal. If more than the limit is used already (R_g < 0), the cap is
W_g + R_g: use that leaves the window is not replaced before the sum is within the limit. A request larger than the
share, if it is the first since the renewal, may take up to all that remains: otherwise it would never fit.

**Concurrent requests** end at any time, and what has ended here may be used here again, up to the cap. Three rules are
theirs alone:

- While anything remains, the share is at least 1. As the exception above, but a client that sends one request after the
  other uses the same place again, instead of waiting for the next share.
- A gateway that got nothing at its last renewal (R_g <= 0) may renew at any time. It must only wait for reports that
  cover its last share, and that renewal had them already: it gets no second share before it knows what the others
  used up to the first.
- A gateway that reports fewer requests than before, when by its last report the limit was used up, keeps no more than a
  share of the rest (`release`). Others may take what it reports as free at once, so it must not take all of that again;
  and what it keeps is a share like any other, after which it waits for reports.

**When a gateway may renew.** Gateways publish changes within T = 1 s, and a heartbeat every second; half a second more
is allowed for the network. A gateway renews when every live gateway has reported so long after its last renewal that
the report covers that moment; if its share was used up, then *that* moment. A burst that arrives everywhere at once is
thus reported in full before any gateway gets a second share of it.

**Silent gateways.** A gateway whose stream is silent (12 s) counts as if it used its equal share of the limit, and is
not waited for. A silent gateway never adds to what the others may use.

**The overshoot.** Let u_gj be what j has used and g did not know at its last renewal. At each request that g admits,
total use is at most

    limit + sum over j of u_gj - (R_g - R_g // n)            without the last term for a request larger than the share

(of concurrent requests, with max(1, R_g // n) for a share of less than 1)

because W_g + sum of H_gj is at most limit - (R_g - R_g // n) under g's cap, and each j has used H_gj + u_gj. With c the
largest reservation of one request, and k the number of shares that a gateway gets before the others learn of the first,
that is at most `overshoot`: (n - 1) c for k = 1, which holds for bursts as above while messages arrive within the
allowed time. Reservations are counted: use beyond them (an input estimated too low, an answer without a bound on its
length) comes on top.

**Gateways that start.** The first message of each other gateway says what it used in the last minute, and what it knows
of gateways whose streams have ended, such as the former process of the one that starts. Until it comes, the other
gateway counts as silent. So at most one share, limit/n, comes on top for each gateway that lets requests pass before
these messages; and what a gateway had used but not reported when it crashed, at most its last share.
"""

from typing import Final

PUBLISH_SECONDS: Final = 1.0
"""T: seconds within which a change is published, and between heartbeats without changes."""
WIRE_SECONDS: Final = 0.5
"""Seconds that a message may take."""
ROUND_SECONDS: Final = 3
"""Seconds until a gateway's next share at most, while all report: Retry-After of a request that found the share used up
but not the limit."""


def overshoot(remaining: int, gateways: int, largest: int, shares: int = 1) -> int:
    """How much all gateways together exceed a limit at most, of which `remaining` was left at their last reports, with
    requests of at most `largest`, if each takes `shares` shares before it learns of the others'.

    One share: all may admit one request that is larger than it, where only one fits. Several: what they leave of
    `remaining` shrinks by 1/n with each.
    """
    n = gateways
    if shares == 1:
        return (n - 1) * min(largest, remaining)
    left = remaining * (n - 1) ** shares // n**shares
    return n * min(remaining, remaining - left + shares * largest) - remaining


class Share:
    """What this gateway may use of one limit until the other gateways have reported again. `own`: its own use."""

    __slots__ = ("cap", "full_at", "gateways", "least", "peer_use", "remaining", "since", "taken")

    def __init__(self, least: int = 0) -> None:
        self.least = least
        """The smallest share while anything remains: 1 for concurrent requests."""
        self.cap = self.remaining = self.peer_use = 0
        self.gateways = 1
        self.since = float("-inf")
        """Time of the last renewal."""
        self.full_at: float | None = None
        """Since when the share is used up; None: it is not."""
        self.taken = False
        """A request has used some of the share."""

    def renew(self, now: float, own: int, peer_use: int, remaining: int, gateways: int) -> None:
        """`remaining` of the limit is left for `gateways` gateways; `peer_use`: the known use of the others."""
        self.remaining = max(0, remaining)
        self.cap = own + (max(self.least, remaining // gateways) if remaining > 0 else remaining)
        self.gateways = gateways
        self.peer_use = peer_use
        self.since = now
        self.full_at = None
        self.taken = False

    @property
    def reports_after(self) -> float:
        """Time that the others' reports must cover before the next renewal."""
        return self.since if self.full_at is None else self.full_at

    def release(self, now: float, own: int, most: int) -> None:
        """The others learn that only `own` of `most` is used here, and may take the rest. As a renewal, but it never
        raises the cap, since it has not waited for reports."""
        cap = self.cap
        self.renew(now, own, self.peer_use, most - own - self.peer_use, self.gateways)
        self.cap = min(self.cap, cap)

    def fits(self, own: int, amount: int) -> bool:
        return own + amount <= self.cap or (not self.taken and amount <= self.remaining)

    def full(self, now: float) -> None:
        """A request found the share used up."""
        if self.full_at is None:
            self.full_at = now
