"""Labs for tests: a real cluster with nodes, removed whatever happens.

Skipped only where it cannot be: without root, or without the lab's binaries and without Go to build them.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from typing import Any

import orjson
import pytest

from shoal_dev.lab import api, binaries, fleet

SMALL_FLEET = {
    "nodes": [
        {"name": "cpu-1"},
        {"name": "l4-{n}", "count": 2, "gpus": 2, "gpuProduct": "NVIDIA-L4", "gpuMemoryMiB": 23034},
    ]
}


def why_no_lab() -> str | None:
    """The reason to skip; None where a lab can be made."""
    if os.geteuid() != 0:
        return "the lab needs root"
    if binaries.find() is None and shutil.which("go") is None:
        return "no lab binaries (`shoal lab binaries` builds them) and no Go"
    return None


def unique_name() -> str:
    return f"test-{secrets.token_hex(4)}"


def make_lab(data: dict[str, Any] | None = None, **options: Any) -> api.Lab:
    """A lab of a unique name with the small fleet, or the given one; the caller ends it."""
    if reason := why_no_lab():
        pytest.skip(reason)
    return api.Lab.up(unique_name(), fleet_data=fleet.FleetFile.model_validate(data or SMALL_FLEET), **options)


@pytest.fixture(scope="session")
def lab() -> Generator[api.Lab]:
    """One lab for the whole session: tests that share it keep to namespaces of their own."""
    made = make_lab(faults=True)
    try:
        yield made
    finally:
        made.down()


@pytest.fixture
def namespace(lab: api.Lab) -> Generator[str]:
    """A fresh namespace in the shared lab, deleted without waiting."""
    name = f"t-{secrets.token_hex(4)}"
    lab.kubectl("create", "namespace", name)
    # Pods are refused until the controllers have made it.
    eventually(lambda: lab.kubectl("get", "serviceaccount", "default", "-n", name), "the default ServiceAccount")
    try:
        yield name
    finally:
        lab.kubectl("delete", "namespace", name, "--wait=false")


def apply(lab: api.Lab, *objects: dict[str, Any]) -> None:
    """kubectl apply of objects, as people do it."""
    text = "\n---\n".join(orjson.dumps(item).decode() for item in objects)
    lab.kubectl("apply", "-f", "-", stdin=text)


def get(lab: api.Lab, *arguments: str) -> dict[str, Any]:
    return orjson.loads(lab.kubectl("get", *arguments, "-o", "json"))


def eventually(probe: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    """The first true value of `probe`; LabErrors on the way count as "not yet"."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = probe()
            if last:
                return last
        except api.LabError as error:
            last = error
        time.sleep(0.2)
    pytest.fail(f"{what}: not within {seconds:.0f} s; last: {last}")
