"""GET /v1/traffic on the operations port: facts of the last requests, for `kubectl shoal advise`. A person's call is
answered for all gateways, a gateway's call for this one."""

import asyncio
import base64
import math
from typing import Final

from starlette.responses import Response

from shoal.api import keys, names
from shoal.api.rights import TRAFFIC
from shoal.api.traffic import HEAD, MOST_ROWS, MissingTraffic, ModelTraffic, TrafficPage
from shoal.core.advice.marks import MarkSealer
from shoal.gateway.traffic import TrafficSample
from shoal.kube.callers import Callers
from shoal.net.errors import Problem
from shoal.net.gatewaycalls import GatewayPods
from shoal.net.gatheredpage import GatheredPage, MissingPart
from shoal.net.installkey import KeyRing
from shoal.net.pages import denial_response
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

PEER_SECONDS: Final = 12.0
WAIT_SECONDS: Final = 12.0
"""For which a person's call waits for those before it. With its own answer that is less than the 30 s of `kubectl
shoal`."""
MOST_WAITING: Final = 16
"""People's calls that wait for their turn."""
_BUSY: Final = "others are asking for the same page: try again in a moment"
USUAL_ROWS: Final = 20_000
_MOST_BYTES: Final = 128 * 1024 * 1024
"""Of a peer's answer."""
_AT_ONCE: Final = 250
"""Rows that are sealed before others have their turn on the event loop."""
_HEAD: Final = HEAD.size


class TrafficApi:
    def __init__(
        self,
        sample: TrafficSample,
        key_ring: KeyRing,
        gateway: str,
        peers: GatewayPods = lambda: (),
        port: int = names.OPS_PORT,
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
    ) -> None:
        """`gateway`: name of this pod. `callers` knows people by their tokens; None: keys only."""
        self._sample = sample
        self._key_ring = key_ring
        self._gateway = gateway
        self.page = GatheredPage(names.TRAFFIC_PATH, TRAFFIC, key_ring, peers, port, credentials, callers)
        self._sealing = asyncio.Semaphore(1)
        self._turn = asyncio.Lock()
        """Held while a person's call is answered: all rows of all gateways are in memory then."""
        self.waiting = 0
        """People's calls that wait for their turn."""

    async def ops(self, request: ShellRequest) -> Response:
        """Serves the operations port."""
        try:
            page = await self._page(request)
        except Problem as problem:
            return denial_response(problem)
        return Response(page.model_dump_json(), media_type="application/json")

    async def _page(self, request: ShellRequest) -> TrafficPage:
        await self.page.guard(request)
        if request.method != "GET":
            raise Problem(405, "use GET", {"allow": "GET"})
        namespace, name = request.one("namespace"), request.one("model")
        since, most = _number(request, "since", 0.0), int(_number(request, "requests", USUAL_ROWS))
        if not 0 < most <= MOST_ROWS:
            raise Problem(400, f"`requests` must be from 1 to {MOST_ROWS:,}")
        if self.page.for_gateway(request):
            models = await self._own(namespace, name, since, most)
            return TrafficPage(since=self._sample.began, models=models)
        return await request.while_connected(self._in_turn(namespace, name, since, most))

    async def _in_turn(self, namespace: str | None, name: str | None, since: float, most: int) -> TrafficPage:
        """Answers a person, after those who came before."""
        if self.waiting >= MOST_WAITING:
            raise Problem(503, _BUSY, {"retry-after": "5"})
        self.waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise Problem(503, _BUSY, {"retry-after": "5"}) from None
        finally:
            self.waiting -= 1
        try:
            return await self._everywhere(namespace, name, since, most)
        finally:
            self._turn.release()

    async def _everywhere(self, namespace: str | None, name: str | None, since: float, most: int) -> TrafficPage:
        peers, missing = self.page.peers()
        share = math.ceil(most / (1 + len(peers)))
        query = {"namespace": namespace, "model": name, "since": str(since), "requests": str(share)}
        gathered = self.page.gather(peers, query, TrafficPage, seconds=PEER_SECONDS, most_bytes=_MOST_BYTES)
        asked = asyncio.ensure_future(gathered)
        try:
            models = await self._own(namespace, name, since, share)
            answers = await asked
        finally:
            asked.cancel()
        began = self._sample.began
        for answer in answers:
            if isinstance(answer, MissingPart):
                missing.append(answer)
            else:
                began = max(began, answer.since)
                models += answer.models
        told = tuple(MissingTraffic(gateway=each.gateway, reason=each.reason) for each in missing)
        return TrafficPage(since=began, models=models, missing=told)

    async def _own(self, namespace: str | None, name: str | None, since: float, most: int) -> tuple[ModelTraffic, ...]:
        """`most` rows of each Model."""
        secret = next(iter(self._key_ring.bearers_of("gateway", keys.PROMPT_MARKS)), "")
        if not secret:
            raise Problem(503, "no install key is known here")
        sealer = MarkSealer(secret.encode()[:64])
        found: list[ModelTraffic] = []
        # Not held during a call of another gateway: two that call each other would wait for each other.
        async with self._sealing:
            for model in self._sample.models():
                where, _, called = model.partition("/")
                if namespace in (None, where) and name in (None, called):
                    found.append(await self._model(model, sealer, since, most))
        return tuple(found)

    async def _model(self, model: str, sealer: MarkSealer, since: float, most: int) -> ModelTraffic:
        complete, kept = self._sample.newest(model, since, most)
        rows = bytearray()
        for number, each in enumerate(kept):
            rows += each[:_HEAD]
            rows += sealer.seal(each[_HEAD:])
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
        return ModelTraffic(
            model=model,
            gateway=self._gateway,
            since=complete,
            classes=tuple(self._sample.classes),
            requests=len(kept),
            rows=base64.b64encode(rows).decode(),
        )


def _number(request: ShellRequest, name: str, otherwise: float) -> float:
    text = request.one(name)
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise Problem(400, f"`{name}` must be a number")
    return found
