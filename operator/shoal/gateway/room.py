"""Those who wait for one Model: a queue that is emptied at the pace of the replicas' room.

Nothing polls for a replica: what agents say and what the API server tells wake a room. Only while replicas are there
and too busy for all who wait, a timer makes sure of a round every 100 ms.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from shoal.core.hold.fair import FairQueue
from shoal.core.hold.limits import Held, over, retry_after
from shoal.core.hold.room import Allowance, share_of
from shoal.core.resolve import ServedModel
from shoal.core.routing import Replica
from shoal.gateway.errors import ApiError
from shoal.gateway.stays import sum_of
from shoal.gateway.ticket import Ticket

if TYPE_CHECKING:
    from shoal.gateway.hold import Holds

ROUND_SECONDS: Final = 0.1


class WaitingRoom:
    """Those who wait for one Model."""

    def __init__(self, holds: "Holds", model: ServedModel) -> None:
        self.model = model
        self.since = time.monotonic()
        """When the first of those who wait now came to an empty room: a wake began then, if there was no replica."""
        self.held = Held()
        self._holds = holds
        self._tenants: dict[str, Held] = {}
        self._queue: FairQueue[Ticket] = FairQueue()
        self._again: FairQueue[Ticket] = FairQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False

    @property
    def waking_seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def retry_after(self) -> int:
        """For those who are sent away."""
        return retry_after(self.model.cold_start_seconds, self.waking_seconds)

    def enter(self, ticket: Ticket) -> None:
        """
        Raises:
            ApiError: 503, there is no more room to wait.
        """
        stays, uid = self._holds.stays, self.model.uid
        held = sum_of(self.held, stays.held(uid))
        tenants = sum_of(self.of_tenant(ticket.tenant), stays.of_tenant(uid, ticket.tenant))
        bound = over(self.model.limits, ticket.size, held, tenants)
        if bound is not None:
            raise self._holds.full(ticket.word, bound, self.retry_after)
        self._count(ticket, +1)
        self._holds.book.held(self.model.uid, ticket.tokens, ticket.since)
        queue = self._again if ticket.again else self._queue
        queue.push(ticket.tenant, ticket, ticket.tokens, ticket.priority)
        self._arm()

    def of_tenant(self, tenant: str) -> Held:
        return self._tenants.get(tenant, Held())

    def leave(self, ticket: Ticket) -> None:
        """Takes a ticket out, if it is still here; ends a release that nobody took."""
        if ticket.forgone:
            self._holds.fleet.leave(ticket.forgone, ticket.tokens)
            ticket.take()
            self._holds.poke(self.model.uid)
        elif self._queue.remove(ticket.tenant, ticket) or self._again.remove(ticket.tenant, ticket):
            if ticket.paid:
                self._holds.budget(self.model.uid).unused()
            self._left(ticket)

    def recheck(self) -> None:
        """Keys were taken back, or tenants suspended: refuses at once those who may not ask any more."""
        for ticket in [*self._queue.items(), *self._again.items()]:
            try:
                if ticket.check is not None:
                    ticket.check()
            except ApiError as error:
                self.leave(ticket)
                ticket.refuse(error)

    def poke(self) -> None:
        """Something changed: a round in this turn of the loop."""
        if not self._poked:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        """Lets go as many as there is room for now; refuses all where no replica will come."""
        self._poked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.held.requests:
            return
        holds = self._holds
        refusal = holds.no_use(self.model)
        if refusal is not None:
            for ticket in [*self._queue.items(), *self._again.items()]:
                self.leave(ticket)
                ticket.refuse(refusal)
            return
        usable = holds.fleet.usable(holds.directory.snapshot, self.model)
        if not usable:
            return  # an event tells when one comes
        budget = holds.budget(self.model.uid)
        now = time.monotonic()
        while len(self._again) and budget.take(now):
            ticket = self._again.pop()
            if ticket is not None:
                ticket.paid = True
                self._queue.push(ticket.tenant, ticket, ticket.tokens, ticket.priority)
        if len(self._again):
            holds.metrics.retries_put_off.inc()
        share = share_of(self.held.requests, holds.elsewhere(self.model.uid))
        kv = self.model.kv_percent
        allowed = {r.uid: (r, holds.fleet.allowance(r, kv_percent=kv, share=share)) for r in usable}
        self._release({uid: pair for uid, pair in allowed.items() if pair[1].requests > 0})
        if self.held.requests:
            self._arm()

    def _release(self, allowed: dict[str, tuple[Replica, Allowance]]) -> None:
        fleet = self._holds.fleet
        while allowed and (ticket := self._queue.pop()) is not None:
            replicas = [replica for replica, _ in allowed.values()]
            untried = [replica for replica in replicas if replica.uid not in ticket.tried]
            replica = fleet.least_busy(untried or replicas)
            fleet.enter(replica, ticket.tokens)
            self._left(ticket)
            self._holds.metrics.releases.inc()
            if not ticket.again:
                self._holds.budget(self.model.uid).sent()
            ticket.release(replica)
            left = allowed[replica.uid][1]
            tokens = None if left.tokens is None else left.tokens - ticket.tokens
            if left.requests <= 1 or (tokens is not None and tokens <= 0):
                del allowed[replica.uid]
            else:
                allowed[replica.uid] = (replica, Allowance(left.requests - 1, tokens))

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ROUND_SECONDS, self._round)

    def _left(self, ticket: Ticket) -> None:
        self._count(ticket, -1)
        self._holds.book.unheld(self.model.uid, ticket.tokens, ticket.since)
        if not self.held.requests:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._holds.closed(self)

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.held = Held(self.held.requests + sign, self.held.bytes + sign * ticket.size)
        before = self._tenants.get(ticket.tenant, Held())
        after = Held(before.requests + sign, before.bytes + sign * ticket.size)
        if after.requests:
            self._tenants[ticket.tenant] = after
        else:
            del self._tenants[ticket.tenant]
