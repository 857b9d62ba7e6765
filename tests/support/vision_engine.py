"""SGLang on the CPU with a tiny model that reads images (Qwen2-VL, random weights).

`running_vision_engine` makes the model, and starts the engine. The programs beside this file run with the engine's own
Python, in which this project is not installed.
"""

import contextlib
import subprocess
from collections.abc import Generator
from pathlib import Path

from tests.support.engines import MODEL, EngineProcess, make_models, running_engine, sglang_launcher

_HERE = Path(__file__).parent
_ON_A_CPU = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--mm-attention-backend", "sdpa", "--sleep-on-idle",
)  # fmt: skip


@contextlib.contextmanager
def running_vision_engine(folder: Path, *more: str) -> Generator[EngineProcess]:
    python = str(sglang_launcher().parent / "python")
    make_models()
    model = folder / "vision-model"
    subprocess.run([python, str(_HERE / "vision_model.py"), str(MODEL), str(model)], check=True, timeout=300)
    program = [python, str(_HERE / "vision_launcher.py"), *_ON_A_CPU]
    with running_engine("sglang", folder, *more, model=model, program=program) as engine:
        yield engine
