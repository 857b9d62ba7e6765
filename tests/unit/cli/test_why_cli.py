"""`shoal why`: what a person and a program see of a cause, and what is said when something cannot be read."""

import base64
import csv
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shoal.api.decisions import DecisionRecord, Decisions, ModelScaling
from shoal.api.routestats import ExternalStats, RouteStatsPage
from shoal.cli.main import main
from shoal.cli.why.subjects import SUBJECTS
from shoal.core.layers.refusals import REFUSALS
from tests.faults.worlds import NOW, condition, crashed, node, pending, pod
from tests.support.cannedapi import CannedApi

SHOAL = "/apis/shoal.dev/v1alpha1"
MODEL = f"{SHOAL}/namespaces/chat/models/llama"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/shoal-system/leases/shoal-operator"
DECISIONS = "/api/v1/namespaces/shoal-system/pods/shoal-operator-1:9090/proxy/v1/decisions/chat/llama"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"


GATEWAYS = "/api/v1/namespaces/shoal-system/pods"


def gateway(ready: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "shoal-gateway-1", "namespace": "shoal-system"},
        "spec": {"nodeName": "cpu-1"},
        "status": {"phase": "Running", "conditions": [condition("Ready", ready, "x")]},
    }


def listed(*items: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def model(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": "llama", "namespace": "chat", "uid": "u1", "generation": 1},
        "spec": {"source": {"uri": "hf://owner/llama"}, "variants": [{"class": "h100-80gb"}]},
        "status": {"observedGeneration": 1, "conditions": list(conditions)},
    }


FAILED = model(
    condition("Ready", "False", "EngineFailed", f"the engine of pod chat/llama-1 ended with exit code 1: {OOM}")
)
GPU_CLASS = {
    "metadata": {"name": "h100-80gb", "generation": 1},
    "spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100"}, "resourceName": "nvidia.com/gpu"},
    "status": {"conditions": [condition("Ready", "True", "NodesFound")]},
}
SCALING = ModelScaling(
    model="chat/llama",
    wanted=1,
    ready_replicas=0,
    reason="Waking",
    message="a request waits",
    decisions=(DecisionRecord(time=NOW, before=0, wanted=1, reason="Waking", message="a request waits"),),
)


@pytest.fixture
def api() -> CannedApi:
    answer = Decisions(operator="shoal-operator-1", leads=True, time=NOW, models=(SCALING,))
    return CannedApi(
        {
            MODEL: FAILED,
            "/api/v1/namespaces/chat/pods": listed(pod(crashed(OOM))),
            "/api/v1/nodes": listed(node()),
            f"{SHOAL}/gpuclasses": listed(GPU_CLASS),
            "/apis/events.k8s.io/v1/namespaces/chat/events": listed(),
            "/apis/events.k8s.io/v1/namespaces/default/events": listed(),
            GATEWAYS: listed(gateway("True")),
            "/apis/networking.k8s.io/v1/namespaces/chat/networkpolicies": listed(),
            "/apis/autoscaling/v2/namespaces/chat/horizontalpodautoscalers": listed(),
            "/apis/networking.k8s.io/v1/namespaces/shoal-system/networkpolicies": listed(),
            LEASE: {"spec": {"holderIdentity": "shoal-operator-1", "renewTime": "2999-01-01T00:00:00.000000Z"}},
            DECISIONS: answer.model_dump(mode="json", by_alias=True),
        }
    )


@pytest.fixture
def kubeconfig(api: CannedApi, tmp_path: Path) -> Generator[Path]:
    with api.kubeconfig(tmp_path) as path:
        yield path


def why(kubeconfig: Path, *args: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["why", *args], env={"KUBECONFIG": str(kubeconfig)})


def test_a_cause_is_told_in_the_order_of_the_questions_a_person_asks(kubeconfig: Path) -> None:
    done = why(kubeconfig, "model/llama")
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert lines[0] == "Model chat/llama: something is wrong"
    assert lines[2].startswith("1. wrong     container engine of pod chat/llama-1 ended with exit code 1")
    first = [line.split()[0] for line in lines[3:] if line.startswith("   ") and line[3:4] != " "]
    assert first == ["layer", "seen", "tried", "do", "explains"]
    assert "   layer     L3 execution  OutOfGPUMemory" in lines
    assert "CUDA out of memory" in done.output
    assert "restarted container engine of pod chat/llama-1 3 times" in done.output
    assert "smaller memory fraction" in done.output
    assert "L4 engine EngineFailed" in done.output
    assert "2." not in done.output, "what the cause explains is no cause"


def test_the_decisions_about_a_models_replicas_follow(kubeconfig: Path) -> None:
    shown = why(kubeconfig, "llama").output
    assert "chat/llama: 1 wanted, 0 ready" in shown
    assert "0 -> 1  Waking: a request waits" in shown
    only = why(kubeconfig, "llama", "--scaling").output
    assert only.startswith("chat/llama: 1 wanted, 0 ready")
    assert "L3" not in only


def test_for_programs_a_cause_has_fields(kubeconfig: Path) -> None:
    found = json.loads(why(kubeconfig, "llama", "-o", "json").output)
    assert (found["kind"], found["name"], found["state"]) == ("Model", "chat/llama", "failing")
    (cause,) = found["causes"]
    assert (cause["layer"], cause["reason"], cause["state"]) == ("L3", "OutOfGPUMemory", "fault")
    assert isinstance(cause["evidence"][0]["ageSeconds"], int)
    assert cause["explains"]
    assert found["scaling"]["wanted"] == 1
    assert found["unread"] == []
    (row,) = csv.DictReader(io.StringIO(why(kubeconfig, "llama", "-o", "csv").output))
    assert (row["layer"], row["reason"]) == ("L3", "OutOfGPUMemory")


def test_a_broken_gpu_stands_before_the_engine_that_it_ends(kubeconfig: Path, api: CannedApi) -> None:
    xid = condition("XIDErrors", "True", "XIDError", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus")
    api.answers["/api/v1/nodes"] = listed(node(xid))
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert (cause["layer"], cause["reason"]) == ("L0", "GPUFellOffBus")
    assert any("OutOfGPUMemory" in line for line in cause["explains"])


def test_a_gateway_that_is_not_ready_says_what_it_misses(kubeconfig: Path, api: CannedApi) -> None:
    stuck = gateway("False")
    stuck["metadata"]["uid"] = "u2"
    stuck["metadata"]["labels"] = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}
    stuck["status"]["containerStatuses"] = [{"name": "gateway", "state": {"running": {}}}]
    api.answers[MODEL] = model(condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    api.answers[GATEWAYS] = listed(stuck)
    page = f"{GATEWAYS}/shoal-gateway-1:9090/proxy/readyz"
    api.answers[page] = (503, {"status": "not ready", "missing": ["spool"]})
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert (cause["layer"], cause["reason"]) == ("L5", "UsageSpoolRefuses")
    del api.answers[page]  # it does not answer
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert cause["reason"] == "GatewaysNotReady"


def test_what_cannot_be_read_is_listed_and_the_rest_is_explained(kubeconfig: Path, api: CannedApi) -> None:
    refused = 'nodes is forbidden: User "me" cannot list resource "nodes"'
    api.answers["/api/v1/nodes"] = (403, refused)
    api.answers[LEASE] = (403, "leases is forbidden")
    done = why(kubeconfig, "llama")
    assert done.exit_code == 0
    assert "layer     L3 execution  OutOfGPUMemory" in done.output
    assert "not read, so not known:" in done.output
    assert f"nodes: {refused}" in done.output
    assert "decisions of the operator: leases is forbidden" in done.output


def test_nothing_wrong_is_not_said_where_something_could_not_be_read(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] = model(condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    assert why(kubeconfig, "llama").output.splitlines()[:2] == [
        "Model chat/llama: nothing is wrong",
        "Ready is True: ReplicasReady: 1 of 1 replicas ready",
    ]
    api.answers["/api/v1/nodes"] = (403, "nodes is forbidden")
    assert json.loads(why(kubeconfig, "llama", "-o", "json").output)["state"] == "unknown"


def test_a_note_and_a_step_are_not_called_wrong(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{SHOAL}/tenants/acme"] = {
        "metadata": {"name": "acme", "generation": 1},
        "spec": {"models": [{"namespace": "chat", "name": "llama"}]},
        "status": {"observedGeneration": 1, "conditions": [condition("Ready", "True", "Active", "1 key")]},
    }
    shown = why(kubeconfig, "tenant/acme").output
    assert shown.startswith("Tenant acme: nothing is wrong\n\n1. note   Model chat/llama does not serve: ")
    assert "layer  L6 client  TargetNotServing\n" in shown
    api.answers[MODEL] = model(condition("Ready", "False", "Fetching", "3 of 9 GB of the weights are there"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    shown = why(kubeconfig, "llama").output
    assert shown.startswith("Model chat/llama: on its way\n\n1. pending  Model chat/llama: 3 of 9 GB of the weights")
    assert "Fetching (ends by itself)\n" in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_the_message_of_a_condition_is_shown_whole(kubeconfig: Path, api: CannedApi) -> None:
    sums = "; ".join(f"class-{n}: on 4 GPUs with 44.99 GiB each, weights need {n}03.19 GiB" for n in range(14))
    assert 900 < len(sums) < 1000
    api.answers[MODEL] = model(condition("Placed", "False", "NoFit", f"fits on no GPU class: {sums}"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert cause["message"].endswith(sums)
    # It is evidence too: there its beginning is enough.
    assert cause["evidence"][0]["what"].endswith("weights need 303.19 GiB; ...")


def test_kind_and_name_may_be_two_words(kubeconfig: Path) -> None:
    assert why(kubeconfig, "model", "llama").output.splitlines()[0] == "Model chat/llama: something is wrong"
    assert why(kubeconfig, "model/llama", "other").exit_code == 2


@pytest.mark.parametrize(("maker", "told"), [(None, True), ("ScaledObject", False)])
def test_another_autoscaler_of_a_models_deployment_is_named(
    kubeconfig: Path, api: CannedApi, maker: str | None, told: bool
) -> None:
    ready = model(condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready"))
    api.answers[MODEL] = ready | {"spec": {"variants": [{"class": "h100-80gb"}]}}
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    owners = [{"kind": maker, "name": "llama"}] if maker else []
    api.answers["/apis/autoscaling/v2/namespaces/chat/horizontalpodautoscalers"] = listed(
        {
            "metadata": {"namespace": "chat", "name": "team", "ownerReferences": owners},
            "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "llama-h100-80gb"}},
        }
    )
    found = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert [cause["reason"] for cause in found] == (["OtherAutoscaler"] if told else [])


def test_a_model_that_does_not_exist_is_told_in_the_servers_words(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] = (404, {"reason": "NotFound", "message": 'models.shoal.dev "llama" not found'})
    done = why(kubeconfig, "llama")
    assert (done.exit_code, 'models.shoal.dev "llama" not found' in done.output) == (1, True)


def test_a_kind_that_nobody_knows_is_refused_with_those_that_there_are(kubeconfig: Path) -> None:
    done = why(kubeconfig, "secret/x")
    assert done.exit_code == 2
    for kind in SUBJECTS:
        assert kind in done.output
    assert why(kubeconfig, "tenant/acme", "--scaling").exit_code == 2


def test_an_operator_that_is_away_is_told(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] = model()
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    api.answers[LEASE] = {"spec": {"holderIdentity": "shoal-operator-1", "renewTime": "2026-01-01T00:00:00Z"}}
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert (cause["layer"], cause["reason"]) == ("control", "OperatorNotLeading")
    assert any("Pending" in line for line in cause["explains"])


def adapter_of_a_pool(api: CannedApi) -> None:
    api.answers[f"{SHOAL}/namespaces/chat/loraadapters/poet"] = {
        "metadata": {"name": "poet", "namespace": "chat", "generation": 1},
        "spec": {"poolRef": {"name": "pool"}},
        "status": {"conditions": [condition("Ready", "False", "LoadingAdapter", "loaded on 0 of 1 replica")]},
    }
    api.answers[f"{SHOAL}/namespaces/chat/lorapools/pool"] = {
        "metadata": {"name": "pool", "namespace": "chat", "generation": 1},
        "spec": {"modelRef": {"name": "llama"}},
        "status": {"conditions": [condition("Ready", "True", "PoolReady")]},
    }


def test_an_adapter_is_explained_by_the_engine_of_its_pool(kubeconfig: Path, api: CannedApi) -> None:
    adapter_of_a_pool(api)
    (cause,) = json.loads(why(kubeconfig, "adapter/poet", "-o", "json").output)["causes"]
    assert cause["reason"] == "OutOfGPUMemory"
    assert any("LoadingAdapter" in line for line in cause["explains"])
    (cause,) = json.loads(why(kubeconfig, "pool/pool", "-o", "json").output)["causes"]
    assert cause["reason"] == "OutOfGPUMemory"


def test_a_pool_is_explained_by_itself_where_its_model_is_gone(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{SHOAL}/namespaces/chat/lorapools/pool"] = {
        "metadata": {"name": "pool", "namespace": "chat", "generation": 1},
        "spec": {"modelRef": {"name": "gone"}},
        "status": {"conditions": [condition("Ready", "False", "ModelNotFound", "there is no Model chat/gone")]},
    }
    found = json.loads(why(kubeconfig, "lorapool/pool", "-o", "json").output)
    assert [cause["reason"] for cause in found["causes"]] == ["ModelNotFound"]
    assert "Model chat/gone" in [each["what"] for each in found["unread"]]


@pytest.mark.parametrize(
    ("subject", "path", "expected"),
    [
        ("model/llama", MODEL, "kubectl -n chat create rolebinding shoal-viewer-user --clusterrole=shoal-viewer"),
        ("tenant/acme", f"{SHOAL}/tenants/acme", "kubectl create clusterrolebinding shoal-viewer-user --clusterrole="),
    ],
)
def test_without_the_right_to_read_a_subject_the_command_that_grants_it_is_shown(
    kubeconfig: Path, api: CannedApi, subject: str, path: str, expected: str
) -> None:
    api.answers[path] = (403, "it is forbidden: no")
    done = why(kubeconfig, subject)
    assert done.exit_code == 1
    assert "it is forbidden: no" in done.output
    assert expected in done.output


def test_a_tenant_is_explained_with_its_models(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{SHOAL}/tenants/acme"] = {
        "metadata": {"name": "acme", "generation": 1},
        "spec": {"models": [{"namespace": "chat", "name": "llama"}, {"namespace": "chat", "name": "gone"}]},
        "status": {"conditions": [condition("Ready", "False", "NoUsableKey", "none of 1 keys can be used")]},
    }
    found = json.loads(why(kubeconfig, "tenant/acme", "-o", "json").output)
    assert [cause["reason"] for cause in found["causes"]] == ["ModelNotFound", "NoUsableKey", "TargetNotServing"]
    assert found["causes"][0]["message"] == "Tenant acme grants Models that do not exist: chat/gone"
    assert found["unread"] == []


LEDGER = "/api/v1/namespaces/shoal-system/pods/shoal-ledger-0:8500/proxy/v1/bill"


def _with_budget(api: CannedApi) -> None:
    """A Tenant with a budget, and the key and the pod of a ledger."""
    api.answers[f"{SHOAL}/tenants/acme"] = {
        "metadata": {"name": "acme", "generation": 1},
        "spec": {"models": [{"namespace": "chat", "name": "llama"}], "budget": {"amount": "50", "currency": "EUR"}},
        "status": {"conditions": [condition("Ready", "True", "Active")]},
    }
    api.answers[MODEL] = model(condition("Ready", "True", "ReplicasReady"))
    key = base64.b64encode(b"key").decode()
    api.answers["/api/v1/namespaces/shoal-system/secrets/shoal-key-billing"] = {"data": {"key": key}}
    labels = {"app.kubernetes.io/component": "ledger"}
    ledger = {"name": "shoal-ledger-0", "namespace": "shoal-system", "labels": labels}
    api.answers[GATEWAYS] = listed({"metadata": ledger, "status": {"conditions": [condition("Ready", "True", "x")]}})


def test_a_budget_that_is_used_up_is_the_cause_of_a_tenant(kubeconfig: Path, api: CannedApi) -> None:
    _with_budget(api)
    api.answers[LEDGER] = {"tenant": "acme", "month": "2026-11", "currency": "EUR", "total": "50.25"}
    found = json.loads(why(kubeconfig, "tenant/acme", "-o", "json").output)
    assert (found["state"], found["causes"][0]["reason"]) == ("failing", "BudgetUsedUp")
    assert "used 50.25 of 50 EUR of 2026-11" in found["causes"][0]["message"]


def test_a_budget_whose_use_cannot_be_read_is_not_called_well(kubeconfig: Path, api: CannedApi) -> None:
    _with_budget(api)
    found = json.loads(why(kubeconfig, "tenant/acme", "-o", "json").output)
    assert found["state"] == "unknown"
    assert [each["what"] for each in found["unread"]] == ["use of the budget"]


def test_a_pod_of_others_that_holds_the_gpus_is_the_cause(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[MODEL] = model(condition("Ready", "False", "NoCapacity", "class h100-80gb has 0 of 8 GPUs free"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    spec = {"nodeName": "gpu-1", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
    named = {"namespace": "ml-train", "name": "train-0", "uid": "u"}
    train: dict[str, Any] = {"metadata": named, "spec": spec, "status": {"phase": "Running"}}
    done = train | {"status": {"phase": "Succeeded"}}
    api.answers["/api/v1/pods"] = listed(train, done)
    found = json.loads(why(kubeconfig, "model/llama", "-o", "json").output)
    first = found["causes"][0]
    assert (first["layer"], first["reason"]) == ("L2", "GPUsHeldByOthers")
    assert "8 of 8 nvidia.com/gpu of GPUClass h100-80gb are held by pods that are not Shoal's" in first["message"]
    assert "ml-train/train-0 (8 on gpu-1)" in first["message"]
    assert any("NoCapacity" in each for each in first["explains"])
    assert "/api/v1/pods?limit=500&fieldSelector=spec.nodeName=gpu-1" in api.asked
    api.answers["/api/v1/pods"] = (403, "pods is forbidden")
    found = json.loads(why(kubeconfig, "model/llama", "-o", "json").output)
    assert found["causes"][0]["reason"] == "NoCapacity"
    assert "pods of others on node gpu-1" in [each["what"] for each in found["unread"]]


def route_of_four_targets(api: CannedApi) -> None:
    rule = {
        "targets": [{"model": {"name": "llama"}}, {"adapter": {"name": "gone", "namespace": "code"}}],
        "canary": {"target": {"model": {"name": "next"}}},
        "fallback": {"targets": [{"model": {"name": "small"}}]},
    }
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/best"] = {
        "metadata": {"name": "best", "namespace": "chat", "generation": 1},
        "spec": {"rules": [rule]},
        "status": {"conditions": [condition("Ready", "False", "TargetsNotReady", "rule default: no target serves")]},
    }


def test_a_route_is_explained_with_its_targets(kubeconfig: Path, api: CannedApi) -> None:
    route_of_four_targets(api)
    found = json.loads(why(kubeconfig, "route/best", "-o", "json").output)
    assert [cause["reason"] for cause in found["causes"]] == ["TargetsNotReady", "TargetNotServing"]
    assert "Model chat/llama does not serve: EngineFailed" in found["causes"][1]["message"]
    unread = [each["what"] for each in found["unread"]]
    assert unread == ["LoRAAdapter code/gone", "Model chat/next", "Model chat/small"], "each target was looked at"


def test_an_external_target_that_fails_is_a_cause_of_its_route(kubeconfig: Path, api: CannedApi) -> None:
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/best"] = {
        "metadata": {"name": "best", "namespace": "chat", "generation": 1},
        "spec": {"externalTargets": [{"name": "outside", "url": "https://api.example.com"}]},
        "status": {"conditions": [condition("Ready", "True", "TargetsReady")]},
    }
    there = gateway("True")
    there["metadata"] |= {"uid": "u", "labels": {
        "app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}}  # fmt: skip
    key = base64.b64encode(b"key").decode()
    api.answers["/api/v1/namespaces/shoal-system/secrets/shoal-key-logs"] = {"data": {"key": key}}
    api.answers[GATEWAYS] = listed(there)
    fails = ExternalStats(target="chat/best/outside", gateway="shoal-gateway-1", state="Fails", reason="certificate")
    other = ExternalStats(target="chat/best-2/outside", gateway="shoal-gateway-1", state="Fails", reason="connect")
    page = RouteStatsPage(externals=(fails, other))
    where = "/api/v1/namespaces/shoal-system/pods/shoal-gateway-1:9090/proxy/v1/routestats"
    api.answers[where] = page.model_dump(mode="json", by_alias=True)
    found = json.loads(why(kubeconfig, "route/best", "-o", "json").output)
    assert [cause["reason"] for cause in found["causes"]] == ["ExternalCertificateRefused"]
    assert "external target chat/best/outside: its certificate is not trusted" in found["causes"][0]["message"]


def test_an_external_target_that_is_not_allowed_is_a_cause_of_the_route(kubeconfig: Path, api: CannedApi) -> None:
    text = "external target outside: the installation does not allow api.example.com at port 443"
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/best"] = {
        "metadata": {"name": "best", "namespace": "chat", "generation": 1},
        "spec": {"rules": [{"targets": [{"external": {"name": "outside"}}]}]},
        "status": {"conditions": [condition("Accepted", "False", "ExternalNotAllowed", text)]},
    }
    (cause,) = json.loads(why(kubeconfig, "route/best", "-o", "json").output)["causes"]
    assert (cause["reason"], cause["message"]) == ("ExternalNotAllowed", f"ModelRoute chat/best: {text}")
    assert "gateway.external.allowedHosts" in cause["do"]


def test_a_pod_a_class_and_a_node_are_explained(kubeconfig: Path, api: CannedApi) -> None:
    api.answers["/api/v1/namespaces/chat/pods/llama-1"] = pending("0/1 nodes are available: 1 Insufficient cpu.")
    (cause,) = json.loads(why(kubeconfig, "pod/llama-1", "-o", "json").output)["causes"]
    assert cause["reason"] == "InsufficientCPUOrMemory"
    api.answers["/api/v1/nodes"] = listed(node(gpus=0))
    api.answers[f"{SHOAL}/gpuclasses/h100-80gb"] = GPU_CLASS | {
        "status": {"conditions": [condition("Ready", "False", "NoNodes", "does the device plugin run there?")]}
    }
    (cause,) = json.loads(why(kubeconfig, "gpuclass/h100-80gb", "-o", "json").output)["causes"]
    assert (cause["layer"], cause["reason"]) == ("L1", "DevicePluginMissing")
    api.answers["/api/v1/nodes/gpu-1"] = node(condition("DiskPressure", "True", "x", "full"))
    (cause,) = json.loads(why(kubeconfig, "node/gpu-1", "-o", "json").output)["causes"]
    assert cause["reason"] == "DiskPressure"


def test_only_nodes_that_matter_are_read(kubeconfig: Path, api: CannedApi) -> None:
    """A cluster may have thousands of others."""
    why(kubeconfig, "llama")
    asked = [path for path in api.asked if path.startswith("/api/v1/nodes")]
    assert len(asked) == 1
    assert "labelSelector=nvidia.com/gpu.product=NVIDIA-H100" in asked[0]
    api.answers[f"{SHOAL}/gpuclasses"] = listed()
    api.answers["/api/v1/nodes/gpu-1"] = node(condition("DiskPressure", "True", "x", "full"))
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert cause["reason"] == "DiskPressure"
    api.answers["/api/v1/nodes/gpu-1"] = (404, {"reason": "NotFound", "message": 'nodes "gpu-1" not found'})
    (cause,) = json.loads(why(kubeconfig, "llama", "-o", "json").output)["causes"]
    assert cause["reason"] == "NodeGone"


def test_nothing_is_written(kubeconfig: Path, api: CannedApi) -> None:
    why(kubeconfig, "llama")
    assert api.patches == []
    assert {method for method, _, _ in api.calls} == {"GET"}
    assert not any("/secrets" in path for path in api.asked)


@pytest.mark.parametrize("there", [(), (gateway("False"),)])
def test_a_model_that_serves_is_of_no_use_without_gateways(
    kubeconfig: Path, api: CannedApi, there: tuple[dict[str, Any], ...]
) -> None:
    api.answers[MODEL] = model(condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    api.answers[GATEWAYS] = listed(*there)
    found = json.loads(why(kubeconfig, "llama", "-o", "json").output)
    assert found["state"] == "failing"
    assert [(cause["layer"], cause["reason"]) for cause in found["causes"]] == [("L5", "GatewaysNotReady")]


# --- a request that its Model refused, or that more than one replica had

CHOICES = f"{GATEWAYS}/shoal-gateway-1:9090/proxy/v1/choices"
HELD = {"time": "2026-11-27T12:00:20Z", "gateway": "shoal-gateway-1", "status": 503, "code": "hold_expired"}


def attempt(number: int, failure: str | None = None) -> dict[str, Any]:
    return {
        "time": f"2026-11-27T12:00:0{number}Z",
        "gateway": "shoal-gateway-1",
        "model": "chat/llama",
        "attempt": number,
        "replica": f"chat/llama-{number}",
        "message": f"llama-{number}: the only one",
        "failure": failure,
    }


def remember(api: CannedApi, **found: Any) -> None:
    """What the gateways remember of request r1."""
    there = gateway("True")
    there["metadata"] |= {"uid": "u", "labels": {
        "app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}}  # fmt: skip
    api.answers[GATEWAYS] = listed(there)
    key = base64.b64encode(b"key").decode()
    api.answers["/api/v1/namespaces/shoal-system/secrets/shoal-key-logs"] = {"data": {"key": key}}
    api.answers[CHOICES] = {"request": "r1", "remembered": 1, **found}


@pytest.mark.parametrize(
    "code", ["hold_expired", "hold_full", "model_unavailable", "no_replica", "client_left_waiting", "replica_lost"]
)
def test_a_request_that_its_model_refuses_leads_to_what_is_wrong_with_the_model(
    kubeconfig: Path, api: CannedApi, code: str
) -> None:
    remember(api, refusals=[HELD | {"code": code, "model": "chat/llama"}])
    found = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)
    assert [(each["layer"], each["reason"]) for each in found["causes"]] == [
        ("L3", "OutOfGPUMemory"),
        (str(REFUSALS[code].layer), code),
    ]
    assert found["subjectNow"] == {"kind": "Model", "name": "chat/llama", "state": "failing", "unread": []}
    assert found["causes"][1]["do"].startswith("Begin with what is wrong with Model chat/llama: L3 execution OutOfGPU")
    shown = why(kubeconfig, "request/r1").output
    assert shown.startswith("Model chat/llama now: something is wrong")
    assert shown.index("layer     L3 execution  OutOfGPUMemory") < shown.index("2. wrong")
    assert "model/NAME" not in shown


@pytest.mark.parametrize("code", ["adapter_unavailable", "adapter_unusable"])
def test_a_request_whose_adapter_is_not_served_leads_to_the_engine_of_its_pool(
    kubeconfig: Path, api: CannedApi, code: str
) -> None:
    adapter_of_a_pool(api)
    remember(api, refusals=[HELD | {"code": code, "subject": "adapter/chat/poet"}])
    found = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)
    assert [each["reason"] for each in found["causes"]] == ["OutOfGPUMemory", code]
    begin = "Begin with what is wrong with LoRAAdapter chat/poet: L3 execution OutOfGPUMemory. "
    assert found["causes"][1]["do"].startswith(begin)
    assert "adapter/NAME" not in found["causes"][1]["do"]
    assert (found["subjectNow"]["kind"], found["subjectNow"]["name"]) == ("LoRAAdapter", "chat/poet")
    assert why(kubeconfig, "request/r1").output.startswith("LoRAAdapter chat/poet now: something is wrong")


def test_a_request_whose_route_has_no_target_leads_to_what_is_wrong_with_the_targets(
    kubeconfig: Path, api: CannedApi
) -> None:
    route_of_four_targets(api)
    remember(api, refusals=[HELD | {"code": "no_route_target", "subject": "route/chat/best"}])
    found = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)
    assert [each["reason"] for each in found["causes"]] == ["TargetsNotReady", "no_route_target"]
    assert found["causes"][1]["do"].startswith("Begin with what is wrong with ModelRoute chat/best: control Targets")
    # Of a route whose targets serve, the tenant may lack a grant.
    route = api.answers[f"{SHOAL}/namespaces/chat/modelroutes/best"]
    route["spec"] = {"rules": []}
    route["status"] = {"conditions": [condition("Ready", "True", "TargetsReady")]}
    (cause,) = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"]
    assert (cause["reason"], cause["do"]) == ("no_route_target", REFUSALS["no_route_target"].do)


@pytest.mark.parametrize("subject", ["pod/chat/x", "adapter/poet", "route/chat/best", "", "///"])
def test_a_subject_that_does_not_fit_the_error_is_not_read(kubeconfig: Path, api: CannedApi, subject: str) -> None:
    remember(api, refusals=[HELD | {"code": "adapter_unavailable", "subject": subject}])
    found = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)
    assert [each["reason"] for each in found["causes"]] == ["adapter_unavailable"]
    assert found["subjectNow"] is None


def test_a_model_that_cannot_be_read_leaves_the_words_of_the_refusal(kubeconfig: Path, api: CannedApi) -> None:
    remember(api, refusals=[HELD | {"model": "chat/llama"}])
    for answer, told in (
        ((403, "models is forbidden"), "models is forbidden"),
        ((404, {"reason": "NotFound", "message": 'models.shoal.dev "llama" not found'}), '"llama" not found'),
    ):
        api.answers[MODEL] = answer
        (cause,) = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"]
        assert (cause["reason"], cause["do"]) == ("hold_expired", REFUSALS["hold_expired"].do)
        done = why(kubeconfig, "request/r1")
        assert (done.exit_code, "not read, so not known:" in done.output) == (0, True)
        assert "Model chat/llama: " in done.output
        assert told in done.output


def test_a_model_with_which_nothing_is_wrong_now_explains_nothing(kubeconfig: Path, api: CannedApi) -> None:
    remember(api, refusals=[HELD | {"model": "chat/llama"}])
    api.answers[MODEL] = model(condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    shown = why(kubeconfig, "request/r1").output
    assert shown.startswith("Model chat/llama now: nothing is wrong")
    assert "1. wrong  it was answered with 503 hold_expired" in shown
    assert REFUSALS["hold_expired"].do in " ".join(shown.split())


def test_a_model_that_starts_is_told_before_the_request_that_waited_for_it(kubeconfig: Path, api: CannedApi) -> None:
    remember(api, refusals=[HELD | {"model": "chat/llama", "code": "client_left_waiting", "seconds": 12.0}])
    api.answers[MODEL] = model(condition("Ready", "False", "Fetching", "40 % of the weights"))
    api.answers["/api/v1/namespaces/chat/pods"] = listed()
    waits, left = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"]
    assert (waits["reason"], waits["state"], left["reason"]) == ("Fetching", "waits", "client_left_waiting")
    assert left["do"].startswith("Raise the client's timeout, or keep a replica"), "there is nothing to mend"


def test_no_model_is_read_for_an_error_that_none_explains(kubeconfig: Path, api: CannedApi) -> None:
    remember(api, refusals=[HELD | {"status": 429, "code": "rate_limit_exceeded", "model": "chat/llama"}])
    found = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)
    assert [each["reason"] for each in found["causes"]] == ["rate_limit_exceeded"]
    assert found["subjectNow"] is None
    assert MODEL not in api.asked


def test_of_an_earlier_gateway_the_model_is_that_of_the_last_attempt(kubeconfig: Path, api: CannedApi) -> None:
    remember(api, choices=[attempt(1)], refusals=[HELD])
    assert json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"][0]["reason"] == "OutOfGPUMemory"
    # It may have left the Model for an external target, which has none.
    left = {"time": HELD["time"], "gateway": "g", "left": "chat/llama", "target": "chat/front/out", "message": "x"}
    remember(api, choices=[attempt(1)], fallbacks=[left], refusals=[HELD])
    assert json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"][0]["reason"] == "hold_expired"


def test_what_was_tried_for_a_refused_request_is_told_in_its_order(kubeconfig: Path, api: CannedApi) -> None:
    left = {
        "time": "2026-11-27T12:00:00Z",
        "gateway": "shoal-gateway-1",
        "left": "chat/large",
        "target": "chat/llama",
        "message": "went on to chat/llama: the request waited 20 s",
    }
    refused = HELD | {"status": 500, "code": "internal_error", "model": "chat/llama"}
    attempts = [attempt(1, "lost"), attempt(2, "no_key"), attempt(3, "of-a-newer-gateway"), attempt(4)]
    remember(api, choices=attempts, fallbacks=[left], refusals=[refused])
    (cause,) = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"]
    assert cause["tried"] == [
        "it left chat/large and went on to chat/llama: the request waited 20 s",
        "attempt 1 at chat/llama-1 failed on L4 engine: the connection to its engine broke",
        "attempt 2 at chat/llama-2 failed on control: the gateway had no key for its engine",
        "attempt 3 at chat/llama-3 failed on L4 engine: it failed in a way that this command does not know",
        "attempt 4 at chat/llama-4, which had it last",
    ]
    shown = why(kubeconfig, "request/r1").output
    assert "  tried  it left chat/large and went on to chat/llama" in shown
    assert "  failed on L4 engine: the connection to its engine broke" in shown.splitlines()


def test_failures_before_the_replica_that_took_a_request_are_a_note_with_their_layer(
    kubeconfig: Path, api: CannedApi
) -> None:
    remember(api, choices=[attempt(1, "no_key"), attempt(2, "lost"), attempt(3, "lost"), attempt(4)])
    found = json.loads(why(kubeconfig, "request/r1", "-o", "json").output)
    assert [(each["layer"], each["reason"], each["state"]) for each in found["causes"]] == [
        ("L4", "attempt_failed", "note"),
        ("control", "attempt_failed", "note"),
    ]
    lost = found["causes"][0]
    assert lost["message"] == (
        "2 of its 4 attempts failed, at chat/llama-2, chat/llama-3: the connection to its engine broke"
    )
    assert [each["what"] for each in lost["evidence"]] == ["attempt 2: lost", "attempt 3: lost"]
    assert lost["do"] == "Nothing, unless it repeats: then run `shoal why model/llama -n chat`."
    assert lost["tried"][-1] == "attempt 4 at chat/llama-4, which had it last"
    shown = why(kubeconfig, "request/r1").output
    assert "L4 engine  attempt_failed" in shown
    assert "1. note " in shown
    remember(api, choices=[attempt(1)])
    assert json.loads(why(kubeconfig, "request/r1", "-o", "json").output)["causes"] == []
