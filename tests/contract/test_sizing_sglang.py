"""Sizing beside SGLang's own code: the same config, the same GPU, the same figures."""

from typing import Any

import pytest

from shoal.core.architectures import facts_of, names
from shoal.core.sizing import SGLangTuning, stages
from shoal.core.sizing.cell import bytes_per_token
from shoal.core.sizing.sglang.fraction import MULTIMODAL_PREFILL_GRAPHS, static_fraction
from shoal.engine.sglang.architectures import STAGED
from tests.support.model_configs import ALL
from tests.support.sizing import ask_sglang

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MEMORY = (16384, 23034, 46068, 81559, 143771, 183359)
"""MiB: a T4's neighbour, L4, L40S, H100, H200, B200."""
KV_TYPES = ("auto", "fp8_e4m3", "mxfp8")


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, config in ALL.items():
        facts = facts_of(config, source="x")
        heads = facts.attention_heads or 1
        for tensor in (n for n in (1, 2, 4, 8) if heads % n == 0):
            for i, memory in enumerate(MEMORY):
                kv_type = KV_TYPES[(i + tensor) % 3 if facts.kv.kind == "Full" else 0]
                tuned = {"chunked_prefill_size": 2048, "cuda_graph_max_bs": 32} if i in (1, 3) else {}
                found.append(
                    {"name": name, "config": config, "tensor": tensor, "memory_mib": memory, "kv_dtype": kv_type}
                    | tuned
                )
    v3 = {"name": "deepseek-v3", "config": ALL["deepseek-v3"], "memory_mib": 143771, "kv_dtype": "auto"}
    found += [v3 | {"tensor": 8, "attention_dp": dp} for dp in (2, 8)]
    # 61 and 32 layers: the stages are of two sizes, and of one.
    found += [v3 | {"tensor": 8, "pipeline": stages} for stages in (2, 4)]
    llama = {"name": "llama-8b", "config": ALL["llama-8b"], "memory_mib": 81559, "kv_dtype": "auto"}
    return [*found, *(llama | {"tensor": 2, "pipeline": stages} for stages in (2, 3, 4))]


@pytest.fixture(scope="module")
def sglang() -> dict[str, Any]:
    return ask_sglang(cases(), registry=True)


def test_every_figure(sglang: dict[str, Any]) -> None:
    differ: list[str] = []
    for case, theirs in zip(cases(), sglang["answers"], strict=True):
        facts = facts_of(case["config"], source="x")
        dp, tensor = case.get("attention_dp", 1), case["tensor"]
        tuning = SGLangTuning(
            attention_dp=dp,
            pipeline=case.get("pipeline", 1),
            chunked_prefill_size=case.get("chunked_prefill_size"),
            cuda_graph_max_bs=case.get("cuda_graph_max_bs"),
        )
        kv_type = facts.kv.dtype if case["kv_dtype"] == "auto" else case["kv_dtype"]
        ours = {
            "context": facts.context_length or tuning.default_context,
            "fraction": static_fraction(facts, case["memory_mib"], tensor, tuning),
            "multimodal": facts.multimodal,
            "quantization": facts.quantization,
            "generation": facts.task == "Generate",
            "cell": bytes_per_token(stages.largest(facts, tuning).kv, attention_tensor=tensor // dp, kv_dtype=kv_type),
        }
        if ours["fraction"] == 0:
            # SGLang would start with a fraction below zero and fail; so does sizing, with its own sentence.
            assert theirs["fraction"] <= 0
            ours["fraction"] = theirs["fraction"]
        wrong = {k: (ours[k], theirs[k]) for k in ours if ours[k] != pytest.approx(theirs[k])}
        if wrong:
            differ.append(f"{case['name']} on {tensor} x {case['memory_mib']} MiB: {wrong}")
    assert differ == []


def test_states_of_hybrid_models_divide_over_the_gpus(sglang: dict[str, Any]) -> None:
    seen = 0
    for case, theirs in zip(cases(), sglang["answers"], strict=True):
        state = facts_of(case["config"], source="x").kv.state_bytes_per_request
        assert (state is None) == (theirs["state"] is None)
        if state is not None:
            # Groups that are fewer than the GPUs are repeated: a little more than a share.
            share = state / case["tensor"]
            assert share == pytest.approx(theirs["state"], rel=0.01 if case["tensor"] > 1 else 0)
            seen += 1
    assert seen > 20


def test_names_are_those_of_the_registry(sglang: dict[str, Any]) -> None:
    known = names.MLA | names.WINDOWED | names.HYBRID | names.FULL
    registry, multimodal = set(sglang["registry"]), set(sglang["multimodal"])
    assert known - registry == set()
    assert registry >= names.EMBEDS
    # SGLang turns these off by itself; all others that are known are among ours.
    off = {"Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration", "MiMoV2ForCausalLM"}
    assert multimodal & known - names.MULTIMODAL == off
    assert multimodal >= names.MULTIMODAL | names.IMAGES_IF_ASKED
    assert multimodal >= MULTIMODAL_PREFILL_GRAPHS
    assert set(sglang["staged"]) & (known | names.EMBEDS | names.MULTIMODAL) == STAGED


def test_capabilities_are_those_of_the_quantizations(sglang: dict[str, Any]) -> None:
    theirs = sglang["capabilities"]
    assert {k: theirs.get(k) for k in SGLangTuning.min_capability} == SGLangTuning.min_capability
