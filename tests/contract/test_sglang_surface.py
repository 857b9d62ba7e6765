"""SGLang's probes, keys, facts and load: what the agent relies on."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.conftest import Client
from tests.support.engines import ADMIN_KEY, API_KEY, CONTEXT, MAX_RUNNING, MODEL, SERVED, EngineProcess
from tests.support.shapes import Const, Maybe, mismatch

FAMILIES = json.loads((Path(__file__).parent / "fixtures" / "sglang_metrics.json").read_text())
"""Types, labels and buckets of SGLang 0.5.23, dumped after some traffic."""

RELIED_ON = {
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
    "sglang:kv_used_tokens",
    "sglang:kv_evictable_tokens",
    "sglang:prompt_tokens",
    "sglang:generation_tokens",
    "sglang:cached_tokens",
    "sglang:num_requests",
    "sglang:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:e2e_request_latency_seconds",
    "sglang:queue_time_seconds",
    "sglang:http_requests_active",
}
"""What Shoal and its dashboards read."""

LOADS = {
    "timestamp": str,
    "version": Const("0.5.23"),
    "accelerator": Maybe(str),
    "num_accelerators": int,
    "loads": [
        {
            "timestamp": float,
            "dp_rank": int,
            "num_running_reqs": int,
            "num_waiting_reqs": int,
            "num_waiting_uncached_tokens": int,
            "num_used_tokens": int,
            "num_total_tokens": int,
            "num_active_tokens": int,
            "num_prealloc_ready_tokens": int,
            "max_total_num_tokens": Const(20000),
            "max_running_requests": Const(MAX_RUNNING),
            "token_usage": float,
            "gen_throughput": float,
            "cache_hit_rate": float,
            "utilization": float,
            "total_prefill_uncached_tokens": int,
            "total_prefill_busy_us": int,
            "decode_moments": Maybe([float]),
            "memory": {"weight_gb": float, "kv_cache_gb": float, "graph_gb": float, "token_capacity": Const(20000)},
            "disaggregation": {
                "mode": Const("null"),
                "prefill_bootstrap_queue_reqs": int,
                "prefill_inflight_queue_reqs": int,
                "decode_prealloc_queue_reqs": int,
                "decode_transfer_queue_reqs": int,
                "decode_retracted_queue_reqs": int,
                "kv_transfer_speed_gb_s": float,
                "kv_transfer_latency_ms": float,
            },
            "queues": {"waiting": int, "grammar": int, "paused": int, "retracted": int, "prealloc_ready": int},
        }
    ],
}
CARD = {
    "id": Const(SERVED),
    "object": Const("model"),
    "created": int,
    "owned_by": Const("sglang"),
    "root": Const(SERVED),
    "parent": None,
    "max_model_len": Const(CONTEXT),
}


def test_the_port_is_closed_while_loading_then_unready_then_ready(engine: EngineProcess):
    assert engine.states == ["refused", "503", "200"]


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
async def test_probes_of_a_ready_engine_answer_200_with_no_body(client: Client, path: str):
    answer = await client.get(path)
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    ("path", "method", "open_to"),
    [
        ("/ready", "GET", {None, "wrong", API_KEY, ADMIN_KEY}),
        ("/metrics", "GET", {None, "wrong", API_KEY, ADMIN_KEY}),
        ("/ping", "GET", {API_KEY}),
        ("/", "GET", {API_KEY}),
        ("/v1/models", "GET", {API_KEY}),
        ("/v1/loads", "GET", {API_KEY}),
        ("/model_info", "GET", {API_KEY}),
        ("/server_info", "GET", {API_KEY}),
        ("/flush_cache", "POST", {ADMIN_KEY}),
        ("/abort_request", "POST", {ADMIN_KEY}),
    ],
)
async def test_keys(client: Client, path: str, method: str, open_to: set[str | None]):
    for key in (None, "wrong", API_KEY, ADMIN_KEY):
        answer = await client.call(method, path, {} if method == "POST" else None, key=key)
        if key in open_to:
            assert answer.status == 200, (key, answer)
        else:
            assert (answer.status, answer.json) == (401, {"error": "Unauthorized"}), key


async def test_a_path_that_is_not_there_wants_the_key_first(client: Client):
    assert (await client.get("/nope", key=None)).status == 401
    answer = await client.get("/nope")
    assert (answer.status, answer.json) == (404, {"detail": "Not Found"})
    answer = await client.get("/v1/chat/completions")
    assert (answer.status, answer.json) == (405, {"detail": "Method Not Allowed"})


async def test_models(client: Client):
    answer = (await client.get("/v1/models")).json
    assert mismatch(answer, {"object": Const("list"), "data": [CARD]}) is None
    assert len(answer["data"]) == 1
    assert mismatch((await client.get(f"/v1/models/{SERVED}")).json, CARD) is None
    answer = await client.get("/v1/models/other")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"


async def test_loads(client: Client):
    answer = await client.get("/v1/loads")
    assert mismatch(answer.json, LOADS) is None
    assert (await client.get("/get_load")).status == 404


async def test_loads_count_what_runs_and_what_waits(client: Client):
    for i in range(MAX_RUNNING + 1):
        client.background("/v1/completions", {"prompt": f"number {i}", "max_tokens": 1500, "ignore_eos": True})
        await client.until("one more", lambda load, i=i: load["num_running_reqs"] + load["num_waiting_reqs"] > i)
    # Load is published every few steps: wait until it has caught up.
    await client.until("settled", lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (MAX_RUNNING, 1))
    await client.until("used", lambda load: load["num_used_tokens"] > 0 and load["token_usage"] > 0)
    assert (await client.admin("/abort_request", {"abort_all": True})).status == 200
    await client.idle()


async def test_model_info_names_what_is_served(client: Client):
    info = (await client.get("/model_info")).json
    assert info["model_path"] == str(MODEL)
    assert info["served_model_name"] == SERVED
    assert info["is_generation"] is True
    assert info["model_type"] == "llama"
    assert info["architectures"] == ["LlamaForCausalLM"]


async def test_server_info_tells_the_keys_and_the_real_capacity(client: Client):
    info = (await client.get("/server_info")).json
    assert info["api_key"] == API_KEY
    assert info["admin_api_key"] == ADMIN_KEY
    assert info["served_model_name"] == SERVED
    assert info["tp_size"] == 1
    assert info["version"] == "0.5.23"
    assert info["max_running_requests"] == MAX_RUNNING
    (state,) = info["internal_states"]
    assert state["memory_usage"]["token_capacity"] == 20000
    assert state["effective_max_running_requests_per_dp"] == MAX_RUNNING


async def test_metrics_have_the_names_labels_and_buckets_of_the_real_engine(client: Client):
    for stream in (False, True):
        for _ in range(2):  # the second is answered from the cache
            body = {"prompt": "metrics have names and labels", "max_tokens": 4, "stream": stream}
            assert (await client.post("/v1/completions", body)).status == 200
    text = (await client.get("/metrics", key=None)).body.decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(found) >= RELIED_ON
    ours = {name for name in found if name.startswith("sglang:")}
    if client.engine.kind == "sim":
        assert ours <= set(FAMILIES)
    for name in ours & set(FAMILIES):
        family, known = found[name], FAMILIES[name]
        assert family.type == known["type"], name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(known["labels"]), name
        bounds = {s.labels["le"] for s in family.samples if s.name.endswith("_bucket")}
        assert {float(b) for b in bounds} == {float(b) for b in known.get("buckets", [])}, name
    assert not re.search(r"_created\b", text)
    assert 'model_name="team-a/tiny"' in text


async def test_flushing_the_cache_forgets_prefixes_and_is_refused_while_busy(client: Client):
    body = {"prompt": "a prompt that is worth caching", "max_tokens": 1}
    await client.post("/v1/completions", body)
    await client.idle()
    assert (await client.admin("/flush_cache", {})).status == 200
    usage = (await client.post("/v1/completions", body)).json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    client.background("/v1/completions", {"prompt": "busy", "max_tokens": 1500, "ignore_eos": True, "rid": "busy"})
    await client.until("busy", lambda load: load["num_running_reqs"] == 1)
    assert (await client.admin("/flush_cache", {})).status == 400
    await client.admin("/abort_request", {"rid": "busy"})


async def test_a_paused_engine_is_unready_and_alive(client: Client):
    assert (await client.admin("/pause_generation", {})).json == {
        "message": "Generation paused successfully.",
        "status": "ok",
    }
    assert (await client.get("/ready")).status == 503
    assert (await client.get("/ping")).status == 200
    waiting = client.background("/v1/completions", {"prompt": "wait for it", "max_tokens": 2})
    assert (await client.admin("/continue_generation", {})).status == 200
    assert (await waiting).status == 200
    assert (await client.get("/ready")).status == 200


async def test_adapters_are_refused_without_enable_lora(client: Client):
    answer = await client.admin("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})
    assert answer.status == 400
    assert answer.json == {
        "rid": None,
        "http_worker_ipc": None,
        "success": False,
        "error_message": "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.",
        "loaded_adapters": None,
    }
