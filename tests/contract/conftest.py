"""One suite, four engines: the simulator as SGLang and as vLLM in every test run, the real ones in `make test-engine`.

Where the simulator differs from the engine that it imitates, the simulator is wrong. What the two engines do
differently stands in tests/support/behaviour.py; a test with the fixtures `any_…` runs on all four and asks there.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.behaviour import WORDS, EngineWords, words_of
from tests.support.engines import ADMIN_KEY, API_KEY, LORA, EngineProcess, Kind, running_engine

# Three starts of a real engine take longer than a usual test may.
REAL = (pytest.mark.engine, pytest.mark.timeout(600))
KINDS = [pytest.param("sim", id="sim"), pytest.param("sglang", id="sglang", marks=[*REAL, pytest.mark.sglang])]
"""SGLang and the simulator as SGLang."""
VLLM_KINDS = [pytest.param("sim-vllm", id="sim-vllm"), pytest.param("vllm", id="vllm", marks=[*REAL, pytest.mark.vllm])]
"""vLLM and the simulator as vLLM."""
ALL_KINDS = [*KINDS, *VLLM_KINDS]
REAL_KINDS = [KINDS[-1], VLLM_KINDS[-1]]
"""For what the simulator does not do."""


@dataclass(slots=True)
class Answer:
    """One whole answer."""

    status: int
    content_type: str | None
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream: each event parsed; `[DONE]` as text."""
        found: list[Any] = []
        for block in self.body.decode().split("\n\n"):
            if block:
                assert block.startswith("data: "), block
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found


@dataclass(slots=True)
class Client:
    """Calls one engine as the gateway does."""

    engine: EngineProcess
    session: aiohttp.ClientSession
    tasks: list[asyncio.Task[Any]] = field(default_factory=list[asyncio.Task[Any]])

    async def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = API_KEY, raw: bytes | None = None,
        content_type: str = "application/json",
    ) -> Answer:  # fmt: skip
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["content-type"] = content_type
        async with self.session.request(method, self.engine.url + path, data=data, headers=headers) as response:
            return Answer(response.status, response.headers.get("content-type"), await response.read())

    @property
    def words(self) -> EngineWords:
        """How to speak to this engine, and what it does differently."""
        return words_of(self.engine)

    async def get(self, path: str, **kw: Any) -> Answer:
        return await self.call("GET", path, **kw)

    async def post(self, path: str, body: Any = None, **kw: Any) -> Answer:
        return await self.call("POST", path, body, **kw)

    async def admin(self, path: str, body: Any) -> Answer:
        return await self.call("POST", path, body, key=ADMIN_KEY)

    def background(self, path: str, body: Any) -> asyncio.Task[Answer]:
        """A request that runs while the test goes on."""
        task = asyncio.create_task(self.post(path, body))
        self.tasks.append(task)
        return task

    async def running(self) -> int:
        return int(await self.metric(f"{self.words.prefix}:{self.words.running}"))

    async def waiting(self) -> int:
        return int(await self.metric(f"{self.words.prefix}:{self.words.waiting}"))

    async def settle(self, running: int, waiting: int = 0, timeout: float = 60.0) -> None:
        """Returns when so many requests run and wait."""
        async with asyncio.timeout(timeout):
            while (await self.running(), await self.waiting()) != (running, waiting):
                await asyncio.sleep(0.02)

    async def load_adapter(self, name: str, folder: Path | str) -> Answer:
        return await self._adapters(self.words.load_path, {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> Answer:
        return await self._adapters(self.words.unload_path, {"lora_name": name})

    async def _adapters(self, path: str, body: Any) -> Answer:
        return await self.call("POST", path, body, key=ADMIN_KEY if self.words.admin_key else API_KEY)

    async def load(self) -> dict[str, Any]:
        return (await self.get("/v1/loads")).json["loads"][0]

    async def until(self, what: str, test: Any, timeout: float = 60.0) -> None:
        """Waits until `test(load)` is true."""
        async with asyncio.timeout(timeout):
            while not test(await self.load()):
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        await self.until("idle", lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)

    async def metric(self, name: str) -> float:
        """Sum over all label sets; 0 if the family has not appeared yet."""
        text = (await self.get("/metrics", key=None)).body.decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine that streams on a busy machine may take longer to tell its load than an agent waits. An agent asks
    again later; a test asks in the time that its requests run."""
    monkeypatch.setattr("shoal.engine.sglang.client.LOADS_SECONDS", 30.0)
    monkeypatch.setattr("shoal.engine.vllm.client.LOAD_SECONDS", 30.0)
    for name in ("sglang", "vllm"):
        monkeypatch.setattr(f"shoal.engine.{name}.client.METRICS_SECONDS", 30.0)


@pytest.fixture(scope="session", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine for all tests that leave it as they found it."""
    kind: Kind = request.param
    with running_engine(kind, tmp_path_factory.mktemp(kind)) as process:
        yield process


@pytest.fixture(scope="session", params=KINDS)
def lora_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine with LoRA for all tests that need no more of it than names of their own."""
    kind: Kind = request.param
    with running_engine(kind, tmp_path_factory.mktemp(f"lora-{kind}"), *LORA) as process:
        yield process


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """For tests that start an engine of their own."""
    return request.param


async def _client(process: EngineProcess) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        client = Client(process, session)
        try:
            yield client
        finally:
            for task in client.tasks:
                task.cancel()
            await asyncio.gather(*client.tasks, return_exceptions=True)


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[Client]:
    async for client in _client(engine):
        await client.idle()
        yield client


@pytest.fixture
async def lora(lora_engine: EngineProcess) -> AsyncIterator[Client]:
    """Nothing is loaded when the test begins, though the engine may know names of earlier tests."""
    async for client in _client(lora_engine):
        await client.idle()
        for card in (await client.get("/v1/models")).json["data"][1:]:
            await client.admin("/unload_lora_adapter", {"lora_name": card["id"]})
        yield client


# --- on every engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=ALL_KINDS)
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine with adapters for all tests that leave it as they found it. One at a time: they are large."""
    kind: Kind = request.param
    with running_engine(kind, tmp_path_factory.mktemp(f"any-{kind}"), *WORDS[kind].lora) as process:
        yield process


@pytest.fixture(params=ALL_KINDS)
def any_kind(request: pytest.FixtureRequest) -> Kind:
    """For tests that start an engine of their own."""
    return request.param


@pytest.fixture
async def any_client(any_engine: EngineProcess) -> AsyncIterator[Client]:
    async for client in _client(any_engine):
        await client.settle(0)
        for card in (await client.get("/v1/models")).json["data"][1:]:
            await client.unload_adapter(card["id"])
        yield client


@pytest.fixture(params=VLLM_KINDS)
def vllm_kind(request: pytest.FixtureRequest) -> Kind:
    """For tests of what only vLLM does, that start an engine of their own."""
    return request.param


# --- which rows ran on which engine ---------------------------------------------------------------------------------

_TABLED = ("test_any", "test_engine", "test_sglang", "test_vllm")
_rows: dict[str, dict[str, str]] = defaultdict(dict)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not any(f"tests/contract/{name}_" in report.nodeid for name in _TABLED) or (
        report.when != "call" and report.passed
    ):
        return
    name, _, params = report.nodeid.rpartition("::")[2].partition("[")
    params = params.rstrip("]")
    first = next((kind for kind in ("sim-vllm", *WORDS) if f"{params}-".startswith(f"{kind}-")), "")
    rest = params.removeprefix(first).removeprefix("-")
    _rows[f"{name} {rest}".strip()][first] = report.outcome


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _rows:
        return
    terminalreporter.section("engine contract: rows by engine")
    width = max(len(row) for row in _rows)
    for row, outcomes in _rows.items():
        columns = "  ".join(f"{kind} {outcomes[kind]:8}" for kind in WORDS if kind in outcomes)
        terminalreporter.write_line(f"{row:{width}}  {columns}")
