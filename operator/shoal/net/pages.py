"""Probes and metrics, and who may read them: by the caller's Kubernetes token, which the API server judges
(`kube/access.py`)."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from starlette.responses import Response

from shoal.api.rights import Right
from shoal.kube.access import METRICS, NO_TOKEN, Access, token_of
from shoal.kube.callers import Callers
from shoal.net.errors import Problem
from shoal.net.shell import ANY, Shell, ShellRequest, Unrouted, answer_json

_REASONS: Final = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "Timeout",
    413: "RequestEntityTooLarge",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
"""The API server's words for these statuses (`StatusReason` of k8s.io/apimachinery)."""
PROBES: Final = frozenset({"/healthz", "/readyz"})
"""Open to all: a node's probes have no token."""

Causes = Callable[[], Mapping[str, str]]
"""What is wrong, by part."""


class TokenGuard:
    """Lets callers through whose token may `get` the path. The paths of probes are open, and METRICS too where
    `open_metrics` is set or `access` is None. Who may read METRICS also learns what is missing where something is not
    ready. For `/v1/decisions/<namespace>/<name>` the right to `/v1/decisions` is needed.

    A token for the audience of `callers` is asked for its right to this page (`rights`), of the namespace that the path
    or the query names, or of all. Without `access`, such a token alone opens a page.
    """

    def __init__(
        self,
        access: Access | None,
        callers: Callers | None = None,
        rights: Mapping[tuple[str, str], Right] = MappingProxyType({}),
        *,
        open_metrics: bool = False,
    ) -> None:
        self._access = access
        self._callers = callers
        self._rights = rights
        self._open_metrics = open_metrics or access is None

    async def __call__(self, request: ShellRequest) -> None:
        path: str = request.scope["path"]
        if path in PROBES:
            return
        page = "/".join(path.split("/")[:3])
        right = self._rights.get(("GET", page))
        callers, token = self._callers, token_of(request.headers)
        if callers is None or right is None or not callers.meant(token):
            await self.check(request, page)
            return
        named = path.split("/")[3:4]
        namespace = named[0] if named else request.one("namespace")
        verdict = await callers.may(token, right, namespace=namespace)
        if not verdict.allowed:
            raise Problem(verdict.status, verdict.message, verdict.headers)

    async def check(self, request: ShellRequest, page: str = METRICS) -> None:
        """Raises Problem where the caller may not read this page."""
        if page == METRICS and self._open_metrics:
            return
        verdict = NO_TOKEN if self._access is None else await self._access.check(token_of(request.headers), page)
        if not verdict.allowed:
            raise Problem(verdict.status, verdict.message, verdict.headers)

    async def may_know(self, request: ShellRequest) -> bool:
        """Whether the caller may know causes."""
        if self._access is None or self._open_metrics:
            return True
        token = token_of(request.headers)
        return bool(token) and (await self._access.check(token, METRICS)).allowed


def denial_response(problem: Problem) -> Response:
    """A refusal in the API server's flat shape, for `kubectl shoal`; in plain text where there is no such path."""
    if isinstance(problem, Unrouted):
        return Response(problem.message, problem.status, problem.headers, "text/plain")
    body = {"message": problem.message, "reason": _REASONS.get(problem.status, "")}
    return answer_json(body, problem.status, problem.headers)


async def metrics_page(*registries: CollectorRegistry) -> Response:
    """The metrics of these registries. The values are collected in the event loop, where none changes meanwhile.
    Formatting them takes three times as long (measured: 1 ms per Model), and is done in a thread."""
    collected = [_CollectedMetrics(registry) for registry in registries]
    parts = await asyncio.to_thread(lambda: [generate_latest(each) for each in collected])
    return Response(b"".join(parts), headers={"content-type": CONTENT_TYPE_LATEST})


def ops_shell(
    name: str,
    registry: CollectorRegistry,
    missing: Causes,
    *,
    notes: Causes = dict[str, str],
    refresh: Callable[[], None] = lambda: None,
    access: Access | None = None,
) -> Shell:
    """/healthz, /readyz and /metrics of a gateway or ledger. Every caller gets a status, and names of the parts that
    are not ready; causes and metrics are only for callers that `access` allows. `missing` returns why the process is
    not ready, `notes` are problems that do not make it unready, `refresh` updates the gauges before they are read."""
    doors = TokenGuard(access)
    shell = Shell(name, wording=_status_response)

    async def healthz(_: ShellRequest) -> Response:
        # Only shows that the event loop answers: a restart fixes nothing else. /readyz shows what is missing.
        return answer_json({"status": "ok"})

    async def readyz(request: ShellRequest) -> Response:
        found = missing()
        status: dict[str, object] = {"status": "not ready" if found else "ok"}
        if found:
            status["missing"] = sorted(found)  # names of parts only: `shoal why` asks without a token
        if await doors.may_know(request):
            status |= {**notes(), **found}
        return answer_json(status, 503 if found else 200)

    async def metrics(_: ShellRequest) -> Response:
        refresh()
        return await metrics_page(registry)

    shell.route(ANY, "/healthz", healthz)
    shell.route(ANY, "/readyz", readyz)
    shell.route(ANY, METRICS, metrics, doors.check)
    return shell


def _status_response(problem: Problem) -> Response:
    message = "unknown path" if isinstance(problem, Unrouted) else problem.message
    return answer_json({"status": message}, problem.status, problem.headers)


class _CollectedMetrics(CollectorRegistry):
    """A registry's metrics, collected once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._families = tuple(registry.collect())

    def collect(self) -> Iterable[Metric]:
        return self._families
