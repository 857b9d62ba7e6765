"""After redaction no match is left: in no text, wherever it stands in a request, an answer or a stream."""

from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.tenant import Redaction, TenantLogging
from shoal.core.access import KeyIdentity
from shoal.core.redaction.content import Content
from shoal.core.redaction.patterns import BUILTIN
from shoal.core.redaction.rules import compile_rules
from shoal.requestlog.capture import OVERHEAD, Capture, CaptureBudget
from shoal.requestlog.entry import Lines, LogEntry

RULES = (
    *(Redaction.model_validate({"name": name.lower(), "builtin": name}) for name in BUILTIN if name != "Secret"),
    Redaction(name="ticket", pattern="ACME-[0-9]+"),
)
SECRETS = (
    "sk-proj-abcdefghijklm0123456789",
    "AKIAIOSFODNN7EXAMPLE",
    "alice@example.org",
    "4111 1111 1111 1111",
    "10.1.2.3",
    "2001:db8::17",
    "+49 30 901820",
    "ACME-4711",
)
around = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
glue = st.sampled_from((" ", "\n", ", ", "<", "\t", "“", "é "))
secrets = st.sampled_from(SECRETS)
texts = st.builds(lambda a, g, s, h, b: a + g + s + h + b, around, glue, secrets, glue, around)


def gone(raw: str) -> bool:
    return not any(secret in raw for secret in SECRETS)


@given(st.lists(st.one_of(texts, around), max_size=5).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_match_is_left_in_a_text(text: str):
    rules = compile_rules(RULES)
    redacted = rules.text(text)
    assert gone(redacted)
    # What stands between the placeholders was found clean where it stood: nothing there matches by itself.
    left = redacted.encode()
    for rule in rules.rules:
        placeholders = [rule.name for rule in rules.rules]
        for start, end in rule.find(left):
            found = left[start:end].decode(errors="replace")
            assert start == end or any(f"[{name}]" in found for name in placeholders), (rule.name, found)


json_values = st.recursive(
    st.one_of(texts, around, st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.just(4111111111111111)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(texts, st.sampled_from(["role", "content", "arguments"])), inner, max_size=3),
        inner.map(lambda value: orjson.dumps(value).decode()),
    ),
    max_leaves=8,
)


@given(json_values)
@settings(max_examples=200, deadline=None)
def test_no_match_is_left_in_a_request_however_deep_it_stands(value: Any):
    logged = Content(compile_rules(RULES), 1 << 20).request({"messages": value, "tools": [value]})
    raw = orjson.dumps(logged).decode()
    assert gone(raw)
    assert gone(raw.replace("\\", ""))
    assert "4111111111111111" not in raw


@given(texts, st.lists(st.integers(1, 12), min_size=1, max_size=8), st.sampled_from(["content", "arguments"]))
@settings(max_examples=200, deadline=None)
def test_a_stream_is_put_together_before_it_is_redacted(text: str, sizes: list[int], where: str):
    logging = TenantLogging(mode="Full", redact=RULES)
    room = CaptureBudget(1 << 20)
    assert room.take(OVERHEAD)
    capture = Capture(room, logging, "", 1 << 20)
    capture.requested(b"{}", {})
    at = 0
    while at < len(text):
        size = sizes[at % len(sizes)]
        piece = text[at : at + size]
        call = {"index": 0, "function": {"arguments": piece}}
        delta = {"content": piece} if where == "content" else {"tool_calls": [call]}
        capture.event(b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}))
        at += size
    line, refusal = Lines(1 << 20).line(LogEntry("acme", logging, {}, capture.take(), capture.size))
    assert refusal is None
    assert gone(orjson.dumps(orjson.loads(line)).decode())
    assert "answer" in orjson.loads(line)


def test_an_identity_without_logging_has_nothing_to_log():
    assert KeyIdentity("acme", None, "prod", None, False, False, frozenset()).logging is None
