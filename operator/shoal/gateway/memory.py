"""How much the gateway may keep in memory, derived from its container's limit.

Request bodies, non-streaming answers and unfinished request heads get a share each. The rest is for decoding a body,
for streams and for the process itself. Every share can be set explicitly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.core.jsonbounds import JsonBounds
from shoal.gateway.settings import GatewaySettings

MIB: Final = 1024 * 1024
_CGROUPS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ASSUMED: Final = 1024 * MIB
"""Used where the container has no limit: the chart's default."""
_NO_BOUND: Final = 1 << 60
"""An older kernel shows a number above this where there is no limit."""
_LEAST: Final = 32 * MIB


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """In bytes, except `connections`."""

    bodies: int
    """Request bodies, over all requests."""
    bodies_of_tenant: int
    """Request bodies of one tenant, so that others always have a share."""
    body: int
    """One request body that is no form."""
    form: int
    """One form."""
    answers: int
    """Answers that are kept whole (no streams, and streams of /v1/responses), over all requests."""
    answer: int
    """One non-streaming answer."""
    heads: int
    """Unfinished request heads, over all connections."""
    connections: int


def container_limit(files: tuple[Path, ...] = _CGROUPS) -> int | None:
    """Memory limit of this process's container in bytes; None: no limit, or unknown."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_BOUND:
            return int(text)
    return None


def memory_bounds(settings: GatewaySettings, limit: int | None) -> MemoryBounds:
    """`limit` is the container's memory limit."""
    memory = limit or _ASSUMED
    bodies = settings.max_held_body_bytes or max(_LEAST, memory // 4)
    answers = settings.max_held_answer_bytes or max(_LEAST, memory // 4)
    # What could never be held is refused as too large, and not with a 503 that says to try again.
    form = min(bodies, max(settings.max_form_bytes, settings.max_body_bytes))
    return MemoryBounds(
        bodies=bodies,
        bodies_of_tenant=max(bodies // 2, form),
        body=min(bodies, settings.max_body_bytes),
        form=form,
        answers=answers,
        answer=min(settings.max_answer_bytes or 256 * MIB, max(1, answers // 2)),
        heads=max(MIB, memory // 32),
        connections=settings.max_connections or max(256, min(16384, memory // (64 * 1024))),
    )


def json_bounds(settings: GatewaySettings) -> JsonBounds:
    """Bounds of one request's JSON body."""
    return JsonBounds(
        values=settings.max_body_values,
        containers=settings.max_body_containers,
        strings=settings.max_body_strings,
        depth=settings.max_body_depth,
    )
