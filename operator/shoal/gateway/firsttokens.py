"""How long a new replica takes to its first token: the last stage of a cold start, as this gateway's clients feel it.

Only of replicas whose engine this gateway saw become ready: of any other one it cannot know whether its own request is
the first. The first request that it sends there decides, whatever becomes of it: a second one finds a warmer engine.
"""

import time
from collections.abc import Callable, Collection
from typing import Final

from shoal.api.replica import Phase
from shoal.core.routing.replica import Replica
from shoal.gateway.demand import DemandState

_BEFORE: Final = ("fetching", "loading")


class FirstRequest:
    """The first request to one new replica."""

    __slots__ = ("_after", "_began", "_clock", "_demand", "_over", "_replica")

    def __init__(
        self, demand: DemandState, clock: Callable[[], float], replica: Replica, after: float, began: float
    ) -> None:
        self._demand, self._clock, self._replica = demand, clock, replica
        self._after, self._began = after, began
        self._over = False

    def answers(self, *, shows: bool) -> None:
        """Its answer begins now; `shows`: with its first token, and not with the whole of a long answer."""
        self._tell(self._clock() - self._began if shows else None)

    def ended(self) -> None:
        """It has left the replica."""
        self._tell(None)

    def _tell(self, seconds: float | None) -> None:
        if not self._over:
            self._over = True
            self._demand.first_token(self._replica.model_uid, self._replica.uid, self._after, seconds)


class FirstTokens:
    """Knows which replicas are new. Times are those of `clock`."""

    def __init__(self, demand: DemandState, clock: Callable[[], float] = time.monotonic) -> None:
        self._demand, self._clock = demand, clock
        self.new: dict[str, float] = {}
        """Pod's uid -> when its engine became ready; of those that were sent nothing since."""
        self._starting: set[str] = set()
        self._were_ready: set[str] = set()

    def reported(self, uid: str, phase: Phase | None) -> None:
        """A pod's agent reported another phase; None: it does not know."""
        if phase in _BEFORE:
            self.new.pop(uid, None)
            if uid not in self._were_ready:  # else the engine starts again, which is no cold start
                self._starting.add(uid)
        elif phase is not None:
            if phase != "ready":
                self.new.pop(uid, None)
            elif uid in self._starting:
                self.new[uid] = self._clock()
            self._starting.discard(uid)
            self._were_ready.add(uid)

    def down(self, uid: str) -> None:
        """A pod's stream ended: what happens until the next one is not seen."""
        self.new.pop(uid, None)
        self._starting.discard(uid)

    def sent(self, replica: Replica, waiting_since: float | None) -> FirstRequest | None:
        """A request goes to a replica now; `waiting_since`: when it began to wait for one, None: it did not wait. None:
        the replica is not new."""
        ready = self.new.pop(replica.uid, None)
        if ready is None:
            return None
        now = self._clock()
        began = now if waiting_since is None else max(ready, waiting_since)
        return FirstRequest(self._demand, self._clock, replica, now - ready, began)

    def keep(self, pods: Collection[str]) -> None:
        """Forgets the other pods."""
        for uid in [uid for uid in self._were_ready | self._starting if uid not in pods]:
            self._were_ready.discard(uid)
            self.down(uid)
        self._demand.retain_pods(pods)
