"""Which GPUs are taken out of use, for how long, and which never are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from shoal.core.devices.facts import Device, DeviceId
from shoal.core.devices.match import Matched
from shoal.core.facts import HeldDevice, Node, NodeCondition, Pod, Taint
from shoal.core.health import HealthMemory, HealthPlan, HealthSignal, HealthSnapshot, Quarantine, Unit, decide, signals
from shoal.core.health.decide import (
    CONFIRM_SECONDS,
    CORDONED,
    HOLD_SECONDS,
    OWN_WORD_SECONDS,
    PROBATION_SECONDS,
    Tested,
    holding,
)
from shoal.core.health.requests import MOST, CordonRequest, parse, write

START = datetime(2026, 11, 26, tzinfo=UTC)
SICK = "GPUUnhealthy"


def says(node: str, device: str = "", *, model: str | None = None, reason: str = SICK) -> HealthSignal:
    return HealthSignal(Unit(node, device), reason, f"{reason} there", model)


@dataclass
class Clock:
    """A class over time: each step passes what is there, and remembers what was decided."""

    usable: Mapping[str, int]
    devices: Mapping[str, frozenset[str]] | None = None
    hosts: frozenset[str] = frozenset()
    tainted: frozenset[str] = frozenset()
    capacity: Mapping[str, int] | None = None
    """Where it is more than what nodes offer."""
    at: datetime = START
    memory: HealthMemory | None = None
    quarantined: tuple[Quarantine, ...] = ()
    cordons: tuple[CordonRequest, ...] = ()
    uncordons: tuple[CordonRequest, ...] = ()
    plan: HealthPlan = field(default_factory=lambda: HealthPlan(()))
    writes: int = 0

    def step(self, seconds: float, *there: HealthSignal, tested: Mapping[Unit, Tested] | None = None) -> HealthPlan:
        self.at += timedelta(seconds=seconds)
        seen = HealthSnapshot(
            capacity=self.capacity or self.usable,
            usable=self.usable,
            nodes=frozenset(self.usable),
            devices=self.devices,
            quarantined=self.quarantined,
            signals=there,
            cordons=self.cordons,
            uncordons=self.uncordons,
            tested=tested or {},
            hosts=self.hosts,
            tainted=self.tainted,
        )
        self.plan, self.memory = decide(seen, self.memory, self.at)
        self.writes += self.plan.quarantined != self.quarantined
        self.quarantined = self.plan.quarantined
        return self.plan

    def last(self, seconds: float, *there: HealthSignal, each: float = 5) -> HealthPlan:
        """Steps for so long."""
        for _ in range(int(seconds // each)):
            self.step(each, *there)
        return self.plan

    def out(self) -> set[Unit]:
        return set(holding(self.quarantined))


def four(**more: int) -> Clock:
    return Clock({"a": 8, "b": 8, "c": 8, "d": 8} | more)


def test_a_signal_that_lasts_takes_the_node_out_and_a_short_one_does_not() -> None:
    clock = four()
    clock.step(0, says("a"))
    assert not clock.step(CONFIRM_SECONDS - 1, says("a")).quarantined
    [found] = clock.step(1, says("a")).quarantined
    assert (found.unit, found.reason, found.message, found.by) == (Unit("a"), SICK, f"{SICK} there", "Shoal")
    short = four()
    short.step(0, says("a"))
    short.step(8, says("a"))
    assert not short.last(3600).quarantined
    assert short.plan.recheck_seconds is None, "nothing is left that a later decision would see otherwise"


def test_a_signal_that_comes_and_goes_takes_it_out_once_and_is_written_seldom() -> None:
    clock = four()
    for _ in range(30):  # ten seconds a minute, for half an hour
        clock.last(10, says("a"))
        clock.last(50)
    assert clock.out() == {Unit("a")}
    assert clock.writes == 1, "a flapping signal is no flapping quarantine"


def test_it_is_released_only_after_the_signal_is_gone_for_a_while_and_a_test_was_passed() -> None:
    clock = four()
    clock.last(60, says("a"))
    clock.last(340)
    [found] = clock.quarantined
    assert found.until is not None
    assert found.state == "Quarantined"
    clock.last(HOLD_SECONDS)
    [found] = clock.quarantined
    assert found.state == "Probation", "replicas are placed there again, and nothing more"
    assert not clock.out()
    clock.last(6 * 3600, each=60)
    assert len(clock.quarantined) == 1, "without a test it is not released, however long it takes"
    plan = clock.step(5, tested={Unit("a"): "passed"})
    assert not plan.quarantined
    [(ended, why)] = plan.released
    assert (ended.unit, why) == (Unit("a"), "a replica there passed its test")


def on_probation(*units: str) -> Clock:
    clock = four(e=8, f=8, g=8, h=8)
    clock.last(60, *(says(unit) for unit in units))
    clock.last(340 + HOLD_SECONDS)
    assert [each.state for each in clock.quarantined].count("Probation") == 1
    return clock


def test_a_replica_that_answers_and_has_no_other_beside_it_ends_the_probation_by_time() -> None:
    clock = on_probation("a")
    [found] = clock.quarantined
    assert found.until is not None, "people see how long it takes"
    for _ in range(int(PROBATION_SECONDS // 60) - 7):
        clock.step(60, tested={Unit("a"): "answered"})
        assert clock.quarantined, "an hour, not at its first word"
    for _ in range(8):
        clock.step(60, tested={Unit("a"): "answered"})
    assert not clock.quarantined


def test_a_signal_or_a_verdict_counts_more_than_an_answer_and_time() -> None:
    clock = on_probation("a")
    clock.last(PROBATION_SECONDS + 60, each=60)
    clock.step(5, tested={Unit("a"): "failed"})
    assert (clock.quarantined[0].state, clock.quarantined[0].times) == ("Quarantined", 2)
    clock = on_probation("a")
    clock.last(PROBATION_SECONDS - 60, each=60)
    clock.last(10, says("a"))
    clock.step(60, says("a"), tested={Unit("a"): "answered"})
    assert clock.quarantined[0].state == "Quarantined"


def test_a_unit_without_a_replica_is_not_released_and_holds_no_other_up_for_ever() -> None:
    clock = on_probation("a", "b")
    assert [each.state for each in clock.quarantined] == ["Probation", "Quarantined"]
    clock.last(PROBATION_SECONDS + 120, each=60)
    assert [each.state for each in clock.quarantined] == ["Probation", "Probation"]
    clock.last(PROBATION_SECONDS + 120, each=60)
    assert len(clock.quarantined) == 2
    assert clock.plan.recheck_seconds is None, "nothing more happens by time alone"


def test_a_probation_that_an_operator_of_before_began_ends_too() -> None:
    clock = four()
    clock.quarantined = (Quarantine(Unit("a"), SICK, "", START, state="Probation"),)
    for _ in range(70):
        clock.step(60, tested={Unit("a"): "answered"})
    assert not clock.quarantined


@pytest.mark.parametrize("again", ["test", "signal"])
def test_a_unit_that_fails_on_probation_is_out_for_twice_as_long(again: str) -> None:
    clock = four()
    clock.last(60, says("a"))
    clock.last(340 + HOLD_SECONDS)
    assert clock.quarantined[0].state == "Probation"
    if again == "test":
        clock.step(5, tested={Unit("a"): "failed"})
    else:
        clock.last(30, says("a"))
    [found] = clock.quarantined
    assert (found.state, found.times) == ("Quarantined", 2)
    clock.last(340)
    clock.last(HOLD_SECONDS + 60)
    assert clock.quarantined[0].state == "Quarantined"
    clock.last(HOLD_SECONDS)
    assert clock.quarantined[0].state == "Probation"


@pytest.mark.parametrize("again", ["test", "signal"])
def test_one_that_fails_on_probation_goes_out_only_where_no_more_than_a_quarter_is_out(again: str) -> None:
    """A storm had three of eight GPUs out of use: two were taken, and one on probation was sick again."""
    clock = four()
    clock.last(60, says("a"))
    clock.last(340 + HOLD_SECONDS)
    clock.last(60, says("b"))
    assert clock.out() == {Unit("b")}
    if again == "test":
        plan = clock.step(5, says("b"), tested={Unit("a"): "failed"})
    else:
        plan = clock.last(60, says("a"), says("b"))
    assert [(each.signal.unit, each.why) for each in plan.withheld] == [
        (Unit("a"), "8 of 32 GPUs are out of use already, and more than 25 % may not be")
    ]
    if again == "test":
        said = plan.withheld[0].signal
        assert said.reason == "ReplicaAnswersDiffer"
        assert "failed its test" in said.message
        assert said.message.endswith(f"out of use before for {SICK}: {SICK} there")
    assert [(each.unit.node, each.state) for each in clock.quarantined] == [("a", "Probation"), ("b", "Quarantined")]
    clock.uncordons = (CordonRequest(Unit("b"), clock.at),)
    clock.step(5, says("a"), tested={Unit("a"): "failed"})
    assert clock.out() == {Unit("a")}
    assert clock.quarantined[0].times == 2


@pytest.mark.parametrize("again", ["test", "signal"])
def test_one_that_failed_on_probation_goes_out_as_soon_as_another_ones_time_is_over(again: str) -> None:
    """While it counted as on probation, no other probation began, so no place became free for an hour."""
    clock = four()
    clock.last(60, says("a"))
    clock.last(340 + HOLD_SECONDS - 30)
    clock.last(60, says("b"))
    assert [(each.unit.node, each.state) for each in clock.quarantined] == [("a", "Probation"), ("b", "Quarantined")]
    most = 0
    for _ in range(int((340 + HOLD_SECONDS) // 5) + 1):
        if again == "test":
            clock.step(5, tested={Unit("a"): "failed"} if clock.quarantined[0].state == "Probation" else {})
        else:
            clock.step(5, says("a"))
        most = max(most, len(clock.out()))
    assert [(each.unit.node, each.state, each.times) for each in clock.quarantined] == [
        ("a", "Quarantined", 2),
        ("b", "Probation", 1),
    ]
    assert most == 1, "never more than a quarter, also in the moment of the exchange"
    assert not clock.plan.withheld


def test_the_last_gpus_are_never_taken_and_that_is_said() -> None:
    clock = Clock({"a": 8})
    plan = clock.last(600, says("a"))
    assert not plan.quarantined
    [withheld] = plan.withheld
    assert (withheld.signal.unit, withheld.why) == (Unit("a"), "no GPU of the class would be left")
    two = Clock({"a": 8, "b": 8})
    two.last(600, says("a"), says("b"))
    assert two.out() == {Unit("a")}, "one of two may go, the second one stays"
    assert two.plan.withheld


def test_never_more_than_a_quarter_of_the_class_is_out_at_once() -> None:
    clock = Clock({f"n{i}": 8 for i in range(8)})
    everywhere = [says(f"n{i}") for i in range(8)]
    plan = clock.last(600, *everywhere)
    assert len(clock.out()) == 2
    assert len(plan.withheld) == 6
    assert "16 of 64 GPUs are out of use already" in plan.withheld[0].why


def test_the_share_is_of_all_gpus_also_of_those_with_a_taint_and_the_last_ones_are_of_those_that_work() -> None:
    nodes = [f"n{i}" for i in range(4)]
    clock = Clock(dict.fromkeys(nodes, 2), {n: frozenset({f"gpu.test/{n}/gpu-{i}" for i in (0, 1)}) for n in nodes})
    clock.capacity = dict(clock.usable)
    sick = [says(n, f"gpu.test/{n}/gpu-1") for n in nodes]
    clock.last(60, sick[0])
    # Its driver offers the device no more.
    clock.usable = {**clock.usable, "n0": 1}
    clock.last(60, *sick[:3])
    assert len(clock.out()) == 2, "two of eight"
    assert "2 of 8 GPUs are out of use already" in clock.plan.withheld[0].why
    # Of eight devices one is left.
    one = Clock({"n0": 1}, clock.devices)
    one.capacity = dict.fromkeys(nodes, 2)
    assert not one.last(60, says("n0", "gpu.test/n0/gpu-0")).quarantined
    assert one.plan.withheld[0].why == "no GPU of the class would be left"


def test_nodes_that_take_no_pods_do_not_count_as_what_is_left() -> None:
    clock = Clock({"a": 8, "b": 8})
    clock.usable = {"a": 8}
    seen = HealthSnapshot({"a": 8}, {"a": 8}, frozenset({"a", "b"}), None, signals=(says("a"),))
    _, memory = decide(seen, None, START)
    plan, _ = decide(seen, memory, START + timedelta(seconds=20))
    assert not plan.quarantined
    assert plan.withheld


def test_single_devices_count_as_one_gpu_each_and_a_node_covers_its_devices() -> None:
    names = frozenset(f"gpu.test/a/gpu-{i}" for i in range(8))
    clock = Clock({"a": 8}, {"a": names})
    clock.last(60, *(says("a", f"gpu.test/a/gpu-{i}") for i in range(4)))
    assert {unit.device[-1] for unit in clock.out()} == {"0", "1"}
    assert not clock.last(60, says("a", "gpu.test/a/gpu-99")).withheld, "that device is none of the class"


def test_what_replicas_of_one_model_say_is_believed_of_one_unit_at_most() -> None:
    clock = Clock({f"n{i}": 8 for i in range(40)})
    own = [says(f"n{i}", model="evil/model", reason="ReplicaSlow") for i in range(8)]
    plan = clock.last(600, *own)
    assert len(clock.out()) == 1
    assert plan.withheld[0].why == "another one is out of use on the word of replicas alone, and only one may be"
    clock.last(60, *own, says("n30"), says("n31"))
    assert len(clock.out()) == 3, "nodes, kubelets and drivers are believed beside it"


def test_a_quarantine_on_the_word_of_replicas_ends_later() -> None:
    clock = four()
    clock.last(60, says("a", model="chat/llama"))
    clock.last(340)
    [found] = clock.quarantined
    assert found.until is not None
    assert found.until - clock.at > timedelta(seconds=OWN_WORD_SECONDS - 400)


def test_a_restarted_operator_goes_on_with_what_the_status_says() -> None:
    clock = four()
    clock.last(60, says("a"))
    before = clock.quarantined
    clock.memory = None
    clock.step(1, says("a"))
    assert clock.quarantined == before
    clock.memory = None
    clock.step(3600)
    assert clock.out() == {Unit("a")}, "that nothing was said while no operator led is no release"
    assert clock.quarantined[0].until is not None


def test_a_clock_that_jumps_confirms_nothing_alone() -> None:
    clock = four()
    clock.step(0, says("a"))
    assert not clock.step(-3600, says("a")).quarantined
    assert not clock.step(5, says("a")).quarantined


def test_a_person_takes_a_unit_out_and_puts_it_back_whatever_signals_say() -> None:
    clock = Clock({"a": 8})
    clock.cordons = (CordonRequest(Unit("a"), START, "burn-in"),)
    [found] = clock.step(1).quarantined
    assert (found.by, found.reason, found.message) == ("Person", CORDONED, "burn-in")
    assert clock.last(86_400, each=600).quarantined, "a person's word has no bound and no test"
    clock.cordons, clock.uncordons = (), (CordonRequest(Unit("a"), clock.at),)
    assert not clock.step(1).quarantined
    sick = four()
    sick.last(60, says("a"))
    assert sick.out()
    sick.uncordons = (CordonRequest(Unit("a"), sick.at),)
    plan = sick.last(3600, says("a"))
    assert not plan.quarantined, "overruled"
    assert not plan.withheld
    assert sick.last(86_400, says("a"), each=30).quarantined, "for a day, and not for ever"


def test_the_status_has_room_for_everything_that_is_out_of_use() -> None:
    clock = Clock({f"n{i:03}": 1 for i in range(200)})
    clock.last(60, *(says(f"n{i:03}") for i in range(40)))
    assert len(clock.quarantined) == 40
    clock.cordons = tuple(CordonRequest(Unit(f"n{i:03}"), START) for i in range(100, 164))
    clock.step(5, *(says(f"n{i:03}") for i in range(80)))
    assert len(clock.quarantined) == 64


def test_a_cordon_with_a_time_ends_by_itself() -> None:
    clock = four()
    clock.cordons = (CordonRequest(Unit("a"), START, until=START + timedelta(hours=1)),)
    clock.step(1)
    assert clock.out() == {Unit("a")}
    plan = clock.step(3600)
    assert not plan.quarantined
    assert plan.released[0][1] == "the time for which a person took it out of use is over"


def test_what_a_person_asks_for_last_counts() -> None:
    clock = four()
    clock.cordons = (CordonRequest(Unit("a"), START, "burn-in"),)
    clock.step(1)
    later = START + timedelta(minutes=1)
    clock.cordons = (CordonRequest(Unit("a"), later, "new fan", until=later + timedelta(hours=1)),)
    [found] = clock.step(60).quarantined
    assert (found.message, found.until) == ("new fan", later + timedelta(hours=1))
    # For longer, before that is over.
    longer = later + timedelta(hours=3)
    clock.cordons = (CordonRequest(Unit("a"), later + timedelta(minutes=30), "new fan", until=longer),)
    clock.step(1800)
    plan = clock.step(3600)
    assert plan.quarantined
    assert not plan.released, "nothing is said to be in use again meanwhile"
    assert not clock.step(2 * 3600).quarantined


def test_of_two_requests_by_hand_about_one_unit_the_newer_counts() -> None:
    clock = four()
    newer = CordonRequest(Unit("a"), START + timedelta(seconds=2), "newer")
    clock.cordons = (newer, CordonRequest(Unit("a"), START, "older"))
    clock.step(5)
    [found] = clock.step(5).quarantined
    assert found.message == "newer"


def test_a_device_that_its_driver_drops_is_tested_when_it_comes_back() -> None:
    names = [f"gpu.test/a/gpu-{i}" for i in range(8)]
    clock = Clock({"a": 8}, {"a": frozenset(names)}, hosts=frozenset({"a"}))
    clock.last(60, says("a", names[0]))
    clock.usable, clock.devices = {"a": 7}, {"a": frozenset(names[1:])}
    clock.last(340 + HOLD_SECONDS)
    assert clock.out() == {Unit("a", names[0])}, "it may come back"
    clock.last(60, says("a", names[1]), says("a", names[2]))
    assert clock.out() == {Unit("a", names[0]), Unit("a", names[1])}, "what is gone takes no place in the class's share"
    clock.usable, clock.devices = {"a": 8}, {"a": frozenset(names)}
    clock.step(60)
    assert {each.unit.device: each.state for each in clock.quarantined}[names[0]] == "Probation"


def test_a_device_that_does_not_come_back_within_a_day_or_whose_node_is_gone_is_forgotten() -> None:
    names = [f"gpu.test/a/gpu-{i}" for i in range(8)]
    for node, hours in (("stays", 25), ("goes", 0)):
        clock = Clock({"a": 8}, {"a": frozenset(names)}, hosts=frozenset({"a"}))
        clock.last(60, says("a", names[0]))
        clock.usable, clock.devices = {"a": 7}, {"a": frozenset(names[1:])}
        clock.last(340 + HOLD_SECONDS)
        assert clock.quarantined
        clock.hosts = frozenset({"a"} if node == "stays" else ())
        plan = clock.step(hours * 3600 + 60)
        assert not plan.quarantined, node
        assert plan.released[0][1] == "it is not in the cluster any more"


def test_a_device_with_a_taint_is_out_of_use_though_only_one_other_is_left() -> None:
    names = [f"gpu.test/a/gpu-{i}" for i in (0, 1)]
    # Its driver offers the first one no more, and the other serves: nothing is lost when it is out of use.
    clock = Clock({"a": 1}, {"a": frozenset(names)}, capacity={"a": 2}, tainted=frozenset({names[0]}))
    clock.last(60, says("a", names[0]))
    assert clock.out() == {Unit("a", names[0])}
    assert not clock.plan.withheld
    plan = clock.last(60, says("a", names[0]), says("a", names[1]))
    assert clock.out() == {Unit("a", names[0])}
    assert plan.withheld[0].why == "no GPU of the class would be left"


def test_units_that_are_gone_are_forgotten_after_their_time() -> None:
    clock = four()
    clock.last(60, says("a"))
    clock.usable = {"b": 8, "c": 8, "d": 8}
    clock.last(340 + HOLD_SECONDS)
    assert not clock.quarantined


def test_one_unit_of_a_class_is_on_probation_at_a_time() -> None:
    clock = Clock({f"n{i}": 8 for i in range(8)})
    clock.last(60, says("n0"), says("n1"))
    clock.last(340 + HOLD_SECONDS + 60)
    assert sorted(each.state for each in clock.quarantined) == ["Probation", "Quarantined"]
    clock.step(5, tested={Unit("n0"): "passed"})
    clock.step(5)
    assert [(each.unit.node, each.state) for each in clock.quarantined] == [("n1", "Probation")]


def test_the_order_of_signals_makes_no_difference() -> None:
    def after(*there: HealthSignal) -> tuple[Quarantine, ...]:
        clock = four()
        clock.last(60, *there)
        return clock.quarantined

    one, two = says("b"), says("a", model="chat/llama", reason="ReplicaSlow")
    assert after(one, two) == after(two, one)


# --- what says so -----------------------------------------------------------------------------------------------------


def node(*conditions: NodeCondition) -> Node:
    return Node("a", {}, True, False, (), {}, {}, conditions)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (NodeCondition("XIDErrors", "True", "XidError", "Xid 79: GPU has fallen off the bus"), "GPUFellOffBus"),
        (NodeCondition("GpuMemWatch", "True", "GpuMem", "ErrorCode:DCGM_FR_VOLATILE_DBE_DETECTED GPU:3"), SICK),
        (NodeCondition("AcceleratedHardwareReady", "False", "Xid", "double bit ECC error"), "GPUUncorrectableECC"),
        (NodeCondition("NVLinkStatusInactive", "True", "NVLink", "link 3 is down"), "NVLinkFault"),
        (NodeCondition("XIDErrors", "True", "XidError", "Xid 95, Uncontained"), "GPUUncorrectableECC"),
        *((NodeCondition("XIDErrors", "True", "XidError", f"Xid {xid} on GPU 3"), None) for xid in (31, 63, 92, 94)),
        (NodeCondition("GpuMemWatch", "False", "NoFailure", "No Health Failures"), None),
        (NodeCondition("XIDErrors", "Unknown", "", ""), None),
        (NodeCondition("DiskPressure", "True", "", ""), None),
        (NodeCondition("ReadonlyFilesystem", "True", "", ""), None),
        (NodeCondition("UnhealthyNvidiaDevicePlugin", "True", "", "restarting"), None),
        (NodeCondition("GPUDriverLoaded", "True", "DriverLoaded", "driver 580 runs"), None),
        (NodeCondition("GPUsOnline", "True", "AllOnline", "8 of 8"), None),
    ],
)
def test_conditions_that_problem_detectors_and_monitors_write(condition: NodeCondition, reason: str | None) -> None:
    found = list(signals.of_nodes([node(condition)]))
    assert [each.reason for each in found] == ([reason] if reason else [])
    assert all(each.model is None and condition.type in each.message for each in found)


def test_taints_of_devices_and_what_kubelets_say_of_pods() -> None:
    def matched(name: str, *taints: Taint) -> Matched:
        return Matched(DeviceId("gpu.test", "a", name), Device(name, {}, {}, taints))

    bad = matched("gpu-0", Taint("unhealthy", "true", "NoSchedule"))
    told = matched("gpu-1", Taint("note", "", "None"))
    [found] = signals.of_devices({"a": (bad, told, matched("gpu-2"))})
    assert found.unit == Unit("a", "gpu.test/a/gpu-0")
    assert found.message == "the device has the taint unhealthy=true (NoSchedule)"

    pod = Pod(
        "chat", "llama-1", "u1", "a", finished=False, deleting=False, ready=True, requests={}, model_uid="m",
        gpu_class="h100", devices=(HeldDevice("GPU-7", healthy=False), HeldDevice("GPU-8", healthy=True)),
    )  # fmt: skip
    [found] = signals.of_pods([pod], "h100")
    assert found.unit == Unit("a", "GPU-7")
    assert not list(signals.of_pods([replace(pod, model_uid=None)], "h100")), "a pod that is no replica says nothing"
    assert not list(signals.of_pods([pod], "l4"))


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("gpu.nvidia.com/a/gpu-1", "gpu.nvidia.com/a/gpu-1"),
        ("k8s.gpu.nvidia.com/claim=6f1e-gpu-1", "gpu.nvidia.com/a/gpu-1"),
        ("k8s.gpu.nvidia.com/device=gpu-11", "gpu.nvidia.com/a/gpu-11"),
        ("vendor.example/gpu=7", None),  # one of two, and nothing says which
    ],
)
def test_a_kubelet_calls_a_claimed_device_by_its_name_in_the_runtime(said: str, means: str | None) -> None:
    pod = Pod(
        "chat", "llama-1", "u1", "a", finished=False, deleting=False, ready=True, requests={}, model_uid="m",
        gpu_class="h100", devices=(HeldDevice(said, healthy=False),),
    )  # fmt: skip
    claimed = ("gpu.nvidia.com/a/gpu-1", "gpu.nvidia.com/a/gpu-11")
    assert [s.unit.device for s in signals.of_pods([pod], "h100", lambda _: claimed)] == ([means] if means else [])
    # A replica that has one device has no other that could be meant.
    assert [s.unit.device for s in signals.of_pods([pod], "h100", lambda _: claimed[:1])] == [claimed[0]]


# --- what people write ------------------------------------------------------------------------------------------------


def test_annotations_are_read_as_they_were_written_and_bounded() -> None:
    one = CordonRequest(Unit("a", "gpu.test/a/gpu-0"), START, "smells", START + timedelta(hours=1))
    assert parse(write([one])) == ((one,), None)
    many = [CordonRequest(Unit(f"n{i}"), START + timedelta(seconds=i)) for i in range(MOST + 5)]
    kept, problem = parse(write(many))
    assert problem is None
    assert len(kept) == MOST
    assert kept[-1].unit == Unit(f"n{MOST + 4}"), "the newest stay"


@pytest.mark.parametrize(
    "text",
    ["{", "7", '[{"node": "a"}]', '[{"node": "", "at": "2026-11-26T00:00:00Z"}]', '["a"]', "[" * 100_000,
     '[{"node": "a", "at": "2026-11-26T00:00:00Z", "until": "later"}]', '[{"node": 3, "at": 4}]'],
)  # fmt: skip
def test_annotations_by_hand_may_be_wrong(text: str) -> None:
    found, problem = parse(text)
    assert not found
    assert problem
