"""What a name in the `model` field means for a tenant.

A name, short or `namespace/name`, is claimed by Models, adapters and routes. Among those that a tenant may use
(consent.py, routes.py), a Model precedes every adapter, and an adapter every route; among objects of a kind the oldest
comes first (creationTimestamp, then uid). Objects that a tenant may not use do not count, however old, so nobody
outside its grants can take a name from it.

The index is updated one object at a time: with 20,000 adapters a change costs microseconds, and so does a request.
Claims are kept by namespace, and a request reads only namespaces with a grant to its tenant.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from shoal.api import reasons
from shoal.core.access import KeyIdentity
from shoal.core.routing.consent import EVERYONE, may_use
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.resolveadapters import DeclaredAdapter, DeclaredPool, problem_of
from shoal.core.routing.routes import DeclaredRoute, TargetRef, limited, permits

_FAR: Final = datetime.max.replace(tzinfo=UTC)


_MODEL: Final = 0
_ADAPTER: Final = 1
_ROUTE: Final = 2


class RouteTargets(NamedTuple):
    """A route and those of its targets that a tenant may use and that can answer: requests go to each of them."""

    route: DeclaredRoute
    targets: tuple[ServedModel, ...]


class Unserved(NamedTuple):
    """An adapter that cannot be served now."""

    adapter: str
    """Its key."""
    reason: str


class _Claim(NamedTuple):
    """Sorts by precedence: Models first, then adapters, then routes; then the oldest."""

    kind: Literal[0, 1, 2]
    created: datetime
    uid: str
    key: str


class ModelIndex:
    """Models, adapters, pools and routes by `namespace/name`, and their claims to names."""

    def __init__(self) -> None:
        self.models: Mapping[str, ServedModel] = {}
        self._pools: Mapping[str, DeclaredPool] = {}
        self._adapters: dict[str, DeclaredAdapter] = {}
        self._routes: dict[str, DeclaredRoute] = {}
        self._routes_in: dict[str, dict[str, None]] = {}
        """Namespace -> its routes."""
        self._uids: dict[str, str] = {}
        self._claims: dict[str, dict[str, list[_Claim]]] = {}
        """Name -> namespace -> claims."""
        self._listing: dict[tuple[str, str], dict[str, None]] = {}
        """By namespace and name of a Tenant, or `EVERYONE`: adapters that list it."""
        self._served: dict[str, tuple[ServedModel, DeclaredAdapter, ServedModel]] = {}
        """Adapter -> the Model and adapter last combined, and the result."""
        self._limited: dict[str, dict[TargetRef, tuple[DeclaredRoute, ServedModel, ServedModel]]] = {}
        """Route -> target -> the route and target last combined, and the result."""

    @property
    def adapter_uids(self) -> Collection[str]:
        """Uids of all adapters."""
        return self._uids.keys()

    # --- updates ----------------------------------------------------------------------------------------------------

    def set_models(self, models: Mapping[str, ServedModel]) -> None:
        """Replaces all Models; the mapping is kept, and must not be changed."""
        before, self.models = self.models, models
        for key in before.keys() | models.keys():
            old, new = before.get(key), models.get(key)
            if old is not None and new is not None and _same_claims(old, new):
                continue
            if old is not None:
                self._withdraw(_claim_of(old), (old.key, *old.claims))
            if new is not None:
                self._claim(_claim_of(new), (new.key, *new.claims))

    def set_pools(self, pools: Mapping[str, DeclaredPool]) -> None:
        """Replaces all pools; the mapping is kept, and must not be changed."""
        self._pools = pools

    def put(self, key: str, adapter: DeclaredAdapter | None) -> None:
        """Adds or replaces one adapter; None removes it."""
        old = self._adapters.get(key)
        if old == adapter:
            return
        if old is not None:
            del self._adapters[key], self._uids[old.uid]
            self._served.pop(key, None)
            self._withdraw(_claim_of(old), (old.key, *old.claims))
            for tenant in old.tenants:
                listing = self._listing[old.namespace, tenant]
                del listing[key]
                if not listing:
                    del self._listing[old.namespace, tenant]
        if adapter is not None:
            self._adapters[key] = adapter
            self._uids[adapter.uid] = key
            self._claim(_claim_of(adapter), (adapter.key, *adapter.claims))
            for tenant in adapter.tenants:
                self._listing.setdefault((adapter.namespace, tenant), {})[key] = None

    def retain(self, keys: Collection[str]) -> None:
        """Removes adapters whose keys are not in `keys`."""
        for key in [key for key in self._adapters if key not in keys]:
            self.put(key, None)

    def put_route(self, key: str, route: DeclaredRoute | None) -> None:
        """Adds or replaces one route; None removes it."""
        old = self._routes.get(key)
        if old == route:
            return
        if old is not None:
            del self._routes[key], self._routes_in[old.namespace][key]
            self._limited.pop(key, None)
            if not self._routes_in[old.namespace]:
                del self._routes_in[old.namespace]
            self._withdraw(_claim_of(old), (old.key, *old.claims))
        if route is not None:
            self._routes[key] = route
            self._routes_in.setdefault(route.namespace, {})[key] = None
            self._claim(_claim_of(route), (route.key, *route.claims))

    def retain_routes(self, keys: Collection[str]) -> None:
        """Removes routes whose keys are not in `keys`."""
        for key in [key for key in self._routes if key not in keys]:
            self.put_route(key, None)

    @property
    def routes(self) -> Mapping[str, DeclaredRoute]:
        """All routes."""
        return self._routes

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def find(self, name: str | TargetRef, identity: KeyIdentity) -> ServedModel | None:
        """The Model or adapter that a name, or a reference, means for the tenant; None: nothing, a route, or an adapter
        that cannot be served now."""
        if isinstance(name, TargetRef):
            return self._target(name, identity)
        found = self.meaning(name, identity)
        return None if isinstance(found, DeclaredRoute) else found

    def meaning(self, name: str, identity: KeyIdentity) -> ServedModel | DeclaredRoute | None:
        """What a name means for the tenant; None: nothing, or an adapter that cannot be served now."""
        claim = self._first_claim(name, identity)
        if claim is None:
            return None
        if claim.kind == _ROUTE:
            return self._routes[claim.key]
        return self._answering(self._adapters[claim.key]) if claim.kind == _ADAPTER else self.models[claim.key]

    def why_not(self, name: str | TargetRef, identity: KeyIdentity) -> Unserved | None:
        """Why the adapter that a name, or a reference, means for the tenant cannot be served now; None: it can, or it
        is no adapter."""
        if isinstance(name, TargetRef):
            adapter = self._adapters.get(name.key) if name.kind == "LoRAAdapter" else None
            if adapter is None or not self._may_use(adapter, identity):
                return None
        else:
            claim = self._first_claim(name, identity)
            if claim is None or claim.kind != _ADAPTER:
                return None
            adapter = self._adapters[claim.key]
        reason = self._problem(adapter)
        return None if reason is None else Unserved(adapter.key, reason)

    def target(self, route: DeclaredRoute, ref: TargetRef, identity: KeyIdentity) -> ServedModel | None:
        """A target of a route as the tenant may use it, with the route's limits of a request; None: it does not exist
        for the tenant's requests, or cannot be served now."""
        if ref.kind == "External":
            found = route.externals.get(ref.key) if identity.routes.covers(route.key) else None
        else:
            declared = self.models.get(ref.key) if ref.kind == "Model" else self._adapters.get(ref.key)
            permitted = declared is not None and permits(ref.namespace, declared.route_namespaces, route.namespace)
            found = self._target(ref, identity) if permitted else None
        return None if found is None else self._with_limits(route, ref, found)

    def limited_target(self, route: DeclaredRoute, ref: TargetRef) -> ServedModel | None:
        """A target of a route with the route's limits of a request, for any tenant; None: it cannot be served now."""
        if ref.kind == "External":
            found = route.externals.get(ref.key)
        elif ref.kind == "Model":
            found = self.models.get(ref.key)
        else:
            adapter = self._adapters.get(ref.key)
            found = None if adapter is None or adapter.pool_key not in self._pools else self._answering(adapter)
        return None if found is None else self._with_limits(route, ref, found)

    def listed(self, identity: KeyIdentity) -> list[tuple[str, ServedModel | RouteTargets]]:
        """The tenant's list of models: by short name, or by `namespace/name` for those without a short name."""
        found: list[tuple[str, ServedModel | RouteTargets]] = []
        for address, claims in self._usable(identity):
            owned: list[tuple[str, ServedModel | RouteTargets]] = []
            for name in dict.fromkeys(claims):
                served = self.described(name, identity)
                if served is not None and _is(served, address, claims):
                    owned.append((name, served))
            if not owned and (served := self.described(address, identity)) is not None:
                owned = [(address, served)] if _is(served, address, claims) else []
            found += owned
        return sorted(found, key=lambda pair: pair[0])

    def described(self, name: str, identity: KeyIdentity) -> ServedModel | RouteTargets | None:
        """What a name means for the tenant, for its list of models; None: nothing that can answer."""
        found = self.meaning(name, identity)
        if not isinstance(found, DeclaredRoute):
            return found
        targets = (self.target(found, ref, identity) for ref in found.destinations())
        usable = tuple(target for target in targets if target is not None)
        return RouteTargets(found, usable) if usable else None

    def _with_limits(self, route: DeclaredRoute, ref: TargetRef, model: ServedModel) -> ServedModel:
        if not route.limits_requests:
            return model
        known = self._limited.setdefault(route.key, {})
        if (before := known.get(ref)) is not None and before[0] is route and before[1] is model:
            return before[2]
        found = limited(model, route)
        known[ref] = route, model, found
        return found

    def _target(self, ref: TargetRef, identity: KeyIdentity) -> ServedModel | None:
        if ref.kind == "External":
            route = self._routes.get(ref.key.rpartition("/")[0])
            return None if route is None else self.target(route, ref, identity)
        if ref.kind == "Model":
            return self.models.get(ref.key) if ref.key in identity.grants else None
        adapter = self._adapters.get(ref.key)
        return None if adapter is None or not self._may_use(adapter, identity) else self._answering(adapter)

    def _usable(self, identity: KeyIdentity) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Keys and claims of the Models, adapters and routes that the tenant may use."""
        for key in identity.grants:
            if (model := self.models.get(key)) is not None:
                yield key, model.claims
        keys: dict[str, None] = {}
        for namespace in identity.namespaces:
            for tenant in (identity.tenant, EVERYONE):
                keys.update(self._listing.get((namespace, tenant), {}))
        for key in keys:
            if self._may_use(self._adapters[key], identity):
                yield key, self._adapters[key].claims
        for namespace in identity.namespaces:
            for key in self._routes_in.get(namespace, ()):
                if self._may_use_route(self._routes[key], identity):
                    yield key, self._routes[key].claims

    def _first_claim(self, name: str, identity: KeyIdentity) -> _Claim | None:
        """The first claim to a name among those that the tenant may use."""
        claims = self._claims.get(name)
        if claims is None:
            return None
        first: _Claim | None = None
        for namespace in self._shared(claims, identity):
            for claim in claims[namespace]:
                if first is not None and first < claim:
                    break
                if self._granted(claim, identity):
                    first = claim
                    break
        return first

    def _shared(self, claims: Mapping[str, object], identity: KeyIdentity) -> Iterable[str]:
        """Namespaces with both a claim and a grant to the tenant."""
        granted = identity.namespaces
        if len(claims) < len(granted):
            return [namespace for namespace in claims if namespace in granted]
        return [namespace for namespace in granted if namespace in claims]

    def _granted(self, claim: _Claim, identity: KeyIdentity) -> bool:
        if claim.kind == _ROUTE:
            return self._may_use_route(self._routes[claim.key], identity)
        if claim.kind == _ADAPTER:
            return self._may_use(self._adapters[claim.key], identity)
        return claim.key in identity.grants

    def _may_use_route(self, route: DeclaredRoute, identity: KeyIdentity) -> bool:
        """Whether the tenant may use a route (routes.py). An adapter that cannot be served now counts, and so does a
        target of weight 0: a name must not change its meaning with that. The right says whom the tenant trusts, and
        not that there is an answer."""
        if identity.routes.covers(route.key):
            return True
        return any(
            self._granted_target(ref, identity) for ref in route.references() if ref.namespace == route.namespace
        )

    def _granted_target(self, ref: TargetRef, identity: KeyIdentity) -> bool:
        if ref.kind == "External":
            return False  # only the Tenant's own grant of the route is a right to it
        if ref.kind == "Model":
            return ref.key in identity.grants and ref.key in self.models
        adapter = self._adapters.get(ref.key)
        return adapter is not None and self._may_use(adapter, identity)

    def _may_use(self, adapter: DeclaredAdapter, identity: KeyIdentity) -> bool:
        """Whether the tenant may use an adapter. Without its pool an adapter belongs to no Model, and has no names."""
        pool = self._pools.get(adapter.pool_key)
        if pool is None:
            return False
        return may_use(
            identity.tenant,
            identity.grants,
            identity.consent,
            adapter=adapter.key,
            listed=adapter.tenants,
            model=pool.model_key,
        )

    def _problem(self, adapter: DeclaredAdapter) -> str | None:
        pool = self._pools[adapter.pool_key]
        return problem_of(adapter, pool) or (None if pool.model_key in self.models else reasons.MODEL_NOT_FOUND)

    def _answering(self, adapter: DeclaredAdapter) -> ServedModel | None:
        if adapter.current is None or self._problem(adapter) is not None:
            return None
        base = self.models[self._pools[adapter.pool_key].model_key]
        known = self._served.get(adapter.key)
        if known is not None and known[0] is base and known[1] is adapter:
            return known[2]
        served = replace(base, claims=adapter.claims, created=adapter.created, adapter=adapter.current)
        self._served[adapter.key] = (base, adapter, served)
        return served

    def _claim(self, claim: _Claim, names: tuple[str, ...]) -> None:
        for name in _own_names(claim, names):
            insort(self._claims.setdefault(name, {}).setdefault(_namespace(claim), []), claim)

    def _withdraw(self, claim: _Claim, names: tuple[str, ...]) -> None:
        for name in _own_names(claim, names):
            claims = self._claims[name]
            claimants = claims[_namespace(claim)]
            claimants.remove(claim)
            if not claimants:
                del claims[_namespace(claim)]
            if not claims:
                del self._claims[name]


def _namespace(claim: _Claim) -> str:
    return claim.key.partition("/")[0]


def _own_names(claim: _Claim, names: tuple[str, ...]) -> Iterator[str]:
    """Each name once. A `namespace/name` can be claimed only by the object itself."""
    return (name for name in dict.fromkeys(names) if "/" not in name or name == claim.key)


def _claim_of(one: ServedModel | DeclaredAdapter | DeclaredRoute) -> _Claim:
    kind = _ROUTE if isinstance(one, DeclaredRoute) else _ADAPTER if isinstance(one, DeclaredAdapter) else _MODEL
    return _Claim(kind, one.created or _FAR, one.uid, one.key)


def _is(found: ServedModel | RouteTargets, address: str, claims: tuple[str, ...]) -> bool:
    """Whether it is the object of this address and these claims: a Model may be called like an adapter or a route."""
    if isinstance(found, RouteTargets):
        return (found.route.key, found.route.claims) == (address, claims)
    return (found.address, found.claims) == (address, claims)


def _same_claims(old: ServedModel, new: ServedModel) -> bool:
    return (old.uid, old.created, old.claims) == (new.uid, new.created, new.claims)
