"""Requests held while no replica can take them: a queue per Model (`holdqueue.py`), and the rules of who may wait."""

import time
from collections.abc import Callable, Collection
from typing import Final

from shoal.core.hold.limits import Bound, Held
from shoal.core.hold.retries import RetryBudget
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.adapterwaits import AdapterWaits
from shoal.gateway.demand import DemandState
from shoal.gateway.directory import Directory
from shoal.gateway.holdqueue import HoldQueue
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.ticket import Ticket
from shoal.net import errors
from shoal.net.errors import ApiError

_DEAD_END_RETRY_SECONDS: Final = 60
_FULL: Final[dict[Bound, str]] = {
    "requests": "as many requests as allowed already wait for it",
    "bytes": "the requests that wait for it already take all the bytes allowed",
    "tenant": "as many of your requests as allowed already wait for it",
}


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
        self._keys = directory.snapshot.keys
        self.adapter_waits = AdapterWaits(self)
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
    ) -> Ticket:
        """Puts a request into its Model's queue. The caller must close the ticket.

        Raises:
            ApiError: 503, it may not wait: no replica will come, or the hold limits are reached.
        """
        refusal = self.wait_refusal(model)
        if refusal is not None:
            raise refusal
        queue = self.queues.get(model.uid) or HoldQueue(self, model)
        ticket = Ticket(queue, tenant, model_name, size, tokens, tried, priority, is_retry)
        queue.enter(ticket)
        self.queues[model.uid] = queue
        return ticket

    def full_error(self, model_name: str, bound: Bound, after: int) -> ApiError:
        """The error for a request that a hold limit keeps out."""
        self.metrics.hold_refused.labels(bound).inc()
        return errors.unavailable(
            f"The model `{model_name}` has no free replica, and {_FULL[bound]}. Try again.", "hold_full", after
        )

    def wait_refusal(self, model: ServedModel) -> ApiError | None:
        """Why no request should wait for a replica of this Model; None: a replica may come."""
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
        """The retry budget of a Model's requests."""
        found = self._budgets.get(uid)
        if found is None:
            found = self._budgets[uid] = RetryBudget(time.monotonic())
        return found

    def schedule_round(self, uid: str) -> None:
        """A replica of the Model may have free capacity: its queue runs a round."""
        queue = self.queues.get(uid)
        if queue is not None:
            queue.schedule_round()

    def cluster_changed(self) -> None:
        """Models, pods or API keys changed."""
        models = self.directory.snapshot.models
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
