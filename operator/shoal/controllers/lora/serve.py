"""`GET /v1/adapters`: where adapters are and how they are used, for `kubectl shoal adapters`.

It tells names of objects and pods, and figures; no key, prompt or answer. Who may read it is
decided before (`net/guard.py`), as with metrics.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from shoal.api import names
from shoal.api.adapterstats import AdapterFigures, AdapterFiguresAnswer, PoolFigures
from shoal.controllers.lora.view import AdapterView
from shoal.controllers.scaling.serve import refusal

POOL_UNKNOWN: Final = "PoolUnknown"
AT_A_TIME: Final = 500
"""Adapters that are put into words before others have their turn on the event loop."""


def routes(
    view: AdapterView, *, operator: str, leads: Callable[[], bool], leader: Callable[[], str]
) -> tuple[web.RouteDef, ...]:
    """`operator` is the name of this pod; `leader()` names the one that leads, "" while that is not known."""

    async def everything(request: web.Request) -> web.Response:
        if not leads():
            return refusal(operator, leader())
        namespace, name = request.query.get("namespace"), request.query.get("pool")
        pools: list[PoolFigures] = []
        for key in view.pool_keys(namespace, name):
            adapters: list[AdapterFigures] = []
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
            return web.json_response(body, status=404)
        said = AdapterFiguresAnswer(operator=operator, time=datetime.now(UTC), pools=tuple(pools))
        return web.Response(body=said.model_dump_json().encode(), content_type="application/json")

    return (web.get(names.ADAPTERS_PATH, everything),)
