"""ModelRoutes on a live fleet: shares, sessions, a canary that halts itself, fallbacks, names, and usage by route.

The routes have the two Models that every test finds as targets. Which of them answered is told by the ledger: an answer
has the route's name.
"""

import base64
import concurrent.futures
import json
import os
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import openai
import pytest
import yaml
from click.testing import CliRunner

from shoal.api import names
from shoal.api.meta import API_VERSION
from shoal.cli.main import main
from tests.e2e.conftest import Fleet, serves
from tests.support.tenantfixture import TenantFixture, admitted
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

TENANT: Final = f"routes-e2e-{os.getpid()}"
SPACE: Final = "demo"
CHAT, CODE, COLD = "tiny-chat", "tiny-code", "routes-e2e-cold"
COLD_START_SECONDS: Final = 10
"""Of the Model at zero, at least; longer than a request waits for it before it leaves."""
MANY: Final = 160
"""Requests whose shares are counted."""


def target(name: str, weight: int = 1) -> dict[str, Any]:
    return {"model": {"name": name}, "weight": weight}


@dataclass
class Line:
    """What one route was asked, and what was answered."""

    tenants: TenantFixture
    client: openai.OpenAI
    name: str
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Request -> its input and output tokens, by its own answer."""
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def ask(self, prompt: str = "Tell me.", model: str | None = None, tokens: int = 2, **headers: str) -> str:
        """The request's id."""
        raw = self.client.completions.with_raw_response.create(
            model=model or self.name, prompt=prompt, max_tokens=tokens, extra_headers=headers
        )
        answer = raw.parse()
        assert answer.usage is not None
        assert answer.model == (model or self.name), "the answer has the name that the client sent"
        request = raw.headers["x-request-id"]
        self.tokens[request] = answer.usage.prompt_tokens, answer.usage.completion_tokens
        return request

    def ask_all(self, prompts: list[str], headers: list[dict[str, str]] | None = None) -> list[str]:
        """Several at a time; their ids in order."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            each = headers or [{} for _ in prompts]
            return list(pool.map(lambda pair: self.ask(pair[0], **pair[1]), zip(prompts, each, strict=True)))

    def rows(self) -> dict[str, dict[str, Any]]:
        """The ledger's row of each request, once all are there."""
        if self._rows.keys() == self.tokens.keys():
            return self._rows

        def found() -> list[dict[str, Any]]:
            rows = self.tenants.rows("--tenant", TENANT)
            return [row for row in rows if row["ended"] and row["attempt"] == 0 and row["request"] in self.tokens]

        until(lambda: len(found()) >= len(self.tokens), 120, lambda: f"{len(found())} of {len(self.tokens)}")
        rows = found()
        assert len(rows) == len(self.tokens), "each request has one row"
        self._rows = {row["request"]: row for row in rows}
        assert {id: (row["input_tokens"], row["output_tokens"]) for id, row in self._rows.items()} == self.tokens
        return self._rows

    def answered_by(self, requests: list[str]) -> list[str]:
        rows = self.rows()
        return [rows[request]["model"].partition("/")[2] for request in requests]


@pytest.fixture(scope="module")
def tenants(fleet: Fleet) -> Generator[TenantFixture]:
    made = TenantFixture(fleet)
    models = [{"namespace": SPACE, "name": name} for name in (CHAT, CODE, COLD)]
    fleet.apply({"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": TENANT}, "spec": {"models": models}})
    try:
        made.keys[TENANT] = made.make_key("first", tenant=TENANT)
        admitted(made, made.keys[TENANT])
        yield made
    finally:
        fleet.kubectl("delete", "tenants.shoal.dev", TENANT, "--ignore-not-found")


@pytest.fixture
def line(fleet: Fleet, tenants: TenantFixture, request: pytest.FixtureRequest) -> Generator[Line]:
    """A name for a route of its own, which goes with the test."""
    name = f"routes-e2e-{request.node.name.removeprefix('test_').replace('_', '-')}"[:60].rstrip("-")
    with tenants.client(TENANT) as client:
        try:
            yield Line(tenants, client, name)
        finally:
            fleet.kubectl("delete", "modelroutes.shoal.dev", name, "-n", SPACE, "--ignore-not-found")


def put(fleet: Fleet, name: str, *rules: dict[str, Any], **spec: Any) -> None:
    """The route as it is from now on."""
    metadata = {"name": name, "namespace": SPACE}
    body = {"rules": [{"name": f"r{at}"} | rule for at, rule in enumerate(rules)], **spec}
    fleet.apply({"apiVersion": API_VERSION, "kind": "ModelRoute", "metadata": metadata, "spec": body})


def status(fleet: Fleet, name: str) -> dict[str, Any]:
    found = json.loads(fleet.kubectl("get", "modelroutes.shoal.dev", name, "-n", SPACE, "-o", "json"))
    told = found.get("status", {})
    return told if told.get("observedGeneration") == found["metadata"]["generation"] else {}


def condition(fleet: Fleet, name: str, type: str = "Ready") -> dict[str, Any]:
    return next((c for c in status(fleet, name).get("conditions", []) if c["type"] == type), {})


def known(line: Line, name: str | None = None) -> None:
    """Waits until every gateway has the route: an own connection each time goes to one or the other."""

    def everywhere() -> bool:
        return all(line.tenants.get(f"/v1/models/{name or line.name}", TENANT).status_code == 200 for _ in range(8))

    until(everywhere, 60)


def test_requests_are_shared_by_weight_sessions_stay_and_usage_is_by_route(fleet: Fleet, line: Line) -> None:
    put(
        fleet, line.name,
        {"matches": [{"headers": [{"name": "x-session", "type": "Prefix", "value": "s"}]}],
         "targets": [target(CHAT), target(CODE)], "sessionAffinity": {"type": "Header", "header": "x-session"}},
        {"targets": [target(CHAT, 3), target(CODE, 1)]},
    )  # fmt: skip
    until(lambda: condition(fleet, line.name).get("reason") == "TargetsReady", 60, lambda: status(fleet, line.name))
    known(line)

    drawn = line.ask_all(["Tell me."] * MANY)
    sessions = [f"s{number}" for number in range(24)]
    kept = line.ask_all(["And then?"] * 72, [{"x-session": name} for name in sessions * 3])
    by_name = [line.ask(model=CODE) for _ in range(3)]
    (top,) = [row for row in kubectl_top(fleet) if row["route"] == f"{SPACE}/{line.name}"]
    assert (top["complete"], top["failed"], top["reason"]) == (True, 0, "TargetsReady")
    assert {one["target"] for one in top["targets"]} == {f"{SPACE}/{CHAT}", f"{SPACE}/{CODE}"}
    assert 0 < top["requests"] <= len(drawn) + len(kept)  # of the last minute

    # A quarter; six times the deviation of 5.5 is more than chance does.
    share = Counter(line.answered_by(drawn))
    assert set(share) == {CHAT, CODE}
    assert MANY / 4 - 33 <= share[CODE] <= MANY / 4 + 33
    answered: dict[str, set[str]] = {}
    for session, model in zip(sessions * 3, line.answered_by(kept), strict=True):
        answered.setdefault(session, set()).add(model)
    assert all(len(models) == 1 for models in answered.values()), answered
    assert set().union(*answered.values()) == {CHAT, CODE}, "sessions are shared, too"
    assert set(line.answered_by(by_name)) == {CODE}

    # What was asked is what is billed: by route and Model, each request once.
    rows = line.rows()
    route = f"{SPACE}/{line.name}"
    assert {row["route"] or "" for id, row in rows.items() if id in by_name} == {""}
    expected: dict[tuple[str, str], list[int]] = {}
    for id, row in rows.items():
        one = expected.setdefault((row["route"] or "", row["model"]), [0, 0, 0])
        for at, number in enumerate((1, *line.tokens[id])):
            one[at] += number
    assert {key[0] for key in expected} == {route, ""}
    assert usage_by_route(fleet) == {key: tuple(value) for key, value in expected.items()}


def usage_by_route(fleet: Fleet) -> dict[tuple[str, str], tuple[int, int, int]]:
    """`kubectl shoal usage`: requests, input and output tokens by route and Model."""
    args = ("usage", "--tenant", TENANT, "--by", "route,model", "-o", "json", "--kubeconfig", str(fleet.lab.kubeconfig))
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    return {(r["route"] or "", r["model"]): (r["requests"], r["inputTokens"], r["outputTokens"]) for r in rows}


def test_a_canary_that_fails_halts_itself_and_the_status_says_why(fleet: Fleet, line: Line) -> None:
    canary: dict[str, Any] = {"target": {"model": {"name": CODE}}, "percent": 50}
    with broken(fleet, CODE):
        put(fleet, line.name, {"targets": [target(CHAT)], "canary": canary})
        known(line)
        failed = 0
        for _ in range(200):
            failed += not whole(line)
            if canary_of(fleet, line.name).get("state") == "Halted":
                break
        told = canary_of(fleet, line.name)
        assert told["state"] == "Halted"
        # Three failures are too many for a gateway, and there are two.
        assert 3 <= failed <= 6
        assert told["message"].startswith(f"Model {SPACE}/{CODE}: 3 of its last ")
        ready = condition(fleet, line.name)
        assert (ready["status"], ready["reason"]) == ("True", "CanaryHalted")
        assert told["message"] in ready["message"]
        (shown,) = [row for row in kubectl_status(fleet)["routes"] if row["route"] == f"{SPACE}/{line.name}"]
        assert (shown["reason"], shown["canaries"][0]["state"]) == ("CanaryHalted", "Halted")
        # The Model that works gets everything, at the other gateway as soon as it has heard.
        until(lambda: all(whole(line, anew=True) for _ in range(8)), 30)
        assert all(whole(line, anew=True) for _ in range(8))

        def event() -> bool:
            found = fleet.get("events", "-n", SPACE, "--field-selector", f"involvedObject.name={line.name}")
            return any(e["reason"] == "CanaryHalted" and told["message"] in e["message"] for e in found)

        until(event, 30)
    # The halt lasts until the canary is another one.
    assert all(whole(line) for _ in range(10))
    assert canary_of(fleet, line.name)["state"] == "Halted"
    put(fleet, line.name, {"targets": [target(CHAT)], "canary": canary | {"percent": 100}})
    until(lambda: canary_of(fleet, line.name).get("state") == "Running", 60, lambda: status(fleet, line.name))
    until(lambda: line.answered_by([line.ask()]) == [CODE], 60)


def kubectl_status(fleet: Fleet) -> dict[str, Any]:
    """`kubectl shoal status`."""
    done = CliRunner().invoke(main, ["status", "-n", SPACE, "-o", "json", "--kubeconfig", str(fleet.lab.kubeconfig)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def kubectl_top(fleet: Fleet) -> list[dict[str, Any]]:
    """`kubectl shoal top routes`."""
    args = ["top", "routes", "-n", SPACE, "-o", "json", "--kubeconfig", str(fleet.lab.kubeconfig)]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def canary_of(fleet: Fleet, name: str) -> dict[str, Any]:
    return next(iter(status(fleet, name).get("canaries", [])), {})


def whole(line: Line, *, anew: bool = False) -> bool:
    """Asks for a stream; whether it came to its end. `anew`: over a connection of its own, to one gateway or the
    other."""
    with nullcontext(line.client) if not anew else line.tenants.client(TENANT) as client:
        try:
            stream = client.completions.create(model=line.name, prompt="Tell me.", max_tokens=6, stream=True)
            return any(choice.finish_reason for chunk in stream for choice in chunk.choices)
        except openai.APIError:
            return False


@contextmanager
def broken(fleet: Fleet, model: str) -> Generator[None]:
    """The Model's engine breaks off each answer after its first token."""
    faults(fleet, model, "POST", {"kind": "sse_error", "count": 10_000, "after_tokens": 1})
    try:
        yield
    finally:
        faults(fleet, model, "DELETE", {})


def faults(fleet: Fleet, model: str, method: str, fault: dict[str, Any]) -> None:
    """Arms the simulator's faults from within the pod: others reach serving paths only."""
    selector = f"{names.LABEL_MODEL}={model},{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    (pod,) = [p for p in fleet.get("pods", "-n", SPACE, "-l", selector) if serves(p)]
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "engine-key")
    secret = json.loads(fleet.kubectl("get", "secret", volume["secret"]["secretName"], "-n", SPACE, "-o", "json"))
    key = yaml.safe_load(base64.b64decode(secret["data"]["engine.yaml"]))["admin-api-key"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    code = (
        "import sys, json, urllib.request as r\n"
        "url, headers, method, body = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4].encode()\n"
        "r.urlopen(r.Request(url, body, headers, method=method), timeout=5).read()"
    )
    within = ("exec", pod["metadata"]["name"], "-n", SPACE, "-c", names.CONTAINER_ENGINE, "--", "python", "-c", code)
    url = f"http://127.0.0.1:{names.ENGINE_PORT}/sim/faults"
    fleet.kubectl(*within, url, json.dumps(headers), method, json.dumps(fault))


@pytest.mark.long
def test_the_fallback_answers_while_a_model_is_at_zero_and_a_target_may_disappear(fleet: Fleet, line: Line) -> None:
    slow = [{"name": "SHOAL_SIM_LOAD_SECONDS", "value": str(COLD_START_SECONDS)}]
    fleet.make_model(COLD, scaling={"minReplicas": 0, "maxReplicas": 1, "idleSeconds": 600}, pod={"env": slow})
    try:
        until(lambda: fleet.condition(COLD, "Accepted").get("status") == "True", 60, lambda: fleet.model(COLD))
        fallback = {"targets": [{"model": {"name": CHAT}}], "whenWaitSeconds": 1}
        put(fleet, line.name, {"targets": [target(COLD)], "fallback": fallback})
        known(line)
        # Nobody waits for the cold start, which the first of them causes.
        first = line.ask_all(["Tell me."] * 8)
        assert set(line.answered_by(first)) == {CHAT}
        rows = line.rows()
        assert all(rows[request]["route"] == f"{SPACE}/{line.name}" for request in first)
        until(lambda: line.answered_by([line.ask()]) == [COLD], 240, lambda: fleet.condition(COLD, "Ready"))

        # Now it goes, while it is asked.
        put(fleet, line.name, {"targets": [target(COLD), target(CHAT)]})
        until(lambda: condition(fleet, line.name).get("reason") == "TargetsReady", 60, lambda: status(fleet, line.name))
        with asking(line) as problems:
            fleet.delete_model(COLD)
            until(lambda: condition(fleet, line.name).get("reason") == "TargetNotFound", 60,
                  lambda: status(fleet, line.name))  # fmt: skip
            assert f"Model {SPACE}/{COLD}" in condition(fleet, line.name)["message"]
        assert problems == []
        last = line.ask_all(["Tell me."] * 16)
        assert set(line.answered_by(last)) == {CHAT}
    finally:
        fleet.delete_model(COLD)


def test_a_request_that_may_cost_too_much_goes_to_the_cheaper_model(fleet: Fleet, line: Line) -> None:
    """By examples/prices/demo.yaml, a token of the code model costs half as much again as one of the chat model."""
    limit = {"amount": "0.05", "currency": "USD"}
    fallback = {"targets": [{"model": {"name": CHAT}}], "whenCostAbove": limit}
    put(fleet, line.name, {"targets": [target(CODE)], "fallback": fallback})
    known(line)
    short, long = [line.ask() for _ in range(4)], [line.ask(tokens=80) for _ in range(4)]
    assert set(line.answered_by(short)) == {CODE}
    assert set(line.answered_by(long)) == {CHAT}

    (left,) = shown(fleet, "why", f"request/{long[0]}")["fallbacks"]
    assert (left["left"], left["target"]) == (f"{SPACE}/{CODE}", f"{SPACE}/{CHAT}")
    assert left["message"].endswith(f"USD at {SPACE}/{CODE}, more than the 0.05 USD of whenCostAbove")
    gateways = shown(fleet, "explain", "route", line.name, "-n", SPACE)["byCost"]["gateways"]
    assert gateways
    assert {(one["currency"], one["noEffect"]) for one in gateways} == {("USD", None)}

    # The price list is in another currency: nothing leaves, and it is said.
    fallback["whenCostAbove"] = limit | {"currency": "EUR"}
    put(fleet, line.name, {"targets": [target(CODE)], "fallback": fallback})

    def stays() -> bool:
        found = shown(fleet, "why", f"request/{line.ask(tokens=80)}")["stays"]
        return [one["message"].partition(": it is in EUR")[0] for one in found] == [
            "stayed: whenCostAbove has no effect"
        ]

    until(lambda: all(stays() for _ in range(4)), 60)
    assert line.answered_by([line.ask(tokens=80)]) == [CODE]


def shown(fleet: Fleet, *command: str) -> dict[str, Any]:
    """What a command prints for programs."""
    done = CliRunner().invoke(main, [*command, "-o", "json", "--kubeconfig", str(fleet.lab.kubeconfig)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@contextmanager
def asking(line: Line) -> Generator[list[str]]:
    """Asks all the while; what went wrong."""
    problems: list[str] = []
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(0.05):
            try:
                line.ask()
            except openai.APIError as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield problems
    finally:
        stopped.set()
        for thread in threads:
            thread.join(60)


def test_of_two_routes_with_one_name_the_older_one_has_it_until_it_goes(fleet: Fleet, line: Line) -> None:
    shared, other = "routes-e2e-shared", f"{line.name}-2"
    try:
        put(fleet, line.name, {"targets": [target(CHAT)]}, servedNames=[shared])
        put(fleet, other, {"targets": [target(CODE)]}, servedNames=[shared])
        # Those of one second are ordered by their uids.
        both = fleet.get("modelroutes.shoal.dev", line.name, other, "-n", SPACE)
        made = {one["metadata"]["name"]: one["metadata"] for one in both}
        first, second = sorted(made, key=lambda one: (made[one]["creationTimestamp"], made[one]["uid"]))
        models = {line.name: CHAT, other: CODE}
        until(lambda: condition(fleet, second, "Accepted").get("reason") == "NameClaimed", 60,
              lambda: status(fleet, second))  # fmt: skip
        assert f"ModelRoute {SPACE}/{first}" in condition(fleet, second, "Accepted")["message"]
        assert status(fleet, first)["servedNames"] == [shared]
        for name in (shared, f"{SPACE}/{first}", f"{SPACE}/{second}"):
            known(line, name)
        asked = [line.ask(model=shared) for _ in range(6)]
        assert set(line.answered_by(asked)) == {models[first]}
        assert line.answered_by([line.ask(model=f"{SPACE}/{second}")]) == [models[second]]

        fleet.kubectl("delete", "modelroutes.shoal.dev", first, "-n", SPACE)
        until(lambda: status(fleet, second).get("servedNames") == [shared], 60, lambda: status(fleet, second))
        until(lambda: line.answered_by([line.ask(model=shared)]) == [models[second]], 60)
        assert condition(fleet, second, "Accepted")["reason"] == "Valid"
    finally:
        fleet.kubectl("delete", "modelroutes.shoal.dev", other, "-n", SPACE, "--ignore-not-found")
