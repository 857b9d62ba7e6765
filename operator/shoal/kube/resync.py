"""What every copy of a kind needs, whichever way it is watched: one complete list, and the delays between attempts.

`reflector.py` watches itself; `watch.py` watches through kopf. Both lists run here.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.resources import Resource

FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 15.0
"""Seconds."""


def object_key(obj: JsonObject) -> str:
    """`namespace/name`, or `name` for a cluster-scoped object."""
    metadata = obj["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else metadata["name"]


@dataclass(frozen=True, slots=True)
class CompleteList:
    """The keys of a complete list. A key of the copy that is not among them was deleted, also if no watch reported
    it."""

    keys: frozenset[str]
    version: str
    """Of the collection: where a watch can start."""


async def list_all(
    client: KubeClient,
    resource: Resource,
    receive: Callable[[Sequence[JsonObject]], None],
    *,
    namespace: str | None,
    label_selector: str | None,
    metadata_only: bool = False,
) -> CompleteList:
    """Lists a kind in one namespace (None: in all) to its end, and hands on page by page. Raises KubeError: what was
    received stays good, and nothing is known of deletions."""
    keys: set[str] = set()
    version = ""
    pages = client.list_pages(resource, namespace=namespace, label_selector=label_selector, metadata_only=metadata_only)
    async for page in pages:
        keys.update(map(object_key, page.items))
        version = page.resource_version
        receive(page.items)
    return CompleteList(frozenset(keys), version)


class Backoff:
    """Jittered delays that double up to a limit. With the API server away, a copy waits and never gives up."""

    def __init__(self) -> None:
        self._next = FIRST_BACKOFF

    def reset(self, seconds: float | None = None) -> None:
        """The next delay is the first one again, or so long."""
        self._next = FIRST_BACKOFF if seconds is None else seconds

    def delay(self) -> float:
        """Seconds to wait before the next attempt."""
        delay, self._next = self._next, min(self._next * 2, LONGEST_BACKOFF)
        return delay * random.uniform(0.5, 1.0)  # noqa: S311 - jitter


class EndlessBackoff:
    """Each iteration over it starts with the first delay."""

    def __iter__(self) -> Iterator[float]:
        backoff = Backoff()
        while True:
            yield backoff.delay()
