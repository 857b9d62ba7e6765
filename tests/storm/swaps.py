"""Adapters in a storm: three on the steady Model's replicas, more than its slots, one of which changes all the time.

Which weights answered is seen in every answer: the simulator's adapters sign what they say, so an answer by the base,
by another adapter or by a mixture has other words than its own, and counts as lost.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final

import click

from shoal.api.meta import GROUP
from shoal_dev.demo import steps
from shoal_dev.lab.errors import LabError

SWAPPED: Final = "storm-support"
ADAPTERS: Final[dict[str, tuple[str, ...]]] = {
    SWAPPED: ("support-v1", "support-v2"),
    "storm-legal": ("legal",),
    "storm-poet": ("poet",),
}
"""Name of the adapter -> names of the folders of its revisions, in the image."""
STILL: Final = "storm-legal"
"""One that does not change."""
SECONDS: Final = 6.0
"""From one change of the source to the next: time enough to load a revision, not to let things come to rest."""
CACHED: Final = 3
"""Adapters that a replica may hold."""
_FOLDER: Final = "/opt/shoal/adapters"


def objects(namespace: str, model: str, tenant: str) -> list[dict[str, Any]]:
    """The pool and its adapters. Two adapters at a time in the engine, so that the third one has to wait or evict."""
    pool = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "LoRAPool",
        "metadata": {"name": model, "namespace": namespace},
        "spec": {"modelRef": {"name": model}, "maxRank": 16, "slotsPerReplica": 3, "cachedPerReplica": CACHED},
    }
    adapters = [
        {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "LoRAAdapter",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "poolRef": {"name": model},
                "source": {"uri": source(folders[0])},
                "residency": "Warm" if name == SWAPPED else "OnDemand",
                "tenants": [tenant],
            },
        }
        for name, folders in ADAPTERS.items()
    ]
    return [pool, *adapters]


def source(folder: str) -> str:
    return f"file://{_FOLDER}/{folder}"


def folders() -> dict[str, tuple[Path, ...]]:
    """Name of the adapter -> where its revisions' files are on this machine."""
    root = steps.ROOT / "images" / "shoal" / "rootfs" / _FOLDER.lstrip("/")
    return {name: tuple(root / folder for folder in revisions) for name, revisions in ADAPTERS.items()}


@contextlib.contextmanager
def swapping(kubectl: Callable[..., str], namespace: str, say: Callable[[str], None]) -> Generator[None]:
    """Gives one adapter another source every few seconds, there and back, while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=_swap, args=(kubectl, namespace, say, stop), name="swaps")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def _swap(kubectl: Callable[..., str], namespace: str, say: Callable[[str], None], stop: threading.Event) -> None:
    revisions = ADAPTERS[SWAPPED]
    number = failed = 0
    while not stop.wait(SECONDS):
        number += 1
        patch = json.dumps({"spec": {"source": {"uri": source(revisions[number % len(revisions)])}}})
        try:
            kubectl("patch", f"loraadapters.{GROUP}", SWAPPED, "-n", namespace, "--type=merge", "-p", patch)
        except (LabError, click.ClickException):
            failed += 1  # the API server is away: that is part of the storm
    say(f"{number - failed} times another revision of {SWAPPED}")
