"""The replica's stream: what was told of it, and when to tell more. `signals/hub.py` brings it to the readers."""

import time
from collections.abc import Callable, Mapping

from shoal.agent import changes
from shoal.api.replica import ReplicaKeys
from shoal.signals import hub


class Hub(hub.Hub):
    """Holds what was told (`told`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("keys", self._known)
        self._told: Mapping[str, object] = {}
        self._told_at = -changes.QUIET_SECONDS
        self._clock = clock

    @property
    def told(self) -> Mapping[str, object]:
        return self._told

    def update(self, now: Mapping[str, object]) -> bool:
        """Takes the state as it is now; tells it if it is time. Returns whether a message went out."""
        changed = changes.difference(self._told, now)
        time_now = self._clock()
        if not changed:
            return False
        if not changes.matters(self._told, now) and time_now - self._told_at < changes.QUIET_SECONDS:
            return False
        self._told, self._told_at = dict(now), time_now
        self.tell(_encode(changed))
        return True

    def _known(self) -> bytes:
        return _encode({name: value for name, value in self._told.items() if value is not None})


def _encode(keys: Mapping[str, object]) -> bytes:
    return ReplicaKeys.model_validate(keys).model_dump_json(exclude_unset=True).encode()
