"""Client of the node cache on the pod's node, over the socket in the namespace's mounted folder."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import structlog
from pydantic import ValidationError

from shoal.api import names, reasons
from shoal.api.cache import SILENCE_SECONDS, FetchDone, FetchLine, FetchRequest
from shoal.artifacts import ArtifactError

TIMEOUT_SECONDS: Final = 120.0
"""How long the cache may be unavailable: a DaemonSet pod is being replaced and its image is not pulled yet."""
_BACKOFF: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
_URL: Final = "http://cache"

log = structlog.get_logger()


async def fetch(
    folder: Path,
    request: FetchRequest,
    on_line: Callable[[FetchLine], None],
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> FetchDone:
    """Fetches the model into the namespace's folder, which is mounted at `folder`.

    If the cache restarts meanwhile, the request is repeated, and the cache continues where it was. Raises ArtifactError
    with the cache's reason, or with CacheUnavailable after `timeout` seconds of silence.
    """
    last_line = time.monotonic()
    tries = 0

    def receive(line: FetchLine) -> None:
        nonlocal last_line, tries
        last_line, tries = time.monotonic(), 0
        on_line(line)

    while True:
        try:
            return await _request(folder, request, receive)
        # The socket does not exist yet, is not accessible yet, or its server is gone.
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            silent = time.monotonic() - last_line
            if silent >= timeout:
                raise ArtifactError(reasons.CACHE_UNAVAILABLE, _unavailable(folder, silent, error)) from None
            log.info("stage.cache_retry", problem=_shown(error), silent_seconds=round(silent, 1))
        await asyncio.sleep(_BACKOFF[min(tries, len(_BACKOFF) - 1)])
        tries += 1


async def _request(folder: Path, request: FetchRequest, on_line: Callable[[FetchLine], None]) -> FetchDone:
    async with _session(folder) as session:
        body = request.model_dump_json(exclude_none=True)
        async with session.post(f"{_URL}/v1/fetch", data=body) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise ArtifactError(reasons.CACHE_UNAVAILABLE, f"the node cache refused the request: {text}")
            async for raw in response.content:
                line = FetchLine.model_validate_json(raw)
                if line.error is not None:
                    raise ArtifactError(line.error.reason, line.error.message)
                on_line(line)
                if line.done is not None:
                    return line.done
            raise aiohttp.ClientPayloadError("the response ended early")


async def hold(folder: Path, model_file: Path) -> None:
    """Holds the model that `model_file` names, so that the cache does not evict it. Runs until cancelled.

    The stage container writes that file; it does not exist in a pod whose model is not cached.
    """
    logged = ""
    while True:
        pause = 1.0
        if (key := await asyncio.to_thread(_read, model_file)) is not None:
            problem = ""
            try:
                async with (
                    _session(folder) as session,
                    session.get(f"{_URL}/v1/hold", params={"model": key}) as response,
                ):
                    if response.status == 200:
                        log.info("agent.model_held", model=key)
                        logged = ""
                        async for _ in response.content:
                            pass
                        problem = "the connection ended"
                    else:
                        problem, pause = f"the node cache does not have model {key}", 10.0
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = _shown(error)
            if problem != logged:
                logged = problem
                log.warning("agent.model_not_held", problem=problem, consequence="it may be evicted in two minutes")
        await asyncio.sleep(pause)


def _session(folder: Path) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE_SECONDS)
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / names.CACHE_SOCKET)), timeout=timeout)


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip() or None
    return None


def _shown(error: Exception) -> str:
    return str(error) or type(error).__name__


def _unavailable(folder: Path, silent: float, error: Exception) -> str:
    return (
        f"the node cache has not answered for {silent:.0f} s at {folder / names.CACHE_SOCKET} ({_shown(error)}): look "
        "at the pod of DaemonSet shoal-cache on this node, or switch the cache off with the chart's cache.enabled"
    )
