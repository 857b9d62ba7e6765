"""The HTTP shell: who reaches a handler, what it may do, and what becomes of clients that are slow or gone."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest
from starlette.responses import PlainTextResponse, Response

from shoal.api.keys import Role
from shoal.ledger.service import answer_csv
from shoal.net import shell as shells
from shoal.net.asgi import CALLER, DISCONNECT, GONE
from shoal.net.errors import Problem
from shoal.net.hub import EventStream, StreamHub
from shoal.net.roles import RoleGuard, given_key, role_of
from shoal.net.shell import ANY, GET, BodyStream, Shell, ShellRequest, Write, answer_json
from shoal.net.tls import TLSCredentials
from tests.support.shells import call, served_shell

KEYS: dict[Role, tuple[str, ...]] = {"gateway": ("g-new", "g-old"), "operator": ("o",), "billing": ("b",)}


def keys_of(role: Role) -> tuple[str, ...]:
    return KEYS.get(role, ())


async def ok(_: ShellRequest) -> Response:
    return PlainTextResponse("ok")


# --- routes -----------------------------------------------------------------------------------------------------------


async def test_a_path_and_a_method_find_their_handler() -> None:
    shell = Shell("the test")

    async def named(request: ShellRequest) -> Response:
        return PlainTextResponse(f"{request.method} {request.path_params['namespace']}/{request.path_params['name']}")

    shell.route(GET, "/v1/things/{namespace}/{name}", named)
    shell.route(("POST",), "/v1/things/{namespace}/{name}", named)
    shell.route(ANY, "/any", ok)
    with pytest.raises(ValueError, match="has a handler"):
        shell.route(("POST",), "/v1/things/{namespace}/{name}", ok)

    assert (await call(shell, "/v1/things/a/b")).body == b"GET a/b"
    assert (await call(shell, "/v1/things/a/b", "POST")).body == b"POST a/b"
    refused = await call(shell, "/v1/things/a/b", "DELETE")
    assert (refused.status, refused.headers["allow"], refused.body) == (
        405,
        "GET, HEAD, POST",
        b"405: Method Not Allowed",
    )
    assert (await call(shell, "/any", "PATCH")).status == 200
    for path in ("/", "/v1/things/a", "/v1/things/a/b/", "/v1/things/a/b/c", "//v1/things/a/b", "/any/"):
        unknown = await call(shell, path)
        assert (unknown.status, unknown.body) == (404, b"404: Not Found"), path


async def test_a_shells_guard_comes_before_its_paths_are_known() -> None:
    async def nobody(_: ShellRequest) -> None:
        raise Problem(401, "who are you?", {"www-authenticate": "Bearer"})

    shell = Shell("the test", guard=nobody)
    shell.route(GET, "/there", ok)
    for path in ("/there", "/nowhere"):
        refused = await call(shell, path)
        assert (refused.status, refused.message, refused.headers["www-authenticate"]) == (401, "who are you?", "Bearer")


# --- handlers ---------------------------------------------------------------------------------------------------------


async def test_what_a_handler_may_do() -> None:
    class Away(Exception): ...

    heard: list[tuple[str, int]] = []
    shell = Shell("the test", errors={Away: lambda error: Problem(503, f"away: {error}", {"retry-after": "1"})})
    shell.answered = lambda request, _, status: heard.append((request.scope["path"], status))

    async def table(request: ShellRequest) -> Response:
        return answer_csv(("a", "b"), [(1, 'x"y'), (None, request.one("word"))])

    async def parts(_: ShellRequest) -> Response:
        async def work(write: Write) -> None:
            await write(b"one ")
            await write(b"two")

        return BodyStream(work, {"content-type": "text/plain"})

    async def refuses(_: ShellRequest) -> Response:
        raise Problem(400, "say which month")

    async def waits(_: ShellRequest) -> Response:
        raise Away("the database")

    async def fails(_: ShellRequest) -> Response:
        raise ZeroDivisionError("a secret that must not get out")

    for path, handler in (("/t", table), ("/p", parts), ("/r", refuses), ("/w", waits), ("/f", fails)):
        shell.route(GET, path, handler)

    found = await call(shell, "/t", query=b"word=%C3%A4")
    assert (found.status, found.body) == (200, 'a,b\r\n1,"x""y"\r\n,ä\r\n'.encode())
    assert found.headers["content-type"] == "text/csv; charset=utf-8"
    twice = await call(shell, "/t", query=b"word=1&word=2")
    assert (twice.status, twice.message) == (400, "word is given 2 times; once is enough")
    assert (await call(shell, "/t", query=b"\xff")).message == "the query string is not valid"
    assert (await call(shell, "/t", query=b"&".join(b"a=1" for _ in range(101)))).status == 400
    streamed = await call(shell, "/p")
    assert (streamed.status, streamed.body, streamed.whole, "content-length" in streamed.headers) == (
        200,
        b"one two",
        True,
        False,
    )
    assert (await call(shell, "/r")).message == "say which month"
    away = await call(shell, "/w")
    assert (away.status, away.message, away.headers["retry-after"]) == (503, "away: the database", "1")
    failed = await call(shell, "/f")
    assert (failed.status, failed.message) == (500, "the test failed at this call; its log says why")
    assert heard == [
        ("/t", 200),
        ("/t", 400),
        ("/t", 400),
        ("/t", 400),
        ("/p", 200),
        ("/r", 400),
        ("/w", 503),
        ("/f", 500),
    ]


async def test_a_body_that_breaks_off_is_not_ended_as_if_it_were_whole() -> None:
    async def broken(request: ShellRequest) -> Response:
        async def work(write: Write) -> None:
            if request.first("late"):
                await write(b"half")
            raise ZeroDivisionError

        return BodyStream(work, {})

    shell = Shell("the test")
    shell.route(GET, "/", broken)
    with pytest.raises(ZeroDivisionError):
        await call(shell, "/", query=b"late=1")
    assert (await call(shell, "/")).status == 500


# --- bodies and slow clients ------------------------------------------------------------------------------------------


async def test_bodies_are_bounded_in_bytes() -> None:
    async def length(request: ShellRequest) -> Response:
        return answer_json(len(await request.read(10, advice=": send less")))

    shell = Shell("the test")
    shell.route(("POST",), "/", length)
    assert (await call(shell, "/", "POST", body=(b"12345", b"67890"))).body == b"10"
    told = await call(shell, "/", "POST", content_length="11")
    assert (told.status, told.message) == (413, "the body is larger than 10 bytes: send less")
    assert (await call(shell, "/", "POST", body=(b"12345", b"678901"))).status == 413
    assert (await call(shell, "/", "POST", body=(b"12345", b"678901"), content_length="3")).status == 413
    assert (await call(shell, "/", "POST", body=())).status == 0, "a client that has gone is not answered"


async def test_a_body_that_dribbles_in_is_given_up() -> None:
    async def length(request: ShellRequest) -> Response:
        return answer_json(len(await request.read(1000, 0.2)))

    shell = Shell("the test")
    shell.route(("POST",), "/", length)
    async with served_shell(shell) as server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"x")
        received = await reader.read()  # to the end: the connection is closed
        assert received.startswith(b"HTTP/1.1 408")
        assert b"the body did not arrive within 0.2 s" in received
        writer.close()


async def test_a_client_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "WRITE_SECONDS", 0.05)
    shell = Shell("the test")
    shell.route(GET, "/", ok)
    async with asyncio.timeout(5):
        assert (await call(shell, "/", stuck=True)).status == 0


async def test_work_for_a_client_that_goes_is_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def long() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def waits(request: ShellRequest) -> Response:
        await request.while_connected(long())
        return PlainTextResponse("never")

    async def quick(request: ShellRequest) -> Response:
        return PlainTextResponse(await request.while_connected(asyncio.sleep(0, "done")))

    shell = Shell("the test")
    shell.route(GET, "/", waits)
    shell.route(GET, "/quick", quick)
    async with served_shell(shell) as server, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        writer.close()
        await ended.wait()
        url = f"http://127.0.0.1:{server.port}/quick"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert await answer.text() == "done"
    begun.clear()
    assert (await call(shell, "/", more={DISCONNECT: GONE})).status == 0
    assert not begun.is_set()


async def test_a_stop_cancels_work_too() -> None:
    ended = asyncio.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def waits(request: ShellRequest) -> Response:
        await request.while_connected(long())
        return PlainTextResponse("never")

    shell = Shell("the test")
    shell.route(GET, "/", waits)
    task = asyncio.create_task(call(shell, "/"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# --- events -----------------------------------------------------------------------------------------------------------


def telling(hub: StreamHub, seconds: float = 60.0, during: Callable[[], Any] = contextlib.nullcontext) -> Shell:
    async def events(request: ShellRequest) -> Response:
        return EventStream(hub, request.caller, seconds, during())

    shell = Shell("the test")
    shell.route(GET, "/", events)
    return shell


async def test_a_stream_is_the_full_state_then_changes_then_its_end() -> None:
    hub, told = StreamHub("keys", lambda: b'{"a":1}', "boot"), list[str]()

    @contextlib.contextmanager
    def during():
        told.append("opened")
        yield
        told.append("closed")

    task = asyncio.create_task(call(telling(hub, 0.05, during), "/"))
    await asyncio.sleep(0.08)
    hub.publish(b'{"a":2}')
    await asyncio.sleep(0.01)
    assert (hub.readers, told) == (1, ["opened"])
    hub.close()
    answer = await task
    assert (answer.status, answer.whole, hub.readers, told) == (200, True, 0, ["opened", "closed"])
    assert answer.headers == {"content-type": "text/event-stream", "cache-control": "no-store"}
    assert answer.body.split(b"\n\n")[:3] == [
        b'data: {"boot":"boot","seq":0,"full":true,"keys":{"a":1}}',
        b'data: {"boot":"boot","seq":0}',
        b'data: {"boot":"boot","seq":1,"keys":{"a":2}}',
    ]


async def test_readers_come_back_to_the_full_state_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = StreamHub("keys", lambda: b"{}", "boot")
    async with served_shell(telling(hub)) as server, aiohttp.ClientSession() as session, asyncio.timeout(10):
        url = f"http://127.0.0.1:{server.port}/"
        for seq in range(2):
            async with session.get(url) as response:
                first = orjson.loads((await response.content.readline())[5:])
                assert (first["seq"], first["full"]) == (seq, True)
            while hub.readers:
                await asyncio.sleep(0.005)
            hub.publish(b"{}")
        monkeypatch.setattr("shoal.net.hub.READERS", 0)
        async with session.get(url) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "2")
            assert (await response.json())["error"]["message"] == "too many readers"
    assert (await call(telling(hub), "/", more={DISCONNECT: GONE})).status in (0, 503)


# --- roles ------------------------------------------------------------------------------------------------------------


def test_a_key_is_taken_from_the_first_place_that_has_one() -> None:
    both = {"authorization": "bearer one", "x-shoal-key": " two "}
    assert given_key(both) == "one"
    assert given_key(both, ("x-shoal-key", "authorization")) == "two"
    assert given_key({"x-shoal-key": "two"}) == ""
    assert given_key({"authorization": "Basic one", "x-shoal-key": "two"}, ("authorization", "x-shoal-key")) == "two"
    assert [role_of(given, KEYS, keys_of) for given in ("g-old", "o", "x", "")] == ["gateway", "operator", None, None]


@pytest.mark.parametrize(
    ("key", "status", "message"),
    [
        ("", 401, "a key is needed"),
        ("g", 401, "a key is needed"),
        ("g-newer", 401, "a key is needed"),
        ("ü", 401, "a key is needed"),
        ("o", 403, "the key of role operator may not do this: gateway, billing may"),
        ("b", 200, ""),
        ("g-old", 200, ""),
    ],
)
async def test_roles_by_their_keys(key: str, status: int, message: str) -> None:
    async def who(request: ShellRequest) -> Response:
        return PlainTextResponse(f"{request.caller.role} {request.caller.name[:4]} {request.caller.boot}")

    shell = Shell("the test")
    shell.route(GET, "/", who, RoleGuard(("gateway", "billing"), keys_of, "a key is needed", known=tuple(KEYS)))
    answer = await call(shell, "/", authorization=f"Bearer {key}", x_shoal_caller="gw-0" * 100, x_shoal_boot="b")
    assert answer.status == status
    if status == 200:
        assert answer.body.decode().endswith(" gw-0 b")
    else:
        assert answer.message == message
        assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


async def test_a_key_counts_for_nothing_without_the_certificate_that_goes_with_it() -> None:
    credentials = TLSCredentials()
    shell = Shell("the test")
    shell.route(GET, "/", ok, RoleGuard(("gateway",), keys_of, "a key is needed", credentials=credentials))
    for shown, strict, status in (
        ("gateway", True, 200),
        ("operator", True, 403),
        (None, True, 403),
        ("none", True, 403),
    ):
        credentials.strict = strict
        more = {} if shown == "none" else {CALLER: shown}
        assert (await call(shell, "/", authorization="Bearer g-new", more=more)).status == status, shown
    credentials.strict = False
    assert (await call(shell, "/", authorization="Bearer g-new")).status == 200, "plain HTTP, while there are old peers"
