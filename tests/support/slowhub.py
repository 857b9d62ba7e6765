"""A hub with one private model, as a process: it can be made slow, and it counts. `python -m tests.support.slowhub`."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from aiohttp import web

from tests.support.sources import HubServer, model_files

PIECE = 64 << 10
REPO, TOKEN = "team/tiny", "right"
SIZE = 4 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SlowHub(HubServer):
    """`GET /control?pause=SECONDS` sets the wait between pieces, and tells what was sent so far."""

    pause = 0.0
    sent = 0

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/control", self._control)
        app.middlewares.append(self._slowly)
        return app

    async def _control(self, request: web.Request) -> web.Response:
        self.pause = float(request.query.get("pause", self.pause))
        return web.json_response({"sent": self.sent})

    @web.middleware
    async def _slowly(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.method != "GET" or answer.status >= 400 or "resolve" not in request.path:
            return answer
        assert isinstance(answer, web.Response)
        body = answer.body
        assert isinstance(body, bytes)
        headers = {k: v for k, v in answer.headers.items() if k in ("Content-Range", "Content-Type")}
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        for at in range(0, len(body), PIECE):
            self.sent += len(body[at : at + PIECE])
            await response.write(body[at : at + PIECE])
            await asyncio.sleep(self.pause)
        return response


def main() -> None:
    hub = SlowHub(model_files(SIZE), repo=REPO, private=True, token=TOKEN)
    web.run_app(hub.app(), port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
