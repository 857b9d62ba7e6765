"""Tenant: who may use the fleet. Cluster-scoped; holds key hashes only, so it can live in Git."""

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import CELRule, Column, Conditions, Count, CustomResource, K8s, Name, Object, Quantity


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
        CELRule(
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
    adapters: Annotated[Literal["Same", "None"], K8s(default_in_code=True)] = "Same"
    """Same: also the adapters of the Model's pool that list the tenant and are in the Model's own namespace, where
    whoever may write decides what the Model itself answers, too. None: the Model alone. Adapters of other namespaces
    are granted by `spec.adapters`. Default: Same."""


AdapterName = Annotated[
    # No words of our own for a name that does not fit: a rule that has them costs more than the API server allows here.
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]


class TenantAdapters(Object):
    """LoRAAdapters of one namespace that the tenant may use, if they list it."""

    namespace: Name
    """Namespace of the adapters."""
    names: Annotated[tuple[AdapterName, ...], Field(min_length=1, max_length=256), K8s(list_type="set")] | None = None
    """Names of the adapters. Default: every one of the namespace that lists the tenant, now and later."""


class TenantLimits(Object):
    """What a tenant may use at a time, over all gateways. Approximate: docs/quota.md states the bound."""

    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Accepted requests in any 60 seconds. Default: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = None
    """Input and output tokens in any 60 seconds. Default: no limit."""
    concurrent_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests at a time, those that wait for a replica counted. Default: no limit."""


class TenantBudget(Object):
    """What a tenant may use in a calendar month (UTC): an amount of money at the price list in force, or tokens."""

    amount: Quantity | None = None
    """Money per calendar month, such as "500"; `currency` says which."""
    currency: Annotated[str, StringConstraints(max_length=3, pattern=r"^[A-Z]{3}$")] | None = None
    """Of `amount`, as in ISO 4217; must be that of the price list."""
    tokens: Annotated[int, Field(ge=1, le=1_000_000_000_000_000)] | None = None
    """Input and output tokens per calendar month."""
    when_unknown: Annotated[Literal["Serve", "Refuse"], K8s(default_in_code=True)] = "Serve"
    """What happens while the month's total is not known, because the ledger does not answer: Serve goes on, counting
    what this gateway knows; Refuse answers 429 until it is known again. Default: Serve."""

    cel: ClassVar = (
        CELRule("has(self.amount) != has(self.tokens)", "give either `amount` and `currency`, or `tokens`"),
        CELRule("has(self.amount) == has(self.currency)", "`amount` and `currency` belong together"),
        CELRule(
            "!has(self.amount) || !string(self.amount).endsWith('i') && "
            "quantity(string(self.amount)).compareTo(quantity('0')) > 0",
            "`amount` must be money above zero, such as '500' or '99.50'; `suspended` refuses a tenant as a whole",
        ),
        CELRule(
            "!has(self.amount) || string(self.amount).endsWith('i') || "
            "quantity(string(self.amount)).compareTo(quantity('4600000')) <= 0",
            "`amount` may be at most 4600000: more cannot be counted in 64 bits; give `tokens` instead",
        ),
    )


class Redaction(Object):
    """A pattern whose matches are taken out of what is logged, before it reaches a disk."""

    name: Name
    """Name of the rule; the match is replaced by [name]."""
    builtin: Literal["Email", "CreditCard", "IPAddress", "PhoneNumber", "Secret"] | None = None
    """A pattern of Shoal's own. Secret: what looks like an API key or a token."""
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """A regular expression in RE2's syntax."""

    cel: ClassVar = (CELRule("has(self.builtin) != has(self.pattern)", "give either `builtin` or `pattern`"),)


class TenantLogging(Object):
    """The request log of a tenant: a file of its own, apart from usage records."""

    mode: Literal["Off", "Metadata", "Full"] = "Off"
    """Off: nothing. Metadata: who asked what when, and what came of it. Full: prompts and answers too."""
    retention_days: Annotated[int, Field(ge=1, le=3650), K8s(default_in_code=True)] = 30
    """After so many days what was logged is deleted. Default: 30."""
    redact: Annotated[tuple[Redaction, ...], Field(max_length=32), K8s(list_type="map", keys=("name",))] = ()
    """What is taken out of prompts and answers before they are written. What looks like an API key or a token is taken
    out always."""


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
    adapters: Annotated[
        tuple[TenantAdapters, ...], Field(max_length=256), K8s(list_type="map", keys=("namespace",))
    ] = ()
    """Adapters that the tenant may use besides those that come with `models`. An adapter is used only where both agree:
    the Tenant by this list or by `models`, the adapter by its own list of tenants. The Model under it need not be
    granted."""
    priority: Annotated[int, Field(ge=1, le=1000), K8s(default_in_code=True)] = 50
    """Where requests of several tenants wait for the same Model, each tenant's share of what is let go, in tokens, is
    in proportion to this number. Within one gateway it is exact. Default: 50."""
    prefix_cache_group: Name | None = None
    """Tenants that name the same group share the engines' caches of prompts: what one has asked answers the other
    faster, and each can find out whether the other has sent a prompt that begins like its own. For the tenants of one
    organisation. Default: this tenant alone."""
    plan: Name | None = None
    """Which prices of the price list count; copied to every usage record. Default: those without a plan."""
    limits: TenantLimits = TenantLimits()
    """Requests and tokens per minute, and requests at a time."""
    budget: TenantBudget | None = None
    """Money or tokens per calendar month. Default: no limit."""
    logging: TenantLogging = TenantLogging()
    """The request log."""

    cel: ClassVar = (
        CELRule(
            "!has(self.keys) || self.keys.all(k, self.keys.exists_one(o, o.sha256 == k.sha256))",
            "two of `keys` have the same `sha256`: a request could not be told from the other key's",
        ),
    )


class TenantStatus(Object):
    """What was found."""

    conditions: Conditions = ()
    """Condition Ready says whether the tenant can ask: Active, Suspended, NoUsableKey, ModelNotFound, KeyClaimed,
    Invalid. BudgetReady, where there is a budget in money: Active, OtherCurrency, PricesUnknown. LoggingReady, where a
    request log is asked for: Active, RuleRefused. AdaptersReady, where `adapters` are granted: Active,
    AdapterNotFound."""
    observed_generation: Count | None = None
    """The generation that this status is about."""
    active_keys: Count | None = None
    """Keys that are neither disabled nor expired."""


class Tenant(CustomResource):
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
