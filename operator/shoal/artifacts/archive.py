"""Unpacks an untrusted archive in a separate process (`unpacker`), with limits on bytes, files, memory and time."""

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from shoal.api import reasons
from shoal.artifacts import unpacker
from shoal.artifacts.errors import ArtifactError, gib, require_space
from shoal.artifacts.unpacker import UNREADABLE, ZSTD

RATIO: Final = 4
"""Factor to which an archive may unpack: weights hardly compress."""
SMALL: Final = 64 << 20
"""Bytes that any archive may unpack to: configs and tokenizers compress well."""
_ENTRIES = unpacker.ENTRIES
_SKIPPED_LIMIT = 2 << 30
"""Limit for skipped files in bytes: a compressed archive has to be read through them."""
_MEMORY: Final = (32 << 20, 256 << 20)
"""Memory of the process in bytes, beyond the interpreter: minimum and maximum. Between them, a quarter of the
container's memory."""
_SECONDS: Final = 120
_BYTES_PER_SECOND: Final = 10 << 20
"""Lower bound of decompression speed: bzip2, the slowest, reaches 20 MiB per second."""
_WAIT: Final = 10
"""Factor from CPU seconds to wall-clock seconds of the process: the disk may be slow."""


def content_limit(packed: int) -> int:
    """Bytes to which an archive of `packed` bytes may unpack."""
    return max(RATIO * packed, SMALL)


def unpack(archive: Path, target: Path, source: str, *, only: Collection[str] = (), limit: int) -> None:
    """Unpacks a tar (plain, gzip, bzip2, xz) or a zip into `target`. `source` is its name in messages. Blocks.

    `only`: files with other names are skipped. `limit`: disk space for the content in bytes, each file in whole blocks.
    Raises ArtifactError: TooLarge if the content exceeds this limit or the limit of files; SourceInvalid for anything
    other than files and folders inside the target (links, devices, absolute names, names with `..`); DiskFull.
    """
    seconds = _SECONDS + limit // _BYTES_PER_SECOND
    task = {
        "archive": str(archive),
        "target": str(target),
        "only": list(only),
        "limit": limit,
        "skip": _SKIPPED_LIMIT,
        "entries": _ENTRIES,
        "memory": _memory(),
        "seconds": seconds,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(unpacker.__file__))],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            check=False,
            timeout=_WAIT * seconds,
        )
    except subprocess.TimeoutExpired:
        raise _too_large(source, "takes longer to unpack than any model does") from None
    try:
        answer: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        # Ended by a signal: a limit of CPU time or of the container's memory.
        raise _too_large(
            source, f"cannot be unpacked within its limits (the process ended with {done.returncode})"
        ) from (None)
    if answer:
        raise _refusal(answer, target, source, limit)


def _refusal(answer: dict[str, str], target: Path, source: str, limit: int) -> ArtifactError:
    detail = answer["detail"]
    match answer["problem"]:
        case "too-large":
            return _too_large(source, f"unpacks to more than {gib(int(detail))}")
        case "too-many":
            return _too_large(source, f"has more than {detail} files and folders")
        case "memory":
            return _too_large(source, "takes more memory to unpack than it is given")
        case "full":
            try:
                require_space(target, int(detail) if detail.isdigit() else limit)
            except ArtifactError as error:
                return error
            return ArtifactError(reasons.DISK_FULL, f"no space left while unpacking {source}")
        case "io":
            return ArtifactError(reasons.SOURCE_INVALID, f"{source} cannot be unpacked: {detail}")
        case _:
            return ArtifactError(
                reasons.SOURCE_INVALID, f"{source} {detail}" if "whole" in answer else f"{source}: {detail}"
            )


def _too_large(source: str, what: str) -> ArtifactError:
    return ArtifactError(reasons.TOO_LARGE, f"{source} {what}: pack what is needed only, as a plain .tar")


def broken(error: Exception, first: bytes, source: str) -> ArtifactError:
    """The ArtifactError for an exception of `UNREADABLE`, for an archive that begins with the bytes `first`."""
    return ArtifactError(reasons.SOURCE_INVALID, f"{source} {unpacker.describe(error, first)}")


def _memory() -> int:
    least, most = _MEMORY
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return most
    return max(least, min(most, int(text) // 4)) if text.isdigit() else most


__all__ = ["UNREADABLE", "ZSTD", "broken", "content_limit", "unpack"]
