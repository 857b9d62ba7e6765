"""What the model's name in a request means, and what its route chooses if it is one."""

import random
from functools import cache
from typing import Any, NamedTuple

from shoal.core.access import KeyIdentity
from shoal.core.fields.mediasize import media_size
from shoal.core.fields.table import CHAT
from shoal.core.routing.affinity import conversation_of
from shoal.core.routing.cost import CostConditions
from shoal.core.routing.external import MOST_HOPS
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routes import (
    DeclaredCanary,
    DeclaredRoute,
    NoTarget,
    RequestFacts,
    RouteRole,
    TargetRef,
    decide,
)
from shoal.gateway.arrival import Arrival
from shoal.gateway.shared import Gateway
from shoal.net import errors
from shoal.net.errors import ApiError


class Routed(NamedTuple):
    """What a route chose."""

    route: str
    """`namespace/name`."""
    target: TargetRef
    fallback: tuple[TargetRef, ...] = ()
    leave_seconds: int | None = None
    mirror: TargetRef | None = None
    role: RouteRole = "target"
    cost: CostConditions | None = None
    canary: DeclaredCanary | None = None
    """The request goes to this canary."""
    limited: DeclaredRoute | None = None
    """The route, if it has limits of each tenant."""

    def moved_to(self, ref: TargetRef) -> "Routed":
        """The same for a request that goes to a cheaper fallback. If that refuses it, the request goes to its first
        target, as if there had been no cheaper one, and then to the others."""
        others = (each for each in self.fallback if each != ref)
        mirror = None if self.mirror == ref else self.mirror
        return self._replace(
            target=ref, fallback=(self.target, *others), mirror=mirror, role="fallback", cost=None, canary=None
        )


class RouteChoice:
    """Chooses for one request, by the same random numbers however often it is asked."""

    __slots__ = ("_app", "_arrival", "_draw", "_mirror_draw")

    def __init__(self, app: Gateway, arrival: Arrival) -> None:
        self._app = app
        self._arrival = arrival
        self._draw: float | None = None
        self._mirror_draw = 1.0

    def meaning(
        self, identity: KeyIdentity, name: str, fields: dict[str, Any], size: int
    ) -> tuple[ServedModel, Routed | None]:
        """What a name means, and what chose it if the name is a route's. `size`: bytes of the body. Raises ApiError."""
        found = self._app.directory.snapshot.model_index.meaning(name, identity)
        if found is None:
            raise self.unknown(identity, name)
        if not isinstance(found, DeclaredRoute):
            return found, None
        return self._chosen(found, identity, name, fields, size)

    def _chosen(
        self, route: DeclaredRoute, identity: KeyIdentity, name: str, fields: dict[str, Any], size: int
    ) -> tuple[ServedModel, Routed]:
        app, arrival, index = self._app, self._arrival, self._app.directory.snapshot.model_index
        if self._draw is None:
            self._draw, self._mirror_draw = random.random(), random.random()  # noqa: S311 - shares, no secrets
        facts = RequestFacts(
            identity.tenant,
            arrival.path,
            arrival.headers,
            size,
            lambda: conversation_of(fields),
            # Asked by each rule for lengths; reading media takes long.
            cache(lambda: media_size(fields).text_bytes(size) if arrival.engine_path == CHAT else size),
        )

        def usable(ref: TargetRef) -> bool:
            target = index.target(route, ref, identity)
            return target is not None and self.reaches(target)

        def permitted(ref: TargetRef) -> bool:
            target = index.target(route, ref, identity)
            return target is not None and self.reaches(target) and app.externals.permitted(target)

        def takes(canary: DeclaredCanary) -> bool:
            target = index.target(route, canary.ref, identity)
            return target is None or not app.externals.rests(target)

        halted = app.canaries.is_halted
        chosen = decide(route, facts, permitted, self._draw, halted, self._mirror_draw, takes)
        if isinstance(chosen, NoTarget):
            # The error then says what an external target lacks.
            chosen = decide(route, facts, usable, self._draw, halted, self._mirror_draw, takes)
        if isinstance(chosen, NoTarget):
            raise errors.no_rule(name) if chosen.reason == "no-rule" else errors.no_target(name, route.key)
        model = index.target(route, chosen.target, identity)
        if model is None:
            raise errors.no_target(name, route.key)
        if model.external is not None and arrival.hops >= MOST_HOPS:
            raise errors.route_loop()
        return model, Routed(
            route.key,
            chosen.target,
            chosen.fallback,
            chosen.leave_seconds,
            chosen.mirror,
            chosen.role,
            chosen.cost,
            chosen.canary,
            None if route.tenant_limits is None else route,
        )

    def reaches(self, model: ServedModel) -> bool:
        """Whether the request can go there: a proxy that carries it takes it to replicas only."""
        return model.external is None or self._arrival.carrier is None

    def unknown(self, identity: KeyIdentity, name: str) -> ApiError:
        """The error for a name that belongs to no model."""
        unserved = self._app.directory.snapshot.model_index.why_not(name, identity)
        if unserved is None:
            return errors.model_not_found(name)
        return errors.adapter_waits(name, unserved.reason, unserved.adapter)
