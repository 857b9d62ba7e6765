"""The request log of several gateways: a tenant gets one page, an operator one deletion, and who is away is named."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from shoal.api import names, rights
from shoal.core import facts
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.ops import gateway_ops
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.net.server import make_server
from shoal.requestlog.api import Logging, LogsApi
from shoal.requestlog.logger import RequestLogger
from tests.support.requestlog import ADMIN, PEER, LoggedGateway, echo, logged
from tests.support.rolereviews import RoleReviews
from tests.support.scripted_engine import ScriptedEngine


def pod(name: str, ip: str | None = "127.0.0.1") -> facts.Pod:
    return facts.Pod("shoal-system", name, f"uid-{name}", None, False, False, True, {}, None, ip=ip, was_ready=True)


async def serve_ops(it: LoggedGateway, api: LogsApi) -> tuple[asyncio.Task[None], Any]:
    app = gateway_ops(
        CollectorRegistry(), dict[str, str], lambda: None, DemandPublisher(DemandState()).hub, it.it.ring, logs=api
    )
    server = make_server(app, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    return task, server


def logging_of(tenant: str) -> Logging:
    return "On" if tenant == "acme" else "NoTenant"


class Two:
    """Two gateways with a folder each. Only the first serves; the other has what was written there before."""

    def __init__(self, it: LoggedGateway, other: RequestLogger, port: int, url: str) -> None:
        self.it, self.other, self.port, self.url = it, other, port, url
        self.pods: list[facts.Pod] | None = [pod("gateway-2")]

    async def call(self, method: str, headers: dict[str, str], status: int = 200, **query: str) -> dict[str, Any]:
        async with self.it.it.session.request(method, f"{self.url}/v1/logs", params=query, headers=headers) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer


@pytest.fixture
async def two(tmp_path: Path):
    async with logged(tmp_path, ScriptedEngine(echo)) as it:
        settings = it.it.settings.model_copy(update={"log_dir": tmp_path / "logs-2"})
        other = RequestLogger(settings, gateway="gateway-2")
        far, far_server = await serve_ops(it, LogsApi(other, it.it.ring))
        found = Two(it, other, far_server.port, "")
        near_api = LogsApi(it.book, it.it.ring, lambda: found.pods, far_server.port, logging=logging_of)
        near, near_server = await serve_ops(it, near_api)
        found.url = f"http://127.0.0.1:{near_server.port}"
        await it.it.app.logs.close()
        it.it.app.logs = near_api
        # The second gateway's entries: the same requests, ended there.
        await it.ask("here")
        begin = it.it.app.logs.logger
        it.it.app.logs.logger = other
        await it.ask("there", user="u-2")
        it.it.app.logs.logger = begin
        await asyncio.wrap_future(other.writer.close_files())
        await it.written()
        try:
            yield found
        finally:
            await near_api.close()
            await other.stop()
            for server, task in ((near_server, near), (far_server, far)):
                server.should_exit = True
                await task


def texts(page: dict[str, Any]) -> list[str]:
    return [entry["request"]["messages"][0]["content"] for entry in page["data"]]


async def test_a_tenant_gets_what_all_gateways_have(two: Two):
    page = await two.it.page()
    assert texts(page) == ["there", "here"]
    assert page["missing"] == []
    first = await two.it.page(limit=1)
    assert texts(first) == ["there"]
    assert texts(await two.it.page(limit=1, cursor=first["next_cursor"])) == ["here"]


async def test_a_gateway_that_is_away_is_named(two: Two):
    two.pods = [pod("gateway-2"), pod("gateway-3", None)]
    page = await two.it.page()
    assert len(page["data"]) == 2
    assert page["missing"] == [{"gateway": "gateway-3", "reason": "it has no address"}]
    two.pods = [pod("gateway-2", "127.0.0.99")]
    page = await two.it.page()
    assert texts(page) == ["here"]
    assert page["missing"] == [{"gateway": "gateway-2", "reason": "it cannot be reached"}]
    two.pods = None
    assert "the other gateways are not known" in (await two.it.page())["missing"][0]["reason"]


async def test_people_read_with_the_key_for_logs_and_other_gateways_only_what_is_here(two: Two):
    assert texts(await two.call("GET", ADMIN, tenant="acme")) == ["there", "here"]
    assert texts(await two.call("GET", PEER, tenant="acme")) == ["here"]
    assert (await two.call("GET", ADMIN, tenant="globex"))["data"] == []
    refused = await two.call("GET", {"x-shoal-key": "wrong"}, 401, tenant="acme")
    assert refused["error"]["message"] == "A key for logs, or of a gateway, is needed."
    await two.call("GET", ADMIN, 400)
    await two.call("GET", ADMIN, 400, tenant="../globex")
    await two.call("POST", ADMIN, 405, tenant="acme")


async def test_deletion_goes_to_all_gateways_and_says_which_it_did_not_reach(two: Two):
    answer = await two.call("DELETE", ADMIN, tenant="acme", user="u-2")
    assert (answer["entries"], answer["files"], answer["missing"]) == (1, 1, [])
    assert texts(await two.it.page()) == ["here"]
    two.pods = [pod("gateway-2"), pod("gateway-3", "127.0.0.99")]
    answer = await two.call("DELETE", ADMIN, tenant="acme")
    assert answer["missing"] == [{"gateway": "gateway-3", "reason": "it cannot be reached"}]
    assert answer["files"] == 1
    two.pods = []
    assert (await two.it.page())["data"] == []


# --- people with a role -----------------------------------------------------------------------------------------------


@pytest.fixture
def reviews(two: Two) -> RoleReviews:
    server = RoleReviews()
    two.it.it.app.logs._callers = Callers(cast(KubeClient, server), rights.GATEWAY_AUDIENCE)  # pyright: ignore[reportPrivateUsage]
    return server


def shown(
    server: RoleReviews,
    account: str,
    namespace: str = "shoal-system",
    audience: str = rights.GATEWAY_AUDIENCE,
    **more: Any,
) -> dict[str, str]:
    return {"x-shoal-key": server.issue(account, namespace, audience=audience, **more)}


async def test_who_has_the_role_for_logs_reads_and_deletes_on_all_gateways(two: Two, reviews: RoleReviews):
    reader = shown(reviews, rights.LOGS)
    page = await two.call("GET", reader, tenant="acme")
    assert (texts(page), page["logging"]) == (["there", "here"], "On")
    assert (await two.call("GET", reader, tenant="acmee"))["logging"] == "NoTenant"
    answer = await two.call("DELETE", reader, tenant="acme", user="u-2")
    assert (answer["entries"], answer["missing"]) == (1, [])
    assert texts(await two.call("GET", reader, tenant="acme")) == ["here"]


async def test_who_may_read_one_tenants_log_reads_no_others(two: Two, reviews: RoleReviews):
    reviews.bind("auditor", "acme-team", rights.LOGS, tenant="acme")
    reader = shown(reviews, "auditor", "acme-team")
    assert texts(await two.call("GET", reader, tenant="acme")) == ["there", "here"]
    for other in ("globex", "no-such-tenant"):
        refused = await two.call("GET", reader, 403, tenant=other)
        assert f"may not get requestlogs.shoal.dev of tenant {other}" in refused["message"]
        assert "logging" not in refused, "who may not read a tenant's log is not told whether there is such a tenant"
    await two.call("GET", reader, 400, tenant="")
    await two.call("GET", reader, 400)


async def test_no_other_role_reads_prompts_and_nobody_without_a_token_for_them(two: Two, reviews: RoleReviews):
    for role in (rights.BILLING, rights.VIEWER, rights.TENANT_ADMIN):
        for method in ("GET", "DELETE"):
            refused = await two.call(method, shown(reviews, role), 403, tenant="acme")
            assert "The ClusterRole shoal-logs-account grants it" in refused["message"]
    await two.call("GET", shown(reviews, "shoal-gateway", pod="shoal-gateway-0"), 403, tenant="acme")
    asked = len(reviews.asked)
    for audience in (rights.LEDGER_AUDIENCE, names.LEDGER_AUDIENCE, "https://kubernetes.default.svc"):
        await two.call("GET", shown(reviews, rights.LOGS, audience=audience), 401, tenant="acme")
    await two.call("GET", shown(reviews, rights.LOGS, seconds=-3600), 401, tenant="acme")
    for nothing in ("sk-test-acme", "x" * 20_000):
        await two.call("GET", {"x-shoal-key": nothing}, 401, tenant="acme")
    assert len(reviews.asked) == asked, "neither a tenant's key nor another's token is sent to the API server"
    reviews.away = True
    await two.call("GET", shown(reviews, rights.LOGS), 503, tenant="acme")
