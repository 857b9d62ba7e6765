"""`kubectl shoal usage`, `bill` and `credits` with a role and without any key: what a person sees, and is told."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest
from click.testing import Result

from shoal.api import rights
from shoal.kube.callers import Callers
from shoal.kube.client import KubeClient
from tests.support.ledgerpod import ROOT, SERVICE, SERVICE_PROXY, ledger_pod
from tests.support.ledgerworld import World
from tests.support.queryapi import ADMIN, OCTOBER, hour, ledger
from tests.support.rolereviews import HOME, RoleReviews, user_of

ACCOUNTS = "/api/v1/namespaces/{}/serviceaccounts/{}/token"


@pytest.fixture
async def office(tmp_path: Path) -> AsyncGenerator[World]:
    """A cluster whose user may not read a Secret, nor list pods."""
    reviews = RoleReviews()
    callers = Callers(cast(KubeClient, reviews), rights.LEDGER_AUDIENCE)
    async with (
        ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, callers=callers, october=OCTOBER) as books,
        books.served() as url,
        ledger_pod(url, tmp_path) as pod,
    ):
        await books.fill(
            hour("2026-11-01T00:00", "acme", model="chat/llama", input_tokens=10),
            hour("2026-11-01T00:00", "globex", model="code/coder", input_tokens=20),
        )
        pod.reviews = reviews
        pod.refuse[f"{ROOT}/secrets"] = 403, 'secrets "shoal-key-billing" is forbidden: User "finance@example.com"'
        pod.refuse[f"{ROOT}/pods"] = 403, "pods is forbidden"
        yield World(books, url, pod)


async def shoal(office: World, *args: str) -> Result:
    return await office.shoal(*args, direct=False)


async def test_finance_sees_usage_and_bills_without_any_key(office: World) -> None:
    office.pod.accounts = {(HOME, rights.BILLING)}
    told = await shoal(office, "usage", "--by", "tenant", "-o", "json")
    assert told.exit_code == 0, told.output
    assert [row["tenant"] for row in json.loads(told.stdout)["rows"]] == ["acme", "globex"]
    assert office.pod.asked == [
        ("POST", ACCOUNTS.format(HOME, rights.VIEWER)),
        ("POST", ACCOUNTS.format(HOME, rights.BILLING)),
        ("GET", SERVICE),
        ("GET", f"{SERVICE_PROXY}/v1/usage"),
    ]
    assert not any("/secrets" in path or "/pods" in path for _, path in office.pod.asked)
    for command in (("bill", "--tenant", "acme", "--month", "2026-11"), ("credits", "list"), ("margin",),
                    ("unattributed",), ("export", "focus")):  # fmt: skip
        done = await shoal(office, *command)
        assert done.exit_code == 0, done.output
    assert ADMIN not in office.pod.shown


async def test_a_bill_at_other_prices_is_sent_through_the_service_too(office: World, tmp_path: Path) -> None:
    office.pod.accounts = {(HOME, rights.BILLING)}
    (tmp_path / "next.yaml").write_text(OCTOBER)
    told = await shoal(
        office, "bill", "--tenant", "acme", "--month", "2026-11", "--prices", str(tmp_path / "next.yaml")
    )
    assert told.exit_code == 0, told.output
    assert "Difference: 0" in told.stdout


async def test_billing_gives_no_credit_and_a_tenant_admin_does(office: World) -> None:
    add = ("credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "2")
    office.pod.accounts = {(HOME, rights.BILLING)}
    refused = await shoal(office, *add)
    assert refused.exit_code == 1
    assert "This needs the ClusterRole shoal-tenant-admin. An administrator runs:" in refused.stderr
    office.pod.accounts = {(HOME, rights.TENANT_ADMIN)}
    assert (await shoal(office, *add)).exit_code == 0
    found = json.loads((await shoal(office, "credits", "list", "-o", "json")).stdout)["credits"]
    assert [one["madeBy"] for one in found] == [f"finance@example.com ({user_of(rights.TENANT_ADMIN)})"]


async def test_a_team_sees_its_namespace_and_no_other(office: World) -> None:
    assert office.pod.reviews is not None
    office.pod.reviews.bind("shoal-viewer", "chat", rights.VIEWER, namespace="chat")
    office.pod.accounts = {("chat", "shoal-viewer")}
    told = await shoal(office, "usage", "-n", "chat", "--by", "model", "-o", "json")
    assert told.exit_code == 0, told.output
    assert [row["model"] for row in json.loads(told.stdout)["rows"]] == ["chat/llama"]
    for command in (("usage",), ("usage", "-n", "code"), ("bill", "--tenant", "acme")):
        assert (await shoal(office, *command)).exit_code == 1, command
    # The account of one namespace is never shown for another.
    other = await shoal(office, "usage", "-n", "code")
    assert (
        "kubectl -n code create rolebinding shoal-viewer-finance-example-com --clusterrole=shoal-viewer" in other.stderr
    )
    unseen = await shoal(office, "usage", "-n", "chat", "--tenant", "globex")
    assert "never seen usage of globex in namespace chat" in unseen.stderr


async def test_an_account_whose_binding_was_forgotten_is_named_by_the_ledger(office: World) -> None:
    office.pod.accounts = {("chat", "shoal-viewer")}
    told = await shoal(office, "usage", "-n", "chat")
    assert told.exit_code == 1
    assert (
        "system:serviceaccount:chat:shoal-viewer may not get usage.shoal.dev in namespace chat. The ClusterRoles "
        in told.stderr
    )
    assert "kubectl -n chat create rolebinding shoal-viewer-account" in told.stderr


async def test_an_account_without_the_right_hides_no_role_that_has_it(office: World) -> None:
    """Who may edit a namespace may have a token of every account in it, also of one that nobody bound."""
    office.pod.accounts = {("chat", "shoal-viewer"), (HOME, rights.BILLING)}
    told = await shoal(office, "usage", "-n", "chat", "--by", "model", "-o", "json")
    assert told.exit_code == 0, told.output
    assert [row["model"] for row in json.loads(told.stdout)["rows"]] == ["chat/llama"]


async def test_without_any_role_the_role_and_the_command_are_told(office: World) -> None:
    told = await shoal(office, "bill", "--tenant", "acme")
    assert told.exit_code == 1
    # First what the user lacks; the Secret, which nobody is to be given, last.
    first = "Error: This needs one of the ClusterRoles shoal-billing, shoal-tenant-admin. An administrator runs:"
    assert told.stderr.splitlines()[0] == first
    assert told.stderr.index("create rolebinding") < told.stderr.index("secrets")
    assert told.stderr.splitlines()[-1].startswith("The API server said: secrets")
    command = "kubectl -n shoal-system create rolebinding shoal-billing-finance-example-com"
    assert f"{command} --clusterrole=shoal-billing --user=finance@example.com" in told.stderr


async def test_a_namespace_without_the_account_is_told(office: World) -> None:
    office.pod.refuse[ACCOUNTS.format("chat", "shoal-viewer")] = 404, 'serviceaccounts "shoal-viewer" not found'
    told = await shoal(office, "usage", "-n", "chat")
    assert "There is no ServiceAccount shoal-viewer in namespace chat" in told.stderr
    assert "kubectl -n chat create serviceaccount shoal-viewer" in told.stderr


@pytest.mark.parametrize("path", [SERVICE, SERVICE_PROXY])
async def test_who_may_not_reach_the_service_is_told_what_lets_them(office: World, path: str) -> None:
    office.pod.accounts = {(HOME, rights.VIEWER)}
    office.pod.refuse[path] = 403, "services/proxy is forbidden"
    told = await shoal(office, "usage")
    assert told.exit_code == 1
    assert told.stderr.startswith("Error: This needs the Role shoal-reach in namespace shoal-system")
    assert (
        "create rolebinding shoal-reach-finance-example-com --role=shoal-reach --user=finance@example.com"
        in told.stderr
    )


async def test_who_may_still_read_the_key_needs_no_new_binding(office: World) -> None:
    office.pod.accounts = {(HOME, rights.VIEWER)}
    office.pod.refuse = {SERVICE: (403, "services is forbidden")}
    told = await shoal(office, "usage", "--by", "tenant", "-o", "csv")
    assert told.exit_code == 0, told.output


async def test_a_service_without_a_ready_pod_is_told(office: World) -> None:
    office.pod.accounts = {(HOME, rights.BILLING)}
    office.pod.refuse[SERVICE_PROXY] = 503, 'no endpoints available for service "shoal-ledger"'
    told = await shoal(office, "usage")
    assert "does not reach the ledger, Service shoal-ledger: no endpoints available" in told.stderr


async def test_an_administrator_reaches_the_pod_where_the_service_has_no_endpoints(office: World) -> None:
    office.pod.accounts = {(HOME, rights.BILLING)}
    office.pod.refuse = {SERVICE_PROXY: (503, 'no endpoints available for service "shoal-ledger"')}
    told = await shoal(office, "usage", "--by", "tenant", "-o", "csv")
    assert told.exit_code == 0, told.output
    office.pod.ready = False
    told = await shoal(office, "usage")
    assert "the ledger, pod shoal-ledger-0, is not ready" in told.stderr


async def test_a_token_that_the_ledger_does_not_know_is_asked_for_once_more(office: World) -> None:
    office.pod.accounts = {(HOME, rights.BILLING)}
    assert office.pod.reviews is not None
    office.pod.reviews.issue = lambda *_, **__: "h.eyJhdWQiOiJzaG9hbC1sZWRnZXItcXVlcmllcyJ9.s"  # type: ignore[method-assign]
    told = await shoal(office, "usage")
    assert told.exit_code == 1
    assert "the ledger does not accept the token" in told.stderr
    assert len([path for _, path in office.pod.asked if path.endswith(f"{rights.BILLING}/token")]) == 2
