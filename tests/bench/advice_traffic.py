"""What gateways would have kept of a replayed run of the engine model: requests with the marks of texts that have the
same beginnings as the run's blocks."""

from collections.abc import Sequence

from shoal.api.traffic import TrafficRow
from shoal.core.advice.facts import ClassFact, PromptMark, RequestFact, TrafficWindow, prompt_marks_of
from shoal.core.advice.marks import MarkSealer, prompt_marks
from tests.bench.routing_engine import Asked, Block, Replica, Running

CHARACTERS = 4
"""Of a token."""
SEALER = MarkSealer(b"of a bench")


def text_of(block: Block) -> str:
    name, tokens = block
    unit = f"{name & ((1 << 64) - 1):016x}"
    return (unit * (tokens * CHARACTERS // len(unit) + 1))[: tokens * CHARACTERS]


def fields_of(asked: Asked, *, turns: bool) -> dict[str, object]:
    """The request's body. `turns`: its blocks are a system prompt, questions and answers; else one long message."""
    if not turns:
        return {"messages": [{"role": "user", "content": "".join(map(text_of, asked.blocks))}]}
    blocks, messages = list(asked.blocks), list[dict[str, str]]()
    if asked.system_tokens:
        messages.append({"role": "system", "content": text_of(blocks.pop(0))})
    for at, block in enumerate(blocks):
        messages.append({"role": "assistant" if at % 2 else "user", "content": text_of(block)})
    return {"messages": messages}


def marks_of(asked: Asked, *, turns: bool) -> tuple[PromptMark, ...]:
    found = prompt_marks(0 if asked.adapter is None else asked.adapter + 1, fields_of(asked, turns=turns))
    if found is None:
        return ()
    sealed = SEALER.seal(found)
    return prompt_marks_of(TrafficRow(0, 0, 0, 0, asked.prompt, 0, 0, 0, 0, 0, 0, 0), sealed)


def window(asked: Sequence[Asked], sent: Sequence[Running], placed: Sequence[Replica], *, turns: bool) -> TrafficWindow:
    found = tuple(
        RequestFact(
            one.at,
            one.at,
            run.first,
            run.done,
            run.prompt,
            run.cached,
            run.answer,
            at.number,
            at.gpu_class,
            one.adapter,
            marks=marks_of(one, turns=turns),
        )
        for one, run, at in zip(asked, sent, placed, strict=True)
    )
    return TrafficWindow(asked[0].at, found[-1].at + 1.0, found)


def class_fact(replica: Replica) -> ClassFact:
    return ClassFact(1, replica.params.kv_tokens)
