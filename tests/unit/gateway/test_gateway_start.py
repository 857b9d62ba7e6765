"""A gateway that starts while a tenant has used some of its limit at the others: it is ready when it knows that, and no
gateway that does not answer keeps it from being ready."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from shoal.api.names import ANNOTATION_TRANSPORT, OPS_PORT, OPS_TLS_PORT, TRANSPORT_MTLS
from shoal.gateway import process as gateways
from shoal.gateway.process import GatewayProcess
from tests.support.gateway import INSTALL_KEY
from tests.support.gateway_process import FakeApiServer, readyz, running, until_ready
from tests.support.gatewaypods import FIRST, OWN, SECOND, gateway_pod
from tests.support.mutual import InstallationPKI
from tests.support.mutual import process as role
from tests.support.rolekeys import give
from tests.support.streams import told_gateway, until

Started = tuple[GatewayProcess, aiohttp.ClientSession]
LONG = 600.0
"""Longer than a test: who is ready did not wait so long."""


@contextlib.asynccontextmanager
async def starting(
    tmp_path: Path, *pods: dict[str, Any], **settings: Any
) -> AsyncGenerator[tuple[GatewayProcess, aiohttp.ClientSession]]:
    """A gateway with all that it needs, and these pods of gateways."""
    server = FakeApiServer()
    server.crds = True
    for pod in (gateway_pod("gateway-0", OWN, ready=False), *pods):
        await server.change("pods", pod)
    async with (
        running(tmp_path, server, pod_name="gateway-0", **settings) as process,
        aiohttp.ClientSession() as session,
    ):
        give(tmp_path / "key", INSTALL_KEY)
        await server.up()
        yield process, session


@contextlib.asynccontextmanager
async def silent_peer(ip: str, context: ssl.SSLContext | None = None) -> AsyncGenerator[asyncio.Event]:
    """A gateway that takes connections, and answers when it may: 7 requests of acme. `context`: of mutual TLS."""
    may, ended = asyncio.Event(), asyncio.Event()

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tenants = {"acme": {"requests": 9, "recent": [[5, 7, 70]]}}
        message = {"boot": "b", "seq": 0, "full": True, "models": {}, "tenants": tenants}
        with contextlib.closing(writer):
            await may.wait()
            if not ended.is_set():
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: " + orjson.dumps(message) + b"\n\n")
                await ended.wait()

    try:
        async with await asyncio.start_server(answer, ip, OPS_PORT if context is None else OPS_TLS_PORT, ssl=context):
            yield may
    finally:
        ended.set()
        may.set()


def used_by_others(process: GatewayProcess) -> int:
    return process.demand.tenants.of("acme").peer_usage.used("requests", 60, time.monotonic(), ())[0]


async def test_a_gateway_is_ready_when_it_knows_what_the_others_have_used_of_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was ready before, and a burst got a share of what was used up."""
    monkeypatch.setattr(gateways, "PEERS_SECONDS", LONG)
    async with (
        silent_peer(FIRST) as may_answer,
        starting(tmp_path, gateway_pod("gateway-1", FIRST)) as (process, session),
    ):
        await until(lambda: process.peers.awaited() is not None and process.missing().keys() <= {"peers"})
        for _ in range(20):
            status, why = await readyz(session, process)
            assert (status, why["missing"]) == (503, ["peers"])
            assert "gateway-1" in why["peers"]
        may_answer.set()
        await until_ready(session, process)
        assert (
            process.demand.tenants.of("acme").peer_usage.used("requests", 60, asyncio.get_running_loop().time(), ())[0]
            == 7
        )


async def test_a_gateway_whose_certificate_comes_late_asks_the_others_before_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What it tried without a certificate counted as connections that failed: it was ready, and did not know what the
    others had used until its back-off was over."""
    monkeypatch.setattr(gateways, "PEERS_SECONDS", LONG)
    pki, folder = InstallationPKI(), tmp_path / "tls"
    other = gateway_pod("gateway-1", FIRST, annotations={ANNOTATION_TRANSPORT: TRANSPORT_MTLS})
    async with (
        silent_peer(FIRST, pki.credentials(role("gateway")).server()) as may_answer,
        starting(tmp_path, other, mtls=True, mtls_dir=folder, mtls_port=0) as (process, session),
    ):
        tried = 0
        client = process.credentials.client

        def counted() -> ssl.SSLContext:
            nonlocal tried
            tried += 1
            return client()

        monkeypatch.setattr(process.credentials, "client", counted)
        await until(lambda: process.peers.awaited() is not None and process.missing().keys() == {"certificate"})
        await until(lambda: tried >= 4)  # by both streams
        pki.write(folder, role("gateway"))
        await until(lambda: "certificate" not in process.missing())
        for _ in range(20):
            status, why = await readyz(session, process)
            assert (status, why["missing"]) == (503, ["peers"])
        may_answer.set()
        await until_ready(session, process)
        assert used_by_others(process) == 7


async def test_a_gateway_that_takes_connections_and_never_answers_keeps_no_other_from_being_ready(tmp_path: Path):
    async with silent_peer(FIRST), starting(tmp_path, gateway_pod("gateway-1", FIRST)) as (process, session):
        await until_ready(session, process)
        assert process.peers.awaited() == ["gateway-1"]


@pytest.mark.parametrize(
    "others",
    [
        [],
        [gateway_pod("gateway-1", FIRST, ready=False), gateway_pod("gateway-2", None, ready=False)],
        [gateway_pod("gateway-1", FIRST), gateway_pod("gateway-2", SECOND)],
        [gateway_pod("gateway-1", FIRST, deletionTimestamp="2026-01-01T00:00:00Z")],
    ],
    ids=["the first one", "others that start too", "others that are away", "one that has ended"],
)
async def test_a_gateway_without_others_that_answer_waits_for_nothing(
    others: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gateways, "PEERS_SECONDS", LONG)
    async with starting(tmp_path, *others) as (process, session):
        await until_ready(session, process)


async def test_gateways_that_all_start_again_at_once_wait_for_each_other_and_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The API server says of each that it is ready, and none is: but each tells what it knows before it is ready."""
    monkeypatch.setattr(gateways, "PEERS_SECONDS", LONG)
    pods = [gateway_pod("gateway-1", FIRST), gateway_pod("gateway-2", SECOND)]
    async with told_gateway(FIRST, OPS_PORT) as first, told_gateway(SECOND, OPS_PORT) as second:
        first.ring.known = second.ring.known = (INSTALL_KEY,)
        async with starting(tmp_path, *pods) as (process, session):
            await until_ready(session, process)
            assert process.peers.awaited() == []


async def test_a_gateway_that_is_ready_stays_so_when_another_one_comes_that_does_not_answer(tmp_path: Path):
    server = FakeApiServer()
    server.crds = True
    async with running(tmp_path, server, pod_name="gateway-0") as process, aiohttp.ClientSession() as session:
        give(tmp_path / "key", INSTALL_KEY)
        await server.up()
        await until_ready(session, process)
        async with silent_peer(FIRST):
            await server.change("pods", gateway_pod("gateway-1", FIRST))
            await until(lambda: process.peers.awaited() == ["gateway-1"])
            assert (await readyz(session, process))[0] == 200


async def test_without_the_list_of_gateways_it_is_ready_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where the right to list them is missing."""
    monkeypatch.setattr(gateways.Peers, "awaited", lambda _peers: None)
    async with starting(tmp_path) as (process, session):
        await until_ready(session, process)
