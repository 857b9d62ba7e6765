"""Fetches an archive over HTTPS and goes on where a broken connection left off."""

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import structlog
from yarl import URL

from shoal.api import reasons
from shoal.api.sources import shown
from shoal.artifacts.errors import ArtifactError, require_room

CONNECT_SECONDS = 15.0
READ_SECONDS = 60.0
"""Longest silence of a connection."""
ATTEMPTS = 3
"""Tries in a row that bring nothing, before the container gives up and is restarted."""
_CHUNK = 4 << 20

log = structlog.get_logger()


async def download(
    url: str, archive: Path, *, token: str | None, on_total: Callable[[int], None], pause: float = 1.0
) -> None:
    """Fetches `url` into `archive`. What an earlier run left there is kept if the server says that it is the same.

    `pause` is the wait in seconds before the second try; it doubles with each. Raises ArtifactError and OSError.
    """
    note = archive.with_suffix(".json")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    # A context of our own: it reads SSL_CERT_FILE, by which the chart's CA bundle comes, at this moment.
    connector = aiohttp.TCPConnector(ssl=await asyncio.to_thread(ssl.create_default_context))
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=True, auto_decompress=False
    ) as session:
        failures = 0
        while True:
            before = await asyncio.to_thread(size_of, archive)
            try:
                await _fetch(session, url, archive, note, token, on_total)
                return
            except (aiohttp.ClientError, TimeoutError, ConnectionError, _Busy) as error:
                have = await asyncio.to_thread(size_of, archive)
                failures = 0 if have > before else failures + 1
                problem = _unreachable(url, error)
                if failures >= ATTEMPTS or isinstance(error, aiohttp.ClientConnectorCertificateError):
                    raise problem from None
                log.info("stage.retry", problem=str(problem), bytes_done=have)
            await asyncio.sleep(pause * 2**failures)


class _Busy(Exception):
    """The server answered that it cannot serve now."""


async def _fetch(
    session: aiohttp.ClientSession,
    url: str,
    archive: Path,
    note: Path,
    token: str | None,
    on_total: Callable[[int], None],
) -> None:
    # Identity: a byte range of a compressed transfer could not be appended.
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    have, validator, total = await asyncio.to_thread(_resumable, archive, note)
    if total is not None and have == total:  # whole since an earlier run, which was stopped while it unpacked
        on_total(total)
        return
    if validator:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    async with session.get(url, headers=headers) as response:
        if response.url.scheme != URL(url).scheme:
            raise ArtifactError(
                reasons.SOURCE_UNREACHABLE, f"{shown(url)} redirects to {response.url.scheme}://, refused"
            )
        _check_status(url, response.status, has_token=token is not None)
        if response.status == 416:  # what is there is not a beginning of what the server has
            await asyncio.to_thread(archive.unlink, missing_ok=True)
            raise _Busy("the part that is there does not fit the file any more")
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not resumed:
            have = 0
        total = None
        if response.content_length is not None:
            total = have + response.content_length
            on_total(total)
            await asyncio.to_thread(require_room, archive.parent, response.content_length)
        etag = response.headers.get("ETag", "")
        strong = etag if not etag.startswith("W/") else ""
        promise = {"validator": strong or response.headers.get("Last-Modified", ""), "total": total}
        if not resumed:  # before the note: it must not vouch for bytes of another file
            await asyncio.to_thread(archive.write_bytes, b"")
        await asyncio.to_thread(note.write_text, json.dumps(promise))
        await _append(response, archive)


async def _append(response: aiohttp.ClientResponse, archive: Path) -> None:
    file = await asyncio.to_thread(archive.open, "ab")
    try:
        buffer = bytearray()
        try:
            async for chunk in response.content.iter_any():
                buffer += chunk
                if len(buffer) >= _CHUNK:
                    await asyncio.to_thread(file.write, bytes(buffer))
                    buffer.clear()
        finally:  # what came before the break is worth keeping
            await asyncio.to_thread(file.write, bytes(buffer))
    finally:
        await asyncio.to_thread(file.close)


def size_of(path: Path) -> int:
    """Bytes in the file, 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _resumable(archive: Path, note: Path) -> tuple[int, str, int | None]:
    """Bytes that are there, what to ask the server whether they are still good ("": cannot), and the whole size."""
    try:
        promise = json.loads(note.read_text())
        validator, total = promise["validator"], promise["total"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, "", None
    have = size_of(archive)
    whole = total if isinstance(total, int) else None
    return have, validator if have and isinstance(validator, str) else "", whole


def _check_status(url: str, status: int, *, has_token: bool) -> None:
    if status in (200, 206, 416):
        return
    if status in (401, 403):
        raise ArtifactError(
            reasons.GATED,
            f"{shown(url)} refused the token of source.secretRef ({status}): check the Secret's key `token`"
            if has_token
            else f"{shown(url)} wants credentials ({status}): put a token into key `token` of a Secret and name the "
            "Secret in source.secretRef",
        )
    if status in (404, 410):
        raise ArtifactError(reasons.SOURCE_NOT_FOUND, f"{shown(url)} does not exist ({status}): check source.uri")
    raise _Busy(f"it answered {status}")


def _unreachable(url: str, error: Exception) -> ArtifactError:
    host = URL(url).host
    match error:
        case aiohttp.ClientConnectorCertificateError():
            text = f"the certificate of {host} is not trusted: add its CA to the chart's caBundle"
        case aiohttp.ClientConnectorDNSError():
            text = f"{host} cannot be resolved: check source.uri, the cluster's DNS and the chart's proxy settings"
        case aiohttp.ClientConnectorError():
            text = f"{host} cannot be reached ({error.strerror}): check source.uri and the chart's proxy settings"
        case TimeoutError():
            text = f"{host} did not answer in time: check source.uri and the chart's proxy settings"
        case _Busy():
            text = f"{shown(url)} cannot be fetched now: {error}"
        case aiohttp.ClientPayloadError():
            text = f"the connection to {host} broke off again and again"
        case _:
            text = f"the connection to {host} broke off ({error or type(error).__name__})"
    return ArtifactError(reasons.SOURCE_UNREACHABLE, text)
