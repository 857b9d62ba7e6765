"""The agent's HTTP server: the replica's stream, its acknowledgements, its aborts and its adapters for those who have a
key, /healthz and /metrics for all."""

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ValidationError

from shoal.agent.adapters.service import AdapterService
from shoal.agent.adapters.web import BODY_BYTES, AdaptersApi
from shoal.agent.drain import Drain
from shoal.agent.observe import EngineObserver
from shoal.agent.stream import AgentStream
from shoal.agent.streammetrics import AgentMetrics
from shoal.api import names
from shoal.api.keys import AgentKeys
from shoal.api.replica import HEARTBEAT_SECONDS, Abort, Ack
from shoal.engine.adapters import EngineAdapters
from shoal.engine.client import EngineClient, EngineError
from shoal.net.hub import Caller, HubReader, TooManyReaders
from shoal.net.tls import TLSCredentials, refusal

WRITE_SECONDS: Final = 10.0
"""A reader that takes no byte for so long is dropped."""
KEYS_SECONDS: Final = 2.0
"""Between two tries to read a key file that is not there or not usable."""
ACK_SECONDS: Final = 5.0
ABORT_SECONDS: Final = 2.0
"""In which a request is aborted, with the wait for its turn."""
_ABORTS_AT_ONCE: Final = 8
"""Calls to the engine; the agent's own look at it must find a connection."""
CERTIFICATE_SECONDS: Final = 5.0
"""Between two looks at the certificate's files."""
_NAME: Final = 253
"""Longest name of a pod; what a caller says of itself is cut there."""

log = structlog.get_logger()

_T = TypeVar("_T", bound=BaseModel)


def read_keys(path: Path) -> AgentKeys:
    """Reads `agent.json`. Raises ValueError that says what is wrong, without its content."""
    try:
        return AgentKeys.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) or problem["type"] for problem in error.errors())
        raise ValueError(f"{path} is not the agent's key file: {fields}") from None


class EngineAgent:
    """One engine pod's agent: observes in the background and serves what it sees."""

    def __init__(
        self,
        engine_url: str,
        keys_file: Path,
        hub: AgentStream,
        observer: EngineObserver,
        drain: Drain,
        adapters: AdapterService | None = None,
        credentials: TLSCredentials | None = None,
    ) -> None:
        """With `credentials` whoever has a key is answered over mutual TLS only."""
        self._engine_url = engine_url
        self._keys_file = keys_file
        self._hub = hub
        self._observer = observer
        self._drain = drain
        self._adapters = adapters
        self.credentials = credentials
        self._keys: AgentKeys | None = None
        self._engine: EngineClient | None = None
        """None: not observed yet."""
        self._aborting = asyncio.Semaphore(_ABORTS_AT_ONCE)
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(hub, observer, drain))
        self._registry.register(AgentMetrics(hub.boot, lambda: hub.published))
        if adapters is not None:
            self._registry.register(adapters.metrics)

    def app(self) -> web.Application:
        """The web application; its observing starts and ends with it."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(names.REPLICA_PATH, self._replica)
        app.router.add_post(names.ACK_PATH, self._ack)
        app.router.add_post(names.ABORT_PATH, self._abort)
        app.router.add_routes(AdaptersApi(self._adapters, self._drain, self._hub.boot, self._caller_role).routes())
        return app

    async def observe(self) -> None:
        """Waits for the keys, then looks at the engine for ever."""
        await self._load_keys()
        assert self._keys is not None  # noqa: S101 - _load_keys returns with keys only
        # trust_env stays off: the engine is in this pod, and a proxy must not come between.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=4)) as session:
            engine = EngineClient(session, self._engine_url, api_key=self._keys.engine, admin_key=self._keys.admin)
            self._engine = engine
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._observer.run(engine))
                    if self._adapters is not None:
                        tasks.create_task(self._adapters.run(EngineAdapters(engine)))
            finally:
                self._engine = None

    async def _load_keys(self) -> None:
        problem = ""
        while True:
            try:
                self._keys = await asyncio.to_thread(read_keys, self._keys_file)
                log.info("agent.keys_loaded")
                return
            except ValueError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.error("agent.no_keys", problem=problem, consequence="/v1/replica answers 503 until it is there")
            await asyncio.sleep(KEYS_SECONDS)

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")

    async def _replica(self, request: web.Request) -> web.StreamResponse:
        if self._keys is None:
            return _refusal(503, "the agent has no keys yet")
        role = self._role(request.headers.get("Authorization", ""), self._keys)
        if role is None:
            return _refusal(401, "a key of this replica is needed, as a bearer token")
        if (why := self._unproved(request, role)) is not None:
            return _refusal(403, why)
        said = (request.headers.get(header, "")[:_NAME] for header in (names.HEADER_CALLER, names.HEADER_BOOT))
        caller = Caller(role, *said)
        try:
            with self._hub.reader(caller) as reader:
                # From before the first byte, so that no gateway ever reads what it could act on without being known.
                if role == "gateway":
                    self._drain.opened(caller)
                try:
                    return await self._stream(request, reader)
                finally:
                    if role == "gateway":
                        self._drain.closed(caller)
        except TooManyReaders:
            return _refusal(503, "too many readers")

    async def _stream(self, request: web.Request, reader: HubReader) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                try:
                    message = await reader.next(HEARTBEAT_SECONDS)
                except TimeoutError:
                    message = self._hub.heartbeat()
                if message is None:
                    break
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(message)
        return response

    async def _ack(self, request: web.Request) -> web.Response:
        ack = await self._from_gateway(request, Ack, "an acknowledgement")
        if isinstance(ack, web.Response):
            return ack
        if ack.agent_boot != self._hub.boot:
            return _refusal(409, "this agent has restarted since: connect again")
        if ack.seq > self._hub.seq or min((ack.running, *ack.running_by_adapter.values())) < 0:
            return _refusal(400, f"not an acknowledgement: seq {ack.seq}, running {ack.running}")
        self._drain.acked(ack)
        if self._adapters is not None:
            self._adapters.acked(ack)
        return web.Response(status=204)

    async def _abort(self, request: web.Request) -> web.Response:
        """Lets whole ids of gateways' requests through (`replica.Abort`): the engine takes one for a prefix."""
        asked = await self._from_gateway(request, Abort, "an abort")
        if isinstance(asked, web.Response):
            return asked
        try:
            async with asyncio.timeout(ABORT_SECONDS), self._aborting:
                if (engine := self._engine) is None:
                    return _refusal(503, "the engine is not observed yet")
                await engine.abort(asked.rid)
                for number in range(asked.prompts):
                    await engine.abort(f"{asked.rid}_{number}")
        except TimeoutError:
            return _refusal(503, f"the engine could not be asked within {ABORT_SECONDS:g} s")
        except EngineError as error:
            return _refusal(503, str(error))
        return web.Response(status=204)

    async def _from_gateway(self, request: web.Request, kind: type[_T], what: str) -> _T | web.Response:
        """The body of a call that is for gateways, or the refusal."""
        if self._keys is None:
            return _refusal(503, "the agent has no keys yet")
        if self._role(request.headers.get("Authorization", ""), self._keys) != "gateway":
            return _refusal(401, "a gateway's key of this replica is needed, as a bearer token")
        if (why := self._unproved(request, "gateway")) is not None:
            return _refusal(403, why)
        try:
            async with asyncio.timeout(ACK_SECONDS):
                return kind.model_validate_json(await request.read())
        except TimeoutError:
            return _refusal(408, f"the body did not arrive within {ACK_SECONDS:g} s")
        except ValidationError as error:
            faults = ", ".join(".".join(map(str, fault["loc"])) or fault["type"] for fault in error.errors())
            return _refusal(400, f"not {what}: {faults}")

    def _caller_role(self, request: web.Request) -> str | web.Response:
        if self._keys is None:
            return _refusal(503, "the agent has no keys yet")
        role = self._role(request.headers.get("Authorization", ""), self._keys)
        if role not in ("gateway", "operator"):
            return _refusal(401, "a gateway's or an operator's key of this replica is needed, as a bearer token")
        if (why := self._unproved(request, role)) is not None:
            return _refusal(403, why)
        return role

    def _unproved(self, request: web.Request, role: str) -> str | None:
        """Why whoever has a key of `role` is not answered on this connection; None: it is."""
        transport = request.transport
        if self.credentials is None or transport is None:
            return None
        secured = transport.get_extra_info("sslcontext") is not None
        shown = self.credentials.role(transport.get_extra_info) if secured else None
        return refusal(self.credentials, role, secured=secured, shown=shown)

    @staticmethod
    def _role(authorization: str, keys: AgentKeys) -> str | None:
        """The role of the caller. All keys are compared, so that the time tells nothing."""
        scheme, _, given = authorization.partition(" ")
        found = None
        for role, key in keys.callers.items():
            if hmac.compare_digest(given.encode(), key.encode()):
                found = role
        return found if scheme.lower() == "bearer" and given else None


class _Metrics(Collector):
    def __init__(self, hub: AgentStream, observer: EngineObserver, drain: Drain) -> None:
        self._hub = hub
        self._observer = observer
        self._drain = drain

    def collect(self) -> list[Metric]:
        readers = GaugeMetricFamily("shoal_agent_stream_readers", "Open streams.", value=self._hub.readers)
        told = CounterMetricFamily("shoal_agent_stream_messages", "Messages with keys.", value=self._hub.seq)
        dropped = CounterMetricFamily("shoal_agent_stream_dropped", "Readers too slow.", value=self._hub.dropped)
        errors = CounterMetricFamily("shoal_agent_engine_errors", "Failed calls to the engine.", labels=["kind"])
        for kind, count in self._observer.errors.items():
            errors.add_metric([kind], count)
        draining = GaugeMetricFamily("shoal_agent_draining", "1 while it drains.", value=float(self._drain.draining))
        stalled = GaugeMetricFamily(
            "shoal_agent_stalled", "1 while it is stalled.", value=float(self._observer.stalled)
        )
        return [readers, told, dropped, errors, draining, stalled]


def _refusal(status: int, message: str) -> web.Response:
    headers = {503: {"Retry-After": "2"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status)
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


async def _keep_fresh(credentials: TLSCredentials) -> None:
    """Reads the certificate again whenever the operator has renewed it."""
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        credentials.refresh()


async def serve(
    agent: EngineAgent,
    hub: AgentStream,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    tls_port: int = names.AGENT_TLS_PORT,
    beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
) -> None:
    """Serves until `stop`, then ends every stream and returns at once. What is `beside` it runs until then."""
    runner = web.AppRunner(agent.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        working: list[Callable[[], Coroutine[None, None, None]]] = [agent.observe, *beside]
        if (credentials := agent.credentials) is not None:
            credentials.refresh()
            await web.TCPSite(runner, host, tls_port, ssl_context=credentials.server()).start()
            working.append(partial(_keep_fresh, credentials))
        log.info("agent.serving", host=host, port=port, boot=hub.boot, tls=agent.credentials is not None)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each()) for each in working]
            await stop.wait()
            for task in running:
                task.cancel()
    finally:
        hub.close()
        await runner.cleanup()
