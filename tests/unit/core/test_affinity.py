"""Where prompts go whose beginnings a replica may have in its cache."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.core.fields.mediasize import media_size
from shoal.core.routing.adapterchoice import AdapterCandidate, AdapterChoice, choose_for_adapter
from shoal.core.routing.affinity import HEAD_CHARACTERS, LEAST_CHARACTERS, SLACK, favourite, head_of, prompt_of
from shoal.core.routing.choice import Choice, NoReplica, ReplicaSignal
from tests.support.gateway import replica
from tests.support.pictures import data_url, made
from tests.support.routing import choose

LONG = "You are a helpful assistant. " * 20
PODS = [f"pod-{n}" for n in range(8)]


def chat(*texts: str, system: str = LONG) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *turns]}


def place(head: int, loads: list[int] | None = None, pods: list[str] = PODS) -> str:
    return favourite(head, pods, pods, loads or [0] * len(pods))


def head(tenant: str, fields: dict[str, Any]) -> int:
    found = head_of(tenant, fields)
    assert found is not None
    return found


def test_all_turns_of_a_conversation_have_one_head_and_another_conversation_has_its_own() -> None:
    first = head("acme", chat("What is a shoal?"))
    assert head("acme", chat("What is a shoal?", "A group of fish.", "And a school?")) == first
    assert head("acme", chat("What is a school?")) != first
    assert head("globex", chat("What is a shoal?")) != first  # what others ask tells nothing


def test_questions_on_one_long_document_go_together() -> None:
    document = "All happy families are alike. " * 200
    assert len(document) > HEAD_CHARACTERS
    one, other = ({"messages": [{"role": "user", "content": f"{document}\n{q}"}]} for q in ("Who?", "When?"))
    assert head("acme", one) == head("acme", other)
    assert head("acme", {"prompt": document + "a"}) == head("acme", {"prompt": [document + "b"]})


@pytest.mark.parametrize(
    "fields",
    [
        chat("hi", system="Be brief."),
        {"prompt": "x" * (LEAST_CHARACTERS - 1)},
        {"messages": []},
        {"messages": "no list"},
        {"messages": ["no object" * 100]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}, None, {"type": "text"}]}]},
        {"input": LONG},
        {"prompt": {"no": "text"}},
    ],
)
def test_what_is_short_or_no_text_has_none(fields: dict[str, Any]) -> None:
    assert head_of("acme", fields) is None


def test_text_parts_token_ids_and_lone_surrogates_have_one() -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    assert head_of("acme", {"messages": [{"role": "user", "content": parts}]}) is not None
    assert head_of("acme", {"prompt": list(range(500))}) != head_of("acme", {"prompt": list(range(1, 501))})
    assert head_of("acme", {"prompt": "\ud800" * LEAST_CHARACTERS}) is not None


def seen(*parts: Any, later: Sequence[str] = ()) -> dict[str, Any]:
    turns = [{"role": ("assistant", "user")[n % 2], "content": text} for n, text in enumerate(later)]
    return {"messages": [{"role": "user", "content": list(parts)}, *turns]}


def picture(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url("image/png", made("PNG", 80, 60, seed=seed))}}


def test_all_turns_about_a_picture_go_together_and_those_about_another_one_do_not() -> None:
    what = {"type": "text", "text": "What is this?"}
    first = head("acme", seen(picture(1), what))
    assert head("acme", seen(picture(1), what, later=["A fox.", "What does it do?"])) == first
    assert head("acme", seen(picture(2), what)) != first
    assert head("acme", seen(what, picture(1))) != first  # it begins with other tokens
    assert head("acme", seen(picture(1), {"type": "text", "text": "Which colour?"})) != first
    spoken = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert head("acme", seen(spoken)) != head("acme", seen({**spoken, "input_audio": {"data": "AAAB"}}))


def test_all_texts_of_a_message_belong_to_its_head() -> None:
    parts = [{"type": "text", "text": "Look at this:"}, {"type": "text", "text": LONG}]
    assert head("acme", seen(*parts)) == head("acme", seen({"type": "text", "text": "Look at this:" + LONG}))


def test_a_picture_is_as_long_as_an_engine_reads_it() -> None:
    """Not as its base64: a replica with one photo would look full."""
    fields = seen(picture(1), {"type": "text", "text": "x" * 400}, later=["A fox.", "y" * 40])
    size = media_size(fields)
    assert size.characters > 10_000
    prompt = prompt_of("acme", fields, 500 + 4 * size.tokens, medium=size.each)
    assert prompt.tokens == 125 + size.tokens
    assert prompt.repeated == prompt.tokens - 10  # all but what was asked last
    asked = seen({"type": "text", "text": "x" * 400}, later=["Which?", "y" * 40])
    asked["messages"][-1]["content"] = [picture(1), {"type": "text", "text": "y" * 40}]
    assert prompt_of("acme", asked, 500 + 4 * size.tokens, medium=size.each).repeated == 125 - 10


def test_heads_spread_evenly_and_a_replica_that_goes_moves_only_its_own() -> None:
    heads = [head("acme", chat(f"question {n}")) for n in range(4000)]
    before = [place(h) for h in heads]
    shares = Counter(before)
    assert min(shares.values()) > 400
    assert max(shares.values()) < 600
    left = PODS[:3] + PODS[4:]
    after = [place(h, pods=left) for h in heads]
    assert all(now == then for now, then in zip(after, before, strict=True) if then != PODS[3])


def test_a_head_that_everybody_has_spreads_no_wider_than_its_load_asks_for() -> None:
    one = head("acme", chat("the same"))
    loads = dict.fromkeys(PODS, 0)
    most = 0
    for sent in range(1, 401):
        loads[place(one, list(loads.values()))] += 1
        most = max(most, *loads.values())
        assert max(loads.values()) <= max(SLACK, -(-5 * sent // 32))
        assert sum(load > 0 for load in loads.values()) <= -(-sent // SLACK) + 1
    assert most == 63  # 1.25 times the mean


def test_a_busy_favourite_loses_to_its_second_choice_and_gets_the_head_back() -> None:
    one = head("acme", chat("q"))
    home = place(one)
    busy = [SLACK + 20 if pod == home else 0 for pod in PODS]
    second = place(one, busy)
    assert second != home
    assert second == place(one, pods=[pod for pod in PODS if pod != home])
    assert place(one) == home


def test_the_base_model_is_asked_where_the_head_belongs_and_never_where_it_failed() -> None:
    pods = [replica(n) for n in range(8)]
    heard = {pod.uid: ReplicaSignal("ready", "boot") for pod in pods}
    one = head("acme", chat("q"))
    first = choose(pods, heard, {}, head=one)
    assert isinstance(first, Choice)
    assert all(choose(pods, heard, {}, head=one, turn=turn) == first for turn in range(8))
    other = choose(pods, heard, {}, head=one, tried={first.replica.uid})
    assert isinstance(other, Choice)
    assert other.replica != first.replica
    draining = heard | {first.replica.uid: ReplicaSignal("draining", "boot")}
    assert choose(pods, draining, {}, head=one) == other
    assert choose(pods, heard, {}, head=one, tried={pod.uid for pod in pods}) == NoReplica("tried")


def test_an_adapter_is_asked_where_it_is_loaded_and_of_those_where_the_head_belongs() -> None:
    def home(n: int, *, leased: bool = False, in_flight: int = 0) -> AdapterCandidate:
        return AdapterCandidate(
            replica(n), loaded=True, leased=leased, slot=True, has_capacity=True, in_flight=in_flight
        )

    def go(homes: list[AdapterCandidate], turn: int = 0) -> AdapterChoice:
        found = choose_for_adapter(homes, lambda: (), lambda replicas: replicas[0], turn, one)
        assert isinstance(found, AdapterChoice)
        return found

    one = head("acme", chat("q"))
    homes = [home(n) for n in range(4)]
    chosen = go(homes)
    assert {go(homes, turn) for turn in range(8)} == {chosen}
    other = next(n for n, h in enumerate(homes) if h.replica != chosen.replica)
    leased = [home(n, leased=n == other) for n in range(4)]
    assert go(leased) == AdapterChoice(homes[other].replica, leased=True)  # a lease more takes a slot from others
    assert go([home(n, leased=n == other, in_flight=9 * (n == other)) for n in range(4)]) == chosen
