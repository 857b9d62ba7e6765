"""Faults injected into a running cluster, and what is said of each: its layer, its cause, and the next step."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.core.layers.refusals import OF_MODELS
from tests.faults.lab import clients, installation, objects, rows
from tests.faults.lab.clients import RefusedInLab
from tests.faults.lab.conftest import WITHIN, BrokenFleet, apply
from tests.faults.lab.injections import Undo
from tests.faults.lab.installation import LabChange
from tests.faults.lab.rows import LabFault
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(900)]


@dataclass
class Injected:
    """The lab with its faults, and how each of them is undone."""

    fleet: BrokenFleet
    undos: dict[str, Undo] = field(default_factory=dict[str, Undo])
    """By the fault's name."""
    failed: dict[str, Exception] = field(default_factory=dict[str, Exception])
    """Faults that could not be injected: the others are tested all the same."""

    def make(self, fault: LabFault) -> None:
        if fault.injected is not None:
            try:
                self.undos[fault.name] = fault.injected(self.fleet)
            except Exception as error:
                self.failed[fault.name] = error

    def require(self, fault: LabFault) -> None:
        """Raises what kept a fault from being injected."""
        if fault.name in self.failed:
            raise self.failed[fault.name]


def params(request: pytest.FixtureRequest) -> list[LabFault]:
    """Rows of the tests that are to run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    found: list[LabFault] = [call.params["fault"] for call in calls if call is not None and "fault" in call.params]
    return list({fault.name: fault for fault in found}.values())


@pytest.fixture(scope="module")
def injected(request: pytest.FixtureRequest, broken_fleet: BrokenFleet) -> Injected:
    """All faults at once, each on objects of its own: those of what must serve once it does."""
    fleet = broken_fleet
    # Requests and some tenants name this Model and this one that does not start.
    apply(fleet, [objects.model("base"), *clients.TENANTS])
    wanted = params(request)
    # What must serve starts before what ends again and again.
    apply(fleet, [each for fault in wanted if fault.serves for each in fault.objects])
    for fault in wanted:
        if fault.serves:
            name = fault.subject.partition("/")[2]
            until(
                lambda name=name, fault=fault: fleet.condition(name, "Ready", fault.space).get("status") == "True",
                WITHIN,
            )
    # A broken node that must not serve before is broken before anything starts there.
    found = Injected(fleet)
    early = [fault for fault in wanted if fault.before]
    for fault in early:
        found.make(fault)
    apply(fleet, [each for fault in wanted for each in fault.objects])
    for fault in wanted:
        if fault not in early:
            found.make(fault)
    return found


def first(found: dict[str, Any]) -> tuple[str, str]:
    causes = found.get("causes") or [{"layer": "", "reason": ""}]
    return causes[0]["layer"], causes[0]["reason"]


@pytest.mark.parametrize("fault", rows.ROWS, ids=lambda fault: fault.name)
def test_why_names_layer_cause_and_next_step_first(injected: Injected, fault: LabFault) -> None:
    injected.require(fault)
    found: dict[str, Any] = {}

    def told() -> bool:
        nonlocal found
        found = injected.fleet.why(fault)
        said = fault.explains in json.dumps(found.get("causes", [{}])[:1])
        return first(found) == (fault.layer, fault.reason) and said

    until(told, WITHIN, lambda: json.dumps(found, indent=1, default=str)[:4000])
    cause = found["causes"][0]
    assert found["state"] == fault.state
    assert fault.do in cause["do"]
    assert cause["evidence"]
    assert not fault.explains or any(fault.explains in line for line in cause["explains"])
    assert not fault.tried or any(fault.tried in line for line in cause["tried"])


@pytest.mark.parametrize("refused", clients.REQUESTS, ids=lambda refused: refused.name)
def test_a_refused_request_is_explained_by_the_id_of_its_answer(injected: Injected, refused: RefusedInLab) -> None:
    base = f"http://127.0.0.1:{injected.fleet.lab.forward_port()}"
    seen: list[tuple[str, str] | None] = []

    def told() -> bool:
        seen.append(clients.refusal(base, refused))
        return (seen[-1] or ("", ""))[0] == refused.code

    until(told, 120, lambda: seen[-3:])
    assert seen[-1] is not None
    found = injected.fleet.shoal("why", f"request/{seen[-1][1]}")
    *upstream, cause = found["causes"]
    assert (cause["layer"], cause["reason"]) == (refused.layer, refused.code)
    assert [each["state"] for each in upstream[:1]] == (["fault"] if refused.code in OF_MODELS else [])
    assert refused.do in cause["do"]
    assert cause["evidence"]


HEALED = [fault for fault in rows.ROWS if fault.heals]


@pytest.mark.parametrize("fault", HEALED, ids=lambda fault: fault.name)
def test_what_is_repaired_is_no_cause_any_more(injected: Injected, fault: LabFault) -> None:
    injected.require(fault)
    injected.undos[fault.name]()
    found: dict[str, Any] = {}

    def gone() -> bool:
        nonlocal found
        found = injected.fleet.why(fault)
        return fault.reason not in {c["reason"] for c in found.get("causes", ()) if c["state"] == "fault"}

    until(gone, WITHIN, lambda: json.dumps(found, indent=1, default=str)[:4000])


@pytest.mark.parametrize("change", installation.INSTALLATION, ids=lambda change: change.name)
def test_doctor_finds_what_is_wrong_with_an_installation(injected: Injected, change: LabChange) -> None:
    fleet = injected.fleet
    results: list[dict[str, Any]] = []

    def told(expected: bool) -> bool:
        nonlocal results
        results = [r for r in fleet.doctor() if r["reason"] == change.reason and change.message in r["message"]]
        return bool(results) == expected

    undo = change.make(fleet)
    try:
        until(lambda: told(True), 120, fleet.doctor)
        assert results[0]["layer"] == change.layer
        assert change.do in results[0]["do"]
        if change.of_models is not None:
            base = LabFault("", "model/base", "", "")
            until(lambda: first(fleet.why(base)) == (change.layer, change.of_models), 60, lambda: fleet.why(base))
    finally:
        undo()
    until(lambda: told(False), 120, lambda: results)


def test_a_scheduler_and_a_controller_manager_that_are_away(injected: Injected) -> None:
    """Last: nothing else is made meanwhile. A scheduler is missed after a minute, the controllers after two."""
    fleet, found = injected.fleet, dict[str, Any]()
    of = {name: LabFault("", f"model/{name}", "", "") for name in ("unscheduled", "unmade")}

    def told(name: str, reason: str, do: str) -> bool:
        found[name] = fleet.why(of[name])
        return first(found[name]) == ("L2", reason) and do in found[name]["causes"][0]["do"]

    fleet.lab.kill("kube-scheduler")
    try:
        apply(fleet, [objects.model("unscheduled")])
        until(lambda: bool(fleet.pods(objects.SPACE, "shoal.dev/model=unscheduled")), 60)
        fleet.lab.kill("kube-controller-manager")
        try:
            apply(fleet, [objects.model("unmade")])
            until(lambda: told("unscheduled", "SchedulerAway", "kube-scheduler"), 180, lambda: found)
            until(lambda: told("unmade", "PodsNotCreated", "kube-controller-manager"), 240, lambda: found)
        finally:
            fleet.lab.start("kube-controller-manager")
    finally:
        fleet.lab.start("kube-scheduler")
