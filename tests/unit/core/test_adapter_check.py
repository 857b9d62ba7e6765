"""What an adapter is, and whether it goes with a pool and a base: every reason, as a person reads it."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shoal.api import reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.api.adapters import AdapterSettings
from shoal.api.artifact import LayerWidths
from shoal.core.lora.format.check import BaseModelFacts, Limits, check_adapter, of_settings
from shoal.core.lora.format.peft import RevisionFiles, Tensor, facts_of
from shoal.core.lora.format.sources import credentials_for, pinned_commit, pinned_uri
from shoal.core.status.observed import ModelProblem
from shoal.engine.kinds import KINDS

SGLANG, VLLM = (KINDS[name].pod.adapter_rules for name in ("SGLang", "vLLM"))
WIDTHS = LayerWidths(layers=2, hidden=64, query=64, key=32, feed_forward=128)
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
MODULES = tuple(sorted(path.partition(".")[2] for path in SHAPES))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LIMITS = Limits("chat/llama", 64, MODULES, SGLANG, 1 << 20)
BASE = BaseModelFacts(WIDTHS, 512)


def tensor(*shape: int, dtype: str = "F32") -> Tensor:
    return Tensor(dtype, shape, math.prod(shape) * {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}[dtype])


def matrices(rank: int = 8, layers: int = 2, paths: Mapping[str, tuple[int, int]] = SHAPES) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        for path, (reads, writes) in paths.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            found[f"{name}.lora_A.weight"] = tensor(rank, reads)
            found[f"{name}.lora_B.weight"] = tensor(writes, rank)
    return found


def config(**more: Any) -> dict[str, Any]:
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(MODULES), "bias": "none"}
    return said | {"base_model_name_or_path": "meta-llama/Llama-3.1-8B"} | more


def read(
    tensors: Mapping[str, Tensor] | None = None, tokens: Mapping[str, Any] | None = None, **more: Any
) -> AdapterFacts | ModelProblem:
    wanted = matrices(more.get("r", 8)) if tensors is None else tensors
    return facts_of(RevisionFiles(f"sha256:{'a' * 64}", None, 1000, 1200, config(**more), wanted, tokens or {}))


def usable(*arguments: Any, **more: Any) -> AdapterFacts:
    found = read(*arguments, **more)
    assert isinstance(found, AdapterFacts), found
    return found


def problem(*arguments: Any, **more: Any) -> ModelProblem:
    found = read(*arguments, **more)
    assert isinstance(found, ModelProblem), found
    assert found.reason in reasons.ADAPTER_REASONS
    return found


def refused(facts: AdapterFacts, limits: Limits = LIMITS, base: BaseModelFacts = BASE) -> ModelProblem:
    found = check_adapter(facts, limits, base)
    assert found is not None
    assert found.reason in reasons.ADAPTER_REASONS
    return found


# --- what it is -----------------------------------------------------------------------------------------------------


def test_an_adapter_of_every_linear_layer_is_read_and_goes_with_its_pool():
    facts = usable()
    assert (facts.rank, facts.alpha, facts.layers, facts.base) == (8, 16.0, 2, "meta-llama/Llama-3.1-8B")
    assert facts.modules["q_proj"] == (64, 64)
    assert facts.modules["down_proj"] == (128, 64)
    assert facts.targets == MODULES
    assert check_adapter(facts, LIMITS, BASE) is None


def test_names_as_older_versions_of_peft_save_them_are_known():
    renamed = {name.replace(".weight", ".default.weight"): t for name, t in matrices().items()}
    assert usable(renamed).modules == usable().modules
    assert usable(target_modules=["model.layers.0.self_attn." + m for m in MODULES]).targets == MODULES
    assert usable(target_modules="all-linear").targets == ("all",)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("peft_type", "IA3", "peft_type 'IA3'"),
        ("use_dora", True, "DoRA"),
        ("bias", "all", "biases (bias: all), which neither SGLang nor vLLM serves"),
        ("lora_bias", True, "biases in its LoRA layers"),
        ("rank_pattern", {"(q|v)_proj": 4}, "a regular expression, which is not run: write its modules out"),
        ("modules_to_save", ["lm_head"], "whole layers beside the LoRA (modules_to_save)"),
        ("layer_replication", [[0, 1]], "replicated layers"),
        ("trainable_token_indices", [7], "trained tokens"),
        ("target_parameters", ["experts.w"], "outside linear layers"),
        ("alora_invocation_tokens", [1, 2], "an activated LoRA"),
        ("init_lora_weights", "pissa_niter_16", "changed the base's weights too (init_lora_weights: pissa_niter_16)"),
        ("use_bdlora", {"a": 1}, "a block-diagonal LoRA"),
    ],
)
def test_a_kind_that_every_engine_would_get_wrong_is_refused(field: str, value: object, said: str):
    found = problem(**{field: value})
    assert found.reason == reasons.UNSUPPORTED
    assert said in found.message


NEEDS: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"use_rslora": True},
        None,
        "SGLang ignores: use_rslora false and lora_alpha 45.2548 in adapter_config.json",
    ),
    ({"alpha_pattern": {"q_proj": 4}}, None, "different alphas (alpha_pattern), which SGLang ignores"),
    ({"target_modules": r".*\.(q|v)_proj"}, ("q_proj", "v_proj"), "SGLang wants a list of module names"),
    ({}, ("q_proj", "o_proj"), "has q_proj without v_proj: SGLang stacks q_proj, k_proj and v_proj"),
    ({}, ("up_proj",), "has up_proj without gate_proj: SGLang stacks the two and needs gate_proj"),
]


def of(*modules: str) -> dict[str, Tensor]:
    return matrices(paths={path: shape for path, shape in SHAPES.items() if path.rpartition(".")[2] in modules})


@pytest.mark.parametrize(("config", "modules", "said"), NEEDS)
def test_what_only_one_engine_serves_is_refused_in_its_name(config: dict[str, Any], modules: Any, said: str):
    facts = usable(of(*modules) if modules else matrices(), **config)
    found = refused(facts)
    assert found.reason == reasons.UNSUPPORTED
    assert said in found.message
    assert check_adapter(facts, replace(LIMITS, rules=VLLM), BASE) is None


def test_ranks_by_module_are_checked_against_the_tensors():
    mixed = matrices() | {
        name: tensor(*(4 if size == 8 else size for size in found.shape))
        for name, found in matrices().items() if "q_proj" in name
    }  # fmt: skip
    facts = usable(mixed, rank_pattern={"self_attn.q_proj": 4})
    assert facts.rank == 8
    assert "different ranks (rank_pattern), which SGLang ignores" in refused(facts).message
    assert check_adapter(facts, replace(LIMITS, rules=VLLM), BASE) is None
    assert problem(mixed).reason == reasons.CORRUPT, "without the pattern the tensors have another rank than r"
    assert problem(rank_pattern={"q_proj": 4}).reason == reasons.CORRUPT, "and with one that they do not follow"
    assert problem(mixed, rank_pattern={"proj": 4}).reason == reasons.CORRUPT, "a key is a whole part of a path"
    # The largest one counts.
    assert usable(mixed, r=4, rank_pattern={module: 8 for module in MODULES if module != "q_proj"}).rank == 8


def test_of_two_entries_that_a_path_ends_with_the_first_counts():
    for first, second in (("q_proj", "self_attn.q_proj"), ("self_attn.q_proj", "q_proj")):
        assert problem(rank_pattern={first: 4, second: 2}).message.endswith("adapter_config.json says r = 4")


def test_a_pattern_of_very_many_ranks_is_read_at_once():
    many = {f"module{number}": 4 for number in range(50_000)}
    began = time.process_time()
    assert usable(matrices(layers=40), rank_pattern=many).rank == 8
    assert time.process_time() - began < 3, "seconds in which one adapter holds up all others of its replica"


def test_a_pattern_of_modules_means_those_that_have_tensors():
    facts = usable(of("q_proj", "v_proj"), target_modules=".*attn.*")
    assert facts.targets == ("q_proj", "v_proj")
    narrow = Limits("p", 64, ("o_proj",), VLLM)
    assert refused(facts, narrow).reason == reasons.MODULES_NOT_IN_POOL


def test_a_beginning_that_vllm_takes_for_a_change_of_the_base():
    facts = usable(init_lora_weights="loftq")
    found = check_adapter(facts, replace(LIMITS, rules=VLLM), BASE)
    assert found is not None
    assert "init_lora_weights is loftq, which vLLM takes for one that changed the base" in found.message
    assert check_adapter(facts, LIMITS, BASE) is None


def test_tokens_that_are_added_are_refused_in_the_engines_name():
    facts = usable(None, {"<x>": 512})
    for rules in (SGLANG, VLLM):
        assert (
            f"{rules.engine} serves no adapters that add tokens" in refused(facts, replace(LIMITS, rules=rules)).message
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", False),
        ("bias", None),
        ("rank_pattern", {}),
        ("rank_pattern", {"q_proj": 8}),
        ("modules_to_save", None),
        ("init_lora_weights", True),
        ("init_lora_weights", "gaussian"),
        ("layers_to_transform", [0, 1]),
    ],
)
def test_what_changes_nothing_is_no_reason(field: str, value: object):
    assert check_adapter(usable(**{field: value}), LIMITS, BASE) is None


@pytest.mark.parametrize("value", [None, 0, -1, "8", True, 2.5, 10**400, float("inf")])
def test_a_rank_that_is_none_is_told(value: object):
    found = problem(matrices(), r=value)
    assert found.reason == reasons.CORRUPT
    assert "r = " in found.message


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        ({"x": tensor(8, 64)}, reasons.UNSUPPORTED, "whole weights beside the LoRA (x)"),
        ({"base_model.model.lm_head.weight": tensor(8, 64)}, reasons.UNSUPPORTED, "whole weights beside the LoRA"),
        ({"base_model.h.0.attn.lora_A.weight": tensor(8, 64)}, reasons.UNSUPPORTED, "in no place where engines look"),
        (
            {"a.layers.0.self_attn.q_proj.lora_magnitude_vector": tensor(64)},
            reasons.UNSUPPORTED,
            "it is a DoRA adapter",
        ),
        (
            {"model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight": tensor(8, 64)},
            reasons.UNSUPPORTED,
            "more than the language model",
        ),
        (
            {
                "m.layers.0.cross_attn.q_proj.lora_A.weight": tensor(8, 64),
                "m.layers.0.cross_attn.q_proj.lora_B.weight": tensor(64, 8),
            },
            reasons.UNSUPPORTED,
            "has cross_attn.q_proj and self_attn.q_proj, which engines take for the same module",
        ),
        (
            {"m.layers.0.mlp.x_proj.lora_A.weight": tensor(8, 64)},
            reasons.CORRUPT,
            "mlp.x_proj has lora_A and no lora_B",
        ),
        ({"m.layers.0.mlp.x_proj.lora_A.weight": tensor(8)}, reasons.CORRUPT, "which no LoRA matrix has"),
        (
            {"m.layers.0.mlp.x_proj.lora_A.weight": tensor(4, 64)},
            reasons.CORRUPT,
            "has rank 4, and adapter_config.json",
        ),
        (
            {"m.layers.0.mlp.x_proj.lora_A.weight": tensor(8, 64, dtype="F8_E4M3")},
            reasons.UNSUPPORTED,
            "has type F8_E4M3",
        ),
        ({"m.layers.0.mlp.x_proj.lora_A.weight": Tensor("F32", (8, 64), 9)}, reasons.CORRUPT, "has 9 bytes"),
        (
            {
                "m.layers.0.mlp.x_proj.lora_A.weight": tensor(8, 64),
                "m.layers.0.mlp.x_proj.lora_B.weight": tensor(64, 8),
            },
            reasons.UNSUPPORTED,
            "it has tensors for x_proj, which its target_modules does not name",
        ),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(change: dict[str, Tensor], reason: str, said: str):
    found = problem(matrices() | change)
    assert found.reason == reason
    assert said in found.message


def test_what_stands_in_the_files_is_fit_to_be_shown():
    assert usable(base_model_name_or_path="a\nb\x1b[31m" + "c" * 500).base == "..." + "c" * 77
    assert usable(base_model_name_or_path="a\nb\x1b[31m").base == "a?b?[31m"
    assert "\n" not in problem(matrices() | {"evil\nname": tensor(8, 64)}).message
    assert "a name of 400 letters" in problem(matrices() | {"x" * 400: tensor(8, 64)}).message
    assert problem(target_modules=["q_proj", "x\n"]).reason == reasons.CORRUPT


def test_more_modules_than_a_base_has_are_refused():
    paths = {f"mlp.m{n}": (64, 64) for n in range(100)}
    found = problem(matrices(paths=paths), target_modules=[f"m{n}" for n in range(100)])
    assert found.message == "it changes or names 100 different modules, and no base has so many"


def test_an_adapter_without_tensors_is_corrupt():
    assert problem({}) == ModelProblem(reasons.CORRUPT, "adapter_model.safetensors has no tensors")


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (("v_proj",), "layer 0 self_attn has k_proj and q_proj without v_proj"),
        (("q_proj", "k_proj"), "layer 0 self_attn has v_proj without q_proj"),
        (("gate_proj",), "layer 0 mlp has up_proj without gate_proj"),
    ],
)
def test_halves_of_layers_that_sglang_stacks_are_refused(left_out: tuple[str, ...], said: str):
    paths = {path: shape for path, shape in SHAPES.items() if path.partition(".")[2] not in left_out}
    found = refused(usable(matrices(paths=paths)))
    assert found.reason == reasons.UNSUPPORTED
    assert said in found.message


@pytest.mark.parametrize("left_out", [("k_proj",), ("up_proj",), ("down_proj", "o_proj"), ATTENTION])
def test_halves_that_sglang_fills_with_zeros_are_taken(left_out: tuple[str, ...]):
    paths = {path: shape for path, shape in SHAPES.items() if path.partition(".")[2] not in left_out}
    assert check_adapter(usable(matrices(paths=paths)), LIMITS, BASE) is None


def test_experts_are_read_and_not_compared_with_the_dense_layers():
    paths = {f"mlp.experts.{n}.{module}": (64, 16) for n in range(3) for module in ("w1", "w3")}
    facts = usable(matrices(paths=paths), target_modules=["w1", "w3"])
    assert facts.modules == {"experts.w1": (64, 16), "experts.w3": (64, 16)}
    assert check_adapter(facts, LIMITS, BaseModelFacts(WIDTHS, 512)) is None


# --- whether it goes with the pool ----------------------------------------------------------------------------------


def test_a_rank_above_the_pools_says_both_and_what_to_do():
    found = refused(usable(r=128))
    assert found.reason == reasons.RANK_TOO_HIGH
    assert found.message.startswith("128 > 64 of pool chat/llama: raise the pool's maxRank")
    assert check_adapter(usable(r=64), LIMITS, BASE) is None


def test_modules_that_the_pool_does_not_have_are_named():
    found = refused(usable(), Limits("chat/llama", 64, ATTENTION, SGLANG))
    assert found.reason == reasons.MODULES_NOT_IN_POOL
    assert found.message.startswith("down_proj, gate_proj, up_proj: add to targetModules of pool chat/llama")


def test_embeddings_are_a_module_of_the_pool():
    tables = {
        "base_model.model.model.embed_tokens.lora_embedding_A": tensor(8, 512),
        "base_model.model.model.embed_tokens.lora_embedding_B": tensor(64, 8),
    }
    facts = usable(matrices() | tables, target_modules=[*MODULES, "embed_tokens"])
    assert facts.modules["embed_tokens"] == (512, 64)
    assert refused(facts).message.startswith("embed_tokens: add")
    wide = Limits("chat/llama", 64, (*MODULES, "embed_tokens"), SGLANG)
    assert check_adapter(facts, wide, BASE) is None
    assert refused(facts, wide, BaseModelFacts(WIDTHS, 1000)).reason == reasons.BASE_MISMATCH


def test_a_module_that_only_the_config_names_counts_since_sglang_looks_there():
    found = refused(usable(target_modules=[*MODULES, "lm_head"]))
    assert found.reason == reasons.MODULES_NOT_IN_POOL
    assert found.message.startswith("lm_head: ")


def test_modules_that_sglang_stacks_come_together():
    paths = {path: shape for path, shape in SHAPES.items() if path.partition(".")[2] in ATTENTION}
    facts = usable(matrices(paths=paths), target_modules=list(ATTENTION))
    assert check_adapter(facts, Limits("p", 64, ("q_proj", "o_proj"), SGLANG), BASE) is None


def test_a_pool_for_all_modules_takes_those_that_the_base_has():
    facts = usable()
    everything = Limits("p", 64, ("all",), SGLANG)
    assert check_adapter(facts, everything, BASE) is None
    odd = usable(matrices(paths={"mlp.router": (64, 8)}), target_modules=["router"])
    assert refused(odd, everything).reason == reasons.MODULES_NOT_IN_POOL
    assert check_adapter(odd, everything, BaseModelFacts()) is None  # the engine looks at its base


def test_more_bytes_than_replicas_have_room_for_are_too_large():
    found = refused(usable(), Limits("p", 64, MODULES, SGLANG, 1199))
    assert found.reason == reasons.TOO_LARGE
    assert found.message.startswith("its files have 1200 bytes and pool p has room for 1199 bytes")
    assert check_adapter(usable(), Limits("p", 64, MODULES, SGLANG, 1200), BASE) is None


# --- whether it goes with the base ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (
            BaseModelFacts(WIDTHS.model_copy(update={"hidden": 128})),
            "down_proj is 128 to 64 wide and the base's is 128 to 128",
        ),
        (BaseModelFacts(WIDTHS.model_copy(update={"key": 64})), "k_proj is 64 to 32 wide and the base's is 64 to 64"),
        (
            BaseModelFacts(WIDTHS.model_copy(update={"feed_forward": 256})),
            "down_proj is 128 to 64 wide and the base's is 256",
        ),
        (BaseModelFacts(WIDTHS.model_copy(update={"layers": 1})), "it changes layer 1 and the base has layers 0 to 0"),
    ],
)
def test_an_adapter_for_another_base_says_where_they_differ(base: BaseModelFacts, said: str):
    found = refused(usable(), base=base)
    assert found.reason == reasons.BASE_MISMATCH
    assert said in found.message
    assert found.message.endswith(
        "it was trained for another base; its config names meta-llama/Llama-3.1-8B as its base"
    )


def test_layers_that_differ_fit_no_base_whose_layers_are_alike():
    tensors = matrices()
    tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"] = tensor(8, 32)
    facts = usable(tensors)
    assert facts.modules["o_proj"] is None
    assert "o_proj differ in width" in refused(facts).message
    assert check_adapter(facts, LIMITS, BaseModelFacts()) is None


def test_fewer_layers_than_the_base_has_are_fine():
    assert check_adapter(usable(matrices(layers=1)), LIMITS, BASE) is None


def test_what_is_not_known_of_a_base_is_not_compared():
    assert check_adapter(usable(), LIMITS, BaseModelFacts()) is None


@pytest.mark.parametrize(("highest", "fits"), [(511, True), (512, False)])
def test_tokens_that_the_base_does_not_have_are_refused(highest: int, fits: bool):
    facts = usable(matrices(), {"<a>": 3, "<b>": highest, "<c>": "?"})
    if fits:
        assert check_adapter(facts, LIMITS, BASE) is None
        return
    found = refused(facts)
    assert found.reason == reasons.UNSUPPORTED
    assert "token 512 and the base ends at 511" in found.message


def test_an_agent_checks_with_what_it_was_told():
    settings = AdapterSettings(
        pool="chat/llama", slots=4, cached=8, max_rank=4, target_modules=MODULES, max_bytes=10, widths=WIDTHS
    )
    limits, base = of_settings(settings, SGLANG)
    assert refused(usable(), limits, base).message.startswith("8 > 4 of pool chat/llama")


# --- addresses ------------------------------------------------------------------------------------------------------


def test_the_longest_prefix_opens_a_source():
    prefixes = ("s3://adapters/", "hf://acme/", "s3://adapters/private/")
    assert credentials_for("s3://adapters/a", prefixes) == 0
    assert credentials_for("s3://adapters/private/a", prefixes) == 2
    assert credentials_for("s3://other/a", prefixes) is None


def test_a_branch_is_pinned_to_what_was_read():
    assert pinned_uri("hf://acme/tuned@main", "c0ffee") == "hf://acme/tuned@c0ffee"
    assert pinned_uri("hf://acme/tuned", "c0ffee") == "hf://acme/tuned@c0ffee"
    assert pinned_uri("s3://a/b", None) == "s3://a/b"
    assert pinned_commit("hf://acme/tuned@c0ffee") == ("hf://acme/tuned", "c0ffee")
    assert pinned_commit("hf://acme/tuned") == ("hf://acme/tuned", None)
    assert pinned_commit("https://user@example.com/a") == ("https://user@example.com/a", None)
