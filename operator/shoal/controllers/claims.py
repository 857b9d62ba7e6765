"""Claims of served names by Models, adapters and routes, which contend for them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shoal.api.loraadapter import LoRAAdapter
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute
from shoal.api.tenant import Tenant
from shoal.controllers.world import World
from shoal.core.routing.consent import EVERYONE, NO_ADAPTERS, AdapterConsent, consent_of, granted_models, may_use
from shoal.core.routing.routes import NO_ROUTES, RouteConsent, route_consent_of
from shoal.core.routing.servednames import Claimant
from shoal.kube.projections import Custom

_Claiming = Custom[Model] | Custom[LoRAAdapter] | Custom[ModelRoute]


def claims_changed(before: _Claiming | None, after: _Claiming | None) -> set[str]:
    """Names whose owner may be another one after this change; also `namespace/name`."""
    was, now = _claims(before), _claims(after)
    return set() if was == now else {*was.names, *now.names}


class _Claims(NamedTuple):
    uid: str
    names: tuple[str, ...]


def _claims(custom: _Claiming | None) -> _Claims:
    if custom is None or custom.object is None or custom.metadata.deletion_timestamp is not None:
        return _Claims("", ())
    return _Claims(custom.metadata.uid, (custom.object.key, *custom.object.claimed_names))


def claimants(world: World, own: Claimant) -> list[Claimant]:
    """Contenders for its names; itself among them. Of another namespace only those that some tenant may use beside it:
    an object in another namespace takes no name from it, and must not appear in its status."""
    found = [
        (*_models(world, [name]), *_adapters(world, [name]), *_routes(world, [name]))
        for name in (own.key, *own.claimed_names)
    ]
    asking = [custom.object for customs in found for custom in customs if custom.object is not None]
    here = own.metadata.namespace
    if all(one.metadata.namespace == here for one in asking):
        return asking
    mine = _tenants(world, own)
    return [one for one in asking if one.metadata.namespace == here or mine & _tenants(world, one)]


def _tenants(world: World, one: Claimant) -> set[str]:
    """Names of the Tenants that may use it."""
    if isinstance(one, Model):
        return {custom.metadata.name for custom in world.tenants.by("model", one.key)}
    if isinstance(one, ModelRoute):
        return _tenants_of_route(world, one)
    pool = world.pools.get(one.pool_key)
    if pool is None or pool.object is None:
        return set()
    model, listed = pool.object.model_key, frozenset(one.spec.tenants)
    asked = {custom.metadata.name for custom in world.tenants.by("model", model)} if EVERYONE in listed else set[str]()
    return {name for name in asked | listed if _agree(world, name, one.key, listed, model)}


def _tenants_of_route(world: World, route: ModelRoute) -> set[str]:
    """Names of the Tenants that may use it: that grant it, or that may use one of its targets in its namespace."""
    found = {
        custom.metadata.name
        for custom in world.tenants.by("routes", route.metadata.namespace or "")
        if custom.object is not None and route_consent_of(custom.object.spec).covers(route.key)
    }
    for kind, key in set(route.references()):
        if key.partition("/")[0] != route.metadata.namespace:
            continue
        custom = world.models.get(key) if kind == "Model" else world.adapters.get(key)
        if custom is not None and custom.object is not None:
            found |= _tenants(world, custom.object)
    return found


def _agree(world: World, tenant: str, adapter: str, listed: frozenset[str], model: str) -> bool:
    custom = world.tenants.get(tenant)
    if custom is None or custom.object is None:
        return False
    spec = custom.object.spec
    granted = granted_models(spec)
    return may_use(tenant, granted, consent_of(spec), adapter=adapter, listed=listed, model=model)


def granted_otherwise(
    before: Custom[Tenant] | None, after: Custom[Tenant] | None
) -> tuple[frozenset[str], AdapterConsent, RouteConsent] | None:
    """Models that a changed Tenant grants or granted, and adapters and routes; None: it grants what it granted."""
    (models, consent, routes), (were, consented, routed) = _grants(after), _grants(before)
    if (models, consent, routes) == (were, consented, routed):
        return None
    return (
        models | were,
        AdapterConsent(
            models=consent.models | consented.models,
            namespaces=consent.namespaces | consented.namespaces,
            adapters=consent.adapters | consented.adapters,
        ),
        RouteConsent(routes.namespaces | routed.namespaces, routes.routes | routed.routes),
    )


def _grants(custom: Custom[Tenant] | None) -> tuple[frozenset[str], AdapterConsent, RouteConsent]:
    if custom is None or custom.object is None:
        return frozenset(), NO_ADAPTERS, NO_ROUTES
    spec = custom.object.spec
    return granted_models(spec), consent_of(spec), route_consent_of(spec)


def models_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the Models that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _models(world, names)}


def adapters_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the adapters that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _adapters(world, names)}


def routes_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the routes that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _routes(world, names)}


def _models(world: World, names: Iterable[str]) -> Iterator[Custom[Model]]:
    for name in names:
        if "/" not in name:
            yield from world.models.by("claim", name)
        elif (custom := world.models.get(name)) is not None:
            yield custom


def _adapters(world: World, names: Iterable[str]) -> Iterator[Custom[LoRAAdapter]]:
    for name in names:
        if "/" not in name:
            yield from world.adapters.by("claim", name)
        elif (custom := world.adapters.get(name)) is not None:
            yield custom


def _routes(world: World, names: Iterable[str]) -> Iterator[Custom[ModelRoute]]:
    for name in names:
        if "/" not in name:
            yield from world.routes.by("claim", name)
        elif (custom := world.routes.get(name)) is not None:
            yield custom
