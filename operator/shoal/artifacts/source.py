"""What every kind of source can do, and how patient it is."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.artifacts.errors import POD_ADVICE
from shoal.artifacts.manifest import File, Manifest
from shoal.core.network import PUBLIC, SourceNetwork


@dataclass(frozen=True, slots=True)
class Settings:
    """How sources are spoken to. Proxies come from the environment, further CAs from SSL_CERT_FILE."""

    hub_endpoint: str | None = None
    """A mirror of the hub; None: the hub itself."""
    network: SourceNetwork = PUBLIC
    """Which hosts may be asked. The hub's mirror may lie anywhere: the platform names it."""
    connect_seconds: float = 15.0
    stall_seconds: float = 60.0
    """Longest silence of a connection."""
    slow_bytes: int = 64 << 10
    """What a connection brings in that time at least; its share of that, when it breaks off before."""
    attempts: int = 3
    """Tries in a row that bring less than `slow_bytes` asks, before the source counts as unreachable."""
    pause_seconds: float = 1.0
    """Wait before the second try; doubles with each."""
    connections: int = 8
    """Transfers at the same time, over all files of a source."""
    segment_bytes: int = 32 << 20
    """Files larger than this are read in several ranges at once."""
    disk_advice: str = POD_ADVICE
    """What to do when the disk is full."""


class ArtifactSource(Protocol):
    """One address. Use it as an async context manager: it may hold connections."""

    settings: Settings

    async def __aenter__(self) -> "ArtifactSource": ...
    async def __aexit__(self, *error: object) -> None: ...

    async def manifest(self) -> Manifest:
        """Asks what is there now; a moving branch is resolved to its commit. Raises ArtifactError."""
        ...

    async def authorise(self, manifest: Manifest) -> None:
        """Proves that these credentials may read the content, not only the list: reads one byte of the largest file.

        Raises ArtifactError.
        """
        ...

    async def read(self, file: File, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; less only at the end of the file. Raises ArtifactError."""
        ...

    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end`, in pieces, in one try. Raises Interrupted and ArtifactError."""
        ...

    async def download(self, file: File, path: Path, on_bytes: Callable[[int], None]) -> None:
        """Brings the file to `path`, whole, verified and on disk.

        What an earlier download left in `<path>.part` is kept where the validator still holds. `on_bytes` hears how
        many bytes came; of what was there before, too, and a negative number when something is thrown away.
        Raises ArtifactError.
        """
        ...
