"""Speculation and quantization as fields: what each engine is started with, and what is refused."""

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model, Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, Misfit, Sized, size
from shoal.engine.kinds import KINDS
from shoal.engine.port import EngineKind, EngineLaunch
from shoal.engine.sglang import fields as sglang
from shoal.engine.vllm import fields as vllm
from tests.support.model_configs import ALL


def model(*extra_args: str, **engine: Any) -> Model:
    spec = {"source": {"uri": "hf://a/b"}, "engine": engine | {"extraArgs": list(extra_args)}}
    return Model.model_validate({"metadata": {"name": "m", "namespace": "a", "uid": "u"}, "spec": spec})


def facts(**given: Any) -> ArtifactFacts:
    return ArtifactFacts.model_validate({"source": "x", "task": "Generate", "mtpLayers": 0} | given)


SPECULATION: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"method": "NGram"}, ("--speculative-algorithm=NGRAM",), '{"method":"ngram","num_speculative_tokens":4}'),
    (
        {"method": "NGram", "draftTokens": 8},
        ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=8"),
        '{"method":"ngram","num_speculative_tokens":8}',
    ),
    ({"method": "MTP"}, ("--speculative-algorithm=NEXTN",), '{"method":"mtp","num_speculative_tokens":4}'),
    (
        {"method": "EAGLE3", "draftTokens": 3, "draftPath": "heads/eagle3"},
        (
            "--speculative-algorithm=EAGLE3", "--speculative-draft-model-path=/models/m/heads/eagle3",
            "--speculative-eagle-topk=1", "--speculative-num-steps=3", "--speculative-num-draft-tokens=4",
        ),
        '{"method":"eagle3","num_speculative_tokens":3,"model":"/models/m/heads/eagle3"}',
    ),
    (
        {"method": "DraftModel", "draftPath": "small"},
        ("--speculative-algorithm=STANDALONE", "--speculative-draft-model-path=/models/m/small"),
        '{"method":"draft_model","num_speculative_tokens":4,"model":"/models/m/small"}',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "of_sglang", "of_vllm"), SPECULATION)
def test_each_engine_is_started_with_its_own_arguments(
    asked: dict[str, Any], of_sglang: tuple[str, ...], of_vllm: str
) -> None:
    engine = model(speculation=asked).spec.engine
    assert sglang.field_args(engine, "/models/m", 1) == of_sglang
    assert vllm.field_args(engine, "/models/m") == (f"--speculative-config={of_vllm}",)


def test_the_type_of_the_cache() -> None:
    engine = model(quantization={"kvCache": "FP8"}).spec.engine
    assert sglang.field_args(engine, "/m", 1) == ("--kv-cache-dtype=fp8_e4m3",)
    assert vllm.field_args(engine, "/m") == ("--kv-cache-dtype=fp8",)
    assert sglang.field_args(model().spec.engine, "/m", 1) == vllm.field_args(model().spec.engine, "/m") == ()


def test_whole_experts_on_each_gpu() -> None:
    asked = model(parallelism={"expert": True})
    assert sglang.field_args(asked.spec.engine, "/m", 4) == ("--ep-size=4",)
    assert vllm.field_args(asked.spec.engine, "/m") == ("--enable-expert-parallel",)
    dense, mixture = facts(kv={"kind": "Full"}), facts(kv={"kind": "Full"}, experts=128)
    for problems in (sglang.problems, vllm.problems):
        assert problems(asked, dense) == ["spec.engine.parallelism.expert: this model has no experts: leave it out"]
        assert problems(asked, mixture) == problems(asked, None) == []
    assert (
        "use spec.engine.parallelism.expert"
        in sglang.problems(model("--ep-size=2", parallelism={"expert": True}), mixture)[0]
    )
    assert sglang.problems(model("--ep-size=2"), mixture) == []


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"method": "EAGLE", "draftPath": "../other"}, "draftPath"),
        ({"method": "EAGLE", "draftPath": "/etc"}, "draftPath"),
        ({"method": "EAGLE", "draftPath": "a/../b"}, "draftPath"),
        ({"method": "EAGLE", "draftPath": "a//b"}, "draftPath"),
        ({"method": "NGram", "draftTokens": 0}, "draftTokens"),
        ({"method": "NGram", "draftTokens": 33}, "draftTokens"),
        ({"method": "Oracle"}, "method"),
    ],
)
def test_what_no_engine_gets(asked: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        model(speculation=asked)


def test_ngrams_of_other_tenants_need_consent_where_the_engine_uses_them() -> None:
    default, shared = (
        model(speculation={"method": "NGram"}),
        model(speculation={"method": "NGram", "isolation": "Shared"}),
    )
    (problem,) = sglang.problems(default, facts())
    assert "guesses from the answers to all tenants" in problem
    assert "`isolation: Shared`" in problem
    assert sglang.problems(shared, facts()) == []
    assert vllm.problems(default, facts()) == [], "vLLM looks into the request's own text only"


def test_the_consent_to_a_common_prefix_cache_is_no_consent_to_common_guesses() -> None:
    raw = model(speculation={"method": "NGram"}).model_dump(by_alias=True, exclude_none=True)
    raw["spec"]["prefixCache"] = {"isolation": "Shared"}
    assert sglang.problems(Model.model_validate(raw), facts())


@pytest.mark.parametrize("engine", [sglang, vllm])
def test_what_cannot_guess_is_refused(engine: Any) -> None:
    asked = model(speculation={"method": "MTP"})
    assert "this checkpoint has none" in engine.problems(asked, facts())[0]
    assert engine.problems(asked, facts(mtpLayers=1)) == []
    assert engine.problems(asked, None) == []
    assert "generates nothing" in engine.problems(asked, facts(task="Embed", mtpLayers=1))[0]


def test_sglang_does_not_split_attention_with_ngrams() -> None:
    asked = model("--attn-dp-size=2", speculation={"method": "NGram", "isolation": "Shared"})
    assert "does not go with --attn-dp-size" in sglang.problems(asked, facts())[0]


@pytest.mark.parametrize(
    ("engine", "arg", "field"),
    [
        (sglang, "--speculative-algorithm=NGRAM", "speculation.method"),
        (sglang, "--speculative-algorithm=nextn", "speculation.method"),
        (sglang, "--quantization=fp8", "quantization.weights"),
        (sglang, "--kv-cache-dtype=fp8_e4m3", "quantization.kvCache"),
        (vllm, '--speculative-config={"method":"suffix"}', "speculation"),
        (vllm, "--speculative-config.method=ngram", "speculation"),
        (vllm, "--spec-method=suffix", "speculation.method"),
        (vllm, "--quantization=fp8", "quantization.weights"),
        (vllm, "--kv-cache-dtype=fp8", "quantization.kvCache"),
    ],
)
def test_what_a_field_says_is_refused_as_an_argument(engine: Any, arg: str, field: str) -> None:
    name = arg.removeprefix("--").partition("=")[0].partition(".")[0]
    assert engine.problems(model(arg), facts()) == [
        f"spec.engine.extraArgs: --{name} is owned by Shoal: use spec.engine.{field}"
    ]


@pytest.mark.parametrize(
    ("engine", "arg"),
    [
        (sglang, "--kv-cache-dtype=fp8_e5m2"),
        (sglang, "--quantization=awq_marlin"),
        (sglang, "--speculative-algorithm=DFLASH"),
        (sglang, "--speculative-ngram-max-trie-depth=4"),
        (vllm, "--kv-cache-dtype=fp8_e5m2"),
    ],
)
def test_what_no_field_can_say_stays_an_argument_unless_the_field_is_set(engine: Any, arg: str) -> None:
    assert engine.problems(model(arg), facts()) == []
    asked: dict[str, Any] = {
        "quantization": {"kvCache": "FP8", "weights": "FP8"},
        "speculation": {"method": "EAGLE", "draftPath": "x"},
    }
    fields = {"kv-cache-dtype", "quantization", "speculative-algorithm"}
    name = arg.removeprefix("--").partition("=")[0]
    assert bool(engine.problems(model(arg, **asked), facts(mtpLayers=1))) == (name in fields)


# --- on the command line and in the sums ------------------------------------------------------------------------------

POOL = {"metadata": {"name": "p", "namespace": "a", "uid": "p"}, "spec": {"modelRef": {"name": "m"}}}
DEEPSEEK = facts_of(ALL["deepseek-v3"], source="x", weight_bytes=640 * 2**30)


def launched(kind: EngineKind, asked: Model, quantization: Literal["FP8"] | None = None) -> list[str]:
    version = kind.pod.versions[-1]
    args = kind.pod.args(EngineLaunch(asked, version, model_path="/m", port=1, tensor=4, quantization=quantization))
    of_fields = ("spec", "quant", "kv-cache", "ep-size", "expert")
    return [arg for arg in args if any(word in arg for word in of_fields)]


EVERYTHING = {
    "speculation": {"method": "MTP", "draftTokens": 2},
    "quantization": {"weights": "FP8", "kvCache": "FP8"},
    "parallelism": {"expert": True},
}
LAUNCHED = {
    "SGLang": {
        "--quantization=fp8", "--kv-cache-dtype=fp8_e4m3", "--ep-size=4", "--speculative-algorithm=NEXTN",
        "--speculative-eagle-topk=1", "--speculative-num-steps=2", "--speculative-num-draft-tokens=3",
    },
    "vLLM": {
        "--quantization=fp8", "--kv-cache-dtype=fp8", "--enable-expert-parallel",
        '--speculative-config={"method":"mtp","num_speculative_tokens":2}',
    },
}  # fmt: skip
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


@KIND
def test_the_pods_engine_is_started_with_them(kind: EngineKind) -> None:
    assert set(launched(kind, model(type=kind.type, **EVERYTHING))) == LAUNCHED[kind.type]
    assert launched(kind, model(type=kind.type)) == []


@KIND
def test_a_variants_quantization_takes_precedence(kind: EngineKind) -> None:
    assert launched(kind, model(type=kind.type), "FP8") == ["--quantization=fp8"]
    twice = launched(kind, model(type=kind.type, quantization={"weights": "FP8"}), "FP8")
    assert twice == ["--quantization=fp8"]


@KIND
def test_the_sums_know_them(kind: EngineKind) -> None:
    def sized(**engine: Any) -> Sized:
        asked = model(type=kind.type, **engine)
        tuning = kind.pod.tuning((), engine=asked.spec.engine, facts=DEEPSEEK)
        found = size(
            DEEPSEEK, GPU("h200", 143771 * 2**20), tensor=8, context_length=32768, overrides=Sizing(), tuning=tuning
        )
        assert isinstance(found, Sized), found
        return found

    plain = sized()
    assert sized(quantization={"kvCache": "FP8"}).kv_bytes_per_token * 2 == plain.kv_bytes_per_token
    # One layer more than 61.
    mtp = sized(speculation={"method": "MTP"})
    assert mtp.kv_bytes_per_token == pytest.approx(plain.kv_bytes_per_token * 62 / 61, abs=16)
    assert (mtp.kv_tokens or 0) < (plain.kv_tokens or 0)
    assert sized(speculation={"method": "NGram"}).kv_bytes_per_token == plain.kv_bytes_per_token


@KIND
def test_a_draft_of_unknown_size_is_asked_for(kind: EngineKind) -> None:
    asked = model(type=kind.type, speculation={"method": "EAGLE", "draftPath": "draft"})
    found = size(
        DEEPSEEK, GPU("h200", 143771 * 2**20), tensor=8, context_length=32768, overrides=Sizing(),
        tuning=kind.pod.tuning((), engine=asked.spec.engine, facts=DEEPSEEK),
    )  # fmt: skip
    assert isinstance(found, Misfit)
    assert "a draft model whose size is not known" in found.why


@KIND
def test_whole_experts_run_where_cut_ones_do_not(kind: EngineKind) -> None:
    qwen = facts_of(ALL["qwen3-235b-fp8"], source="x", weight_bytes=235 * 2**30)
    cut, whole = (
        size(
            qwen, GPU("h100", 81559 * 2**20), tensor=8, context_length=8192, overrides=Sizing(),
            tuning=kind.pod.tuning((), engine=model(parallelism={"expert": spread}).spec.engine, facts=qwen),
        )
        for spread in (False, True)
    )  # fmt: skip
    assert isinstance(cut, Misfit)
    assert isinstance(whole, Sized)


@pytest.mark.parametrize(("method", "refused"), [("DraftModel", True), ("EAGLE", False), ("EAGLE3", False)])
def test_a_draft_beside_adapters_is_sglangs_to_refuse(method: str, refused: bool) -> None:
    pod, pool = KINDS["SGLang"].pod, LoRAPool.model_validate(POOL)
    engine = model(speculation={"method": method, "draftPath": "draft"}).spec.engine
    problem = pod.pool_problem(pool, pod.given(pod.field_args(engine)), {})
    assert (problem is not None) == refused
