"""The ledger's answers to people and programs who show a token: what each role sees, and who sees nothing."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.api import names, rights
from shoal.kube.access import DENIED_SECONDS, FRESH_SECONDS, MOST_KEPT
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from shoal.ledger.process import LedgerProcess
from shoal.ledger.settings import LedgerSettings
from tests.support.clock import Clock
from tests.support.ledger import served
from tests.support.queryapi import GATEWAY, OCTOBER, Answer, Ledger, hour, ledger
from tests.support.rolereviews import RoleReviews, user_of


class Desk:
    """A ledger, the API server that it asks, and their clock."""

    def __init__(self, books: Ledger, server: RoleReviews, clock: Clock, callers: Callers) -> None:
        self.books, self.server, self.clock, self.callers = books, server, clock, callers

    async def get(self, token: str, path: str = names.USAGE_PATH, **query: Any) -> Answer:
        return await self.books.get(path, as_=token, **query)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncGenerator[Desk]:
    server, clock = RoleReviews(), Clock(1000.0)
    callers = Callers(cast(KubeClient, server), rights.LEDGER_AUDIENCE, clock)
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, callers=callers, october=OCTOBER) as books:
        await books.fill(
            hour("2026-11-01T00:00", "acme", model="chat/llama", input_tokens=10),
            hour("2026-11-01T00:00", "globex", model="code/coder", input_tokens=20),
            hour("2026-11-01T00:00", "initech", model="chat-two/llama", input_tokens=40),
        )
        yield Desk(books, server, clock, callers)


def models(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [row["model"] for row in answer.json["rows"]]


PAGES: tuple[tuple[str, dict[str, Any]], ...] = (
    (names.USAGE_PATH, {"by": "model"}),
    (names.BILL_PATH, {"tenant": "acme", "month": "2026-11"}),
    (names.CREDITS_PATH, {}),
    (names.MARGIN_PATH, {}),
    (names.PRICES_PATH, {}),
    (names.FOCUS_PATH, {}),
    (names.UNATTRIBUTED_PATH, {}),
)


@pytest.mark.parametrize(
    ("role", "seen"),
    [
        (rights.BILLING, {path for path, _ in PAGES}),
        (rights.TENANT_ADMIN, {names.USAGE_PATH, names.BILL_PATH, names.CREDITS_PATH, names.FOCUS_PATH}),
        (rights.VIEWER, {names.USAGE_PATH}),
        (rights.LOGS, set[str]()),
    ],
)
async def test_each_role_sees_its_pages_and_no_other(desk: Desk, role: str, seen: set[str]) -> None:
    token = desk.server.issue(role)
    found = {path: (await desk.get(token, path, **query)).status for path, query in PAGES}
    assert found == {path: 200 if path in seen else 403 for path, _ in PAGES}


async def test_billing_reads_and_a_tenant_admin_gives_credits_under_the_name_that_was_proved(desk: Desk) -> None:
    credit = {"id": "c1", "tenant": "acme", "month": "2026-11", "amount": "2", "currency": "EUR", "note": "",
              "madeBy": "ada"}  # fmt: skip
    refused = await desk.books.post(names.CREDITS_PATH, credit, as_=desk.server.issue(rights.BILLING))
    assert (refused.status, "may not create credits.shoal.dev" in refused.message) == (403, True)
    made = await desk.books.post(names.CREDITS_PATH, credit, as_=desk.server.issue(rights.TENANT_ADMIN))
    assert (made.status, made.json["madeBy"]) == (201, f"ada ({user_of(rights.TENANT_ADMIN)})")
    long = credit | {"id": "c2", "madeBy": "x" * 253}
    made = await desk.books.post(names.CREDITS_PATH, long, as_=desk.server.issue(rights.TENANT_ADMIN))
    assert made.json["madeBy"].endswith(f"({user_of(rights.TENANT_ADMIN)})")
    assert len(made.json["madeBy"]) == 253


async def test_a_viewer_of_one_namespace_sees_its_models_alone(desk: Desk) -> None:
    desk.server.bind("shoal-viewer", "chat", rights.VIEWER, namespace="chat")
    token = desk.server.issue("shoal-viewer", "chat")
    assert models(await desk.get(token, by="model", namespace="chat")) == ["chat/llama"]
    for query in ({}, {"namespace": "code"}, {"namespace": "chat-two"}, {"model": "chat/llama"}, {"namespace": ""}):
        refused = await desk.get(token, by="model", **query)
        assert refused.status == 403, query
    told = (await desk.get(token, by="model")).message
    assert told.endswith("Or ask for one namespace only (-n)")
    twice = await desk.get(token, by="model", namespace=["chat", "code"])
    assert (twice.status, "namespace is given 2 times" in twice.message) == (400, True)
    # Neither does a filter or an empty answer tell of other namespaces.
    assert models(await desk.get(token, by="model", namespace="chat", model="code/coder")) == []
    seen = await desk.get(token, namespace="chat", tenant="globex")
    assert seen.json["unseen"] == ["globex"], "has used nothing of this namespace"


async def test_a_namespace_narrows_also_what_those_see_who_see_all(desk: Desk) -> None:
    token = desk.server.issue(rights.BILLING)
    assert models(await desk.get(token, by="model")) == ["chat-two/llama", "chat/llama", "code/coder"]
    assert models(await desk.get(token, by="model", namespace="code")) == ["code/coder"]
    wrong = await desk.get(token, namespace="Chat/%")
    assert (wrong.status, "the name of a namespace" in wrong.message) == (400, True)


async def test_bills_of_one_tenant(desk: Desk) -> None:
    desk.server.bind("partner", "acme-team", rights.BILLING, tenant="acme")
    token, month = desk.server.issue("partner", "acme-team"), "2026-11"
    assert (await desk.get(token, names.BILL_PATH, tenant="acme", month=month)).status == 200
    assert (await desk.get(token, names.BILL_PATH, tenant="globex", month=month)).status == 403
    assert (await desk.get(token, names.FOCUS_PATH)).status == 403
    # The body names another tenant than the query: the right on one tenant is not enough where the body decides.
    body = {"tenant": "globex", "month": month, "prices": [{"file": "a.yaml", "text": OCTOBER}]}
    answer = await desk.books.post(f"{names.BILL_PATH}", body, as_=token)
    assert answer.status == 403
    narrowed = await desk.books.call("POST", names.BILL_PATH, key=token, query={"tenant": "acme"}, body=b"{}")
    assert narrowed.status == 403


# --- attacks ----------------------------------------------------------------------------------------------------------


async def test_tokens_that_are_not_for_queries_open_nothing(desk: Desk) -> None:
    server = desk.server
    server.bind("shoal-gateway", "shoal-system", rights.BILLING)  # even were it bound
    for token in (
        server.issue(rights.BILLING, audience="https://kubernetes.default.svc"),
        server.issue(rights.BILLING, audience=rights.OPERATOR_AUDIENCE),
        server.issue("shoal-gateway", audience=names.LEDGER_AUDIENCE, pod="shoal-gateway-0"),
        server.issue(rights.BILLING, seconds=-3600),
        server.issue(rights.BILLING, seconds=8760 * 3600),  # kubectl create token shoal-billing --duration 8760h
    ):
        assert (await desk.get(token)).status == 401
    assert server.asked == [], "a token that says so itself is not sent on"


async def test_a_gateways_pod_has_no_right_also_with_the_right_audience(desk: Desk) -> None:
    token = desk.server.issue("shoal-gateway", pod="shoal-gateway-0")
    for path, query in PAGES:
        assert (await desk.get(token, path, **query)).status == 403


async def test_forged_oversize_and_missing_tokens_and_a_tenants_key_open_nothing(desk: Desk) -> None:
    real = desk.server.issue(rights.BILLING)
    forged = f"{real.rpartition('.')[0]}.forged"
    assert (await desk.get(forged)).status == 401
    asked = len(desk.server.asked)
    for token in ("", "sk-acme-0123456789abcdef", "a.b.c", real + "x" * 20_000, "eyJ" * 10):
        answer = await desk.get(token)
        assert (answer.status, answer.headers[b"www-authenticate"]) == (401, b"Bearer"), token[:40]
    assert len(desk.server.asked) == asked, "what is no token is not sent to the API server"
    assert "or a token for shoal-ledger-queries" in (await desk.get("")).message


async def test_keys_of_roles_go_on_and_are_never_sent_to_the_api_server(desk: Desk) -> None:
    assert (await desk.get(GATEWAY, tenant="acme")).status == 200
    assert (await desk.books.get(names.MARGIN_PATH)).status == 200
    assert desk.server.asked == []


# --- what is kept -----------------------------------------------------------------------------------------------------


async def test_a_verdict_is_kept_for_a_minute_and_a_right_that_was_taken_away_ends_with_it(desk: Desk) -> None:
    token = desk.server.issue(rights.BILLING)
    for _ in range(3):
        assert (await desk.get(token)).status == 200
    assert desk.server.asked == ["tokenreviews", "subjectaccessreviews"]
    desk.server.unbind(rights.BILLING)
    desk.clock.now += FRESH_SECONDS
    assert (await desk.get(token)).status == 403
    desk.server.bind(rights.BILLING, "shoal-system", rights.BILLING)
    desk.clock.now += DENIED_SECONDS
    assert (await desk.get(token)).status == 200


async def test_what_was_allowed_on_one_namespace_is_asked_again_for_another(desk: Desk) -> None:
    desk.server.bind("shoal-viewer", "chat", rights.VIEWER, namespace="chat")
    token = desk.server.issue("shoal-viewer", "chat")
    assert (await desk.get(token, namespace="chat")).status == 200
    assert (await desk.get(token, namespace="code")).status == 403
    assert (await desk.get(token, names.BILL_PATH, tenant="acme", month="2026-11")).status == 403


async def test_a_token_counts_no_longer_than_it_lives(desk: Desk) -> None:
    token = desk.server.issue(rights.BILLING, seconds=5)
    assert (await desk.get(token)).status == 200
    desk.server.forget(token)
    desk.clock.now += 6
    assert (await desk.get(token)).status == 401


async def test_while_the_api_server_is_away_nobody_is_let_in_by_what_it_said_long_ago(desk: Desk) -> None:
    token = desk.server.issue(rights.BILLING)
    assert (await desk.get(token)).status == 200
    desk.server.away = True
    assert (await desk.get(token)).status == 200
    desk.clock.now += FRESH_SECONDS
    answer = await desk.get(token)
    assert (answer.status, answer.headers[b"retry-after"]) == (503, b"2")


async def test_a_ledger_that_may_not_ask_names_the_role_that_it_lacks(desk: Desk) -> None:
    desk.server.forbids = True
    answer = await desk.get(desk.server.issue(rights.BILLING))
    assert (answer.status, "it needs the ClusterRole shoal-reviews" in answer.message) == (503, True)
    desk.server.forbids = False
    assert (await desk.get(desk.server.issue(rights.BILLING))).status == 200


async def test_what_is_kept_is_bounded_whatever_is_asked(desk: Desk) -> None:
    token = desk.server.issue(rights.BILLING)
    for number in range(2 * MOST_KEPT):
        desk.clock.now += 1  # as slow as questions are answered
        await desk.get(token, namespace=f"n{number}")
    kept = desk.callers._allowed, desk.callers._denied  # pyright: ignore[reportPrivateUsage]
    assert [len(each) <= MOST_KEPT for each in kept] == [True, True]
    long = await desk.get(token, namespace="a" * 300)
    assert long.status == 400


async def test_without_role_tokens_a_token_is_no_key(tmp_path: Path) -> None:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as books:
        answer = await books.get(names.USAGE_PATH, as_=RoleReviews().issue(rights.BILLING))
        assert (answer.status, "a token" in answer.message) == (401, False)


# --- the whole ledger -------------------------------------------------------------------------------------------------


async def test_the_process_answers_people_and_takes_no_records_and_streams_no_totals_for_a_token(
    tmp_path: Path,
) -> None:
    server = RoleReviews()
    given: dict[str, Any] = {"client": server, "role_tokens": True, "reconcile": False}
    async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, **given) as process:
        token = f"Bearer {server.issue(rights.BILLING)}"
        status, answer = await process.call("GET", names.USAGE_PATH, Authorization=token)
        assert (status, answer["rows"]) == (200, [])
        for method, path in (("GET", names.TOTALS_PATH), ("POST", names.RECORDS_PATH)):
            status, answer = await process.call(method, path, b"[]", Authorization=token)
            assert status == 401
            assert "a key of this installation is needed" in answer["error"]["message"]


def test_the_process_needs_a_cluster_to_know_people() -> None:
    with pytest.raises(ValueError, match="SHOAL_LEDGER_ROLE_TOKENS needs a cluster"):
        LedgerProcess(LedgerSettings(role_tokens=True))
