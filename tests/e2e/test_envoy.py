"""The other door on a live fleet: a real Envoy in a pod, set up by what the operator wrote for data planes
(docs/other-doors.md). It asks the installed gateways, and sends requests to engines behind mutual TLS itself."""

import base64
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import click
import httpx
import pytest

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal.kube.resources import INFERENCEPOOLS
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab.state import LabForward
from tests.e2e.conftest import Fleet, serves
from tests.support.extproc import Processors, bootstrap, listener
from tests.support.inferencepools import inference_pool_crd
from tests.support.lab import make_lab
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]

SPACE: Final = steps.DEMO_NAMESPACE
INGRESS: Final = "ingress"
"""Namespace of the proxy."""
PORT: Final = 8080
OPEN_PORT: Final = 8081
"""Of Envoy: as documented, and with a filter that lets requests pass when no gateway answers."""
PROXY: Final = LabForward(namespace=INGRESS, service="envoy", port=PORT)
MISTAKEN: Final = LabForward(namespace=INGRESS, service="envoy", port=OPEN_PORT)
MODEL: Final = "llama"
COLD: Final = "cold"
TENANT: Final = "door"
NARROW: Final = "narrow"
KEYS: Final = {TENANT: "sk-door-7f21", NARROW: "sk-narrow-01c4"}
PER_MINUTE: Final = 2
"""Requests of the narrow tenant."""
TOKENS: Final = 40
"""Of an answer under load."""
ENOUGH: Final = 8
"""Whole answers after something happened, that show that all goes on."""
VALUES: Final[dict[str, Any]] = {
    "engines": {
        "simulator": {
            "enabled": True,
            # Slow steps: answers last long enough to be hit by a fault.
            "env": [{"name": "SHOAL_SIM_GPU", "value": "l4"}, {"name": "SHOAL_SIM_KV", "value": "llama-3.1-8b"}],
        },
        "cpuPerGPU": "100m",
        "memoryPerGPU": "512Mi",
    },
    "cache": {"enabled": False},
    "operator": {"replicas": 1},
    "gateway": {"replicas": 2, "extProc": {"enabled": True, "proxyNamespaces": [INGRESS]}},
}


@dataclass(frozen=True)
class Asked:
    """What a client got. `status`: 0: nothing. `request`: its id, by the answer's head; None: Envoy answered itself."""

    status: int
    request: str | None
    tokens: int
    """Output tokens of its usage; of an answer that broke off, the pieces that came."""
    whole: bool
    text: str = ""


class Door(Fleet):
    """A fleet, and the clients of its proxy."""

    def ask(
        self,
        *,
        model: str = MODEL,
        tenant: str = TENANT,
        key: str | None = None,
        tokens: int = 4,
        stream: bool = False,
        forward: LabForward = PROXY,
        timeout: float = 120,
        aimed_at: str | None = None,
    ) -> Asked:
        """`aimed_at`: the endpoint that the client would like."""
        port = self.lab.forward_port(forward.namespace, forward.service, forward.port)
        body: dict[str, Any] = {"model": model, "prompt": "Tell me.", "max_tokens": tokens, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent = {"authorization": f"Bearer {key or KEYS[tenant]}"}
        if aimed_at is not None:
            sent["x-gateway-destination-endpoint"] = aimed_at
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            with httpx.Client(timeout=timeout) as client, client.stream("POST", url, json=body, headers=sent) as answer:
                return _read(answer, stream)
        except httpx.TransportError:
            return Asked(0, None, 0, False)

    def records(self, tenant: str = TENANT) -> list[dict[str, Any]]:
        """The final rows of the tenant's requests; none while the ledger starts."""
        command = ("shoal", "ledger", "records", "--tenant", tenant, "--limit", "10000", "-o", "json")
        try:
            output = self.exec("shoal-ledger-0", *command)
        except click.ClickException:
            return []
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return [row for row in rows if row["attempt"] == 0]

    def recorded(self, request: str | None) -> dict[str, Any]:
        """The only row of a request, once it has ended."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [row for row in self.records() if row["request"] == request]
            return any(row["ended"] for row in found)

        until(there, 60, lambda: found)
        (row,) = found
        return row

    def gateways(self) -> list[dict[str, Any]]:
        found = self.get("pods", "-n", NAMESPACE, "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY}")
        return [pod for pod in found if serves(pod)]

    def named(self) -> list[str]:
        """Addresses of the gateways, as the Model's EndpointSlice has them for proxies."""
        listed = json.loads(self.kubectl("get", "endpointslice", f"picker-{MODEL}", "-n", SPACE, "-o", "json"))
        return sorted(address for each in listed["endpoints"] or [] for address in each["addresses"])

    def open_to_proxies(self, count: int) -> None:
        """Waits until so many gateways are ready, and Envoy is told of them and no others."""

        def same() -> bool:
            addresses = sorted(pod["status"]["podIP"] for pod in self.gateways())
            return len(addresses) == count and self.named() == addresses

        until(same, 120, lambda: (self.named(), [pod["metadata"]["name"] for pod in self.gateways()]))

    def answered_at(self) -> set[str]:
        """Where Envoy sent requests, by its log."""
        lines = self.kubectl("logs", "envoy", "-n", INGRESS).splitlines()
        said = [line.split() for line in lines]
        return {words[1] for words in said if len(words) == 3 and words[0].isdigit() and words[1] != "-"}


def _read(answer: httpx.Response, stream: bool) -> Asked:
    request = answer.headers.get("x-shoal-request-id")
    pieces, usage, whole, text = 0, 0, False, ""
    try:
        if stream and answer.status_code == 200:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    whole = True
                elif line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    pieces += sum(bool(choice["text"]) for choice in chunk.get("choices", ()))
                    usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
        else:
            text = answer.read().decode()
            whole = answer.status_code == 200
            usage = json.loads(text)["usage"]["completion_tokens"] if whole else 0
    except httpx.TransportError:
        whole = False
    return Asked(answer.status_code, request, usage if whole else pieces, whole, text)


@pytest.fixture(scope="module")
def door() -> Generator[Door]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    lab = make_lab(forwards=(PROXY, MISTAKEN))
    try:
        door = Door(lab)
        door.apply(inference_pool_crd(), *(_namespace(name) for name in (SPACE, INGRESS)))
        steps.install(door, "simulator", steps.LAB_IMAGE, VALUES)
        door.kubectl("apply", "-f", str(steps.EXAMPLES / "gpuclasses.yaml"))
        door.apply(*(_tenant(name) for name in KEYS))
        door.make_model(MODEL, scaling={"minReplicas": 2, "maxReplicas": 2})
        door.make_model(COLD, scaling={"minReplicas": 0, "maxReplicas": 1, "idleSeconds": 5, "stabilizationSeconds": 5})
        door.expect(MODEL, "Ready", "ReplicasReady", within=180)
        door.open_to_proxies(2)
        door.apply(*_envoy(door))
        door.kubectl("wait", "--for=condition=Ready", "pod/envoy", "-n", INGRESS, "--timeout=60s", timeout=70)
        until(lambda: door.ask().status == 200, 60)
        yield door
    finally:
        lab.down()


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _tenant(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "keys": [{"name": "k", "sha256": hash_api_key(KEYS[name])}],
        "models": [{"namespace": SPACE, "name": model} for model in (MODEL, COLD)],
    }
    if name == NARROW:
        spec["limits"] = {"requestsPerMinute": PER_MINUTE}
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec}


def _envoy(door: Door) -> list[dict[str, Any]]:
    """The proxy, as a data plane makes it of an InferencePool: it asks the endpoints of the pool's picker."""
    secret = json.loads(door.kubectl("get", "secret", "shoal-gateway-tls", "-n", NAMESPACE, "-o", "json"))
    trust = base64.b64decode(secret["data"]["ca.crt"]).decode()
    asked = Processors([(address, names.EXT_PROC_PORT) for address in door.named()], trust=trust, watched=True)
    open_ = {"failure_mode_allow": True}
    ports = [
        listener("0.0.0.0", PORT, logged=True),
        listener("0.0.0.0", OPEN_PORT, **open_),
    ]
    metadata = {"name": "envoy", "namespace": INGRESS}
    container = {
        "name": "envoy",
        "image": steps.LAB_IMAGE,
        "command": ["envoy", "--config-path", "/config/envoy.json", "--concurrency", "1", "--disable-hot-restart"],
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    volume = {"name": "config", "configMap": {"name": "envoy"}}
    labels = {"app": "envoy"}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata,
         "data": {"envoy.json": bootstrap(ports, asked, trust)}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | {"labels": labels},
         "spec": {"containers": [container], "volumes": [volume]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"selector": labels, "ports": [{"name": f"p{port}", "port": port} for port in (PORT, OPEN_PORT)]}},
    ]  # fmt: skip


def test_answers_go_from_the_engines_to_clients_and_each_is_recorded_once(door: Door) -> None:
    asked = [door.ask(tokens=tokens, stream=stream) for tokens in (3, 5) for stream in (False, True)]
    assert [(one.status, one.tokens, one.whole) for one in asked] == [(200, n, True) for n in (3, 3, 5, 5)]
    for one in asked:
        row = door.recorded(one.request)
        assert (row["outcome"], row["output_tokens"], row["model"]) == ("answered", one.tokens, f"{SPACE}/{MODEL}")
        assert row["count_source"] == "final"
    # What the operator says to data planes is where the answers came from: the pool's pods, at the pool's port.
    kind = f"{INFERENCEPOOLS.plural}.{INFERENCEPOOLS.group}"
    pool = json.loads(door.kubectl("get", kind, MODEL, "-n", SPACE, "-o", "json"))
    (port,) = [each["number"] for each in pool["spec"]["targetPorts"]]
    selector = ",".join(f"{k}={v}" for k, v in pool["spec"]["selector"]["matchLabels"].items())
    pods = {f"{pod['status']['podIP']}:{port}" for pod in door.get("pods", "-n", SPACE, "-l", selector) if serves(pod)}
    assert len(pods) == 2
    assert door.answered_at()
    assert door.answered_at() <= pods
    # The picker's Service leads to a gateway, as its EndpointSlice does.
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["failureMode"] == "FailClose"
    service = json.loads(door.kubectl("get", "service", picker["name"], "-n", SPACE, "-o", "json"))
    to = (service["spec"]["clusterIP"], picker["port"]["number"])
    door.lab.exec("python3", "-c", f"import socket; socket.create_connection({to!r}, 10)")


def test_a_wrong_key_and_a_tenant_over_its_limit_get_no_engine(door: Door) -> None:
    wrong = door.ask(key="sk-of-nobody")
    assert (wrong.status, json.loads(wrong.text)["error"]["code"]) == (401, "invalid_api_key")
    asked = [door.ask(tenant=NARROW, tokens=1) for _ in range(4 * PER_MINUTE)]
    codes = Counter(one.status for one in asked)
    assert set(codes) == {200, 429}
    # One more may have become due meanwhile.
    assert codes[200] <= PER_MINUTE + 1
    refused = next(one for one in asked if one.status == 429)
    assert json.loads(refused.text)["error"]["code"] == "rate_limit_exceeded"
    answered = {one.request for one in asked if one.whole}
    until(lambda: {row["request"] for row in door.records(NARROW) if row["ended"]} == answered, 60)


def test_a_request_to_a_model_at_zero_waits_for_its_replica(door: Door) -> None:
    door.expect(COLD, "Ready", "ScaledToZero")
    asked = door.ask(model=COLD, tokens=3)
    assert (asked.status, asked.tokens, asked.whole) == (200, 3, True), asked.text
    row = door.recorded(asked.request)
    assert (row["model"], row["outcome"]) == (f"{SPACE}/{COLD}", "answered")


@dataclass
class Clients:
    """A steady load through the proxy, and what came of it."""

    door: Door
    got: list[Asked] = field(default_factory=list[Asked])
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, stream: bool) -> None:
        while not self._stop.is_set():
            self.got.append(self.door.ask(tokens=TOKENS, stream=stream))
            self._stop.wait(0.05)

    def go_on(self) -> None:
        """Waits for whole answers of each kind to requests from now on."""
        before = len(self.got)
        until(lambda: sum(one.whole for one in self.got[before:]) >= ENOUGH, 120, lambda: self.got[before:][-5:])

    def stop(self) -> None:
        self._stop.set()


def test_a_gateway_that_is_killed_under_load_leaves_no_answer_without_a_record(door: Door) -> None:
    door.open_to_proxies(2)
    clients = Clients(door)
    victim = door.gateways()[0]["metadata"]["name"]
    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(clients.run, number % 2 == 0) for number in range(8)]
        try:
            clients.go_on()
            door.lab.signal_container(f"{NAMESPACE}/{victim}", signal.SIGKILL)
            clients.go_on()
            until(lambda: len(door.gateways()) == 2, 120)
            clients.go_on()
        finally:
            clients.stop()
    for load in loads:
        load.result()
    door.open_to_proxies(2)

    # Who got the head of an answer has one record of it, whether the rest came or not.
    ids = [one.request for one in clients.got if one.request is not None and one.status == 200]
    assert len(ids) == len(set(ids))
    rows: dict[str, list[dict[str, Any]]] = {}

    def there() -> bool:
        rows.clear()
        for row in door.records():
            if row["ended"]:
                rows.setdefault(row["request"], []).append(row)
        return set(ids) <= rows.keys()

    until(there, 120, lambda: [id for id in ids if id not in rows])
    assert all(len(found) == 1 for found in rows.values())
    for one in clients.got:
        if one.whole:
            (row,) = rows[one.request or ""]
            # The killed gateway may have passed an answer's last byte on and not have written that down.
            counts = (row["outcome"], row["output_tokens"], row["count_source"])
            assert counts == ("answered", TOKENS, "final") or row["outcome"] == "cut", row
        elif one.request is None:
            assert one.status in (0, 500, 503), one  # Envoy's own: nobody had decided
    # The kill was one: something broke off or was refused, and most was answered.
    whole = sum(one.whole for one in clients.got)
    assert len(clients.got) - whole >= 1
    assert whole >= 3 * ENOUGH


def test_without_gateways_nothing_passes_and_no_engine_answers(door: Door) -> None:
    selector = f"{names.LABEL_MODEL}={MODEL},{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    pods = door.get("pods", "-n", SPACE, "-l", selector)
    endpoint = f"{pods[0]['status']['podIP']}:{names.ENGINE_PROXY_PORT}"
    door.kubectl("scale", "statefulset", "shoal-gateway", "-n", NAMESPACE, "--replicas=0")
    try:
        until(lambda: door.named() == [], 120, door.named)
        until(lambda: door.ask(timeout=20).status == 500, 60)
        refused = door.ask(timeout=20, aimed_at=endpoint)
        assert (refused.status, refused.request) == (500, None)
        # Nor by a filter that fails open: Envoy passes on no body that nobody has seen.
        passed = door.ask(timeout=20, forward=MISTAKEN, aimed_at=endpoint)
        assert (passed.status, passed.request) == (500, None)
    finally:
        door.kubectl("scale", "statefulset", "shoal-gateway", "-n", NAMESPACE, "--replicas=2")
    until(lambda: len(door.gateways()) == 2, 120)
    door.open_to_proxies(2)
