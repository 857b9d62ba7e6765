#!/usr/bin/env python3
"""Make the tiny models that the image, the demo and the tests serve: random weights, real tokenizers.

Usage: make_models.py [OUTDIR [ADAPTERS]]

Without arguments into rootfs/opt/shoal/models beside this file, and the LoRA adapters of tiny-chat into
rootfs/opt/shoal/adapters; with OUTDIR alone no adapters are made.

Each model is a Llama of 0.6 MB that every engine can load, each adapter has 0.1 MB. Needs tokenizers and safetensors
only, takes a second, and writes the same bytes on each run. Text from a real engine is readable ASCII without meaning.
"""

import hashlib
import json
import random
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import TensorSpec, serialize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY, HIDDEN, LAYERS, KV_HEADS, INTERMEDIATE, CONTEXT = 512, 64, 2, 1, 128, 4096
HEAD = 32
"""Width of a head: the smallest that vLLM's attention on a CPU knows. With a smaller one it starts, and dies of the
first request."""
SPECIAL = ["<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Spec:
    """One model: its name, and what makes it differ from the others."""

    name: str
    seed: int
    text: str
    heads: int = 2
    """Of attention; as many GPUs can share the model."""


MODELS = (
    Spec(
        "tiny-chat",
        0,
        "the quick brown fox jumps over the lazy dog. hello world, how are you today? "
        "kubernetes pods serve models and adapters while tests count the tokens. ",
    ),
    Spec(
        "tiny-code",
        1,
        "def main(): return 0 if value is None else len(items) for item in range(10): print(item) "
        "import json, async def serve(request): await send(response) class Model: pass # comment ",
        heads=4,
    ),
)


@dataclass(frozen=True)
class AdapterSpec:
    """One LoRA adapter of tiny-chat: its folder, and what makes it differ from the others."""

    name: str
    seed: int


ADAPTER_BASE, RANK, ALPHA = "tiny-chat", 8, 16
ADAPTERS = (
    AdapterSpec("support-v1", 11),
    AdapterSpec("support-v2", 12),
    AdapterSpec("legal", 13),
    AdapterSpec("poet", 14),
)
Weights = dict[str, tuple[list[int], "array[float]"]]
"""Shapes and values in float32."""


def shapes(heads: int) -> dict[str, tuple[int, int]]:
    """What each linear layer writes and reads."""
    return {
        "self_attn.q_proj": (heads * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads * HEAD),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def make_tokenizer(folder: Path, text: str) -> Tokenizer:
    """A byte-level BPE: every string can be encoded, so no unknown token is needed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|eos|>",
            "additional_special_tokens": SPECIAL[2:],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer


def noise(source: random.Random, rows: int, columns: int, scale: float) -> "array[float]":
    return array("f", (source.gauss(0, scale) for _ in range(rows * columns)))


def make_weights(tokenizer: Tokenizer, spec: Spec) -> Weights:
    source = random.Random(spec.seed)  # noqa: S311 - reproducible on purpose
    weights: Weights = {}

    def put(name: str, shape: list[int], values: "array[float]") -> None:
        weights[name] = (shape, values)

    put("model.embed_tokens.weight", [VOCABULARY, HIDDEN], noise(source, VOCABULARY, HIDDEN, 0.08))
    put("model.norm.weight", [HIDDEN], array("f", [1.0] * HIDDEN))
    # No output for tokens other than plain ASCII (special ones, the end of sequence, raw bytes): answers are readable,
    # come token by token, and run to max_tokens.
    head = noise(source, VOCABULARY, HIDDEN, 0.48)
    decoder = decoders.ByteLevel()
    spoken: set[int] = set()
    for token, index in tokenizer.get_vocab().items():
        text = "" if token in SPECIAL else decoder.decode([token])
        if text and text.isascii() and text.isprintable():
            spoken.add(index)
    for index in set(range(VOCABULARY)) - spoken:
        head[index * HIDDEN : (index + 1) * HIDDEN] = array("f", [0.0] * HIDDEN)
    put("lm_head.weight", [VOCABULARY, HIDDEN], head)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(f"model.layers.{layer}.{norm}.weight", [HIDDEN], array("f", [1.0] * HIDDEN))
        for name, (rows, columns) in shapes(spec.heads).items():
            put(f"model.layers.{layer}.{name}.weight", [rows, columns], noise(source, rows, columns, 0.08))
    return weights


def make_model(folder: Path, spec: Spec) -> None:
    """Writes one model into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, spec.text)
    bos, eos = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "torch_dtype": "float32",
        },
    )
    write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    write_weights(folder / "model.safetensors", make_weights(tokenizer, spec))


def make_adapter(folder: Path, spec: AdapterSpec) -> None:
    """Writes one adapter into `folder`, as PEFT saves it; it changes every linear layer, which shows in each token."""
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(spec.seed)  # noqa: S311 - reproducible on purpose
    weights: Weights = {}
    adapted = shapes(next(model.heads for model in MODELS if model.name == ADAPTER_BASE))
    for layer in range(LAYERS):
        for name, (rows, columns) in adapted.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{path}.lora_A.weight"] = ([RANK, columns], noise(source, RANK, columns, 0.2))
            weights[f"{path}.lora_B.weight"] = ([rows, RANK], noise(source, rows, RANK, 0.2))
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": ADAPTER_BASE,
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "modules_to_save": None,
            "target_modules": sorted(name.partition(".")[2] for name in adapted),
        },
    )
    write_weights(folder / "adapter_model.safetensors", weights)


def write_weights(path: Path, weights: Weights) -> None:
    if sys.byteorder == "big":
        for _, values in weights.values():
            values.byteswap()
    # A TensorSpec holds an address only: `weights` keeps the values alive.
    specs = {
        name: TensorSpec(
            dtype="float32",
            shape=shape,
            data_ptr=values.buffer_info()[0],
            data_len=len(values) * values.itemsize,
        )
        for name, (shape, values) in weights.items()
    }
    # Not serialize_file: it writes with mode 0600, and engines do not run as the owner.
    path.write_bytes(serialize(specs, {"format": "pt"}))


def digest(folder: Path) -> str:
    """Of all files of a model, for people to compare."""
    sha = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        sha.update(file.name.encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()[:12]


def main() -> None:
    default = Path(__file__).parent / "rootfs" / "opt" / "shoal"
    given = [Path(argument) for argument in sys.argv[1:]] or [default / "models", default / "adapters"]
    for spec in MODELS:
        make_model(given[0] / spec.name, spec)
        report("models", given[0] / spec.name)
    for spec in ADAPTERS if len(given) > 1 else ():
        make_adapter(given[1] / spec.name, spec)
        report("adapters", given[1] / spec.name)


def report(what: str, folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{what}: {folder.name}: {size / 1e6:.1f} MB, sha256 {digest(folder)}")  # noqa: T201


if __name__ == "__main__":
    main()
