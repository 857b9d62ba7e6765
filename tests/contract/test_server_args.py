"""The pinned SGLang's own parser reads what Shoal writes (needs the engine on the CPU: images/engine-cpu)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from shoal.api.model import Model
from shoal.engine.port import EngineLaunch
from shoal.engine.sglang.arguments import arguments_of, check_extra_args
from shoal.engine.sglang.launch import engine_args

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
LANE = ROOT / "images" / "engine-cpu"
VERSION = "0.5.23"

PARSE = """
import json, sys
import serve_sglang_cpu
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
names = ["model_path", "served_model_name", "host", "port", "tp_size", "context_length", "tool_call_parser",
         "reasoning_parser", "enable_metrics", "enable_cache_report", "api_key", "admin_api_key", "mem_fraction_static"]
print("RESULT " + json.dumps({name: getattr(args, name) for name in names}))
"""


def engine_python() -> str:
    """The engine's interpreter. Absent, the lane fails: it was asked for by its marker."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    python = Path(os.environ.get("SHOAL_ENGINE_VENV", cache / "shoal" / "engine-cpu" / "venv")) / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is missing: run images/engine-cpu/install.sh")
    return str(python)


def run_in_engine(*args: str) -> str:
    done = subprocess.run(
        [engine_python(), *args], cwd=LANE, env=os.environ | {"PYTHONPATH": str(LANE)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def parse(*args: str) -> dict[str, object]:
    line = next(line for line in run_in_engine("-c", PARSE, *args).splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_the_committed_table_is_what_this_engine_accepts():
    """Renew it with: python images/engine-cpu/dump_server_args.py > operator/shoal/engine/sglang/sglang_args.json"""
    committed = (ROOT / "operator" / "shoal" / "engine" / "sglang" / "sglang_args.json").read_text()
    assert json.loads(run_in_engine("dump_server_args.py")) == json.loads(committed)


def test_the_engine_understands_every_argument_that_shoal_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tmp_path / "engine.yaml"
    config.write_text("api-key: client-key\nadmin-api-key: admin-key\n")
    monkeypatch.setattr("shoal.api.names.ENGINE_CONFIG_FILE", str(config))
    model = Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "team-a"},
            "spec": {
                "source": {"uri": "file:///models/tiny"},
                "engine": {
                    "contextLength": 4096,
                    "toolCallParser": "qwen25",
                    "reasoningParser": "deepseek-r1",
                    "extraArgs": ["--mem-fraction-static=0.75"],
                },
            },
        }
    )
    assert check_extra_args(VERSION, model.spec.engine.extra_args) == []
    args = engine_args(
        EngineLaunch(
            model, VERSION, model_path="/shoal/models/model", port=30000, gpus=2, platform_args=("--device=cpu",)
        )
    )
    assert parse(*args) == {
        "model_path": "/shoal/models/model",
        "served_model_name": "team-a/chat",
        "host": "0.0.0.0",
        "port": 30000,
        "tp_size": 2,
        "context_length": 4096,
        "tool_call_parser": "qwen25",
        "reasoning_parser": "deepseek-r1",
        "enable_metrics": True,
        "enable_cache_report": True,
        "api_key": "client-key",
        "admin_api_key": "admin-key",
        "mem_fraction_static": 0.75,
    }


def test_the_engine_would_complete_the_abbreviation_that_shoal_refuses():
    parsed = parse("--model-path=/x", "--device=cpu", "--tp=4")
    assert parsed["tp_size"] == 4
    assert check_extra_args(VERSION, ["--tp=4"])


def test_the_table_is_complete():
    table = arguments_of(VERSION)
    assert table is not None
    assert len(table) > 500
