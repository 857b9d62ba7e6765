"""Which files of a source an engine reads."""

import fnmatch
from collections.abc import Iterable
from pathlib import PurePosixPath

_TEXT = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".yaml", ".yml")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*")
_COPIES = ("original", "onnx", "openvino", "coreml", "metal", "flax")
"""Folders in which repositories keep the same weights once more for other runtimes."""


def wanted_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that an engine reads: safetensors (else the older formats), configs and tokenizer."""
    kept = [
        name
        for name in names
        if not name.startswith(".")
        and PurePosixPath(name).parts[0] not in _COPIES
        and not any(fnmatch.fnmatch(PurePosixPath(name).name, pattern) for pattern in _NOT_WEIGHTS)
    ]
    safetensors = [name for name in kept if name.endswith(".safetensors")]
    # Mistral's repositories hold every weight twice: model-*.safetensors and consolidated*.safetensors.
    sharded = [name for name in safetensors if not PurePosixPath(name).name.startswith("consolidated")]
    weights = sharded or safetensors or [name for name in kept if name.endswith(_OTHER_WEIGHTS)]
    return sorted({*weights, *(name for name in kept if name.endswith(_TEXT))})
