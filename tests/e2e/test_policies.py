"""The optional policies: admission on a real API server, health scripts in a real Lua."""

import importlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.api.lorapool import LoRAPool
from shoal.engine.sglang.arguments import parsed
from shoal.engine.sglang.pool import pool_problem
from shoal.engine.vllm import launch as vllm
from tests.support.apiserver import ApiServer

POLICIES = Path(__file__).resolve().parents[2] / "policies"
OPERATOR = "--as=system:serviceaccount:shoal-system:shoal-operator"
CONTROLLER = "--as=system:serviceaccount:kube-system:replicaset-controller"
PERSON = "--as=alice"
MASTERS = "--as-group=system:masters"

OWNED_BY = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "Model",
    "name": "m",
    "uid": "5fb1b9b5-4e0c-4b8a-8a2c-0c7b8e0c4b8a",
    "controller": True,
}
LABELS = {"shoal.dev/model": "m", "shoal.dev/model-uid": "u", "app.kubernetes.io/managed-by": "shoal"}


def pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "guarded", "labels": labels},
        "spec": {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "x"}]},
    }


def budget(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": "guarded", "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }


def send(server: ApiServer, user: str, verb: str, one: dict[str, Any], *args: str) -> subprocess.CompletedProcess[str]:
    return server.run(verb, user, MASTERS, *args, "-f", "-", text=json.dumps(one))


@pytest.fixture(scope="module")
def guarded(apiserver: ApiServer) -> Iterator[ApiServer]:
    apiserver.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "guarded"}})
    apiserver.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "guarded"}}
    )
    apiserver.kubectl("apply", "-f", str(POLICIES / "admission"))
    # A policy takes a moment to act.
    deadline = time.monotonic() + 30
    while send(apiserver, PERSON, "create", budget("probe", LABELS), "--dry-run=server").returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield apiserver
    apiserver.kubectl("delete", "-f", str(POLICIES / "admission"))


@pytest.mark.apiserver
def test_only_shoal_writes_the_children_of_a_model(guarded: ApiServer) -> None:
    assert send(guarded, OPERATOR, "create", budget("m", LABELS)).returncode == 0

    for verb, one in (("apply", budget("m", LABELS | {"x": "y"})), ("delete", budget("m", LABELS))):
        done = send(guarded, PERSON, verb, one)
        assert done.returncode != 0
        assert "m belongs to a Model: change the Model instead. Shoal would undo this." in done.stderr

    taken = budget("m", {"x": "y"})  # takes the label away in the same step
    assert "belongs to a Model" in send(guarded, PERSON, "replace", taken).stderr
    assert send(guarded, OPERATOR, "delete", budget("m", LABELS)).returncode == 0


@pytest.mark.apiserver
def test_nobody_passes_a_pod_off_as_an_engine(guarded: ApiServer) -> None:
    done = send(guarded, PERSON, "create", pod("fake", LABELS))
    assert "only Shoal's Deployments make such pods" in done.stderr
    # A ReplicaSet would take it for one of its own: it selects by the uid.
    done = send(guarded, PERSON, "create", pod("fake", {"shoal.dev/model-uid": "u"}))
    assert "only Shoal's Deployments make such pods" in done.stderr

    assert send(guarded, PERSON, "create", pod("other", {"app": "x"})).returncode == 0
    relabelled = guarded.run("label", "-n=guarded", "pod/other", "shoal.dev/model=m", PERSON, MASTERS)
    assert "may not be changed" in relabelled.stderr

    assert send(guarded, CONTROLLER, "create", pod("engine", LABELS)).returncode == 0
    moved = guarded.run("label", "-n=guarded", "--overwrite", "pod/engine", "shoal.dev/model=n", PERSON, MASTERS)
    assert "may not be changed" in moved.stderr
    for owners in ([OWNED_BY], []):
        patch = json.dumps({"metadata": {"ownerReferences": owners}})
        given = guarded.run("patch", "-n=guarded", "pod/engine", "--type=merge", "-p", patch, PERSON, MASTERS)
        assert ("may not be changed" in given.stderr) is bool(owners)
    # What people do to pods otherwise stays possible.
    assert guarded.run("label", "-n=guarded", "pod/engine", "note=seen", PERSON, MASTERS).returncode == 0
    assert guarded.run("delete", "-n=guarded", "pod/engine", "--wait=false", PERSON, MASTERS).returncode == 0


def workload(kind: str, name: str, labels: dict[str, str], version: str = "apps/v1") -> dict[str, Any]:
    """A workload with no label of Shoal's own, whose pods have these."""
    app = {"app": name}
    template: dict[str, Any] = {"metadata": {"labels": labels | app}, "spec": pod("x", {})["spec"]}
    spec: dict[str, Any] = {"selector": {"matchLabels": app}, "template": template}
    match kind:
        case "StatefulSet":
            spec["serviceName"] = "x"
        case "ReplicationController":
            spec["selector"] = app
        case "Job" | "CronJob":
            template["spec"] = template["spec"] | {"restartPolicy": "Never"}
            spec = {"template": template}
            if kind == "CronJob":
                spec = {"schedule": "@daily", "jobTemplate": {"spec": spec}}
        case _:
            pass
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "guarded"}, "spec": spec}


WORKLOADS = [
    ("ReplicaSet", "apps/v1"),
    ("Deployment", "apps/v1"),
    ("StatefulSet", "apps/v1"),
    ("DaemonSet", "apps/v1"),
    ("ReplicationController", "v1"),
    ("Job", "batch/v1"),
    ("CronJob", "batch/v1"),
]


@pytest.mark.apiserver
@pytest.mark.parametrize(("kind", "version"), WORKLOADS)
def test_nobody_has_a_controller_make_pods_that_pass_for_engines(guarded: ApiServer, kind: str, version: str) -> None:
    for labels in (LABELS, {"shoal.dev/model-uid": "u"}):
        done = send(guarded, PERSON, "create", workload(kind, "sneaky", labels, version))
        assert "belongs to a Model" in done.stderr, done.stderr
        if kind == "CronJob":  # whose Jobs, too, Shoal would take for its own
            jobs = workload(kind, "sneaky", {}, version)
            jobs["spec"]["jobTemplate"]["metadata"] = {"labels": labels}
            done = send(guarded, PERSON, "create", jobs)
            assert "belongs to a Model" in done.stderr, done.stderr
    mine = workload(kind, "mine", {}, version)
    done = send(guarded, PERSON, "create", mine)
    assert done.returncode == 0, done.stderr
    later = workload(kind, "mine", LABELS, version)
    if kind not in ("Job",):  # whose template nobody may change
        assert "belongs to a Model" in send(guarded, PERSON, "replace", later).stderr
    assert send(guarded, PERSON, "delete", mine).returncode == 0


@pytest.mark.apiserver
def test_nobody_passes_a_secret_off_as_a_models_keys(guarded: ApiServer) -> None:
    for metadata in ({"labels": LABELS}, {"ownerReferences": [OWNED_BY]}):
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "m-keys-1", "namespace": "guarded"} | metadata,
        }
        assert "belongs to a Model" in send(guarded, PERSON, "create", secret).stderr
        assert send(guarded, OPERATOR, "create", secret).returncode == 0
        assert "belongs to a Model" in send(guarded, PERSON, "delete", secret).stderr
        assert send(guarded, OPERATOR, "delete", secret).returncode == 0
    own = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine", "namespace": "guarded"}}
    assert send(guarded, PERSON, "create", own).returncode == 0


@pytest.mark.apiserver
def test_other_peoples_objects_are_left_alone(guarded: ApiServer) -> None:
    assert send(guarded, PERSON, "create", budget("mine", {"app": "x"})).returncode == 0
    assert send(guarded, PERSON, "delete", budget("mine", {"app": "x"})).returncode == 0


# --- nodes ------------------------------------------------------------------------------------------------------------

QUARANTINE = "quarantine.shoal.dev/l40s"


def patched(server: ApiServer, user: str, patch: dict[str, Any], *args: str) -> str:
    """What kubectl says to a merge patch of the node; "": nothing, since it is done."""
    done = server.run("patch", "node", "gpu-1", "--type=merge", "-p", json.dumps(patch), *args, user, MASTERS)
    return done.stderr if done.returncode else ""


@pytest.mark.apiserver
def test_the_operator_changes_nothing_of_a_node_but_its_quarantine(guarded: ApiServer) -> None:
    labels = {"pool": "gpu"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1", "labels": labels}, "spec": {}}
    assert send(guarded, PERSON, "create", node).returncode == 0
    try:
        # As the operator writes it, and takes it back.
        for value in ("GPUFellOffBus", "GPUUnhealthy", None):
            assert patched(guarded, OPERATOR, {"metadata": {"labels": {QUARANTINE: value}}}) == ""

        others = "may change no other labels of a node than quarantine.shoal.dev/CLASS"
        for wrong in ({"pool": "other"}, {"pool": None}, {"stolen": "yes"}, {"quarantine.shoal.device": "x"}):
            said = patched(guarded, OPERATOR, {"metadata": {"labels": {QUARANTINE: "x", **wrong}}})
            assert others in said, (wrong, said)
        nothing = "may change nothing of a node but its labels quarantine.shoal.dev/CLASS"
        owner = {"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "5fb1b9b5-4e0c-4b8a-8a2c-0c7b8e0c4b8a"}
        more: list[dict[str, Any]] = [
            {"spec": {"unschedulable": True}},
            {"spec": {"taints": [{"key": "mine", "effect": "NoExecute"}]}},
            {"metadata": {"annotations": {"a": "b"}}},
            {"metadata": {"finalizers": ["example.com/stays"]}},
            {"metadata": {"ownerReferences": [owner]}},
        ]
        for patch in more:
            assert nothing in patched(guarded, OPERATOR, patch), patch
        assert nothing in patched(guarded, OPERATOR, {"status": {"capacity": {"x": "1"}}}, "--subresource=status")

        # Nobody else is concerned.
        for patch in more[:3]:
            assert patched(guarded, PERSON, patch) == ""
        assert patched(guarded, PERSON, {"metadata": {"labels": {"pool": "other"}}}) == ""
    finally:
        guarded.run("delete", "node", "gpu-1", "--wait=false", MASTERS, PERSON)


# --- pools and their Models -------------------------------------------------------------------------------------------


def own(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "guarded"}
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def model(name: str, *extra: str) -> dict[str, Any]:
    return model_of(name, {"extraArgs": list(extra)})


def model_of(name: str, engine: dict[str, Any]) -> dict[str, Any]:
    return own("Model", name, source={"uri": "hf://owner/repo"}, engine=engine)


def pool(name: str, of: str) -> dict[str, Any]:
    return own("LoRAPool", name, modelRef={"name": of})


def eventually_refused(server: ApiServer, one: dict[str, Any], words: str) -> None:
    """What a policy compares with reaches it by a watch, a moment after it was written."""
    deadline = time.monotonic() + 30
    while words not in (stderr := send(server, PERSON, "create", one, "--dry-run=server").stderr):
        assert time.monotonic() < deadline, stderr
        time.sleep(0.2)


NONE = "--is-embedding, --dllm-algorithm and --startup-weight-load-mode=overlap do not go with adapters"
DRAFT = "--speculative-adaptive and the MoE runner experimental_sgl_trtllm do not go with adapters and this"
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--attn-dp-size=2",), pool_problem({"attn-dp-size": "2"}, {}) or "none"),
    (("--data-parallel-size=16",), pool_problem({"dp-size": "16"}, {}) or "none"),
    (("--load-format=runai_streamer",), "with this --load-format SGLang cannot read adapters: use auto"),
    (("--speculative-algorithm=STANDALONE",), "this --speculative-algorithm does not go with adapters: use NGRAM"),
    (("--speculative-algorithm=EAGLE", "--speculative-adaptive"), DRAFT),
    (("--speculative-algorithm=EAGLE", "--moe-runner-backend=experimental_sgl_trtllm"), DRAFT),
    (
        ("--speculative-algorithm=NGRAM", "--speculative-moe-runner-backend=lora_triton"),
        "this --speculative-moe-runner-backend is for adapters, which the draft has not: leave it out",
    ),
    (("--is-embedding",), NONE),
    (("--dllm-algorithm=LowConfidence",), NONE),
    (("--startup-weight-load-mode=overlap",), NONE),
]
TAKEN: list[tuple[str, ...]] = [
    ("--speculative-algorithm=eagle3", "--load-format=safetensors", "--attn-dp-size=1"),
    ("--speculative-algorithm=NGRAM", "--speculative-adaptive"),
]


GROUPS = {"tensor": 4, "attentionData": 2}
REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"parallelism": GROUPS}, pool_problem({"attn-dp-size": "2"}, {}) or "none"),
    ({"type": "SGLang", "parallelism": GROUPS}, pool_problem({"attn-dp-size": "2"}, {}) or "none"),
    (
        {"type": "vLLM", "parallelism": GROUPS},
        vllm.pool_problem(
            LoRAPool.model_validate(own("LoRAPool", "p", modelRef={"name": "m"})), {"data-parallel-size": "2"}
        )
        or "none",
    ),
]
TAKEN_FIELDS: list[dict[str, Any]] = [
    {"parallelism": {"tensor": 4, "attentionData": 1}},
    {"parallelism": {"tensor": 4}},
    # An argument of vLLM with a name of SGLang's.
    {"type": "vLLM", "extraArgs": ["--load-format=runai_streamer"]},
]


def refused_by_the_operator(arguments: tuple[str, ...]) -> bool:
    """Whether a pool's status would say EngineRefuses."""
    return pool_problem(parsed(arguments), {}) is not None


def test_the_policies_refuse_nothing_that_the_operator_takes() -> None:
    assert [refused_by_the_operator(arguments) for arguments, _ in REFUSED] == [True] * len(REFUSED)
    assert [refused_by_the_operator(arguments) for arguments in TAKEN] == [False] * len(TAKEN)


BY_FIELD = ("--speculative-algorithm=", "--data-parallel-size=")
"""Arguments of which Shoal has a field: no Model has them any more, but those that were stored before."""


def stored(server: ApiServer, one: dict[str, Any], first: str) -> bool:
    """Whether the API server takes the Model; what a field of `spec.engine` says it does not."""
    done = send(server, PERSON, "create", one)
    assert (done.returncode != 0) == first.startswith(BY_FIELD), done.stderr
    assert done.returncode == 0 or "`extraArgs` of SGLang may not have" in done.stderr
    return done.returncode == 0


@pytest.mark.apiserver
def test_a_pool_whose_models_engines_refuse_adapters_is_refused_at_once(guarded: ApiServer) -> None:
    for number, (arguments, words) in enumerate(REFUSED):
        if not stored(guarded, model(f"m{number}", *arguments), arguments[0]):
            continue
        eventually_refused(guarded, pool("p", f"m{number}"), f"Model m{number}: {words}")
    for number, (engine, words) in enumerate(REFUSED_FIELDS):
        assert send(guarded, PERSON, "create", model_of(f"field{number}", engine)).returncode == 0
        eventually_refused(guarded, pool("p", f"field{number}"), f"Model field{number}: {words}")
    for number, engine in enumerate([*({"extraArgs": list(given)} for given in TAKEN), *TAKEN_FIELDS]):
        if not stored(guarded, model_of(f"fits{number}", engine), engine.get("extraArgs", [""])[0]):
            continue
        eventually_refused(guarded, pool("p", "m0"), "Model m0")  # the policy has seen more than one of them
        done = send(guarded, PERSON, "create", pool(f"of-fits{number}", f"fits{number}"))
        assert done.returncode == 0, done.stderr
    # A pool may come before its Model.
    assert send(guarded, PERSON, "create", pool("early", "later")).returncode == 0


@pytest.mark.apiserver
def test_a_model_that_has_a_pool_keeps_to_arguments_that_go_with_adapters(guarded: ApiServer) -> None:
    assert send(guarded, PERSON, "create", pool("pooled", "base")).returncode == 0
    for arguments, words in REFUSED:
        if arguments[0].startswith(BY_FIELD):
            continue
        eventually_refused(guarded, model("base", *arguments), f"LoRAPool pooled gives this Model adapters: {words}")
    for engine, words in REFUSED_FIELDS:
        eventually_refused(guarded, model_of("base", engine), f"LoRAPool pooled gives this Model adapters: {words}")
    for engine in TAKEN_FIELDS:
        done = send(guarded, PERSON, "create", model_of("base", engine), "--dry-run=server")
        assert done.returncode == 0, done.stderr
    done = send(guarded, PERSON, "create", model("base", "--mem-fraction-static=0.8"))
    assert done.returncode == 0, done.stderr
    # By a change, too; and what was wrong before is left alone.
    done = send(guarded, PERSON, "apply", model_of("base", {"parallelism": GROUPS}))
    assert "only adapters that are never evicted" in done.stderr
    assert send(guarded, PERSON, "create", model("another", "--attn-dp-size=2")).returncode == 0


@pytest.mark.apiserver
def test_a_second_pool_for_a_model_is_refused_and_the_first_may_change(guarded: ApiServer) -> None:
    assert send(guarded, PERSON, "create", pool("first", "shared")).returncode == 0
    eventually_refused(guarded, pool("second", "shared"), "Model shared has LoRAPool first already: one pool per Model")
    resized = pool("first", "shared")
    resized["spec"]["maxRank"] = 8
    assert send(guarded, PERSON, "apply", resized).returncode == 0

    # Nor by turning another Model's pool to it.
    assert send(guarded, PERSON, "create", pool("turned", "elsewhere")).returncode == 0
    done = send(guarded, PERSON, "apply", pool("turned", "shared"))
    assert "Model shared has LoRAPool first already: one pool per Model" in done.stderr


# --- health in GitOps tools -------------------------------------------------------------------------------------------


def condition(kind: str, status: str, reason: str = "Some", message: str = "words") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("not seen yet", {}, "Progressing"),
    ("an older generation", {"observedGeneration": 1, "conditions": [condition("Ready", "True")]}, "Progressing"),
    ("starting", {"observedGeneration": 2, "conditions": [condition("Ready", "False")]}, "Progressing"),
    ("unknown", {"observedGeneration": 2, "conditions": [condition("Ready", "Unknown")]}, "Progressing"),
    ("ready", {"observedGeneration": 2, "conditions": [condition("Ready", "True")]}, "Healthy"),
    (
        "waits for a person",
        {"observedGeneration": 2, "conditions": [condition("Ready", "False"), condition("Stalled", "True")]},
        "Degraded",
    ),
]


def argo_health(obj: dict[str, Any]) -> tuple[str, str]:
    """(status, message) as Argo CD's Lua would find them."""
    lua51: Any = importlib.import_module("lupa.lua51")  # the version that Argo CD embeds; its stubs are incomplete
    lua = lua51.LuaRuntime()
    lua.globals()["obj"] = lua.table_from(obj, recursive=True)
    health = lua.execute((POLICIES / "argocd" / "health.lua").read_text())
    return health["status"], health["message"]


@pytest.mark.parametrize(("status", "health"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_argo_cd_sees_the_same_health(status: dict[str, Any], health: str) -> None:
    obj: dict[str, Any] = {"metadata": {"generation": 2}} | ({"status": status} if status else {})

    assert argo_health(obj)[0] == health


def test_argo_cd_tells_the_reason_and_the_pause() -> None:
    ready = condition("Ready", "True", "ReplicasReady", "2 of 2 serve")
    obj: dict[str, Any] = {
        "metadata": {"generation": 2},
        "status": {"observedGeneration": 2, "conditions": [ready]},
    }
    assert argo_health(obj) == ("Healthy", "ReplicasReady: 2 of 2 serve")

    obj["metadata"]["annotations"] = {"shoal.dev/paused": "true"}
    assert argo_health(obj)[0] == "Suspended"
