"""The fallbacks of a request's route, which get its body as the client sent it."""

from typing import NamedTuple

from shoal.core.access import KeyIdentity
from shoal.core.routing.external import MOST_HOPS
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routes import TargetRef
from shoal.gateway.arrival import Arrival
from shoal.gateway.bigbodies import BIG
from shoal.gateway.preparation import ClientBody, Preparation, Ready
from shoal.gateway.requester import Requester
from shoal.gateway.routechoice import RouteChoice, Routed
from shoal.gateway.shared import Gateway
from shoal.gateway.upstream import PartedBody
from shoal.net import errors
from shoal.net.errors import ApiError


class _Kept(NamedTuple):
    body: ClientBody
    route: str
    targets: list[TargetRef]
    """Fallbacks that were not tried yet, in order."""


class Fallbacks:
    """Those of one request."""

    __slots__ = ("_app", "_arrival", "_kept", "_preparation", "_requester", "_routes")

    def __init__(
        self, app: Gateway, arrival: Arrival, requester: Requester, routes: RouteChoice, preparation: Preparation
    ) -> None:
        self._app = app
        self._arrival = arrival
        self._requester = requester
        self._routes = routes
        self._preparation = preparation
        self._kept: _Kept | None = None

    def __bool__(self) -> bool:
        return self._kept is not None and bool(self._kept.targets)

    def keep(self, identity: KeyIdentity, body: ClientBody, ready: Ready) -> int:
        """Keeps the body, if the route has fallbacks and the budget for bodies has room. Returns the bytes that it
        takes of the budget."""
        routed = ready.routed
        if routed is None or not routed.fallback:
            return 0
        # A form for an engine is a view of the body, which was counted when it was read.
        size = body.size - len(body.raw) if isinstance(ready.body, PartedBody) else body.size
        try:
            self._app.body_budget.take(identity.tenant, size)
        except ApiError:
            return 0
        self._kept = _Kept(body, routed.route, list(routed.fallback))
        return size

    async def can_take(self) -> bool:
        """Whether `next` would find one now. All of them stay untried: the request may not need one."""
        if self._kept is None:
            return False
        return await self._ready(self._kept._replace(targets=[*self._kept.targets]), needs_replica=False) is not None

    async def next(self, *, needs_replica: bool) -> Ready | None:
        """The request for the next fallback that the tenant may use and that can do it; None: there is none.
        `needs_replica`: only for one that has a replica now. A large body first waits for the decoding slot: where a
        Model loses its replicas, all that wait for it leave at once. A request under which a replica died goes to no
        other target: what ends the replicas of one Model would end those of the next."""
        return None if self._kept is None else await self._ready(self._kept, needs_replica=needs_replica)

    async def _ready(self, kept: _Kept, *, needs_replica: bool) -> Ready | None:
        """The same for `kept`, whose targets that were tried are removed."""
        meter = self._preparation.meter
        if meter.deaths:
            return None
        if kept.body.size < BIG:
            return self._next(kept, needs_replica=needs_replica)
        async with self._app.big_bodies.slot(meter.tenant, kept.body.size):
            return self._next(kept, needs_replica=needs_replica)

    def _next(self, kept: _Kept, *, needs_replica: bool) -> Ready | None:
        index, waiting = self._app.directory.snapshot.model_index, list[TargetRef]()
        route = index.routes.get(kept.route)
        try:
            identity = self._requester.check_key()
        except ApiError:
            return None
        try:
            while route is not None and kept.targets:
                ref = kept.targets.pop(0)
                model = index.target(route, ref, identity)
                if model is not None and not self._routes.reaches(model):
                    continue
                if model is None or not self._usable(model, identity.tenant, needs_replica=needs_replica):
                    if needs_replica or (model is not None and self._at_its_last_hop(model)):
                        waiting.append(ref)  # its adapter, its pool or a node may be there in a moment
                    continue
                try:
                    ready = self._preparation.again(
                        identity, kept.body, model, Routed(kept.route, ref, role="fallback")
                    )
                except ApiError:
                    continue  # it cannot do what the first target could
                if ready is not None:
                    return ready
            return None
        finally:
            kept.targets[:0] = waiting

    def _usable(self, model: ServedModel, tenant: str, *, needs_replica: bool) -> bool:
        app = self._app
        if model.external is not None:
            return not self._at_its_last_hop(model) and app.externals.usable(model, tenant)
        if app.holds.dead_end(model) is not None:
            return False
        return not needs_replica or bool(app.fleet.usable(app.directory.snapshot, model))

    def _at_its_last_hop(self, model: ServedModel) -> bool:
        """Whether an external target lacks only because the request has come through other gateways."""
        return model.external is not None and self._arrival.hops >= MOST_HOPS

    def refuse_loop(self) -> None:
        """For a request without another fallback: raises the error of a circle where it only lacks one because it has
        come through other gateways. Else these would believe that this gateway fails."""
        kept = self._kept
        if kept is not None and self._arrival.hops >= MOST_HOPS and any(r.kind == "External" for r in kept.targets):
            raise errors.route_loop() from None
