"""config.json as SGLang reads it: the language model's part, with the defaults that files leave out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, cast

_TEXT_KEYS: Final = ("thinker_config", "llm_config", "language_config", "text_config")
"""Where multimodal configs keep the language model's part; the first that is there counts."""
_LENGTH_KEYS: Final = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
_FROM_ROOT: Final = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "vocab_size")
"""What a nested part takes from the file's top level when it does not say it itself."""

_GEMMA: Final = {"head_dim": 256, "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4}
_QWEN3: Final = {"head_dim": 128}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"max_position_embeddings": 131072, "vocab_size": 262208, "sliding_window": 4096},
    "gemma3n_text": _GEMMA | {"num_key_value_heads": 2, "vocab_size": 262400, "max_position_embeddings": 32768},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3": _QWEN3,
    "qwen3_next": {"head_dim": 256},
    "qwen3_5_text": {"head_dim": 256},
    "qwen3_5_moe_text": {"head_dim": 256},
    "qwen3_vl_text": _QWEN3,
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "nemotron_h": {"head_dim": 128},
}
"""Defaults of transformers' config classes that published files rely on, by `model_type`."""
MOST: Final = 10**12
"""No size that a config names is larger: no vocabulary, no width, no context."""
MOST_LAYERS: Final = 10_000
_LAYER_KEYS: Final = frozenset({"num_hidden_layers", "n_layer", "num_layers", "n_layers"})
_MOST_FACTOR: Final = 1e6


class UnknownConfig(ValueError):
    """The file is no model's config; the message says what was found instead."""


@dataclass(frozen=True, slots=True)
class Config:
    """A config.json."""

    root: Mapping[str, Any]
    text: Mapping[str, Any]
    """The language model's part, with what it takes from the top level and the defaults of its type."""
    architectures: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    def number(self, *keys: str) -> int | None:
        """The first of these keys that holds a whole number; None when none does. Raises UnknownConfig for one that no
        model has."""
        for key in keys:
            found = whole(self.text.get(key))
            if found is not None:
                if key in _LAYER_KEYS and found > MOST_LAYERS:
                    raise UnknownConfig(f"config.json says {key} = {found}, and no model has more than {MOST_LAYERS}")
                return found
        return None

    def table(self, key: str) -> Mapping[str, Any]:
        """The nested object under a key; empty when there is none."""
        return as_mapping(self.text.get(key)) or {}

    def strings(self, key: str) -> tuple[str, ...]:
        """The list of strings under a key, which has an entry per layer; empty when there is none. What is no string
        or number stands as an empty one. Raises UnknownConfig for a list that is longer than any model."""
        found = as_list(self.text.get(key))
        if len(found) > MOST_LAYERS:
            raise UnknownConfig(f"config.json lists {len(found)} entries in {key}, and {MOST_LAYERS} are the most")
        return tuple(str(v) if isinstance(v, str | int | float) else "" for v in found)


def whole(value: object) -> int | None:
    """A whole number above or equal to zero, or None. Raises UnknownConfig for one that no model has."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        return None
    if value > MOST:
        raise UnknownConfig(f"config.json holds a number above {MOST}, and no size of a model is larger")
    return int(value) if value == int(value) else None


def as_mapping(value: object) -> Mapping[str, Any] | None:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else None


def as_list(value: object) -> Sequence[object]:
    """The list, or nothing."""
    return cast(list[object], value) if isinstance(value, list) else ()


def read(config: Mapping[str, Any]) -> Config:
    """Raises UnknownConfig."""
    names = config.get("architectures")
    if not as_list(names) or not all(isinstance(n, str) and n for n in as_list(names)):
        kind = config.get("_class_name") or config.get("peft_type") or config.get("model_type")
        seen = (
            f"it describes {kind[:80]!r}"
            if isinstance(kind, str)
            else f"its keys are {', '.join(sorted(config)[:8])[:200]}"
        )
        raise UnknownConfig(f"config.json names no `architectures`, so no engine can serve it: {seen or 'it is empty'}")
    architectures = tuple(cast(list[str], names))
    old_llava = architectures[0].startswith("Llava") and architectures[0].endswith("ForCausalLM")
    found = config if old_llava else _nested(config)
    text: dict[str, Any] = dict(found)
    if found is not config:
        text = {key: config[key] for key in _FROM_ROOT if key in config} | text
    model_type = text.get("model_type")
    if not isinstance(model_type, str) and found is not config:
        # Files of multimodal models leave the type of the part to the whole's class.
        model_type = f"{config.get('model_type')}_text"
    missing = _DEFAULTS.get(model_type if isinstance(model_type, str) else "", {})
    return Config(config, {**missing, **{k: v for k, v in text.items() if v is not None}}, architectures)


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _TEXT_KEYS:
        part = as_mapping(config.get(key))
        if part is not None:
            inner = as_mapping(part.get("text_config")) if key == "thinker_config" else None
            return inner if inner is not None else part
    return config


def context_length(config: Config) -> int | None:
    """Tokens, as SGLang derives them: the first of its keys, times the factor of a scaled rotary embedding unless that
    one says its original length. None when the file names no length."""
    length = config.number(*_LENGTH_KEYS)
    if length is None:
        return None
    scaling = config.table("rope_scaling") or config.table("rope_parameters")
    # A table by layer type has no factor of its own; Gemma's flat one is turned into such a table.
    by_layer = any(isinstance(v, Mapping) for v in scaling.values()) or "gemma3" in str(config.text.get("model_type"))
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor", 1)
    if by_layer or "original_max_position_embeddings" in scaling or kind == "llama3":
        factor = 1
    if not isinstance(factor, int | float) or not 0 < factor <= _MOST_FACTOR:
        return length
    return int(length * factor)
