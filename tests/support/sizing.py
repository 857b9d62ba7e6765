"""Asks SGLang's own code for the figures that sizing computes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.engines import sglang_launcher

_SCRIPT = Path(__file__).with_name("sglang_sizing.py")


def ask_sglang(cases: list[dict[str, Any]], *, registry: bool = False) -> dict[str, Any]:
    """One answer per case under `answers`; with `registry` also what SGLang knows. Raises FileNotFoundError where the
    engine is not installed, RuntimeError with the end of its messages when it fails."""
    venv = sglang_launcher().parents[1]
    env = os.environ | {"PYTHONPATH": str(venv / "share" / "shoal")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [str(venv / "bin" / "python"), str(_SCRIPT)],
        input=json.dumps({"cases": cases, "registry": registry}),
        capture_output=True, text=True, env=env, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.rpartition("\n=====\n")[2])
