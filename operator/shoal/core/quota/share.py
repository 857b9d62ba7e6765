"""How gateways share a limit without asking each other: each may use its share until it has heard the others again.

At a renewal a gateway g knows its own use W_g and of each other gateway j what it has heard, H_gj. It takes

    remaining R_g = limit - W_g - sum of H_gj        cap C_g = W_g + R_g // n        n: gateways, g included

and uses no more than its cap until the next renewal. Where more was used than is allowed already (R_g < 0), the cap is
W_g + R_g: what leaves the window is not used again before all is within the limit. One request that is larger than the
share, and the first since the renewal, may take as much as all that remains: else it would never fit.

**When it may renew.** Others tell what changed within T = 1 s, and say every second that they live; half a second more
is granted for the way. A gateway renews when it has heard every live one so long after its last renewal that it knows
what they had used by then; and where its share was used up, after *that* moment. A burst that comes everywhere at once
is therefore heard in full before anybody gets a second share of it.

**Who is not heard.** A gateway whose stream is silent (12 s) counts as if it used its equal share of the limit, and is
not waited for. Nobody's silence adds to what the others may use.

**How far it goes over.** Let u_gj be what j has used and g did not know at its last renewal. At each request that g
lets pass, all use together is at most

    limit + sum over j of u_gj - (R_g - R_g // n)            without the last term for a request larger than the share

because W_g + sum of H_gj is at most limit - (R_g - R_g // n) under g's cap, and each j has used H_gj + u_gj. With c the
largest reservation of one request, and k the number of shares that a gateway gets before the others hear of the first,
that is at most `overshoot`: (n - 1) c for k = 1, which holds for bursts as above while messages take no longer than
they may. It counts reservations: what requests use beyond theirs (an input that was estimated too low, an answer whose
length nobody bounded) comes on top, and so does at most one share, limit/n, for each gateway that started within the
window.
"""

from typing import Final

PUBLISH_SECONDS: Final = 1.0
"""T: a change is told within this time, and a quiet gateway says so as often."""
WIRE_SECONDS: Final = 0.5
"""What a message may take on its way."""
ROUND_SECONDS: Final = 3
"""What a gateway waits for its next share at most, while all are heard: Retry-After of a request that found the share
used up and not the limit."""


def overshoot(remaining: int, gateways: int, largest: int, shares: int = 1) -> int:
    """Most that all gateways together go over a limit of which `remaining` was left when they last heard each other,
    with requests of at most `largest`, if each takes `shares` shares before it hears of the others'.

    One share: all may let pass one request that is larger than it, where only one fits. Several: what they leave of
    `remaining` shrinks by 1/n with each.
    """
    n = gateways
    if shares == 1:
        return (n - 1) * min(largest, remaining)
    left = remaining * (n - 1) ** shares // n**shares
    return n * min(remaining, remaining - left + shares * largest) - remaining


class Share:
    """What this gateway may use of one limit until it has heard the others again. `own` is its own use."""

    __slots__ = ("_taken", "cap", "full_at", "peer_use", "remaining", "since")

    def __init__(self) -> None:
        self.cap = self.remaining = self.peer_use = 0
        self.since = float("-inf")
        """When it was renewed last."""
        self.full_at: float | None = None
        """Since when it is used up."""
        self._taken = False

    def renew(self, now: float, own: int, peer_use: int, remaining: int, gateways: int) -> None:
        """`remaining` of the limit is left for `gateways` of them; `others` is what is known of their use."""
        self.remaining = max(0, remaining)
        self.cap = own + (remaining // gateways if remaining > 0 else remaining)
        self.peer_use = peer_use
        self.since = now
        self.full_at = None
        self._taken = False

    @property
    def reports_after(self) -> float:
        """What the others had used by then must be known before the next renewal."""
        return self.since if self.full_at is None else self.full_at

    def fits(self, own: int, amount: int) -> bool:
        return own + amount <= self.cap or (not self._taken and amount <= self.remaining)

    def take(self) -> None:
        """Something was taken of it."""
        self._taken = True

    def full(self, now: float) -> None:
        """A request found it used up."""
        if self.full_at is None:
            self.full_at = now
