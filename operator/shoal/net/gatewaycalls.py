"""Calls of a gateway to the other gateways, on their port for operations."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlencode

import aiohttp

from shoal.api import names
from shoal.api.keys import Role
from shoal.core import facts
from shoal.net.stream import gateway_peer
from shoal.net.tls import NoCertificate, TLSCredentials, dial

GatewayPods = Callable[[], Collection[facts.Pod] | None]
"""The other gateways; None: unknown."""
MissingGateways = list[dict[str, str]]
"""`gateway` and `reason` of each that cannot be called."""


class GatewayKeys(Protocol):
    """The part of the key ring that is used here."""

    def demand_keys(self, role: Role) -> Iterable[str]: ...


class NoAnswer(NamedTuple):
    reason: str


class GatewayCalls:
    def __init__(
        self,
        keys: GatewayKeys,
        peers: GatewayPods,
        port: int = names.OPS_PORT,
        credentials: TLSCredentials | None = None,
    ) -> None:
        self._keys = keys
        self._peers = peers
        self._port = port
        self._credentials = credentials
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def reachable(self) -> tuple[list[facts.Pod], MissingGateways]:
        """The gateways that can be called, and those that cannot."""
        found = self._peers()
        if found is None:
            return [], [{"gateway": "?", "reason": "the other gateways are not known: the API server does not answer"}]
        there = [pod for pod in found if pod.ip is not None]
        return there, [
            {"gateway": pod.name, "reason": "it has no address"} for pod in found if pod.ip is None and pod.was_ready
        ]

    async def call(
        self,
        method: Literal["GET", "DELETE"],
        pod: facts.Pod,
        path: str,
        query: Mapping[str, str | None],
        *,
        seconds: float,
        most_bytes: int | None = None,
    ) -> bytes | NoAnswer:
        """The body of an answer with status 200. `query`: without its unknown values; `most_bytes`: of the body."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=2)
        given = urlencode({name: value for name, value in query.items() if value is not None})
        peer = gateway_peer(
            pod.uid, pod.key, pod.ip or "", "", mtls=pod.mtls, credentials=self._credentials, port=self._port
        )
        url = f"{peer.base_url}{path}?{given}"
        try:
            secured = dial(peer.credentials, peer.server_name)
        except NoCertificate as none:
            return NoAnswer(str(none))
        why = "no install key is known here"
        for key in self._keys.demand_keys("gateway"):
            headers = {"authorization": f"Bearer {key}"}
            try:
                async with self._session.request(
                    method, url, headers=headers, timeout=timeout, allow_redirects=False, **secured
                ) as response:
                    raw = await _body(response, most_bytes)
            except TimeoutError:
                return NoAnswer("it did not answer in time")
            except (aiohttp.ClientError, OSError):
                return NoAnswer("it cannot be reached")
            if raw is None:
                return NoAnswer("its answer is too large")
            if response.status == 200:
                return raw
            why = f"it answered with status {response.status}"
            if response.status != 401:
                break
        return NoAnswer(why)


async def _body(response: aiohttp.ClientResponse, most: int | None) -> bytes | None:
    """None: it is larger."""
    if most is None:
        return await response.read()
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)
