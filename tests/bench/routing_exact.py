"""Two kinds of knowledge of prefix caches in the replay of routing rules: what gateways tell each other of the prompts
that they sent, and the engines' own events, of which each gateway keeps an index. Events come late, some are lost, and
the index is bounded."""

import random
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

from shoal.api.traffic import AFTER_ANSWER
from shoal.core.hold.capacity import BYTES_PER_TOKEN
from shoal.core.routing.prefixes import Points
from shoal.core.routing.score import ReplicaScores
from shoal.gateway.prefixes import RECENT, TELL_SECONDS
from tests.bench.routing_engine import Asked, Block, Replica, Running
from tests.bench.routing_policies import Scored, uid_of

DELAY_SECONDS = 0.1
"""From the engine's step to the gateway's index."""
LOSS = 0.002
"""Of all messages. The gateway notices at the next one, forgets what it knows of the replica, and reads it anew."""
RESYNC_SECONDS = 1.0
MOST_TOKENS = 16_000_000
"""In the index of one gateway: a million blocks of 16 tokens."""

_NEAR_END = 8
"""Messages at the end of a conversation that have marks."""


def points_of(asked: Asked) -> Points:
    """The points of a prompt as `core/advice/marks.py` sets them: after the system prompt, the first message and the
    last ones, and at growing lengths. Blocks are messages, or pieces of known texts (`Asked.ends`)."""
    count, system = len(asked.blocks), 1 if asked.system_tokens else 0
    if asked.ends:
        ends = {system, *asked.ends, count}
    elif asked.repeated:
        ends = {system, system + 1, *range(count - _NEAR_END, count + 1)}
    else:
        ends = {system, count}
    found: list[int] = []
    size, mark = 0, 256
    for at, (name, tokens) in enumerate(asked.blocks, 1):
        # A conversation is question, answer, ... question.
        answer = bool(asked.repeated and not asked.ends and at in ends and at > system + 1 and (count - at) % 2)
        while mark <= size + tokens and mark <= 256 << 9:
            if not answer:
                found.append(_point(name, mark - size, mark))
            mark = mark * 4 // 3 if mark % 3 == 0 else mark * 3 // 2
        size += tokens
        if at in ends:
            found.append(_point(name, -1, size) | (AFTER_ANSWER << 32 if answer else 0))
    return tuple(found)


def _point(name: int, at: int, tokens: int) -> int:
    return tokens * BYTES_PER_TOKEN << 32 | hash((name, at)) & 0xFFFFFFFF


@dataclass(slots=True)
class _Known:
    """What one gateway knows of one replica."""

    read: int = 0
    """Events of its log that are applied."""
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    lost: bool = False
    back_at: float | None = None


class BlockIndex:
    """Of one gateway."""

    def __init__(self, gateway: int, most_tokens: int = MOST_TOKENS) -> None:
        self._dice = random.Random(900 + gateway)  # noqa: S311
        self._known: dict[str, _Known] = {}
        self._most_tokens = most_tokens
        self.tokens = 0
        self.resyncs = 0

    def read(self, replica: Replica, now: float) -> None:
        """Applies the events that have arrived."""
        known = self._known.setdefault(uid_of(replica), _Known())
        if known.back_at is not None:
            if now < known.back_at:
                return
            known.back_at, known.read = None, len(replica.log)
            self._put(known, list(reversed(replica.blocks.items())))
            return
        log, at = replica.log, known.read
        while at < len(log) and log[at][0] <= now - DELAY_SECONDS:
            when = log[at][0]
            end = at
            while end < len(log) and log[end][0] == when:
                end += 1
            if known.lost:
                known.lost, known.back_at = False, now + RESYNC_SECONDS
                self._clear(known)
                self.resyncs += 1
                return
            if self._dice.random() < LOSS:
                known.lost = True
            else:
                for _, name, size in log[at:end]:
                    if size:
                        self._put(known, [(name, size)])
                    elif gone := known.blocks.pop(name, 0):
                        self.tokens -= gone
            at = end
        known.read = at

    def found(self, uid: str, blocks: Sequence[Block], also: Mapping[int, int]) -> int:
        """Tokens of a prompt that the replica has, or will have when it has read what was sent there (`also`)."""
        known = self._known.get(uid)
        held = known.blocks if known is not None else {}
        tokens = 0
        for name, size in blocks:
            if name not in held and name not in also:
                break
            tokens += size
        return tokens

    def _put(self, known: _Known, blocks: Sequence[Block]) -> None:
        for name, size in blocks:
            if name not in known.blocks:
                known.blocks[name] = size
                self.tokens += size
        while self.tokens > self._most_tokens:
            most = max(self._known.values(), key=lambda each: len(each.blocks))
            _, size = most.blocks.popitem(last=False)
            self.tokens -= size

    def _clear(self, known: _Known) -> None:
        self.tokens -= sum(known.blocks.values())
        known.blocks.clear()


class Exact(Scored):
    """Shoal's score with the engines' events in place of what gateways tell each other."""

    def __init__(self, gateway: int, gateways: int) -> None:
        super().__init__(gateway, gateways)
        self.index = BlockIndex(gateway)
        self.pending: dict[str, dict[int, int]] = {}
        """By replica: blocks of prompts that this gateway has sent and whose answers have not begun."""

    def heard(self, replica: Replica, now: float) -> None:
        self.index.read(replica, now)

    def held(self, asked: Asked, now: float) -> Mapping[str, int]:
        return {uid: self.index.found(uid, asked.blocks, self.pending.get(uid, {})) for uid in self.reports}

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        super().sent(asked, replica, now)
        pending = self.pending.setdefault(uid_of(replica), {})
        for name, _ in asked.blocks:
            pending[name] = pending.get(name, 0) + 1

    def began(self, one: Running, replica: Replica) -> None:
        super().began(one, replica)
        if one.asked is None:
            return
        pending = self.pending[uid_of(replica)]
        for name, _ in one.asked.blocks:
            if pending[name] > 1:
                pending[name] -= 1
            else:
                del pending[name]


class Told(Scored):
    """Shoal: the score, with what gateways tell each other of the prompts that they sent (gateway/prefixes.py)."""

    _all: ClassVar[list["Told"]] = []

    def __init__(self, gateway: int, gateways: int) -> None:
        super().__init__(gateway, gateways)
        self.inbox: list[tuple[float, int, str, Points]] = []
        self.recent: deque[tuple[str, Points]] = deque(maxlen=RECENT)
        self.offset = TELL_SECONDS * gateway / gateways
        if gateway == 0:
            Told._all = []
        self.peers = Told._all
        self.peers.append(self)

    def restart(self) -> None:
        """The gateway starts again: it has learned nothing, and is given the last prompts of the others."""
        self.scores = ReplicaScores()
        for uid, report in self.reports.items():
            self.reported(uid, report)
        for other in self.peers:
            if other is not self:
                for uid, points in other.recent:
                    self.scores.told(uid, points)

    def points(self, asked: Asked) -> Points:
        return points_of(asked)

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        while self.inbox and self.inbox[0][0] <= now:
            when, _, uid, points = heappop(self.inbox)
            self.scores.told(uid, points, when)
        return super().choose(asked, replicas, now)

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        super().sent(asked, replica, now)
        self.recent.append((uid_of(replica), points_of(asked)))
        when = (int((now - self.offset) / TELL_SECONDS) + 1) * TELL_SECONDS + self.offset
        for other in self.peers:
            if other is not self:
                heappush(other.inbox, (when, asked.number, uid_of(replica), points_of(asked)))
