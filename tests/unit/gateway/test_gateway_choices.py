"""Why a request went to its replica: what gateways remember, who may read it, and what the command says."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from shoal.api import keys, names, rights
from shoal.api.choices import RequestChoices
from shoal.cli.main import main
from shoal.core import facts
from shoal.core.routing.basis import Basis, describe_basis
from shoal.core.routing.resolve import DeadEnd
from shoal.core.routing.reuse import NOTHING, Prompt
from shoal.core.routing.score import Costs, Pick
from shoal.gateway.choices import MOST_ATTEMPTS, ChoiceMemory, ChoicesApi
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.ops import gateway_ops
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.net import errors
from shoal.net.errors import ApiError
from shoal.net.server import make_server
from tests.support.adapter_agents import AdapterAgent, tuned
from tests.support.cannedapi import CannedApi
from tests.support.gateway import API_KEY, INSTALL_KEY, MODEL, GatewayUnderTest, gateway, replica
from tests.support.rolereviews import RoleReviews
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.waiting import until_async

ADMIN = {"x-shoal-key": keys.derive(INSTALL_KEY, "logs", keys.DEMAND)}
PEER = {"authorization": f"Bearer {keys.derive(INSTALL_KEY, 'gateway', keys.DEMAND)}"}
IDLE = {"running": 0, "waiting": 0, "waiting_tokens": 0, "kv_tokens_used": 0, "kv_tokens_total": 100_000}
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "Please tell me of foxes. " * 40}]}


def picked() -> Pick:
    costs, others = Costs(1.0, 0.04, 0, 0.15, 0, 0.036, 0, 0.005, 0, 0), Costs(1.0, 0.395, 0, 0, 0, 0.017, 0, 0, 0, 0)
    return Pick(replica(2), Prompt(4300), NOTHING._replace(tokens=3700.0), 0.15, 0.0, 0.231, costs, "llama-1", others)


def test_the_last_requests_are_remembered_and_no_more() -> None:
    memory = ChoiceMemory(100)
    for number in range(250):
        memory.add(f"id-{number}", replica(1), None)
    assert len(memory) == 100
    assert not memory.records("id-149", "gateway-1")
    assert memory.records("id-150", "gateway-1")[0].replica == "chat/llama-1"
    for _ in range(50):
        memory.add("id-249", replica(1), picked())
    assert len(memory.records("id-249", "gateway-1")) == MOST_ATTEMPTS


def test_a_choice_has_the_terms_of_the_replica_and_of_the_runner_up() -> None:
    memory = ChoiceMemory()
    memory.add("id", replica(2), picked())
    (found,) = memory.records("id", "gateway-1")
    assert found.message == (
        "llama-2: 0.231 s (prefill 0.040, queue 0.150, batch 0.036, kv 0.005), 3700 of 4300 prompt tokens probably "
        "cached; next llama-1: 0.412 s (prefill 0.395, batch 0.017)"
    )
    assert found.chosen is not None
    assert (found.chosen.replica, found.chosen.terms["queue"]) == ("chat/llama-2", 0.15)
    assert found.runner_up is not None
    assert found.runner_up.replica == "chat/llama-1"


# --- over HTTP


class Served:
    """The operations ports of gateways. The first knows the others as its peers."""

    def __init__(self, it: GatewayUnderTest, memories: Sequence[ChoiceMemory], callers: Callers | None = None) -> None:
        self._it, self._memories, self._callers = it, memories, callers
        self._tasks: list[tuple[Any, asyncio.Task[None], ChoicesApi]] = []
        self.pods: list[facts.Pod] = []
        self.url = ""

    async def __aenter__(self) -> "Served":
        port = 0
        for number in reversed(range(len(self._memories))):
            peers = (lambda: self.pods) if not number else (lambda: ())
            name = f"gateway-{number + 1}"
            api = ChoicesApi(self._memories[number], name, self._it.ring, peers, port, callers=self._callers)
            app = gateway_ops(
                CollectorRegistry(),
                dict[str, str],
                lambda: None,
                DemandPublisher(DemandState()).hub,
                self._it.ring,
                choices=api,
            )
            server = make_server(app, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            self._tasks.append((server, task, api))
            port, self.url = server.port, f"http://127.0.0.1:{server.port}"
        self.pods = [
            facts.Pod("shoal-system", "gateway-2", "uid-2", None, False, False, True, {}, None, ip="127.0.0.1")
        ][: len(self._memories) - 1]
        return self

    async def __aexit__(self, *_: object) -> None:
        for server, task, api in self._tasks:
            await api.page.close()
            server.should_exit = True
            await task

    async def ask(self, headers: dict[str, str], status: int = 200, **query: str) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}{names.CHOICES_PATH}", params=query, headers=headers) as response,
        ):
            assert response.status == status, await response.text()
            return await response.json()


async def test_a_request_is_explained_by_the_id_of_its_answer(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(), ScriptedEngine(), routing="Seconds") as it:
        it.hear(1, **{**IDLE, "waiting": 9, "waiting_tokens": 50_000})
        it.hear(2, **IDLE)
        response = await it.post(CHAT)
        assert response.status == 200
        async with Served(it, [it.app.choices]) as served:
            found = RequestChoices.model_validate(
                await served.ask(ADMIN, request=response.headers["x-shoal-request-id"])
            )
        (choice,) = found.choices
        assert (choice.replica, choice.model, choice.attempt) == ("chat/llama-2", "chat/llama", 1)
        assert choice.runner_up is not None
        assert choice.runner_up.terms["queue"] > 1.0
        assert "next llama-1" in choice.message


async def test_any_gateway_collects_from_the_others_and_names_who_is_away(tmp_path: Path) -> None:
    near, far = ChoiceMemory(), ChoiceMemory()
    far.add("id-1", replica(2), picked())
    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [near, far]) as served:
        found = await served.ask(ADMIN, request="id-1")
        assert [choice["gateway"] for choice in found["choices"]] == ["gateway-2"]
        # A gateway gets only what is here.
        assert (await served.ask(PEER, request="id-1"))["choices"] == []
        served.pods = [facts.Pod("shoal-system", "gateway-2", "u", None, False, False, True, {}, None, ip="127.0.0.99")]
        found = await served.ask(ADMIN, request="id-1")
        assert (found["choices"], found["missing"]) == ([], ["gateway-2: it cannot be reached"])


async def test_no_tenant_and_no_stranger_reads_choices(tmp_path: Path) -> None:
    reviews, memory = RoleReviews(), ChoiceMemory()
    memory.add("id-1", replica(2), picked())
    callers = Callers(cast(KubeClient, reviews), rights.GATEWAY_AUDIENCE)

    def shown(account: str, namespace: str = "shoal-system") -> dict[str, str]:
        return {"x-shoal-key": reviews.issue(account, namespace, audience=rights.GATEWAY_AUDIENCE)}

    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [memory], callers) as served:
        for key in ("", API_KEY, "wrong", keys.derive(INSTALL_KEY, "operator", keys.DEMAND)):
            await served.ask({"x-shoal-key": key}, 401, request="id-1")
        assert (await served.ask(shown(rights.LOGS), request="id-1"))["choices"]
        for role in (rights.BILLING, rights.VIEWER, rights.TENANT_ADMIN):
            await served.ask(shown(role), 403, request="id-1")
        reviews.bind("auditor", "acme-team", rights.LOGS, tenant="acme")
        await served.ask(shown("auditor", "acme-team"), 403, request="id-1")
        for request in ("", "no/id", "x" * 200):
            await served.ask(ADMIN, 400, request=request)
        # It is no path of the port that clients reach.
        async with it.session.get(f"{it.url}{names.CHOICES_PATH}?request=id-1", headers=ADMIN) as response:
            assert response.status == 404


async def test_a_refused_request_is_explained_by_the_id_of_its_answer_without_what_it_said(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [it.app.choices]) as served:
        for body, code, param in (({**CHAT, "model": "my-secret"}, "model_not_found", "model"),
                                  ({**CHAT, "n": "my-secret"}, "invalid_type", "n")):  # fmt: skip
            response = await it.post(body)
            found = await served.ask(ADMIN, request=response.headers["x-shoal-request-id"])
            (refused,) = found["refusals"]
            assert (refused["status"], refused["code"], refused["param"]) == (response.status, code, param)
            assert "my-secret" not in str(found)
        response = await it.post(CHAT)
        found = await served.ask(ADMIN, request=response.headers["x-shoal-request-id"])
        assert (len(found["choices"]), found["refusals"]) == (1, [])


async def test_a_replica_that_failed_is_told_with_why_and_the_one_that_answered_without(tmp_path: Path) -> None:
    async def busy(request: EngineRequest) -> None:
        await request.answer(503, b"{}")

    async with gateway(tmp_path, ScriptedEngine(busy), ScriptedEngine(), routing="Seconds") as it:
        it.hear(1, **IDLE)
        it.hear(2, **{**IDLE, "waiting": 9, "waiting_tokens": 50_000})
        response = await it.post(CHAT)
        assert response.status == 200
        async with Served(it, [it.app.choices]) as served:
            found = await served.ask(ADMIN, request=response.headers["x-shoal-request-id"])
        assert [(each["replica"], each.get("failure")) for each in found["choices"]] == [
            ("chat/llama-1", "unavailable"),
            ("chat/llama-2", None),
        ]


def sentences(it: GatewayUnderTest, response: Any) -> list[str]:
    """Why each attempt went to its replica, without the replica's name."""
    found = it.app.choices.records(response.headers["x-shoal-request-id"], "gateway-1")
    return [each.message.partition(": ")[2] for each in found]


@pytest.mark.parametrize(
    ("engines", "routing", "path", "live", "basis"),
    [
        (1, "Seconds", "/v1/chat/completions", True, "only-one"),
        (2, "PrefixHeads", "/v1/chat/completions", True, "prefix-heads"),
        (2, "Seconds", "/v1/chat/completions", False, "no-reports"),
        (2, "Seconds", "/v1/tokenize", True, "computes-nothing"),
    ],
)
async def test_a_choice_without_seconds_has_its_own_reason(
    tmp_path: Path, engines: int, routing: str, path: str, live: bool, basis: Basis
) -> None:
    async def counts(request: EngineRequest) -> None:
        await request.answer(200, b'{"tokens": [5], "count": 1, "max_model_len": 4096}')

    behave = counts if path == "/v1/tokenize" else serve_normally
    some = [ScriptedEngine(behave) for _ in range(engines)]
    async with gateway(tmp_path, *some, routing=routing, live=live) as it:
        if routing == "PrefixHeads":
            it.hear(1, **IDLE)
            it.hear(2, **IDLE)
        body = {"model": "llama", "prompt": "hi"} if path == "/v1/tokenize" else CHAT
        response = await it.post(body, path)
        assert response.status == 200
        assert sentences(it, response) == [describe_basis(basis)]


async def test_the_retry_after_a_lost_replica_says_so(tmp_path: Path) -> None:
    async def dies(request: EngineRequest) -> None:
        dying.die()

    dying = ScriptedEngine(dies)
    async with gateway(tmp_path, dying, ScriptedEngine(), ScriptedEngine(), routing="Seconds") as it:
        it.hear(1, **IDLE)
        for number in (2, 3):
            it.hear(number, **{**IDLE, "waiting": 9, "waiting_tokens": 50_000})
        response = await it.post(CHAT)
        assert response.status == 200
        first, second = sentences(it, response)
        assert "next llama-" in first
        assert second == describe_basis("sent-again")


async def test_a_request_whose_prompt_was_not_looked_at_says_so(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(), ScriptedEngine(), routing="Seconds") as it:
        second = it.pods.pop("chat/llama-2")
        it.pods["chat/llama-1"] = replica(1, ready=False)
        it.changed()
        asking = asyncio.create_task(it.post(CHAT))
        await until_async(lambda: it.app.holds.waiting == 1)
        it.pods["chat/llama-1"], it.pods["chat/llama-2"] = replica(1), second
        it.changed()
        it.hear(1, **IDLE)
        it.hear(2, **IDLE)
        assert sentences(it, await asking) == [describe_basis("no-prompt")]


async def test_the_first_request_of_an_adapter_says_that_it_was_loaded_for_it(tmp_path: Path) -> None:
    async with tuned(tmp_path, *(AdapterAgent(number) for number in (1, 2, 3)), routing="Seconds") as it:
        response = await it.ask()
        assert response.status == 200
        assert sentences(it.it, response) == [describe_basis("adapter-load")]


async def test_a_request_that_its_model_refuses_is_told_with_the_model(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [it.app.choices]) as served:
        it.pods.clear()
        it.model(dead_end=DeadEnd("EngineFailed", unless_pods=False))
        it.changed()
        response = await it.post(CHAT)
        found = await served.ask(ADMIN, request=response.headers["x-shoal-request-id"])
        (refused,) = found["refusals"]
        assert (refused["code"], refused["model"], found["choices"]) == ("model_unavailable", "chat/llama", [])


def test_a_failure_is_noted_at_its_own_attempt_only() -> None:
    memory, first, second = ChoiceMemory(), replica(1), replica(2)
    memory.fail("id", first, "lost")  # of a request that is not remembered
    for number in range(MOST_ATTEMPTS):
        memory.add("id", (first, second)[number % 2], None)
    memory.fail("id", first, "lost")  # the attempt after the last that is remembered
    assert {each.failure for each in memory.records("id", "gateway-1")} == {None}
    memory.fail("id", second, "connect")
    memory.fail("id", second, "lost")
    assert [each.failure for each in memory.records("id", "gateway-1")[-2:]] == [None, "connect"]


async def test_another_gateways_reason_to_stay_is_found(tmp_path: Path) -> None:
    near, far = ChoiceMemory(), ChoiceMemory()
    far.stay("id-1", "chat/llama", "chat/llama has no price")
    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [near, far]) as served:
        (stays,) = (await served.ask(ADMIN, request="id-1"))["stays"]
        assert (stays["gateway"], stays["target"]) == ("gateway-2", "chat/llama")
        assert stays["message"] == "stayed: chat/llama has no price"


@pytest.mark.parametrize("code", ["client_left_waiting", "client_left_working", "client_left_answering"])
async def test_a_client_that_left_is_told_with_what_its_request_was_at(tmp_path: Path, code: str) -> None:
    async def hangs(request: EngineRequest) -> None:
        if request.body.get("stream"):
            await request.begin_stream()
            await request.chunk(request.delta("a", 1))
        await asyncio.Event().wait()

    engine = ScriptedEngine(hangs)
    async with gateway(tmp_path, engine) as it, Served(it, [it.app.choices]) as served:
        if code == "client_left_waiting":
            it.pods.clear()
            it.fleet.update("pod-1", None)
            it.changed()
        post = asyncio.create_task(it.post({**CHAT, "stream": code == "client_left_answering"}))
        if code == "client_left_waiting":
            await until_async(lambda: it.app.demand.demand(MODEL.uid).held == 1)
        elif code == "client_left_working":
            await until_async(lambda: len(engine.requests) == 1)
        else:
            response = await post
            await response.content.readany()
            response.close()
        post.cancel()
        (record,) = await it.records()
        found = await served.ask(ADMIN, request=record.id.partition(":")[0])
        (refused,) = found["refusals"]
        assert (refused["status"], refused["code"], record.data.outcome) == (499, code, "cancelled")
        assert refused["seconds"] > 0
        assert refused["model"] == "chat/llama"


async def test_another_gateways_refusal_is_found(tmp_path: Path) -> None:
    near, far = ChoiceMemory(), ChoiceMemory()
    far.refuse("id-1", ApiError(429, "used", "rate_limit_exceeded"))
    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [near, far]) as served:
        found = await served.ask(ADMIN, request="id-1")
        assert [each["gateway"] for each in found["refusals"]] == ["gateway-2"]


def test_errors_are_bounded_and_do_not_drive_choices_out() -> None:
    memory = ChoiceMemory(100)
    memory.add("chosen", replica(1), None)
    for number in range(250):
        memory.refuse(f"id-{number}", ApiError(401, "no", "invalid_api_key"))
    assert len(memory) == 101
    assert memory.records("chosen", "gateway-1")
    assert not memory.refusals("id-149", "gateway-1")


# --- the command

SYSTEM = "/api/v1/namespaces/shoal-system"
PROXY = f"{SYSTEM}/pods/shoal-gateway-0:9090/proxy{names.CHOICES_PATH}"


@pytest.fixture
def api() -> CannedApi:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}
    pod = {
        "metadata": {"namespace": "shoal-system", "name": "shoal-gateway-0", "uid": "u", "labels": labels},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    key = base64.b64encode(ADMIN["x-shoal-key"].encode()).decode()
    memory = ChoiceMemory()
    memory.add("id-1", replica(2), picked())
    found = RequestChoices(request="id-1", choices=memory.records("id-1", "shoal-gateway-0"), remembered=1)
    return CannedApi(
        {
            f"{SYSTEM}/secrets/shoal-key-logs": {"metadata": {"name": "shoal-key-logs"}, "data": {"key": key}},
            f"{SYSTEM}/pods": {"metadata": {"resourceVersion": "1"}, "items": [pod]},
            PROXY: found.model_dump(mode="json", by_alias=True),
        }
    )


def why(api: CannedApi, tmp_path: Path, *arguments: str) -> Any:
    with api.kubeconfig(tmp_path) as kubeconfig:
        return CliRunner().invoke(main, ["why", *arguments, "--kubeconfig", str(kubeconfig)])


def test_the_command_says_when_a_client_left_and_what_to_do(api: CannedApi, tmp_path: Path) -> None:
    memory = ChoiceMemory()
    memory.client_left("id-1", "client_left_waiting", 12.34)
    found = RequestChoices(request="id-1", refusals=memory.refusals("id-1", "shoal-gateway-0"), remembered=1)
    api.answers[PROXY] = found.model_dump(mode="json", by_alias=True)
    shown = why(api, tmp_path, "request/id-1").output
    assert "layer  L6 client  client_left_waiting" in shown
    assert "its client left after 12.3 s, while it waited for a replica" in shown
    assert "Raise the client's timeout" in shown


def test_the_command_says_what_an_external_target_did(api: CannedApi, tmp_path: Path) -> None:
    memory = ChoiceMemory()
    memory.refuse("id-1", errors.unavailable("x", "external_unavailable", 2, outcome="certificate"))
    found = RequestChoices(request="id-1", refusals=memory.refusals("id-1", "shoal-gateway-0"), remembered=1)
    api.answers[PROXY] = found.model_dump(mode="json", by_alias=True)
    shown = why(api, tmp_path, "request/id-1").output
    assert "layer  L5 gateway  ExternalCertificateRefused" in shown
    assert "its certificate is not trusted, or has expired" in " ".join(shown.split())


def test_the_command_shows_the_sentence(api: CannedApi, tmp_path: Path) -> None:
    result = why(api, tmp_path, "request/id-1")
    assert result.exit_code == 0, result.output
    assert "chat/llama by shoal-gateway-0" in result.output
    assert "llama-2: 0.231 s (prefill 0.040, queue 0.150" in result.output
    assert "next llama-1: 0.412 s" in result.output
    method, path, headers = [call for call in api.calls if "/proxy/" in call[1]][-1]
    assert (method, path) == ("GET", f"{PROXY}?request=id-1")
    assert headers["x-shoal-key"] == ADMIN["x-shoal-key"]


def test_the_command_shows_which_target_a_request_left_and_why(api: CannedApi, tmp_path: Path) -> None:
    memory = ChoiceMemory()
    memory.leave("id-1", "chat/other", "chat/llama", "the request waited 20 s")
    memory.add("id-1", replica(2), picked())
    left, chosen = memory.fallbacks("id-1", "shoal-gateway-0"), memory.records("id-1", "shoal-gateway-0")
    found = RequestChoices(request="id-1", choices=chosen, fallbacks=left, remembered=1)
    api.answers[PROXY] = found.model_dump(mode="json", by_alias=True)
    lines = why(api, tmp_path, "request/id-1").output.splitlines()
    assert lines[0].endswith("chat/other by shoal-gateway-0")
    assert lines[1] == "  went on to chat/llama: the request waited 20 s"
    assert lines[2].endswith("chat/llama by shoal-gateway-0")
    # To an external target no replica is chosen.
    api.answers[PROXY] = {**api.answers[PROXY], "choices": []}
    assert why(api, tmp_path, "request/id-1").exit_code == 0


async def test_fallbacks_of_another_gateway_are_found(tmp_path: Path) -> None:
    near, far = ChoiceMemory(), ChoiceMemory(2)
    for number in range(4):
        far.leave(f"id-{number}", "chat/llama", "chat/front/outside", "the request waited 20 s")
    assert not far.fallbacks("id-1", "gateway-2")
    async with gateway(tmp_path, ScriptedEngine()) as it, Served(it, [near, far]) as served:
        (left,) = (await served.ask(ADMIN, request="id-3"))["fallbacks"]
        assert (left["gateway"], left["left"], left["target"]) == ("gateway-2", "chat/llama", "chat/front/outside")


def test_a_request_that_is_not_remembered_gets_a_clear_answer(api: CannedApi, tmp_path: Path) -> None:
    api.answers[PROXY] = {"request": "old", "choices": [], "remembered": 4096, "missing": ["gateway-2: it is away"]}
    result = why(api, tmp_path, "request/old")
    assert result.exit_code == 1
    assert "missing: gateway gateway-2: it is away" in result.output
    assert "no gateway remembers request old: each remembers its last requests, 4,096 at the moment" in result.output


@pytest.mark.parametrize(
    ("code", "layer", "do"),
    [
        ("context_length_exceeded", "L6 client", "Send fewer tokens"),
        ("cannot_record_usage", "L5 gateway", "spool"),
        ("no_such_thing", "L4 engine", "what the engine supports"),
    ],
)
def test_the_command_says_which_layer_refused_a_request_and_what_to_do(
    api: CannedApi, tmp_path: Path, code: str, layer: str, do: str
) -> None:
    memory = ChoiceMemory()
    memory.refuse("id-2", ApiError(400, "Secret text", code, param="messages"))
    found = RequestChoices(request="id-2", refusals=memory.refusals("id-2", "shoal-gateway-0"), remembered=1)
    api.answers[PROXY] = found.model_dump(mode="json", by_alias=True)
    shown = why(api, tmp_path, "request/id-2").output
    assert f"layer  {layer}  {code}" in shown
    assert do in shown
    assert f"400 {code} (field messages) (gateway shoal-gateway-0," in shown
    (cause,) = json.loads(why(api, tmp_path, "request/id-2", "-o", "json").output)["causes"]
    assert (cause["layer"], cause["reason"], cause["state"]) == (layer.partition(" ")[0], code, "fault")
    assert do in cause["do"]


def test_the_command_says_whose_limit_ended_a_request(api: CannedApi, tmp_path: Path) -> None:
    memory = ChoiceMemory()
    memory.refuse("id-3", errors.timeout("It took too long.", "requestSeconds of ModelRoute chat/front, 60 s"))
    found = RequestChoices(request="id-3", refusals=memory.refusals("id-3", "shoal-gateway-0"), remembered=1)
    api.answers[PROXY] = found.model_dump(mode="json", by_alias=True)
    shown = " ".join(why(api, tmp_path, "request/id-3").output.split())
    assert "504 timeout: the limit is requestSeconds of ModelRoute chat/front, 60 s" in shown
    assert "raise requestSeconds: of the ModelRoute, the Model, or the gateways" in shown


def test_the_command_shows_why_a_request_stayed_with_a_target_that_it_might_have_left(
    api: CannedApi, tmp_path: Path
) -> None:
    memory = ChoiceMemory(2)
    for number in range(3):
        memory.stay(f"id-{number}", "chat/llama", "whenCostAbove has no effect: chat/llama has no price")
    assert not memory.stays("id-0", "shoal-gateway-0"), "it is bounded"
    found = RequestChoices(request="id-1", stays=memory.stays("id-1", "shoal-gateway-0"), remembered=2)
    api.answers[PROXY] = found.model_dump(mode="json", by_alias=True)
    lines = why(api, tmp_path, "request/id-1").output.splitlines()
    assert lines[0].endswith("chat/llama by shoal-gateway-0")
    assert lines[1] == "  stayed: whenCostAbove has no effect: chat/llama has no price"
