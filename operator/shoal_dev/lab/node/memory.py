"""Memory limits of containers, for those that the pod's annotation `lab.shoal.dev/enforce-memory` names.

A process node has no cgroups: it measures the memory of all processes of a container and kills the container above its
limit, which its status then reports as a kubelet does (exit code 137, OOMKilled).
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

from shoal_dev.lab.node import fields, quantity

ANNOTATION: Final = "lab.shoal.dev/enforce-memory"
"""Names of containers, with commas between them."""
SECONDS: Final = 0.2
"""Between two measurements."""


def limit_of(metadata: dict[str, Any], container: dict[str, Any]) -> int | None:
    """Bytes that a container may use; None: nothing is enforced."""
    if container["name"] not in str(fields.mapping(metadata, "annotations").get(ANNOTATION) or "").split(","):
        return None
    limit = fields.mapping(fields.mapping(container, "resources"), "limits").get("memory")
    return None if limit is None else quantity.ceiling(str(limit))


async def enforce(pid: int, limit: int, kill: Callable[[], None]) -> None:
    """Calls `kill` once when the container whose first process this is uses more. Returns then, or when it is gone."""
    while (used := await asyncio.to_thread(usage, pid)) is not None:
        if used > limit:
            kill()
            return
        await asyncio.sleep(SECONDS)


def usage(pid: int) -> int | None:
    """Bytes in memory of all processes in the process namespace of `pid`; None: it has ended."""
    pages = 0
    found = processes(pid)
    for each in found:
        try:
            with open(f"/proc/{each}/statm", encoding="ascii") as file:
                pages += int(file.read().split()[1])
        except OSError:
            continue  # it has ended meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE") if found else None


def processes(pid: int) -> list[int]:
    """All processes in the process namespace of `pid`: a container's, if it is one of them. Empty: it has ended."""
    try:
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return []
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                found.append(int(name))
        except OSError:
            continue
    return found
