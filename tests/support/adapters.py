"""Tiny PEFT adapters for the tiny models, with visibly different weights for each seed."""

import json
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from safetensors import TensorSpec, serialize

from shoal.api.artifact import LayerWidths
from shoal.core.lora.format.check import BaseModelFacts
from tests.support.engines import MODEL, make_models

ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 8,
    modules: Sequence[str] = ALL,
    layers: int | None = None,
    alpha: int = 16,
    base: Path = MODEL,
    widths: Mapping[str, tuple[int, int]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes an adapter for the model in `base` into `folder`, and returns that.

    `widths` says for a module what its tensors read and write instead of what the base does; `config` replaces fields
    of adapter_config.json.
    """
    make_models()
    dims = json.loads((base / "config.json").read_text())
    source = random.Random(seed)  # noqa: S311 - reproducible on purpose
    tensors: dict[str, tuple[list[int], array[float]]] = {}
    for layer in range(dims["num_hidden_layers"] if layers is None else layers):
        for module in modules:
            reads, writes = {**layer_widths(dims), **(widths or {})}[module]
            part = "self_attn" if module[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            for letter, shape in (("A", [rank, reads]), ("B", [writes, rank])):
                values = array("f", (source.gauss(0, 0.3) for _ in range(shape[0] * shape[1])))
                if sys.byteorder == "big":
                    values.byteswap()
                tensors[f"{name}.lora_{letter}.weight"] = (shape, values)
    folder.mkdir(parents=True, exist_ok=True)
    specs = {
        name: TensorSpec(
            dtype="float32", shape=shape, data_ptr=values.buffer_info()[0], data_len=len(values) * values.itemsize
        )
        for name, (shape, values) in tensors.items()
    }
    (folder / "adapter_model.safetensors").write_bytes(serialize(specs, {"format": "pt"}))
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "target_modules": sorted(modules), "inference_mode": True,
        "base_model_name_or_path": base.name, "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields | dict(config or {}), indent=1))
    return folder


def layer_widths(dims: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """What each linear layer of a model with this config.json reads and writes."""
    hidden, ffn, head = dims["hidden_size"], dims["intermediate_size"], dims["head_dim"]
    query, key = dims["num_attention_heads"] * head, dims["num_key_value_heads"] * head
    return {
        "q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden),
        "gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden),
    }  # fmt: skip


def base_of(folder: Path) -> BaseModelFacts:
    """What Shoal's checks know of the model in the folder."""
    config = json.loads((folder / "config.json").read_text())
    head = config["head_dim"]
    widths = LayerWidths(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        query=config["num_attention_heads"] * head,
        key=config["num_key_value_heads"] * head,
        feed_forward=config["intermediate_size"],
    )
    return BaseModelFacts(widths, config["vocab_size"])
