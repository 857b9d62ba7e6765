"""An adapter's files as SGLang reads them: what a load refuses, and what it lets pass that kills the engine later.

A load looks at the configuration and reads the tensors. Whether their shapes fit the base model shows only when the
first request copies them to a GPU slot, by an assertion that ends the engine's scheduler.
"""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from shoal_dev.sim.signatures import WEIGHTS, signature_of

_FUSED: Final = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}  # fmt: skip
"""SGLang loads these into one buffer."""
_HEADS: Final = ("embed_tokens", "lm_head")
"""Left out where the adapter does not name them."""
_NAME: Final = re.compile(r"layers\.(\d+)\..*?\.?(\w+)\.lora_(A|B)\.")


class AdapterFilesError(Exception):
    """Not loaded; the message is the one of SGLang or of a library below it."""


@dataclass(frozen=True, slots=True)
class BaseDimensions:
    """The base model's dimensions."""

    layers: int
    hidden: int
    query: int
    key: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "BaseDimensions":
        """Of a config.json; what it leaves out is as in Llama."""
        hidden, heads = int(config.get("hidden_size", 64)), int(config.get("num_attention_heads", 4))
        head = int(config.get("head_dim") or hidden // heads)
        return cls(
            layers=int(config.get("num_hidden_layers", 2)),
            hidden=hidden,
            query=heads * head,
            key=int(config.get("num_key_value_heads", heads)) * head,
            feed_forward=int(config.get("intermediate_size", 2 * hidden)),
            vocabulary=int(config.get("vocab_size", 512)),
        )

    def widths(self, module: str) -> tuple[int, int] | None:
        """What a module reads and writes; None: not known here."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.feed_forward),
            "up_proj": (self.hidden, self.feed_forward),
            "down_proj": (self.feed_forward, self.hidden),
        }.get(module)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """adapter_config.json, as far as it decides."""

    raw: bytes
    rank: int
    modules: frozenset[str]
    """Normalized; `all` stands for whatever the pool has."""
    dora: bool
    adds_tokens: bool


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A loaded adapter."""

    bytes: int
    signature: str
    kills: str | None
    """Why its first request ends the engine; None: it does not."""


def config_of(path: str, base: BaseDimensions) -> AdapterConfig:
    """Raises AdapterFilesError."""
    folder = Path(path)
    if not folder.is_dir():
        # SGLang takes it for a repository of the hub.
        raise AdapterFilesError(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. "
            "Use `repo_type` argument if needed."
        )
    try:
        raw = (folder / "adapter_config.json").read_bytes()
        config: dict[str, Any] = json.loads(raw)
        tokens = _json(folder / "added_tokens.json")
        return AdapterConfig(
            raw=raw,
            rank=int(config["r"]),
            modules=normalized(config["target_modules"]),
            dora=bool(config.get("use_dora")),
            adds_tokens=any(int(token) >= base.vocabulary for token in tokens.values()),
        )
    except KeyError as error:
        raise AdapterFilesError(str(error)) from None
    except (OSError, ValueError) as error:
        raise AdapterFilesError(str(error)) from None


def normalized(modules: object) -> frozenset[str]:
    """As `get_normalized_target_modules`. Raises AdapterFilesError."""
    if isinstance(modules, str):
        if modules not in ("all", "all-linear"):
            raise AdapterFilesError("Only 'all' or 'all-linear' can be used as the string for target module")
        return frozenset({"all"})
    leaves = (str(name).rpartition(".")[2] for name in cast("Iterable[object]", modules))
    return frozenset(_FUSED.get(leaf, leaf) for leaf in leaves)


def weights_of(path: str, config: AdapterConfig, base: BaseDimensions, modules: frozenset[str]) -> AdapterFiles:
    """Reads the weights; `modules` are the pool's, normalized. Raises AdapterFilesError."""
    folder = Path(path)
    files = [file for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]
    if not files:
        raise AdapterFilesError(f"Cannot find any model weights with `{path}`")
    try:
        shapes = {name: shape for file in files if file.suffix == ".safetensors" for name, shape in shapes_of(file)}
        size = sum(file.stat().st_size for file in files)
        return AdapterFiles(size, signature_of(config.raw, folder), _kills(shapes, config, base, modules))
    except OSError as error:
        raise AdapterFilesError(str(error)) from None


def shapes_of(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a safetensors file. Raises AdapterFilesError as its library words it."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header: dict[str, Any] = json.loads(file.read(min(length, size)))
    except (struct.error, ValueError):
        raise AdapterFilesError("Error while deserializing header: invalid JSON in header") from None
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if size != 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0):
        raise AdapterFilesError("Error while deserializing header: incomplete metadata, file not fully covered")
    return [(name, tuple(tensor["shape"])) for name, tensor in tensors.items()]


def _kills(
    shapes: Mapping[str, tuple[int, ...]], config: AdapterConfig, base: BaseDimensions, pool: frozenset[str]
) -> str | None:
    layers: dict[int, dict[str, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        match = _NAME.search(name)
        if match is not None:
            layers[int(match[1])][match[2]][match[3]] = shape
    for number, modules in sorted(layers.items()):
        if number >= base.layers:
            raise AdapterFilesError(f"index {number} is out of range")
        if "q_proj" in modules and "v_proj" not in modules:
            raise AdapterFilesError(f"'base_model.model.model.layers.{number}.self_attn.v_proj.lora_A.weight'")
        foreign = {m for m in modules if _FUSED.get(m, m) not in pool and "all" not in pool and m not in _HEADS}
        lone = {"k_proj", "v_proj"} & modules.keys() if "q_proj" not in modules else set[str]()
        lone |= {"up_proj"} & modules.keys() if "gate_proj" not in modules else set[str]()
        lone |= foreign
        if lone:
            return f"Cannot find target module name for {sorted(lone)[0]} of layer {number} in {sorted(pool)}"
        for module, pair in modules.items():
            widths = base.widths(module)
            if widths is None:
                continue
            found = (pair.get("A"), pair.get("B"))
            if found != ((config.rank, widths[0]), (widths[1], config.rank)):
                return f"LoRA buffer shape {widths} of {module} does not match weight shape {found}."
    return None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
