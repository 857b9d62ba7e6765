"""`python -m tests.kubelet`: the pod life-cycle suite, drains and a DRA driver on one real kubelet with containerd and
Shoal's own image.

Makes a lab with process nodes and a node with a real kubelet, runs the suite on the latter, removes the lab. Needs
root, Debian's or Ubuntu's apt-get for what is missing (runc, and for the image buildah and debootstrap), and about 10
CPU minutes for a first build of kubelet and containerd. Nothing is skipped in silence: a skipped test is a failure.

--keep leaves the lab up; --image FILE takes an image archive (docker or OCI) instead of building one; further arguments
go to pytest.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

from shoal_dev.lab import api
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.fleet import FleetFile
from tests.kubelet import image

NODE: Final = "real-1"
SUITES: Final = ("tests/lab/test_pod_lifecycle.py", "tests/e2e/test_drain.py", "tests/e2e/test_dra_driver.py")
SPARE: Final = "spare-1"
"""A process node that takes pods only while the real one is drained: it is cordoned otherwise."""
_GPUS: Final = {"gpus": 8, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068}
"""Of the class that the examples' Models name."""
_NODES: Final = ({"name": "cpu-1"}, {"name": NODE, "realKubelet": True, **_GPUS}, {"name": SPARE, **_GPUS})
_ROOT: Final = Path(__file__).resolve().parents[2]


class NothingSkipped:
    """Here each test must run: a skip would be a gap in what is said to be proved."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kubelet", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the lab up")
    parser.add_argument("--image", type=Path, help="an archive of Shoal's image, instead of building it")
    parser.add_argument("--name", default=f"kubelet-{os.getpid()}", help="of the lab")
    options, rest = parser.parse_known_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell in the background lets SIGINT be ignored
        signal.signal(number, _interrupt)
    try:
        return run(options.name, options.image, rest, keep=options.keep)
    except LabError as error:
        say(f"tests.kubelet: {error}")
        return 2
    except KeyboardInterrupt:
        say("tests.kubelet: interrupted")
        return 130


def run(name: str, archive: Path | None, arguments: list[str], *, keep: bool) -> int:
    """Raises LabError."""
    api.require_root()
    found = archive or image.build(say)
    fleet = FleetFile.model_validate({"nodes": _NODES, "archives": [str(found.resolve())]})
    try:
        lab = api.Lab.up(name, fleet_data=fleet, faults=True, announce=say)
        lab.kubectl("cordon", SPARE)
        say(lab.kubectl("get", "nodes", "-o", "wide").rstrip())
        os.environ |= {
            "SHOAL_LIFECYCLE_LAB": name,
            "SHOAL_E2E_LAB": name,
            "SHOAL_E2E_STREAM_TOKENS": "700",
            "SHOAL_E2E_SPARE_NODE": SPARE,
            "SHOAL_LIFECYCLE_NODE": NODE,
            "SHOAL_LIFECYCLE_IMAGE": image.NAME,
            # Containers of a real runtime take seconds to start where many start at once on few cores.
            "SHOAL_LIFECYCLE_PARALLEL": "6",
            "SHOAL_LIFECYCLE_TIMEOUT": "1200",
        }
        watcher = NothingSkipped()
        suites = [str(_ROOT / suite) for suite in SUITES]
        code = pytest.main(["-m", "lab", "-rs", *suites, *arguments], plugins=[watcher])
        if watcher.skipped:
            say("tests.kubelet: skipped, and so not shown: " + ", ".join(watcher.skipped))
            return int(code) or 1
        return int(code)
    finally:
        if keep:
            say(f"the lab stays: `shoal lab down --name {name}` removes it")
        else:
            say("removing the lab")
            api.down(name)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
