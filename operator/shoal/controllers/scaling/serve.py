"""`GET /v1/decisions`: what the scaler decided and from what, for `kubectl shoal why` and `top`.

It tells names of Models and pods, and figures; no key, prompt or answer. Who may read it is
decided before (`net/guard.py`), as with metrics.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, Protocol

from aiohttp import web

from shoal.api import names
from shoal.api.decisions import Decisions, ModelFigures

NOT_LEADING: Final = "NotLeading"
MODEL_UNKNOWN: Final = "ModelUnknown"
RETRY_SECONDS: Final = 2
AT_A_TIME: Final = 50
"""Models that are put into words before others have their turn on the event loop."""


class ModelStats(Protocol):
    """Where the answers come from."""

    def stats(self, namespace: str | None = None) -> Iterable[ModelFigures]:
        """Every Model, or those of a namespace, without their decisions."""
        ...

    def model(self, key: str) -> ModelFigures | None:
        """One Model with its last decisions, newest first; None: there is none, or nothing was decided."""
        ...


def refusal(operator: str, leader: str) -> web.Response:
    """Of an operator that does not lead; `leader` is the one that does, "" while that is not known."""
    told = f"{leader} leads" if leader and leader != operator else "nobody is known to lead"
    body = {"reason": NOT_LEADING, "message": f"{operator} does not lead: {told}", "leader": leader}
    return web.json_response(body, status=503, headers={"Retry-After": str(RETRY_SECONDS)})


def routes(
    history: ModelStats, *, operator: str, leads: Callable[[], bool], leader: Callable[[], str]
) -> tuple[web.RouteDef, ...]:
    """`operator` is the name of this pod; `leader()` names the one that leads, "" while that is not known."""

    def refused() -> web.Response | None:
        return None if leads() else refusal(operator, leader())

    def answer(models: Iterable[ModelFigures]) -> web.Response:
        said = Decisions(operator=operator, leads=True, time=datetime.now(UTC), models=tuple(models))
        return web.Response(body=said.model_dump_json().encode(), content_type="application/json")

    async def everything(request: web.Request) -> web.Response:
        if (problem := refused()) is not None:
            return problem
        found: list[ModelFigures] = []
        for model in history.stats(request.query.get("namespace")):
            found.append(model)
            if len(found) % AT_A_TIME == 0:
                await asyncio.sleep(0)  # who watches thousands of Models must not hold up one that wakes
        return answer(sorted(found, key=lambda one: one.model))

    async def one(request: web.Request) -> web.Response:
        if (problem := refused()) is not None:
            return problem
        key = f"{request.match_info['namespace']}/{request.match_info['name']}"
        found = history.model(key)
        if found is None:
            body = {"reason": MODEL_UNKNOWN, "message": f"the operator has decided nothing on a Model {key} yet"}
            return web.json_response(body, status=404)
        return answer([found])

    path = names.DECISIONS_PATH
    return (web.get(path, everything), web.get(f"{path}/{{namespace}}/{{name}}", one))
