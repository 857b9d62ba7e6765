"""Engines of a tiny Whisper: the simulator, or SGLang on the CPU with random weights."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

from tests.support.engines import MODEL, EngineProcess, Kind, make_models, running_engine, sglang_launcher

_HERE = Path(__file__).parent
_ON_A_CPU = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--mm-attention-backend", "sdpa", "--sleep-on-idle",
)  # fmt: skip


@contextlib.contextmanager
def running_speech_engine(kind: Kind, folder: Path, *more: str) -> Generator[EngineProcess]:
    make_models()
    model = folder / "speech-model"
    if kind == "sim":
        shutil.copytree(MODEL, model)
        config = json.loads((model / "config.json").read_text())
        config["architectures"] = ["WhisperForConditionalGeneration"]
        (model / "config.json").write_text(json.dumps(config))
        with running_engine(kind, folder / "run", *more, model=model) as engine:
            yield engine
        return
    python = str(sglang_launcher().parent / "python")
    subprocess.run([python, str(_HERE / "speech_model.py"), str(model)], check=True, timeout=300)
    program = [python, str(_HERE / "vision_launcher.py"), *_ON_A_CPU]
    with running_engine("sglang", folder / "run", *more, model=model, program=program) as engine:
        yield engine
