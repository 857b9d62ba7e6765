"""What a Model can do, by its architecture and its engine's arguments."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from shoal.api.model import Model
from shoal.core.architectures import facts_of
from shoal.core.capabilities import Capability, capabilities
from shoal.core.enginedifferences import EngineDifferences
from shoal.core.routing.resolve import ServedAdapter, ServedModel, abilities, can, served_model
from shoal.engine.kinds import KINDS
from shoal.engine.sglang.wire import EMBEDS_ARG, NO_PREFIX_CACHE, WIRE
from shoal.engine.wires import differences_of
from tests.support import model_configs as configs

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
ONE = {"id2label": {"0": "LABEL_0"}}
THREE = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}


@pytest.mark.parametrize(
    ("architecture", "config", "args", "shared", "able"),
    [
        ("LlamaForCausalLM", {}, (), False, "generate"),
        # /v1/score takes no cache_salt: one tenant would find another's prompts.
        ("LlamaForCausalLM", {}, (), True, "generate score"),
        ("LlamaForCausalLM", {}, (NO_PREFIX_CACHE,), False, "generate score"),
        ("LlamaForCausalLM", {}, (EMBEDS_ARG,), True, "embed"),
        ("LlamaForCausalLM", ONE, (), False, "generate"),
        ("Qwen3Model", {}, (), False, "embed"),
        ("XLMRobertaModel", {}, (EMBEDS_ARG,), False, "embed"),
        ("NotKnownForCausalLM", {}, (), False, "generate"),
        # EmbeddingGemma, if its config says `use_bidirectional_attention`.
        ("Gemma3TextModel", {}, (), True, "embed generate"),
        ("Gemma3TextModel", {}, (EMBEDS_ARG,), False, "embed"),
        ("XLMRobertaForSequenceClassification", ONE, (), False, "rerank"),
        ("BertForSequenceClassification", {"num_labels": 1}, (EMBEDS_ARG,), False, "rerank"),
        ("XLMRobertaForSequenceClassification", THREE, (), False, "classify"),
        ("BertForSequenceClassification", {}, (), False, "classify"),
        ("Qwen2ForSequenceClassification", ONE, (), False, "rerank score"),
        ("Qwen2ForSequenceClassification", THREE, (), False, "classify score"),
        ("Qwen3ForRewardModel", {}, (), False, "score"),
        ("WhisperForConditionalGeneration", {}, (), True, "transcribe"),
        ("Qwen3ASRForConditionalGeneration", {}, (), False, "transcribe"),
        # It takes no cache_salt either: one tenant would find another's audio.
        ("Qwen2AudioForConditionalGeneration", {}, (), False, "generate"),
        ("Qwen2AudioForConditionalGeneration", {}, (), True, "generate score transcribe"),
        ("VoxtralForConditionalGeneration", {}, (), True, "generate score"),
    ],
)
def test_the_weights_say_what_a_model_can_do(
    architecture: str, config: dict[str, Any], args: Sequence[str], shared: bool, able: str
) -> None:
    facts = facts_of({"architectures": [architecture], "model_type": "x", **SIZES, **config}, source="hf://a/b")
    assert capabilities(facts, args, shares_prefixes=shared, differences=WIRE.differences) == set(able.split())


@pytest.mark.parametrize(
    ("architecture", "config", "shared", "able"),
    [
        ("LlamaForCausalLM", {}, True, "generate"),
        ("Qwen3Model", {}, False, "embed"),
        ("XLMRobertaForSequenceClassification", ONE, False, "rerank score"),
        ("Qwen2ForSequenceClassification", ONE, False, "rerank score"),
        ("Qwen2ForSequenceClassification", THREE, False, "classify"),
        ("Qwen3ForRewardModel", {}, False, ""),
    ],
)
def test_an_engine_that_scores_pairs_scores_where_it_reranks(
    architecture: str, config: dict[str, Any], shared: bool, able: str
) -> None:
    facts = facts_of({"architectures": [architecture], "model_type": "x", **SIZES, **config}, source="hf://a/b")
    pairs = EngineDifferences(pairs_score=True)
    assert capabilities(facts, (), shares_prefixes=shared, differences=pairs) == set(able.split())


@pytest.mark.parametrize(
    ("architecture", "args", "able"),
    [
        ("LlamaForCausalLM", (), "generate score"),
        ("Qwen2VLForConditionalGeneration", (), "generate score"),
        ("LlamaForCausalLM", (EMBEDS_ARG,), "embed"),
        ("Gemma3TextModel", (), "embed generate"),
        ("Qwen2ForSequenceClassification", (), "classify"),
    ],
)
def test_an_engine_that_separates_tenants_when_it_scores_needs_no_common_cache(
    architecture: str, args: Sequence[str], able: str
) -> None:
    facts = facts_of({"architectures": [architecture], "model_type": "x", **SIZES}, source="hf://a/b")
    salted = EngineDifferences(
        embeds_arg=EMBEDS_ARG, pairs_score=True, generating=EngineDifferences(most_scored_bytes=10)
    )
    assert capabilities(facts, args, shares_prefixes=False, differences=salted) == set(able.split())


def test_an_engine_may_not_transcribe_with_an_architecture() -> None:
    facts = facts_of(
        {"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "x", **SIZES}, source="hf://a/b"
    )
    assert "transcribe" in capabilities(facts, (), shares_prefixes=True, differences=WIRE.differences)
    differences = EngineDifferences(not_transcribed=frozenset({"Qwen2AudioForConditionalGeneration"}))
    assert capabilities(facts, (), shares_prefixes=True, differences=differences) == {"generate", "score"}


def test_facts_of_an_earlier_release_do_not_say_how_many_labels_there_are() -> None:
    facts = facts_of(
        {"architectures": ["Qwen2ForSequenceClassification"], "model_type": "x", **SIZES, **ONE}, source="hf://a/b"
    ).model_copy(update={"labels": None})
    assert capabilities(facts, (), shares_prefixes=False, differences=WIRE.differences) == {
        "rerank",
        "classify",
        "score",
    }


def test_without_facts_the_engine_judges() -> None:
    assert capabilities(None, (), shares_prefixes=False, differences=WIRE.differences) == {"generate", "embed"}
    assert capabilities(None, (EMBEDS_ARG,), shares_prefixes=False, differences=WIRE.differences) == {"embed"}


@pytest.mark.parametrize(
    ("architecture", "engine", "told"),
    [
        ("LlamaForCausalLM", {}, ""),
        ("LlamaForCausalLM", {"toolCallParser": "llama3", "reasoningParser": "qwen3"}, "tools reasoning"),
        ("Qwen2VLForConditionalGeneration", {"type": "vLLM", "toolCallParser": "hermes"}, "vision tools"),
        ("Qwen2AudioForConditionalGeneration", {}, "audio"),
        # A part of its work, not of a chat.
        ("WhisperForConditionalGeneration", {}, ""),
    ],
)
def test_clients_are_told_what_a_model_does_with_a_chat(architecture: str, engine: dict[str, Any], told: str) -> None:
    config = {"architectures": [architecture], "model_type": "x", **SIZES}
    spec = {"source": {"uri": "hf://a/b"}, "engine": engine}
    facts = facts_of(config, source="hf://a/b").model_dump(by_alias=True)
    declared = {"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec, "status": {"artifact": facts}}
    assert served_model(Model.model_validate(declared)).traits == set(told.split())


STEP3 = {"architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl", "vision_config": {}, **SIZES}
QWEN3_VL = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "x", "vision_config": {}, **SIZES}
ON, OFF, DEFAULT = "--enable-multimodal", "--language-model-only", "--no-language-model-only"


@pytest.mark.parametrize(
    ("engine", "config", "args", "reads"),
    [
        ("SGLang", configs.GEMMA3_4B, (), False),
        ("SGLang", configs.GEMMA3_4B, (ON,), True),
        ("SGLang", configs.LLAMA4_SCOUT, (), False),
        ("SGLang", configs.LLAMA4_SCOUT, (ON,), True),
        ("SGLang", STEP3, (), False),
        ("SGLang", STEP3, (ON,), True),
        ("SGLang", QWEN3_VL, (), True),
        ("SGLang", QWEN3_VL, (ON,), True),
        ("SGLang", QWEN3_VL, (OFF,), False),
        # With both it refuses images.
        ("SGLang", QWEN3_VL, (OFF, ON), False),
        ("SGLang", configs.LLAMA_8B, (ON,), False),
        ("vLLM", configs.GEMMA3_4B, (), True),
        ("vLLM", configs.GEMMA3_4B, (OFF,), False),
        ("vLLM", configs.GEMMA3_4B, (OFF, DEFAULT), True),
        ("vLLM", configs.GEMMA3_4B, (DEFAULT, OFF), False),
        ("vLLM", configs.LLAMA4_SCOUT, (), True),
        ("vLLM", STEP3, (), True),
        ("vLLM", QWEN3_VL, (), True),
        ("vLLM", QWEN3_VL, (OFF,), False),
        ("vLLM", configs.LLAMA_8B, (), False),
    ],
)
def test_engine_and_arguments_say_whether_images_are_read_and_sized(
    engine: str, config: dict[str, Any], args: Sequence[str], reads: bool
) -> None:
    facts = facts_of(config, source="hf://a/b")
    spec = {"source": {"uri": "hf://a/b"}, "engine": {"type": engine, "extraArgs": args}}
    status = {"artifact": facts.model_dump(by_alias=True)}
    declared = {"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec, "status": status}
    served = served_model(Model.model_validate(declared), differences_of(engine))
    assert served.facts.media == ({"image"} if reads else set())
    assert served.traits == ({"vision"} if reads else set())
    assert KINDS[engine].pod.tuning(args, facts=facts).reads_media(facts) == reads


def test_a_model_that_reads_text_only_transcribes_nothing() -> None:
    facts = facts_of({"architectures": ["GlmAsrForConditionalGeneration"], "model_type": "x", **SIZES}, source="x")
    for args, able in (((), {"generate", "score", "transcribe"}), ((OFF,), {"generate", "score"})):
        assert capabilities(facts, args, shares_prefixes=True, differences=differences_of("vLLM")) == able


def test_an_endpoint_asks_for_what_the_error_lists() -> None:
    """Each request asks for one ability (`can`); the message of a refusal lists them all (`abilities`)."""
    model = ServedModel("a/m", "uid", "m", (), None, capabilities=frozenset({"generate", "score"}))
    adapter = ServedAdapter("a/adapter", "adapter-uid", "revision", "adapter", "file:///adapter")
    for served in (model, replace(model, adapter=adapter)):
        assert [need for need in sorted(get_args(Capability)) if can(served, need)] == abilities(served)
