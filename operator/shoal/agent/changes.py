"""What to tell and when: pure functions over the keys of the stream (streams.md)."""

from collections.abc import Mapping
from typing import Final

Keys = Mapping[str, object]
"""Keys of `replica.ReplicaKeys` by attribute name; None is unknown."""

KV_STEP: Final = 0.02
"""A move of KV use, as a share of the capacity, that is told at once."""
QUIET_SECONDS: Final = 1.0
"""Other changes are told at most this often."""
_AT_ONCE: Final = frozenset({"phase", "engine_boot", "adapters"})
_QUEUES: Final = frozenset({"waiting", "adapters_waiting"})


def difference(published: Keys, now: Keys) -> dict[str, object]:
    """The keys whose value is another than what was told; a key that became unknown is None."""
    return {name: now.get(name) for name in {*published, *now} if published.get(name) != now.get(name)}


def matters(published: Keys, now: Keys) -> bool:
    """Whether a change must be told at once: the phase, a restart, an adapter, something that became known or unknown,
    a queue that appeared or went, or KV use that moved by 2 points."""
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
