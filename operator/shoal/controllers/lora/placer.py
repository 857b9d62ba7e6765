"""Keeps a plan per pool: which replica should hold which adapters. Made again when something changed, never by a timer
per adapter.

The controller of adapters enters what is to be placed and reads where it is; what a replica should hold goes to its
agent. Signals of replicas and gateways are read once per `PACE_SECONDS`, and a plan is made only if they have changed.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final

import prometheus_client
import structlog

from shoal.api.loraadapter import LoRAAdapter
from shoal.controllers.lora.choices import Choices, Chosen
from shoal.controllers.lora.desired import DesiredAdapterWriter
from shoal.controllers.lora.observe import PoolObserver
from shoal.controllers.lora.poolplan import PoolPlan, desired_adapters, placed, same, sources_of, status_changes
from shoal.controllers.lora.signals import AdapterSignals
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.lora.lifecycle.held import held
from shoal.core.lora.lifecycle.revisions import Revisions
from shoal.core.lora.placement import may_switch, types
from shoal.core.lora.placement.place import place
from shoal.core.status.adapterstatus import Held

log = structlog.get_logger()

SETTLE_SECONDS: Final = 0.1
"""Changes come in bunches."""
PACE_SECONDS: Final = 1.0
"""Seconds between two readings of the signals, where nothing else changed."""
SWITCH_TIMEOUT_SECONDS: Final = 30.0
"""A newer revision that some replica has loaded takes over after so long, though others have not: one that hangs must
not keep it from all. Where it is missing its first request loads it."""
SHARE: Final = 5
"""A plan that takes long makes the next one wait, so that planning takes at most this fraction of the time."""
SECONDS = prometheus_client.Histogram(
    "shoal_adapter_plan_seconds", "Duration of one plan of a pool's adapters.", buckets=(0.001, 0.01, 0.05, 0.2, 1, 5)
)


class Placer:
    """`enter` and `leave` adapters, `run` while this operator leads."""

    def __init__(
        self,
        world: World,
        choices: Choices,
        desired: DesiredAdapterWriter,
        signals: AdapterSignals,
        wake: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called with the keys of adapters whose part of the plan changed."""
        self._world, self._choices, self._desired, self._clock = world, choices, desired, clock
        self._wake_adapter = wake
        self.observer = PoolObserver(world, signals)
        self.pools: dict[str, PoolPlan] = {}
        self._of: dict[str, str] = {}
        """Uid of an adapter -> its pool."""
        self._some = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._leads = False

    # --- what is placed ---------------------------------------------------------------------------------------------

    def enter(self, pool_key: str, adapter: LoRAAdapter, revisions: Revisions) -> None:
        """An adapter that was read and fits, as of now."""
        uid = adapter.metadata.uid
        if self._of.get(uid) not in (None, pool_key):
            self.leave(uid)
        pool = self.pools.setdefault(pool_key, PoolPlan(pool_key))
        known = pool.adapters.get(uid)
        entered, sources = placed(adapter, revisions), sources_of(adapter, revisions)
        if entered == known and all(pool.sources.get(name) == source for name, source in sources.items()):
            return
        if known is not None:
            self._drop_sources(pool, known)
        pool.adapters[uid], pool.keys[uid], self._of[uid] = entered, adapter.key, pool_key
        pool.sources.update(sources)
        self._schedule(pool, changed=True)

    def leave(self, uid: str) -> None:
        """The adapter is gone, or is no more one of its pool's."""
        pool = self.pools.get(self._of.pop(uid, ""))
        if pool is None:
            return
        known = pool.adapters.pop(uid, None)
        pool.keys.pop(uid, None)
        pool.planned.pop(uid, None)
        if known is not None:
            self._drop_sources(pool, known)
        self._schedule(pool, changed=True)

    @staticmethod
    def _drop_sources(pool: PoolPlan, adapter: types.Adapter) -> None:
        for revision in adapter.revisions:
            pool.sources.pop(revision.name, None)

    # --- what was decided -------------------------------------------------------------------------------------------

    def held(self, adapter: LoRAAdapter) -> Held | None:
        """Where it is, as of the last plan; None: it was entered since, `wake` will tell."""
        uid = adapter.metadata.uid
        pool = self.pools.get(self._of.get(uid, ""))
        if pool is None or pool.plan is None or pool.planned.get(uid) is not pool.adapters.get(uid):
            return None
        return held(
            pool.states.get(uid), pool.plan.adapters.get(uid), replicas=pool.replicas, stale=pool.stale_replicas
        )

    def switches_to(self, adapter: LoRAAdapter) -> str | None:
        """Engine name of the next revision, once gateways may be sent to it."""
        pool = self.pools.get(self._of.get(adapter.metadata.uid, ""))
        return pool.switches.get(adapter.metadata.uid) if pool is not None else None

    def verdict(self, uid: str) -> types.AdapterPlacement | None:
        """What the last plan says of an adapter; None: it is on no floor and needs none."""
        pool = self.pools.get(self._of.get(uid, ""))
        return pool.plan.adapters.get(uid) if pool is not None and pool.plan is not None else None

    def last_used(self, uid: str) -> datetime | None:
        """When it was last seen to be asked for, in this term and not too long ago."""
        pool = self.pools.get(self._of.get(uid, ""))
        traffic = pool.memory.traffic.get(uid) if pool is not None and pool.memory is not None else None
        return None if traffic is None else self._world.now() - timedelta(seconds=self._clock() - traffic.used)

    # --- what wakes it ----------------------------------------------------------------------------------------------

    def reported(self, model_uid: str | None, urgent: bool) -> None:
        """The signals of a Model's replicas changed (None: of any Model), or those of gateways. `urgent`: a replica was
        added or removed, or an engine restarted."""
        if not self._leads or not self.pools:
            return
        seconds = SETTLE_SECONDS if urgent else PACE_SECONDS
        if model_uid is None:
            for pool in self.pools.values():
                self._schedule(pool, seconds=seconds)
        else:
            for pool in self._pools_of(model_uid):
                self._schedule(pool, seconds=seconds)

    def _pools_of(self, model_uid: str) -> Iterable[PoolPlan]:
        custom = self._world.model_by_uid(model_uid)
        if custom is None:
            return
        for found in self._world.pools.by("model", f"{custom.metadata.namespace}/{custom.metadata.name}"):
            pool = self.pools.get(f"{found.metadata.namespace}/{found.metadata.name}")
            if pool is not None:
                yield pool

    def pool_changed(self, pool_key: str) -> None:
        """Its specification, or that of its Model."""
        if (pool := self.pools.get(pool_key)) is not None:
            self._schedule(pool, changed=True)

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        pod = after or before
        if pod is None or pod.model_uid is None or not self._leads:
            return
        for pool in self._pools_of(pod.model_uid):
            self._schedule(pool)

    def _schedule(self, pool: PoolPlan, *, changed: bool = False, seconds: float = SETTLE_SECONDS) -> None:
        pool.changed = pool.changed or changed
        due = self._clock() + seconds
        if due < pool.due:
            pool.due = due
            self._some.set()

    # --- planning ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Plans until cancelled. What an earlier term remembered is not trusted."""
        self._desired.begin()
        for pool in self.pools.values():
            pool.memory, pool.snapshot, pool.changed, pool.due = None, None, True, float("-inf")
        self._leads = True
        self._some.set()
        try:
            while True:
                now = self._clock()
                waits = [pool.due - now for pool in self.pools.values() if pool.due < float("inf")]
                await self._sleep(min(waits, default=None))
                self._some.clear()
                for pool in [p for p in self.pools.values() if p.due <= self._clock()]:
                    begin = time.monotonic()
                    self._once(pool)
                    await asyncio.sleep((time.monotonic() - begin) * (SHARE - 1))
        finally:
            self._leads = False

    async def _sleep(self, seconds: float | None) -> None:
        if seconds is not None and seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._some.wait()
        except TimeoutError:
            return

    def _once(self, pool: PoolPlan) -> None:
        pool.due = float("inf")
        chosen = self._choices.of(pool.key)
        try:
            self._plan(pool, chosen)
        except Exception:
            # What replicas hold goes on; one pool that cannot be planned must not end the operator.
            log.exception("the adapters of a pool could not be placed; the last plan stays", pool=pool.key)
        if not pool.adapters and (chosen is None or chosen.settings is None):
            self.pools.pop(pool.key, None)

    def _plan(self, pool: PoolPlan, chosen: Chosen | None) -> None:
        if chosen is None or chosen.settings is None or chosen.model is None:
            return
        now = self._clock()
        for pod in self.observer.homes(chosen.model.metadata.uid):
            self._desired.reported(pod.uid)
        snapshot = self.observer.snapshot(chosen.model, chosen.settings, pool.adapters)
        if not pool.changed and not self._late(pool, now) and same(pool.snapshot, snapshot):
            self._again(pool, now)
            self._states(pool, snapshot, chosen.model.metadata.uid)
            return
        begin = time.perf_counter()
        pool.plan, pool.memory = place(snapshot, pool.memory, now)
        SECONDS.observe(time.perf_counter() - begin)
        pool.snapshot, pool.changed = snapshot, False
        self._set_desired(pool, pool.plan, chosen.model.metadata.uid)
        self._again(pool, now)
        self._states(pool, snapshot, chosen.model.metadata.uid)

    @staticmethod
    def _late(pool: PoolPlan, now: float) -> bool:
        """Time alone may have changed the plan."""
        if pool.plan is None or pool.memory is None:
            return True
        return pool.plan.replan_after is not None and now >= pool.memory.now + pool.plan.replan_after

    def _again(self, pool: PoolPlan, now: float) -> None:
        if pool.plan is not None and pool.plan.replan_after is not None and pool.memory is not None:
            pool.due = min(pool.due, max(now + SETTLE_SECONDS, pool.memory.now + pool.plan.replan_after))

    def _set_desired(self, pool: PoolPlan, plan: types.Plan, model_uid: str) -> None:
        for pod in self.observer.homes(model_uid):
            entries = plan.desired.get(pod.uid, ())
            self._desired.set(pod, tuple(desired_adapters(pool.sources, entries)))

    def _states(self, pool: PoolPlan, snapshot: types.PoolSnapshot, model_uid: str) -> None:
        """Where adapters are now; wakes those of which something else has to be said."""
        before, planned_before = pool.states, pool.planned
        counts = (pool.replicas, pool.stale_replicas)
        pool.states = self.observer.states(model_uid, pool.adapters)
        pool.replicas, pool.stale_replicas = self.observer.counts(model_uid)
        pool.planned = dict(pool.adapters)
        switches = self._switches(pool, snapshot)
        counted = counts != (pool.replicas, pool.stale_replicas)
        for uid, adapter in pool.adapters.items():
            entered = planned_before.get(uid) is not adapter
            moved = before.get(uid) != pool.states.get(uid)
            if (
                entered
                or (moved and status_changes(adapter, before.get(uid), pool.states.get(uid)))
                or (counted and adapter.residency != "OnDemand")
                or switches.get(uid) != pool.switches.get(uid)
            ):
                self._wake_adapter(pool.keys[uid])
        pool.switches = switches

    def _switches(self, pool: PoolPlan, snapshot: types.PoolSnapshot) -> dict[str, str]:
        now, found = self._clock(), dict[str, str]()
        following = {uid: a.next.name for uid, a in pool.adapters.items() if a.next is not None}
        pool.following = {
            uid: known if (known := pool.following.get(uid, ("", now)))[0] == name else (name, now)
            for uid, name in following.items()
        }
        for uid, (name, since) in pool.following.items():
            state = pool.states.get(uid)
            loaded = state is not None and state.next_loaded > 0
            if pool.plan is not None and may_switch(pool.adapters[uid], pool.plan, snapshot).now:
                found[uid] = name
            elif loaded and now - since >= SWITCH_TIMEOUT_SECONDS:
                log.warning("a replica does not load a newer revision; the others go on with it", adapter=name)
                found[uid] = name
            elif loaded:
                pool.due = min(pool.due, since + SWITCH_TIMEOUT_SECONDS)
        return found
