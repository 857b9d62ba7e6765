"""The agent as its callers see it: over HTTP, with an engine beside it that a test can break."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer, unused_port

from shoal.agent import observe, serve
from shoal.agent.observe import Observer
from shoal.agent.serve import Agent
from shoal.agent.stream import Hub
from tests.support.fake_engine import FakeEngine, load

KEYS = {"callers": {"gateway": "gateway-key", "operator": "operator-key"}, "engine": "engine-key", "admin": "admin-key"}


class Pod:
    """A run folder, a key file, a fake engine and a real agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "agent.json"
        self.engine = FakeEngine()
        self.url = ""
        self.stop = asyncio.Event()
        self.engine_server: TestServer | None = None

    def stage(self, text: str) -> None:
        (self.folder / "stage.json").write_text(text)

    def boot(self, name: str) -> None:
        (self.folder / "boot").write_text(name + "\n")

    @asynccontextmanager
    async def stream(self, key: str = "gateway-key") -> AsyncGenerator["Stream"]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/v1/replica", headers={"Authorization": f"Bearer {key}"}) as response,
        ):
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            yield Stream(response)

    async def get(self, path: str, key: str | None = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()


class Stream:
    """Reads messages and keeps the state as a gateway would."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.state: dict[str, object] = {}
        self.messages: list[dict[str, object]] = []

    async def message(self) -> dict[str, object] | None:
        async with asyncio.timeout(10):
            line = await self._response.content.readline()
            await self._response.content.readline()
        if not line:
            return None
        message = json.loads(line.removeprefix(b"data: "))
        if message.get("full"):
            self.state = {}
        self.state |= message.get("keys", {})
        self.messages.append(message)
        return message

    async def until(self, **wanted: object) -> None:
        async with asyncio.timeout(15):
            while any(self.state.get(key) != value for key, value in wanted.items()):
                assert await self.message() is not None


PodMaker = Callable[[], Awaitable[Pod]]


@pytest.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observe, "BUSY_SECONDS", 0.02)
    monkeypatch.setattr(observe, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(observe, "COUNTERS_SECONDS", 0.0)
    monkeypatch.setattr(serve, "KEYS_SECONDS", 0.02)
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    pod.engine_server = TestServer(pod.engine.app())
    await pod.engine_server.start_server()
    hub = Hub()
    observer = Observer(hub, tmp_path / "stage.json", tmp_path / "boot")
    agent = Agent(str(pod.engine_server.make_url("")), pod.keys, hub, observer)
    port = unused_port()
    pod.url = f"http://127.0.0.1:{port}"
    task = asyncio.create_task(serve.serve(agent, hub, host="127.0.0.1", port=port, stop=pod.stop))
    while True:
        try:
            await pod.get("/healthz")
            break
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.01)
    yield pod
    pod.stop.set()
    await task
    await pod.engine_server.close()


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
        pod.engine.metrics = "sglang:prompt_tokens_total 12\nsglang:generation_tokens_total 34\n"
        await stream.until(
            phase="ready",
            running=2,
            waiting=1,
            waitingTokens=9,
            kvTokensUsed=100,
            kvTokensTotal=1000,
            promptTokensTotal=12,
            generationTokensTotal=34,
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
        assert pod.engine_server is not None
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
async def test_without_keys_the_agent_is_up_and_says_503(pod: Pod, tmp_path: Path, content: str | None):
    keys = tmp_path / "late.json"
    if content is not None:
        keys.write_text(content)
    hub = Hub()
    agent = Agent("http://127.0.0.1:1", keys, hub, Observer(hub, tmp_path / "stage.json", tmp_path / "boot"))
    port, stop = unused_port(), asyncio.Event()
    task = asyncio.create_task(serve.serve(agent, hub, host="127.0.0.1", port=port, stop=stop))
    pod.url = f"http://127.0.0.1:{port}"
    await asyncio.sleep(0.1)
    assert await pod.get("/healthz") == (200, "ok\n")
    status, text = await pod.get("/v1/replica", "gateway-key")
    assert (status, json.loads(text)["error"]["message"]) == (503, "the agent has no keys yet")
    keys.write_text(json.dumps(KEYS))
    async with asyncio.timeout(5):
        while (await pod.get("/v1/replica", "wrong"))[0] == 503:
            await asyncio.sleep(0.01)
    async with pod.stream() as stream:
        assert await stream.message() is not None
    stop.set()
    await task


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
