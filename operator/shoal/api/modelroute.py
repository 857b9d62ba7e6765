"""ModelRoute: one served name over several targets. Namespaced; short name `mroute`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from shoal.api.meta import (
    CELRule,
    Column,
    Conditions,
    Count,
    CustomResource,
    K8s,
    Object,
)
from shoal.api.model import OutputTokens, RequestSeconds, ServedName
from shoal.api.tenant import ConcurrentRequests, RequestsPerMinute, TenantLimits, TokensPerMinute

HeaderName = Annotated[
    # No pattern messages in this file: as CEL rules inside of nested lists they would exceed the API server's limit.
    str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9]([-a-z0-9_]*[a-z0-9])?$")
]
Endpoint = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^/v1/[a-z]+([/_-][a-z]+)*$")]
PlainName = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
PlainNamespace = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


SecretKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
ExternalEndpoint = Annotated[
    str, StringConstraints(max_length=64, pattern=r"^/v1/(chat/completions|completions|embeddings|messages|responses)$")
]
_HOST_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
EXTERNAL_URL = (
    rf"^https?://({_HOST_LABEL}\.)+[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?(:[1-9][0-9]{{0,4}})?(/[-._~A-Za-z0-9]+)*/?$"
)
"""A host by its name (the last label begins with a letter, so it is no IP address), without user, query, fragment."""
RefKind = Literal["Model", "LoRAAdapter", "External"]
"""What can be the target of a rule."""


class TargetReference(Object):
    """A Model or a LoRAAdapter."""

    name: PlainName
    """Name of the object."""
    namespace: PlainNamespace | None = None
    """Namespace of the object. The object must list the route's namespace in `routeNamespaces`. Default: the route's
    own."""


class ExternalReference(Object):
    """An entry of the route's `externalTargets`."""

    name: PlainNamespace
    """Name of the entry."""


_ONE_OF = "(has(self.model) ? 1 : 0) + (has(self.adapter) ? 1 : 0) + (has(self.external) ? 1 : 0) == 1"
_ONE_TEXT = "give one of `model`, `adapter` and `external`"


class RouteTarget(Object):
    """A target of a rule and its weight."""

    model: TargetReference | None = None
    """A Model."""
    adapter: TargetReference | None = None
    """A LoRAAdapter."""
    external: ExternalReference | None = None
    """An entry of `externalTargets`."""
    weight: Annotated[int, Field(ge=0, le=1_000_000), K8s(default_in_code=True)] = 1
    """Share of the requests, relative to the other weights of the rule. 0: none. Default: 1."""

    cel: ClassVar = (CELRule(_ONE_OF, _ONE_TEXT),)

    @model_validator(mode="after")
    def _one(self) -> Self:
        # The CEL rule, for objects from before it and from clusters without it.
        if sum(one is not None for one in (self.model, self.adapter, self.external)) != 1:
            raise ValueError(_ONE_TEXT)
        return self


class HeaderMatch(Object):
    """A header of the request."""

    name: HeaderName
    """Name of the header, in lower case. Headers with keys or cookies cannot be matched."""
    type: Annotated[Literal["Exact", "Prefix"], K8s(default_in_code=True)] = "Exact"
    """Exact: the whole value. Prefix: its beginning. Default: Exact."""
    value: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """The value, with upper and lower case."""

    cel: ClassVar = (
        CELRule(
            "!(self.name in ['authorization', 'x-api-key', 'x-shoal-key', 'cookie', 'proxy-authorization'])",
            "a header with a key or a cookie cannot be matched",
        ),
    )


class LengthMatch(Object):
    """A range of lengths."""

    at_least: Annotated[int, Field(ge=0, le=2**40)] | None = None
    """Smallest length. Default: 0."""
    less_than: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Length that is too long. It must be above `atLeast`. Default: no bound."""

    # No validator: one rule that no request reaches is no reason to serve nothing of a route from before the CEL rule.
    cel: ClassVar = (
        CELRule(
            "!has(self.atLeast) || !has(self.lessThan) || self.atLeast < self.lessThan",
            "`atLeast` has to be below `lessThan`: otherwise no request has such a length",
        ),
    )


class RouteMatch(Object):
    """Conditions on a request. All that are given must hold."""

    headers: Annotated[tuple[HeaderMatch, ...], Field(max_length=8), K8s(list_type="map", keys=("name",))] = ()
    """Headers that the request must have."""
    tenants: Annotated[tuple[PlainNamespace, ...], Field(max_length=64), K8s(list_type="set")] = ()
    """Tenants, of which one must have sent the request."""
    endpoints: Annotated[tuple[Endpoint, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Paths such as /v1/chat/completions, of which the request must have one."""
    prompt_bytes: LengthMatch | None = None
    """Length of the request's body in bytes."""
    prompt_tokens: LengthMatch | None = None
    """Length of the request in estimated tokens: a quarter of the bytes of its text, and for images, sounds and files
    what they show."""


class SessionAffinity(Object):
    """What identifies a session. The same session keeps its target as long as that can be used."""

    type: Literal["Header", "Conversation"]
    """Header: the value of a header. Conversation: the beginning of the conversation, up to the first message of the
    user."""
    header: HeaderName | None = None
    """Name of the header, in lower case, with type Header. Requests without it have no session."""

    cel: ClassVar = (
        CELRule("(self.type == 'Header') == has(self.header)", "`header` belongs to the type Header"),
        CELRule(
            "!has(self.header) || !(self.header in "
            "['authorization', 'x-api-key', 'x-shoal-key', 'cookie', 'proxy-authorization'])",
            "a header with a key or a cookie cannot identify a session",
        ),
    )


class SingleTarget(Object):
    """A Model, a LoRAAdapter, or an external target."""

    model: TargetReference | None = None
    """A Model."""
    adapter: TargetReference | None = None
    """A LoRAAdapter."""
    external: ExternalReference | None = None
    """An entry of `externalTargets`."""

    cel: ClassVar = (CELRule(_ONE_OF, _ONE_TEXT),)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.model, self.adapter, self.external)) != 1:
            raise ValueError(_ONE_TEXT)
        return self


class HaltOn(Object):
    """When a canary is halted. Each gateway judges the last requests of all gateways."""

    error_percent: Annotated[int, Field(ge=0, le=100), K8s(default_in_code=True)] = 10
    """Share of failed requests, in percent of `minRequests`, above which the canary is halted. Failed are answers of
    5xx, requests that no replica took, and streams that broke off; not what an engine rejects. Default: 10."""
    ttft_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    """Time to the first byte of a stream. The canary is halted when more than half of `minRequests` streams took
    longer, waiting included. Default: no limit."""
    min_requests: Annotated[int, Field(ge=1, le=10_000), K8s(default_in_code=True)] = 20
    """Number of the last requests that are judged. Default: 20."""


class Canary(Object):
    """A new target that gets a small share of a rule's requests, and none once it is halted."""

    target: SingleTarget
    """The new target."""
    percent: Annotated[int, Field(ge=0, le=100)]
    """Share of the rule's requests, in percent. The rest is shared by `targets`."""
    halt_on: HaltOn = HaltOn()
    """When the canary is halted. A halt ends when any field of `canary` changes."""


class CostLimit(Object):
    """An amount of money that one request may cost."""

    amount: Annotated[
        str,
        StringConstraints(max_length=19, pattern=r"^([1-9][0-9]{0,5}(\.[0-9]{1,12})?|0\.[0-9]{0,11}[1-9][0-9]{0,11})$"),
    ]
    """A decimal number above zero and below a million, in quotes, such as "0.05", with at most 12 decimals: YAML makes
    a float of a decimal without quotes, which the API server refuses."""
    currency: Annotated[str, StringConstraints(min_length=3, max_length=3, pattern=r"^[A-Z]{3}$")]
    """ISO 4217 code of the currency. It must be the currency of the price list; otherwise requests stay with their
    target."""


class Fallback(Object):
    """Where requests go that no replica of their target takes, or that are cheaper there. Never after the first byte of
    an answer."""

    targets: Annotated[tuple[SingleTarget, ...], Field(min_length=1, max_length=4), K8s(list_type="atomic")]
    """Targets in order. The first that the tenant may use and that can do the request gets it."""
    when_wait_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    """Waiting time after which a request goes to a fallback that has a replica. It goes at once if the target has no
    replica, and the rest of its measured cold start is longer. Default: requests leave their target only when it
    refuses them: no replica will come, too many requests wait, or the longest wait is over."""
    when_cost_above: CostLimit | None = None
    """A request that may cost more at its target goes to the first fallback that is cheaper for it and has a replica.
    What it may cost is what a budget reserves: its estimated prompt and its longest answer at the price list in force.
    Decided once, before the request waits. Requests stay with their target if a price is not known. Default: no
    limit."""
    when_budget_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    """Share of its Tenant's monthly budget, in percent. Once so much is used, requests go to the first fallback that is
    cheaper for them and has a replica. It has no effect on Tenants without a budget. Default: no limit."""


class Mirror(Object):
    """A Model that gets copies of requests. Its answers are thrown away."""

    model: TargetReference
    """The Model. It must be one that the tenant may use."""
    percent: Annotated[int, Field(ge=1, le=100)]
    """Share of the rule's requests that are copied, in percent."""


class RouteRule(Object):
    """One rule: which requests it is for, and where they go."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = (
        "default"
    )
    """Name of the rule. Default: default."""
    matches: Annotated[tuple[RouteMatch, ...], Field(max_length=8), K8s(list_type="atomic")] = ()
    """The rule is for requests that one of these matches. Default: every request."""
    targets: Annotated[tuple[RouteTarget, ...], Field(min_length=1, max_length=16), K8s(list_type="atomic")]
    """Where the requests go. Targets that the tenant may not use do not exist for it: their share goes to the
    others."""
    session_affinity: SessionAffinity | None = None
    """Requests of one session go to one target. Default: each request is a session of its own."""
    canary: Canary | None = None
    """A new target on trial. Default: none."""
    fallback: Fallback | None = None
    """Targets for requests that no replica of their target takes, or that are cheaper there. Default: none."""
    mirror: Mirror | None = None
    """A Model that gets copies of requests, while it has free capacity. Default: none."""


class ExternalCredentials(Object):
    """A key of a Secret in the route's namespace. The Secret must be of type `shoal.dev/external-target`, and its key
    `host` names the only host that it may be sent to."""

    name: PlainName
    """Name of the Secret."""
    key: Annotated[SecretKey, K8s(default_in_code=True)] = "token"
    """Key of the Secret with the API key. Default: token."""
    auth: Annotated[Literal["Bearer", "ApiKey", "XApiKey"], K8s(default_in_code=True)] = "Bearer"
    """How the API key is sent. Bearer: `authorization: Bearer KEY`. ApiKey: `api-key: KEY`, as Azure wants it. XApiKey:
    `x-api-key: KEY`, as Anthropic wants it. Default: Bearer."""


class ExternalTimeouts(Object):
    """How long a gateway waits for an external target."""

    connect_seconds: Annotated[int, Field(ge=1, le=60), K8s(default_in_code=True)] = 5
    """Longest time for the name's resolution, the connection and its TLS handshake. Default: 5."""
    first_byte_seconds: Annotated[int, Field(ge=1, le=3600), K8s(default_in_code=True)] = 60
    """Longest time from sending the request to the first part of a streamed answer, or to the head of a whole one.
    Then the request goes to a fallback. Default: 60."""
    idle_seconds: Annotated[int, Field(ge=1, le=3600), K8s(default_in_code=True)] = 60
    """Longest pause within an answer. Then the answer is cut. Default: 60."""


class ExternalTarget(Object):
    """An OpenAI-compatible API outside of this cluster. Only Tenants whose `routes` grant the route can reach it."""

    name: PlainNamespace
    """Name of the external target. Usage records and price lists have it as `namespace/route/name`."""
    url: Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=EXTERNAL_URL)]
    """Base URL of the API, with its version, such as https://api.example.com/v1. The installation must allow its host
    (chart value `gateway.external.allowedHosts`), and plain HTTP."""
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Name of the model there."""
    endpoints: Annotated[
        tuple[ExternalEndpoint, ...], Field(min_length=1, max_length=5), K8s(list_type="set", default_in_code=True)
    ] = ("/v1/chat/completions",)
    """Endpoints that it serves. /v1/messages and /v1/responses go there as they are if it serves them, and else are
    translated to chat completions. Other requests are refused. Default: /v1/chat/completions."""
    credentials: ExternalCredentials | None = None
    """The API key. Default: none is sent."""
    ca_bundle: Annotated[str, StringConstraints(max_length=16384, pattern=r"-----BEGIN CERTIFICATE-----")] | None = None
    """Certificates (PEM) of the authorities that may have signed the server's certificate. Default: the public ones."""
    timeouts: ExternalTimeouts = ExternalTimeouts()
    """How long a gateway waits for it."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=4096), K8s(default_in_code=True)] = 128
    """Most requests that each gateway has there at a time. Further ones go to a fallback. Default: 128."""


class RouteLimits(Object):
    """Limits of a single request that names the route, and limits of each tenant for all of its requests that name the
    route. Those of the target and of the Tenant hold too."""

    max_output_tokens: OutputTokens | None = None
    """Longest output in tokens. It applies to requests that set no limit or a higher one. Default: the target's
    limit."""
    request_seconds: RequestSeconds | None = None
    """Longest time that a request may take at all of its targets together, to the last byte. The gateway's own limit
    applies too. Default: the target's limit."""
    requests_per_minute: RequestsPerMinute | None = None
    """Accepted requests of each tenant that name the route, in any 60 seconds, over all gateways. Approximate, as a
    Tenant's limits are: docs/quota.md states the error bound. Default: only the Tenant's own limit."""
    tokens_per_minute: TokensPerMinute | None = None
    """Input and output tokens of these requests of each tenant in any 60 seconds. Default: only the Tenant's own
    limit."""
    concurrent_requests: ConcurrentRequests | None = None
    """Concurrent requests of each tenant that name the route, including held requests. Default: only the Tenant's own
    limit."""

    @property
    def of_each_tenant(self) -> TenantLimits | None:
        """What bounds all requests of one tenant; None: nothing does."""
        limits = TenantLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
        )
        return limits if limits != TenantLimits() else None


class ModelRouteSpec(Object):
    """Desired state of the route: its names and its rules."""

    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Names by which clients request the route in `model`. Default: the object's name. `namespace/name` works too. A
    Model or an adapter that the tenant may use and that claims a name gets it before a route does; of several routes
    the oldest gets it."""
    rules: Annotated[tuple[RouteRule, ...], Field(min_length=1, max_length=16), K8s(list_type="map", keys=("name",))]
    """Rules in order. The first that matches a request is for it; a request that none matches is refused."""
    external_targets: Annotated[
        tuple[ExternalTarget, ...], Field(max_length=16), K8s(list_type="map", keys=("name",))
    ] = ()
    """APIs outside of this cluster that rules may name as targets."""
    limits: RouteLimits = RouteLimits()
    """Limits of a single request that names the route, for all tenants and rules, and of each tenant's use of the
    route. Requests that name a target itself have the target's limits only, and do not count here."""


class CanaryStatus(Object):
    """State of the canary of one rule."""

    rule: Annotated[str, StringConstraints(max_length=63)]
    """Name of the rule."""
    state: Literal["Running", "Halted"]
    """Running: it gets its share. Halted: it gets nothing."""
    revision: Annotated[str, StringConstraints(max_length=64)]
    """Fingerprint of the canary as specified. A change ends a halt."""
    message: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Why it is halted."""


class ExternalTargetStatus(Object):
    """An external target that gateways do not use."""

    name: PlainNamespace
    """Name of the entry of `externalTargets`."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """ExternalNotAllowed, SecretNotFound, SecretRefused, or Pending while its Secret was not read yet and gateways were
    given no key for it: since the target was made or its `url` or `credentials` changed, or since another operator
    began to lead."""
    message: Annotated[str, StringConstraints(max_length=1024)]
    """What to mend."""


class ModelRouteStatus(Object):
    """Observed state of the route."""

    conditions: Conditions = ()
    """Conditions Accepted and Ready. Reasons for failure: WeightsSumToZero, TargetNotFound, CircularRoute,
    NotPermitted, NameTaken, ExternalNotAllowed, SecretNotFound, SecretRefused, TargetsNotReady, Invalid. Ready with
    reason CanaryHalted: a canary was halted."""
    observed_generation: Count | None = None
    """Generation of the spec that this status describes."""
    served_names: Annotated[tuple[ServedName, ...], Field(max_length=16), K8s(list_type="set")] = ()
    """Short names that the route owns. A name that a Model, an adapter or an older route claims is left out."""
    canaries: Annotated[tuple[CanaryStatus, ...], Field(max_length=16), K8s(list_type="map", keys=("rule",))] = ()
    """State of each canary."""
    external_targets: Annotated[
        tuple[ExternalTargetStatus, ...], Field(max_length=16), K8s(list_type="map", keys=("name",))
    ] = ()
    """External targets that rules name and gateways do not use, and why. The host of any other is allowed, and its
    key delivered."""


class ModelRoute(CustomResource):
    """ModelRoute is one served name over several Models, adapters and external APIs."""

    kind_name: ClassVar = "ModelRoute"
    plural: ClassVar = "modelroutes"
    singular: ClassVar = "modelroute"
    short_names: ClassVar = ("mroute",)
    columns: ClassVar = (
        Column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        Column("Names", ".status.servedNames"),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column("Message", '.status.conditions[?(@.type=="Ready")].message'),  # last: it is long
    )

    spec: ModelRouteSpec
    status: ModelRouteStatus | None = None

    @property
    def claimed_names(self) -> tuple[str, ...]:
        """Short names that the route claims."""
        return self.spec.served_names or (self.metadata.name,)

    def references(self) -> Iterator[tuple[RefKind, str]]:
        """Kind and key of everything that the route names as a target."""
        for rule in self.spec.rules:
            for target in rule.targets:
                yield self.resolved(target)
            if rule.canary is not None:
                yield self.resolved(rule.canary.target)
            if rule.mirror is not None:
                yield self.mirrored(rule.mirror)
            for target in rule.fallback.targets if rule.fallback is not None else ():
                yield self.resolved(target)

    def resolved(self, target: RouteTarget | SingleTarget) -> tuple[RefKind, str]:
        """Kind and key of a target: `namespace/name`, of an external one `namespace/route/name`."""
        if target.external is not None:
            return "External", self.external_key(target.external.name)
        reference = target.model or target.adapter
        assert reference is not None  # noqa: S101 - the validators
        kind: RefKind = "Model" if target.model is not None else "LoRAAdapter"
        return kind, f"{reference.namespace or self.metadata.namespace}/{reference.name}"

    def external_key(self, name: str) -> str:
        """What an external target is called in records, price lists and messages."""
        return f"{self.key}/{name}"

    def mirrored(self, mirror: Mirror) -> tuple[RefKind, str]:
        """Kind and `namespace/name` of a mirror."""
        return "Model", f"{mirror.model.namespace or self.metadata.namespace}/{mirror.model.name}"
