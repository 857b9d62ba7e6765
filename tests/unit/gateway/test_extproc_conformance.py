"""The cases of the Gateway API Inference Extension v1.3.0 (Go module sigs.k8s.io/gateway-api-inference-extension), held
against the gateway's port.

The module has two lists of cases. `test/integration/epp/hermetic_test.go` asks its own endpoint picker by hand; each of
its cases is here, with what a gateway does. `conformance/tests` asks a data plane in a cluster, with a picker that
obeys a header of the test: those are no cases of a picker, and `DATA_PLANE` says where the half of each that a picker
has is tested. The musts of the protocol itself (proposal 004) are in `test_extproc_protocol.py`.
"""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
from google.protobuf.json_format import MessageToDict

from shoal.gateway.extproc.protocol import external_processor_pb2 as pb
from tests.support.gateway import API_KEY
from tests.unit.gateway.test_extproc_protocol import DESTINATION, Caller, Picker, picker

ROOT: Final = Path(__file__).parents[3]
PROMPT: Final = {"max_tokens": 100, "prompt": "test6", "temperature": 0}
ASKED: Final = {"model": "chat/llama", **PROMPT}
CHAT: Final = {"model": "chat/llama", "messages": [{"role": "user", "content": "test6"}]}
ANSWER: Final = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "chat/llama",
    "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17},
}
HINTS: Final = {
    "x-gateway-inference-objective": "other",
    "x-gateway-model-name-rewrite": "other",
    "x-gateway-inference-fairness-id": "other",
    DESTINATION: "127.0.0.1:9",
}
"""Headers by which the module's own picker lets its client choose. Here the client has no say in it."""


@dataclass(frozen=True)
class Refused:
    """An immediate answer, in OpenAI's shape."""

    status: int
    code: str


@dataclass(frozen=True)
class RoutedTo:
    """A replica by its number; 0: any. The engine gets the whole body, for the Model that it names."""

    replica: int = 0


@dataclass(frozen=True)
class Case:
    """`name`: as the module calls it. `body`: None where there is only a head. `subset`: replicas by number; -1: none
    that exists."""

    name: str
    expect: Refused | RoutedTo
    body: tuple[bytes, ...] | None = (json.dumps(ASKED).encode(),)
    headers: dict[str, str] = field(default_factory=dict[str, str])
    subset: tuple[int, ...] | None = None
    replicas: int = 3
    loads: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """By the number of the replica: what its agent says."""
    path: str = "/v1/completions"
    method: str = "POST"


BUSY: Final[dict[str, Any]] = {"running": 8, "waiting": 10, "waiting_tokens": 80_000}
FREE: Final[dict[str, Any]] = {"running": 0, "waiting": 0, "waiting_tokens": 0}
SPLIT: Final = (b'{"max_tokens":100,"model":"chat/ll', b'ama","prompt":"test6","temperature":0}')
REQUESTS: Final = (
    Case("select lower queue and kv cache", RoutedTo(2), loads={1: BUSY, 2: FREE, 3: BUSY}),
    Case("do not shed requests by default", RoutedTo(), loads={1: BUSY, 2: BUSY, 3: BUSY}),
    Case("invalid json body", Refused(400, "invalid_json"), body=(b"no healthy upstream",)),
    Case("split body across chunks", RoutedTo(), body=SPLIT, headers=HINTS),
    Case("no backend pods available", Refused(503, "hold_expired"), replicas=0),
    Case("request missing model field", Refused(400, "missing_model"), body=(b'{"hello":"world"}',)),
    Case("subsetting: select best from subset", RoutedTo(2), subset=(1, 2, 3), loads={1: BUSY, 2: FREE, 3: BUSY}),
    Case("subsetting: partial match", RoutedTo(3), subset=(3,), loads={1: FREE, 2: FREE, 3: BUSY}),
    Case("subsetting: no pods match", Refused(503, "no_replica"), subset=(-1,)),
    Case("passthrough: model not in objectives", RoutedTo(), body=SPLIT, headers=HINTS),
    Case("protocol: simple GET (header only)", Refused(200, ""), body=None, path="/v1/models", method="GET"),
)


@dataclass(frozen=True)
class Answered:
    """A response as the module's cases say it by hand, and what a client gets of it."""

    name: str
    content_type: str
    parts: tuple[bytes, ...]
    expect: Callable[[bytes], bool]
    output: int | None = 10
    """Tokens of the usage record; None: nobody counted them, and the input is estimated."""
    stream: bool = False


def _json(body: bytes) -> bool:
    return json.loads(body) == ANSWER


_WHOLE: Final = json.dumps(ANSWER).encode()
_USAGE: Final = (
    b'data: {"usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10},"choices":[]}\n\ndata: [DONE]\n\n'
)
RESPONSES: Final = (
    Answered("response buffering: multi-chunk JSON", "application/json", (_WHOLE[:40], _WHOLE[40:]), _json),
    Answered("response buffering: empty EOS chunk (JSON)", "application/json", (_WHOLE, b""), _json),
    # It is no answer of an engine: the estimate of its input counts.
    Answered(
        "response buffering: invalid JSON",
        "application/json",
        (b"no healthy upstream",),
        lambda body: body == b"no healthy upstream",
        output=None,
    ),
    Answered(
        "response streaming: SSE token counting",
        "text/event-stream",
        (b'data: {"choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}\n\n', _USAGE, b""),
        # Nobody asked for the usage, so it is counted and not passed on.
        lambda body: body.endswith(b"data: [DONE]\n\n") and b"usage" not in body,
        stream=True,
    ),
)
OTHERWISE: Final = {
    "rewrite request model": (
        "No client and no other object rewrites a Model's name: names are those of Models, adapters and ModelRoutes.",
        "tests/unit/gateway/test_extproc_envoy.py::test_an_adapter_is_leased_and_named_to_the_engine",
    ),
    "select active lora, low queue": (
        "An adapter's lease says where it is loaded, so no metrics of engines are read for it.",
        "tests/unit/gateway/test_extproc_envoy.py::test_an_adapter_is_leased_and_named_to_the_engine",
    ),
    "select lora despite higher kv cache (affinity)": (
        "The same; the score in seconds decides whether a load elsewhere costs less.",
        "tests/unit/gateway/test_extproc_envoy.py::test_an_adapter_is_leased_and_named_to_the_engine",
    ),
}
"""Cases of the module with another answer here: why, and the test that holds it."""
HERE: Final = "tests/unit/gateway/test_extproc_conformance.py"
ENVOY: Final = "tests/unit/gateway/test_extproc_envoy.py"
DATA_PLANE: Final = {
    "EppUnAvailableFailOpen": (
        "tests/unit/gateway/test_sidecar_proxies.py"
        "::test_a_filter_that_fails_open_gets_nothing_from_an_engine_that_its_client_chose"
    ),
    "GatewayDestinationEndpointServed": f"{HERE}::test_the_endpoint_that_served_is_taken_note_of",
    "GatewayFollowingEPPRouting": f"{ENVOY}::test_a_chat_completion_is_answered_and_metered_once",
    "GatewayFollowingEPPRoutingWithDataParallelism": None,
    "GatewayWeightedAcrossTwoInferencePools": None,
    "HTTPRouteInvalidInferencePoolRef": None,
    "HTTPRouteMultipleGatewaysDifferentPools": None,
    "HTTPRouteMultipleRulesDifferentPools": None,
    "InferencePoolAccepted": None,
    "InferencePoolHTTPRoutePortValidation": None,
    "InferencePoolInvalidEPPService": None,
    "InferencePoolResolvedRefsCondition": None,
}
"""Tests of the conformance suite: where the picker's half of it is held; None: all of it is the data plane's."""


@pytest.mark.parametrize("case", REQUESTS, ids=[case.name for case in REQUESTS])
async def test_a_request_of_the_module_gets_what_the_protocol_asks_for(tmp_path: Path, case: Case) -> None:
    async with picker(tmp_path, engines=3, hold_seconds=0.1) as it:
        for number in (n for n in (1, 2, 3) if n > case.replicas):
            del it.it.pods[f"chat/llama-{number}"]
        it.it.changed()
        for number, load in case.loads.items():
            it.it.hear(number, **load, kv_tokens_used=1_000, kv_tokens_total=100_000, max_running=64)
        caller = Caller(it.channel)
        await say(caller, case, it)
        if isinstance(case.expect, Refused):
            told = (await caller.hear()).immediate_response
            body = json.loads(told.body)
            assert (told.status.code, body.get("error", {}).get("code", "")) == (case.expect.status, case.expect.code)
            return
        told = await caller.hear()
        endpoint = MessageToDict(told.dynamic_metadata)["envoy.lb"][DESTINATION]
        wanted = {it.endpoint(case.expect.replica)} if case.expect.replica else {it.endpoint(n) for n in (1, 2, 3)}
        assert endpoint in wanted
        headers = told.request_headers.response.header_mutation
        said = {each.header.key: each.header.raw_value.decode() for each in headers.set_headers}
        assert said[DESTINATION] == endpoint
        assert set(case.headers) <= {*headers.remove_headers, *said}  # none of the client's goes on
        assert not set(case.headers) - {DESTINATION} & said.keys()
        sent = await body_of(caller, "request_body")
        assert {name: json.loads(sent)[name] for name in ASKED} == ASKED


async def say(caller: Caller, case: Case, it: Picker) -> None:
    first = pb.ProcessingRequest()
    values = {":method": case.method, ":path": case.path, "authorization": f"Bearer {API_KEY}", **case.headers}
    for name, value in values.items():
        first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    first.request_headers.end_of_stream = case.body is None
    if case.subset is not None:
        hint: Any = first.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        listed = [it.endpoint(number) if number > 0 else "127.0.0.99:8000" for number in case.subset]
        hint.update({"x-gateway-destination-endpoint-subset": listed})
    await caller.call.write(first)
    parts = case.body or ()
    for at, part in enumerate(parts, 1):
        last = at == len(parts)
        await caller.call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=part, end_of_stream=last)))


async def body_of(caller: Caller, kind: str) -> bytes:
    """The whole body of the request or of the answer, as Envoy passes it on."""
    found = b""
    while True:
        told = await caller.hear()
        assert told.WhichOneof("response") == kind
        streamed = getattr(told, kind).response.body_mutation.streamed_response
        found += streamed.body
        if streamed.end_of_stream:
            return found


async def sent_on(caller: Caller, body: dict[str, Any]) -> str:
    """Asks, and takes what Envoy would send to the replica; the replica's endpoint."""
    await caller.ask(json.dumps(body).encode())
    endpoint, _ = await caller.picked()
    await body_of(caller, "request_body")
    return endpoint


async def answered(caller: Caller, content_type: str, parts: tuple[bytes, ...], served: str | None = None) -> None:
    """Says what came from the replica."""
    head = pb.ProcessingRequest()
    for name, value in {":status": "200", "content-type": content_type}.items():
        head.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    if served is not None:
        told: Any = head.metadata_context.filter_metadata["envoy.lb"]
        told.update({"x-gateway-destination-endpoint-served": served})
    await caller.call.write(head)
    for at, part in enumerate(parts, 1):
        last = at == len(parts)
        await caller.call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=part, end_of_stream=last)))


@pytest.mark.parametrize("case", RESPONSES, ids=[case.name for case in RESPONSES])
async def test_a_response_of_the_module_reaches_the_client_and_is_counted(tmp_path: Path, case: Answered) -> None:
    async with picker(tmp_path, engines=1) as it:
        caller = Caller(it.channel)
        await sent_on(caller, {**CHAT, "stream": case.stream})
        await answered(caller, case.content_type, case.parts)
        assert (await caller.hear()).WhichOneof("response") == "response_headers"
        assert case.expect(await body_of(caller, "response_body"))
        (record,) = await it.it.records()
        data = record.data
        source = "estimated" if case.output is None else "final"
        assert (data.outcome, data.output_tokens, data.count_source) == ("answered", case.output, source)
        assert data.input_tokens == 7 or source == "estimated"


async def test_the_endpoint_that_served_is_taken_note_of(tmp_path: Path) -> None:
    """A data plane that goes to another endpoint by itself is set up wrongly, and somebody has to know."""
    with structlog.testing.capture_logs() as logs:
        async with picker(tmp_path, engines=1) as it:
            for elsewhere in (False, True):
                caller = Caller(it.channel)
                endpoint = await sent_on(caller, CHAT)
                await answered(caller, "application/json", (_WHOLE,), "127.0.0.1:9" if elsewhere else endpoint)
                await caller.hear()
                await body_of(caller, "response_body")
            assert len(await it.it.records(count=2)) == 2
    told = [(line["picked"], line["served"]) for line in logs if "another endpoint" in line["event"]]
    (picked,) = told
    assert picked[1] == "127.0.0.1:9" != picked[0]


def test_every_case_is_here_or_says_which_test_holds_it() -> None:
    listed = [case.name for case in (*REQUESTS, *RESPONSES)] + list(OTHERWISE)
    assert len(listed) == len(set(listed)) == 18  # of hermetic_test.go
    assert len(DATA_PLANE) == 12
    for place in [held for _, held in OTHERWISE.values()] + [held for held in DATA_PLANE.values() if held]:
        file, _, name = place.partition("::")
        tests = {
            node.name
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in tests, place
