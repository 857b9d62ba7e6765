"""Which adapter a word means, and who may use it."""

import dataclasses
import functools
from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.core.access import KeyIdentity
from shoal.core.routing.consent import NO_ADAPTERS, AdapterConsent
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.resolveadapters import DeclaredAdapter
from tests.support.adapter_agents import V1, V2, adapter, name_of, pool
from tests.support.gateway import MODEL

MODELS = {MODEL.key: MODEL}
OLDER = "2025-06-01T00:00:00Z"


@dataclasses.dataclass
class Meant:
    served: dict[str, ServedModel]
    waiting: dict[str, str]
    listed: list[tuple[str, str]]


ALL_OF_CHAT = AdapterConsent(namespaces=frozenset({"chat"}))


def words(
    *adapters: DeclaredAdapter,
    tenant: str = "acme",
    grants: tuple[str, ...] = (),
    consent: AdapterConsent = ALL_OF_CHAT,
    models=MODELS,
    pools=None,
) -> Meant:
    """What every word means that anybody claims."""
    identity = KeyIdentity(tenant, None, "key", None, False, False, frozenset(grants), consent)
    index = ModelIndex()
    index.set_models(models)
    index.set_pools({"chat/pool": pool()} if pools is None else pools)
    for one in adapters:
        index.put(one.key, one)
    claimants = [*models.values(), *adapters]
    claimed = {word for one in claimants for word in (one.key, *one.claims)}
    served = {word: found for word in claimed if (found := index.find(word, identity)) is not None}
    waiting = {word: found.reason for word in claimed if (found := index.why_not(word, identity)) is not None}
    assert not served.keys() & waiting.keys()
    return Meant(
        served,
        waiting,
        [(word, found.address) for word, found in index.listed(identity) if isinstance(found, ServedModel)],
    )


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


@pytest.mark.parametrize("created", [OLDER, "2026-03-01T00:00:00Z"])
def test_a_granted_model_comes_before_every_adapter_however_old(created: str):
    taken = adapter(served=("llama",), created=created)
    assert words(taken, grants=("chat/llama",)).served["llama"].adapter is None
    assert words(taken).served["llama"].address == "chat/support"  # the Model is nothing to this tenant
    namesake = adapter("llama", created=created)
    assert words(namesake, grants=("chat/llama",)).served["chat/llama"].adapter is None
    assert words(namesake).served["chat/llama"].adapter is not None


PICKY = AdapterConsent(adapters=frozenset({"team/support"}))
BY_MODEL = AdapterConsent(models=frozenset({"chat/llama"}))


@pytest.mark.parametrize(
    ("consent", "reached"),
    [
        (NO_ADAPTERS, set()),
        (ALL_OF_CHAT, {"chat/support"}),
        (PICKY, {"team/support"}),
        (BY_MODEL, {"chat/support"}),  # of the Model's own namespace, and no other
        (AdapterConsent(models=frozenset({"chat/other"})), set()),
        (AdapterConsent(namespaces=frozenset({"team"})), {"team/support", "team/other"}),
    ],
)
@pytest.mark.parametrize("lists", ["acme", "*"])
def test_an_adapter_is_used_where_the_tenant_grants_it_and_it_lists_the_tenant(consent, reached, lists: str):
    declared = [
        adapter("support", tenants=(lists,)),
        adapter("support", "team", tenants=(lists,), pool_namespace="chat", created=OLDER),
        adapter("other", "team", tenants=(lists,), pool_namespace="chat"),
        adapter("foreign", "team", tenants=("globex",), pool_namespace="chat"),
        adapter("strange", "chat", tenants=("globex",)),
    ]
    pools = {"chat/pool": pool(allowedNamespaces={"from": "All"})}
    grants = ("chat/llama",) if lists == "*" else ()
    found = words(*declared, pools=pools, consent=consent, grants=grants)
    assert {one.address for one in found.served.values() if one.adapter} == reached
    assert {address for _, address in found.listed} - {"chat/llama"} == reached
    assert not found.waiting


@pytest.mark.parametrize("tenants", [("acme",), ("*",), ("acme", "*")])
def test_an_adapter_nobody_gave_me_takes_no_name_from_me(tenants: tuple[str, ...]):
    """The theft: whoever can write a LoRAAdapter anywhere lists a tenant, and is older."""
    thieves = [
        adapter("thief", "evil", served=("support", "llama"), created=OLDER, tenants=tenants, pool_namespace="chat"),
        # With a pool and a Model of its own, it needs nobody's leave.
        adapter("own", "evil", served=("support", "llama"), created=OLDER, tenants=tenants),
    ]
    pools = {"chat/pool": pool(allowedNamespaces={"from": "All"}), "evil/pool": pool(namespace="evil")}
    rogue = ServedModel("evil/llama", "uid-evil", "evil/llama", ("support", "llama"), datetime(2025, 1, 1, tzinfo=UTC))
    models = {**MODELS, rogue.key: rogue}
    known = functools.partial(words, models=models, pools=pools, grants=("chat/llama",))
    alone, beside = known(adapter(), consent=BY_MODEL), known(adapter(), *thieves, consent=BY_MODEL)
    assert alone == beside
    assert beside.served["support"].address == "chat/support"
    # With the tenant's half of the consent switched off it works.
    trusting = AdapterConsent(namespaces=frozenset({"chat", "evil"}))
    stolen = known(adapter(), *thieves, consent=trusting)
    assert stolen.served["support"].address.startswith("evil/")


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
    """So that a word which means an adapter never begins to mean another one."""
    young = ServedModel("chat/young", "u", "chat/young", ("support",), datetime(2026, 10, 1, tzinfo=UTC))
    consent = AdapterConsent(namespaces=frozenset({"chat", "team"}))
    models = {**models, "chat/young": young}
    found = words(adapter(**changes), pools=pools, models=models, consent=consent)
    assert not found.served
    assert found.waiting["support"] == reason
    # A Model that the tenant was granted has the name in any case.
    assert (
        words(adapter(**changes), pools=pools, models=models, consent=consent, grants=("chat/young",))
        .served["support"]
        .adapter
        is None
    )


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
    consent = AdapterConsent(namespaces=frozenset({"team"}))
    found = words(other, pools={"chat/pool": pool(allowedNamespaces=allowed)}, consent=consent)
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
    base = dataclasses.replace(MODEL, kv_percent=55, capabilities=frozenset({"embed"}))
    served = words(adapter(), models={MODEL.key: base}).served["support"]
    assert (served.kv_percent, served.capabilities, served.limits) == (55, {"embed"}, base.limits)


def test_one_that_changes_or_goes_leaves_no_name_behind():
    """The index is kept up one object at a time: it must be as if it had been made anew."""
    acme = KeyIdentity("acme", None, "key", None, False, False, frozenset(), ALL_OF_CHAT)
    index = ModelIndex()
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


def test_what_others_claim_costs_a_request_nothing(monkeypatch: pytest.MonkeyPatch):
    """20,000 adapters of somebody that claim a name would else be looked at by each request for it."""
    looked: list[object] = []
    granted = ModelIndex._granted

    def counted(self: ModelIndex, claim: Any, identity: KeyIdentity) -> bool:
        looked.append(claim)
        return granted(self, claim, identity)

    monkeypatch.setattr(ModelIndex, "_granted", counted)
    acme = KeyIdentity("acme", None, "key", None, False, False, frozenset({"chat/llama"}), BY_MODEL)
    index = ModelIndex()
    index.set_models(MODELS)
    index.set_pools({"chat/pool": pool(), "evil/pool": pool(namespace="evil")})
    index.put("chat/support", adapter())
    for number in range(300):
        index.put(f"evil/{number}", adapter(str(number), "evil", served=("support", "llama"), created=OLDER))
    for word, address in (("support", "chat/support"), ("llama", "chat/llama")):
        looked.clear()
        found = index.find(word, acme)
        assert found is not None
        assert found.address == address
        assert len(looked) == 1
    looked.clear()
    assert [word for word, _ in index.listed(acme)] == ["llama", "support"]
    assert len(looked) < 10
