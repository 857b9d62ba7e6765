"""Which revision of an adapter is served, and which one is next, as its source is read and replicas load it."""

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from shoal.api import reasons
from shoal.api.adapters import AdapterSettings
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter
from shoal.core.status.conditions import find
from shoal.core.status.observed import ModelProblem

FINAL: Final = frozenset(
    {
        reasons.RANK_TOO_HIGH,
        reasons.MODULES_NOT_IN_POOL,
        reasons.BASE_MISMATCH,
        reasons.TOO_LARGE,
        reasons.CORRUPT,
        reasons.UNSUPPORTED,
        reasons.SOURCE_INVALID,
        reasons.DIGEST_MISMATCH,
    }
)
"""Faults of the files themselves: reading the same files again gives the same result."""


@dataclass(frozen=True, slots=True)
class Revisions:
    """The revisions of an adapter."""

    current: AdapterRevision | None = None
    """The revision that is served."""
    next: AdapterRevision | None = None
    """A revision that is loaded beside `current`, to replace it."""
    read_by: str | None = None
    """The reading (`read_key`) behind this state; None: no reading was completed."""
    refused: ModelProblem | None = None
    """The fault that this reading found; then `current` is from an earlier one."""


def demands(settings: AdapterSettings) -> str:
    """What a pool and its base require of an adapter, without the number of adapters and their credentials."""
    return settings.model_dump_json(exclude={"slots", "cached", "credentials"})


def read_key(adapter: LoRAAdapter, asked: str) -> str:
    """Identifies a reading: the declared source, and all requirements (`demands`). 16 hex digits."""
    source = adapter.spec.source
    return hashlib.sha256("\0".join((source.uri, source.digest or "", asked)).encode()).hexdigest()[:16]


def stored(adapter: LoRAAdapter) -> Revisions:
    """The state in the adapter's own status, so that a restart does not read the files again."""
    status = adapter.status
    if status is None:
        return Revisions()
    accepted = find(status.conditions, reasons.ACCEPTED)
    refused = accepted is not None and accepted.status == "False" and accepted.reason in FINAL
    return Revisions(
        current=adapter.current,
        next=status.next,
        read_by=status.read_by,
        refused=ModelProblem(accepted.reason, accepted.message) if refused and accepted and status.read_by else None,
    )


def found(before: Revisions, revision: AdapterRevision, key: str) -> Revisions:
    """After a reading that found a fitting revision. The first revision is served at once. So is the current one from
    the address of this reading: it may be gone from the former address."""
    if before.current is None or before.current.revision == revision.revision:
        return Revisions(current=revision, read_by=key)
    return Revisions(current=before.current, next=revision, read_by=key)


def refused(before: Revisions, problem: ModelProblem, key: str, *, revision: str | None = None) -> Revisions:
    """After a reading that found unusable files; `revision` identifies them, if known.

    The current revision stays, unless it is the unusable one, because its pool or base changed.
    """
    usable = before.current if before.current is None or before.current.revision != revision else None
    return Revisions(current=usable, read_by=key, refused=problem)


def switched(before: Revisions) -> Revisions:
    """After all replicas that should have loaded the next revision."""
    return before if before.next is None else replace(before, current=before.next, next=None)
