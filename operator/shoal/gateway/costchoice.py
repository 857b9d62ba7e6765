"""Whether a request leaves its target for a cheaper fallback, by the conditions on costs of its route."""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.access import KeyIdentity
from shoal.core.routing.cost import PricedRequest, Trigger, decide_by_cost
from shoal.core.routing.external import MOST_HOPS
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.arrival import Arrival
from shoal.gateway.body import lowered
from shoal.gateway.quota import reserved_tokens
from shoal.gateway.requester import Requester
from shoal.gateway.routechoice import RouteChoice, Routed
from shoal.gateway.shared import Gateway
from shoal.metering.meter import Units


class CostNote(NamedTuple):
    """What became of a request whose route has conditions on costs."""

    left: str
    """`namespace/name` of its target."""
    trigger: Trigger | None
    """The condition for which it went to a fallback; None: it stayed."""
    why: str


class TooCostly(NamedTuple):
    """A request that leaves its target for a cheaper fallback, if one can do it."""

    left: ServedModel
    cheaper: Sequence[tuple[ServedModel, Routed]]
    """In order; each has a replica now, and fits the Tenant's limits if the target or any of them does."""
    trigger: Trigger
    why: str


class RequestSize(NamedTuple):
    """What a request may use, whatever target it goes to."""

    path: str
    """Of the engine."""
    read: int
    """Bytes of its prompt."""
    answers: int
    bound: int | None
    """Longest answer that the client allows; None: not bounded."""
    units: Units
    audio_known: bool
    """The length of all its sounds is known."""

    def at(self, model: ServedModel) -> PricedRequest:
        """What it may use at one target."""
        bound = lowered(self.bound, self.path, model.max_output_tokens)
        tokens = reserved_tokens(self.read, self.answers, bound, model.max_output_tokens)
        adapter = None if model.adapter is None else model.adapter.key
        return PricedRequest(model.key, adapter, *tokens, **self.units._asdict(), audio_known=self.audio_known)


class CostChoice:
    """Decides for one request."""

    __slots__ = ("_app", "_arrival", "_requester", "_routes")

    def __init__(self, app: Gateway, arrival: Arrival, requester: Requester, routes: RouteChoice) -> None:
        self._app = app
        self._arrival = arrival
        self._requester = requester
        self._routes = routes

    def decide(
        self, identity: KeyIdentity, model: ServedModel, routed: Routed, size: RequestSize
    ) -> TooCostly | CostNote | None:
        """The cheaper fallbacks of the request which have a replica now and for which its Tenant's limits have room;
        or why it stays with its target; None: its route has nothing to say."""
        app, conditions, index = self._app, routed.cost, self._app.directory.snapshot.model_index
        route = index.routes.get(routed.route)
        if conditions is None or route is None:
            return None
        targets = [(index.target(route, ref, identity), routed.moved_to(ref)) for ref in routed.fallback]
        options = [(one, moved) for one, moved in targets if one is not None and self._routes.reaches(one)]
        quota = self._requester.quota
        percent = None if conditions.budget_percent is None or quota is None else quota.budget_percent()
        decision = decide_by_cost(
            conditions,
            app.quotas.ledger.rate_table,
            identity.plan,
            size.at(model),
            [size.at(one) for one, _ in options],
            percent,
        )
        cheaper = [options[place] for place in decision.cheaper]
        ready = [each for each in cheaper if self._has_replica(each[0], identity.tenant)]
        fitting = [each for each in ready if self._fits(identity, size.at(each[0]))]
        # Where the limits have no room at the target either, a fallback refuses the request, or it waits for a share.
        if ready and not fitting and not self._fits(identity, size.at(model)):
            fitting = ready
        if fitting and decision.trigger is not None:
            return TooCostly(model, fitting, decision.trigger, decision.why)
        why = decision.why
        if cheaper:
            missing = "fits the limits of its Tenant" if ready else "has a replica now"
            why += f", but no cheaper fallback {missing}"
        return CostNote(model.address, None, why) if why else None

    def _has_replica(self, model: ServedModel, tenant: str) -> bool:
        """Whether a fallback could take the request now."""
        app = self._app
        if model.external is not None:
            return self._arrival.hops < MOST_HOPS and app.externals.usable(model, tenant)
        return app.holds.dead_end(model) is None and bool(app.fleet.usable(app.directory.snapshot, model))

    def _fits(self, identity: KeyIdentity, request: PricedRequest) -> bool:
        """Whether the Tenant's limits and budget, and its limits by the route, have room for the request now."""
        requester = self._requester
        quotas = (each for each in (requester.quota, requester.route_quota) if each is not None)
        return all(each.fits(request, identity.plan, begun=requester.reserved is not None) for each in quotas)
