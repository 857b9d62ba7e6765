"""The interface of sources, and their settings."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.artifacts.errors import POD_ADVICE
from shoal.artifacts.manifest import File, Manifest
from shoal.core.network import PUBLIC, SourceNetwork


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of source connections. Proxies come from the environment, additional CAs from SSL_CERT_FILE."""

    hub_endpoint: str | None = None
    """URL of a mirror of the hub; None: the hub itself."""
    network: SourceNetwork = PUBLIC
    """Allowed hosts. The hub's mirror is always allowed, because the platform configures it."""
    connect_seconds: float = 15.0
    stall_seconds: float = 60.0
    """Longest silence of a connection, in seconds."""
    slow_bytes: int = 64 << 10
    """Least bytes that a connection must deliver in that time, in proportion if it breaks off earlier."""
    attempts: int = 3
    """Consecutive attempts below that pace, before the source counts as unreachable."""
    pause_seconds: float = 1.0
    """Pause before the second attempt, in seconds; doubles with each attempt."""
    connections: int = 8
    """Concurrent transfers over all files of a source."""
    segment_bytes: int = 32 << 20
    """Files larger than this are read in parallel ranges."""
    disk_advice: str = POD_ADVICE
    """Advice when the disk is full."""


class ArtifactSource(Protocol):
    """One source URI. Use it as an async context manager: it may hold connections."""

    settings: Settings

    async def __aenter__(self) -> "ArtifactSource": ...
    async def __aexit__(self, *error: object) -> None: ...

    async def manifest(self) -> Manifest:
        """The current files; a moving branch is resolved to its commit. Raises ArtifactError."""
        ...

    async def authorise(self, manifest: Manifest) -> None:
        """Checks that the credentials may read content, not only lists: reads one byte of the largest file.

        Raises ArtifactError.
        """
        ...

    async def read(self, file: File, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer only at the end of the file. Raises ArtifactError."""
        ...

    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end`, in pieces, in one attempt. Raises Interrupted and ArtifactError."""
        ...

    async def download(self, file: File, path: Path, on_bytes: Callable[[int], None]) -> None:
        """Downloads the file to `path`, complete, verified and synced to disk.

        A `<path>.part` of an earlier download is continued if the validator still matches. `on_bytes` receives the
        number of new bytes, including those of the earlier part; negative when bytes are discarded. Raises
        ArtifactError.
        """
        ...
