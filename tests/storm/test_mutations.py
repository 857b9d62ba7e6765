"""A storm that finds nothing proves little, unless it finds what is wrong: one protection off, and it must complain."""

from pathlib import Path

import pytest

from shoal.api.replica import HEARTBEAT_SECONDS
from tests.storm.faults import CUT_SECONDS, SILENT_SECONDS
from tests.storm.ground import BURSTY
from tests.storm.run import StormConfig, run
from tests.support.lab import why_no_lab

pytestmark = [pytest.mark.lab, pytest.mark.mutation, pytest.mark.timeout(600)]

IDLE = round(SILENT_SECONDS) + 9
"""Seconds. With the streams cut nobody seems to ask: this idle window ends well after the time for which what was heard
before may still be acted on, and well before the streams flow again."""
STAYS = 600
"""Seconds. No Model goes to zero: its wake on a busy machine would take the time in which a canary is to be broken."""


@pytest.fixture(autouse=True)
def a_lab() -> None:
    if reason := why_no_lab():
        pytest.skip(reason)


def storm(
    mutation: str | None,
    *faults: str,
    seconds: int = 60,
    drain_seconds: int = 120,
    idle_seconds: int = 10,
    adapters: bool = False,
    routes: bool = False,
    sick: bool = False,
    nodes: bool = False,
    rests: bool = False,
) -> StormConfig:
    """Both Models are asked all the time, and every engine always works on some long answer: what a fault shows must
    not depend on the moment at which it comes."""
    rate = 15
    return StormConfig(
        requests=seconds * rate,
        rate=rate,
        seed=9,
        faults=faults,
        gap=4,
        sdk_rate=0.0,
        burst_period=0.0,
        drain_seconds=drain_seconds,
        idle_seconds=idle_seconds,
        long=0.15,
        shuffled=False,
        one_by_one=True,
        mutation=mutation,
        adapters=adapters,
        routes=routes,
        sick=sick,
        nodes=nodes,
        rests=rests,
    )


def test_with_every_protection_the_same_faults_show_nothing(tmp_path: Path) -> None:
    findings = run(
        storm(None, "pod_deleted", "gateway_paused", "rolled_out", "streams_cut", idle_seconds=IDLE), tmp_path
    )
    assert findings.lost() == []
    assert findings.violations == []


def test_without_the_drain_engines_are_stopped_while_they_answer(tmp_path: Path) -> None:
    findings = run(storm("no-drain", "pod_deleted", "pod_deleted", "rolled_out", seconds=40), tmp_path)
    assert not findings.good
    assert any(v.startswith("invariant 12") for v in findings.violations)


def test_without_the_acknowledgement_requests_come_to_an_engine_that_was_told_to_stop(tmp_path: Path) -> None:
    # Its requests never end, since gateways send more: it is told to stop when the time for draining is over.
    findings = run(storm("no-ack", "pod_deleted", "gateway_paused", drain_seconds=20), tmp_path)
    assert not findings.good
    assert any("after SIGTERM" in v for v in findings.violations)


def test_answers_of_the_base_in_an_adapters_place_are_lost_requests(tmp_path: Path) -> None:
    findings = run(storm("no-lora-path", "pod_deleted", seconds=20, adapters=True), tmp_path)
    assert findings.wrong > 0
    assert findings.wrong == findings.totals["lost"], findings.lost()


def test_without_another_try_requests_are_lost(tmp_path: Path) -> None:
    findings = run(storm("no-retry", "engine_hangs_up", "engine_refuses", seconds=30), tmp_path)
    assert findings.lost()
    assert not findings.good


def test_requests_that_are_sent_again_after_their_first_byte_are_found(tmp_path: Path) -> None:
    findings = run(storm("sends-again", "engine_killed", "engine_killed", seconds=30), tmp_path)
    assert any(v.startswith("invariant 2") for v in findings.violations)


def test_a_canary_that_nobody_halts_is_found(tmp_path: Path) -> None:
    findings = run(storm("no-halt", "canary_broken", idle_seconds=STAYS, routes=True), tmp_path)
    assert any("was not halted" in v for v in findings.violations)


def test_a_record_with_another_model_than_the_one_that_answered_is_found(tmp_path: Path) -> None:
    findings = run(storm("keeps-model", "canary_broken", idle_seconds=STAYS, routes=True), tmp_path)
    assert any("has the Model storm/storm-next and the replica storm/storm-steady-" in v for v in findings.violations)


def test_a_record_with_the_model_that_was_too_dear_for_a_request_is_found(tmp_path: Path) -> None:
    findings = run(storm("keeps-dear", seconds=30, idle_seconds=STAYS, routes=True), tmp_path)
    assert any("has the Model storm/storm-next and the replica storm/storm-steady-" in v for v in findings.violations)


def test_a_copy_for_a_mirror_that_is_billed_is_found(tmp_path: Path) -> None:
    findings = run(storm("bills-copies", seconds=30, idle_seconds=STAYS, routes=True), tmp_path)
    assert any("the copy" in v and "has a final record" in v for v in findings.violations)


def test_gpus_out_of_use_beyond_their_share_are_found(tmp_path: Path) -> None:
    findings = run(storm("no-share", "devices_sicken", seconds=75, sick=True), tmp_path)
    assert any("GPUs of storm-l4 were out of use at once" in v for v in findings.violations)


def test_a_replica_that_goes_before_another_one_serves_is_found(tmp_path: Path) -> None:
    findings = run(storm("no-replacement", "device_tainted", seconds=75, sick=True), tmp_path)
    assert any("went for device_tainted while 3 other replicas" in v for v in findings.violations)


def test_nodes_that_never_come_are_found(tmp_path: Path) -> None:
    findings = run(storm("no-coming", "nodes_wanted", seconds=75, nodes=True), tmp_path)
    assert "nodes: no node came; 0 replicas asked for one" in findings.violations


def test_a_node_that_is_emptied_under_a_stream_is_found(tmp_path: Path) -> None:
    findings = run(storm("moves-busy", "node_thinned", seconds=300, rests=True), tmp_path)
    assert any("was chosen to be emptied while storm-works-" in v for v in findings.violations)


def test_with_unknown_read_as_zero_replicas_go_while_nobody_is_heard(tmp_path: Path) -> None:
    assert IDLE + HEARTBEAT_SECONDS < CUT_SECONDS
    findings = run(storm("unknown-is-zero", "streams_cut", idle_seconds=IDLE), tmp_path)
    assert not findings.good
    assert any(v.startswith("invariant 6") and BURSTY in v for v in findings.violations)
