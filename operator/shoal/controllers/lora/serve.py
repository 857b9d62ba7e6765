"""`GET /v1/adapters`: where adapters are and how they are used, for `kubectl shoal adapters`.

It tells names of objects and pods, and numbers; no key, prompt or answer. Who may read it is
decided before (`net/pages.py`), as with metrics.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from starlette.responses import Response

from shoal.api import names
from shoal.api.adapterstats import AdapterStats, AdapterStatsAnswer, PoolStats
from shoal.controllers.lora.view import AdapterView
from shoal.controllers.scaling.serve import not_leading
from shoal.net.shell import GET, Shell, ShellRequest, answer_json

POOL_UNKNOWN: Final = "PoolUnknown"
AT_A_TIME: Final = 500
"""Adapters that are put into words before others have their turn on the event loop."""


def add_routes(
    shell: Shell, view: AdapterView, *, operator: str, leads: Callable[[], bool], leader: Callable[[], str]
) -> None:
    """`operator` is the name of this pod; `leader()` names the one that leads, "" while that is not known."""

    async def everything(request: ShellRequest) -> Response:
        if not leads():
            return not_leading(operator, leader())
        namespace, name = request.first("namespace"), request.first("pool")
        pools: list[PoolStats] = []
        for key in view.pool_keys(namespace, name):
            adapters: list[AdapterStats] = []
            for adapter in view.adapters(key):
                adapters.append(adapter)
                if len(adapters) % AT_A_TIME == 0:
                    await asyncio.sleep(0)
            found = view.pool(key, adapters)
            if found is not None:
                pools.append(found)
        if name is not None and not pools:
            where = f" in namespace {namespace}" if namespace else ""
            body = {"reason": POOL_UNKNOWN, "message": f"there is no LoRAPool {name}{where}"}
            return answer_json(body, 404)
        said = AdapterStatsAnswer(operator=operator, time=datetime.now(UTC), pools=tuple(pools))
        return Response(said.model_dump_json(), media_type="application/json")

    shell.route(GET, names.ADAPTERS_PATH, everything)
