"""One unix socket per namespace: whoever can reach it has that namespace's folder mounted, and so is of it."""

import asyncio
import socket
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web
from pydantic import ValidationError

from shoal.api import names
from shoal.api.cache import HOLD_SECONDS, FetchError, FetchLine, FetchRequest
from shoal.artifacts import ArtifactError
from shoal.cache.disk import CacheDisk
from shoal.cache.fetcher import Fetcher
from shoal.cache.index import Index

WRITE_SECONDS: Final = 10.0
"""A client that takes no byte for so long is gone."""
_BODY_BYTES: Final = 1 << 20

log = structlog.get_logger()


class CacheServer:
    """The namespaces that are served now."""

    def __init__(self, disk: CacheDisk, index: Index, fetcher: Fetcher) -> None:
        self._disk = disk
        self._index = index
        self._fetcher = fetcher
        self._runners: dict[str, web.AppRunner] = {}

    @property
    def namespaces(self) -> frozenset[str]:
        return frozenset(self._runners)

    async def add(self, namespace: str) -> None:
        """Makes the namespace's folder and answers in it. Raises OSError."""
        folder = await asyncio.to_thread(self._disk.make_namespace, namespace)
        # A pod that goes ends its wait and its hold at once, not at the next write.
        runner = web.AppRunner(self._app(namespace), access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
        await runner.setup()
        listener = await asyncio.to_thread(_listen, folder / names.CACHE_SOCKET)
        await web.SockSite(runner, listener).start()
        self._runners[namespace] = runner
        log.info("cache.namespace_served", namespace=namespace)

    async def remove(self, namespace: str) -> None:
        """Ends the socket and removes the folder; models stay for other namespaces, until they are evicted."""
        if (runner := self._runners.pop(namespace, None)) is not None:
            await runner.cleanup()
        await asyncio.to_thread(self._disk.remove_namespace, namespace)
        log.info("cache.namespace_removed", namespace=namespace)

    async def close(self) -> None:
        """Ends every connection. The folders stay: running pods read from them."""
        await asyncio.gather(*(runner.cleanup() for runner in self._runners.values()))
        self._runners.clear()

    # --- one namespace ----------------------------------------------------------------------------------------------

    def _app(self, namespace: str) -> web.Application:
        async def fetch(request: web.Request) -> web.StreamResponse:
            return await self._fetch(namespace, request)

        async def hold(request: web.Request) -> web.StreamResponse:
            return await self._hold(namespace, request)

        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/v1/fetch", fetch)
        app.router.add_get("/v1/hold", hold)
        return app

    async def _fetch(self, namespace: str, request: web.Request) -> web.StreamResponse:
        try:
            wanted = FetchRequest.model_validate_json(await request.read())
        except ValidationError as error:
            # Without the input: it has credentials.
            fields = ", ".join(".".join(map(str, e["loc"])) or e["type"] for e in error.errors(include_input=False))
            return web.json_response({"error": f"not a fetch request: {fields}"}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)

        async def on_progress(line: FetchLine) -> None:
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(line.model_dump_json(exclude_none=True).encode() + b"\n")
            except TimeoutError:
                raise ConnectionResetError("it takes no more") from None

        try:
            try:
                done = await self._fetcher.fetch(namespace, wanted, on_progress)
                await on_progress(FetchLine(state="done", bytes_done=done.bytes, bytes_total=done.bytes, done=done))
            except ArtifactError as error:
                log.warning("cache.fetch_failed", namespace=namespace, reason=error.reason, problem=str(error))
                await on_progress(FetchLine(state="failed", error=FetchError(reason=error.reason, message=str(error))))
        except ConnectionError:
            log.info("cache.client_left", namespace=namespace)
        return response

    async def _hold(self, namespace: str, request: web.Request) -> web.StreamResponse:
        key = request.query.get("model", "")
        model = self._index.get(key)
        # Only of what the namespace was given: it learns nothing of other models.
        if model is None or not await asyncio.to_thread(self._disk.is_linked, namespace, model):
            return web.json_response({"error": "the cache does not have this model"}, status=404)
        with self._index.hold(namespace, key):
            response = web.StreamResponse(headers={"Content-Type": "text/plain"})
            await response.prepare(request)
            try:
                while True:
                    async with asyncio.timeout(WRITE_SECONDS):
                        await response.write(b"\n")
                    await asyncio.sleep(HOLD_SECONDS)
            except (ConnectionError, TimeoutError):
                return response


def _listen(path: Path) -> socket.socket:
    """A socket that every user of the namespace's pods may connect to, in the place of an earlier daemon's."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
