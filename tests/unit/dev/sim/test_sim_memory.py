"""What the simulator says of its KV cache is what Shoal predicts of it, so that calibration works without a GPU."""

import json
from pathlib import Path

import pytest

from shoal.agent.facts import FactsRequest, read_facts
from shoal.api.model import Sizing
from shoal.artifacts import Settings
from shoal.core.sizing import GPU, Sized, implied_overhead, size
from shoal.engine.sglang.tuning import tuning_of
from shoal.engine.vllm.tuning import tuning_of as vllm_tuning
from shoal_dev.sim import memory, timing
from shoal_dev.sim.args import parse
from shoal_dev.sim.vllm import args as vllm_args
from shoal_dev.sim.vllm import memory as vllm_memory
from tests.support.sources import LOCAL

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 1 MiB of weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1 << 19], "data_offsets": [0, 1 << 20]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1 << 20))
    return tmp_path


@pytest.mark.parametrize("extra", [(), ("--mem-fraction-static=0.5",), ("--max-total-tokens=5000",)])
async def test_the_engine_says_what_was_predicted(folder: Path, extra: tuple[str, ...]) -> None:
    gpu = GPU("l4-24gb", 23034 << 20)
    facts = await read_facts(FactsRequest(f"file://{folder}", settings=Settings(network=LOCAL)))
    tuning = tuning_of(extra)
    predicted = size(facts, gpu, tensor=None, context_length=4096, overrides=Sizing.model_validate({}), tuning=tuning)
    assert isinstance(predicted, Sized)
    args = parse(["--model-path", str(folder), "--sim-gpu=l4", "--context-length=4096", *extra], {})
    found = memory.of(args)
    assert (found.kv_tokens, found.max_requests) == (predicted.kv_tokens, predicted.max_requests)
    if tuning.max_total_tokens is None:
        overhead = implied_overhead(gpu, predicted, found.kv_tokens, tuning)
        assert overhead == pytest.approx(predicted.breakdown.overhead, rel=0.01), "calibration finds what was assumed"


def test_the_memory_of_the_gpu_is_told_by_the_node(folder: Path) -> None:
    def tokens(environ: dict[str, str]) -> int:
        return memory.of(parse(["--model-path", str(folder), "--sim-gpu=h100"], environ)).kv_tokens

    assert tokens({"SHOAL_SIM_GPU_MEMORY_MIB": "23034"}) < tokens({}) / 3


def test_the_slots_of_adapters_take_their_memory_from_the_cache(folder: Path) -> None:
    given = ["--model-path", str(folder), "--sim-gpu=l4"]
    lora = ["--enable-lora", "--max-lora-rank=64", "--max-loras-per-batch=8", "--lora-target-modules"]
    plain = memory.of(parse(given, {})).kv_tokens
    some = memory.of(parse([*given, *lora, "q_proj"], {})).kv_tokens
    more = memory.of(parse([*given, *lora, "q_proj", "o_proj", "gate_proj", "down_proj"], {})).kv_tokens
    assert plain > some > more


def test_the_cache_of_a_larger_model_can_be_asked_for(folder: Path) -> None:
    given = ["--model-path", str(folder), "--sim-gpu=l4"]
    assert memory.of(parse([*given, "--sim-kv=llama-3.1-8b"], {})).kv_tokens == timing.kv_tokens("l4:bfloat16", 1, 0.9)
    with pytest.raises(SystemExit):
        parse([*given, "--sim-kv=gpt"], {})


def test_what_is_not_known_counts_as_the_larger_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-knows", "architectures": ["Nobody"]}))
    args = parse(["--model-path", str(tmp_path), "--sim-gpu=l4"], {})
    assert memory.of(args).kv_tokens == timing.kv_tokens("l4:bfloat16", 1, 0.9)


def test_weights_that_leave_no_room_are_refused_in_the_words_of_the_engine(folder: Path) -> None:
    args = parse(["--model-path", str(folder)], {"SHOAL_SIM_GPU_MEMORY_MIB": "500"})
    with pytest.raises(ValueError, match=r"Not enough memory\. Please try to increase --mem-fraction-static"):
        memory.of(args)


# --- as vLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("--gpu-memory-utilization=0.5",), ("--kv-cache-memory-bytes=67108864",)])
async def test_a_simulated_vllm_says_what_was_predicted(folder: Path, extra: tuple[str, ...]) -> None:
    facts = await read_facts(FactsRequest(f"file://{folder}", settings=Settings(network=LOCAL)))
    args = vllm_args.parse([str(folder), "--sim-gpu=l4", "--max-model-len=4096", *extra], {})
    tuning = vllm_tuning([*extra, f"--block-size={args.block_size}"])
    predicted = size(
        facts, GPU("l4-24gb", 23034 << 20), tensor=1, context_length=4096, overrides=Sizing(), tuning=tuning
    )
    assert isinstance(predicted, Sized)
    found = vllm_memory.of(args, 4096)
    # One block is never used.
    assert (found.blocks - 1) * args.block_size == predicted.kv_tokens


def test_a_simulated_vllm_without_room_for_one_request_ends_in_the_engines_words(folder: Path) -> None:
    args = vllm_args.parse([str(folder), "--kv-cache-memory-bytes=65536"], {})
    with pytest.raises(ValueError, match="To serve at least one request with the model's max seq len"):
        vllm_memory.of(args, 4096)
