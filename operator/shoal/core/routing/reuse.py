"""How much of a prompt a replica probably has in its prefix cache.

What is known without asking the engine, best first:

- **held**: a gateway sent a prompt there that begins in the same way (prefixes.py);
- **remembered**: this gateway sent the same head there before;
- **home**: the head belongs to the replica (affinity.py), so that every gateway sends it there, and the prompt has an
  earlier answer in it or the head was seen before;
- **shared**: the replica had the same system prompt before, or the system prompt belongs to it.

Each kind of knowledge has a trust: the share of what it promised that engines then reported as cached. Memory is
bounded: the heads used longest ago are forgotten. An engine that starts again has an empty cache.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from shoal.core.routing.prefixes import Points

MOST_HEADS: Final = 1 << 14
MOST_PLACES: Final = 4
"""Replicas that are remembered for one head."""
MOST_SHARED_PLACES: Final = 64
_MOST_MODELS: Final = 4096
_WEIGHT: Final = 0.05
"""Of one observation in a trust."""
_LEAST_ESTIMATE: Final = 256
"""Tokens of a prompt from which the length of tokens is learned."""
_MOST_LENGTH: Final = 8.0

Kind = Literal["held", "remembered", "home", "shared", "none"]


class Prompt(NamedTuple):
    """What routing knows of a prompt. Lengths in tokens, estimated from characters."""

    tokens: int
    head: int | None = None
    """Hash of the head; None: too short to be worth a lookup."""
    repeated: int = 0
    """Up to the end of the last answer in the prompt; 0 in a first turn."""
    system: int | None = None
    """Hash of the system prompt alone."""
    system_tokens: int = 0
    points: Points = ()
    """Checksums of its beginnings (prefixes.py)."""

    def measured(self, tokens: int, length: float) -> "Prompt":
        """The same prompt with `tokens`, and `length` tokens per estimated one."""
        repeated = self.repeated * tokens // self.tokens
        return Prompt(max(1, tokens), self.head, repeated, self.system, int(length * self.system_tokens), self.points)


class Expected(NamedTuple):
    tokens: float
    """Probably in the cache."""
    promised: int
    """The same if the knowledge was right."""
    kind: Kind


Guess = tuple[float, int, Kind]
"""The same as a plain tuple, which is made in a fraction of the time: of those about all replicas, one is kept."""
NOTHING: Final = Expected(0.0, 0, "none")
_NOWHERE: Final[Mapping[str, int]] = {}

_FIRST_TRUST: Final[dict[Kind, float]] = {"held": 0.9, "remembered": 0.9, "home": 0.7, "shared": 0.7, "none": 0.0}


@dataclass(slots=True)
class Trust:
    """How far knowledge of one Model's prompts proved right, as shares."""

    of: dict[Kind, float] = field(default_factory=lambda: dict(_FIRST_TRUST))
    recurring: float = 0.3
    """Share of prompts whose head came before: what keeping heads together is worth."""
    length: float = 1.0
    """The engine's tokens per token as estimated from characters: text in another language than English, or code, has
    more of them."""
    lengths: int = 0
    """Prompts of which that was learned."""
    eviction: float = 0.0
    """Tokens that must be computed again for each token that is computed, where a full cache evicts others for it
    (prefixes.py). One figure of all replicas: between replicas that do not have a prompt it decides nothing."""

    def observe(self, expected: Expected, cached: int) -> None:
        """The engine reported that it found `cached` tokens of a prompt."""
        if expected.promised > 0:
            share = min(1.0, max(0, cached) / expected.promised)
            self.of[expected.kind] += _WEIGHT * (share - self.of[expected.kind])

    def evicted(self, cost: float) -> None:
        """What evictions cost the replica that was just sent a prompt."""
        self.eviction += _WEIGHT * (cost - self.eviction)

    def counted(self, estimated: int, tokens: int) -> None:
        """The engine counted the tokens of a prompt whose length was estimated."""
        if estimated < _LEAST_ESTIMATE:
            return  # of a short prompt the chat template is a large part
        self.lengths += 1
        ratio = min(_MOST_LENGTH, max(1.0 / _MOST_LENGTH, tokens / estimated))
        self.length += max(_WEIGHT, 1.0 / (1 + self.lengths)) * (ratio - self.length)


@dataclass(slots=True)
class _Heads:
    """Replicas by head, with the tokens that were computed there."""

    most: int
    places: int
    known: OrderedDict[int, dict[str, int]] = field(default_factory=OrderedDict[int, dict[str, int]])

    def get(self, head: int | None) -> dict[str, int] | None:
        return None if head is None else self.known.get(head)

    def put(self, head: int, uid: str, tokens: int) -> None:
        places = self.known.get(head)
        if places is None:
            places = self.known[head] = {}
            if len(self.known) > self.most:
                self.known.popitem(last=False)
        else:
            self.known.move_to_end(head)
            places.pop(uid, None)  # it goes to the end: the youngest
        places[uid] = tokens
        if len(places) > self.places:
            del places[next(iter(places))]


class ReuseMemory:
    def __init__(self) -> None:
        self._heads = _Heads(MOST_HEADS, MOST_PLACES)
        self._systems = _Heads(MOST_HEADS // 4, MOST_SHARED_PLACES)
        self._trusts: dict[str, Trust] = {}

    def trust(self, model_uid: str) -> "Trust":
        """What a Model's knowledge is worth. Each Model has its own: its tenants change no other Model's routing."""
        found = self._trusts.get(model_uid)
        if found is None:
            if len(self._trusts) >= _MOST_MODELS:
                self._trusts.clear()
            found = self._trusts[model_uid] = Trust()
        return found

    def places(self, head: int | None) -> dict[str, int] | None:
        """Tokens by replica that are remembered of a head."""
        return self._heads.get(head)

    def systems(self, system: int | None) -> dict[str, int] | None:
        return self._systems.get(system)

    def sent(self, prompt: Prompt, uid: str, trust: "Trust") -> None:
        """The prompt goes to the replica, which has it in its cache from then on."""
        if prompt.head is not None:
            came_before = 1.0 if prompt.repeated or prompt.head in self._heads.known else 0.0
            trust.recurring += _WEIGHT * (came_before - trust.recurring)
            self._heads.put(prompt.head, uid, prompt.tokens)
        if prompt.system is not None and prompt.system_tokens:
            self._systems.put(prompt.system, uid, prompt.system_tokens)

    def answered(self, prompt: Prompt, uid: str, tokens: int) -> None:
        """The prompt and its answer have `tokens`, which the replica has in its cache now."""
        places = self._heads.get(prompt.head)
        if places is not None and uid in places:
            places[uid] = max(places[uid], tokens)

    def expect(
        self,
        prompt: Prompt,
        uids: Iterable[str],
        into: dict[str, Guess],
        trust: "Trust",
        *,
        places: Mapping[str, int] | None = None,
        systems: Container[str] | None = None,
        held: Mapping[str, int] | None = None,
        length: float = 1.0,
        home: str | None = None,
        system_home: str | None = None,
    ) -> None:
        """Puts what replicas probably have `into` a mapping. `places`: of the head; `systems`: replicas that had the
        system prompt; `held`: what gateways sent there, of which each token is `length` of the engine's; `home`,
        `system_home`: the replicas to which head and system prompt belong."""
        most, repeated, of = prompt.tokens - 1, prompt.repeated, trust.of
        remembered_trust, held_trust = of["remembered"], of["held"]
        places, held = places or _NOWHERE, held or _NOWHERE
        kind: Kind
        # Every request comes through here, with each replica that it may go to.
        for uid in uids:
            known = places.get(uid)
            if known is not None:
                # The previous turn and its answer; what the client sends again of it is all that is repeated.
                promised = known if known > repeated else repeated
                if promised > most:
                    promised = most
                tokens, kind = promised * remembered_trust, "remembered"
            else:
                tokens, promised, kind = 0.0, 0, "none"
                if uid == home and (repeated or places):
                    promised = min(most, max(0, repeated, *places.values()))
                    tokens, kind = promised * of["home"], "home"
                if uid == system_home or (systems is not None and uid in systems):
                    shared = min(most, prompt.system_tokens)
                    if shared * of["shared"] > tokens:
                        tokens, promised, kind = shared * of["shared"], shared, "shared"
            sent = held.get(uid, 0)
            if sent and length != 1.0:
                sent = int(length * sent)
            if sent > most:
                sent = most
            if sent > 0 and sent * held_trust > tokens:
                tokens, promised, kind = sent * held_trust, sent, "held"
            into[uid] = tokens, promised, kind

    def forget(self, uid: str) -> None:
        """The replica's cache is empty, or the replica is gone."""
        for heads in (self._heads.known, self._systems.known):
            for head in [head for head, places in heads.items() if uid in places]:
                del heads[head][uid]
                if not heads[head]:
                    del heads[head]

    def __len__(self) -> int:
        return len(self._heads.known) + len(self._systems.known)
