"""Tenant: a user of the fleet with its API keys, grants and limits. Cluster-scoped; contains only hashes of keys, so it
can live in Git."""

from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import CELRule, Column, Conditions, Count, CustomResource, K8s, Name, Object, Quantity


class TenantKey(Object):
    """One API key, as the SHA-256 of the bearer token. To rotate a key, add the new one and then remove the old one."""

    name: Name
    """Name of the key, copied to usage records."""
    sha256: Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]{64}$"), K8s(pattern_in_rules=True)]
    """The SHA-256 of the key in lower-case hex, as `printf %s "$KEY" | sha256sum` prints it."""
    expires: datetime | None = None
    """Time after which the key is refused."""
    disabled: bool = False
    """Refuses the key without removing it."""

    cel: ClassVar = (
        # On the object, not on the field: the message of a field repeats its value, which may be the key itself.
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
    """Same: also grants the adapters of the Model's pool that list the tenant and are in the Model's own namespace,
    where a user who can write adapters can change the Model too. None: grants only the Model. Adapters of other
    namespaces are granted by `spec.adapters`. Default: Same."""


AdapterName = Annotated[
    # No pattern message: the CEL rule for it would exceed the API server's cost limit here.
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]


class TenantAdapters(Object):
    """LoRAAdapters of one namespace that the tenant may use. Each adapter must list the tenant too."""

    namespace: Name
    """Namespace of the adapters."""
    names: Annotated[tuple[AdapterName, ...], Field(min_length=1, max_length=256), K8s(list_type="set")] | None = None
    """Names of the adapters. Default: all adapters of the namespace that list the tenant, including future ones."""


class TenantRoutes(Object):
    """ModelRoutes of one namespace that the tenant may use."""

    namespace: Name
    """Namespace of the routes."""
    names: Annotated[tuple[AdapterName, ...], Field(min_length=1, max_length=64), K8s(list_type="set")] | None = None
    """Names of the routes. Default: all routes of the namespace, including future ones."""


RequestsPerMinute = Annotated[int, Field(ge=1, le=10_000_000)]
TokensPerMinute = Annotated[int, Field(ge=1, le=1_000_000_000_000)]
ConcurrentRequests = Annotated[int, Field(ge=1, le=1_000_000)]


class TenantLimits(Object):
    """Rate limits of a tenant over all gateways. They are approximate: docs/quota.md states the error bound."""

    requests_per_minute: RequestsPerMinute | None = None
    """Accepted requests in any 60 seconds. Default: no limit."""
    tokens_per_minute: TokensPerMinute | None = None
    """Input and output tokens in any 60 seconds. Default: no limit."""
    concurrent_requests: ConcurrentRequests | None = None
    """Concurrent requests, including held requests. Default: no limit."""


class TenantBudget(Object):
    """Budget of a tenant per calendar month (UTC): money at the price list in force, or tokens."""

    amount: Quantity | None = None
    """Amount of money per calendar month, in quotes, such as "99.50", in `currency`. YAML makes a float of a decimal
    without quotes, which the API server refuses."""
    currency: Annotated[str, StringConstraints(max_length=3, pattern=r"^[A-Z]{3}$")] | None = None
    """ISO 4217 code of the currency of `amount`. It must be the currency of the price list."""
    tokens: Annotated[int, Field(ge=1, le=1_000_000_000_000_000)] | None = None
    """Input and output tokens per calendar month."""
    when_unknown: Annotated[Literal["Serve", "Refuse"], K8s(default_in_code=True)] = "Serve"
    """Behaviour while the ledger does not respond and the month's total is unknown. Serve: serves requests, and each
    gateway counts its own. Refuse: answers 429 until the total is known. Default: Serve."""

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
    """A pattern whose matches are replaced before request logs are written to disk."""

    name: Name
    """Name of the rule; a match is replaced by [name]."""
    builtin: Literal["Email", "CreditCard", "IPAddress", "PhoneNumber", "Secret"] | None = None
    """A built-in pattern. Secret matches what looks like an API key or a token."""
    pattern: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """A regular expression in RE2 syntax."""

    cel: ClassVar = (CELRule("has(self.builtin) != has(self.pattern)", "give either `builtin` or `pattern`"),)


class TenantLogging(Object):
    """Request log of a tenant. It is separate from usage records."""

    mode: Literal["Off", "Metadata", "Full"] = "Off"
    """Off: no log. Metadata: caller, time and outcome of each request. Full: also prompts and outputs. Default: Off."""
    retention_days: Annotated[int, Field(ge=1, le=3650), K8s(default_in_code=True)] = 30
    """Days after which logged requests are deleted. Default: 30."""
    redact: Annotated[tuple[Redaction, ...], Field(max_length=32), K8s(list_type="map", keys=("name",))] = ()
    """Patterns that are redacted from prompts and outputs before these are written. What looks like an API key or a
    token is always redacted."""


class TenantSpec(Object):
    """Desired state of the tenant: keys, grants, limits."""

    external_id: Annotated[str, StringConstraints(max_length=128)] | None = Field(None, alias="externalID")
    """Identifier of the customer in your billing system; copied to every usage record."""
    suspended: bool = False
    """Refuses all requests of the tenant."""
    keys: Annotated[tuple[TenantKey, ...], Field(max_length=64), K8s(list_type="map", keys=("name",))] = ()
    """API keys of the tenant, as hashes."""
    models: Annotated[
        tuple[TenantModel, ...], Field(max_length=256), K8s(list_type="map", keys=("namespace", "name"))
    ] = ()
    """Models that the tenant may use."""
    adapters: Annotated[
        tuple[TenantAdapters, ...], Field(max_length=256), K8s(list_type="map", keys=("namespace",))
    ] = ()
    """Adapters that the tenant may use, in addition to those granted by `models`. An adapter is usable only if both
    sides agree: the Tenant by this list or by `models`, and the adapter by its own list of tenants. The adapter's Model
    need not be granted."""
    routes: Annotated[tuple[TenantRoutes, ...], Field(max_length=64), K8s(list_type="map", keys=("namespace",))] = ()
    """ModelRoutes that the tenant may use, in addition to those in the namespace of one of their targets that the
    tenant may use. A route grants none of its targets: those that the tenant may not use do not exist for it."""
    priority: Annotated[int, Field(ge=1, le=1000), K8s(default_in_code=True)] = 50
    """Weight of the tenant when requests of several tenants are on hold for the same Model. Each tenant's share of
    released tokens is proportional to its weight. It is exact within one gateway. Default: 50."""
    prefix_cache_group: Name | None = None
    """Tenants with the same group share the engines' prefix cache: prompts of one tenant speed up requests of the
    others, and each can find out whether another has sent a prompt with the same beginning. Use it for tenants of one
    organisation. Default: not shared."""
    plan: Name | None = None
    """Plan that selects prices from the price list; copied to every usage record. Default: prices without a plan."""
    limits: TenantLimits = TenantLimits()
    """Limits of requests and tokens per minute, and of concurrent requests."""
    budget: TenantBudget | None = None
    """Budget in money or tokens per calendar month. Default: no limit."""
    logging: TenantLogging = TenantLogging()
    """Request log of the tenant."""

    cel: ClassVar = (
        CELRule(
            "!has(self.keys) || self.keys.all(k, self.keys.exists_one(o, o.sha256 == k.sha256))",
            "two of `keys` have the same `sha256`: a request could not be told from the other key's",
        ),
    )


class TenantStatus(Object):
    """Observed state of the tenant."""

    conditions: Conditions = ()
    """Conditions of the tenant. Ready, whether the tenant can send requests: Active, Suspended, NoUsableKey,
    ModelNotFound, KeyClaimed, Invalid. BudgetReady, with a budget in money: Active, OtherCurrency, PricesUnknown.
    LoggingReady, with a request log: Active, RuleRefused. AdaptersReady, with `adapters`: Active, AdapterNotFound."""
    observed_generation: Count | None = None
    """Generation of the spec that this status describes."""
    active_keys: Count | None = None
    """Number of keys that are neither disabled nor expired."""


class Tenant(CustomResource):
    """Tenant is a user of the fleet: its API keys, and the Models and adapters that it may use."""

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
