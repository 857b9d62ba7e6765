"""What Shoal refuses of adapters before SGLang sees them, held against SGLang (what it accepts: test_any_adapters.py).

What is refused because SGLang would take it and answer with other weights, SGLang does take.
"""

from pathlib import Path
from typing import Any

import pytest

from shoal.api import reasons
from shoal.artifacts import ArtifactError, adapter
from shoal.core.lora.format.check import Limits, check_adapter
from shoal.engine.sglang.pool import RULES
from tests.contract.conftest import KINDS, Client
from tests.support.adapters import base_of, make_adapter
from tests.support.engines import LORA_MODULES, LORA_RANK, MODEL
from tests.support.lora_calls import ask, load

LIMITS = Limits("pool", LORA_RANK, LORA_MODULES, RULES)
REAL = [param for param in KINDS if param.id == "sglang"]
REVISION = f"sha256:{'0' * 64}"


REFUSED: dict[str, dict[str, Any]] = {
    "pattern": {"config": {"target_modules": ".*_proj"}},
    "dora": {"config": {"use_dora": True}},
    "q-alone": {"modules": ["q_proj"]},
}


def refusal(folder: Path) -> str | None:
    """The reason with which Shoal refuses the adapter; None: it does not."""
    try:
        facts = adapter.read_folder(folder, folder.name, REVISION)
    except ArtifactError as error:
        return error.reason
    problem = check_adapter(facts, LIMITS, base_of(MODEL))
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
