"""What KEDA is answered: one number per ScaledObject, and when KEDA asked about it last."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.controllers.keda.answers import Changed
from shoal.controllers.reservations import Reservation, Reservations
from shoal.controllers.world import World
from shoal.core.keda import TARGET, ScalerAnswer, metric

Key = tuple[str, str]
"""Namespace and name of a ScaledObject, which are those of its Deployment."""


@dataclass(slots=True)
class _Entry:
    model_uid: str
    gpu_class: str
    gpus: int
    replicas: int


@dataclass(slots=True)
class ScalerTargets:
    """Implements `Answers`. Every call reads and writes memory only.

    A number stands here from when it may be carried out: pods that go first are marked before a lower one is set. What
    is set counts as promised as long as it stands here.
    """

    world: World
    reservations: Reservations
    """An answer is a promise: KEDA's HPA may write it at any moment."""
    polled_again: Callable[[str], None]
    """Called with the uid of a Model that KEDA polls again after a silence."""
    clock: Callable[[], float] = time.monotonic
    changed: list[Changed] = field(default_factory=list[Changed])
    _entries: dict[Key, _Entry] = field(default_factory=dict[Key, _Entry])
    _polled: dict[Key, float] = field(default_factory=dict[Key, float])
    _stale: set[Key] = field(default_factory=set[Key])

    # --- Answers ----------------------------------------------------------------------------------------------------

    def answer(self, namespace: str, name: str) -> ScalerAnswer | None:
        entry = self._entries.get((namespace, name))
        if entry is None:
            return None
        number = entry.replicas
        child = self.world.deployments.get(f"{namespace}/{name}")
        current = child.deployment.replicas if child is not None and child.deployment is not None else None
        return ScalerAnswer(number > 0, number, metric(number), TARGET, above_zero=bool(current))

    def polled(self, namespace: str, name: str) -> None:
        key = (namespace, name)
        self._polled[key] = self.clock()
        if key in self._stale:
            self._stale.discard(key)
            if (entry := self._entries.get(key)) is not None:
                self.polled_again(entry.model_uid)

    # --- the driver -------------------------------------------------------------------------------------------------

    def set(self, key: Key, model_uid: str, gpu_class: str, gpus: int, replicas: int) -> None:
        """KEDA is to bring the Deployment to so many replicas."""
        entry, known = _Entry(model_uid, gpu_class, gpus, replicas), self._entries.get(key)
        if entry == known:
            return
        self._entries[key] = entry
        self.reservations.put(Reservation(model_uid, gpu_class, replicas, gpus, "keda"))
        self.notify(key)

    def number(self, key: Key) -> int | None:
        """What is answered; None: nothing yet in this term."""
        entry = self._entries.get(key)
        return entry.replicas if entry is not None else None

    def since(self, key: Key) -> float | None:
        """When KEDA asked last, on `clock`; None: never in this term."""
        return self._polled.get(key)

    def mark_stale(self, key: Key) -> None:
        """KEDA has not polled for too long: its next poll is reported."""
        self._stale.add(key)

    def notify(self, key: Key) -> None:
        """The answer, or whether it stands already, is another one."""
        for listener in self.changed:
            listener(*key)

    def drop(self, key: Key) -> None:
        """Nothing is answered any more: the ScaledObject is gone."""
        entry = self._entries.pop(key, None)
        self._polled.pop(key, None)
        self._stale.discard(key)
        if entry is not None:
            self.reservations.remove(entry.model_uid, "keda", entry.gpu_class)

    def drop_model(self, model_uid: str) -> None:
        """The Model is gone, and its ScaledObjects with it."""
        for key in [key for key, entry in self._entries.items() if entry.model_uid == model_uid]:
            self.drop(key)

    def begin(self) -> None:
        """A new term: no answer is given before a new decision, and no poll is remembered."""
        for key in list(self._entries):
            self.drop(key)
        self._polled.clear()
        self._stale.clear()
