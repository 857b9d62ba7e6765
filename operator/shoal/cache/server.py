"""One unix socket per namespace. A process that can reach a socket has that namespace's folder mounted, and so runs in
that namespace."""

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from shoal.api import names
from shoal.api.cache import HOLD_SECONDS, FetchError, FetchLine, FetchRequest
from shoal.artifacts import ArtifactError
from shoal.cache.disk import CacheDisk
from shoal.cache.fetcher import Fetcher
from shoal.cache.index import Index
from shoal.net.errors import Problem
from shoal.net.server import make_server
from shoal.net.serving import KEEP_ALIVE_SECONDS, serving
from shoal.net.shell import GET, BodyStream, Shell, ShellRequest, Unrouted, Write, answer_json, error_response

_BODY_BYTES: Final = 1 << 20

log = structlog.get_logger()


class CacheServer:
    """The namespaces that are served now."""

    def __init__(self, disk: CacheDisk, index: Index, fetcher: Fetcher) -> None:
        self._disk = disk
        self._index = index
        self._fetcher = fetcher
        self._servers: dict[str, contextlib.AsyncExitStack] = {}

    @property
    def namespaces(self) -> frozenset[str]:
        return frozenset(self._servers)

    async def add(self, namespace: str) -> None:
        """Makes the namespace's folder and answers in it. Raises OSError."""
        folder = await asyncio.to_thread(self._disk.make_namespace, namespace)
        listener = await asyncio.to_thread(_listen, folder / names.CACHE_SOCKET)
        # Pods hold models for as long as they live: a stop does not wait for them.
        server = make_server(self._shell(namespace), host="", port=0, keep_alive=KEEP_ALIVE_SECONDS, stop_seconds=0)
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(serving(server, sockets=[listener]))
        self._servers[namespace] = stack
        log.info("cache.namespace_served", namespace=namespace)

    async def remove(self, namespace: str) -> None:
        """Ends the socket and removes the folder; models stay for other namespaces, until they are evicted."""
        if (server := self._servers.pop(namespace, None)) is not None:
            await server.aclose()
        await asyncio.to_thread(self._disk.remove_namespace, namespace)
        log.info("cache.namespace_removed", namespace=namespace)

    def lost(self) -> list[str]:
        """The namespaces whose sockets are no longer in their folders. Blocks."""
        return [each for each in tuple(self._servers) if not (self._disk.namespace(each) / names.CACHE_SOCKET).exists()]

    async def close(self) -> None:
        """Ends every connection. The folders stay: running pods read from them."""
        await asyncio.gather(*(server.aclose() for server in self._servers.values()))
        self._servers.clear()

    # --- one namespace ----------------------------------------------------------------------------------------------

    def _shell(self, namespace: str) -> Shell:
        shell = Shell("the node cache", wording=_error_response)
        shell.route(("POST",), "/v1/fetch", partial(self._fetch, namespace))
        shell.route(GET, "/v1/hold", partial(self._hold, namespace))
        return shell

    async def _fetch(self, namespace: str, request: ShellRequest) -> Response:
        try:
            wanted = FetchRequest.model_validate_json(await request.read(_BODY_BYTES))
        except ValidationError as error:
            # Without the input: it has credentials.
            fields = ", ".join(".".join(map(str, e["loc"])) or e["type"] for e in error.errors(include_input=False))
            raise Problem(400, f"not a fetch request: {fields}") from None

        async def work(write: Write) -> None:
            # A pod that goes ends its fetch at once, not at the next write.
            try:
                await request.while_connected(self._fetch_into(namespace, wanted, write))
            except ClientDisconnect:
                log.info("cache.client_left", namespace=namespace)
                raise

        return BodyStream(work, {"content-type": "application/x-ndjson"})

    async def _fetch_into(self, namespace: str, wanted: FetchRequest, write: Write) -> None:
        async def on_progress(line: FetchLine) -> None:
            await write(line.model_dump_json(exclude_none=True).encode() + b"\n")

        try:
            done = await self._fetcher.fetch(namespace, wanted, on_progress)
            await on_progress(FetchLine(state="done", bytes_done=done.bytes, bytes_total=done.bytes, done=done))
        except ArtifactError as error:
            log.warning("cache.fetch_failed", namespace=namespace, reason=error.reason, problem=str(error))
            await on_progress(FetchLine(state="failed", error=FetchError(reason=error.reason, message=str(error))))

    async def _hold(self, namespace: str, request: ShellRequest) -> Response:
        key = request.first("model") or ""
        model = self._index.get(key)
        # Only of what the namespace was given: it learns nothing of other models.
        if model is None or not await asyncio.to_thread(self._disk.is_linked, namespace, model):
            raise Problem(404, "the cache does not have this model")

        async def beat(write: Write) -> None:
            while True:
                await write(b"\n")
                await asyncio.sleep(HOLD_SECONDS)

        async def work(write: Write) -> None:
            # Nothing is awaited between the look above and this hold, so no eviction comes between.
            with self._index.hold(namespace, key):
                await request.while_connected(beat(write))

        return BodyStream(work, {"content-type": "text/plain"})


def _error_response(problem: Problem) -> Response:
    if isinstance(problem, Unrouted):
        return error_response(problem)
    return answer_json({"error": problem.message}, problem.status, problem.headers)


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
