"""Who is told a bearer, and who is answered: over real TLS, with listeners that keep what they hear."""

import asyncio
import json
import ssl
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from shoal.agent import serve
from shoal.api import identity, names
from shoal.gateway.connections import Pool
from shoal.gateway.upstream import AbortHandle, ConnectFailed, UpstreamAddress, UpstreamError
from shoal.net import stream as streaming
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.net.tls import TLSCredentials, dial
from shoal.signals.demand import DemandStream
from shoal.signals.replica import ReplicaStream, ReplicaStreams, StreamBroken
from tests.support.agentpod import KEYS, Pod, make_quick
from tests.support.controlplane import free_ports
from tests.support.mutual import Heard, InstallationPKI, listener, model, process, wire
from tests.support.waiting import until_async

BEARER, PROMPT = "the-gateways-key", "a secret prompt"
UID = "11111111-2222-3333-4444-555555555555"
REQUEST = (
    f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BEARER}\r\ncontent-length: 15\r\n\r\n"
)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def call(port: int, credentials: TLSCredentials | None, name: str | None) -> int:
    """As a gateway calls an engine."""
    pool = Pool(credentials=credentials)
    try:
        async with asyncio.timeout(20):
            answer = await pool.start(
                UpstreamAddress("127.0.0.1", port, name), REQUEST.encode(), PROMPT.encode(), AbortHandle()
            )
            answer.release()
            return answer.status
    finally:
        pool.close()


def impostors(pki: InstallationPKI) -> dict[str, AbstractAsyncContextManager[Heard]]:
    """Listeners in an engine's place that are not that engine."""
    stranger = InstallationPKI()
    return {
        "no TLS": listener(None, OK),
        "another authority": listener(stranger.credentials(model(UID), trust=pki.trust).server(optional=True), OK),
        "another Model": listener(pki.credentials(model("another-uid")).server(optional=True), OK),
        "a gateway": listener(pki.credentials(process("gateway")).server(optional=True), OK),
    }


@pytest.mark.parametrize("who", ["no TLS", "another authority", "another Model", "a gateway"])
async def test_a_gateway_tells_an_impostor_neither_bearer_nor_prompt(who: str) -> None:
    pki = InstallationPKI()
    gateway = pki.credentials(process("gateway"))
    async with impostors(pki)[who] as heard:
        with pytest.raises(ConnectFailed):
            await call(heard.port, gateway, identity.model_server_name(UID))
        assert BEARER not in heard
        assert PROMPT not in heard


async def test_without_mutual_tls_whoever_has_the_address_is_told_both() -> None:
    async with listener(None, OK) as heard:
        assert await call(heard.port, None, None) == 200
        assert BEARER in heard
        assert PROMPT in heard


@pytest.mark.parametrize("secured", [True, False])
async def test_on_the_wire_there_is_neither_bearer_nor_prompt(secured: bool) -> None:
    pki = InstallationPKI()
    context = pki.credentials(model(UID)).server() if secured else None
    gateway, name = pki.credentials(process("gateway")), identity.model_server_name(UID) if secured else None
    async with listener(context, OK) as engine, wire(engine.port) as network:
        assert await call(network.port, gateway, name) == 200
        assert BEARER in engine
        assert PROMPT in engine
        # Without it they are there: what this test holds is worth something.
        assert (BEARER in network, PROMPT in network) == (not secured, not secured)


@pytest.mark.parametrize("who", ["no TLS", "another authority", "another Model"])
async def test_a_stream_tells_an_impostor_no_bearer(who: str) -> None:
    pki = InstallationPKI()
    async with impostors(pki)[who] as heard, aiohttp.ClientSession() as session:
        peer = StreamPeer(
            "uid", "pod", "127.0.0.1", BEARER, heard.port, (), identity.model_server_name(UID),
            pki.credentials(process("gateway")),
        )  # fmt: skip
        stream = ReplicaStream(peer, session, lambda _uid, _keys: None, ListenerIdentity())
        with pytest.raises((aiohttp.ClientError, StreamBroken)):
            async for _ in stream.listen():
                pass
        assert BEARER not in heard


COUNTS = b"""HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r
data: {"boot":"b","seq":0,"full":true,"models":{},"canaryCounts":{"r1":{"requests":9,"failed":9}}}

"""


@pytest.mark.parametrize("who", ["a gateway", "a replica", "another authority", "no TLS"])
async def test_only_a_gateway_can_say_how_requests_to_a_canary_ended(who: str) -> None:
    pki = InstallationPKI()
    contexts = {
        "a gateway": pki.credentials(process("gateway")).server(optional=True),
        "a replica": pki.credentials(model(UID)).server(optional=True),
        "another authority": InstallationPKI().credentials(process("gateway"), trust=pki.trust).server(optional=True),
        "no TLS": None,
    }
    counted: list[str] = []
    async with listener(contexts[who], COUNTS) as heard, aiohttp.ClientSession() as session:
        peer = StreamPeer(
            "uid", "pod", "127.0.0.1", BEARER, heard.port, (), identity.server_name("gateway"),
            pki.credentials(process("gateway")),
        )  # fmt: skip
        stream = DemandStream(
            peer, session, lambda _uid, _models: None, ListenerIdentity(), counted=lambda boot, _: counted.append(boot)
        )
        if who == "a gateway":
            async for _ in stream.listen():
                break
            assert counted == ["b"]
            assert stream.live
        else:
            with pytest.raises((aiohttp.ClientError, StreamBroken)):
                async for _ in stream.listen():
                    pass
            assert not counted
            assert BEARER not in heard


async def test_without_a_certificate_of_its_own_nobody_is_called() -> None:
    async with listener(None, OK) as heard:
        for own in (None, TLSCredentials(Path("/nowhere"))):
            with pytest.raises(ConnectFailed, match="certificate"):
                await call(heard.port, own, identity.model_server_name(UID))
        assert not heard.raw


# --- the agent ------------------------------------------------------------------------------------------------------


class Secured:
    """An agent that speaks mutual TLS."""

    def __init__(self, folder: Path, pod: Pod) -> None:
        self.pki, self.folder, self.pod = InstallationPKI(), folder / "tls", pod
        self.pki.write(self.folder, model(UID))
        self.port = free_ports(1)[0]

    def peer(self, credentials: TLSCredentials, key: str = "gateway-key") -> StreamPeer:
        return StreamPeer("uid", "pod", "127.0.0.1", key, self.port, (), identity.model_server_name(UID), credentials)


@pytest.fixture
async def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_quick(monkeypatch)
    monkeypatch.setattr(serve, "CERTIFICATE_SECONDS", 0.05)
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    it = Secured(tmp_path, pod)
    async with pod.running(credentials=TLSCredentials(it.folder), tls_port=it.port):
        yield it


async def status(it: Secured, credentials: TLSCredentials | None, key: str, path: str = names.REPLICA_PATH) -> int:
    secured = {} if credentials is None else dial(credentials, identity.model_server_name(UID))
    base = it.pod.url if credentials is None else f"https://127.0.0.1:{it.port}"
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.get(f"{base}{path}", headers=headers, **secured) as response,
    ):
        return response.status


async def test_an_agent_answers_its_callers_only(secured: Secured) -> None:
    pki = secured.pki
    gateway, ledger = pki.credentials(process("gateway")), pki.credentials(process("ledger"))
    assert await status(secured, gateway, "gateway-key") == 200
    # A key that was read somewhere is of no use with another role's certificate, nor without any.
    assert await status(secured, ledger, "gateway-key") == 403
    assert await status(secured, gateway, "operator-key") == 403
    assert await status(secured, gateway, "wrong") == 401
    assert await status(secured, None, "gateway-key") == 403
    assert await status(secured, None, "", "/healthz") == 200
    stranger = InstallationPKI()
    for refused in (
        stranger.credentials(process("gateway"), trust=pki.trust),
        pki.credentials(model("another-uid")),
        pki.credentials(model(UID)),
    ):
        with pytest.raises((aiohttp.ClientError, OSError)):
            await status(secured, refused, "gateway-key")


async def test_a_renewed_certificate_and_another_authority_break_no_stream(secured: Secured) -> None:
    pki, after = secured.pki, InstallationPKI()
    both = pki.trust + after.trust
    gateway = pki.credentials(process("gateway"), trust=both)
    streams = ReplicaStreams(lambda _uid, _keys: None, ListenerIdentity("gateway-0", "boot"))
    streams.start()
    try:
        streams.put(secured.peer(gateway))
        await until_async(lambda: streams.get("uid") is not None)
        first = streams.get("uid")
        assert first is not None
        after.write(secured.folder, model(UID), trust=both)

        async def renewed() -> bool:
            try:
                # Only whoever trusts the new authority alone sees that it is there.
                return await status(secured, after.credentials(process("gateway")), "gateway-key") == 200
            except (aiohttp.ClientError, OSError):
                return False

        async with asyncio.timeout(30):
            while not await renewed():
                await asyncio.sleep(0.05)
        gateway.put(after.pair(process("gateway")), both)
        seq = first.seq
        secured.pod.boot("boot-1")
        await until_async(lambda: first.seq > seq)
        assert streams.get("uid") is first
        assert first.failures == 0
    finally:
        await streams.close()


class CountedCredentials(TLSCredentials):
    """Counts the calls that it was asked for."""

    calls = 0

    def client(self) -> ssl.SSLContext:
        self.calls += 1
        return super().client()


@pytest.mark.parametrize("before", ["none", "one that has expired"])
async def test_a_stream_begins_when_the_certificate_comes(
    before: str, secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway starts before its Secret is mounted: each of its streams waited until its back-off was over."""
    monkeypatch.setattr(streaming, "BACKOFF_FIRST", 600.0)  # longer than a test
    pki, gateway = secured.pki, CountedCredentials()
    if before == "one that has expired":
        yesterday = datetime.now(UTC) - timedelta(days=1)
        gateway.put(pki.authority.issue(process("gateway"), yesterday, timedelta(hours=1), calls=True), pki.trust)
    streams = ReplicaStreams(lambda _uid, _keys: None, ListenerIdentity("gateway-0", "boot"))
    streams.start()
    try:
        streams.put(secured.peer(gateway))
        await until_async(lambda: gateway.calls == 1)
        monkeypatch.setattr(streaming, "BACKOFF_FIRST", 0.01)
        gateway.put(pki.pair(process("gateway")), pki.trust)
        await until_async(lambda: streams.get("uid") is not None, within=20)
        assert gateway.calls == 2
        assert (streams.failures("uid") == 0) == (before == "none")
    finally:
        await streams.close()


async def test_an_expired_certificate_reaches_nobody_until_it_is_renewed(secured: Secured) -> None:
    pki = secured.pki
    gateway = TLSCredentials()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    old = pki.authority.issue(process("gateway"), yesterday, timedelta(hours=1), calls=True)
    gateway.put(old, pki.trust)
    assert gateway.expired()
    with pytest.raises((aiohttp.ClientError, OSError)):
        await status(secured, gateway, "gateway-key")
    gateway.put(pki.pair(process("gateway")), pki.trust)
    assert not gateway.expired()
    assert await status(secured, gateway, "gateway-key") == 200


def test_what_cannot_be_read_leaves_the_last_certificate_in_use(tmp_path: Path) -> None:
    pki, folder = InstallationPKI(), tmp_path / "tls"
    credentials = TLSCredentials(folder)
    assert not credentials.refresh()
    assert credentials.missing == f"no certificate in {folder}: the operator issues it"
    pki.write(folder, process("gateway"))
    assert credentials.refresh()
    assert not credentials.refresh()
    assert (bool(credentials), credentials.missing, credentials.strict) == (True, None, True)
    before = credentials.client()
    for broken in ("", "nonsense", pki.pair(process("gateway")).key):
        (folder / "tls.key").write_text(broken)
        assert not credentials.refresh()
        assert credentials.problem
        assert credentials.client() is before
    (folder / "strict").unlink()
    pki.write(folder, process("gateway"), strict=False)
    assert credentials.refresh()
    assert (credentials.problem, credentials.strict) == (None, False)


async def test_answers_of_the_sidecar_are_told_from_the_engines() -> None:
    """Only where there is one: an engine cannot pass its own 503 off as another's."""
    pki = InstallationPKI()
    gateway, name = pki.credentials(process("gateway")), identity.model_server_name(UID)

    def answered(flags: str) -> bytes:
        return f"HTTP/1.1 503 No\r\n{names.HEADER_SIDECAR}: {flags}\r\ncontent-length: 2\r\n\r\nno".encode()

    for flags, lost in (("UF", False), ("UC", True), ("UC,URX", True)):
        async with listener(pki.credentials(model(UID)).server(), answered(flags)) as engine:
            with pytest.raises(UpstreamError) as caught:
                await call(engine.port, gateway, name)
            assert isinstance(caught.value, ConnectFailed) is not lost
    async with listener(None, answered("UF")) as engine:
        assert await call(engine.port, gateway, None) == 503
