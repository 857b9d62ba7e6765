"""HTTP sources: byte ranges over HTTP, for archives and hubs."""

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Self

import aiohttp
from yarl import URL

from shoal.api import reasons
from shoal.api.sources import SourceUri, shown
from shoal.artifacts.connect import CheckedResolver, refused, require_host
from shoal.artifacts.credentials import StoreCredentials
from shoal.artifacts.errors import ArtifactError, Interrupted, NoRanges, Unreached, gib
from shoal.artifacts.manifest import File, Manifest
from shoal.artifacts.ranges import RangedSource, with_retries
from shoal.artifacts.source import Settings

_PIECE = 1 << 20
_REDIRECTS = 5
_LONGEST = 5
"""Limit for fetching a list of files, as a multiple of the stall timeout."""
_MOVED = (301, 302, 303, 307, 308)
_VALIDATORS = {"etag": "ETag", "modified": "Last-Modified"}
"""Header of a validator by its kind. The value does not tell them apart: some servers send an ETag without quotes."""
_RETRYABLE = (aiohttp.ClientError, TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True)
class Probed:
    """A server's metadata of a file."""

    size: int | None
    """Size in bytes; None: unknown."""
    validator: str
    """`etag:...`, `modified:...`, or "" if the server provides nothing that identifies a version."""


class Web:
    """A session to one host, and to hosts that it may redirect to (`core.network`)."""

    def __init__(
        self, settings: Settings, token: str | None, refusal: Callable[[str, int, str], ArtifactError | None]
    ) -> None:
        """`refusal` converts the status of a response to a URL, with the hub's X-Error-Code, to an error; None: it may
        be temporary."""
        self._settings, self._token, self._refusal = settings, token, refusal
        self._session: aiohttp.ClientSession | None = None
        self._moved: dict[str, URL] = {}
        """Latest redirect target of each URL: a hub redirects each request to its store, and rate-limits requests."""

    async def open(self) -> None:
        # A context of its own: it reads SSL_CERT_FILE, which contains the chart's CA bundle, now.
        context = await asyncio.to_thread(ssl.create_default_context)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=context, limit=0, resolver=CheckedResolver(self._settings.network), use_dns_cache=False
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._settings.connect_seconds, sock_read=self._settings.stall_seconds
            ),
            trust_env=True,
            auto_decompress=False,
            read_bufsize=1 << 18,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def probe(self, url: str) -> Probed:
        """Requests one byte: a signed URL is signed for GET, not for HEAD. Raises Interrupted and ArtifactError."""
        async with _explained(url), await self._get(url, {"Range": "bytes=0-0"}) as response:
            etag = response.headers.get("ETag", "")
            modified = response.headers.get("Last-Modified", "")
            strong = etag and not etag.startswith("W/")
            validator = f"etag:{etag}" if strong else f"modified:{modified}" if modified else ""
            if response.status == 206:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                return Probed(_size(total), validator)
            if response.status == 416:
                before, _, total = response.headers.get("Content-Range", "").rpartition("/")
                return Probed(_size(total) if before == "bytes *" else None, validator)
            return Probed(response.content_length, validator)

    async def text(self, url: str, limit: int) -> bytes:
        """A complete response of at most `limit` bytes. Raises Interrupted and ArtifactError."""
        content = bytearray()
        seconds = _LONGEST * self._settings.stall_seconds
        async with _explained(url), asyncio.timeout(seconds), await self._get(url, {}) as response:
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > limit:
                    raise ArtifactError(reasons.SOURCE_INVALID, f"{shown(url)} answers with more than {gib(limit)}")
        return bytes(content)

    async def stream(
        self, url: str, start: int, end: int, size: int, *, same_as: str | None = None
    ) -> AsyncGenerator[bytes]:
        """The bytes from `start` up to `end` of a file of `size` bytes, in pieces of about a MiB.

        `same_as` is the validator that the file must still have. Raises Interrupted, NoRanges and ArtifactError.
        """
        headers: dict[str, str] = {}
        kind, _, condition = (same_as or "").partition(":")
        named = _VALIDATORS.get(kind, "")
        if (start, end) != (0, size):
            headers["Range"] = f"bytes={start}-{end - 1}"
            if condition:
                headers["If-Range"] = condition
        buffer = bytearray()
        loop = asyncio.get_running_loop()
        handed = loop.time()
        async with _explained(url):
            async with await self._get(url, headers) as response:
                if headers:
                    _check_range(url, response, start, named, condition)
                elif response.content_length not in (None, size) or _other_version(response, named, condition):
                    raise _changed(url)
                try:
                    async for chunk in response.content.iter_any():
                        buffer += chunk
                        # Bytes of a slow server are passed on as well: the reader judges the pace.
                        if len(buffer) >= _PIECE or loop.time() - handed >= self._settings.stall_seconds / 4:
                            yield bytes(buffer)
                            buffer.clear()
                            handed = loop.time()
                except _RETRYABLE:
                    if buffer:  # the bytes before the break are kept
                        yield bytes(buffer)
                    raise
            if buffer:
                yield bytes(buffer)

    async def _get(self, url: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Raises what aiohttp raises, Interrupted and ArtifactError."""
        if (known := self._moved.get(url)) is not None:
            response = None
            try:
                response = await self._request(known, headers, token=None)
                if response.status in (200, 206):
                    return response
                response.close()  # a signed URL expires
            finally:
                if (response is None or not response.ok) and self._moved.get(url) is known:
                    del self._moved[url]  # unless another transfer has already requested it
        asked = URL(url)
        response = await self._follow(asked, headers)
        try:
            code = response.headers.get("X-Error-Code", "")
            wrong = None if response.status in (200, 206, 416) else self._refusal(url, response.status, code)
            if wrong is not None:
                raise wrong
        except ArtifactError:
            response.close()
            raise
        if response.url.origin() != asked.origin():
            self._moved[url] = response.url
        return response

    async def _follow(self, asked: URL, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """The response after allowed redirects. The token is sent to the original origin only, not even to the same
        host at another port."""
        url = asked
        for _ in range(_REDIRECTS + 1):
            response = await self._request(url, headers, token=self._token if url.origin() == asked.origin() else None)
            location = response.headers.get("Location")
            if response.status not in _MOVED or location is None:
                return response
            response.close()
            url = self._target(url, location)
        raise ArtifactError(reasons.SOURCE_UNREACHABLE, f"{shown(str(asked))} has too many redirects")

    def _target(self, url: URL, location: str) -> URL:
        """The target of a redirect. Raises ArtifactError unless it is allowed."""
        where = shown(str(url))
        try:
            target = url.join(URL(location))
            host = target.host
        except ValueError:
            target, host = url, None
        if host is None or target.scheme not in ("http", "https") or target.user is not None:
            raise refused(f"{where} redirects to something that is not the URL of a file")
        if url.scheme == "https" and target.scheme != "https":
            raise refused(f"{where} redirects to {target.scheme}://, refused")
        if (problem := self._settings.network.redirect_problem(url.host or "", host)) is not None:
            raise refused(problem)
        return target

    async def _request(self, url: URL, headers: dict[str, str], token: str | None) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("a source is used as a context manager")
        require_host(self._settings.network, url.host)
        # Identity: byte ranges of a compressed transfer could not be joined.
        headers = {**headers, "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Redirects are followed here: the library would follow any of them.
        return await self._session.get(url, headers=headers, allow_redirects=False)


def _size(text: str) -> int | None:
    """A number of bytes in a header; None: it is none, or longer than any file's."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _check_range(url: str, response: aiohttp.ClientResponse, start: int, named: str, condition: str) -> None:
    """Raises ArtifactError unless the response is the requested range of the same version."""
    if response.status == 416 or _other_version(response, named, condition):
        raise _changed(url)
    if response.status != 206:
        raise NoRanges(shown(url))
    if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise Interrupted(f"{shown(url)} sent another range than it was asked for")


def _other_version(response: aiohttp.ClientResponse, named: str, condition: str) -> bool:
    """Whether the header `named` says another validator than `condition`. A response without it is accepted."""
    return response.headers.get(named, condition) != condition


def _changed(url: str) -> ArtifactError:
    return ArtifactError(
        reasons.SOURCE_CHANGED,
        f"{shown(url)} changed while it was being fetched: publish another version under another address, and name "
        "that in source.uri",
    )


class _explained:  # noqa: N801 - reads as a statement
    """Converts network errors to Interrupted, or to an error that a retry cannot fix."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _RETRYABLE):
            raise _unreachable(self._url, error) from None


def _unreachable(url: str, error: BaseException) -> ArtifactError:
    host = URL(url).host
    match error:
        case aiohttp.ClientConnectorCertificateError():
            text = f"the certificate of {host} is not trusted: add its CA to the chart's caBundle"
            return ArtifactError(reasons.SOURCE_UNREACHABLE, text)
        case aiohttp.ClientConnectorDNSError() if error.os_error.errno == socket.EAI_AGAIN:
            # `shoal why` knows these words (`core/layers/phrases.py`): the name may be right.
            text = f"no name server answered for {host}: check the cluster's DNS, and the network on the way to it"
        case aiohttp.ClientConnectorDNSError():
            text = f"{host} cannot be resolved: check source.uri, the cluster's DNS and the chart's proxy settings"
        case aiohttp.ClientConnectorError():
            text = f"{host} cannot be reached ({error.strerror}): check source.uri and the chart's proxy settings"
        case TimeoutError():
            text = f"{host} did not answer in time: check source.uri and the chart's proxy settings"
        case aiohttp.ClientPayloadError():
            text = f"the connection to {host} broke off again and again"
        case _:
            text = f"the connection to {host} broke off ({error or type(error).__name__})"
    return Unreached(text)


_NAME = "archive"
"""Constant name: the last part of a URL may be anything."""


class ArchiveSource(RangedSource):
    """https://: one archive."""

    def __init__(self, source: SourceUri, credentials: StoreCredentials, settings: Settings) -> None:
        super().__init__(settings)
        self._url, self._shown = source.uri, shown(source.uri)
        self._has_token = credentials.token is not None
        self._web = Web(settings, credentials.token, self._refusal)

    async def __aenter__(self) -> Self:
        await self._web.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._web.close()

    async def manifest(self) -> Manifest:
        probed = await with_retries(self.settings, lambda: self._web.probe(self._url))
        if probed.size is None:
            raise ArtifactError(
                reasons.SOURCE_INVALID,
                f"{self._shown} does not report its size (no Content-Length): serve it as a file",
            )
        return Manifest(
            source=self._shown,
            origin=self._shown,
            revision=None,
            files=(File(_NAME, probed.size, probed.validator),),
            archive=True,
        )

    async def authorise(self, manifest: Manifest) -> None:
        """No check: the manifest request has already read a byte of the content."""

    def stream(self, file: File, start: int, end: int) -> AsyncGenerator[bytes]:
        return self._web.stream(self._url, start, end, file.size, same_as=file.validator)

    def _refusal(self, url: str, status: int, _: str) -> ArtifactError | None:
        where = shown(url)
        if status in (401, 403):
            return ArtifactError(
                reasons.GATED,
                f"{where} refused the token of source.secretRef ({status}): check the Secret's key `token`"
                if self._has_token
                else f"{where} wants credentials ({status}): put a token into key `token` of a Secret and name the "
                "Secret in source.secretRef",
            )
        if status in (404, 410):
            return ArtifactError(reasons.SOURCE_NOT_FOUND, f"{where} does not exist ({status}): check source.uri")
        return Interrupted(f"{where} cannot be fetched now: it answered {status}")
