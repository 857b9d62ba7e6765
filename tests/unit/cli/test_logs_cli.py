"""`shoal logs`: what an operator sees of a tenant's request log, and what is said when it cannot be had."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shoal.api import keys
from shoal.cli.main import main
from tests.support.cannedapi import CannedApi

INSTALL_KEY = b"an install key of 32 bytes......"
SYSTEM = "/api/v1/namespaces/shoal-system"
SECRET = f"{SYSTEM}/secrets/shoal-key-logs"
PODS = f"{SYSTEM}/pods"
CLAIMS = f"{SYSTEM}/persistentvolumeclaims"


def proxy(pod: str) -> str:
    return f"{SYSTEM}/pods/{pod}:9090/proxy/v1/logs"


def pod(name: str, ready: bool = True) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    return {"metadata": {"namespace": "shoal-system", "name": name, "uid": name, "labels": labels}, "status": status}


def claims(*names: str) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": name}} for name in names]}


def entry(number: int, **said: Any) -> dict[str, Any]:
    return {
        "time": f"2026-11-22T06:00:{number:02d}.000Z",
        "id": f"id-{number}",
        "user": "u-1",
        "keyName": "prod",
        "model": "chat/llama",
        "outcome": "answered",
        "status": 200,
        "inputTokens": 7,
        "durationMs": 12.3,
        "request": {"messages": [{"role": "user", "content": [{"type": "text", "text": f"text\n{number}\x1b[31m"}]}]},
        **said,
    }


def page(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"object": "list", "has_more": False, "missing": [], **more, "data": list(entries)}


@pytest.fixture
def api() -> CannedApi:
    data = {"key": base64.b64encode(keys.derive(INSTALL_KEY, "logs", keys.DEMAND).encode()).decode()}
    pods = [pod("shoal-gateway-1", ready=False), pod("shoal-gateway-0")]
    return CannedApi(
        {
            SECRET: {"metadata": {"name": "shoal-key-logs"}, "data": data},
            PODS: {"metadata": {"resourceVersion": "1"}, "items": pods},
            CLAIMS: claims("spool-shoal-gateway-0", "logs-shoal-gateway-0", "logs-shoal-gateway-1"),
            proxy("shoal-gateway-0"): page(entry(2), entry(1)),
        }
    )


def run(api: CannedApi, tmp_path: Path, *arguments: str, input: str | None = None) -> Result:
    with api.kubeconfig(tmp_path) as kubeconfig:
        return CliRunner().invoke(main, ["logs", *arguments, "--kubeconfig", str(kubeconfig)], input=input)


def asked(api: CannedApi) -> tuple[str, str, dict[str, str]]:
    return [call for call in api.calls if "/proxy/" in call[1]][-1]


def test_entries_are_shown_in_their_order_and_obey_no_terminal(api: CannedApi, tmp_path: Path):
    result = run(
        api, tmp_path, "--tenant", "acme", "--user", "u-1", "--model", "llama", "--route", "chat/front", "--limit", "5"
    )
    assert result.exit_code == 0, result.output
    header, first, second = result.output.splitlines()
    assert header.startswith("TIME")
    assert first.startswith("2026-11-22T06:00:01Z u-1")
    assert first.endswith("text 1[31m")
    assert second.endswith("text 2[31m")
    assert " - " in first  # output tokens are not known
    method, path, headers = asked(api)
    assert (method, path) == (
        "GET",
        f"{proxy('shoal-gateway-0')}?tenant=acme&user=u-1&model=llama&route=chat/front&limit=5",
    )
    assert headers["x-shoal-key"] == keys.derive(INSTALL_KEY, "logs", keys.DEMAND)


def test_json_is_one_whole_entry_per_line(api: CannedApi, tmp_path: Path):
    result = run(api, tmp_path, "--tenant", "acme", "-o", "json")
    assert [json.loads(line) for line in result.output.splitlines()] == [entry(1), entry(2)]


def test_yaml_is_one_list_and_csv_a_line_per_entry_without_bodies(api: CannedApi, tmp_path: Path):
    result = run(api, tmp_path, "--tenant", "acme", "-o", "yaml")
    assert yaml.safe_load(result.output) == [entry(1), entry(2)]
    head, first, _ = run(api, tmp_path, "--tenant", "acme", "-o", "csv").output.splitlines()
    found = dict(zip(head.split(","), first.split(","), strict=True))
    assert (found["id"], found["keyName"], found["inputTokens"], found["outputTokens"]) == ("id-1", "prod", "7", "")
    assert "text" not in first


TENANT = "/apis/shoal.dev/v1alpha1/tenants/acmee"


def test_a_tenant_that_does_not_exist_is_no_empty_log(api: CannedApi, tmp_path: Path):
    api.answers[proxy("shoal-gateway-0")] = page()
    result = run(api, tmp_path, "--tenant", "acmee")
    assert result.exit_code == 1
    assert "there is no Tenant acmee and no request log of it: is it spelt right?" in result.output


def test_an_empty_log_says_that_logging_is_off(api: CannedApi, tmp_path: Path):
    api.answers[proxy("shoal-gateway-0")] = page()
    api.answers[TENANT] = {"metadata": {"name": "acmee"}, "spec": {}}
    result = run(api, tmp_path, "--tenant", "acmee")
    assert result.exit_code == 0
    assert "the request log of Tenant acmee is off: set its spec.logging" in result.stderr
    api.answers[TENANT]["spec"] = {"logging": {"mode": "Off", "retentionDays": 7}}
    assert "is off" in run(api, tmp_path, "--tenant", "acmee").stderr
    api.answers[TENANT]["spec"] = {"logging": {"mode": "Metadata"}}
    assert run(api, tmp_path, "--tenant", "acmee").stderr == ""


def test_who_may_not_read_tenants_is_told_what_the_gateway_knows(api: CannedApi, tmp_path: Path):
    """The ClusterRole shoal-logs is bound in one namespace, and Tenants are in none."""
    api.answers[TENANT] = (403, "tenants is forbidden")
    api.answers[proxy("shoal-gateway-0")] = page(logging="NoTenant")
    wrong = run(api, tmp_path, "--tenant", "acmee")
    assert wrong.exit_code == 1
    assert "gateways know no valid Tenant acmee, and there is no request log of it: is it spelt right?" in wrong.stderr
    api.answers[TENANT] = (403, "tenants is forbidden")
    api.answers[proxy("shoal-gateway-0")] = page(logging="Off")
    off = run(api, tmp_path, "--tenant", "acmee")
    assert off.exit_code == 0
    assert "the request log of Tenant acmee is off: set its spec.logging" in off.stderr
    api.answers[proxy("shoal-gateway-0")] = page(logging="On")
    assert run(api, tmp_path, "--tenant", "acmee").stderr == ""


def test_a_gateway_that_does_not_know_tenants_yet_leaves_it_open(api: CannedApi, tmp_path: Path):
    api.answers[TENANT] = (403, "tenants is forbidden")
    api.answers[proxy("shoal-gateway-0")] = page()
    result = run(api, tmp_path, "--tenant", "acmee")
    assert result.exit_code == 0
    assert "its request log is on is unknown: tenants is forbidden" in result.stderr


def test_the_log_of_a_deleted_tenant_is_shown(api: CannedApi, tmp_path: Path):
    api.answers[proxy("shoal-gateway-0")] = page(entry(1), logging="NoTenant")
    result = run(api, tmp_path, "--tenant", "acmee")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_span_of_time_is_asked_for_in_utc(api: CannedApi, tmp_path: Path):
    assert run(api, tmp_path, "--tenant", "acme", "--since", "2026-11-22T07:00:00+01:00").exit_code == 0
    assert "from=2026-11-22T06:00:00+00:00" in asked(api)[1]
    assert run(api, tmp_path, "--tenant", "acme", "--since", "1h", "--until", "2026-11-22").exit_code == 0
    assert "to=2026-11-22T00:00:00+00:00" in asked(api)[1]
    wrong = run(api, tmp_path, "--tenant", "acme", "--since", "yesterday")
    assert wrong.exit_code == 2
    assert "--since 'yesterday' is not a time: give how long ago (90s, 30m, 12h, 7d)" in wrong.output


def test_what_is_missing_is_said_beside_what_is_there(api: CannedApi, tmp_path: Path):
    missing = [{"gateway": "shoal-gateway-3", "reason": "it cannot be reached"}]
    api.answers[proxy("shoal-gateway-0")] = page(entry(1), missing=missing, unreadable=["a.enc: its key is gone"])
    result = run(api, tmp_path, "--tenant", "acme")
    assert result.exit_code == 0
    assert "missing: gateway shoal-gateway-3: it cannot be reached" in result.output
    assert "missing: file a.enc: its key is gone" in result.output


def test_another_gateway_is_asked_when_one_is_not_reached(api: CannedApi, tmp_path: Path):
    api.answers[proxy("shoal-gateway-1")] = api.answers[proxy("shoal-gateway-0")]
    api.answers[proxy("shoal-gateway-0")] = (503, "no endpoints")
    result = run(api, tmp_path, "--tenant", "acme", "-o", "json")
    assert len(result.output.splitlines()) == 2, result.output


def test_who_may_not_is_told_what_it_takes(api: CannedApi, tmp_path: Path):
    api.answers[SECRET] = (403, 'secrets "shoal-key-logs" is forbidden')
    result = run(api, tmp_path, "--tenant", "acme")
    assert result.exit_code == 1
    assert (
        "needs the right to get the Secret shoal-key-logs, to list pods and persistentvolumeclaims, and"
        in result.output
    )
    assert "A tenant reads its own log with its own key: GET /v1/logs of the gateway." in result.output


@pytest.mark.parametrize(
    ("missing", "says"),
    [(SECRET, "there is no Secret shoal-key-logs in namespace"), (PODS, "there is no gateway in namespace")],
)
def test_another_namespace_is_suggested(api: CannedApi, tmp_path: Path, missing: str, says: str):
    if missing == PODS:
        api.answers[PODS] = {"metadata": {"resourceVersion": "1"}, "items": []}
    else:
        del api.answers[missing]
    result = run(api, tmp_path, "--tenant", "acme")
    assert result.exit_code == 1
    assert says in result.output
    assert "--operator-namespace" in result.output


def test_a_gateway_that_refuses_is_quoted(api: CannedApi, tmp_path: Path):
    refusal = {"error": {"message": "`model` is wrong."}, "message": "`model` is wrong.", "reason": "invalid_parameter"}
    api.answers[proxy("shoal-gateway-0")] = (400, refusal)
    result = run(api, tmp_path, "--tenant", "acme")
    assert result.exit_code == 1
    assert "`model` is wrong." in result.output


def test_deleting_asks_first_and_says_what_went(api: CannedApi, tmp_path: Path):
    deleted = {"object": "logs.deleted", "files": 3, "entries": 12, "missing": [], "unreadable": []}
    api.answers[proxy("shoal-gateway-0")] = deleted
    refused = run(api, tmp_path, "delete", "--tenant", "acme", "--user", "u-1", input="n\n")
    assert refused.exit_code == 1
    assert "Delete the entries of user u-1 of tenant acme? This cannot be undone" in refused.output
    assert not [call for call in api.calls if call[0] == "DELETE"]
    result = run(api, tmp_path, "delete", "--tenant", "acme", "--user", "u-1", input="y\n")
    assert result.exit_code == 0
    assert "Deleted: 12 entries in 3 files." in result.output
    method, path, _ = asked(api)
    assert (method, path) == ("DELETE", f"{proxy('shoal-gateway-0')}?tenant=acme&user=u-1")


def test_a_deletion_that_did_not_reach_everything_fails_and_says_so(api: CannedApi, tmp_path: Path):
    missing = [{"gateway": "shoal-gateway-1", "reason": "it cannot be reached"}]
    api.answers[proxy("shoal-gateway-0")] = {"files": 1, "entries": None, "missing": missing, "unreadable": []}
    result = run(api, tmp_path, "delete", "--tenant", "acme", "--yes")
    assert result.exit_code == 1
    assert "Deleted: 1 files." in result.output
    assert "gateway shoal-gateway-1: it cannot be reached" in result.output
    assert "Fix this and repeat the command." in result.output
    told = run(api, tmp_path, "delete", "--tenant", "acme", "--yes", "-o", "json")
    assert told.exit_code == 1
    left = ["gateway shoal-gateway-1: it cannot be reached"]
    assert json.loads(told.stdout) == {"tenant": "acme", "user": None, "entries": None, "files": 1, "left": left}


def test_what_a_gateway_that_was_scaled_away_left_is_named(api: CannedApi, tmp_path: Path):
    """Nobody reads or deletes what is on its volume: who deletes must not think that all is gone."""
    api.answers[CLAIMS] = claims("spool-shoal-gateway-2", "logs-shoal-gateway-0", "logs-shoal-gateway-2")
    said = (
        "gateway shoal-gateway-2: it was scaled down, and its log is still on its volume. Scale up again to "
        "reach it, or delete it: kubectl -n shoal-system delete persistentvolumeclaim logs-shoal-gateway-2"
    )
    shown = run(api, tmp_path, "--tenant", "acme", "-o", "json")
    assert (shown.exit_code, len(shown.stdout.splitlines())) == (0, 2)
    assert shown.stderr == f"missing: {said}\n"
    api.answers[proxy("shoal-gateway-0")] = {"files": 1, "entries": None, "missing": [], "unreadable": []}
    deleted = run(api, tmp_path, "delete", "--tenant", "acme", "--yes")
    assert deleted.exit_code == 1
    assert "Deleted: 1 files." in deleted.output
    assert said in deleted.output


def test_who_may_not_see_volumes_is_told_that_they_are_unknown(api: CannedApi, tmp_path: Path):
    api.answers[CLAIMS] = (403, "persistentvolumeclaims is forbidden")
    api.answers[proxy("shoal-gateway-0")] = {"files": 1, "entries": None, "missing": [], "unreadable": []}
    deleted = run(api, tmp_path, "delete", "--tenant", "acme", "--yes")
    assert deleted.exit_code == 1
    assert "volumes of gateways that were scaled down are unknown: persistentvolumeclaims is forb" in deleted.output


def test_options_that_do_not_go_together(api: CannedApi, tmp_path: Path):
    assert "--tenant is required" in run(api, tmp_path).output
    wrong = CliRunner().invoke(main, ["logs", "--tenant", "acme", "delete", "--tenant", "acme"])
    assert "put the options of `logs delete` after `delete`" in wrong.output
    wrong = CliRunner().invoke(main, ["logs", "-o", "json", "delete", "--tenant", "acme"])
    assert "put the options of `logs delete` after `delete`" in wrong.output


# --- with a role ----------------------------------------------------------------------------------------------------

TOKEN = f"{SYSTEM}/serviceaccounts/shoal-logs/token"
SERVICE = f"{SYSTEM}/services/shoal-gateway-pods"


@pytest.fixture
def reader(api: CannedApi) -> CannedApi:
    """The user has the ClusterRole shoal-logs, and may read no Secret."""
    api.answers[TOKEN] = {"status": {"token": "short-lived"}}
    api.answers[SECRET] = (403, 'secrets "shoal-key-logs" is forbidden')
    api.answers[SERVICE] = {"spec": {"ports": [{"port": 9090}]}}
    return api


@pytest.mark.parametrize("mtls", [False, True])
def test_with_the_role_no_key_is_needed(reader: CannedApi, tmp_path: Path, mtls: bool):
    where = f"{SYSTEM}/services/shoal-gateway-pods:9090/proxy/v1/logs"
    if mtls:
        reader.answers[SERVICE] = {"spec": {"ports": [{"port": 9090}, {"port": 9443}]}}
        where = f"{SYSTEM}/services/https:shoal-gateway-pods:9443/proxy/v1/logs"
    reader.answers[where] = page(entry(1))
    result = run(reader, tmp_path, "--tenant", "acme", "-o", "json")
    assert result.exit_code == 0, result.output
    assert [json.loads(text)["id"] for text in result.stdout.splitlines()] == ["id-1"]
    method, path, headers = asked(reader)
    assert (method, path.partition("?")[0], headers["x-shoal-key"]) == ("GET", where, "short-lived")
    reader.answers[where] = {"files": 1, "entries": None, "missing": [], "unreadable": []}
    assert run(reader, tmp_path, "delete", "--tenant", "acme", "--yes").exit_code == 0
    assert asked(reader)[0] == "DELETE"
    assert SECRET not in reader.asked


def test_without_the_role_the_command_is_told(reader: CannedApi, tmp_path: Path):
    reader.answers[TOKEN] = (403, "cannot create serviceaccounts/token")
    result = run(reader, tmp_path, "--tenant", "acme")
    assert result.exit_code == 1
    assert result.output.startswith("Error: This needs the ClusterRole shoal-logs. An administrator runs:")
    assert "kubectl -n shoal-system create rolebinding shoal-logs-user --clusterrole=shoal-logs" in result.output
