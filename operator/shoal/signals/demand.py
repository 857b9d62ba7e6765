"""What gateways say (`GET /v1/demand`): a stream to each gateway pod."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import aiohttp

from shoal.api import demand as api
from shoal.api.meta import JsonObject
from shoal.api.names import DEMAND_PATH
from shoal.signals.stream import Follower, Me, Peer, Streams

Changed = Callable[[str, Collection[str] | None], None]
"""Hears the uid of a gateway's pod, and of which Models (uids) it said something new; None: of all that it has, because
its stream came up or went down."""

NOTHING = api.ModelDemand()
"""What a live gateway has of a Model that it does not name."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a gateway said of one Model, and when it was heard (time.monotonic())."""

    demand: api.ModelDemand
    at: float


class DemandStream(Follower):
    """Listens to one gateway."""

    path = DEMAND_PATH
    field = "models"
    what = "gateway"

    def __init__(self, peer: Peer, session: aiohttp.ClientSession, changed: Changed, me: Me) -> None:
        super().__init__(peer, session, me)
        self.models: dict[str, Told] = {}
        """By uid of the Model; means something only while the stream is live."""
        self._changed = changed

    def demand(self, model_uid: str, now: float | None = None) -> api.ModelDemand:
        """What the gateway has of the Model. The age of the oldest that waits has grown since it was told."""
        told = self.models.get(model_uid)
        if told is None:
            return NOTHING
        if not told.demand.held:
            return told.demand
        grown = max(0.0, (time.monotonic() if now is None else now) - told.at)
        return told.demand.model_copy(update={"oldest_seconds": told.demand.oldest_seconds + grown})

    def _keep(self, content: JsonObject, *, full: bool) -> None:
        if full:
            self.models = {}
        now = time.monotonic()
        for uid, said in content.items():
            if said is None:
                self.models.pop(uid, None)
            else:
                self.models[uid] = Told(api.ModelDemand.model_validate(said), now)

    def _tell(self, content: JsonObject | None) -> None:
        self._changed(self.peer.uid, None if content is None else content.keys())

    def _forget(self) -> None:
        self.models = {}


class DemandStreams(Streams[DemandStream]):
    """A stream to every gateway that is named."""

    def __init__(self, changed: Changed, me: Me = Me()) -> None:  # noqa: B008 - immutable
        super().__init__(lambda peer, session: DemandStream(peer, session, changed, me))
