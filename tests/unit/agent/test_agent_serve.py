"""The agent as its callers see it: over HTTP, with an engine beside it that a test can break."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import BaseModel

from shoal.agent import serve
from shoal.api import names
from shoal.api.replica import CANARY_PROMPTS
from shoal.engine.sglang.client import SGLangClient
from shoal.gateway import ids
from tests.support.agentpod import KEYS, Pod, make_quick
from tests.support.fake_engine import load


@pytest.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_quick(monkeypatch)
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    async with pod.running():
        yield pod


async def test_the_stream_tells_a_replicas_life_from_fetching_to_ready(pod: Pod):
    pod.engine.ready = 503
    async with pod.stream() as stream:
        pod.stage('{"state": "fetching", "bytesDone": 5, "bytesTotal": 10}')
        await stream.until(phase="fetching", fetchedBytes=5, fetchTotalBytes=10)
        pod.stage('{"state": "done", "bytesDone": 10, "bytesTotal": 10}')
        await stream.until(phase="loading")
        pod.boot("boot-1")
        await stream.until(engineBoot="boot-1")
        pod.engine.ready = 200
        pod.engine.ranks = [load(running=2, waiting=1, waiting_tokens=9, used=100)]
        pod.engine.metrics = (
            "sglang:prompt_tokens_total 12\nsglang:generation_tokens_total 34\n"
            'sglang:startup_cuda_graph_time_seconds{phase="decode"} 7.5\n'
        )
        await stream.until(
            phase="ready",
            running=2,
            waiting=1,
            waitingTokens=9,
            kvTokensUsed=100,
            kvTokensTotal=1000,
            promptTokensTotal=12,
            generationTokensTotal=34,
            graphSeconds=7.5,
        )
        sequence = [message["seq"] for message in stream.messages]
        assert sequence == list(range(len(sequence)))


async def test_a_new_engine_boot_takes_the_counters_with_it(pod: Pod):
    pod.boot("boot-1")
    pod.engine.metrics = "sglang:prompt_tokens_total 12\n"
    async with pod.stream() as stream:
        await stream.until(phase="ready", promptTokensTotal=12)
        pod.engine.metrics = ""
        pod.engine.ready = 503
        pod.boot("boot-2")
        await stream.until(engineBoot="boot-2", promptTokensTotal=None, phase="loading")


async def test_a_stopping_engine_is_told_as_draining(pod: Pod):
    pod.boot("boot-1")
    async with pod.stream() as stream:
        await stream.until(phase="ready")
        pod.engine.ready = 503
        await stream.until(phase="draining")


async def test_load_that_cannot_be_read_becomes_unknown_not_zero(pod: Pod):
    pod.boot("boot-1")
    async with pod.stream() as stream:
        await stream.until(phase="ready", running=0)
        for garbage in ["", "nonsense", "[]", '{"loads": [7]}']:
            pod.engine.raw_loads = garbage
            await stream.until(running=None, kvTokensUsed=None)
            pod.engine.raw_loads = None
            await stream.until(running=0)
        assert stream.state["phase"] == "ready"
    _, metrics = await pod.get("/metrics")
    assert 'shoal_agent_engine_errors_total{kind="EngineGarbled"}' in metrics


async def test_an_engine_that_is_gone_is_loading_with_unknown_load(pod: Pod):
    pod.boot("boot-1")
    async with pod.stream() as stream:
        await stream.until(phase="ready", running=0)
        await pod.engine_server.close()
        await stream.until(phase="loading", running=None)


@pytest.mark.parametrize(
    "garbage", ["", "{", "null", '{"state": "flying"}', '{"state": 3, "bytesDone": -1}', "\0" * 99]
)
async def test_a_garbled_stage_file_is_unknown_and_harmless(pod: Pod, garbage: str):
    async with pod.stream() as stream:
        pod.stage('{"state": "fetching"}')
        await stream.until(phase="fetching")
        pod.stage(garbage)
        await stream.until(phase=None)
        pod.stage('{"state": "done"}')
        await stream.until(phase="loading")


@pytest.mark.parametrize("key", [None, "wrong", "engine-key", "admin-key", "gateway-ke", "gateway-keyy"])
async def test_who_has_no_key_hears_nothing(pod: Pod, key: str | None):
    async with pod.stream():  # the keys are loaded
        pass
    status, text = await pod.get("/v1/replica", key)
    assert status == 401
    assert json.loads(text) == {"error": {"message": "a key of this replica is needed, as a bearer token"}}


async def test_every_role_may_listen(pod: Pod):
    async with pod.stream("operator-key") as stream:
        message = await stream.message()
        assert message is not None
        assert message["full"] is True


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"callers": {}}'])
async def test_without_keys_the_agent_is_up_and_says_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
):
    make_quick(monkeypatch)
    pod = Pod(tmp_path)
    if content is not None:
        pod.keys.write_text(content)
    async with pod.running():
        assert await pod.get("/healthz") == (200, "ok\n")
        status, text = await pod.get("/v1/replica", "gateway-key")
        assert (status, json.loads(text)["error"]["message"]) == (503, "the agent has no keys yet")
        pod.keys.write_text(json.dumps(KEYS))
        async with asyncio.timeout(20):
            while (await pod.get("/v1/replica", "wrong"))[0] == 503:
                await asyncio.sleep(0.01)
        async with pod.stream() as stream:
            assert await stream.message() is not None


def test_a_wrong_key_file_is_explained_without_its_content(tmp_path: Path):
    file = tmp_path / "agent.json"
    with pytest.raises(ValueError, match="No such file"):
        serve.read_keys(file)
    file.write_text('{"callers": {"gateway": "secret-value"}, "engine": 3}')
    with pytest.raises(ValueError, match="is not the agent's key file: engine, admin") as caught:
        serve.read_keys(file)
    assert "secret-value" not in str(caught.value)


async def test_a_silent_stream_still_beats(pod: Pod, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "HEARTBEAT_SECONDS", 0.1)
    async with pod.stream() as stream:
        first, beat = await stream.message(), await stream.message()
    assert first is not None
    assert beat == {"boot": first["boot"], "seq": first["seq"]}


async def test_stopping_ends_open_streams(pod: Pod):
    async with pod.stream() as stream:
        await stream.message()
        pod.stop.set()
        while await stream.message() is not None:
            pass


# --- aborts -----------------------------------------------------------------------------------------------------------

RID = "01935b0a-7c1e-7f00-8a1b-0123456789ab"


async def test_a_gateway_has_the_engine_end_a_request(pod: Pod):
    assert await pod.abort(rid=RID) == (204, "")
    assert await pod.abort(rid=f"{RID}.2", prompts=2) == (204, "")
    assert pod.engine.aborted == [RID, f"{RID}.2", f"{RID}.2_0", f"{RID}.2_1"]


async def test_ids_that_gateways_make_are_let_through(pod: Pod):
    made = ids.uuid7()
    assert (await pod.abort(rid=made))[0] == 204
    assert pod.engine.aborted == [made]


@pytest.mark.parametrize(
    "rid",
    [
        "",
        "0",
        RID[:-1],
        RID[:8],
        RID + "0",
        RID.upper(),
        RID + "\n",
        RID + ".",
        RID + ".0",
        RID + ".99999",
        RID + "_0",
        RID.replace("7f00", "4f00"),
        "x" * 100_000,
        None,
        [RID],
        7,
    ],
)
async def test_what_may_begin_the_ids_of_others_never_reaches_the_engine(pod: Pod, rid: object):
    """SGLang ends every request whose id begins so: with an empty one all of them."""
    status, text = await pod.abort(rid=rid)
    assert (status, pod.engine.aborted) == (400, [])
    assert json.loads(text) == {"error": {"message": "not an abort: rid"}}


async def test_where_the_form_is_not_checked_a_few_letters_end_the_requests_of_all(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
):
    class AnyAbort(BaseModel):
        rid: str
        prompts: int = 0

    monkeypatch.setattr(serve, "Abort", AnyAbort)
    assert ((await pod.abort(rid=RID[:2]))[0], pod.engine.aborted) == (204, [RID[:2]])


@pytest.mark.parametrize("body", [{}, {"abort_all": True}, {"rid": RID, "prompts": 65}, {"rid": RID, "prompts": -1}])
async def test_neither_all_requests_nor_an_endless_list_can_be_ended(pod: Pod, body: dict[str, Any]):
    assert ((await pod.abort(**body))[0], pod.engine.aborted) == (400, [])


@pytest.mark.parametrize("key", [None, "wrong", "operator-key", "engine-key", "admin-key"])
async def test_only_gateways_end_requests(pod: Pod, key: str | None):
    assert ((await pod.abort(key, rid=RID))[0], pod.engine.aborted) == (401, [])


async def test_an_engine_that_is_not_there_or_hangs_is_said(pod: Pod, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "ABORT_SECONDS", 0.1)
    pod.engine.hang = True
    status, text = await pod.abort(rid=RID)
    assert (status, json.loads(text)["error"]["message"]) == (503, "the engine could not be asked within 0.1 s")
    monkeypatch.setattr(serve, "ABORT_SECONDS", 5.0)
    await pod.engine_server.close()
    status, text = await pod.abort(rid=RID)
    assert status == 503
    assert "/abort_request" in text
    assert "admin-key" not in text


async def test_the_engines_client_never_aborts_all(pod: Pod):
    async with aiohttp.ClientSession() as session:
        client = SGLangClient(session, str(pod.engine_server.make_url("")), api_key=None, admin_key="admin-key")
        with pytest.raises(ValueError, match="empty"):
            await client.abort("")
    assert pod.engine.aborted == []


async def canary(pod: Pod, key: str = "operator-key", query: str = "") -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {key}"}
        async with session.post(f"{pod.url}{names.CANARY_PATH}{query}", headers=headers) as answer:
            return answer.status, await answer.json()


async def test_a_canary_is_a_fixed_greedy_request_for_operators_alone(pod: Pod):
    pod.boot("boot-1")
    async with pod.stream() as stream:
        await stream.until(phase="ready")
        assert await canary(pod) == (200, {"prompt": CANARY_PROMPTS[0], "text": " Paris."})
        [asked] = pod.engine.completed
        assert (asked["model"], asked["temperature"], asked["prompt"]) == ("base", 0, CANARY_PROMPTS[0])
        assert str(asked["rid"]).startswith("shoal-canary-"), "the engine's log says who asked"
        assert (await canary(pod, "gateway-key"))[0] in (401, 403)
        assert len(pod.engine.completed) == 1
        for number, prompt in enumerate(CANARY_PROMPTS):
            assert (await canary(pod, query=f"?prompt={number}"))[1]["prompt"] == prompt
        for wrong in ("3", "-1", "write%20a%20poem", "1&prompt=2"):
            assert (await canary(pod, query=f"?prompt={wrong}"))[0] == 400, "none of the caller's"
        assert len(pod.engine.completed) == 4
        pod.engine.says = None
        assert (await canary(pod))[0] == 503, "a model that generates nothing has no canary"
        pod.engine.says = "x" * 100_000
        status, answer = await canary(pod)
        assert status == 200
        assert len(answer["text"]) == 512, "what an engine says is bounded"
