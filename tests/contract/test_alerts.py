"""The alerting rules, judged by Prometheus' own tool: each alert fires for what it is for, and for nothing less."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shoal_dev.generate.monitoring import ALERTS, Alert, plain_rules
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.network import require_programs

ROOT: Final = Path(__file__).resolve().parents[2]
EVERY: Final = {alert.name: alert for group in ALERTS.values() for alert in group}
LLAMA: Final = 'model="chat/llama"'
SERVED: Final = 'gen_ai_request_model="chat/llama"'


@dataclass(frozen=True, slots=True)
class Case:
    """Series as promtool writes them (one value a minute). `fires`: the labels of the alerts at `at`."""

    alert: str
    at: str
    series: dict[str, str]
    fires: tuple[dict[str, str], ...] = ()


def requests(refused: str, answered: str, outcome: str = "refused") -> dict[str, str]:
    total = f"shoal_gateway_requests_total{{{SERVED}"
    return {f'{total},pod="g-0",outcome="{outcome}"}}': refused, f'{total},pod="g-0",outcome="answered"}}': answered}


def condition(kind: str, status: str, reason: str) -> dict[str, str]:
    labels = f'{LLAMA},type="{kind}",status="{status}",reason="{reason}"'
    return {f"shoal_model_condition{{{labels}}}": "1x40"}


def replicas(ready: str, wanted: str) -> dict[str, str]:
    return {
        f'shoal_model_replicas{{{LLAMA},gpu_class="l4",state="ready"}}': ready,
        f'shoal_model_replicas{{{LLAMA},gpu_class="l4",state="starting"}}': "1x60",
        f"shoal_model_replicas_wanted{{{LLAMA}}}": wanted,
    }


def wakes(seconds: str, expected: str = "30x90") -> dict[str, str]:
    return {
        f"shoal_model_wake_seconds_sum{{{LLAMA}}}": seconds,
        f"shoal_model_wake_seconds_count{{{LLAMA}}}": "0+1x90",
        f'shoal_model_cold_start_expected_seconds{{{LLAMA},gpu_class="l4"}}': expected,
    }


def kv(used: str) -> dict[str, str]:
    of = LLAMA
    return {
        f'shoal_replica_kv_tokens_used{{{of},pod="a"}}': used,
        f'shoal_replica_kv_tokens_used{{{of},pod="b"}}': "9600x40",
        f'shoal_replica_kv_tokens_capacity{{{of},pod="a"}}': "10000x40",
        f'shoal_replica_kv_tokens_capacity{{{of},pod="b"}}': "10000x40",
    }


def spool(used: str, limit: str) -> dict[str, str]:
    return {
        'shoal_gateway_spool_bytes{pod="g-0"}': used,
        'shoal_gateway_spool_limit_bytes{pod="g-0"}': limit,
    }


def tokens(left: str, counted: str) -> dict[str, str]:
    return {
        f'shoal_ledger_unattributed_tokens{{{LLAMA},kind="output"}}': left,
        f'shoal_ledger_engine_tokens{{{LLAMA},kind="output"}}': counted,
    }


MODEL: Final = {"model": "chat/llama"}
REQUESTS: Final = {"gen_ai_request_model": "chat/llama"}
GATEWAY: Final = {"pod": "g-0"}

CASES: Final = (
    Case("ShoalRequestsFailed", "15m", requests("0+5x40", "0+95x40", "failed"), (REQUESTS,)),
    Case("ShoalRequestsFailed", "15m", requests("0+0x40", "0+95x40", "failed")),
    Case("ShoalRequestsFailed", "15m", requests("0+50x40", "0+50x40", "cancelled")),  # clients may leave
    Case("ShoalRefusalsBurnFast", "70m", requests("0+30x90", "0+70x90"), (REQUESTS,)),
    Case("ShoalRefusalsBurnFast", "70m", requests("0+30x90", "0+70x90", "expired"), (REQUESTS,)),
    Case("ShoalRefusalsBurnFast", "70m", requests("0+5x90", "0+95x90")),  # above the budget, and not at this speed
    Case("ShoalRefusalsBurnFast", "70m", requests("0x64 0+30x10", "0+100x90")),  # minutes of an hour
    Case("ShoalRefusalsBurnFast", "70m", requests("0+0x90", "0+0x90")),  # nobody asks
    Case("ShoalRefusalsBurnSlow", "7h", requests("0+8x500", "0+92x500"), (REQUESTS,)),
    Case("ShoalRefusalsBurnSlow", "7h", requests("0+1x500", "0+99x500")),
    Case(
        "ShoalHoldNearLimit",
        "5m",
        {
            f'shoal_gateway_held_requests{{{SERVED},pod="g-0"}}': "1900x10",
            f'shoal_gateway_hold_limit_requests{{{SERVED},pod="g-0"}}': "2000x10",
            f'shoal_gateway_held_requests{{{SERVED},pod="g-1"}}': "0x10",
            f'shoal_gateway_hold_limit_requests{{{SERVED},pod="g-1"}}': "2000x10",
        },
        (REQUESTS,),
    ),
    Case(
        "ShoalHoldNearLimit",
        "5m",
        {
            f'shoal_gateway_held_requests{{{SERVED},pod="g-0"}}': "900x10",
            f'shoal_gateway_hold_limit_requests{{{SERVED},pod="g-0"}}': "2000x10",
        },
    ),
    Case(
        "ShoalModelWithoutCapacity",
        "10m",
        condition("Placed", "False", "NoCapacity"),
        ({**MODEL, "reason": "NoCapacity"},),
    ),
    Case("ShoalModelWithoutCapacity", "10m", condition("Placed", "True", "Placed")),
    Case("ShoalModelWithoutCapacity", "10m", condition("Available", "False", "NoReplica")),
    Case("ShoalModelWithoutCapacity", "3m", condition("Placed", "False", "NoCapacity")),  # others drain first
    Case("ShoalModelNotServing", "45m", replicas("0x60", "1x60"), (MODEL,)),
    Case("ShoalModelNotServing", "45m", replicas("0x60", "0x60")),  # it sleeps
    Case("ShoalModelNotServing", "45m", replicas("1x60", "2x60")),
    Case("ShoalModelNotServing", "20m", replicas("0x60", "1x60")),  # large models take their time
    Case("ShoalWakeSlow", "80m", wakes("0+90x90"), (MODEL,)),
    Case("ShoalWakeSlow", "80m", wakes("0+33x90")),
    Case("ShoalWakeSlow", "80m", wakes("0+90x90", "120x90")),  # a large model
    Case("ShoalKVNearFull", "20m", kv("9000x40"), (MODEL,)),
    Case("ShoalKVNearFull", "20m", kv("5000x40")),
    Case(
        "ShoalEngineStalled",
        "5m",
        {'shoal_agent_stalled{namespace="chat",pod="llama-1",model="chat/llama"}': "1x10"},
        ({"namespace": "chat", "pod": "llama-1"},),
    ),
    Case("ShoalEngineStalled", "5m", {'shoal_agent_stalled{namespace="chat",pod="llama-1"}': "0x10"}),
    Case(
        "ShoalSignalsStale",
        "10m",
        {f'shoal_model_signal_sources{{{LLAMA},kind="replica",state="stale"}}': "1x20"},
        ({**MODEL, "kind": "replica"},),
    ),
    Case(
        "ShoalSignalsStale",
        "10m",
        {
            f'shoal_model_signal_sources{{{LLAMA},kind="replica",state="stale"}}': "0x20",
            f'shoal_model_signal_sources{{{LLAMA},kind="replica",state="live"}}': "3x20",
        },
    ),
    Case(
        "ShoalKEDANotDriving",
        "5m",
        condition("ScalingActive", "False", "KEDANotPolling"),
        ({**MODEL, "reason": "KEDANotPolling"},),
    ),
    Case("ShoalKEDANotDriving", "5m", condition("ScalingActive", "True", "DrivenByKEDA")),
    Case(
        "ShoalOperatorWithoutLeader",
        "5m",
        {'shoal_leading{pod="o-0"}': "0x10", 'shoal_leading{pod="o-1"}': "0x10"},
        ({},),
    ),
    Case("ShoalOperatorWithoutLeader", "5m", {'up{pod="other"}': "1x10"}, ({},)),  # nobody is scraped
    Case("ShoalOperatorWithoutLeader", "5m", {'shoal_leading{pod="o-0"}': "0x10", 'shoal_leading{pod="o-1"}': "1x10"}),
    Case(
        "ShoalScalerCertificateExpires",
        "3h",
        {'shoal_keda_certificate_expiry_timestamp_seconds{pod="o-0"}': "500000x200"},
        ({},),
    ),
    Case(
        "ShoalScalerCertificateExpires",
        "3h",
        {
            'shoal_keda_certificate_expiry_timestamp_seconds{pod="o-0"}': "5000000x200",
            'shoal_keda_certificate_expiry_timestamp_seconds{pod="o-1"}': "0x200",  # it has none
        },
    ),
    Case(
        "ShoalReconcilesFail",
        "30m",
        {'shoal_reconciles_total{queue="model",outcome="error",pod="o-0"}': "0+1x40"},
        ({"queue": "model"},),
    ),
    Case("ShoalReconcilesFail", "30m", {'shoal_reconciles_total{queue="model",outcome="done",pod="o-0"}': "0+9x40"}),
    Case(
        "ShoalCacheFailing",
        "15m",
        {'shoal_cache_fetches_total{result="failed",pod="c-1"}': "0+1x20"},
        ({"pod": "c-1"},),
    ),
    Case("ShoalCacheFailing", "15m", {'shoal_cache_broken_files_total{pod="c-1"}': "0 0 0 1x20"}, ({"pod": "c-1"},)),
    Case(
        "ShoalCacheFailing",
        "15m",
        {
            'shoal_cache_fetches_total{result="failed",pod="c-1"}': "4x20",
            'shoal_cache_fetches_total{result="hit",pod="c-1"}': "0+5x20",
            'shoal_cache_broken_files_total{pod="c-1"}': "0x20",
        },
    ),
    Case("ShoalSpoolRefuses", "5m", {'shoal_gateway_spool_ok{pod="g-0"}': "0x10"}, (GATEWAY,)),
    Case("ShoalSpoolRefuses", "5m", {'shoal_gateway_spool_ok{pod="g-0"}': "1x10"}),
    Case("ShoalSpoolFilling", "15m", spool("900x20", "1000x20"), (GATEWAY,)),
    Case("ShoalSpoolFilling", "15m", spool("100x20", "1000x20")),
    Case("ShoalSpoolFilling", "15m", spool("900x20", "0x20")),  # no bound
    Case("ShoalUsageLost", "20m", {'shoal_gateway_spool_requests_lost{pod="g-0"}': "0x10 3x10"}, (GATEWAY,)),
    Case("ShoalUsageLost", "20m", {'shoal_gateway_spool_requests_lost{pod="g-0"}': "3x30"}),  # told long ago
    Case("ShoalLedgerBehind", "20m", {'shoal_gateway_unshipped_oldest_seconds{pod="g-0"}': "0+60x30"}, (GATEWAY,)),
    Case("ShoalLedgerBehind", "20m", {'shoal_gateway_unshipped_oldest_seconds{pod="g-0"}': "2x30"}),
    Case("ShoalLedgerDatabaseDown", "5m", {'shoal_ledger_database_up{pod="ledger-0"}': "0x10"}, ({"pod": "ledger-0"},)),
    Case("ShoalLedgerDatabaseDown", "5m", {'shoal_ledger_database_up{pod="ledger-0"}': "1x10"}),
    Case("ShoalUnattributedTokens", "40m", tokens("100000x60", "2000000x60"), ({},)),
    Case("ShoalUnattributedTokens", "40m", tokens("-100000x60", "2000000x60"), ({},)),  # billed, and not counted
    Case("ShoalUnattributedTokens", "40m", tokens("10000x60", "2000000x60")),
    Case("ShoalUnattributedTokens", "40m", tokens("500x60", "1000x60")),  # too little to say anything
)


@pytest.fixture(scope="module", autouse=True)
def promtool() -> str:
    try:
        require_programs(print, {"promtool": "prometheus"})
    except LabError as error:
        pytest.skip(f"Prometheus' own tool is not to be had here: {error}")
    return shutil.which("promtool") or "promtool"


def run(promtool: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *args], capture_output=True, text=True, timeout=120, check=False)


def unit_test(case: Case, number: int) -> dict[str, Any]:
    """A group of promtool's own tests."""
    alert = EVERY[case.alert]
    expected = {"alertname": case.alert, "eval_time": case.at}
    # Only labels matter here: texts are looked at by `test_texts_are_whole`.
    rules = [{"alertname": case.alert, "alertstate": "firing", "severity": alert.severity, **f} for f in case.fires]
    samples = [{"labels": _selector("ALERTS", labels), "value": 1} for labels in rules]
    query = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    test = {"expr": query, "eval_time": case.at, "exp_samples": samples}
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    return {"name": f"{number} {expected['alertname']}", "interval": "1m", "input_series": series} | {
        "promql_expr_test": [test]
    }


def _selector(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}}"


def test_every_alert_fires_for_what_it_is_for_and_for_nothing_less(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(plain_rules())
    tests = [unit_test(case, number) for number, case in enumerate(CASES)]
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file))
    done = run(promtool, "test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", EVERY)
def test_every_alert_is_shown_to_fire_and_to_be_silent(name: str) -> None:
    assert {bool(case.fires) for case in CASES if case.alert == name} == {True, False}


def test_a_rule_that_asks_for_less_is_found_out(promtool: str, tmp_path: Path) -> None:
    """The cases above can fail: with each threshold of the recorded ratios lowered, silent cases fire."""
    (tmp_path / "rules.yaml").write_text(re.sub(r"ratio(_rate\w+)? > 0\.\d+", r"ratio\1 >= 0", plain_rules()))
    tests = [unit_test(case, number) for number, case in enumerate(CASES)]
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file))
    done = run(promtool, "test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode != 0
    found = done.stdout + done.stderr
    assert all(name in found for name in ("ShoalRequestsFailed", "ShoalHoldNearLimit", "ShoalKVNearFull"))


def test_prometheus_reads_the_rules(promtool: str) -> None:
    done = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", str(ROOT / "policies/prometheus/rules.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", EVERY.values(), ids=lambda a: a.name)
def test_every_alert_has_a_page_that_says_what_to_do(alert: Alert) -> None:
    page = (ROOT / "docs" / "runbooks" / f"{alert.page}.md").read_text()
    assert page.startswith(f"# {alert.name}\n")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings == ["What it means", "Impact", "Diagnosis", "What to do"]


@pytest.mark.parametrize("alert", EVERY.values(), ids=lambda a: a.name)
def test_texts_name_labels_that_the_alert_has(alert: Alert) -> None:
    """A label that an expression sums away would be an empty word in the text."""
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    fired = [case.fires for case in CASES if case.alert == alert.name and case.fires]
    for labels in (labels for case in fired for labels in case):
        assert named <= labels.keys()
