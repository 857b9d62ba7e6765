"""A node cache for tests: its real files and sockets, and sources that are as slow and as broken as a test wants."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.api import reasons
from shoal.api.cache import FetchDone, FetchLine, FetchRequest
from shoal.artifacts import ArtifactError, ArtifactSource, File, Manifest, Settings, StoreCredentials
from shoal.cache.disk import CacheDisk
from shoal.cache.diskquota import DiskQuota
from shoal.cache.fetcher import Fetcher, OpenSource
from shoal.cache.index import Index
from shoal.cache.server import CacheServer


@dataclass
class Shop:
    """Where the fake sources get their files: URI -> files. It counts what is taken from it."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    tokens: dict[str, str] = field(default_factory=dict[str, str])
    """URI -> the token that it wants."""
    hashed: bool = True
    """Whether the source tells the SHA-256 of its files."""
    vouched: bool = True
    """Whether it tells anything at all by which a file is known again."""
    downloads: list[str] = field(default_factory=list[str])
    """Names of the files that were downloaded."""
    asked: int = 0
    """Manifests that were asked for."""
    gate: asyncio.Event | None = None
    """Downloads stop after half of each file until it is set."""
    broken: bool = False
    """Downloads fail."""
    arrived: int = 0
    """Bytes sent so far."""

    def open(
        self, uri: str, credentials: StoreCredentials, settings: Settings, *, revision: str | None = None
    ) -> "ArtifactSource":
        return _Source(self, uri, credentials, settings)


class _Source:
    def __init__(self, shop: Shop, uri: str, credentials: StoreCredentials, settings: Settings) -> None:
        self.settings = settings
        self._shop = shop
        self._uri = uri
        self._token = credentials.token
        self._open = False

    async def __aenter__(self) -> "ArtifactSource":
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False

    async def manifest(self) -> Manifest:
        self._shop.asked += 1
        await asyncio.sleep(0)
        files = self._shop.models.get(self._uri)
        if files is None:
            raise ArtifactError(reasons.SOURCE_NOT_FOUND, f"{self._uri} does not exist")
        rows = [File(name, len(body), *self._validator(body)) for name, body in sorted(files.items())]
        origin, _, revision = self._uri.partition("@")
        return Manifest(self._uri, origin, revision or None, tuple(rows))

    def _validator(self, body: bytes) -> tuple[str, str | None]:
        sha = hashlib.sha256(body).hexdigest()
        if not self._shop.vouched:
            return "", None
        return (f"sha256:{sha}", sha) if self._shop.hashed else (f'etag:"{sha[:16]}"', None)

    async def authorise(self, manifest: Manifest) -> None:
        wanted = self._shop.tokens.get(self._uri)
        if wanted is not None and wanted != self._token:
            raise ArtifactError(reasons.GATED, f"{self._uri} refuses the token of source.secretRef")

    async def read(self, file: File, start: int, length: int) -> bytes:
        return self._shop.models[self._uri][file.name][start : start + length]

    async def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        yield await self.read(file, start, end - start)

    async def download(self, file: File, path: Path, on_bytes: Callable[[int], None]) -> None:
        assert self._open
        shop, body = self._shop, self._shop.models[self._uri][file.name]
        part = path.with_name(path.name + ".part")
        have = part.stat().st_size if part.exists() else 0
        on_bytes(have)
        half = max(have, len(body) // 2)
        self._send(part, body[have:half], on_bytes)
        if shop.gate is not None:
            await shop.gate.wait()
        if shop.broken:
            raise ArtifactError(reasons.SOURCE_UNREACHABLE, "the connection broke off again and again")
        self._send(part, body[half:], on_bytes)
        os.replace(part, path)
        shop.downloads.append(file.name)

    def _send(self, part: Path, body: bytes, on_bytes: Callable[[int], None]) -> None:
        with part.open("ab") as out:
            out.write(body)
        self._shop.arrived += len(body)
        on_bytes(len(body))


@dataclass
class Cache:
    """A running cache without a cluster."""

    disk: CacheDisk
    index: Index
    room: DiskQuota
    fetcher: Fetcher
    server: CacheServer

    def folder(self, namespace: str) -> Path:
        return self.disk.namespace(namespace)

    async def fetch(
        self,
        namespace: str,
        uri: str,
        *,
        token: str = "",
        credentials: StoreCredentials | None = None,
        manifest: str | None = None,
        lines: list[FetchLine] | None = None,
    ) -> FetchDone:
        """As a stage container asks, without the socket."""

        async def tell(line: FetchLine) -> None:
            if lines is not None:
                lines.append(line)

        given = credentials or StoreCredentials({"token": token} if token else {})
        request = FetchRequest(
            uri=uri,
            manifest=manifest,
            credentials=dict(given.values),
            credentials_given=given.given,
            credentials_identity=given.identity,
        )
        return await self.fetcher.fetch(namespace, request, tell)

    def content(self, namespace: str, done: FetchDone) -> dict[str, bytes]:
        """What a pod of the namespace reads."""
        root = self.folder(namespace) / done.path
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@contextlib.asynccontextmanager
async def running(
    root: Path,
    source: Shop | OpenSource,
    *namespaces: str,
    size: int = 1 << 30,
    grace: float = 0.0,
    free_percent: int = 0,
    settings: Settings | None = None,
) -> AsyncGenerator[Cache]:
    """A cache over `root`, as the daemon opens it; leaving it is the daemon's end."""
    opened = source.open if isinstance(source, Shop) else source
    disk, index = CacheDisk(root), Index(grace)
    index.fill(await asyncio.to_thread(disk.open))
    room = DiskQuota(disk, index, size, free_percent)
    async with Fetcher(disk, index, room, settings or Settings(), opened) as fetcher:
        server = CacheServer(disk, index, fetcher)
        for namespace in namespaces:
            await server.add(namespace)
        try:
            yield Cache(disk, index, room, fetcher, server)
        finally:
            await server.close()


@contextlib.contextmanager
def short_folder() -> Generator[Path]:
    """A folder whose path leaves room for a socket's name (107 bytes at most)."""
    folder = Path(tempfile.mkdtemp(prefix="cache-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def shop_with(models: Mapping[str, Mapping[str, bytes]], **options: object) -> Shop:
    shop = Shop({uri: dict(files) for uri, files in models.items()})
    for name, value in options.items():
        setattr(shop, name, value)
    return shop
