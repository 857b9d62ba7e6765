"""Which revision of an adapter answers, and which is to take over, as its source is read and replicas load it."""

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
"""What is wrong with the files themselves: reading the same ones again finds the same."""


@dataclass(frozen=True, slots=True)
class Revisions:
    """What is known of an adapter's files."""

    current: AdapterRevision | None = None
    """The one that answers."""
    next: AdapterRevision | None = None
    """Loaded beside it, to take over."""
    read_by: str | None = None
    """The reading (`read_key`) that this comes from; None: nothing was read to its end yet."""
    refused: ModelProblem | None = None
    """What that reading found wrong; then `current` is one of before."""


def demands(settings: AdapterSettings) -> str:
    """What a pool and its base ask of an adapter. How many there may be, and who reads them, is nothing to it."""
    return settings.model_dump_json(exclude={"slots", "cached", "credentials"})


def read_key(adapter: LoRAAdapter, asked: str) -> str:
    """Names a reading: the source as it is declared, and all that is asked of it (`demands`). 16 hex digits."""
    source = adapter.spec.source
    return hashlib.sha256("\0".join((source.uri, source.digest or "", asked)).encode()).hexdigest()[:16]


def stored(adapter: LoRAAdapter) -> Revisions:
    """What the adapter's own status says, so that a restart reads nothing again."""
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
    """After a reading that found a revision which fits. The first one answers at once: no other could. So does the one
    that answers already, from the address where it is now: it may be gone from the former one."""
    if before.current is None or before.current.revision == revision.revision:
        return Revisions(current=revision, read_by=key)
    return Revisions(current=before.current, next=revision, read_by=key)


def refused(before: Revisions, problem: ModelProblem, key: str, *, revision: str | None = None) -> Revisions:
    """After a reading that found files which cannot be used; `revision` names them, where that much is known.

    A former revision goes on answering; not one that turns out to be unusable now, since its pool or base changed.
    """
    usable = before.current if before.current is None or before.current.revision != revision else None
    return Revisions(current=usable, read_by=key, refused=problem)


def switched(before: Revisions) -> Revisions:
    """After every replica that should has loaded the next one."""
    return before if before.next is None else replace(before, current=before.next, next=None)
