"""What the gateway may hold at one time, from the memory that its container has.

A share each for request bodies, for answers that are not streams, and for what clients have not sent to its end; the
rest is for decoding a body, for streams, and for the process itself. Every share can be set instead.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.core.jsonbounds import JsonBounds
from shoal.gateway.settings import GatewaySettings

MIB: Final = 1024 * 1024
_CGROUPS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ASSUMED: Final = 1024 * MIB
"""Where the container has no bound: the chart's own."""
_NO_BOUND: Final = 1 << 60
"""An older kernel's way to say that there is none."""
_LEAST: Final = 16 * MIB


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Bytes, but for connections."""

    bodies: int
    """Request bodies, over all requests."""
    bodies_of_tenant: int
    """The same of one tenant: another one's always find room."""
    answers: int
    """Answers that are not streams, over all requests."""
    answer: int
    """One of them."""
    heads: int
    """Heads of requests that have not come to their end, over all connections."""
    connections: int


def container_limit(files: tuple[Path, ...] = _CGROUPS) -> int | None:
    """Bytes that this process' container may have; None: there is no bound, or it is not known."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_BOUND:
            return int(text)
    return None


def memory_bounds(settings: GatewaySettings, limit: int | None) -> MemoryBounds:
    """`limit`: of the container."""
    memory = limit or _ASSUMED
    bodies = settings.max_held_body_bytes or max(_LEAST, memory // 4)
    answers = settings.max_held_answer_bytes or max(_LEAST, memory // 4)
    return MemoryBounds(
        bodies=bodies,
        bodies_of_tenant=max(bodies // 2, min(bodies, settings.max_body_bytes)),
        answers=answers,
        answer=min(settings.max_answer_bytes or 256 * MIB, max(1, answers // 2)),
        heads=max(MIB, memory // 32),
        connections=settings.max_connections or max(256, min(16384, memory // (64 * 1024))),
    )


def json_bounds(settings: GatewaySettings) -> JsonBounds:
    """Of one request's body."""
    return JsonBounds(
        values=settings.max_body_values,
        containers=settings.max_body_containers,
        strings=settings.max_body_strings,
        depth=settings.max_body_depth,
    )
