"""Ids of requests: unique, of the form that RFC 9562 gives, and in the order in which requests came."""

import time
import uuid

from shoal.gateway.ids import uuid7


def test_an_id_is_a_uuid_of_version_7_that_says_when_it_was_made():
    before = time.time_ns() // 1_000_000
    found = uuid.UUID(uuid7())
    assert (found.version, found.variant) == (7, uuid.RFC_4122)
    assert before <= found.int >> 80 <= time.time_ns() // 1_000_000


def test_ids_made_one_after_the_other_sort_so():
    made: list[str] = []
    for _ in range(500):
        made.append(uuid7())
        until = time.perf_counter_ns() + 1_000
        while time.perf_counter_ns() < until:
            pass
    assert made == sorted(made)
    assert len(set(made)) == len(made)
