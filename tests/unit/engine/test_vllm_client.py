"""What the agent learns from a vLLM engine, and what it does with answers that make no sense."""

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from shoal.engine.port import EngineGarbled, EngineRefused, EngineTimeout, EngineUnreachable
from shoal.engine.vllm import client as module
from shoal.engine.vllm.client import VLLMClient, parse_counters, parse_loads

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",kv_cache_size_tokens="1664"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 100.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.79e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 40.0
vllm:estimated_flops_per_gpu_total{engine="0",model_name="tiny"} 3e+20
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 5.0
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 9.0
"""


class Engine:
    """Answers as vLLM 0.32.0 does."""

    def __init__(self) -> None:
        self.health, self.load, self.page, self.hang = 200, "3", PAGE, False

    def app(self) -> web.Application:
        async def health(_: web.Request) -> web.Response:
            return web.Response(status=self.health)

        async def load(_: web.Request) -> web.Response:
            if self.hang:
                await asyncio.sleep(30)
            return web.Response(text=f'{{"server_load":{self.load}}}')

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self.page)

        app = web.Application()
        app.add_routes([web.get("/health", health), web.get("/load", load), web.get("/metrics", metrics)])
        return app


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def client(engine: Engine) -> AsyncGenerator[VLLMClient]:
    server = TestServer(engine.app())
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield VLLMClient(session, str(server.make_url("")), api_key="engine-key", max_running=256)
    await server.close()


async def test_load_is_read_from_the_metrics_page_and_the_http_servers_own_count(client: VLLMClient) -> None:
    loads = await client.loads()
    assert (loads.running, loads.waiting, loads.active, loads.max_running) == (2, 1, 3, 256)
    # Of 13 blocks of 128 tokens one is never given out.
    assert (loads.kv_tokens_used, loads.kv_tokens_total) == (384, 1536)
    assert (loads.waiting_tokens, loads.published) == (None, None)


async def test_requests_received_are_those_answered_and_those_that_run(client: VLLMClient) -> None:
    counters = await client.counters()
    assert (counters.prompt_tokens, counters.generation_tokens) == (100, 40)
    assert (counters.active, counters.requests) == (3, 8)


def test_before_the_first_request_there_was_none() -> None:
    page = "\n".join(line for line in PAGE.splitlines() if not line.startswith("http_requests"))
    assert parse_counters(page.encode(), active=0).requests == 0


def test_work_is_progress_beyond_64_bits_and_without_an_estimate() -> None:
    first = parse_loads(PAGE.encode(), active=0, max_running=None).computed
    later = parse_loads(PAGE.replace("3e+20", "3.000001e+20").encode(), active=0, max_running=None).computed
    assert first is not None
    assert later is not None
    assert later > first
    tokens = "\n".join(line for line in PAGE.splitlines() if "flops" not in line)
    assert parse_loads(tokens.encode(), active=0, max_running=None).computed == 140


@pytest.mark.parametrize(
    ("drafts", "accepted", "expected"),
    [("100.0", "150.0", 2.5), ("100.0", "0.0", 1.0), ("0.0", "0.0", None), ("nan", "1.0", None), ("1.0", "1e+9", None)],
)
def test_what_speculation_gives_is_counted_over_all_ranks(drafts: str, accepted: str, expected: float | None) -> None:
    ranks = "".join(
        f'vllm:spec_decode_num_drafts_total{{engine="{rank}"}} {drafts}\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="{rank}"}} {accepted}\n'
        for rank in (0, 1)
    )
    assert parse_loads((PAGE + ranks).encode(), active=0, max_running=None).tokens_per_step == expected


def test_without_speculation_nothing_is_known_of_it() -> None:
    assert parse_loads(PAGE.encode(), active=0, max_running=None).tokens_per_step is None
    half = PAGE + 'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\n'
    assert parse_loads(half.encode(), active=0, max_running=None).tokens_per_step is None


@pytest.mark.parametrize(
    "page",
    [
        "",
        PAGE.replace('kv_cache_size_tokens="1664"', 'kv_cache_size_tokens="many"'),
        PAGE.replace('kv_cache_size_tokens="1664"', f'kv_cache_size_tokens="{10**17}"'),
        PAGE.replace('tiny"} 0.25', 'tiny"} NaN'),
        PAGE.replace('tiny"} 0.25', 'tiny"} 17'),
        PAGE.replace('block_size="128",', ""),
    ],
)
def test_a_cache_that_a_page_does_not_describe_is_unknown_and_not_empty(page: str) -> None:
    loads = parse_loads(page.encode(), active=0, max_running=None)
    assert (loads.kv_tokens_used, loads.kv_tokens_total) == (None, None)


def test_a_counter_that_is_no_number_is_unknown() -> None:
    loads = parse_loads(PAGE.replace("} 3e+20", "} inf").encode(), active=0, max_running=None)
    assert loads.computed is None
    assert parse_counters(PAGE.replace("} 100.0", "} nan").encode(), active=0).prompt_tokens is None


async def test_a_dead_engine_that_still_answers_counts_as_gone(engine: Engine, client: VLLMClient) -> None:
    assert await client.ready() is True
    engine.health = 503
    with pytest.raises(EngineUnreachable):
        await client.ready()
    engine.health = 500
    with pytest.raises(EngineRefused):
        await client.ready()


@pytest.mark.parametrize("load", ["null", '"3"', "true", "-1"])
async def test_a_load_that_is_none_is_garbled(engine: Engine, client: VLLMClient, load: str) -> None:
    engine.load = load
    with pytest.raises(EngineGarbled):
        await client.loads()


async def test_a_server_that_hangs_is_a_timeout(
    engine: Engine, client: VLLMClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOAD_SECONDS", 0.05)
    engine.hang = True
    with pytest.raises(EngineTimeout):
        await client.loads()


async def test_a_closed_port_is_unreachable() -> None:
    async with aiohttp.ClientSession() as session:
        client = VLLMClient(session, f"http://127.0.0.1:{unused_port()}", api_key=None)
        with pytest.raises(EngineUnreachable):
            await client.ready()
        with pytest.raises(EngineUnreachable):
            await client.loads()


async def test_an_abort_asks_for_nothing_and_never_for_all(client: VLLMClient) -> None:
    await client.abort("chatcmpl-1")
    with pytest.raises(ValueError, match="begins all"):
        await client.abort("")
