"""How many of those who wait go at a time: never more than there is room, and always some in the end."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.api.replica import ReplicaKeys
from shoal.core.hold.capacity import UNKNOWN_CAPACITY, OwnInFlight, allowance, estimated_tokens, share_of
from shoal.core.hold.retries import FIRST, MOST, PER_SECOND, RATIO, RetryBudget

SMALL = st.integers(0, 200)
TOKENS = st.integers(0, 500_000)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), SMALL, SMALL, st.integers(1, 300))
def test_all_gateways_together_release_no_more_than_the_room_and_one_each(
    held: list[int], running: int, waiting: int, most: int
):
    said = ReplicaKeys(running=running, waiting=waiting, max_running=most, kv_tokens_used=0, kv_tokens_total=10**9)
    released = [
        allowance(said, OwnInFlight(), kv_percent=80, share=share_of(own, sum(held) - own)).requests for own in held
    ]
    room = max(0, most - running - waiting)
    assert sum(released) <= room + len(held)
    assert (sum(released) > 0) == (room > 0)


@given(SMALL, SMALL, SMALL, st.integers(1, 300))
def test_what_was_sent_since_the_report_is_counted_in(running: int, at_report: int, since: int, most: int):
    said = ReplicaKeys(running=running, waiting=0, max_running=most, kv_tokens_used=0, kv_tokens_total=10**9)
    ours = OwnInFlight(at_report + since, 0, at_report)
    allowed = allowance(said, ours, kv_percent=80, share=1.0).requests
    assert allowed + since + max(running, at_report) <= most or allowed == 0


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 100))
def test_tokens_stay_under_the_target(used: int, waiting: int, total: int, percent: int):
    said = ReplicaKeys(
        running=0, waiting=3, max_running=100, kv_tokens_used=used, kv_tokens_total=total, waiting_tokens=waiting
    )
    allowed = allowance(said, OwnInFlight(), kv_percent=percent, share=1.0)
    room = total * percent // 100 - used - waiting
    assert allowed.requests == 0 if room <= 0 else (allowed.tokens is not None and allowed.tokens <= room)


@given(TOKENS, st.integers(1, 500_000))
def test_an_engine_without_a_queue_gets_a_next_one_however_full_it_is(used: int, total: int):
    said = ReplicaKeys(running=1, waiting=0, max_running=10, kv_tokens_used=used, kv_tokens_total=total)
    assert allowance(said, OwnInFlight(1, 0, 1), kv_percent=80, share=0.01).requests >= 1
    # ... but one at a time: not another before it was heard what became of that one
    full = said.model_copy(update={"kv_tokens_used": total})
    assert allowance(full, OwnInFlight(2, 0, 1), kv_percent=80, share=1.0).requests == 0


@given(st.sampled_from(["running", "waiting", "max_running", "kv_tokens_used", "kv_tokens_total"]))
def test_room_that_is_not_known_is_small_and_not_nothing(missing: str):
    fields = {"running": 0, "waiting": 0, "max_running": 100, "kv_tokens_used": 0, "kv_tokens_total": 10**6}
    said = ReplicaKeys.model_validate({**fields, missing: None})
    assert allowance(said, OwnInFlight(), kv_percent=80, share=1.0).requests == UNKNOWN_CAPACITY
    assert allowance(None, OwnInFlight(), kv_percent=80, share=1.0).requests == UNKNOWN_CAPACITY


def test_a_replica_that_is_known_to_be_full_gets_nothing_though_its_cache_is_not_known():
    assert (
        allowance(ReplicaKeys(running=8, waiting=0, max_running=8), OwnInFlight(), kv_percent=80, share=1.0).requests
        == 0
    )


@given(st.integers(0, 10**7), st.none() | st.integers(-5, 10**6), st.integers(-1, 8))
def test_an_estimate_is_never_nothing(size: int, bound: int | None, choices: int):
    assert estimated_tokens(size, bound, choices) >= 1


def test_unknown_peers_hold_nothing():
    assert share_of(5, None) == share_of(5, 0) == share_of(0, 7) == 1.0
    assert share_of(5, 15) == 0.25


@given(st.integers(0, 2000), st.floats(0, 600))
def test_a_model_that_only_fails_gets_a_share_of_retries(requests: int, seconds: float):
    budget = RetryBudget(0.0)
    retries = 0
    for number in range(requests):
        budget.sent()
        retries += budget.take(seconds * number / requests)
    while budget.take(seconds):
        retries += 1
    assert retries <= FIRST + RATIO * requests + PER_SECOND * seconds + 1


def test_a_model_that_answers_again_takes_what_waits_at_a_rate_that_doubles():
    budget = RetryBudget(0.0)
    while budget.take(0.0):
        pass
    assert budget.take(1.0)
    rounds: list[int] = []
    released = 1
    for _ in range(5):
        for _ in range(released):
            budget.answered()
        released = 0
        while budget.take(1.0):
            released += 1
        rounds.append(released)
    assert rounds == [2, 4, 8, 16, 32]


def test_time_and_requests_save_up_a_bounded_number():
    budget = RetryBudget(0.0)
    for _ in range(10_000):
        budget.sent()
    assert sum(budget.take(1e6) for _ in range(1000)) == MOST
