"""`GET /v1/decisions` and `/v1/adapters` for people with a role: of all namespaces, or of theirs alone."""

from typing import Any, cast

import orjson
import pytest
from starlette.responses import PlainTextResponse, Response

from shoal.api import names, rights
from shoal.controllers.scaling.serve import add_routes
from shoal.kube.access import Access
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.net.pages import METRICS, TokenGuard, denial_response
from shoal.net.shell import GET, Shell, ShellRequest
from tests.support.rolereviews import KUBERNETES, RoleReviews, user_of
from tests.support.shells import Answer, call
from tests.unit.controllers.test_decisions_served import FakeHistory


class Asked:
    """The operator's pages, and the API server that it asks."""

    def __init__(self, *, roles: bool = True, open_metrics: bool = False) -> None:
        self.server = RoleReviews()
        client = cast(KubeClient, self.server)
        callers = Callers(client, rights.OPERATOR_AUDIENCE) if roles else None
        self.serve(TokenGuard(Access(client), callers, rights.OPERATOR, open_metrics=open_metrics))

    def serve(self, guard: TokenGuard) -> None:
        self.shell = Shell("the operator", wording=denial_response, guard=guard)
        add_routes(self.shell, FakeHistory(), operator="op-1", leads=lambda: True, leader=lambda: "op-1")
        self.shell.route(GET, METRICS, metrics)

    def token(
        self,
        account: str = rights.VIEWER,
        namespace: str = "shoal-system",
        audience: str = rights.OPERATOR_AUDIENCE,
        **more: Any,
    ) -> str:
        return self.server.issue(account, namespace, audience=audience, **more)

    def decisions_token(
        self, account: str = names.DECISIONS_ACCOUNT, namespace: str = "shoal-system", seconds: float = 600
    ) -> str:
        """For the API server itself, of an account with the ClusterRole shoal-decisions-reader."""
        self.server.paths[user_of(account, namespace)] = {names.DECISIONS_PATH, names.ADAPTERS_PATH}
        return self.server.issue(account, namespace, audience=KUBERNETES, seconds=seconds)

    async def get(self, token: str, path: str = names.DECISIONS_PATH) -> Answer:
        path, _, query = path.partition("?")
        return await call(self.shell, path, query=query.encode(), x_shoal_key=token)


async def metrics(_: ShellRequest) -> Response:
    return PlainTextResponse("shoal_leading 1")


@pytest.fixture
def asked() -> Asked:
    return Asked()


def models(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [model["model"] for model in orjson.loads(answer.body)["models"]]


async def test_a_viewer_of_all_namespaces_sees_every_model(asked: Asked) -> None:
    assert models(await asked.get(asked.token())) == ["chat/a", "code/b"]
    assert models(await asked.get(asked.token(), "/v1/decisions/code/b")) == ["code/b"]


async def test_a_viewer_of_one_namespace_sees_its_models_alone(asked: Asked) -> None:
    asked.server.bind("shoal-viewer", "chat", rights.VIEWER, namespace="chat")
    token = asked.token("shoal-viewer", "chat")
    assert models(await asked.get(token, "/v1/decisions?namespace=chat")) == ["chat/a"]
    assert models(await asked.get(token, "/v1/decisions/chat/a")) == ["chat/a"]
    for path in (
        "/v1/decisions",
        "/v1/decisions?namespace=",
        "/v1/decisions?namespace=code",
        "/v1/decisions/code/b",
        "/v1/decisions/code/b?namespace=chat",
        "/v1/decisions/",
        "/v1/decisions//a?namespace=chat",
        "/v1/adapters",
        "/v1/adapters?namespace=code",
    ):
        assert (await asked.get(token, path)).status == 403, path
    assert (await asked.get(token, "/v1/decisions?namespace=chat&namespace=code")).status == 400
    # A Model of another namespace is not told from one that does not exist.
    others = [orjson.loads((await asked.get(token, f"/v1/decisions/code/{name}")).body) for name in ("b", "none")]
    assert others[0] == others[1]
    assert "kubectl -n code create rolebinding shoal-viewer-account" in others[0]["message"]


async def test_other_roles_and_tokens_for_others_see_nothing(asked: Asked) -> None:
    for role in (rights.BILLING, rights.LOGS, rights.TENANT_ADMIN):
        assert (await asked.get(asked.token(role))).status == 403
    assert (await asked.get(asked.token("shoal-gateway", pod="shoal-gateway-0"))).status == 403
    for audience in (rights.LEDGER_AUDIENCE, rights.GATEWAY_AUDIENCE, names.LEDGER_AUDIENCE):
        assert (await asked.get(asked.token(audience=audience))).status == 401
    for seconds in (-3600, 8760 * 3600):
        assert (await asked.get(asked.token(seconds=seconds))).status == 401
    for nothing in ("", "sk-acme-key", "x" * 20_000):
        assert (await asked.get(nothing)).status == 401


async def test_a_role_opens_no_metrics(asked: Asked) -> None:
    assert (await asked.get(asked.token(), "/metrics")).status == 401


async def test_a_token_of_the_role_shoal_decisions_ends_soon(asked: Asked) -> None:
    assert models(await asked.get(asked.decisions_token())) == ["chat/a", "code/b"]
    answer = await asked.get(asked.decisions_token(seconds=8760 * 3600))
    assert (answer.status, "kubectl create token --duration 10m" in answer.body.decode()) == (401, True)


async def test_the_own_token_of_a_program_may_be_long(asked: Asked) -> None:
    """API servers make the token of a pod valid for a year; its rights end with the binding of its account."""
    token = asked.decisions_token("dashboard", "monitoring", seconds=8760 * 3600)
    assert models(await asked.get(token)) == ["chat/a", "code/b"]


@pytest.mark.parametrize("roles", [True, False])
async def test_with_open_metrics_the_other_pages_still_need_a_token(roles: bool) -> None:
    asked = Asked(roles=roles, open_metrics=True)
    assert (await asked.get("", "/metrics")).status == 200
    for path in ("/v1/decisions", "/v1/decisions/chat/a", "/v1/adapters", "/v1/nothing", "/metrics/", "//metrics"):
        for token in ("", "sk-acme-key", asked.token(rights.BILLING), asked.token(seconds=8760 * 3600)):
            assert (await asked.get(token, path)).status in (401, 403), path
    if roles:
        assert models(await asked.get(asked.token())) == ["chat/a", "code/b"]
        asked.server.bind("shoal-viewer", "chat", rights.VIEWER, namespace="chat")
        team = asked.token("shoal-viewer", "chat")
        assert (await asked.get(team)).status == 403
        assert models(await asked.get(team, "/v1/decisions?namespace=chat")) == ["chat/a"]
    # The token of the Role shoal-decisions: `kubectl shoal top` without a role.
    assert models(await asked.get(asked.decisions_token())) == ["chat/a", "code/b"]


async def test_where_nobody_judges_tokens_of_the_api_server_metrics_alone_are_open(asked: Asked) -> None:
    for callers in (Callers(cast(KubeClient, asked.server), rights.OPERATOR_AUDIENCE), None):
        asked.serve(TokenGuard(None, callers, rights.OPERATOR))
        assert (await asked.get("", "/metrics")).status == 200
        for path in ("/v1/decisions", "/v1/decisions/chat/a", "/v1/adapters"):
            for token in ("", asked.token(rights.BILLING), asked.decisions_token()):
                assert (await asked.get(token, path)).status in (401, 403), path
        assert (await asked.get(asked.token())).status == (401 if callers is None else 200)
