"""Reads the events of replicas that no scheduler has bound, for the status of their Models: what an autoscaler says of
those that wait for its nodes, at the pod and at Karpenter's NodeClaims, and why the ResourceClaim of others is not
made."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from typing import Final

import structlog

from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.facts import AutoscalerNews
from shoal.core.placement.autoscalerevents import PodEvent, news, node_claims, of_node_claims
from shoal.core.podquota import CLAIM_SECONDS, claim_refusal
from shoal.kube import projections
from shoal.kube.errors import KubeError
from shoal.kube.resources import EVENTS

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0
WAITS_SECONDS: Final = 10.0
"""Age of a pod from which on its events are read: an autoscaler needs a moment to say something."""
AGAIN_SECONDS: Final = 30.0
STALE_SECONDS: Final = 120.0
"""Seconds without its events after which a refusal counts no more: each look renews an outage by it."""
MOST_AT_ONCE: Final = 20
"""Pods whose events are read in one check. Those of the others are read in the next ones."""
_TIMEOUT_SECONDS: Final = 10.0
_MOST_EVENTS: Final = 500


class PendingPodEvents:
    """One request to the API server for each pod that waits for a node of an autoscaler, or for its ResourceClaim,
    every half minute, and one for all NodeClaims that were announced to such pods."""

    def __init__(self, world: World, state: FleetState, cold: ColdStarts) -> None:
        self._world, self._state, self._cold = world, state, cold
        self._read_at: dict[str, float] = {}
        """Uid of a pod -> time of the event loop."""
        self._answered: dict[str, datetime] = {}
        """Uid of a pod -> when its events were last read without an error."""
        self._claim_events: list[PodEvent] | None = None
        """Of all NodeClaims, read once in a check; None: not read in this one."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Reads the events of the pods whose events were not read for the longest time."""
        now, self._claim_events = asyncio.get_running_loop().time(), None
        waiting = self._waiting()
        self._read_at = {pod.uid: self._read_at[pod.uid] for pod in waiting if pod.uid in self._read_at}
        self._answered = {pod.uid: self._answered[pod.uid] for pod in waiting if pod.uid in self._answered}
        due = [pod for pod in waiting if now - self._read_at.get(pod.uid, now - AGAIN_SECONDS) >= AGAIN_SECONDS]
        for pod in sorted(due, key=lambda pod: self._read_at.get(pod.uid, 0.0))[:MOST_AT_ONCE]:
            self._read_at[pod.uid] = now
            try:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    await self._read(pod)
            except (KubeError, TimeoutError) as error:
                log.info("events of a pending pod not read", pod=pod.key, error=str(error) or type(error).__name__)
                self._drop_stale(pod)
            except Exception:
                # What one namespace's events contain must not end the operator.
                log.exception("events of a pending pod not understood", pod=pod.key)
                self._drop_stale(pod)
            else:
                self._answered[pod.uid] = self._world.now()

    def _waiting(self) -> list[facts.Pod]:
        found: list[facts.Pod] = []
        for uid in self._state.starting:
            for pod in self._world.pods.by("model", uid):
                if pod.node is not None or pod.finished or pod.deleting or not pod.created:
                    continue
                age = (self._world.now() - pod.created).total_seconds()
                if (pod.lacks_claim and age >= CLAIM_SECONDS) or (self._autoscaled(pod) and age >= WAITS_SECONDS):
                    found.append(pod)
        return found

    def _autoscaled(self, pod: facts.Pod) -> bool:
        return bool(pod.unschedulable) and self._cold.provision_seconds(pod.gpu_class or "") is not None

    async def _read(self, pod: facts.Pod) -> None:
        events = await self._events(pod.namespace, f"regarding.uid={pod.uid}")
        before = self._world.autoscaler_news.get(pod.uid, AutoscalerNews())
        found = news(
            [*events, *await self._of_node_claims(node_claims(events))],
            before,
            now=self._world.now(),
            provision_seconds=self._cold.provision_seconds(pod.gpu_class or ""),
        )
        if found != before:
            self._note(pod, found)
        refusal = claim_refusal(events) if pod.lacks_claim else None
        if refusal is not None and refusal != pod.claim_refusal:
            self._world.claim_refusals[pod.uid] = refusal
            self._world.pods.amend(pod.key, pod.uid, lambda found: _refused(found, refusal))

    def _note(self, pod: facts.Pod, found: AutoscalerNews) -> None:
        self._world.autoscaler_news[pod.uid] = found
        self._world.pods.amend(pod.key, pod.uid, lambda pod: pod.with_news(found))

    def _drop_stale(self, pod: facts.Pod) -> None:
        """Forgets a refusal that nobody has seen for long. What was announced stays: it is late after its time."""
        before, answered = self._world.autoscaler_news.get(pod.uid), self._answered.get(pod.uid)
        if before is None or before.refusal is None:
            return
        if answered is None or (self._world.now() - answered).total_seconds() >= STALE_SECONDS:
            self._note(pod, replace(before, refusal=None))

    async def _events(self, namespace: str, selector: str) -> list[PodEvent]:
        # One page only: users who may write events in the namespace must not keep the operator busy.
        async for page in self._world.client.list_pages(
            EVENTS, namespace=namespace, field_selector=selector, page_size=_MOST_EVENTS
        ):
            return [projections.pod_event(each) for each in page.items]
        return []

    async def _of_node_claims(self, claims: Collection[str]) -> list[PodEvent]:
        """Why the nodes of these NodeClaims do not come. Karpenter deletes such a NodeClaim at once, so only events say
        it. Where these cannot be read, the pod's events have to do."""
        if claims and self._claim_events is None:
            try:
                # NodeClaims are in no namespace, so their events are in this one.
                self._claim_events = await self._events("default", "regarding.kind=NodeClaim,type=Warning")
            except KubeError as error:
                self._claim_events = []
                log.info("events of NodeClaims not read", error=str(error))
        return of_node_claims(self._claim_events or [], claims)


def _refused(pod: facts.Pod, refusal: facts.ClaimRefusal) -> facts.Pod:
    """Its claim may have been made while its events were read."""
    return replace(pod, claim_refusal=refusal if pod.lacks_claim else None, claim_was_refused=True)
