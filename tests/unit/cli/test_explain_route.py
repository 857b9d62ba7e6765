"""`shoal explain route`: what a person sees of a route's rules and shares."""

import base64
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shoal.cli.main import main
from tests.support.cannedapi import CannedApi
from tests.support.routes import target

SHOAL = "/apis/shoal.dev/v1alpha1"
ROUTE = {
    "metadata": {"name": "front", "namespace": "chat", "uid": "r1", "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {
        "rules": [
            {"name": "beta", "matches": [{"headers": [{"name": "x-beta", "value": "1"}]}], "targets": [target("b")]},
            {
                "name": "default",
                "matches": [{"promptBytes": {"lessThan": 1000}}],
                "targets": [target("a", 3), target("b", 1), target("lost"), target("far", namespace="other")],
                "canary": {"target": target("new"), "percent": 20},
                "fallback": {"targets": [target("b")]},
                "mirror": {**target("new"), "percent": 7},
            },
        ]
    },
}


def listed(*items: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def model(name: str, namespace: str = "chat") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": f"u-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"source": {"uri": "file:///models/tiny"}}}


def granted(*names: str) -> dict[str, Any]:
    return {"metadata": {"name": "acme"}, "spec": {"models": [{"namespace": "chat", "name": name} for name in names]}}


@pytest.fixture
def api() -> CannedApi:
    return CannedApi(
        {
            f"{SHOAL}/namespaces/chat/modelroutes/front": ROUTE,
            f"{SHOAL}/models": listed(model("a"), model("b"), model("new"), model("far", "other")),
            f"{SHOAL}/lorapools": listed(),
            f"{SHOAL}/loraadapters": listed(),
            f"{SHOAL}/tenants/acme": granted("a", "new"),
        }
    )


def gateways_say(api: CannedApi, page: dict[str, Any]) -> None:
    system = "/api/v1/namespaces/shoal-system"
    labels = {"app.kubernetes.io/component": "gateway", "app.kubernetes.io/part-of": "shoal"}
    pod = {
        "metadata": {"namespace": "shoal-system", "name": "shoal-gateway-0", "uid": "u", "labels": labels},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    key = base64.b64encode(b"key").decode()
    api.answers[f"{system}/secrets/shoal-key-logs"] = {"metadata": {"name": "shoal-key-logs"}, "data": {"key": key}}
    api.answers[f"{system}/pods"] = listed(pod)
    api.answers[f"{system}/pods/shoal-gateway-0:9090/proxy/v1/routestats"] = page


@pytest.fixture
def kubeconfig(api: CannedApi, tmp_path: Path) -> Generator[Path]:
    with api.kubeconfig(tmp_path) as path:
        yield path


def explain(kubeconfig: Path, *args: str) -> Result:
    words = ["explain", "route", "front", "-n", "chat", *args]
    return CliRunner(catch_exceptions=False).invoke(main, words, env={"KUBECONFIG": str(kubeconfig)})


def shares(done: Result) -> dict[str, tuple[float, str | None]]:
    found = json.loads(done.output)
    return {f"{row['role']} {row['target']}": (row["sharePercent"], row["note"]) for row in found["targets"]}


def test_each_target_with_its_share_and_why_it_has_none(kubeconfig: Path) -> None:
    done = explain(kubeconfig, "-o", "json")
    assert done.exit_code == 0
    assert json.loads(done.output)["rule"] == "default"
    assert shares(done) == {
        "canary chat/new": (20.0, None),
        "target chat/a": (60.0, None),
        "target chat/b": (20.0, None),
        "target chat/lost": (0.0, "it does not exist"),
        "target other/far": (0.0, "it does not list the namespace chat in spec.routeNamespaces"),
        "fallback chat/b": (0.0, None),
        "mirror chat/new": (7.0, None),
    }


def test_as_a_tenant_sees_it(kubeconfig: Path) -> None:
    done = explain(kubeconfig, "--tenant", "acme", "-o", "json")
    found = shares(done)
    assert found["target chat/a"] == (80.0, None)
    assert found["target chat/b"] == (0.0, "Tenant acme may not use it")
    shown = explain(kubeconfig, "--tenant", "acme").output
    assert "Rule default of chat/front, for a request to /v1/chat/completions:" in shown
    assert "Tenant acme may not use it" in shown


def test_the_request_decides_the_rule(kubeconfig: Path) -> None:
    assert shares(explain(kubeconfig, "--header", "X-Beta: 1", "-o", "json")) == {"target chat/b": (100.0, None)}
    done = explain(kubeconfig, "--bytes", "1000")
    assert done.exit_code == 1
    assert "it gets 404 no_route_rule" in done.output


def test_a_header_beyond_ascii_is_matched_as_a_gateway_does(api: CannedApi, kubeconfig: Path) -> None:
    match = {"headers": [{"name": "x-team", "value": "Zürich"}]}
    spec = {"rules": [{"name": "team", "matches": [match], "targets": [target("b")]}]}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": spec}
    assert shares(explain(kubeconfig, "--header", "X-Team: Zürich", "-o", "json")) == {"target chat/b": (100.0, None)}
    assert explain(kubeconfig, "--header", "X-Team: ZÜRICH").exit_code == 1


def test_without_a_usable_target_the_fallback_gets_all(api: CannedApi, kubeconfig: Path) -> None:
    api.answers[f"{SHOAL}/models"] = listed(model("b"))
    spec = {"rules": [{"targets": [target("a")], "fallback": {"targets": [target("lost"), target("b")]}}]}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": spec}
    found = shares(explain(kubeconfig, "-o", "json"))
    assert (found["fallback chat/lost"][0], found["fallback chat/b"]) == (0.0, (100.0, None))
    api.answers[f"{SHOAL}/tenants/acme"] = granted()
    done = explain(kubeconfig, "--tenant", "acme")
    assert done.exit_code == 1
    assert "no name means this route" in done.output
    assert "503 no_route_target" in done.output


def test_without_a_usable_target_a_canary_gets_all_only_where_no_fallback_can_answer(
    api: CannedApi, kubeconfig: Path
) -> None:
    canary = {"target": target("new"), "percent": 5}
    rule = {"targets": [target("a")], "canary": canary, "fallback": {"targets": [target("b")]}}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": {"rules": [rule]}}
    api.answers[f"{SHOAL}/models"] = listed(model("b"), model("new"))
    found = shares(explain(kubeconfig, "-o", "json"))
    assert (found["canary chat/new"], found["fallback chat/b"]) == ((5.0, None), (95.0, None))
    api.answers[f"{SHOAL}/models"] = listed(model("new"))
    found = shares(explain(kubeconfig, "-o", "json"))
    assert found["canary chat/new"] == (100.0, "it gets all: no other target can be used")
    assert found["fallback chat/b"] == (0.0, "it does not exist")


def test_what_is_not_there_is_said(api: CannedApi, kubeconfig: Path) -> None:
    del api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"]
    done = explain(kubeconfig)
    assert done.exit_code == 1
    assert "Error" in done.output
    done = CliRunner().invoke(main, ["explain", "pool", "x"])
    assert (done.exit_code, "route NAME" in done.output) == (2, True)


def test_an_external_target_needs_the_tenants_grant_of_the_route(kubeconfig: Path, api: CannedApi) -> None:
    outside = {"name": "outside", "url": "https://api.example.com/v1", "model": "m"}
    fallback = {"targets": [target("outside", kind="external"), target("lost", kind="external")]}
    rule = {"name": "default", "targets": [target("outside", kind="external")], "fallback": fallback}
    spec = {"rules": [rule], "externalTargets": [outside]}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": spec}
    found = shares(explain(kubeconfig, "--tenant", "acme", "-o", "json"))
    assert found["target chat/front/outside"] == (0.0, "Tenant acme does not grant the route in spec.routes")
    assert found["fallback chat/front/lost"] == (0.0, "it is not in spec.externalTargets")
    tenant = granted("a")
    api.answers[f"{SHOAL}/tenants/acme"] = tenant | {"spec": tenant["spec"] | {"routes": [{"namespace": "chat"}]}}
    found = shares(explain(kubeconfig, "--tenant", "acme", "-o", "json"))
    assert found["target chat/front/outside"] == (100.0, None)


def test_an_external_target_that_gateways_do_not_use_says_what_it_lacks(kubeconfig: Path, api: CannedApi) -> None:
    outside = {"name": "outside", "url": "https://api.example.com/v1", "model": "m", "credentials": {"name": "key"}}
    targets = [target("outside", kind="external"), target("a")]
    spec = {"rules": [{"name": "default", "targets": targets}], "externalTargets": [outside]}
    unused = {"name": "outside", "reason": "SecretNotFound", "message": "Secret chat/key does not exist"}
    status = {"observedGeneration": 2, "externalTargets": [unused]}
    route = ROUTE | {"metadata": ROUTE["metadata"] | {"generation": 2}, "spec": spec, "status": status}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = route
    found = shares(explain(kubeconfig, "-o", "json"))
    assert found["target chat/front/outside"] == (0.0, "SecretNotFound: Secret chat/key does not exist")
    assert found["target chat/a"] == (100.0, None)
    # What the operator found was found of another version: it is not known.
    status["observedGeneration"] = 1
    done = explain(kubeconfig)
    assert "The operator has not looked at this version of the route yet" in done.output
    assert shares(explain(kubeconfig, "-o", "json"))["target chat/front/outside"] == (50.0, None)


def test_gateways_say_whether_an_external_target_answers(kubeconfig: Path, api: CannedApi) -> None:
    outside = {"name": "outside", "url": "https://api.example.com/v1", "model": "m"}
    rule = {"name": "default", "targets": [target("outside", kind="external"), target("a")]}
    spec = {"rules": [rule], "externalTargets": [outside]}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": spec}
    # Who may not ask gateways gets the rest of the answer, and the reason.
    done = explain(kubeconfig)
    assert done.exit_code == 0
    assert "External targets at gateways: unknown:" in done.output
    assert json.loads(explain(kubeconfig, "-o", "json").output)["externalTargets"] == []

    fails = {"state": "Fails", "reason": "connect", "secondsAgo": 12.4, "rests": True}
    externals = [
        {"target": "chat/front/outside", "gateway": "shoal-gateway-0", **fails},
        {"target": "chat/front/outside", "gateway": "shoal-gateway-1", "state": "NotAsked"},
        {"target": "chat/other/outside", "gateway": "shoal-gateway-0", "state": "Answers", "secondsAgo": 1},
    ]
    page = {
        "gateways": ["shoal-gateway-0"],
        "externals": externals,
        "missing": ["shoal-gateway-2: it cannot be reached"],
    }
    gateways_say(api, page)
    shown = [line.split() for line in explain(kubeconfig).output.splitlines()]
    first = ["chat/front/outside", "shoal-gateway-0", "Fails,", "rests", "connect", "12", "s", "ago"]
    assert first in shown
    assert ["chat/front/outside", "shoal-gateway-1", "NotAsked"] in shown
    found = json.loads(explain(kubeconfig, "-o", "json").output)
    assert [(one["gateway"], one["state"]) for one in found["externalTargets"]] == [
        ("shoal-gateway-0", "Fails"),
        ("shoal-gateway-1", "NotAsked"),
    ]
    assert found["missing"] == ["shoal-gateway-2: it cannot be reached"]


def outside(
    api: CannedApi,
    rule: dict[str, Any],
    *at: dict[str, Any],
    most: int = 128,
    missing: Sequence[str] = (),
    **status: Any,
) -> None:
    """A route with an external target, and what gateways say of it."""
    entry = {"name": "outside", "url": "https://api.example.com/v1", "model": "m", "maxConcurrentRequests": most}
    spec = {"rules": [rule], "externalTargets": [entry]}
    route = ROUTE | {"metadata": ROUTE["metadata"] | {"generation": 1}, "spec": spec}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = route | {"status": {"observedGeneration": 1} | status}
    rows = [{"target": "chat/front/outside", "gateway": f"shoal-gateway-{n}"} | one for n, one in enumerate(at)]
    gateways_say(api, {"gateways": [row["gateway"] for row in rows], "externals": rows, "missing": list(missing)})


RESTS: dict[str, Any] = {"state": "Fails", "reason": "connect", "secondsAgo": 3, "rests": True}
ANSWERS: dict[str, Any] = {"state": "Answers", "secondsAgo": 1, "running": 1}
FULL = ANSWERS | {"running": 2}


def test_a_canary_that_rests_says_who_gets_its_share_there(kubeconfig: Path, api: CannedApi) -> None:
    canary = {"target": target("outside", kind="external"), "percent": 20}
    rule = {"targets": [target("a")], "canary": canary, "fallback": {"targets": [target("b")]}}
    outside(api, rule, RESTS, ANSWERS, most=2)
    found = shares(explain(kubeconfig, "-o", "json"))
    assert found["canary chat/front/outside"] == (20.0, "rests at 1 of 2 gateways: targets get its share there")
    assert found["target chat/a"] == (80.0, None)
    outside(api, rule | {"targets": [target("lost")]}, RESTS, RESTS)
    note = shares(explain(kubeconfig, "-o", "json"))["canary chat/front/outside"][1]
    assert note == "rests at 2 of 2 gateways: a fallback gets its share there"
    outside(api, {"targets": [target("lost")], "canary": canary}, RESTS)
    assert shares(explain(kubeconfig, "-o", "json"))["canary chat/front/outside"] == (
        100.0,
        "it gets all: no other target can be used; "
        "rests at 1 of 1 gateway: its requests get 503 external_unavailable there",
    )
    outside(api, rule, ANSWERS)
    assert shares(explain(kubeconfig, "-o", "json"))["canary chat/front/outside"] == (20.0, None)
    # What gets nothing anyway gets nothing there either.
    outside(api, rule | {"canary": canary | {"percent": 0}}, RESTS)
    assert shares(explain(kubeconfig, "-o", "json"))["canary chat/front/outside"] == (0.0, None)


def test_an_external_target_with_as_many_requests_as_it_may_have_says_so(kubeconfig: Path, api: CannedApi) -> None:
    rule = {"targets": [target("outside", kind="external"), target("a")], "fallback": {"targets": [target("b")]}}
    outside(api, rule, RESTS | {"running": 2}, FULL, ANSWERS, most=2)
    done = explain(kubeconfig, "-o", "json")
    assert shares(done)["target chat/front/outside"] == (
        50.0,
        "rests at 1 of 3 gateways and has as many requests as maxConcurrentRequests allows at 1 of 3 gateways: "
        "a fallback gets its share there",
    )
    shown = [line.split() for line in explain(kubeconfig).output.splitlines()]
    assert ["chat/front/outside", "shoal-gateway-1", "Answers,", "full", "1", "s", "ago"] in shown
    assert ["chat/front/outside", "shoal-gateway-2", "Answers", "1", "s", "ago"] in shown
    # Without a fallback its requests are refused; a fallback itself only says so.
    outside(api, {"targets": [target("outside", kind="external"), target("a")]}, FULL, most=2)
    assert shares(explain(kubeconfig, "-o", "json"))["target chat/front/outside"][1] == (
        "has as many requests as maxConcurrentRequests allows at 1 of 1 gateway: "
        "its requests get 503 external_unavailable there"
    )
    outside(api, {"targets": [target("a")], "fallback": {"targets": [target("outside", kind="external")]}}, RESTS)
    assert shares(explain(kubeconfig, "-o", "json"))["fallback chat/front/outside"] == (0.0, "rests at 1 of 1 gateway")


def test_a_secret_that_was_not_read_yet_is_told_unless_a_gateway_has_the_key(kubeconfig: Path, api: CannedApi) -> None:
    rule = {"targets": [target("outside", kind="external"), target("a")]}
    pending = [{"name": "outside", "reason": "Pending", "message": "its Secret is not read yet"}]
    outside(api, rule, {"state": "Unused", "reason": "no key"}, externalTargets=pending)
    found = shares(explain(kubeconfig, "-o", "json"))
    assert found["target chat/front/outside"] == (0.0, "Pending: its Secret is not read yet")
    assert found["target chat/a"] == (100.0, None)
    outside(api, rule, {"state": "NotAsked"}, externalTargets=pending)
    assert shares(explain(kubeconfig, "-o", "json"))["target chat/front/outside"] == (50.0, None)


def test_a_key_that_has_not_reached_the_gateways_is_told(kubeconfig: Path, api: CannedApi) -> None:
    lacks = {"state": "Unused", "reason": "the key of its external target has not arrived at this gateway"}
    note = f"is not used at 1 of 2 gateways ({lacks['reason']})"
    external = target("outside", kind="external")
    fallback = {"targets": [target("b")]}

    def told(rule: dict[str, Any], *at: dict[str, Any], role: str = "target") -> tuple[float, str | None]:
        outside(api, rule, *at)
        return shares(explain(kubeconfig, "-o", "json"))[f"{role} chat/front/outside"]

    assert told({"targets": [external, target("a")]}, lacks, lacks) == (0.0, f"no gateway uses it: {lacks['reason']}")
    assert shares(explain(kubeconfig, "-o", "json"))["target chat/a"] == (100.0, None)
    assert told({"targets": [external]}, lacks)[0] == 0.0
    done = explain(kubeconfig)
    assert (done.exit_code, done.output.count("gets 503 external_unavailable.")) == (1, 1)
    # At some gateways: who gets its share there.
    there = told({"targets": [external, target("a")], "fallback": fallback}, lacks, ANSWERS)
    assert there == (50.0, f"{note}: other targets get its share there")
    there = told({"targets": [external], "fallback": fallback}, lacks, ANSWERS)
    assert there == (100.0, f"{note}: a fallback gets its share there")
    there = told({"targets": [external]}, lacks, ANSWERS)
    assert there == (100.0, f"{note}: its requests get 503 external_unavailable there")
    canary = {"target": target("new"), "percent": 20}
    there = told({"targets": [external], "canary": canary}, lacks, ANSWERS)
    assert there == (80.0, f"{note}: the canary gets its share there")
    there = told({"targets": [external], "canary": canary, "fallback": fallback}, lacks, ANSWERS)
    assert there == (80.0, f"{note}: a fallback gets its share there")
    canary = {"target": external, "percent": 20}
    there = told({"targets": [target("a")], "canary": canary}, lacks, ANSWERS, role="canary")
    assert there == (20.0, f"{note}: targets get its share there")
    there = told({"targets": [target("a")], "fallback": {"targets": [external]}}, lacks, ANSWERS, role="fallback")
    assert there == (0.0, note)
    # A target that rests does not leave its share to the other targets.
    there = told({"targets": [external, target("a")], "fallback": fallback}, lacks, RESTS)
    rests = "rests at 1 of 2 gateways: a fallback gets its share there"
    assert there == (50.0, f"{note}: other targets get its share there; {rests}")
    # Of a gateway that did not answer it is not known.
    outside(api, {"targets": [external, target("a")]}, lacks, missing=["shoal-gateway-1: it cannot be reached"])
    assert shares(explain(kubeconfig, "-o", "json"))["target chat/front/outside"] == (
        50.0,
        f"is not used at 1 of 1 gateway ({lacks['reason']}): other targets get its share there",
    )


def test_whose_limit_of_a_request_holds_at_each_target(kubeconfig: Path, api: CannedApi) -> None:
    outside = {"name": "outside", "url": "https://api.example.com/v1", "model": "m"}
    targets = [target("a"), target("b"), target("lost"), target("outside", kind="external")]
    limits = {"maxOutputTokens": 100, "requestSeconds": 60}
    spec = {"rules": [{"name": "default", "targets": targets}], "externalTargets": [outside], "limits": limits}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": spec}
    strict = model("a")
    strict["spec"]["limits"] = {"maxOutputTokens": 50, "requestSeconds": 90}
    api.answers[f"{SHOAL}/models"] = listed(strict, model("b"))
    rows = json.loads(explain(kubeconfig, "-o", "json").output)["targets"]
    names = ("maxOutputTokens", "maxOutputTokensOf", "requestSeconds", "requestSecondsOf")
    assert {row["target"]: tuple(row[name] for name in names) for row in rows} == {
        "chat/a": (50, "target", 60.0, "route"),
        "chat/b": (100, "route", 60.0, "route"),
        "chat/lost": (None, None, None, None),
        "chat/front/outside": (100, "route", 60.0, "route"),
    }
    shown = explain(kubeconfig).output
    assert "50 output tokens (target), 60 s (route)" in " ".join(shown.split())
    # Without any limit there is no column for it.
    api.answers[f"{SHOAL}/models"] = listed(model("a"), model("b"))
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE
    assert "LIMITS" in shown
    assert "LIMITS" not in explain(kubeconfig).output


def test_limits_of_each_tenant_are_shown(kubeconfig: Path, api: CannedApi) -> None:
    assert "eachTenant" not in json.loads(explain(kubeconfig, "-o", "json").output)
    limits = {"requestsPerMinute": 60, "concurrentRequests": 5, "requestSeconds": 60}
    spec = {"rules": [{"name": "default", "targets": [target("a")]}], "limits": limits}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": spec}
    found = json.loads(explain(kubeconfig, "-o", "json").output)
    assert found["eachTenant"] == {"requestsPerMinute": 60, "concurrentRequests": 5}
    shown = " ".join(explain(kubeconfig).output.split())
    assert "Each tenant may send by this route: 60 requests per minute, 5 requests at a time." in shown


def test_a_rule_with_conditions_on_costs_says_where_they_have_no_effect(kubeconfig: Path, api: CannedApi) -> None:
    fallback = {
        "targets": [target("b")],
        "whenCostAbove": {"amount": "0.050", "currency": "USD"},
        "whenBudgetPercent": 80,
    }
    rule = {"name": "default", "targets": [target("a")], "fallback": fallback}
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = ROUTE | {"spec": {"rules": [rule]}}
    assert "Prices at gateways: unknown:" in explain(kubeconfig).output

    known = [
        {"gateway": "shoal-gateway-0", "currency": "USD"},
        {"gateway": "shoal-gateway-1", "currency": "EUR", "unpriced": ["chat/b", "chat/elsewhere"]},
        {"gateway": "shoal-gateway-2"},
        {"gateway": "shoal-gateway-0", "route": "chat/other"},
    ]
    page = {"gateways": ["shoal-gateway-0"], "prices": [{"route": "chat/front"} | one for one in known]}
    gateways_say(api, page)
    done = explain(kubeconfig)
    told = "goes to the first fallback that is cheaper for it and has a replica."
    assert done.output.splitlines()[-5:] == [
        f"A request that may cost more than 0.05 USD {told}",
        f"From 80 % of its Tenant's budget on, a request {told}",
        "At shoal-gateway-0: all of these targets have a price in USD.",
        "At shoal-gateway-1: whenCostAbove is in USD and the price list in EUR, so it has no effect; "
        "chat/b has no price, so no request leaves it or goes there for its cost.",
        "At shoal-gateway-2: it knows no price list, so requests stay with their target.",
    ]
    found = json.loads(explain(kubeconfig, "-o", "json").output)["byCost"]
    assert (found["above"], found["currency"], found["budgetPercent"]) == ("0.05", "USD", 80)
    assert [one["noEffect"] for one in found["gateways"]][::2] == [
        None,
        "it knows no price list, so requests stay with their target",
    ]


def test_a_route_that_is_not_there_is_told_with_the_namespace(kubeconfig: Path, api: CannedApi) -> None:
    message = 'modelroutes.shoal.dev "front" not found'
    api.answers[f"{SHOAL}/namespaces/chat/modelroutes/front"] = (404, {"reason": "NotFound", "message": message})
    done = explain(kubeconfig)
    assert done.exit_code == 1
    where = "in namespace chat: `kubectl get modelroutes -A` lists all; -n names another"
    assert done.output.strip() == f"Error: {message} {where}"
