"""Faults injected into a running cluster, and what is said of each: its layer, its cause, and the next step."""

import json
from typing import Any

import pytest

from tests.faults.lab import clients, installation, rows
from tests.faults.lab.clients import RefusedInLab
from tests.faults.lab.conftest import WITHIN, BrokenFleet, apply
from tests.faults.lab.installation import LabChange
from tests.faults.lab.rows import LabFault
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(900)]


def break_node(fleet: BrokenFleet, name: str) -> None:
    node = f"{name}-1"
    match name:
        case "silent":
            fleet.lab.kill_node(node)
        case "xid" | "both":
            fleet.node_condition(node, "XIDErrors", "True", "XidError", "Xid 79: GPU has fallen off the bus")
        case "ecc":
            fleet.node_condition(node, "GpuEccErrors", "True", "DoubleBitError", "GPU 0 has double bit errors")
        case "link":
            fleet.node_condition(node, "IBLinkFlapping", "True", "IBLinkFlapping", "mlx5_2")
        case "pressure":
            fleet.node_condition(node, "DiskPressure", "True", "KubeletHasDiskPressure", "kubelet has disk pressure")
        case "unplugged":
            fleet.lab.gpu_health(node, healthy=0)
        case "tainted":
            fleet.kubectl("taint", "node", node, "maintenance=true:NoExecute")
        case "cordoned":
            fleet.kubectl("cordon", node)
        case "shared":
            fleet.kubectl("label", "node", node, "--overwrite", "nvidia.com/gpu.replicas=4",
                          "nvidia.com/gpu.sharing-strategy=time-slicing")  # fmt: skip
        case _:
            raise ValueError(name)


REPAIRS: dict[str, tuple[str, ...]] = {
    "tainted": ("taint", "node", "tainted-1", "maintenance-"),
    "cordoned": ("uncordon", "cordoned-1"),
    "shared": ("label", "node", "shared-1", "--overwrite", "nvidia.com/gpu.replicas=1",
               "nvidia.com/gpu.sharing-strategy=none"),
}  # fmt: skip
"""By kubectl. The others are repaired below."""


def repair_node(fleet: BrokenFleet, name: str) -> None:
    node = f"{name}-1"
    match name:
        case "silent":
            fleet.lab.start_node(node)
        case "xid" | "both":
            fleet.node_condition(node, "XIDErrors", "False")
        case "ecc":
            fleet.node_condition(node, "GpuEccErrors", "False")
        case "link":
            fleet.node_condition(node, "IBLinkFlapping", "False")
        case "pressure":
            fleet.node_condition(node, "DiskPressure", "False")
        case "unplugged":
            fleet.lab.gpu_health(node, healthy=2)
        case _:
            fleet.kubectl(*REPAIRS[name])


def params(request: pytest.FixtureRequest) -> list[LabFault]:
    """Rows of the tests that are to run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    found: list[LabFault] = [call.params["fault"] for call in calls if call is not None and "fault" in call.params]
    return list({fault.name: fault for fault in found}.values())


@pytest.fixture(scope="module")
def injected(request: pytest.FixtureRequest, broken_fleet: BrokenFleet) -> BrokenFleet:
    """All faults at once, each on objects of its own: those of nodes once their Models serve."""
    fleet = broken_fleet
    # Requests and some tenants name this Model and this one that does not start.
    apply(fleet, [rows.model("base"), *clients.TENANTS])
    wanted = params(request)
    # What must serve starts before what ends again and again.
    apply(fleet, [each for fault in wanted if fault.serves for each in fault.objects])
    for fault in wanted:
        if fault.serves:
            name = fault.subject.partition("/")[2]
            until(lambda name=name: fleet.condition(name, "Ready", rows.SPACE).get("status") == "True", WITHIN)
    apply(fleet, [each for fault in wanted for each in fault.objects])
    for fault in wanted:
        if fault.broken is not None:
            break_node(fleet, fault.broken)
    return fleet


def first(found: dict[str, Any]) -> tuple[str, str]:
    causes = found.get("causes") or [{"layer": "", "reason": ""}]
    return causes[0]["layer"], causes[0]["reason"]


@pytest.mark.parametrize("fault", rows.ROWS, ids=lambda fault: fault.name)
def test_why_names_layer_cause_and_next_step_first(injected: BrokenFleet, fault: LabFault) -> None:
    found: dict[str, Any] = {}

    def told() -> bool:
        nonlocal found
        found = injected.why(fault)
        said = fault.explains in json.dumps(found.get("causes", [{}])[:1])
        return first(found) == (fault.layer, fault.reason) and said

    until(told, WITHIN, lambda: json.dumps(found, indent=1, default=str)[:4000])
    cause = found["causes"][0]
    assert found["state"] == fault.state
    assert fault.do in cause["do"]
    assert cause["evidence"]
    assert not fault.explains or any(fault.explains in line for line in cause["explains"])


@pytest.mark.parametrize("refused", clients.REQUESTS, ids=lambda refused: refused.name)
def test_a_refused_request_is_explained_by_the_id_of_its_answer(injected: BrokenFleet, refused: RefusedInLab) -> None:
    base = f"http://127.0.0.1:{injected.lab.forward_port()}"
    seen: list[tuple[str, str] | None] = []

    def told() -> bool:
        seen.append(clients.refusal(base, refused))
        return (seen[-1] or ("", ""))[0] == refused.code

    until(told, 120, lambda: seen[-3:])
    assert seen[-1] is not None
    found = injected.shoal("why", f"request/{seen[-1][1]}")
    (cause,) = found["causes"]
    assert (cause["layer"], cause["reason"]) == (refused.layer, refused.code)
    assert refused.do in cause["do"]
    assert cause["evidence"]


REPAIRED = [fault for fault in rows.NODES if fault.serves]


@pytest.mark.parametrize("fault", REPAIRED, ids=lambda fault: fault.name)
def test_a_node_that_is_repaired_is_no_cause_any_more(injected: BrokenFleet, fault: LabFault) -> None:
    assert fault.broken is not None
    repair_node(injected, fault.broken)
    found: dict[str, Any] = {}

    def gone() -> bool:
        nonlocal found
        found = injected.why(fault)
        return fault.reason not in {c["reason"] for c in found.get("causes", ()) if c["state"] == "fault"}

    until(gone, WITHIN, lambda: json.dumps(found, indent=1, default=str)[:4000])


@pytest.mark.parametrize("change", installation.INSTALLATION, ids=lambda change: change.name)
def test_doctor_finds_what_is_wrong_with_an_installation(injected: BrokenFleet, change: LabChange) -> None:
    fleet = injected
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
        if change.name in ("no gateways", "no operator"):
            base = LabFault("", "model/base", change.layer, "", "")
            reason = "GatewaysNotReady" if change.layer == "L5" else change.reason
            until(lambda: first(fleet.why(base)) == (change.layer, reason), 60, lambda: fleet.why(base))
    finally:
        undo()
    until(lambda: told(False), 120, lambda: results)
