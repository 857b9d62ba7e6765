"""`shoal why --scaling`, `top`, `wake`: what a person sees of decisions, and what is said when they cannot be had."""

import csv
import io
import json
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from shoal.api.decisions import (
    DecisionRecord,
    Decisions,
    DrivenVariant,
    DriverStats,
    ModelScaling,
    ReplicaStats,
    RuleResult,
)
from shoal.cli.main import main
from shoal.cli.scaling.top import ordered, render
from shoal.cli.scaling.totals import Sum, add, line
from tests.support.cannedapi import CannedApi

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
LEASE = "/apis/coordination.k8s.io/v1/namespaces/shoal-system/leases/shoal-operator"
POD = "/api/v1/namespaces/shoal-system/pods/shoal-operator-1:9090/proxy/v1/decisions"
MODEL = "/apis/shoal.dev/v1alpha1/namespaces/chat/models/llama"

QUEUE = RuleResult(
    rule="queue", replicas=4, inputs={"waiting": 14, "target": 4}, sentence="14 queued on 2 replicas, target 4"
)
KV = RuleResult(rule="kvCache", replicas=None, inputs={"kvTokensUsed": None}, sentence="llama-2 does not say")
DECISIONS = (
    DecisionRecord(
        time=NOW - timedelta(seconds=34),
        before=2,
        wanted=4,
        reason="ScalingUp",
        message="14 queued on 2 replicas, target 4",
        rules=(QUEUE, KV),
        alternative="not 3: 14 / 3 is above the target",
    ),
    DecisionRecord(time=NOW - timedelta(hours=3), before=2, wanted=2, reason="ReplicasReady", message="", count=12),
)
LLAMA = ModelScaling(
    model="chat/llama",
    wanted=4,
    ready_replicas=2,
    reason="ScalingUp",
    message="14 queued on 2 replicas, target 4",
    held=0,
    in_flight=30,
    arrivals_per_second=3.25,
    hourly_cost="3.72",
    currency="USD",
    replicas=(
        ReplicaStats(
            pod="llama-1",
            phase="ready",
            running=16,
            waiting=14,
            kv_tokens_used=50_000,
            kv_tokens_total=100_000,
            tokens_per_second=800.0,
        ),
        ReplicaStats(pod="llama-3", phase="loading"),
    ),
)
IDLE = ModelScaling(
    model="chat/idle",
    wanted=0,
    ready_replicas=0,
    reason="ScaledToZero",
    message="",
    held=0,
    in_flight=0,
    hourly_cost="0",
)

ACCOUNT = "/api/v1/namespaces/shoal-system/serviceaccounts/shoal-decisions/token"


def answer(*models: ModelScaling) -> dict[str, Any]:
    return Decisions(operator="shoal-operator-1", leads=True, time=NOW, models=models).model_dump(mode="json")


@pytest.fixture
def api() -> CannedApi:
    return CannedApi(
        {
            LEASE: {"spec": {"holderIdentity": "shoal-operator-1"}},
            POD: answer(IDLE, LLAMA),
            f"{POD}/chat/llama": answer(LLAMA.model_copy(update={"decisions": DECISIONS})),
            MODEL: {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "Model",
                "metadata": {"name": "llama", "namespace": "chat", "uid": "u1"},
                "spec": {"source": {"uri": "hf://owner/llama"}},
                "status": {"replicas": {"desired": 0, "ready": 0}},
            },
        }
    )


@pytest.fixture
def kubeconfig(api: CannedApi, tmp_path: Path) -> Generator[Path]:
    with api.kubeconfig(tmp_path) as path:
        yield path


def shoal(kubeconfig: Path, *args: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, args, env={"KUBECONFIG": str(kubeconfig)})


# --- why ------------------------------------------------------------------------------------------------------------


def test_why_shows_the_last_decisions_with_their_inputs_and_what_was_not_done(kubeconfig: Path) -> None:
    done = shoal(kubeconfig, "why", "--scaling", "model/llama")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "chat/llama: 4 wanted, 2 ready"
    assert "11:59:26Z (34 s ago)  2 -> 4  ScalingUp: 14 queued on 2 replicas, target 4" in done.output
    (queue,) = [text.split() for text in lines if text.strip().startswith("queue ")]
    assert queue[:6] == ["queue", "4", "waiting", "14,", "target", "4"]
    (kv,) = [text.split() for text in lines if text.strip().startswith("kvCache")]
    assert kv[1:4] == ["?", "kvTokensUsed", "?"], "unknown is not zero"
    assert "not done: not 3: 14 / 3 is above the target" in done.output
    assert "09:00:00Z (3 h ago, 12 times)  2  ReplicasReady" in done.output, "newest first, a repetition once"


def test_why_shows_the_stages_of_cold_starts_and_what_would_shorten_them(kubeconfig: Path, api: CannedApi) -> None:
    last = {"schedule": 2, "pull": 10, "fetch": 300, "load": 40}
    usual = last | {"fetch": 200, "firstToken": 4}
    variant = {"class": "h100", "coldStart": {"last": last, "median": usual, "starts": 3}}
    api.answers[MODEL]["status"]["variants"] = [variant]
    shown = " ".join(shoal(kubeconfig, "why", "--scaling", "model/llama").output.split())
    assert (
        "cold start on h100: 352 s (schedule 2 s, pull 10 s, fetch 300 s, load 40 s, of which graph capture unknown), "
        "then the first token: unknown; usually 252 s, then 4 s; " in shown
    )
    assert "most is fetch: put the weights on the nodes before: spec.prefetch" in shown


def test_why_says_what_speculation_gives_and_when_nobody_has_told(kubeconfig: Path, api: CannedApi) -> None:
    def said() -> str:
        return " ".join(shoal(kubeconfig, "why", "--scaling", "llama").output.split())

    assert "speculation" not in said()
    api.answers[MODEL]["spec"]["engine"] = {"speculation": {"method": "MTP"}}
    assert "speculation: no replica has told its tokens per step" in said()
    replicas = [
        each.model_copy(update={"tokens_per_step": told})
        for each, told in zip(LLAMA.replicas, (2.5, None), strict=True)
    ]
    api.answers[f"{POD}/chat/llama"] = answer(LLAMA.model_copy(update={"replicas": tuple(replicas)}))
    assert "speculation: 2.50 tokens per step and request since the engines' start (1 of 2 replicas)" in said()


def test_a_decision_that_is_not_shoals_own_names_its_layer(kubeconfig: Path, api: CannedApi) -> None:
    failed = DECISIONS[1].model_copy(update={"reason": "EngineFailed", "layer": "L4", "message": "exit code 1"})
    own = DECISIONS[0].model_copy(update={"layer": "control"})
    api.answers[f"{POD}/chat/llama"] = answer(LLAMA.model_copy(update={"decisions": (own, failed)}))
    said = shoal(kubeconfig, "why", "--scaling", "llama").output
    assert "2 -> 4  ScalingUp: 14 queued" in said
    assert "2  L4 engine EngineFailed: exit code 1" in said
    lines = shoal(kubeconfig, "why", "--scaling", "llama", "-o", "csv").output.splitlines()
    assert [line.split(",")[3:5] for line in lines] == [
        ["reason", "layer"],
        ["ScalingUp", "control"],
        ["EngineFailed", "L4"],
    ]


def test_why_shows_as_many_decisions_as_asked_for(kubeconfig: Path) -> None:
    assert "ReplicasReady" not in shoal(kubeconfig, "why", "--scaling", "llama", "--last", "1").output


def test_why_as_json_is_what_the_operator_said(kubeconfig: Path) -> None:
    found = json.loads(shoal(kubeconfig, "why", "--scaling", "llama", "-n", "chat", "-o", "json").output)
    assert found["decisions"][0]["rules"][1] == {
        "rule": "kvCache",
        "replicas": None,
        "inputs": {"kvTokensUsed": None},
        "sentence": "llama-2 does not say",
    }


def test_why_names_the_signal_sources_that_keep_replicas_from_going(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{POD}/chat/llama"] = answer(LLAMA.model_copy(update={"stale": ("shoal-gateway-1",)}))
    said = shoal(kubeconfig, "why", "--scaling", "llama").output
    assert "stale signals, so no scale-down: shoal-gateway-1" in said
    assert "no decision since this operator became leader" in said


DRIVEN = DriverStats(
    driver="KEDA",
    status="False",
    reason="MetricsUnavailable",
    message="HorizontalPodAutoscaler keda-hpa-llama-l4 gets no metric",
    variants=(
        DrivenVariant(gpu_class="l4", answered=4, replicas_written=2),
        DrivenVariant(gpu_class="h100", answered=0),
    ),
)


def test_why_names_the_driver_and_where_it_lags_behind(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{POD}/chat/llama"] = answer(LLAMA.model_copy(update={"driven": DRIVEN, "decisions": DECISIONS}))
    lines = shoal(kubeconfig, "why", "--scaling", "llama").output.splitlines()
    assert lines[2] == (
        "driver KEDA: MetricsUnavailable: HorizontalPodAutoscaler keda-hpa-llama-l4 gets no metric; l4: 4 answered, "
        "2 written; h100: 0 answered, ? written"
    )


def test_top_marks_a_model_whose_driver_does_not_drive(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[POD] = answer(LLAMA.model_copy(update={"driven": DRIVEN}))
    assert "(MetricsUnavailable)" in shoal(kubeconfig, "top").output
    well = DRIVEN.model_copy(update={"status": "True", "reason": "DrivenByKEDA"})
    api.answers[POD] = answer(LLAMA.model_copy(update={"driven": well}))
    assert "DrivenByKEDA" not in shoal(kubeconfig, "top").output


def test_a_model_that_does_not_exist_is_told_in_the_servers_words(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] = (404, {"reason": "NotFound", "message": 'models.shoal.dev "llama" not found'})
    done = shoal(kubeconfig, "why", "--scaling", "llama")
    assert done.exit_code == 1
    where = "in namespace chat: `kubectl get models -A` lists all; -n names another"
    assert done.output.strip() == f'Error: models.shoal.dev "llama" not found {where}'


def test_a_model_on_which_nothing_is_decided_yet_is_told(kubeconfig: Path, api: CannedApi) -> None:
    nothing = {"reason": "ModelUnknown", "message": "the operator has decided nothing on a Model chat/llama yet"}
    api.answers[f"{POD}/chat/llama"] = (404, nothing)
    done = shoal(kubeconfig, "why", "--scaling", "llama")
    assert done.exit_code == 1
    assert "decided nothing on a Model chat/llama yet: see the Model's conditions" in done.output


# --- reaching the operator ------------------------------------------------------------------------------------------


def test_without_an_operator_it_says_where_it_looked(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[LEASE] = (404, {"reason": "NotFound", "message": "leases not found"})
    done = shoal(kubeconfig, "top")
    assert done.exit_code == 1
    assert "no operator has run in namespace shoal-system" in done.output
    assert "--operator-namespace" in done.output


def test_another_namespace_of_shoal_can_be_named(kubeconfig: Path, api: CannedApi) -> None:
    shoal(kubeconfig, "top", "--operator-namespace", "elsewhere")
    assert api.asked == ["/apis/coordination.k8s.io/v1/namespaces/elsewhere/leases/shoal-operator"]


def test_without_a_leader_it_says_what_to_look_at(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[LEASE] = {"spec": {"holderIdentity": ""}}
    done = shoal(kubeconfig, "why", "--scaling", "llama")
    assert done.exit_code == 1
    assert "there is no leading operator at the moment: look at kubectl -n shoal-system get pods" in done.output


def test_it_shows_the_operator_a_token_that_it_asked_for(kubeconfig: Path, api: CannedApi) -> None:
    """A person's own token stays with the API server; the operator is shown one that opens its decisions alone."""
    api.answers[ACCOUNT] = {"status": {"token": "short-lived"}}
    assert shoal(kubeconfig, "why", "--scaling", "llama").exit_code == 0
    shown = [headers for _, path, headers in api.calls if "proxy/v1/decisions" in path]
    assert {headers["x-shoal-key"] for headers in shown} == {"short-lived"}


def test_without_the_right_to_a_token_it_says_which_one_is_needed(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[ACCOUNT] = (403, "you cannot create serviceaccounts/token")
    done = shoal(kubeconfig, "why", "--scaling", "llama")
    assert done.exit_code == 1
    assert "create a token of the ServiceAccount shoal-decisions" in done.output


def test_without_the_rights_it_says_which_ones_are_needed(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[POD] = (403, 'pods "shoal-operator-1" is forbidden: User "me" cannot get resource "pods/proxy"')
    done = shoal(kubeconfig, "top")
    assert done.exit_code == 1
    assert 'cannot get resource "pods/proxy"' in done.output
    assert "needs the right to get the Lease shoal-operator and pods/proxy in namespace shoal-system" in done.output


def test_a_pod_that_the_api_server_does_not_reach_is_told_with_a_way_around(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[POD] = (503, "error trying to reach service: dial tcp 10.0.0.9:9090: i/o timeout")
    done = shoal(kubeconfig, "top")
    assert done.exit_code == 1
    assert "dial tcp 10.0.0.9:9090: i/o timeout" in done.output
    assert "kubectl -n shoal-system port-forward shoal-operator-1 9090" in done.output


def test_the_operator_can_be_called_at_an_address_instead(kubeconfig: Path, api: CannedApi) -> None:
    server = json.dumps(kubeconfig.read_text()).split("server: ")[1].split("\\n")[0]
    api.answers = {"/v1/decisions": answer(LLAMA)}
    done = shoal(kubeconfig, "top", "--operator-url", server)
    assert "llama" in done.output
    assert api.asked == ["/v1/decisions?namespace=chat"]


def test_a_leader_that_has_just_changed_is_found_by_a_second_look(kubeconfig: Path, api: CannedApi) -> None:
    stale = {"reason": "NotLeading", "message": "shoal-operator-1 does not lead: shoal-operator-2 leads"}
    api.answers[POD] = (503, stale)
    done = shoal(kubeconfig, "top")
    assert [path for path in api.asked if path == LEASE] == [LEASE, LEASE]
    assert done.exit_code == 1
    assert "shoal-operator-2 leads: try again in a few seconds" in done.output


# --- top ------------------------------------------------------------------------------------------------------------


def test_top_shows_a_line_per_model_and_the_totals(kubeconfig: Path, api: CannedApi) -> None:
    done = shoal(kubeconfig, "top", "models")
    assert done.exit_code == 0, done.output
    heading, idle, llama, totals = [text.split("  ") for text in done.output.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (heading, idle, llama, totals)]
    assert cells[0] == [
        "MODEL",
        "REPLICAS",
        "KV %",
        "QUEUE",
        "HELD",
        "IN FLIGHT",
        "REQ/S",
        "TOK/S",
        "COST/H",
        "REASON",
    ]
    assert cells[1] == ["idle", "0/0", "-", "0", "0", "0", "?", "0", "0.00", "ScaledToZero"]
    said = "ScalingUp: 14 queued on 2 replicas, target 4"
    assert cells[2] == ["llama", "2/4", "50", "14", "0", "30", "3.2", "800", "3.72", said]
    assert cells[3][:5] == ["in all", "2/4", "50", "14", "0"]
    assert cells[3][-1] == "2 Models, cost in USD"
    assert api.asked[-1].endswith("?namespace=chat"), "only what is shown is asked for"


def test_top_over_all_namespaces_names_them(kubeconfig: Path, api: CannedApi) -> None:
    done = shoal(kubeconfig, "top", "-A")
    assert done.output.splitlines()[0].startswith("NAMESPACE")
    assert api.asked[-1] == POD


def test_top_as_json_leaves_unknown_null(kubeconfig: Path) -> None:
    idle, llama = json.loads(shoal(kubeconfig, "top", "-o", "json").output)
    assert idle["arrivalsPerSecond"] is None
    assert llama["replicas"][0]["waiting"] == 14


def test_what_is_not_known_is_never_shown_as_zero() -> None:
    silent = LLAMA.model_copy(
        update={
            "held": None,
            "arrivals_per_second": None,
            "replicas": (ReplicaStats(pod="llama-1"),),
            "stale": ("llama-1",),
        }
    )
    of = line([silent])
    assert of.kv_percent is None
    assert [one.text() for one in (of.queue, of.held, of.requests, of.tokens)] == ["?"] * 4
    both = line([silent, LLAMA])
    assert both.kv_percent is None, "a share of which a part is unknown would mislead"
    assert both.queue.text() == "14+?"
    assert add([]) == Sum(0, True)


def test_a_replica_that_has_not_spoken_yet_has_no_load() -> None:
    of = line([LLAMA.model_copy(update={"replicas": (*LLAMA.replicas, ReplicaStats(pod="llama-4"))})])
    assert (of.kv_percent, of.queue.text(), of.tokens.text()) == (50.0, "14", "800")


def test_a_gateway_that_is_not_heard_leaves_a_part_of_the_demand_unknown() -> None:
    of = line([LLAMA.model_copy(update={"stale": ("shoal-gateway-1",)})])
    assert (of.held.text(), of.in_flight.text()) == ("0+?", "30+?")
    of = line([LLAMA.model_copy(update={"stale": ("llama-3",)})])
    assert of.in_flight.text() == "30", "gateways are all heard"


def test_a_narrow_terminal_keeps_the_numbers_and_leaves_the_message_out() -> None:
    found = Decisions(operator="o", leads=True, time=NOW, models=(LLAMA,))
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render(found, wide=False, sort="name", width=100))
    said = console.export_text()
    assert "ScalingUp" in said
    assert "queued" not in said


def test_a_low_terminal_says_how_many_models_it_leaves_out_and_counts_them() -> None:
    models = tuple(LLAMA.model_copy(update={"model": f"chat/m{i:02}"}) for i in range(40))
    found = Decisions(operator="o", leads=True, time=NOW, models=models)
    console = Console(width=150, file=io.StringIO(), record=True)
    console.print(render(found, wide=False, sort="name", width=150, height=20, live=True))
    said = console.export_text()
    assert len(said.splitlines()) <= 20
    assert "more Models" in said
    assert "40 Models" in said
    assert "80/160" in said, "the totals are of all"


def test_sorted_by_a_figure_what_is_unknown_comes_first() -> None:
    unknown = LLAMA.model_copy(update={"model": "chat/z", "held": None})
    waiting = LLAMA.model_copy(update={"model": "chat/b", "held": 5})
    assert [m.model for m in ordered([LLAMA, waiting, unknown], "held")] == ["chat/z", "chat/b", "chat/llama"]


def test_where_nothing_is_the_namespace_is_named(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[POD] = answer()
    assert shoal(kubeconfig, "top").output == "there is no Model in namespace chat; -A shows all\n"
    assert shoal(kubeconfig, "top", "-A").output == "there is no Model\n"
    assert json.loads(shoal(kubeconfig, "top", "-o", "json").output) == []


# --- wake -----------------------------------------------------------------------------------------------------------


def test_wake_writes_the_time_and_says_what_happens(kubeconfig: Path, api: CannedApi) -> None:
    done = shoal(kubeconfig, "wake", "model/llama")
    assert done.exit_code == 0, done.output
    assert done.output == (
        "chat/llama: wakes on the cheapest class that fits and is free, and goes back to zero 600 s after the last "
        "request\n"
    )
    ((path, body),) = api.patches
    assert path == f"{MODEL}?fieldManager=kubectl-shoal"
    when = datetime.fromisoformat(body["metadata"]["annotations"]["shoal.dev/wake"])
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=1)
    assert list(body) == ["metadata"], "nothing else is touched"


def test_wake_of_a_model_that_runs_says_that_it_counts_as_a_request(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] |= {"status": {"replicas": {"desired": 2, "ready": 2}}}
    assert "has 2 replicas: counts as a request now" in shoal(kubeconfig, "wake", "llama").output


def test_wake_of_a_paused_model_says_when_it_wakes(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL]["metadata"]["annotations"] = {"shoal.dev/paused": "true"}
    assert (
        "is paused: it wakes when the annotation shoal.dev/paused is gone" in shoal(kubeconfig, "wake", "llama").output
    )


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("NoFit", "no class is large enough", "cannot start now: NoFit: no class is large enough; the wake counts"),
        ("SourceNotFound", "hf://o/x: there is none", "cannot start now: SourceNotFound: hf://o/x: there is none"),
        ("Fetching", "0 of 1 replicas ready; 40 %", "is starting already"),
    ],
)
def test_wake_of_a_model_that_cannot_start_says_what_stands_in_the_way(
    kubeconfig: Path, api: CannedApi, reason: str, message: str, expected: str
) -> None:
    ready = {"type": "Ready", "status": "False", "reason": reason, "message": message}
    ready["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    api.answers[MODEL]["status"] = {"replicas": {"desired": 1, "ready": 0}, "conditions": [ready]}
    assert expected in shoal(kubeconfig, "wake", "llama").output


def test_wake_can_wait_until_a_replica_serves(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] |= {"status": {"replicas": {"desired": 1, "ready": 1}}}
    assert "a replica serves after" in shoal(kubeconfig, "wake", "llama", "--wait").output


def test_an_operator_of_another_version_is_told_of_in_one_line(kubeconfig: Path, api: CannedApi) -> None:
    (model,) = answer(LLAMA)["models"]
    del model["readyReplicas"]
    api.answers[POD] = answer() | {"models": [model | {"ready": 2}]}
    done = shoal(kubeconfig, "top", "-A", "--once")
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "does not understand (models.0.readyReplicas: Field required): is this command of the same version?" in line


def test_what_wake_did_can_be_read_by_a_program(kubeconfig: Path, api: CannedApi) -> None:
    done = shoal(kubeconfig, "wake", "llama", "-o", "json")
    assert json.loads(done.stdout) == {
        "model": "chat/llama",
        "readySeconds": None,
        "message": (
            "wakes on the cheapest class that fits and is free, and goes back to zero 600 s after the last request"
        ),
    }
    api.answers[MODEL] |= {"status": {"replicas": {"desired": 1, "ready": 1}}}
    waited = shoal(kubeconfig, "wake", "llama", "--wait", "-o", "csv")
    (row,) = csv.DictReader(io.StringIO(waited.stdout))
    assert (row["model"], float(row["readySeconds"]) < 60) == ("chat/llama", True)
    assert "a replica serves after" in waited.stderr, "people see the progress meanwhile"


def test_wake_that_waits_in_vain_says_what_the_model_says(kubeconfig: Path, api: CannedApi) -> None:
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": "NoCapacity",
        "message": "class h100-80gb has 0 free",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    api.answers[MODEL]["status"] = {"replicas": {"desired": 1, "ready": 0}, "conditions": [condition]}
    done = shoal(kubeconfig, "wake", "llama", "--wait", "--timeout", "1")
    assert done.exit_code == 1
    assert "no replica serves after 1 s: NoCapacity: class h100-80gb has 0 free" in done.output
    told = shoal(kubeconfig, "wake", "llama", "--wait", "--timeout", "1", "-o", "json")
    assert (told.exit_code, json.loads(told.stdout)["readySeconds"]) == (1, None), "it is woken all the same"


def test_wake_of_a_model_that_does_not_exist_is_told_in_the_servers_words(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] = (404, {"reason": "NotFound", "message": 'models.shoal.dev "llama" not found'})
    done = shoal(kubeconfig, "wake", "llama")
    assert done.exit_code == 1
    assert 'models.shoal.dev "llama" not found' in done.output
    assert not api.patches


# --- with a role ----------------------------------------------------------------------------------------------------

SYSTEM = "/api/v1/namespaces/shoal-system"
SERVICE = f"{SYSTEM}/services/shoal-operator"
PAGES = f"{SERVICE}:9090/proxy/v1/decisions"


def viewer_token(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/serviceaccounts/shoal-viewer/token"


@pytest.fixture
def team(api: CannedApi) -> CannedApi:
    """The user sees the namespace `chat`, may get no Lease and reach no pod."""
    api.answers[viewer_token("chat")] = {"status": {"token": "of-chat"}}
    for refused in (viewer_token("shoal-system"), LEASE, POD, ACCOUNT, f"{POD}/chat/llama"):
        api.answers[refused] = (403, f"you may not: {refused}")
    api.answers[SERVICE] = {"spec": {"ports": [{"port": 9090}]}}
    api.answers[PAGES] = answer(LLAMA)
    api.answers[f"{PAGES}/chat/llama"] = answer(LLAMA.model_copy(update={"decisions": DECISIONS}))
    return api


def proxied(api: CannedApi) -> list[tuple[str, str]]:
    return [(path, headers.get("x-shoal-key", "")) for _, path, headers in api.calls if "/proxy/" in path]


def test_a_team_sees_top_and_why_of_its_namespace(kubeconfig: Path, team: CannedApi) -> None:
    assert "llama" in shoal(kubeconfig, "top", "--once").output
    assert "11:59:26Z" in shoal(kubeconfig, "why", "--scaling", "llama", "-n", "chat").output
    assert proxied(team) == [(f"{PAGES}?namespace=chat", "of-chat"), (f"{PAGES}/chat/llama", "of-chat")]
    assert LEASE not in team.asked


def test_a_team_is_told_what_all_namespaces_take(kubeconfig: Path, team: CannedApi) -> None:
    done = shoal(kubeconfig, "top", "-A", "--once")
    assert done.exit_code == 1
    assert "This needs the ClusterRole shoal-viewer. An administrator runs:" in done.output
    assert "kubectl -n shoal-system create rolebinding shoal-viewer-user --clusterrole=shoal-viewer --user=USER" in (
        done.output
    )
    assert "Or ask for one namespace whose shoal-viewer you are, with -n." in done.output
    assert proxied(team) == []


def test_what_the_operator_refuses_is_told_in_its_words(kubeconfig: Path, team: CannedApi) -> None:
    said = {"reason": "Forbidden", "message": "system:serviceaccount:chat:shoal-viewer may not get decisions.shoal.dev"}
    team.answers[PAGES] = (403, said)
    done = shoal(kubeconfig, "top", "--once")
    assert (done.exit_code, "may not get decisions.shoal.dev" in done.output) == (1, True)
    assert "shoal-reach" not in done.output
    team.answers[PAGES] = (403, "services/proxy is forbidden")
    assert "This needs the Role shoal-reach in namespace shoal-system" in shoal(kubeconfig, "top", "--once").output


def test_an_operator_that_does_not_lead_is_asked_again_until_the_leader_answers(
    kubeconfig: Path, team: CannedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = (503, {"reason": "NotLeading", "message": "shoal-operator-1 does not lead: shoal-operator-2 leads"})

    class Turns(dict[str, Any]):
        """The proxy reaches the one that leads at the third call."""

        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            return stale if key == PAGES and len(proxied(team)) % 3 else found

    team.answers = Turns(team.answers)
    assert "llama" in shoal(kubeconfig, "top", "--once").output
    assert len(proxied(team)) == 3
    team.answers[PAGES] = stale
    done = shoal(kubeconfig, "top", "--once")
    assert (done.exit_code, "shoal-operator-2 leads: try again" in done.output) == (1, True)


def test_a_token_that_has_expired_is_replaced(kubeconfig: Path, team: CannedApi) -> None:
    expired = (401, {"reason": "Unauthorized", "message": "it has expired"})
    team.answers[PAGES] = expired
    done = shoal(kubeconfig, "top", "--once")
    assert "the operator does not accept the token: it has expired" in done.output
    # Twice with each token: the client cannot tell the operator's 401 from one of the API server.
    assert len(proxied(team)) == 4
