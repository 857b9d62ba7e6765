"""Who may read a process's pages, by an API server that the test plays."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import orjson
import pytest
from prometheus_client import CollectorRegistry, Gauge
from starlette.responses import PlainTextResponse, Response
from structlog.testing import capture_logs

from shoal.api import names
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.ops import gateway_ops
from shoal.kube import access
from shoal.kube.access import ALLOWED, AWAY, BAD_TOKEN, BUSY, NO_TOKEN, Access
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, Forbidden, KubeError, ObjectInvalid
from shoal.net.errors import Problem
from shoal.net.pages import TokenGuard, denial_response
from shoal.net.shell import GET, Shell, ShellRequest
from tests.support.clock import Clock
from tests.support.shells import call
from tests.support.streams import Ring


class Judge:
    """An API server that knows tokens and what their owners may get."""

    def __init__(self) -> None:
        self.rights = {"prometheus": {"/metrics"}, "stranger": set[str]()}
        self.asked: list[str] = []
        self.away = False
        self.error: KubeError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def create(self, resource: Any, review: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(resource.plural)
        await self.gate.wait()
        if self.away:
            raise APIServerUnavailable("no answer")
        if self.error is not None:
            raise self.error
        spec = review["spec"]
        if resource.plural == "tokenreviews":
            name = spec["token"].removesuffix("-token")
            return {"status": {"authenticated": name in self.rights, "user": {"username": name}}}
        path = spec["nonResourceAttributes"]["path"]
        return {"status": {"allowed": path in self.rights[spec["user"]]}}


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def doors(judge: Judge, clock: Clock) -> Access:
    return Access(cast(KubeClient, judge), clock)


async def test_who_may_is_let_in_and_asked_about_once_a_minute(doors: Access, judge: Judge, clock: Clock) -> None:
    for _ in range(3):
        assert await doors.check("prometheus-token", "/metrics") is ALLOWED
    assert judge.asked == ["tokenreviews", "subjectaccessreviews"]
    clock.now += access.FRESH_SECONDS
    judge.rights["prometheus"] = set()  # the binding was taken away
    assert (await doors.check("prometheus-token", "/metrics")).status == 403
    assert len(judge.asked) == 4


async def test_others_are_told_why_not(doors: Access, judge: Judge, clock: Clock) -> None:
    assert await doors.check("", "/metrics") is NO_TOKEN
    assert await doors.check("x" * 20_000, "/metrics") is NO_TOKEN
    assert judge.asked == []
    assert await doors.check("unknown", "/metrics") is BAD_TOKEN
    refused = await doors.check("stranger-token", "/metrics")
    assert (refused.status, "stranger may not get /metrics" in refused.message) == (403, True)
    # What may read metrics may not read decisions.
    assert (await doors.check("prometheus-token", "/v1/decisions")).status == 403
    asked = len(judge.asked)
    assert await doors.check("stranger-token", "/metrics") == refused
    assert len(judge.asked) == asked
    # A right that was given counts soon.
    judge.rights["stranger"] = {"/metrics"}
    clock.now += access.DENIED_SECONDS
    assert await doors.check("stranger-token", "/metrics") is ALLOWED


async def test_strangers_cost_the_api_server_little_and_shut_nobody_out(
    doors: Access, judge: Judge, clock: Clock
) -> None:
    assert await doors.check("prometheus-token", "/metrics") is ALLOWED
    judge.asked.clear()
    verdicts = [await doors.check(f"guess-{number}", "/metrics") for number in range(1000)]
    assert verdicts.count(BUSY) >= 1000 - access.BURST
    assert len(judge.asked) <= access.BURST
    clock.now += access.FRESH_SECONDS
    for number in range(1000):
        await doors.check(f"more-{number}", "/metrics")
    assert await doors.check("prometheus-token", "/metrics") is ALLOWED


async def test_guesses_in_flight_are_bounded_and_one_caller_asks_once(doors: Access, judge: Judge) -> None:
    judge.gate.clear()
    same = [asyncio.create_task(doors.check("prometheus-token", "/metrics")) for _ in range(50)]
    guesses = [asyncio.create_task(doors.check(f"guess-{number}", "/metrics")) for number in range(50)]
    await asyncio.sleep(0)
    assert len(judge.asked) <= access.MOST_ASKING
    judge.gate.set()
    assert {(await task).status for task in same} == {200}
    assert {(await task).status for task in guesses} == {401, 503}


async def test_while_the_api_server_is_away_known_readers_go_on(doors: Access, judge: Judge, clock: Clock) -> None:
    assert await doors.check("prometheus-token", "/metrics") is ALLOWED
    judge.away = True
    clock.now += access.STALE_SECONDS - 1
    assert await doors.check("prometheus-token", "/metrics") is ALLOWED
    assert await doors.check("stranger-token", "/metrics") is AWAY
    clock.now += 2
    assert await doors.check("prometheus-token", "/metrics") is AWAY


async def test_while_the_api_server_is_away_decisions_are_read_for_no_longer_than_its_last_answer_counts(
    doors: Access, judge: Judge, clock: Clock
) -> None:
    """What goes on without it is what is looked at then: metrics."""
    judge.rights["reader"] = {"/v1/decisions", "/metrics"}
    for page in ("/v1/decisions", "/metrics"):
        assert await doors.check("reader-token", page) is ALLOWED
    judge.away = True
    judge.rights["reader"] = set()
    clock.now += access.FRESH_SECONDS - 1
    assert await doors.check("reader-token", "/v1/decisions") is ALLOWED
    clock.now += 1
    assert await doors.check("reader-token", "/v1/decisions") is AWAY
    assert await doors.check("reader-token", "/metrics") is ALLOWED


async def test_an_api_server_that_answers_with_an_error_is_not_away(doors: Access, judge: Judge, clock: Clock) -> None:
    assert await doors.check("prometheus-token", "/metrics") is ALLOWED
    judge.error = ObjectInvalid("a webhook of reviews is broken", status=400)
    clock.now += access.FRESH_SECONDS
    assert (await doors.check("prometheus-token", "/metrics")).status == 503


FORBIDDEN: Final = 'User "system:serviceaccount:shoal-system:shoal-operator" cannot create resource "tokenreviews"'


async def test_a_service_that_may_not_ask_says_which_right_it_lacks_and_logs_it_once(
    doors: Access, judge: Judge, clock: Clock
) -> None:
    judge.error = Forbidden(FORBIDDEN, status=403)
    with capture_logs() as logs:
        for number in range(3):
            refused = await doors.check(f"reader-{number}", "/v1/decisions")
            assert (refused.status, refused.headers) == (503, {"Retry-After": "2"})
            assert refused.message == (
                "this service may not ask the API server who calls: its ServiceAccount may not create "
                "tokenreviews.authentication.k8s.io, it needs the ClusterRole shoal-access, which the chart makes and "
                "binds"
            )
    assert [(each["log_level"], each["problem"]) for each in logs] == [("error", FORBIDDEN)]
    judge.error = None
    assert await doors.check("prometheus-token", "/metrics") is ALLOWED
    judge.error = Forbidden(FORBIDDEN, status=403)
    with capture_logs() as logs:
        await doors.check("reader-4", "/metrics")
    assert len(logs) == 1, "lost again"


# --- the pages --------------------------------------------------------------------------------------------------------

Get = Callable[..., Awaitable[tuple[int, str]]]


async def asgi_get(app: Shell, path: str, token: str = "", header: str = "authorization") -> tuple[int, str]:
    sent: list[dict[str, Any]] = []
    value = f"Bearer {token}" if header == "authorization" else token
    headers = [(header.encode(), value.encode())] if token else []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    await app({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], sent[1]["body"].decode()


def gateway(doors: Access | None) -> Shell:
    registry = CollectorRegistry()
    Gauge("shoal_tenant_requests", "x", ["tenant"], registry=registry).labels("acme").set(1)
    missing = lambda: {"models": "not listed yet"}  # noqa: E731
    return gateway_ops(registry, missing, lambda: None, DemandPublisher(DemandState()).hub, Ring(b"k"), access=doors)


async def test_a_gateways_page_tells_tenants_names_to_nobody_without_a_token(doors: Access) -> None:
    app = gateway(doors)
    assert (await asgi_get(app, "/metrics"))[0] == 401
    assert (await asgi_get(app, "/metrics", "stranger-token"))[0] == 403
    status, text = await asgi_get(app, "/metrics", "prometheus-token")
    assert (status, "acme" in text) == (200, True)
    assert (await asgi_get(app, "/metrics", "prometheus-token", names.HEADER_KEY))[0] == 200
    # Probes have no token: they are told that it is not ready, and which part, and no more.
    assert await asgi_get(app, "/readyz") == (503, '{"status":"not ready","missing":["models"]}')
    assert "not listed yet" in (await asgi_get(app, "/readyz", "prometheus-token"))[1]
    assert (await asgi_get(app, "/healthz"))[0] == 200


async def test_with_the_wall_down_everybody_reads_them() -> None:
    """The mutation."""
    status, text = await asgi_get(gateway(None), "/metrics")
    assert (status, "acme" in text) == (200, True)


@pytest.mark.parametrize("walled", [True, False])
async def test_an_operators_pages_need_a_token_and_only_metrics_can_be_open(
    doors: Access, judge: Judge, walled: bool
) -> None:
    judge.rights["reader"] = {"/v1/decisions"}
    guard = TokenGuard(doors, open_metrics=not walled)
    shell = Shell("the operator", wording=denial_response, guard=guard)

    async def told(_: ShellRequest) -> Response:
        return PlainTextResponse("demo/tiny-chat")

    async def readyz(request: ShellRequest) -> Response:
        return PlainTextResponse("why" if await guard.may_know(request) else "not ok")

    shell.route(GET, "/v1/decisions/{a}/{b}", told)
    shell.route(GET, "/metrics", told)
    shell.route(GET, "/readyz", readyz)

    async def get(path: str, token: str = "") -> tuple[int, str]:
        answer = await call(shell, path, x_shoal_key=token)
        return answer.status, answer.body.decode()

    assert (await get("/v1/decisions/a/b"))[0] == 401
    assert (await get("/v1/decisions/a/b", "prometheus-token"))[0] == 403
    assert (await get("/v1/decisions/a/b", "reader-token"))[0] == 200
    assert (await get("/metrics", "reader-token"))[0] == (403 if walled else 200)
    assert await get("/readyz") == (200, "not ok" if walled else "why")
    assert await get("/readyz", "prometheus-token") == (200, "why")
    # Strangers do not learn which paths there are.
    assert (await get("/v1/nothing"))[0] == 401
    refused = await call(shell, "/metrics", x_shoal_key="stranger-token")
    if walled:
        assert orjson.loads(refused.body) == {
            "message": "stranger may not get /metrics: see the ClusterRole shoal-metrics-reader",
            "reason": "Forbidden",
        }


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "BadRequest"),
        (401, "Unauthorized"),
        (403, "Forbidden"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
    ],
)
def test_a_refusal_has_the_api_servers_word_for_its_status(status: int, reason: str):
    """A client that reads only the reason must not take a missing answer for a refusal."""
    body = orjson.loads(denial_response(Problem(status, "why")).body)
    assert body == {"message": "why", "reason": reason}
