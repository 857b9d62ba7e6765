"""The replica's stream: what was told of it, and when to tell more. `net/hub.py` brings it to the readers."""

import time
from collections.abc import Callable, Mapping

from shoal.agent import changes
from shoal.api.replica import ReplicaKeys
from shoal.net import hub


class AgentStream(hub.StreamHub):
    """Holds what was told (`told`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("keys", self._full_content)
        self._published: Mapping[str, object] = {}
        self._published_at = -changes.QUIET_SECONDS
        self._clock = clock

    @property
    def published(self) -> Mapping[str, object]:
        return self._published

    def update(self, now: Mapping[str, object]) -> bool:
        """Takes the state as it is now; tells it if it is time. Returns whether a message went out."""
        changed = changes.difference(self._published, now)
        time_now = self._clock()
        if not changed:
            return False
        if not changes.matters(self._published, now) and time_now - self._published_at < changes.QUIET_SECONDS:
            return False
        self._published, self._published_at = dict(now), time_now
        self.publish(_encode(changed))
        return True

    def _full_content(self) -> bytes:
        return _encode({name: value for name, value in self._published.items() if value is not None})


def _encode(keys: Mapping[str, object]) -> bytes:
    return ReplicaKeys.model_validate(keys).model_dump_json(exclude_unset=True).encode()
