"""LoRAAdapter: observe, ask core, one status write. Its source is read by the reader, its places are the placer's."""

import itertools
from typing import Final

import structlog

from shoal.api import names, reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter, LoRAAdapterStatus, engine_name
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.api.tenant import Tenant, TenantSpec
from shoal.controllers.claims import adapters_claiming, claimants, claims_changed, granted_otherwise
from shoal.controllers.isolation import isolated, stored
from shoal.controllers.lora.choices import Choices, Chosen
from shoal.controllers.lora.namespaces import Namespaces
from shoal.controllers.lora.placer import Placer
from shoal.controllers.lora.reader import AdapterReader
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core.lora.format.basename import other_base
from shoal.core.lora.format.check import check_adapter
from shoal.core.lora.format.sources import pinned_uri
from shoal.core.lora.joining import may_join
from shoal.core.lora.lifecycle import revisions
from shoal.core.lora.lifecycle.revisions import Revisions
from shoal.core.routing.consent import EVERYONE, not_granted
from shoal.core.routing.servednames import served_names
from shoal.core.status import adapterstatus
from shoal.core.status.adapterstatus import Held, Seen
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.core.status.observed import ModelProblem
from shoal.kube.events import Event
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import LORA_ADAPTERS

log = structlog.get_logger()

UNREAD_BASE: Final = "waits until the source of Model {} is read: adapters are checked against it"


class AdapterController:
    """Woken by its own objects, their pools, those that claim the same names, what is read and what is placed."""

    def __init__(self, world: World, choices: Choices, placer: Placer, queue: WorkQueue) -> None:
        self._world, self._choices, self._placer, self.queue = world, choices, placer, queue
        self.reader = AdapterReader(world, queue.add)
        self.namespaces = Namespaces(world, self._namespace)
        self._pools: dict[str, Chosen | None] = {}
        """Pool -> its state as its adapters last got it."""

    # --- what wakes an adapter --------------------------------------------------------------------------------------

    def on_adapter(self, key: str, before: Custom[LoRAAdapter] | None, after: Custom[LoRAAdapter] | None) -> None:
        self.queue.add(key)
        if before is not None and (after is None or _going(after) or after.metadata.uid != before.metadata.uid):
            # At once: its replicas need not hold it any more.
            self._placer.leave(before.metadata.uid)
            self.reader.forget(key)
        for contender in adapters_claiming(self._world, claims_changed(before, after)):
            self.queue.add(contender)

    def on_pool(self, key: str, before: Custom[LoRAPool] | None, after: Custom[LoRAPool] | None) -> None:
        self._check_pool(key)
        for custom in (before, after):  # another pool of the same Model may have it now
            for contender in self._world.pools.by("model", custom.object.model_key) if custom and custom.object else ():
                self._check_pool(f"{contender.metadata.namespace}/{contender.metadata.name}")

    def on_model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        for pool in self._world.pools.by("model", key):
            self._check_pool(f"{pool.metadata.namespace}/{pool.metadata.name}")
        for contender in adapters_claiming(self._world, claims_changed(before, after)):
            self.queue.add(contender)

    def on_tenant(self, key: str, before: Custom[Tenant] | None, after: Custom[Tenant] | None) -> None:
        """A Tenant whose grants are others has agreed to others of the adapters that list it."""
        changed = granted_otherwise(before, after)
        if changed is None:
            return
        everyone = (self._world.adapters.by("tenant", f"{where}/{EVERYONE}") for where in changed[1].touches())
        for custom in itertools.chain(self._world.adapters.by("tenant", key), *everyone):
            self.queue.add(f"{custom.metadata.namespace}/{custom.metadata.name}")

    def _spec(self, tenant: str) -> TenantSpec | None:
        custom = self._world.tenants.get(tenant)
        return custom.object.spec if custom is not None and custom.object is not None else None

    def _check_pool(self, key: str) -> None:
        """Wakes the pool's adapters if it is another one to them."""
        chosen, last = self._choices.of(key), self._pools.get(key)
        self._placer.pool_changed(key)
        same = chosen.same_for_adapters(last) if chosen is not None else key in self._pools and last is None
        self._pools[key] = chosen
        if not same:
            self._wake_pool(key)

    def _wake_pool(self, key: str, namespace: str | None = None) -> None:
        for custom in self._world.adapters.by("pool", key):
            if namespace in (None, custom.metadata.namespace):
                self.queue.add(f"{custom.metadata.namespace}/{custom.metadata.name}")

    def _namespace(self, namespace: str) -> None:
        for custom in self._world.pools.values():
            if custom.object is not None and custom.object.spec.allowed_namespaces.from_ == "Selector":
                self._wake_pool(custom.object.key, namespace or None)

    def enqueue_all(self) -> None:
        """At the beginning of a term."""
        for key in self._world.adapters.known_keys():
            self.queue.add(key)

    # --- one adapter ------------------------------------------------------------------------------------------------

    async def reconcile(self, key: str) -> float | None:
        """Returns None: nothing is looked at again without a reason."""
        world, manager = self._world, names.MANAGER_LORAADAPTER
        return await isolated(world, LORA_ADAPTERS, world.adapters, key, self._reconcile, manager=manager)

    async def _reconcile(self, key: str) -> float | None:
        custom = self._world.adapters.get(key)
        if custom is None or _going(custom):
            return None
        if custom.object is None:
            self._placer.leave(custom.metadata.uid)
            await self._write(custom, _invalid(custom, self._world))
            return None
        adapter = custom.object
        chosen = self._choices.of(adapter.pool_key)
        problem = may_join(
            adapter,
            chosen.pool if chosen else None,
            pool_problem=chosen.problem if chosen else None,
            labels=self.namespaces.labels(adapter.metadata.namespace or ""),
        )
        known, failure, waiting = revisions.stored(adapter), None, ""
        held: Held | None = Held(stale=1)
        if problem is not None or chosen is None:
            self._placer.leave(adapter.metadata.uid)
            self.reader.forget(key)
        else:
            known, failure, waiting = self._read(adapter, chosen, known)
            if known.current is None:
                self._placer.leave(adapter.metadata.uid)
            elif chosen.settings is not None:
                self._placer.enter(adapter.pool_key, adapter, known)
                held = self._placer.held(adapter)
        if held is None:
            return None  # the placer wakes it
        switched = self._switch(adapter, known)
        seen = Seen(
            adapter=adapter,
            served=served_names(adapter, claimants(self._world, adapter)),
            revisions=switched,
            problem=problem,
            failure=failure,
            waiting=waiting,
            not_granted=self._not_granted(adapter, chosen),
            other_base=_other_base(chosen, switched),
            held=held,
        )
        status = adapterstatus.status(seen, self._world.now())
        if await self._write(custom, status) and switched is not known and switched.current and known.current:
            old, new = adapterstatus.short(known.current), adapterstatus.short(switched.current)
            log.info("adapter switched", adapter=key, before=old, now=new)
            note = f"revision {new} answers from now on, in place of {old}"
            event = Event(LORA_ADAPTERS, custom.metadata, "Normal", reasons.SWITCHED, note, "Switch")
            self._world.recorder.emit(event)
        return None

    def _not_granted(self, adapter: LoRAAdapter, chosen: Chosen | None) -> tuple[str, ...]:
        if chosen is None:
            return ()
        return not_granted(adapter.spec.tenants, self._spec, adapter=adapter.key, model=chosen.pool.model_key)

    def _read(
        self, adapter: LoRAAdapter, chosen: Chosen, known: Revisions
    ) -> tuple[Revisions, ModelProblem | None, str]:
        """(revisions, why reading fails for now, what it waits for)."""
        if chosen.settings is None:
            # What was read before is believed until it can be compared: nobody is to write thousands of statuses twice.
            return known, None, "" if known.current else UNREAD_BASE.format(chosen.pool.model_key)
        key = revisions.read_key(adapter, chosen.demands)
        if known.read_by == key:
            self.reader.forget(adapter.key)
            return known, None, ""
        answer = self.reader.read(adapter, key, chosen.pool, chosen.settings)
        if answer.found is not None:
            return _checked(adapter, chosen, known, answer.found, key), None, ""
        if answer.problem is not None:
            if answer.final:
                return revisions.refused(known, answer.problem, key), None, ""
            return known, answer.problem, ""
        if (told := _last_failure(adapter)) is not None:
            return known, told, ""  # it is tried again from time to time: until that ends, why it failed is known
        return known, None, answer.waiting

    def _switch(self, adapter: LoRAAdapter, known: Revisions) -> Revisions:
        following = known.next
        if following is None or self._placer.switches_to(adapter) != engine_name(adapter.key, following.revision):
            return known
        return revisions.switched(known)

    async def _write(self, custom: Custom[LoRAAdapter], status: LoRAAdapterStatus) -> bool:
        table = self._world.adapters
        return await write_status(self._world, LORA_ADAPTERS, table, custom, status, manager=names.MANAGER_LORAADAPTER)


def _checked(adapter: LoRAAdapter, chosen: Chosen, known: Revisions, found: AdapterFacts, key: str) -> Revisions:
    limits = chosen.limits
    problem = check_adapter(found, *limits) if limits is not None else None
    if problem is not None:
        return revisions.refused(known, ModelProblem(problem.reason, problem.message), key, revision=found.revision)
    revision = AdapterRevision(
        revision=found.revision,
        uri=pinned_uri(adapter.spec.source.uri, found.commit),
        rank=found.rank,
        size_bytes=found.size_bytes,
        base=found.base,
    )
    return revisions.found(known, revision, key)


def _other_base(chosen: Chosen | None, revisions: Revisions) -> str:
    """The warning about the declared revision's base; "": none."""
    declared = revisions.next or revisions.current
    if chosen is None or chosen.model is None or declared is None:
        return ""
    return other_base(declared.base, chosen.pool, chosen.model)


def _last_failure(adapter: LoRAAdapter) -> ModelProblem | None:
    """What the status says of a source that could not be read, of this very specification."""
    for condition in adapter.status.conditions if adapter.status else ():
        if condition.type == reasons.ACCEPTED and condition.observed_generation == adapter.metadata.generation:
            passing = reasons.STAGE_REASONS | {reasons.STAGE_FAILED, reasons.REFUSED}
            if condition.status == "False" and condition.reason in passing:
                return ModelProblem(condition.reason, condition.message)
    return None


def _going(custom: Custom[LoRAAdapter]) -> bool:
    return custom.metadata.deletion_timestamp is not None


def _invalid(custom: Custom[LoRAAdapter], world: World) -> LoRAAdapterStatus:
    """The status of an object that this version does not understand. What it had is kept."""
    message = f"what is stored does not pass this version's validation: {custom.error}"
    findings = [
        ConditionUpdate(kind, "False", reasons.INVALID, message)
        for kind in (reasons.ACCEPTED, reasons.AVAILABLE, reasons.READY)
    ] + [ConditionUpdate(reasons.STALLED, "True", reasons.INVALID, message)]
    old = stored(LoRAAdapterStatus, custom)
    generation = custom.metadata.generation
    conditions = merge(old.conditions, findings, generation=generation, now=world.now())
    return old.model_copy(update={"conditions": conditions, "observed_generation": generation})
