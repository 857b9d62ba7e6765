"""GPUs promised to Models before the cluster shows them: one way to promise, for every kind of writer.

| kind | promised | until |
|---|---|---|
| apply | replicas that are being written, and that no Deployment shows yet | the write is over |
| wake | replicas from zero, ahead of the plan | a plan has read them from the Deployment |
| keda | the number that KEDA is answered: its HPA may write it at any moment | another answer, or none |
| surge | the one replica more that a Deployment has during a rollout | the Deployment has rolled out, or is gone |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

ReservationKind = Literal["apply", "wake", "keda", "surge"]
_KINDS: Final[tuple[ReservationKind, ...]] = ("apply", "wake", "keda", "surge")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Replicas of a Model on a GPU class."""

    model_uid: str
    gpu_class: str
    replicas: int
    """In all, those that stand included; of `surge`: beside those that stand."""
    gpus: int
    """Per replica."""
    kind: ReservationKind
    written: bool = False
    """Of `wake`: the Deployment has them, and the next plan decides about them."""


class Reservations:
    """All of them. At most one of a kind for a Model and class."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        """`changed` is called with the uid of a Model whose reservations changed."""
        self._changed = changed
        self._made: dict[ReservationKind, dict[str, dict[str, Reservation]]] = {kind: {} for kind in _KINDS}
        """Kind -> Model's uid -> class -> reservation."""

    def put(self, reservation: Reservation) -> None:
        """Takes the place of the former one."""
        of_model = self._made[reservation.kind].setdefault(reservation.model_uid, {})
        if of_model.get(reservation.gpu_class) != reservation:
            of_model[reservation.gpu_class] = reservation
            self._changed(reservation.model_uid)

    def replace(self, model_uid: str, kind: ReservationKind, made: Iterable[Reservation]) -> None:
        """These instead of all others of the kind that the Model has."""
        self._made[kind][model_uid] = {each.gpu_class: each for each in made}
        self._changed(model_uid)

    def remove(self, model_uid: str, kind: ReservationKind, gpu_class: str | None = None) -> None:
        """That of a class; None: of every class."""
        of_model = self._made[kind].get(model_uid)
        if of_model is None or (gpu_class is not None and gpu_class not in of_model):
            return
        if gpu_class is not None:
            del of_model[gpu_class]
        if gpu_class is None or not of_model:
            del self._made[kind][model_uid]
        self._changed(model_uid)

    def clear(self, *kinds: ReservationKind) -> None:
        """Nothing of these kinds is promised to anybody."""
        for kind in kinds:
            for model_uid in list(self._made[kind]):
                self.remove(model_uid, kind)

    def of(self, model_uid: str, kind: ReservationKind) -> Mapping[str, Reservation]:
        """Class -> reservation."""
        return self._made[kind].get(model_uid, {})

    def all(self, kind: ReservationKind) -> Iterable[Reservation]:
        return [each for of_model in self._made[kind].values() for each in of_model.values()]

    def gpus(self, gpu_class: str, *kinds: ReservationKind) -> int:
        """GPUs of a class that are promised in these ways."""
        return sum(
            found.replicas * found.gpus
            for kind in kinds
            for of_model in self._made[kind].values()
            if (found := of_model.get(gpu_class)) is not None
        )
