"""The GPU of a class, and what its engines teach of it."""

from typing import Any

import pytest

from shoal.api.gpuclass import GPUClass
from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.facts import Node
from shoal.core.sizing import GPU, SGLangTuning, Sized, Tuning, gpu_of, implied_overhead, memory_of, size
from tests.support import model_configs as configs

MI, GI = 2**20, 2**30


def gpu_class(status: dict[str, Any] | None = None, **spec: Any) -> GPUClass:
    return GPUClass.model_validate(
        {
            "metadata": {"name": "l40s"},
            "spec": {"nodeSelector": {"gpu": "l40s"}, "memoryPerGPU": "48Gi", **spec},
            **({"status": status} if status else {}),
        }
    )


def node(gpus: int = 4, memory: str | None = None) -> Node:
    labels = {} if memory is None else {"nvidia.com/gpu.memory": memory}
    resource = {"nvidia.com/gpu": gpus}
    return Node("n", labels, ready=True, unschedulable=False, taints=(), capacity=resource, allocatable=resource)


def test_the_nodes_own_labels_say_the_memory_and_the_least_counts() -> None:
    labelled = [node(4, mib) for mib in ("46068", "46067", "", "much", "0")]
    assert memory_of(gpu_class(), labelled) == (46067 * MI, "NodeLabels")
    assert memory_of(gpu_class(), [node()]) == (48 * GI, "Spec")


def test_a_part_of_a_gpu_has_a_label_of_its_own() -> None:
    whole = Node(
        "n", {"nvidia.com/gpu.memory": "81559", "nvidia.com/mig-3g.40gb.memory": "40192"}, True, False, (), {}, {}
    )
    part = gpu_class(resourceName="nvidia.com/mig-3g.40gb")
    assert memory_of(part, [whole]) == (40192 * MI, "NodeLabels")


def test_a_gpu_of_a_class() -> None:
    status = {"memory": {"perGPU": "46068Mi", "source": "NodeLabels", "overhead": "900Mi"}}
    found = gpu_of(gpu_class(status, computeCapability="8.9"), [node(2), node(8)])
    assert found == GPU("l40s", 48 * GI, 900 * MI, (8, 9), 8)
    assert gpu_of(gpu_class(), []) == GPU("l40s", 48 * GI)


def replica(gpu: GPU, config: dict[str, Any], weights: int, tensor: int = 1, tuning: Tuning | None = None) -> Sized:
    found = size(
        facts_of(config, source="x", weight_bytes=weights), gpu,
        tensor=tensor, context_length=4096, overrides=Sizing(), tuning=tuning or SGLangTuning(),
    )  # fmt: skip
    assert isinstance(found, Sized)
    return found


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-8b", MI),
        ("gpt-oss-20b", 4 * MI),  # a token's bytes are no whole number
        ("qwen3-next-80b", 160 * MI),  # states of 74 MiB come in whole numbers
        ("qwen2.5-vl-7b", MI),
        ("deepseek-v2-lite", MI),
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_engines_own_figure_gives_back_the_overhead_that_it_had(name: str, near: int, tensor: int) -> None:
    config, weights = configs.ALL[name], 20 * GI
    real = GPU("h200", 143771 * MI, overhead_bytes=1234 * MI)
    assumed = GPU("h200", 143771 * MI)
    tokens = replica(real, config, weights, tensor).kv_tokens
    assert tokens is not None
    before = replica(assumed, config, weights, tensor)
    learned = implied_overhead(assumed, before, tokens, SGLangTuning())
    assert learned == pytest.approx(1234 * MI, abs=near)
    corrected = GPU("h200", 143771 * MI, overhead_bytes=learned)
    after = replica(corrected, config, weights, tensor)
    assert after.kv_tokens == pytest.approx(tokens, rel=2e-3)
    # What was learned does not move by having been learned: it would be written again and again.
    assert implied_overhead(corrected, after, tokens, SGLangTuning()) == learned


def test_replicas_of_all_sizes_correct_the_same_figure() -> None:
    real, assumed = GPU("h200", 143771 * MI, overhead_bytes=2 * GI), GPU("h200", 143771 * MI)
    learned = []
    for tensor in (1, 2, 4, 8):
        tokens = replica(real, configs.LLAMA_70B, 100 * GI, tensor).kv_tokens or 0
        learned.append(
            implied_overhead(assumed, replica(assumed, configs.LLAMA_70B, 100 * GI, tensor), tokens, SGLangTuning())
        )
    assert learned == pytest.approx([2 * GI] * 4, abs=MI)


@pytest.mark.parametrize(
    ("tokens", "tuning"),
    [
        (20_000, SGLangTuning(max_total_tokens=20_000)),  # the arguments set it
        (183_986, SGLangTuning(device="cpu")),
        (5_000, SGLangTuning()),  # an engine that found 22 GiB less: a simulator, or other weights
        (400_000, SGLangTuning()),
        (0, SGLangTuning()),
    ],
)
def test_numbers_that_say_nothing_of_the_class(tokens: int, tuning: Tuning) -> None:
    gpu = GPU("l40s", 46068 * MI)
    assert implied_overhead(gpu, replica(gpu, configs.LLAMA_8B, 16 * GI), tokens, tuning) is None


def test_a_little_more_than_there_should_be_means_that_nothing_was_gone() -> None:
    none_gone = GPU("l40s", 46068 * MI, overhead_bytes=0)
    found = replica(none_gone, configs.LLAMA_8B, 16 * GI)
    assert implied_overhead(none_gone, found, (found.kv_tokens or 0) + 1000, SGLangTuning()) == 0
