"""Asks the engines' own code for the figures that sizing computes."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.engines import sglang_launcher, vllm_launcher

_SGLANG = Path(__file__).with_name("sglang_sizing.py")
_VLLM = Path(__file__).with_name("vllm_sizing.py")


def ask_sglang(cases: list[dict[str, Any]], *, registry: bool = False) -> dict[str, Any]:
    """One answer per case under `answers`; with `registry` also what SGLang knows. Raises FileNotFoundError where the
    engine is not installed, RuntimeError with the end of its messages when it fails."""
    venv = sglang_launcher().parents[1]
    question = {"cases": cases, "registry": registry}
    return _ask(_SGLANG, venv, question, {"PYTHONPATH": str(venv / "share" / "shoal")})


def ask_vllm(cases: Sequence[Mapping[str, Any]], gpus: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """One answer per case under `capacities`, one per GPU (GiB, name) under `batches`, and the `capabilities` of
    quantizations. Raises as `ask_sglang`."""
    return _ask(_VLLM, vllm_launcher().parents[1], {"cases": cases, "gpus": gpus}, {"VLLM_NO_USAGE_STATS": "1"})


def _ask(script: Path, venv: Path, question: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    env = os.environ | environment
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [str(venv / "bin" / "python"), str(script)],
        input=json.dumps(question), capture_output=True, text=True, env=env, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.rpartition("\n=====\n")[2])
