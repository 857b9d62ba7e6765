"""Media that a gateway fetches, from hosts that mean harm. Each attack is held, and beside it works where its wall is
taken away."""

import asyncio
import base64
import contextlib
import gzip
import socket
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import ResolveResult

from shoal.core.fields.media import MOST_FETCHED, TYPES
from shoal.core.fields.remote import contactable
from shoal.gateway import mediafetch
from shoal.gateway.mediafetch import MAX_CONCURRENT, MAX_PER_TENANT, Address, MediaFetcher, MediaResolver
from shoal.net.errors import ApiError
from tests.support.hostile import listening
from tests.support.mediahost import (
    HOST,
    INSIDE,
    PNG,
    Dns,
    MediaHost,
    counter,
    endless,
    fetcher,
    telling,
    trust,
    wanted,
)

MI = 1024 * 1024
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
SECRET = "inside.example.com"
"""A name of something that is not outside."""


def nothing(_: int) -> None: ...


async def got(it: MediaFetcher, take: Callable[[int], None] = nothing, **of: Any) -> str:
    (found,) = await it.fetch("acme", [wanted(**of)], take)
    return found


async def refusal(it: MediaFetcher, take: Callable[[int], None] = nothing, **of: Any) -> str:
    with pytest.raises(ApiError) as caught:
        await got(it, take, **of)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "media_not_fetched", wanted(**of).at)
    assert "127.0.0" not in error.message
    assert HOST not in error.message
    return error.message


def outcomes(fetches: Any) -> dict[str, float]:
    (family,) = fetches.collect()
    return {one.labels["outcome"]: one.value for one in family.samples if one.name.endswith("_total")}


def sessions_with(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Sessions that are made from here on have another setting than the fetcher gives them."""
    original: Any = aiohttp.ClientSession
    monkeypatch.setattr(aiohttp, "ClientSession", lambda **given: original(**{**given, name: value}))


# --- what is fetched ------------------------------------------------------------------------------------------------


async def test_a_file_becomes_a_data_url() -> None:
    fetches, taken = counter(), list[int]()
    async with MediaHost().running() as host, fetcher(Dns({HOST: [host.at]}), fetches) as it:
        assert await got(it, taken.append, target="/a.png?sig=a%2Fb%20c") == DATA
        assert sum(taken) == len(DATA)
    (head,) = host.asked
    assert head.startswith("GET /a.png?sig=a%2Fb%20c HTTP/1.1\r\n")
    said = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head.split("\r\n")[1:] if line}
    assert said.pop("host") == HOST
    assert said.pop("connection") == "close"
    assert said == {"accept": ", ".join(TYPES["image"]), "accept-encoding": "identity", "user-agent": "shoal"}
    assert outcomes(fetches) == {"fetched": 1}


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 65_535, 65_536, 65_537, 3 * MI])
async def test_all_of_it_whatever_pieces_it_comes_in(length: int) -> None:
    body = bytes(n % 251 for n in range(length))
    async with MediaHost(telling(body)).running() as host, fetcher(Dns({HOST: [host.at]})) as it:
        found = await got(it)
        assert base64.b64decode(found.partition(",")[2], validate=True) == body


async def test_files_of_one_request_keep_their_order() -> None:
    first, second = MediaHost(telling(b"first"), names=("a.example",)), MediaHost(telling(b"2"), names=("b.example",))
    async with first.running(), second.running():
        dns = Dns({"a.example": [first.at], "b.example": [second.at]})
        async with fetcher(dns) as it:
            asked = [wanted("a.example"), wanted("b.example", number=1), wanted("a.example", number=2)]
            found = await it.fetch("acme", asked, nothing)
    assert [base64.b64decode(each.partition(",")[2]) for each in found] == [b"first", b"2", b"first"]


async def test_one_that_fails_fails_the_request_with_its_field() -> None:
    async with MediaHost().running() as host, fetcher(Dns({HOST: [host.at]})) as it:
        with pytest.raises(ApiError) as caught:
            await it.fetch("acme", [wanted(), wanted("nobody.example", number=7)], nothing)
        assert caught.value.param == "messages[0].content[7].image_url.url"
        assert await got(it) == DATA  # and leaves nothing behind


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (telling(status="404 Not Found"), "status"),
        (telling(status="503 Busy"), "status"),
        (telling(status="206 Partial"), "status"),
        (telling(status="302 Found", location="https://images.example.com/b"), "redirect"),
        (telling(kind="application/octet-stream"), "type"),
        (telling(kind="image/svg+xml"), "type"),
        (telling(kind="audio/wav"), "type"),
        (telling(kind=""), "type"),
        (telling(content_encoding="gzip"), "encoding"),
        (telling(content_encoding="identity, br"), "encoding"),
        (telling(content_length="100000"), "unreachable"),
        (telling(content_length="-1"), "unreachable"),
        (telling(b"zz", transfer_encoding="chunked", length=False), "unreachable"),
        (telling(kind="Image/PNG; charset=x"), "fetched"),
        (telling(content_encoding="identity"), "fetched"),
        (telling(length=False), "fetched"),
    ],
)
async def test_each_outcome_is_counted(answer: Any, outcome: str) -> None:
    fetches = counter()
    async with MediaHost(answer).running() as host, fetcher(Dns({HOST: [host.at]}), fetches) as it:
        if outcome == "fetched":
            await got(it)
        else:
            await refusal(it)
    assert outcomes(fetches) == {outcome: 1}


async def test_a_host_that_is_not_there() -> None:
    fetches = counter()
    async with MediaHost().running() as host:
        gone = host.at
    async with fetcher(Dns({HOST: [gone], "empty.example": []}), fetches) as it:
        assert "cannot be reached" in await refusal(it)
        assert "no address" in await refusal(it, host="nobody.example")
        assert "no address" in await refusal(it, host="empty.example")
    assert outcomes(fetches) == {"unreachable": 1, "not_found": 2}


# --- where it leads -------------------------------------------------------------------------------------------------


async def test_a_redirect_to_the_inside_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = MediaHost(telling(b"secret"), names=(SECRET,), address=INSIDE)
    evil = MediaHost(telling(status="307 Temporary", location=f"https://{SECRET}/latest/meta-data"))
    async with inside.running(), evil.running():
        dns = Dns({HOST: [evil.at], SECRET: [inside.at]})
        async with fetcher(dns) as it:
            assert "redirects" in await refusal(it)
            assert dns.asked == [HOST]
            assert inside.asked == []

        original = aiohttp.ClientSession.get

        def following(self: aiohttp.ClientSession, url: Any, *, allow_redirects: bool, **more: Any) -> Any:
            return original(self, url, allow_redirects=True, **more)

        monkeypatch.setattr(aiohttp.ClientSession, "get", following)
        async with fetcher(dns) as it:  # the address is a wall of its own
            assert "not allowed" in await refusal(it)
            assert inside.asked == []
        async with fetcher(dns, allowed=lambda _: True) as it:
            assert base64.b64decode((await got(it)).partition(",")[2]) == b"secret"


@pytest.mark.parametrize("others", [(), ("127.0.0.1",)], ids=["alone", "among others"])
async def test_a_name_with_a_private_address_is_refused(others: tuple[str, ...]) -> None:
    inside = MediaHost(telling(b"secret"), address=INSIDE)
    fetches = counter()
    async with inside.running():
        answer = [*(Address(each, inside.port) for each in others), inside.at]
        async with fetcher(Dns({HOST: answer}), fetches) as it:
            assert "the address of its host is not allowed" in await refusal(it)
        assert inside.asked == []
        async with fetcher(Dns({HOST: [inside.at]}), fetches, allowed=contactable) as it:
            assert "the address of its host is not allowed" in await refusal(it)
        assert inside.asked == []
        async with fetcher(Dns({HOST: [inside.at]}), fetches, allowed=lambda _: True) as it:
            assert base64.b64decode((await got(it)).partition(",")[2]) == b"secret"
    assert outcomes(fetches) == {"not_allowed": 2, "fetched": 1}


async def test_a_name_that_changes_after_it_was_judged_leads_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = MediaHost(telling(b"secret"), address=INSIDE)
    async with MediaHost().running() as host, inside.running():
        dns = Dns({HOST: [[host.at], [inside.at]]})
        async with fetcher(dns) as it:
            assert await got(it) == DATA
            assert dns.asked == [HOST]  # one answer, which was judged and connected to

        async def twice(self: Any, name: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
            """As one does who judges a name first, and leaves the connection to a library."""
            for each in await self._resolve(name):
                self._check(each.host)
            return [
                ResolveResult(hostname=name, host=each.host, port=each.port, family=each.family, proto=0, flags=0)
                for each in await self._resolve(name)
            ]

        monkeypatch.setattr(mediafetch._CheckedResolver, "resolve", twice)
        async with fetcher(Dns({HOST: [[host.at], [inside.at]]})) as it:  # a second wall: where it is connected to
            assert "not allowed" in await refusal(it)
        assert inside.asked == []
        monkeypatch.setattr(mediafetch._CheckedResolver, "socket", None)
        async with fetcher(Dns({HOST: [[host.at], [inside.at]]})) as it:
            assert base64.b64decode((await got(it)).partition(",")[2]) == b"secret"


async def test_an_address_in_place_of_a_name_is_judged_where_it_is_connected_to() -> None:
    async with MediaHost(address=INSIDE, names=(INSIDE,)).running() as inside, fetcher(Dns({})) as it:
        assert "not allowed" in await refusal(it, host=f"{INSIDE}:{inside.port}")
        assert inside.asked == []


async def test_a_host_proves_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = counter()
    async with MediaHost(names=("evil.com",)).running() as host:
        dns = Dns({HOST: [host.at]})
        async with fetcher(dns, fetches) as it:
            assert "certificate" in await refusal(it)
        async with fetcher(dns, fetches, trust=ssl.create_default_context()) as it:
            assert "certificate" in await refusal(it)
        assert host.asked == []
        anybody = trust()
        anybody.check_hostname = False
        async with fetcher(dns, trust=anybody) as it:
            assert await got(it) == DATA
    assert outcomes(fetches) == {"certificate": 2}


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MediaHost().running() as host, listening() as (port, began):
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        dns = Dns({HOST: [host.at]})
        async with fetcher(dns) as it:
            assert await got(it) == DATA
        assert began == []
        sessions_with(monkeypatch, "trust_env", True)
        async with fetcher(dns) as it:
            await refusal(it)
        assert set(began) == {b"C"}  # CONNECT


async def test_cookies_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MediaHost(telling(set_cookie="a=b; Secure; Path=/")).running() as host:
        async with fetcher(Dns({HOST: [host.at]})) as it:
            await got(it)
            await got(it)
        assert not any("cookie" in head.lower() for head in host.asked)
        sessions_with(monkeypatch, "cookie_jar", None)
        async with fetcher(Dns({HOST: [host.at]})) as it:
            await got(it)
            await got(it)
        assert "cookie: a=b" in host.asked[-1].lower()


# --- how much, how long, how many -----------------------------------------------------------------------------------

LARGE = {
    "no length": endless("connection: close"),
    "a small length": endless("content-length: 10"),
    "pieces": endless("transfer-encoding: chunked", piece=b"10000\r\n" + bytes(65_536) + b"\r\n"),
    "a large length": endless(f"content-length: {100 * MI}"),
}


@pytest.mark.parametrize("form", LARGE)
async def test_an_endless_file_is_not_read_beyond_its_bound(form: str) -> None:
    taken = list[int]()
    async with MediaHost(LARGE[form]).running() as host, fetcher(Dns({HOST: [host.at]}), most_bytes=MI) as it:
        if form == "a small length":
            # As many as it says; or nothing, where the rest is seen before they are read.
            with contextlib.suppress(ApiError):
                assert base64.b64decode((await got(it, taken.append)).partition(",")[2]) == bytes(10)
            assert sum(taken) < 100
        else:
            assert f"more than {MI} bytes" in await refusal(it, taken.append)
    assert sum(taken) <= MI // 3 * 4 + 100


async def test_without_the_bound_all_of_it_is_kept() -> None:
    taken = list[int]()

    async with MediaHost(telling(bytes(4 * MI))).running() as host:
        async with fetcher(Dns({HOST: [host.at]}), most_bytes=MI) as it:
            await refusal(it)
        async with fetcher(Dns({HOST: [host.at]}), most_bytes=100 * MI) as it:
            assert len(await got(it, taken.append)) == sum(taken) > 5 * MI


def test_a_file_may_be_as_large_as_one_that_is_sent() -> None:
    assert len(base64.b64encode(bytes(MOST_FETCHED))) == 8 * MI


async def test_what_a_gateway_has_no_room_for_is_not_kept() -> None:
    def full(size: int) -> None:
        raise ApiError(503, "full", "overloaded")

    fetches = counter()
    async with MediaHost().running() as host, fetcher(Dns({HOST: [host.at]}), fetches) as it:
        with pytest.raises(ApiError) as caught:
            await got(it, full)
        assert caught.value.code == "overloaded"
    assert outcomes(fetches) == {"overloaded": 1}


async def test_a_host_that_drips_is_left() -> None:
    drip = endless("content-length: 1000000", piece=b"x", pause=0.01)
    fetches = counter()
    async with MediaHost(drip).running() as host, fetcher(Dns({HOST: [host.at]}), fetches, seconds=0.5) as it:
        assert "longer than 0.5 s" in await refusal(it)
        async with asyncio.timeout(30):
            while host._tasks:
                await asyncio.sleep(0.01)
    assert outcomes(fetches) == {"too_slow": 1}


async def test_with_more_time_the_same_host_is_waited_for() -> None:
    whole = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: {len(PNG)}\r\n\r\n"
        writer.write(head.encode() + PNG[:-1])
        await whole.wait()
        writer.write(PNG[-1:])
        await writer.drain()

    async with MediaHost(slow).running() as host:
        async with fetcher(Dns({HOST: [host.at]}), seconds=0.5) as it:
            await refusal(it)
        async with fetcher(Dns({HOST: [host.at]})) as it:
            before = len(host.asked)
            fetching = asyncio.create_task(got(it))
            while len(host.asked) == before:
                await asyncio.sleep(0.01)
            whole.set()
            assert await fetching == DATA


@pytest.mark.parametrize("where", ["name", "handshake", "head"])
async def test_the_time_is_that_of_all_of_it(where: str) -> None:
    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    with socket.create_server(("127.0.0.1", 0)) as mute:  # connects, and says nothing
        async with MediaHost(never).running() as host:
            silent = Address("127.0.0.1", mute.getsockname()[1])
            dns: Any = never if where == "name" else Dns({HOST: [host.at if where == "head" else silent]})
            async with fetcher(dns, seconds=0.5) as it:
                assert "longer than" in await refusal(it)


async def test_a_compressed_file_is_refused_before_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(bytes(8 * MI))
    assert len(bomb) < 10_000
    taken = list[int]()
    async with MediaHost(telling(bomb, content_encoding="gzip")).running() as host:
        dns = Dns({HOST: [host.at]})
        async with fetcher(dns) as it:
            assert "compressed" in await refusal(it, taken.append)
        assert taken == []
        monkeypatch.setattr(mediafetch, "_IDENTITY", frozenset({"gzip"}))
        async with fetcher(dns) as it:  # nothing here unpacks
            assert len(await got(it)) < 20_000
            sessions_with(monkeypatch, "auto_decompress", True)
        async with fetcher(dns, most_bytes=100 * MI) as it:
            assert len(await got(it)) > 8 * MI


async def test_a_page_is_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MediaHost(telling(b"<html>", "text/html")).running() as host:
        dns = Dns({HOST: [host.at]})
        async with fetcher(dns) as it:
            assert "Content-Type" in await refusal(it)
        monkeypatch.setitem(TYPES, "image", ("text/html",))  # pyright: ignore[reportArgumentType]
        async with fetcher(dns) as it:
            assert (await got(it)).startswith("data:text/html;base64,")


async def test_one_tenant_takes_no_more_than_its_share() -> None:
    go = asyncio.Event()

    async def waits(writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await telling()(writer)

    async with MediaHost(waits).running() as host, fetcher(Dns({HOST: [host.at]})) as it:
        files = [wanted(number=n) for n in range(2 * MAX_PER_TENANT)]
        mine = asyncio.create_task(it.fetch("acme", files, nothing))
        while len(host.asked) < MAX_PER_TENANT:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(it.fetch("zeta", [wanted()], nothing))
        while len(host.asked) < MAX_PER_TENANT + 1:
            await asyncio.sleep(0.01)
        many = [asyncio.create_task(it.fetch(f"t{n}", files, nothing)) for n in range(MAX_CONCURRENT)]
        while len(host.asked) < MAX_CONCURRENT:
            await asyncio.sleep(0.01)
        assert len(host.asked) == MAX_CONCURRENT
        go.set()
        assert [len(each) for each in await asyncio.gather(mine, other, *many)] == [8, 1, *[8] * MAX_CONCURRENT]
        assert it._slots._tenants == {}


async def test_who_finds_no_place_is_told_to_come_again() -> None:
    async def never(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    fetches = counter()
    async with MediaHost(never).running() as host, fetcher(Dns({HOST: [host.at]}), fetches) as it:
        held = [asyncio.create_task(it.fetch("acme", [wanted()], nothing)) for _ in range(MAX_PER_TENANT)]
        while len(host.asked) < MAX_PER_TENANT:
            await asyncio.sleep(0.01)
        it._seconds = 0.2
        with pytest.raises(ApiError) as caught:
            await got(it)
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "overloaded", 2)
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert it._slots._tenants == {}
    assert outcomes(fetches) == {"overloaded": 1, "given_up": MAX_PER_TENANT}


async def test_the_gateways_own_resolver_asks_for_the_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", ("8.8.8.8", port)), (10, 1, 6, "", ("2606:4700::1111", port, 0, 0))]

    monkeypatch.setattr(mediafetch.socket, "getaddrinfo", answer)
    names = MediaResolver()
    assert await names("images.example.com") == [("8.8.8.8", 443, 2), ("2606:4700::1111", 443, 10)]
    assert asked == ["images.example.com."]
    names.close()
