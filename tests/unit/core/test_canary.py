"""When a canary is halted, and who gets it before."""

import dataclasses

import pytest

from shoal.api.modelroute import CanaryStatus, ModelRouteStatus
from shoal.core.routing.canary import CanaryHalt, CanaryWindow, HaltLimits
from shoal.core.routing.routes import DeclaredRoute, NoTarget, RequestFacts, RouteDecision, decide, declared_route
from tests.support.routes import a_route, declared, target

LIMITS = HaltLimits(error_percent=10, ttft_seconds=2, min_requests=20)


def after(*outcomes: str, limits: HaltLimits = LIMITS, ttft: float | None = None) -> tuple[int, CanaryHalt | None]:
    """How many requests it took, and the halt."""
    window = CanaryWindow(limits)
    for number, outcome in enumerate(outcomes, 1):
        if (halt := window.note(outcome, ttft)) is not None:
            return number, halt
    return len(outcomes), None


def test_a_canary_that_fails_at_once_is_halted_after_a_few_requests():
    assert after(*["failed"] * 20) == (3, CanaryHalt("Errors", 3, 3))
    assert after("refused", limits=LIMITS._replace(error_percent=0)) == (1, CanaryHalt("Errors", 1, 1))


def test_as_many_errors_as_allowed_halt_nothing_and_old_ones_are_forgotten():
    few = ["failed", "expired", *["answered"] * 18]
    assert after(*few)[1] is None
    assert after(*few * 5)[1] is None, "each twenty requests have two"
    assert after(*few, "failed", "failed", "failed")[1] == CanaryHalt("Errors", 3, 20)


@pytest.mark.parametrize("outcome", ["rejected", "cancelled"])
def test_what_is_no_fault_of_the_canary_does_not_halt_it(outcome: str):
    assert after(*[outcome] * 100)[1] is None


def test_late_answers_halt_it_when_they_are_more_than_half():
    assert after(*["answered"] * 40, ttft=2.5) == (11, CanaryHalt("Slow", 11, 11))
    assert after(*["answered"] * 40, ttft=2.0)[1] is None
    assert after(*["answered"] * 40, ttft=99.0, limits=LIMITS._replace(ttft_seconds=None))[1] is None
    window = CanaryWindow(LIMITS)
    for number in range(40):
        assert window.note("answered", 9.0 if number % 2 else 0.1) is None


@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_gateways_that_each_see_too_few_failures_halt_it_after_so_many_together(gateways: int):
    windows = [CanaryWindow(LIMITS) for _ in range(gateways)]
    halts = [windows[number % gateways].note("failed", None) for number in range(2 * gateways + 1)]
    assert halts == [None] * 2 * gateways + [CanaryHalt("Errors", 3, 3)]
    windows = [CanaryWindow(LIMITS) for _ in range(gateways)]
    halts = [windows[number % gateways].note("answered", 9.0) for number in range(10 * gateways + 1)]
    assert halts == [None] * 10 * gateways + [CanaryHalt("Slow", 11, 11)]


RULE = {
    "targets": [target("a")],
    "canary": {"target": target("b"), "percent": 20},
}


def facts(**headers: str) -> RequestFacts:
    return RequestFacts("acme", "/v1/chat/completions", {k.replace("_", "-"): v for k, v in headers.items()}, 10)


def where(route: DeclaredRoute, draw: float, **headers: str) -> str:
    made = decide(route, facts(**headers), lambda _: True, draw)
    assert isinstance(made, RouteDecision)
    assert (made.canary is not None) == (made.target.key == "chat/b")
    return made.target.key


def test_a_canary_gets_its_share_and_the_targets_share_the_rest():
    three = declared({**RULE, "targets": [target("a"), target("c")]})
    found = [where(three, (at + 0.5) / 100) for at in range(100)]
    assert {key: found.count(key) for key in set(found)} == {"chat/a": 40, "chat/b": 20, "chat/c": 40}


def test_a_share_that_grows_keeps_the_sessions_that_it_has():
    def sessions(percent: int) -> set[int]:
        canary = {"target": target("b"), "percent": percent}
        affinity = {"type": "Header", "header": "x-session"}
        one = declared({**RULE, "canary": canary, "sessionAffinity": affinity})
        return {at for at in range(1000) if where(one, 0.5, x_session=str(at)) == "chat/b"}

    few, more, all_of_them = sessions(5), sessions(30), sessions(100)
    assert few < more < all_of_them
    assert len(few) == pytest.approx(50, abs=25)
    assert len(all_of_them) == 1000
    assert not sessions(0)


def test_a_halted_canary_gets_nothing_and_its_sessions_go_to_the_targets():
    one = declared(RULE)
    made = decide(one, facts(), lambda _: True, 0.0, lambda _: True)
    assert isinstance(made, RouteDecision)
    assert made.target.key == "chat/a"
    assert decide(one, facts(), lambda ref: ref.key == "chat/b", 0.0, lambda _: True) == NoTarget(
        "no-target", "default"
    )


def test_a_canary_whose_target_is_gone_gets_nothing():
    made = decide(declared(RULE), facts(), lambda ref: ref.key != "chat/b", 0.0)
    assert isinstance(made, RouteDecision)
    assert made.target.key == "chat/a"


def test_the_status_halts_it_until_its_specification_changes():
    route = a_route(RULE)
    (rule,) = declared_route(route).rules
    assert rule.canary is not None
    assert not rule.canary.halted
    halted = CanaryStatus(rule="default", state="Halted", revision=rule.canary.revision, message="m")
    route = route.model_copy(update={"status": ModelRouteStatus(canaries=(halted,))})
    assert [r.canary.halted for r in declared_route(route).rules if r.canary] == [True]
    other = a_route({**RULE, "canary": {"target": target("b"), "percent": 10}})
    other = other.model_copy(update={"status": route.status})
    assert [r.canary.halted for r in declared_route(other).rules if r.canary] == [False]
    unrelated = a_route({**RULE, "targets": [target("a"), target("c")]})
    unrelated = unrelated.model_copy(update={"status": route.status})
    assert [r.canary.halted for r in declared_route(unrelated).rules if r.canary] == [True]
    renamed = dataclasses.replace(declared_route(route), key="chat/other")
    assert renamed.rules[0].canary == declared_route(route).rules[0].canary
