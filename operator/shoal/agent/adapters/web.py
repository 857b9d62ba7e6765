"""`POST /v1/adapters/{name}/ensure` and `PUT /v1/adapters` (`api/adapters.py`)."""

from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from shoal.agent.adapters.service import AdapterService
from shoal.agent.drain import Drain
from shoal.api import names, reasons
from shoal.api.adapters import AdapterRefusal, AdapterWanted, DesiredAdapters, Ensure
from shoal.core.lora.lifecycle.planstep import Denial
from shoal.net.errors import Problem
from shoal.net.shell import Guard, Shell, ShellRequest

BODY_SECONDS: Final = 5.0
BODY_BYTES: Final = 8 << 20
"""Longest floor: 4,096 adapters, with the longest of addresses."""
_NAME: Final = "name"

_T = TypeVar("_T", bound=BaseModel)


class AdaptersApi:
    """`boot` is the agent's."""

    def __init__(self, adapters: AdapterService | None, drain: Drain, boot: str) -> None:
        self._adapters = adapters
        self._drain = drain
        self._boot = boot

    def add(self, shell: Shell, guard: Guard) -> None:
        """Adds the routes; `guard` lets gateways and operators through."""
        shell.route(("POST",), f"{names.ADAPTERS_PATH}/{{{_NAME}}}/ensure", self._ensure, guard)
        shell.route(("PUT",), names.ADAPTERS_PATH, self._set_desired, guard)

    async def _ensure(self, request: ShellRequest) -> Response:
        if (adapters := self._adapters) is None:
            return _no_pool()
        ensure = await _read(request, Ensure)
        if isinstance(ensure, Response):
            return ensure
        name = request.path_params[_NAME]
        problem = f"the path says {name} and the body {ensure.name}" if name != ensure.name else _wrong(ensure)
        if problem:
            return _refuse(Denial(400, reasons.INVALID, problem))
        key = None
        if request.caller.role == "gateway":
            key = ensure.gateway, ensure.boot
            if ensure.agent_boot != self._boot or not self._drain.listens(key):
                text = "the caller has no stream to this agent, or to a former one: connect, and ask again"
                return _refuse(Denial(409, reasons.NOT_LISTENING, text))
        # A caller that hangs up has the adapter elsewhere now, or is no more: it must not get a slot that others wait
        # for.
        lease = await request.while_connected(adapters.ensure(ensure, key, ensure.wait_seconds))
        if isinstance(lease, Denial):
            return _refuse(lease)
        return Response(lease.model_dump_json(), media_type="application/json")

    async def _set_desired(self, request: ShellRequest) -> Response:
        if request.caller.role != "operator":
            return _refuse(Denial(403, reasons.INVALID, "an operator's key of this replica is needed"))
        if self._adapters is None:
            return _no_pool()
        floor = await _read(request, DesiredAdapters)
        if isinstance(floor, Response):
            return floor
        problem = next((text for adapter in floor.adapters if (text := _wrong(adapter))), None)
        if problem:
            return _refuse(Denial(400, reasons.INVALID, problem))
        self._adapters.set_desired(floor)
        return Response(status_code=204)


def _wrong(wanted: AdapterWanted) -> str | None:
    """The name carries the beginning of the digest; with another one it would be another adapter's."""
    if wanted.name.rpartition("@")[2] == wanted.revision.removeprefix("sha256:")[:12]:
        return None
    return f"{wanted.name} is no name of revision {wanted.revision}"


async def _read(request: ShellRequest, kind: type[_T]) -> _T | Response:
    try:
        return kind.model_validate_json(await request.read(BODY_BYTES, BODY_SECONDS))
    except Problem as problem:
        return _refuse(Denial(problem.status, reasons.INVALID, problem.message), problem.headers)
    except ValidationError as error:
        faults = ", ".join(".".join(map(str, fault["loc"])) or fault["type"] for fault in error.errors()[:5])
        return _refuse(Denial(400, reasons.INVALID, f"not what is asked for here: {faults}"))


def _no_pool() -> Response:
    return _refuse(Denial(404, reasons.POOL_NOT_FOUND, "the replica's Model has no LoRAPool"))


def _refuse(denial: Denial, headers: Mapping[str, str] | None = None) -> Response:
    refusal = AdapterRefusal(reason=denial.reason, message=denial.message, retry_after=denial.retry_after)
    if denial.retry_after is not None:
        headers = {**(headers or {}), "retry-after": str(denial.retry_after)}
    return Response(refusal.model_dump_json(), denial.status, headers, "application/json")
