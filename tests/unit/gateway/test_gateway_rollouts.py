"""Rollouts of real gateway processes under clients that keep their connections, and do not try again.

`tests.bench.bench_rollouts` does the same on the lab, with 100 rollouts and the Service of a cluster.
"""

import asyncio
import contextlib
import itertools
import os
import random
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from shoal.api import names
from shoal.metering.spoolreader import SpoolReader
from tests.bench.rollout_clients import Clients
from tests.support.addresses import pod_ip
from tests.support.gateway import API_KEY, INSTALL_KEY, tenant
from tests.support.gateway_process import MODEL, POD, POD_IP, FakeApiServer, kubeconfig
from tests.support.rolekeys import give
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

ROLLOUTS = 6
SDK_CLIENTS = PLAIN_CLIENTS = AHEAD_CLIENTS = 3
LONGEST_THINK_SECONDS = 1.5
ENDPOINTS_SECONDS = 0.3
"""From the SIGTERM of a gateway until the Service knows of it."""


class Service:
    """Takes connections as a Service does: each goes to one of the endpoints, and stays there."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []

    async def connection(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            chosen = random.choice(self.endpoints)  # noqa: S311
            gateway, to_gateway = await asyncio.open_connection(chosen, names.GATEWAY_PORT)
        except OSError:
            to_client.transport.abort()
            return
        await asyncio.gather(self._copy(client, to_gateway), self._copy(gateway, to_client))
        to_client.close()
        to_gateway.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
            target.write_eof()
        except OSError:
            target.transport.abort()  # a reset is passed on as one


class Gateway:
    """One process, the successor of another."""

    def __init__(self, folder: Path, number: int, kubeconfig: str) -> None:
        self.ip = pod_ip(2 + number)
        self.spool = folder / f"spool-{number}"
        self._log = folder / f"gateway-{number}.log"
        settings = {
            "HOST": self.ip,
            "OPS_HOST": self.ip,
            "POD_NAME": f"gateway-{number}",
            "KEYS_DIR": str(folder / "key"),
            "SPOOL_DIR": str(self.spool),
            "LOG_DIR": str(folder / f"logs-{number}"),
            "SETTLE_SECONDS": "2",
        }
        own = {f"SHOAL_GATEWAY_{name}": value for name, value in settings.items()}
        self._env = os.environ | own | {"KUBECONFIG": kubeconfig, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Returns when it is ready."""
        with self._log.open("wb") as out:
            command = (sys.executable, "-m", "shoal", "gateway", "run")
            self._process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env=self._env)
        async with asyncio.timeout(60):
            while True:
                assert self._process.returncode is None, self._log.read_text()
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://{self.ip}:{names.OPS_PORT}/readyz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)

    def terminate(self) -> None:
        assert self._process is not None
        self._process.terminate()

    async def ended(self) -> int:
        assert self._process is not None
        async with asyncio.timeout(60):
            return await self._process.wait()

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def answered(self) -> int:
        """Requests that it has answered, by its own records."""
        with contextlib.closing(SpoolReader(self.spool)) as reader:
            return sum(row.record.data.outcome == "answered" for row in reader.newest(100_000, kinds=("final",)))


class AheadClients:
    """Clients whose pools connect ahead of the request: each new connection waits for its first one."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model
        self.ended = False
        self.answered = 0
        self.broken: list[str] = []

    async def ask(self, seed: int) -> None:
        thinks = random.Random(seed)  # noqa: S311
        body = b'{"model": "%b", "prompt": "x"}' % self._model.encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
        while not self.ended:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            # Longer than it takes a gateway to stop listening.
            await asyncio.sleep(thinks.uniform(0, 6))
            try:
                writer.write(head % (API_KEY.encode(), len(body)) + body)
                answer = await reader.readuntil(b"\r\n")
                if b" 200 " in answer:
                    self.answered += 1
                else:
                    self.broken.append(answer.decode())
            except (OSError, asyncio.IncompleteReadError) as error:
                self.broken.append(repr(error))
            writer.close()


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncGenerator[tuple[str, Service, int]]:
    """A kubeconfig, a Service, and its port. There are one Model with one replica, and one tenant."""

    async def serve(request: EngineRequest) -> None:
        await asyncio.sleep(0.1)
        await serve_normally(request)

    server = FakeApiServer()
    server.crds = True
    (folder / "key").mkdir()
    give(folder / "key", INSTALL_KEY)
    await server.up()
    acme = tenant().model_dump(mode="json", by_alias=True, exclude_none=True)
    for plural, obj in (("models", MODEL), ("tenants", acme), ("pods", POD)):
        await server.change(plural, obj)
    service = Service()
    engine = await asyncio.start_server(ScriptedEngine(serve).handle, POD_IP, names.ENGINE_PORT)
    listener = await asyncio.start_server(service.connection, "127.0.0.1", 0)
    try:
        yield kubeconfig(folder, server), service, listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        engine.close()
        await server.down()


@pytest.mark.timeout(300)
async def test_no_request_breaks_while_gateways_are_rolled_out_again_and_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (config, service, port), aiohttp.ClientSession() as session:
        gateways = [Gateway(tmp_path, number, config) for number in range(ROLLOUTS + 1)]
        clients = Clients(f"http://127.0.0.1:{port}", API_KEY, "chat/llama", longest_think=LONGEST_THINK_SECONDS)
        ahead = AheadClients(port, "chat/llama")
        try:
            await gateways[0].start(session)
            service.endpoints = [gateways[0].ip]
            async with asyncio.TaskGroup() as group:
                for number in range(SDK_CLIENTS):
                    group.create_task(clients.sdk(number))
                for number in range(PLAIN_CLIENTS):
                    group.create_task(clients.plain(SDK_CLIENTS + number))
                for number in range(AHEAD_CLIENTS):
                    group.create_task(ahead.ask(number))
                for before, after in itertools.pairwise(gateways):
                    await after.start(session)
                    service.endpoints = [before.ip, after.ip]
                    await asyncio.sleep(LONGEST_THINK_SECONDS)
                    before.terminate()
                    await asyncio.sleep(ENDPOINTS_SECONDS)
                    service.endpoints = [after.ip]
                await gateways[-2].ended()
                clients.ended = ahead.ended = True
            gateways[-1].terminate()
            assert [await gateway.ended() for gateway in gateways] == [0] * len(gateways)
        finally:
            for gateway in gateways:
                await gateway.kill()
    assert (clients.refused, dict(clients.broken), ahead.broken) == (0, {}, [])
    by_gateway = [gateway.answered() for gateway in gateways]
    assert min(by_gateway) > 0, by_gateway
    assert sum(by_gateway) == clients.answered + ahead.answered, "an answer that was lost"
