"""Whether a tenant and an adapter have agreed that the tenant may use it.

Both sides say so, as in the Gateway API: the adapter lists the tenant, and the Tenant grants the adapter, its
namespace, or the Model whose pool it joins (then it has to be in the Model's own namespace). Without the second half
anybody who can write a LoRAAdapter somewhere could put a name of their choice before a tenant, and answer what it asks.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from shoal.api.tenant import TenantSpec

EVERYONE: Final = "*"
"""In an adapter's list of tenants: everyone who may use the Model under it."""


@dataclass(frozen=True, slots=True)
class AdapterConsent:
    """The adapters that a Tenant grants."""

    models: frozenset[str] = frozenset()
    """`namespace/name` of Models whose pool's adapters are granted, as far as they are in the Model's namespace."""
    namespaces: frozenset[str] = frozenset()
    """Of which every adapter is granted."""
    adapters: frozenset[str] = frozenset()
    """`namespace/name`."""

    def covers(self, adapter: str, model: str) -> bool:
        """Whether it grants an adapter that joins the pool of a Model, both as `namespace/name`."""
        namespace = adapter.partition("/")[0]
        if namespace in self.namespaces or adapter in self.adapters:
            return True
        return model in self.models and namespace == model.partition("/")[0]

    def touches(self) -> frozenset[str]:
        """The namespaces in which granted adapters can be."""
        granted = (key.partition("/")[0] for key in (*self.models, *self.adapters))
        return self.namespaces.union(granted)


NO_ADAPTERS: Final = AdapterConsent()


def granted_models(spec: TenantSpec) -> frozenset[str]:
    """`namespace/name` of the Models that a Tenant grants."""
    return frozenset(f"{grant.namespace}/{grant.name}" for grant in spec.models)


def consent_of(spec: TenantSpec) -> AdapterConsent:
    return AdapterConsent(
        models=frozenset(f"{grant.namespace}/{grant.name}" for grant in spec.models if grant.adapters == "Same"),
        namespaces=frozenset(grant.namespace for grant in spec.adapters if grant.names is None),
        adapters=frozenset(f"{grant.namespace}/{name}" for grant in spec.adapters for name in grant.names or ()),
    )


def may_use(
    tenant: str, models: Set[str], consent: AdapterConsent, *, adapter: str, listed: Set[str], model: str
) -> bool:
    """Whether both sides agree. `models` are those that the tenant is granted, `listed` the tenants of the adapter,
    `model` that of the pool which the adapter joins."""
    asked = tenant in listed or (EVERYONE in listed and model in models)
    return asked and consent.covers(adapter, model)


def not_granted(
    listed: Iterable[str], specs: Callable[[str], TenantSpec | None], *, adapter: str, model: str
) -> tuple[str, ...]:
    """Of the tenants that an adapter lists, those that do not grant it. One that does not exist is among them: whoever
    may read an adapter is not told which Tenants there are."""
    found: list[str] = []
    for tenant in sorted(set(listed) - {EVERYONE}):
        spec = specs(tenant)
        if spec is None or not consent_of(spec).covers(adapter, model):
            found.append(tenant)
    return tuple(found)


def unmatched(spec: TenantSpec, listing: Set[str]) -> tuple[str, ...]:
    """Of a Tenant's grants of adapters, those that match none of the adapters that list it (`namespace/name`)."""
    namespaces = {key.partition("/")[0] for key in listing}
    found: list[str] = []
    for grant in spec.adapters:
        if grant.names is None:
            found += [f"{grant.namespace}/*"] if grant.namespace not in namespaces else []
        else:
            found += [key for name in grant.names if (key := f"{grant.namespace}/{name}") not in listing]
    return tuple(found)


def some(names: Sequence[str], most: int = 5) -> str:
    """A list in a sentence, bounded."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
