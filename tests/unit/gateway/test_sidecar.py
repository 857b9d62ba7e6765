"""What stands in front of an engine, run for real: who it lets in, to what, and what it says when it is gone."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from shoal.api import identity, names
from shoal.api.config import AgentImage, Engines, OperatorConfig, Pods
from shoal.engine.kinds import DEFAULT
from shoal.gateway.connections import Pool
from shoal.gateway.metrics import OPERATIONS
from shoal.gateway.upstream import AbortHandle, ConnectFailed, ConnectionLost, UpstreamAddress, UpstreamAnswer
from shoal.manifests import sidecar
from shoal.net.tls import TLSCredentials
from tests.support.controlplane import free_ports
from tests.support.mutual import InstallationPKI, model, process

UID = "11111111-2222-3333-4444-555555555555"
CONFIG = OperatorConfig(
    engines=Engines(default_version="1", versions={}, cpuPerGPU="1", memoryPerGPU="1Gi"),
    agent=AgentImage(image="shoal"),
)


class Engine:
    """Streams a chunk for each step that a test lets it take."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.step = asyncio.Event()
        self.dies = False

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.seen.append(head.split(" HTTP")[0])
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                await reader.readexactly(int(lengths[0].split(":")[1]) if lengths else 0)
                if self.dies:
                    break
                if "stream" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    while True:
                        writer.write(b"5\r\nchunk\r\n")
                        await self.step.wait()
                        self.step.clear()
                        if self.dies:
                            writer.transport.abort()
                            return
                writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 3\r\n\r\nown")
        writer.close()


class Front:
    """A sidecar, its files and its ports."""

    def __init__(self, folder: Path) -> None:
        self.pki, self.folder = InstallationPKI(), folder
        self.engine_port, self.serving, self.probes = free_ports(3)
        self.certify(self.pki)

    def certify(self, pki: InstallationPKI, trust: str | None = None, caller: str = process("gateway").uri) -> None:
        """As the kubelet does: files beside, then one rename."""
        for name, text in sidecar.secrets(pki.pair(model(UID)), trust or pki.trust, caller).items():
            (self.folder / f".{name}").write_text(text)
            (self.folder / f".{name}").rename(self.folder / name)

    async def ask(
        self, credentials: TLSCredentials | None, path: str = "/v1/completions", method: str = "POST", more: str = ""
    ) -> UpstreamAnswer:
        port, name = self.probes, None
        if credentials is not None:
            port, name = self.serving, identity.model_server_name(UID)
        head = f"{method} {path} HTTP/1.1\r\nhost: engine\r\n{more}content-length: 2\r\n\r\n"
        async with asyncio.timeout(20):
            return await Pool(credentials=credentials).start(
                UpstreamAddress("127.0.0.1", port, name), head.encode(), b"{}", AbortHandle()
            )

    async def status(
        self, credentials: TLSCredentials | None, path: str = "/v1/completions", method: str = "POST"
    ) -> int:
        answer = await self.ask(credentials, path, method)
        answer.release()
        return answer.status


@pytest.fixture
async def front(tmp_path: Path) -> AsyncGenerator[Front]:
    it = Front(tmp_path)
    config = CONFIG.model_copy(update={"pods": Pods(scraper_namespaces=("monitoring",))})
    bootstrap = sidecar.bootstrap(
        config,
        DEFAULT.pod,
        folder=str(tmp_path),
        engine_port=it.engine_port,
        serving_port=it.serving,
        probe_port=it.probes,
    )
    _, _, *flags = sidecar.command(config, DEFAULT.pod)[1:]
    program = Path(sys.executable).with_name("envoy")
    child = await asyncio.create_subprocess_exec(program, "--config-yaml", json.dumps(bootstrap), *flags)
    try:
        gateway = it.pki.credentials(process("gateway"))

        async def up() -> bool:
            with suppress(ConnectFailed):
                await it.status(gateway, "/")
                return True
            return False

        async with asyncio.timeout(30):
            while not await up():
                await asyncio.sleep(0.05)
        yield it
    finally:
        child.terminate()
        await child.wait()


@asynccontextmanager
async def engine_of(front: Front) -> AsyncGenerator[Engine]:
    engine = Engine()
    server = await asyncio.start_server(engine.talk, "127.0.0.1", front.engine_port)
    try:
        yield engine
    finally:
        engine.dies = True
        engine.step.set()
        server.close()


def test_the_paths_are_those_that_gateways_call() -> None:
    assert set(names.SERVING_PATHS) == set(OPERATIONS)


async def test_gateways_reach_serving_paths_and_nobody_reaches_anything_else(front: Front) -> None:
    gateway = front.pki.credentials(process("gateway"))
    # Nothing of it: the engine takes no connection, which is no loss.
    with pytest.raises(ConnectFailed):
        await front.ask(gateway)
    async with engine_of(front) as engine:
        for path in names.SERVING_PATHS:
            assert await front.status(gateway, path) == 503  # the engine's own, told as such
        assert await front.status(gateway, "/ready", "GET") == 503
        assert await front.status(None, "/ready", "GET") == 503
        assert await front.status(None, "/metrics", "GET") == 503
        assert len(engine.seen) == len(names.SERVING_PATHS) + 3
        for path in (
            "/server_info",
            "/get_server_info",
            "/load_lora_adapter",
            "/v1/completions/../../server_info",
            "/",
        ):
            for method in ("GET", "POST"):
                assert await front.status(gateway, path, method) == 404
                assert await front.status(None, path, method) == 404
        for path in names.SERVING_PATHS:
            assert await front.status(None, path) == 404
        stranger = InstallationPKI()
        for refused in (
            front.pki.credentials(process("ledger")),
            front.pki.credentials(process("operator")),
            front.pki.credentials(model(UID)),
            stranger.credentials(process("gateway"), trust=front.pki.trust),
        ):
            with pytest.raises(ConnectionLost):
                await front.ask(refused)
        assert len(engine.seen) == len(names.SERVING_PATHS) + 3


async def test_without_the_proxy_whoever_has_the_address_reaches_everything(front: Front) -> None:
    async with engine_of(front) as engine:
        front.probes = front.engine_port
        for path in ("/load_lora_adapter", "/v1/completions"):
            assert await front.status(None, path) == 503  # the engine's own
        assert engine.seen == ["POST /load_lora_adapter", "POST /v1/completions"]


async def test_if_it_did_not_look_for_a_gateway_any_role_would_be_one(front: Front) -> None:
    ledger = front.pki.credentials(process("ledger"))

    async def reached() -> bool:
        with suppress(ConnectionLost, ConnectFailed):
            return await front.status(ledger) == 503
        return False

    async with engine_of(front) as engine:
        assert not await reached()
        front.certify(front.pki, caller=process("ledger").uri)
        async with asyncio.timeout(30):
            while not await reached():
                await asyncio.sleep(0.05)
        assert engine.seen == ["POST /v1/completions"]


async def test_an_engine_that_dies_under_a_request_is_told_from_one_that_takes_none(front: Front) -> None:
    gateway = front.pki.credentials(process("gateway"))
    async with engine_of(front) as engine:
        engine.dies = True
        with pytest.raises(ConnectionLost):
            await front.ask(gateway)
        engine.dies = False
        answer = await front.ask(gateway, more="x: stream\r\n")
        assert await answer.read() == b"chunk"
        engine.dies = True
        engine.step.set()
        with pytest.raises(ConnectionLost):
            await answer.read_all(1000)
        answer.release()


async def test_a_renewed_certificate_and_another_authority_break_no_stream(front: Front) -> None:
    before, after = front.pki, InstallationPKI()
    gateway = before.credentials(process("gateway"), trust=before.trust + after.trust)
    async with engine_of(front) as engine:
        answer = await front.ask(gateway, more="x: stream\r\n")
        assert await answer.read() == b"chunk"
        front.certify(after, before.trust + after.trust)
        newer = after.credentials(process("gateway"))  # trusts the new authority only

        async def renewed() -> bool:
            with suppress(ConnectFailed):
                return await front.status(newer, "/") == 404
            return False

        async with asyncio.timeout(30):
            while not await renewed():
                await asyncio.sleep(0.05)
        for _ in range(3):
            engine.step.set()
            assert await answer.read() == b"chunk"
        answer.release()
        # Then nobody of the old authority is let in any more.
        front.certify(after)

        async def dropped() -> bool:
            with suppress(ConnectionLost):
                await front.status(gateway, "/")
                return False
            return True

        async with asyncio.timeout(30):
            while not await dropped():
                await asyncio.sleep(0.05)
