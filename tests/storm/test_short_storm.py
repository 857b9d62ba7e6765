"""A short storm: every request is followed to its end while pods, engines, a gateway and the leader go."""

from collections import Counter
from pathlib import Path

import pytest

from tests.storm import journals
from tests.storm.ground import BURSTY, STEADY, STORM
from tests.storm.routes import EXTERNAL, FRONT, NEXT, OUT, TRIAL
from tests.storm.run import StormConfig, collect, run
from tests.storm.swaps import STILL
from tests.support.lab import why_no_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

FAULTS = (
    "operator_killed",
    "gateway_killed",
    "pod_deleted",
    "engine_killed",
    "rolled_out",
    "engine_errors",
    "ledger_killed",
)
"""Each once, within about 90 seconds. What begins idle windows anew comes first."""


@pytest.fixture(autouse=True)
def a_lab() -> None:
    if reason := why_no_lab():
        pytest.skip(reason)


# Gateways and the ledger are killed in turn meanwhile.
ROUTED = (
    "operator_killed",
    "engine_changed",
    "canary_broken",
    "engine_killed",
    "canary_broken",
    "outside_killed",
    "pod_deleted",
    "operator_frozen",
)


@pytest.mark.long
def test_through_routes_no_request_is_lost_and_each_has_one_record_of_one_route_and_model(tmp_path: Path) -> None:
    config = StormConfig(
        requests=3300, rate=17, seed=5, faults=ROUTED, once=True, gap=8, pace=0.5, shuffled=False, routes=True, kills=8
    )
    findings = run(config, tmp_path)
    assert findings.lost() == []
    assert findings.violations == []
    found = collect(tmp_path)
    # The canary was halted each time that it was asked enough, and the fallback answered for a Model at zero.
    assert any(halt.since is not None for halt in found.halts)
    answered = {(row.route, row.model) for row in found.rows if row.outcome == "answered"}
    front, trial = (f"{STORM}/{name}" for name in (FRONT, TRIAL))
    steady, bursty, following = (f"{STORM}/{name}" for name in (STEADY, BURSTY, NEXT))
    assert {(front, steady), (front, following), (trial, bursty), (trial, following), (trial, steady)} <= answered
    # So did the adapter, the external target, and the steady Model while that was killed.
    out = f"{STORM}/{OUT}"
    assert {(out, f"{out}/{EXTERNAL}"), (out, steady)} <= answered
    assert any((row.route, row.adapter) == (front, f"{STORM}/{STILL}") for row in found.rows)
    assert findings.totals["answered"] > 0.7 * findings.sent


SICK = ("device_tainted", "driver_upgraded", "node_sickens", "operator_killed", "devices_sicken", "replica_garbled")


@pytest.mark.long
def test_gpus_that_sicken_lose_no_request_and_never_more_than_their_share_is_out_of_use(tmp_path: Path) -> None:
    config = StormConfig(
        requests=7500,
        rate=17,
        seed=5,
        faults=SICK,
        once=True,
        gap=6,
        pace=0.6,
        burst_period=0,
        shuffled=False,
        sick=True,
    )
    findings = run(config, tmp_path)
    assert findings.lost() == []
    assert findings.violations == []
    assert findings.wrong == 0
    found = collect(tmp_path)
    done = {each.fault: each for each in found.sicknesses}
    assert {"device_tainted", "node_sickens", "replica_garbled"} <= done.keys()
    assert all(each.replaced is not None for each in done.values()), done
    assert max(len(each.units) for each in found.out_of_use) > 0
    (upgrade,) = found.upgrades
    assert upgrade.pods, upgrade
    assert findings.totals["answered"] > 0.7 * findings.sent


NODES = ("nodes_wanted", "spot_node_taken", "operator_killed", "stock_out", "spot_node_lost")


@pytest.mark.long
def test_nodes_that_come_and_go_lose_no_request(tmp_path: Path) -> None:
    config = StormConfig(
        requests=7500,
        rate=17,
        seed=5,
        faults=NODES,
        once=True,
        gap=6,
        pace=0.6,
        burst_period=0,
        shuffled=False,
        nodes=True,
    )
    findings = run(config, tmp_path)
    assert findings.lost() == []
    assert findings.violations == []
    seen = collect(tmp_path).nodes
    why = Counter((event.event, event.why) for event in seen)
    assert why["came", ""] >= 3
    assert why["gone", "empty"] >= 1
    assert why["gone", "notice"] >= 1
    assert why["gone", "power"] == 1
    assert why["quoted", ""] == 1
    assert {event.why for event in seen if event.event == "fault" and event.good} == {
        "nodes_wanted", "spot_node_taken", "stock_out", "spot_node_lost",
    }  # fmt: skip
    assert findings.totals["answered"] > 0.7 * findings.sent


@pytest.mark.long
def test_nodes_that_are_emptied_lose_no_request_and_none_is_emptied_under_a_stream(tmp_path: Path) -> None:
    config = StormConfig(
        requests=7000,
        rate=17,
        seed=5,
        faults=("node_thinned", "operator_killed"),
        gap=6,
        pace=0.6,
        burst_period=0,
        shuffled=False,
        rests=True,
    )
    findings = run(config, tmp_path)
    assert findings.lost() == []
    assert findings.violations == []
    seen = collect(tmp_path).nodes
    assert any(event.event == "emptying" for event in seen)
    assert any((event.event, event.why) == ("gone", "empty") for event in seen)
    assert findings.totals["answered"] > 0.7 * findings.sent


def test_no_request_is_lost_in_a_short_storm(tmp_path: Path) -> None:
    # The second pause, from 120 to 160 seconds, comes after all faults: however slow the machine is, the bursty Model
    # goes to zero in it, and the burst that follows, 12 seconds until the last request, wakes it.
    config = StormConfig(
        requests=3100, rate=17, seed=5, faults=FAULTS, once=True, gap=8, pace=0.5, burst_period=80, shuffled=False
    )
    findings = run(config, tmp_path)
    assert findings.lost() == []
    assert findings.violations == []
    # Nobody's usage was lost with the gateway or the ledger.
    account = findings.account
    assert account is not None
    assert min(account.kills[what] for what in ("engine", "gateway", "ledger")) > 0
    assert account.billed.plus(account.unattributed) == account.engines
    assert account.outcomes["answered"] > 0.7 * findings.sent
    # The storm was one: most were answered, something was cut or failed by the kills, clients left.
    totals = findings.totals
    assert totals["answered"] > 0.7 * findings.sent
    assert totals["failed"] + totals["cut"] > 0
    assert totals["cancelled"] > 0
    # The bursty Model went to zero and came back.
    told = [s.replicas for s in journals.read_scales(tmp_path / "scales.jsonl") if s.model == BURSTY]
    assert 0 in told
    assert any(n > 0 for n in told[told.index(0) :])
