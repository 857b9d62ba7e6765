"""Who may ask a service what, as a function of what the API server says."""

import base64
import json
from typing import Any

import pytest

from shoal.api import rights
from shoal.cli.roletokens import TOKEN_SECONDS
from shoal.core.callers import CallerReview, decide, question, read_claims, seconds_left, unfit

AUDIENCE = rights.LEDGER_AUDIENCE
NOW = 1_000_000.0
FINANCE = "system:serviceaccount:shoal-system:shoal-billing"
TEAM = "system:serviceaccount:team-a:shoal-viewer"


def jwt(**claims: Any) -> str:
    return f"h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b'=').decode()}.s"


def test_a_right_on_everything_is_asked_for_unless_the_call_names_less() -> None:
    usage = {"group": "shoal.dev", "resource": "usage", "verb": "get"}
    assert question(rights.USAGE).attributes == usage
    assert question(rights.USAGE, namespace="team-a").attributes == usage | {"namespace": "team-a"}
    assert question(rights.BILLS, tenant="acme").attributes == usage | {"resource": "bills", "name": "acme"}
    # What does not narrow a right does not narrow what is asked: margins are of all namespaces.
    assert question(rights.MARGINS, namespace="team-a", tenant="acme") == question(rights.MARGINS)
    assert question(rights.USAGE, tenant="acme") == question(rights.USAGE)
    # No name is every name: an empty parameter is never less than all.
    assert question(rights.USAGE, namespace="") == question(rights.USAGE)
    with pytest.raises(ValueError, match="longer than 253 characters"):
        question(rights.USAGE, namespace="a" * 254)


def test_nobody_without_a_known_token_gets_anything_whatever_else_is_said() -> None:
    verdict = decide(question(rights.USAGE), CallerReview(None, True))
    assert (verdict.status, verdict.refused) == (
        401,
        "the API server does not know this token, or it has expired: get another one",
    )


def test_who_has_the_right_gets_it() -> None:
    assert decide(question(rights.BILLS), CallerReview(FINANCE, True)).refused is None


@pytest.mark.parametrize(
    ("asked", "user", "told"),
    [
        (
            question(rights.USAGE, namespace="team-b"),
            TEAM,
            f"{TEAM} may not get usage.shoal.dev in namespace team-b. The ClusterRoles shoal-viewer-account, "
            "shoal-billing-account, shoal-tenant-admin-account grant it. An administrator runs: kubectl -n team-b "
            "create rolebinding shoal-viewer-account "
            "--clusterrole=shoal-viewer-account --serviceaccount=team-a:shoal-viewer",
        ),
        (
            question(rights.DECISIONS),
            TEAM,
            f"{TEAM} may not get decisions.shoal.dev in all namespaces. The ClusterRole shoal-viewer-account grants "
            "it. An administrator runs: kubectl create clusterrolebinding shoal-viewer-account --clusterrole="
            "shoal-viewer-account --serviceaccount=team-a:shoal-viewer. Or ask for one namespace only (-n)",
        ),
        (
            question(rights.NEW_CREDITS),
            "o'neill",
            "o'neill may not create credits.shoal.dev. The ClusterRole shoal-tenant-admin-account grants it. An "
            "administrator runs: kubectl create clusterrolebinding shoal-tenant-admin-account "
            """--clusterrole=shoal-tenant-admin-account --user='o'"'"'neill'""",
        ),
        (
            question(rights.REQUEST_LOGS, tenant="acme"),
            FINANCE,
            f"{FINANCE} may not get requestlogs.shoal.dev of tenant acme. The ClusterRole shoal-logs-account grants "
            "it. An administrator runs: kubectl create clusterrolebinding shoal-logs-account "
            "--clusterrole=shoal-logs-account "
            "--serviceaccount=shoal-system:shoal-billing",
        ),
    ],
)
def test_a_refusal_names_the_role_and_the_command(asked: Any, user: str, told: str) -> None:
    verdict = decide(asked, CallerReview(user, False))
    assert (verdict.status, verdict.refused) == (403, told)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("", "a token of a ServiceAccount for audience shoal-ledger-queries is needed"),
        ("sk-a-tenants-key", "this is no token of a ServiceAccount"),
        ("a.b", "this is no token of a ServiceAccount"),
        ("a.!!!.c", "this is no token of a ServiceAccount"),
        (f"a.{base64.urlsafe_b64encode(b'[1]').decode()}.c", "this is no token of a ServiceAccount"),
        ("x" * 16_385, "the token is longer than 16384 characters"),
        (
            jwt(aud=["https://kubernetes.default.svc"], exp=NOW + 60),
            "(https://kubernetes.default.svc), and must be for",
        ),
        (jwt(aud=["shoal-ledger"], exp=NOW + 60), "(shoal-ledger), and must be for shoal-ledger-queries"),
        (jwt(exp=NOW + 60), "another audience (none)"),
        (jwt(aud={"a": 1}), "another audience (none)"),
        (jwt(aud=[AUDIENCE], exp=NOW - 61), "the token has expired"),
        (jwt(aud=[AUDIENCE], iat=NOW, exp=NOW + 8760 * 3600), "valid for 31,536,000 s, and one for at most 3,600 s"),
        (jwt(aud=[AUDIENCE], iat=NOW - 86_000, exp=NOW + 400), "valid for 86,400 s"),
        (jwt(aud=[AUDIENCE], iat=NOW, exp=NOW + 3661), "kubectl create token --duration 10m"),
        (jwt(aud=[AUDIENCE], exp=NOW + 600), "does not say when it was made and when it expires"),
        (jwt(aud=[AUDIENCE], iat=NOW), "does not say when it was made and when it expires"),
        (jwt(aud=[AUDIENCE]), "does not say when it was made and when it expires"),
        (jwt(aud=[AUDIENCE], iat="1", exp=NOW + 600), "does not say when it was made and when it expires"),
    ],
)
def test_a_token_that_proves_nothing_is_refused_before_the_api_server_is_asked(token: str, why: str) -> None:
    told = unfit(token, AUDIENCE, NOW)
    assert told is not None
    assert why in told


def test_a_token_for_the_audience_is_asked_about_also_where_clocks_differ_a_little() -> None:
    for token in (jwt(aud=AUDIENCE, iat=NOW - 599, exp=NOW + 1), jwt(aud=["x", AUDIENCE], iat=NOW - 659, exp=NOW - 59)):
        assert unfit(token, AUDIENCE, NOW) is None


def test_what_commands_and_the_docs_ask_for_is_not_too_long() -> None:
    seconds = (
        TOKEN_SECONDS,
        3600,  # `kubectl create token` without a duration, and docs/roles.md for programs
        3607,  # what a kubelet asks for a pod's own token, which API servers make longer for their own audience only
    )
    for each in seconds:
        assert unfit(jwt(aud=[AUDIENCE], iat=NOW, exp=NOW + each), AUDIENCE, NOW) is None


def test_what_a_token_says_of_its_end_bounds_what_is_kept_of_it() -> None:
    assert seconds_left(jwt(exp=NOW + 30), NOW) == 30
    for token in (jwt(exp=NOW - 1), jwt(), jwt(exp=True), jwt(exp="soon"), "no token"):
        assert seconds_left(token, NOW) == 0
    assert read_claims("a.b.c.d") is None


def test_each_right_is_granted_by_a_role_and_logs_by_no_other() -> None:
    asked = [*rights.LEDGER.values(), *rights.OPERATOR.values(), *rights.GATEWAY.values()]
    assert all(rights.roles_with(right) for right in asked)
    assert rights.roles_with(rights.REQUEST_LOGS) == rights.roles_with(rights.ERASE_REQUEST_LOGS) == ("shoal-logs",)
    assert rights.roles_with(rights.NEW_CREDITS) == ("shoal-tenant-admin",), "billing only reads"
    assert {right.verb for right in rights.GRANTED[rights.BILLING]} == {"get"}
