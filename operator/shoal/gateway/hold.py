"""Requests that wait here while no replica can take them: a room per Model, emptied at the pace of the replicas' room.

Nothing polls for a replica: what agents say and what the API server tells wake a room. Only while replicas are there
and too busy for all who wait, a timer makes sure of a round every 100 ms.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Final

from shoal.core.hold.fair import FairQueue
from shoal.core.hold.limits import Bound, Held, over, retry_after
from shoal.core.hold.retries import RetryBudget
from shoal.core.hold.room import Allowance, share_of
from shoal.core.resolve import ServedModel
from shoal.core.routing import Replica
from shoal.gateway import errors
from shoal.gateway.demand import DemandBook
from shoal.gateway.directory import Directory
from shoal.gateway.errors import ApiError
from shoal.gateway.fleet import Fleet
from shoal.gateway.metrics import Metrics
from shoal.gateway.stays import Stays, sum_of
from shoal.gateway.ticket import Ticket

ROUND_SECONDS: Final = 0.1
_DEAD_END_RETRY_SECONDS: Final = 60
_FULL: Final[dict[Bound, str]] = {
    "requests": "as many requests wait for it as may",
    "bytes": "the requests that wait for it are as large as they may be together",
    "tenant": "you have as many requests waiting for it as one account may",
}


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


class Holds:
    """All rooms of this gateway. `elsewhere` says how many requests of a Model wait in the other gateways, None when
    that is not known."""

    def __init__(
        self,
        directory: Directory,
        fleet: Fleet,
        book: DemandBook,
        metrics: Metrics,
        elsewhere: Callable[[str], int | None] = lambda _uid: None,
    ) -> None:
        self.directory = directory
        self.fleet = fleet
        self.book = book
        self.metrics = metrics
        self.elsewhere = elsewhere
        self.rooms: dict[str, WaitingRoom] = {}
        """By uid of the Model; only of those for which somebody waits."""
        self._budgets: dict[str, RetryBudget] = {}
        self._keys = directory.snapshot.keys
        self.stays = Stays(self)
        directory.changed.append(self.look)
        fleet.changed.append(self._heard)
        metrics.watch_holds(self.figures)

    @property
    def waiting(self) -> int:
        """Requests that wait here, of all Models."""
        return sum(room.held.requests for room in self.rooms.values()) + self.stays.waiting

    def enter(
        self,
        model: ServedModel,
        tenant: str,
        word: str,
        size: int,
        tokens: int,
        tried: Collection[str],
        priority: int,
        *,
        again: bool,
    ) -> Ticket:
        """A place for one request; close the ticket in any case.

        Raises:
            ApiError: 503, it may not wait: no replica will come, or too much waits already.
        """
        refusal = self.no_use(model)
        if refusal is not None:
            raise refusal
        room = self.rooms.get(model.uid) or WaitingRoom(self, model)
        ticket = Ticket(room, tenant, word, size, tokens, tried, priority, again)
        room.enter(ticket)
        self.rooms[model.uid] = room
        return ticket

    def full(self, word: str, bound: Bound, after: int) -> ApiError:
        """For one for whom there is no more room to wait."""
        self.metrics.hold_refused.labels(bound).inc()
        return errors.unavailable(
            f"The model `{word}` has no free replica, and {_FULL[bound]}. Try again.", "hold_full", after
        )

    def no_use(self, model: ServedModel) -> ApiError | None:
        """Why nobody should wait for a replica of this Model; None: one may come."""
        current = self.directory.snapshot.models.get(model.key)
        if current is None or current.uid != model.uid:
            return ApiError(404, f"The model `{model.key}` was deleted.", "model_not_found", param="model")
        end = current.dead_end
        if end is None:
            return None
        pods = self.directory.snapshot.replicas_of(current)
        if any(pod.ready and not pod.deleting for pod in pods):
            return None
        if end.unless_pods and any(not pod.deleting for pod in pods):
            return None
        return errors.unavailable(
            f"The model `{model.key}` cannot serve right now ({end.reason}). Try again later.",
            "model_unavailable",
            _DEAD_END_RETRY_SECONDS,
        )

    def budget(self, uid: str) -> RetryBudget:
        """What a Model's requests may be sent again."""
        found = self._budgets.get(uid)
        if found is None:
            found = self._budgets[uid] = RetryBudget(time.monotonic())
        return found

    def poke(self, uid: str) -> None:
        """There may be room at a replica of the Model with this uid."""
        room = self.rooms.get(uid)
        if room is not None:
            room.poke()

    def look(self) -> None:
        """The cluster, or the keys to it, changed."""
        models = self.directory.snapshot.models
        keys, self._keys = self._keys, self.directory.snapshot.keys
        if keys is not self._keys:
            for room in list(self.rooms.values()):
                room.recheck()
        if len(self._budgets) > len(models):
            known = {model.uid for model in models.values()}
            self._budgets = {uid: budget for uid, budget in self._budgets.items() if uid in known}
        for uid, room in self.rooms.items():
            model = models.get(room.model.key)
            if model is not None and model.uid == uid:
                room.model = model
            room.poke()
        self.stays.look()

    def closed(self, room: WaitingRoom) -> None:
        """Nobody waits in a room any more."""
        self.rooms.pop(room.model.uid, None)

    def figures(self) -> dict[str, Held]:
        """What waits, by `namespace/name` of the Model."""
        return {room.model.key: room.held for room in self.rooms.values()}

    def _heard(self, pod: str) -> None:
        if self.rooms or self.stays.waiting:
            uid = self.directory.snapshot.owners.get(pod, "")
            self.poke(uid)
            self.stays.heard(uid)
