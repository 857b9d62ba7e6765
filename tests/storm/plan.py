"""What a storm asks: a seeded sequence of requests, open loop, and what each whole answer must be. Pure."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from shoal_dev.sim.answers import SimulatedAnswer
from shoal_dev.sim.signatures import signature
from shoal_dev.sim.tokenizer import ModelFolder
from tests.storm.apis import TRANSLATED, TranslatedKind, body_of

Kind = Literal["short", "chat", "stream", "long", "leaver", "wrong", "attack"] | TranslatedKind
STREAMS: Final = frozenset({"stream", "long", "leaver", "message_stream", "response_stream"})
CHATS: Final = frozenset({"chat", *TRANSLATED})
"""Answered with the words of a chat."""
_SHARES: Final[dict[Kind, float]] = {
    "short": 0.46,
    "chat": 0.08,
    "message": 0.03,
    "message_stream": 0.03,
    "response": 0.03,
    "response_stream": 0.03,
    "stream": 0.24,
    "long": 0.0,
    "leaver": 0.06,
    "wrong": 0.03,
    "attack": 0.01,
}
ATTACKS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("stop_token_ids", {"min_tokens": 2, "stop_token_ids": [10_000_000]}),
    ("stop_token_ids", {"min_tokens": 2, "stop_token_ids": [-1]}),
    ("logprobs", {"logprobs": 1_000_000}),
    ("prompt", {"prompt": [10_000_000]}),
    ("stop_regex", {"stop_regex": "(a+)+b"}),
    ("n", {"n": 3000}),
    ("repetition_penalty", {"repetition_penalty": 1e-300}),
    ("lora_path", {"lora_path": "someone-elses"}),
)
"""Fields of completions that end or stall an engine for everybody, each with the field that the gateway must name in
its 400. In the simulator they end the engine as they end the real one: a storm finds that as a loss without a kill."""
LONG: Final = 0.01
"""Share of long answers, taken from the short ones. Where it is high, every engine always works on some."""
PROMPTS: Final = 256
"""Distinct prompts, each with an answer of its own: an answer that went to the wrong client is seen."""
_LONGEST: Final = 420
_TOO_MANY: Final = 10_000_000
"""More tokens than any context holds: the engine's own 400 is the right answer."""


@dataclass(frozen=True, slots=True)
class Phase:
    """While a Model is asked: `on` seconds of every `period`, from `start`. `period` 0: always."""

    period: float = 0.0
    on: float = 0.0
    start: float = 0.0

    def active(self, at: float) -> bool:
        return self.period <= 0 or (at - self.start) % self.period < self.on


@dataclass(frozen=True, slots=True)
class Target:
    """A Model or an adapter, and its share of the requests."""

    model: str
    share: float
    phase: Phase = Phase()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `at` in seconds from the start of the load."""

    id: str
    at: float
    model: str
    kind: Kind
    prompt: int
    max_tokens: int
    leave_after: float | None = None
    """The client hangs up so many seconds after it asked."""

    @property
    def path(self) -> str:
        if self.kind == "chat":
            return "/v1/chat/completions"
        return TRANSLATED.get(self.kind, "/v1/completions")

    def body(self) -> bytes:
        fields = {"model": self.model, **body_of(self.kind, prompt_text(self.prompt), self.max_tokens)}
        fields |= attack_of(self)
        if self.kind in STREAMS:
            fields["stream"] = True
            # Who does not ask for it hears nothing of usage; the engine tells the gateway all the same.
            if self.kind not in TRANSLATED and self.prompt % 2:
                fields["stream_options"] = {"include_usage": True}
        return orjson.dumps(fields)


def attack_of(ask: Ask) -> Mapping[str, Any]:
    """The fields with which it attacks the engine; none of any other kind."""
    return ATTACKS[ask.prompt % len(ATTACKS)][1] if ask.kind == "attack" else {}


def attacked_field(ask: Ask) -> str:
    """The field that the gateway must name when it refuses an attack."""
    return ATTACKS[ask.prompt % len(ATTACKS)][0]


def prompt_text(number: int) -> str:
    return f"Question {number}: how deep is the water where {number * 7919 % 1009} fish swim?"


def asks(
    seed: int,
    count: int,
    rate: float,
    targets: tuple[Target, ...],
    prefix: str = "s",
    *,
    long: float = LONG,
    attacks: bool = True,
    translated: bool = True,
) -> Iterator[Ask]:
    """`count` requests with exponential gaps of mean 1/rate seconds. A Model that is not asked at that moment passes
    its requests on to the next one that is; at least one Target must always be active. Without `attacks` those are
    short ones, and without `translated` those of other APIs are chats."""
    source = random.Random(seed)  # noqa: S311 - reproducible on purpose
    shares = _SHARES | {"long": long, "short": _SHARES["short"] - long}
    kinds, weights = zip(*shares.items(), strict=True)
    at = 0.0
    for number in range(count):
        at += source.expovariate(rate)
        active = [t for t in targets if t.phase.active(at)]
        (target,) = source.choices(active, [t.share for t in active])
        (kind,) = source.choices(kinds, weights)
        if kind == "attack" and not attacks:
            kind = "short"
        if kind in TRANSLATED and not translated:
            kind = "chat"
        yield Ask(
            id=f"{prefix}{seed}-{number:07d}",
            at=at,
            model=target.model,
            kind=kind,
            prompt=source.randrange(PROMPTS),
            max_tokens=_tokens(kind, source),
            leave_after=source.uniform(0.01, 1.5) if kind == "leaver" else None,
        )


def _tokens(kind: Kind, source: random.Random) -> int:
    low, high = {
        "short": (1, 8),
        **dict.fromkeys(CHATS, (2, 8)),
        "stream": (8, 24),
        "long": (150, _LONGEST),
        "leaver": (20, 120),
        "attack": (1, 8),
    }.get(kind, (_TOO_MANY, _TOO_MANY))
    return source.randint(low, high)


class Answers:
    """What the simulator says to each prompt, token by token: the same code, in another process."""

    def __init__(
        self,
        model_path: Path,
        adapters: Mapping[str, Sequence[Path]] | None = None,
        mixed: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`mixed`: names that the base and these adapters may answer."""
        self._folder = ModelFolder.load(str(model_path))
        self._signatures: dict[str, tuple[str, ...]] = {
            name: tuple(signature(folder) for folder in folders) for name, folders in (adapters or {}).items()
        }
        self._mixed = mixed or {}
        self._pieces: dict[tuple[bool, int, str | None], list[tuple[str, bool]]] = {}

    def right(self, ask: Ask) -> tuple[str, ...]:
        """The whole texts that may answer: one, or one of each revision of an adapter."""
        return tuple(text for _, text in self.by_weights(ask))

    def by_weights(self, ask: Ask) -> tuple[tuple[str, str], ...]:
        """The same, each with the name of its adapter; "" is the base."""
        mixed = self._mixed.get(ask.model)
        names = (ask.model,) if mixed is None else ("", *mixed)
        return tuple(
            (name if sign else "", self._text(ask, sign))
            for name in names
            for sign in self._signatures.get(name, (None,))
        )

    def _text(self, ask: Ask, sign: str | None) -> str:
        chat = ask.kind in CHATS
        key = (chat, ask.prompt, sign)
        if key not in self._pieces:
            self._pieces[key] = self._tokens_of(chat, prompt_text(ask.prompt), 16 if chat else _LONGEST, sign)
        text = ""
        for piece, last in self._pieces[key][: ask.max_tokens]:
            if last and chat:
                break
            text += piece
        return text

    def _tokens_of(self, chat: bool, text: str, count: int, sign: str | None) -> list[tuple[str, bool]]:
        tokenizer = self._folder.tokenizer
        if chat:
            text = self._folder.chat_prompt([{"role": "user", "content": text}], None)
        answer = SimulatedAnswer(tokenizer, tuple(tokenizer.encode(text)), seed=0, choice=0, signature=sign)
        return [answer.token(i)[1:] for i in range(count)]
