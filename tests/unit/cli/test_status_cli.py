"""`shoal status`: what a person sees of Models, and what is said when something cannot be read."""

import csv
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing
from click.testing import CliRunner, Result
from rich.console import Console

from shoal.agent.stage.progress import DownloadProgress
from shoal.api.replica import StageProgress
from shoal.cli.main import main
from shoal.cli.status.command import render
from shoal.cli.status.read import StatusSnapshot, last_progress
from shoal.cli.status.view import CanaryRow, ModelRow, RouteRow, fetched
from tests.support.cannedapi import CannedApi

GI = 2**30
MODEL: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"name": "llama", "namespace": "chat", "uid": "u1"},
    "spec": {"source": {"uri": "hf://owner/llama"}},
    "status": {
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Fetching",
                "message": "0 of 1 replicas ready",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
        "variants": [
            {
                "class": "l40s-48gb",
                "desired": 1,
                "ready": 0,
                "gpusPerReplica": 2,
                "step": "Fetching",
                "hourlyCost": "1.86",
                "coldStartSeconds": 74,
                "kvTokensPerReplica": {"predicted": 183911, "engine": 183000},
            },
            {"class": "l4-24gb", "excluded": "weights do not fit"},
        ],
    },
}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "llama-1",
        "namespace": "chat",
        "uid": "p1",
        "labels": {
            "app.kubernetes.io/component": "engine",
            "shoal.dev/model": "llama",
            "shoal.dev/model-uid": "u1",
            "shoal.dev/gpu-class": "l40s-48gb",
        },
    },
    "spec": {"nodeName": "node-1", "containers": []},
    "status": {"phase": "Pending", "initContainerStatuses": [{"name": "stage", "state": {"running": {}}}]},
}
ROUTES = "/apis/shoal.dev/v1alpha1/namespaces/chat/modelroutes"


def route(name: str, ready: str, reason: str, message: str, **told: Any) -> dict[str, Any]:
    moment = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message, **moment}
    accepted = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "1 rule", **moment}
    accepted |= told.pop("accepted", {})
    return {
        "metadata": {"name": name, "namespace": "chat", "uid": f"u-{name}"},
        "spec": {"rules": [{"targets": [{"model": {"name": "llama"}}]}]},
        "status": {"conditions": [accepted, condition], **told},
    }


LOG = "\n".join(
    [
        json.dumps({"event": "stage.progress", "state": "fetching", "bytes_done": 3 * GI, "bytes_total": 10 * GI}),
        json.dumps({"event": "stage.progress", "state": "fetching", "bytes_done": 4 * GI, "bytes_total": 10 * GI}),
        json.dumps({"event": "stage.retry", "problem": "slow"}),
        "not a line of JSON",
    ]
)


@pytest.fixture
def api() -> CannedApi:
    return CannedApi(
        {
            "/apis/shoal.dev/v1alpha1/namespaces/chat/models": {"items": [MODEL]},
            "/apis/shoal.dev/v1alpha1/namespaces/chat/models/llama": MODEL,
            "/apis/shoal.dev/v1alpha1/models": {"items": [MODEL]},
            ROUTES: {"items": []},
            "/apis/shoal.dev/v1alpha1/modelroutes": {"items": []},
            "/api/v1/namespaces/chat/pods": {"items": [POD]},
            "/api/v1/pods": {"items": [POD]},
            "/api/v1/namespaces/chat/pods/llama-1/log": LOG,
        }
    )


@pytest.fixture
def kubeconfig(api: CannedApi, tmp_path: Path) -> Generator[Path]:
    with api.kubeconfig(tmp_path) as path:
        yield path


def status(kubeconfig: Path, *args: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["status", *args], env={"KUBECONFIG": str(kubeconfig)})


def test_a_model_that_is_fetched_shows_the_per_cent_and_what_it_runs_on(kubeconfig: Path) -> None:
    done = status(kubeconfig)
    assert done.exit_code == 0, done.output
    heading, line, *more = done.output.splitlines()
    for word in ("MODEL", "READY", "CLASS", "UP", "GPUS", "STEP", "KV TOKENS", "COLD START", "COST/H", "MESSAGE"):
        assert word in heading
    for word in ("llama", "False", "l40s-48gb", "0/1", "Fetching 40 % of 10.0 GiB", "183,000", "74 s", "1.86"):
        assert word in line
    assert "Fetching: 0 of 1 replicas ready" in line
    assert not more, "classes that are not used have no line"


def test_on_a_narrow_terminal_the_message_stands_below_the_table(kubeconfig: Path) -> None:
    assert "MESSAGE" in status(kubeconfig).output
    row = ModelRow("chat", "llama", "False", "Fetching", "0 of 1 replicas ready", ())
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(StatusSnapshot([row], ()), wide=False, width=console.width))
    heading, line, blank, message = (text.rstrip() for text in console.export_text().splitlines())
    assert "MESSAGE" not in heading
    assert line.startswith("llama")
    assert not blank
    assert message == "llama: Fetching: 0 of 1 replicas ready"


def test_on_a_wide_terminal_capabilities_are_a_column() -> None:
    row = ModelRow("chat", "llama", "True", "ReplicasReady", "", (), ("generate", "tools"))
    shown: dict[int, str] = {}
    for width in (150, 170):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render(StatusSnapshot([row], ()), wide=False, width=width))
        shown[width] = console.export_text()
    assert "generate tools" in shown[170]
    assert "CAPABILITIES" in shown[170]
    assert "CAPABILITIES" not in shown[150]


def test_one_model_can_be_named_as_kubectl_writes_it(kubeconfig: Path, api: CannedApi) -> None:
    assert "40 %" in status(kubeconfig, "model/llama").output
    assert api.asked[0] == "/apis/shoal.dev/v1alpha1/namespaces/chat/models/llama"


def test_all_namespaces_are_shown_with_their_names(kubeconfig: Path) -> None:
    done = status(kubeconfig, "-A")
    assert done.output.splitlines()[0].startswith("NAMESPACE")
    assert done.output.splitlines()[1].startswith("chat")


HALTED = "canary of rule default halted: Model chat/next: 3 of its last 5 requests failed"


def canary(rule: str, state: str) -> dict[str, Any]:
    return {"rule": rule, "state": state, "revision": "0"} | ({"message": HALTED} if state == "Halted" else {})


def test_routes_follow_the_models_with_what_is_to_be_known_of_them(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[ROUTES] = {
        "items": [
            route("quiet", "True", "TargetsReady", "every target can serve", servedNames=["quiet", "calm"]),
            route(
                "front", "True", "CanaryHalted", HALTED, servedNames=["front"], canaries=[canary("default", "Halted")]
            ),
            route("bad", "False", "TargetNotFound", "there is no Model chat/none"),
            route("two", "True", "TargetsReady", "", canaries=[canary("a", "Running"), canary("b", "Halted")]),
            route(
                "late", "True", "TargetsReady", "", accepted={"reason": "NameClaimed", "message": "front is another's"}
            ),
        ]
    }
    done = status(kubeconfig)
    assert done.exit_code == 0, done.output
    model, heading = done.output.split("\n\n")[0], done.output.split("\n\n")[1].splitlines()[0]
    assert "llama" in model
    assert heading.split() == ["ROUTE", "READY", "NAMES", "CANARY", "MESSAGE"]
    rows = {line.split()[0]: " ".join(line.split()) for line in done.output.split("\n\n")[1].splitlines()[1:]}
    assert rows["quiet"] == "quiet True quiet, calm -"
    assert rows["bad"] == "bad False - - TargetNotFound: there is no Model chat/none"
    assert rows["front"].startswith("front True front Halted CanaryHalted: canary of rule default halted: Model")
    assert rows["two"] == "two True - a: Running, b: Halted"
    assert rows["late"] == "late True - - NameClaimed: front is another's"
    found = {one["route"]: one for one in json.loads(status(kubeconfig, "-o", "json").output)["routes"]}
    assert (found["chat/front"]["reason"], found["chat/front"]["servedNames"]) == ("CanaryHalted", ["front"])
    assert found["chat/front"]["canaries"] == [{"rule": "default", "state": "Halted", "message": HALTED}]


def test_one_route_can_be_named(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{ROUTES}/front"] = route("front", "True", "CanaryHalted", HALTED, canaries=[canary("r", "Halted")])
    done = status(kubeconfig, "route/front")
    assert done.output.splitlines()[0].split()[:2] == ["ROUTE", "READY"]
    assert "Halted" in done.output
    assert "llama" not in done.output
    assert api.asked == [f"{ROUTES}/front"]
    assert "give a name, model/name or route/name" in status(kubeconfig, "node/front").output


def test_on_a_narrow_terminal_what_is_to_be_known_of_a_route_stands_below() -> None:
    row = RouteRow(
        "chat", "front", "True", "CanaryHalted", HALTED, ("front",), (CanaryRow("default", "Halted", HALTED),)
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(StatusSnapshot([], (), (row,)), wide=True, width=console.width))
    heading, line, blank, message = (text.rstrip() for text in console.export_text().splitlines())
    assert "MESSAGE" not in heading
    assert line.split() == ["chat", "front", "True", "front", "Halted"]
    assert not blank
    assert message == f"chat/front: CanaryHalted: {HALTED}"


def test_without_the_right_to_see_routes_the_models_are_shown(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[ROUTES] = (403, "modelroutes is forbidden: no")
    done = status(kubeconfig)
    assert "l40s-48gb" in done.output
    assert "routes are unknown: modelroutes is forbidden: no" in done.output


def test_a_route_of_another_version_or_without_a_status_is_shown(kubeconfig: Path, api: CannedApi) -> None:
    strange = route("strange", "True", "x", "y", canaries=[{"rule": "a", "state": "Asleep", "revision": "0"}])
    new = {key: value for key, value in route("new", "True", "x", "y").items() if key != "status"}
    api.answers[ROUTES] = {"items": [strange, new]}
    output = status(kubeconfig).output
    assert "its status is of a version that this command does not know" in output
    assert "the operator has not reconciled it yet: is it running?" in output


def test_options_of_the_cluster_may_stand_before_the_command_as_with_kubectl(kubeconfig: Path, api: CannedApi) -> None:
    done = CliRunner().invoke(main, ["--kubeconfig", str(kubeconfig), "-n", "chat", "status", "llama"])
    assert done.exit_code == 0, done.output
    assert "40 %" in done.output
    assert api.asked[0] == "/apis/shoal.dev/v1alpha1/namespaces/chat/models/llama"
    # The command's own option is nearer.
    CliRunner().invoke(main, ["--kubeconfig", str(kubeconfig), "-n", "chat", "status", "-n", "other", "llama"])
    assert "/apis/shoal.dev/v1alpha1/namespaces/other/models/llama" in api.asked
    # One without such an option ignores it; a sub-command has it too.
    done = CliRunner().invoke(main, ["-n", "chat", "keys", "list", "-f", "nowhere.yaml"])
    assert "No such option" not in done.output


def test_as_json_the_numbers_are_numbers(kubeconfig: Path) -> None:
    (row,) = json.loads(status(kubeconfig, "-o", "json").output)["models"]
    assert row["variants"][0]["gpus"] == 2
    assert row["variants"][0]["coldStartSeconds"] == 74


def test_as_csv_there_is_a_line_per_model_and_class(kubeconfig: Path) -> None:
    head, line = status(kubeconfig, "-o", "csv").output.splitlines()
    found = dict(zip(head.split(","), line.split(","), strict=True))
    assert (found["model"], found["ready"]) == ("chat/llama", "False")
    assert (found["gpuClass"], found["desired"], found["readyReplicas"], found["gpus"]) == ("l40s-48gb", "1", "0", "2")


def test_as_csv_a_route_has_its_own_columns(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{ROUTES}/front"] = route(
        "front", "True", "CanaryHalted", HALTED, servedNames=["front", "door"], canaries=[canary("r", "Halted")]
    )
    head, line = csv.reader(status(kubeconfig, "route/front", "-o", "csv").output.splitlines())
    assert dict(zip(head, line, strict=True)) == {
        "route": "chat/front",
        "ready": "True",
        "servedNames": "front door",
        "canaries": "r:Halted",
        "reason": "CanaryHalted",
        "message": HALTED,
    }


def test_without_the_right_to_read_logs_the_rest_is_shown_and_the_reason_told(kubeconfig: Path, api: CannedApi) -> None:
    api.answers["/api/v1/namespaces/chat/pods/llama-1/log"] = (403, 'pods "llama-1" is forbidden: cannot get pods/log')
    done = status(kubeconfig)
    assert done.exit_code == 0
    assert "Fetching  " in done.output
    assert 'progress of fetches is unknown: pods "llama-1" is forbidden' in done.output


def test_without_the_right_to_see_pods_the_models_are_shown(kubeconfig: Path, api: CannedApi) -> None:
    api.answers["/api/v1/namespaces/chat/pods"] = (403, "pods is forbidden: cannot list pods")
    done = status(kubeconfig)
    assert "l40s-48gb" in done.output
    assert "progress of pods is unknown: pods is forbidden" in done.output


def test_gpus_that_are_out_of_use_are_named_where_a_model_uses_their_class(kubeconfig: Path, api: CannedApi) -> None:
    def gpu_class(name: str) -> dict[str, Any]:
        told = {
            "type": "GPUsHealthy", "status": "False", "reason": "GPUsQuarantined",
            "message": "node a is out of use (GPUFellOffBus: Xid 79)", "lastTransitionTime": "2026-01-01T00:00:00Z",
        }  # fmt: skip
        return {"metadata": {"name": name, "uid": name}, "status": {"conditions": [told]}}

    path = "/apis/shoal.dev/v1alpha1/gpuclasses"
    api.answers[path] = {"items": [gpu_class("l40s-48gb"), gpu_class("l4-24gb")]}
    said = status(kubeconfig).output
    assert "GPUClass l40s-48gb: GPUsQuarantined: node a is out of use (GPUFellOffBus: Xid 79)" in said
    assert "l4-24gb" not in said
    api.answers[path] = (403, "gpuclasses.shoal.dev is forbidden")
    assert "forbidden" not in status(kubeconfig).output, "who sees one namespace need not see classes"


def test_no_right_to_see_models_is_said_in_the_servers_words(kubeconfig: Path, api: CannedApi) -> None:
    api.answers["/apis/shoal.dev/v1alpha1/namespaces/chat/models"] = (403, "models.shoal.dev is forbidden: no")
    done = status(kubeconfig)
    assert done.exit_code == 1
    assert "models.shoal.dev is forbidden: no" in done.output


def test_without_the_right_to_see_models_the_command_that_grants_it_is_shown(kubeconfig: Path, api: CannedApi) -> None:
    review = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    api.answers[review] = {"status": {"userInfo": {"username": "ada"}}}
    api.answers["/apis/shoal.dev/v1alpha1/namespaces/chat/models"] = (403, "models.shoal.dev is forbidden: no")
    role = "--clusterrole=shoal-viewer --user=ada"
    assert f"kubectl -n chat create rolebinding shoal-viewer-ada {role}" in status(kubeconfig).output
    api.answers["/apis/shoal.dev/v1alpha1/models"] = (403, "models.shoal.dev is forbidden at the cluster scope")
    assert f"kubectl create clusterrolebinding shoal-viewer-ada {role}" in status(kubeconfig, "-A").output


def test_a_cluster_without_the_kind_says_what_to_install(kubeconfig: Path, api: CannedApi) -> None:
    del api.answers["/apis/shoal.dev/v1alpha1/namespaces/chat/models"]
    done = status(kubeconfig)
    assert done.exit_code == 1
    assert "is Shoal's chart `shoal-crds` installed?" in done.output


def test_an_empty_namespace_says_so(kubeconfig: Path, api: CannedApi) -> None:
    api.answers["/apis/shoal.dev/v1alpha1/namespaces/chat/models"] = {"items": []}
    assert status(kubeconfig).output == "there is no Model in namespace chat; -A shows all\n"


def test_a_model_that_nobody_looked_at_asks_for_the_operator(kubeconfig: Path, api: CannedApi) -> None:
    bare = {k: v for k, v in MODEL.items() if k != "status"}
    api.answers["/apis/shoal.dev/v1alpha1/namespaces/chat/models"] = {"items": [bare]}
    assert "the operator has not reconciled it yet: is it running?" in status(kubeconfig).output


def test_no_cluster_at_all_is_told(tmp_path: Path) -> None:
    done = status(tmp_path / "none")
    assert done.exit_code == 1
    assert "cannot connect to a cluster" in done.output


def test_all_namespaces_and_a_name_exclude_each_other(kubeconfig: Path) -> None:
    done = status(kubeconfig, "-A", "llama")
    assert done.exit_code == 2
    assert "--all-namespaces excludes" in done.output


def test_the_last_line_about_progress_counts() -> None:
    found = last_progress(LOG)
    assert found is not None
    assert found.bytes_done == 4 * GI
    assert last_progress("") is None
    assert last_progress('{"event": "stage.progress"}') is None, "a line that is cut off says nothing"


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ([], ""),
        ([StageProgress(state="fetching", bytes_done=0)], ""),
        ([StageProgress(state="fetching", bytes_done=GI)], "1.0 GiB"),
        ([StageProgress(state="fetching", bytes_done=GI, bytes_total=4 * GI)], "25 % of 4.0 GiB"),
        ([StageProgress(state="fetching", bytes_done=5 * GI, bytes_total=4 * GI)], "100 % of 4.0 GiB"),
        (
            [
                StageProgress(state="fetching", bytes_done=GI, bytes_total=4 * GI),
                StageProgress(state="fetching", bytes_done=4 * GI, bytes_total=4 * GI),
            ],
            "62 % of 8.0 GiB",
        ),
    ],
)
def test_what_is_fetched_is_told_as_far_as_it_is_known(known: list[StageProgress], text: str) -> None:
    assert fetched(known) == text


async def test_what_the_stage_container_logs_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.agent.stage.progress.LOG_SECONDS", 0.0)
    arrived = 0
    progress = DownloadProgress(tmp_path / "stage.json", lambda: arrived)
    # A logger of its own: the module's may have been bound for good by another test.
    capture = structlog.testing.LogCapture()
    wrapper = structlog.make_filtering_bound_logger(0)
    own = structlog.wrap_logger(None, processors=[capture], wrapper_class=wrapper)
    monkeypatch.setattr("shoal.agent.stage.progress.log", own)
    await progress.report("fetching")
    progress.total, arrived = 4 * GI, GI
    await progress.report("fetching")
    await progress.report("fetching")
    lines = capture.entries
    assert len(lines) == 2, "what did not change is not told again"
    found = last_progress("\n".join(json.dumps(line) for line in lines))
    assert found is not None
    assert fetched([found]) == "25 % of 4.0 GiB"


def test_a_model_that_is_not_there_is_told_with_the_namespace(kubeconfig: Path, api: CannedApi) -> None:
    message = 'models.shoal.dev "nosuch" not found'
    path = "/apis/shoal.dev/v1alpha1/namespaces/chat/models/nosuch"
    api.answers[path] = (404, {"reason": "NotFound", "message": message})
    done = status(kubeconfig, "nosuch", "-n", "chat")
    assert done.exit_code == 1
    assert f"{message} in namespace chat: `kubectl get models -A` lists all" in done.output
