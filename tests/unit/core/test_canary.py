"""When a canary is halted, and who gets it before."""

import collections
import dataclasses
import random
from collections.abc import Collection

import pytest

from shoal.api.modelroute import Canary, CanaryStatus, HaltOn, ModelRouteStatus
from shoal.core.routing.canary import MOST_PEERS, CanaryCounts, CanaryHalt, CanaryWindow, HaltLimits
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


@pytest.mark.parametrize(("ttft", "waited"), [(None, 2.5), (2.5, None)], ids=["before", "after"])
def test_streams_that_clients_leave_before_or_after_a_late_first_byte_halt_it(ttft: float | None, waited: float | None):
    def halts(limits: HaltLimits) -> list[CanaryHalt | None]:
        window = CanaryWindow(limits)
        return [window.note("cancelled", ttft, waited_seconds=waited) for _ in range(11)]

    assert halts(LIMITS) == [None] * 10 + [CanaryHalt("Slow", 11, 11)]
    assert halts(LIMITS._replace(ttft_seconds=3)) == halts(LIMITS._replace(ttft_seconds=None)) == [None] * 11


def test_a_client_that_leaves_before_the_limit_says_nothing_of_a_canary():
    window = CanaryWindow(LIMITS)
    assert {window.note("cancelled", None, waited_seconds=seconds) for seconds in (0.0, 1.9, 2.0) * 200} == {None}
    assert window.counts == CanaryCounts()
    assert window.note("cancelled", 0.1) is None
    assert window.counts == CanaryCounts(1, 0, 1, 0, 1), "its answer began in time"


@pytest.mark.parametrize("gateways", [1, 2])
def test_streams_that_clients_leave_do_not_hide_failures(gateways: int):
    fleet = Fleet(gateways)
    halts = [fleet.note(*one) for _ in range(3) for one in (("failed", None), *[("cancelled", 0.1)] * 20)]
    assert halts[:42] == [None] * 42
    assert halts[42] == CanaryHalt("Errors", 3, 3)


def test_a_stream_that_its_client_left_is_no_answer_to_doubtful_requests():
    window = CanaryWindow(LIMITS)
    halts = list[CanaryHalt | None]()
    for number in range(1, 21):
        window.note("cancelled", 0.1)
        window.heard("peer", CanaryCounts(number, 0, number, 0, number))
        halts.append(window.note("refused", None, doubtful=True))
    assert halts == [None] * 19 + [CanaryHalt("Errors", 20, 20)]


def test_failures_that_the_requests_may_have_caused_count_only_where_none_is_answered():
    window = CanaryWindow(LIMITS)
    for _ in range(5):
        assert all(window.note("refused", None, doubtful=True) is None for _ in range(19))
        assert window.note("answered", None) is None
    assert window.counts == CanaryCounts(5), "one tenant's prompts halt it for nobody"
    halts = [window.note("refused", None, doubtful=True) for _ in range(20)]
    assert halts == [None] * 19 + [CanaryHalt("Errors", 20, 20)]


def test_an_answer_at_another_gateway_says_that_the_canary_works():
    window = CanaryWindow(LIMITS)
    for _ in range(19):
        window.note("refused", None, doubtful=True)
    assert window.heard("peer", CanaryCounts(1, 1)) is None
    assert window.heard("peer", CanaryCounts(2, 1)) is None
    assert window.note("refused", None, doubtful=True) is None
    assert window.note("refused", None, doubtful=True) is None


def test_doubtful_requests_that_are_answered_or_rejected_count_as_others_do():
    window = CanaryWindow(LIMITS)
    assert [window.note(one, None, doubtful=True) for one in ("answered", "rejected", "cancelled")] == [None] * 3
    assert window.counts == CanaryCounts(1)


# --- several gateways -------------------------------------------------------------------------------------------------


class Fleet:
    """Gateways that tell each other after every `every` requests of all together."""

    def __init__(self, gateways: int, every: int = 1, limits: HaltLimits = LIMITS) -> None:
        self.windows = [CanaryWindow(limits) for _ in range(gateways)]
        self.every, self.requests = every, 0

    def note(self, outcome: str, ttft: float | None = None) -> CanaryHalt | None:
        """A request at the next gateway in turn; the first halt."""
        halts = [self.windows[self.requests % len(self.windows)].note(outcome, ttft)]
        self.requests += 1
        if self.requests % self.every == 0:
            halts += self.tell()
        return next((halt for halt in halts if halt is not None), None)

    def tell(self) -> list[CanaryHalt | None]:
        told = [(str(number), window.counts) for number, window in enumerate(self.windows)]
        return [
            window.heard(boot, counts)
            for number, window in enumerate(self.windows)
            for boot, counts in told
            if boot != str(number)
        ]


@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_gateways_that_each_see_too_few_failures_halt_it_as_one_would(gateways: int):
    fleet = Fleet(gateways)
    assert [fleet.note("failed") for _ in range(3)] == [None, None, CanaryHalt("Errors", 3, 3)]
    fleet = Fleet(gateways)
    halts = [fleet.note("answered", 9.0) for _ in range(11)]
    assert halts == [None] * 10 + [CanaryHalt("Slow", 11, 11)]
    silent = Fleet(gateways, every=10_000)
    halts = [silent.note("failed") for _ in range(2 * gateways + 1)]
    assert halts == [None] * 2 * gateways + [CanaryHalt("Errors", 3, 3)], "without news each judges its own"


def halted(share: float, gateways: int = 1, every: int = 1) -> int:
    """Of 100 canaries with this share of failures, how many are halted in 300 requests."""
    found = 0
    for seed in range(100):
        draws, fleet = random.Random(seed), Fleet(gateways, every)  # noqa: S311 - reproducible
        found += any(fleet.note("failed" if draws.random() < share else "answered") for _ in range(300))
    return found


@pytest.mark.parametrize("every", [1, 3, 16, 100])
def test_gateways_together_halt_about_as_many_canaries_as_one_would(every: int):
    """Not the same ones, since requests between two messages have no order."""
    assert halted(0.3, 8, every) == halted(0.3) == 100
    assert 0.7 * halted(0.02) < halted(0.02, 8, every) < 1.5 * halted(0.02) < 40


def test_with_news_after_each_request_gateways_judge_as_one_does():
    fleet = Fleet(7)
    assert {fleet.note("failed" if at % 10 == 9 else "answered") for at in range(800)} == {None}
    assert fleet.note("failed") == CanaryHalt("Errors", 3, 20)


@pytest.mark.parametrize("every", [1, 3, 16, 100])
def test_failures_that_all_gateways_have_forgotten_do_not_count(every: int):
    fleet = Fleet(8, every)
    for _ in range(2):
        assert fleet.note("failed") is None
    for _ in range(120):
        assert fleet.note("answered") is None
    assert [fleet.note("failed") for _ in range(2)] == [None, None]
    fleet.tell()
    assert {window.counts.failed for window in fleet.windows} <= {0, 1, 2}
    assert fleet.note("failed") or any(fleet.tell())


def test_what_is_told_again_counts_once_and_what_began_anew_counts_whole():
    window = CanaryWindow(LIMITS)
    for _ in range(5):
        assert window.heard("a", CanaryCounts(4, 1)) is None
    assert window.heard("a", CanaryCounts(6, 2)) is None
    assert window.heard("a again", CanaryCounts(3, 0)) is None, "another process begins with nothing"
    assert window.heard("a", CanaryCounts(1, 0)) is None, "it had forgotten the canary"
    assert window.heard("a again", CanaryCounts(4, 1)) == CanaryHalt("Errors", 3, 11)


def test_a_gateway_that_starts_hears_of_what_lies_back_and_does_not_halt_for_it():
    window = CanaryWindow(LIMITS)
    for number in range(8):
        assert window.heard(str(number), CanaryCounts(5000, 400, 4000, 2000)) is None
    assert window.note("failed", None) is None
    assert window.heard("0", CanaryCounts(5001, 401, 4000, 2000)) == CanaryHalt("Errors", 3, 20)


def test_many_requests_between_two_messages_count_by_their_share():
    window = CanaryWindow(LIMITS)
    assert window.heard("a", CanaryCounts(1000, 149)) is None
    assert window.heard("a", CanaryCounts(2000, 299)) == CanaryHalt("Errors", 3, 20)


def test_what_is_remembered_of_peers_is_bounded():
    window = CanaryWindow(LIMITS._replace(min_requests=10_000))
    for number in range(20_000):
        window.heard(str(number), CanaryCounts(1, 0, 1, 0))
    assert len(window._peers) == MOST_PEERS  # pyright: ignore[reportPrivateUsage]
    for judged in (window._requests, window._streams):  # pyright: ignore[reportPrivateUsage]
        assert len(judged._batches) == judged.of == 10_000  # pyright: ignore[reportPrivateUsage]


RULE = {
    "targets": [target("a")],
    "canary": {"target": target("b"), "percent": 20},
}


def facts(**headers: str) -> RequestFacts:
    return RequestFacts(
        "acme", "/v1/chat/completions", {k.replace("_", "-").encode(): v.encode() for k, v in headers.items()}, 10
    )


def where(route: DeclaredRoute, draw: float, usable: Collection[str] | None = None, **headers: str) -> str:
    made = decide(route, facts(**headers), lambda ref: usable is None or ref.key in usable, draw)
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


def test_requests_that_a_canary_does_not_take_now_are_shared_by_the_targets():
    """An external target that rests. Where nothing else can answer, its error says until when."""
    three = declared({**RULE, "targets": [target("a"), target("c")]})

    def found(usable: Collection[str], draw: float) -> str:
        made = decide(three, facts(), lambda ref: ref.key in usable, draw, takes=lambda _: False)
        assert isinstance(made, RouteDecision)
        assert made.role == ("canary" if made.target.key == "chat/b" else "target")
        return made.target.key

    everything = {"chat/a", "chat/b", "chat/c"}
    assert collections.Counter(found(everything, (at + 0.5) / 100) for at in range(100)) == {"chat/a": 50, "chat/c": 50}
    assert collections.Counter(found(everything, (at + 0.5) / 100) for at in range(20)) == {"chat/a": 10, "chat/c": 10}
    assert {found({"chat/b"}, (at + 0.5) / 100) for at in range(100)} == {"chat/b"}
    assert found({"chat/a", "chat/b"}, 0.0) == "chat/a"


def test_a_canary_whose_target_is_gone_gets_nothing():
    made = decide(declared(RULE), facts(), lambda ref: ref.key != "chat/b", 0.0)
    assert isinstance(made, RouteDecision)
    assert made.target.key == "chat/a"


@pytest.mark.parametrize("gone", ["deleted", "weight 0"])
def test_without_targets_a_canary_keeps_its_share_and_the_fallback_gets_the_rest(gone: str):
    rule = {**RULE, "targets": [target("a", 0 if gone == "weight 0" else 1)]}
    one = declared({**rule, "fallback": {"targets": [target("lost"), target("c")]}})
    usable = {"chat/b", "chat/c"}
    found = [decide(one, facts(), lambda ref: ref.key in usable, (at + 0.5) / 100) for at in range(100)]
    made = [each for each in found if isinstance(each, RouteDecision)]
    assert collections.Counter((each.target.key, each.role) for each in made) == {
        ("chat/b", "canary"): 20,
        ("chat/c", "fallback"): 80,
    }
    assert {each.fallback for each in made if each.role == "fallback"} == {()}
    usable.discard("chat/c")
    assert where(one, 0.99, usable) == "chat/b", "where nothing else can answer, the canary does"
    assert decide(one, facts(), lambda _: False, 0.5) == NoTarget("no-target", "default")


def test_without_targets_sessions_of_a_canary_stay_there():
    affinity = {"type": "Header", "header": "x-session"}
    one = declared({**RULE, "sessionAffinity": affinity, "fallback": {"targets": [target("c")]}})
    for number in range(100):
        before = where(one, 0.5, x_session=str(number))
        after_it = where(one, 0.5, {"chat/b", "chat/c"}, x_session=str(number))
        assert after_it == ("chat/b" if before == "chat/b" else "chat/c")


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


def test_a_release_that_adds_fields_with_defaults_ends_no_halt():
    class NewHaltOn(HaltOn):
        new_limit: int | None = None
        new_percent: int = 50

    class NewCanary(Canary):
        halt_on: NewHaltOn = NewHaltOn()  # pyright: ignore[reportIncompatibleVariableOverride]
        new_field: str = "Default"

    def revision(**halt_on: int) -> tuple[str, str]:
        spec = {"target": target("b"), "percent": 20, **({"haltOn": halt_on} if halt_on else {})}
        now = a_route({**RULE, "canary": spec})
        (rule,) = now.spec.rules
        rules = (rule.model_copy(update={"canary": NewCanary.model_validate(spec)}),)
        later = now.model_copy(update={"spec": now.spec.model_copy(update={"rules": rules})})
        one, other = (declared_route(route).rules[0].canary for route in (now, later))
        assert one is not None
        assert other is not None
        return one.revision, other.revision

    (before, after_it), (other, other_later) = revision(), revision(minRequests=7)
    assert before == after_it
    assert other == other_later != before
    assert revision(minRequests=20) == (before, before), "what it is by default anyway"
