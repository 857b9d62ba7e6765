"""ModelRoute on a real API server: what is stored, what is refused, and what a person reads then."""

from typing import Any

import pytest

from tests.e2e.test_crds import changed
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.apiserver

ROUTE: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "ModelRoute",
    "metadata": {"name": "front", "namespace": "default"},
    "spec": {"rules": [{"targets": [{"model": {"name": "a"}}]}]},
}
EXTERNAL: dict[str, Any] = {"name": "outside", "url": "https://api.example.com/v1", "model": "m"}
ONE_OF = "give one of `model`, `adapter` and `external`"
COST = {"whenCostAbove": {"amount": "0.05", "currency": "USD"}}
AFFINITY = {"type": "Header", "header": "x-session"}


def rule(**said: Any) -> dict[str, Any]:
    return changed(ROUTE, "spec.rules", [{"targets": [{"model": {"name": "a"}}]} | said])


def header(**said: Any) -> dict[str, Any]:
    return rule(matches=[{"headers": [{"name": "x-beta", "value": "1"} | said]}])


def external(**said: Any) -> dict[str, Any]:
    return changed(ROUTE, "spec.externalTargets", [EXTERNAL | said])


def fallback(**said: Any) -> dict[str, Any]:
    return rule(fallback={"targets": [{"model": {"name": "b"}}]} | said)


def costs(**said: Any) -> dict[str, Any]:
    return fallback(whenCostAbove=said)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no rule", changed(ROUTE, "spec.rules", []), "should have at least 1 items"),
    ("no target", rule(targets=[]), "should have at least 1 items"),
    ("a target of nothing", rule(targets=[{"weight": 1}]), ONE_OF),
    ("a target of two kinds", rule(targets=[{"model": {"name": "a"}, "adapter": {"name": "b"}}]), ONE_OF),
    ("a target of two kinds", rule(targets=[{"model": {"name": "a"}, "external": {"name": "b"}}]), ONE_OF),
    (
        "an external mirror",
        rule(mirror={"external": {"name": "b"}, "percent": 5}),
        'unknown field "spec.rules[0].mirror.external"',
    ),
    ("an external target by address", external(url="https://169.254.169.254/v1"), "should match"),
    ("an external target with a password", external(url="https://u:p@api.example.com/v1"), "should match"),
    ("an external target of a file", external(url="file:///etc/passwd"), "should match"),
    ("an external target without a model", external(model=""), "at least 1 chars"),
    ("an external target's endpoint", external(endpoints=["/v1/files"]), "should match"),
    (
        "a key in a header of the writer's choice",
        external(credentials={"name": "provider", "auth": "Cookie"}),
        'supported values: "Bearer", "ApiKey", "XApiKey"',
    ),
    ("an external target that may hang", external(timeouts={"firstByteSeconds": 0}), "greater than or equal to 1"),
    ("a caBundle of something else", external(caBundle="x"), "should match"),
    ("two external targets of a name", changed(ROUTE, "spec.externalTargets", [EXTERNAL] * 2), "Duplicate value"),
    ("a negative weight", rule(targets=[{"model": {"name": "a"}, "weight": -1}]), "greater than or equal to 0"),
    ("a header with a key", header(name="authorization"), "a header with a key or a cookie cannot be matched"),
    ("a header in upper case", header(name="X-Beta"), "should match"),
    (
        "lengths that no request has",
        rule(matches=[{"promptTokens": {"atLeast": 10, "lessThan": 5}}]),
        "`atLeast` has to be below `lessThan`",
    ),
    (
        "a range of no length",
        rule(matches=[{"promptBytes": {"atLeast": 5, "lessThan": 5}}]),
        "`atLeast` has to be below `lessThan`",
    ),
    ("a session by key", rule(sessionAffinity=AFFINITY | {"header": "cookie"}), "cannot identify a session"),
    ("a session without its header", rule(sessionAffinity={"type": "Header"}), "`header` belongs to the type Header"),
    ("two rules without a name", changed(ROUTE, "spec.rules", ROUTE["spec"]["rules"] * 2), "Duplicate value"),
    ("a cost of nothing at all", costs(), "spec.rules[0].fallback.whenCostAbove.amount: Required value"),
    ("a cost without a currency", costs(amount="0.05"), "whenCostAbove.currency: Required value"),
    ("a cost as a float", costs(amount=0.05, currency="USD"), "must be of type string"),
    ("a cost of nothing", costs(amount="0.00", currency="USD"), "should match"),
    ("a cost below zero", costs(amount="-1", currency="USD"), "should match"),
    ("a cost with an exponent", costs(amount="1e3", currency="USD"), "should match"),
    ("a cost with a unit", costs(amount="50m", currency="USD"), "should match"),
    ("a cost of a million", costs(amount="1000000", currency="USD"), "should match"),
    ("a cost in a currency that is none", costs(amount="1", currency="Euro"), "may not be more than 3 bytes"),
    ("no share of a budget", fallback(whenBudgetPercent=0), "greater than or equal to 1"),
    ("more than a budget", fallback(whenBudgetPercent=101), "less than or equal to 100"),
    ("a cost without fallbacks", fallback(targets=[], **COST), "should have at least 1 items"),
    ("a limit of nothing", changed(ROUTE, "spec.limits", {"maxOutputTokens": 0}), "greater than or equal to 1"),
    ("no requests", changed(ROUTE, "spec.limits", {"requestsPerMinute": 0}), "greater than or equal to 1"),
    ("a budget", changed(ROUTE, "spec.limits", {"budget": 5}), "unknown field"),
    ("a name with a slash", changed(ROUTE, "spec.servedNames", ["a/b"]), "have a meaning of their own"),
]


@pytest.mark.parametrize(("bad", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_route_is_refused_with_words_that_help(apiserver: ApiServer, bad: dict[str, Any], message: str) -> None:
    answer = apiserver.apply(bad, dry_run=True)
    assert answer.returncode != 0
    assert message in answer.stderr


def test_a_route_with_everything_is_stored_as_it_was_written(apiserver: ApiServer) -> None:
    spec = {
        "servedNames": ["front"],
        "limits": {
            "maxOutputTokens": 1000,
            "requestSeconds": 60,
            "requestsPerMinute": 60,
            "tokensPerMinute": 20000,
            "concurrentRequests": 4,
        },
        "rules": [
            {
                "name": "long",
                "matches": [
                    {
                        "headers": [{"name": "x-beta", "type": "Prefix", "value": "1"}],
                        "tenants": ["acme"],
                        "endpoints": ["/v1/chat/completions"],
                        "promptTokens": {"atLeast": 1000},
                    }
                ],
                "targets": [{"model": {"name": "a"}, "weight": 9}, {"adapter": {"name": "b", "namespace": "other"}}],
                "sessionAffinity": {"type": "Header", "header": "x-session"},
                "canary": {"target": {"external": {"name": "outside"}}, "percent": 5},
                "fallback": {
                    "targets": [{"external": {"name": "outside"}}],
                    "whenWaitSeconds": 20,
                    **COST,
                    "whenBudgetPercent": 80,
                },
            }
        ],
        "externalTargets": [
            EXTERNAL
            | {
                "endpoints": ["/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"],
                "credentials": {"name": "provider", "key": "token", "auth": "XApiKey"},
                "caBundle": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
                "timeouts": {"connectSeconds": 2, "firstByteSeconds": 20, "idleSeconds": 30},
                "maxConcurrentRequests": 16,
            }
        ],
    }
    assert apiserver.apply(changed(ROUTE, "spec", spec)).returncode == 0
    try:
        assert apiserver.json("get", "mroute", "front", "-n", "default", "-o", "json")["spec"] == spec
    finally:
        apiserver.kubectl("delete", "modelroutes.shoal.dev", "front", "-n", "default")
