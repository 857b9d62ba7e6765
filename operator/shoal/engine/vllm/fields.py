"""vLLM's arguments for speculation and quantization, and what vLLM refuses of them."""

import json
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Engine, Model, Speculation
from shoal.core.capabilities import only_embeds
from shoal.engine.fields import FieldArgument, no_experts, refused
from shoal.engine.vllm.arguments import ARGUMENTS

_METHODS: Final = {
    "NGram": "ngram", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "DraftModel": "draft_model",
}  # fmt: skip
"""Speculation method -> `method` of --speculative-config."""
DRAFT_TOKENS: Final = 4
"""Guessed tokens per step; vLLM has no default of its own for most methods."""
_FIELDS: Final = (
    # Its other methods are for experiments, and one of them (suffix) guesses from the answers to all tenants.
    FieldArgument("speculative-config", "speculation", None),
    FieldArgument("spec-method", "speculation.method", None),
    FieldArgument("spec-model", "speculation.draftPath", None),
    FieldArgument("spec-tokens", "speculation.draftTokens", None),
    FieldArgument("enable-expert-parallel", "parallelism.expert", None),
    FieldArgument("quantization", "quantization.weights", frozenset({"fp8"})),
    FieldArgument("kv-cache-dtype", "quantization.kvCache", frozenset({"fp8", "fp8_e4m3"})),
)


def field_args(engine: Engine, model_path: str) -> tuple[str, ...]:
    """Arguments for speculation, experts and the type of the KV cache; `model_path` is the folder of the weights. How
    the weights are quantized is a matter of the variant too: see `quantization_args`."""
    experts = ("--enable-expert-parallel",) if engine.parallelism.expert else ()
    cache = ("--kv-cache-dtype=fp8",) if engine.quantization.kv_cache == "FP8" else ()
    return (*experts, *cache, *(_speculation(engine.speculation, model_path) if engine.speculation else ()))


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
    asked = engine.speculation
    if asked is None:
        return found
    if only_embeds(facts, ()):
        found.append("spec.engine.speculation: this model generates nothing that could be guessed: leave it out")
    if asked.method == "MTP" and facts is not None and facts.mtp_layers == 0:
        found.append(
            "spec.engine.speculation: MTP needs layers for multi-token prediction, and this checkpoint has none"
        )
    return found
