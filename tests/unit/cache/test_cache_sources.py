"""The node cache over real sources: a hub, and archives over HTTPS."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from shoal.api import reasons
from shoal.artifacts import ArtifactError, Settings, open_source
from shoal.artifacts.connect import with_public_roots
from tests.support.cache import Cache, running, short_folder
from tests.support.sources import LOCAL, ArchiveServer, HubServer, localhost_tls, model_files, safetensors, tar_of

URI = "hf://team/tiny"


@pytest.fixture
def root() -> Generator[Path]:
    with short_folder() as folder:
        yield folder


HERE = Settings(network=LOCAL)


@pytest.fixture
async def hub() -> HubServer:
    return HubServer(model_files(5000))


@pytest.fixture
async def hub_settings(hub: HubServer) -> AsyncGenerator[Settings]:
    async with TestServer(hub.app()) as server:
        yield Settings(network=LOCAL, hub_endpoint=str(server.make_url("")).rstrip("/"), pause_seconds=0.01)


@pytest.fixture
async def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[ArchiveServer, str]]:
    context, certificate = localhost_tls(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(with_public_roots(certificate, tmp_path / "ca.crt")))
    archive = ArchiveServer(tar_of({f"tiny/{name}": body for name, body in model_files(5000).items()}))
    server = TestServer(archive.app(), scheme="https")
    await server.start_server(ssl=context)
    try:
        yield archive, f"https://localhost:{server.port}/tiny.tar.gz"
    finally:
        await server.close()


async def test_a_gated_repository_is_for_those_with_a_token_though_all_may_list_it(
    root: Path, hub: HubServer, hub_settings: Settings
) -> None:
    hub.gated = True
    async with running(root, open_source, "a", "b", settings=hub_settings) as cache:
        done = await cache.fetch("a", URI, token=hub.token)
        sent = len(hub.fetched)
        assert cache.content("a", done) == model_files(5000)
        assert done.revision == "a" * 40

        for token in ("", "wrong"):
            with pytest.raises(ArtifactError) as caught:
                await cache.fetch("b", URI, token=token)
            assert caught.value.reason == reasons.GATED
        assert (await cache.fetch("b", URI, token=hub.token)).fetched_bytes == 0
        assert hub.fetched[sent:] == ["model.safetensors"], "one byte, which proves that it may be read"


async def test_a_repository_is_pinned_to_what_its_facts_were_read_of(
    root: Path, hub: HubServer, hub_settings: Settings
) -> None:
    async with running(root, open_source, "a", settings=hub_settings) as cache:
        model = cache.index.get((await cache.fetch("a", URI)).model)
        assert model is not None
        hub.files["model.safetensors"] = safetensors(6000)  # the same commit, force-pushed
        assert (await cache.fetch("a", URI, manifest=model.manifest)).fetched_bytes == 0
        cache.disk.remove_namespace("a")
        cache.disk.make_namespace("a")
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", URI, manifest=model.manifest)
        assert caught.value.reason == reasons.SOURCE_CHANGED


async def test_weights_that_arrive_wrong_twice_are_not_kept(root: Path, hub: HubServer, hub_settings: Settings) -> None:
    wrong = bytearray(model_files(5000)["model.safetensors"])
    wrong[-1] ^= 1
    hub.corrupt["model.safetensors"] = bytes(wrong)
    async with running(root, open_source, "a", settings=hub_settings) as cache:
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", URI)
        assert caught.value.reason == reasons.DIGEST_MISMATCH
        assert cache.index.models == 0

        hub.corrupt.clear()
        assert cache.content("a", await cache.fetch("a", URI)) == model_files(5000)


def bodies(archive: ArchiveServer) -> int:
    """Requests for more than the one byte by which a source is looked at."""
    return sum(wanted != "bytes=0-0" for wanted in archive.requested)


async def test_an_archive_is_unpacked_once(root: Path, archives: tuple[ArchiveServer, str]) -> None:
    archive, uri = archives
    archive.token = "right"
    async with running(root, open_source, "a", "b", settings=HERE) as cache:
        done = await cache.fetch("a", uri, token="right")
        assert cache.content("a", done) == model_files(5000), "without the folder around it"
        assert done.digest == "sha256:" + hashlib.sha256(archive.body).hexdigest()
        assert list((root / "partial").iterdir()) == []
        fetched = bodies(archive)

        assert (await cache.fetch("a", uri, token="right")).fetched_bytes == 0
        assert (await cache.fetch("b", uri, token="right")).fetched_bytes == 0
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("b", uri, token="wrong")
        assert caught.value.reason == reasons.GATED
        assert bodies(archive) == fetched
    async with running(root, open_source, "a", settings=HERE) as cache:
        await damage(cache, "config.json")
        assert cache.content("a", await cache.fetch("a", uri, token="right")) == model_files(5000)
        assert bodies(archive) > fetched


async def damage(cache: Cache, name: str) -> None:
    blob = cache.disk.blob(hashlib.sha256(model_files()[name]).hexdigest())
    blob.chmod(0o600)
    blob.write_bytes(b"x" * blob.stat().st_size)


async def test_an_archive_that_leads_out_of_its_folder_leaves_nothing(
    root: Path, archives: tuple[ArchiveServer, str]
) -> None:
    archive, uri = archives
    archive.body = tar_of({"../../escaped": b"x", **model_files()})
    async with running(root, open_source, "a", settings=HERE) as cache:
        with pytest.raises(ArtifactError) as caught:
            await cache.fetch("a", uri)
        assert caught.value.reason == reasons.SOURCE_INVALID
        assert cache.index.models == 0
        assert not await asyncio.to_thread(lambda: list(root.rglob("escaped")))
        assert list((cache.folder("a") / "models").iterdir()) == []
