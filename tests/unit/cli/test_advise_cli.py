"""`shoal advise`: what a person reads, and what is said when something is missing."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shoal.api import keys
from shoal.api.traffic import HEAD, MARK, STREAM
from shoal.cli.main import main
from tests.support.cannedapi import CannedApi

INSTALL_KEY = b"an install key of 32 bytes......"
SYSTEM = "/api/v1/namespaces/shoal-system"
GATEWAY = f"{SYSTEM}/pods/shoal-0:9090/proxy/v1/traffic"
LEDGER = f"{SYSTEM}/pods/shoal-0:8500/proxy/v1/usage"
MODELS = "/apis/shoal.dev/v1alpha1/namespaces/chat/models"
CLASSES = "/apis/shoal.dev/v1alpha1/gpuclasses"


POD = {
    "metadata": {
        "namespace": "shoal-system",
        "name": "shoal-0",
        "uid": "shoal-0",
        "labels": {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"},
    },
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}
"""Gateway and ledger: the stand-in for the API server does not select by labels."""


def secret(role: keys.Role, subject: str) -> dict[str, Any]:
    key = keys.derive(INSTALL_KEY, role, subject)
    return {"metadata": {"name": f"shoal-key-{role}"}, "data": {"key": base64.b64encode(key.encode()).decode()}}


def traffic(count: int = 400, replicas: int = 2) -> dict[str, Any]:
    """Questions on eleven documents, each at its own replica, which has it from the second question on. A replica's
    cache has space for six of them."""
    began = time.time() - 3600
    rows = b""
    for number in range(count):
        document = number * 7 % 11
        cached = 900 if number >= 11 else 0
        first = 50 + (1300 - cached) // 2  # 2,000 tokens a second
        rows += HEAD.pack(
            began + number, 50, first, first + 200, 1300, cached, 20, 1 + document % replicas, 0, 1, STREAM, 2
        )
        rows += MARK.pack(document.to_bytes(8), 3600) + MARK.pack((1000 + number).to_bytes(8), 5200)
    return {
        "model": "chat/llama",
        "gateway": "shoal-gateway-0",
        "since": began - 1,
        "classes": ["l40s-48gb"],
        "requests": count,
        "rows": base64.b64encode(rows).decode(),
    }


def model(name: str = "llama") -> dict[str, Any]:
    variant = {
        "class": "l40s-48gb",
        "gpusPerReplica": 1,
        "kvTokensPerReplica": {"predicted": 9_000, "engine": 8_500},
    }
    return {
        "metadata": {"name": name, "namespace": "chat", "uid": name},
        "spec": {"source": {"uri": "file:///models/tiny"}},
        "status": {"variants": [variant]},
    }


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


@pytest.fixture
def api() -> CannedApi:
    gpu_class = {
        "metadata": {"name": "l40s-48gb", "uid": "c"},
        "spec": {
            "nodeSelector": {"gpu": "l40s"},
            "memoryPerGPU": "48Gi",
            "hourlyCost": {"amount": "1.20", "currency": "EUR"},
        },
    }
    usage = {
        "from": "2026-11-25T00:00:00Z",
        "to": "2026-11-26T00:00:00Z",
        "by": ["model"],
        "rows": [{"model": "chat/llama", "requests": 1, "inputTokens": 72_000_000, "cachedTokens": 0, "outputTokens": 0,
                  "reasoningTokens": 0, "unknownCachedInputTokens": 0, "unknownRequests": 0}],
    }  # fmt: skip
    return CannedApi(
        {
            f"{SYSTEM}/secrets/shoal-key-logs": secret("logs", keys.DEMAND),
            f"{SYSTEM}/secrets/shoal-key-billing": secret("billing", keys.LEDGER),
            f"{SYSTEM}/pods": listed(POD),
            MODELS: listed(model()),
            f"{MODELS}/llama": model(),
            CLASSES: listed(gpu_class),
            GATEWAY: {"models": [traffic()], "missing": []},
            LEDGER: usage,
        }
    )


def run(api: CannedApi, tmp_path: Path, *arguments: str) -> Result:
    with api.kubeconfig(tmp_path) as kubeconfig:
        return CliRunner().invoke(main, ["advise", *arguments, "--kubeconfig", str(kubeconfig)])


def test_sentences_come_first_and_then_the_table(api: CannedApi, tmp_path: Path) -> None:
    result = run(api, tmp_path, "model/llama")
    assert result.exit_code == 0, result.output
    head, empty, saved, *rest = result.stdout.splitlines()
    assert head.startswith("chat/llama: 400 requests of 1 gateway, ")
    assert empty == ""
    assert saved.startswith("Prefix routing saved ")
    assert saved.endswith(" EUR a day, compared with the least loaded replica.")
    table = rest[rest.index("") + 1 :]
    assert table[0].split() == ["PROMPT", "TOKENS", "IN", "A", "CACHE", "SHARE"]
    shown = {line.rsplit(maxsplit=2)[0]: line.rsplit(maxsplit=2)[1] for line in table[1:8]}
    assert shown["delivered by the engines"] == "69.2"
    assert shown["the same, replayed"] == "69.2"
    assert "prefill on l40s-48gb: " in table[8]
    (asked,) = [path for path in api.asked if path.startswith(GATEWAY)]
    assert "namespace=chat&model=llama&since=" in asked
    assert asked.endswith("&requests=20000")


def test_the_amount_a_day_is_the_ledgers(api: CannedApi, tmp_path: Path) -> None:
    result = run(api, tmp_path, "llama", "--since", "2d", "-o", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"] == "chat/llama"
    assert found["promptTokensPerDay"] == 36_000_000
    assert found["shares"]["delivered"] == 0.692308
    assert found["currency"] == "EUR"
    (each,) = found["classes"]
    assert (each["gpuClass"], each["kvTokensPerReplica"], round(each["prefillRate"])) == ("l40s-48gb", 8_500, 2000)
    # Without affinity no replica has the document that is asked for next: 900 tokens of each prompt of 1,300.
    saved = found["saved"]
    assert saved["share"] == pytest.approx(900 / 1300, abs=0.02)
    assert saved["gpuHoursPerDay"] == pytest.approx(saved["share"] * 36_000_000 / 2000 / 3600, rel=1e-5)
    assert float(saved["costPerDay"]) == pytest.approx(saved["gpuHoursPerDay"] * 1.20, rel=1e-4)
    assert found["sentences"][0].startswith("Prefix routing saved ")
    assert found["pools"] == {"mostGain": 0.0}  # no answer runs while another prompt is read


def test_all_models_of_a_namespace(api: CannedApi, tmp_path: Path) -> None:
    api.answers[MODELS] = listed(model(), model("quiet"))
    few = traffic(20) | {"model": "chat/quiet"}
    api.answers[GATEWAY] = {"models": [traffic(), few], "missing": [{"gateway": "shoal-gateway-1", "reason": "away"}]}
    result = run(api, tmp_path, "-o", "json")
    assert result.exit_code == 0, result.output
    assert [each["model"] for each in json.loads(result.stdout)] == ["chat/llama"]
    assert "note: gateway shoal-gateway-1 is missing: away" in result.stderr
    assert "chat/quiet: advice needs at least 200 requests" in result.stderr
    lines = run(api, tmp_path, "-o", "csv").stdout.splitlines()
    assert lines[0] == "model,what,share"
    assert "chat/llama,delivered,0.692308" in lines


def test_the_report_begins_where_every_gateway_has_all_requests(api: CannedApi, tmp_path: Path) -> None:
    since = time.time() - 3600 + 150
    api.answers[GATEWAY] = {"since": since, "models": [traffic()], "missing": []}
    found = json.loads(run(api, tmp_path, "llama", "-o", "json").stdout)
    assert found["requests"] in (249, 250)
    assert found["since"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
    kept = "gateways keep their last requests, in memory, from their start on"
    shown = run(api, tmp_path, "llama", "--since", "7d").stderr
    assert f"note: chat/llama: the report covers 1.0 h, not all of --since 7d: {kept}" in shown
    assert kept not in run(api, tmp_path, "llama", "--since", "60m").stderr
    api.answers[GATEWAY] = {"since": time.time(), "models": [traffic()], "missing": []}
    assert "the gateways know 0" in run(api, tmp_path, "llama").stderr


def test_too_few_requests_are_no_report(api: CannedApi, tmp_path: Path) -> None:
    api.answers[GATEWAY] = {"models": [traffic(50)], "missing": []}
    result = run(api, tmp_path, "llama")
    assert result.exit_code == 1
    assert "chat/llama: advice needs at least 200 requests" in result.stderr
    assert "the gateways know 50" in result.stderr
    api.answers[GATEWAY] = {"models": [], "missing": []}
    assert "the gateways know 0" in run(api, tmp_path, "llama").stderr
    assert "know too few requests of any Model here" in run(api, tmp_path).stderr


def test_what_may_not_be_read_is_unknown(api: CannedApi, tmp_path: Path) -> None:
    api.answers[CLASSES] = 403, "gpuclasses.shoal.dev is forbidden"
    api.answers[LEDGER] = 503, "no endpoints available"
    result = run(api, tmp_path, "llama", "-o", "json")
    assert result.exit_code == 0, result.output
    assert "note: costs are unknown: gpuclasses.shoal.dev is forbidden" in result.stderr
    assert "because the ledger did not answer" in result.stderr
    found = json.loads(result.stdout)
    assert found["saved"]["costPerDay"] is None
    assert found["promptTokensPerDay"] > 1_000_000


def test_who_may_not_read_it_learns_what_is_needed(api: CannedApi, tmp_path: Path) -> None:
    api.answers[f"{SYSTEM}/secrets/shoal-key-logs"] = 403, 'secrets "shoal-key-logs" is forbidden'
    result = run(api, tmp_path, "llama")
    assert result.exit_code == 1
    assert "There is no ServiceAccount shoal-viewer in namespace chat" in result.stderr
    assert "Or, without such a role: This needs the right to get the Secret shoal-key-logs" in result.stderr


@pytest.mark.parametrize("since", ["yesterday", "0h", "-1d", "24"])
def test_a_time_that_is_none_is_refused(api: CannedApi, tmp_path: Path, since: str) -> None:
    result = run(api, tmp_path, "llama", "--since", since)
    assert result.exit_code == 2
    assert "give how long ago, as in 30m, 24h, 7d" in result.stderr


def test_a_misspelt_model_is_named(api: CannedApi, tmp_path: Path) -> None:
    message = 'models.shoal.dev "lama" not found'
    details = {"name": "lama", "kind": "models"}
    status = {"kind": "Status", "code": 404, "message": message, "reason": "NotFound", "details": details}
    api.answers[f"{MODELS}/lama"] = 404, status
    result = run(api, tmp_path, "lama")
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_teams_viewer_needs_no_key(api: CannedApi, tmp_path: Path) -> None:
    api.answers["/api/v1/namespaces/chat/serviceaccounts/shoal-viewer/token"] = {"status": {"token": "short-lived"}}
    for role in ("logs", "billing"):
        api.answers[f"{SYSTEM}/secrets/shoal-key-{role}"] = 403, "secrets is forbidden"
    api.answers[CLASSES] = 403, "gpuclasses.shoal.dev is forbidden"
    for service, path in (("shoal-gateway-pods", GATEWAY), ("shoal-ledger", LEDGER)):
        pod, _, rest = path.partition("/proxy/")
        port = pod.rpartition(":")[2]
        api.answers[f"{SYSTEM}/services/{service}"] = {"spec": {"ports": [{"port": int(port)}]}}
        api.answers[f"{SYSTEM}/services/{service}:{port}/proxy/{rest}"] = api.answers.pop(path)
    result = run(api, tmp_path, "llama", "-o", "json", "--since", "2d")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["promptTokensPerDay"] == 36_000_000
    shown = {headers.get("x-shoal-key") for _, path, headers in api.calls if "/proxy/" in path}
    assert shown == {"short-lived"}
