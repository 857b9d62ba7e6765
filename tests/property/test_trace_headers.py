"""Whatever a client sends as its trace, what the engine gets is a well-formed one, and nothing else."""

import re

from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from shoal.core.access import KeyIdentity
from shoal.gateway import ids
from shoal.gateway.tracing import Traces

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("test")
IDENTITY = KeyIdentity("acme", None, "prod", None, False, False, frozenset())
LINES = re.compile(
    r"(traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\r\n(tracestate: [\x20-\x7e]{1,512}\r\n)?)?", re.ASCII
)
SAMPLED = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
VALUES = st.none() | st.binary(max_size=80) | st.text("0123456789abcdef-", max_size=60).map(str.encode)
PARENTS = VALUES | st.just(SAMPLED) | st.from_regex(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", fullmatch=True)
STATES = VALUES | st.from_regex(rb"([a-z@*/_-]{0,9}=[ -~]{0,9},?){0,40}", fullmatch=True)


@given(PARENTS, STATES)
@example(SAMPLED, b"a=1\r\nx-evil: yes")
@example(SAMPLED, b"a=1,a=2,=,b")
@example(SAMPLED + b"\n", None)
@example(b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None)
def test_an_engine_gets_a_trace_or_nothing(parent: bytes | None, state: bytes | None):
    headers = {name: value for name, value in ((b"traceparent", parent), (b"tracestate", state)) if value is not None}
    passed_on = ids.trace_lines(headers)
    assert LINES.fullmatch(passed_on)
    own, spans = Traces(TRACER).begin(headers, "/v1/chat/completions", "request", IDENTITY)
    assert own
    assert LINES.fullmatch(own)
    if spans is not None:
        spans.end()
    if passed_on:
        assert own.split("-")[1] == passed_on.split("-")[1]  # the client's trace goes on either way
