"""What the request path knows of a Model, and of an adapter served with it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from shoal.api import reasons
from shoal.api.meta import Condition
from shoal.api.model import Model, ModelStatus
from shoal.core import quantity
from shoal.core.architectures import names
from shoal.core.capabilities import Capability, capabilities, generates_only
from shoal.core.enginedifferences import NONE, EngineDifferences
from shoal.core.fields.kinds import Facts, Medium
from shoal.core.hold.limits import Limits

Trait = Literal["vision", "audio", "tools", "reasoning"]
"""What a Model that generates does with a chat: it reads images, or sound; the engine takes its calls of tools, or its
thoughts, out of its text."""
_NO_PLACE: Final = frozenset({reasons.NO_FIT, reasons.NO_CAPACITY, reasons.OUTRANKED, reasons.NO_CLASS})
_FOR_A_PERSON: Final = {reasons.NO_FIT, reasons.NO_CLASS, reasons.SIZE_UNKNOWN, reasons.INVALID} | (
    reasons.STAGE_REASONS - {reasons.SOURCE_UNREACHABLE, reasons.DISK_FULL, reasons.CACHE_UNAVAILABLE}
)
"""Reasons that end when a person changes the Model, its source or the classes. An engine that failed may start."""


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """Why waiting for a replica of a Model is pointless, from its conditions."""

    reason: str
    """One of `reasons.py`. The condition's message is not for clients: it tells of nodes and engines."""
    unless_pods: bool
    """It does not apply while there are pods that may become ready: only further replicas have no place."""
    for_a_person: bool = False
    """It ends when a person changes something, and by nothing else: a client that tries again gets the same."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """The served revision of a LoRAAdapter."""

    key: str
    """`namespace/name`."""
    uid: str
    revision: str
    """Digest of its files."""
    engine_name: str
    """The revision's name in engines."""
    uri: str
    """Where agents fetch it from."""


@dataclass(frozen=True, slots=True)
class ServedExternal:
    """What the request path needs of an external target."""

    host: str
    port: int
    tls: bool
    base: str
    """Path before that of the endpoint, without its `/v1`."""
    model: str
    """Name of the model there."""
    endpoints: frozenset[str]
    credential: str | None
    """Id of its key among those that are delivered to gateways; None: it needs none."""
    key_prefix: str
    """What stands before the key in its header line."""
    ca_bundle: str | None
    connect_seconds: float
    first_byte_seconds: float
    idle_seconds: float
    most: int
    """Requests at a time."""

    @property
    def authority(self) -> str:
        """Value of the header `host`."""
        return self.host if self.port == (443 if self.tls else 80) else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the request path knows of a Model, or of an adapter and its Model."""

    key: str
    """`namespace/name`."""
    uid: str
    engine_name: str
    """Its name in the engine."""
    claims: tuple[str, ...]
    """Short names that it claims."""
    created: datetime | None
    capabilities: frozenset[Capability] = frozenset({"generate"})
    """What its engine does. SGLang exits on a request for some of the rest, so that one client's mistake would take the
    replica from all."""
    facts: Facts = field(default_factory=Facts)
    """Facts behind the bounds of request fields."""
    limits: Limits = field(default_factory=Limits)
    """Limits of waiting requests."""
    kv_percent: int = 80
    """Share of a replica's KV cache up to which waiting requests are released."""
    cold_start_seconds: float | None = None
    """Measured; None: not yet."""
    dead_end: DeadEnd | None = None
    """Why no replica will come; None: one may."""
    max_output_tokens: int | None = None
    """Cap of one answer; None: the context length."""
    max_output_tokens_route: str | None = None
    """The route whose cap that is, `namespace/name`; None: it is the Model's own."""
    request_seconds: float | None = None
    """Cap of one request's seconds at replicas; None: the gateway's own."""
    request_seconds_route: str | None = None
    """The route whose cap that is; None: it is the Model's own."""
    shares_prefixes: bool = False
    """Tenants share the prefix cache of its engines."""
    speculates: bool = False
    """Its engines guess tokens (`spec.engine.speculation`)."""
    route_namespaces: frozenset[str] = frozenset()
    """Other namespaces whose routes may have the Model as a target."""
    external: ServedExternal | None = None
    """The API outside of this cluster that answers in place of replicas; None: it is a Model."""
    adapter: ServedAdapter | None = None
    """The adapter that replicas of this Model serve; `claims` and `created` are then the adapter's. None: the Model
    itself."""
    traits: frozenset[Trait] = frozenset()
    """What else its list of models tells clients of it."""

    @property
    def keeps_prefixes(self) -> bool:
        """Whether a prompt may find the beginning of an earlier one in an engine's cache."""
        return self.shares_prefixes or "generate" in self.capabilities

    @property
    def address(self) -> str:
        """`namespace/name` of what is served: the adapter, or the Model."""
        return self.key if self.adapter is None else self.adapter.key


_WITH_ADAPTERS: Final[frozenset[Capability]] = frozenset({"generate", "embed"})
"""SGLang applies adapters to these alone. Elsewhere the weights of the base would answer under the adapter's name."""


def abilities(model: ServedModel) -> list[Capability]:
    """What a Model can do, or a Model with an adapter: what endpoints need."""
    return sorted(model.capabilities if model.adapter is None else model.capabilities & _WITH_ADAPTERS)


def can(model: ServedModel, need: Capability) -> bool:
    """Whether a Model, or a Model with an adapter, can do it: `abilities` without the list, for each request."""
    return need in model.capabilities and (model.adapter is None or need in _WITH_ADAPTERS)


def listed_capabilities(model: ServedModel) -> tuple[str, ...]:
    """`capabilities` of `GET /v1/models`, and of a Model's status."""
    return tuple(sorted({*abilities(model), *model.traits}))


def served_model(model: Model, differences: EngineDifferences = NONE) -> ServedModel:
    """What a request needs of the Model; `differences`: of the type of engine that it declares."""
    able = capabilities(
        model.status.artifact if model.status else None,
        model.spec.engine.extra_args,
        shares_prefixes=model.spec.prefix_cache.isolation == "Shared",
        differences=differences,
    )
    if differences.generating is not None and generates_only(able):
        differences = differences.generating
    media = _media(model, differences)
    traits = _traits(model, media) if "generate" in able else frozenset[Trait]()
    return ServedModel(
        key=model.key,
        uid=model.metadata.uid,
        engine_name=model.engine_model_name,
        claims=model.claimed_names,
        created=model.metadata.creation_timestamp,
        capabilities=able,
        traits=traits,
        facts=_facts(model, differences, media, tuple(sorted({*able, *traits}))),
        limits=Limits(
            max_requests=model.spec.hold.max_requests,
            max_bytes=quantity.count(model.spec.hold.max_bytes),
            max_tenant_percent=model.spec.hold.max_tenant_percent,
            timeout_seconds=float(model.spec.hold.timeout_seconds),
        ),
        max_output_tokens=model.spec.limits.max_output_tokens,
        request_seconds=None if model.spec.limits.request_seconds is None else float(model.spec.limits.request_seconds),
        shares_prefixes=model.spec.prefix_cache.isolation == "Shared",
        speculates=model.spec.engine.speculation is not None,
        route_namespaces=frozenset(model.spec.route_namespaces),
        kv_percent=model.spec.scaling.kv_utilization_percent,
        cold_start_seconds=_cold_start(model.status) if model.status else None,
        dead_end=_dead_end(model.status.conditions) if model.status else None,
    )


def _facts(model: Model, differences: EngineDifferences, media: frozenset[Medium], able: tuple[str, ...]) -> Facts:
    artifact = None if model.status is None else model.status.artifact
    return Facts(
        vocabulary=None if artifact is None else artifact.vocabulary,
        context_length=model.spec.engine.context_length or (None if artifact is None else artifact.context_length),
        max_output_tokens=model.spec.limits.max_output_tokens,
        media=media,
        piped=artifact is not None and artifact.architecture in names.PIPED,
        media_hosts=frozenset(model.spec.media.allowed_hosts),
        differences=differences,
        capabilities=able,
        parses_calls=model.spec.engine.tool_call_parser is not None,
        compiles_tools=differences.compiles_tools(
            model.spec.engine.tool_call_parser,
            [*model.spec.engine.extra_args, *(variable.name for variable in model.spec.pod.env)],
        ),
        deterministic=any(arg.startswith(differences.deterministic_args) for arg in model.spec.engine.extra_args),
    )


def _traits(model: Model, media: frozenset[Medium]) -> frozenset[Trait]:
    engine = model.spec.engine
    told: dict[Trait, bool] = {
        "vision": "image" in media,
        "audio": "audio" in media,
        "tools": engine.tool_call_parser is not None,
        "reasoning": engine.reasoning_parser is not None,
    }
    return frozenset(trait for trait, does in told.items() if does)


def _media(model: Model, differences: EngineDifferences) -> frozenset[Medium]:
    artifact = None if model.status is None else model.status.artifact
    if artifact is None or not differences.reads_media(artifact, model.spec.engine.extra_args):
        return frozenset()
    name = artifact.architecture or ""
    reads: dict[Medium, bool] = {"image": name not in names.HEARS_ONLY, "audio": name in names.HEARS}
    return frozenset(medium for medium, does in reads.items() if does)


def _cold_start(status: ModelStatus) -> float | None:
    """The longest of the classes with wanted replicas, with the wait for a node; without any, the Model's own value.
    None: unknown, since one of these classes has started no replica yet."""
    wanted = [v for v in status.variants if v.desired]
    if not wanted:
        return None if status.cold_start_seconds is None else float(status.cold_start_seconds)
    known = [v.cold_start_seconds + (v.node_wait_seconds or 0) for v in wanted if v.cold_start_seconds is not None]
    return float(max(known)) if len(known) == len(wanted) else None


def _dead_end(conditions: Iterable[Condition]) -> DeadEnd | None:
    for condition in conditions:
        state, person = (condition.type, condition.status), condition.reason in _FOR_A_PERSON
        if state == (reasons.ACCEPTED, "False"):
            return DeadEnd(condition.reason, unless_pods=False, for_a_person=True)
        if state == (reasons.STALLED, "True"):
            return DeadEnd(condition.reason, unless_pods=False, for_a_person=person)
        if state == (reasons.PLACED, "False") and condition.reason in _NO_PLACE:
            return DeadEnd(condition.reason, unless_pods=True, for_a_person=person)
        if state == (reasons.SCALING_ACTIVE, "False") and condition.reason == reasons.KEDA_NOT_INSTALLED:
            return DeadEnd(condition.reason, unless_pods=True)
    return None
