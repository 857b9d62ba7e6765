"""Ranges of bytes over HTTP, for archives and for hubs."""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from shoal.api import reasons
from shoal.api.sources import shown
from shoal.artifacts.connect import CheckedResolver, refused, require_host
from shoal.artifacts.errors import ArtifactError, Interrupted, NoRanges, Unreached, gib
from shoal.artifacts.source import Settings

_PIECE = 1 << 20
_REDIRECTS = 5
_LONGEST = 5
"""Times the longest silence that a list of files may take."""
_MOVED = (301, 302, 303, 307, 308)
_RETRYABLE = (aiohttp.ClientError, TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True)
class Probed:
    """What a server says of a file without sending it."""

    size: int | None
    """Bytes; None: it does not say."""
    validator: str
    """`etag:...`, `modified:...`, or "" where there is nothing that proves a version."""


class Web:
    """A session to one host, and to where it may redirect (`core.network`)."""

    def __init__(
        self, settings: Settings, token: str | None, refusal: Callable[[str, int, str], ArtifactError | None]
    ) -> None:
        """`refusal` says what an answer's status means for a URL, with a hub's X-Error-Code; None: it may pass."""
        self._settings, self._token, self._refusal = settings, token, refusal
        self._session: aiohttp.ClientSession | None = None
        self._moved: dict[str, URL] = {}
        """Where a URL led last: a hub answers each request with a redirect to its store, and counts them."""

    async def open(self) -> None:
        # A context of our own: it reads SSL_CERT_FILE, by which the chart's CA bundle comes, at this moment.
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
        """Asks for one byte: a signed URL is signed for GET, not for HEAD. Raises Interrupted and ArtifactError."""
        async with _explained(url), await self._get(url, {"Range": "bytes=0-0"}) as response:
            etag = response.headers.get("ETag", "")
            modified = response.headers.get("Last-Modified", "")
            strong = etag and not etag.startswith("W/")
            validator = f"etag:{etag}" if strong else f"modified:{modified}" if modified else ""
            if response.status == 206:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                return Probed(int(total) if total.isdigit() else None, validator)
            if response.status == 416:
                total = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
                return Probed(int(total[1]) if total else None, validator)
            return Probed(response.content_length, validator)

    async def text(self, url: str, limit: int) -> bytes:
        """A whole answer of at most `limit` bytes. Raises Interrupted and ArtifactError."""
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
        condition = same_as.partition(":")[2] if same_as else ""
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
                    _check_range(url, response, start, condition)
                elif response.content_length not in (None, size) or _other_version(response, condition):
                    raise _changed(url)
                try:
                    async for chunk in response.content.iter_any():
                        buffer += chunk
                        # A slow server's bytes are handed on as well: whoever reads them judges its pace.
                        if len(buffer) >= _PIECE or loop.time() - handed >= self._settings.stall_seconds / 4:
                            yield bytes(buffer)
                            buffer.clear()
                            handed = loop.time()
                except _RETRYABLE:
                    if buffer:  # what came before the break is worth keeping
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
                response.close()  # a signed address expires
            finally:
                if (response is None or not response.ok) and self._moved.get(url) is known:
                    del self._moved[url]  # unless another transfer has asked for it already
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
        """The answer, after redirects to where the rules allow. The token goes to the origin that was asked, and to no
        other, also not to the same host at another port."""
        url = asked
        for _ in range(_REDIRECTS + 1):
            response = await self._request(url, headers, token=self._token if url.origin() == asked.origin() else None)
            location = response.headers.get("Location")
            if response.status not in _MOVED or location is None:
                return response
            response.close()
            url = self._target(url, location)
        raise ArtifactError(reasons.SOURCE_UNREACHABLE, f"{shown(str(asked))} redirects again and again")

    def _target(self, url: URL, location: str) -> URL:
        """Where a redirect leads. Raises ArtifactError unless it may."""
        where = shown(str(url))
        try:
            target = url.join(URL(location))
            host = target.host
        except ValueError:
            target, host = url, None
        if host is None or target.scheme not in ("http", "https") or target.user is not None:
            raise refused(f"{where} redirects to something that is no address of a file")
        if url.scheme == "https" and target.scheme != "https":
            raise refused(f"{where} redirects to {target.scheme}://, refused")
        if (problem := self._settings.network.redirect_problem(url.host or "", host)) is not None:
            raise refused(problem)
        return target

    async def _request(self, url: URL, headers: dict[str, str], token: str | None) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("a source is used as a context manager")
        require_host(self._settings.network, url.host)
        # Identity: a byte range of a compressed transfer could not be put beside others.
        headers = {**headers, "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Redirects are followed here: the library would ask whomever it is sent to.
        return await self._session.get(url, headers=headers, allow_redirects=False)


def _check_range(url: str, response: aiohttp.ClientResponse, start: int, condition: str) -> None:
    """Raises ArtifactError unless the answer is the range that was asked for, of the same version."""
    if response.status == 416 or _other_version(response, condition):
        raise _changed(url)
    if response.status != 206:
        raise NoRanges(shown(url))
    if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise Interrupted(f"{shown(url)} sent another range than it was asked for")


def _other_version(response: aiohttp.ClientResponse, condition: str) -> bool:
    """An answer may leave its validators out; one that has another is of another version."""
    if not condition:
        return False
    named = response.headers.get("ETag" if condition.startswith('"') else "Last-Modified")
    return named is not None and named != condition


def _changed(url: str) -> ArtifactError:
    return ArtifactError(
        reasons.SOURCE_CHANGED,
        f"{shown(url)} changed while it was being fetched: publish another version under another address, and name "
        "that in source.uri",
    )


class _explained:  # noqa: N801 - reads as a statement
    """Turns the errors of the network into Interrupted, or into an error that no repetition heals."""

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
