"""hf:// as hubs really serve it: files behind a redirect to another host, at addresses that expire."""

import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shoal.api import reasons
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, open_source
from tests.support.sources import HubServer, model_files

FILES = model_files(200_000)


@dataclass
class Store:
    """Where a hub's files really are: another host, addresses that are signed and expire."""

    files: dict[str, bytes]
    valid: str = "1"
    tokens: list[str | None] = field(default_factory=list)
    """The Authorization header of each request."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{name}", self._file)
        return app

    async def _file(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        if request.query.get("signature") != self.valid:
            return web.Response(status=403)
        content, span = self.files[request.match_info["name"]], request.http_range
        if span.start is None:
            return web.Response(body=content)
        stop = min(span.stop or len(content), len(content))
        spanned = {"Content-Range": f"bytes {span.start}-{stop - 1}/{len(content)}"}
        return web.Response(status=206, body=content[span.start : stop], headers=spanned)


@dataclass
class RedirectingHub(HubServer):
    """A hub that answers with where a file is."""

    store: Store | None = None
    elsewhere: str = ""
    led: int = 0
    """Redirects so far: a hub counts them, and bounds them."""

    async def _file(self, request: web.Request) -> web.Response:
        refused = self._refused(request, content=True)
        if refused is not None:
            return refused
        assert self.store is not None
        self.led += 1
        raise web.HTTPFound(f"{self.elsewhere}/{request.match_info['path']}?signature={self.store.valid}")


@pytest.fixture
async def hub() -> AsyncGenerator[tuple[RedirectingHub, Store, Settings]]:
    store = Store(FILES)
    stored = TestServer(store.app())
    await stored.start_server()
    server = RedirectingHub(FILES, gated=True, store=store, elsewhere=f"http://127.0.0.1:{stored.port}")
    running = TestServer(server.app())
    await running.start_server()
    settings = Settings(hub_endpoint=f"http://127.0.0.1:{running.port}", pause_seconds=0.001, segment_bytes=10_000)
    yield server, store, settings
    await running.close()
    await stored.close()


TOKEN = StoreCredentials({"token": "hub-token"}, given=True)


async def test_the_hub_is_asked_once_per_file_and_its_token_stays_there(
    hub: tuple[RedirectingHub, Store, Settings], tmp_path: Path
):
    server, store, settings = hub
    async with open_source("hf://team/tiny", TOKEN, dataclasses.replace(settings, connections=1)) as source:
        for file in (await source.manifest()).files:
            await source.download(file, tmp_path / file.name, lambda _: None)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES
    assert server.led == len(FILES)
    assert len(store.tokens) > 20
    assert set(store.tokens) == {None}


async def test_an_address_that_expired_is_asked_for_again(hub: tuple[RedirectingHub, Store, Settings], tmp_path: Path):
    _, store, settings = hub
    async with open_source("hf://team/tiny", TOKEN, settings) as source:
        manifest = await source.manifest()
        file = max(manifest.files, key=lambda file: file.size)
        assert await source.read(file, 0, 10) == FILES[file.name][:10]
        store.valid = "2"
        await source.download(file, tmp_path / "x", lambda _: None)
    assert (tmp_path / "x").read_bytes() == FILES[file.name]


async def test_the_manifest_tells_what_proves_each_file(hub: tuple[RedirectingHub, Store, Settings]):
    _, _, settings = hub
    async with open_source("hf://team/tiny", TOKEN, settings) as source:
        manifest = await source.manifest()
    kinds = {file.name: file.validator.partition(":")[0] for file in manifest.files}
    assert kinds == {"config.json": "git", "model.safetensors": "sha256", "tokenizer.json": "git"}
    assert [file.sha256 is not None for file in manifest.files] == [False, True, False]
    assert manifest.revision == "a" * 40
    assert manifest.origin == f"{settings.hub_endpoint}/team/tiny"


async def test_a_gated_repository_shows_its_list_and_not_its_content(hub: tuple[RedirectingHub, Store, Settings]):
    _, _, settings = hub
    async with open_source("hf://team/tiny", StoreCredentials(), settings) as source:
        manifest = await source.manifest()
        with pytest.raises(ArtifactError, match="is gated, private or does not exist") as caught:
            await source.authorise(manifest)
    assert caught.value.reason == reasons.GATED
    async with open_source("hf://team/tiny", TOKEN, settings) as source:
        await source.authorise(manifest := await source.manifest())
        assert manifest.files


async def test_a_repository_with_nothing_for_an_engine_is_told_so(hub: tuple[RedirectingHub, Store, Settings]):
    server, _, settings = hub
    server.files = {"README.md": b"#", "picture.png": b"p"}
    async with open_source("hf://team/tiny", TOKEN, settings) as source:
        with pytest.raises(ArtifactError, match="has no files that an engine could read") as caught:
            await source.manifest()
    assert caught.value.reason == reasons.SOURCE_INVALID
