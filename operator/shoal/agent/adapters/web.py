"""`POST /v1/adapters/{name}/ensure` and `PUT /v1/adapters` (`api/adapters.py`)."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from shoal.agent.adapters.service import AdapterService
from shoal.agent.drain import Drain
from shoal.api import names, reasons
from shoal.api.adapters import AdapterRefusal, AdapterWanted, DesiredAdapters, Ensure
from shoal.core.lora.lifecycle.planstep import Denial

BODY_SECONDS: Final = 5.0
BODY_BYTES: Final = 8 << 20
"""Longest floor: 4,096 adapters, with the longest of addresses."""
POLL_SECONDS: Final = 0.25
"""Between two looks whether a caller who waits for a lease is still there."""
_CLIENT_GONE: Final = 499
_NAME: Final = "name"

_T = TypeVar("_T", bound=BaseModel)
_R = TypeVar("_R")


class AdaptersApi:
    """`role` gives the role of a caller, or the refusal of one who has none; `boot` is the agent's."""

    def __init__(
        self,
        adapters: AdapterService | None,
        drain: Drain,
        boot: str,
        role: Callable[[web.Request], str | web.Response],
    ) -> None:
        self._adapters = adapters
        self._drain = drain
        self._boot = boot
        self._role = role

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(f"{names.ADAPTERS_PATH}/{{{_NAME}}}/ensure", self._ensure),
            web.put(names.ADAPTERS_PATH, self._set_desired),
        ]

    async def _ensure(self, request: web.Request) -> web.Response:
        adapters, role = self._adapters, self._role(request)
        if isinstance(role, web.Response):
            return role
        if adapters is None:
            return _no_pool()
        ensure = await _read(request, Ensure)
        if isinstance(ensure, web.Response):
            return ensure
        name = request.match_info[_NAME]
        problem = f"the path says {name} and the body {ensure.name}" if name != ensure.name else _wrong(ensure)
        if problem:
            return _refuse(Denial(400, reasons.INVALID, problem))
        key = None
        if role == "gateway":
            key = ensure.gateway, ensure.boot
            if ensure.agent_boot != self._boot or not self._drain.listens(key):
                text = "the caller has no stream to this agent, or to a former one: connect, and ask again"
                return _refuse(Denial(409, reasons.NOT_LISTENING, text))
        lease = await _while_connected(request, adapters.ensure(ensure, key, ensure.wait_seconds))
        if lease is None:
            return web.Response(status=_CLIENT_GONE)  # nobody reads it
        if isinstance(lease, Denial):
            return _refuse(lease)
        return web.Response(text=lease.model_dump_json(), content_type="application/json")

    async def _set_desired(self, request: web.Request) -> web.Response:
        role = self._role(request)
        if isinstance(role, web.Response):
            return role
        if role != "operator":
            return _refuse(Denial(403, reasons.INVALID, "an operator's key of this replica is needed"))
        if self._adapters is None:
            return _no_pool()
        floor = await _read(request, DesiredAdapters)
        if isinstance(floor, web.Response):
            return floor
        problem = next((text for adapter in floor.adapters if (text := _wrong(adapter))), None)
        if problem:
            return _refuse(Denial(400, reasons.INVALID, problem))
        self._adapters.set_desired(floor)
        return web.Response(status=204)


async def _while_connected(request: web.Request, work: Coroutine[Any, Any, _R]) -> _R | None:
    """What `work` returns; None when the caller hung up before: it has the adapter elsewhere now, or is no more, and
    must not get a slot that others wait for. (aiohttp can tell handlers so, but only all of them: a drain goes on.)"""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
            if request.transport is None or request.transport.is_closing():
                return None
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _wrong(wanted: AdapterWanted) -> str | None:
    """The name carries the beginning of the digest; with another one it would be another adapter's."""
    if wanted.name.rpartition("@")[2] == wanted.revision.removeprefix("sha256:")[:12]:
        return None
    return f"{wanted.name} is no name of revision {wanted.revision}"


async def _read(request: web.Request, kind: type[_T]) -> _T | web.Response:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return kind.model_validate_json(await request.read())
    except TimeoutError:
        return _refuse(Denial(408, reasons.INVALID, f"the body did not arrive within {BODY_SECONDS:g} s"))
    except ValidationError as error:
        faults = ", ".join(".".join(map(str, fault["loc"])) or fault["type"] for fault in error.errors()[:5])
        return _refuse(Denial(400, reasons.INVALID, f"not what is asked for here: {faults}"))


def _no_pool() -> web.Response:
    return _refuse(Denial(404, reasons.POOL_NOT_FOUND, "the replica's Model has no LoRAPool"))


def _refuse(denial: Denial) -> web.Response:
    refusal = AdapterRefusal(reason=denial.reason, message=denial.message, retry_after=denial.retry_after)
    headers = {"Retry-After": str(denial.retry_after)} if denial.retry_after is not None else None
    return web.Response(
        status=denial.status, text=refusal.model_dump_json(), content_type="application/json", headers=headers
    )
