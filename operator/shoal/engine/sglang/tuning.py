"""What the engine's arguments mean for its memory, and which arguments a quantization adds."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, cast

from shoal.api.artifact import ArtifactFacts
from shoal.core import quantity
from shoal.core.sizing import AdapterSlots, SGLangTuning
from shoal.engine.arguments import LONGEST, json_object, unless
from shoal.engine.sglang.arguments import ARGUMENTS, parsed
from shoal.engine.sglang.wire import WIRE

_LONGER: Final = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_NO_DRAFT: Final = ("NGRAM",)
"""Speculative algorithms that guess from the text itself, without a model."""
_OWN_LAYERS: Final = "NEXTN"
"""The one that uses layers of the checkpoint."""
_SLOTS: Final = 8
"""SGLang's own --max-loras-per-batch."""
_GB: Final = 2**30
"""SGLang's --cpu-offload-gb counts in these."""


def quantization_args(quantization: Literal["FP8"] | None) -> tuple[str, ...]:
    """Engine arguments that quantize the weights while they are loaded."""
    return ("--quantization=fp8",) if quantization == "FP8" else ()


def tuning_of(
    extra_args: Sequence[str],
    *,
    platform_args: Sequence[str] = (),
    quantization: Literal["FP8"] | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    facts: ArtifactFacts | None = None,
) -> SGLangTuning:
    """What these arguments change in the memory arithmetic; a later argument wins over an earlier one, and the Model's
    own win over the platform's.

    `env` is the environment that the Model gives its engine, `facts` are those of the weights. A value that is no
    number, or none within its bounds, is left out: `check_extra_args` reports it.
    """
    given = parsed([*platform_args, *quantization_args(quantization), *ARGUMENTS.bounded(extra_args)])
    number = partial(ARGUMENTS.number, given)
    graphs = _graphs(given)
    algorithm = (given.get("speculative-algorithm") or "").upper()
    layers = facts.mtp_layers if facts is not None and algorithm == _OWN_LAYERS else None
    longer = env.get(_LONGER, "").lower() in ("1", "true", "yes", "y", "t") or "json-model-override-args" in given
    return SGLangTuning(
        device="cpu" if given.get("device") == "cpu" else "cuda",
        dtype=unless(given.get("dtype"), "auto"),
        mem_fraction_static=number("mem-fraction-static", float),
        kv_cache_dtype=unless(given.get("kv-cache-dtype"), "auto"),
        chunked_prefill_size=number("chunked-prefill-size", quantity.count),
        cuda_graph_max_bs=graphs.decode_batch,
        decode_graphs=graphs.decode,
        prefill_graphs=graphs.prefill,
        max_running_requests=number("max-running-requests", quantity.count),
        max_total_tokens=number("max-total-tokens", quantity.count),
        page_size=number("page-size", quantity.count),
        pipeline=max(1, number("pp-size", int) or 1),
        attention_dp=max(1, number("attn-dp-size", int) or 1),
        expert_parallel=max(1, number("ep-size", int) or 1),
        swa_full_tokens_ratio=number("swa-full-tokens-ratio", float),
        windows="disable-hybrid-swa-memory" not in given,
        mamba_full_memory_ratio=number("mamba-full-memory-ratio", float),
        radix_cache="disable-radix-cache" not in given,
        multimodal=WIRE.differences.reads_media(facts, [*platform_args, *extra_args]),
        cpu_offload_bytes=_GB * (number("cpu-offload-gb", int) or 0),
        quantization=unless(given.get("quantization"), "unquant"),
        longer_context=longer,
        draft=algorithm if algorithm and algorithm not in _NO_DRAFT and not layers else None,
        speculates=bool(algorithm),
        draft_layers=layers or 0,
        adapters=_adapters(given, number("max-loras-per-batch", int), number("max-lora-rank", int)),
    )


def _adapters(given: Mapping[str, str], slots: int | None, rank: int | None) -> AdapterSlots | None:
    """None without adapters, and without the rank that a start without adapters needs: the engine would not run."""
    if "enable-lora" not in given or rank is None:
        return None
    modules = tuple(given.get("lora-target-modules", "").split())
    return AdapterSlots(_SLOTS if slots is None else slots, rank, modules)


class _Graphs:
    """Which CUDA graphs are captured; later sources win, as in `parse_cuda_graph_config`."""

    def __init__(self) -> None:
        self.decode = self.prefill = True
        self.decode_batch: int | None = None

    def backend(self, phase: str, value: object) -> None:
        if phase == "decode":
            self.decode = value != "disabled"
        elif phase == "prefill":
            self.prefill = value != "disabled"

    def batches(self, sizes: Sequence[object]) -> None:
        words = (s for s in map(str, sizes) if len(s) <= LONGEST and s.isdecimal())
        numbers = [n for n in map(int, words) if ARGUMENTS.within("cuda-graph-max-bs-decode", n)]
        if numbers:
            self.decode_batch = max(numbers)


def _graphs(given: Mapping[str, str]) -> _Graphs:
    graphs = _Graphs()
    for flag, phases in (
        ("disable-cuda-graph", ("decode", "prefill")),
        ("disable-prefill-cuda-graph", ("prefill",)),
        ("disable-decode-cuda-graph", ("decode",)),
    ):
        for phase in phases if flag in given else ():
            graphs.backend(phase, "disabled")
    for phase in ("decode", "prefill"):
        if f"cuda-graph-backend-{phase}" in given:
            graphs.backend(phase, given[f"cuda-graph-backend-{phase}"])
    graphs.batches([given.get("cuda-graph-max-bs-decode", "")])
    graphs.batches(given.get("cuda-graph-bs-decode", "").split())
    for phase, entry in json_object(given.get("cuda-graph-config")).items():
        if not isinstance(entry, dict):
            continue
        settings = cast(dict[str, Any], entry)
        if "backend" in settings:
            graphs.backend(phase, settings["backend"])
        if phase == "decode":
            graphs.batches([settings.get("max_bs")])
            sizes = settings.get("bs")
            graphs.batches(cast(list[object], sizes) if isinstance(sizes, list) else [])
    return graphs
