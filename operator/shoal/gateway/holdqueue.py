"""The hold queue of one Model, emptied as fast as the replicas have capacity.

Nothing polls for a replica: agents' reports and changes of the cluster start a round. A timer starts one every 100 ms
only while there are replicas that are too busy for all held requests.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from shoal.core.hold.capacity import Allowance, share_of
from shoal.core.hold.fair import FairQueue
from shoal.core.hold.limits import Held, over, retry_after
from shoal.core.routing.choice import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.adapterwaits import sum_of
from shoal.gateway.ticket import Ticket
from shoal.net.errors import ApiError

if TYPE_CHECKING:
    from shoal.gateway.hold import Holds

ROUND_SECONDS: Final = 0.1


class HoldQueue:
    """The held requests of one Model."""

    def __init__(self, holds: "Holds", model: ServedModel) -> None:
        self.model = model
        self.since = time.monotonic()
        """When the first request entered the empty queue. If there was no replica, a wake began then."""
        self.held = Held()
        self._holds = holds
        self._tenants: dict[str, Held] = {}
        self._queue: FairQueue[Ticket] = FairQueue()
        self._retries: FairQueue[Ticket] = FairQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._round_scheduled = False

    @property
    def waking_seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def retry_after(self) -> int:
        """Seconds that rejected clients are told to wait before they try again."""
        return retry_after(self.model.cold_start_seconds, self.waking_seconds)

    def enter(self, ticket: Ticket) -> None:
        """
        Raises:
            ApiError: 503, a hold limit is reached.
        """
        adapter_waits, uid = self._holds.adapter_waits, self.model.uid
        held = sum_of(self.held, adapter_waits.held(uid))
        tenants = sum_of(self.of_tenant(ticket.tenant), adapter_waits.of_tenant(uid, ticket.tenant))
        bound = over(self.model.limits, ticket.size, held, tenants)
        if bound is not None:
            raise self._holds.full_error(ticket.model_name, bound, self.retry_after)
        self._count(ticket, +1)
        self._holds.demand.held(self.model.uid, ticket.tokens, ticket.since)
        queue = self._retries if ticket.is_retry else self._queue
        queue.push(ticket.tenant, ticket, ticket.tokens, ticket.priority)
        self._arm()

    def of_tenant(self, tenant: str) -> Held:
        return self._tenants.get(tenant, Held())

    def leave(self, ticket: Ticket) -> None:
        """Removes a ticket if it is still queued, or undoes a release that was not claimed."""
        if ticket.unclaimed:
            self._holds.fleet.leave(ticket.unclaimed, ticket.tokens)
            ticket.take()
            self._holds.schedule_round(self.model.uid)
        elif self._queue.remove(ticket.tenant, ticket) or self._retries.remove(ticket.tenant, ticket):
            if ticket.paid:
                self._holds.budget(self.model.uid).unused()
            self._removed(ticket)

    def recheck(self) -> None:
        """API keys or tenants changed: refuses the requests that are no longer allowed."""
        for ticket in [*self._queue.items(), *self._retries.items()]:
            try:
                if ticket.check is not None:
                    ticket.check()
            except ApiError as error:
                self.leave(ticket)
                ticket.refuse(error)

    def schedule_round(self) -> None:
        """Runs a round in the next iteration of the event loop."""
        if not self._round_scheduled:
            self._round_scheduled = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        """Releases as many requests as the replicas have capacity for; refuses all if no replica will come."""
        self._round_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.held.requests:
            return
        holds = self._holds
        refusal = holds.wait_refusal(self.model)
        if refusal is not None:
            for ticket in [*self._queue.items(), *self._retries.items()]:
                self.leave(ticket)
                ticket.refuse(refusal)
            return
        usable = holds.fleet.usable(holds.directory.snapshot, self.model)
        if not usable:
            return  # an event follows when a replica comes
        budget = holds.budget(self.model.uid)
        now = time.monotonic()
        while len(self._retries) and budget.take(now):
            ticket = self._retries.pop()
            if ticket is not None:
                ticket.paid = True
                self._queue.push(ticket.tenant, ticket, ticket.tokens, ticket.priority)
        if len(self._retries):
            holds.metrics.retries_deferred.inc()
        share = share_of(self.held.requests, holds.held_by_peers(self.model.uid))
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
            self._removed(ticket)
            self._holds.metrics.releases.inc()
            if not ticket.is_retry:
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

    def _removed(self, ticket: Ticket) -> None:
        self._count(ticket, -1)
        self._holds.demand.released(self.model.uid, ticket.tokens, ticket.since)
        if not self.held.requests:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._holds.queue_emptied(self)

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.held = Held(self.held.requests + sign, self.held.bytes + sign * ticket.size)
        before = self._tenants.get(ticket.tenant, Held())
        after = Held(before.requests + sign, before.bytes + sign * ticket.size)
        if after.requests:
            self._tenants[ticket.tenant] = after
        else:
            del self._tenants[ticket.tenant]
