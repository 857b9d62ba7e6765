"""A Job's answer about a batch of adapters: never too long, and whatever is said is whole."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.api import reasons
from shoal.api.adapterfacts import BATCH_ADAPTERS, AdapterFacts
from shoal.core.lora.format.facts import LIMIT_BYTES, Result, message, parse
from shoal.core.status.observed import ModelProblem

HEX = "0123456789abcdef"
keys = st.text(HEX, min_size=16, max_size=16)
modules = st.text("abcdefghij_", min_size=1, max_size=40)
widths = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))
facts = st.builds(
    AdapterFacts,
    revision=st.text(HEX, min_size=64, max_size=64).map("sha256:{}".format),
    commit=st.none() | st.text(HEX, min_size=40, max_size=40),
    rank=st.integers(1, 1024),
    alpha=st.floats(-1e6, 1e6),
    size_bytes=st.integers(0, 1 << 40),
    file_bytes=st.integers(0, 1 << 40),
    modules=st.dictionaries(modules, st.none() | widths, max_size=64),
    targets=st.lists(modules, max_size=64).map(tuple),
    layers=st.integers(0, 99999),
    base=st.none() | st.text(max_size=80),
    added_token=st.none() | st.integers(0, 10**9),
)
problems = st.builds(ModelProblem, st.sampled_from(sorted(reasons.ADAPTER_REASONS)), st.text(max_size=2000))
batches = st.lists(st.tuples(keys, facts | problems), min_size=1, max_size=BATCH_ADAPTERS, unique_by=lambda row: row[0])


@given(batches)
def test_an_answer_fits_and_says_of_each_adapter_the_truth_or_nothing(batch: list[tuple[str, Result]]) -> None:
    text = message(batch)
    assert len(text.encode(errors="replace")) <= LIMIT_BYTES
    found = parse(text)
    assert list(found) == [key for key, _ in batch][: len(found)]
    assert found, "every Job brings the batch forward"
    for key, said in batch:
        if key not in found:
            continue
        heard = found[key]
        if isinstance(said, AdapterFacts) and isinstance(heard, ModelProblem):
            assert heard.message == "it changes more modules than can be told"
        elif isinstance(said, ModelProblem):
            assert isinstance(heard, ModelProblem)
            assert heard.reason == said.reason
            assert said.message.startswith(heard.message)
        else:
            assert heard == said
