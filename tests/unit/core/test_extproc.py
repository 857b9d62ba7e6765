"""The conversation with Envoy: what may be said when, and what of a client's or an engine's message goes on."""

from collections.abc import Callable

import pytest

from shoal.core.extproc import (
    PART_BYTES,
    AnswerMutation,
    BodyPart,
    Conversation,
    Immediate,
    ProtocolBroken,
    RequestMutation,
    State,
    TrailersRemoved,
    endpoint,
    served_of,
    subset_of,
)

HEAD = [
    (b":method", b"POST"),
    (b":path", b"/v1/chat/completions?a=1"),
    (b":authority", b"api.example.com"),
    (b":scheme", b"https"),
    (b"Authorization", b"Bearer sk"),
    (b"cookie", b"a"),
    (b"cookie", b"b"),
    (b"x-gateway-destination-endpoint", b"10.0.0.9:22"),
    (b"content-length", b"2"),
    (b"transfer-encoding", b"chunked"),
]
ANSWER = [(b":status", b"200"), (b"content-type", b"application/json"), (b"server", b"uvicorn"), (b"date", b"now")]
TO_ENGINE = [(b"host", b"10.0.0.1"), (b"authorization", b"Bearer engine"), (b"content-length", b"3")]


def asked(body: bool = True) -> Conversation:
    talk = Conversation()
    talk.request_head(HEAD, not body, {})
    if body:
        talk.request_part(last=True)
    return talk


def forwarded(body: bytes = b"{}") -> Conversation:
    talk = asked()
    list(talk.forward("10.0.0.1:30000", "/v1/chat/completions", TO_ENGINE, body))
    return talk


def answered() -> Conversation:
    talk = forwarded()
    talk.answer_head(ANSWER, False, {})
    return talk


def test_the_head_of_a_request_is_that_of_http_1() -> None:
    head = Conversation().request_head(HEAD, False, {})
    assert (head.method, head.path, head.query) == ("POST", "/v1/chat/completions", b"a=1")
    assert dict(head.headers)[b"host"] == b"api.example.com"
    assert not [name for name, _ in head.headers if name.startswith(b":")]
    assert dict(head.headers)[b"authorization"] == b"Bearer sk"


def test_nothing_of_the_client_goes_on_but_what_belongs_to_the_connection() -> None:
    mutation, part = asked().forward("10.0.0.1:30000", "/v1/chat/completions", TO_ENGINE, b"{}")
    assert isinstance(mutation, RequestMutation)
    assert dict(mutation.set) == {
        b":path": b"/v1/chat/completions",
        b"x-gateway-destination-endpoint": b"10.0.0.1:30000",
        b"authorization": b"Bearer engine",
    }
    assert mutation.remove == (b"cookie",)
    assert part == BodyPart(True, b"{}", True)


def test_nothing_of_the_engine_goes_to_the_client() -> None:
    (mutation,) = answered().begin(200, [(b"content-type", b"application/json"), (b"connection", b"close")])
    assert isinstance(mutation, AnswerMutation)
    assert dict(mutation.set) == {b":status": b"200", b"content-type": b"application/json"}
    assert mutation.remove == (b"server",)


def test_a_body_goes_in_parts_that_envoy_takes() -> None:
    body = b"x" * (2 * PART_BYTES + 1)
    parts = [told for told in asked().forward("a:1", "/", [], body) if isinstance(told, BodyPart)]
    assert [len(part.data) for part in parts] == [PART_BYTES, PART_BYTES, 1]
    assert [part.last for part in parts] == [False, False, True]
    assert b"".join(part.data for part in parts) == body


def test_trailers_are_taken_off_both_messages() -> None:
    talk = Conversation()
    talk.request_head(HEAD, False, {})
    talk.trailers(True, [(b"x-sum", b"1")])
    told = list(talk.forward("a:1", "/", [], b"{}"))
    assert told[1:] == [BodyPart(True, b"{}", False), TrailersRemoved(True, (b"x-sum",))]
    talk.answer_head(ANSWER, False, {})
    list(talk.begin(200, []))
    talk.trailers(False, [(b"grpc-status", b"0")])
    assert list(talk.part(b"", last=True)) == [BodyPart(False, b"", False), TrailersRemoved(False, (b"grpc-status",))]


@pytest.mark.parametrize("talk", [asked, forwarded, answered])
def test_the_gateway_may_answer_itself_until_the_client_has_something(talk: Callable[[], Conversation]) -> None:
    conversation = talk()
    (told,) = conversation.refuse(429, [(b"retry-after", b"1"), (b"content-length", b"2")], b"{}")
    assert told == Immediate(429, [(b"retry-after", b"1")], b"{}")
    assert conversation.state is State.ENDED
    conversation.answer_part(last=True)  # what was on its way
    with pytest.raises(ProtocolBroken):
        list(conversation.refuse(500, [], b""))


def test_a_request_leaves_once_and_whole() -> None:
    talk = Conversation()
    talk.request_head(HEAD, False, {})
    talk.request_part(last=False)
    with pytest.raises(ProtocolBroken):
        list(talk.forward("a:1", "/", [], b""))
    talk.request_part(last=True)
    list(talk.forward("a:1", "/", [], b""))
    with pytest.raises(ProtocolBroken):
        list(talk.forward("b:1", "/", [], b""))


def test_what_comes_out_of_order_is_refused() -> None:
    with pytest.raises(ProtocolBroken):
        Conversation().request_part(last=True)
    with pytest.raises(ProtocolBroken):
        asked().request_part(last=True)
    with pytest.raises(ProtocolBroken):
        asked().request_head(HEAD, False, {})
    with pytest.raises(ProtocolBroken):
        asked().answer_head(ANSWER, False, {})
    with pytest.raises(ProtocolBroken):
        forwarded().answer_part(last=True)
    with pytest.raises(ProtocolBroken):
        forwarded().begin(200, []).__next__()
    with pytest.raises(ProtocolBroken):
        answered().part(b"a", last=False).__next__()
    done = answered()
    done.answer_part(last=True)
    with pytest.raises(ProtocolBroken):
        done.answer_part(last=True)


@pytest.mark.parametrize(
    "head",
    [
        [],
        [(b":path", b"/")],
        [(b":method", b"GET"), (b":path", b"*")],
        [*HEAD, *[(b"x", b"y")] * 300],
    ],
)
def test_a_head_that_is_none_is_refused(head: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ProtocolBroken):
        Conversation().request_head(head, True, {})


def test_an_answer_without_a_status_is_refused() -> None:
    with pytest.raises(ProtocolBroken):
        forwarded().answer_head([(b"content-type", b"x")], True, {})


@pytest.mark.parametrize(
    ("metadata", "subset"),
    [
        ({}, None),
        ({"envoy.lb.subset_hint": {}}, None),
        ({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": []}}, set[str]()),
        ({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.1:80", 3]}}, {"10.0.0.1:80"}),
        ({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": "a:1, b:2"}}, {"a:1", "b:2"}),
        ({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": 7}}, set[str]()),
    ],
)
def test_the_subset_is_what_envoy_names(metadata: dict[str, object], subset: set[str] | None) -> None:
    assert subset_of(metadata) == subset


def test_addresses_and_who_served() -> None:
    assert (endpoint("10.0.0.1", 80), endpoint("fd00::1", 80)) == ("10.0.0.1:80", "[fd00::1]:80")
    assert served_of({"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.1:80"}}) == "10.0.0.1:80"
    assert served_of({"envoy.lb": {"x-gateway-destination-endpoint-served": 1}}) is None
    assert served_of({}) is None
