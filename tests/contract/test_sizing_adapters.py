"""GPU memory of adapters' places beside the buffers that SGLang's own LoRA memory pool makes."""

from typing import Any

import pytest

from shoal.core.architectures import facts_of
from shoal.core.sizing import AdapterSlots, SGLangTuning
from shoal.core.sizing.sglang.slots import slot_bytes
from tests.support.model_configs import ALL
from tests.support.sizing import ask_sglang

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETS = (
    ["q_proj"],
    ATTENTION,
    [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    [*ATTENTION, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
)


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, config in ALL.items():
        facts = facts_of(config, source="x")
        if facts.widths is None:
            continue
        for tensor in (n for n in (1, 2, 4, 8) if (facts.attention_heads or 1) % n == 0):
            for number, modules in enumerate(SETS):
                if facts.widths.feed_forward is None and "down_proj" in modules:
                    continue
                if tensor > 1 and "lm_head" in modules:
                    continue  # how that one is cut is asked of the loaded base
                adapters = {"slots": 2 + number, "rank": 16 << number, "modules": modules}
                found.append(
                    {"name": name, "config": config, "tensor": tensor, "memory_mib": 81559, "adapters": adapters}
                )
    return found


def test_the_places_take_what_sglang_reserves_for_them() -> None:
    differ: list[str] = []
    asked = cases()
    for case, theirs in zip(asked, ask_sglang(asked)["answers"], strict=True):
        given = case["adapters"]
        tuning = SGLangTuning(adapters=AdapterSlots(given["slots"], given["rank"], tuple(given["modules"])))
        ours = slot_bytes(facts_of(case["config"], source="x"), case["tensor"], tuning)
        if ours != theirs["slots"]:
            differ.append(f"{case['name']} on {case['tensor']}, {given}: {ours} is not {theirs['slots']}")
    assert differ == []
    assert len({case["name"] for case in asked}) >= 6
