"""LoRAPool: whether it and its Model go together, and how its adapters are."""

from collections.abc import Awaitable, Callable
from typing import Final

import orjson

from shoal.api import names, reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import AdapterCounts, LoRAPool, LoRAPoolStatus
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.artifacts import secret_advice
from shoal.controllers.isolation import isolated, stored
from shoal.controllers.lora.choices import Choices, Chosen
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core.status import poolstatus
from shoal.core.status.conditions import ConditionUpdate, find, merge, shorten
from shoal.kube.errors import NotFound
from shoal.kube.projections import Child, Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import LORA_POOLS, SECRETS

COUNT_SECONDS: Final = 2.0
"""Adapters change in bunches; they are counted once per bunch."""
RECHECK_SECONDS: Final = 30.0
"""Secrets are not watched: one that is missing is asked for again."""
_NOT_JOINED: Final = (reasons.POOL_NOT_FOUND, reasons.NAMESPACE_NOT_ALLOWED)


class PoolController:
    """Woken by its own objects, their Models and the Models' Deployments, and by adapters."""

    def __init__(
        self, world: World, choices: Choices, secrets_found: Callable[[str], Awaitable[None]], queue: WorkQueue
    ) -> None:
        """`secrets_found` is called with a pool whose Secrets all exist, after one was missing."""
        self._world, self._choices, self._secrets_found, self.queue = world, choices, secrets_found, queue

    def on_pool(self, key: str, before: Custom[LoRAPool] | None, after: Custom[LoRAPool] | None) -> None:
        for custom in (before, after):
            if custom is not None and custom.object is not None:
                self._of_model(custom.object.model_key)
        self.queue.add(key)

    def on_model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        self._of_model(key)

    def on_deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        child = after or before
        custom = self._world.model_by_uid(child.model_uid) if child is not None else None
        if custom is not None:
            self._of_model(f"{custom.metadata.namespace}/{custom.metadata.name}")

    def _of_model(self, model_key: str) -> None:
        for pool in self._world.pools.by("model", model_key):
            self.queue.add(f"{pool.metadata.namespace}/{pool.metadata.name}")

    def on_adapter(self, _key: str, before: Custom[LoRAAdapter] | None, after: Custom[LoRAAdapter] | None) -> None:
        for custom in (before, after):
            pool = custom.object.pool_key if custom is not None and custom.object is not None else ""
            if self._world.pools.get(pool) is not None:
                self.queue.add_after(pool, COUNT_SECONDS)

    def enqueue_all(self) -> None:
        for key in self._world.pools.known_keys():
            self.queue.add(key)

    async def reconcile(self, key: str) -> float | None:
        """Returns seconds after which to look again, or None."""
        world = self._world
        return await isolated(world, LORA_POOLS, world.pools, key, self._reconcile, manager=names.MANAGER_LORAPOOL)

    async def _reconcile(self, key: str) -> float | None:
        world = self._world
        custom = world.pools.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            return None
        if custom.object is None:
            await self._write(custom, _invalid(custom, world))
            return None
        chosen = self._choices.of(key)
        if chosen is None:
            return None
        missing = await self._missing_secrets(chosen.pool)
        if _stored_missing(chosen.pool) not in ("", shorten(missing)):
            await self._secrets_found(key)
        await self._write(custom, poolstatus.status(self._observed(chosen, missing), world.now()))
        return RECHECK_SECONDS if missing else None

    async def _missing_secrets(self, pool: LoRAPool) -> str:
        """The sentence about Secrets that do not exist. Their content is never read here."""
        namespace = pool.metadata.namespace
        missing: dict[str, list[str]] = {}
        for credentials in pool.spec.credentials:
            name = credentials.secret_ref.name
            try:
                await self._world.client.get_metadata(SECRETS, name, namespace)
            except NotFound:
                missing.setdefault(name, []).append(credentials.uri_prefix)
        return "; ".join(
            f"spec.credentials: there is no Secret {namespace}/{name}, so nothing is read from {', '.join(prefixes)}; "
            f"{_advice(prefixes[0])}"
            for name, prefixes in missing.items()
        )

    def _observed(self, chosen: Chosen, secrets_missing: str) -> poolstatus.Seen:
        model = chosen.model
        ready = find(model.status.conditions, reasons.READY) if model is not None and model.status else None
        return poolstatus.Seen(
            pool=chosen.pool,
            problem=chosen.problem,
            counts=self._counts(chosen.pool.key),
            model_ready=ready is not None and ready.status == "True",
            model_message=ready.message if ready is not None else "it was not worked on yet",
            rolling=self._rolling(chosen),
            secrets_missing=secrets_missing,
        )

    def _counts(self, pool_key: str) -> AdapterCounts:
        total = available = failed = 0
        for custom in self._world.adapters.by("pool", pool_key):
            conditions: list[JsonObject] = custom.status.get("conditions") or []
            said = {c["type"]: (c["status"], c["reason"]) for c in conditions}
            if custom.metadata.deletion_timestamp is not None or said.get(reasons.ACCEPTED, ("", ""))[1] in _NOT_JOINED:
                continue
            total += 1
            available += said.get(reasons.AVAILABLE, ("", ""))[0] == "True"
            failed += said.get(reasons.STALLED, ("", ""))[0] == "True"
        return AdapterCounts(total=total, available=available, failed=failed)

    def _rolling(self, chosen: Chosen) -> str:
        """Deployments whose pods are not all of this pool as it is now."""
        if chosen.model is None or chosen.settings is None:
            return "" if chosen.problem else f"waits until the source of Model {chosen.pool.model_key} is read"
        told = orjson.dumps(chosen.settings.model_dump_json(exclude_none=True))
        behind: list[str] = []
        for child in self._world.deployments_of(chosen.model.metadata.uid):
            found = child.deployment
            if found is None or found.deleting or not found.replicas:
                continue
            if told not in child.raw or not found.rolled_out:
                behind.append(found.name)
        return f"replicas start with the pool's arguments: {', '.join(sorted(behind))}" if behind else ""

    async def _write(self, custom: Custom[LoRAPool], status: LoRAPoolStatus) -> None:
        table = self._world.pools
        await write_status(self._world, LORA_POOLS, table, custom, status, manager=names.MANAGER_LORAPOOL)


def _stored_missing(pool: LoRAPool) -> str:
    """The last message about Secrets that do not exist; "" when all existed."""
    ready = find(pool.status.conditions, reasons.READY) if pool.status else None
    return ready.message if ready is not None and ready.reason == reasons.SECRET_NOT_FOUND else ""


def _advice(prefix: str) -> str:
    """Which keys the Secret must have."""
    try:
        return secret_advice(prefix)
    except ValueError:
        return "create it"


def _invalid(custom: Custom[LoRAPool], world: World) -> LoRAPoolStatus:
    """The status of an object that this version does not understand."""
    message = f"what is stored does not pass this version's validation: {custom.error}"
    findings = [
        ConditionUpdate(kind, "False", reasons.INVALID, message) for kind in (reasons.ACCEPTED, reasons.READY)
    ] + [ConditionUpdate(reasons.STALLED, "True", reasons.INVALID, message)]
    old = stored(LoRAPoolStatus, custom).conditions
    generation = custom.metadata.generation
    conditions = merge(old, findings, generation=generation, now=world.now())
    return LoRAPoolStatus(conditions=conditions, observed_generation=generation)
