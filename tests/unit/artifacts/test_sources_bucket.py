"""s3:// against a server that checks signatures and permissions; gs:// and az:// as far as that goes without one."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import stage
from shoal.api import reasons
from shoal.artifacts import ArtifactError, Manifest, Settings, StoreCredentials, folders, open_source
from shoal.artifacts.connect import with_public_roots
from tests.support.flaky import Flaky
from tests.support.hostile import Server
from tests.support.s3 import S3, s3_server
from tests.support.sources import LOCAL, localhost_tls, model_files, safetensors, tar_of, write_files

GOOGLE_KEY = json.dumps(
    {
        "gcs_base_url": "http://127.0.0.1:1",
        "disable_oauth": True,
        "client_email": "",
        "private_key": "s3cret",
        "private_key_id": "",
    }
)
QUICK = Settings(network=LOCAL, pause_seconds=0.001)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        server.put("llama", {**model_files(300_000), "README.md": b"#", "original/consolidated.00.pth": b"o"})
        server.put("llama-2", {"config.json": b"{}"})
        yield server


@pytest.fixture
def paths(tmp_path: Path) -> StagePaths:
    (tmp_path / "models").mkdir()
    (tmp_path / "run").mkdir()
    return StagePaths(
        target=tmp_path / "models" / "model",
        source=tmp_path / "source",
        secret=tmp_path / "secret",
        progress=tmp_path / "run" / "stage.json",
    )


def credentials(secret: dict[str, bytes]) -> StoreCredentials:
    return StoreCredentials({name: value.decode() for name, value in secret.items()}, given=True)


async def manifest_of(uri: str, secret: dict[str, bytes] | None = None, settings: Settings = QUICK) -> Manifest:
    given = StoreCredentials() if secret is None else credentials(secret)
    async with open_source(uri, given, settings) as source:
        return await source.manifest()


async def refusal(uri: str, secret: dict[str, bytes] | None = None, settings: Settings = QUICK) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await manifest_of(uri, secret, settings)
    return caught.value


async def test_what_an_engine_reads_is_staged(s3: S3, paths: StagePaths):
    write_files(paths.secret, s3.secret())
    await stage(StageRequest("s3://models/llama", settings=QUICK), paths)
    found = {p.relative_to(paths.target).as_posix(): p.read_bytes() for p in folders.regular_files(paths.target)}
    assert found == model_files(300_000)


async def test_many_ranges_at_once_make_the_same_bytes(s3: S3, tmp_path: Path):
    settings = replace(QUICK, segment_bytes=7_001, connections=5)
    came: list[int] = []
    async with open_source("s3://models/llama", credentials(s3.secret()), settings) as source:
        manifest = await source.manifest()
        file = next(file for file in manifest.files if file.name == "model.safetensors")
        await source.download(file, tmp_path / "x", came.append)
    assert (tmp_path / "x").read_bytes() == model_files(300_000)["model.safetensors"]
    assert sum(came) == file.size
    assert os.listdir(tmp_path) == ["x"]


async def test_a_prefix_is_a_folder_and_not_the_beginning_of_a_name(s3: S3):
    manifest = await manifest_of("s3://models/llama", s3.secret())
    assert [file.name for file in manifest.files] == sorted(model_files())
    assert all(file.validator.startswith("etag:") for file in manifest.files)


async def test_an_archive_in_a_bucket_is_unpacked(s3: S3, paths: StagePaths):
    s3.put("", {"packed/tiny.tar.gz": tar_of(model_files())})
    write_files(paths.secret, s3.secret())
    await stage(StageRequest("s3://models/packed/tiny.tar.gz", settings=QUICK), paths)
    assert (paths.target / "model.safetensors").read_bytes() == model_files()["model.safetensors"]


async def test_a_wrong_key_is_told_with_the_names_of_the_keys(s3: S3):
    error = await refusal("s3://models/llama", s3.secret({**s3.keys, "AWS_SECRET_ACCESS_KEY": "wr0ng"}))
    assert error.reason == reasons.GATED
    assert str(error) == (
        "s3://models/llama refuses the credentials of source.secretRef: check its keys AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, and that they may list the bucket and read its objects"
    )


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (
            400,
            "ExpiredToken",
            "says that the credentials of source.secretRef have expired: put new ones into its",
        ),
        (
            400,
            "InvalidToken",
            "refuses the credentials of source.secretRef: check its keys AWS_ACCESS_KEY_ID, AWS_SECRET",
        ),
        (
            403,
            "RequestTimeTooSkewed",
            "refuses requests of another time than its own: let a time service (NTP) set",
        ),
    ],
)
async def test_what_a_bucket_says_of_a_token_or_a_clock_is_told(status: int, code: str, message: str):
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>")

    async with Server(answer).running() as server:
        keys = {"AWS_ACCESS_KEY_ID": b"a", "AWS_SECRET_ACCESS_KEY": b"b", "AWS_SESSION_TOKEN": b"c"}
        with pytest.raises(ArtifactError) as caught:
            await manifest_of("s3://bucket/llama", {**keys, "AWS_ENDPOINT_URL": server.url("").encode()})
    assert caught.value.reason == reasons.GATED
    assert message in str(caught.value)


async def test_a_secret_without_the_keys_is_told_what_it_has():
    error = await refusal("s3://models/llama", {"token": b"s3cret", "AWS_ACCESS_KEY_ID": b"a"})
    assert error.reason == reasons.GATED
    assert str(error) == (
        "the Secret of source.secretRef has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
        "(it has: AWS_ACCESS_KEY_ID, token)"
    )


async def test_who_may_list_may_not_yet_read(s3: S3):
    lister = credentials(s3.secret(s3.user("lister", "s3:ListBucket")))
    async with open_source("s3://models/llama", lister, QUICK) as source:
        manifest = await source.manifest()
        with pytest.raises(ArtifactError, match="refuses the credentials") as caught:
            await source.authorise(manifest)
    assert caught.value.reason == reasons.GATED
    async with open_source("s3://models/llama", credentials(s3.secret()), QUICK) as source:
        await source.authorise(await source.manifest())


async def test_no_secret_means_no_identity_whatever_the_node_has(s3: S3, monkeypatch: pytest.MonkeyPatch):
    for name, value in s3.keys.items():
        monkeypatch.setenv(name, value)
    given = credentials({"AWS_ENDPOINT_URL": s3.endpoint.encode()})
    with s3.anonymous():
        async with open_source("s3://models/llama", given, QUICK) as source:
            manifest = await source.manifest()
            with pytest.raises(ArtifactError) as caught:
                await source.authorise(manifest)
    assert caught.value.reason == reasons.GATED
    assert str(caught.value) == (
        "s3://models/llama is not public: put AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY into a Secret and name it in "
        "source.secretRef (a node's own identity is never used), or name a ServiceAccount that may read it in "
        "spec.pod.serviceAccountName"
    )


async def test_a_public_bucket_needs_no_keys(s3: S3):
    s3.client.create_bucket(Bucket="public")
    s3.client.put_object(Bucket="public", Key="config.json", Body=b"{}", ACL="public-read")
    given = credentials({"AWS_ENDPOINT_URL": s3.endpoint.encode()})
    with s3.anonymous():
        async with open_source("s3://public", given, QUICK) as source:
            (file,) = (await source.manifest()).files
            assert await source.read(file, 0, 10) == b"{}"


async def test_a_bucket_or_prefix_that_is_not_there(s3: S3):
    error = await refusal("s3://modles/llama", s3.secret())
    assert error.reason == reasons.SOURCE_NOT_FOUND
    assert str(error) == "s3://modles/llama: the bucket does not exist; check source.uri"
    error = await refusal("s3://models/lama", s3.secret())
    assert error.reason == reasons.SOURCE_NOT_FOUND
    assert str(error) == "s3://models/lama has no files: check source.uri"
    error = await refusal("s3://models/lama.tar", s3.secret())
    assert str(error) == "s3://models/lama.tar: there is nothing under that name; check source.uri"


async def test_a_server_that_is_not_there_is_explained(s3: S3):
    endpoint = f"http://127.0.0.1:{unused_port()}"
    error = await refusal("s3://models/llama", s3.secret(endpoint=endpoint))
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error) == (
        "s3://models/llama cannot be reached (connection refused): check source.uri, the Secret's endpoint and region, "
        "and the chart's proxy settings"
    )


async def test_a_server_that_hangs_is_left_after_the_stall_time(s3: S3):
    settings = replace(QUICK, stall_seconds=0.2, attempts=1)
    async with Flaky(s3.port, hang_after=0) as flaky:
        error = await refusal("s3://models/llama", s3.secret(endpoint=f"http://{flaky.address}"), settings)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "no answer in time" in str(error)


async def test_a_transfer_that_breaks_goes_on_where_it_broke(s3: S3, tmp_path: Path):
    content = safetensors(6 << 20)
    s3.put("large", {"config.json": b"{}", "model.safetensors": content})
    async with Flaky(s3.port) as flaky:
        given = credentials(s3.secret(endpoint=f"http://{flaky.address}"))
        async with open_source("s3://models/large", given, replace(QUICK, connections=1)) as source:
            manifest = await source.manifest()
            flaky.cut_after = 3 << 20
            file = max(manifest.files, key=lambda file: file.size)
            before = flaky.carried
            await source.download(file, tmp_path / "x", lambda _: None)
    assert (tmp_path / "x").read_bytes() == content
    assert flaky.carried - before < 1.6 * len(content)


async def test_an_object_that_is_overwritten_meanwhile_is_not_mixed(s3: S3, tmp_path: Path):
    s3.put("moving", model_files(1000))
    async with open_source("s3://models/moving", credentials(s3.secret()), QUICK) as source:
        manifest = await source.manifest()
        s3.put("moving", {"model.safetensors": safetensors(1000)[:-1] + b"!"})
        file = next(file for file in manifest.files if file.name == "model.safetensors")
        with pytest.raises(ArtifactError) as caught:
            await source.download(file, tmp_path / "x", lambda _: None)
    assert caught.value.reason == reasons.SOURCE_CHANGED
    assert str(caught.value) == (
        "s3://models/moving changed while it was being fetched: publish another version under another prefix, and "
        "name that in source.uri"
    )


async def test_a_pinned_bucket_that_was_overwritten_is_refused(s3: S3, paths: StagePaths):
    s3.put("pinned", model_files(1000))
    write_files(paths.secret, s3.secret())
    pin = (await manifest_of("s3://models/pinned", s3.secret())).digest
    await stage(StageRequest("s3://models/pinned", manifest=pin, settings=QUICK), paths)
    s3.put("pinned", {"config.json": b'{"model_type": "other"}'})
    paths.marker.unlink()
    with pytest.raises(ArtifactError, match="is not what it was when it was pinned") as caught:
        await stage(StageRequest("s3://models/pinned", manifest=pin, settings=QUICK), paths)
    assert caught.value.reason == reasons.SOURCE_CHANGED


LISTING = """<?xml version="1.0"?><ListBucketResult><Name>m</Name><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated>
<Contents><Key>config.json</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"a"</ETag><Size>2</Size>
</Contents></ListBucketResult>"""


@pytest.fixture
async def listing(tmp_path: Path) -> AsyncGenerator[tuple[TestServer, Path]]:
    """A store on https://localhost that can only list, and the certificate of its CA."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=LISTING, content_type="application/xml")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    context, authority = localhost_tls(tmp_path)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    yield server, authority
    await server.close()


async def test_the_charts_ca_vouches_for_buckets_too(
    s3: S3, listing: tuple[TestServer, Path], monkeypatch: pytest.MonkeyPatch
):
    server, authority = listing
    secret = s3.secret(endpoint=f"https://localhost:{server.port}")
    error = await refusal("s3://m", secret)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error) == "the certificate of s3://m is not trusted: add its CA to the chart's caBundle"
    combined = with_public_roots(authority, authority.with_name("combined.crt"))
    monkeypatch.setenv("SSL_CERT_FILE", str(combined))
    assert [file.name for file in (await manifest_of("s3://m", secret)).files] == ["config.json"]


async def test_the_charts_proxy_leads_to_buckets_too(s3: S3, monkeypatch: pytest.MonkeyPatch):
    async with Flaky(s3.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
        monkeypatch.setenv("NO_PROXY", "inside.invalid")
        await refusal("s3://models/llama", s3.secret(endpoint="http://inside.invalid"))
        assert proxy.connections == 0
        await refusal("s3://models/llama", s3.secret(endpoint="http://outside.invalid"))
        assert proxy.connections > 0


@pytest.mark.parametrize(
    ("uri", "secret", "message"),
    [
        (
            "gs://b/m",
            {"token": b"x"},
            "the Secret of source.secretRef has no GOOGLE_SERVICE_ACCOUNT_KEY (it has: token)",
        ),
        (
            "az://c/m",
            {"AZURE_STORAGE_ACCOUNT_NAME": b"x", "AZURE_CLIENT_ID": b"y"},
            "the Secret of source.secretRef has no AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN, or "
            "AZURE_CLIENT_ID and AZURE_CLIENT_SECRET and AZURE_TENANT_ID (it has: AZURE_CLIENT_ID, "
            "AZURE_STORAGE_ACCOUNT_NAME)",
        ),
        (
            "az://c/m",
            {"AZURE_STORAGE_ACCOUNT_KEY": b"eA=="},
            "az://c/m needs the name of the storage account: put it into key AZURE_STORAGE_ACCOUNT_NAME of a Secret "
            "and name the Secret in source.secretRef",
        ),
        (
            "gs://b/m",
            {"GOOGLE_SERVICE_ACCOUNT_KEY": b"n0t json"},
            "the Secret of source.secretRef cannot be used for gs:// (GenericError): check the values of "
            "GOOGLE_SERVICE_ACCOUNT_KEY",
        ),
    ],
)
async def test_the_keys_of_other_stores_are_told(uri: str, secret: dict[str, bytes], message: str):
    error = await refusal(uri, secret)
    assert error.reason == reasons.GATED
    assert str(error) == message


@pytest.mark.parametrize(
    ("uri", "secret"),
    [
        ("az://c/m", {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=s3cret"}),
        ("gs://b/m", {"GOOGLE_SERVICE_ACCOUNT_KEY": GOOGLE_KEY}),
    ],
)
async def test_a_store_that_cannot_be_reached_shows_no_credentials(
    uri: str, secret: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    endpoint = {"AZURE_ENDPOINT": f"http://127.0.0.1:{unused_port()}"} if uri.startswith("az") else {}
    error = await refusal(uri, {name: value.encode() for name, value in {**secret, **endpoint}.items()})
    out = capsys.readouterr()
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "s3cret" not in str(error) + repr(error) + out.out + out.err


def test_credentials_show_no_value():
    given = StoreCredentials({"token": "s3cret"}, given=True)
    assert "s3cret" not in repr(given) + str(given)


def test_a_mounted_secret_is_read_as_a_kubelet_mounts_it(tmp_path: Path):
    write_files(tmp_path / "..2026", {"token": b"s3cret\n", "empty": b""})
    (tmp_path / "..data").symlink_to("..2026")
    for name in ("token", "empty"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert StoreCredentials.read(tmp_path).values == {"token": "s3cret"}
    assert StoreCredentials.read(tmp_path / "none") == StoreCredentials()


async def test_two_origins_vouch_for_themselves_only(s3: S3):
    ours = await manifest_of("s3://models/llama", s3.secret())
    async with Flaky(s3.port) as flaky:
        theirs = await manifest_of("s3://models/llama", s3.secret(endpoint=f"http://{flaky.address}"))
    assert ours.digest == theirs.digest
    assert ours.identity(ours.files[0]) != theirs.identity(theirs.files[0])
    again = await asyncio.wait_for(manifest_of("s3://models/llama", s3.secret()), 30)
    assert ours.identity(ours.files[0]) == again.identity(again.files[0])
