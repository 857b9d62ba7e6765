"""What is remembered of canaries, as the status of a Model has it: so that it outlives operators."""

from collections.abc import Mapping
from types import MappingProxyType

from shoal.api.model import CanaryAnswers, GPUAnswer, KnownAnswerStatus, Model, PromptAnswers
from shoal.core.health import canary
from shoal.core.health.canary import CanaryContext, Memory, PromptMemory

_NOTHING: Memory = MappingProxyType({})


def stored(model: Model) -> Mapping[str, CanaryAnswers]:
    """Class -> what the status says."""
    return {v.gpu_class: v.canary for v in (model.status.variants if model.status else ()) if v.canary is not None}


def memory(found: CanaryAnswers | None, context: CanaryContext) -> Memory:
    """What was remembered under the same circumstances; under others, nothing."""
    if found is None or found.key != context.key:
        return _NOTHING
    return {
        each.prompt: PromptMemory(
            tuple(canary.KnownAnswer(known.answer, known.since, known.gpus) for known in each.known),
            tuple((last.gpu, last.answer) for last in each.last),
        )
        for each in found.prompts
    }


def shown(context: CanaryContext, memory: Memory) -> CanaryAnswers:
    return CanaryAnswers(
        key=context.key,
        image=context.image,
        weights=context.weights,
        quantization=context.quantization,
        prompts=tuple(
            PromptAnswers(
                prompt=prompt,
                known=tuple(KnownAnswerStatus(answer=k.answer, since=k.since, gpus=k.gpus) for k in each.known),
                last=tuple(GPUAnswer(gpu=gpu, answer=answer) for gpu, answer in each.last),
            )
            for prompt, each in sorted(memory.items())
        ),
    )
