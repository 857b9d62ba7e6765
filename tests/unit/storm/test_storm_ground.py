"""What a storm does about its own lab, so that its verdict is about Shoal."""

from pathlib import Path
from typing import Any

import pytest

from shoal.api import names
from shoal_dev.lab.api import ProcessStatus, Status
from tests.storm import ground as module
from tests.storm.ground import Ground


class LabWithoutScheduler:
    """Its scheduler ended itself, as the real one does over a cache that it does not believe."""

    def __init__(self) -> None:
        self.scheduler_runs = False

    def status(self) -> Status:
        runs, code = self.scheduler_runs, None if self.scheduler_runs else 1
        return Status(ready=True, processes=(ProcessStatus("kube-scheduler", 7, runs, code, False, 0.0, None),))

    def start(self, process: str) -> None:
        assert process == "kube-scheduler"
        self.scheduler_runs = True


class GroundOfOneGateway(Ground):
    """A gateway and a ledger that are bound once there is a scheduler."""

    def __init__(self, lab: LabWithoutScheduler, folder: Path) -> None:
        self.lab = lab  # pyright: ignore[reportAttributeAccessIssue]
        self.folder = folder

    def wanted(self, component: str) -> int:
        return 1

    def pods(self, component: str) -> list[str]:
        assert component in (names.COMPONENT_GATEWAY, names.COMPONENT_LEDGER)
        return [f"shoal-{component}-0"] if self.lab.scheduler_runs else []  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def _spools(self) -> list[Path]:
        return []


def test_a_scheduler_that_ends_in_the_last_seconds_is_started_for_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else gateways and ledger stay Pending until the wait is over, and the engines' last counters are not in the books.
    monkeypatch.setattr(module, "_HEARD_SECONDS", 0.0)
    monkeypatch.setattr(module, "_BACKOFF_SECONDS", 1.0)
    lab, said = LabWithoutScheduler(), list[str]()
    GroundOfOneGateway(lab, tmp_path).settle(said.append)
    assert lab.scheduler_runs
    assert said == ["kube-scheduler ended by itself, and is started again"]


class GroundAfterAnOutage(Ground):
    """Its second gateway is new and ready; the cluster's controllers have not seen that yet."""

    def __init__(self) -> None:
        self.reached = {"10.244.1.2", "10.244.2.2"}

    def get(self, *args: str) -> list[dict[str, Any]]:
        if args[0] == "endpointslices":
            return [{"endpoints": [{"addresses": [ip], "conditions": {"ready": True}} for ip in sorted(self.reached)]}]
        ready = [{"type": "Ready", "status": "True"}]
        return [
            {"metadata": {"name": name}, "status": {"conditions": ready, "podIP": ip}}
            for name, ip in (("shoal-gateway-0", "10.244.1.2"), ("shoal-gateway-1", "10.244.2.3"))
        ]


def test_a_gateway_that_gets_no_requests_yet_does_not_count_as_back() -> None:
    # Else the only one that serves is killed, and nobody can be reached for minutes.
    ground = GroundAfterAnOutage()
    assert len(ground.pods(names.COMPONENT_GATEWAY)) == 2
    assert ground.serving(names.COMPONENT_GATEWAY) == ["shoal-gateway-0"]
    ground.reached.add("10.244.2.3")
    assert ground.serving(names.COMPONENT_GATEWAY) == ["shoal-gateway-0", "shoal-gateway-1"]
