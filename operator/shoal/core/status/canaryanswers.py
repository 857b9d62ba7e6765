"""What is remembered of canaries, as the status of a Model has it: so that it outlives operators; and what the classes
of a Model show beside each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.api.model import CanaryAnswers, GPUAnswer, KnownAnswerStatus, Model, PromptAnswers, VariantStatus
from shoal.core.health import canary
from shoal.core.health.canary import REPEATS, WITNESSES, CanaryContext, Memory, PromptMemory

LEAST_PROMPTS: Final = 2
"""To which a class must repeat itself."""
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


@dataclass(frozen=True, slots=True)
class GarbledClass:
    """A class whose GPUs all repeat themselves, where another one answers."""

    gpu_class: str
    gpus: int
    prompts: int
    image: str
    quantization: str | None
    other: str
    """The class that answers with the same weights."""

    @property
    def text(self) -> str:
        """For the condition."""
        of = f"{self.image}, quantization {self.quantization}" if self.quantization else self.image
        return (
            f"class {self.gpu_class} ({of}): the last {self.gpus} GPUs answered each of {self.prompts} canaries with "
            f"one or two characters repeated, or with nothing; class {self.other} answers them with the same weights"
        )


def garbled(variants: Sequence[VariantStatus]) -> tuple[GarbledClass, ...]:
    """Classes that serve and seem to compute wrong as a whole.

    Other answers than those of another class are no reason: kinds of GPUs differ in the last bits of sums. Answers that
    repeat themselves are none either: those of random weights do, on every class. Both together are: on one class no
    answer to any prompt was ever known, and another class of the same weights gives one of its own to each.
    """
    found: list[GarbledClass] = []
    for each in variants:
        seen = each.canary
        if seen is None or not each.ready or seen.weights is None:
            continue
        gpus = [_repeating(prompt) for prompt in seen.prompts]
        if len(gpus) < LEAST_PROMPTS or min(gpus) < WITNESSES:
            continue
        asked = [prompt.prompt for prompt in seen.prompts]
        others = (o for o in variants if o.canary is not None and o.canary.weights == seen.weights)
        right = sorted(o.gpu_class for o in others if o.canary is not None and _answers(o.canary, asked))
        if right:
            found.append(GarbledClass(each.gpu_class, min(gpus), len(gpus), seen.image, seen.quantization, right[0]))
    return tuple(found)


def _repeating(seen: PromptAnswers) -> int:
    """The GPUs that answered last, if all of them repeat themselves and none is known to have answered; else 0."""
    repeats = not seen.known and all(each.answer == REPEATS for each in seen.last)
    return len(seen.last) if repeats else 0


def _answers(seen: CanaryAnswers, asked: Sequence[str]) -> bool:
    """Whether an answer is known to each prompt, and to no two the same: what says the same to everything is not right
    either."""
    known = {each.prompt: frozenset(k.answer for k in each.known) for each in seen.prompts}
    answers = [known.get(prompt, frozenset[str]()) for prompt in asked]
    return all(answers) and len(frozenset[str]().union(*answers)) == sum(len(each) for each in answers)
