"""What only vLLM does, and Shoal has to know: what it tells of itself, what is open, and what its adapters do."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.api.artifact import LayerWidths
from shoal.api.lorapool import LINEAR
from shoal.artifacts import ArtifactError, adapter
from shoal.core.fields.table import MOST_STOPS
from shoal.core.lora.format.check import BaseModelFacts, Limits, check_adapter
from shoal.engine.vllm.kind import VLLM
from shoal.engine.vllm.launch import ENVIRONMENT
from tests.contract.conftest import VLLM_KINDS, Client
from tests.support.adapters import make_adapter
from tests.support.behaviour import WORDS
from tests.support.engines import (
    API_KEY,
    LORA_LOADED,
    LORA_RANK,
    MAX_RUNNING,
    SERVED,
    VLLM_BLOCK,
    VLLM_LORA,
    EngineProcess,
    Kind,
    running_engine,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"model": SERVED, "prompt": "go on", "max_tokens": 3000, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
FAMILIES = json.loads((Path(__file__).parent / "fixtures" / "vllm_metrics.json").read_text())
"""Types, labels and buckets of vLLM 0.32.0 with LoRA, dumped after some traffic."""
RELIED_ON = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:prompt_tokens_cached", "vllm:request_success", "vllm:num_preemptions", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:estimated_flops_per_gpu", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
}  # fmt: skip


@pytest.fixture(scope="module", params=VLLM_KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    kind: Kind = request.param
    stops = {name: value for name, value in ENVIRONMENT.items() if "STOP" in name}
    with running_engine(kind, tmp_path_factory.mktemp(f"only-{kind}"), *VLLM_LORA, environment=stops) as process:
        yield process


async def connected(process: EngineProcess) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        client = Client(process, session)
        try:
            yield client
        finally:
            for task in client.tasks:
                task.cancel()
            await asyncio.gather(*client.tasks, return_exceptions=True)


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[Client]:
    async for client in connected(engine):
        await client.settle(0)
        for card in (await client.get("/v1/models")).json["data"][1:]:
            await client.unload_adapter(card["id"])
        yield client


async def text_of_metrics(client: Client) -> str:
    return (await client.get("/metrics", key=None)).body.decode()


# --- what it tells of itself ------------------------------------------------------------------------------------------


def test_metrics_are_there_before_the_first_request(vllm_kind: Kind, tmp_path: Path):
    with running_engine(vllm_kind, tmp_path) as engine:
        shown = subprocess.run(
            ["curl", "-s", engine.url + "/metrics"], capture_output=True, text=True, check=True, timeout=60
        )
    found = {family.name for family in text_string_to_metric_families(shown.stdout)}
    assert found >= RELIED_ON
    assert 'vllm:generation_tokens_total{engine="0",model_name="team-a/tiny"} 0.0' in shown.stdout


async def test_metrics_have_the_names_labels_and_buckets_of_the_real_engine(client: Client):
    for stream in (False, True):
        body = {"prompt": "metrics have names and labels", "max_tokens": 4, "stream": stream}
        assert (await client.post(COMPLETIONS, body)).status == 200
    found = {family.name: family for family in text_string_to_metric_families(await text_of_metrics(client))}
    ours = {name for name in found if name.startswith("vllm:") and not name.endswith("_created")}
    if client.engine.kind == "sim-vllm":
        assert ours <= set(FAMILIES)
    for name in ours & set(FAMILIES):
        family, known = found[name], FAMILIES[name]
        assert family.type == known["type"], name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(known["labels"]), name
        bounds = {float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")}
        assert bounds == {float(bound) for bound in known.get("buckets", [])}, name


async def test_the_size_of_the_cache_is_in_a_label_and_one_block_is_not_usable(client: Client):
    text = await text_of_metrics(client)
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    blocks, block = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    assert (block, blocks) == (VLLM_BLOCK, 640)
    assert int(labels["kv_cache_size_tokens"]) == blocks * block
    # Usage counts in the blocks that can be used, which are whole for each request.
    client.background(COMPLETIONS, LONG | {"prompt": [300] * 100})
    await client.settle(1)
    used = await client.metric("vllm:kv_cache_usage_perc")
    assert used * (blocks - 1) == pytest.approx(round(used * (blocks - 1)), abs=1e-3)
    assert used > 0


async def test_only_load_counts_what_came_since_the_engine_hangs(vllm_kind: Kind, tmp_path: Path):
    """A probe of death: neither it nor the gauges show a scheduler that stands still."""
    with running_engine(vllm_kind, tmp_path) as engine:
        async for client in connected(engine):
            assert (await client.get("/load", key=None)).json == {"server_load": 0}
            await hang(client)
            for _ in range(2):
                client.background(COMPLETIONS, LONG)
            async with asyncio.timeout(20):
                while (await client.get("/load", key=None)).json != {"server_load": 2}:
                    await asyncio.sleep(0.05)
            assert (await client.get("/health", key=None)).status == 200
            assert (await client.running(), await client.waiting()) == (0, 0)


async def hang(client: Client) -> None:
    """The scheduler stands still from now on."""
    if client.engine.kind == "sim-vllm":
        await client.admin("/sim/faults", {"kind": "stall"})
        client.background(COMPLETIONS, SHORT)
        async with asyncio.timeout(20):
            while not (await client.get("/sim/faults")).json["stalled"]:
                await asyncio.sleep(0.02)
        client.tasks.pop().cancel()
        async with asyncio.timeout(20):
            while (await client.get("/load", key=None)).json != {"server_load": 0}:
                await asyncio.sleep(0.02)
        return
    for pid in core_of(client.engine):
        os.kill(pid, signal.SIGSTOP)


def core_of(engine: EngineProcess) -> list[int]:
    """The processes that schedule and compute."""
    group = os.getpgid(engine.process.pid)
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, pgid, name in rows if int(pgid) == group and WORDS["vllm"].core in name]


async def test_what_waits_for_a_slot_is_told_apart(client: Client, tmp_path: Path):
    for i in range(3):
        await client.load_adapter(f"slot{i}", make_adapter(tmp_path / str(i), seed=i))
        client.background(COMPLETIONS, LONG | {"model": f"slot{i}"})
    await client.settle(2, 1)
    text = await text_of_metrics(client)
    assert re.search(r'num_requests_waiting_by_reason\{.*reason="deferred"\} 1\.0', text)
    assert re.search(r'num_requests_waiting_by_reason\{.*reason="capacity"\} 0\.0', text)


async def test_beside_its_slots_the_batch_has_a_limit(client: Client):
    for at in range(MAX_RUNNING + 1):
        client.background(COMPLETIONS, LONG | {"prompt": f"fill {at}"})
    await client.settle(MAX_RUNNING, 1)
    assert re.search(r'num_requests_waiting_by_reason\{.*reason="capacity"\} 1\.0', await text_of_metrics(client))


async def test_what_speculation_gives_is_known_once_something_was_guessed(vllm_kind: Kind, tmp_path: Path):
    guesses = '--speculative-config={"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":1}'
    with running_engine(vllm_kind, tmp_path, guesses) as engine:
        async for client in connected(engine):
            asking = VLLM.agent.connect(client.session, engine.url, api_key=API_KEY, admin_key=None).client
            assert (await asking.loads()).tokens_per_step is None
            assert "vllm:spec_decode_num_drafts_total{" in await text_of_metrics(client)
            body = {"prompt": [300, 301, 302] * 30, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
            assert (await client.post(COMPLETIONS, body)).json["usage"]["completion_tokens"] == 120
            given = (await asking.loads()).tokens_per_step
            if vllm_kind == "vllm":
                assert given is not None
                assert 1 <= given <= 5
            else:
                assert given is None, "the simulator guesses nothing"


# --- what is open -----------------------------------------------------------------------------------------------------


async def test_paths_that_do_not_begin_with_a_version_want_no_key(client: Client, tmp_path: Path):
    for path in ("/health", "/ping", "/metrics", "/version", "/load"):
        assert (await client.get(path, key=None)).status == 200, path
    assert (await client.call("POST", "/tokenize", {"prompt": "hello"}, key=None)).status == 200
    folder = make_adapter(tmp_path / "a")
    answer = await client.call("POST", "/adapters", {"name": "open", "src": str(folder)}, key=None)
    assert answer.status == 200
    assert (await client.post(COMPLETIONS, SHORT | {"model": "open"})).status == 200


async def test_the_key_of_requests_loads_adapters(client: Client, tmp_path: Path):
    """There is no key for the administration: whoever may ask may load."""
    assert (await client.load_adapter("any", make_adapter(tmp_path / "a"))).status == 200


def test_a_config_file_in_one_word_has_no_effect_and_its_keys_none(vllm_kind: Kind, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text("api-key: key-of-another-file\n")
    with running_engine(vllm_kind, tmp_path, f"--config={other}") as engine:
        asked = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", engine.url + "/v1/models"]
        taken = ["-H", "authorization: Bearer key-of-another-file"]
        shown = subprocess.run([*asked, *taken], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "401"


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_other_files_at_the_same_path_under_the_same_name_meet_old_prefixes(client: Client, tmp_path: Path):
    """Why each revision has a path of its own."""
    work = tmp_path / "work"
    body = {"model": "same", "prompt": [340 + (i * 19) % 40 for i in range(100)], "max_tokens": 1}
    cached: list[int] = []
    for seed in (1, 2):
        shutil.rmtree(work, ignore_errors=True)
        make_adapter(work, seed=seed)
        await client.load_adapter("same", work)
        usage = (await client.post(COMPLETIONS, body)).json["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        await client.unload_adapter("same")
    assert cached == [0, 96]


BASE = BaseModelFacts(LayerWidths(layers=2, hidden=64, query=64, key=32, feed_forward=128), 512)
LIMITS = Limits("pool", LORA_RANK, LINEAR, VLLM.pod.adapter_rules)


@pytest.mark.parametrize("what", ["a smaller base", "more layers", "another rank than it says"])
async def test_what_the_engine_takes_and_answers_wrongly_is_refused_before(client: Client, tmp_path: Path, what: str):
    made: dict[str, dict[str, Any]] = {
        "a smaller base": {"widths": {"down_proj": (64, 64)}},
        "more layers": {"layers": 3},
        "another rank than it says": {"rank": LORA_RANK // 2, "config": {"r": LORA_RANK}},
    }
    folder = make_adapter(tmp_path / "a", **made[what])
    assert (await client.load_adapter("wrong", folder)).status == 200
    assert (await client.post(COMPLETIONS, SHORT | {"model": "wrong"})).status == 200
    assert refused(folder)


def refused(folder: Path) -> bool:
    """Whether Shoal's own checks refuse the adapter."""
    try:
        facts = adapter.read_folder(folder, "a", f"sha256:{'0' * 64}")
    except ArtifactError:
        return True
    return check_adapter(facts, LIMITS, BASE) is not None


@pytest.mark.parametrize(
    "made",
    [{"modules": ("q_proj", "o_proj")}, {"modules": ("k_proj", "v_proj")}, {"modules": ("up_proj",)}, {"rank": 5},
     {"config": {"use_rslora": True}}, {"config": {"target_modules": "all-linear"}},
     {"config": {"target_modules": ".*proj"}}, {"config": {"alpha_pattern": {"q_proj": 64}}}],
    ids=lambda made: str(made)[:40],
)  # fmt: skip
async def test_it_takes_parts_of_layers_and_other_ranks_than_its_slots(
    client: Client, tmp_path: Path, made: dict[str, Any]
):
    base = (await client.post(COMPLETIONS, SHORT | {"max_tokens": 12})).json["choices"][0]["text"]
    folder = make_adapter(tmp_path / "a", **made)
    assert not refused(folder), "what the engine serves is not refused before it"
    assert (await client.load_adapter("part", folder)).status == 200
    answer = await client.post(COMPLETIONS, SHORT | {"model": "part", "max_tokens": 12})
    assert answer.json["choices"][0]["text"] != base


async def test_an_evicted_adapter_whose_files_are_gone_ends_the_engine(vllm_kind: Kind, tmp_path: Path):
    """Why files stay for as long as a request can name the adapter: first the unload, then the files."""
    with running_engine(vllm_kind, tmp_path, *VLLM_LORA) as engine:
        async for client in connected(engine):
            names = [f"n{i}" for i in range(LORA_LOADED + 1)]
            for at, name in enumerate(names):
                assert (await client.load_adapter(name, make_adapter(tmp_path / name, seed=at))).status == 200
                assert (await client.post(COMPLETIONS, SHORT | {"model": name})).status == 200
            shutil.rmtree(tmp_path / names[-1])
            # It is in the engine's memory still.
            assert (await client.post(COMPLETIONS, SHORT | {"model": names[-1]})).status == 200
            shutil.rmtree(tmp_path / names[0])
            with contextlib.suppress(aiohttp.ClientError):
                assert (await client.post(COMPLETIONS, SHORT | {"model": names[0]})).status == 500
        assert await asyncio.to_thread(engine.process.wait, 60) == 0


async def test_unloaded_first_an_adapter_whose_files_are_gone_harms_nobody(client: Client, tmp_path: Path):
    names = [f"m{i}" for i in range(LORA_LOADED + 1)]
    for at, name in enumerate(names):
        await client.load_adapter(name, make_adapter(tmp_path / name, seed=at))
    await client.unload_adapter(names[0])
    shutil.rmtree(tmp_path / names[0])
    assert (await client.post(COMPLETIONS, SHORT | {"model": names[0]})).status == 404
    assert (await client.post(COMPLETIONS, SHORT)).status == 200


# --- what it takes ----------------------------------------------------------------------------------------------------


async def test_it_takes_as_many_stops_as_its_environment_says(client: Client):
    for path, body in ((COMPLETIONS, SHORT), (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})):
        for stops, status in ((MOST_STOPS, 200), (MOST_STOPS + 1, 400)):
            answer = await client.post(path, {**body, "model": SERVED, "stop": [f"{n}." for n in range(stops)]})
            assert answer.status == status, (path, stops, answer.body)
