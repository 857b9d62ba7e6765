"""What the placer keeps of one pool, and how it is put for others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.api.adapters import DesiredAdapter
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter, engine_name
from shoal.core.lora.lifecycle.held import HeldState
from shoal.core.lora.lifecycle.revisions import Revisions
from shoal.core.lora.placement import types
from shoal.core.status.observed import ModelProblem


@dataclass(slots=True)
class PoolPlan:
    """What is known of one pool."""

    key: str
    adapters: dict[str, types.Adapter] = field(default_factory=dict[str, types.Adapter])
    """By uid: as entered."""
    keys: dict[str, str] = field(default_factory=dict[str, str])
    """Uid -> `namespace/name`."""
    sources: dict[str, DesiredAdapter] = field(default_factory=dict[str, DesiredAdapter])
    """Engine name -> what an agent needs to load it."""
    planned: dict[str, types.Adapter] = field(default_factory=dict[str, types.Adapter])
    """As the last plan saw them."""
    snapshot: types.PoolSnapshot | None = None
    plan: types.Plan | None = None
    memory: types.PoolMemory | None = None
    states: Mapping[str, HeldState] = field(default_factory=dict[str, HeldState])
    """By uid: where adapters of interest are."""
    replicas: int = 0
    stale_replicas: int = 0
    changed: bool = True
    """Something was entered or left since the last plan."""
    due: float = float("inf")
    """When to look next."""
    following: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    """Uid -> engine name of the next revision, and since when it is known."""
    switches: dict[str, str] = field(default_factory=dict[str, str])
    """Uid -> engine name of the next revision to which gateways may be sent now."""


def same(last: types.PoolSnapshot | None, now: types.PoolSnapshot) -> bool:
    """Apart from the adapters, whose changes are entered."""
    return last is not None and (last.limits, last.replicas, last.sources) == (now.limits, now.replicas, now.sources)


def placed(adapter: LoRAAdapter, revisions: Revisions) -> types.Adapter:
    """An adapter as placing sees it."""

    def revision(found: AdapterRevision | None) -> types.Revision | None:
        if found is None:
            return None
        return types.Revision(engine_name(adapter.key, found.revision), found.rank, found.size_bytes)

    spec = adapter.spec
    return types.Adapter(
        uid=adapter.metadata.uid,
        key=adapter.key,
        current=revision(revisions.current),
        next=revision(revisions.next),
        residency=spec.residency,
        min_copies=spec.min_copies,
    )


def sources_of(adapter: LoRAAdapter, revisions: Revisions) -> dict[str, DesiredAdapter]:
    """Engine name -> what an agent needs to load it, of both revisions."""
    found: dict[str, DesiredAdapter] = {}
    for revision in (revisions.current, revisions.next):
        if revision is not None:
            name = engine_name(adapter.key, revision.revision)
            found[name] = DesiredAdapter(name=name, revision=revision.revision, uri=revision.uri)
    return found


def desired_adapters(
    sources: Mapping[str, DesiredAdapter], entries: Iterable[types.PlannedAdapter]
) -> Iterable[DesiredAdapter]:
    """The desired adapters in the form that an agent gets."""
    for entry in entries:
        source = sources.get(entry.name)
        if source is not None:
            yield source.model_copy(update={"pinned": True}) if entry.pinned else source


def status_changes(adapter: types.Adapter, before: HeldState | None, after: HeldState | None) -> bool:
    """Whether the adapter's status depends on what changed: that of one on demand only on what went wrong."""
    if adapter.residency != "OnDemand" or adapter.next is not None:
        return True

    def wrong(state: HeldState | None) -> tuple[ModelProblem | None, bool]:
        failure = state.failure if state is not None else None
        return failure, failure is not None and not (state and state.loaded)

    return wrong(before) != wrong(after)
