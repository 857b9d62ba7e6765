"""A LoRAPool's arguments as the pinned SGLang reads them, and the combinations that it refuses itself."""

import json
from pathlib import Path

import pytest

from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.engine.port import EngineLaunch
from shoal.engine.sglang.arguments import parsed
from shoal.engine.sglang.launch import engine_args, pool_args
from shoal.engine.sglang.pool import pool_problem
from tests.contract.test_server_args import VERSION, run_in_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CHECK = """
import json, sys
import serve_sglang_cpu
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.server_args import prepare_server_args
found = []
for words in json.loads(sys.argv[1]):
    try:
        args = prepare_server_args(words)
        check_lora_server_args(args)
    except (Exception, SystemExit) as error:
        found.append({"refused": f"{type(error).__name__}: {error}"})
        continue
    names = ["enable_lora", "max_lora_rank", "max_loras_per_batch", "max_loaded_loras"]
    found.append({name: getattr(args, name) for name in names} | {"modules": sorted(args.lora_target_modules)})
print("RESULT " + json.dumps(found))
"""
POOL = LoRAPool.model_validate(
    {
        "metadata": {"name": "pool", "namespace": "ns"},
        "spec": {
            "modelRef": {"name": "chat"},
            "maxRank": 32,
            "targetModules": ["q_proj", "v_proj"],
            "slotsPerReplica": 4,
            "cachedPerReplica": 16,
        },
    }
)
TAKEN = (
    ("--speculative-algorithm=NGRAM",),
    ("--load-format=safetensors",),
    ("--quantization=fp8",),
    ("--disable-radix-cache",),
)
REFUSED = (
    ("--speculative-algorithm=STANDALONE", "--speculative-draft-model-path=/draft"),
    ("--moe-runner-backend=lora_triton",),
    ("--speculative-algorithm=NGRAM", "--speculative-moe-runner-backend=lora_triton"),
)
"""By SGLang at its start. What it refuses later, or takes and then answers wrongly, Shoal alone refuses."""


def model(*extra: str) -> Model:
    return Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "ns"},
            "spec": {"source": {"uri": "file:///models/tiny"}, "engine": {"extraArgs": list(extra)}},
        }
    )


def words(*extra: str) -> list[str]:
    found = engine_args(
        EngineLaunch(
            model(*extra), VERSION, model_path="/m", port=1, gpus=1, platform_args=("--device=cpu",), pool=POOL
        )
    )
    return list(found)


def ours(*extra: str) -> bool:
    given = parsed([*pool_args(POOL), *extra])
    return pool_problem(given, {}) is None


def test_sglang_and_shoal_take_and_refuse_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("api-key: client-key\nadmin-api-key: admin-key\n")
    monkeypatch.setattr("shoal.api.names.ENGINE_CONFIG_FILE", str(config))
    asked = [(), *TAKEN, *REFUSED]
    output = run_in_engine("-c", CHECK, json.dumps([words(*extra) for extra in asked]))
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    theirs = dict(zip(asked, json.loads(line.removeprefix("RESULT ")), strict=True))

    for extra in ((), *TAKEN):
        assert theirs[extra] == {
            "enable_lora": True,
            "max_lora_rank": 32,
            "max_loras_per_batch": 4,
            "max_loaded_loras": 16,
            "modules": ["q_proj", "v_proj"],
        }, extra
        assert ours(*extra)
    for extra in REFUSED:
        assert "lora" in theirs[extra].get("refused", "").lower(), (extra, theirs[extra])
        assert not ours(*extra)
