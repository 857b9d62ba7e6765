"""Sources of tenants who mean harm. Each attack is held, and beside it works where its wall is taken away."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.resolver import ThreadedResolver
from aiohttp.web import Request, Response, StreamResponse

from shoal.api import reasons
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, open_source
from shoal.artifacts.connect import CheckedResolver
from shoal.artifacts.credentials import StoreCredentials as Secret
from shoal.artifacts.folder import FolderSource
from shoal.artifacts.manifest import File, require_count, sort
from shoal.artifacts.web import Web
from shoal.core.lora.format.sources import credentials_for
from shoal.core.network import PUBLIC, SourceNetwork
from tests.support.hostile import Answer, Server, endless, listening, redirecting, telling
from tests.support.sources import tar_of

BODY = tar_of({"config.json": b"{}"})
TOKEN = "s3cret-token"
QUICK = Settings(pause_seconds=0.001, attempts=2, connect_seconds=5, stall_seconds=5)
TLS = b"\x16"
"""How a handshake of TLS begins."""
ALLOWED = SourceNetwork(allowed_hosts=("127.0.0.1",))
"""What a platform says that has its mirror there."""


def web(settings: Settings, token: str | None = TOKEN) -> Web:
    return Web(settings, token, lambda url, status, _: None)


async def got(settings: Settings, url: str, token: str | None = TOKEN, limit: int = 1 << 20) -> bytes:
    opened = web(settings, token)
    await opened.open()
    try:
        return await opened.text(url, limit)
    finally:
        await opened.close()


def trust_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the platform's rules away."""
    for rule in ("redirect_problem", "address_problem", "host_problem", "folder_problem"):
        monkeypatch.setattr(SourceNetwork, rule, lambda *_: None)


async def refusal(settings: Settings, url: str) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await got(settings, url)
    return caught.value


# --- redirects ------------------------------------------------------------------------------------------------------


async def test_a_redirect_to_another_host_is_refused_and_the_token_goes_nowhere():
    async with (
        Server(telling(BODY)).running() as other,
        Server(redirecting(lambda: other.url(host="localhost"))).running() as server,
    ):
        error = await refusal(replace(QUICK, network=ALLOWED), server.url())
    assert error.reason == reasons.SOURCE_REFUSED
    assert "127.0.0.1 redirects to localhost, refused" in str(error)
    assert other.asked == []


async def test_where_the_platform_allows_the_redirect_the_token_stays_behind_all_the_same():
    named = replace(QUICK, network=replace(ALLOWED, redirect_hosts=("localhost",)))
    async with (
        Server(telling(BODY)).running() as other,
        Server(redirecting(lambda: other.url(host="localhost"))).running() as server,
    ):
        assert await got(named, server.url()) == BODY
    assert server.asked[0]["authorization"] == f"Bearer {TOKEN}"
    assert "authorization" not in other.asked[0]


async def test_another_port_of_the_same_host_gets_no_token():
    async with (
        Server(telling(BODY)).running() as other,
        Server(redirecting(other.url)).running() as server,
    ):
        assert await got(replace(QUICK, network=ALLOWED), server.url()) == BODY
    assert "authorization" not in other.asked[0]


async def test_without_the_wall_the_token_goes_along(monkeypatch: pytest.MonkeyPatch):
    request = Web._request
    monkeypatch.setattr(Web, "_request", lambda self, url, headers, token: request(self, url, headers, self._token))
    async with (
        Server(telling(BODY)).running() as other,
        Server(redirecting(other.url)).running() as server,
    ):
        assert await got(replace(QUICK, network=ALLOWED), server.url()) == BODY
    assert other.asked[0]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
        "http://[fd00:ec2::254]/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://metadata.google.internal/computeMetadata/v1/",
        "http://user@169.254.169.254/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_x",
        "//169.254.169.254/",
    ],
)
async def test_a_redirect_to_a_metadata_server_is_refused_whoever_is_trusted(location: str):
    everyone = SourceNetwork(
        allowed_hosts=("127.0.0.1", "169.254.169.254", "0.0.0.0/0", "::/0", "metadata.google.internal"),
        redirect_hosts=(
            "169.254.169.254",
            "fd00:ec2::254",
            "64:ff9b::a9fe:a9fe",
            "::ffff:169.254.169.254",
            ".internal",
        ),
        private_addresses=True,
    )
    async with Server(redirecting(location)).running() as server:
        error = await refusal(replace(QUICK, network=everyone), server.url())
    assert error.reason == reasons.SOURCE_REFUSED


async def test_redirects_end():
    server = Server(redirecting(lambda: server.url("/again")))
    async with server.running():
        error = await refusal(replace(QUICK, network=ALLOWED), server.url())
    assert "has too many redirects" in str(error)
    assert len(server.asked) == 6


async def test_without_their_bound_redirects_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.artifacts.web._REDIRECTS", 60)
    server = Server(redirecting(lambda: server.url("/again")))
    async with server.running():
        await refusal(replace(QUICK, network=ALLOWED), server.url())
    assert len(server.asked) == 61


async def test_without_the_wall_a_redirect_reaches_inside(monkeypatch: pytest.MonkeyPatch):
    trust_everybody(monkeypatch)
    async with (
        Server(telling(b"the node's keys")).running() as inside,
        Server(redirecting(lambda: inside.url(host="localhost"))).running() as server,
    ):
        assert await got(QUICK, server.url()) == b"the node's keys"


# --- names that resolve to something else ---------------------------------------------------------------------------


class Rebinding(ThreadedResolver):
    """A name of the attacker's own, public at the first look and loopback from then on."""

    looks: list[str]

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        self.looks.append(host)
        address = "93.184.215.14" if len(self.looks) == 1 else "127.0.0.1"
        row = {"hostname": host, "host": address, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
        return [row]


async def test_a_name_that_turns_into_loopback_is_not_connected_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rebinding, "looks", ["the check before"], raising=False)
    monkeypatch.setattr("shoal.artifacts.connect.ThreadedResolver", Rebinding)
    async with Server(telling(BODY)).running() as inside:
        error = await refusal(QUICK, inside.url(host="models.attacker.example"))
    assert error.reason == reasons.SOURCE_REFUSED
    assert "the pod itself" in str(error)
    assert inside.asked == []


async def test_without_the_wall_a_name_that_turns_reaches_inside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rebinding, "looks", ["the check before"], raising=False)
    monkeypatch.setattr("shoal.artifacts.connect.ThreadedResolver", Rebinding)
    monkeypatch.setattr(SourceNetwork, "address_problem", lambda *_: None)
    async with Server(telling(BODY)).running() as inside:
        assert await got(QUICK, inside.url(host="models.attacker.example")) == BODY
    assert inside.asked[0]["authorization"] == f"Bearer {TOKEN}"


async def test_of_several_addresses_the_refused_ones_are_left_out(monkeypatch: pytest.MonkeyPatch):
    async def both(self: object, host: str, port: int = 0, family: Any = 0) -> Any:
        row = {"hostname": host, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
        return [row | {"host": "10.0.0.1"}, row | {"host": "93.184.215.14"}]

    monkeypatch.setattr("shoal.artifacts.connect.ThreadedResolver.resolve", both)
    resolver = CheckedResolver(PUBLIC)
    assert [each["host"] for each in await resolver.resolve("models.example", 443)] == ["93.184.215.14"]


# --- buckets --------------------------------------------------------------------------------------------------------


def keys(endpoint: str) -> Secret:
    values = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK", "AWS_SESSION_TOKEN": TOKEN}
    return Secret(values | {"AWS_ENDPOINT_URL": endpoint}, given=True)


async def listed(endpoint: str, network: SourceNetwork) -> ArtifactError:
    async with open_source("s3://models/tiny", keys(endpoint), replace(QUICK, network=network)) as source:
        with pytest.raises(ArtifactError) as caught:
            await source.manifest()
    return caught.value


async def test_a_bucket_that_redirects_elsewhere_gets_no_keys_sent_along():
    async with (
        Server(telling(b"")).running() as other,
        Server(redirecting(lambda: other.url("/models"))).running() as server,
    ):
        error = await listed(server.url(""), ALLOWED)
    assert len(server.asked) >= 1
    assert server.asked[0]["x-amz-security-token"] == TOKEN
    assert other.asked == [], "another port of the same host is another server"
    assert error.reason == reasons.SOURCE_REFUSED


async def test_without_the_relay_the_keys_go_where_the_bucket_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.artifacts.bucket.endpoint", lambda *_: None)
    async with (
        Server(telling(b"")).running() as other,
        Server(redirecting(lambda: other.url("/models"))).running() as server,
    ):
        await listed(server.url(""), ALLOWED)
    assert other.asked[0]["x-amz-security-token"] == TOKEN


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://169.254.169.254",
        "http://[fd00:ec2::254]",
        "http://metadata.google.internal",
        "http://127.0.0.1:9",
        "http://localhost:9",
        "http://10.1.2.3:9000",
    ],
)
async def test_an_endpoint_inside_is_refused(endpoint: str):
    assert (await listed(endpoint, PUBLIC)).reason == reasons.SOURCE_REFUSED


async def test_without_the_wall_an_endpoint_inside_is_told_the_keys(monkeypatch: pytest.MonkeyPatch):
    trust_everybody(monkeypatch)
    async with Server(telling(b"")).running() as inside:
        await listed(inside.url(""), PUBLIC)
    assert inside.asked[0]["x-amz-security-token"] == TOKEN


@pytest.mark.parametrize(
    ("scheme", "values"),
    [
        ("s3", {"AWS_REGION": "x.attacker.example/#"}),
        ("s3", {"AWS_ENDPOINT_URL": "file:///etc"}),
        ("s3", {"AWS_ENDPOINT_URL": "http://user:pw@host"}),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "attacker.example/"}),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_TENANT_ID": "../x"}),
        ("gs", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"gcs_base_url": "ftp://x"}'}),
    ],
)
def test_values_of_a_secret_that_would_make_another_address_are_refused(scheme: str, values: dict[str, str]):
    with pytest.raises(ArtifactError) as caught:
        open_source(f"{scheme}://models/tiny", StoreCredentials(values, given=True), QUICK)
    assert caught.value.reason == reasons.GATED
    assert "cannot be used" in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "values"),
    [
        ("s3", {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK", "AWS_REGION": "x@127.0.0.1:PORT/#"}),
        ("az", {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=x", "AZURE_STORAGE_ACCOUNT_NAME": "127.0.0.1:PORT/"}),
    ],
)
async def test_without_the_wall_such_a_value_leads_inside(
    scheme: str, values: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shoal.artifacts.bucketkeys._VALUES", {})
    async with listening() as (port, began):
        given = StoreCredentials({key: value.replace("PORT", str(port)) for key, value in values.items()}, given=True)
        async with open_source(f"{scheme}://models/tiny", given, QUICK) as source:
            with pytest.raises(ArtifactError):
                await source.manifest()
    assert began[0] == TLS, "no relay is between: the Secret named no endpoint"


def google_key(url: str) -> StoreCredentials:
    key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return StoreCredentials({"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key)}, given=True)


async def listed_by_google(key: StoreCredentials) -> ArtifactError:
    async with open_source("gs://models/tiny", key, QUICK) as source:
        with pytest.raises(ArtifactError) as caught:
            await source.manifest()
    return caught.value


async def test_a_key_of_google_that_names_a_server_inside_is_refused():
    async with listening() as (port, began):
        for url in (f"https://127.0.0.1:{port}", "https://169.254.169.254"):
            assert (await listed_by_google(google_key(url))).reason == reasons.SOURCE_REFUSED
    assert began == []


async def test_without_the_relay_a_key_of_google_leads_inside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.artifacts.bucket.endpoint", lambda *_: None)
    async with listening() as (port, began):
        await listed_by_google(google_key(f"https://127.0.0.1:{port}"))
    assert began[0] == TLS


# --- servers that never end -----------------------------------------------------------------------------------------


async def downloaded(answer: Answer, tmp_path: Path, settings: Settings) -> ArtifactError:
    async with Server(answer).running() as server:
        source = open_source("https://host.example/x.tar", StoreCredentials(), replace(settings, network=ALLOWED))
        source._url = server.url()  # pyright: ignore[reportAttributeAccessIssue]
        async with source:
            with pytest.raises(ArtifactError) as caught:
                await source.download(File("x.tar", 1 << 20, 'etag:"v1"'), tmp_path / "x", lambda _: None)
    return caught.value


async def test_a_server_that_sends_a_byte_now_and_then_is_given_up(tmp_path: Path):
    slow = replace(QUICK, stall_seconds=0.2)
    error = await downloaded(endless(b"x", 0.02, claims=1 << 20), tmp_path, slow)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "which is too slow" in str(error)


async def waits_without_end(fetching: Coroutine[Any, Any, object], enough: asyncio.Event) -> None:
    """Whoever fetches has taken more than a wall lets pass, and goes on."""
    task = asyncio.create_task(fetching)
    waiting = asyncio.create_task(enough.wait())
    try:
        async with asyncio.timeout(60):
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not task.done()
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


def counting(enough: int) -> tuple[asyncio.Event, Callable[[int], None]]:
    """An event, set once so many bytes were sent."""
    reached, left = asyncio.Event(), enough

    def sent(count: int) -> None:
        nonlocal left
        left -= count
        if left <= 0:
            reached.set()

    return reached, sent


async def test_without_a_pace_it_is_never_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def any_pace(_settings: Settings, pieces: AsyncGenerator[bytes], _name: str) -> AsyncGenerator[bytes]:
        async for piece in pieces:
            yield piece

    monkeypatch.setattr("shoal.artifacts.ranges.paced", any_pace)
    # Ten times what comes while a server is bearable twice.
    enough, sent = counting(200)
    slow = replace(QUICK, stall_seconds=0.2)
    await waits_without_end(downloaded(endless(b"x", 0.02, claims=1 << 20, sent=sent), tmp_path, slow), enough)


async def test_an_answer_without_an_end_is_read_to_its_bound():
    async with Server(endless(bytes(1 << 16))).running() as server:
        error = await refusal(replace(QUICK, network=ALLOWED), server.url())
    assert error.reason == reasons.SOURCE_INVALID
    assert "answers with more than 1.0 MiB" in str(error)


async def test_without_the_bound_it_is_read_on_and_on():
    enough, sent = counting(32 << 20)
    async with Server(endless(bytes(1 << 16), sent=sent)).running() as server:
        fetching = got(replace(QUICK, network=ALLOWED), server.url(), limit=1 << 60)
        await waits_without_end(fetching, enough)


async def test_an_etag_without_quotes_is_no_date():
    dated = {"ETag": "5f3a91", "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
    opened = web(replace(QUICK, network=ALLOWED))
    await opened.open()
    async with Server(telling(b"x" * 1000, **dated)).running() as server:
        url, validator = server.url(), (await opened.probe(server.url())).validator
        assert validator == "etag:5f3a91"
        for start, end in ((10, 30), (0, 1000)):
            pieces = [piece async for piece in opened.stream(url, start, end, 1000, same_as=validator)]
            assert b"".join(pieces) == b"x" * (end - start)
        server.answer = telling(b"y" * 1000, **dated | {"ETag": "5f3a92"})
        for start, end in ((10, 30), (0, 1000)):
            with pytest.raises(ArtifactError, match="changed while it was being fetched"):
                await anext(opened.stream(url, start, end, 1000, same_as=validator))
    await opened.close()


async def test_a_body_longer_than_it_says_is_cut_off_where_it_should_end(tmp_path: Path):
    async with Server(endless(bytes(1 << 16), claims=1 << 20)).running() as server:
        source = open_source("https://host.example/x.tar", StoreCredentials(), replace(QUICK, network=ALLOWED))
        source._url = server.url()  # pyright: ignore[reportAttributeAccessIssue]
        async with source:
            await source.download(File("x.tar", 1 << 20, 'etag:"v1"'), tmp_path / "x", lambda _: None)
    assert (tmp_path / "x").stat().st_size == 1 << 20


def test_names_beyond_number_and_length_are_refused():
    for names in (["n" * 300], ["a/" * 600 + "x"], ["a\x1b[2J"], ["\ud800"]):
        with pytest.raises(ArtifactError) as caught:
            sort(File(name, 1, "etag:x") for name in names)
        assert caught.value.reason == reasons.SOURCE_INVALID
    with pytest.raises(ArtifactError, match="more than 20000 files"):
        require_count(20_001, "s3://models")


# --- credentials by prefix ------------------------------------------------------------------------------------------


BESIDE = [
    ("s3://adapters", "s3://adapters-of-others/a"),
    ("s3://adapters/team", "s3://adapters/team-b/a"),
    ("https://host.example", "https://host.example.attacker.example/a.tar"),
    ("https://host.example", "https://host.example@attacker.example/a.tar"),
    ("https://host.example", "https://host.example:8443/a.tar"),
    ("hf://acme", "hf://acme-evil/a"),
    ("hf://acme/model", "hf://acme/model-private"),
    ("s3://", "s3://anything/a"),
    ("https://", "https://anything/a"),
    ("https:///", "https:///a"),
    ("s", "s3://adapters/a"),
]


@pytest.mark.parametrize(("prefix", "uri"), BESIDE)
def test_credentials_are_for_what_they_name_and_nothing_beside_it(prefix: str, uri: str):
    assert credentials_for(uri, [prefix]) is None


@pytest.mark.parametrize(("prefix", "uri"), BESIDE)
def test_if_a_prefix_were_only_how_an_address_begins_it_would_open_them(
    prefix: str, uri: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shoal.core.lora.format.sources.covers", lambda prefix, uri: uri.startswith(prefix))
    assert credentials_for(uri, [prefix]) == 0


@pytest.mark.parametrize(
    ("prefix", "uri"),
    [
        ("s3://adapters", "s3://adapters/a"),
        ("s3://adapters", "s3://adapters"),
        ("s3://adapters/team/", "s3://adapters/team/a"),
        ("https://host.example/", "https://host.example/a.tar?sig=1"),
        ("https://host.example/a.tar", "https://host.example/a.tar?sig=1"),
        ("hf://acme", "hf://acme/a@main"),
        ("hf://acme/a", "hf://acme/a@main"),
    ],
)
def test_credentials_are_for_what_is_below_them(prefix: str, uri: str):
    assert credentials_for(uri, ["gs://other", prefix]) == 1


# --- volumes --------------------------------------------------------------------------------------------------------


async def test_a_link_out_of_a_volume_is_refused(tmp_path: Path):
    (tmp_path / "volume" / "model").mkdir(parents=True)
    (tmp_path / "keys").write_text("{}")
    (tmp_path / "volume" / "model" / "config.json").symlink_to(tmp_path / "keys")
    async with open_source("pvc://weights/model", StoreCredentials(), QUICK, mounted=tmp_path / "volume") as source:
        with pytest.raises(ArtifactError) as caught:
            await source.manifest()
    assert caught.value.reason == reasons.SOURCE_REFUSED
    assert "config.json is a link that leads out of the volume" in str(caught.value)


async def test_without_the_wall_a_link_gives_out_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FolderSource, "_is_inside", lambda *_: True)
    (tmp_path / "volume" / "model").mkdir(parents=True)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "config.json").write_text("the pod's keys")
    (tmp_path / "volume" / "model" / "config.json").symlink_to(tmp_path / "keys" / "config.json")
    (tmp_path / "volume" / "folder").symlink_to(tmp_path / "keys")
    for uri in ("pvc://weights/model", "pvc://weights/folder"):
        async with open_source(uri, StoreCredentials(), QUICK, mounted=tmp_path / "volume") as source:
            (file,) = (await source.manifest()).files
            assert await source.read(file, 0, 100) == b"the pod's keys"


async def test_the_folder_itself_may_not_lead_out_either(tmp_path: Path):
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "model").symlink_to("/etc")
    async with open_source("pvc://weights/model", StoreCredentials(), QUICK, mounted=tmp_path / "volume") as source:
        with pytest.raises(ArtifactError) as caught:
            await source.manifest()
    assert caught.value.reason == reasons.SOURCE_REFUSED


async def test_links_inside_a_volume_are_followed_and_circles_end(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "x").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/x")
    for name in ("a", "b"):
        (snapshot / name).symlink_to("..")
        (snapshot / f"{name}-self").symlink_to(".")
    async with open_source("pvc://weights/snapshots/main", StoreCredentials(), QUICK, mounted=tmp_path) as source:
        names = [file.name for file in (await source.manifest()).files]
    assert names == ["a/main/config.json", "b/main/config.json", "config.json"], "each way once"


async def test_file_names_no_folder_but_the_image_s_own(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for uri in (f"file://{tmp_path}", "file:///etc", "file:///proc/self", "file:///opt/shoalish"):
        async with open_source(uri, StoreCredentials(), QUICK) as source:
            with pytest.raises(ArtifactError) as caught:
                await source.manifest()
        assert caught.value.reason == reasons.SOURCE_REFUSED


async def test_without_the_wall_file_names_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trust_everybody(monkeypatch)
    (tmp_path / "config.json").write_text("the pod's keys")
    async with open_source(f"file://{tmp_path}", StoreCredentials(), QUICK) as source:
        (file,) = (await source.manifest()).files
        assert await source.read(file, 0, 100) == b"the pod's keys"


@pytest.mark.parametrize("total", ["²", "9" * 5000, "-1", "*"])
@pytest.mark.parametrize("status", [206, 416])
async def test_a_length_that_is_no_number_is_none(total: str, status: int):
    """Python takes some for digits that it cannot read, and none of more than 4,300: the error ended the agent."""

    async def answer(_: Request) -> StreamResponse:
        spanned = "bytes */" if status == 416 else "bytes 0-0/"
        return Response(status=status, body=b"x", headers={"Content-Range": f"{spanned}{total}"})

    opened = web(replace(QUICK, network=ALLOWED))
    async with Server(answer).running() as server:
        await opened.open()
        try:
            assert (await opened.probe(server.url())).size is None
        finally:
            await opened.close()
