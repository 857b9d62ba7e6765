"""Nothing that ends a replica cuts an answer: it stops getting requests, finishes, goes.

Answers run for some 20 seconds here (the simulator computes as slowly as the Model says), while short requests go on:
every stream must come whole and every request be answered. Deletion, drain of a node, scaling down and rollouts all end
in the deletion of a pod, where the drain is.
"""

import base64
import json
import os
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import yaml

from shoal.api import names
from shoal_dev.demo import steps
from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

MODEL = "drained"
TOKENS = int(os.environ.get("SHOAL_E2E_STREAM_TOKENS", "250"))
"""More where pods start slowly: an answer must last longer than that."""
SPARE = os.environ.get("SHOAL_E2E_SPARE_NODE", "")
"""A node that takes pods only while another one is drained, where the fleet has no other place for them."""
DRAIN_SECONDS = 300
"""Far longer than any answer here: a pod that goes before has not waited for the time to be over."""
SLOW = {"env": [{"name": "SHOAL_SIM_SPEED", "value": "0.1"}, {"name": "SHOAL_SIM_LOAD_SECONDS", "value": "1"}]}


@dataclass
class Stream:
    """One long answer, read in a thread of its own."""

    client: openai.OpenAI
    chunks: int = 0
    tokens: int | None = None
    problem: str = ""
    ended: float | None = None
    _thread: threading.Thread | None = None

    def start(self) -> "Stream":
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.chunks > 3, 60, lambda: self.problem)
        return self

    def _read(self) -> None:
        try:
            answer = self.client.completions.create(
                model=MODEL,
                prompt="A long story",
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            for chunk in answer:
                self.chunks += 1
                if chunk.usage is not None:
                    self.tokens = chunk.usage.completion_tokens
        except Exception as error:
            self.problem = repr(error)
        self.ended = time.monotonic()

    @property
    def runs(self) -> bool:
        return self.ended is None

    def assert_whole(self) -> None:
        """Waits for its end."""
        assert self._thread is not None
        self._thread.join(180)
        assert (self.problem, self.tokens) == ("", TOKENS)


@dataclass
class Requests:
    """Short requests, one after the other, until stopped."""

    client: openai.OpenAI
    answered: int = 0
    failed: list[str] = field(default_factory=list[str])
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(0.2):
            try:
                if self.client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices:
                    self.answered += 1
            except Exception as error:
                self.failed.append(repr(error))

    def stop(self) -> None:
        self._stop.set()


@pytest.fixture(scope="module")
def model(fleet: Fleet) -> Generator[str]:
    fleet.until_alone()  # else a class that gets free meanwhile draws the replica to it
    fleet.make_model(
        MODEL,
        pod=SLOW,
        drainSeconds=DRAIN_SECONDS,
        stallSeconds=30,
        scaling={"minReplicas": 1, "maxReplicas": 3, "stabilizationSeconds": 0},
    )
    grant(fleet)
    fleet.kubectl("wait", "--for=condition=Ready", f"model/{MODEL}", "-n", "demo", "--timeout=240s", timeout=250)
    yield MODEL
    fleet.delete_model(MODEL)
    steps.apply_examples(fleet)


def grant(fleet: Fleet) -> None:
    """The demo's tenant may use the Model."""
    value = f'[{{"op": "add", "path": "/spec/models/-", "value": {{"namespace": "demo", "name": "{MODEL}"}}}}]'
    fleet.kubectl("patch", "tenants.shoal.dev", "acme", "--type=json", "-p", value)


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    port = fleet.lab.forward_port()
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=steps.DEMO_KEY, max_retries=0, timeout=180)


@pytest.fixture
def requests(model: str, fleet: Fleet, client: openai.OpenAI) -> Generator[Requests]:
    """Goes on during the test; at its end none of them may have failed."""
    until(lambda: model in {m.id for m in client.models.list()}, 60)
    until(lambda: len(ready(fleet)) == 1 and len(pods(fleet)) == 1, 240, lambda: phases(fleet))
    load = Requests(client)
    thread = threading.Thread(target=load.run, daemon=True)
    thread.start()
    yield load
    # A replica that starts slowly may come after all that the test looks at: the requests that wait for it count.
    until(lambda: load.answered > 5 or load.failed != [], 180, lambda: phases(fleet))
    load.stop()
    thread.join(200)
    assert not thread.is_alive()
    assert load.failed == []
    assert load.answered > 5


def pods(fleet: Fleet) -> list[dict[str, Any]]:
    return fleet.get("pods", "-n", "demo", "-l", f"{names.LABEL_MODEL}={MODEL},app.kubernetes.io/component=engine")


def phases(fleet: Fleet) -> list[tuple[str, str, bool]]:
    return [(p["metadata"]["name"], p["status"]["phase"], "deletionTimestamp" in p["metadata"]) for p in pods(fleet)]


def ready(fleet: Fleet) -> list[str]:
    """Names of the pods that serve."""
    return [
        p["metadata"]["name"]
        for p in pods(fleet)
        if "deletionTimestamp" not in p["metadata"]
        and any(c["type"] == "Ready" and c["status"] == "True" for c in p["status"].get("conditions", []))
    ]


def going(fleet: Fleet) -> list[str]:
    return [name for name, _, deleting in phases(fleet) if deleting]


def there(fleet: Fleet, pod: str) -> bool:
    return any(name == pod for name, _, _ in phases(fleet))


def patch(fleet: Fleet, spec: str) -> None:
    fleet.kubectl("patch", "models.shoal.dev", MODEL, "-n", "demo", "--type=merge", "-p", f'{{"spec": {spec}}}')


def assert_goes_after(fleet: Fleet, pod: str, stream: Stream) -> None:
    """The stream comes whole, its pod is there until then and gone soon after, long before drainSeconds."""
    # Where a successor started so slowly that the stream is over, the pod may go between two looks.
    until(lambda: pod in going(fleet) or not there(fleet, pod), 240, lambda: phases(fleet))
    while stream.runs:
        assert there(fleet, pod) or not stream.runs, "the pod went before its stream had ended"
        time.sleep(0.5)
    stream.assert_whole()
    until(lambda: not there(fleet, pod), 120, lambda: phases(fleet))


def test_a_deleted_pod_finishes_its_stream_while_others_get_the_requests(
    fleet: Fleet, client: openai.OpenAI, requests: Requests
) -> None:
    (pod,) = ready(fleet)
    stream = Stream(client).start()
    fleet.kubectl("delete", "pod", pod, "-n", "demo", "--wait=false")
    # With one replica the next requests wait at the gateway for the new one, and the old one gets none.
    until(lambda: [p for p in ready(fleet) if p != pod] != [], 180, lambda: phases(fleet))
    before = requests.answered
    until(lambda: requests.answered > before + 3, 60)
    assert_goes_after(fleet, pod, stream)


def test_the_drain_of_a_node_waits_for_the_stream(fleet: Fleet, client: openai.OpenAI, requests: Requests) -> None:
    (pod,) = ready(fleet)
    node = node_of(fleet, pod)
    stream = Stream(client).start()
    if SPARE:
        fleet.kubectl("uncordon", SPARE)
    options = ("--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={names.LABEL_MODEL}={MODEL}")
    draining = threading.Thread(target=lambda: fleet.kubectl("drain", node, *options, "--timeout=300s", timeout=330))
    draining.start()
    try:
        assert_goes_after(fleet, pod, stream)
        draining.join(120)
        assert not draining.is_alive()
    finally:
        fleet.kubectl("uncordon", node)
        if SPARE:
            fleet.kubectl("cordon", SPARE)
    if SPARE:
        come_back(fleet, node)


def node_of(fleet: Fleet, pod: str) -> str:
    """Empty: on none."""
    return next((p["spec"].get("nodeName", "") for p in pods(fleet) if p["metadata"]["name"] == pod), "")


def come_back(fleet: Fleet, node: str) -> None:
    """What went to the spare node meanwhile is replaced on the one that the other tests are about."""
    until(lambda: ready(fleet) != [], 240, lambda: phases(fleet))
    for pod in [pod for pod in ready(fleet) if node_of(fleet, pod) == SPARE]:
        fleet.kubectl("delete", "pod", pod, "-n", "demo", "--wait=false")
    until(lambda: {node_of(fleet, pod) for pod in ready(fleet)} == {node}, 240, lambda: phases(fleet))


def test_a_rollout_replaces_the_replica_after_its_stream(
    fleet: Fleet, client: openai.OpenAI, requests: Requests
) -> None:
    (pod,) = ready(fleet)
    stream = Stream(client).start()
    patch(fleet, '{"pod": {"annotations": {"example.com/revision": "2"}}}')
    assert_goes_after(fleet, pod, stream)
    until(lambda: [p for p in ready(fleet) if p != pod] != [], 30, lambda: phases(fleet))


def test_scaling_down_lets_both_replicas_finish(fleet: Fleet, client: openai.OpenAI, requests: Requests) -> None:
    patch(fleet, '{"scaling": {"minReplicas": 2}}')
    until(lambda: len(ready(fleet)) == 2, 240, lambda: phases(fleet))
    both = set(ready(fleet))
    streams = [Stream(client).start() for _ in range(4)]
    patch(fleet, '{"scaling": {"minReplicas": 1, "maxReplicas": 1}}')
    stay = lambda: both & {name for name, _, deleting in phases(fleet) if not deleting}  # noqa: E731
    until(lambda: len(stay()) == 1, 240, lambda: phases(fleet))
    gone = both - stay()
    for stream in streams:
        stream.assert_whole()
    until(lambda: not any(there(fleet, pod) for pod in gone), 120, lambda: phases(fleet))
    patch(fleet, '{"scaling": {"maxReplicas": 3}}')


def test_a_kubelet_that_restarts_during_the_drain_calls_the_hook_again(
    fleet: Fleet, client: openai.OpenAI, requests: Requests
) -> None:
    (pod,) = ready(fleet)
    node = next(p["spec"]["nodeName"] for p in pods(fleet) if p["metadata"]["name"] == pod)
    stream = Stream(client).start()
    fleet.kubectl("delete", "pod", pod, "-n", "demo", "--wait=false")
    until(lambda: pod in going(fleet), 30)
    time.sleep(1.0)
    fleet.lab.restart_kubelet(node)
    assert_goes_after(fleet, pod, stream)


def restarts(fleet: Fleet, pod: str) -> int:
    found = next(p for p in pods(fleet) if p["metadata"]["name"] == pod)
    statuses = found["status"].get("containerStatuses", [])
    return next((s["restartCount"] for s in statuses if s["name"] == names.CONTAINER_ENGINE), 0)


def test_a_stalled_engine_is_restarted_soon_and_serves_again(fleet: Fleet, client: openai.OpenAI, model: str) -> None:
    until(lambda: len(ready(fleet)) == 1 and len(pods(fleet)) == 1, 240, lambda: phases(fleet))
    (pod,) = ready(fleet)
    began = time.monotonic()
    stall_engine(fleet, pod)
    stream = threading.Thread(target=lambda: answered(client), daemon=True)
    stream.start()
    # stallSeconds (30), two liveness probes 10 s apart, and nothing for a drain: it would take 300 s.
    until(lambda: restarts(fleet, pod) == 1, 240, lambda: log_of_agent(fleet, pod))
    assert time.monotonic() - began < DRAIN_SECONDS
    until(lambda: pod in ready(fleet), 120, lambda: phases(fleet))
    until(lambda: answered(client), 120)


def log_of_agent(fleet: Fleet, pod: str) -> str:
    return fleet.kubectl("logs", pod, "-n", "demo", "-c", names.CONTAINER_AGENT, "--tail=20")


def answered(client: openai.OpenAI) -> bool:
    try:
        return bool(client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices)
    except openai.APIError:
        return False


def stall_engine(fleet: Fleet, pod: str) -> None:
    """Arms the simulator's fault: from the next request on the engine computes nothing."""
    found = next(p for p in pods(fleet) if p["metadata"]["name"] == pod)
    volume = next(v for v in found["spec"]["volumes"] if v["name"] == "engine-key")
    secret = json.loads(fleet.kubectl("get", "secret", volume["secret"]["secretName"], "-n", "demo", "-o", "json"))
    key = yaml.safe_load(base64.b64decode(secret["data"]["engine.yaml"]))["admin-api-key"]
    # From within the pod: others reach serving paths only.
    url = f"http://127.0.0.1:{names.ENGINE_PORT}/sim/faults"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    code = (
        "import sys, json, urllib.request as r\n"
        "url, headers = sys.argv[1], json.loads(sys.argv[2])\n"
        'r.urlopen(r.Request(url, b\'{"kind": "stall"}\', headers), timeout=5).read()'
    )
    within = ("exec", pod, "-n", "demo", "-c", names.CONTAINER_ENGINE, "--", "python", "-c", code)
    fleet.kubectl(*within, url, json.dumps(headers))
