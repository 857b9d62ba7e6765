"""What goes wrong with sources in a fleet that serves others, and what the user reads: real Jobs, cache and nodes."""

import json
from collections.abc import Generator
from typing import Any

import pytest

from shoal.api import names
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import HUB_NAMESPACE, Fleet
from tests.e2e.test_line import shared_fields
from tests.support import faultyhub
from tests.support.helperpods import helper_pod
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

SPACE = "faults"
ENGINE = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
CANARY = "canary-51c07e-token"


class Hub:
    """The hub's pod, and what is changed in it meanwhile."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def change(self, repository: str, **values: Any) -> dict[str, Any]:
        code = (
            "import sys, urllib.request as u; "
            f"print(u.urlopen('http://127.0.0.1:8080/control/{repository}', sys.argv[1].encode()).read().decode())"
        )
        where = ("exec", "-n", HUB_NAMESPACE, "hub", "--", "python", "-c", code, json.dumps(values))
        return json.loads(self._fleet.kubectl(*where))


@pytest.fixture(scope="module")
def hub(fleet: Fleet) -> Generator[Hub]:
    pod = helper_pod(
        "hub", HUB_NAMESPACE, "tests.support.faultyhub", "8080", "/opt/shoal/models/tiny-chat", image=steps.LAB_IMAGE
    )
    metadata = {"name": "hub", "namespace": HUB_NAMESPACE}
    service = {"selector": {"app": "hub"}, "ports": [{"port": 80, "targetPort": 8080}]}
    secret = {"name": "wrong", "namespace": SPACE}
    fleet.until_alone()  # where Models here come to be is a matter of free GPUs
    try:
        for name in (HUB_NAMESPACE, SPACE):
            fleet.kubectl("create", "namespace", name)
            until(lambda name=name: "default" in fleet.kubectl("get", "serviceaccounts", "-n", name), 30)
        fleet.apply(
            pod,
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
            {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "stringData": {"token": CANARY}},
        )
        fleet.kubectl("wait", "--for=condition=Ready", "pod/hub", "-n", HUB_NAMESPACE, "--timeout=120s", timeout=130)
        yield Hub(fleet)
    finally:
        fleet.kubectl("delete", "models.shoal.dev", "--all", "-n", SPACE, timeout=120)
        until(lambda: not fleet.get("pods", "-n", SPACE, "-l", ENGINE), 180)  # other tests count free GPUs
        fleet.kubectl("delete", "namespace", HUB_NAMESPACE, SPACE, "--wait=false")


def make(fleet: Fleet, name: str, repository: str, *, secret: str | None = None, **spec: Any) -> None:
    source: dict[str, Any] = {"uri": f"hf://team/{repository}"}
    if secret:
        source["secretRef"] = {"name": secret}
    fleet.make_model(name, SPACE, source=source, **spec)


def expect(fleet: Fleet, name: str, kind: str, reason: str, within: float = 180) -> str:
    last: dict[str, Any] = {}

    def found() -> bool:
        nonlocal last
        last = fleet.condition(name, kind, SPACE)
        return last["reason"] == reason

    until(found, within, lambda: last)
    return last["message"]


def engines(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    pods = fleet.get("pods", "-n", SPACE, "-l", f"{ENGINE},{names.LABEL_MODEL}={name}")
    return [p for p in pods if "deletionTimestamp" not in p["metadata"]]


def test_what_is_wrong_with_a_source_is_told_before_any_gpu_waits_for_it(fleet: Fleet, hub: Hub) -> None:
    told = {
        "no-config": ("SourceInvalid", "hf://team/no-config is not a model: it has no config.json (found: "),
        "truncated": ("SourceInvalid", "model.safetensors has "),
        "unknown": ("SizeUnknown", "of NeverSeenForCausalLM takes in the KV cache is not known: say in `sizing."),
        "gated": ("Gated", "team/gated is gated, private or does not exist (401): put a hub token into key `token` of"),
        "missing": ("SourceNotFound", "the hub has no repository team/missing: check source.uri"),
        "wrong-secret": ("Gated", "the hub refuses team/gated to the token of source.secretRef (403): accept the "),
    }
    make(fleet, "hung", "hung")  # takes its time: see below
    for name in told:
        wrong = name == "wrong-secret"
        make(fleet, name, "gated" if wrong else name, secret="wrong" if wrong else None)
    for name, (reason, message) in told.items():
        assert message in expect(fleet, name, "Ready", reason), name
        assert message in fleet.condition(name, "Placed", SPACE)["message"], name
        assert engines(fleet, name) == [], name
    assert fleet.condition("gated", "Stalled", SPACE)["status"] == "True"
    # A figure of one's own is all that an unknown architecture lacks.
    make(fleet, "unknown", "unknown", sizing={"kvBytesPerToken": 1024}, engine={"contextLength": 2048})
    expect(fleet, "unknown", "Placed", "Placed")
    done = ("unknown", "gated", "missing", "no-config", "truncated")
    fleet.kubectl("delete", "models.shoal.dev", *done, "-n", SPACE, timeout=120)


def test_weights_that_arrive_corrupt_never_reach_an_engine(fleet: Fleet, hub: Hub) -> None:
    make(fleet, "corrupt", "corrupt")
    message = expect(fleet, "corrupt", "Ready", "DigestMismatch")
    assert "model.safetensors arrived twice with another content than the source promises" in message
    assert "Upload the file again" in message
    assert fleet.condition("corrupt", "Stalled", SPACE)["status"] == "True"
    (pod,) = engines(fleet, "corrupt")
    assert all(c.get("started") is False for c in pod["status"]["containerStatuses"])
    fleet.delete_model("corrupt", SPACE)


def test_a_moving_branch_is_pinned_and_a_force_push_stops_new_replicas_only(fleet: Fleet, hub: Hub) -> None:
    spread: list[dict[str, Any]] = [{"class": "l4-24gb", "maxReplicas": 1}, {"class": "l40s-48gb"}]
    make(fleet, "moving", "moving", variants=spread)
    expect(fleet, "moving", "Ready", "ReplicasReady")
    assert fleet.model("moving", SPACE)["status"]["artifact"]["revision"] == faultyhub.FIRST
    (serving,) = engines(fleet, "moving")

    # The branch moves: the second replica, on another node, fetches the commit that the first one has.
    hub.change("moving", branches={"main": faultyhub.REWRITTEN, "old": faultyhub.FIRST})
    make(fleet, "moving", "moving", variants=spread, scaling={"minReplicas": 2})
    until(lambda: fleet.model("moving", SPACE)["status"].get("replicas", {}).get("ready") == 2, 180)
    assert fleet.model("moving", SPACE)["status"]["artifact"]["revision"] == faultyhub.FIRST

    # Its history is rewritten: a node that does not have the commit cannot get it any more.
    hub.change("moving", branches={"main": faultyhub.REWRITTEN})
    spread[1]["maxReplicas"] = 1
    make(fleet, "moving", "moving", variants=[*spread, {"class": "h100-80gb"}], scaling={"minReplicas": 3})
    message = expect(fleet, "moving", "Ready", "SourceChanged")
    assert f"team/moving has no commit {faultyhub.FIRST} any more, to which its branch was pinned" in message
    assert "Edit source.uri to take what is there now" in message
    assert fleet.condition("moving", "Stalled", SPACE)["status"] == "True"
    assert fleet.condition("moving", "Available", SPACE)["status"] == "True"
    assert serving["metadata"]["name"] in {p["metadata"]["name"] for p in engines(fleet, "moving")}
    assert fleet.model("moving", SPACE)["status"]["replicas"] == {"desired": 3, "ready": 2}


def test_a_node_that_is_lost_while_it_fetches_is_left_for_another(fleet: Fleet, hub: Hub) -> None:
    hub.change("slow", pause=5)
    make(fleet, "slow", "slow", variants=[{"class": "l40s-48gb"}])
    expect(fleet, "slow", "Ready", "Fetching")
    until(lambda: hub.change("slow")["begun"] >= 1, 120)
    (pod,) = engines(fleet, "slow")
    node = pod["spec"]["nodeName"]
    fleet.lab.kill_node(node)
    try:
        hub.change("slow", pause=0)
        until(
            lambda: node not in {p["spec"].get("nodeName", node) for p in engines(fleet, "slow")},
            240,
            lambda: (fleet.model("slow", SPACE)["status"], engines(fleet, "slow")),
        )
        expect(fleet, "slow", "Ready", "ReplicasReady")
        assert hub.change("slow")["begun"] >= 2, "the other node fetched it itself"
    finally:
        fleet.lab.start_node(node)
        fleet.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=120s", timeout=130)
        fleet.delete_model("slow", SPACE)


def test_a_source_that_hangs_is_told_and_tried_again(fleet: Fleet, hub: Hub) -> None:
    message = expect(fleet, "hung", "Ready", "SourceUnreachable", 180)
    assert message.startswith("the hub cannot be reached for team/hung (")
    assert "check the network, or the chart's hub mirror and proxy settings" in message
    assert fleet.condition("hung", "Reconciling", SPACE)["status"] == "True", "it may come back by itself"


def test_what_opens_a_source_stands_in_its_secret_only(fleet: Fleet, hub: Hub) -> None:
    """Invariant 14, for the credentials of sources: objects, events and logs of those that had the token."""
    expect(fleet, "wrong-secret", "Ready", "Gated")
    kinds = "models.shoal.dev,events,jobs,pods,deployments,configmaps,persistentvolumeclaims"
    seen = {kinds: fleet.kubectl("get", kinds, "-n", SPACE, "-o", "json", "--show-managed-fields")}
    for where in (SPACE, NAMESPACE, HUB_NAMESPACE):
        for pod in fleet.get("pods", "-n", where):
            name = pod["metadata"]["name"]
            seen[name] = fleet.lab.kubectl("logs", name, "-n", where, "--all-containers", "--tail=-1", check=False)
    assert any(text for name, text in seen.items() if name.startswith("shoal-cache"))
    assert [name for name, text in seen.items() if CANARY in text] == []
    # The check can fail.
    assert CANARY in fleet.kubectl("get", "secrets", "-n", SPACE, "-o", "go-template={{range .items}}{{range .data}}"
                                   "{{base64decode .}}{{end}}{{end}}")  # fmt: skip


def test_the_volumes_of_the_cache_have_one_writer_for_each_field(fleet: Fleet, hub: Hub) -> None:
    """Invariant 7, for what only a namespace with a fetched model has."""
    made = fleet.get("persistentvolumeclaims", "-n", SPACE, "--show-managed-fields")
    made += fleet.get("persistentvolumes", "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_CACHE}",
                      "--show-managed-fields")  # fmt: skip
    assert {o["kind"] for o in made} == {"PersistentVolume", "PersistentVolumeClaim"}
    assert shared_fields(made) == []
