"""Tenant: who may use the fleet. Cluster-scoped; holds key hashes only, so it can live in Git."""

from datetime import datetime
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from shoal.api.meta import Column, Conditions, K8s, Kind, Name, Object, Rule


class TenantKey(Object):
    """One API key, as the SHA-256 of the bearer token. Rotate by adding one and removing the other."""

    name: Name
    """Name of the key; it stands on usage records."""
    sha256: Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]{64}$"), K8s(pattern_in_rules=True)]
    """The SHA-256 of the key in lower-case hex, as `printf %s "$KEY" | sha256sum` prints it."""
    expires: datetime | None = None
    """After this moment the key is refused."""
    disabled: bool = False
    """A disabled key is refused and stays listed."""

    cel: ClassVar = (
        # On the object and not on the field: a field's message repeats its value, which may be the key itself.
        Rule(
            "self.sha256.matches('^[0-9a-f]{64}$')",
            "`sha256` must be the SHA-256 of the key, 64 lower-case hex digits, never the key itself: "
            'printf %s "$KEY" | sha256sum',
        ),
    )


class TenantModel(Object):
    """A Model that the tenant may use."""

    namespace: Name
    """Namespace of the Model."""
    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
        K8s(pattern_message="must be lower-case letters, digits, '-' and '.', with a letter or digit at both ends"),
    ]
    """Name of the Model."""


class TenantSpec(Object):
    """Keys and grants."""

    external_id: Annotated[str, StringConstraints(max_length=128)] | None = Field(None, alias="externalID")
    """The customer in your own billing system; copied to every usage record."""
    suspended: bool = False
    """A suspended tenant is refused."""
    keys: Annotated[tuple[TenantKey, ...], Field(max_length=64), K8s(list_type="map", keys=("name",))] = ()
    """API keys of the tenant, as hashes."""
    models: Annotated[
        tuple[TenantModel, ...], Field(max_length=256), K8s(list_type="map", keys=("namespace", "name"))
    ] = ()
    """Models that the tenant may use."""
    priority: Annotated[int, Field(ge=1, le=1000), K8s(default_in_code=True)] = 50
    """Where requests of several tenants wait for the same Model, each tenant's share of what is let go, in tokens, is
    in proportion to this number. Within one gateway it is exact. Default: 50."""

    cel: ClassVar = (
        Rule(
            "!has(self.keys) || self.keys.all(k, self.keys.exists_one(o, o.sha256 == k.sha256))",
            "two of `keys` have the same `sha256`: a request could not be told from the other key's",
        ),
    )


class TenantStatus(Object):
    """What was found."""

    conditions: Conditions = ()
    """Condition Ready says whether the tenant can ask: Active, Suspended, NoUsableKey, ModelNotFound, KeyClaimed,
    Invalid."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation that this status is about."""
    active_keys: Annotated[int, Field(ge=0)] | None = None
    """Keys that are neither disabled nor expired."""


class Tenant(Kind):
    """Who may use which Models with which keys."""

    kind_name: ClassVar = "Tenant"
    plural: ClassVar = "tenants"
    singular: ClassVar = "tenant"
    scope: ClassVar = "Cluster"
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Keys", ".status.activeKeys", "integer"),
        Column("External-ID", ".spec.externalID", "string", 1),
        Column("Age", ".metadata.creationTimestamp", "date"),
    )

    spec: TenantSpec
    status: TenantStatus | None = None
