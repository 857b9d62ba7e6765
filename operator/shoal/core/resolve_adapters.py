"""Which adapters a tenant may use, and which of them can answer.

An adapter answers while its status names a revision, its pool exists, is accepted for its Model and allows the
adapter's namespace. One that cannot answer keeps its names all the same: a word that means an adapter never begins to
mean a Model because the adapter is not ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Literal, NamedTuple

from shoal.api import reasons
from shoal.api.loraadapter import LoRAAdapter, engine_name
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import Condition
from shoal.core.resolve import ServedAdapter, ServedModel, names_for

EVERYONE: Final = "*"


@dataclass(frozen=True, slots=True)
class DeclaredPool:
    """What the request path needs of a LoRAPool."""

    namespace: str
    model_key: str
    problem: str | None
    """Reason for which it is not accepted; None: it is."""
    allows: Literal["Same", "All", "Selector"]


@dataclass(frozen=True, slots=True)
class DeclaredAdapter:
    """What the request path needs of a LoRAAdapter."""

    key: str
    uid: str
    namespace: str
    created: datetime | None
    claims: tuple[str, ...]
    tenants: tuple[str, ...]
    pool_key: str
    current: ServedAdapter | None
    """None: no revision answers yet."""
    problem: str
    """Why not, then: a reason of `reasons.py`."""
    namespace_allowed: bool
    """What the operator says of a pool that selects namespaces by their labels, which gateways do not see."""


class Usable(NamedTuple):
    """An adapter with the Model that it belongs to."""

    adapter: DeclaredAdapter
    model_key: str
    problem: str | None
    """Why it does not answer now; None: it does."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Those that name a pool which exists, by who may use them."""

    by_tenant: Mapping[str, tuple[Usable, ...]] = field(default_factory=dict[str, tuple[Usable, ...]])
    """By name of a Tenant that is listed."""
    for_everyone: Mapping[str, tuple[Usable, ...]] = field(default_factory=dict[str, tuple[Usable, ...]])
    """By `namespace/name` of the Model: for all who may use it."""
    uids: frozenset[str] = frozenset()
    """All of them."""


@dataclass(frozen=True, slots=True)
class Words:
    """What one tenant can put in `model`."""

    served: Mapping[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    waiting: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of adapters that it may use and that do not answer: the reason."""


def declared_pool(pool: LoRAPool) -> DeclaredPool:
    conditions = pool.status.conditions if pool.status else ()
    accepted = _condition(conditions, reasons.ACCEPTED)
    problem = reasons.PENDING if accepted is None else None if accepted.status == "True" else accepted.reason
    return DeclaredPool(
        pool.metadata.namespace or "", pool.model_key, problem, pool.spec.allowed_namespaces.from_ or "Same"
    )


def declared_adapter(adapter: LoRAAdapter) -> DeclaredAdapter:
    conditions = adapter.status.conditions if adapter.status else ()
    accepted, available = (_condition(conditions, kind) for kind in (reasons.ACCEPTED, reasons.AVAILABLE))
    problem = next((c.reason for c in (accepted, available) if c is not None and c.status != "True"), reasons.PENDING)
    current = adapter.current
    return DeclaredAdapter(
        key=adapter.key,
        uid=adapter.metadata.uid,
        namespace=adapter.metadata.namespace or "",
        created=adapter.metadata.creation_timestamp,
        claims=adapter.claimed_names,
        tenants=adapter.spec.tenants,
        pool_key=adapter.pool_key,
        current=None
        if current is None
        else ServedAdapter(
            key=adapter.key,
            uid=adapter.metadata.uid,
            revision=current.revision,
            engine_name=engine_name(adapter.key, current.revision),
            uri=current.uri,
        ),
        problem=problem,
        namespace_allowed=accepted is not None and accepted.reason != reasons.NAMESPACE_NOT_ALLOWED,
    )


def adapters_for(declared: Iterable[DeclaredAdapter], pools: Mapping[str, DeclaredPool]) -> Adapters:
    """Sorts adapters by who may use them. One whose pool does not exist belongs to no Model, and has no names."""
    by_tenant: dict[str, list[Usable]] = {}
    for_everyone: dict[str, list[Usable]] = {}
    uids: set[str] = set()
    for adapter in declared:
        pool = pools.get(adapter.pool_key)
        if pool is None:
            continue
        uids.add(adapter.uid)
        usable = Usable(adapter, pool.model_key, _problem(adapter, pool))
        for tenant in adapter.tenants:
            if tenant == EVERYONE:
                for_everyone.setdefault(pool.model_key, []).append(usable)
            else:
                by_tenant.setdefault(tenant, []).append(usable)
    return Adapters(
        {tenant: tuple(found) for tenant, found in by_tenant.items()},
        {model: tuple(found) for model, found in for_everyone.items()},
        frozenset(uids),
    )


def words_for(grants: frozenset[str], tenant: str, models: Mapping[str, ServedModel], adapters: Adapters) -> Words:
    """Every word that the tenant can put in `model`: of the Models that it was granted, of adapters that list it, and
    of those for everyone who may use their Model."""
    found = {u.adapter.uid: u for u in adapters.by_tenant.get(tenant, ())}
    for key in grants:
        if key in models:
            found.update((u.adapter.uid, u) for u in adapters.for_everyone.get(key, ()))
    if not found:
        return Words(names_for(grants, models))
    problems: dict[str, str] = {}
    served: list[ServedModel] = []
    for uid, usable in found.items():
        base = models.get(usable.model_key)
        problem = reasons.MODEL_NOT_FOUND if base is None else usable.problem
        if problem is not None:
            problems[uid] = problem
        served.append(_served(base or _no_model(usable.model_key), usable.adapter))
    names = names_for(grants, models, served)
    if not problems:
        return Words(names)
    waiting = {w: problems[m.adapter.uid] for w, m in names.items() if m.adapter and m.adapter.uid in problems}
    return Words({word: model for word, model in names.items() if word not in waiting}, waiting)


def _served(base: ServedModel, adapter: DeclaredAdapter) -> ServedModel:
    current = adapter.current or ServedAdapter(adapter.key, adapter.uid, "", "", "")
    return replace(base, claims=adapter.claims, created=adapter.created, adapter=current)


def _no_model(key: str) -> ServedModel:
    return ServedModel(key, "", "", (), None)


def _problem(adapter: DeclaredAdapter, pool: DeclaredPool) -> str | None:
    if pool.problem is not None:
        return pool.problem
    if not _allowed(adapter, pool):
        return reasons.NAMESPACE_NOT_ALLOWED
    return adapter.problem if adapter.current is None else None


def _allowed(adapter: DeclaredAdapter, pool: DeclaredPool) -> bool:
    if adapter.namespace == pool.namespace or pool.allows == "All":
        return True
    return pool.allows == "Selector" and adapter.namespace_allowed


def _condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((c for c in conditions if c.type == kind), None)
