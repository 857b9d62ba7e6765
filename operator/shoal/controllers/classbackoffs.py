"""Classes on which a Model's replicas fail to start, and those of which no further node comes for any Model: looked at
while pods have been starting for long."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Final

import structlog

from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.placement.backoff import ClassBackoff, observe
from shoal.core.placement.outages import decide, own, stored

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0


class ClassBackoffs:
    """Backoffs are kept in the Models' records: an operator that starts anew gives each class another chance. Outages
    are in the fleet's state, and the status of their classes has them, so that the next leader goes on with them."""

    def __init__(self, world: World, state: FleetState, cold: ColdStarts) -> None:
        self._world, self._state, self._cold = world, state, cold
        self._admitted: dict[str, datetime] = {}
        """Uid of a pod of a queue, or whose claim was refused -> when it last waited for quota, or was first seen."""
        self._without_node: dict[str, datetime] = {}
        """Uid of a pod that waits for a node -> when it was last seen to wait without one being expected."""
        self.changed: list[Callable[[], None]] = []
        """Called when a class has an outage, or no more."""

    def begin_term(self) -> None:
        """What the classes say of outages counts: another operator may have led since."""
        known = {name: stored(each) for name, each in self._world.accepted_classes().items()}
        self._state.outages = {name: each for name, each in known.items() if each is not None}

    async def run(self) -> None:
        """Looks every few seconds, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_SECONDS)

    def check(self) -> None:
        """Looks once at the Models with a replica that starts, and at those that have a backoff."""
        self._note_admissions()
        self._note_outages()
        found: list[Mapping[str, ClassBackoff]] = []
        for uid in self._state.starting | {uid for uid, record in self._state.records() if record.all_backoffs}:
            record = self._state.record(uid)
            before = record.all_backoffs
            try:
                seen = self._check(uid, before)
            except Exception:
                # One Model that cannot be looked at must not end the operator.
                log.exception("it is not known whether a class is in backoff for a Model", model_uid=uid)
                continue
            found.append(seen)
            record.all_backoffs = after = own(seen)
            if after != before:
                for name, each in after.items():
                    if each != before.get(name):
                        log.warning("a class is in backoff for a Model", model_uid=uid, gpu_class=name, why=each.why)
                self._state.replan()
        self._decide_outages(found)

    def _decide_outages(self, found: Iterable[Mapping[str, ClassBackoff]]) -> None:
        before, now = self._state.outages, self._world.now()
        classes = self._world.accepted_classes()
        after = decide(before, found, classes, now=now, newest_node=self._newest_node)
        if after == before:
            return
        self._state.outages = after
        for name, each in after.items():
            if name not in before or before[name].since != each.since:
                log.warning("no node of a class is expected", gpu_class=name, reason=each.reason, why=each.why)
        for name in before.keys() - after.keys():
            log.info("nodes of a class may come again", gpu_class=name)
        self._state.replan()
        for changed in self.changed:
            changed()

    def _newest_node(self, gpu_class: str) -> datetime | None:
        nodes = self._state.gpus.members().get(gpu_class, ())
        return max((node.created for node in nodes if node.created is not None), default=None)

    def _note_admissions(self) -> None:
        """The API does not say when a gate was taken off, so it is noted while it is on."""
        now = self._world.now()
        starting = [pod for uid in self._state.starting for pod in self._world.pods.by("model", uid) if _starts(pod)]
        queued = [pod for pod in starting if pod.waited_for_quota or pod.gates]
        self._admitted = {p.uid: now if p.gated else self._admitted.get(p.uid, now) for p in queued}

    def _note_outages(self) -> None:
        """Events do not say when the node of a waiting replica was expected anew, so it is noted until then."""
        known, now = self._without_node, self._world.now()
        starting = (pod for uid in self._state.starting for pod in self._world.pods.by("model", uid))
        waiting = [pod for pod in starting if pod.node is None and not pod.deleting]
        hopeless = {p.uid for p in waiting if p.gpu_class in self._state.outages and not p.node_announced}
        self._without_node = {
            pod.uid: now if pod.uid in hopeless else known[pod.uid]
            for pod in waiting
            if pod.uid in hopeless or pod.uid in known
        }

    def _check(self, uid: str, before: Mapping[str, ClassBackoff]) -> dict[str, ClassBackoff]:
        custom = self._world.model_by_uid(uid)
        model = custom.object if custom is not None else None
        pods = [pod for pod in self._world.pods.by("model", uid) if not pod.finished]
        if not any(_starts(pod) for pod in pods):
            self._state.starting.discard(uid)
        if model is None:
            return {}
        # One that is overdue without a pod of the former revision does not end by itself.
        rolling = {
            d.gpu_class
            for child in self._world.deployments_of(uid)
            if (d := child.deployment) is not None and (not d.rolled_out or (d.replacing and not d.overdue))
        }
        return observe(
            before,
            pods,
            now=self._world.now(),
            timeout=lambda name: self._cold.start_timeout(model, name),
            rolling=rolling,
            provision=self._cold.provision_seconds,
            admitted=self._admitted,
            newest_node=self._newest_node,
            without_node=self._without_node,
            applied=self._state.record(uid).applied,
        )

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if after is None or not after.model_uid or not _starts(after):
            return
        self._state.starting.add(after.model_uid)
        if _given_up(after) and not (before is not None and _given_up(before)):
            self.check()  # the plan that is due moves the replica, and its pod would tell nothing any more


def _starts(pod: facts.Pod) -> bool:
    return not (pod.ready or pod.was_ready or pod.deleting or pod.finished)


def _given_up(pod: facts.Pod) -> bool:
    return pod.queue_wait is not None and pod.queue_wait.refusal is not None
