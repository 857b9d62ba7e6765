"""The replica's stream: the published state, and when to publish a change. `net/hub.py` sends it to the readers."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from shoal.api.replica import ReplicaKeys
from shoal.net import hub

Keys = Mapping[str, object]
"""Keys of `replica.ReplicaKeys` by attribute name; None: unknown."""

KV_STEP: Final = 0.02
"""A change of KV cache use, as a fraction of the capacity, that is published at once."""
QUIET_SECONDS: Final = 1.0
"""Minimum interval of other messages."""
_AT_ONCE: Final = frozenset({"phase", "engine_boot", "adapters"})
_QUEUES: Final = frozenset({"waiting", "adapters_waiting"})


def difference(published: Keys, now: Keys) -> dict[str, object]:
    """The keys whose value differs from the published one; None: the key became unknown."""
    return {name: now.get(name) for name in {*published, *now} if published.get(name) != now.get(name)}


def is_urgent(published: Keys, now: Keys) -> bool:
    """Whether a change is published at once: phase, engine restart, adapters, a key that became known or unknown, a
    queue that became empty or non-empty, or KV cache use that changed by 2 percentage points."""
    changed = difference(published, now)
    if not changed.keys().isdisjoint(_AT_ONCE):
        return True
    if any((published.get(name) is None) != (now.get(name) is None) for name in changed):
        return True
    if any(published.get(queue) == 0 or now.get(queue) == 0 for queue in _QUEUES & changed.keys()):
        return True
    before, after, total = published.get("kv_tokens_used"), now.get("kv_tokens_used"), now.get("kv_tokens_total")
    if isinstance(before, int) and isinstance(after, int) and isinstance(total, int) and total > 0:
        return abs(after - before) / total >= KV_STEP
    return False


class AgentStream(hub.StreamHub):
    """Keeps the published state (`published`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("keys", self._full_content)
        self._published: Mapping[str, object] = {}
        self._published_at = -QUIET_SECONDS
        self._clock = clock

    @property
    def published(self) -> Mapping[str, object]:
        return self._published

    def update(self, state: Mapping[str, object]) -> bool:
        """Takes the current state and publishes it if it is time. Returns whether a message was sent."""
        changed = difference(self._published, state)
        at = self._clock()
        if not changed:
            return False
        if not is_urgent(self._published, state) and at - self._published_at < QUIET_SECONDS:
            return False
        self._published, self._published_at = dict(state), at
        self.publish(_encode(changed))
        return True

    def _full_content(self) -> bytes:
        return _encode({name: value for name, value in self._published.items() if value is not None})


def _encode(keys: Mapping[str, object]) -> bytes:
    return ReplicaKeys.model_validate(keys).model_dump_json(exclude_unset=True).encode()
