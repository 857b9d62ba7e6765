"""What the request path knows of adapters and pools, and which adapters can be served.

An adapter can be served while its status has a revision, and its pool exists, is accepted for its Model and allows the
adapter's namespace. An adapter that cannot be served keeps its names: a name that means an adapter must not fall to a
Model because the adapter is not ready.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from shoal.api import reasons
from shoal.api.loraadapter import LoRAAdapter, engine_name
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import Condition
from shoal.core.routing.resolve import ServedAdapter


@dataclass(frozen=True, slots=True)
class DeclaredPool:
    """What the request path needs of a LoRAPool."""

    namespace: str
    model_key: str
    problem: str | None
    """Reason why it is not accepted; None: it is."""
    allows: Literal["Same", "All", "Selector"]


@dataclass(frozen=True, slots=True)
class DeclaredAdapter:
    """What the request path needs of a LoRAAdapter."""

    key: str
    uid: str
    namespace: str
    created: datetime | None
    claims: tuple[str, ...]
    tenants: frozenset[str]
    pool_key: str
    current: ServedAdapter | None
    """None: no revision is served yet."""
    problem: str
    """If `current` is None: one of `reasons.py`."""
    namespace_allowed: bool
    """The operator's decision on a pool that selects namespaces by their labels, which gateways do not see."""
    route_namespaces: frozenset[str] = frozenset()
    """Other namespaces whose routes may have the adapter as a target."""


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
        tenants=frozenset(adapter.spec.tenants),
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
        route_namespaces=frozenset(adapter.spec.route_namespaces),
    )


def problem_of(adapter: DeclaredAdapter, pool: DeclaredPool) -> str | None:
    """Why an adapter of that pool cannot be served now; None: it can, if its Model exists."""
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
