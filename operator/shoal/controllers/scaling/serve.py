"""`GET /v1/decisions`: what the scaler decided and from what, for `kubectl shoal why` and `top`.

It tells names of Models and pods, and numbers; no key, prompt or answer. Who may read it is
decided before (`net/pages.py`), as with metrics.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, Protocol

from starlette.responses import Response

from shoal.api import names
from shoal.api.decisions import Decisions, ModelScaling
from shoal.net.shell import GET, Shell, ShellRequest, answer_json

NOT_LEADING: Final = "NotLeading"
MODEL_UNKNOWN: Final = "ModelUnknown"
RETRY_SECONDS: Final = 2
AT_A_TIME: Final = 50
"""Models that are put into words before others have their turn on the event loop."""


class ModelStats(Protocol):
    """Where the answers come from."""

    def stats(self, namespace: str | None = None) -> Iterable[ModelScaling]:
        """Every Model, or those of a namespace, without their decisions."""
        ...

    def model(self, key: str) -> ModelScaling | None:
        """One Model with its last decisions, newest first; None: there is none, or nothing was decided."""
        ...


def not_leading(operator: str, leader: str) -> Response:
    """Of an operator that does not lead; `leader` is the one that does, "" while that is not known."""
    told = f"{leader} leads" if leader and leader != operator else "nobody is known to lead"
    body = {"reason": NOT_LEADING, "message": f"{operator} does not lead: {told}", "leader": leader}
    return answer_json(body, 503, {"retry-after": str(RETRY_SECONDS)})


def add_routes(
    shell: Shell, history: ModelStats, *, operator: str, leads: Callable[[], bool], leader: Callable[[], str]
) -> None:
    """`operator` is the name of this pod; `leader()` names the one that leads, "" while that is not known."""

    def answer(models: Iterable[ModelScaling]) -> Response:
        said = Decisions(operator=operator, leads=True, time=datetime.now(UTC), models=tuple(models))
        return Response(said.model_dump_json(), media_type="application/json")

    async def everything(request: ShellRequest) -> Response:
        if not leads():
            return not_leading(operator, leader())
        found: list[ModelScaling] = []
        for model in history.stats(request.first("namespace")):
            found.append(model)
            if len(found) % AT_A_TIME == 0:
                await asyncio.sleep(0)  # who watches thousands of Models must not hold up one that wakes
        return answer(sorted(found, key=lambda one: one.model))

    async def one(request: ShellRequest) -> Response:
        if not leads():
            return not_leading(operator, leader())
        key = f"{request.path_params['namespace']}/{request.path_params['name']}"
        found = history.model(key)
        if found is None:
            body = {"reason": MODEL_UNKNOWN, "message": f"the operator has decided nothing on a Model {key} yet"}
            return answer_json(body, 404)
        return answer([found])

    shell.route(GET, names.DECISIONS_PATH, everything)
    shell.route(GET, f"{names.DECISIONS_PATH}/{{namespace}}/{{name}}", one)
