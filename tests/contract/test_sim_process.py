"""What only a real process can show of the simulator: how it dies, and what it says when it cannot start."""

import asyncio
import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.engines import ADMIN_KEY, API_KEY, EngineProcess, command, running_engine

KEY = {"authorization": f"Bearer {API_KEY}"}


async def arm(session: aiohttp.ClientSession, engine: EngineProcess, **fault: Any) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with session.post(engine.url + "/sim/faults", json=fault, headers=headers) as answer:
        assert answer.status == 200


async def stream(session: aiohttp.ClientSession, engine: EngineProcess) -> int:
    """Tokens received, if the stream ends well."""
    body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"continuous_usage_stats": True}}
    tokens = 0
    async with session.post(engine.url + "/v1/completions", json=body, headers=KEY) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return tokens


async def test_broken_connections_and_a_crash(tmp_path: Path):
    with running_engine("sim", tmp_path, "--sim-journal", str(tmp_path / "journal.jsonl")) as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
            await arm(session, engine, kind="close")
            with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
                await stream(session, engine)
            await arm(session, engine, kind="close", after_tokens=5)
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
                await stream(session, engine)
            assert await stream(session, engine) == 40
            await arm(session, engine, kind="crash", after_tokens=5)
            with pytest.raises(aiohttp.ClientError):
                await stream(session, engine)
            assert await asyncio.to_thread(engine.process.wait, 60) == -signal.SIGKILL
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    ended = [(line["outcome"], line["completion_tokens"]) for line in lines if line["event"] == "finished"]
    assert ended == [("close", 0), ("close", 5), ("length", 40)]
    # The one that the engine died of was asked and never ended.
    asked = [line["rid"] for line in lines if line["event"] == "asked"]
    assert len(asked) == 4
    assert asked[3] not in {line.get("rid") for line in lines if line["event"] == "finished"}


def test_sigterm_while_loading_kills_at_once(tmp_path: Path):
    with running_engine("sim", tmp_path, "--sim-load-seconds", "60", wait=False) as engine:
        deadline = time.monotonic() + 90
        while "loading" not in engine.tail():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert engine.ready_state() == "refused"
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(timeout=60) == -signal.SIGTERM


def start(tmp_path: Path, port: int, *more: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "engine.yaml"
    config.write_text("{}")
    return subprocess.run(
        command("sim", port, config, *more), capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path
    )


def test_a_port_that_is_taken_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = start(tmp_path, port)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


def test_a_model_that_does_not_fit_the_gpu_is_refused_in_the_engines_words(tmp_path: Path):
    config = tmp_path / "engine.yaml"
    config.write_text("{}")
    argv = ["--model-path", str(tmp_path), "--sim-gpu", "l4", "--mem-fraction-static", "0.5"]
    program = command("sim", 0, config)[:5]
    done = subprocess.run([*program, *argv], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    assert "Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.5" in done.stderr
