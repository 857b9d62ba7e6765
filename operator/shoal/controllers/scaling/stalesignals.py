"""What the status of each Model says of voices that are not heard (`core/scaling/sources.py`)."""

import asyncio
from collections.abc import Callable

from shoal.api import reasons
from shoal.api.model import Model
from shoal.core.scaling import Steady, due, steady
from shoal.core.status.conditions import find


class StaleSignals:
    """`take` what each decision says; read `of`. Keeps a timer only for a Model of which something else is due."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, Steady] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.changed: Callable[[str], None] = lambda _key: None
        """Hears the key of a Model of which `of` says something else."""

    def message(self, model: Model) -> str | None:
        """What is told of the Model."""
        known = self._known.get(model.metadata.uid)
        return known.published if known is not None else _stored_message(model)

    def update(self, model: Model, message: str | None) -> None:
        """Who is not heard now; None: nobody, or nothing is held up."""
        uid, now = model.metadata.uid, self._clock()
        before = self._known.get(uid)
        if before is None:
            written = _stored_message(model)  # in an earlier term: it stands until this one knows better
            before = Steady(written, written, now)
        known = self._known[uid] = steady(before, message, now)
        self._stop(uid)
        if (left := due(known, now)) is not None:
            self._timers[uid] = asyncio.get_running_loop().call_later(left, self.update, model, message)
        if known.published != before.published:
            self.changed(model.key)

    def forget(self, uid: str) -> None:
        """The Model is gone, or this term is over."""
        self._known.pop(uid, None)
        self._stop(uid)

    def clear(self) -> None:
        """This term is over."""
        for uid in list(self._known):
            self.forget(uid)

    def _stop(self, uid: str) -> None:
        timer = self._timers.pop(uid, None)
        if timer is not None:
            timer.cancel()


def _stored_message(model: Model) -> str | None:
    known = find(model.status.conditions, reasons.SIGNALS_UNKNOWN) if model.status else None
    return known.message if known is not None else None
