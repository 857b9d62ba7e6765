"""What the agent learns from an engine, and what it does with answers that make no sense."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp.test_utils import TestServer, unused_port

from shoal.engine import http
from shoal.engine.port import Counters, EngineGarbled, EngineRefused, EngineTimeout, EngineUnreachable, Loads
from shoal.engine.sglang import client as module
from shoal.engine.sglang.client import SGLangClient, parse_counters, parse_loads
from tests.support.fake_engine import FakeEngine, load


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine):
    server = TestServer(engine.app())
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield SGLangClient(session, str(server.make_url("")), api_key="engine-key", admin_key="admin-key")
    await server.close()


async def test_load_is_summed_over_data_parallel_ranks(engine: FakeEngine, client: SGLangClient):
    engine.ranks = [load(running=2, waiting=1, waiting_tokens=40, used=300), load(running=1, used=100)]
    assert await client.loads() == Loads(3, 1, 40, 400, 2000, max_running=64)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ([{"accept_length": 2.5, "accept_rate": 0.4}], 2.5),
        ([{"accept_length": 2.0}, {"accept_length": 3.0}], 2.5),
        ([{"accept_length": 2.0}, None], None),  # a rank that says nothing has no share in a mean
        ([None], None),
        ([{"accept_length": 0.0}], None),
        ([{"accept_length": "2"}], None),
        ([{"accept_length": True}], None),
        ([{"accept_length": 1e300}], None),
        (["fast"], None),
    ],
)
def test_what_speculation_gives_is_read_or_unknown(sections: list[object], expected: float | None):
    rows = [load() | ({} if section is None else {"speculative": section}) for section in sections]
    assert parse_loads(json.dumps({"loads": rows}).encode()).tokens_per_step == expected


async def test_ready_tells_a_stopping_engine_from_a_broken_one(engine: FakeEngine, client: SGLangClient):
    assert await client.ready() is True
    engine.ready = 503
    assert await client.ready() is False
    engine.ready = 500
    with pytest.raises(EngineRefused, match="/ready answered 500"):
        await client.ready()


async def test_a_wrong_key_is_an_error_that_does_not_tell_the_key(engine: FakeEngine, client: SGLangClient):
    engine.key = "another"
    with pytest.raises(EngineRefused) as caught:
        await client.loads()
    assert caught.value.status == 401
    assert "engine-key" not in str(caught.value)


async def test_an_engine_that_hangs_is_a_timeout(
    engine: FakeEngine, client: SGLangClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LOADS_SECONDS", 0.05)
    engine.hang = True
    with pytest.raises(EngineTimeout):
        await client.loads()


async def test_a_closed_port_is_unreachable():
    async with aiohttp.ClientSession() as session:
        client = SGLangClient(session, f"http://127.0.0.1:{unused_port()}", api_key=None, admin_key=None)
        with pytest.raises(EngineUnreachable):
            await client.ready()


async def test_an_endless_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch, client: SGLangClient):
    monkeypatch.setattr(http, "ANSWER_BYTES", 10)
    with pytest.raises(EngineGarbled):
        await client.loads()


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b"{}", b'{"loads": []}', b'{"loads": 3}', b"\xff\xfe", b"[" * 100_000]
)
def test_garbage_for_loads_is_an_error_and_never_zero(body: bytes):
    with pytest.raises(EngineGarbled):
        parse_loads(body)


def test_a_count_that_is_missing_or_senseless_is_unknown():
    body = b'{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": -1, "num_used_tokens": "x"}, {}]}'
    assert parse_loads(body) == Loads(None, None, None, None, None)
    assert parse_loads(b'{"loads": [{"num_running_reqs": 2}]}').running == 2


def test_a_number_that_the_replicas_stream_does_not_take_is_unknown():
    for many in (2**53, 10**400):
        row = {"num_running_reqs": many, "timestamp": many, "max_total_num_tokens": 2**53 - 1}
        loads = parse_loads(json.dumps({"loads": [row]}).encode())
        assert (loads.running, loads.published, loads.kv_tokens_total) == (None, None, 2**53 - 1)
        assert parse_loads(json.dumps({"loads": [row, row]}).encode()).kv_tokens_total is None
    assert parse_counters(b"sglang:prompt_tokens_total 9007199254740992.0").prompt_tokens is None


def test_counters_are_summed_over_their_label_sets():
    text = (
        "# HELP sglang:prompt_tokens_total x\n"
        'sglang:prompt_tokens_total{model_name="a} b",is_streaming="true"} 10.0\n'
        'sglang:prompt_tokens_total{is_streaming="false"} 5.0 1700000000\n'
        "sglang:generation_tokens_total 7.0\n"
        'sglang:generation_tokens_total{x="y"} NaN-ish\n'
    )
    assert parse_counters(text.encode()) == Counters(15, 7)


@pytest.mark.parametrize(
    ("values", "seconds"),
    [(("1.5", "20.25", "0.0"), 21.75), (("0.0", "0.0", "0.0"), 0), (("NaN", "1", "1"), None), (("-5", "1", "1"), None),
     (("1e300", "1", "1"), None), ((), None)],
)  # fmt: skip
def test_the_capture_of_graphs_is_summed_over_its_phases(values: tuple[str, ...], seconds: float | None):
    family = "sglang:startup_cuda_graph_time_seconds"
    lines = [
        f'{family}{{engine_type="unified",model_name="m",phase="{phase}"}} {value}'
        for phase, value in zip(("prefill", "decode", "draft_extend"), values, strict=False)
    ]
    assert parse_counters("\n".join([*lines, ""]).encode()).graph_seconds == seconds


def test_requests_for_answers_are_counted_and_probes_are_not():
    text = (
        'sglang:http_requests_active{endpoint="/metrics",method="GET"} 1.0\n'
        'sglang:http_requests_active{endpoint="/v1/completions",method="POST"} 2.0\n'
        'sglang:http_requests_total{endpoint="/ready",method="GET"} 900.0\n'
        'sglang:http_requests_total{endpoint="/v1/completions",method="POST"} 7.0\n'
        'sglang:http_requests_total{endpoint="/generate",method="PUT"} 1.0\n'
        'sglang:http_responses_total{endpoint="/v1/completions",method="POST",status_code="200"} 5.0\n'
    )
    assert parse_counters(text.encode()) == Counters(None, None, active=2, requests=8)
    # No line of a POST among others: there was none. No line at all: this version does not tell.
    assert parse_counters(text.splitlines()[0].encode()).active == 0
    assert parse_counters(b"").active is None


def test_what_moves_while_an_answer_is_computed_is_read():
    def loads(*ranks: str) -> Loads:
        return parse_loads(f'{{"loads": [{", ".join(ranks)}]}}'.encode())

    moving = '{"total_prefill_uncached_tokens": 100, "decode_moments": [3, 1, 1, 1, 1, 40.0], "timestamp": 20.5}'
    fresh = '{"total_prefill_uncached_tokens": 5, "decode_moments": null, "timestamp": 18}'
    assert loads(moving).computed == 140
    both = loads(moving, fresh)
    assert (both.computed, both.published) == (145, 18.0)
    assert loads(moving, "{}").computed is None
    assert loads('{"total_prefill_uncached_tokens": 5}').computed is None
    assert loads('{"timestamp": "yesterday"}').published is None


def test_a_counter_that_has_not_appeared_is_unknown():
    assert parse_counters(b"sglang:num_running_reqs 1\n") == Counters(None, None)
    assert parse_counters(b"sglang:prompt_tokens_total{} inf\n").prompt_tokens is None


async def test_cancelling_a_call_is_not_an_engine_error(engine: FakeEngine, client: SGLangClient):
    engine.hang = True
    call = asyncio.create_task(client.loads())
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
