"""A vLLM engine as Shoal starts it, and what the agent beside it reads and does: on the simulator and on real vLLM."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
import yaml

from shoal.agent.drain import Drain
from shoal.agent.observe import EngineObserver
from shoal.agent.stalls import StallTracker
from shoal.agent.stream import AgentStream
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.engine.port import AdapterRejected, AlreadyLoaded, EngineConnection, EngineLaunch, NotLoaded
from shoal.engine.vllm.kind import VLLM
from shoal.manifests.pod import start_script
from tests.support.controlplane import free_ports
from tests.support.engines import (
    API_KEY,
    MODEL,
    START_SECONDS,
    VLLM_BLOCK,
    VLLM_KV_BYTES,
    Kind,
    make_models,
    vllm_launcher,
)

MODEL_OBJECT = Model.model_validate(
    {
        "metadata": {"name": "tiny", "namespace": "team-a", "uid": "u"},
        "spec": {
            "source": {"uri": "file:///models/tiny"},
            "drainSeconds": 60,
            "engine": {
                "type": "vLLM",
                "contextLength": 2048,
                "extraArgs": [f"--block-size={VLLM_BLOCK}", f"--kv-cache-memory-bytes={VLLM_KV_BYTES}"],
            },
        },
    }
)
POOL = LoRAPool.model_validate(
    {
        "metadata": {"name": "p", "namespace": "team-a"},
        "spec": {"modelRef": {"name": "tiny"}, "maxRank": 5, "slotsPerReplica": 3, "cachedPerReplica": 4},
    }
)
ADAPTERS = MODEL.parents[1] / "adapters"


class Pod:
    """The engine container's process, started by the script of the pod."""

    def __init__(self, kind: Kind, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_models()
        self.kind: Kind = kind
        self.port = free_ports(1)[0]
        config = folder / "engine.yaml"
        config.write_text(yaml.safe_dump(dict(VLLM.pod.keys_file(API_KEY, "unused"))))
        monkeypatch.setattr("shoal.api.names.ENGINE_CONFIG_FILE", str(config))
        args = VLLM.pod.args(
            EngineLaunch(
                MODEL_OBJECT,
                "0.32.0",
                model_path=str(MODEL),
                port=self.port,
                gpus=1,
                platform_args=("--dtype=float32",),
                pool=POOL,
                host="127.0.0.1",
            )
        )
        assert VLLM.pod.extra_args_problems("0.32.0", MODEL_OBJECT.spec.engine.extra_args) == []
        simulated = [sys.executable, "-m", "shoal", "sim", "vllm"]
        program = simulated if kind == "sim-vllm" else [str(vllm_launcher())]
        extra = ["--sim-load-seconds", "0.5"] if kind == "sim-vllm" else []
        files = (str(folder / name) for name in ("boot", "stalled", "drain"))
        script = start_script(*files, repeat=VLLM.pod.repeat_stop_seconds)
        environment = {**VLLM.pod.environment(pool=True), "HOME": str(folder), "TMPDIR": str(folder)}
        self.log = folder / "engine.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["sh", "-c", script, "engine", *program, *args, *extra],
                stdout=out,
                stderr=out,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ended(self, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while self.process.poll() is None:
                await asyncio.sleep(0.1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
async def pod(vllm_kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Pod]:
    pod = Pod(vllm_kind, tmp_path, monkeypatch)
    yield pod
    pod.kill()


def completion(tokens: int, model: str = "team-a/tiny") -> dict[str, object]:
    return {"model": model, "prompt": "one two three", "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def until_ready(engine: EngineConnection, pod: Pod) -> None:
    async with asyncio.timeout(START_SECONDS[pod.kind]):
        while True:
            assert pod.process.poll() is None, pod.log.read_text()[-3000:]
            try:
                if await engine.client.ready():
                    return
            except Exception:
                await asyncio.sleep(0.2)


@pytest.mark.timeout(900)
async def test_the_agent_reads_load_and_counters_and_handles_adapters(pod: Pod) -> None:
    """With the command line, keys, environment and start script of a pod."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession() as session:
        engine = VLLM.agent.connect(session, pod.url, api_key=API_KEY, admin_key=None, max_running=256)
        await until_ready(engine, pod)
        idle = await engine.client.loads()
        assert (idle.running, idle.waiting, idle.active, idle.max_running) == (0, 0, 0, 256)
        assert (idle.kv_tokens_used, idle.kv_tokens_total) == (0, 639 * VLLM_BLOCK)
        first = await engine.client.counters()
        assert (first.active, first.requests) == (0, 0)

        # A request: it is active, it runs, work is done, and the counters tell what was counted.
        async with session.post(pod.url + "/v1/completions", json=completion(400), headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.content.readany()
            async with asyncio.timeout(60):
                while not (busy := await engine.client.loads()).kv_tokens_used:
                    await asyncio.sleep(0.02)
            assert (busy.running, busy.active) == (1, 1)
            assert (busy.computed or 0) > (idle.computed or 0)
            assert (await engine.client.counters()).requests == 1
            await response.read()
        async with asyncio.timeout(30):
            while (after := await engine.client.counters()).active:
                await asyncio.sleep(0.05)
        assert (after.generation_tokens or 0) - (first.generation_tokens or 0) == 400
        assert after.requests == 1

        # A key is needed, and the engine knows no adapter.
        async with session.post(pod.url + "/v1/completions", json=completion(1)) as response:
            assert response.status == 401
        assert await engine.adapters.loaded() == ()
        path = str(next(folder for folder in sorted(ADAPTERS.iterdir()) if folder.is_dir()))
        await engine.adapters.load("team-a.a@0123456789ab", path, seconds=60)
        assert [(each.name, each.path) for each in await engine.adapters.loaded()] == [("team-a.a@0123456789ab", path)]
        with pytest.raises(AlreadyLoaded):
            await engine.adapters.load("team-a.a@0123456789ab", path, seconds=60)
        with pytest.raises(AdapterRejected):
            await engine.adapters.load("team-a.b@0123456789ab", "/nowhere", seconds=60)
        named = completion(3, "team-a.a@0123456789ab")
        async with session.post(pod.url + "/v1/completions", json=named, headers=headers) as response:
            assert response.status == 200
            await response.read()
        await engine.adapters.unload("team-a.a@0123456789ab", seconds=60)
        with pytest.raises(NotLoaded):
            await engine.adapters.unload("team-a.a@0123456789ab", seconds=60)
        async with session.post(pod.url + "/v1/completions", json=named, headers=headers) as response:
            assert response.status == 404


@pytest.mark.timeout(900)
async def test_one_stop_is_enough_and_what_runs_ends_whole(pod: Pod, tmp_path: Path) -> None:
    """The shell repeats the signal; a repeated one cuts nothing."""
    hub = AgentStream()
    observer = EngineObserver(hub, Drain(900), StallTracker(180, tmp_path / "stalled"), tmp_path)
    (tmp_path / "stage.json").write_text('{"state": "done"}')
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession() as session:
        engine = VLLM.agent.connect(session, pod.url, api_key=API_KEY, admin_key=None)
        await until_ready(engine, pod)
        await observer.observe(engine.client)
        assert hub.published.get("phase") == "ready"
        async with session.post(pod.url + "/v1/completions", json=completion(1200), headers=headers) as response:
            await response.content.readany()
            os.kill(pod.process.pid, signal.SIGTERM)
            await asyncio.sleep(1)
            await observer.observe(engine.client)
            # The probe says nothing of the shutdown: only the drain of the agent does.
            assert hub.published.get("phase") == "ready"
            text = (await response.read()).decode()
        assert '"finish_reason":"length"' in text.replace('": "', '":"')
        await pod.ended(90)
        await observer.observe(engine.client)
    assert hub.published.get("phase") == "loading"


@pytest.mark.timeout(900)
async def test_one_stop_is_enough_while_the_engine_loads(pod: Pod) -> None:
    async with asyncio.timeout(START_SECONDS[pod.kind]):
        while pod.kind == "vllm" and "Resolved architecture" not in pod.log.read_text(errors="replace"):
            await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    os.kill(pod.process.pid, signal.SIGTERM)
    await pod.ended(60)
