"""What the status of each Model says of stale signal sources (`core/scaling/sources.py`)."""

import asyncio
from collections.abc import Callable

from shoal.api import reasons
from shoal.api.model import Model
from shoal.controllers.state import FleetState, StaleRecord
from shoal.core.scaling import Steady, due, steady
from shoal.core.status.conditions import find


class StaleSignals:
    """`update` with each decision; read `message`. Keeps a timer only for a Model of which something else is due."""

    def __init__(self, state: FleetState, changed: Callable[[str], None], clock: Callable[[], float]) -> None:
        """`changed` is called with the key of a Model whose `message` changed."""
        self._state, self._changed, self._clock = state, changed, clock

    def message(self, model: Model) -> str | None:
        """What the Model's status says."""
        stale = self._state.record(model.metadata.uid).stale
        return stale.known.published if stale is not None else _stored_message(model)

    def update(self, model: Model, message: str | None) -> None:
        """Which sources are stale now; None: none, or they keep nothing from scaling down."""
        record, now = self._state.record(model.metadata.uid), self._clock()
        if record.stale is None:
            written = _stored_message(model)  # in an earlier term: it stands until this one knows better
            record.stale = StaleRecord(Steady(written, written, now))
        stale, before = record.stale, record.stale.known
        known = stale.known = steady(before, message, now)
        stale.close()
        if (left := due(known, now)) is not None:
            stale.timer = asyncio.get_running_loop().call_later(left, self.update, model, message)
        if known.published != before.published:
            self._changed(model.key)

    def clear(self) -> None:
        """This term is over."""
        for _, record in self._state.records():
            if record.stale is not None:
                record.stale.close()
                record.stale = None


def _stored_message(model: Model) -> str | None:
    known = find(model.status.conditions, reasons.SIGNALS_UNKNOWN) if model.status else None
    return known.message if known is not None else None
