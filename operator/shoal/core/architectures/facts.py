"""The facts of one revision of a source, from its config.json and what its weight files' headers say."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.api.artifact import ArtifactFacts
from shoal.core.architectures import names, quantization, shapes
from shoal.core.architectures.config import Config, UnknownConfig, as_mapping, context_length, read, whole
from shoal.core.architectures.geometry import geometry, heads
from shoal.core.sizing.cell import bytes_per_token

_SHORT = 128
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of a config with its layers for multi-token prediction."""
_MTP_NOT_SAID = "MiMoV2"
"""Beginning of the names of architectures whose config does not say how many they have."""


def facts_of(
    config: Mapping[str, Any],
    *,
    source: str,
    revision: str | None = None,
    digest: str | None = None,
    parameters: int | None = None,
    weight_bytes: int | None = None,
    file_bytes: int | None = None,
    tensor_dtypes: Mapping[str, int] | None = None,
) -> ArtifactFacts:
    """The facts of weights with this config.json.

    `tensor_dtypes` are bytes per tensor type of the safetensors headers (BF16, F8_E4M3, ...). An architecture that is
    not known is no error: its `kv.kind` is Unknown. Where a checkpoint keeps its quantization in hf_quant_config.json,
    its table `quantization` may be given as the config's `quantization_config`. Raises UnknownConfig for a config that
    is no model's, or has sizes that none has.
    """
    try:
        return _facts(config, source, revision, digest, parameters, weight_bytes, file_bytes, tensor_dtypes)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise UnknownConfig(f"config.json makes no sense: {where}: {fault['msg']}") from None


def _facts(
    config: Mapping[str, Any],
    source: str,
    revision: str | None,
    digest: str | None,
    parameters: int | None,
    weight_bytes: int | None,
    file_bytes: int | None,
    tensor_dtypes: Mapping[str, int] | None,
) -> ArtifactFacts:
    read_config = read(config)
    kv = geometry(read_config)
    dtype = _dtype(read_config)
    dense, expert = shapes.divisors(read_config)
    attention = shapes.attention_parameters(read_config, kv)
    # Of packed weights the headers count fewer parameters than there are; attention is often not packed at all.
    stored = weight_bytes / parameters if weight_bytes and parameters else 2.0
    per_parameter = min(stored, float(shapes.item_bytes(dtype)))
    vision = as_mapping(config.get("vision_config"))
    per_token = bytes_per_token(kv, attention_tensor=1, kv_dtype=kv.dtype or dtype)
    return ArtifactFacts(
        source=source,
        revision=revision,
        digest=digest,
        architecture=read_config.architecture[:_SHORT],
        parameters=parameters,
        weight_bytes=weight_bytes,
        file_bytes=file_bytes,
        dtype=dtype,
        quantization=(quantization.method(read_config, tensor_dtypes) or "")[:_SHORT] or None,
        context_length=context_length(read_config) or None,
        embedding_bytes=shapes.embedding_bytes(read_config, dtype),
        attention_bytes=None if attention is None else int(attention * per_parameter),
        attention_heads=heads(read_config) or None,
        tensor_divisor=dense,
        expert_divisor=expert,
        widths=shapes.widths(read_config, kv),
        vocabulary=read_config.number("vocab_size") or None,
        mtp_layers=_mtp_layers(read_config),
        experts=shapes.experts(read_config),
        task="Embed" if read_config.architecture in names.EMBEDS else "Generate",
        labels=_labels(config) if read_config.architecture in names.CLASSIFIES else None,
        multimodal=read_config.architecture in names.MULTIMODAL,
        # SGLang's own defaults for an encoder that does not say its size.
        vision_layers=None if vision is None else (_int(vision, "num_hidden_layers", 24)),
        vision_width=None if vision is None else (_int(vision, "hidden_size", 1024)),
        kv=kv,
        kv_bytes_per_token=None if per_token is None else -int(-per_token // 1),
    )


def _mtp_layers(config: Config) -> int | None:
    if config.architecture.startswith(_MTP_NOT_SAID):
        return None
    return config.number(*_MTP) or 0


def _labels(config: Mapping[str, Any]) -> int | None:
    """As transformers counts them: `id2label` wins over `num_labels`, and a config without either has two."""
    named = as_mapping(config.get("id2label"))
    return len(named) if named else whole(config.get("num_labels")) or 2


def _int(table: Mapping[str, Any], key: str, default: int) -> int:
    value = whole(table.get(key))
    return default if value is None else value


def _dtype(config: Config) -> str | None:
    for source in (config.text, config.root):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if isinstance(value, str) and value:
                return value.removeprefix("torch.")[:_SHORT]
    return None
