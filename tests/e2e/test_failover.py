"""Two live operators, one Lease: the leader dies or hangs, the other one leads, and nothing is done twice."""

import signal
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet
from tests.support.waiting import until
from tests.support.watching import Recorder

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

PATHS = {
    "deployments": "/apis/apps/v1/namespaces/demo/deployments",
    "pods": "/api/v1/namespaces/demo/pods",
    "secrets": "/api/v1/namespaces/demo/secrets",
    "poddisruptionbudgets": "/apis/policy/v1/namespaces/demo/poddisruptionbudgets",
    "networkpolicies": "/apis/networking.k8s.io/v1/namespaces/demo/networkpolicies",
}
SERVING = ("tiny-chat", "tiny-code")


@pytest.fixture
def watched(fleet: Fleet, tmp_path: Path) -> Generator[Recorder]:
    # What another test let go has gone before this one looks at what goes, and what followed from it is written: how a
    # Deployment rolls out depends on the GPUs that are free.
    fleet.until_alone()
    until(lambda: still(fleet), 120)
    with Recorder(fleet.tools.kubectl, fleet.tools.env, PATHS, tmp_path) as recorder:
        deployments = [d["metadata"]["name"] for d in fleet.get("deployments", "-n", "demo")]
        recorder.wait_for("deployments", deployments)
        yield recorder


def still(fleet: Fleet) -> bool:
    """Whether the Deployments stay as they are for a while."""

    def specs() -> dict[str, Any]:
        return {d["metadata"]["uid"]: d["spec"] for d in fleet.get("deployments", "-n", "demo")}

    before = specs()
    time.sleep(5)
    return specs() == before


def lease(fleet: Fleet) -> dict[str, Any]:
    return next(e for e in fleet.get("leases", "-n", NAMESPACE) if e["metadata"]["name"] == "shoal-operator")["spec"]


def leader(fleet: Fleet) -> str:
    """The pod that the Lease names."""
    found = ""

    def held() -> bool:
        nonlocal found
        found = lease(fleet).get("holderIdentity") or ""
        return bool(found)

    until(held, 60)
    return found


def ready_again(fleet: Fleet) -> None:
    rollout = ("rollout", "status", "deployment/shoal-operator", "-n", NAMESPACE, "--timeout=120s")
    fleet.kubectl(*rollout, timeout=130)


def assert_nothing_was_done_twice(recorder: Recorder, new: str) -> None:
    for plural in PATHS:
        events = recorder.events(plural)
        if plural != "pods":
            made = Counter(o["metadata"]["name"] for kind, o in events if kind == "ADDED")
            assert not [name for name, count in made.items() if count > 1], f"{plural} made more than once"
    deployments = recorder.events("deployments")
    ours = [(k, d) for k, d in deployments if d["metadata"]["labels"].get("shoal.dev/model") == new]
    assert len({d["metadata"]["uid"] for _, d in ours}) == 1
    engine = "app.kubernetes.io/component"
    pods = [(k, p) for k, p in recorder.events("pods") if p["metadata"]["labels"].get(engine) == "engine"]
    started = {p["metadata"]["uid"] for _, p in pods if p["metadata"]["labels"].get("shoal.dev/model") == new}
    assert len(started) == ours[-1][1]["spec"]["replicas"] == 1

    # What served goes on: no Deployment is scaled down or changed, no pod of theirs goes.
    for model in SERVING:
        specs = [d["spec"] for _, d in deployments if d["metadata"]["labels"].get("shoal.dev/model") == model]
        assert specs
        assert all(spec == specs[0] for spec in specs)
        gone = [
            (kind, p["metadata"]["name"], p["metadata"].get("deletionTimestamp"), p["status"].get("conditions"))
            for kind, p in pods
            if p["metadata"]["labels"].get("shoal.dev/model") == model
            and (kind == "DELETED" or "deletionTimestamp" in p["metadata"])
        ]
        assert not gone
    deleted = {d["metadata"]["labels"].get("shoal.dev/model") for kind, d in deployments if kind == "DELETED"}
    assert not deleted & {*SERVING, new}


def test_the_leader_is_killed_and_a_new_process_leads(fleet: Fleet, watched: Recorder) -> None:
    ready_again(fleet)
    pod, before = leader(fleet), lease(fleet)["leaseTransitions"]
    fleet.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGKILL)
    # Made while nobody leads. Who leads next is open: the other pod, or this one's next process, if it is first.
    fleet.make_model("failover")
    fleet.kubectl("wait", "--for=condition=Ready", "model/failover", "-n", "demo", "--timeout=180s", timeout=190)
    assert lease(fleet)["leaseTransitions"] > before
    assert_nothing_was_done_twice(watched, "failover")
    fleet.delete_model("failover")
    ready_again(fleet)


def test_the_leader_hangs_and_the_other_one_leads_also_when_it_wakes_up(fleet: Fleet, watched: Recorder) -> None:
    ready_again(fleet)
    pod = leader(fleet)
    fleet.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGSTOP)
    try:
        fleet.make_model("hangover")
        until(lambda: leader(fleet) != pod, 60, lambda: lease(fleet))
        other = leader(fleet)
        # It wakes up before its liveness probe gives it up, which takes a minute.
        fleet.lab.kubectl("wait", "--for=condition=Ready", "model/hangover", "-n", "demo", "--timeout=20s", check=False)
    finally:
        fleet.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGCONT)
    fleet.kubectl("wait", "--for=condition=Ready", "model/hangover", "-n", "demo", "--timeout=180s", timeout=190)
    # It finds that it leads no more, and stands again behind the other one.
    until(lambda: "lost the lease" in fleet.kubectl("logs", pod, "-n", NAMESPACE), 60, lambda: lease(fleet))
    ready_again(fleet)
    assert leader(fleet) == other
    assert_nothing_was_done_twice(watched, "hangover")
    fleet.delete_model("hangover")
