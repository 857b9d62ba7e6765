"""Memory limits of a process node's containers."""

import os
import subprocess
import sys
from typing import Any

from shoal_dev.lab.node import memory


def container(**limits: str) -> dict[str, Any]:
    return {"name": "engine", "resources": {"limits": limits}}


def annotated(names: str) -> dict[str, Any]:
    return {"annotations": {memory.ANNOTATION: names}}


def test_a_limit_holds_for_the_containers_that_the_pod_names() -> None:
    assert memory.limit_of(annotated("stage,engine"), container(memory="16Mi")) == 16 << 20
    assert memory.limit_of(annotated("stage"), container(memory="16Mi")) is None
    assert memory.limit_of({}, container(memory="16Mi")) is None
    assert memory.limit_of(annotated("engine"), container(cpu="1")) is None


async def test_a_container_above_its_limit_is_killed_once() -> None:
    killed: list[bool] = []
    await memory.enforce(os.getpid(), 1, lambda: killed.append(True))
    assert killed == [True]


async def test_a_container_that_has_ended_is_not_measured_any_more() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        assert memory.usage(ended.pid) is None
        await memory.enforce(ended.pid, 1, lambda: None)


def test_the_memory_of_a_container_is_that_of_all_its_processes() -> None:
    assert os.getpid() in memory.processes(os.getpid())
    assert (memory.usage(os.getpid()) or 0) > 1 << 20
