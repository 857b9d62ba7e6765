"""Requests held while no replica can take them: one queue per Model, and the rules that decide which requests may wait.

A round releases as many held requests as the Model's replicas have capacity for. Nothing polls for a replica: agents'
reports and changes of the cluster start a round. A timer starts a round every 100 ms only while replicas exist that are
too busy for all held requests.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Final

from shoal.core.hold.capacity import Allowance, share_of
from shoal.core.hold.fair import FairQueue
from shoal.core.hold.limits import Bound, Held, expected_wait, may_come, over, retry_after
from shoal.core.hold.retries import RetryBudget
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import DeadEnd, ServedModel
from shoal.core.routing.reuse import Prompt
from shoal.gateway.adapterwaits import AdapterWaits, sum_of
from shoal.gateway.demand import DemandState
from shoal.gateway.directory import Directory
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.waiter import Ticket, any_replica
from shoal.net import errors
from shoal.net.errors import ApiError

ROUND_SECONDS: Final = 0.1
_DEAD_END_RETRY_SECONDS: Final = 60
_DELETED: Final = DeadEnd("Deleted", unless_pods=False)
_FULL: Final[dict[Bound, str]] = {
    "requests": "as many requests as allowed already wait for it",
    "bytes": "the requests that wait for it already take all the bytes allowed",
    "tenant": "as many of your requests as allowed already wait for it",
}


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
        """Seconds after which rejected clients should try again."""
        return retry_after(self.model.cold_start_seconds, self.waking_seconds)

    @property
    def expected_seconds(self) -> float | None:
        """Seconds until the Model's first replica is ready, if it has none; None: unknown."""
        ages = self._holds.start_ages(self.model)
        return None if ages is None else expected_wait(self.model.cold_start_seconds, ages)

    @property
    def starts(self) -> bool:
        """The Model has no replica, and one may soon come."""
        return self._holds.starts(self.model)

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
        dead_end = holds.dead_end(self.model)
        if dead_end is not None:
            for ticket in [*self._queue.items(), *self._retries.items()]:
                self.leave(ticket)
                ticket.refuse(_no_use(dead_end, ticket.model_name))
            return
        usable = holds.fleet.usable(holds.directory.snapshot, self.model)
        if not usable:
            return  # an agent's report or a change of the cluster starts the next round
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
        self._release({uid: pair for uid, pair in allowed.items() if pair[1].requests > 0}, usable)
        if self.held.requests:
            self._arm()

    def _release(self, allowed: dict[str, tuple[Replica, Allowance]], usable: Iterable[Replica]) -> None:
        """Releases requests to the replicas of `allowed`. In a rollout from one engine, version or argument to another
        not every replica does what each request asks for: a request waits for one that does, if there is any."""
        fleet = self._holds.fleet
        kinds = _kinds(usable)
        mixed = len(kinds) > 1
        replicas: list[Replica] = []
        free: Collection[Replica] = ()

        def fits(ticket: Ticket) -> bool:
            return any(map(ticket.suits, free)) or not any(map(ticket.suits, kinds))

        while allowed:
            if len(replicas) != len(allowed):
                replicas = [replica for replica, _ in allowed.values()]
                free = _kinds(replicas) if mixed else ()
            ticket = self._queue.pop(fits if mixed else None)
            if ticket is None:
                break
            among = replicas
            if mixed:
                among = [replica for replica in replicas if ticket.suits(replica)] or replicas
            if ticket.tried:
                among = [replica for replica in among if replica.uid not in ticket.tried] or among
            fleet.next_turn()
            pick = None if ticket.prompt is None else fleet.cheapest(among, ticket.prompt)
            replica = fleet.least_busy(among) if pick is None else pick.replica
            fleet.enter(replica, ticket.tokens, pick)
            self._removed(ticket)
            self._holds.metrics.releases.inc()
            if not ticket.is_retry:
                self._holds.budget(self.model.uid).sent()
            ticket.release(replica, pick, len(among))
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


def _kinds(replicas: Iterable[Replica]) -> Collection[Replica]:
    """One replica of each kind: those of one kind can do the same."""
    return {(replica.runs, replica.reads_media): replica for replica in replicas}.values()


class Holds:
    """All hold queues of this gateway. `held_by_peers` returns how many requests of a Model wait in other gateways;
    None: unknown."""

    def __init__(
        self,
        directory: Directory,
        fleet: ReplicaPool,
        demand: DemandState,
        metrics: GatewayMetrics,
        held_by_peers: Callable[[str], int | None] = lambda _uid: None,
    ) -> None:
        self.directory = directory
        self.fleet = fleet
        self.demand = demand
        self.metrics = metrics
        self.held_by_peers = held_by_peers
        self.queues: dict[str, HoldQueue] = {}
        """By uid of the Model; only Models with held requests."""
        self._budgets: dict[str, RetryBudget] = {}
        self.first_seen: dict[str, float] = {}
        """By pod uid: when this gateway first saw the pod (time.monotonic)."""
        self._keys = directory.snapshot.keys
        self.adapter_waits = AdapterWaits(self.queues, directory, fleet, demand)
        directory.changed.append(self.cluster_changed)
        fleet.changed.append(self._on_report)
        metrics.watch_holds(
            self.held_by_model, lambda: {queue.model.key: queue.model.limits for queue in self.queues.values()}
        )

    @property
    def waiting(self) -> int:
        """Held requests of all Models."""
        return sum(queue.held.requests for queue in self.queues.values()) + self.adapter_waits.waiting

    def enter(
        self,
        model: ServedModel,
        tenant: str,
        model_name: str,
        size: int,
        tokens: int,
        tried: Collection[str],
        priority: int,
        *,
        is_retry: bool,
        reason: str = "queue",
        prompt: Prompt | None = None,
        suits: Callable[[Replica], bool] = any_replica,
    ) -> Ticket:
        """Puts a request into its Model's queue. The caller must close the ticket. `reason` is the NoReplica reason;
        `prompt` is what the choice of the replica goes by; `suits` says of a replica whether its engine does what the
        request asks for.

        Raises:
            ApiError: the request may not wait: 404, the Model was deleted; 503, no replica will come, or the hold
            limits are reached.
        """
        if (refusal := self.wait_refusal(model, model_name)) is not None:
            raise refusal
        queue = self.queues.get(model.uid) or HoldQueue(self, model)
        ticket = Ticket(queue, reason, tenant, model_name, size, tokens, tried, priority, is_retry, prompt, suits)
        queue.enter(ticket)
        self.queues[model.uid] = queue
        return ticket

    def starts(self, model: ServedModel) -> bool:
        """Whether a Model has no replica, and one may soon come. A gateway's clock may be ahead of the API server's: no
        pod counts as older than this gateway has seen it."""
        starting = self.fleet.starting(self.directory.snapshot, model)
        if starting is None:
            return False
        now, clock = time.monotonic(), datetime.now(UTC)
        ages = (
            None
            if pod.created is None
            else min((clock - pod.created).total_seconds(), now - self.first_seen.get(pod.uid, now))
            for pod in starting
        )
        return may_come(model.cold_start_seconds, ages)

    def start_ages(self, model: ServedModel) -> list[float | None] | None:
        """Seconds for which the pods have existed that may become a Model's first replica; None: there is one."""
        starting = self.fleet.starting(self.directory.snapshot, model)
        if starting is None:
            return None
        now = datetime.now(UTC)
        return [None if pod.created is None else (now - pod.created).total_seconds() for pod in starting]

    def full_error(self, model_name: str, bound: Bound, after: int) -> ApiError:
        """The error for a request that a hold limit rejects."""
        self.metrics.hold_refused.labels(bound).inc()
        text = f"The model `{model_name}` has no free replica, and {_FULL[bound]}. Try again."
        # The share of one tenant is full by the tenant's own requests.
        return errors.unavailable(text, "hold_full", after, about_target=bound != "tenant")

    def wait_refusal(self, model: ServedModel, model_name: str) -> ApiError | None:
        """The error for a request that should not wait for a replica of this Model; None: a replica may come.
        `model_name`: what the client calls the Model, or the route that chose it."""
        dead_end = self.dead_end(model)
        return None if dead_end is None else _no_use(dead_end, model_name)

    def dead_end(self, model: ServedModel) -> DeadEnd | None:
        """Why no replica of this Model will come; None: one may come."""
        current = self.directory.snapshot.models.get(model.key)
        if current is None or current.uid != model.uid:
            return _DELETED
        end = current.dead_end
        if end is None:
            return None
        pods = self.directory.snapshot.replicas_of(current)
        if any(pod.ready and not pod.deleting for pod in pods):
            return None
        if end.unless_pods and any(not pod.deleting for pod in pods):
            return None
        return end

    def budget(self, uid: str) -> RetryBudget:
        """The retry budget of a Model's requests."""
        found = self._budgets.get(uid)
        if found is None:
            found = self._budgets[uid] = RetryBudget(time.monotonic())
        return found

    def schedule_round(self, uid: str) -> None:
        """Called when a replica of the Model may have free capacity: the Model's queue runs a round."""
        queue = self.queues.get(uid)
        if queue is not None:
            queue.schedule_round()

    def cluster_changed(self) -> None:
        """Called when Models, pods or API keys changed: rechecks the waiting requests and schedules rounds."""
        models, owners = self.directory.snapshot.models, self.directory.snapshot.owners
        if owners.keys() != self.first_seen.keys():
            now = time.monotonic()
            self.first_seen = {uid: self.first_seen.get(uid, now) for uid in owners}
        keys, self._keys = self._keys, self.directory.snapshot.keys
        if keys is not self._keys:
            for queue in list(self.queues.values()):
                queue.recheck()
        if len(self._budgets) > len(models):
            known = {model.uid for model in models.values()}
            self._budgets = {uid: budget for uid, budget in self._budgets.items() if uid in known}
        for uid, queue in self.queues.items():
            model = models.get(queue.model.key)
            if model is not None and model.uid == uid:
                queue.model = model
            queue.schedule_round()
        self.adapter_waits.cluster_changed()

    def queue_emptied(self, queue: HoldQueue) -> None:
        """Removes a queue that has become empty."""
        self.queues.pop(queue.model.uid, None)

    def held_by_model(self) -> dict[str, Held]:
        """Held requests by `namespace/name` of the Model."""
        return {queue.model.key: queue.held for queue in self.queues.values()}

    def _on_report(self, pod: str) -> None:
        if self.queues or self.adapter_waits.waiting:
            uid = self.directory.snapshot.owners.get(pod, "")
            self.schedule_round(uid)
            self.adapter_waits.agent_reported(uid, pod)


def _no_use(dead_end: DeadEnd, model_name: str) -> ApiError:
    """The error where waiting is of no use. It has the client's name, and not that of the Model: which Models a route
    leads to is not for its clients."""
    if dead_end is _DELETED:
        return ApiError(404, f"What `{model_name}` leads to was deleted.", "model_not_found", param="model")
    text = f"The model `{model_name}` cannot serve right now ({dead_end.reason}). Try again later."
    if dead_end.for_a_person:
        text = f"The model `{model_name}` cannot serve ({dead_end.reason}); its owner has to mend it."
    return errors.unavailable(
        text,
        "model_unavailable",
        _DEAD_END_RETRY_SECONDS,
        headers=errors.DO_NOT_RETRY if dead_end.for_a_person else (),
    )
