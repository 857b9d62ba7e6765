"""The request log in a bucket of a real S3 server: files go there whole, and are read and deleted there."""

import asyncio
import os
from collections.abc import Generator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from shoal.gateway.settings import GatewaySettings
from shoal.requestlog.bucket import BucketDown, BucketStore
from shoal.requestlog.erase import sweep
from shoal.requestlog.logger import RequestLogger
from shoal.requestlog.store import LogFile
from tests.support.requestlog import LoggedGateway, echo, logged
from tests.support.s3 import S3, s3_server
from tests.support.scripted_engine import ScriptedEngine

URL = "s3://models/logs"


@pytest.fixture(scope="module")
def server() -> Generator[S3]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3) -> S3:
    for each in server.client.list_objects_v2(Bucket=server.bucket).get("Contents", ()):
        server.client.delete_object(Bucket=server.bucket, Key=each["Key"])
    return server


def secret(folder: Path, s3: S3, **changes: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in {**s3.secret(), **changes}.items():
        (folder / name).write_bytes(value)
    return folder


def keys_of(s3: S3) -> list[str]:
    return [each["Key"] for each in s3.client.list_objects_v2(Bucket=s3.bucket).get("Contents", ())]


async def upload(it: LoggedGateway) -> None:
    await asyncio.wrap_future(it.book.writer.close_files())
    await asyncio.to_thread(it.book._upload)


async def test_finished_files_go_to_the_bucket_and_are_read_from_there(tmp_path: Path, s3: S3):
    given = {"log_url": URL, "log_secret_dir": secret(tmp_path / "secret", s3)}
    async with logged(tmp_path, ScriptedEngine(echo), **given) as it:
        await it.ask("in the bucket")
        await upload(it)
        await it.ask("still here")
        page = await it.page()
        assert [e["request"]["messages"][0]["content"] for e in page["data"]] == ["still here", "in the bucket"]
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        (file,) = [key for key in keys_of(s3) if key.endswith(".zst")]
        assert file.startswith(f"logs/tenant=acme/date={day}/gateway-1-")
        # What came and went in the folder is not read twice.
        await upload(it)
        assert it.book.folder.size() == 0
        assert len((await it.page())["data"]) == 2


async def test_a_user_and_a_tenant_are_deleted_in_the_bucket(tmp_path: Path, s3: S3):
    key_dir = tmp_path / "log-keys"
    key_dir.mkdir()
    (key_dir / "current").write_bytes(os.urandom(32))
    given = {"log_url": URL, "log_secret_dir": secret(tmp_path / "secret", s3), "log_key_dir": key_dir}
    async with logged(tmp_path, ScriptedEngine(echo), **given) as it:
        await it.ask("one", user="u-1")
        await it.ask("two", user="u-2")
        await upload(it)
        erased = await it.book.erase("acme", "u-1", everywhere=True)
        assert (erased.entries, erased.files) == (1, 1)
        assert [e["user"] for e in (await it.page())["data"]] == ["u-2"]
        await it.book.erase("acme", None, everywhere=False)  # as another gateway asks: the folder only
        assert len((await it.page())["data"]) == 1
        await it.book.erase("acme", None, everywhere=True)
        assert (await it.page())["data"] == []
        assert keys_of(s3) == []


async def test_retention_holds_in_the_bucket(tmp_path: Path, s3: S3):
    bucket, today = BucketStore(URL, secret(tmp_path / "secret", s3)), date(2026, 11, 22)
    (tmp_path / "file").write_bytes(b"x")
    for ago in (0, 5, 9):
        day = (today - timedelta(days=ago)).isoformat()
        bucket.put(LogFile("acme", day, "gw-1-1.jsonl.zst", 0), tmp_path / "file")
        bucket.put(LogFile("gone", day, "gw-1-1.jsonl.zst", 0), tmp_path / "file")
    bucket.keep_retention("gone", 3)
    assert bucket.tenants() == ["acme", "gone"]
    assert sweep(bucket, {"acme": 7}, today) == 3
    assert [len(bucket.dates(tenant)) for tenant in ("acme", "gone")] == [2, 1]
    assert sweep(bucket, {"acme": 7}, today + timedelta(days=9)) == 3
    assert keys_of(s3) == []


async def test_a_bucket_that_refuses_is_said_and_files_wait(tmp_path: Path, s3: S3):
    folder = secret(tmp_path / "secret", s3, AWS_SECRET_ACCESS_KEY=b"wrong")
    async with logged(tmp_path, ScriptedEngine(echo), log_url=URL, log_secret_dir=folder) as it:
        await it.ask("waits")
        await upload(it)
        assert it.book.upload_failures == 1
        assert len(it.book.folder.files("acme", f"{datetime.now(UTC):%Y-%m-%d}")) == 1
        page = await it.page()
        assert len(page["data"]) == 1
        (why,) = page["unreadable"]
        assert why == (
            "the bucket of the request log refuses the credentials: "
            "check the Secret, and that it may list, read, write and delete"
        )
        secret(folder, s3)
        await upload(it)
        assert len((await it.page())["data"]) == 1


async def test_what_is_left_goes_to_the_bucket_when_the_gateway_stops(tmp_path: Path, s3: S3):
    given = {"log_url": URL, "log_secret_dir": secret(tmp_path / "secret", s3)}
    async with logged(tmp_path, ScriptedEngine(echo), **given) as it:
        await it.ask("last words")
    assert any(key.endswith(".zst") for key in keys_of(s3))


async def test_a_url_that_is_no_bucket_is_refused():
    with pytest.raises(ValueError, match="is no bucket: write s3://bucket/prefix"):
        RequestLogger(GatewaySettings(log_url="hf://owner/repo"))


def test_an_unreachable_bucket_tells_no_address(tmp_path: Path, s3: S3):
    bucket = BucketStore(URL, secret(tmp_path / "secret", s3, AWS_ENDPOINT_URL=b"http://127.0.0.1:1"))
    with pytest.raises(BucketDown) as down:
        bucket.tenants()
    assert down.value.strerror == "the bucket of the request log cannot be reached"
