"""How a checkpoint's weights are quantized, by SGLang's names, and in which blocks."""

from collections.abc import Mapping
from typing import Any

from shoal.core.architectures.config import Config, as_list, as_mapping, whole

_FP8_TENSORS = ("F8_E4M3", "F8_E5M2")


def table_of(config: Config) -> Mapping[str, Any]:
    """The quantization's own table; empty for a checkpoint that has none."""
    for source in (config.root, config.text):
        for key in ("quantization_config", "compression_config"):
            table = as_mapping(source.get(key))
            if table:
                return table
    return {}


def method(config: Config, tensor_dtypes: Mapping[str, int] | None) -> str | None:
    """SGLang's name of the method (fp8, awq, gptq, modelopt_fp4, ...); None when the weights are not quantized.

    Where config.json is silent, tensors that are mostly of an 8-bit float say fp8 (the table then stands in a file of
    its own, such as hf_quant_config.json).
    """
    table = table_of(config)
    if table:
        name = str(table.get("quant_method") or "modelopt").lower()
        if name != "modelopt":
            return "compressed-tensors" if name == "compressed_tensors" else name
        algorithm = str(table.get("quant_algo") or "").upper()
        if "MIXED" in algorithm:
            return "modelopt_mixed"
        return "modelopt_fp4" if "FP4" in algorithm else "modelopt_fp8" if "FP8" in algorithm else "modelopt"
    if tensor_dtypes:
        eight_bit = sum(tensor_dtypes.get(name, 0) for name in _FP8_TENSORS)
        if 2 * eight_bit > sum(tensor_dtypes.values()):
            return "fp8"
    return None


def block(config: Config) -> int:
    """Columns that share a scale and therefore stay on one GPU; 1 when any number may be cut off."""
    table = table_of(config)
    if size := as_list(table.get("weight_block_size")):
        return max((n for item in size if (n := whole(item))), default=1)
    if (group := whole(table.get("group_size"))) is not None and group > 0:
        return group
    groups = [
        n
        for entry in (as_mapping(table.get("config_groups")) or {}).values()
        if (weights := as_mapping((as_mapping(entry) or {}).get("weights"))) and (n := whole(weights.get("group_size")))
    ]
    return max(groups, default=1)
