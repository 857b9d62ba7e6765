"""What gateways know of the last minute of routes, who may read it, and what `shoal top routes` shows of it."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry
from rich.console import Console

from shoal.api import keys, names, rights
from shoal.api.ledger import Prices, Rate
from shoal.api.routestats import RouteStatsPage, TargetStats
from shoal.cli.main import main
from shoal.cli.scaling.toproutes import RouteTop, lines, render
from shoal.core import facts
from shoal.core.routing.routestats import TTFT_BOUNDS
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.ops import gateway_ops
from shoal.gateway.routestats import RouteStatsApi, route_prices
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.net.server import make_server
from shoal.signals.totals import TotalsFollower
from tests.support.cannedapi import CannedApi
from tests.support.gateway import API_KEY, INSTALL_KEY, GatewayUnderTest, gateway
from tests.support.gateway import lines as events
from tests.support.provider import Provider, beside, whole
from tests.support.rolereviews import RoleReviews
from tests.support.routes import put, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

ADMIN = {"x-shoal-key": keys.derive(INSTALL_KEY, "logs", keys.DEMAND)}
PEER = {"authorization": f"Bearer {keys.derive(INSTALL_KEY, 'gateway', keys.DEMAND)}"}
CHAT = {"model": "front", "messages": [{"role": "user", "content": "hi"}]}


class Served:
    def __init__(self, url: str) -> None:
        self.url = url
        self.pods: list[facts.Pod] = []

    async def ask(self, headers: dict[str, str], status: int = 200, **query: str) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}{names.ROUTE_STATS_PATH}", params=query, headers=headers) as response,
        ):
            assert response.status == status, await response.text()
            return await response.json()


@asynccontextmanager
async def served(
    it: GatewayUnderTest, *, callers: Callers | None = None, name: str = "gateway-1", peer_port: int = 0
) -> AsyncGenerator[Served]:
    """The gateway's port for operations."""
    found = Served("")
    api = RouteStatsApi(
        it.app.routes,
        it.app.externals,
        name,
        it.ring,
        lambda: found.pods,
        peer_port,
        prices=lambda: route_prices(it.directory.snapshot.model_index, it.app.quotas.ledger.rate_table, name),
        callers=callers,
    )
    hub = DemandPublisher(DemandState()).hub
    app = gateway_ops(CollectorRegistry(), dict[str, str], lambda: None, hub, it.ring, routes=api)
    server = make_server(app, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    found.url = f"http://127.0.0.1:{server.port}"
    try:
        yield found
    finally:
        await api.page.close()
        server.should_exit = True
        await task


async def refuse(request: EngineRequest) -> None:
    await request.answer(500, b'{"object":"error","message":"no","type":"InternalServerError","code":500}')


async def test_requests_to_a_route_count_at_the_target_that_they_went_to_last(tmp_path: Path) -> None:
    rule = {"targets": [target("llama")], "canary": {"target": target("other"), "percent": 0}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(refuse), rule) as it, served(it) as ops:
        assert (await it.post(CHAT)).status == 200
        async with await it.post({**CHAT, "stream": True}) as answer:
            assert [event async for event in events(answer)]
        assert (await it.post({**CHAT, "model": "llama"})).status == 200  # it names its Model, and no route
        await it.records(count=3)
        (told,) = (await ops.ask(ADMIN))["targets"]
        assert (told["route"], told["target"], told["role"]) == ("chat/front", "chat/llama", "target")
        assert (told["requests"], told["failed"], told["outputTokens"]) == (2, 0, 6)
        assert sum(told["firstBytes"]) == 1, "only streams have a time to the first byte"
        assert told["windowSeconds"] > 0


async def test_which_targets_have_prices_is_told_for_routes_with_conditions_on_costs(tmp_path: Path) -> None:
    fallback = {"targets": [target("other")], "whenBudgetPercent": 80}
    plain, priced = {"targets": [target("other")]}, {"targets": [target("llama")], "fallback": fallback}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), plain) as it, served(it) as ops:
        assert (await ops.ask(ADMIN))["prices"] == []
        put(it, {"name": "long", "matches": [{"promptTokens": {"atLeast": 9}}], **priced}, plain)
        found = {"route": "chat/front", "gateway": "gateway-1", "currency": None, "unpriced": []}
        assert (await ops.ask(ADMIN))["prices"] == [found]
        ledger = TotalsFollower("http://ledger:8500", lambda: ())
        ledger.priced(Prices(list="p", currency="EUR", rates=(Rate(model="chat/other", input=1, cached=1, output=1),)))
        it.app.quotas.ledger = ledger
        assert (await ops.ask(ADMIN))["prices"] == [found | {"currency": "EUR", "unpriced": ["chat/llama"]}]
        assert (await ops.ask(ADMIN, namespace="elsewhere"))["prices"] == []


async def test_a_canary_and_a_fallback_are_told_apart_and_failures_count(tmp_path: Path) -> None:
    rule = {"targets": [target("llama")], "canary": {"target": target("other"), "percent": 100}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(refuse), rule) as it, served(it) as ops:
        assert (await it.post(CHAT)).status == 500
        await it.records()
        (told,) = (await ops.ask(ADMIN))["targets"]
        assert (told["target"], told["role"], told["failed"]) == ("chat/other", "canary", 1)
    rule = {"targets": [target("other")], "fallback": {"targets": [target("llama")], "whenWaitSeconds": 1}}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule, hold_seconds=0.1) as it:
        del it.pods["chat/llama-2"]
        it.changed()
        async with served(it) as ops:
            assert (await it.post(CHAT)).status == 200
            await it.records()
            (told,) = (await ops.ask(ADMIN))["targets"]
        assert (told["target"], told["role"], told["failed"]) == ("chat/llama", "fallback", 0)


async def test_a_namespace_sees_its_own_routes_and_a_gateway_that_is_away_is_named(tmp_path: Path) -> None:
    rule = {"targets": [target("llama")]}
    async with two_models(tmp_path, ScriptedEngine(), ScriptedEngine(), rule) as it:
        await it.post(CHAT)
        await it.records()
        async with served(it, name="gateway-2") as far:
            port = int(far.url.rpartition(":")[2])
            async with served(it, peer_port=port) as ops:
                assert (await ops.ask(ADMIN, namespace="other"))["targets"] == []
                pod = facts.Pod("shoal-system", "gateway-2", "u", None, False, False, True, {}, None, ip="127.0.0.1")
                ops.pods = [pod]
                found = await ops.ask(ADMIN, namespace="chat")
                assert [each["gateway"] for each in found["targets"]] == ["gateway-1", "gateway-2"]
                assert (found["gateways"], found["missing"]) == (["gateway-1", "gateway-2"], [])
                # A gateway gets only what is here.
                assert (await ops.ask(PEER))["gateways"] == ["gateway-1"]
        async with served(it, peer_port=port) as ops:
            ops.pods = [pod]
            assert (await ops.ask(ADMIN))["missing"] == ["gateway-2: it cannot be reached"]


async def test_an_external_target_says_whether_it_answers_and_why_not(tmp_path: Path) -> None:
    provider = Provider()
    only = {"targets": [{"external": {"name": "outside"}}]}
    async with beside(tmp_path, provider, ScriptedEngine(), only) as it, served(it) as ops:
        it.app.externals.follow(it.app.directory.snapshot.model_index.routes.values())

        async def told() -> dict[str, Any]:
            (found,) = (await ops.ask(ADMIN, namespace="chat"))["externals"]
            assert (found["target"], found["gateway"]) == ("chat/front/outside", "gateway-1")
            return found

        assert (await told())["state"] == "NotAsked"
        assert (await it.post(CHAT)).status == 200
        now = await told()
        assert (now["state"], now["reason"], now["rests"]) == ("Answers", None, False)
        assert now["secondsAgo"] >= 0
        provider.answer = whole(b"boom", "500 Internal Server Error")
        for _ in range(3):
            assert (await it.post(CHAT)).status == 503
        now = await told()
        assert (now["state"], now["reason"], now["rests"], now["running"]) == ("Fails", "failed", True, 0)
        assert (await ops.ask(ADMIN, namespace="other"))["externals"] == []
        for file in (tmp_path / "external-keys").iterdir():
            file.unlink()
        it.app.externals.sweep()
        now = await told()
        assert (now["state"], now["reason"]) == (
            "Unused",
            "the key of its external target has not arrived at this gateway",
        )


async def test_only_who_may_read_facts_of_requests_reads_this(tmp_path: Path) -> None:
    reviews = RoleReviews()
    callers = Callers(cast(KubeClient, reviews), rights.GATEWAY_AUDIENCE)

    def shown(account: str, namespace: str = "shoal-system") -> dict[str, str]:
        return {"x-shoal-key": reviews.issue(account, namespace, audience=rights.GATEWAY_AUDIENCE)}

    async with gateway(tmp_path, ScriptedEngine()) as it, served(it, callers=callers) as ops:
        for key in ("", API_KEY, "wrong", keys.derive(INSTALL_KEY, "operator", keys.DEMAND)):
            await ops.ask({"x-shoal-key": key}, 401)
        await ops.ask(shown(rights.VIEWER))
        for role in (rights.BILLING, rights.LOGS, rights.TENANT_ADMIN):
            await ops.ask(shown(role), 403)
        # It is no path of the port that clients reach.
        async with it.session.get(f"{it.url}{names.ROUTE_STATS_PATH}", headers=ADMIN) as response:
            assert response.status == 404


# --- the command

SYSTEM = "/api/v1/namespaces/shoal-system"
PROXY = f"{SYSTEM}/pods/shoal-gateway-0:9090/proxy{names.ROUTE_STATS_PATH}"
ROUTES = "/apis/shoal.dev/v1alpha1/namespaces/chat/modelroutes"
HALT = "Model chat/next: 3 of its last 20 requests failed"


def counted(target: str, role: Any, requests: int, failed: int = 0, gateway: str = "g-0", **more: Any) -> TargetStats:
    first = [0] * (len(TTFT_BOUNDS) + 1)
    first[3] = requests
    fields: dict[str, Any] = {"window_seconds": 60.0, "output_tokens": 60 * requests, "first_bytes": first, **more}
    return TargetStats(
        route="chat/front", target=target, role=role, gateway=gateway, requests=requests, failed=failed, **fields
    )


PAGE = RouteStatsPage(
    gateways=("g-0", "g-1"),
    targets=(
        counted("chat/llama", "target", 120),
        counted("chat/llama", "target", 60, gateway="g-1", window_seconds=30.0),
        counted("chat/next", "canary", 20, failed=5),
    ),
)


def a_raw_route(name: str, reason: str, message: str, canaries: list[dict[str, str]]) -> dict[str, Any]:
    condition = {
        "type": "Ready", "status": "True", "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip
    metadata = {"namespace": "chat", "name": name, "uid": name}
    return {"metadata": metadata, "status": {"conditions": [condition], "canaries": canaries}}


@pytest.fixture
def api() -> CannedApi:
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}
    pod = {
        "metadata": {"namespace": "shoal-system", "name": "shoal-gateway-0", "uid": "u", "labels": labels},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    key = base64.b64encode(ADMIN["x-shoal-key"].encode()).decode()
    halted = {"rule": "r0", "state": "Halted", "revision": "a", "message": HALT}
    routes = [
        a_raw_route("front", "CanaryHalted", f"rule r0: {HALT}", [halted]),
        a_raw_route("quiet", "TargetsReady", "", []),
    ]
    return CannedApi(
        {
            f"{SYSTEM}/secrets/shoal-key-logs": {"metadata": {"name": "shoal-key-logs"}, "data": {"key": key}},
            f"{SYSTEM}/pods": {"metadata": {"resourceVersion": "1"}, "items": [pod]},
            PROXY: PAGE.model_dump(mode="json", by_alias=True),
            ROUTES: {"metadata": {"resourceVersion": "1"}, "items": routes},
        }
    )


def top(api: CannedApi, tmp_path: Path, *arguments: str) -> Result:
    with api.kubeconfig(tmp_path) as kubeconfig:
        return CliRunner().invoke(main, ["top", "routes", "-n", "chat", *arguments, "--kubeconfig", str(kubeconfig)])


def test_the_table_has_each_route_and_its_targets(api: CannedApi, tmp_path: Path) -> None:
    done = top(api, tmp_path)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    front, llama, following, quiet = (next(r for r in rows if r[0] == n) for n in ("front", "llama", "next", "quiet"))
    # 120 in 60 s, 60 in 30 s, and 20 in 60 s.
    assert front[1:3] == ["4.3", "260"]
    assert front[-1] == "failed"
    assert llama[1:5] == ["target", "90", "%", "4.0"]
    assert following[1:5] == ["canary", "10", "%", "0.3"]
    assert following[-2:] == ["25", "%"]
    assert quiet[1:] == ["0", "0", "-", "-", "-"], "a route without requests has no errors and no times"
    method, path, _ = [call for call in api.calls if "/proxy/" in call[1]][-1]
    assert (method, path) == ("GET", f"{PROXY}?namespace=chat")


def test_json_has_the_same_with_the_canary_and_its_halt(api: CannedApi, tmp_path: Path) -> None:
    front, quiet = json.loads(top(api, tmp_path, "-o", "json").output)
    assert (front["requests"], front["failed"], front["errorPercent"], front["complete"]) == (200, 5, 2.5, True)
    assert 0.2 < front["ttftSecondsP50"] <= 0.35
    assert front["canaries"] == [{"rule": "r0", "state": "Halted", "message": HALT}]
    assert [(t["target"], t["role"], t["sharePercent"]) for t in front["targets"]] == [
        ("chat/llama", "target", 90.0),
        ("chat/next", "canary", 10.0),
    ]
    assert (quiet["requests"], quiet["ttftSecondsP50"], quiet["errorPercent"]) == (0, None, None)
    csv = top(api, tmp_path, "-o", "csv").output.splitlines()
    assert len(csv) == 1 + 2 + 2


def test_with_a_gateway_missing_no_sum_is_whole(api: CannedApi, tmp_path: Path) -> None:
    api.answers[PROXY] = PAGE.model_copy(update={"missing": ("g-2: it cannot be reached",)}).model_dump(mode="json")
    shown = top(api, tmp_path).output
    assert "gateway g-2: it cannot be reached" in shown
    assert "4.3+?" in shown
    (front, _) = json.loads(top(api, tmp_path, "-o", "json").output)
    assert (front["complete"], front["missing"]) == (False, ["g-2: it cannot be reached"])


def test_who_may_not_list_routes_sees_the_counts_and_is_told(api: CannedApi, tmp_path: Path) -> None:
    del api.answers[ROUTES]
    shown = top(api, tmp_path).output
    assert "canaries and reasons are unknown" in shown
    assert "4.3" in shown


def test_routes_have_two_sort_orders(api: CannedApi, tmp_path: Path) -> None:
    done = top(api, tmp_path, "--sort", "kv")
    assert (done.exit_code, "routes are sorted by name or rate" in done.output) == (2, True)
    names_of = [row["route"] for row in json.loads(top(api, tmp_path, "--sort", "rate", "-o", "json").output)]
    assert names_of == ["chat/front", "chat/quiet"]


def test_a_screen_that_is_too_low_shows_the_first_routes() -> None:
    one = counted("chat/m", "target", 1)
    page = RouteStatsPage(targets=tuple(one.model_copy(update={"route": f"chat/r{n}"}) for n in range(9)))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(RouteTop(tuple(lines(page, ())), ()), "chat", sort="name", height=6))
    shown = console.export_text()
    assert "r0" in shown
    assert "r8" not in shown
    assert "more routes" in shown
