"""vLLM's arguments for speculation and quantization, and what vLLM refuses of them."""

import json
from collections.abc import Mapping
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Engine, Model, Speculation
from shoal.core.capabilities import only_embeds, takes_no_salt
from shoal.engine import rules
from shoal.engine.fields import FieldArgument, no_experts, refused
from shoal.engine.vllm.architectures import EAGLE3_IN_STAGES, NO_EAGLE3, NOT_STAGED
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.wire import WIRE

_METHODS: Final = {
    "NGram": "ngram", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "DraftModel": "draft_model",
}  # fmt: skip
"""Speculation method -> `method` of --speculative-config."""
DRAFT_TOKENS: Final = 4
"""Guessed tokens per step; vLLM has no default of its own for most methods."""
_NOT_IN_STAGES: Final = ("enable-return-routed-experts", "enable-hc-sp", "enable-dbo")
_FIELDS: Final = (
    # Its other methods are for experiments, and one of them (suffix) guesses from the answers to all tenants.
    FieldArgument("speculative-config", "speculation", None),
    FieldArgument("spec-method", "speculation.method", None),
    FieldArgument("spec-model", "speculation.draftPath", None),
    FieldArgument("spec-tokens", "speculation.draftTokens", None),
    FieldArgument("enable-expert-parallel", "parallelism.expert", None),
    FieldArgument("quantization", "quantization.weights", frozenset({"fp8", "fp8_per_tensor"})),
    FieldArgument("kv-cache-dtype", "quantization.kvCache", frozenset({"fp8", "fp8_e4m3"})),
)


_NO_SALT: Final = (
    "--enable-prefix-caching: nothing separates the prompts of tenants in the cache of a model that does not generate; "
    "leave it out, or set spec.prefixCache.isolation to Shared"
)


def field_args(engine: Engine, model_path: str) -> tuple[str, ...]:
    """Arguments for speculation, parallelism and the type of the KV cache; `model_path` is the folder of the weights.
    How the weights are quantized is a matter of the variant too: see `quantization_args`."""
    asked = engine.parallelism
    stages = (f"--pipeline-parallel-size={asked.pipeline}",) if asked.pipeline > 1 else ()
    # Without the second vLLM starts one HTTP server per group: adapters and the agent's counters need a single one.
    groups = (
        (f"--data-parallel-size={asked.attention_data}", "--api-server-count=1") if asked.attention_data > 1 else ()
    )
    experts = ("--enable-expert-parallel",) if asked.expert else ()
    cache = ("--kv-cache-dtype=fp8",) if engine.quantization.kv_cache == "FP8" else ()
    return (
        *stages,
        *groups,
        *experts,
        *cache,
        *(_speculation(engine.speculation, model_path) if engine.speculation else ()),
    )


def _speculation(asked: Speculation, model_path: str) -> tuple[str, ...]:
    config: dict[str, object] = {
        "method": _METHODS[asked.method],
        "num_speculative_tokens": asked.draft_tokens or DRAFT_TOKENS,
    }
    if asked.draft_path is not None:
        config["model"] = f"{model_path}/{asked.draft_path}"
    return (f"--speculative-config={json.dumps(config, separators=(',', ':'))}",)


def problems(model: Model, facts: ArtifactFacts | None) -> list[str]:
    """What vLLM cannot do of these fields, and what `extraArgs` may not say because of them: one sentence each.

    Its n-grams are those of the request's own text, so that no tenant learns anything of another.
    """
    engine = model.spec.engine
    given = {name.partition(".")[0]: value for name, value in ARGUMENTS.parsed(engine.extra_args).items()}
    found = refused(_FIELDS, engine, given)
    if (why := no_experts(engine, facts)) is not None:
        found.append(why)
    found += _in_parallel(engine, given, facts)
    if (
        "enable-prefix-caching" in given
        and model.spec.prefix_cache.isolation != "Shared"
        and takes_no_salt(facts, (), WIRE.differences)
    ):
        found.append(_NO_SALT)
    asked = engine.speculation
    if asked is None:
        return found
    if only_embeds(facts, (), WIRE.differences):
        found.append("spec.engine.speculation: this model generates nothing that could be guessed: leave it out")
    if asked.method == "MTP" and facts is not None and facts.mtp_layers == 0:
        found.append(
            "spec.engine.speculation: MTP needs layers for multi-token prediction, and this checkpoint has none"
        )
    if asked.method == "EAGLE3" and facts is not None:
        found += _eagle3(engine, given, facts)
    return found


def _eagle3(engine: Engine, given: Mapping[str, str], facts: ArtifactFacts) -> list[str]:
    """Why vLLM guesses nothing by EAGLE3 for this model."""
    where = "spec.engine.speculation: EAGLE3"
    # The Transformers backend has EAGLE3 for every architecture, and for none in stages.
    backend = given.get("model-impl") == "transformers"
    if facts.architecture in NO_EAGLE3 and not backend:
        return [f"{where} is not there for {facts.architecture} in vLLM: use another method, or leave it out"]
    if engine.parallelism.pipeline > 1 and facts.kv.kind != "Unknown":
        if backend:
            return [f"{where} does not go with parallelism.pipeline and --model-impl: leave one of them out"]
        if facts.architecture not in EAGLE3_IN_STAGES:
            return [
                f"{where} is not there for {facts.architecture} in stages of vLLM: use another method, or leave out "
                "parallelism.pipeline"
            ]
    return []


def _in_parallel(engine: Engine, given: Mapping[str, str], facts: ArtifactFacts | None) -> list[str]:
    """What vLLM does not do in pipeline stages or groups."""
    asked, found = engine.parallelism, list[str]()
    where = "spec.engine.parallelism.pipeline"
    if asked.pipeline > 1 and facts is not None and facts.architecture in NOT_STAGED:
        found.append(f"{where}: vLLM does not divide {facts.architecture} into stages: leave it out")
    if asked.pipeline > 1:
        found += [
            f"{where} does not go with --{name}: leave one of them out" for name in _NOT_IN_STAGES if name in given
        ]
    if asked.attention_data > 1 and facts is not None and facts.experts is None and facts.kv.kind != "Unknown":
        found.append(
            "spec.engine.parallelism.attentionData: this model has no experts, so that each group of vLLM would hold "
            "all of its weights: use spec.scaling for more replicas"
        )
    return found


CEL: Final = (
    *rules.owned(ARGUMENTS),
    *rules.said_by_fields(ARGUMENTS, _FIELDS),
    *rules.not_in_stages(ARGUMENTS, _NOT_IN_STAGES),
)
"""See `PodSide.rules`."""
