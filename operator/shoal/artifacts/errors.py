"""How a source fails: always with a reason that stands on the Model, and a message that says what to do."""

import errno
import shutil
from pathlib import Path

from shoal.api import reasons

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
POD_ADVICE = "give the node more ephemeral storage, or keep the model on a volume and use pvc://"
"""What to do when the volume of a pod is full."""


class ArtifactError(Exception):
    """`reason` is one of `reasons.STAGE_REASONS`; the message is for the person who wrote the Model."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Interrupted(ArtifactError):
    """The source cannot be reached now; the same may work when it is tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(reasons.SOURCE_UNREACHABLE, message)


class Unreached(Interrupted):
    """No answer came at all, or it broke off."""


class NoRanges(ArtifactError):
    """The server answers a request for a range with the whole file."""

    def __init__(self, what: str) -> None:
        super().__init__(reasons.SOURCE_UNREACHABLE, f"{what}: the server serves no byte ranges")


def is_full(error: OSError) -> bool:
    """Whether the disk, or the quota on it, is full."""
    return error.errno in _FULL


def gib(count: int) -> str:
    """A number of bytes for people."""
    if count < 2**17:
        return f"{count} bytes"
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def require_space(folder: Path, needed: int, advice: str = POD_ADVICE) -> None:
    """Raises ArtifactError(DiskFull) unless `needed` bytes fit beside what is in `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ArtifactError(
            reasons.DISK_FULL, f"the model needs {gib(needed)} and the volume has {gib(free)} free: {advice}"
        )


def of_os_error(error: OSError, what: str, advice: str = POD_ADVICE) -> ArtifactError:
    """The ArtifactError for an error of the file system while doing `what`."""
    if is_full(error):
        return ArtifactError(reasons.DISK_FULL, f"no space left while {what}: {advice}")
    return ArtifactError(reasons.SOURCE_INVALID, f"{what} failed: {error.strerror or error} ({error.filename})")
