"""Invariant 18: a name reaches a tenant only with the consent of both sides, and who has no consent changes nothing.

Histories of Models, pools and adapters that come, change and go in any order, over few names, so that they collide; one
tenant with any grants. The namespace `evil` is granted by nobody, and may do what it likes: older objects, the same
names, pools and Models of its own, adapters that list the tenant or everyone."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.tenant import Tenant
from shoal.core.access import KeyIdentity, index_keys
from shoal.core.routing.consent import AdapterConsent
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.resolveadapters import DeclaredAdapter, DeclaredPool
from tests.support.adapter_agents import adapter, pool
from tests.support.gateway import tenant

OURS, EVIL = ("chat", "acme"), "evil"
FAR = datetime.max.replace(tzinfo=UTC)
NAMES = ("llama", "support", "legal")
DAYS = st.integers(1, 3).map(lambda day: f"2026-01-0{day}T00:00:00Z")
SERVED = st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple)


@dataclass(frozen=True)
class Event:
    kind: str
    key: str
    made: Any
    """None: it goes."""

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]


@st.composite
def events(draw: st.DrawFn) -> Event:
    namespace, name = draw(st.sampled_from((*OURS, EVIL))), draw(st.sampled_from(NAMES))
    key, kind = f"{namespace}/{name}", draw(st.sampled_from(("model", "pool", "adapter", "adapter", "adapter")))
    if draw(st.integers(0, 5)) == 5:
        return Event(kind, f"{namespace}/pool" if kind == "pool" else key, None)
    created, serial = draw(DAYS), draw(st.integers(0, 99))
    if kind == "model":
        claims = draw(SERVED) or (name,)
        return Event(
            kind, key, ServedModel(key, f"{kind}-{key}-{serial}", key, claims, datetime.fromisoformat(created))
        )
    if kind == "pool":
        allowed: dict[str, Any] = draw(st.sampled_from(({"allowedNamespaces": {"from": "All"}}, {})))
        return Event(kind, f"{namespace}/pool", pool("pool", namespace, model=draw(st.sampled_from(NAMES)), **allowed))
    made = adapter(
        name,
        namespace,
        tenants=draw(st.sampled_from((("acme",), ("*",), ("globex",), ("acme", "*")))),
        created=created,
        served=draw(SERVED),
        # Who is granted may join whom it likes; here it does not choose to trust `evil`.
        pool_namespace=draw(st.sampled_from((*OURS, EVIL) if namespace == EVIL else OURS)),
        uid=f"{kind}-{key}-{serial}",
    )
    return Event(kind, key, made)


@st.composite
def grants(draw: st.DrawFn) -> Tenant:
    keys = [(namespace, name) for namespace in OURS for name in NAMES]
    models = draw(st.lists(st.sampled_from((("chat", "llama"), *keys)), max_size=3, unique=True))
    modes = [draw(st.sampled_from(({}, {"adapters": "Same"}, {"adapters": "None"}))) for _ in models]
    spaces = draw(st.lists(st.sampled_from(OURS), max_size=2, unique=True))
    names = [draw(st.sampled_from(({}, {"names": ["support"]}, {"names": ["llama", "legal"]}))) for _ in spaces]
    spec = {
        "models": [{"namespace": ns, "name": n, **mode} for (ns, n), mode in zip(models, modes, strict=True)],
        "adapters": [{"namespace": ns, **more} for ns, more in zip(spaces, names, strict=True)],
    }
    made = tenant("acme").model_dump(by_alias=True, mode="json", exclude_none=True)
    return Tenant.model_validate({**made, "spec": {**made["spec"], **spec}})


@dataclass
class State:
    models: dict[str, ServedModel]
    pools: dict[str, DeclaredPool]
    adapters: dict[str, DeclaredAdapter]
    index: ModelIndex


def played(history: list[Event]) -> State:
    """What is left of a history, and the index that was kept up with each of its events."""
    state = State({}, {}, {}, ModelIndex())
    for event in history:
        table: dict[str, Any] = {"model": state.models, "pool": state.pools, "adapter": state.adapters}[event.kind]
        if event.made is None:
            table.pop(event.key, None)
        else:
            table[event.key] = event.made
        if event.kind == "model":
            state.index.set_models(dict(state.models))
        elif event.kind == "pool":
            state.index.set_pools(dict(state.pools))
        else:
            state.index.put(event.key, event.made)
    return state


def asked(state: State, identity: KeyIdentity) -> dict[str, Any]:
    """What every name means, what is said of those that do not answer, and what is listed."""
    every = [*NAMES, *(f"{namespace}/{name}" for namespace in (*OURS, EVIL) for name in NAMES)]
    said: dict[str, Any] = {
        word: (state.index.find(word, identity), state.index.why_not(word, identity)) for word in every
    }
    return said | {"listed": state.index.listed(identity)}


def both_agree(spec: Any, state: State, key: str) -> bool:
    """By the words of the specification, without the code that decides it."""
    one = state.adapters[key]
    under = state.pools[one.pool_key].model_key
    granted = {f"{m.namespace}/{m.name}": m.adapters for m in spec.models}
    lists = "acme" in one.tenants or ("*" in one.tenants and under in granted)
    named = any(
        g.namespace == one.namespace and (g.names is None or key.split("/")[1] in g.names) for g in spec.adapters
    )
    return lists and (named or (granted.get(under) == "Same" and under.split("/")[0] == one.namespace))


def began() -> list[Event]:
    """Something to fight over, so that few histories are about nothing."""
    open_to_all: dict[str, Any] = {"allowedNamespaces": {"from": "All"}}
    made = [Event("pool", f"{where}/pool", pool("pool", where, **open_to_all)) for where in (*OURS, EVIL)]
    for where in (*OURS, EVIL):
        key = f"{where}/llama"
        made.append(Event("model", key, ServedModel(key, f"first-{key}", key, ("llama",), None)))
    return made


def check(history: list[Event], who: Tenant) -> None:
    (identity,) = index_keys([who]).values()
    history = [*began(), *history]
    state = played(history)
    said = asked(state, identity)
    for word, (found, _) in ((w, a) for w, a in said.items() if w != "listed"):
        claims = [m for m in state.models.values() if m.key in identity.grants and word in (m.key, *m.claims)]
        if found is None:
            assert not claims, "a Model that is granted always answers to its name"
        elif found.adapter is None:
            assert found.key in identity.grants
            assert found.key == min(claims, key=lambda m: (m.created or FAR, m.uid)).key
        else:
            assert not claims, "a granted Model comes before every adapter"
            assert both_agree(who.spec, state, found.adapter.key)
    # Who was granted nothing may as well not be there.
    harmless = played([event for event in history if event.namespace != EVIL])
    assert asked(harmless, identity) == said
    # The order of events decides nothing but what is there in the end.
    fresh = State(state.models, state.pools, state.adapters, ModelIndex())
    fresh.index.set_pools(state.pools)
    for key in sorted(state.adapters):
        fresh.index.put(key, state.adapters[key])
    fresh.index.set_models(state.models)
    assert asked(fresh, identity) == said


HISTORIES = st.lists(events(), min_size=4, max_size=20)


@settings(deadline=None, max_examples=300)
@given(HISTORIES, grants())
def test_a_name_reaches_a_tenant_only_with_both_consents_and_nobody_else_changes_what_it_means(
    history: list[Event], who: Tenant
):
    check(history, who)


def test_without_the_tenants_consent_the_theft_works_and_is_found(monkeypatch: pytest.MonkeyPatch):
    ours = [Event("model", "chat/llama", ServedModel("chat/llama", "m", "chat/llama", ("llama",), None))]
    ours += [Event("pool", "chat/llama", pool("llama", "chat"))]
    ours += [Event("adapter", "chat/support", adapter(pool="llama", created="2026-01-02T00:00:00Z"))]
    thief = adapter(
        "theft", EVIL, pool="llama", pool_namespace="chat", served=("support",), created="2026-01-01T00:00:00Z"
    )
    history = [*ours, Event("adapter", thief.key, thief)]
    check(history, tenant("acme"))
    monkeypatch.setattr(AdapterConsent, "covers", lambda *_: True)
    monkeypatch.setattr(ModelIndex, "_shared", lambda _self, claims, _identity: list(claims))
    with pytest.raises(AssertionError):
        check(history, tenant("acme"))
