"""A LoRA adapter's facts, from its adapter_config.json (PEFT) and the names and shapes of its tensors.

SGLang reads r, lora_alpha, target_modules and use_dora from the config, and tensors whose names it knows; it ignores
the rest. vLLM reads more. What would make every engine serve other weights than the adapter was trained for is refused
here, because answers would not show it; what only some of them serve stands in the facts as a need.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from pydantic import ValidationError

from shoal.api import reasons
from shoal.api.adapterfacts import AdapterFacts, Need, Widths
from shoal.core.lora.format.check import buffers
from shoal.core.status.observed import ModelProblem

_LAYER: Final = re.compile(
    r"^(?P<before>.*?)layers\.(?P<layer>\d{1,5})\.(?P<path>[\w.-]{1,200})\.lora_(?P<side>[AB])(\.[^.]+)?\.weight\Z"
)
_OUTSIDE: Final = re.compile(
    r"(^|\.)(?P<module>embed_tokens|lm_head|unembed_tokens)\.lora_(embedding_)?(?P<side>[AB])(\.\w+)*\Z"
)
_NAME: Final = re.compile(r"^[A-Za-z0-9_.-]{1,200}\Z")
_OTHER_TOWERS: Final = re.compile(r"(vision|visual|audio|speech|image)")
_PLAIN: Final = re.compile(r"^[A-Za-z0-9_.-]{1,200}\Z")
"""A key of rank_pattern or alpha_pattern without operators: PEFT reads them as regular expressions, and those of a
stranger are not run."""
_FLOATS: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Data types that engines load -> bytes of a number."""
_MODULES: Final = 64
_NAME_LETTERS: Final = 300
_EVERYTHING: Final = ("all", "all-linear")
"""Values of `target_modules` that name every linear layer."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "lora_ga")
"""Values of `init_lora_weights` with which training also changes the base's weights."""
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica")
"""Values with which vLLM takes an adapter for a plain one (`PEFTHelper` of 0.32.0); others it refuses."""
_MUST_BE_UNSET: Final = {
    "use_dora": "a DoRA adapter",
    "lora_bias": "biases in its LoRA layers",
    "modules_to_save": "whole layers beside the LoRA (modules_to_save)",
    "layer_replication": "replicated layers (layer_replication)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "target_parameters": "parameters outside linear layers (target_parameters)",
    "alora_invocation_tokens": "an activated LoRA (alora_invocation_tokens)",
    "use_qalora": "a QA-LoRA adapter",
    "use_bdlora": "a block-diagonal LoRA (use_bdlora)",
}
_NOBODY: Final = "which neither SGLang nor vLLM serves"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, from the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class RevisionFiles:
    """The files of one revision, as read."""

    revision: str
    commit: str | None
    size_bytes: int
    file_bytes: int
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    added_tokens: Mapping[str, Any] = field(default_factory=dict[str, Any])


def facts_of(files: RevisionFiles) -> AdapterFacts | ModelProblem:
    """The facts, or why no base and no pool could serve the adapter."""
    found = _Config.read(files.config)
    if isinstance(found, ModelProblem):
        return found
    seen = _Tensors(found)
    for name, tensor in sorted(files.tensors.items()):
        if (problem := seen.take(name, tensor)) is not None:
            return problem
    if (problem := seen.problem()) is not None:
        return problem
    widths = seen.widths()
    if (count := max(len(widths), len(found.targets))) > _MODULES:
        return _unsupported(f"it changes or names {count} different modules, and no base has so many")
    if not found.targets:  # a pattern: what it matched has tensors
        found = replace(found, targets=tuple(sorted({module.rpartition(".")[2] for module in widths})))
    if found.targets != ("all",) and (extra := [m for m in widths if not buffers([m]) <= buffers(found.targets)]):
        return _unsupported(f"it has tensors for {', '.join(extra)}, which its target_modules does not name")
    ids = [i for i in files.added_tokens.values() if isinstance(i, int)]
    try:
        return _facts(files, found, widths, seen, ids)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        return _corrupt(f"its {'.'.join(map(str, fault['loc']))[:80]} is no adapter's: {fault['msg'][:200]}")


def _facts(
    files: RevisionFiles, found: "_Config", widths: dict[str, Widths | None], seen: "_Tensors", ids: list[int]
) -> AdapterFacts:
    return AdapterFacts(
        revision=files.revision,
        commit=files.commit,
        rank=seen.largest,
        alpha=found.alpha,
        size_bytes=files.size_bytes,
        file_bytes=files.file_bytes,
        modules=widths,
        targets=found.targets,
        layers=seen.layers,
        base=found.base,
        added_token=max(ids, default=None),
        needs={**found.needs, **seen.needs},
    )


def _corrupt(message: str) -> ModelProblem:
    return ModelProblem(reasons.CORRUPT, message)


def _unsupported(message: str) -> ModelProblem:
    return ModelProblem(reasons.UNSUPPORTED, message)


# --- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Config:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Empty: a pattern."""
    base: str | None
    ranks: Mapping[str, tuple[int, int]]
    """rank_pattern: module or the end of its path -> place in the pattern, rank."""
    needs: Mapping[Need, str]

    def rank_of(self, path: str) -> int:
        """The rank of a module, as PEFT finds it: the first entry that the path ends with, at a dot. It looks up the
        path's ends, because a stranger's pattern may have 100,000 entries."""
        parts = path.split(".")
        found = (self.ranks.get(".".join(parts[at:])) for at in range(len(parts)))
        return min((entry for entry in found if entry is not None), default=(0, self.rank))[1]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "_Config | ModelProblem":
        kind = config.get("peft_type")
        if not isinstance(kind, str) or kind.upper() != "LORA":
            return _unsupported(f"adapter_config.json says peft_type {_short(repr(kind))}: engines serve LORA")
        rank, alpha = _number(config.get("r")), _number(config.get("lora_alpha"))
        if rank is None or rank != int(rank) or rank < 1:
            return _corrupt(f"adapter_config.json says r = {_short(repr(config.get('r')))}, which is no rank")
        if alpha is None:
            return _corrupt(
                f"adapter_config.json says lora_alpha = {_short(repr(config.get('lora_alpha')))}, which is no number"
            )
        if (problem := _unserved(config)) is not None:
            return problem
        ranks = _ranks(config.get("rank_pattern"), int(rank))
        if isinstance(ranks, ModelProblem):
            return ranks
        needs = _needs(config, int(rank), alpha)
        targets = _targets(config.get("target_modules"))
        if isinstance(targets, ModelProblem):
            return targets
        base = config.get("base_model_name_or_path")
        return cls(int(rank), alpha, targets, _short(base) if isinstance(base, str) and base else None, ranks, needs)


def _number(value: object) -> float | None:
    """The value as a float; None: no number, or one that is too large (JSON has no bound)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
        return None
    return float(value)


def _unserved(config: Mapping[str, Any]) -> ModelProblem | None:
    """What no engine serves; None: nothing."""
    for key, meaning in _MUST_BE_UNSET.items():
        if config.get(key):
            return _unsupported(f"it is or has {meaning}, {_NOBODY}")
    if config.get("bias") not in (None, "none"):
        return _unsupported(f"it has trained biases (bias: {_short(str(config['bias']))}), {_NOBODY}")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        return _unsupported(
            f"its training changed the base's weights too (init_lora_weights: {_short(begun)}): save it "
            "converted to a plain LoRA, as PEFT describes it"
        )
    return None


def _ranks(pattern: object, rank: int) -> "dict[str, tuple[int, int]] | ModelProblem":
    """rank_pattern, as far as it says another rank than the config's own."""
    entries = cast("dict[object, object]", pattern) if isinstance(pattern, dict) else {}
    found: dict[str, tuple[int, int]] = {}
    for place, (key, value) in enumerate(entries.items()):
        if value == rank:
            continue
        if not isinstance(key, str) or not _PLAIN.match(key):
            what = "a regular expression, which is not run: write its modules out"
            return _unsupported(f"rank_pattern of adapter_config.json has the key {_short(repr(key))}, {what}")
        given = _number(value)
        if given is None or given != int(given) or given < 1:
            return _corrupt(f"rank_pattern of adapter_config.json says {_short(repr(value))}, which is no rank")
        found[key] = place, int(given)
    return found


def _needs(config: Mapping[str, Any], rank: int, alpha: float) -> dict[Need, str]:
    found: dict[Need, str] = {}
    if config.get("use_rslora"):
        found["rsLoRA"] = f"use_rslora false and lora_alpha {alpha * rank**0.5:g} in adapter_config.json"
    for key, need, usual in (("rank_pattern", "rankPattern", rank), ("alpha_pattern", "alphaPattern", alpha)):
        pattern = config.get(key)
        if isinstance(pattern, dict) and any(v != usual for v in cast("dict[str, object]", pattern).values()):
            found[cast("Need", need)] = ""
    if isinstance(targets := config.get("target_modules"), str) and targets not in _EVERYTHING:
        found["targetPattern"] = _short(repr(targets))
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower() not in _PLAIN_INITS:
        found["initialization"] = _short(begun)
    return found


def _targets(value: object) -> "tuple[str, ...] | ModelProblem":
    """Names of modules; empty for a pattern."""
    if isinstance(value, str):
        return ("all",) if value in _EVERYTHING else ()
    names = cast("list[object]", value) if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and _NAME.match(name) for name in names):
        return _corrupt("adapter_config.json names no target_modules, or some that are no names")
    return tuple(sorted({str(name).rpartition(".")[2] for name in names}))


# --- the tensors ----------------------------------------------------------------------------------------------------


class _Tensors:
    """The tensors read so far."""

    def __init__(self, config: _Config) -> None:
        self._config = config
        self.largest = config.rank
        """The largest rank."""
        self.needs: dict[Need, str] = {}
        self._halves: dict[tuple[int, str], dict[str, int]] = {}
        """(layer or -1, path in it) -> side -> the width that is not the rank."""
        self.layers = 0

    def take(self, name: str, tensor: Tensor) -> ModelProblem | None:
        if len(name) > _NAME_LETTERS:
            return _corrupt(f"tensor {_short(name)} has a name of {len(name)} letters")
        if tensor.dtype not in _FLOATS:
            return _unsupported(
                f"tensor {_short(name)} has type {tensor.dtype}: engines take float32, float16, bfloat16"
            )
        inner = _LAYER.match(name)
        match = inner or _OUTSIDE.search(name)
        if match is None:
            return self._stranger(name)
        layer, path = (int(match["layer"]), match["path"]) if inner else (-1, match["module"])
        if inner and _OTHER_TOWERS.search(match["before"].lower()):
            return _unsupported(
                f"it changes more than the language model ({_short(name)}): an engine would take that for layer {layer}"
            )
        # lora_A is (rank, in), lora_B is (out, rank). Experts may be stacked in a dimension before these.
        if len(tensor.shape) != 2 and not (_of_expert(path) and len(tensor.shape) == 3):
            return _corrupt(f"tensor {_short(name)} has shape {list(tensor.shape)}, which no LoRA matrix has")
        if tensor.bytes != math.prod(tensor.shape) * _FLOATS[tensor.dtype]:
            return _corrupt(f"tensor {_short(name)} has {tensor.bytes} bytes, which is not what its shape takes")
        rank, width = tensor.shape[-2:] if match["side"] == "A" else reversed(tensor.shape[-2:])
        wanted = self._config.rank_of(f"layers.{layer}.{path}" if inner else path)
        if rank != wanted:
            return _corrupt(f"tensor {_short(name)} has rank {rank}, and adapter_config.json says r = {wanted}")
        self.largest = max(self.largest, wanted)
        self._halves.setdefault((layer, path), {})[match["side"]] = width
        self.layers = max(self.layers, layer + 1)
        return None

    @staticmethod
    def _stranger(name: str) -> ModelProblem:
        if "lora_magnitude_vector" in name:
            return _unsupported(f"it is a DoRA adapter, {_NOBODY}")
        if "lora_" not in name:
            return _unsupported(f"it has whole weights beside the LoRA ({_short(name)}), {_NOBODY}")
        return _unsupported(f"tensor {_short(name)} is in no place where engines look for a LoRA")

    def problem(self) -> ModelProblem | None:
        """What is wrong with the tensors together; None: nothing."""
        if not self._halves:
            return _corrupt("adapter_model.safetensors has no tensors")
        inside: dict[tuple[int, str], set[str]] = {}
        plain: dict[tuple[int, str], str] = {}
        for (layer, path), halves in sorted(self._halves.items()):
            where = f"layer {layer} " if layer >= 0 else ""
            if len(halves) < 2:
                there = next(iter(halves))
                return _corrupt(f"{where}{path} has lora_{there} and no lora_{'B' if there == 'A' else 'A'}")
            parent, _, module = path.rpartition(".")
            inside.setdefault((layer, parent), set()).add(module)
            twin = path if _of_expert(path) else plain.setdefault((layer, module), path)
            if twin != path:
                return _unsupported(f"{where}has {twin} and {path}, which engines take for the same module")
        for (layer, parent), modules in inside.items():
            for need, what in _incomplete(modules):
                self.needs.setdefault(need, f"layer {layer} {_short(parent)} {what}")
        return None

    def widths(self) -> dict[str, Widths | None]:
        """(input, output) width by module; None where layers differ."""
        found: dict[str, Widths | None] = {}
        for (_, path), halves in sorted(self._halves.items()):
            module = path.rpartition(".")[2]
            key = f"experts.{module}" if _of_expert(path) else module
            key = "lm_head" if key == "unembed_tokens" else key
            width = (halves["A"], halves["B"])
            found[key] = width if found.get(key, width) == width else None
        return found


def _of_expert(path: str) -> bool:
    return ".experts." in f".{path}."


def _incomplete(modules: Iterable[str]) -> Iterator[tuple[Need, str]]:
    """Which modules are missing, for engines that stack q, k, v and gate, up into one layer each."""
    there = set(modules)
    attention = there & {"q_proj", "k_proj", "v_proj"}
    if attention and (missing := {"q_proj", "v_proj"} - there):
        yield "partOfAttention", f"has {' and '.join(sorted(attention))} without {' and '.join(sorted(missing))}"
    if "up_proj" in there and "gate_proj" not in there:
        yield "partOfGate", "has up_proj without gate_proj"


def _short(name: str) -> str:
    """A name from the files, shortened and printable, for a condition: its content is untrusted."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in name[-200:])
    return shown if len(shown) <= 80 else f"...{shown[-77:]}"
