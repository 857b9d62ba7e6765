"""Which replica serves, whose a key is, which Model a word means: the pure part of the request path."""

from datetime import UTC, datetime, timedelta

import pytest

from shoal.api.tenant import Tenant
from shoal.core.access import DenialReason, Denied, KeyIdentity, authenticate, index_keys
from shoal.core.routing.choice import Choice, NoReplica, ReplicaSignal, has_ended
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from tests.support.gateway import replica
from tests.support.routing import choose

READY = ReplicaSignal("ready", "boot")
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def chosen(result: Choice | NoReplica) -> str:
    assert isinstance(result, Choice)
    return result.replica.uid


def test_fewest_in_flight():
    pods = [replica(n) for n in (1, 2, 3)]
    heard = {p.uid: READY for p in pods}
    assert chosen(choose(pods, heard, {"pod-1": 2, "pod-2": 1, "pod-3": 2})) == "pod-2"


def test_equals_take_turns():
    pods = [replica(n) for n in (1, 2)]
    heard = {p.uid: READY for p in pods}
    assert {chosen(choose(pods, heard, {}, turn=turn)) for turn in (1, 2)} == {"pod-1", "pod-2"}


@pytest.mark.parametrize(
    ("pod", "heard", "reason"),
    [
        (replica(1, ready=False), READY, "not-ready"),
        (replica(1, deleting=True), READY, "not-ready"),
        (replica(1, ip=None), READY, "not-ready"),
        (replica(1), ReplicaSignal("draining", "b"), "turned-away"),
        (replica(1), ReplicaSignal("stalled", "b"), "turned-away"),
    ],
)
def test_who_is_never_chosen(pod: Replica, heard: ReplicaSignal, reason: str):
    result = choose([pod], {"pod-1": heard}, {})
    assert isinstance(result, NoReplica)
    assert result.reason == reason
    assert result.message


def test_only_replicas_with_a_live_stream():
    pods = [replica(1), replica(2)]
    for turn in range(4):
        result = choose(pods, {"pod-2": READY}, {"pod-2": 50}, turn=turn)
        assert chosen(result) == "pod-2"
        assert isinstance(result, Choice)
        assert not result.fallback


def test_all_streams_down_falls_back_to_ready_pods():
    result = choose([replica(1), replica(2, ready=False)], {}, {})
    assert chosen(result) == "pod-1"
    assert isinstance(result, Choice)
    assert result.fallback


def test_a_draining_replica_is_no_reason_to_fall_back():
    result = choose([replica(1), replica(2)], {"pod-1": ReplicaSignal("draining", "b")}, {})
    assert result == NoReplica("turned-away")


def test_what_was_tried_is_not_tried_again():
    pods = [replica(1), replica(2)]
    heard = {p.uid: READY for p in pods}
    assert chosen(choose(pods, heard, {"pod-2": 9}, tried={"pod-1"})) == "pod-2"
    assert choose(pods, heard, {}, tried={"pod-1", "pod-2"}) == NoReplica("tried")
    assert choose([], {}, {}) == NoReplica("none")


# --- keys -----------------------------------------------------------------------------------------------------------


def tenant(name: str, sha: str, created: str = "2026-01-01T00:00:00Z", uid: str = "", **spec: object) -> Tenant:
    key = {"name": "k", "sha256": sha, **{f: spec.pop(f) for f in ("expires", "disabled") if f in spec}}
    return Tenant.model_validate(
        {"metadata": {"name": name, "uid": uid or name, "creationTimestamp": created}, "spec": {"keys": [key], **spec}}
    )


SHA = "a" * 64


def test_a_key_that_two_tenants_list_belongs_to_the_older():
    young = tenant("young", SHA, "2026-05-01T00:00:00Z")
    old = tenant("old", SHA, "2026-01-01T00:00:00Z")
    for order in ([young, old], [old, young]):
        found = authenticate(index_keys(order), SHA, NOW)
        assert isinstance(found, KeyIdentity)
        assert found.tenant == "old"
    same = [tenant("b", SHA, uid="2"), tenant("a", SHA, uid="1")]
    found = authenticate(index_keys(same), SHA, NOW)
    assert isinstance(found, KeyIdentity)
    assert found.tenant == "a"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [({"disabled": True}, "disabled"), ({"expires": NOW}, "expired"), ({"suspended": True}, "suspended")],
)
def test_refused_keys(spec: dict, reason: DenialReason):
    assert authenticate(index_keys([tenant("t", SHA, **spec)]), SHA, NOW) == Denied(reason, "t")


def test_a_key_holds_until_it_expires():
    index = index_keys([tenant("t", SHA, expires=NOW)])
    assert isinstance(authenticate(index, SHA, NOW - timedelta(seconds=1)), KeyIdentity)
    assert authenticate(index, "b" * 64, NOW) == Denied("unknown")


# --- names ----------------------------------------------------------------------------------------------------------


def model(key: str, *claims: str, created: datetime | None = NOW, uid: str = "") -> ServedModel:
    return ServedModel(key, uid or key, key, claims, created)


def means(models: dict[str, ServedModel], word: str, *grants: str) -> ServedModel | None:
    words = ModelIndex()
    words.set_models(models)
    return words.find(word, identity(*grants))


def identity(*grants: str) -> KeyIdentity:
    return KeyIdentity("acme", None, "key", None, False, False, frozenset(grants))


def test_a_short_name_belongs_to_the_oldest_claimant_that_the_tenant_may_use():
    old, young = model("a/x", "llama", created=NOW - timedelta(1)), model("b/x", "llama")
    models = {m.key: m for m in (young, old)}
    assert means(models, "llama", "a/x", "b/x") is old
    assert means(models, "llama", "b/x") is young  # a Model outside the grants takes nothing away
    assert means(models, "b/x", "b/x") is young
    assert means(models, "a/x", "b/x") is None
    assert means(models, "llama", "gone/x") is None


def test_equal_age_goes_by_uid():
    models = {m.key: m for m in (model("a/x", "n", uid="2"), model("b/x", "n", uid="1"))}
    assert means(models, "n", *models) is models["b/x"]


def test_a_claim_cannot_take_the_full_name():
    models = {m.key: m for m in (model("a/x", "b/y", created=NOW - timedelta(1)), model("b/y", "y"))}
    assert means(models, "b/y", *models) is models["b/y"]


def test_the_list_shows_short_names_and_full_ones_where_there_is_no_short():
    models = {m.key: m for m in (model("a/x", "n", created=NOW - timedelta(1)), model("b/x", "n"))}
    words = ModelIndex()
    words.set_models(models)
    assert [word for word, _ in words.listed(identity(*models))] == ["b/x", "n"]


def test_models_that_change_their_names_or_go_keep_none_behind():
    words, everyone = ModelIndex(), identity("a/x", "b/x")
    words.set_models({"a/x": model("a/x", "n", created=NOW - timedelta(1)), "b/x": model("b/x", "n")})
    words.set_models({"a/x": model("a/x", "m", created=NOW - timedelta(1)), "b/x": model("b/x", "n")})
    listed = [(word, found.key) for word, found in words.listed(everyone) if isinstance(found, ServedModel)]
    assert listed == [("m", "a/x"), ("n", "b/x")]
    words.set_models({})
    assert words.listed(everyone) == []
    assert words.find("n", everyone) is None


@pytest.mark.parametrize(
    ("boot", "answers", "signal", "ended"),
    [
        ("boot", True, READY, False),
        ("boot", False, READY, False),  # only this gateway does not reach it
        ("boot", False, ReplicaSignal("loading", "boot"), True),
        ("boot", False, ReplicaSignal("ready", "next"), True),
        ("boot", True, ReplicaSignal("ready", "next"), True),  # the one that has followed it
        ("boot", False, ReplicaSignal("loading", None), True),
        ("boot", False, None, True),
        ("boot", True, None, False),
        ("boot", True, ReplicaSignal("draining", "boot"), False),
        (None, False, None, False),  # nothing was known of it before either
    ],
)
def test_a_replica_has_ended_if_its_agent_names_another_engine_or_agrees_that_it_takes_no_connection(
    boot: str | None, answers: bool, signal: ReplicaSignal | None, ended: bool
) -> None:
    assert has_ended(boot, answers, signal) is ended
