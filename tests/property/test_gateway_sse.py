"""Server-sent events come out the same however the network cuts them, and editing them as bytes equals editing JSON."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.engine.sglang.wire import ModelNameRewriter
from shoal.gateway import sse

TEXT = st.text(max_size=40) | st.sampled_from(
    [
        '"usage":{',
        '"model":"chat/llama"',
        "\\",
        '\\"usage\\":{"a":1}',
        "\r\n\n",
        "data: [DONE]",
        '{"choices":[]}',
        "\x00",
    ]
)


BROKEN: dict[str, Any] = {
    "id": "",
    "object": "chat.completion.chunk",
    "model": "chat/llama",
    "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}],
    "usage": {"prompt_tokens": 0, "completion_tokens": 1, "prompt_tokens_details": None},
}
"""Bytes in its middle come before the name's end: it is no JSON then."""


@st.composite
def chunk(draw: st.DrawFn, usage: bool | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {
        "id": draw(TEXT),
        "object": "chat.completion.chunk",
        "model": "chat/llama",
        "choices": [{"index": 0, "delta": {"content": draw(TEXT)}, "finish_reason": draw(TEXT | st.none())}],
    }
    if draw(st.booleans()) if usage is None else usage:
        n = draw(st.integers(0, 10**9))
        details = draw(st.none() | st.builds(lambda c: {"cached_tokens": c}, st.integers(0, 10**6)))
        event["usage"] = {"prompt_tokens": n, "completion_tokens": 1, "prompt_tokens_details": details}
    if draw(st.booleans()):
        event["sglext"] = {"cached_tokens_details": {"device": 1, "host": 0}}
    return event


def encode(event: dict[str, Any], spaced: bool) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    return b"data: " + json.dumps(event, separators=separators, ensure_ascii=False).encode()


def decode(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))


@given(
    events=st.lists(chunk(), min_size=1, max_size=6),
    ending=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    data=st.data(),
)
def test_events_survive_any_cut(events: list[dict[str, Any]], ending: bytes, data: st.DataObject):
    encoded = [encode(event, False) for event in events]
    wire = b"".join(event + ending * 2 for event in [b": comment", *encoded])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    splitter = sse.Splitter()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        got += splitter.feed(wire[start:end])
    got += splitter.feed(b"\n")  # a CR at the very end waits to see whether a LF follows
    assert got == [b": comment", *encoded]


@given(events=st.lists(chunk(), min_size=1, max_size=4))
def test_byte_by_byte(events: list[dict[str, Any]]):
    encoded = [encode(event, False) for event in events]
    splitter = sse.Splitter()
    wire = b"".join(event + b"\r\n\r\n" for event in encoded) + b"data: unfinished"
    got = [event for n in range(len(wire)) for event in splitter.feed(wire[n : n + 1])]
    assert got == encoded


@given(event=chunk(usage=True), spaced=st.booleans())
def test_usage_is_found_and_taken_out(event: dict[str, Any], spaced: bool):
    raw = encode(event, spaced)
    span = sse.find_usage(raw)
    assert span is not None
    assert json.loads(raw[span[0] : span[1]]) == event["usage"]
    rest = {name: value for name, value in event.items() if name != "usage"}
    assert decode(sse.without_usage(raw, span)) == rest


@given(event=chunk(usage=False), spaced=st.booleans())
def test_text_that_looks_like_usage_is_text(event: dict[str, Any], spaced: bool):
    assert sse.find_usage(encode(event, spaced)) is None
    assert not sse.is_closing_usage(encode(event, spaced))


@given(event=chunk(), word=TEXT, spaced=st.booleans())
def test_only_the_model_changes(event: dict[str, Any], word: str, spaced: bool):
    raw = encode(event, spaced)
    event_with_word = {**event, "model": word}
    assert decode(ModelNameRewriter("chat/llama", word).rewrite(raw)) == event_with_word


def fed(most: int, piece: bytes, limit: int) -> int:
    """Bytes of an event that never ends, until it is refused, or until `most` are kept of it."""
    splitter = sse.Splitter(limit)
    for number in range(most // len(piece)):
        try:
            assert splitter.feed(piece) == []
        except sse.EventTooLarge:
            return (number + 1) * len(piece)
    assert len(splitter._rest) > most // 2
    return most


PIECES = [b"x" * 65_536, b"x\n" * 32_768, b"data: x\r" * 8_192]


@pytest.mark.parametrize("piece", PIECES, ids=["one line", "lines", "carriage returns"])
def test_an_event_without_end_is_refused(piece: bytes):
    assert fed(16 << 20, piece, 1 << 20) <= (1 << 20) + 2 * len(piece)


@pytest.mark.parametrize("piece", PIECES, ids=["one line", "lines", "carriage returns"])
def test_without_the_bound_it_is_kept_for_as_long_as_the_engine_sends(piece: bytes):
    assert fed(16 << 20, piece, 1 << 60) == 16 << 20


class Searched(bytearray):
    """An unfinished event, which counts the bytes that are searched in it."""

    searched = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None, /) -> int:
        self.searched += len(self) - start
        return super().find(sub, start)


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_a_large_event_in_small_reads_is_neither_copied_nor_searched_at_each(ending: bytes):
    splitter = sse.Splitter()
    splitter._rest = rest = Searched()
    event = b"data: " + b"x" * (1 << 20)
    assert splitter.feed(event) == []
    rest.searched = allocated = 0
    tracemalloc.start()
    try:
        for _ in range(1000):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert splitter.feed(b"y") == []
            allocated += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert allocated < 8 << 20, "each read copies what is here"
    assert rest.searched <= 3000, "each read searches what is here"
    got = [whole for n in range(len(ending)) for whole in splitter.feed(ending[n : n + 1])] + splitter.feed(b"z")
    assert got == [event + b"y" * 1000]
    assert splitter.held == 1


def test_usage_that_is_null_is_none():
    assert sse.find_usage(b'data: {"choices":[],"usage":null}') is None


def test_usage_as_first_and_only_member():
    for raw in (
        b'data: {"usage":{"a":1}}',
        b'data: {"usage":{"a":{"b":2}},"x":1}',
        b'data: {"usage": {"a": 1}, "x": 1}',
    ):
        span = sse.find_usage(raw)
        assert span is not None
        assert decode(sse.without_usage(raw, span)) == ({"x": 1} if b'"x"' in raw else {})


@given(
    event=chunk(),
    spaced=st.booleans(),
    ending=st.sampled_from(
        [b"\n\n", b"\n\n", b"\r\n\r\n", b"\n\n\n", b"\n", b"\n\ndata: [DONE]\n\n", b"\n\n: comment\n\n"]
    ),
    inserted=st.sampled_from(
        [b"", b"", b"}", b"\n", b"\n\n", b"\r", b'"usage":{', b',"usage":{"a":1}', b',"usage":5', b'"choices":[]', b"{"]
    ),
    at=st.floats(0, 1),
)
@example(event=BROKEN, spaced=False, ending=b"\n\n", inserted=b'"choices":[]', at=0.5)
def test_the_short_way_of_a_plain_chunk_equals_the_long_way(
    event: dict[str, Any], spaced: bool, ending: bytes, inserted: bytes, at: float
):
    raw = encode(event, spaced)
    place = int(at * len(raw))
    data = raw[:place] + inserted + raw[place:] + ending
    if (found := sse.plain_chunks(data)) is None:
        return
    [long] = sse.Splitter().feed(data)
    span = sse.find_usage(long)
    assert span is not None
    # In JSON, no text and no name holds these bytes: in an event that is none, either way is as good.
    assert sse.payload(long) is None or not sse.is_closing_usage(long)
    assert not sse.is_error(long)
    assert found == (sse.without_usage(long, span) + b"\n\n", long[span[0] : span[1]])


@given(
    events=st.lists(chunk(), min_size=2, max_size=5),
    spaced=st.booleans(),
    between=st.sampled_from([b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n\n\n", b"\n", b"\n\n\n\n"]),
    inserted=st.sampled_from([b"", b"", b"", b"}", b"\n", b"\r", b'"usage":{', b',"usage":{"a":1}', b"{", b"\n\n"]),
    at=st.floats(0, 1),
)
def test_the_short_way_of_several_chunks_equals_the_long_way(
    events: list[dict[str, Any]], spaced: bool, between: bytes, inserted: bytes, at: float
):
    raw = between.join(encode(event, spaced) for event in events)
    place = int(at * len(raw))
    data = raw[:place] + inserted + raw[place:] + b"\n\n"
    if (found := sse.plain_chunks(data, lambda event: b"<" + event)) is None:
        return
    out, usage = b"", b""
    for event in sse.Splitter().feed(data):
        span = sse.find_usage(event)
        assert span is not None
        assert not sse.is_closing_usage(event)
        assert not sse.is_error(event)
        usage = event[span[0] : span[1]]
        out += b"<" + sse.without_usage(event, span) + b"\n\n"
    assert found == (out, usage)


@given(events=st.lists(chunk(usage=False), min_size=1, max_size=4), prompt=st.integers(0, 10**9))
def test_the_engines_usual_chunks_take_the_short_way(events: list[dict[str, Any]], prompt: int):
    usage = {"prompt_tokens": prompt, "completion_tokens": 1, "prompt_tokens_details": None}
    data = b"".join(encode({**event, "usage": usage}, False) + b"\n\n" for event in events)
    found = sse.plain_chunks(data)
    assert found is not None
    assert [decode(event) for event in found[0].split(b"\n\n")[:-1]] == events
    assert json.loads(found[1]) == usage
