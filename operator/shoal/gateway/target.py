"""The target of a request: a Model, or an adapter of a Model (`adaptertarget.py`). A target decides which replicas can
take the request, how the request waits for a replica, and what each attempt counts."""

import time
from collections.abc import Collection
from typing import Protocol

from shoal.core.routing.choice import Choice, NoReplica
from shoal.core.routing.replica import Replica
from shoal.gateway.accepted import AcceptedRequest, InFlight
from shoal.net import errors


class DispatchTarget(Protocol):
    """The target of one request. There is no await between the last check of the state, in `choose` or `wait_for`, and
    the start of the write to the replica."""

    def choose(self, tried: set[str], in_a_row: int) -> InFlight | NoReplica:
        """Chooses a replica without waiting, for a first attempt while the hold queue is empty and for a retry. `tried`
        has the uids of the pods that failed; `in_a_row` counts the attempts since the last wait."""
        ...

    async def wait_for(self, why: NoReplica, tried: set[str]) -> InFlight:
        """Waits until a replica can take the request.

        Raises:
            ApiError: the request may not wait, or its time to wait is over.
            ClientGone: the client left.
        """
        ...

    def started(self, replica: Replica) -> None:
        """An attempt at the replica begins. `finished` follows exactly once."""
        ...

    def finished(self, replica: Replica, failure: str | None) -> None:
        """The attempt has ended; `failure` is the reason if another replica may be tried."""
        ...

    @property
    def adapter_name(self) -> str | None:
        """The engines' name of the adapter that answers; None: the base model does."""
        ...


class BaseTarget:
    """A Model itself."""

    __slots__ = ("_request",)

    def __init__(self, request: AcceptedRequest) -> None:
        self._request = request

    def choose(self, tried: Collection[str], in_a_row: int) -> InFlight | NoReplica:
        request = self._request
        app, prepared, attempts = request.app, request.prepared, request.attempts
        model = prepared.model
        if not attempts and model.uid in app.holds.queues:
            return NoReplica("queue")
        if in_a_row >= app.settings.attempts:
            return NoReplica("tried")
        choice = app.fleet.choose(app.directory.snapshot, model, tried, prepared.prompt)
        if not isinstance(choice, Choice):
            return choice
        budget = app.holds.budget(model.uid)
        if attempts:
            if not budget.take(time.monotonic()):
                app.metrics.retries_deferred.inc()
                return NoReplica("tried")
        else:
            budget.sent()
        app.fleet.enter(choice.replica, pick=choice.pick)
        basis = request.basis(choice.pick, choice.among)
        return InFlight(choice.replica, 0, bool(attempts), choice.pick, basis)

    async def wait_for(self, why: NoReplica, tried: set[str]) -> InFlight:
        return await self._request.wait_in_queue(why, tried, self._recheck)

    def started(self, replica: Replica) -> None:
        """Counts nothing: the replica pool counts the attempt, and a Model has no counts of its own."""

    def finished(self, replica: Replica, failure: str | None) -> None:
        """See `started`."""

    @property
    def adapter_name(self) -> str | None:
        return None

    def _recheck(self) -> None:
        """Checks after a wait that the client's key is still valid and may still use the Model. Raises ApiError."""
        request = self._request
        index, prepared = request.app.directory.snapshot.model_index, request.prepared
        now, then = index.find(prepared.meaning, request.check_key()), prepared.model
        if now is None or now.uid != then.uid or now.address != then.address:
            raise errors.model_not_found(prepared.model_name)
