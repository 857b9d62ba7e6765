"""The agent's HTTP server: the replica's stream, its acknowledgements, its aborts and its adapters for those who have a
key, /healthz and /metrics for all."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import aiohttp
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ValidationError
from starlette.responses import PlainTextResponse, Response

from shoal.agent.adapters.service import AdapterService
from shoal.agent.adapters.web import BODY_BYTES, AdaptersApi
from shoal.agent.admission import AdmissionApp
from shoal.agent.drain import Drain
from shoal.agent.observe import EngineObserver
from shoal.agent.stream import AgentStream
from shoal.agent.streammetrics import AgentMetrics
from shoal.api import names
from shoal.api.keys import AgentKeys, Role
from shoal.api.replica import CANARY_PROMPTS, CANARY_TOKENS, HEARTBEAT_SECONDS, Abort, Ack, CanaryAnswer
from shoal.engine.kinds import DEFAULT
from shoal.engine.port import EngineClient, EngineError, EngineKind
from shoal.net.errors import Problem
from shoal.net.hub import Caller, EventStream
from shoal.net.roles import RoleGuard
from shoal.net.server import make_server
from shoal.net.serving import KEEP_ALIVE_SECONDS, serving
from shoal.net.shell import GET, Guard, Shell, ShellRequest
from shoal.net.tls import TLSCredentials

KEYS_SECONDS: Final = 2.0
"""Between two tries to read a key file that is not there or not usable."""
ACK_SECONDS: Final = 5.0
ABORT_SECONDS: Final = 2.0
"""In which a request is aborted, with the wait for its turn."""
_ABORTS_AT_ONCE: Final = 8
"""Calls to the engine; the agent's own look at it must find a connection."""
CANARY_SECONDS: Final = 20.0
CERTIFICATE_SECONDS: Final = 5.0
"""Between two looks at the certificate's files."""

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
        *,
        kind: EngineKind = DEFAULT,
        max_running: int | None = None,
    ) -> None:
        """With `credentials` a caller with a key is answered over mutual TLS only. `kind`, `max_running`: of the
        engine."""
        self._kind = kind
        self._max_running = max_running
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
        self._canaries = asyncio.Semaphore(1)
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(hub, observer, drain))
        self._registry.register(AgentMetrics(hub.boot, lambda: hub.published))
        if adapters is not None:
            self._registry.register(adapters.metrics)

    def shell(self) -> Shell:
        """What is served; the observing (`observe`) runs beside it."""
        shell = Shell("the agent")
        shell.route(GET, "/healthz", self._healthz)
        shell.route(GET, "/metrics", self._metrics)
        shell.route(GET, names.REPLICA_PATH, self._replica, self._guard(None, "a key"))
        gateways = self._guard(("gateway",), "a gateway's key")
        shell.route(("POST",), names.ACK_PATH, self._ack, gateways)
        shell.route(("POST",), names.ABORT_PATH, self._abort, gateways)
        operators = self._guard(("operator",), "an operator's key")
        shell.route(("POST",), names.CANARY_PATH, self._canary, operators)
        both = self._guard(("gateway", "operator"), "a gateway's or an operator's key")
        AdaptersApi(self._adapters, self._drain, self._hub.boot).add(shell, both)
        return shell

    @property
    def engine_key(self) -> str | None:
        """The key with which the engine is called; None: not known yet."""
        return None if self._keys is None else self._keys.engine

    async def observe(self) -> None:
        """Waits for the keys, then looks at the engine for ever."""
        await self._load_keys()
        assert self._keys is not None  # noqa: S101 - _load_keys returns with keys only
        # trust_env stays off: the engine is in this pod, and a proxy must not come between.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=4)) as session:
            engine = self._kind.agent.connect(
                session,
                self._engine_url,
                api_key=self._keys.engine,
                admin_key=self._keys.admin,
                max_running=self._max_running,
            )
            self._engine = engine.client
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._observer.run(engine.client))
                    if self._adapters is not None:
                        tasks.create_task(self._adapters.run(engine.adapters))
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

    def _guard(self, roles: tuple[Role, ...] | None, which: str) -> Guard:
        """Lets callers with a key of one of `roles` through (None: of any role)."""

        async def guard(request: ShellRequest) -> None:
            if self._keys is None:
                raise _later("the agent has no keys yet")
            callers = self._keys.callers
            needed = f"{which} of this replica is needed, as a bearer token"
            known = roles or cast("tuple[Role, ...]", tuple(callers))

            def key_of(role: Role) -> tuple[str, ...]:
                return (callers[role],) if role in callers else ()

            await RoleGuard(known, key_of, needed, credentials=self.credentials)(request)

        return guard

    async def _healthz(self, _: ShellRequest) -> Response:
        return PlainTextResponse("ok\n")

    async def _metrics(self, _: ShellRequest) -> Response:
        return PlainTextResponse(generate_latest(self._registry))

    async def _replica(self, request: ShellRequest) -> EventStream:
        caller = request.caller
        # Entered before the first byte, so that no gateway ever reads what it could act on without being known.
        during = self._listening(caller) if caller.role == "gateway" else None
        return EventStream(self._hub, caller, HEARTBEAT_SECONDS, during)

    @contextlib.contextmanager
    def _listening(self, caller: Caller) -> Generator[None]:
        self._drain.opened(caller)
        try:
            yield
        finally:
            self._drain.closed(caller)

    async def _ack(self, request: ShellRequest) -> Response:
        ack = await _body(request, Ack, "an acknowledgement")
        if ack.agent_boot != self._hub.boot:
            raise Problem(409, "this agent has restarted since: connect again")
        if ack.seq > self._hub.seq or min((ack.running, *ack.running_by_adapter.values())) < 0:
            raise Problem(400, f"not an acknowledgement: seq {ack.seq}, running {ack.running}")
        self._drain.acked(ack)
        if self._adapters is not None:
            self._adapters.acked(ack)
        return Response(status_code=204)

    async def _abort(self, request: ShellRequest) -> Response:
        """Lets whole ids of gateways' requests through (`replica.Abort`): the engine takes one for a prefix."""
        asked = await _body(request, Abort, "an abort")
        try:
            async with asyncio.timeout(ABORT_SECONDS), self._aborting:
                if (engine := self._engine) is None:
                    raise _later("the engine is not observed yet")
                await engine.abort(asked.rid)
                for number in range(asked.prompts):
                    await engine.abort(f"{asked.rid}_{number}")
        except TimeoutError:
            raise _later(f"the engine could not be asked within {ABORT_SECONDS:g} s") from None
        except EngineError as error:
            raise _later(str(error)) from None
        return Response(status_code=204)

    async def _canary(self, request: ShellRequest) -> Response:
        """The same prompts for every replica, and none of the caller's: what is asked is no way to use the engine."""
        numbers = {str(number): prompt for number, prompt in enumerate(CANARY_PROMPTS)}
        prompt = numbers.get(request.one("prompt") or "0")
        if prompt is None:
            raise Problem(400, f"prompt is one of {', '.join(numbers)}")
        try:
            async with asyncio.timeout(CANARY_SECONDS), self._canaries:
                if (engine := self._engine) is None:
                    raise _later("the engine is not observed yet")
                text = await engine.greedy(prompt, CANARY_TOKENS, CANARY_SECONDS)
        except TimeoutError:
            raise _later(f"the engine did not answer within {CANARY_SECONDS:g} s") from None
        except EngineError as error:
            raise _later(str(error)) from None
        answer = CanaryAnswer(prompt=prompt, text=text)
        return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


class _Metrics(Collector):
    def __init__(self, hub: AgentStream, observer: EngineObserver, drain: Drain) -> None:
        self._hub = hub
        self._observer = observer
        self._drain = drain

    def collect(self) -> list[Metric]:
        readers = GaugeMetricFamily("shoal_agent_stream_readers", "Open streams.", value=self._hub.readers)
        told = CounterMetricFamily("shoal_agent_stream_messages", "Messages published.", value=self._hub.seq)
        dropped = CounterMetricFamily(
            "shoal_agent_stream_dropped",
            "Subscribers that were disconnected because they read too slowly.",
            value=self._hub.dropped,
        )
        errors = CounterMetricFamily("shoal_agent_engine_errors", "Failed calls to the engine.", labels=["kind"])
        for kind, count in self._observer.errors.items():
            errors.add_metric([kind], count)
        draining = GaugeMetricFamily(
            "shoal_agent_draining", "1 while the replica drains.", value=float(self._drain.draining)
        )
        stalled = GaugeMetricFamily(
            "shoal_agent_stalled", "1 while the engine is stalled.", value=float(self._observer.stalled)
        )
        return [readers, told, dropped, errors, draining, stalled]


async def _body(request: ShellRequest, kind: type[_T], what: str) -> _T:
    """The message in a call's body. Raises Problem."""
    try:
        return kind.model_validate_json(await request.read(BODY_BYTES, ACK_SECONDS))
    except ValidationError as error:
        faults = ", ".join(".".join(map(str, fault["loc"])) or fault["type"] for fault in error.errors())
        raise Problem(400, f"not {what}: {faults}") from None


def _later(message: str) -> Problem:
    return Problem(503, message, {"retry-after": "2"})


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
    admits_for: str | None = None,
) -> None:
    """Serves until `stop`, then ends every stream and returns at once. What is `beside` it runs until then.
    `admits_for`: the pod's address, where proxies bring requests; None: they do not."""
    shell = agent.shell()
    server = partial(make_server, shell, host=host, keep_alive=KEEP_ALIVE_SECONDS, stop_seconds=1)
    servers = [server(port=port)]
    working: list[Callable[[], Coroutine[None, None, None]]] = [agent.observe, *beside]
    if (credentials := agent.credentials) is not None:
        credentials.refresh()
        servers.append(server(port=tls_port, credentials=credentials, certificate_required=True))
        working.append(partial(_keep_fresh, credentials))
    if admits_for is not None:
        admission = AdmissionApp(admits_for, lambda: agent.engine_key)
        # Longer than the sidecar keeps a connection to it, so that none is closed under a request.
        servers.append(
            make_server(admission, host="127.0.0.1", port=names.ADMISSION_PORT, keep_alive=30, stop_seconds=1)
        )
    async with serving(*servers):
        log.info("agent.serving", host=host, port=port, boot=hub.boot, tls=credentials is not None)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(each()) for each in working]
                await stop.wait()
                for task in running:
                    task.cancel()
        finally:
            hub.close()
