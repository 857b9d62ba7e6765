"""Who a bearer key is: Tenants hold SHA-256 hashes, so the lookup is by hash and never by the key itself."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from shoal.api.tenant import Tenant, TenantBudget, TenantLimits, TenantLogging
from shoal.core.routing.consent import NO_ADAPTERS, AdapterConsent, consent_of, granted_models
from shoal.core.routing.routes import NO_ROUTES, RouteConsent, route_consent_of

DenialReason = Literal["unknown", "disabled", "expired", "suspended"]

_FAR = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class KeyIdentity:
    """What one API key stands for."""

    tenant: str
    external_id: str | None
    key_name: str
    expires: datetime | None
    disabled: bool
    suspended: bool
    grants: frozenset[str]
    """`namespace/name` of the Models that the tenant may use."""
    consent: AdapterConsent = NO_ADAPTERS
    """The adapters that the tenant may use, if they list it."""
    routes: RouteConsent = NO_ROUTES
    """The routes that its Tenant grants."""
    priority: int = 50
    """Its weight among the tenants whose requests wait for the same Model."""
    prefix_cache_group: str | None = None
    """Tenants that name the same one share what engines keep of their prompts."""
    plan: str | None = None
    """Which prices count."""
    limits: TenantLimits | None = None
    """None: there are none, so nothing has to be counted."""
    budget: TenantBudget | None = None
    logging: TenantLogging | None = None
    """None: nothing is logged."""
    namespaces: frozenset[str] = field(init=False)
    """Where all of that can be: what is elsewhere is nothing to this tenant."""

    def __post_init__(self) -> None:
        models = (key.partition("/")[0] for key in self.grants)
        object.__setattr__(self, "namespaces", self.consent.touches().union(models, self.routes.touches()))


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a key was refused."""

    reason: DenialReason
    tenant: str | None = None


def index_keys(tenants: Iterable[Tenant]) -> dict[str, KeyIdentity]:
    """SHA-256 of a key -> whose it is. A hash that two Tenants list belongs to the older one (then the smaller uid):
    Tenants are cluster-scoped, so only those who run the fleet can list one twice."""
    index: dict[str, KeyIdentity] = {}
    for tenant in sorted(tenants, key=lambda t: (t.metadata.creation_timestamp or _FAR, t.metadata.uid)):
        spec = tenant.spec
        grants, consent, routes = granted_models(spec), consent_of(spec), route_consent_of(spec)
        for key in spec.keys:
            index.setdefault(
                key.sha256,
                KeyIdentity(
                    tenant=tenant.metadata.name,
                    external_id=spec.external_id,
                    key_name=key.name,
                    expires=_aware(key.expires),
                    disabled=key.disabled,
                    suspended=spec.suspended,
                    grants=grants,
                    consent=consent,
                    routes=routes,
                    priority=spec.priority,
                    prefix_cache_group=spec.prefix_cache_group,
                    plan=spec.plan,
                    limits=None if spec.limits == TenantLimits() else spec.limits,
                    budget=spec.budget,
                    logging=None if spec.logging.mode == "Off" else spec.logging,
                ),
            )
    return index


def authenticate(index: Mapping[str, KeyIdentity], sha256: str, now: datetime) -> KeyIdentity | Denied:
    """The identity behind the hash of a key, or why it is refused at `now` (an aware datetime)."""
    identity = index.get(sha256)
    if identity is None:
        return Denied("unknown")
    if identity.disabled:
        return Denied("disabled", identity.tenant)
    if identity.expires is not None and now >= identity.expires:
        return Denied("expired", identity.tenant)
    if identity.suspended:
        return Denied("suspended", identity.tenant)
    return identity


def _aware(moment: datetime | None) -> datetime | None:
    # The API server demands RFC 3339 with a zone; an object from elsewhere may lack it, and comparing would raise.
    return moment if moment is None or moment.tzinfo is not None else moment.replace(tzinfo=UTC)
