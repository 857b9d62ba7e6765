"""Errors of sources: each has a reason, which is shown on the Model, and a message that says what to do."""

import errno
import shutil
from pathlib import Path

from shoal.api import reasons

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
POD_ADVICE = "give the node more ephemeral storage, or keep the model on a volume and use pvc://"
"""Advice when a pod's volume is full."""


class ArtifactError(Exception):
    """`reason` is one of `reasons.STAGE_REASONS`; the message is for the author of the Model."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Interrupted(ArtifactError):
    """The source is unavailable; a retry may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(reasons.SOURCE_UNREACHABLE, message)


class Unreached(Interrupted):
    """There was no response, or it was cut off."""


class NoRanges(ArtifactError):
    """The server answers a range request with the whole file."""

    def __init__(self, what: str) -> None:
        super().__init__(reasons.SOURCE_UNREACHABLE, f"{what}: the server serves no byte ranges")


def is_full(error: OSError) -> bool:
    """Whether the disk or its quota is full."""
    return error.errno in _FULL


def gib(count: int) -> str:
    """A number of bytes, formatted."""
    if count < 2**17:
        return f"{count} bytes"
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def require_space(folder: Path, needed: int, advice: str = POD_ADVICE) -> None:
    """Raises ArtifactError(DiskFull) unless `needed` bytes are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ArtifactError(
            reasons.DISK_FULL, f"the model needs {gib(needed)} and the volume has {gib(free)} free: {advice}"
        )


def of_os_error(error: OSError, what: str, advice: str = POD_ADVICE) -> ArtifactError:
    """The ArtifactError for a file system error during `what`."""
    if is_full(error):
        return ArtifactError(reasons.DISK_FULL, f"no space left while {what}: {advice}")
    return ArtifactError(reasons.SOURCE_INVALID, f"{what} failed: {error.strerror or error} ({error.filename})")
