"""Instant queries to a Prometheus, with a deadline and a bound on each answer."""

import asyncio
import ssl
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import aiohttp
import certifi
from pydantic import BaseModel, ValidationError

from shoal.api.config import Prometheus

MAX_BYTES: Final = 64 * 2**20
"""Of one answer: some 200,000 samples."""
_SHOWN: Final = 300
"""Characters of an error that Prometheus, or a proxy in front of it, answers."""


class NotAnswered(Exception):
    """Prometheus did not answer, or not as it should: a sentence for a person."""


class Sample(NamedTuple):
    """One sample of an instant query."""

    labels: dict[str, str]
    at: float
    """Seconds since 1970, on Prometheus' clock."""
    value: float
    """Also NaN or infinite."""


class _Sample(BaseModel):
    metric: dict[str, str]
    value: tuple[float, float]


class _Vector(BaseModel):
    result: list[_Sample]


class _Answer(BaseModel):
    """https://prometheus.io/docs/prometheus/latest/querying/api/"""

    status: Literal["success"]
    data: _Vector


class _Failure(BaseModel):
    error: str


class PromQLClient:
    """One Prometheus. Use it as an async context manager: it keeps connections."""

    def __init__(self, settings: Prometheus) -> None:
        self._settings = settings
        self._url = settings.url.rstrip("/") + "/api/v1/query"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "PromQLClient":
        # The public roots, and what SSL_CERT_FILE names: the chart's CA bundle comes by it.
        context = ssl.create_default_context()
        context.load_verify_locations(certifi.where())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context),
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_seconds),
            trust_env=True,  # proxies
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def query(self, expression: str, *, at: float | None = None) -> list[Sample]:
        """Samples at a time (seconds since 1970; None: Prometheus' now). Raises NotAnswered."""
        form = {"query": expression} if at is None else {"query": expression, "time": repr(at)}
        try:
            status, body = await self._post(form)
        except TimeoutError:
            raise NotAnswered(f"no answer within {self._settings.timeout_seconds} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a token that is no header's value
            raise NotAnswered(f"{type(error).__name__}: {error}") from None
        # Large answers take some 100 ms to read: not on the event loop.
        return await asyncio.to_thread(_samples, status, body)

    async def _post(self, form: dict[str, str]) -> tuple[int, bytes]:
        if self._session is None:
            raise RuntimeError("PromQLClient is used outside of its context")
        headers: dict[str, str] = {}
        if self._settings.token_file:
            # Read each time: such tokens are renewed in place.
            token = await asyncio.to_thread(Path(self._settings.token_file).read_text)
            headers["Authorization"] = f"Bearer {token.strip()}"
        async with self._session.get(self._url, params=form, headers=headers) as answer:
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MAX_BYTES:
                    raise NotAnswered(f"the answer is longer than {MAX_BYTES >> 20} MiB")
            return answer.status, bytes(body)


def _samples(status: int, body: bytes) -> list[Sample]:
    if status != 200:
        raise NotAnswered(f"HTTP {status}: {_error(body)}")
    try:
        found = _Answer.model_validate_json(body)
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
        where = ".".join(map(str, first["loc"])) or "body"
        raise NotAnswered(f"not an answer of Prometheus ({where}: {first['msg']})") from None
    return [Sample(one.metric, *one.value) for one in found.data.result]


def _error(body: bytes) -> str:
    try:
        return _Failure.model_validate_json(body).error[:_SHOWN]
    except ValidationError:
        return body[:_SHOWN].decode(errors="replace")
