"""The HTTP shell: what all cold endpoints of Shoal share. The hot path (`/v1/chat/completions` and its kin) is not on
it: that is a plain ASGI application, and writes its usual answers without ASGI's messages (`DirectExchange`).

A `Shell` is an ASGI application for `net/server.py`. Starlette gives it paths with parameters, requests and responses.
A call goes through these steps, and a `Problem` raised in one of them is the answer:

1. The shell's guard, if it has one, sees the call before its path is looked up: strangers learn no paths.
2. The path and the method select a handler; 404 or 405 otherwise.
3. The handler's guard decides who may call: by a role's key (`net/roles.py`), or by a Kubernetes token
   (`net/pages.py`).
4. The handler reads the body within its bounds (`ShellRequest.read`) and returns Starlette's `Response`, a
   `BodyStream` or an `EventStream` (`net/hub.py`).
5. The response is written. A client that takes no byte for WRITE_SECONDS is dropped.

A shell has one `wording`, which puts each `Problem` into the shape of its process. A handler that fails is logged, and
answered with a status 500 that tells nothing of the inside. Listening and stopping are in `net/serving.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from shoal.net.asgi import DISCONNECT, GONE, Receive, Scope, Send
from shoal.net.errors import Problem
from shoal.net.hub import ANONYMOUS, Caller

log = structlog.get_logger()

WRITE_SECONDS: Final = 10.0
"""A client that takes no byte for so long is dropped."""
GET: Final = ("GET", "HEAD")
ANY: Final = ("*",)
"""Every method."""
_MOST_PARAMETERS: Final = 100

_R = TypeVar("_R")


class ShellRequest(Request):
    """One call. Its guard sets `caller`, and may read the body into `content`."""

    caller: Caller = ANONYMOUS
    content: bytes = b""

    @cached_property
    def parameters(self) -> Mapping[str, Sequence[str]]:
        """Of the query string, each with all its values. Raises Problem."""
        try:
            text = self.scope.get("query_string", b"").decode()
            return parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
        except ValueError:
            raise Problem(400, "the query string is not valid") from None

    def first(self, name: str) -> str | None:
        """A parameter's first value."""
        values = self.parameters.get(name, ())
        return values[0] if values else None

    def one(self, name: str, default: str | None = None) -> str | None:
        """A parameter that may be given once. Raises Problem where it is given more often."""
        values = self.parameters.get(name, ())
        if len(values) > 1:
            raise Problem(400, f"{name} is given {len(values)} times; once is enough")
        return values[0] if values else default

    async def read(self, most: int, seconds: float | None = None, advice: str = "") -> bytes:
        """The body, of at most `most` bytes, within `seconds` (None: within the server's own bound).

        Raises:
            Problem: it is larger (with `advice`), or too slow.
            ClientDisconnect: the client has gone.
        """
        too_large = Problem(413, f"the body is larger than {most} bytes{advice}")
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                async for chunk in self.stream():
                    size += len(chunk)
                    if size > most:
                        raise too_large
                    chunks.append(chunk)
        except TimeoutError:
            # What comes of the body after the answer would be read for as long as the client likes.
            close = {"connection": "close"}
            raise Problem(408, f"the body did not arrive within {seconds:g} s", close) from None
        return b"".join(chunks)

    async def while_connected(self, work: Coroutine[Any, Any, _R]) -> _R:
        """What `work` returns. It is cancelled, and ClientDisconnect raised, when the client goes before."""
        task = asyncio.ensure_future(work)
        gone = self.scope.get(DISCONNECT) is GONE

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        if gone:
            task.cancel()
        else:
            self.scope[DISCONNECT] = leave
        try:
            return await task
        except asyncio.CancelledError:
            if gone:
                raise ClientDisconnect from None
            raise


class Unrouted(Problem):
    """No handler for a path (status 404), or none for the method (405; `allowed` are those that there are)."""

    def __init__(self, status: int, path: str, allowed: str = "") -> None:
        super().__init__(status, f"{status}: {HTTPStatus(status).phrase}", {"allow": allowed} if allowed else None)
        self.path = path
        self.allowed = allowed


class BodyStream(Response):
    """An answer with status 200 whose body `work` writes. The head goes out with the first piece: what fails before is
    answered as with any handler."""

    def __init__(self, work: Callable[["Write"], Awaitable[None]], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def start() -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(piece: bytes) -> None:
            await start()
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        await self._work(write)
        await start()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


Write = Callable[[bytes], Awaitable[None]]
Handler = Callable[[ShellRequest], Awaitable[Response]]
Guard = Callable[[ShellRequest], Awaitable[None]]
"""Raises Problem where the caller may not do this."""
Wording = Callable[[Problem], Response]


def answer_json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as orjson takes it."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def error_response(problem: Problem) -> Response:
    """A refusal as one process of Shoal words it to another; in plain text where there is no such path or method."""
    if isinstance(problem, Unrouted):
        return PlainTextResponse(problem.message, problem.status, problem.headers)
    return answer_json({"error": {"message": problem.message}}, problem.status, problem.headers)


class _ClientStuck(Exception):
    """It takes nothing of what is written."""


class Shell:
    """Routes are added before it serves. `name` is the process, in messages. `errors` map an exception of
    handlers to a Problem. `answered`, where set, is called after each call that a guard let through: the call, when its
    handler began (time.monotonic), and the answer's status."""

    def __init__(
        self,
        name: str,
        *,
        wording: Wording = error_response,
        guard: Guard | None = None,
        errors: Mapping[type[Exception], Callable[[Exception], Problem]] | None = None,
    ) -> None:
        self._name = name
        self._wording = wording
        self._guard = guard
        self._errors = errors or {}
        self._resources: dict[str, _Resource] = {}
        self._router = Router(redirect_slashes=False, default=_unknown_path)
        self.answered: Callable[[ShellRequest, float, int], None] | None = None

    def route(self, methods: Sequence[str], path: str, handler: Handler, guard: Guard | None = None) -> None:
        """Has `handler` answer these methods on a path, of which `{name}` is a parameter. Raises ValueError where
        another handler does."""
        resource = self._resources.get(path)
        if resource is None:
            resource = self._resources[path] = _Resource(self)
            self._router.routes.append(Route(path, resource))
        for method in methods:
            if method in resource.handlers:
                raise ValueError(f"{method} {path} has a handler")
            resource.handlers[method] = handler, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False
        taken: Any = receive

        async def bounded(message: Any) -> None:
            nonlocal started
            started = True
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await send(message)
            except TimeoutError:
                raise _ClientStuck from None

        try:
            try:
                if self._guard is not None:
                    await self._guard(ShellRequest(scope, taken))
                await self._router(scope, taken, bounded)
            except (ClientDisconnect, _ClientStuck):
                raise
            except Exception as error:
                if started:
                    raise
                await self._wording(self._problem(error, scope))(scope, taken, bounded)
        except ClientDisconnect:
            return
        except _ClientStuck:
            log.warning("a client took nothing of its answer and was dropped", path=scope["path"])
        except Exception:
            # Its head is sent: the client notices by a body that ends too soon.
            log.exception("an answer broke off", path=scope["path"])
            raise

    async def handle(self, request: ShellRequest, handler: Handler) -> Response:
        """The answer of `handler`, which is reported to `answered`."""
        if self.answered is None:
            return await handler(request)
        began, status = time.monotonic(), 500
        try:
            response = await handler(request)
            status = response.status_code
            return response
        except Exception as error:
            if (problem := self._expected(error)) is not None:
                status = problem.status
            raise
        finally:
            self.answered(request, began, status)

    def _problem(self, error: Exception, scope: Scope) -> Problem:
        problem = self._expected(error)
        if problem is None:
            log.exception("a call failed", method=scope["method"], path=scope["path"])
            problem = Problem(500, f"{self._name} failed at this call; its log says why")
        return problem

    def _expected(self, error: Exception) -> Problem | None:
        if isinstance(error, Problem):
            return error
        return next((words(error) for kind, words in self._errors.items() if isinstance(error, kind)), None)


class _Resource:
    """One path's handlers, with their guards, by method: an ASGI application for Starlette's router."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.handlers: dict[str, tuple[Handler, Guard | None]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self.handlers.get(scope["method"]) or self.handlers.get("*")
        if found is None:
            raise Unrouted(405, scope["path"], ", ".join(sorted(self.handlers)))
        handler, guard = found
        request = ShellRequest(scope, receive)
        if guard is not None:
            await guard(request)
        response = await self._shell.handle(request, handler)
        await response(scope, receive, send)


async def _unknown_path(scope: Any, receive: Any, send: Any) -> None:
    raise Unrouted(404, scope["path"])
