"""Engines of a tiny Whisper: the simulator, or SGLang and vLLM on the CPU with random weights."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

from shoal.engine.kinds import KINDS
from tests.support.engines import (
    MODEL,
    VLLM_KINDS,
    EngineProcess,
    Kind,
    make_models,
    running_engine,
    sglang_launcher,
    vllm_launcher,
)

_HERE = Path(__file__).parent
_ON_A_CPU = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--mm-attention-backend", "sdpa", "--sleep-on-idle",
)  # fmt: skip


@contextlib.contextmanager
def running_speech_engine(kind: Kind, folder: Path, *more: str) -> Generator[EngineProcess]:
    make_models()
    if kind in VLLM_KINDS:
        # Each clip of a recording is a request in its queue.
        more = ("--max-num-queued-reqs", "64", *more)
    model = folder / "speech-model"
    if kind in ("sim", "sim-vllm"):
        shutil.copytree(MODEL, model)
        config = json.loads((model / "config.json").read_text())
        config["architectures"] = ["WhisperForConditionalGeneration"]
        (model / "config.json").write_text(json.dumps(config))
        # Its config has none of Whisper's sizes, so a token of it is one of the largest Whisper.
        room = ("--kv-cache-memory-bytes", str(16 << 30)) if kind == "sim-vllm" else ()
        with running_engine(kind, folder / "run", *room, *more, model=model) as engine:
            yield engine
        return
    launcher = vllm_launcher() if kind == "vllm" else sglang_launcher()
    python = str(launcher.parent / "python")
    # vLLM on a CPU needs heads of 32 or more.
    heads = "2" if kind == "vllm" else "4"
    subprocess.run([python, str(_HERE / "speech_model.py"), str(model), heads], check=True, timeout=300)
    if kind == "vllm":
        pod = KINDS["vLLM"].pod.environment(pool=False)
        bounds = {name: value for name, value in pod.items() if name.startswith("VLLM_MAX_AUDIO")}
        with running_engine(kind, folder / "run", *more, model=model, environment=bounds) as engine:
            yield engine
        return
    program = [python, str(_HERE / "vision_launcher.py"), *_ON_A_CPU]
    with running_engine("sglang", folder / "run", *more, model=model, program=program) as engine:
        yield engine
