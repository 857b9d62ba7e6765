"""SGLang and vLLM on the CPU with a tiny model that reads images (Qwen2-VL, random weights).

`running_vision_engine` makes the model, and starts the engine. The programs beside this file run with the engine's own
Python, in which this project is not installed.
"""

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

from tests.support.engines import (
    MODEL,
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
def running_vision_engine(kind: Kind, folder: Path, *more: str) -> Generator[EngineProcess]:
    """A real engine: the simulator reads no images."""
    launcher = vllm_launcher() if kind == "vllm" else sglang_launcher()
    python = str(launcher.parent / "python")
    make_models()
    model = folder / "vision-model"
    # vLLM on a CPU needs heads of 32 or more.
    heads = "2" if kind == "vllm" else "4"
    subprocess.run([python, str(_HERE / "vision_model.py"), str(MODEL), str(model), heads], check=True, timeout=300)
    program = None if kind == "vllm" else [python, str(_HERE / "vision_launcher.py"), *_ON_A_CPU]
    with running_engine(kind, folder / "run", *more, model=model, program=program) as engine:
        yield engine
