"""From which pod a caller comes, by an API server that the test plays."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.api import names
from shoal.kube import access
from shoal.kube.access import BUSY
from shoal.kube.client import KubeClient
from shoal.kube.podtokens import PodTokens
from shoal.metering.tokenfile import TokenFile
from tests.support.clock import Clock
from tests.support.podtokens import ACCOUNT, NAMESPACE, PodTokenReviews


@pytest.fixture
def server() -> PodTokenReviews:
    return PodTokenReviews()


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def tokens(server: PodTokenReviews, clock: Clock) -> PodTokens:
    client = cast(KubeClient, server)
    where = {"namespace": NAMESPACE, "account": ACCOUNT, "audience": names.LEDGER_AUDIENCE}
    return PodTokens(client, **where, clock=clock, wall=clock)


async def test_a_token_says_its_pod_and_is_asked_about_once_until_it_ends(
    tokens: PodTokens, server: PodTokenReviews, clock: Clock
) -> None:
    token = server.issue("shoal-gateway-3", made=clock.now)
    for _ in range(3):
        verdict = await tokens.pod_of(token)
        assert (verdict.status, verdict.pod) == (200, "shoal-gateway-3")
    assert server.asked == 1
    server.away = True
    clock.now += 3599
    assert (await tokens.pod_of(token)).allowed
    clock.now += 1
    assert (await tokens.pod_of(token)).status == 503, "its time is over, whatever is remembered"
    server.away = False
    server.forget(token)
    assert (await tokens.pod_of(token)).status == 403


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"audience": "https://kubernetes.default.svc"}, "not for audience shoal-ledger"),
        ({"account": "shoal-ledger"}, "is of system:serviceaccount:shoal-system:shoal-ledger, and must be of"),
        ({"namespace": "tenant"}, "is of system:serviceaccount:tenant:shoal-gateway, and must be of"),
        ({"pod": None}, "bound to no pod"),
        ({"pod": ""}, "bound to no pod"),
    ],
)
async def test_another_token_proves_nothing(
    tokens: PodTokens, server: PodTokenReviews, how: dict[str, Any], why: str
) -> None:
    verdict = await tokens.pod_of(server.issue(**how))
    assert (verdict.status, verdict.pod) == (403, "")
    assert why in verdict.message


async def test_a_token_that_outlives_its_pod_proves_nothing(tokens: PodTokens, server: PodTokenReviews) -> None:
    """Whoever may create tokens of the account could get one of a year, and it counts until it ends."""
    verdict = await tokens.pod_of(server.issue(seconds=365 * 86400))
    assert (verdict.status, verdict.pod) == (403, "")
    assert "valid for more than an hour" in verdict.message


async def test_no_token_and_a_forged_one(tokens: PodTokens, server: PodTokenReviews) -> None:
    assert "a token of the pod for audience shoal-ledger is needed" in (await tokens.pod_of("")).message
    assert server.asked == 0
    for forged in ("x", "a.b.c", "..", "x" * 20_000):
        assert (await tokens.pod_of(forged)).status == 403


async def test_an_api_server_that_does_not_look_at_audiences_proves_nothing(
    tokens: PodTokens, server: PodTokenReviews
) -> None:
    server.knows_audiences = False
    assert (await tokens.pod_of(server.issue())).status == 403


async def test_while_the_api_server_is_away_the_unknown_wait_and_the_proven_do_not(
    tokens: PodTokens, server: PodTokenReviews, clock: Clock
) -> None:
    known, unknown = server.issue(made=clock.now), server.issue("shoal-gateway-1", made=clock.now)
    assert (await tokens.pod_of(known)).allowed
    server.away = True
    verdict = await tokens.pod_of(unknown)
    assert (verdict.status, "Retry-After" in verdict.headers) == (503, True)
    assert (await tokens.pod_of(known)).allowed
    server.away = False
    assert (await tokens.pod_of(unknown)).pod == "shoal-gateway-1"


async def test_a_ledger_that_may_not_ask_says_which_right_it_lacks(tokens: PodTokens, server: PodTokenReviews) -> None:
    server.forbids = True
    refused = await tokens.pod_of(server.issue())
    assert (refused.status, refused.message) == (
        503,
        "the API server cannot say whose the pod's token is (its ServiceAccount may not create "
        "tokenreviews.authentication.k8s.io, it needs the ClusterRole shoal-ledger-senders, which the chart makes and "
        "binds)",
    )


async def test_strangers_cost_the_api_server_little_and_push_out_nobody(
    tokens: PodTokens, server: PodTokenReviews, clock: Clock
) -> None:
    known = server.issue(made=clock.now)
    assert (await tokens.pod_of(known)).allowed
    server.asked = 0
    verdicts = [await tokens.pod_of(f"guess-{number}") for number in range(1000)]
    assert verdicts.count(BUSY) >= 1000 - access.BURST
    assert server.asked <= access.BURST
    for _ in range(20):
        clock.now += 10
        for number in range(100):
            await tokens.pod_of(f"more-{clock.now}-{number}")
    server.away = True
    assert (await tokens.pod_of(known)).pod == "shoal-gateway-0"


async def test_what_is_remembered_is_bounded(tokens: PodTokens, server: PodTokenReviews, clock: Clock) -> None:
    for _ in range(access.MOST_KEPT + 50):
        clock.now += 1
        assert (await tokens.pod_of(server.issue(made=clock.now))).allowed
        await tokens.pod_of(f"guess-{clock.now}")
    assert len(tokens._allowed) == access.MOST_KEPT
    assert len(tokens._denied) <= access.MOST_KEPT


async def test_many_batches_at_a_time_ask_once(tokens: PodTokens, server: PodTokenReviews) -> None:
    token = server.issue()
    server.gate.clear()
    waiting = [asyncio.create_task(tokens.pod_of(token)) for _ in range(50)]
    await asyncio.sleep(0)
    server.gate.set()
    assert {(await each).pod for each in waiting} == {"shoal-gateway-0"}
    assert server.asked == 1


async def test_a_clock_that_is_wrong_makes_no_token_last_longer_than_its_life(
    tokens: PodTokens, server: PodTokenReviews, clock: Clock
) -> None:
    early = server.issue(made=clock.now + 86_400)  # as a machine sees it whose clock is a day behind
    assert (await tokens.pod_of(early)).allowed
    late = server.issue("shoal-gateway-1", made=clock.now - 86_400)
    assert (await tokens.pod_of(late)).allowed
    server.away = True
    clock.now += access.FRESH_SECONDS - 1
    assert (await tokens.pod_of(late)).allowed, "it does not cost a question per batch"
    clock.now += 3601 - access.FRESH_SECONDS
    assert (await tokens.pod_of(early)).status == 503


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_renewed_token_is_read_as_the_kubelet_writes_it(tmp_path: Path) -> None:
    token = TokenFile(tmp_path / "token")
    assert token() == ""
    for number in (1, 2):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "token").write_text(f"token-{number}\n")
        (tmp_path / "..new").symlink_to(f"..{number}")
        (tmp_path / "..new").rename(tmp_path / "..data")
        if number == 1:
            (tmp_path / "token").symlink_to("..data/token")
        assert token() == f"token-{number}"
    (tmp_path / "token").unlink()
    assert token() == ""


@pytest.mark.parametrize("content", [b"two\nlines", b"\xff\xfe", b"a\0b", b""])
def test_what_is_no_token_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    assert TokenFile(tmp_path / "token")() == ""
