"""The router of the rules of `bench_replicas` that know nothing of prompts and loads: it forwards a request as it is to
an engine, and the answer as it comes.

Its configuration: `rule`, `number` (its own), and `engines` (their URLs). It says its `port`.
"""

from collections.abc import Callable
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

from tests.bench import replica_processes
from tests.bench.replica_clients import HOME_HEADER, IDLE_SECONDS

PATH: Final = "/v1/chat/completions"
_PASSED: Final = ("authorization", "content-type")


class Chooser:
    """The engine of a request, by its number. Each router counts for itself."""

    def __init__(self, rule: str, number: int, engines: int) -> None:
        rules: dict[str, Callable[[int], int]] = {
            "round robin": self._next,
            "least in flight": self._least,
            "by conversation": lambda home: home,
        }
        self._rule = rules[rule]
        # Routers that begin with the same engine would stay together.
        self._turn = number * (engines // 2) - 1
        self.in_flight = [0] * engines

    def choose(self, home: int) -> int:
        return self._rule(home)

    def _next(self, _home: int) -> int:
        self._turn += 1
        return self._turn % len(self.in_flight)

    def _least(self, home: int) -> int:
        """Of equal ones the next."""
        first = self._next(home)
        engines = len(self.in_flight)
        return min(range(engines), key=lambda each: (self.in_flight[each], (each - first) % engines))


class Proxy:
    def __init__(self, session: aiohttp.ClientSession, chooser: Chooser, engines: list[str]) -> None:
        self._session = session
        self._chooser = chooser
        self._engines = engines

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        engine = self._chooser.choose(int(request.headers.get(HOME_HEADER, "0")))
        self._chooser.in_flight[engine] += 1
        try:
            url = self._engines[engine] + PATH
            async with self._session.post(url, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=f"{type(error).__name__}: {error}") from error
        finally:
            self._chooser.in_flight[engine] -= 1


async def main() -> None:
    asked = replica_processes.configuration()
    engines: list[str] = asked["engines"]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        proxy = Proxy(session, Chooser(asked["rule"], asked["number"], len(engines)), engines)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post(PATH, proxy.forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port: int = runner.addresses[0][1]
            await replica_processes.ready(port=port)
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main())
