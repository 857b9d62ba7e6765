"""The pinned vLLM's own parser, and its own checks of a configuration, read what Shoal writes: every combination of the
fields that Shoal does not refuse. No engine is started (needs the engine on the CPU: images/engine-cpu)."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.architectures.facts import facts_of
from shoal.engine.port import EngineLaunch
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.kind import VLLM
from tests.support.engines import MODEL, make_models, vllm_launcher
from tests.support.model_configs import ALL
from tests.support.vllm_cpu import model_folder

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(600)]

VERSION = "0.32.0"
PROGRAM = Path(__file__).parents[1] / "support" / "vllm_arguments.py"
LLAMA = ArtifactFacts(source="x", architecture="LlamaForCausalLM", task="Generate")
EMBEDS = ArtifactFacts(source="x", architecture="LlamaForCausalLM", task="Embed")
RERANKS = ArtifactFacts(source="x", architecture="BertForSequenceClassification", task="Embed")
SPECULATION: list[dict[str, Any] | None] = [
    None, {"method": "NGram"}, {"method": "MTP", "draftTokens": 2}, {"method": "EAGLE", "draftPath": "draft"},
    {"method": "EAGLE3", "draftPath": "draft"}, {"method": "DraftModel", "draftPath": "draft", "draftTokens": 3},
]  # fmt: skip
QUANTIZATION: list[dict[str, Any]] = [
    {}, {"weights": "FP8"}, {"kvCache": "FP8"}, {"weights": "FP8", "kvCache": "FP8"},
]  # fmt: skip
PARALLELISM: list[dict[str, Any]] = [
    {}, {"pipeline": 2}, {"expert": True}, {"tensor": 4, "attentionData": 2, "expert": True},
]  # fmt: skip
POOL = LoRAPool.model_validate(
    {
        "metadata": {"name": "p", "namespace": "team-a"},
        "spec": {"modelRef": {"name": "chat"}, "maxRank": 24, "slotsPerReplica": 4},
    }
)
FACTS: dict[str, ArtifactFacts | None] = {
    "unknown": None,
    "text": LLAMA,
    "embeddings": EMBEDS,
    "scoring": RERANKS,
    "experts": facts_of(ALL["mixtral"], source="x"),
    "multi-token": facts_of(ALL["deepseek-v3"], source="x"),
    "images": facts_of(ALL["qwen2.5-vl-7b"], source="x"),
    "stored as FP8": facts_of(ALL["qwen3-32b-fp8"], source="x"),
}


def model_of(**engine: Any) -> Model:
    return Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "team-a"},
            "spec": {"source": {"uri": "hf://a/b"}, "engine": {"type": "vLLM", **engine}},
        }
    )


def rendered(
    model: Model, facts: ArtifactFacts | None, *, folder: str = "/models/m", pool: LoRAPool | None = None,
    platform: Sequence[str] = (), gpus: int | None = None,
) -> list[str] | None:  # fmt: skip
    """The whole argument list; None: Shoal refuses the Model, or the pool."""
    engine = model.spec.engine
    if VLLM.pod.problems(model, VERSION, facts) or VLLM.pod.extra_args_problems(VERSION, engine.extra_args):
        return None
    given = gpus or (engine.parallelism.tensor or 1) * engine.parallelism.pipeline
    args = VLLM.pod.args(
        EngineLaunch(
            model, VERSION, model_path=folder, port=30000, gpus=given, platform_args=platform, pool=pool, facts=facts
        )
    )
    if pool is not None and VLLM.pod.pool_problem(pool, ARGUMENTS.parsed(args), {}) is not None:
        return None
    return list(args)


def ask_vllm(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [vllm_launcher().parent / "python", PROGRAM], input=json.dumps(cases), capture_output=True, text=True,
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("ANSWERS\n")[2])


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = tmp_path / "engine.yaml"
    config.write_text("api-key: client-key\n")
    monkeypatch.setattr("shoal.api.names.ENGINE_CONFIG_FILE", str(config))
    return tmp_path


def test_its_parser_reads_every_combination_that_shoal_writes(keys: Path) -> None:
    cases: list[dict[str, Any]] = []
    expected: list[dict[str, Any]] = []
    for what, speculation, quantization, parallelism, pool in itertools.product(
        FACTS, SPECULATION, QUANTIZATION, PARALLELISM, (None, POOL)
    ):
        engine = {"speculation": speculation, "quantization": quantization, "parallelism": parallelism}
        model = model_of(**{name: value for name, value in engine.items() if value})
        args = rendered(model, FACTS[what], pool=pool)
        if args is None:
            continue
        cases.append({"args": args})
        expected.append(
            {
                "api_key": ["client-key"],
                "model": "/models/m",
                "served_model_name": ["team-a/chat"],
                "enable_lora": True if pool else None,
                "max_lora_rank": 32 if pool else 16,
                "kv_cache_dtype": "fp8" if quantization.get("kvCache") else "auto",
                "quantization": _word(FACTS[what], quantization),
                "pipeline_parallel_size": parallelism.get("pipeline", 1),
                "data_parallel_size": parallelism.get("attentionData", 1),
                "tensor_parallel_size": 2 if parallelism.get("attentionData") else 1,
                "enable_expert_parallel": bool(parallelism.get("expert")),
                "speculation": None if speculation is None else _METHODS[speculation["method"]],
            }
        )
    assert len(cases) > 300
    differ: list[str] = []
    for case, wanted, told in zip(cases, expected, ask_vllm(cases), strict=True):
        config = told.get("speculative_config") or {}
        found = {name: told.get(name) for name in wanted} | {"speculation": config.get("method")}
        if "error" in told or found != wanted:
            differ.append(f"{' '.join(case['args'])}: {told.get('error') or found}, not {wanted}")
    assert differ == []


_METHODS = {"NGram": "ngram", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "DraftModel": "draft_model"}


def _word(facts: ArtifactFacts | None, quantization: dict[str, Any]) -> str | None:
    if not quantization.get("weights"):
        return None
    return "fp8" if facts is not None and facts.quantization is not None else "fp8_per_tensor"


def test_the_other_fields_arrive_too(keys: Path) -> None:
    model = model_of(
        contextLength=8192, toolCallParser="hermes", reasoningParser="qwen3", extraArgs=["--max-num-seqs=7"]
    )
    args = rendered(model, LLAMA, platform=("--dtype=bfloat16",), gpus=2)
    assert args is not None
    (told,) = ask_vllm([{"args": args}])
    wanted = {
        "port": 30000, "host": "0.0.0.0", "max_model_len": 8192, "tool_call_parser": "hermes",
        "enable_auto_tool_choice": True, "reasoning_parser": "qwen3", "max_num_seqs": 7, "dtype": "bfloat16",
        "tensor_parallel_size": 2, "shutdown_timeout": 900, "enable_prompt_tokens_details": True,
        "enable_server_load_tracking": True, "enable_mfu_metrics": True, "enable_request_id_headers": True,
    }  # fmt: skip
    assert {name: told.get(name) for name in wanted} == wanted


SMALL = ("--dtype=bfloat16", "--kv-cache-memory-bytes=10485760", "--block-size=32", "--max-model-len=2048")
"""What the configuration needs to be made on a CPU without memory for weights."""


def test_it_makes_a_configuration_of_what_shoal_writes(keys: Path) -> None:
    """Which is where it checks the word for a quantization against the weights, drafts against the model, and what does
    not go together."""
    make_models()
    text = keys / "text"
    shutil.copytree(MODEL, text)
    shutil.copytree(MODEL, text / "draft")
    experts = model_folder(keys / "experts", _small(ALL["mixtral"]))
    multi = model_folder(keys / "multi", _small(ALL["deepseek-v3"]))
    stored = model_folder(keys / "stored", _small(ALL["qwen3-32b-fp8"]))
    asked: list[tuple[Model, ArtifactFacts, Path, LoRAPool | None, dict[str, Any]]] = []
    for speculation, quantization, pool in itertools.product(
        [each for each in SPECULATION if each is None or each["method"] != "MTP"], QUANTIZATION, (None, POOL)
    ):
        model = model_of(**({"speculation": speculation} if speculation else {}), quantization=quantization)
        method = None if speculation is None else _METHODS[speculation["method"]]
        asked.append((model, LLAMA, text, pool, {"speculation": method, "quantization": _word(LLAMA, quantization)}))
    for quantization in QUANTIZATION[:2]:
        for parallelism in PARALLELISM:
            model = model_of(parallelism=parallelism, quantization=quantization)
            facts = FACTS["experts"]
            assert facts is not None
            asked.append((model, facts, experts, None, {"quantization": _word(facts, quantization)}))
    for facts, folder, engine, wanted in (
        (EMBEDS, text, {}, {"runner": "pooling"}),
        (EMBEDS, text, {"quantization": {"weights": "FP8"}}, {"runner": "pooling", "quantization": "fp8_per_tensor"}),
        (FACTS["multi-token"], multi, {"speculation": {"method": "MTP"}}, {"speculation": "mtp"}),
        (FACTS["stored as FP8"], stored, {}, {"quantization": "fp8"}),
        (FACTS["stored as FP8"], stored, {"quantization": {"weights": "FP8"}}, {"quantization": "fp8"}),
    ):
        assert facts is not None
        asked.append((model_of(**engine), facts, folder, None, wanted))
    cases: list[dict[str, Any]] = []
    expected: list[dict[str, Any]] = []
    for model, facts, folder, pool, wanted in asked:
        args = rendered(model, facts, folder=str(folder), pool=pool, platform=SMALL)
        if args is not None:
            cases.append({"args": args, "config": True})
            expected.append({"adapters": None if pool is None else 3} | wanted)
    assert len(cases) > 40
    differ: list[str] = []
    for case, wanted, told in zip(cases, expected, ask_vllm(cases), strict=True):
        made = told.get("made", {})
        if "error" in told or {name: made.get(name) for name in wanted} != wanted:
            differ.append(f"{' '.join(case['args'])}: {told.get('error') or made}, not {wanted}")
    assert differ == []


def _small(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "num_hidden_layers": 2}


def test_a_word_that_it_does_not_know_is_refused(keys: Path) -> None:
    """So that the rest of this file proves something."""
    make_models()
    args = rendered(model_of(), LLAMA, folder=str(MODEL), platform=SMALL)
    assert args is not None
    unknown, whole = ask_vllm([{"args": [*args, "--quantization=fp8_per_row"], "config": True}, {"args": ["--nope"]}])
    assert "Unknown quantization method: fp8_per_row" in unknown["error"]
    assert "unrecognized arguments: --nope" in whole["error"]
