"""Whether a tenant and an adapter have agreed that the tenant may use it.

Both sides agree, as in the Gateway API: the adapter lists the tenant, and the Tenant grants the adapter, its namespace,
or the Model whose pool it joins (then the adapter must be in the Model's namespace). Without the grant, anybody who can
create a LoRAAdapter could claim a name that a tenant uses, and answer its requests.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from shoal.api.tenant import TenantSpec

EVERYONE: Final = "*"
"""In an adapter's list of tenants: every tenant that may use the pool's Model."""


@dataclass(frozen=True, slots=True)
class AdapterConsent:
    """The adapters that a Tenant grants."""

    models: frozenset[str] = frozenset()
    """`namespace/name` of Models whose pool's adapters are granted if they are in the Model's namespace."""
    namespaces: frozenset[str] = frozenset()
    """Namespaces of which every adapter is granted."""
    adapters: frozenset[str] = frozenset()
    """`namespace/name`."""

    def covers(self, adapter: str, model: str) -> bool:
        """Whether an adapter that joins the pool of a Model is granted; both as `namespace/name`."""
        namespace = adapter.partition("/")[0]
        if namespace in self.namespaces or adapter in self.adapters:
            return True
        return model in self.models and namespace == model.partition("/")[0]

    def touches(self) -> frozenset[str]:
        """Namespaces that granted adapters can be in."""
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
    """Whether both sides agree. `models`: granted to the tenant; `listed`: the adapter's tenants; `model`: the Model of
    the adapter's pool."""
    asked = tenant in listed or (EVERYONE in listed and model in models)
    return asked and consent.covers(adapter, model)


def not_granted(
    listed: Iterable[str], specs: Callable[[str], TenantSpec | None], *, adapter: str, model: str
) -> tuple[str, ...]:
    """Tenants that an adapter lists and that do not grant it. Tenants that do not exist are included, so that a reader
    of the adapter does not learn which Tenants exist."""
    found: list[str] = []
    for tenant in sorted(set(listed) - {EVERYONE}):
        spec = specs(tenant)
        if spec is None or not consent_of(spec).covers(adapter, model):
            found.append(tenant)
    return tuple(found)


def unmatched(spec: TenantSpec, listing: Set[str]) -> tuple[str, ...]:
    """A Tenant's grants of adapters that match no adapter that lists it (`listing`, as `namespace/name`)."""
    namespaces = {key.partition("/")[0] for key in listing}
    found: list[str] = []
    for grant in spec.adapters:
        if grant.names is None:
            found += [f"{grant.namespace}/*"] if grant.namespace not in namespaces else []
        else:
            found += [key for name in grant.names if (key := f"{grant.namespace}/{name}") not in listing]
    return tuple(found)


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
