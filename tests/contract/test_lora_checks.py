"""What Shoal checks of adapters before an engine sees them, held against the engine.

What is accepted loads and answers with weights of its own. What is refused because SGLang would take it and answer with
other weights, SGLang does take.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.api import reasons
from shoal.api.artifact import LayerWidths
from shoal.artifacts import ArtifactError, adapter
from shoal.core.lora.format.check import BaseModelFacts, Limits, check_adapter
from shoal.engine.sglang.pool import RULES
from tests.contract.conftest import KINDS, Client
from tests.support.adapters import ALL, make_adapter
from tests.support.engines import LORA_MODULES, LORA_RANK, MODEL, ROOT
from tests.support.lora_calls import ask, load, text

LIMITS = Limits("pool", LORA_RANK, LORA_MODULES, RULES)
REAL = [param for param in KINDS if param.id == "sglang"]
REVISION = f"sha256:{'0' * 64}"


def base() -> BaseModelFacts:
    config = json.loads((MODEL / "config.json").read_text())
    head = config["head_dim"]
    widths = LayerWidths(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        query=config["num_attention_heads"] * head,
        key=config["num_key_value_heads"] * head,
        feed_forward=config["intermediate_size"],
    )
    return BaseModelFacts(widths, config["vocab_size"])


def without(*modules: str) -> list[str]:
    return [module for module in ALL if module not in modules]


FITTING: dict[str, dict[str, Any]] = {
    "whole": {},
    "low-rank": {"rank": 2},
    "no-k": {"modules": without("k_proj")},
    "no-up": {"modules": without("up_proj")},
    "down-and-o": {"modules": ["down_proj", "o_proj"]},
    "first-layer": {"layers": 1},
    "all-linear": {"config": {"target_modules": "all-linear"}},
    "full-names": {"config": {"target_modules": [f"model.layers.0.x.{module}" for module in ALL]}},
    "same-patterns": {"config": {"rank_pattern": {"q_proj": LORA_RANK}, "alpha_pattern": {}}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "pattern": {"config": {"target_modules": ".*_proj"}},
    "dora": {"config": {"use_dora": True}},
    "q-alone": {"modules": ["q_proj"]},
}


@pytest.mark.parametrize("name", FITTING)
async def test_an_adapter_that_passes_the_check_loads_and_answers(lora: Client, tmp_path: Path, name: str) -> None:
    folder = make_adapter(tmp_path / name, seed=21, **FITTING[name])
    facts = adapter.read_folder(folder, name, REVISION)
    assert check_adapter(facts, LIMITS, base()) is None

    answer = await load(lora, name, folder)
    assert answer.status == 200, answer.body
    assert await text(lora, lora_path=name) != await text(lora)


def refusal(folder: Path) -> str | None:
    """The reason with which Shoal refuses the adapter; None: it does not."""
    try:
        facts = adapter.read_folder(folder, folder.name, REVISION)
    except ArtifactError as error:
        return error.reason
    problem = check_adapter(facts, LIMITS, base())
    return None if problem is None else problem.reason


IGNORED: dict[str, tuple[str, object]] = {
    "rslora": ("use_rslora", True),
    "alphas": ("alpha_pattern", {"q_proj": 1}),
    "ranks": ("rank_pattern", {"q_proj": 4}),
    "bias": ("bias", "lora_only"),
    "saved": ("modules_to_save", ["lm_head"]),
    "pissa": ("init_lora_weights", "pissa"),
    "activated": ("alora_invocation_tokens", [1, 2]),
}


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("lora_engine", REAL, indirect=True)
async def test_sglang_takes_what_is_refused_as_silently_wrong_and_ignores_it(
    lora: Client, tmp_path: Path, name: str
) -> None:
    field, value = IGNORED[name]
    plain = make_adapter(tmp_path / "plain", seed=22)
    other = make_adapter(tmp_path / name, seed=22, config={field: value})
    # Tensors of the usual rank do not follow a pattern that says another.
    assert refusal(other) == (reasons.CORRUPT if name == "ranks" else reasons.UNSUPPORTED)

    answers: list[Any] = []
    for engine_name, folder in ((f"{name}-plain", plain), (name, other)):
        assert (await load(lora, engine_name, folder)).status == 200
        answer = await ask(lora, lora_path=engine_name, logprobs=1)
        assert answer.status == 200, answer.body
        answers.append(answer.json["choices"][0]["logprobs"]["token_logprobs"])
    assert answers[0] == answers[1], "with PEFT these two would differ"


@pytest.mark.parametrize("name", REFUSED)
async def test_what_sglang_refuses_is_refused_before_it_is_asked(lora: Client, tmp_path: Path, name: str) -> None:
    folder = make_adapter(tmp_path / name, seed=23, **REFUSED[name])
    assert refusal(folder) == reasons.UNSUPPORTED
    assert (await load(lora, name, folder)).status == 400


async def test_the_adapters_of_the_examples_load_and_each_answers_its_own(lora: Client, tmp_path: Path) -> None:
    script = ROOT / "images" / "shoal" / "make_models.py"
    await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script), str(tmp_path / "m"), str(tmp_path / "a")], check=True, timeout=60
    )
    answers = [await text(lora)]
    for name in ("support-v1", "support-v2", "legal", "poet"):
        facts = adapter.read_folder(tmp_path / "a" / name, name, REVISION)
        assert check_adapter(facts, LIMITS, base()) is None
        assert (await load(lora, name, tmp_path / "a" / name)).status == 200
        answers.append(await text(lora, lora_path=name))
    assert len(set(answers)) == 5
