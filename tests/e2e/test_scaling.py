"""Zero and back, out and in, and rollouts, as clients of the gateway see them."""

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal_dev.demo.clients import DemoClients
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import NEXT_ENGINE, Fleet, serves
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

KEY = "sk-elastic-tests"
MODELS = ("sleeper", "crowded", "rolled", "broken", "cramped", "roomy")
SMALL = {"extraArgs": ["--max-running-requests=2"]}
FAST = {"idleSeconds": 5, "stabilizationSeconds": 5}


@pytest.fixture(scope="module", autouse=True)
def tenant(fleet: Fleet) -> Generator[None]:
    spec = {
        "keys": [{"name": "k", "sha256": hash_api_key(KEY)}],
        "models": [{"namespace": "demo", "name": name} for name in MODELS],
    }
    metadata = {"name": "elastic-tests"}
    fleet.until_alone()  # which class wakes is a matter of free GPUs
    fleet.apply({"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": metadata, "spec": spec})
    try:
        yield
    finally:
        fleet.kubectl("delete", "tenants.shoal.dev", "elastic-tests")


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    port = fleet.lab.forward_port()
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=180)


@contextmanager
def asking(fleet: Fleet, model: str, clients: int, tokens: int = 48) -> Generator[DemoClients]:
    """So many clients ask again and again meanwhile, in a thread of their own."""
    load = DemoClients(f"http://127.0.0.1:{fleet.lab.forward_port()}", KEY, f"demo/{model}")
    thread = threading.Thread(target=lambda: asyncio.run(load.many(clients, tokens)))
    thread.start()
    try:
        yield load
    finally:
        load.enough.set()
        thread.join(timeout=180)
        assert not thread.is_alive()


def counts(fleet: Fleet, name: str) -> dict[str, int]:
    return fleet.model(name).get("status", {}).get("replicas") or {}


def until_counts(fleet: Fleet, name: str, desired: int, ready: int, within: float = 240) -> None:
    wanted = {"desired": desired, "ready": ready}
    until(lambda: counts(fleet, name) == wanted, within, lambda: fleet.model(name).get("status"))


def ready(fleet: Fleet, name: str) -> dict[str, Any]:
    return fleet.condition(name, "Ready")


def pods(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    found = fleet.get("pods", "-n", "demo", "-l", f"shoal.dev/model={name},app.kubernetes.io/component=engine")
    return [p for p in found if "deletionTimestamp" not in p["metadata"]]


def in_place(fleet: Fleet) -> int:
    """Events that tell of a replica that goes before its successor comes."""
    events = [e for e in fleet.get("events", "-n", "demo") if e["reason"] == "ReplacingInPlace"]
    return sum((e.get("series") or {}).get("count") or 1 for e in events)


def ask(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=f"demo/{model}", messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )
    return answer.choices[0].message.content or ""


def test_a_request_at_zero_is_held_wakes_the_model_and_is_answered(fleet: Fleet, client: openai.OpenAI) -> None:
    fleet.make_model("sleeper", scaling=FAST)
    message = fleet.expect("sleeper", "Ready", "ScaledToZero", within=240)
    # Its first replica, so that faults show, was ready meanwhile; how long it was depends on the machine.
    assert "coldStartSeconds" in fleet.model("sleeper")["status"]
    assert message == "no request for 5 s; the next one wakes class l4-24gb"
    assert ready(fleet, "sleeper")["status"] == "True"
    until(lambda: not pods(fleet, "sleeper"), 120)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, "sleeper")
        until(lambda: counts(fleet, "sleeper")["desired"] == 1, 120, lambda: fleet.model("sleeper"))
        assert answer.result(180)
    fleet.expect("sleeper", "Ready", "ScaledToZero", within=120)
    fleet.delete_model("sleeper")


def test_load_scales_out_and_goes_in_again_without_a_failed_request(fleet: Fleet) -> None:
    fleet.make_model("crowded", engine=SMALL, scaling=FAST | {"maxReplicas": 3, "queuedRequestsPerReplica": 2})
    until_counts(fleet, "crowded", 1, 1)
    with asking(fleet, "crowded", 14) as load:
        until_counts(fleet, "crowded", 3, 3)
        assert ready(fleet, "crowded")["status"] == "True"
    # The last answers end while replicas go: none is cut.
    until(lambda: counts(fleet, "crowded")["desired"] == 0, 240, lambda: fleet.model("crowded")["status"])
    assert not load.problems
    assert len(load.answers) > 14
    fleet.delete_model("crowded")


@pytest.mark.long
def test_a_rollout_under_load_has_no_gap_and_a_revision_that_fails_replaces_nothing(fleet: Fleet) -> None:
    two: dict[str, Any] = {"scaling": {"minReplicas": 2, "maxReplicas": 2}, "variants": [{"class": "l40s-48gb"}]}
    fleet.make_model("rolled", **two)
    until_counts(fleet, "rolled", 2, 2)
    before = {p["metadata"]["uid"] for p in pods(fleet, "rolled")}

    def replaced(old: set[str]) -> set[str]:
        until(
            lambda: len(now := {p["metadata"]["uid"] for p in pods(fleet, "rolled")}) == 2 and not now & old,
            240,
            lambda: pods(fleet, "rolled"),
        )
        until(lambda: ready(fleet, "rolled")["status"] == "True", 60, lambda: ready(fleet, "rolled"))
        return {p["metadata"]["uid"] for p in pods(fleet, "rolled")}

    with asking(fleet, "rolled", 4) as load:
        changed = {"env": [{"name": "SHOAL_SIM_SEED", "value": "7"}]}
        fleet.make_model("rolled", **two, pod=changed)
        after = replaced(before)

        wrong = {"env": [{"name": "SHOAL_SIM_GPU", "value": "abacus"}]}
        fleet.make_model("rolled", **two, pod=wrong)
        fleet.expect("rolled", "Ready", "RolloutStalled", within=240)
        # Once it has ended: the engine's own last lines.
        until(lambda: "abacus" in ready(fleet, "rolled")["message"], 120, lambda: ready(fleet, "rolled"))
        message = fleet.expect("rolled", "Ready", "RolloutStalled")
        assert "the one before goes on serving with 2 of 2 replicas" in message
        assert fleet.condition("rolled", "Stalled")["status"] == "True"
        assert fleet.condition("rolled", "Available")["status"] == "True"
        assert after <= {p["metadata"]["uid"] for p in pods(fleet, "rolled")}

        # Put right, and with another version of the engine at once.
        fleet.make_model("rolled", **two, pod=changed, engine={"version": NEXT_ENGINE})
        replaced(after)
        versions = {p["metadata"]["annotations"][names.ANNOTATION_ENGINE_VERSION] for p in pods(fleet, "rolled")}
        assert versions == {NEXT_ENGINE}
        assert fleet.condition("rolled", "Stalled").get("status") != "True"
    assert not load.problems
    assert load.answers
    fleet.delete_model("rolled")


@pytest.mark.long
def test_without_a_free_gpu_a_request_is_refused_at_once_and_a_rollout_replaces_in_place(
    fleet: Fleet, client: openai.OpenAI
) -> None:
    # Both nodes of the class are full with these two.
    wide: dict[str, Any] = {
        "source": {"uri": "file:///opt/shoal/models/tiny-code"},  # it can be cut in four
        "variants": [{"class": "h100-80gb"}],
        "engine": {"parallelism": {"tensor": 4}},
    }
    for name, replicas in (("roomy", 1), ("broken", 3)):
        fleet.make_model(name, **wide, scaling={"minReplicas": replicas})
        until_counts(fleet, name, replicas, replicas)
    fleet.make_model("cramped", **wide)
    message = fleet.expect("cramped", "Ready", "NoCapacity")
    assert "h100-80gb: 0 of 16 GPUs free" in message

    def refused() -> bool:
        try:
            ask(client, "cramped")
        except openai.APIStatusError as error:
            return error.status_code == 503 and 0 < int(error.response.headers["retry-after"]) <= 60
        return False

    until(refused, 60)
    changed = {"env": [{"name": "SHOAL_SIM_SEED", "value": "7"}]}
    fleet.delete_model("cramped")
    fleet.make_model("roomy", **wide, scaling={"minReplicas": 1}, pod=changed)
    until(lambda: in_place(fleet) > 0, 120, lambda: fleet.get("events", "-n", "demo"))
    assert ask(client, "roomy")  # held meanwhile
    until_counts(fleet, "roomy", 1, 1)

    # With another class that has room, the successor starts there, and the replica serves until it is ready.
    before = in_place(fleet)
    either: dict[str, Any] = wide | {"variants": [{"class": "h100-80gb"}, {"class": "l40s-48gb"}]}
    with asking(fleet, "roomy", 2) as load:
        changed = {"env": [{"name": "SHOAL_SIM_SEED", "value": "8"}]}
        fleet.make_model("roomy", **either, scaling={"minReplicas": 1}, pod=changed)

        def moved() -> bool:
            found = pods(fleet, "roomy")
            assert any(serves(pod) for pod in found), "no replica serves"
            return {pod["metadata"]["labels"][names.LABEL_GPU_CLASS] for pod in found} == {"l40s-48gb"}

        until(moved, 240, lambda: fleet.model("roomy").get("status"))
    assert not load.problems
    assert load.answers
    assert in_place(fleet) == before
    for name in ("roomy", "broken"):
        fleet.delete_model(name)


@pytest.mark.long
def test_operators_that_start_anew_lower_nothing(fleet: Fleet) -> None:
    fleet.make_model(
        "crowded", engine=SMALL, scaling={"stabilizationSeconds": 600, "maxReplicas": 2, "idleSeconds": 600}
    )
    until_counts(fleet, "crowded", 1, 1)
    with asking(fleet, "crowded", 12):
        until_counts(fleet, "crowded", 2, 2)
    selector = ("-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator")
    fleet.kubectl("delete", "pods", *selector, "--force", "--grace-period=0")
    fleet.kubectl("rollout", "status", "deployment/shoal-operator", "-n", NAMESPACE, "--timeout=120s", timeout=130)

    def leader() -> str:
        lease = json.loads(fleet.kubectl("get", "leases", "shoal-operator", "-n", NAMESPACE, "-o", "json"))
        return lease["spec"].get("holderIdentity") or ""

    until(lambda: bool(leader()), 60)
    # A Model that is made now shows that the new leader works: it starts a replica, and takes it away again.
    fleet.make_model("sleeper", scaling=FAST)
    fleet.expect("sleeper", "Ready", "ScaledToZero", within=240)
    assert "coldStartSeconds" in fleet.model("sleeper")["status"]
    assert counts(fleet, "crowded") == {"desired": 2, "ready": 2}
    for name in ("crowded", "sleeper"):
        fleet.delete_model(name)
