"""Pods and the node cache over its sockets: the stage container fetches, the agent holds, and either end may die."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from shoal.agent import cacheclient
from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import stage
from shoal.api import names, reasons
from shoal.api.cache import FetchLine, FetchRequest
from shoal.api.replica import StageProgress
from shoal.artifacts import ArtifactError, Settings
from shoal.cache.volumes import NamespaceVolumes
from tests.support.cache import Cache, Shop, running, shop_with, short_folder
from tests.support.sources import LOCAL, HubServer, model_files, write_files
from tests.support.waiting import until_async

URI = "hf://team/tiny"


@pytest.fixture
def root() -> Generator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def shop() -> Shop:
    return shop_with({URI: model_files(5000)})


def pod(folder: Path, cache: Cache, namespace: str = "a") -> StagePaths:
    """The paths of a pod whose cache volume is the namespace's folder."""
    for name in ("models", "run"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return StagePaths(
        target=folder / "models" / "model",
        secret=folder / "secret",
        progress=folder / "run" / "stage.json",
        cache=cache.folder(namespace),
    )


def progress(paths: StagePaths) -> StageProgress:
    return StageProgress.model_validate_json(paths.progress.read_bytes())


async def test_the_engine_finds_the_cached_model_where_it_always_is(root: Path, shop: Shop, tmp_path: Path) -> None:
    async with running(root, shop, "a") as cache:
        first, second = pod(tmp_path / "1", cache), pod(tmp_path / "2", cache)
        result = await stage(StageRequest(URI), first)
        again = await stage(StageRequest(URI), second)

        for paths in (first, second):
            assert {p.name: p.read_bytes() for p in paths.target.iterdir()} == model_files(5000)
            assert paths.target.resolve().is_relative_to(cache.folder("a"))
            assert progress(paths).state == "done"
        assert result.digest == again.digest
        assert result.bytes == sum(map(len, model_files(5000).values()))
        assert len(shop.downloads) == len(model_files())


async def test_the_pods_own_secret_is_what_the_source_sees(root: Path, shop: Shop, tmp_path: Path) -> None:
    shop.tokens[URI] = "right"
    async with running(root, shop, "a") as cache:
        paths = pod(tmp_path, cache)
        with pytest.raises(ArtifactError) as caught:
            await stage(StageRequest(URI), paths)
        assert caught.value.reason == progress(paths).reason == reasons.GATED
        assert not paths.target.exists()

        write_files(paths.secret, {"token": b"right"})
        await stage(StageRequest(URI), paths)
        assert paths.target.is_dir()


async def test_a_digest_that_is_not_the_models_is_refused(root: Path, shop: Shop, tmp_path: Path) -> None:
    async with running(root, shop, "a") as cache:
        paths = pod(tmp_path, cache)
        result = await stage(StageRequest(URI), paths)
        assert (await stage(StageRequest(URI, result.digest), pod(tmp_path / "2", cache))).digest == result.digest
        with pytest.raises(ArtifactError) as caught:
            await stage(StageRequest(URI, "sha256:" + "0" * 64), pod(tmp_path / "3", cache))
        assert caught.value.reason == reasons.DIGEST_MISMATCH


async def test_a_source_that_is_no_model_says_what_it_lacks(root: Path, shop: Shop, tmp_path: Path) -> None:
    del shop.models[URI]["config.json"]
    async with running(root, shop, "a") as cache:
        with pytest.raises(ArtifactError) as caught:
            await stage(StageRequest(URI), pod(tmp_path, cache))
    assert caught.value.reason == reasons.SOURCE_INVALID
    assert "no config.json" in str(caught.value)


async def test_files_of_the_image_need_no_cache(root: Path, shop: Shop, tmp_path: Path) -> None:
    model = write_files(tmp_path / "tiny", model_files())
    async with running(root, shop, "a") as cache:
        paths = pod(tmp_path, cache)
        await stage(StageRequest(f"file://{model}", settings=Settings(network=LOCAL)), paths)
        assert paths.target.is_dir()
        assert not paths.target.is_symlink()
        assert not paths.cache_model.exists()


async def test_a_cache_that_is_killed_while_it_fetches_goes_on_after_its_restart(
    root: Path, shop: Shop, tmp_path: Path
) -> None:
    shop.gate = asyncio.Event()
    async with running(root, shop, "a") as cache:
        paths = pod(tmp_path, cache)
        staging = asyncio.create_task(stage(StageRequest(URI), paths))
        await until_async(lambda: shop.arrived > 0 and paths.progress.exists() and progress(paths).bytes_done > 0)
    arrived = shop.arrived
    assert not staging.done()
    shop.gate.set()
    async with running(root, shop, "a") as cache:
        result = await staging
        assert 0 < arrived < shop.arrived == result.bytes, "it went on where it was"
        assert paths.target.is_dir()


@pytest.mark.parametrize("emptied", ["namespaces", "namespaces/a", f"namespaces/a/{names.CACHE_SOCKET}"])
async def test_a_daemon_whose_folder_was_emptied_ends_and_its_successor_serves(
    root: Path, shop: Shop, tmp_path: Path, emptied: str
) -> None:
    async with running(root, shop, "a") as cache:
        await stage(StageRequest(URI), pod(tmp_path / "1", cache))
        client: Any = SimpleNamespace(spaces=lambda *_: (None,))
        volumes = NamespaceVolumes(client, cache.disk, cache.index, cache.server, 0)
        await volumes._settle({"a"})  # pyright: ignore[reportPrivateUsage]
        (shutil.rmtree if (root / emptied).is_dir() else os.unlink)(root / emptied)
        with pytest.raises(FileNotFoundError, match="the cache's folder was emptied: the sockets of a are gone"):
            await volumes._settle({"a"})  # pyright: ignore[reportPrivateUsage]
    async with running(root, shop, "a") as cache:
        await stage(StageRequest(URI), pod(tmp_path / "2", cache))


async def test_a_cache_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        await cacheclient.fetch(tmp_path, FetchRequest(uri=URI), lambda _: None, timeout=0.3)
    assert caught.value.reason == reasons.CACHE_UNAVAILABLE
    assert reasons.CACHE_UNAVAILABLE in reasons.STAGE_REASONS
    assert str(tmp_path / names.CACHE_SOCKET) in str(caught.value)
    assert "DaemonSet shoal-cache" in str(caught.value)


async def test_an_agent_holds_its_model_also_through_a_restart_of_the_cache(
    root: Path, shop: Shop, tmp_path: Path
) -> None:
    async with running(root, shop, "a") as cache:
        paths = pod(tmp_path, cache)
        holding = asyncio.create_task(cacheclient.hold(cache.folder("a"), paths.cache_model))
        await stage(StageRequest(URI), paths)
        await until_async(lambda: cache.index.holds == 1)
        assert cache.index.held_in("a")
        assert not cache.index.held_in("b")
        assert [c.pinned for c in cache.index.candidates()] == [True]
    async with running(root, shop, "a") as cache:
        assert [c.pinned for c in cache.index.candidates()] == [False]
        await until_async(lambda: cache.index.holds == 1)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await until_async(lambda: cache.index.holds == 0)


async def test_a_model_of_another_namespace_cannot_be_held_or_seen(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a", "b") as cache:
        done = await cache.fetch("a", URI)
        for namespace, status in (("a", 200), ("b", 404)):
            connector = aiohttp.UnixConnector(str(cache.folder(namespace) / names.CACHE_SOCKET))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get("http://cache/v1/hold", params={"model": done.model}) as response,
            ):
                assert response.status == status


async def test_a_malformed_request_is_answered_without_its_secrets(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        connector = aiohttp.UnixConnector(str(cache.folder("a") / names.CACHE_SOCKET))
        body = json.dumps({"uri": "", "credentials": {"token": ["hunter2"]}})
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post("http://cache/v1/fetch", data=body) as response,
        ):
            text = await response.text()
            assert response.status == 400
            assert "uri" in text
            assert "hunter2" not in text
    assert "hunter2" not in repr(FetchRequest(uri=URI, credentials={"token": "hunter2"}))


async def test_a_pod_that_goes_while_it_waits_ends_the_fetch(root: Path, shop: Shop) -> None:
    shop.gate = asyncio.Event()
    async with running(root, shop, "a") as cache:
        lines: list[FetchLine] = []
        asking = asyncio.create_task(cacheclient.fetch(cache.folder("a"), FetchRequest(uri=URI), lines.append))
        await until_async(lambda: shop.arrived > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until_async(lambda: cache.fetcher.under_way == 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
async def test_a_pod_reaches_the_cache_over_a_read_only_mount_as_any_user(root: Path, shop: Shop) -> None:
    """As a kubelet mounts the volume: in a mount and network namespace of its own, read-only, with the pod's user."""
    async with running(root, shop, "a", "b") as cache:
        await asyncio.to_thread(root.chmod, 0o755)
        await cache.fetch("b", URI)
        given = await cache.fetch("a", URI)
        script = f"""
import asyncio, os, sys
from pathlib import Path
from shoal.agent import cacheclient
from shoal.api.cache import FetchRequest
for what in (lambda: Path("/mnt/x").write_text(""), lambda: Path("/mnt/models/{given.model}/config.json").open("a"),
             lambda: Path("/mnt/{names.CACHE_SOCKET}").unlink(), lambda: os.chown("/mnt", 0, 65532)):
    try: what()
    except OSError as error: print(error.strerror)
os.setgroups([]); os.setgid(65532); os.setuid(65532)
async def main():
    done = await cacheclient.fetch(Path("/mnt"), FetchRequest(uri="{URI}"), lambda _: None, timeout=5)
    print((Path("/mnt") / done.path / "config.json").read_text())
    print(sorted(p.name for p in Path("/mnt").rglob("*")))
asyncio.run(main())
"""
        mount = f"mount --bind {cache.folder('a')} /mnt && mount -o remount,bind,ro /mnt && exec {sys.executable} -"
        process = await asyncio.create_subprocess_exec(
            "unshare", "--mount", "--net", "sh", "-c", mount,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(script.encode()), 60)
        lines = out.decode().splitlines()
        # Even root may not, nor a kubelet's chgrp for fsGroup.
        assert lines[:4] == ["Read-only file system"] * 4, out.decode()
        assert lines[4] == model_files()["config.json"].decode()
        assert lines[5] == str(sorted(["models", names.CACHE_SOCKET, *model_files(), given.model]))


@pytest.mark.skipif(os.geteuid() != 0, reason="the daemon's user is root")
async def test_the_daemon_needs_no_capability_and_may_be_killed(root: Path) -> None:
    """As the chart runs it: user 0 with every capability dropped. A node's reset is no more than SIGKILL."""
    hub = HubServer(model_files(5000))
    bare = ["setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    socket = root / "node" / "namespaces" / "a" / names.CACHE_SOCKET
    async with TestServer(hub.app()) as server:
        endpoint = str(server.make_url("")).rstrip("/")
        command = [*bare, sys.executable, "-m", "tests.bench.cache_process", str(root / "node"), endpoint, "a"]
        for fetched in (True, False):
            process = await asyncio.create_subprocess_exec(*command)
            try:
                done = await cacheclient.fetch(socket.parent, FetchRequest(uri=URI), lambda _: None, timeout=60)
                status = await asyncio.to_thread(Path(f"/proc/{process.pid}/status").read_text)
                assert "CapEff:\t0000000000000000" in status
                assert bool(done.fetched_bytes) is fetched
            finally:
                process.kill()
                await process.wait()
