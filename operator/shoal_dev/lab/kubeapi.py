"""A small client of the lab's own API server: what bootstrap, Services, DNS and volumes need of it."""

import asyncio
import base64
import ssl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import aiohttp
import orjson
import structlog

_log = structlog.get_logger()
_TIMEOUT: Final = aiohttp.ClientTimeout(total=15, connect=5)
_WATCH_SECONDS: Final = 300
"""The server ends a watch after so long, and the client goes on from where it stopped."""

Object = dict[str, Any]


class KubeAPIError(Exception):
    """The API server answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """Raises ApiError for error answers, aiohttp.ClientError or TimeoutError when there is none."""

    def __init__(self, kubeconfig: Path) -> None:
        config = orjson.loads(kubeconfig.read_bytes())  # written by pki.py: JSON, everything inside
        self.server: str = config["clusters"][0]["cluster"]["server"]
        self._authority = base64.b64decode(config["clusters"][0]["cluster"]["certificate-authority-data"])
        user = config["users"][0]["user"]
        self._client = base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"])
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        context = ssl.create_default_context(cadata=self._authority.decode())
        with tempfile.NamedTemporaryFile() as file:  # mode 0600; the ssl module reads keys from files only
            file.write(self._client)
            file.flush()
            context.load_cert_chain(file.name)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), timeout=_TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use `async with`")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """One call; answers that are no JSON (as /readyz) come back as {}."""
        async with self._open().request(
            method,
            self.server + path,
            data=None if body is None else orjson.dumps(body),
            params=params,
            headers={"Content-Type": content_type} if body is not None else None,
        ) as response:
            data = await response.read()
            json: Object = orjson.loads(data) if response.content_type == "application/json" else {}
            if response.status >= 400:
                raise KubeAPIError(response.status, str(json.get("message") or data[:200]))
            return json

    async def apply(self, path: str, body: Mapping[str, Any]) -> Object:
        """Server-side apply as `shoal-lab`, by force."""
        return await self.request(
            "PATCH", path, body, {"fieldManager": "shoal-lab", "force": "true"}, "application/apply-patch+yaml"
        )

    async def watch(self, path: str, version: str, on_event: Callable[[str, Object], None]) -> None:
        """One watch until the server ends it. `on_event` gets bookmarks too.

        Raises ApiError with status 410 when `version` is too old.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        # Bookmarks come every minute; silence for longer means a dead connection.
        timeout = aiohttp.ClientTimeout(total=_WATCH_SECONDS + 30, connect=5, sock_read=100)
        async with self._open().get(self.server + path, params=params, timeout=timeout) as response:
            if response.status >= 400:
                raise KubeAPIError(response.status, (await response.text())[:200])
            buffer = b""
            async for chunk in response.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    event = orjson.loads(line)
                    if event["type"] == "ERROR":
                        raise KubeAPIError(int(event["object"].get("code") or 500), str(event["object"].get("message")))
                    on_event(event["type"], event["object"])


def key_of(item: Object) -> str:
    """NAMESPACE/NAME, or /NAME for an object without namespace."""
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


class LabReflector:
    """Keeps `objects` equal to what the API server has at `path`; keeps what it knew while the server is away."""

    def __init__(self, api: Api, path: str, on_change: Callable[[Literal["upsert", "delete"], Object], None]) -> None:
        self._api = api
        self._path = path
        self._on_change = on_change
        self.objects: dict[str, Object] = {}
        self.synced = asyncio.Event()
        self._version: str | None = None
        """To go on from, also after a watch that broke; None: list first."""

    async def run(self) -> None:
        """Until cancelled. Errors of the API server are logged and tried again."""
        while True:
            try:
                if self._version is None:
                    self._version = await self._list()
                await self._api.watch(self._path, self._version, self._event)
            except KubeAPIError as error:
                self._version = None
                _log.info("watch_restarts", path=self._path, error=str(error))
                await asyncio.sleep(0.1 if error.status == 410 else 1.0)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                # The same version again: the server's watch cache tells when it is too old.
                _log.info("api_server_away", path=self._path, error=str(error) or type(error).__name__)
                await asyncio.sleep(0.5)

    async def _list(self) -> str:
        answer = await self._api.request("GET", self._path)
        found = {key_of(item): item for item in answer["items"]}
        for key in self.objects.keys() - found.keys():
            self._on_change("delete", self.objects.pop(key))
        for key, item in found.items():
            self.objects[key] = item
            self._on_change("upsert", item)
        self.synced.set()
        return str(answer["metadata"]["resourceVersion"])

    def _event(self, kind: str, item: Object) -> None:
        self._version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self.objects.pop(key_of(item), None)
            self._on_change("delete", item)
        else:
            self.objects[key_of(item)] = item
            self._on_change("upsert", item)
