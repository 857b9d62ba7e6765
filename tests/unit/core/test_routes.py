"""Which target of a route a request goes to, who may use a route, and whose its names are."""

import collections
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.core.access import KeyIdentity
from shoal.core.routing.affinity import conversation_of
from shoal.core.routing.consent import NO_ADAPTERS, AdapterConsent
from shoal.core.routing.modelindex import ModelIndex, RouteTargets
from shoal.core.routing.routes import (
    DeclaredRoute,
    NoTarget,
    RequestFacts,
    RouteConsent,
    RouteDecision,
    TargetRef,
    decide,
    limited,
    session_of,
)
from tests.support.adapter_agents import adapter, pool
from tests.support.routes import declared, served, target

A, B, C = (TargetRef("Model", f"chat/{name}") for name in "abc")


def route(*rules: dict[str, Any], age: int = 0, **more: Any) -> DeclaredRoute:
    found = declared(*rules, **more)
    return dataclasses.replace(found, created=datetime(2026, 1, 28, tzinfo=UTC) - timedelta(days=age))


def facts(size: int = 100, tenant: str = "acme", endpoint: str = "/v1/chat/completions", **headers: str):
    return RequestFacts(tenant, endpoint, {k.replace("_", "-").encode(): v.encode() for k, v in headers.items()}, size)


def everything(_ref: TargetRef) -> bool:
    return True


def shares(one: DeclaredRoute, usable: Callable[[TargetRef], bool] = everything, count: int = 1000) -> dict[str, int]:
    """Targets of requests whose random numbers are spread evenly."""
    found: collections.Counter[str] = collections.Counter()
    for at in range(count):
        made = decide(one, facts(), usable, (at + 0.5) / count)
        found[made.target.key if isinstance(made, RouteDecision) else made.reason] += 1
    return dict(found)


def test_requests_are_shared_by_weight():
    assert shares(route({"targets": [target("a", 9), target("b", 1)]})) == {"chat/a": 900, "chat/b": 100}
    assert shares(route({"targets": [target("a"), target("b")]})) == {"chat/a": 500, "chat/b": 500}


def test_a_target_that_is_gone_or_has_no_weight_leaves_its_share_to_the_others():
    three = route({"targets": [target("a", 2), target("b", 2), target("c", 0)]})
    assert shares(three) == {"chat/a": 500, "chat/b": 500}
    assert shares(three, lambda ref: ref != A) == {"chat/b": 1000}
    assert shares(three, lambda ref: ref == C) == {"no-target": 1000}


def test_weights_that_sum_to_zero_have_no_target():
    assert shares(route({"targets": [target("a", 0), target("b", 0)]}), count=3) == {"no-target": 3}


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_ends_of_the_random_numbers_have_a_target(draw: float):
    made = decide(route({"targets": [target("a", 1), target("b", 999_999)]}), facts(), everything, draw)
    assert isinstance(made, RouteDecision)


MATCHES: list[tuple[dict[str, Any], RequestFacts, bool]] = [
    ({"headers": [{"name": "x-beta", "value": "1"}]}, facts(x_beta="1"), True),
    ({"headers": [{"name": "x-beta", "value": "1"}]}, facts(x_beta="12"), False),
    ({"headers": [{"name": "x-beta", "type": "Prefix", "value": "1"}]}, facts(x_beta="12"), True),
    ({"headers": [{"name": "x-beta", "value": "1"}]}, facts(), False),
    ({"headers": [{"name": "x-a", "value": "1"}, {"name": "x-b", "value": "1"}]}, facts(x_a="1"), False),
    ({"tenants": ["acme", "other"]}, facts(), True),
    ({"tenants": ["other"]}, facts(), False),
    ({"endpoints": ["/v1/embeddings"]}, facts(), False),
    ({"endpoints": ["/v1/embeddings"]}, facts(endpoint="/v1/embeddings"), True),
    ({"promptBytes": {"atLeast": 100, "lessThan": 101}}, facts(100), True),
    ({"promptBytes": {"lessThan": 100}}, facts(100), False),
    ({"promptTokens": {"atLeast": 25}}, facts(100), True),
    ({"promptTokens": {"atLeast": 26}}, facts(100), False),
    ({"tenants": ["acme"], "promptTokens": {"atLeast": 26}}, facts(100), False),
]


@pytest.mark.parametrize(("match", "request_facts", "holds"), MATCHES)
def test_the_first_rule_that_matches_is_for_the_request(match: dict[str, Any], request_facts: Any, holds: bool):
    one = route({"name": "some", "matches": [match], "targets": [target("a")]}, {"targets": [target("b")]})
    made = decide(one, request_facts, everything, 0.5)
    assert isinstance(made, RouteDecision)
    assert (made.rule, made.target) == (("some", A) if holds else ("default", B))


@pytest.mark.parametrize("kind", ["Exact", "Prefix"])
@pytest.mark.parametrize(("encoding", "holds"), [("utf-8", True), ("latin-1", True), ("utf-16", False)])
def test_a_value_beyond_ascii_is_matched_as_clients_send_it(kind: str, encoding: str, holds: bool):
    header = {"name": "x-team", "type": kind, "value": "Zürich"}
    one = route({"matches": [{"headers": [header]}], "targets": [target("a")]})
    sent = RequestFacts("acme", "/v1/chat/completions", {b"x-team": "Zürich".encode(encoding)}, 1)
    assert isinstance(decide(one, sent, everything, 0.5), RouteDecision) == holds


def test_a_value_that_latin_1_lacks_is_matched_in_utf_8():
    one = route({"matches": [{"headers": [{"name": "x-team", "value": "東京"}]}], "targets": [target("a")]})
    for value, holds in (("東京".encode(), True), (b"Tokyo", False), (b"\xe6", False)):
        sent = RequestFacts("acme", "/v1/chat/completions", {b"x-team": value}, 1)
        assert isinstance(decide(one, sent, everything, 0.5), RouteDecision) == holds


def test_alternatives_and_no_rule():
    one = route({"matches": [{"tenants": ["x"]}, {"tenants": ["acme"]}], "targets": [target("a")]})
    assert isinstance(decide(one, facts(), everything, 0.5), RouteDecision)
    assert decide(one, facts(tenant="y"), everything, 0.5) == NoTarget("no-rule")


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "cookie"])
def test_no_rule_sees_a_key(name: str):
    """An object from before the rule at the API server, or from a cluster without it."""
    one = route({"matches": [{"headers": [{"name": "x-ok", "value": "1"}]}], "targets": [target("a")]})
    (rule,) = one.rules
    header = rule.matches[0].headers[0].model_copy(update={"name": name, "type": "Prefix", "value": "Bearer s"})
    leaky = rule.matches[0].model_copy(update={"headers": (header,)})
    object.__setattr__(rule, "matches", (leaky,))
    sent = RequestFacts("acme", "/v1/chat/completions", {name.encode(): b"Bearer secret"}, 1)
    assert decide(one, sent, everything, 0.5) == NoTarget("no-rule")


def test_without_a_usable_target_the_first_usable_fallback_gets_the_request():
    one = route({"targets": [target("a")], "fallback": {"targets": [target("b"), target("c")], "whenWaitSeconds": 9}})
    made = decide(one, facts(), everything, 0.5)
    assert isinstance(made, RouteDecision)
    assert (made.target, made.fallback, made.leave_seconds) == (A, (B, C), 9)
    made = decide(one, facts(), lambda ref: ref != A, 0.5)
    assert isinstance(made, RouteDecision)
    assert (made.target, made.fallback) == (B, (C,))
    made = decide(one, facts(), lambda ref: ref == C, 0.5)
    assert isinstance(made, RouteDecision)
    assert (made.target, made.fallback) == (C, ())
    assert decide(one, facts(), lambda _: False, 0.5) == NoTarget("no-target", "default")
    assert set(one.references()) == {A, B, C}


# --- sessions ---------------------------------------------------------------------------------------------------------


def sticky(*targets: dict[str, Any]) -> DeclaredRoute:
    return route({"targets": list(targets), "sessionAffinity": {"type": "Header", "header": "x-session"}})


def homes(one: DeclaredRoute, usable: Callable[[TargetRef], bool] = everything, count: int = 2000) -> dict[int, str]:
    found: dict[int, str] = {}
    for at in range(count):
        made = decide(one, facts(x_session=f"s{at}"), usable, 0.5)
        assert isinstance(made, RouteDecision)
        assert made.session
        found[at] = made.target.key
    return found


def test_a_session_keeps_its_target_whatever_the_random_number():
    one = sticky(target("a"), target("b"))
    made = {decide(one, facts(x_session="s"), everything, draw / 10) for draw in range(10)}
    assert len(made) == 1
    assert decide(one, facts(), everything, 0.1) != decide(one, facts(), everything, 0.9), "without one it is drawn"


@pytest.mark.parametrize(
    ("value", "session"),
    [("s", "c8537638ef1397e31d9ab4ada97aa6e7"), ("Zürich", "d74495aef1d7bbb6e93bcf46fd1fee2b"), ("", None)],
)
def test_all_versions_agree_on_a_session(value: str, session: str | None):
    """Otherwise sessions would change their targets with an upgrade, and between gateways while it goes on."""
    one = sticky(target("a"))
    found = session_of(one, one.rules[0], facts(x_session=value))
    assert (found and found.hex()) == session
    assert session_of(one, one.rules[0], facts()) is None


def test_sessions_are_shared_by_weight():
    counts = collections.Counter(homes(sticky(target("a", 3), target("b", 1))).values())
    assert counts["chat/a"] == pytest.approx(1500, abs=90)


def test_a_target_that_goes_moves_only_its_own_sessions_and_gets_them_back():
    three = sticky(target("a"), target("b"), target("c"))
    before, without = homes(three), homes(three, lambda ref: ref != C)
    assert {at for at in before if before[at] != without[at]} == {at for at in before if before[at] == "chat/c"}
    assert homes(three) == before


def test_another_weight_moves_only_what_the_share_grows_by():
    before, after = homes(sticky(target("a", 9), target("b", 1))), homes(sticky(target("a", 8), target("b", 2)))
    moved = {(before[at], after[at]) for at in before if before[at] != after[at]}
    assert moved == {("chat/a", "chat/b")}


def test_two_tenants_share_no_session():
    one = sticky(*(target(name) for name in "abcdefgh"))
    made = {decide(one, facts(tenant=f"t{at}", x_session="s"), everything, 0.5) for at in range(64)}
    assert len(made) > 4


def test_all_turns_of_a_conversation_have_one_beginning():
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    later = [*first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
    assert conversation_of({"messages": first}) == conversation_of({"messages": later})
    assert conversation_of({"messages": first}) != conversation_of({"messages": first[1:]})
    assert conversation_of({"prompt": "x"}) is None
    assert conversation_of({"messages": ["no object"]}) is None


def with_medium(kind: str, medium: dict[str, Any], *texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: medium}, *in_parts(*texts)]}]}


@pytest.mark.parametrize("texts", [(), ("What is this?",)])
@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("image_url", {"url": "data:image/png;base64,AAAA"}, {"url": "data:image/png;base64,AAAB"}),
        ("image_url", {"url": "https://example.com/1"}, {"url": "https://example.com/2"}),
        ("input_audio", {"data": "AAAA", "format": "wav"}, {"data": "AAAB", "format": "wav"}),
        ("file", {"file_data": "JVBERiAA"}, {"file_data": "JVBERiAB"}),
    ],
)
def test_conversations_about_two_images_sounds_or_files_are_two(
    kind: str, one: dict[str, Any], other: dict[str, Any], texts: tuple[str, ...]
):
    first = with_medium(kind, one, *texts)
    later = [*first["messages"], {"role": "assistant", "content": "a fox"}, {"role": "user", "content": "and?"}]
    assert conversation_of(first) == conversation_of({"messages": later})
    assert conversation_of(first) != conversation_of(with_medium(kind, other, *texts))


def in_parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"system": "x" * 5000 + "a"}, {"system": "x" * 5000 + "b"}),
        ({"user": "document " * 10_000 + "Who?"}, {"user": "document " * 10_000 + "When?"}),
        ({"user": in_parts("the document", "Who?")}, {"user": in_parts("the document", "When?")}),
        ({"system": in_parts("be brief", "a")}, {"system": in_parts("be brief", "b")}),
    ],
    ids=["end of the system prompt", "end of the message", "second part", "second part of the system prompt"],
)
def test_conversations_that_differ_late_in_their_beginning_are_two(one: dict[str, Any], other: dict[str, Any]):
    def made(changed: dict[str, Any]) -> str | None:
        said: dict[str, Any] = {"system": "be brief", "user": "hi", **changed}
        return conversation_of({"messages": [{"role": role, "content": content} for role, content in said.items()]})

    assert made(one) == made(dict(one)) != made(other)


def test_a_conversation_of_odd_content_has_a_beginning():
    for content in (None, 7, [None, 3, {"text": 4}, {"type": "image_url"}], "\ud800", {"text": "x"}):
        assert conversation_of({"messages": [{"role": "user", "content": content}]}) is not None


# --- who may use it, and whose its names are --------------------------------------------------------------------------


def identity(*grants: str, routes: RouteConsent | None = None, consent: AdapterConsent = NO_ADAPTERS) -> KeyIdentity:
    return KeyIdentity(
        "acme", None, "key", None, False, False, frozenset(grants), consent, routes=routes or RouteConsent()
    )


def index(*routes: DeclaredRoute, **models: Any) -> ModelIndex:
    found = ModelIndex()
    made = [served(f"chat/{name}") for name in "ab"] + list(models.values())
    found.set_models({one.key: one for one in made})
    for one in routes:
        found.put_route(one.key, one)
    return found


AB = {"targets": [target("a"), target("b")]}


def test_a_route_exists_for_who_may_use_a_target_in_its_namespace():
    found, front = index(route(AB)), route(AB)
    for name in ("front", "chat/front"):
        assert found.meaning(name, identity("chat/a")) == front
        assert found.meaning(name, identity("other/a")) is None
        assert found.meaning(name, identity()) is None
    assert found.target(front, A, identity("chat/a")) is not None
    assert found.target(front, B, identity("chat/a")) is None, "a route grants nothing"


def test_a_route_elsewhere_needs_the_tenants_grant_and_the_targets_consent():
    there = route({"targets": [target("a", namespace="chat")]}, namespace="evil")
    found = index(there)
    assert found.meaning("front", identity("chat/a")) is None
    granted = identity("chat/a", routes=RouteConsent(frozenset({"evil"})))
    assert found.meaning("front", granted) == there
    assert found.target(there, A, granted) is None, "the Model does not list the route's namespace"
    open_model = served("chat/a", route_namespaces=frozenset({"evil"}))
    assert index(there, a=open_model).target(there, A, granted) == open_model
    assert index(there, a=open_model).target(there, A, identity("chat/b", routes=granted.routes)) is None


def test_a_granted_route_by_name_is_that_one_alone():
    one, two = (route({"targets": [target("a", namespace="chat")]}, name=name, namespace="door") for name in "xy")
    named = identity("chat/a", routes=RouteConsent(routes=frozenset({"door/x"})))
    found = index(one, two)
    assert found.meaning("x", named) == one
    assert found.meaning("y", named) is None


def test_a_model_and_an_adapter_come_before_every_route_and_the_older_route_before_the_younger():
    old, young = (route(AB, name=name, age=age, servedNames=["a", "mine"]) for name, age in (("o", 9), ("y", 1)))
    found = index(young, old)
    me = identity("chat/a")
    assert found.find("a", me) == served("chat/a")
    assert found.meaning("mine", me) == old
    assert found.meaning("mine", identity("chat/a")) == old
    found.put_route(old.key, None)
    assert found.meaning("mine", me) == young
    found.put("chat/tuned", adapter("tuned", served=("mine",)))
    found.set_pools({"chat/pool": pool()})
    all_of_chat = AdapterConsent(namespaces=frozenset({"chat"}))
    assert found.meaning("mine", identity("chat/a", consent=all_of_chat)) is None, "its Model is not there"
    assert found.why_not("mine", identity("chat/a", consent=all_of_chat)) == ("chat/tuned", "ModelNotFound")


def test_a_route_outside_the_grants_takes_no_name_however_old():
    mine, theirs = route(AB, age=1), route({"targets": [target("x")]}, namespace="evil", age=20)
    assert index(theirs, mine).meaning("front", identity("chat/a")) == mine


def test_the_list_has_the_names_of_a_route_with_a_target():
    found = index(route(AB, servedNames=["front", "a"]))
    listed = dict(found.listed(identity("chat/a")))
    assert set(listed) == {"a", "front"}
    shown = listed["front"]
    assert isinstance(shown, RouteTargets)
    assert [one.key for one in shown.targets] == ["chat/a"]
    assert found.listed(identity()) == []


def test_a_deleted_route_is_forgotten():
    found = index(route(AB))
    found.retain_routes([])
    assert found.meaning("front", identity("chat/a")) is None
    assert not found.routes


def test_a_mirror_gets_its_share_of_copies_and_never_one_of_its_own_requests():
    one = route({"targets": [target("a"), target("b")], "mirror": {**target("b"), "percent": 30}})
    mirrors: collections.Counter[TargetRef | None] = collections.Counter()
    for at in range(100):
        made = decide(one, facts(), everything, 0.1, mirror_draw=at / 100)
        assert isinstance(made, RouteDecision)
        mirrors[made.mirror] += 1
    assert mirrors == {B: 30, None: 70}
    made = decide(one, facts(), everything, 0.9, mirror_draw=0.0)
    assert isinstance(made, RouteDecision)
    assert (made.target, made.mirror) == (B, None)
    made = decide(one, facts(), lambda ref: ref != B, 0.1, mirror_draw=0.0)
    assert isinstance(made, RouteDecision)
    assert made.mirror is None


def test_each_limit_of_a_request_is_the_smaller_one_and_is_told_whose():
    one = route(AB, limits={"maxOutputTokens": 100, "requestSeconds": 60})
    free, strict = served("chat/a"), served("chat/b", max_output_tokens=50, request_seconds=60.0)
    found = limited(free, one)
    assert (found.max_output_tokens, found.max_output_tokens_route) == (100, "chat/front")
    assert (found.request_seconds, found.request_seconds_route) == (60.0, "chat/front")
    assert found.facts.max_output_tokens == 100, "what a request may ask for in all is bounded by it"
    assert limited(strict, one) is strict, "of equal limits it is the target's"
    assert limited(free, route(AB)) is free


def test_a_target_follows_its_route_and_its_model():
    """Targets with their limits are remembered."""
    me, front = identity("chat/a"), route(AB, limits={"maxOutputTokens": 100})
    found = index(front)

    def most(one: DeclaredRoute) -> int | None:
        model = found.target(one, A, me)
        assert model is not None
        assert model == found.limited_target(one, A)
        return model.max_output_tokens

    assert found.target(front, A, me) is found.target(front, A, me)
    assert most(front) == 100
    found.set_models({**found.models, "chat/a": served("chat/a", max_output_tokens=7)})
    assert most(front) == 7
    lower = route(AB, limits={"maxOutputTokens": 5})
    found.put_route(lower.key, lower)
    assert most(lower) == 5
    assert found.find("chat/a", me) == served("chat/a", max_output_tokens=7), "the Model itself has its own limit"


@pytest.mark.parametrize(
    ("match", "text_bytes", "found"),
    [
        ({"promptTokens": {"atLeast": 1000}}, 3_999, False),
        ({"promptTokens": {"atLeast": 1000}}, 4_000, True),
        ({"promptTokens": {"atLeast": 1000}}, None, True),
        ({"promptBytes": {"atLeast": 4000}}, 3, True),
    ],
)
def test_a_rule_by_tokens_asks_what_a_body_would_be_as_text_and_one_by_bytes_does_not(
    match: dict[str, Any], text_bytes: int | None, found: bool
) -> None:
    """A photo of 2 MB is no long prompt."""
    asked = None if text_bytes is None else lambda: text_bytes
    photo = dataclasses.replace(facts(size=2_000_000), text_bytes=asked)
    made = decide(route({"matches": [match], "targets": [target("a")]}), photo, everything, 0.5)
    assert isinstance(made, RouteDecision) is found
