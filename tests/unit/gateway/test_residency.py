"""How long requests have waited for an adapter that no replica has."""

from shoal.agent.adapters.calls import LOAD_SECONDS
from shoal.agent.adapters.service import STAGE_SECONDS
from shoal.api.replica import AdapterState
from shoal.core.hold.limits import FIRST_LOAD_SECONDS
from shoal.gateway.residency import Residency


def test_the_wait_for_an_adapter_begins_anew_once_a_pod_has_had_it():
    residency = Residency()
    assert residency.waited_for("uid-a", "a@1", 10.0) == 0.0
    residency.update("pod-1", {"a@1": AdapterState(state="loading"), "b@1": AdapterState(state="loaded")})
    residency.update("pod-1", None)
    assert residency.waited_for("uid-a", "a@1", 15.0) == 5.0
    residency.update("pod-2", {"a@1": AdapterState(state="loaded")})
    assert residency.waited_for("uid-a", "a@1", 16.0) == 0.0
    residency.update("pod-2", {})
    assert residency.waited_for("uid-a", "a@1", 20.0) == 0.0
    assert residency.waited_for("uid-a", "a@1", 21.0) == 1.0


def test_the_wait_is_that_of_one_revision_and_ends_with_the_adapter():
    residency = Residency()
    residency.waited_for("uid-a", "a@1", 10.0)
    residency.waited_for("uid-b", "b@1", 10.0)
    assert residency.waited_for("uid-a", "a@2", 15.0) == 0.0
    residency.retain({"uid-a"})
    assert residency.waited_for("uid-a", "a@2", 20.0) == 5.0
    assert residency.waited_for("uid-b", "b@1", 20.0) == 0.0


def test_what_agents_give_a_load_is_less_than_the_longest_first_load():
    assert STAGE_SECONDS + LOAD_SECONDS < FIRST_LOAD_SECONDS
