"""How commands reach the ledger, and what a person is told when they do not."""

import pytest

from tests.support.ledgerpod import PROXY, ROOT
from tests.support.ledgerworld import World, run, world
from tests.support.queryapi import ADMIN, GATEWAY

__all__ = ["world"]


async def test_the_ledger_is_reached_through_the_api_server(world: World) -> None:
    told = await world.shoal("usage", "--by", "tenant", "-o", "csv", direct=False)
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines()[1].startswith("acme,1202,2000049")
    # Who may have no token of a role goes on with the key of the role.
    roles = ("shoal-viewer", "shoal-billing", "shoal-tenant-admin")
    assert world.pod.asked == [
        *(("POST", f"{ROOT}/serviceaccounts/{role}/token") for role in roles),
        ("GET", f"{ROOT}/secrets/shoal-key-billing"),
        ("GET", f"{ROOT}/pods"),
        ("GET", f"{PROXY}/v1/usage"),
    ]
    made = await world.shoal("credits", "add", "--tenant", "acme", "--month", "2026-11", "--amount", "2", direct=False)
    assert made.exit_code == 0, made.output
    refused = await world.shoal("usage", "--by", "colour", direct=False)
    assert "by=colour: it is one of" in refused.stderr


@pytest.mark.parametrize(
    ("path", "status", "message", "told"),
    [
        (f"{ROOT}/secrets", 403, 'secrets "shoal-key-billing" is forbidden', "needs the right to get the Secret"),
        (f"{ROOT}/secrets", 404, "not found", "there is no Secret shoal-key-billing in namespace shoal-system"),
        (f"{ROOT}/pods", 403, "pods is forbidden", "needs the right to list pods and to use pods/proxy"),
        (PROXY, 403, "pods/proxy is forbidden", "needs the right to list pods and to use pods/proxy"),
        (PROXY, 503, "error trying to reach service: dial tcp", "port-forward service/shoal-ledger 8500"),
    ],
)
async def test_what_is_in_the_way_is_told(world: World, path: str, status: int, message: str, told: str) -> None:
    world.pod.refuse[path] = (status, message)
    result = await world.shoal("usage", direct=False)
    assert result.exit_code == 1
    assert told in result.stderr


async def test_a_ledger_that_is_not_there_or_not_ready_is_told(world: World) -> None:
    world.pod.ready = False
    result = await world.shoal("bill", "--tenant", "acme", direct=False)
    assert "the ledger, pod shoal-ledger-0, is not ready" in result.stderr
    world.pod.there = False
    result = await world.shoal("bill", "--tenant", "acme", direct=False)
    assert "no ledger runs in namespace shoal-system" in result.stderr


async def test_a_key_that_is_not_the_ledger_s_is_told(world: World) -> None:
    result = await run("usage", "--ledger-url", world.url, "--ledger-key", "nonsense")
    assert (result.exit_code, "the ledger does not accept this key" in result.stderr) == (1, True)
    result = await run("margin", "--ledger-url", world.url, "--ledger-key", GATEWAY)
    assert "the key of role gateway may not do this" in result.stderr
    result = await run("usage", "--ledger-url", "http://127.0.0.1:9", "--ledger-key", ADMIN)
    assert "the ledger at http://127.0.0.1:9 does not answer" in result.stderr
