"""SGLang's arguments that concern LoRA, and the combinations of them that it refuses."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class LoRAPath:
    """An adapter that is loaded at the start."""

    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class LoRAArgs:
    """LoRA is enabled, with these limits."""

    slots: int
    """GPU slots; the base model takes one in a mixed batch."""
    cached: int | None
    """Adapters in host memory at most; None: no limit."""
    max_rank: int | None
    """None: as the adapters in `paths`."""
    modules: frozenset[str]
    """As in --lora-target-modules; empty: as the adapters in `paths`."""
    paths: tuple[LoRAPath, ...] = ()


def of(ns: argparse.Namespace) -> LoRAArgs | None:
    """None where LoRA is not enabled. Raises ValueError with SGLang's words."""
    if not ns.enable_lora and not ns.lora_paths:
        return None
    paths = tuple(_path(text) for text in cast("Sequence[str]", ns.lora_paths or ()))
    slots, cached = ns.max_loras_per_batch or 8, ns.max_loaded_loras
    modules = frozenset(cast("Sequence[str]", ns.lora_target_modules or ()))
    if "all" in modules and len(modules) > 1:
        raise ValueError("If 'all' is specified in --lora-target-modules, it should be the only module specified.")
    if not paths and not (ns.max_lora_rank and modules):
        raise ValueError(
            "When no initial --lora-paths is provided, you need to specify both --max-lora-rank and "
            "--lora-target-modules for LoRA initialization."
        )
    if cached is not None and cached < slots:
        raise ValueError(
            "max_loaded_loras should be greater than or equal to max_loras_per_batch. "
            f"max_loaded_loras={cached}, max_loras_per_batch={slots}"
        )
    if cached is not None and len(paths) > cached:
        raise ValueError(
            "The number of LoRA paths should not exceed max_loaded_loras. "
            f"max_loaded_loras={cached}, lora_paths={len(paths)}"
        )
    return LoRAArgs(slots, cached, ns.max_lora_rank, modules, paths)


def _path(text: str) -> LoRAPath:
    if text.lstrip().startswith("{"):
        entry: dict[str, Any] = json.loads(text)
        if "lora_name" not in entry or "lora_path" not in entry:
            raise ValueError(f"a JSON of --lora-paths needs lora_name and lora_path: {text}")
        return LoRAPath(entry["lora_name"], entry["lora_path"], bool(entry.get("pinned", False)))
    name, equals, path = text.partition("=")
    return LoRAPath(name, path) if equals else LoRAPath(text, text)
