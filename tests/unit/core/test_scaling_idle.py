"""What was learned under load keeps no Model from zero, and wakes none."""

from dataclasses import replace

from shoal.api import reasons
from shoal.core.scaling import Policy, decide
from tests.support.scaling import Term, load, pending, replica, snapshot, source

POLICY = Policy(idle_seconds=60.0, stabilization_seconds=30.0)


def after_load() -> tuple[Term, int, int]:
    """A Model that had more requests than its replica could take, so that its speed is known; and its counters."""
    term, tokens, arrivals = Term(), 0, 0
    for second in range(1, 61):
        tokens, arrivals = tokens + 2_000, arrivals + 10
        busy = load(
            running=8, max_running=8, waiting=20, waiting_tokens=2_000, kv_tokens_used=5_000,
            prompt_tokens_total=tokens // 4, generation_tokens_total=tokens,
        )  # fmt: skip
        gateway = source(arrivals=arrivals, in_flight=28)
        term.at(float(second), snapshot(replica(0, busy), sources=[gateway], policy=POLICY))
    return term, tokens, arrivals


def test_a_rate_that_fades_does_not_keep_the_last_replica() -> None:
    term, tokens, arrivals = after_load()
    quiet = load(prompt_tokens_total=tokens // 4, generation_tokens_total=tokens)
    seen = snapshot(replica(0, quiet), sources=[source(arrivals=arrivals)], policy=POLICY)

    assert term.at(61.0, seen).wanted == 1
    assert any(r.name == "rate" and r.replicas for r in term.decision.rules) if term.decision else False
    decision = term.at(140.0, seen)

    assert (decision.wanted, decision.reason) == (0, reasons.SCALED_TO_ZERO)


def test_nor_does_it_wake_the_model_again_from_zero() -> None:
    term, _, arrivals = after_load()
    seen = snapshot(sources=[source(arrivals=arrivals)], policy=POLICY, wanted=0)

    assert [term.at(now, seen).wanted for now in (140.0, 141.0, 170.0)] == [0, 0, 0]


def test_nor_while_the_last_replica_still_ends() -> None:
    term, tokens, arrivals = after_load()
    quiet = load(prompt_tokens_total=tokens // 4, generation_tokens_total=tokens)
    ending = replica(0, quiet, deleting=True)
    seen = snapshot(ending, sources=[source(arrivals=arrivals)], policy=POLICY, wanted=0)
    started = replace(seen, replicas=(ending, pending(1, created=139.0)))

    assert [term.at(now, seen).wanted for now in (140.0, 141.0)] == [0, 0]
    assert term.at(142.0, started).wanted == 0, "nor one that somebody else started"


def test_nor_before_it_is_seen_to_end() -> None:
    term, tokens, arrivals = after_load()
    quiet = replica(0, load(prompt_tokens_total=tokens // 4, generation_tokens_total=tokens))
    seen = snapshot(quiet, sources=[source(arrivals=arrivals)], policy=POLICY)
    assert term.at(140.0, seen).wanted == 0
    asked_for_none = replace(seen, wanted=0)

    assert [term.at(now, asked_for_none).wanted for now in (140.1, 140.2, 140.3)] == [0, 0, 0]


def test_a_call_to_wake_is_named_as_what_woke_it_while_an_older_rate_fades() -> None:
    term, _, arrivals = after_load()
    seen = snapshot(sources=[source(arrivals=arrivals)], policy=POLICY, wanted=0)
    term.at(140.0, seen)

    decision = term.at(141.0, replace(seen, last_wake=141.0))

    assert (decision.wanted, decision.reason) == (1, reasons.WAKING)
    assert decision.message.startswith("a recent request")


def test_a_new_model_whose_source_is_read_for_longer_than_its_idle_window_starts_all_the_same() -> None:
    term, unsized = Term(), replace(snapshot(new=True, policy=Policy(idle_seconds=5.0)), variants=())
    assert [term.at(now, replace(unsized, wanted=1)).wanted for now in (0.0, 6.0, 60.0)] == [1, 1, 1]
    starting = snapshot(pending(0, created=60.0), policy=Policy(idle_seconds=5.0))

    assert [term.at(now, starting).wanted for now in (61.0, 90.0)] == [1, 1]


def test_a_new_model_that_is_not_sized_yet_is_not_said_to_lack_room() -> None:
    decision, _ = decide(replace(snapshot(new=True), variants=()), None, 10.0)

    assert (decision.wanted, decision.reason, decision.message) == (1, reasons.SCALING_UP, "the Model is new")
    still, _ = decide(replace(snapshot(new=True), variants=(), wanted=1), None, 11.0)

    assert (still.wanted, still.reason) == (1, reasons.SCALING_UP)
