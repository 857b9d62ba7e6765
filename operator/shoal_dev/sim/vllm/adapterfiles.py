"""An adapter's files as vLLM reads them: what it refuses, and what it takes although the answers are wrong."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shoal_dev.sim.adapterfiles import AdapterFiles, AdapterFilesError, BaseDimensions, shapes_of
from shoal_dev.sim.signatures import WEIGHTS, signature_of

CONFIG: Final = "adapter_config.json"
_NAME: Final = re.compile(r"layers\.(\d+)\..*?(\w+)\.lora_(A|B)\.")


class AdapterMissingError(AdapterFilesError):
    """There is no adapter at the path."""


def read(path: str, base: BaseDimensions, max_rank: int) -> AdapterFiles:
    """Raises AdapterMissingError, and AdapterFilesError with what a worker of vLLM says."""
    folder = Path(path)
    try:
        raw = (folder / CONFIG).read_bytes()
    except OSError:
        raise AdapterMissingError(path) from None
    try:
        config: dict[str, Any] = json.loads(raw)
    except ValueError as error:
        raise AdapterFilesError(str(error)) from None
    _check(config, max_rank)
    files = [file for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]
    if not files:
        raise AdapterFilesError("<path> doesn't contain tensors")
    shapes = {name: shape for file in files if file.suffix == ".safetensors" for name, shape in shapes_of(file)}
    right = _fits(shapes, int(config["r"]), max_rank, base)
    sign = signature_of(raw, folder)
    # With wrong weights the answers are nobody's, so they must not carry the signature of the files.
    shown = sign if right else hashlib.sha256(f"misfit {sign}".encode()).hexdigest()[:8]
    return AdapterFiles(sum(file.stat().st_size for file in files), shown, None)


def _check(config: Mapping[str, Any], max_rank: int) -> None:
    missing = {field for field in ("r", "lora_alpha", "target_modules") if field not in config}
    if missing:
        raise AdapterFilesError(f"Missing required configuration fields: {missing}")
    problems: list[str] = []
    if config["r"] > max_rank:
        problems.append(f"LoRA rank {config['r']} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        problems.append("Adapter bias is not supported.")
    if config.get("modules_to_save"):
        problems.append(
            'vLLM only supports modules_to_save being either None or ["classifier", "score"] for classification '
            f"models. Unsupported modules_to_save: {config['modules_to_save']}"
        )
    if config.get("use_dora"):
        problems.append("vLLM does not yet support DoRA.")
    if problems:
        raise AdapterFilesError(" ".join(problems))


def _fits(shapes: Mapping[str, tuple[int, ...]], rank: int, max_rank: int, base: BaseDimensions) -> bool:
    """Whether the answers are right. Raises AdapterFilesError for what does not go into a slot."""
    right = True
    for name, shape in shapes.items():
        match = _NAME.search(name)
        if match is None:
            continue
        widths = base.widths(match[2])
        if widths is None:
            found = name.partition(".lora_")[0].removeprefix("base_model.model.")
            raise AdapterFilesError(
                f"While loading <path>, expected target modules in {set(_MODULES)} but received ['{found}']. Please "
                "verify that the loaded LoRA module is correct"
            )
        slot = (max_rank, widths[0]) if match[3] == "A" else (widths[1], max_rank)
        wanted = (rank, widths[0]) if match[3] == "A" else (widths[1], rank)
        for at in (0, 1):
            if shape[at] > slot[at]:
                raise AdapterFilesError(
                    f"The size of tensor a ({slot[at]}) must match the size of tensor b ({shape[at]}) at non-singleton "
                    f"dimension {at}"
                )
        right = right and shape == wanted and int(match[1]) < base.layers
    return right


_MODULES: Final = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head",
)  # fmt: skip
