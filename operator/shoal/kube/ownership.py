"""Which pods have proved that they are replicas (`core/ownership.py`), from events in whatever order they come.

A pod that has proved it stays proven for its lifetime: its ReplicaSet may be deleted before it (a rollout's cleanup, a
deletion that does not wait), and it still serves. Not seen yet is unknown: it is asked again with the next event of the
object that is missing.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from shoal.api import names
from shoal.core.ownership import Link, OwnershipVerdict, verdict

log = structlog.get_logger()

ENGINES: Final = (
    f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}"
)
"""Selects engine pods, their ReplicaSets and Deployments."""
GRACE_SECONDS: Final = 30.0
"""Seconds for which an owner may be missing before it is reported: watches of different kinds are not in step."""


@dataclass(slots=True)
class _Unproven:
    pod: Link
    verdict: OwnershipVerdict
    since: float
    reported: bool = False


class Ownership:
    """`proved` is called with a pod whose owners are proven later than it was seen, `reported` with a rogue pod."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replica_sets: dict[str, Link] = {}
        self._deployments: dict[str, Link] = {}
        self._models: dict[str, str] = {}
        self._proven: dict[str, tuple[str, str, str]] = {}
        """Uid of a pod -> what its labels said when it proved itself: with other labels it is asked again."""
        self._unproven: dict[str, _Unproven] = {}
        self._waiting: dict[str, set[str]] = {}
        """Uid of an object in a chain -> pods whose verdict depends on it."""
        self.proved: list[Callable[[Link], None]] = []
        self.reported: list[Callable[[Link, str], None]] = []

    def pod(self, pod: Link) -> bool:
        """A pod as it is now: whether it is a replica of the Model that its labels name."""
        if self._proven.get(pod.uid) == pod.labels:
            return True
        self._proven.pop(pod.uid, None)
        return self._judge(pod)

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._proven.pop(uid, None)
        self._drop(uid)

    def replica_set(self, replica_set: Link) -> None:
        self._replica_sets[replica_set.uid] = replica_set
        self._judge_again(replica_set.uid)

    def replica_set_gone(self, uid: str) -> None:
        self._replica_sets.pop(uid, None)

    def deployment(self, deployment: Link) -> None:
        self._deployments[deployment.uid] = deployment
        self._judge_again(deployment.uid)

    def deployment_gone(self, uid: str) -> None:
        self._deployments.pop(uid, None)

    def model(self, uid: str, key: str) -> None:
        """`key`: namespace/name."""
        if self._models.get(uid) != key:
            self._models[uid] = key
            self._judge_again(uid)

    def model_gone(self, uid: str) -> None:
        self._models.pop(uid, None)

    @property
    def rogue(self) -> int:
        """Pods that carry a Model's labels and have not proved that they belong to it."""
        return len(self._unproven)

    def report(self) -> None:
        """Tells of pods whose owners have been missing for too long; call it from time to time."""
        if not self._unproven:
            return
        before = self._clock() - GRACE_SECONDS
        for unproven in list(self._unproven.values()):
            if unproven.since <= before:
                self._report(unproven)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _judge(self, pod: Link) -> bool:
        found = self._verdict(pod)
        known = self._unproven.get(pod.uid)
        self._drop(pod.uid)
        if found.outcome == "proven":
            self._proven[pod.uid] = pod.labels
            return True
        unproven = _Unproven(pod, found, self._clock())
        if known is not None:
            unproven.since, unproven.reported = known.since, known.reported
        self._unproven[pod.uid] = unproven
        for uid in found.through:
            self._waiting.setdefault(uid, set()).add(pod.uid)
        if found.outcome == "refused":
            self._report(unproven)
        return False

    def _verdict(self, pod: Link) -> OwnershipVerdict:
        return verdict(pod, self._replica_sets, self._deployments, self._models)

    def _judge_again(self, uid: str) -> None:
        pods: Iterable[str] = tuple(self._waiting.get(uid, ()))
        for each in pods:
            unproven = self._unproven.get(each)
            if unproven is not None and self._judge(unproven.pod):
                for proved in self.proved:
                    proved(unproven.pod)

    def _drop(self, uid: str) -> None:
        unproven = self._unproven.pop(uid, None)
        for through in unproven.verdict.through if unproven is not None else ():
            waiting = self._waiting.get(through, set())
            waiting.discard(uid)
            if not waiting:
                self._waiting.pop(through, None)

    def _report(self, unproven: _Unproven) -> None:
        if unproven.reported:
            return
        unproven.reported = True
        pod, reason = unproven.pod, unproven.verdict.reason
        log.warning("a pod with the labels of an engine is none", pod=pod.key, model_uid=pod.model_uid, why=reason)
        for reported in self.reported:
            reported(pod, reason)
