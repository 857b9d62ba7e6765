"""A gateway's demand over HTTP: who may hear it, what a listener knows, and when it knows nothing."""

import asyncio
import contextlib
import json
import time
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from shoal.api import names
from shoal.api import replica as api
from shoal.api.demand import ModelDemand
from shoal.net import hub as hubs
from shoal.net import stream
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.signals.demand import DemandStream, DemandStreams
from shoal.signals.replica import ReplicaStream
from tests.support.streams import CURRENT, PREVIOUS, ToldGateway, told_gateway, until
from tests.support.waiting import until_async

Heard = list[tuple[str, list[str] | None]]


@contextlib.asynccontextmanager
async def listening(*peers: StreamPeer) -> AsyncGenerator[tuple[DemandStreams, Heard]]:
    heard: Heard = []

    def note(uid: str, models: Collection[str] | None) -> None:
        heard.append((uid, None if models is None else sorted(models)))

    streams = DemandStreams(note, ListenerIdentity("operator-1", "boot-of-operator"))
    streams.start()
    streams.set_peers(peers)
    try:
        yield streams, heard
    finally:
        await streams.close()


async def test_a_listener_hears_everything_and_then_what_changes():
    async with told_gateway() as gateway:
        gateway.book.arrived("m")
        gateway.book.held("m", 40, 0.0)
        async with listening(gateway.peer()) as (streams, heard):
            await until(lambda: bool(streams.live()))
            (heard_of,) = streams.live()
            assert heard_of.demand("m").held == 1
            assert heard_of.demand("never named") == ModelDemand()
            assert heard_of.boot == gateway.hub.boot
            gateway.book.released("m", 40, 0.0)
            gateway.book.sent("m")
            await until(lambda: heard_of.demand("m") == ModelDemand(arrivals=1, in_flight=1))
            assert heard[0] == ("gateway-1", None)
            assert ("gateway-1", ["m"]) in heard
            (caller,) = [reader.caller for reader in gateway.hub]
            assert (caller.role, caller.name, caller.boot) == ("operator", "operator-1", "boot-of-operator")
        await until(lambda: gateway.hub.readers == 0)


async def test_the_age_of_the_oldest_grows_between_messages():
    async with told_gateway() as gateway, listening(gateway.peer()) as (streams, _):
        gateway.book.held("m", 40, 0.0)
        await until(lambda: any(s.demand("m").held for s in streams.live()))
        (heard,) = streams.live()
        told = heard.models["m"]
        assert heard.demand("m", told.at + 30).oldest_seconds == told.demand.oldest_seconds + 30


@pytest.mark.parametrize(("role", "status"), [("operator", 200), ("gateway", 200), ("ledger", 401), ("agent", 401)])
async def test_only_operators_and_gateways_may_hear_it(role: str, status: int):
    async with told_gateway() as gateway, aiohttp.ClientSession() as session:
        peer = gateway.peer(role=role)  # pyright: ignore[reportArgumentType]
        url = f"http://127.0.0.1:{gateway.port}{names.DEMAND_PATH}"
        async with session.get(url, headers={"authorization": f"Bearer {peer.key}"}) as answer:
            assert answer.status == status
            if status == 401:
                assert "a key of an operator or a gateway is needed" in (await answer.json())["status"]
        async with session.get(url) as nobody:
            assert nobody.status == 401


async def test_both_install_keys_are_good_and_a_caller_that_is_ahead_tries_the_other():
    async with told_gateway() as gateway:
        async with listening(gateway.peer(key=PREVIOUS)) as (streams, _):
            await until(lambda: bool(streams.live()))
        # The caller has read the new key; this gateway's mounted Secret still has the old one.
        gateway.ring.known = (PREVIOUS,)
        ahead = gateway.peer("gateway-1", "operator", CURRENT, PREVIOUS)
        async with listening(ahead) as (streams, _):
            await until(lambda: bool(streams.live()))


async def test_another_process_at_the_same_address_is_a_restart_and_its_counters_begin_anew():
    gateway = ToldGateway()
    await gateway.up()
    async with listening(gateway.peer()) as (streams, heard):
        for _ in range(5):
            gateway.book.arrived("m")
        await until(lambda: any(s.demand("m").arrivals == 5 for s in streams.live()))
        boot = gateway.hub.boot
        await gateway.down()
        await until(lambda: not streams.live())
        assert heard[-1] == ("gateway-1", None)
        await gateway.up()
        await until(lambda: bool(streams.live()))
        (now,) = streams.live()
        assert now.boot == gateway.hub.boot != boot
        assert now.demand("m") == ModelDemand()
    await gateway.down()


async def test_silence_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "SILENCE_SECONDS", 0.3)
    async with told_gateway() as gateway, listening(gateway.peer()) as (streams, _):
        gateway.book.held("m", 1, 0.0)
        await until(lambda: bool(streams.live()))
        await until(lambda: not streams.live())


async def test_a_listener_that_was_stopped_itself_does_not_take_old_words_for_new(monkeypatch: pytest.MonkeyPatch):
    async with told_gateway() as gateway, listening(gateway.peer()) as (streams, _):
        await until(lambda: bool(streams.live()))
        # It sleeps past the silence, and looks before its own timers have run.
        awake = time.monotonic() + 13.0
        monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: awake))
        assert streams.get("gateway-1") is None
        assert streams.live() == []


async def test_a_listener_that_fails_leaves_the_stream_up(capfd: pytest.CaptureFixture[str]):
    def fails(_uid: str, _models: Collection[str] | None) -> None:
        raise RuntimeError("a bug of the listener")

    async with told_gateway() as gateway:
        streams = DemandStreams(fails, ListenerIdentity())
        streams.start()
        streams.put(gateway.peer())
        try:
            await until(lambda: bool(streams.live()))
            gateway.book.arrived("m")
            await until(lambda: any(s.demand("m").arrivals for s in streams.live()))
        finally:
            await streams.close()
    assert "a bug of the listener" in capfd.readouterr().out


async def test_a_quiet_gateway_is_heard_by_its_heartbeats(monkeypatch: pytest.MonkeyPatch):
    from shoal.gateway import ops

    monkeypatch.setattr(ops, "HEARTBEAT_SECONDS", 0.05)
    async with told_gateway() as gateway, listening(gateway.peer()) as (streams, heard):
        await until(lambda: bool(streams.live()))
        (stream_,) = streams.live()
        first = stream_.received_at
        await until(lambda: stream_.received_at > first)
        assert heard == [("gateway-1", None)]  # a heartbeat is no news


async def test_readers_are_bounded_and_the_next_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hubs, "READERS", 1)
    async with told_gateway() as gateway, listening(gateway.peer()) as (streams, _):
        await until(lambda: bool(streams.live()))
        url = f"http://127.0.0.1:{gateway.port}{names.DEMAND_PATH}"
        headers = {"authorization": f"Bearer {gateway.peer().key}"}
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    "said",
    [
        b'{"boot":"b","seq":3,"models":{"m":{"arrivals":"many"}}}',
        b'{"boot":"b","seq":3,"models":["m"]}',
        b'{"boot":"b","seq":3',
        b"[]",
        b'{"seq":3,"models":{}}',
    ],
)
async def test_what_is_not_understood_ends_the_stream_and_what_was_known_is_unknown(said: bytes):
    follower = DemandStream(
        StreamPeer("g", "g", "h", "k"),
        cast(aiohttp.ClientSession, None),
        lambda _uid, _models: None,
        ListenerIdentity(),
    )
    follower.take(b'{"boot":"b","seq":2,"full":true,"models":{"m":{"arrivals":4,"unheardOf":1}}}')
    assert follower.demand("m").arrivals == 4
    with pytest.raises(stream.StreamBroken, match="not understood"):
        follower.take(said)
    follower.lose()
    assert follower.boot is None


def endless(sent: list[int]) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A peer whose message has no end. `sent`: the bytes of it that were taken."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: ")
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent.append(65536)
        writer.close()

    return serve


async def test_a_message_without_end_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DemandStream, "longest", 1 << 20)
    server = await asyncio.start_server(endless([]), "127.0.0.1", 0)
    peer = StreamPeer("g", "g", "127.0.0.1", "key", server.sockets[0].getsockname()[1])
    async with server, aiohttp.ClientSession() as session:
        follower = DemandStream(peer, session, lambda _uid, _models: None, ListenerIdentity())
        with pytest.raises(stream.StreamBroken, match="too long"):
            await asyncio.wait_for(_to_the_end(follower), 20)


async def test_without_the_bound_it_is_read_for_as_long_as_the_peer_sends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DemandStream, "longest", 1 << 60)
    sent = list[int]()
    server = await asyncio.start_server(endless(sent), "127.0.0.1", 0)
    peer = StreamPeer("g", "g", "127.0.0.1", "key", server.sockets[0].getsockname()[1])
    async with server, aiohttp.ClientSession() as session:
        follower = DemandStream(peer, session, lambda _uid, _models: None, ListenerIdentity())
        reading = asyncio.create_task(_to_the_end(follower))
        await until_async(lambda: sum(sent) > 16 << 20 or reading.done(), 60)
        assert not reading.done()  # sixteen times what ended the other
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("piece", [b"x", b": nothing\n"], ids=["a message without end", "comments"])
async def test_a_peer_that_sends_no_whole_message_is_silent(piece: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "SILENCE_SECONDS", 0.3)
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + (b"data: " if piece == b"x" else b""))
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        left.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    peer = StreamPeer("g", "g", "127.0.0.1", "key", server.sockets[0].getsockname()[1])
    async with server, aiohttp.ClientSession() as session:
        follower = DemandStream(peer, session, lambda _uid, _models: None, ListenerIdentity())
        with pytest.raises(stream.StreamBroken, match="no whole message came"):
            await asyncio.wait_for(_to_the_end(follower), 10)
        await asyncio.wait_for(left.wait(), 10)


async def test_a_long_message_in_small_reads_is_not_copied_at_each():
    allocated = 0
    begin = b'data: {"boot":"b","seq":1,"full":true,"models":{"m":{"arrivals":4}},"padding":"'
    end = b'"}\n'

    async def pieces() -> AsyncGenerator[bytes]:
        nonlocal allocated
        yield begin + b"x" * (1 << 20)
        for _ in range(1000):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            yield b"y"
            allocated += tracemalloc.get_traced_memory()[1] - before
        for at in range(len(end)):
            yield end[at : at + 1]

    @contextlib.asynccontextmanager
    async def get(_url: str, **_: Any) -> AsyncGenerator[Any]:
        yield SimpleNamespace(status=200, content=SimpleNamespace(iter_any=pieces))

    session = cast(aiohttp.ClientSession, SimpleNamespace(get=get))
    follower = DemandStream(StreamPeer("g", "g", "h", "k"), session, lambda _uid, _models: None, ListenerIdentity())
    tracemalloc.start()
    try:
        await _to_the_end(follower)
    finally:
        tracemalloc.stop()
    assert follower.demand("m").arrivals == 4
    assert allocated < 8 << 20


@pytest.mark.parametrize("kind", [DemandStream, ReplicaStream])
def test_a_whole_message_that_is_too_long_is_not_taken(kind: type[stream.Follower]):
    with pytest.raises(stream.StreamBroken, match="too long"):
        padded(kind)


@pytest.mark.parametrize("kind", [DemandStream, ReplicaStream])
def test_without_the_bound_it_is_taken(kind: type[stream.Follower], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kind, "longest", 1 << 60)
    assert padded(kind) == "b"


def padded(kind: type[stream.Follower]) -> str | None:
    """The peer's process, as heard from a message of nothing but room."""
    field = "keys" if kind is ReplicaStream else "models"
    keys = {"phase": "ready", "engineBoot": "b"} if kind is ReplicaStream else {}
    message = {"boot": "b", "seq": 1, "full": True, field: keys, "padding": "x" * (16 << 20)}
    follower = cast(Any, kind)(StreamPeer("g", "g", "h", "k"), None, lambda *_: None, ListenerIdentity())
    follower.take(json.dumps(message).encode())
    return follower.boot


async def _to_the_end(follower: stream.Follower) -> None:
    async for _ in follower.listen():
        pass
