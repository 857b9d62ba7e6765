"""One call to the engine of the same pod: a deadline, a bounded answer, typed errors. For the adapters beside this
file."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, Literal, cast
from uuid import uuid4

import aiohttp

from shoal.engine.port import CANARY_ID, EngineGarbled, EngineRefused, EngineTimeout, EngineUnreachable

ANSWER_BYTES: Final = 8 << 20
"""Longest answer that is read."""

Role = Literal["api", "admin"]
"""Whose key a call carries."""


class EngineHTTP:
    """Calls one engine. Every call has a deadline and raises EngineError, nothing else."""

    def __init__(self, session: aiohttp.ClientSession, url: str, keys: Mapping[Role, str | None]) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._keys = keys

    async def get(self, path: str, seconds: float, *, auth: Role | None) -> bytes:
        """The body of a 200. Raises EngineRefused for another status."""
        status, body = await self.call("GET", path, seconds, auth=auth)
        if status != 200:
            raise EngineRefused(path, status)
        return body

    async def greedy(self, prompt: str, tokens: int, seconds: float) -> str:
        """What the base model writes after a prompt at temperature 0. Raises EngineRefused where it writes nothing."""
        listed = json_object(await self.get("/v1/models", seconds, auth="api"), "/v1/models").get("data")
        models = cast("list[Any]", listed) if isinstance(listed, list) else []
        cards = [cast("dict[str, Any]", each) for each in models if isinstance(each, dict)]
        name: Any = next((card.get("id") for card in cards if not card.get("parent")), None)  # no adapter
        if not isinstance(name, str):
            raise EngineGarbled("/v1/models: names no model")
        path = "/v1/completions"
        rid = f"{CANARY_ID}{uuid4().hex}"
        body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "rid": rid}
        status, answer = await self.call("POST", path, seconds, auth="api", body=body, rid=rid)
        if status != 200:
            raise EngineRefused(path, status)
        match json_object(answer, path):
            case {"choices": [{"text": str(text)}, *_]}:
                return text
            case _:
                raise EngineGarbled(f"{path}: no text")

    async def call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        seconds: float,
        *,
        auth: Role | None,
        body: object = None,
        rid: str | None = None,
    ) -> tuple[int, bytes]:
        """One call: its status and the body of the answer. `rid`: the request's id, for engines that read it from a
        header."""
        key = self._keys[auth] if auth else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if rid is not None:
            headers["X-Request-Id"] = rid
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method, self._url + path, headers=headers, json=body, allow_redirects=False
                ) as response,
            ):
                return response.status, await _read(response, path)
        except TimeoutError:
            raise EngineTimeout(f"{path} did not answer within {seconds:g} s") from None
        except (aiohttp.ClientConnectionError, ConnectionError) as error:
            raise EngineUnreachable(f"{path}: {type(error).__name__}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineGarbled(f"{path}: {type(error).__name__}") from None


async def _read(response: aiohttp.ClientResponse, path: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise EngineGarbled(f"{path}: more than {ANSWER_BYTES} bytes")
    return bytes(body)


def json_object(body: bytes, path: str) -> dict[str, Any]:
    """The JSON object in `body`. Raises EngineGarbled."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise EngineGarbled(f"{path}: not JSON") from None
    if not isinstance(answer, dict):
        raise EngineGarbled(f"{path}: not a JSON object")
    return cast("dict[str, Any]", answer)
