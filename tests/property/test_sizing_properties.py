"""Whatever the model and the GPU: sizes are never below zero, and more of what helps never makes it worse.

SGLang's own defaults jump where a GPU passes 20, 35, 60 and 160 GiB (larger batches are captured, more is kept free):
a GPU just above such a step can hold fewer tokens than one just below. So what grows is compared within one step, or
with the fraction given. States of hybrid models come in whole numbers: with a little more memory there may be one
more of them and fewer tokens, so that of those models both are compared together.
"""

from dataclasses import replace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, Misfit, SGLangTuning, Sized, Tuning, VLLMTuning, size
from tests.support.model_configs import ALL

MI, GI = 2**20, 2**30
STEPS = ((8, 20), (20, 35), (35, 60), (60, 160), (160, 288))

_NAMES = st.sampled_from(sorted(ALL))
_NOT_HYBRID = st.sampled_from(sorted(n for n in ALL if facts_of(ALL[n], source="x").kv.kind != "Hybrid"))
_GIB = st.integers(1, 700)
_TUNING = st.builds(
    SGLangTuning,
    mem_fraction_static=st.none() | st.floats(0.3, 0.95),
    kv_cache_dtype=st.sampled_from([None, "fp8_e4m3", "mxfp8", "nvfp4"]),
    chunked_prefill_size=st.sampled_from([None, -1, 2048, 16384]),
    max_running_requests=st.none() | st.integers(1, 4096),
    max_total_tokens=st.none() | st.integers(1, 10**7),
    page_size=st.sampled_from([None, 1, 16, 64]),
    quantization=st.sampled_from([None, "fp8"]),
    attention_dp=st.sampled_from([1, 1, 2]),
)

_VLLM = st.builds(
    VLLMTuning,
    gpu_memory_utilization=st.none() | st.floats(0.3, 0.97),
    kv_cache_dtype=st.sampled_from([None, "fp8", "nvfp4"]),
    max_num_batched_tokens=st.sampled_from([None, 2048, 16384]),
    max_running_requests=st.none() | st.integers(1, 4096),
    kv_cache_memory_bytes=st.none() | st.integers(1, 100 * GI),
    block_size=st.sampled_from([None, 16, 128]),
    quantization=st.sampled_from([None, "fp8"]),
    windows=st.booleans(),
    graphs=st.booleans(),
)


def facts(name: str, gib: int) -> ArtifactFacts:
    return facts_of(ALL[name], source="x", weight_bytes=gib * GI)


def ask(found: ArtifactFacts, gpu: GPU, tuning: Tuning, **asked: Any) -> Sized | Misfit:
    defaults: dict[str, Any] = {"tensor": None, "context_length": 1024, "overrides": Sizing()}
    return size(found, gpu, tuning=tuning, **(defaults | asked))


@given(_NAMES, _GIB, st.integers(1, 300 * 1024), st.integers(1, 16), _TUNING, st.none() | st.integers(1, 16))
def test_nothing_is_below_zero_and_the_sums_add_up(
    name: str, gib: int, mib: int, node: int, tuning: Tuning, tensor: int | None
) -> None:
    found = ask(facts(name, gib), GPU("a", mib * MI, largest_node=node), tuning, tensor=tensor)
    if isinstance(found, Misfit):
        assert 10 < len(found.why) <= 512
        return
    s = found.breakdown
    assert min(s.overhead, s.reserve, s.weights, s.images, s.state, s.kv, found.kv_tokens or 0) >= 0
    assert s.overhead + s.reserve + s.weights + s.images + s.state + s.kv == s.memory
    assert found.gpus <= node
    assert (found.kv_tokens or 0) // found.attention_groups >= 1024
    # What is promised is there: rounding up a token's bytes may cost less than one of them.
    assert (found.kv_tokens or 0) // found.attention_groups * (found.kv_bytes_per_token - 1) <= s.kv


@given(_NAMES, _GIB, st.integers(1, 300 * 1024), st.integers(1, 16), _VLLM, st.none() | st.integers(1, 16))
def test_of_vllm_nothing_is_below_zero_and_the_sums_add_up(
    name: str, gib: int, mib: int, node: int, tuning: VLLMTuning, tensor: int | None
) -> None:
    found = ask(facts(name, gib), GPU("a", mib * MI, largest_node=node), tuning, tensor=tensor)
    if isinstance(found, Misfit):
        assert 10 < len(found.why) <= 512
        return
    s = found.breakdown
    parts = (s.overhead, s.reserve, s.weights, s.images, s.state, s.adapters, s.activations, s.graphs, s.kv)
    assert min(parts) >= 0
    assert sum(parts) == s.memory
    assert found.gpus <= node
    assert (found.kv_tokens or 0) >= 1024


@given(_NAMES, _GIB, st.integers(8, 300), st.integers(0, 100), st.integers(1, 8), st.floats(0.5, 0.95))
def test_a_larger_share_never_holds_fewer_tokens_with_vllm(
    name: str, gib: int, memory: int, more: int, tensor: int, share: float
) -> None:
    # The batch is given: vLLM's own choice is larger from 70 and from 160 GiB on.
    tuning = VLLMTuning(gpu_memory_utilization=share, max_num_batched_tokens=2048, max_running_requests=256)
    rooms = [_room(facts(name, gib), gb * 1024, tuning, tensor) for gb in (memory, memory + more)]
    assert rooms[0] <= rooms[1]


@given(_NAMES, _GIB, st.sampled_from(STEPS), st.integers(0, 1000), st.integers(0, 1000), _TUNING, st.integers(1, 8))
def test_more_memory_never_holds_fewer_tokens(
    name: str, gib: int, step: tuple[int, int], at: int, more: int, tuning: Tuning, tensor: int
) -> None:
    low, high = step
    span = (high - low) * 1024 - 1
    small, large = (low * 1024 + span * n // 2000 for n in (at, at + more))
    assert _room(facts(name, gib), small, tuning, tensor) <= _room(facts(name, gib), large, tuning, tensor)


@given(_NAMES, _GIB, st.integers(8, 300), st.integers(1, 100), st.floats(0.3, 0.95), st.integers(1, 8))
def test_more_memory_never_holds_fewer_tokens_across_steps_with_a_given_fraction(
    name: str, gib: int, small: int, more: int, fraction: float, tensor: int
) -> None:
    tuning = SGLangTuning(mem_fraction_static=fraction)
    rooms = [_room(facts(name, gib), mib * 1024, tuning, tensor) for mib in (small, small + more)]
    assert rooms[0] <= rooms[1]


def _room(found: ArtifactFacts, mib: int, tuning: Tuning, tensor: int) -> int:
    """Tokens; of a hybrid model the bytes of tokens and states."""
    sized = ask(found, GPU("a", mib * MI), tuning, tensor=tensor, context_length=1)
    if isinstance(sized, Misfit):
        return 0
    return sized.breakdown.kv + sized.breakdown.state if found.kv.kind == "Hybrid" else sized.kv_tokens or 0


@given(_NAMES, _GIB, st.sampled_from([46068, 81559, 143771, 183359]), st.sampled_from([1, 2, 4]))
def test_more_gpus_never_have_less_room_for_one_replicas_cache(name: str, gib: int, mib: int, tensor: int) -> None:
    gpu = GPU("a", mib * MI)
    fewer, more = (ask(facts(name, gib), gpu, SGLangTuning(), tensor=n, context_length=1) for n in (tensor, 2 * tensor))
    assume(isinstance(fewer, Sized))
    assert isinstance(fewer, Sized)
    if isinstance(more, Misfit):
        # The only reason not to fit on more GPUs is that the model cannot be cut into so many parts.
        assert more.why.startswith("`tensor` is")
        return
    assert more.gpus * (more.breakdown.kv + more.breakdown.state) >= fewer.gpus * (
        fewer.breakdown.kv + fewer.breakdown.state
    )


@given(_NAMES, _GIB, st.integers(8 * 1024, 200 * 1024), _TUNING, st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_longer_context_never_fits_where_a_shorter_one_does_not(
    name: str, gib: int, mib: int, tuning: Tuning, one: int, other: int
) -> None:
    gpu, longer_allowed = GPU("a", mib * MI), replace(tuning, longer_context=True)
    short, long = (
        ask(facts(name, gib), gpu, longer_allowed, context_length=n) for n in sorted((one, other))
    )  # fmt: skip
    if isinstance(short, Misfit):
        assert isinstance(long, Misfit)
    elif isinstance(long, Sized):
        assert long.gpus >= short.gpus


@given(_NOT_HYBRID, _GIB, st.integers(0, 200), st.integers(8 * 1024, 200 * 1024), _TUNING)
def test_heavier_weights_never_fit_better(name: str, gib: int, more: int, mib: int, tuning: Tuning) -> None:
    gpu = GPU("a", mib * MI)
    light, heavy = (ask(facts(name, w), gpu, tuning) for w in (gib, gib + more))
    if isinstance(light, Misfit):
        assert isinstance(heavy, Misfit)
    elif isinstance(heavy, Sized):
        assert heavy.gpus >= light.gpus
        if heavy.gpus == light.gpus:
            assert (heavy.kv_tokens or 0) <= (light.kv_tokens or 0)


@given(_NAMES, _GIB, st.integers(16, 200), st.integers(1, 7), _TUNING)
def test_larger_nodes_never_exclude_what_smaller_ones_hold(
    name: str, gib: int, memory: int, node: int, tuning: Tuning
) -> None:
    small, large = (ask(facts(name, gib), GPU("a", memory * GI, largest_node=n), tuning) for n in (node, node + 1))
    if isinstance(small, Sized):
        assert small == large
