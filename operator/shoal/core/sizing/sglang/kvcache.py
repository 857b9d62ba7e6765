"""What is left of one GPU for the KV cache, and how many tokens it makes: SGLang's `kv_cache_configurator`.

pre = memory - overhead                              free before the weights are loaded
kv  = pre * mem_fraction_static - weights - adapters - state    rounded down to pages of tokens
"""

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.sizing.cell import SWA_FULL_TOKENS_RATIO, bytes_per_token
from shoal.core.sizing.sglang.arguments import SGLangArguments
from shoal.core.sizing.sglang.fraction import static_fraction
from shoal.core.sizing.sglang.slots import slot_bytes
from shoal.core.sizing.types import GPU, MemoryBreakdown
from shoal.core.sizing.units import MI, before
from shoal.core.sizing.weights import runs_in

_IMAGE_CACHE = 100 * MI
"""SGLANG_VLM_CACHE_SIZE_MB: multimodal embeddings."""
_MAMBA_RATIO = 0.9
_SPECULATING = 48
"""Requests at once of an engine that guesses tokens, unless its arguments say another number."""
_STATES_PER_REQUEST = 5
"""States that the prefix cache of a hybrid model needs for one running request."""


def cell(facts: ArtifactFacts, gpu: GPU, gpus: int, overrides: Sizing, tuning: SGLangArguments) -> float:
    """Bytes of one token on one GPU; the caller has made sure that it is known."""
    if overrides.kv_bytes_per_token is not None:
        return float(overrides.kv_bytes_per_token)
    found = bytes_per_token(
        facts.kv if tuning.windows else facts.kv.model_copy(update={"kind": "Full"}),
        attention_tensor=gpus // tuning.attention_dp,
        kv_dtype=kv_dtype(facts, gpu, tuning),
        swa_ratio=tuning.swa_full_tokens_ratio or SWA_FULL_TOKENS_RATIO,
        kept_float32=runs_in(facts, tuning) == "float32",
    )
    depth = (facts.kv.full_layers if facts.kv.kind == "Hybrid" else facts.kv.layers) or 1
    return (found or 1.0) * (1 + tuning.draft_layers / depth)


def kv_dtype(facts: ArtifactFacts, gpu: GPU, tuning: SGLangArguments) -> str:
    """The cache's type: as the arguments say, as the checkpoint says, or the model's own."""
    asked = tuning.kv_cache_dtype
    if asked not in (None, "auto"):
        return asked
    if facts.kv.kind == "DSA":
        # Of an unknown GPU the larger of the two is assumed.
        blackwell = gpu.compute_capability is not None and gpu.compute_capability[0] >= 10
        return "fp8_e4m3" if blackwell else "bfloat16"
    return facts.kv.dtype or "bfloat16"


def breakdown(
    facts: ArtifactFacts, gpu: GPU, gpus: int, weights: int, tuning: SGLangArguments
) -> tuple[MemoryBreakdown, int | None]:
    """The parts of one GPU's memory, and how many requests' states a hybrid model keeps (None: no limit)."""
    overhead = before(gpu, gpus * tuning.pipeline)
    fraction = static_fraction(facts, gpu.memory_bytes / MI, gpus, tuning)
    pre = gpu.memory_bytes - overhead
    static = int(pre * fraction)
    images = _IMAGE_CACHE if tuning.reads_media(facts) else 0
    adapters = slot_bytes(facts, gpus, tuning) or 0
    state, slots = _state(facts, static - weights - images - adapters, gpus, tuning)
    return MemoryBreakdown(
        memory=gpu.memory_bytes,
        overhead=overhead,
        reserve=pre - static,
        weights=weights,
        images=images,
        state=state,
        adapters=adapters,
        kv=static - weights - images - adapters - state,
        fraction=fraction,
    ), slots


def _state(facts: ArtifactFacts, rest: int, gpus: int, tuning: SGLangArguments) -> tuple[int, int | None]:
    """Bytes of all states on one GPU, and how many there are (`_handle_max_mamba_cache`)."""
    if facts.kv.kind != "Hybrid" or rest <= 0:
        return 0, None
    ratio = state_ratio(tuning)
    budget = int(rest * ratio / (1 + ratio))
    one = facts.kv.state_bytes_per_request
    if not one:
        return budget, None
    each = -(-one * tuning.attention_dp // gpus)
    if not tuning.radix_cache and tuning.max_running_requests is not None:
        slots = max(1, tuning.max_running_requests // tuning.attention_dp)
    else:
        slots = max(0, budget - each) // each
    return (slots + 1) * each, slots // (_STATES_PER_REQUEST if tuning.radix_cache else 1)


def state_ratio(tuning: SGLangArguments) -> float:
    """Bytes of a hybrid model's states over those of its tokens."""
    return tuning.mamba_full_memory_ratio or _MAMBA_RATIO


def tokens(facts: ArtifactFacts, kv_bytes: int, cell: float, tuning: SGLangArguments) -> int:
    """Tokens of one attention group; below zero where the weights alone are too much."""
    found = int(kv_bytes // cell)
    if tuning.max_total_tokens is not None:
        found = min(found, tuning.max_total_tokens)
    page = page_size(facts, tuning)
    return found // page * page


def page_size(facts: ArtifactFacts, tuning: SGLangArguments) -> int:
    return tuning.page_size or (64 if facts.kv.kind == "DSA" else 1)


def window_fits(facts: ArtifactFacts, found: int, tuning: SGLangArguments) -> bool:
    """A pool of windows must hold more than one window, or SGLang does not start."""
    if not tuning.windows or facts.kv.kind != "SlidingWindow" or facts.kv.sliding_window is None:
        return True
    ratio = tuning.swa_full_tokens_ratio or SWA_FULL_TOKENS_RATIO
    return int(found * ratio) > facts.kv.sliding_window + page_size(facts, tuning)


def requests(found: int, slots: int | None, context: int, tuning: SGLangArguments) -> int:
    """Requests that one attention group runs at once (`resolve_max_num_reqs`)."""
    if tuning.max_running_requests is not None:
        most = max(1, tuning.max_running_requests // tuning.attention_dp)
    else:
        most = max(min(int(found / max(1, context) * 512), 4096), 2048)
        most = most if not tuning.speculates else _SPECULATING
    most = min(most, found // 2)
    return most if slots is None else min(most, slots)
