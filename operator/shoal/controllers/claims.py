"""Claims of served names by Models and adapters, which contend for them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shoal.api.loraadapter import LoRAAdapter
from shoal.api.model import Model
from shoal.api.tenant import Tenant
from shoal.controllers.world import World
from shoal.core.routing.consent import EVERYONE, NO_ADAPTERS, AdapterConsent, consent_of, granted_models, may_use
from shoal.core.routing.servednames import Claimant
from shoal.kube.projections import Custom

_Claiming = Custom[Model] | Custom[LoRAAdapter]


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
    found = [(*_models(world, [name]), *_adapters(world, [name])) for name in (own.key, *own.claimed_names)]
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
    pool = world.pools.get(one.pool_key)
    if pool is None or pool.object is None:
        return set()
    model, listed = pool.object.model_key, frozenset(one.spec.tenants)
    asked = {custom.metadata.name for custom in world.tenants.by("model", model)} if EVERYONE in listed else set[str]()
    return {name for name in asked | listed if _agree(world, name, one.key, listed, model)}


def _agree(world: World, tenant: str, adapter: str, listed: frozenset[str], model: str) -> bool:
    custom = world.tenants.get(tenant)
    if custom is None or custom.object is None:
        return False
    spec = custom.object.spec
    granted = granted_models(spec)
    return may_use(tenant, granted, consent_of(spec), adapter=adapter, listed=listed, model=model)


def granted_otherwise(
    before: Custom[Tenant] | None, after: Custom[Tenant] | None
) -> tuple[frozenset[str], AdapterConsent] | None:
    """Models that a changed Tenant grants or granted, and adapters; None: it grants what it granted."""
    (models, consent), (were, consented) = _grants(after), _grants(before)
    if (models, consent) == (were, consented):
        return None
    return models | were, AdapterConsent(
        models=consent.models | consented.models,
        namespaces=consent.namespaces | consented.namespaces,
        adapters=consent.adapters | consented.adapters,
    )


def _grants(custom: Custom[Tenant] | None) -> tuple[frozenset[str], AdapterConsent]:
    if custom is None or custom.object is None:
        return frozenset(), NO_ADAPTERS
    return granted_models(custom.object.spec), consent_of(custom.object.spec)


def models_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the Models that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _models(world, names)}


def adapters_claiming(world: World, names: Iterable[str]) -> set[str]:
    """Keys of the adapters that ask for one of these names."""
    return {f"{c.metadata.namespace}/{c.metadata.name}" for c in _adapters(world, names)}


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
