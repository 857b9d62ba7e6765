"""ModelRoutes: which of a route's targets a request goes to.

The decision is a function of the route, of facts of the request, of the targets that the tenant may use, and of one
random number. A request of a session does not depend on the number: its target follows from a hash of the session
(weighted rendezvous hashing), so all gateways agree without talking to each other, and a target that comes, goes or
changes its weight moves only its own share of the sessions.

**Rights.** A route grants nothing. A target that the tenant may not use by itself does not exist for the tenant's
requests, nor does a target in another namespace that does not list the route's namespace. A tenant may use a route
that its Tenant grants, and a route in whose own namespace it may use one of the targets: people who can write routes
there can also give that target the route's name.

An external target exists only for tenants whose Tenant grants the route: their prompts leave the cluster there, and who
writes routes does not decide that.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Literal, NamedTuple

from shoal.api.modelroute import (
    Canary,
    Fallback,
    HeaderMatch,
    LengthMatch,
    ModelRoute,
    RefKind,
    RouteLimits,
    RouteMatch,
    RouteRule,
)
from shoal.api.tenant import TenantLimits, TenantSpec
from shoal.core import quantity
from shoal.core.hold.capacity import BYTES_PER_TOKEN
from shoal.core.quota.month import PICO
from shoal.core.routing.canary import HaltLimits
from shoal.core.routing.cost import CostConditions
from shoal.core.routing.external import served_external
from shoal.core.routing.resolve import ServedModel

ANYWHERE: Final = "*"
"""In `routeNamespaces`: every namespace."""
SECRET_HEADERS: Final = frozenset({"authorization", "x-api-key", "x-shoal-key", "cookie", "proxy-authorization"})
"""Headers that no route can look at: otherwise a person who writes routes could guess a tenant's key."""
MOST_SESSION: Final = 1024
"""Bytes of a header that identify a session."""
_BITS: Final = 52
"""Of a hash that becomes a number between 0 and 1, neither of which it reaches."""


class TargetRef(NamedTuple):
    """A target of a route."""

    kind: RefKind
    key: str
    """`namespace/name`; of an external target `namespace/route/name`."""

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class WeightedTarget(NamedTuple):
    """A target of a rule and its weight."""

    ref: TargetRef
    weight: int


@dataclass(frozen=True, slots=True)
class DeclaredCanary:
    """A new target on trial."""

    ref: TargetRef
    percent: int
    limits: HaltLimits
    revision: str
    """Fingerprint of the specification. A halt is one of this revision."""
    halted: bool
    """The route's status says so."""


@dataclass(frozen=True, slots=True)
class DeclaredRule:
    """What the request path needs of a rule."""

    name: str
    matches: tuple[RouteMatch, ...]
    targets: tuple[WeightedTarget, ...]
    session_header: str | None
    by_conversation: bool
    canary: DeclaredCanary | None = None
    fallback: tuple[TargetRef, ...] = ()
    """In order."""
    leave_seconds: int | None = None
    """Waiting time after which a request goes to a fallback."""
    cost: CostConditions | None = None
    """When a request goes to a cheaper fallback; None: never."""
    mirror: TargetRef | None = None
    mirror_percent: int = 0

    def destinations(self) -> Iterator[TargetRef]:
        """Everything that can answer a request: no target of weight 0, no halted canary, and no mirror."""
        yield from (target.ref for target in self.targets if target.weight)
        if self.canary is not None and self.canary.percent and not self.canary.halted:
            yield self.canary.ref
        yield from self.fallback

    def references(self) -> Iterator[TargetRef]:
        """Everything that the rule names."""
        yield from (target.ref for target in self.targets)
        if self.canary is not None:
            yield self.canary.ref
        yield from self.fallback
        if self.mirror is not None:
            yield self.mirror


@dataclass(frozen=True, slots=True)
class DeclaredRoute:
    """What the request path needs of a ModelRoute."""

    key: str
    uid: str
    created: datetime | None
    claims: tuple[str, ...]
    rules: tuple[DeclaredRule, ...]
    externals: Mapping[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    """External targets by key."""
    limits: RouteLimits = field(default_factory=RouteLimits)
    """Of a single request that names the route."""
    tenant_limits: TenantLimits | None = None
    """Of each tenant, for all of its requests that name the route; None: there are none."""

    @property
    def limits_requests(self) -> bool:
        """Whether it has a limit of a single request."""
        return self.limits.max_output_tokens is not None or self.limits.request_seconds is not None

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    def references(self) -> Iterator[TargetRef]:
        """Everything that the route names, each once."""
        yield from dict.fromkeys(ref for rule in self.rules for ref in rule.references())

    def destinations(self) -> Iterator[TargetRef]:
        """Everything that can answer a request, each once."""
        yield from dict.fromkeys(ref for rule in self.rules for ref in rule.destinations())


@dataclass(frozen=True, slots=True)
class RouteConsent:
    """The routes that a Tenant grants."""

    namespaces: frozenset[str] = frozenset()
    """Namespaces of which every route is granted."""
    routes: frozenset[str] = frozenset()
    """`namespace/name`."""

    def covers(self, route: str) -> bool:
        """Whether the route `namespace/name` is granted."""
        return route in self.routes or route.partition("/")[0] in self.namespaces

    def touches(self) -> frozenset[str]:
        """Namespaces that granted routes can be in."""
        return self.namespaces.union(key.partition("/")[0] for key in self.routes)


NO_ROUTES: Final = RouteConsent()


def route_consent_of(spec: TenantSpec) -> RouteConsent:
    """The routes that a Tenant grants."""
    return RouteConsent(
        frozenset(grant.namespace for grant in spec.routes if grant.names is None),
        frozenset(f"{grant.namespace}/{name}" for grant in spec.routes for name in grant.names or ()),
    )


def permits(target_namespace: str, listed: Set[str], route_namespace: str) -> bool:
    """Whether a target lets a route name it. `listed`: the target's `routeNamespaces`."""
    return target_namespace == route_namespace or route_namespace in listed or ANYWHERE in listed


def declared_route(route: ModelRoute) -> DeclaredRoute:
    """What the request path needs of a ModelRoute."""
    return DeclaredRoute(
        route.key,
        route.metadata.uid,
        route.metadata.creation_timestamp,
        route.claimed_names,
        tuple(_declared_rule(route, rule) for rule in route.spec.rules),
        {route.external_key(one.name): served_external(route, one) for one in route.spec.external_targets},
        route.spec.limits,
        route.spec.limits.of_each_tenant,
    )


def limited(model: ServedModel, route: DeclaredRoute) -> ServedModel:
    """A target with the smaller of its own limits of a request and the route's; of equal ones its own."""
    tokens, seconds = route.limits.max_output_tokens, route.limits.request_seconds
    if tokens is not None and (model.max_output_tokens is None or tokens < model.max_output_tokens):
        facts = replace(model.facts, max_output_tokens=tokens)
        model = replace(model, max_output_tokens=tokens, max_output_tokens_route=route.key, facts=facts)
    if seconds is not None and (model.request_seconds is None or seconds < model.request_seconds):
        model = replace(model, request_seconds=float(seconds), request_seconds_route=route.key)
    return model


def _declared_rule(route: ModelRoute, rule: RouteRule) -> DeclaredRule:
    affinity = rule.session_affinity
    return DeclaredRule(
        rule.name,
        rule.matches,
        tuple(WeightedTarget(TargetRef(*route.resolved(target)), target.weight) for target in rule.targets),
        affinity.header if affinity is not None and affinity.type == "Header" else None,
        affinity is not None and affinity.type == "Conversation",
        None if rule.canary is None else _declared_canary(route, rule.name, rule.canary),
        tuple(TargetRef(*route.resolved(target)) for target in rule.fallback.targets) if rule.fallback else (),
        rule.fallback.when_wait_seconds if rule.fallback else None,
        _cost_conditions(rule.fallback) if rule.fallback else None,
        TargetRef(*route.mirrored(rule.mirror)) if rule.mirror else None,
        rule.mirror.percent if rule.mirror else 0,
    )


def _cost_conditions(fallback: Fallback) -> CostConditions | None:
    limit, percent = fallback.when_cost_above, fallback.when_budget_percent
    if limit is None:
        return None if percent is None else CostConditions(budget_percent=percent)
    return CostConditions(int(quantity.parse(limit.amount) * PICO), limit.currency, percent)


def _declared_canary(route: ModelRoute, rule: str, canary: Canary) -> DeclaredCanary:
    # Without defaults: a release that adds a field ends no halt.
    told = "\0".join((route.metadata.uid, rule, canary.model_dump_json(exclude_defaults=True)))
    revision = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
    known = route.status.canaries if route.status is not None else ()
    limits = HaltLimits(canary.halt_on.error_percent, canary.halt_on.ttft_seconds, canary.halt_on.min_requests)
    halted = any(one.revision == revision and one.state == "Halted" for one in known)
    return DeclaredCanary(TargetRef(*route.resolved(canary.target)), canary.percent, limits, revision, halted)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What rules look at in a request."""

    tenant: str
    endpoint: str
    """Path that the client called."""
    headers: Mapping[bytes, bytes]
    """As they came, by name in lower case. No rule looks at those of `SECRET_HEADERS`."""
    size: int
    """Bytes of the body."""
    conversation: Callable[[], str | None] = lambda: None
    """The beginning of the conversation; None: there is none."""
    text_bytes: Callable[[], int] | None = None
    """Bytes of text of which an engine would read about as much as of the body; None: `size`."""


RouteRole = Literal["target", "canary", "fallback"]
"""What a request's target is in the request's rule."""


class RouteDecision(NamedTuple):
    """Where a request goes."""

    rule: str
    target: TargetRef
    shares: tuple[WeightedTarget, ...]
    """Targets that could be chosen, with their weights."""
    session: bool
    """The target was chosen by the request's session."""
    canary: DeclaredCanary | None = None
    """The target is this canary."""
    fallback: tuple[TargetRef, ...] = ()
    """Where it goes, in order, if no replica of the target takes it."""
    leave_seconds: int | None = None
    """Waiting time after which it does so; None: only when the target refuses it."""
    cost: CostConditions | None = None
    """When it goes to a cheaper one of them at once; None: never."""
    mirror: TargetRef | None = None
    """It gets a copy; None: nothing does."""

    @property
    def role(self) -> RouteRole:
        return "canary" if self.canary is not None else "target" if self.shares else "fallback"


class NoTarget(NamedTuple):
    """Why a request goes nowhere."""

    reason: Literal["no-rule", "no-target"]
    rule: str = ""


def decide(
    route: DeclaredRoute,
    facts: RequestFacts,
    usable: Callable[[TargetRef], bool],
    draw: float,
    is_halted: Callable[[DeclaredCanary], bool] = lambda canary: canary.halted,
    mirror_draw: float = 1.0,
    takes: Callable[[DeclaredCanary], bool] = lambda canary: True,
) -> RouteDecision | NoTarget:
    """The target of a request. `usable`: whether the request's tenant may use a target and it can answer; `draw`: a
    random number of [0, 1); `is_halted`: whether a canary gets nothing; `mirror_draw`: another random number, for the
    mirror; `takes`: whether a canary would take the request now."""
    rule = next((rule for rule in route.rules if matches(rule, facts)), None)
    if rule is None:
        return NoTarget("no-rule")
    found = _chosen(route, rule, facts, usable, draw, is_halted, takes)
    if isinstance(found, NoTarget) or rule.mirror is None or mirror_draw * 100 >= rule.mirror_percent:
        return found
    return found._replace(mirror=rule.mirror) if usable(rule.mirror) and rule.mirror != found.target else found


def _chosen(
    route: DeclaredRoute,
    rule: DeclaredRule,
    facts: RequestFacts,
    usable: Callable[[TargetRef], bool],
    draw: float,
    is_halted: Callable[[DeclaredCanary], bool],
    takes: Callable[[DeclaredCanary], bool],
) -> RouteDecision | NoTarget:
    shares = tuple(target for target in rule.targets if target.weight > 0 and usable(target.ref))
    session, canary = session_of(route, rule, facts), rule.canary
    has_session, fallback, leave, by_cost = session is not None, rule.fallback, rule.leave_seconds, rule.cost
    first = None if shares else next((number for number, ref in enumerate(fallback) if usable(ref)), None)
    if canary is not None and not is_halted(canary) and usable(canary.ref):
        # A share that grows keeps the sessions that it has.
        share, at = canary.percent / 100, draw if session is None else _fraction(session)
        # An untested revision does not take over what a fallback can answer.
        alone = bool(canary.percent) and not shares and first is None
        if alone or (at < share and takes(canary)):
            return RouteDecision(rule.name, canary.ref, shares, has_session, canary, fallback, leave, by_cost)
        if session is None:
            draw = draw / share if at < share else (draw - share) / (1 - share)
    if shares:
        target = by_weight(shares, draw) if session is None else by_session(shares, session)
        return RouteDecision(rule.name, target, shares, has_session, None, fallback, leave, by_cost)
    if first is None:
        return NoTarget("no-target", rule.name)
    return RouteDecision(rule.name, fallback[first], (), False, None, fallback[first + 1 :], leave, by_cost)


def matches(rule: DeclaredRule, facts: RequestFacts) -> bool:
    """Whether a rule is for a request."""
    return not rule.matches or any(_holds(match, facts) for match in rule.matches)


def _holds(match: RouteMatch, facts: RequestFacts) -> bool:
    if match.tenants and facts.tenant not in match.tenants:
        return False
    if match.endpoints and facts.endpoint not in match.endpoints:
        return False
    if match.prompt_bytes is not None and not _within(match.prompt_bytes, facts.size):
        return False
    if match.prompt_tokens is not None:
        read = facts.size if facts.text_bytes is None else facts.text_bytes()
        if not _within(match.prompt_tokens, read // BYTES_PER_TOKEN):
            return False
    return all(_has(header, facts.headers) for header in match.headers)


def _has(match: HeaderMatch, headers: Mapping[bytes, bytes]) -> bool:
    value = None if match.name in SECRET_HEADERS else headers.get(match.name.encode())
    if value is None:
        return False
    wanted = (match.value.encode(),)
    if not match.value.isascii() and max(match.value) <= "\xff":
        # HTTP leaves the encoding open: most clients send UTF-8, some Latin-1, where it has the characters.
        wanted = (*wanted, match.value.encode("latin-1"))
    return value in wanted if match.type == "Exact" else value.startswith(wanted)


def _within(length: LengthMatch, size: int) -> bool:
    return size >= (length.at_least or 0) and (length.less_than is None or size < length.less_than)


def session_of(route: DeclaredRoute, rule: DeclaredRule, facts: RequestFacts) -> bytes | None:
    """What identifies the request's session; None: it has none. Sessions of two tenants or two rules are never one."""
    if rule.by_conversation:
        value = facts.conversation()
    elif rule.session_header is not None and rule.session_header not in SECRET_HEADERS:
        # One character for each byte, whatever the encoding.
        value = facts.headers.get(rule.session_header.encode(), b"").decode("latin-1")
    else:
        return None
    if not value:
        return None
    told = "\0".join((route.uid, rule.name, facts.tenant, value[:MOST_SESSION]))
    return hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=16).digest()


def by_weight(shares: Sequence[WeightedTarget], draw: float) -> TargetRef:
    """The target at `draw`, a number of [0, 1), of all weights. `shares` is not empty, and its weights are positive."""
    left = draw * sum(target.weight for target in shares)
    for target in shares:
        left -= target.weight
        if left < 0:
            return target.ref
    return shares[-1].ref


def by_session(shares: Sequence[WeightedTarget], session: bytes) -> TargetRef:
    """The target of a session, by weighted rendezvous hashing. `shares` is not empty, and its weights are positive."""
    return max(shares, key=lambda target: (_score(target, session), target.ref)).ref


def _fraction(session: bytes) -> float:
    """A number of [0, 1) for a session, which does not depend on the targets."""
    hashed = int.from_bytes(hashlib.blake2b(b"canary", key=session, digest_size=8).digest()) >> (64 - _BITS)
    return float(hashed / 2**_BITS)


def _score(target: WeightedTarget, session: bytes) -> float:
    # A target that is listed twice has the same hash twice: its larger weight counts.
    name = f"{target.ref.kind}/{target.ref.key}".encode()
    hashed = int.from_bytes(hashlib.blake2b(name, key=session, digest_size=8).digest()) >> (64 - _BITS)
    return -target.weight / math.log((hashed + 0.5) / 2**_BITS)
