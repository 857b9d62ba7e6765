"""What a ModelRoute is told of its targets and its names."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.api import reasons
from shoal.core.routing.canary import CanaryHalt
from shoal.core.routing.external import ExternalProblem
from shoal.core.routing.routes import TargetRef, declared_route
from shoal.core.status.observed import ServedNames
from shoal.core.status.routestatus import SeenRoute, SeenTarget, new_halts, status
from tests.support.routes import a_route, target

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
A, B = (TargetRef("Model", f"chat/{name}") for name in "ab")
OWNED = ServedNames(("front",), ())
READY = SeenTarget()


def told(
    *rules: dict[str, Any],
    served: ServedNames = OWNED,
    limits: dict[str, int] | None = None,
    **targets: SeenTarget,
) -> dict[str, tuple[str, str, str]]:
    route = a_route(*rules, limits=limits or {})
    seen = {ref: targets.get(ref.key.partition("/")[2], READY) for ref in declared_route(route).references()}
    found = status(SeenRoute(route, served, seen), NOW)
    return {c.type: (c.status, c.reason, c.message) for c in found.conditions}


AB = {"targets": [target("a"), target("b")]}


def test_a_route_whose_targets_serve_is_ready():
    found = told(AB)
    assert found["Accepted"] == ("True", "Valid", "1 rule, 2 targets")
    assert found["Ready"][:2] == ("True", "TargetsReady")
    assert set(found) == {"Accepted", "Ready"}


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"maxOutputTokens": 100}, "1 rule, 2 targets; a request has at most 100 output tokens"),
        ({"requestSeconds": 60}, "1 rule, 2 targets; a request has at most 60 s"),
        (
            {"maxOutputTokens": 1, "requestSeconds": 60},
            "1 rule, 2 targets; a request has at most 1 output tokens and 60 s",
        ),
    ],
)
def test_the_limits_of_a_request_are_told(limits: dict[str, int], says: str):
    assert told(AB, limits=limits)["Accepted"] == ("True", "Valid", says)


@pytest.mark.parametrize(
    ("seen", "reason", "says"),
    [
        (SeenTarget(exists=False), reasons.TARGET_NOT_FOUND, "there is no Model chat/b; the other targets are used"),
        (
            SeenTarget(exists=False, is_route=True),
            reasons.CIRCULAR_ROUTE,
            "there is no Model chat/b, only a ModelRoute",
        ),
        (SeenTarget(exists=False, permitted=False), reasons.NOT_PERMITTED, "list the namespace chat in"),
        (SeenTarget(permitted=False), reasons.NOT_PERMITTED, "list the namespace chat in spec.routeNamespaces"),
    ],
)
def test_a_wrong_target_is_named_with_the_remedy(seen: SeenTarget, reason: str, says: str):
    found = told(AB, b=seen)
    for kind in ("Accepted", "Ready"):
        assert found[kind][:2] == ("False", reason)
        assert says in found[kind][2]
    assert found["Stalled"][:2] == ("True", reason)


def test_what_is_not_permitted_tells_nothing_of_what_there_is():
    assert told(AB, b=SeenTarget(exists=False, permitted=False)) == told(AB, b=SeenTarget(permitted=False))


def test_a_rule_without_weights_is_ready_where_its_fallback_serves():
    rule = {"name": "off", "targets": [target("a", 0)], "fallback": {"targets": [target("b")]}}
    says = "All weights are 0 in rule off: its fallback serves in place of its targets"
    found = told(rule)
    assert found["Accepted"] == ("True", "Valid", f"1 rule, 2 targets. {says}")
    assert found["Ready"] == ("True", "TargetsReady", f"every target can serve. {says}")
    assert set(found) == {"Accepted", "Ready"}
    assert told(rule, a=SeenTarget(not_ready="NoFit: x"))["Ready"][:2] == ("True", "TargetsReady")
    found = told(rule, b=SeenTarget(not_ready="NoFit: no class"))
    assert found["Accepted"][0] == "True"
    assert found["Ready"] == ("False", "TargetsNotReady", "no target of rule off: Model chat/b: NoFit: no class")
    found = told(rule, b=SeenTarget(exists=False))
    assert found["Ready"][:2] == ("False", "TargetNotFound")


ALL = {"name": "all", "targets": [target("a")]}
LATE = {"name": "late", "matches": [{"tenants": ["acme"]}], "targets": [target("b")]}
LATER = {"name": "later", "targets": [target("b")]}
EMPTY = {"name": "empty", "matches": [{"promptTokens": {"atLeast": 10, "lessThan": 5}}], "targets": [target("b")]}


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ((ALL, LATE, LATER), "No request reaches rule late, later: rule all, which is for every request, comes first"),
        ((LATE, ALL), ""),
        (({**ALL, "matches": [{}]}, LATE), "No request reaches rule late: rule all, "),
        (({**ALL, "matches": [{"promptBytes": {"atLeast": 0}}]}, LATE), "No request reaches rule late: rule all, "),
        (({**ALL, "matches": [{"promptBytes": {"lessThan": 9}}]}, LATE), ""),
        (({**ALL, "matches": [{"headers": [{"name": "x-a", "value": "1"}]}]}, LATE), ""),
        (({**ALL, "matches": [{"endpoints": ["/v1/embeddings"]}]}, LATE), ""),
        ((EMPTY, ALL), "No request reaches rule empty: `atLeast` of a length has to be below `lessThan`"),
        (({**EMPTY, "matches": [{"promptBytes": {"atLeast": 5, "lessThan": 5}}]}, ALL), "reaches rule empty:"),
        (({**EMPTY, "matches": [*EMPTY["matches"], {"tenants": ["acme"]}]}, ALL), ""),
        ((EMPTY, ALL, LATE), "comes first. No request reaches rule empty: "),
    ],
)
def test_rules_that_no_request_reaches_are_named(rules: tuple[dict[str, Any], ...], says: str):
    found = told(*rules)
    assert found["Accepted"][:2] == ("True", "Valid")
    assert says in found["Accepted"][2]
    assert ("No request reaches" in found["Accepted"][2]) == bool(says)
    assert found["Ready"] == ("True", "TargetsReady", "every target can serve")


def test_a_route_that_lost_a_name_is_told_of_its_rules_too():
    found = told(ALL, LATE, served=ServedNames((), (("front", "Model chat/front"),)))
    assert found["Accepted"][:2] == ("True", "NameClaimed")
    assert "'chat/front' always means this one. No request reaches rule late" in found["Accepted"][2]


def test_weights_that_sum_to_zero_name_their_rule():
    found = told(AB, {"name": "off", "targets": [target("a", 0)]})
    assert found["Accepted"] == (
        "False",
        "WeightsSumToZero",
        "all weights are 0 in rule off: its requests have no target",
    )


def test_a_route_without_a_name_is_told_and_one_with_another_is_warned():
    lost = (("front", "Model chat/front"), ("chat/front", "Model chat/front"))
    found = told(AB, served=ServedNames((), lost))
    assert found["Accepted"][:2] == ("False", "NameTaken")
    assert "nothing means this one" in found["Accepted"][2]
    found = told(AB, served=ServedNames((), lost[:1]))
    assert found["Accepted"][:2] == ("True", "NameClaimed")
    assert "'chat/front' always means this one" in found["Accepted"][2]


def test_a_rule_needs_one_target_that_serves():
    waits = SeenTarget(not_ready="NoCapacity")
    found = told(AB, b=waits)
    assert found["Ready"][:2] == ("True", "TargetsReady")
    assert "not yet Model chat/b: NoCapacity" in found["Ready"][2]
    found = told(AB, {"name": "only", "targets": [target("b")]}, b=waits)
    assert found["Ready"] == ("False", "TargetsNotReady", "no target of rule only: Model chat/b: NoCapacity")
    assert found["Reconciling"][1] == "TargetsNotReady"


def test_an_unchanged_route_keeps_its_status():
    route = a_route(AB)
    seen = SeenRoute(route, OWNED, {A: READY, B: READY})
    first = status(seen, NOW)
    again = route.model_copy(update={"status": first})
    assert status(SeenRoute(again, OWNED, seen.targets), NOW.replace(year=2027)) == first


CANARY = {"targets": [target("a")], "canary": {"target": target("b"), "percent": 5}}


def test_a_halted_canary_is_told_and_stays_halted_when_no_gateway_tells_it_any_more():
    route = a_route(CANARY)
    (rule,) = declared_route(route).rules
    assert rule.canary is not None
    targets = {A: READY, B: READY}
    running = status(SeenRoute(route, OWNED, targets), NOW)
    assert [(one.rule, one.state) for one in running.canaries] == [("default", "Running")]
    halts = {rule.canary.revision: CanaryHalt("Errors", 3, 5), "another": CanaryHalt("Slow", 9, 9)}
    halted = status(SeenRoute(route, OWNED, targets, halts), NOW)
    (one,) = halted.canaries
    assert (one.state, one.message) == ("Halted", "Model chat/b: 3 of its last 5 requests failed")
    ready = next(c for c in halted.conditions if c.type == "Ready")
    assert (ready.status, ready.reason) == ("True", "CanaryHalted")
    later = route.model_copy(update={"status": halted})
    for year in (1970, 2026, 2099):
        assert status(SeenRoute(later, OWNED, targets), NOW.replace(year=year)) == halted, "no clock ends a halt"
    changed = a_route({**CANARY, "canary": {"target": target("b"), "percent": 4}})
    changed = changed.model_copy(update={"status": halted})
    assert [one.state for one in status(SeenRoute(changed, OWNED, targets, halts), NOW).canaries] == ["Running"]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [(SeenTarget(exists=False), reasons.TARGET_NOT_FOUND), (SeenTarget(not_ready="NoFit"), reasons.TARGETS_NOT_READY)],
)
def test_another_problem_does_not_hide_that_a_canary_is_halted(seen: SeenTarget, reason: str):
    route = a_route(CANARY)
    (rule,) = declared_route(route).rules
    assert rule.canary is not None
    halts = {rule.canary.revision: CanaryHalt("Errors", 3, 5)}
    found = status(SeenRoute(route, OWNED, {A: seen, B: READY}, halts), NOW)
    told = {c.type: c for c in found.conditions}
    assert (told["Ready"].status, told["Ready"].reason) == ("False", reason)
    says = "canary of rule default halted: Model chat/b: 3 of its last 5 requests failed. A change of `canary` ends"
    assert f". {says}" in told["Ready"].message
    assert "halted" not in told["Accepted"].message
    assert [says in one for one in new_halts(route, found)] == [True]
    assert new_halts(route.model_copy(update={"status": found}), found) == []


def test_external_targets_that_gateways_do_not_use_are_listed_with_what_they_lack():
    url = "https://api.example.com/v1"
    outside = [{"name": name, "url": url, "model": "m"} for name in ("one", "two", "three")]
    rule = {"targets": [{"external": {"name": name}} for name in ("one", "two", "three")]}
    route = a_route(rule, externalTargets=outside)
    wrong = {
        "one": ExternalProblem(reasons.SECRET_NOT_FOUND, "Secret chat/one does not exist"),
        "three": ExternalProblem(reasons.EXTERNAL_NOT_ALLOWED, "x" * 2000),
    }
    refs = declared_route(route).references()
    seen = {ref: SeenTarget(problem=wrong.get(ref.key.rpartition("/")[2])) for ref in refs}
    found = status(SeenRoute(route, OWNED, seen), NOW).external_targets
    assert [(one.name, one.reason) for one in found] == [("one", "SecretNotFound"), ("three", "ExternalNotAllowed")]
    assert found[0].message == "Secret chat/one does not exist"
    assert len(found[1].message) == 1024


def test_an_external_target_whose_secret_was_not_read_yet_is_listed_and_the_route_accepted():
    outside = {"name": "outside", "url": "https://api.example.com/v1", "model": "m", "credentials": {"name": "key"}}
    route = a_route({"targets": [{"external": {"name": "outside"}}]}, externalTargets=[outside])
    says = "external target outside: its Secret is not read yet"
    (ref,) = declared_route(route).references()
    seen = SeenTarget(problem=ExternalProblem(reasons.PENDING, says), not_ready=reasons.PENDING)
    found = status(SeenRoute(route, OWNED, {ref: seen}), NOW)
    assert [(one.name, one.reason, one.message) for one in found.external_targets] == [("outside", "Pending", says)]
    conditions = {c.type: (c.status, c.reason) for c in found.conditions}
    assert conditions["Accepted"] == ("True", "Valid")
    assert conditions["Ready"] == ("False", "TargetsNotReady")
