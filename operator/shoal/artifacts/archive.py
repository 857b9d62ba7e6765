"""Unpacks an archive from outside: bounded in bytes, files, memory and time, in a process of its own (`unpacker`)."""

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from shoal.api import reasons
from shoal.artifacts import unpacker
from shoal.artifacts.errors import ArtifactError, gib, require_space
from shoal.artifacts.unpacker import BROKEN, ZSTD

RATIO: Final = 4
"""Weights hardly compress; what unpacks to more is no model, or should be a plain tar."""
SMALL: Final = 64 << 20
"""Bytes that any archive may unpack to: configs and tokenizers compress well."""
_ENTRIES = unpacker.ENTRIES
_SKIPPED_LIMIT = 2 << 30
"""Bytes of files that nobody wants: a compressed archive has to be read through them."""
_MEMORY: Final = (32 << 20, 256 << 20)
"""Bytes for the process beside the interpreter: at least, and at most; a quarter of the container's between them."""
_SECONDS: Final = 120
_BYTES_PER_SECOND: Final = 10 << 20
"""Slower than any decompressor: bzip2, which is the slowest, makes 20 MiB per second."""
_WAIT: Final = 10
"""Times the processor's seconds that the process may take by the clock: the disk may be slow."""


def content_limit(packed: int) -> int:
    """Bytes to which an archive of `packed` bytes may unpack."""
    return max(RATIO * packed, SMALL)


def unpack(archive: Path, target: Path, source: str, *, only: Collection[str] = (), limit: int) -> None:
    """Unpacks a tar (plain, gzip, bzip2, xz) or a zip into `target`. `source` names it in messages. Blocks.

    `only`: files with other names are skipped. `limit`: bytes on the disk that the content may take, each file in
    whole blocks. Raises ArtifactError: TooLarge for more than that, or than an archive has files; SourceInvalid for
    anything that is not a file or a folder inside the target (links, devices, absolute or climbing names), DiskFull.
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
        # A signal of a limit: of the processor's time, or of the container's memory.
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
    """What an error of `BROKEN` means for an archive that begins with the bytes `first`."""
    return ArtifactError(reasons.SOURCE_INVALID, f"{source} {unpacker.describe(error, first)}")


def _memory() -> int:
    least, most = _MEMORY
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return most
    return max(least, min(most, int(text) // 4)) if text.isdigit() else most


__all__ = ["BROKEN", "ZSTD", "broken", "content_limit", "unpack"]
