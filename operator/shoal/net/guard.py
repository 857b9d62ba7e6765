"""The same doors for aiohttp's applications: what is not open asks `kube/access.py`."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from shoal.kube.access import Access, token_of

OPEN: Final = frozenset({"/healthz", "/readyz"})
"""For a node's probes, which have no token."""
PAGE: Final = "/metrics"
"""Who may get it also learns what is missing where something is not ready."""


def guarded(access: Access | None) -> Middleware:
    """A middleware: lets in whom `access` lets in, everybody where it is None."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if access is None or request.path in OPEN:
            return await handler(request)
        verdict = await access.check(_token(request), _page(request.path))
        if verdict.allowed:
            return await handler(request)
        body = {"message": verdict.message, "reason": "Forbidden" if verdict.status == 403 else "Unauthorized"}
        return web.json_response(body, status=verdict.status, headers=verdict.headers)

    return middleware


async def may_know(access: Access | None, request: web.Request) -> bool:
    """Whether the caller may know causes."""
    if access is None:
        return True
    token = _token(request)
    return bool(token) and (await access.check(token, PAGE)).allowed


def _token(request: web.Request) -> str:
    return token_of({name.lower(): value for name, value in request.headers.items()})


def _page(path: str) -> str:
    """The path that is asked about: `/v1/decisions/<namespace>/<name>` is part of `/v1/decisions`."""
    return "/".join(path.split("/")[:3])
