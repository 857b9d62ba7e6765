"""Requests that wait here while no replica can take them: a room per Model (`room.py`), and who may wait at all."""

import time
from collections.abc import Callable, Collection
from typing import Final

from shoal.core.hold.limits import Bound, Held
from shoal.core.hold.retries import RetryBudget
from shoal.core.resolve import ServedModel
from shoal.gateway import errors
from shoal.gateway.demand import DemandBook
from shoal.gateway.directory import Directory
from shoal.gateway.errors import ApiError
from shoal.gateway.fleet import Fleet
from shoal.gateway.metrics import Metrics
from shoal.gateway.room import WaitingRoom
from shoal.gateway.stays import Stays
from shoal.gateway.ticket import Ticket

_DEAD_END_RETRY_SECONDS: Final = 60
_FULL: Final[dict[Bound, str]] = {
    "requests": "as many requests wait for it as may",
    "bytes": "the requests that wait for it are as large as they may be together",
    "tenant": "you have as many requests waiting for it as one account may",
}


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
        metrics.watch_holds(self.figures, lambda: {room.model.key: room.model.limits for room in self.rooms.values()})

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
            self.stays.heard(uid, pod)
