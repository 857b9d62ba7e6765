"""Whatever numbers a Model names, sizing it costs the same: no loop over a number, no list as long as one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.model import Model
from shoal.core.architectures import facts_of
from shoal.core.candidates import consider
from shoal.core.sizing import GPU, Misfit, SGLangTuning, Sized, Tuning, VLLMTuning, size
from shoal.core.sizing.sglang import fraction
from shoal.engine.arguments import MOST_INT
from shoal.engine.sglang.arguments import ARGUMENTS, check_extra_args
from shoal.engine.sglang.bounds import BOUNDS
from shoal.engine.sglang.tuning import tuning_of
from shoal.engine.vllm.arguments import ARGUMENTS as VLLM
from shoal.engine.vllm.tuning import tuning_of as vllm_tuning
from tests.support.limited import MI, TooManySteps, counted, run
from tests.support.model_configs import ALL

VERSION = "0.5.23"
ATTACK = "--chunked-prefill-size=20000000000"
GI = 2**30
_READ = sorted(
    ["attn-dp-size", "chunked-prefill-size", "cpu-offload-gb", "cuda-graph-max-bs-decode", "ep-size",
     "mamba-full-memory-ratio", "max-running-requests", "max-total-tokens", "mem-fraction-static", "page-size",
     "pp-size", "swa-full-tokens-ratio"]
)  # fmt: skip
"""Arguments that sizing reads as numbers."""
_EXTREMES = ["-1", "0", "1", "-0", "nan", "inf", "-inf", "1e308", "1e-308", "1e999999999", "20000000000", str(MOST_INT)]
_NUMBERS = st.sampled_from([*_EXTREMES, "9" * 240, "-" + "9" * 240, "1Ei", "1e99Ei", "4096"]) | st.integers().map(str)
_SHARES = st.floats(allow_nan=True, allow_infinity=True).map(str)


def _model(*args: str) -> Model:
    spec = {"source": {"uri": "hf://a/b"}, "engine": {"extraArgs": list(args)}}
    return Model.model_validate({"metadata": {"name": "m", "namespace": "a", "uid": "u"}, "spec": spec})


def _sized(tuning: Tuning, name: str = "llama-8b", **asked: Any) -> Sized | Misfit:
    model = _model()
    given: dict[str, Any] = {"tensor": None, "context_length": 4096, "overrides": model.spec.sizing}
    facts = facts_of(ALL[name], source="x", parameters=8 * 10**9, weight_bytes=16 * 10**9)
    return size(facts, GPU("h100", 80 * GI, largest_node=8), tuning=tuning, **(given | asked))


# --- the attack -----------------------------------------------------------------------------------------------------


def _listed(max_tokens: int) -> int:
    """As it was: every size in a list."""
    sizes = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
        *range(4608, max_tokens + 1, 512),
    ]  # fmt: skip
    return sum(size <= max_tokens for size in sizes)


def size_the_attack(walls: bool) -> str:
    """In a child: one Model as the audit wrote it, taken as it is (its arguments are not checked)."""
    if not walls:
        fraction.prefill_graphs = _listed
    return type(_sized(SGLangTuning(chunked_prefill_size=20_000_000_000))).__name__


def test_a_huge_chunk_is_sized_at_once() -> None:
    outcome = run(size_the_attack, True, memory=64 * MI, cpu=5)
    assert outcome.ended == "done"
    assert outcome.value == "Misfit"


def test_with_the_list_of_sizes_the_same_model_takes_all_memory() -> None:
    assert run(size_the_attack, False, memory=512 * MI, cpu=30).ended == "memory"


def test_the_argument_is_refused_and_says_what_may_be() -> None:
    assert check_extra_args(VERSION, [ATTACK]) == [
        "--chunked-prefill-size must be a whole number from -1 to 10000000; got '20000000000'"
    ]
    assert tuning_of([ATTACK]).chunked_prefill_size is None


@given(st.integers(-10, 300_000))
def test_counting_the_graphs_gives_what_listing_them_gave(tokens: int) -> None:
    assert fraction.prefill_graphs(tokens) == _listed(tokens)


# --- any number -----------------------------------------------------------------------------------------------------

_PLAIN = counted(lambda: _sized(SGLangTuning())).lines


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(_READ), _NUMBERS | _SHARES, max_size=6), st.sampled_from(sorted(ALL)))
def test_no_number_makes_sizing_longer(numbers: dict[str, str], name: str) -> None:
    """A replica is tried for each number of GPUs of a node at most, and nothing else is repeated."""
    args = [f"--{key}={value}"[:256] for key, value in numbers.items()]

    def whole() -> None:
        check_extra_args(VERSION, args)
        _sized(tuning_of(args), name)

    cost = counted(whole, most_lines=60 * _PLAIN)
    assert cost.peak_bytes < MI


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        SGLangTuning,
        chunked_prefill_size=st.none() | st.integers(-1, 10**12),
        cuda_graph_max_bs=st.none() | st.integers(1, 10**12),
        max_running_requests=st.none() | st.integers(1, 10**12),
        max_total_tokens=st.none() | st.integers(1, 10**15),
        page_size=st.none() | st.integers(1, 10**9),
    )
    | st.builds(
        VLLMTuning,
        max_num_batched_tokens=st.none() | st.integers(1, 10**12),
        max_running_requests=st.none() | st.integers(1, 10**12),
        kv_cache_memory_bytes=st.none() | st.integers(1, 10**15),
        num_gpu_blocks_override=st.none() | st.integers(1, 10**12),
        block_size=st.none() | st.integers(1, 10**9),
    ),
    st.sampled_from(sorted(ALL)),
)
def test_nor_does_one_that_nobody_checked(tuning: Tuning, name: str) -> None:
    assert counted(lambda: _sized(tuning, name), most_lines=60 * _PLAIN).peak_bytes < MI


_READ_BY_VLLM = sorted(
    ["block-size", "cpu-offload-gb", "data-parallel-size", "gpu-memory-utilization", "kv-cache-memory-bytes",
     "max-lora-rank", "max-loras", "max-num-batched-tokens", "max-num-seqs", "num-gpu-blocks-override",
     "pipeline-parallel-size"]
)  # fmt: skip
"""Arguments of vLLM that sizing reads as numbers."""


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(_READ_BY_VLLM), _NUMBERS | _SHARES), st.booleans(), st.sampled_from(sorted(ALL)))
def test_nor_does_any_of_vllm(numbers: dict[str, str], lora: bool, name: str) -> None:
    args = [*(f"--{key}={value}"[:256] for key, value in numbers.items()), *(["--enable-lora"] if lora else [])]

    def whole() -> None:
        VLLM.problems("0.32.0", args)
        _sized(vllm_tuning(args), name)

    assert counted(whole, most_lines=60 * _PLAIN).peak_bytes < MI


def test_a_loop_over_the_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fraction, "prefill_graphs", _listed)
    with pytest.raises(TooManySteps):
        counted(lambda: _sized(SGLangTuning(chunked_prefill_size=100_000_000)), most_lines=60 * _PLAIN)


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(name for name in BOUNDS if ARGUMENTS.owner(name) is None))
def test_both_ends_of_a_bound_pass_and_what_is_beyond_them_is_refused(name: str) -> None:
    least, most = BOUNDS[name]
    assert check_extra_args(VERSION, [f"--{name}={least}"]) == []
    assert check_extra_args(VERSION, [f"--{name}={most}"]) == []
    for beyond in (least - 1, most + 1):
        assert len(check_extra_args(VERSION, [f"--{name}={beyond}"])) == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "9" * 200])
def test_a_number_without_end_is_refused_for_every_argument(value: str) -> None:
    for name in ("mem-fraction-static", "schedule-conservativeness", "page-size", "stream-interval"):
        assert len(check_extra_args(VERSION, [f"--{name}={value}"])) == 1


def test_what_is_told_of_many_bad_arguments_stays_short() -> None:
    problems = check_extra_args(VERSION, [f"--{'x' * 200}{i}={'y' * 40}" for i in range(64)])
    assert len(problems) == 9
    assert len("; ".join(problems)) < 2048
    assert len(check_extra_args(VERSION, ["--" + "a" * 10**6])[0]) < 200
    assert check_extra_args(VERSION, ["--sleep-on-idle"] * 65) == ["there are 65 of them, and 64 are the most"]


def test_a_model_that_passed_no_admission_is_considered_like_any_other() -> None:
    model = _model().model_copy(update={"spec": _model().spec.model_copy(update={"variants": ()})})
    facts = facts_of(ALL["llama-8b"], source="x", parameters=8 * 10**9, weight_bytes=16 * 10**9)
    found = consider(model, facts, {}, {}, lambda _quantization: tuning_of([ATTACK]))
    assert found.candidates == ()
