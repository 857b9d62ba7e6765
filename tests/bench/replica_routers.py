"""The rules that `bench_replicas` compares, and the processes of their routers: two of each, which clients take in
turns."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from tests.bench.replica_adapters import Adapters
from tests.bench.replica_clients import Entrance
from tests.bench.replica_gateway import CLAIM
from tests.bench.replica_processes import READY_SECONDS, Helper, helper, started
from tests.support.controlplane import free_ports
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.engines import EngineProcess
from tests.support.gateway import API_KEY

ROUTERS: Final = 2


@dataclass(frozen=True, slots=True)
class Fleet:
    """What routers stand in front of."""

    engines: Sequence[EngineProcess]
    adapters: Adapters | None = None

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]


@dataclass(frozen=True, slots=True)
class Routers:
    """Of one rule, while they run."""

    entrance: Entrance
    helpers: Sequence[Helper]
    """All processes that the rule needs beside the engines: the routers, and for Shoal's the agents."""

    def cpu_seconds(self) -> float:
        return sum(each.cpu_seconds() for each in self.helpers)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    running: Callable[[Path, Fleet], AbstractAsyncContextManager[Routers]]
    """Its routers, with an empty folder for them. Raises NotStarted, or OSError where there is no such program."""


@contextlib.asynccontextmanager
async def proxies(rule: str, folder: Path, fleet: Fleet) -> AsyncGenerator[Routers]:
    async with contextlib.AsyncExitStack() as stack:
        helpers = [
            await stack.enter_async_context(
                helper(
                    "replica_proxy",
                    {"rule": rule, "number": number, "engines": fleet.urls},
                    folder / f"proxy-{number}.log",
                )
            )
            for number in range(ROUTERS)
        ]
        said = [await each.ready() for each in helpers]
        yield Routers(Entrance(tuple(f"http://127.0.0.1:{each['port']}" for each in said)), helpers)


@contextlib.asynccontextmanager
async def smg(policy: str, folder: Path, fleet: Fleet) -> AsyncGenerator[Routers]:
    program = Path(sys.executable).parent / "smg"
    async with contextlib.AsyncExitStack() as stack:
        helpers: list[Helper] = []
        urls: list[str] = []
        for number in range(ROUTERS):
            port, metrics = free_ports(2)
            command = (
                str(program),
                *("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy),
                *("--prometheus-port", str(metrics), "--log-level", "warn", "--api-key", ENGINE_KEY),
                *("--worker-urls", *fleet.urls),
            )
            helpers.append(await stack.enter_async_context(started(command, folder / f"smg-{number}.log")))
            urls.append(f"http://127.0.0.1:{port}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            for it, url in zip(helpers, urls, strict=True):
                try:
                    async with asyncio.timeout(READY_SECONDS):
                        while not await _ready(session, url):
                            if it.process.returncode is not None:
                                raise it.failure("it ended")
                            await asyncio.sleep(0.5)
                except TimeoutError:
                    raise it.failure(f"not ready after {READY_SECONDS:g} s") from None
        yield Routers(Entrance(tuple(urls)), helpers)


async def _ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.get(f"{url}/readiness") as response:
            return response.status == 200
    return False


@contextlib.asynccontextmanager
async def shoal(routing: str, shared: bool, folder: Path, fleet: Fleet) -> AsyncGenerator[Routers]:
    """With `shared` the gateways tell each other what they sent."""
    tuned = fleet.adapters
    loras = {"adapters": str(tuned.folder), "slots": tuned.slots} if tuned is not None else {"adapters": None}
    async with contextlib.AsyncExitStack() as stack:
        agents = await stack.enter_async_context(
            helper("replica_agents", {"folder": str(folder), "engines": fleet.urls, **loras}, folder / "agents.log")
        )
        ports = (await agents.ready())["ports"]
        ops = free_ports(ROUTERS)
        gateways: list[Helper] = []
        for number in range(ROUTERS):
            own = folder / f"gateway-{number}"
            own.mkdir()
            config = {
                "folder": str(own),
                "name": f"gateway-{number}",
                "routing": routing,
                "engines": [engine.port for engine in fleet.engines],
                "agents": ports,
                "ops": ops[number],
                "peers": [port for port in ops if port != ops[number]] if shared else [],
                **loras,
            }
            gateways.append(
                await stack.enter_async_context(helper("replica_gateway", config, folder / f"gateway-{number}.log"))
            )
        said = [await each.ready() for each in gateways]
        urls = tuple(each["url"] for each in said)
        yield Routers(Entrance(urls, API_KEY, CLAIM, "model"), [*gateways, agents])


RULES: Final = (
    *(Rule(name, partial(proxies, name)) for name in ("round robin", "least in flight", "by conversation")),
    *(Rule(f"smg {policy}", partial(smg, policy)) for policy in ("cache_aware", "least_load")),
    Rule("Shoal PrefixHeads", partial(shoal, "PrefixHeads", False)),
    Rule("Shoal Seconds, heads only", partial(shoal, "Seconds", False)),
    Rule("Shoal Seconds", partial(shoal, "Seconds", True)),
)
