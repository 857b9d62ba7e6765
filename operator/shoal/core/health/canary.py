"""Replicas that answer greedy requests otherwise than healthy GPUs of their class do.

Greedy answers of healthy engines begin alike and may differ later: which requests run in one batch moves the last bits
of a sum. So beginnings are compared, of several prompts, and a replica differs where most of its answers do.

An answer is *known* once two GPUs gave it: two of the replicas that are asked at the same time, if they are most of
them, or two of the last three GPUs that replicas ran on, one after the other. One GPU alone never makes an answer
known. What is known is remembered as long as nothing changes that answers depend on (`CanaryContext`), so that a Model
with one replica is compared too. A GPU that is out of use makes nothing known, and neither does an answer that repeats
one or two characters: two broken GPUs may well repeat the same.

Where healthy GPUs do not give the known answer any more, it is the known answer that was wrong: what they give becomes
known beside it.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Literal

COMPARED: Final = 12
"""Characters at the beginning."""
ROUNDS: Final = 3
"""In a row, in which a replica has to differ."""
WITNESSES: Final = 2
"""GPUs that must have given an answer before a replica differs from it."""
REMEMBERED: Final = 3
"""GPUs of which it is remembered what they answered last; and answers that are known at once."""
LEAST_ALONE: Final = 2
"""Prompts to which a replica has to answer otherwise when fewer than three replicas are asked: nobody shows then
whether all replicas answer otherwise just now."""
_TOGETHER: Final = 3
_LEAST_CHARACTERS: Final = 3
"""Different ones at the beginning of an answer that can become known."""
REPEATS: Final = "-"
"""Digest of an answer that repeats itself, or that is empty."""
MOST_PROMPTS: Final = 4
"""Of which something is remembered."""
LONGEST_PROMPT: Final = 64

CanaryVerdict = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class CanaryContext:
    """What the answers of a class's replicas of one Model depend on."""

    key: str
    """Digest of all of it."""
    image: str
    """Of the engine."""
    weights: str | None
    """Digest of their manifest or content; None: they are those of an image of Shoal's."""
    quantization: str | None


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer to one prompt that two GPUs gave, at least."""

    answer: str
    """As `digest` has it."""
    since: datetime
    gpus: int
    """Most GPUs that were seen to give it at once."""


@dataclass(frozen=True, slots=True)
class PromptMemory:
    """What is remembered of one prompt."""

    known: tuple[KnownAnswer, ...] = ()
    """The newest first."""
    last: tuple[tuple[str, str], ...] = ()
    """(GPU, its last answer), the one that answered last first."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """What one replica answers in a round."""

    gpu: str
    """The GPU, or the node where nobody says which of its GPUs it is."""
    named: bool
    """It is a GPU."""
    answers: Mapping[str, str]
    """Prompt -> digest of the answer's beginning."""
    counts: bool = True
    """False: the GPU is out of use or on probation, so it makes nothing known."""


Memory = Mapping[str, PromptMemory]
"""Prompt -> what is remembered of it."""


def digest(text: str) -> str:
    """Of the beginning of an answer: 16 hex digits; `REPEATS`: it repeats itself, and is never known."""
    beginning = text[:COMPARED]
    if len(set(beginning)) < _LEAST_CHARACTERS:
        return REPEATS
    return hashlib.sha256(beginning.encode(errors="replace")).hexdigest()[:16]


def judge(memory: Memory, said: Mapping[str, Spoken], now: datetime) -> tuple[Memory, dict[str, CanaryVerdict]]:
    """`said`: uid of a replica -> its answers of one round. Returns what is remembered from now on."""
    asked = sorted({prompt for each in said.values() for prompt in each.answers})[:MOST_PROMPTS]
    found = {prompt: _learn(memory.get(prompt, PromptMemory()), prompt, said, now) for prompt in asked}
    together = len(said) >= _TOGETHER
    verdicts: dict[str, CanaryVerdict] = {uid: _verdict(found, each, together) for uid, each in said.items()}
    others = [prompt for prompt in sorted(memory) if prompt not in found]
    return found | {prompt: memory[prompt] for prompt in others[: MOST_PROMPTS - len(found)]}, verdicts


def _learn(before: PromptMemory, prompt: str, said: Mapping[str, Spoken], now: datetime) -> PromptMemory:
    counted = [(uid, s, s.answers[prompt]) for uid, s in sorted(said.items()) if s.counts and prompt in s.answers]
    fresh = {spoken.gpu: answer for _, spoken, answer in counted}
    no_more = {spoken.gpu for spoken in said.values() if not spoken.counts}
    older = [(gpu, answer) for gpu, answer in before.last if gpu not in fresh and gpu not in no_more]
    last = (*fresh.items(), *older)[:REMEMBERED]
    # Replicas that run at the same time have different GPUs, also where nobody names them.
    groups: dict[str, set[str]] = {}
    for uid, spoken, answer in counted:
        groups.setdefault(answer, set()).add(spoken.gpu if spoken.named else uid)
    answer, gpus = _most(groups)
    if gpus < WITNESSES or gpus * 2 <= len(counted):
        answer, gpus = _most(_by_answer(last)) if len(counted) < _TOGETHER else (REPEATS, 0)
    if {each for _, each in (*before.last, *last)} <= {each.answer for each in before.known} and before.last:
        last = before.last  # nothing new: what is remembered is written to the API server when it changes
    after = replace(before, last=last)
    return _known(after, answer, gpus, now) if gpus >= WITNESSES and answer != REPEATS else after


def _by_answer(last: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for gpu, answer in last:
        found.setdefault(answer, set()).add(gpu)
    return found


def _most(groups: Mapping[str, Collection[str]]) -> tuple[str, int]:
    """(answer, GPUs that give it)."""
    answer = max(sorted(groups), key=lambda each: len(groups[each]), default=REPEATS)
    return answer, len(groups.get(answer, ()))


def _known(memory: PromptMemory, answer: str, gpus: int, now: datetime) -> PromptMemory:
    first = next((each for each in memory.known if each.answer == answer), None)
    if first is None:
        first = KnownAnswer(answer, now.replace(microsecond=0), gpus)
        return replace(memory, known=(first, *memory.known)[:REMEMBERED])
    if gpus <= first.gpus:
        return memory
    more = tuple(replace(each, gpus=gpus) if each is first else each for each in memory.known)
    return replace(memory, known=more)


def _verdict(memory: Memory, said: Spoken, together: bool) -> CanaryVerdict:
    agrees = differs = 0
    for prompt, answer in said.answers.items():
        known = {each.answer for each in memory[prompt].known} if prompt in memory else set[str]()
        agrees += answer in known
        differs += bool(known) and answer not in known
    if differs > agrees and (together or differs >= LEAST_ALONE):
        return "differs"
    return "agrees" if agrees > differs else "unknown"


@dataclass(slots=True)
class CanaryWatch:
    """Rounds of canaries over time. Mutable; for one owner."""

    _memory: dict[str, Memory] = field(default_factory=dict[str, Memory])
    _rows: dict[str, int] = field(default_factory=dict[str, int])

    def knows(self, group: str) -> bool:
        return group in self._memory

    def remember(self, group: str, memory: Memory) -> None:
        """What was remembered of a group elsewhere."""
        self._memory[group] = memory

    def memory(self, group: str) -> Memory:
        return self._memory.get(group, {})

    def round(self, group: str, said: Mapping[str, Spoken], now: datetime) -> dict[str, CanaryVerdict]:
        """`group`: a Model, its class, and what answers depend on; `said`: uid of a replica -> its answers."""
        self._memory[group], verdicts = judge(self.memory(group), said, now)
        for replica, verdict in verdicts.items():
            if verdict != "unknown":
                self._rows[replica] = self._rows.get(replica, 0) + 1 if verdict == "differs" else 0
        return verdicts

    def differs(self, replica: str) -> bool:
        """It has differed in every one of the last rounds."""
        return self._rows.get(replica, 0) >= ROUNDS

    def doubted(self, replica: str) -> bool:
        """It differed when it was asked last."""
        return self._rows.get(replica, 0) > 0

    def keep(self, replicas: Collection[str], groups: Collection[str]) -> None:
        """Forgets all others."""
        self._rows = {each: rows for each, rows in self._rows.items() if each in replicas}
        self._memory = {each: memory for each, memory in self._memory.items() if each in groups}
