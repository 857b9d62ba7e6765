"""Reads why Kueue holds replicas back, for the status of their Models."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Final

import structlog

from shoal.api import reasons
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.facts import QueueWait
from shoal.core.podquota import NO_KUEUE, ProvisioningRequest, Workload, queue_wait, waits_for_queue
from shoal.kube import projections
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.resources import PROVISIONINGREQUESTS, WORKLOADS, WORKLOADS_BETA2, Resource

log = structlog.get_logger()

CHECK_SECONDS: Final = 5.0
WAITS_SECONDS: Final = 3.0
"""Age of a pod from which on its Workload is looked for: Kueue needs a moment to make it."""
AGAIN_SECONDS: Final = 15.0
MOST_AT_ONCE: Final = 20
"""Namespaces whose Workloads are read in one check. Those of the others are read in the next ones."""
_TIMEOUT_SECONDS: Final = 10.0
_PAGE_SIZE: Final = 500
_MOST_PAGES: Final = 4
_VERSIONS: Final = (WORKLOADS, WORKLOADS_BETA2)


class QueueMessages:
    """One request to the API server for each namespace with a replica that waits for quota, four times a minute; one
    more for ProvisioningRequests while an admission check holds one back."""

    def __init__(self, world: World, state: FleetState) -> None:
        self._world, self._state = world, state
        self._read_at: dict[str, float] = {}
        """Namespace -> time of the event loop."""
        self._served = WORKLOADS
        """The version that the API server was last seen to serve: it is asked for first."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Reads the Workloads of the namespaces whose Workloads were not read for the longest time."""
        now = asyncio.get_running_loop().time()
        waiting = self._waiting()
        self._read_at = {name: at for name, at in self._read_at.items() if name in waiting}
        due = [name for name in waiting if now - self._read_at.get(name, now - AGAIN_SECONDS) >= AGAIN_SECONDS]
        for namespace in sorted(due, key=lambda name: self._read_at.get(name, 0.0))[:MOST_AT_ONCE]:
            self._read_at[namespace] = now
            try:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    await self._read(namespace, waiting[namespace])
            except (KubeError, TimeoutError) as error:
                log.info("Workloads not read", namespace=namespace, error=str(error) or type(error).__name__)
            except Exception:
                # What one namespace's Workloads contain must not end the operator.
                log.exception("Workloads not understood", namespace=namespace)

    def _waiting(self) -> dict[str, list[facts.Pod]]:
        found: dict[str, list[facts.Pod]] = {}
        for uid in self._state.starting:
            for pod in self._world.pods.by("model", uid):
                if not pod.gated or not waits_for_queue(pod) or pod.deleting or pod.finished or pod.created is None:
                    continue
                if (self._world.now() - pod.created).total_seconds() >= WAITS_SECONDS:
                    found.setdefault(pod.namespace, []).append(pod)
        return found

    async def _read(self, namespace: str, pods: list[facts.Pod]) -> None:
        for version in (self._served, *(each for each in _VERSIONS if each is not self._served)):
            try:
                found, pages = await self._workloads(version, namespace, pods)
            except NotFound:
                continue
            self._served = version
            break
        else:
            for pod in pods:
                self._note(pod, QueueWait(reasons.QUOTA_WAIT, NO_KUEUE))
            return
        requests = await self._requests(namespace, {each.uid for each in found if each.checked or not each.active})
        for pod in pods:
            if pages < _MOST_PAGES or any(pod.uid in each.owners for each in found):
                self._note(pod, queue_wait(pod.uid, found, requests))

    async def _workloads(self, version: Resource, namespace: str, pods: list[facts.Pod]) -> tuple[list[Workload], int]:
        """(those of the pods, pages that were read). Raises NotFound where the API server does not serve the
        version."""
        wanted, found = {pod.uid for pod in pods}, list[Workload]()
        pages = 0
        async for page in self._world.client.list_pages(version, namespace=namespace, page_size=_PAGE_SIZE):
            # Of thousands of jobs only those of the waiting pods are kept, and not every page is read: users who
            # may create Workloads must not keep the operator busy.
            found += [each for item in page.items if wanted & set((each := projections.workload(item)).owners)]
            pages += 1
            if pages == _MOST_PAGES or len(found) >= len(pods):
                break
        return found, pages

    async def _requests(self, namespace: str, workloads: set[str]) -> list[ProvisioningRequest]:
        """Those of some Workloads; empty where the cluster has none, or the operator may not list them."""
        found: list[ProvisioningRequest] = []
        pages = 0
        if not workloads:
            return found
        with suppress(NotFound, Forbidden):
            async for page in self._world.client.list_pages(
                PROVISIONINGREQUESTS, namespace=namespace, page_size=_PAGE_SIZE
            ):
                each = map(projections.provisioning_request, page.items)
                found += [request for request in each if request.workload in workloads]
                pages += 1
                if pages == _MOST_PAGES:
                    break
        return found

    def _note(self, pod: facts.Pod, wait: QueueWait) -> None:
        if wait.refusal is not None and not self._autoscaled(pod):
            wait = replace(wait, refusal=None, refused_at=None)  # the class has the nodes that exist
        if wait != pod.queue_wait:
            self._world.queue_waits[pod.uid] = wait
            self._world.pods.amend(pod.key, pod.uid, lambda found: replace(found, queue_wait=wait))

    def _autoscaled(self, pod: facts.Pod) -> bool:
        custom = self._world.classes.get(pod.gpu_class or "")
        return custom is not None and custom.object is not None and custom.object.spec.nodes.autoscaled is not None
