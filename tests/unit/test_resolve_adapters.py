"""Which adapter a word means, and who may use it."""

import dataclasses
from datetime import UTC, datetime

import pytest

from shoal.core.access import Identity
from shoal.core.resolve import ServedModel
from shoal.core.resolve_adapters import DeclaredAdapter
from shoal.core.words import Words
from tests.support.adapter_agents import V1, V2, adapter, name_of, pool
from tests.support.gateway import MODEL

MODELS = {MODEL.key: MODEL}
OLDER = "2025-06-01T00:00:00Z"


@dataclasses.dataclass
class Meant:
    served: dict[str, ServedModel]
    waiting: dict[str, str]
    listed: list[tuple[str, str]]


def words(
    *adapters: DeclaredAdapter, tenant: str = "acme", grants: tuple[str, ...] = (), models=MODELS, pools=None
) -> Meant:
    """What every word means that anybody claims."""
    identity = Identity(tenant, None, "key", None, False, False, frozenset(grants))
    index = Words()
    index.set_models(models)
    index.set_pools({"chat/pool": pool()} if pools is None else pools)
    for one in adapters:
        index.put(one.key, one)
    claimants = [*models.values(), *adapters]
    claimed = {word for one in claimants for word in (one.key, *one.claims)}
    served = {word: found for word in claimed if (found := index.find(word, identity)) is not None}
    waiting = {word: reason for word in claimed if (reason := index.why_not(word, identity)) is not None}
    assert not served.keys() & waiting.keys()
    return Meant(served, waiting, [(word, found.address) for word, found in index.listed(identity)])


def test_a_tenant_that_is_listed_needs_no_grant_of_the_base():
    found = words(adapter()).served
    assert set(found) == {"support", "chat/support"}
    served = found["support"]
    assert (served.key, served.uid, served.engine_name) == ("chat/llama", "uid-llama", "chat/llama")
    assert served.adapter is not None
    assert (served.adapter.engine_name, served.adapter.revision) == (name_of(), V1)


def test_others_do_not_even_learn_that_it_is_there():
    assert words(adapter(), tenant="other") == Meant({}, {}, [])
    assert words(adapter(revision=None), tenant="other") == Meant({}, {}, [])


def test_a_star_means_those_who_may_use_the_base():
    everyone = adapter(tenants=("*",))
    assert "support" not in words(everyone).served
    assert "support" in words(everyone, grants=("chat/llama",)).served
    assert "support" not in words(everyone, grants=("chat/other",)).served


def test_the_names_that_it_declares_replace_its_own_short_name():
    assert set(words(adapter(served=("a", "b"))).served) == {"a", "b", "chat/support"}


@pytest.mark.parametrize(("created", "means"), [(OLDER, "chat/other"), ("2026-03-01T00:00:00Z", "chat/support")])
def test_a_short_name_belongs_to_the_oldest_adapter(created: str, means: str):
    found = words(adapter(), adapter("other", served=("support",), created=created)).served
    assert found["support"].address == means
    assert found["chat/other"].address == "chat/other"


def test_a_short_name_belongs_to_the_oldest_of_models_and_adapters():
    taken = adapter(served=("llama",))
    assert words(taken, grants=("chat/llama",)).served["llama"].adapter is None
    old = adapter(served=("llama",), created=OLDER)
    assert words(old, grants=("chat/llama",)).served["llama"].address == "chat/support"
    assert words(taken).served["llama"].address == "chat/support"  # of what this tenant may use, it is the oldest


def test_an_adapter_nobody_gave_me_takes_no_name_from_me():
    stolen = adapter("thief", "evil", served=("support",), created=OLDER, tenants=("other",), pool_namespace="chat")
    pools = {"chat/pool": pool(allowedNamespaces={"from": "All"})}
    assert words(adapter(), stolen, pools=pools).served["support"].address == "chat/support"


@pytest.mark.parametrize("created", [OLDER, "2026-03-01T00:00:00Z"])
def test_a_model_and_an_adapter_of_one_name_are_two_claimants_of_it(created: str):
    found = words(adapter("llama", created=created), grants=("chat/llama",)).served
    assert (found["chat/llama"].adapter is not None) == (created == OLDER)


@pytest.mark.parametrize(
    ("changes", "pools", "models", "reason"),
    [
        ({"revision": None, "reason": "RankTooHigh"}, None, MODELS, "RankTooHigh"),
        ({"revision": None}, None, MODELS, "Pending"),
        ({}, {"chat/pool": pool(accepted=False)}, MODELS, "PoolClaimed"),
        ({"namespace": "team", "pool_namespace": "chat"}, None, MODELS, "NamespaceNotAllowed"),
        ({}, None, {}, "ModelNotFound"),
    ],
    ids=["refused", "not read yet", "pool not accepted", "namespace", "no Model"],
)
def test_one_that_cannot_answer_keeps_its_names_and_says_why(changes, pools, models, reason):
    """So that a word which means an adapter never begins to mean a Model."""
    young = ServedModel("chat/young", "u", "chat/young", ("support",), datetime(2026, 10, 1, tzinfo=UTC))
    found = words(adapter(**changes), pools=pools, models={**models, "chat/young": young}, grants=("chat/young",))
    assert set(found.served) == {"chat/young"}
    assert found.waiting["support"] == reason


@pytest.mark.parametrize(
    ("allowed", "reason", "answers"),
    [
        ({"from": "Same"}, "Valid", False),
        ({"from": "All"}, "Valid", True),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "b"}}}, "Valid", True),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "b"}}}, "NamespaceNotAllowed", False),
    ],
)
def test_the_pool_says_from_which_namespaces(allowed: dict, reason: str, answers: bool):
    other = adapter(namespace="team", pool_namespace="chat", reason=reason)
    found = words(other, pools={"chat/pool": pool(allowedNamespaces=allowed)})
    assert ("team/support" in found.served) == answers


def test_one_whose_newer_revision_is_bad_answers_with_the_one_before():
    served = words(adapter(revision=V2, reason="Corrupt")).served["support"]
    assert served.adapter is not None
    assert served.adapter.revision == V2


def test_one_without_a_pool_has_no_names():
    assert words(adapter(), pools={}) == Meant({}, {}, [])


def test_a_list_shows_short_names_and_the_address_of_what_has_none():
    nameless = adapter("other", served=("support",), created="2026-03-01T00:00:00Z")
    found = words(adapter(), nameless, grants=("chat/llama",))
    assert found.listed == [
        ("chat/other", "chat/other"),
        ("llama", "chat/llama"),
        ("support", "chat/support"),
    ]


def test_it_waits_within_the_bounds_of_its_model():
    base = dataclasses.replace(MODEL, kv_percent=55, embeds=True)
    served = words(adapter(), models={MODEL.key: base}).served["support"]
    assert (served.kv_percent, served.embeds, served.limits) == (55, True, base.limits)


def test_one_that_changes_or_goes_leaves_no_name_behind():
    """The index is kept up one object at a time: it must be as if it had been made anew."""
    acme = Identity("acme", None, "key", None, False, False, frozenset())
    index = Words()
    index.set_models(MODELS)
    index.set_pools({"chat/pool": pool()})
    index.put("chat/support", adapter())
    index.put("chat/support", adapter(served=("other",)))
    assert [word for word, _ in index.listed(acme)] == ["other"]
    assert index.find("support", acme) is None
    index.put("chat/support", adapter(tenants=("rival",)))
    assert index.find("chat/support", acme) is None
    assert index.why_not("chat/support", acme) is None
    index.put("chat/support", adapter(uid="made-anew"))
    assert list(index.adapter_uids) == ["made-anew"]
    found = index.find("support", acme)
    assert found is not None
    assert found.adapter is not None
    assert found.adapter.uid == "made-anew"
    index.set_models({MODEL.key: dataclasses.replace(MODEL, kv_percent=33)})
    found = index.find("support", acme)
    assert found is not None
    assert found.kv_percent == 33  # the Model's own changes reach its adapters
    index.retain(())
    assert (index.find("support", acme), list(index.adapter_uids), index.listed(acme)) == (None, [], [])
