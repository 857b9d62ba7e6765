"""SGLang's arguments for speculation and quantization, and what SGLang refuses of them."""

from collections.abc import Mapping
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import CELRule
from shoal.api.model import Engine, Model, Speculation
from shoal.core.capabilities import only_embeds
from shoal.engine import rules
from shoal.engine.fields import FieldArgument, no_experts, refused
from shoal.engine.sglang.architectures import EAGLE3, STAGED
from shoal.engine.sglang.arguments import ARGUMENTS, parsed
from shoal.engine.sglang.wire import WIRE

_ALGORITHMS: Final = {
    "NGram": "NGRAM", "MTP": "NEXTN", "EAGLE": "EAGLE", "EAGLE3": "EAGLE3", "DraftModel": "STANDALONE",
}  # fmt: skip
"""Speculation method -> --speculative-algorithm."""
_NOT_IN_STAGES: Final[Mapping[str, str]] = {
    "min-free-slots-delay": "each stage has a part of the places",
    "enable-return-aux-hidden-states": "only the last stage sees them",
    "enable-pdmux": "it divides one stage between prefill and decode",
    "dllm-algorithm": "diffusion runs in one stage, and the GPUs of the others would stay idle",
}
"""Argument -> why it does not go with stages."""
_FIELDS: Final = (
    FieldArgument(
        "speculative-algorithm", "speculation.method", frozenset(name.lower() for name in _ALGORITHMS.values())
    ),
    FieldArgument("speculative-num-draft-tokens", "speculation.draftTokens", frozenset()),
    FieldArgument("speculative-draft-model-path", "speculation.draftPath", frozenset()),
    FieldArgument("attn-dp-size", "parallelism.attentionData", frozenset()),
    FieldArgument("ep-size", "parallelism.expert", frozenset()),
    FieldArgument("quantization", "quantization.weights", frozenset({"fp8"})),
    FieldArgument("kv-cache-dtype", "quantization.kvCache", frozenset({"fp8_e4m3"})),
)


def field_args(engine: Engine, model_path: str, tensor: int | None) -> tuple[str, ...]:
    """Arguments for speculation, parallelism and the type of the KV cache; `model_path` is the folder of the weights,
    `tensor` the number of GPUs of a stage, if it is known. How the weights are quantized is a matter of the variant
    too: see `quantization_args`."""
    asked = engine.parallelism
    stages = (f"--pp-size={asked.pipeline}",) if asked.pipeline > 1 else ()
    groups = (f"--attn-dp-size={asked.attention_data}",) if asked.attention_data > 1 else ()
    experts = (f"--ep-size={tensor}",) if asked.expert and tensor is not None else ()
    cache = ("--kv-cache-dtype=fp8_e4m3",) if engine.quantization.kv_cache == "FP8" else ()
    return (
        *stages,
        *groups,
        *experts,
        *cache,
        *(_speculation(engine.speculation, model_path) if engine.speculation else ()),
    )


def _speculation(asked: Speculation, model_path: str) -> tuple[str, ...]:
    args = [f"--speculative-algorithm={_ALGORITHMS[asked.method]}"]
    if asked.draft_path is not None:
        args.append(f"--speculative-draft-model-path={model_path}/{asked.draft_path}")
    if asked.draft_tokens is None:
        return tuple(args)
    if asked.method == "NGram":
        return (*args, f"--speculative-num-draft-tokens={asked.draft_tokens}")
    # One guess after the other; the token that the check itself yields counts too.
    steps = ("--speculative-eagle-topk=1", f"--speculative-num-steps={asked.draft_tokens}")
    return (*args, *steps, f"--speculative-num-draft-tokens={asked.draft_tokens + 1}")


def problems(model: Model, facts: ArtifactFacts | None) -> list[str]:
    """What SGLang cannot do of these fields, and what `extraArgs` may not say because of them: one sentence each."""
    engine = model.spec.engine
    given = parsed(engine.extra_args)
    found = refused(_FIELDS, engine, given)
    if (why := no_experts(engine, facts)) is not None:
        found.append(why)
    if engine.parallelism.pipeline > 1:
        found += _in_stages(engine, given, facts)
    asked = engine.speculation
    if asked is None:
        return found
    where = f"spec.engine.speculation: {asked.method}"
    if asked.method == "NGram" and asked.isolation == "Tenant":
        found.append(
            f"{where} of SGLang guesses from the answers to all tenants of a replica, so response times tell a tenant "
            "what others were answered; set `isolation: Shared` to accept that, or use another method"
        )
    if only_embeds(facts, engine.extra_args, WIRE.differences):
        found.append("spec.engine.speculation: this model generates nothing that could be guessed: leave it out")
    if asked.method == "MTP" and facts is not None and facts.mtp_layers == 0:
        found.append(f"{where} needs layers for multi-token prediction, and this checkpoint has none")
    known = facts.architecture if facts is not None and facts.kv.kind != "Unknown" else None
    if asked.method == "EAGLE3" and known is not None and known not in EAGLE3:
        found.append(f"{where} is not there for {known} in SGLang: use another method, or leave it out")
    split = engine.parallelism.attention_data > 1 or given.get("attn-dp-size", "1") != "1"
    if asked.method in ("NGram", "DraftModel") and split:
        by = "parallelism.attentionData" if engine.parallelism.attention_data > 1 else "--attn-dp-size"
        found.append(f"{where} does not go with {by}: leave one of them out")
    return found


def _in_stages(engine: Engine, given: Mapping[str, str], facts: ArtifactFacts | None) -> list[str]:
    """Why SGLang does not run this in pipeline stages (`check_pipeline_parallel_compat`)."""
    where, found = "spec.engine.parallelism.pipeline", list[str]()
    if facts is not None and facts.kv.kind != "Unknown" and facts.architecture not in STAGED:
        found.append(f"{where}: SGLang does not divide {facts.architecture} into stages: leave it out")
    if engine.speculation is not None or "speculative-algorithm" in given:
        found.append(
            f"{where}: SGLang guesses no tokens in stages, except in engines that only do prefill: leave it out"
        )
    found += [
        f"{where} does not go with --{name}, since {why}" for name, why in _NOT_IN_STAGES.items() if name in given
    ]
    return found


CEL: Final = (
    *rules.owned(ARGUMENTS),
    *rules.said_by_fields(ARGUMENTS, _FIELDS),
    *rules.not_in_stages(ARGUMENTS, _NOT_IN_STAGES),
    CELRule(
        f"!({rules.SPECULATES} && self.speculation.method == 'NGram') "
        "|| (has(self.speculation.isolation) && self.speculation.isolation == 'Shared')",
        "`speculation` by NGram of SGLang guesses from the answers to all tenants: set `isolation: Shared` to accept "
        "that, or use another method",
    ),
    CELRule(
        f"!({rules.SPECULATES} && self.speculation.method in ['NGram', 'DraftModel'] && {rules.GROUPED})",
        "`speculation` by NGram or DraftModel does not go with `parallelism.attentionData` in SGLang: leave one of "
        "them out",
    ),
    CELRule(
        f"!({rules.STAGED} && ({rules.SPECULATES} || {rules.given(ARGUMENTS, 'speculative-algorithm')}))",
        "SGLang guesses no tokens in stages: leave out `speculation` or `parallelism.pipeline`",
    ),
)
"""See `PodSide.rules`."""
