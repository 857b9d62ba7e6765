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
AFFINITY = {"type": "Header", "header": "x-session"}


def rule(**said: Any) -> dict[str, Any]:
    return changed(ROUTE, "spec.rules", [{"targets": [{"model": {"name": "a"}}]} | said])


def header(**said: Any) -> dict[str, Any]:
    return rule(matches=[{"headers": [{"name": "x-beta", "value": "1"} | said]}])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no rule", changed(ROUTE, "spec.rules", []), "should have at least 1 items"),
    ("no target", rule(targets=[]), "should have at least 1 items"),
    ("a target of nothing", rule(targets=[{"weight": 1}]), "give either `model` or `adapter`"),
    (
        "a target of two kinds",
        rule(targets=[{"model": {"name": "a"}, "adapter": {"name": "b"}}]),
        "give either `model` or `adapter`",
    ),
    ("a negative weight", rule(targets=[{"model": {"name": "a"}, "weight": -1}]), "greater than or equal to 0"),
    ("a header with a key", header(name="authorization"), "a header with a key or a cookie cannot be matched"),
    ("a header in upper case", header(name="X-Beta"), "should match"),
    ("a session by key", rule(sessionAffinity=AFFINITY | {"header": "cookie"}), "cannot identify a session"),
    ("a session without its header", rule(sessionAffinity={"type": "Header"}), "`header` belongs to the type Header"),
    ("two rules without a name", changed(ROUTE, "spec.rules", ROUTE["spec"]["rules"] * 2), "Duplicate value"),
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
            }
        ],
    }
    assert apiserver.apply(changed(ROUTE, "spec", spec)).returncode == 0
    try:
        assert apiserver.json("get", "mroute", "front", "-n", "default", "-o", "json")["spec"] == spec
    finally:
        apiserver.kubectl("delete", "modelroutes.shoal.dev", "front", "-n", "default")
