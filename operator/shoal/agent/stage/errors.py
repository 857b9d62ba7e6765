"""How staging fails: always with a reason that stands on the Model, and a message that says what to do."""

import errno
import shutil
from pathlib import Path

from shoal.api import reasons

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StageError(Exception):
    """`reason` is one of `reasons.STAGE_REASONS`; the message is for the person who wrote the Model."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def gib(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def require_room(folder: Path, needed: int) -> None:
    """Raises StageError(DiskFull) unless `needed` bytes fit beside what is in `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StageError(
            reasons.DISK_FULL,
            f"the model needs {gib(needed)} and the pod's volume has {gib(free)} free: give the node more ephemeral "
            "storage, or keep the model on a volume and use pvc://",
        )


def of_os_error(error: OSError, what: str) -> StageError:
    """The StageError for an error of the file system while doing `what`."""
    if error.errno in _FULL:
        return StageError(
            reasons.DISK_FULL,
            f"no space left while {what}: give the node more ephemeral storage, or keep the model on a volume and "
            "use pvc://",
        )
    return StageError(reasons.SOURCE_INVALID, f"{what} failed: {error.strerror or error} ({error.filename})")
