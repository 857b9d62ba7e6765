"""Staging of adapters by an agent: what arrives, from where, and what each failure says and leaves."""

import asyncio
import errno
import gzip
import json
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from shoal.agent.stage import adapter as staging
from shoal.agent.stage.adapter import stage_adapter
from shoal.api import reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.api.adapters import AdapterSettings, AdapterWanted
from shoal.api.artifact import LayerWidths
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, adapter, archive, open_source
from shoal.engine.sglang.pool import RULES
from tests.support.adapters import ALL, make_adapter
from tests.support.cache import Shop, running, shop_with, short_folder
from tests.support.flaky import Flaky
from tests.support.s3 import S3, s3_server
from tests.support.slowdisk import SlowDisk
from tests.support.slowhub import SlowHub
from tests.support.sources import LOCAL, HubServer, safetensors, tar_of, write_files
from tests.support.waiting import until_async

QUICK = Settings(network=LOCAL, pause_seconds=0.001)
POOL = AdapterSettings(
    pool="chat/tiny",
    slots=4,
    cached=8,
    max_rank=16,
    target_modules=ALL,
    max_bytes=1 << 20,
    credentials=("s3://models/", "s3://models/private/"),
    widths=LayerWidths(layers=2, hidden=64, query=64, key=32, feed_forward=128),
    vocabulary=512,
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BESIDE = {"README.md": b"#", "tokenizer.json": b"{}", "checkpoint-5/adapter_model.safetensors": safetensors()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return content(make_adapter(tmp_path_factory.mktemp("adapter"), seed=3))


@pytest.fixture(scope="module")
def s3(files: dict[str, bytes]) -> Generator[S3]:
    with s3_server() as server:
        server.put("plain", files | BESIDE)
        server.put("private", files)
        server.put("packed", {"a.tar.gz": tar_of({f"v1/{name}": body for name, body in files.items()})})
        yield server


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def revision(uri: str, credentials: StoreCredentials | None = None, settings: Settings = QUICK) -> str:
    async with open_source(uri, credentials or StoreCredentials(), settings) as source:
        return (await source.manifest()).digest


def wanted(uri: str, digest: str) -> AdapterWanted:
    return AdapterWanted(name=f"chat.a@{digest.removeprefix('sha256:')[:12]}", revision=digest, uri=uri)


async def staged(
    adapters: Path, uri: str, digest: str | None = None, *, pool: AdapterSettings = POOL, **more: object
) -> AdapterFacts:
    asked = wanted(uri, digest or await revision(uri))
    options = {"rules": RULES, "secrets": adapters.parent / "secrets", "sources": QUICK} | more
    return await stage_adapter(asked, adapters / asked.name, pool, **options)  # pyright: ignore[reportArgumentType]


async def refused(adapters: Path, uri: str, digest: str | None = None, **more: object) -> ArtifactError:
    before = names_in(adapters)
    with pytest.raises(ArtifactError) as caught:
        await staged(adapters, uri, digest, **more)  # pyright: ignore[reportArgumentType]
    assert caught.value.reason in reasons.ADAPTER_REASONS
    assert names_in(adapters) == before, "nothing is left"
    return caught.value


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only(adapters: Path) -> Path:
    (folder,) = adapters.iterdir()
    return folder


def secret(adapters: Path, place: int, values: dict[str, bytes]) -> None:
    write_files(adapters.parent / "secrets" / str(place), values)


# --- what arrives ---------------------------------------------------------------------------------------------------


async def test_an_engine_sees_the_adapters_own_files_and_no_others(
    tmp_path: Path, adapters: Path, files: dict[str, bytes]
):
    source = write_files(tmp_path / "v1", files | BESIDE)
    facts = await staged(adapters, f"file://{source}")
    assert content(only(adapters)) == files
    assert (facts.rank, facts.size_bytes) == (8, len(files[WEIGHTS]))
    for path in only(adapters).iterdir():
        assert path.stat().st_mode & 0o004, "the engine runs as another user"


async def test_what_is_there_already_asks_no_source(tmp_path: Path, adapters: Path, files: dict[str, bytes]):
    source = write_files(tmp_path / "v1", files)
    uri = f"file://{source}"
    digest = await revision(uri)
    first = await staged(adapters, uri, digest)
    shutil.rmtree(source)
    assert await staged(adapters, uri, digest) == first


async def test_what_is_there_already_is_checked_again(tmp_path: Path, adapters: Path, files: dict[str, bytes]):
    uri = f"file://{write_files(tmp_path / 'v1', files)}"
    await staged(adapters, uri)
    (only(adapters) / WEIGHTS).write_bytes(files[WEIGHTS][:-1])
    assert (await refused(adapters, uri)).reason == reasons.CORRUPT


async def test_a_bucket_opens_with_the_pools_credentials(adapters: Path, s3: S3, files: dict[str, bytes]):
    values = s3.secret()
    secret(adapters, 0, values)
    given = StoreCredentials({name: value.decode() for name, value in values.items()}, given=True)
    digest = await revision("s3://models/plain", given)
    await staged(adapters, "s3://models/plain", digest)
    assert content(only(adapters)) == files


async def test_the_longest_prefix_says_which_secret(adapters: Path, s3: S3):
    values = s3.secret()
    given = StoreCredentials({name: value.decode() for name, value in values.items()}, given=True)
    digest = await revision("s3://models/private", given)
    secret(adapters, 0, values)
    secret(adapters, 1, s3.secret(s3.user("nobody", "s3:ListBucket")))
    found = await refused(adapters, "s3://models/private/", digest)
    assert found.reason == reasons.GATED
    assert "refuses the pool's credentials" in str(found)
    secret(adapters, 1, values)
    await staged(adapters, "s3://models/private/", digest)


async def test_an_archive_is_unpacked_and_its_wrapping_left_out(adapters: Path, s3: S3, files: dict[str, bytes]):
    secret(adapters, 0, s3.secret())
    given = StoreCredentials({name: value.decode() for name, value in s3.secret().items()}, given=True)
    await staged(adapters, "s3://models/packed/a.tar.gz", await revision("s3://models/packed/a.tar.gz", given))
    assert content(only(adapters)) == files


# --- what is refused ------------------------------------------------------------------------------------------------


async def test_a_source_that_changed_is_not_taken(tmp_path: Path, adapters: Path, files: dict[str, bytes]):
    source = write_files(tmp_path / "v1", files)
    uri = f"file://{source}"
    digest = await revision(uri)
    write_files(source, content(make_adapter(tmp_path / "v2", seed=4)))
    found = await refused(adapters, uri, digest)
    assert found.reason == reasons.SOURCE_CHANGED
    assert str(found).startswith(f"{uri} is not what it was when it was read: its manifest has digest sha256:")
    assert "Publish another version under another address" in str(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({CONFIG: None}, "has no adapter_config.json (found: adapter_model.safetensors)"),
        ({WEIGHTS: None}, "has no adapter_model.safetensors"),
        ({WEIGHTS: None, "adapter_model.bin": b"x"}, "its weights are a pickle (adapter_model.bin)"),
        ({CONFIG: b"{"}, "adapter_config.json is not JSON"),
        ({CONFIG: b"[]"}, "adapter_config.json is not a JSON object"),
        ({CONFIG: b" " * (5 << 20)}, "which no config has"),
        ({WEIGHTS: b"no"}, "is not a whole safetensors file"),
        ({WEIGHTS: b"\x08\0\0\0\0\0\0\0notjson!"}, "has a header that is not that of a safetensors file"),
        ({WEIGHTS: b"\0\0\0\x04\0\0\0\0" + bytes(1 << 26)}, "has a header of 64.0 MiB, which no adapter has"),
        ({CONFIG: None, WEIGHTS: None, f"v1/{CONFIG}": b"{}"}, "v1/adapter_config.json is further down"),
    ],
)
async def test_files_that_are_no_adapter_say_what_is_missing(
    tmp_path: Path, adapters: Path, files: dict[str, bytes], change: dict[str, bytes | None], said: str
):
    there = {name: body for name, body in (files | change).items() if body is not None}
    pool = POOL.model_copy(update={"max_bytes": 1 << 30})
    found = await refused(adapters, f"file://{write_files(tmp_path / 'v1', there)}", pool=pool)
    assert found.reason == reasons.CORRUPT
    assert said in str(found)


async def test_a_truncated_file_is_corrupt(tmp_path: Path, adapters: Path, files: dict[str, bytes]):
    source = write_files(tmp_path / "v1", files | {WEIGHTS: files[WEIGHTS][:-4]})
    found = await refused(adapters, f"file://{source}")
    assert found.reason == reasons.CORRUPT
    assert f"has {len(files[WEIGHTS]) - 4} bytes where its header promises {len(files[WEIGHTS])}" in str(found)


@pytest.mark.parametrize(
    ("pool", "reason", "said"),
    [
        ({"max_rank": 4}, reasons.RANK_TOO_HIGH, "8 > 4 of pool chat/tiny"),
        ({"target_modules": ("q_proj", "o_proj")}, reasons.MODULES_NOT_IN_POOL, "down_proj, gate_proj, up_proj"),
        ({"widths": LayerWidths(layers=2, hidden=128, query=64, key=32, feed_forward=128)}, reasons.BASE_MISMATCH, ""),
    ],
)
async def test_what_does_not_go_with_the_pool_never_gets_its_place(
    tmp_path: Path, adapters: Path, files: dict[str, bytes], pool: dict[str, object], reason: str, said: str
):
    uri = f"file://{write_files(tmp_path / 'v1', files)}"
    found = await refused(adapters, uri, pool=POOL.model_copy(update=pool))
    assert found.reason == reason
    assert said in str(found)


async def test_what_is_too_large_is_not_even_fetched(adapters: Path, files: dict[str, bytes]):
    async with hub(files) as (server, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        pool = POOL.model_copy(update={"max_bytes": 1000})
        found = await refused(adapters, "hf://team/tiny", digest, pool=pool, sources=settings)
        assert found.reason == reasons.TOO_LARGE
        assert server.fetched == []


async def test_an_archive_that_unpacks_to_more_than_the_folder_holds_is_stopped(
    tmp_path: Path, adapters: Path, s3: S3, files: dict[str, bytes]
):
    bomb = tar_of(files | {WEIGHTS: bytes(4 << 20)})
    assert len(bomb) < POOL.max_bytes
    s3.put("bomb", {"a.tar.gz": bomb})
    secret(adapters, 0, s3.secret())
    given = StoreCredentials({name: value.decode() for name, value in s3.secret().items()}, given=True)
    digest = await revision("s3://models/bomb/a.tar.gz", given)
    found = await refused(adapters, "s3://models/bomb/a.tar.gz", digest)
    assert found.reason == reasons.TOO_LARGE
    assert "unpacks to more than 1.0 MiB: pack what is needed only" in str(found)


async def test_what_lies_beside_the_adapter_in_an_archive_takes_no_room(
    adapters: Path, s3: S3, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    s3.put("beside", {"a.tar.gz": tar_of({"tokenizer.json": bytes(4 << 20)} | files)})
    secret(adapters, 0, s3.secret())
    given = StoreCredentials({name: value.decode() for name, value in s3.secret().items()}, given=True)
    digest = await revision("s3://models/beside/a.tar.gz", given)
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_SKIPPED_LIMIT", 1 << 20)
        assert (await refused(adapters, "s3://models/beside/a.tar.gz", digest)).reason == reasons.TOO_LARGE
    await staged(adapters, "s3://models/beside/a.tar.gz", digest)
    assert content(only(adapters)) == files


async def test_a_full_disk_says_what_to_do(
    root: Path, adapters: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    store = shop(files)
    async with running(root, store, "a") as cache:
        found = await refused(adapters, HUB, await shop_revision(store), cache=cache.folder("a"))
    assert found.reason == reasons.DISK_FULL
    assert "lower cachedPerReplica or maxRank of the pool" in str(found)


async def test_a_source_by_which_no_change_could_be_seen_is_refused(
    tmp_path: Path, adapters: Path, files: dict[str, bytes]
):
    store = shop(files)
    store.vouched = False
    source = store.open(HUB, StoreCredentials(), QUICK)
    with pytest.raises(ArtifactError, match="no ETag, no Last-Modified") as caught:
        await adapter.read_adapter(source, await source.manifest())
    assert caught.value.reason == reasons.SOURCE_INVALID


async def test_a_broken_archive_is_told(adapters: Path, s3: S3):
    s3.put("broken", {"a.tar.gz": gzip.compress(b"no tar")})
    secret(adapters, 0, s3.secret())
    given = StoreCredentials({name: value.decode() for name, value in s3.secret().items()}, given=True)
    digest = await revision("s3://models/broken/a.tar.gz", given)
    assert (await refused(adapters, "s3://models/broken/a.tar.gz", digest)).reason == reasons.SOURCE_INVALID


async def test_a_source_that_falls_silent_is_unreachable(adapters: Path, files: dict[str, bytes]):
    async with hub(files) as (server, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        server.silent_file = WEIGHTS
        impatient = replace(settings, stall_seconds=0.2, attempts=1)
        found = await refused(adapters, "hf://team/tiny", digest, sources=impatient)
    assert found.reason == reasons.SOURCE_UNREACHABLE
    assert "did not answer in time" in str(found)


async def test_a_source_whose_connections_break_off_is_read_all_the_same(adapters: Path, files: dict[str, bytes]):
    async with hub(files) as (_, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        assert settings.hub_endpoint is not None
        async with Flaky(int(settings.hub_endpoint.rpartition(":")[2]), cut_after=20_000) as flaky:
            broken = replace(settings, hub_endpoint=f"http://{flaky.address}")
            await staged(adapters, "hf://team/tiny", digest, sources=broken)
            assert flaky.connections > 2
    assert content(only(adapters)) == files


async def test_a_gated_repository_says_where_the_token_belongs(adapters: Path, files: dict[str, bytes]):
    async with hub(files, gated=True) as (_, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        found = await refused(adapters, "hf://team/tiny", digest, sources=settings)
    assert found.reason == reasons.GATED
    assert "name the Secret in the pool's credentials" in str(found)


# --- interrupted ----------------------------------------------------------------------------------------------------


async def test_who_gives_up_in_the_middle_leaves_nothing(adapters: Path, files: dict[str, bytes]):
    slow = SlowHub(files | {WEIGHTS: files[WEIGHTS]}, repo="team/tiny", token="")
    slow.pause = 30.0
    async with serving(slow) as settings:
        digest = await revision("hf://team/tiny", settings=settings)
        task = asyncio.create_task(staged(adapters, "hf://team/tiny", digest, sources=settings))
        await until_async(lambda: slow.sent > 0)
        assert all(name.startswith(".") for name in names_in(adapters)), "no half adapter has its name"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert names_in(adapters) == []


async def test_a_file_that_is_refused_while_another_is_on_its_way_leaves_nothing(
    adapters: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
):
    """Many that fail so would fill the folder, which has a limit."""
    values = s3.secret()
    given = StoreCredentials({name: value.decode() for name, value in values.items()}, given=True)
    digest = await revision("s3://models/private", given)
    secret(adapters, 1, s3.secret(s3.user("lists", "s3:ListBucket")))
    disk = SlowDisk(monkeypatch, quick=1)
    failing = asyncio.create_task(refused(adapters, "s3://models/private/", digest))
    await until_async(disk.asked.is_set)
    asyncio.get_running_loop().call_later(0.5, disk.goes_on.set)
    assert (await failing).reason == reasons.GATED
    await until_async(disk.done.is_set)
    assert names_in(adapters) == []


async def test_who_gives_up_at_any_time_leaves_no_half_adapter(adapters: Path, files: dict[str, bytes], tmp_path: Path):
    uri = f"file://{write_files(tmp_path / 'v1', files)}"
    digest = await revision(uri)
    tries = 0
    while names_in(adapters) == []:
        task = asyncio.create_task(staged(adapters, uri, digest))
        await asyncio.sleep(tries * 0.002)
        task.cancel()
        await asyncio.wait({task})
        assert not any(name.startswith(".") for name in names_in(adapters))
        tries += 1
    assert content(only(adapters)) == files


async def test_an_agent_that_is_killed_leaves_no_half_adapter(adapters: Path, files: dict[str, bytes]):
    slow = SlowHub(files, repo="team/tiny", token="")
    slow.pause = 30.0
    async with serving(slow) as settings:
        digest = await revision("hf://team/tiny", settings=settings)
        asked = wanted("hf://team/tiny", digest)
        program = (
            "import asyncio, sys; from pathlib import Path\n"
            "from shoal.agent.stage.adapter import stage_adapter; from shoal.artifacts import Settings\n"
            "from shoal.api.adapters import AdapterSettings, AdapterWanted\n"
            "from shoal.engine.sglang.pool import RULES\n"
            "wanted, pool, folder, hub = sys.argv[1:]\n"
            "asyncio.run(stage_adapter(AdapterWanted.model_validate_json(wanted), Path(folder),\n"
            "    AdapterSettings.model_validate_json(pool), rules=RULES, sources=Settings(hub_endpoint=hub)))"
        )
        arguments = [asked.model_dump_json(), POOL.model_dump_json(), str(adapters / asked.name)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, *arguments, str(settings.hub_endpoint)
        )
        try:
            await until_async(lambda: slow.sent > 0, 60)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert all(name.startswith(".") for name in names_in(adapters))
        slow.pause = 0.0
        await staged(adapters, "hf://team/tiny", digest, sources=settings)
        assert content(adapters / asked.name) == files


# --- through the node cache -----------------------------------------------------------------------------------------


@pytest.fixture
def root() -> Generator[Path]:
    with short_folder() as folder:
        yield folder


HUB = "hf://team/tuned"


def shop(files: dict[str, bytes]) -> Shop:
    return shop_with({HUB: files | BESIDE})


async def shop_revision(shop: Shop) -> str:
    return (await shop.open(HUB, StoreCredentials(), QUICK).manifest()).digest


async def test_the_second_replica_of_a_node_takes_nothing_from_the_source(
    root: Path, adapters: Path, files: dict[str, bytes]
):
    store = shop(files)
    digest = await shop_revision(store)
    async with running(root, store, "a") as cache:
        await staged(adapters, HUB, digest, cache=cache.folder("a"))
        assert content(only(adapters)) == files
        assert sorted(store.downloads) == sorted(files), "nothing that lies beside the adapter"
        asked = store.asked
        shutil.rmtree(only(adapters))
        await staged(adapters, HUB, digest, cache=cache.folder("a"))
        assert content(only(adapters)) == files
        assert (sorted(store.downloads), store.asked) == (sorted(files), asked)


async def test_a_whole_model_and_a_part_of_the_same_source_do_not_meet(
    root: Path, adapters: Path, files: dict[str, bytes]
):
    store = shop(files)
    digest = await shop_revision(store)
    async with running(root, store, "a") as cache:
        await staged(adapters, HUB, digest, cache=cache.folder("a"))
        whole = await cache.fetch("a", HUB, manifest=digest)
        assert cache.content("a", whole) == files | BESIDE


async def test_a_cache_that_does_not_answer_is_done_without(
    tmp_path: Path, adapters: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(staging, "CACHE_TIMEOUT_SECONDS", 0.0)
    async with hub(files) as (server, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        await staged(adapters, "hf://team/tiny", digest, cache=tmp_path, sources=settings)
        assert sorted(server.fetched) == sorted(files)
    assert content(only(adapters)) == files


async def test_a_change_that_the_cache_sees_is_told_in_the_same_words(
    root: Path, adapters: Path, files: dict[str, bytes]
):
    store = shop(files)
    digest = await shop_revision(store)
    store.models[HUB] = store.models[HUB] | {CONFIG: b"{}"}
    async with running(root, store, "a") as cache:
        found = await refused(adapters, HUB, digest, cache=cache.folder("a"))
    assert found.reason == reasons.SOURCE_CHANGED
    assert f"{HUB} is not what it was when it was read: its manifest is another one" in str(found)


async def test_a_commit_that_is_gone_is_a_source_that_changed(adapters: Path, files: dict[str, bytes]):
    """The user's address names a branch, so that `no such revision` would send them looking for what is there."""
    async with hub(files) as (server, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        server.branches = {"main": "b" * 40}
        pinned = f"hf://team/tiny@{'a' * 40}"
        found = await refused(adapters, pinned, digest, sources=settings)
        assert found.reason == reasons.SOURCE_CHANGED
        assert f"team/tiny has no commit {'a' * 40} any more" in str(found)
        assert "its history was rewritten" in str(found)


async def test_a_branch_that_moved_on_is_none(adapters: Path, files: dict[str, bytes]):
    async with hub(files) as (server, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        server.branches = {"main": "b" * 40, "old": "a" * 40}
        await staged(adapters, f"hf://team/tiny@{'a' * 40}", digest, sources=settings)
        assert content(only(adapters)) == files


async def test_other_files_of_the_same_commit_are_not_taken(adapters: Path, files: dict[str, bytes], tmp_path: Path):
    async with hub(files) as (server, settings):
        digest = await revision("hf://team/tiny", settings=settings)
        server.files = content(make_adapter(tmp_path / "v2", seed=4)) | BESIDE
        found = await refused(adapters, f"hf://team/tiny@{'a' * 40}", digest, sources=settings)
        assert found.reason == reasons.SOURCE_CHANGED
        assert "its manifest has digest" in str(found)


async def test_a_cached_adapter_is_checked_too(root: Path, adapters: Path, files: dict[str, bytes]):
    said = json.loads(files[CONFIG]) | {"use_rslora": True}
    store = shop(files | {CONFIG: json.dumps(said).encode()})
    async with running(root, store, "a") as cache:
        found = await refused(adapters, HUB, await shop_revision(store), cache=cache.folder("a"))
    assert found.reason == reasons.UNSUPPORTED


# --- helpers --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(server: HubServer) -> AsyncGenerator[Settings]:
    running_server = TestServer(server.app())
    await running_server.start_server()
    try:
        yield replace(QUICK, hub_endpoint=f"http://127.0.0.1:{running_server.port}")
    finally:
        await running_server.close()


@asynccontextmanager
async def hub(files: dict[str, bytes], **more: bool) -> AsyncGenerator[tuple[HubServer, Settings]]:
    server = HubServer(files | BESIDE, **more)  # pyright: ignore[reportArgumentType]
    async with serving(server) as settings:
        yield server, settings
