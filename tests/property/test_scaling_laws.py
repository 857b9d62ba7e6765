"""What holds whatever agents and gateways say. Each law comes with its mutation: the protection off, and it breaks."""

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.core.scaling import Load, ModelSnapshot, Policy, Replica, ScalingDecision, SignalSource, decide
from shoal.core.scaling.learn import LATE_SECONDS
from tests.support.scaling import CLASS, KV_TOKENS, replica, source, variant

learn, load, rules, deciding = (
    importlib.import_module(f"shoal.core.scaling.{name}") for name in ("learn", "load", "rules", "decide")
)

Body = Callable[[st.DataObject], None]


def holds(law: Body, examples: int = 60) -> None:
    """Tries the law."""

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        law(data)

    run()


def breaks(law: Body) -> None:
    """Finds a case in which it does not hold: the same one each time."""

    @settings(
        max_examples=2000,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        law(data)

    with pytest.raises(AssertionError):
        run()


# --- Models -----------------------------------------------------------------------------------------------------------

POLICIES = st.builds(
    Policy,
    minimum=st.integers(0, 2),
    maximum=st.integers(2, 12),
    kv_percent=st.sampled_from([50, 80, 100]),
    queued_per_replica=st.integers(1, 8),
    idle_seconds=st.sampled_from([30.0, 600.0]),
    stabilization_seconds=st.sampled_from([0.0, 20.0, 120.0]),
)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    busy = draw(st.booleans())
    return Load(
        engine_boot=draw(st.sampled_from(["a", "b"])),
        phase="ready",
        running=draw(st.integers(0, 50)) if busy else 0,
        max_running=256,
        waiting=draw(st.sampled_from([0, 0, 1, 9, 40])) if busy else 0,
        waiting_tokens=draw(st.integers(0, 50_000)) if busy else 0,
        kv_tokens_used=draw(st.one_of(st.just(KV_TOKENS), st.integers(0, KV_TOKENS))) if busy else 0,
        kv_tokens_total=KV_TOKENS,
        prompt_tokens_total=draw(st.integers(0, 10**6)),
        generation_tokens_total=draw(st.integers(0, 10**5)),
    )


@st.composite
def pods(draw: st.DrawFn) -> tuple[Replica, ...]:
    found: list[Replica] = []
    for number in range(draw(st.integers(0, 4))):
        state = draw(st.sampled_from(["ready", "ready", "ready", "starting", "deleting", "lost"]))
        said = draw(loads())
        starting = state == "starting"
        found.append(
            replace(
                replica(number, said),
                ready=not starting,
                was_ready=not starting,
                deleting=state == "deleting",
                lost=state == "lost",
                load=None if starting else said,
                created=draw(st.floats(-1000, 0)),
            )
        )
    return tuple(found)


@st.composite
def gateways(draw: st.DrawFn) -> tuple[SignalSource, ...]:
    return tuple(
        source(
            f"gateway-{i}",
            draw(st.sampled_from(["x", "y"])),
            arrivals=draw(st.integers(0, 100)),
            in_flight=draw(st.integers(0, 30)),
            held=(held := draw(st.sampled_from([0, 0, 0, 1, 7]))),
            held_tokens=held * 500,
        )
        for i in range(draw(st.integers(1, 3)))
    )


@st.composite
def models(draw: st.DrawFn, quiet: bool = False) -> ModelSnapshot:
    """Everybody is heard."""
    replicas, policy = draw(pods()), draw(POLICIES)
    sources = draw(gateways())
    if quiet:
        idle = {"running": 0, "waiting": 0, "waiting_tokens": 0, "kv_tokens_used": 0}
        replicas = tuple(replace(r, load=r.load and replace(r.load, **idle)) for r in replicas)
        sources = tuple(source(v.name, v.boot or "x") for v in sources)
    standing = sum(1 for r in replicas if not r.deleting and not r.lost)
    return ModelSnapshot(
        policy=policy,
        wanted=draw(st.integers(0, policy.maximum)),
        replicas=replicas,
        sources=sources,
        variants=(variant(CLASS, replicas=standing, room=draw(st.sampled_from([None, 0, 3, 100]))),),
        rolling=draw(st.sampled_from([False, False, False, True])),
        term_began=0.0,
    )


def steps(
    data: st.DataObject, seen: st.SearchStrategy[ModelSnapshot]
) -> list[tuple[ModelSnapshot, ScalingDecision, float]]:
    """A Model's decisions over some minutes, each carried out at once."""
    now, memory, wanted = 0.0, None, None
    made: list[tuple[ModelSnapshot, ScalingDecision, float]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        snapshot = data.draw(seen)
        if wanted is not None:
            snapshot = replace(snapshot, wanted=wanted)
        decision, memory = decide(snapshot, memory, now)
        wanted = decision.wanted
        made.append((snapshot, decision, now))
        now += data.draw(st.sampled_from([0.0, 0.5, 5.0, 25.0, 130.0, 700.0]))
    return made


def _standing(seen: ModelSnapshot) -> list[Replica]:
    return [r for r in seen.replicas if not r.deleting and not r.lost]


# --- enough -----------------------------------------------------------------------------------------------------------


def _is_enough(of: st.SearchStrategy[ModelSnapshot]) -> Body:
    def law(data: st.DataObject) -> None:
        for seen, decision, _ in steps(data, of):
            policy, most = seen.policy, seen.wanted + max(seen.policy.max_step, seen.wanted)
            said = [r.load for r in _standing(seen) if r.load is not None]
            tokens = sum((s.kv_tokens_used or 0) + (s.waiting_tokens or 0) for s in said)
            wanted, target = decision.wanted, policy.kv_percent / 100
            assert wanted >= min(policy.minimum, policy.maximum, most)
            # A maximum that was lowered is not undercut, and more may still stand.
            assert wanted >= min(policy.maximum, most) or tokens <= wanted * KV_TOKENS * target + 1
            demands = [v.demand for v in seen.sources or () if v.demand]
            assert wanted > 0 or not any(d.in_flight for d in demands) or seen.wanted == 0
            assert wanted > 0 or not any(d.held for d in demands)
            assert wanted <= max(policy.maximum, seen.wanted)

    return law


def test_never_fewer_than_the_load_needs_while_everybody_is_heard() -> None:
    holds(_is_enough(models()))


def _full(seen: ModelSnapshot) -> ModelSnapshot:
    full = {"kv_tokens_used": KV_TOKENS, "waiting": 0}
    return replace(seen, replicas=tuple(replace(r, load=r.load and replace(r.load, **full)) for r in seen.replicas))


def _knocked(seen: ModelSnapshot) -> ModelSnapshot:
    return replace(seen, wanted=0, replicas=(), sources=(source(held=1, held_tokens=9),))


_WHERE_IT_COUNTS = {
    "kv_cache": models().map(_full),
    "held": models(quiet=True).map(_knocked),
    "minimum": models(quiet=True),
}


@pytest.mark.parametrize("rule", list(_WHERE_IT_COUNTS))
def test_without_one_of_its_rules_there_are_fewer_than_the_load_needs(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds(_is_enough(_WHERE_IT_COUNTS[rule]), examples=10)
    monkeypatch.setattr(deciding, "RULES", tuple(r for r in rules.RULES if r.__name__ != rule))

    breaks(_is_enough(_WHERE_IT_COUNTS[rule]))


# --- unknown ----------------------------------------------------------------------------------------------------------


@st.composite
def _muted(draw: st.DrawFn) -> ModelSnapshot:
    """A quiet Model with a stale signal source."""
    seen = draw(models(quiet=True).filter(lambda s: bool(s.sources)))
    assert seen.sources is not None
    heard = [i for i, r in enumerate(seen.replicas) if r.ready and not r.deleting and not r.lost]
    who = draw(st.sampled_from(["gateway", "gateways", "field", "replica"] if heard else ["gateway", "gateways"]))
    if who == "gateways":
        return replace(seen, sources=None)
    if who == "gateway":
        first, *rest = seen.sources
        return replace(seen, sources=(replace(first, demand=None), *rest))
    at = draw(st.sampled_from(heard))
    mute = seen.replicas[at]
    said = mute.load
    if who == "field" and said is not None:
        said = replace(said, **{draw(st.sampled_from(["running", "waiting", "kv_tokens_used"])): None})
    else:
        said = None
    found = [*seen.replicas]
    found[at] = replace(mute, load=said)
    return replace(seen, replicas=tuple(found))


def _is_cautious(data: st.DataObject) -> None:
    for seen, decision, _ in steps(data, _muted()):
        assert decision.wanted >= seen.wanted
        assert decision.stale


def test_nothing_goes_down_while_a_signal_source_is_stale() -> None:
    holds(_is_cautious)


def test_where_unknown_reads_as_zero_replicas_go_down(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load.fleet_load
    monkeypatch.setattr(deciding, "fleet_load", lambda seen: replace(plain(seen), stale=(), load_unknown=()))
    original = deciding.decide

    def law(data: st.DataObject) -> None:
        for seen, decision, _ in steps(data, _muted()):
            assert decision.wanted >= seen.wanted

    assert original is decide
    breaks(law)


def _is_patient_in_rollouts(data: st.DataObject) -> None:
    for seen, decision, _ in steps(data, models(quiet=True).map(lambda s: replace(s, rolling=True))):
        assert decision.wanted >= seen.wanted


def test_nothing_goes_down_during_a_rollout() -> None:
    holds(_is_patient_in_rollouts)


# --- a new leader -----------------------------------------------------------------------------------------------------


def _keeps_over_a_restart(data: st.DataObject) -> None:
    """Whatever it knew before, a new leader lowers nothing before its windows are over."""
    before = steps(data, models())
    seen = replace(data.draw(models(quiet=True)), wanted=before[-1][1].wanted, rolling=False)
    policy, now, memory = seen.policy, before[-1][2] + 1.0, None
    seen = replace(seen, term_began=now)
    seconds = 0.0
    for gap in data.draw(st.lists(st.sampled_from([0.5, 5.0, 20.0, 100.0]), min_size=1, max_size=8)):
        decision, memory = decide(seen, memory, now + seconds)
        # Which window it is depends on how far down: to zero it is that of idleness, shorter or longer.
        window = policy.stabilization_seconds if decision.wanted else policy.idle_seconds
        if seconds < window and seen.wanted <= policy.maximum:
            assert decision.wanted >= seen.wanted
        if seconds < policy.idle_seconds and seen.wanted:
            assert decision.wanted >= 1
        seen = replace(seen, wanted=decision.wanted)
        seconds += gap


def test_a_new_leader_lowers_nothing_before_its_windows_are_over() -> None:
    holds(_keeps_over_a_restart)


@pytest.mark.parametrize("what", ["window", "quiet"])
def test_a_leader_that_begins_without_windows_lowers_early(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "window":
        monkeypatch.setattr(deciding, "highest", lambda _window: 0)
    else:
        monkeypatch.setattr(deciding, "_idle_at", lambda view: view.now - 1.0)

    breaks(_keeps_over_a_restart)


# --- the clock --------------------------------------------------------------------------------------------------------


def _withstands_the_clock(data: st.DataObject) -> None:
    now, memory = 0.0, None
    seen = replace(data.draw(models(quiet=True)), rolling=False)
    for _ in range(data.draw(st.integers(1, 8))):
        decision, memory = decide(seen, memory, now)
        seen = replace(seen, wanted=decision.wanted)
        jump = data.draw(st.sampled_from([None, -5000.0, -10.0, 50.0, 10_000.0]))
        due = memory.due if memory.due is not None else now + 5.0
        before = now
        now = due if jump is None else now + jump
        if now < before or now > due + LATE_SECONDS:
            leapt, memory = decide(seen, memory, now)
            assert leapt.wanted >= min(seen.wanted, seen.policy.maximum)
            seen = replace(seen, wanted=leapt.wanted)


def test_a_leap_of_the_clock_lowers_nothing() -> None:
    holds(_withstands_the_clock)


def test_without_the_watch_on_the_clock_a_leap_lowers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "LATE_SECONDS", 1e9)

    breaks(_withstands_the_clock)


# --- monotone, deterministic ------------------------------------------------------------------------------------------


def _is_monotone(data: st.DataObject) -> None:
    """More load on one replica or gateway never means fewer replicas."""
    seen = replace(data.draw(models()), rolling=False)
    more = seen
    heard = [i for i, r in enumerate(seen.replicas) if r.load is not None]
    if heard and data.draw(st.booleans()):
        at = data.draw(st.sampled_from(heard))
        field = data.draw(st.sampled_from(["waiting", "waiting_tokens", "kv_tokens_used"]))
        found, said = [*seen.replicas], seen.replicas[at].load
        assert said is not None
        found[at] = replace(
            found[at], load=replace(said, **{field: getattr(said, field) + data.draw(st.integers(1, 10**6))})
        )
        more = replace(seen, replicas=tuple(found))
    else:
        assert seen.sources is not None
        first, *rest = seen.sources
        assert first.demand is not None
        grown = replace(first.demand, held=first.demand.held + data.draw(st.integers(1, 500)))
        grown = replace(grown, held_tokens=grown.held * 500)
        more = replace(seen, sources=(replace(first, demand=grown), *rest))

    assert decide(more, None, 10.0)[0].wanted >= decide(seen, None, 10.0)[0].wanted


def test_more_load_never_means_fewer_replicas() -> None:
    holds(_is_monotone)


def test_where_a_full_queue_is_taken_for_a_mistake_more_load_means_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load.fleet_load

    def forgetful(seen: ModelSnapshot) -> object:
        said = plain(seen)
        return replace(said, waiting=said.waiting if said.waiting < 50 else 0)

    monkeypatch.setattr(deciding, "fleet_load", forgetful)

    breaks(_is_monotone)


def _is_deterministic(data: st.DataObject) -> None:
    """The same said in another order means the same."""
    seen = data.draw(models())
    assert seen.sources is not None
    other = replace(
        seen,
        replicas=tuple(data.draw(st.permutations(seen.replicas))),
        sources=tuple(data.draw(st.permutations(seen.sources))),
    )
    one, memory = decide(seen, None, 10.0)
    again, same = decide(seen, None, 10.0)
    turned, _ = decide(other, None, 10.0)

    assert (one, memory) == (again, same)
    assert (one.wanted, one.reason, one.message) == (turned.wanted, turned.reason, turned.message)


def test_the_same_numbers_give_the_same_decision_in_whatever_order() -> None:
    holds(_is_deterministic)


def test_a_decider_that_hears_the_first_replica_only_depends_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load.fleet_load
    monkeypatch.setattr(deciding, "fleet_load", lambda seen: plain(replace(seen, replicas=seen.replicas[:1])))

    breaks(_is_deterministic)


# --- lies -------------------------------------------------------------------------------------------------------------

_ANYTHING = st.one_of(st.none(), st.integers(-(10**12), 10**12))


def _bears_lies(data: st.DataObject) -> None:
    lie = st.builds(
        Load,
        engine_boot=st.sampled_from([None, "a"]),
        phase=st.sampled_from([None, "ready", "loading"]),
        **dict.fromkeys(
            (
                "running",
                "max_running",
                "waiting",
                "waiting_tokens",
                "kv_tokens_used",
                "kv_tokens_total",
                "prompt_tokens_total",
                "generation_tokens_total",
            ),
            _ANYTHING,
        ),
    )

    def lying(seen: ModelSnapshot) -> ModelSnapshot:
        return replace(seen, replicas=tuple(replace(r, load=r.load and data.draw(lie)) for r in seen.replicas))

    for seen, decision, _ in steps(data, models().map(lying)):
        assert 0 <= decision.wanted <= max(seen.policy.maximum, seen.wanted)
        negative = any(
            r.ready
            and r.load is not None
            and any((getattr(r.load, f) or 0) < 0 for f in ("running", "waiting", "kv_tokens_used"))
            for r in _standing(seen)
        )
        if negative:
            assert decision.invalid
            assert decision.wanted >= seen.wanted


def test_whatever_an_agent_says_the_decision_stays_within_bounds_and_lies_lower_nothing() -> None:
    holds(_bears_lies)


def test_where_less_than_nothing_is_taken_for_nothing_a_lie_lowers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load.fleet_load

    def credulous(seen: ModelSnapshot) -> object:
        said = plain(seen)
        return replace(said, stale=(), load_unknown=()) if said.invalid else said

    monkeypatch.setattr(deciding, "fleet_load", credulous)

    breaks(_bears_lies)
