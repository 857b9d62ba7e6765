"""vLLM's arguments for speculation and quantization, and what vLLM refuses of them and of the other fields."""

import json
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Engine, Model, Speculation
from shoal.engine.fields import FieldArgument, no_experts, refused
from shoal.engine.vllm.arguments import ARGUMENTS

_METHODS: Final = {
    "NGram": "ngram", "MTP": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3", "DraftModel": "draft_model",
}  # fmt: skip
"""Speculation method -> `method` of --speculative-config."""
_GUESSES: Final = 4
"""Guessed tokens where nothing else is said: vLLM has no number of its own for every method."""
_FIELDS: Final = (
    FieldArgument("speculative-config", "speculation", frozenset()),
    FieldArgument("spec-method", "speculation.method", frozenset(_METHODS.values())),
    FieldArgument("spec-model", "speculation.draftPath", None),
    FieldArgument("spec-tokens", "speculation.draftTokens", frozenset()),
    FieldArgument("enable-expert-parallel", "parallelism.expert", None),
    FieldArgument("quantization", "quantization.weights", frozenset({"fp8"})),
    FieldArgument("kv-cache-dtype", "quantization.kvCache", frozenset({"fp8", "fp8_e4m3"})),
)


def field_args(engine: Engine, model_path: str) -> tuple[str, ...]:
    """Arguments for speculation, experts and the type of the KV cache; `model_path` is the folder of the weights. How
    the weights are quantized is a matter of the variant too: see `quantization_args`."""
    experts = ("--enable-expert-parallel",) if engine.parallelism.expert else ()
    cache = ("--kv-cache-dtype=fp8_e4m3",) if engine.quantization.kv_cache == "FP8" else ()
    return (*experts, *cache, *(_speculation(engine.speculation, model_path) if engine.speculation else ()))


def _speculation(asked: Speculation, model_path: str) -> tuple[str, ...]:
    settings: dict[str, str | int] = {"method": _METHODS[asked.method]}
    if asked.draft_path is not None:
        settings["model"] = f"{model_path}/{asked.draft_path}"
    settings["num_speculative_tokens"] = asked.draft_tokens or _GUESSES
    return (f"--speculative-config={json.dumps(settings, separators=(',', ':'))}",)


def problems(model: Model, facts: ArtifactFacts | None) -> list[str]:
    """What vLLM cannot do of these fields, and what `extraArgs` may not say because of them: one sentence each."""
    engine = model.spec.engine
    given = {name.partition(".")[0]: value for name, value in ARGUMENTS.parsed(engine.extra_args).items()}
    found = refused(_FIELDS, engine, given)
    if (why := no_experts(engine, facts)) is not None:
        found.append(why)
    asked = engine.speculation
    if asked is None:
        return found
    # Unlike SGLang's, NGram guesses from the request's own text.
    if facts is not None and facts.task == "Embed":
        found.append("spec.engine.speculation: this model generates nothing that could be guessed: leave it out")
    if asked.method == "MTP" and facts is not None and facts.mtp_layers == 0:
        found.append(
            "spec.engine.speculation: MTP needs layers for multi-token prediction, and this checkpoint has none"
        )
    return found
