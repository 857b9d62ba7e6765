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
        (vllm, "--quantization=fp8_per_tensor", "quantization.weights"),
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


HEAD = {"method": "EAGLE3", "draftPath": "head"}


@pytest.mark.parametrize(
    ("architecture", "of_sglang", "of_vllm"),
    [
        ("LlamaForCausalLM", False, False),
        ("MixtralForCausalLM", True, True),
        ("Gemma3ForCausalLM", False, True),
        ("GraniteForCausalLM", True, False),
        # vLLM runs it on its Transformers backend.
        ("OlmoForCausalLM", True, False),
    ],
)
def test_eagle3_is_for_architectures_whose_hidden_states_the_engine_gives_it(
    architecture: str, of_sglang: bool, of_vllm: bool
) -> None:
    read = facts(kv={"kind": "Full"}, architecture=architecture)
    for engine, name, refused in ((sglang, "SGLang", of_sglang), (vllm, "vLLM", of_vllm)):
        why = (
            f"spec.engine.speculation: EAGLE3 is not there for {architecture} in {name}: use another method, "
            "or leave it out"
        )
        assert engine.problems(model(speculation=HEAD), read) == ([why] if refused else [])
        assert engine.problems(model(speculation=HEAD), None) == []
        assert engine.problems(model(speculation=HEAD | {"method": "EAGLE"}), read) == []
        assert engine.problems(model(speculation=HEAD), facts(architecture="NobodyKnowsForCausalLM")) == []


@pytest.mark.parametrize(
    ("architecture", "refused"),
    [
        ("LlamaForCausalLM", False),
        ("Qwen3VLForConditionalGeneration", False),
        ("Mistral3ForConditionalGeneration", False),
        ("Qwen3MoeForCausalLM", True),
        ("DeepseekV3ForCausalLM", True),
        # It inherits from Qwen 2, and takes it back.
        ("MiMoForCausalLM", True),
        # On the Transformers backend.
        ("OlmoForCausalLM", True),
    ],
)
def test_eagle3_in_stages_of_vllm_is_for_decoders_that_pass_hidden_states_on(architecture: str, refused: bool) -> None:
    staged = model(speculation=HEAD, parallelism={"pipeline": 2})
    why = (
        f"spec.engine.speculation: EAGLE3 is not there for {architecture} in stages of vLLM: use another method, "
        "or leave out parallelism.pipeline"
    )
    read = facts(kv={"kind": "Full"}, architecture=architecture)
    assert vllm.problems(staged, read) == ([why] if refused else [])
    assert vllm.problems(model(speculation=HEAD), read) == vllm.problems(staged, None) == []
    assert vllm.problems(model(speculation={"method": "NGram"}, parallelism={"pipeline": 2}), read) == []
    backend = model("--model-impl=transformers", speculation=HEAD, parallelism={"pipeline": 2})
    assert "does not go with parallelism.pipeline and --model-impl" in vllm.problems(backend, read)[0]


def test_eagle3_is_there_for_what_vllm_runs_on_its_transformers_backend() -> None:
    read = facts(kv={"kind": "Full"}, architecture="MixtralForCausalLM")
    assert vllm.problems(model("--model-impl=transformers", speculation=HEAD), read) == []


# --- parsers ----------------------------------------------------------------------------------------------------------

PARSERS = [
    ("SGLang", "toolCallParser", "qwen25", "hermes3", "hermes"),
    ("SGLang", "reasoningParser", "deepseek-r1", "deepseek_r1", "deepseek-r1"),
    ("vLLM", "toolCallParser", "llama3_json", "llama3", "llama3_json"),
    ("vLLM", "reasoningParser", "deepseek_r1", "deepseek-r1", "deepseek_r1"),
]


@pytest.mark.parametrize(("type_", "field", "right", "wrong", "meant"), PARSERS)
def test_a_parser_is_one_of_the_engines_own(type_: str, field: str, right: str, wrong: str, meant: str) -> None:
    pod = KINDS[type_].pod
    version = pod.versions[-1]
    assert pod.problems(model(type=type_, **{field: right}), version, facts()) == []
    # A build of the version has its parsers; of a version without a table nothing is known.
    assert pod.problems(model(type=type_, **{field: right}), f"{version}-mine", facts()) == []
    assert pod.problems(model(type=type_, **{field: wrong}), "99.0.0", facts()) == []
    (problem,) = pod.problems(model(type=type_, **{field: wrong}), version, facts())
    assert problem.startswith(
        f"spec.engine.{field}: {type_} {version} has no parser {wrong} (did you mean {meant}?); it has "
    )
    assert f", {right}, " in problem
    (problem,) = pod.problems(model(type=type_, **{field: "zzzzzzzz"}), version, facts())
    assert "has no parser zzzzzzzz; it has " in problem


def test_a_parser_of_a_plugin_is_the_plugins() -> None:
    own = model("--tool-parser-plugin=/opt/mine.py", type="vLLM", toolCallParser="mine")
    assert KINDS["vLLM"].pod.problems(own, KINDS["vLLM"].pod.versions[-1], facts()) == []


# --- on the command line and in the sums ------------------------------------------------------------------------------

POOL = {"metadata": {"name": "p", "namespace": "a", "uid": "p"}, "spec": {"modelRef": {"name": "m"}}}
DEEPSEEK = facts_of(ALL["deepseek-v3"], source="x", weight_bytes=640 * 2**30)


def launched(kind: EngineKind, asked: Model, quantization: Literal["FP8"] | None = None) -> list[str]:
    version = kind.pod.versions[-1]
    args = kind.pod.args(EngineLaunch(asked, version, model_path="/m", port=1, gpus=4, quantization=quantization))
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
        "--quantization=fp8_per_tensor", "--kv-cache-dtype=fp8", "--enable-expert-parallel",
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
    once = ["--quantization=fp8" if kind.type == "SGLang" else "--quantization=fp8_per_tensor"]
    assert launched(kind, model(type=kind.type), "FP8") == once
    assert launched(kind, model(type=kind.type, quantization={"weights": "FP8"}), "FP8") == once


@KIND
def test_stages_and_groups_divide_the_gpus(kind: EngineKind) -> None:
    def args(gpus: int, **parallelism: Any) -> set[str]:
        asked = model(type=kind.type, parallelism=parallelism)
        found = kind.pod.args(EngineLaunch(asked, kind.pod.versions[-1], "/m", 1, gpus=gpus))
        return {
            arg for arg in found if any(word in arg for word in ("tp-size", "pp-size", "dp-size", "parallel", "api-s"))
        }

    sglang = kind.type == "SGLang"
    assert args(4) == ({"--tp-size=4"} if sglang else {"--tensor-parallel-size=4"})
    assert args(8, pipeline=2) == (
        {"--tp-size=4", "--pp-size=2"} if sglang else {"--tensor-parallel-size=4", "--pipeline-parallel-size=2"}
    )
    # SGLang's groups are cut out of its tensor parallelism, vLLM's have one each.
    assert args(8, attentionData=4) == (
        {"--tp-size=8", "--attn-dp-size=4"}
        if sglang
        else {"--tensor-parallel-size=2", "--data-parallel-size=4", "--api-server-count=1"}
    )


STAGED = facts_of(ALL["llama-70b"], source="x", parameters=70_553_706_496)


@KIND
def test_a_replica_of_stages_is_sized_by_the_largest(kind: EngineKind) -> None:
    def sized(gpu: GPU, tensor: int | None, **parallelism: Any) -> Sized | Misfit:
        asked = model(type=kind.type, parallelism=parallelism)
        tuning = kind.pod.tuning((), engine=asked.spec.engine, facts=STAGED)
        return size(STAGED, gpu, tensor=tensor, context_length=8192, overrides=Sizing(), tuning=tuning)

    h100 = GPU("h100", 81559 * 2**20)
    plain, staged = sized(h100, 4), sized(h100, 2, pipeline=2)
    assert isinstance(plain, Sized)
    assert isinstance(staged, Sized)
    assert plain.gpus == staged.gpus == 4
    # 40 of 80 layers on two GPUs, as 80 on four.
    assert staged.kv_bytes_per_token == plain.kv_bytes_per_token
    # A stage has one of the two tables whole: half of both, cut in two in place of four.
    assert staged.weight_bytes_per_gpu == pytest.approx(plain.weight_bytes_per_gpu, rel=0.001)
    # 80 layers in three stages: 27 in the largest, and a table.
    three = sized(h100, 1, pipeline=3)
    assert isinstance(three, Sized)
    table = 128256 * 8192 * 2
    layers = 2 * STAGED.parameters - 2 * table if STAGED.parameters else 0
    assert three.weight_bytes_per_gpu == pytest.approx(layers * 27 / 80 + table, abs=16)
    # The smallest number that fits counts GPUs of a stage, up to a node's.
    found = sized(GPU("l40s", 46068 * 2**20, largest_node=8), None, pipeline=2)
    assert isinstance(found, Sized)
    assert found.gpus in (4, 8)
    none = sized(GPU("l40s", 46068 * 2**20, largest_node=2), None, pipeline=4)
    assert isinstance(none, Misfit)
    assert "`pipeline` is 4, and no node has more than 2 GPUs" in none.why
    both = sized(GPU("l40s", 46068 * 2**20, largest_node=4), 4, pipeline=2)
    assert isinstance(both, Misfit)
    assert "`tensor` is 4 and `pipeline` 2, and the largest node has 4 GPUs" in both.why


@KIND
def test_a_stage_has_a_layer_at_least(kind: EngineKind) -> None:
    small = facts_of(ALL["llama-8b"] | {"num_hidden_layers": 3}, source="x", weight_bytes=2**30)
    tuning = kind.pod.tuning((), engine=model(parallelism={"pipeline": 4}).spec.engine, facts=small)
    found = size(small, GPU("h100", 2**36), tensor=1, context_length=4096, overrides=Sizing(), tuning=tuning)
    assert isinstance(found, Misfit)
    assert "3 layers do not make 4 stages" in found.why


@KIND
def test_layers_that_are_not_alike_are_not_divided_by_guessing(kind: EngineKind) -> None:
    windows = facts_of(ALL["gpt-oss-20b"], source="x", weight_bytes=14 * 2**30)
    tuning = kind.pod.tuning((), engine=model(parallelism={"pipeline": 2}).spec.engine, facts=windows)
    gpu = GPU("h100", 81559 * 2**20)

    def sized(**overrides: Any) -> Sized | Misfit:
        given = Sizing.model_validate(overrides)
        return size(windows, gpu, tensor=1, context_length=8192, overrides=given, tuning=tuning)

    unknown = sized()
    assert isinstance(unknown, Misfit)
    assert "how 2 stages share the layers of GptOssForCausalLM" in unknown.why
    assert isinstance(sized(kvBytesPerToken=24576), Sized)


def test_each_group_holds_what_its_engine_repeats() -> None:
    def sized(kind: str, **sizing: Any) -> Sized | Misfit:
        asked = model(type=kind, parallelism={"attentionData": 8})
        tuning = KINDS[kind].pod.tuning((), engine=asked.spec.engine, facts=DEEPSEEK)
        given = Sizing.model_validate(sizing)
        gpu = GPU("h200", 143771 * 2**20)
        return size(DEEPSEEK, gpu, tensor=8, context_length=32768, overrides=given, tuning=tuning)

    split = sized("SGLang")
    assert isinstance(split, Sized)
    assert split.attention_groups == 8
    unknown = sized("vLLM")
    assert isinstance(unknown, Misfit)
    assert (
        "how much of the weights vLLM repeats with `attentionData` (--data-parallel-size) is not known" in unknown.why
    )
    known = sized("vLLM", weightBytes="760Gi")
    assert isinstance(known, Sized)
    assert (known.gpus, known.attention_groups) == (8, 8)


def test_what_sglang_does_not_run_in_stages_or_groups() -> None:
    staged = model(parallelism={"pipeline": 2})
    assert sglang.problems(staged, STAGED) == sglang.problems(staged, None) == []
    gemma = facts_of(ALL["gemma2-9b"], source="x")
    assert sglang.problems(staged, gemma) == [
        "spec.engine.parallelism.pipeline: SGLang does not divide Gemma2ForCausalLM into stages: leave it out"
    ]
    for guessing in (
        model(parallelism={"pipeline": 2}, speculation={"method": "MTP"}),
        model("--speculative-algorithm=DFLASH", parallelism={"pipeline": 2}),
    ):
        assert "guesses no tokens in stages" in sglang.problems(guessing, facts(mtpLayers=1))[0]
    (delay,) = sglang.problems(model("--min-free-slots-delay=1", parallelism={"pipeline": 2}), STAGED)
    assert delay.startswith("spec.engine.parallelism.pipeline does not go with --min-free-slots-delay")
    groups = model(parallelism={"attentionData": 2}, speculation={"method": "DraftModel", "draftPath": "d"})
    assert "does not go with parallelism.attentionData" in sglang.problems(groups, facts())[0]
    twice = model("--attn-dp-size=2", parallelism={"attentionData": 2})
    assert "use spec.engine.parallelism.attentionData" in sglang.problems(twice, facts())[0]


def test_what_vllm_does_not_run_in_stages_or_groups() -> None:
    staged = model(parallelism={"pipeline": 2})
    assert vllm.problems(staged, STAGED) == vllm.problems(staged, None) == []
    whisper = facts(kv={"kind": "Full"}, architecture="WhisperForConditionalGeneration")
    assert "vLLM does not divide WhisperForConditionalGeneration" in vllm.problems(staged, whisper)[0]
    assert (
        "does not go with --enable-dbo" in vllm.problems(model("--enable-dbo", parallelism={"pipeline": 2}), STAGED)[0]
    )
    assert vllm.problems(model("--enable-dbo"), STAGED) == []
    groups = model(parallelism={"attentionData": 2})
    assert "use spec.scaling for more replicas" in vllm.problems(groups, STAGED)[0]
    assert vllm.problems(groups, DEEPSEEK) == []


@KIND
def test_adapters_do_not_go_with_groups(kind: EngineKind) -> None:
    pod, pool = kind.pod, LoRAPool.model_validate(POOL)
    for groups, refused in ((1, False), (2, True)):
        given = pod.given(pod.field_args(model(parallelism={"attentionData": groups}).spec.engine))
        problem = pod.pool_problem(pool, given, {})
        assert (problem is not None and "parallelism.attentionData" in problem) == refused


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


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("WhisperForConditionalGeneration", None),
        ("Qwen3ForRewardModel", "no endpoint is for Qwen3ForRewardModel with vLLM: use SGLang"),
        ("Qwen2ForSequenceClassification", None),
        ("LlamaForCausalLM", None),
        ("Qwen3Model", None),
        (None, None),
    ],
)
def test_a_model_that_no_endpoint_is_for_starts_no_replica(architecture: str | None, says: str | None) -> None:
    """Its replicas would hold GPUs, and no request could be sent to them."""
    config = {"architectures": [architecture], "model_type": "x", "hidden_size": 64, "num_hidden_layers": 2}
    read = None if architecture is None else facts_of(config | {"num_attention_heads": 4}, source="hf://a/b")
    found = {kind.type: kind.pod.problems(model(type=kind.type), "1.2.3", read) for kind in KINDS.values()}
    assert found["SGLang"] == []
    if says is None:
        assert found["vLLM"] == []
    else:
        (problem,) = found["vLLM"]
        assert problem.startswith("spec.engine.type: ")
        assert says in problem
