"""Which replica a request costs least: predicted seconds until its first token, and the seconds that it costs others.

The terms, all in seconds, of one replica:

- **prefill**: the prompt's tokens that are probably not in its prefix cache (reuse.py), over its prefill rate
  (speeds.py);
- **queue**: prompt tokens that are ahead, over the same rate: what the replica reported as waiting, of all gateways,
  and what this gateway has sent since, less what was prefilled meanwhile;
- **batch**: the step that runs when the prompt arrives must end, and the requests that run there take a part of each
  following one;
- **evict**: a full cache evicts something for what is computed; the part of it that comes again must be computed again
  (prefixes.py). So a further copy of a shared beginning is made only where that saves more than it costs;
- **others**: the prompt's own prefill delays each of them;
- **slots**: a full batch takes no further request until one ends;
- **kv**: a barrier that grows as the KV cache fills up, before the engine preempts what runs; and where prompts wait
  for space, the time until enough requests have ended. What is cached takes no further space;
- **adapter**: the time to load the adapter, or to wait for a slot;
- **home**: less than nothing, where the prompt's head belongs: all gateways find it there later.

GPU classes differ by their rates, which are learned per replica (speeds.py). A replica of which no load was reported
has no score. If that is so of all, the rule of choice.py decides.
"""

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, NamedTuple

from shoal.api.replica import ReplicaKeys
from shoal.core.lora.placement.rendezvous import digest, score
from shoal.core.routing.prefixes import PRIOR_TOKENS, Points, PrefixIndex, tokens_of
from shoal.core.routing.replica import Replica
from shoal.core.routing.reuse import NOTHING, Expected, Guess, Prompt, ReuseMemory, Trust
from shoal.core.routing.speeds import NOTHING_KNOWN, Pace, Speeds

# Chosen by `bench_routing`, on the kinds of traffic that it replays.
BATCH_TOKENS: Final = 24.0
"""Prompt tokens that could be prefilled in the time that one running request takes of a step."""
OTHERS: Final = 0.005
"""Weight of a second by which one other request is delayed."""
KV_SECONDS: Final = 0.2
"""Scale of the barrier k / (1 - k), where k is the share of the KV cache that is in use. That also shows long prompts
that are being read, which are in no report of what waits."""
KV_STAY: Final = 0.15
"""The scale is no more than this part of the time that requests run: where they are short, space is free soon."""
FULLEST: Final = 0.98
HOME_TOKENS: Final = 1500.0
"""What it is worth to send a head home, in prompt tokens, if all heads come again."""
ATTENTION_TOKENS: Final = 20_000.0
"""After so many tokens, attention to them costs a token as much again as everything else."""
TOLD_SECONDS: Final = 2.0
"""Agents report what changes within about a second. A request of another gateway that no report confirms in this time
is over, or never reached the engine."""
LAG_SECONDS: Final = 0.25
"""What was sent so shortly before a report is not in it yet."""
MOST_CANDIDATES: Final = 8
"""Replicas that are scored for one request; of more, a sample of so many and those with knowledge of the prompt."""
MOST_HELD: Final = 16
"""Replicas that are scored because they have some of the prompt, where others have less of it."""
_MOST_HOMES: Final = 4096
"""Heads whose home is kept."""
_TURNS: Final = tuple(
    tuple((*range(start, count), *range(start)) for start in range(count)) for count in range(MOST_CANDIDATES + 1)
)
"""By number of candidates, and by the one that is looked at first: in what order they are."""


def work(prompt: float, cached: float) -> float:
    """Prefill of the rest of a prompt, in tokens of a short one: attention to what is before grows with the length."""
    rest = prompt - cached
    if rest < 1.0:
        rest = 1.0
    return rest * (1.0 + (cached + rest / 2.0) / ATTENTION_TOKENS)


@dataclass(slots=True)
class ReplicaLoad:
    """The load of one replica as far as it is known here. Work is in the unit of `work`."""

    per_token: float = 1.0 / NOTHING_KNOWN.rate
    """Seconds per unit of work."""
    waiting: float = 0.0
    """Work in the engine's queue, of all gateways."""
    own: float = 0.0
    """Work that this gateway has sent and whose answer has not begun."""
    as_of: float = 0.0
    """When `waiting` and `own` were so large; both decrease with time."""
    reported_at: float = -math.inf
    """When the last report came."""
    sent_total: float = 0.0
    busy: int = 0
    """Requests that ran or waited, of all gateways, when the last report came."""
    own_requests: int = 0
    """In flight of this gateway at that time."""
    max_running: int | None = None
    kv_total: int | None = None
    kv_taken: float = 0.0
    """Tokens in the KV cache and of prompts that will need space there: what the last report said, and what was sent
    since, as far as this gateway knows, without what is cached."""
    kv_reported: float = 0.0
    """Of `kv_taken`: in use when the last report came. It is free again when those requests have ended."""
    evicts: bool = False
    """Its cache is full of what is used again."""
    unreported: int = 0
    """Of `busy`: requests of which other gateways have spoken since the report."""
    unreported_tokens: float = 0.0
    """Of `kv_taken`: of their prompts."""
    unreported_at: float = 0.0
    """When the first message about them came."""
    stay: float = NOTHING_KNOWN.stay
    """How long a request runs once its answer has begun."""
    step: float = NOTHING_KNOWN.step
    """Seconds between two tokens of an answer."""
    recent: float = 0.0
    recent_at: float = -math.inf

    def ahead(self, now: float) -> float:
        """Work that is ahead of a prompt that arrives now."""
        left = self.waiting if self.waiting > self.own else self.own
        if now > self.as_of:
            left -= (now - self.as_of) / self.per_token
        return left if left > 0.0 else 0.0

    def paced(self, pace: Pace) -> None:
        """Applies what is believed of the replica's speed."""
        self.per_token, self.stay, self.step = 1.0 / pace.rate, pace.stay, pace.step

    def slots(self, busy: int) -> float:
        """Seconds until a request can join `busy` others in the batch."""
        if self.max_running is None or busy < self.max_running:
            return 0.0
        return self.stay * (busy + 1 - self.max_running) / max(1, self.max_running)

    def reported(self, keys: ReplicaKeys, own: int, now: float) -> None:
        """Applies an agent's report. `own`: requests of this gateway in flight there."""
        self._pass(now)
        if keys.waiting_tokens is not None:
            self.waiting = keys.waiting_tokens + (self.recent if now - self.recent_at < LAG_SECONDS else 0.0)
        self.reported_at = now
        self.busy = max((keys.running or 0) + (keys.waiting or 0), own)
        self.own_requests = own
        self.max_running, self.kv_total = keys.max_running, keys.kv_tokens_total
        self.kv_reported = keys.kv_tokens_used or 0
        self.kv_taken = self.kv_reported + (keys.waiting_tokens or 0)
        self.unreported, self.unreported_tokens = 0, 0.0

    def sent(self, now: float, amount: float, tokens: float) -> float:
        """This gateway sends a prompt that needs so many tokens of the KV cache, and so much work. Returns its mark
        for `began`."""
        self._pass(now)
        self.waiting += amount
        self.own += amount
        self.sent_total += amount
        self.kv_taken += tokens
        self.recent = amount + (self.recent if now - self.recent_at < LAG_SECONDS else 0.0)
        self.recent_at = now
        return self.sent_total

    def told(self, at: float, amount: float, tokens: float) -> None:
        """Another gateway said at `at` that it had sent a prompt that needs so many tokens of the KV cache, and so much
        work. The last report contains what was said before it."""
        if at < self.reported_at:
            return
        self._pass(max(at, self.as_of))
        self.waiting += amount
        if not self.unreported:
            self.unreported_at = at
        self.unreported += 1
        self.unreported_tokens += tokens
        self.kv_taken += tokens
        self.busy += 1

    def lapse(self) -> None:
        """What other gateways said is over: no report confirmed it."""
        self.busy -= self.unreported
        self.kv_taken -= self.unreported_tokens
        self.unreported, self.unreported_tokens = 0, 0.0

    def began(self, now: float, mark: float) -> None:
        """The answer to the prompt with this mark began. What was sent before it is done: engines prefill in the order
        of arrival."""
        self._pass(now)
        self.own = max(0.0, min(self.own, self.sent_total - mark))

    def _pass(self, now: float) -> None:
        if now > self.as_of:
            done = (now - self.as_of) / self.per_token
            self.waiting = self.waiting - done if self.waiting > done else 0.0
            self.own = self.own - done if self.own > done else 0.0
        self.as_of = now


class Terms(NamedTuple):
    """Seconds."""

    prefill: float
    evict: float
    queue: float
    batch: float
    others: float
    slots: float
    kv: float
    adapter: float
    home: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def message(self) -> str:
        parts = [f"{name} {value:.3f}" for name, value in zip(self._fields, self, strict=True) if abs(value) >= 0.0005]
        return f"{self.total:.3f} s ({', '.join(parts)})" if parts else f"{self.total:.3f} s"


class Costs(NamedTuple):
    """What the score of one replica was made of when it was looked at. Work is in the unit of `work`."""

    per_token: float
    """Seconds per unit of work."""
    prefill: float
    """Work of the prompt."""
    evict: float
    """Work to do again for each of it, because of what is evicted."""
    ahead: float
    """Work ahead of it."""
    busy: int
    """Requests there."""
    step: float
    """Seconds until the step ends that runs."""
    slots: float
    """Seconds until a request can join the batch."""
    kv: float
    """Seconds of the barrier of the KV cache."""
    adapter: float
    """Seconds for the adapter."""
    home_tokens: float

    @property
    def terms(self) -> Terms:
        prefill = self.prefill * self.per_token
        return Terms(
            prefill,
            prefill * self.evict,
            self.ahead * self.per_token,
            self.busy * BATCH_TOKENS * self.per_token + self.step,
            prefill * OTHERS * self.busy,
            self.slots,
            self.kv,
            self.adapter,
            -self.home_tokens * self.per_token,
        )


CostNumbers = tuple[float, float, float, float, int, float, float, float, float, float]
"""The same as a plain tuple, which is made in a fraction of the time: of almost all choices nobody asks for more."""


@dataclass(slots=True)
class Pick:
    """The replica that costs least, and what was known when it was picked. Why it was picked is worked out only for
    those who ask."""

    replica: Replica
    prompt: Prompt
    expected: Expected
    ahead: float
    """Work ahead of the prompt."""
    at: float
    seconds: float
    """Of the least sum."""
    costs: CostNumbers
    runner_up: str | None = None
    runner_up_costs: CostNumbers | None = None
    mark: float = 0.0

    @property
    def terms(self) -> Terms:
        return Costs(*self.costs).terms

    @property
    def runner_up_terms(self) -> Terms | None:
        return None if self.runner_up_costs is None else Costs(*self.runner_up_costs).terms

    @property
    def message(self) -> str:
        """For people: the terms of the replica and of the runner-up."""
        cached = f"{self.expected.tokens:.0f} of {self.prompt.tokens} prompt tokens probably cached"
        found = f"{self.replica.name}: {self.terms.message}, {cached}"
        following = self.runner_up_terms
        return found if following is None else f"{found}; next {self.runner_up}: {following.message}"


class _View:
    """The replicas of one Model whose load is known, as they are at the moment. The gateway's list of them is the same
    object until one comes or goes."""

    __slots__ = ("at", "digests", "homes", "loads", "model_uid", "replicas", "source", "uids")

    def __init__(self, source: Sequence[Replica], loads: Mapping[str, ReplicaLoad]) -> None:
        self.source = source
        self.model_uid = source[0].model_uid
        self.replicas = [r for r in source if r.uid in loads]
        self.uids = [r.uid for r in self.replicas]
        self.loads = [loads[uid] for uid in self.uids]
        self.digests = [digest(uid) for uid in self.uids]
        self.at = {uid: at for at, uid in enumerate(self.uids)}
        self.homes: dict[int, int] = {}

    def home(self, head: int) -> int:
        """Index of the replica to which a head belongs."""
        found = self.homes.get(head)
        if found is None:
            points = [score(head, each) for each in self.digests]
            if len(self.homes) >= _MOST_HOMES:
                self.homes.clear()
            found = self.homes[head] = points.index(max(points))
        return found


class ReplicaScores:
    """What one gateway knows of the cost of requests at each replica, by uid of its pod. Times are of one monotonic
    clock, in seconds."""

    def __init__(self) -> None:
        self.speeds = Speeds()
        self.reuse = ReuseMemory()
        self.prefixes = PrefixIndex()
        self._loads: dict[str, ReplicaLoad] = {}
        self._views: dict[str, _View] = {}
        """By uid of the Model."""
        self._boots: dict[str, str | None] = {}
        self._replicas: dict[str, Replica] = {}
        """Those that had a choice made about them."""

    def reported(self, uid: str, keys: ReplicaKeys, own: int, now: float) -> None:
        """Applies an agent's report. `own`: requests of this gateway in flight there."""
        load = self._loads.get(uid)
        if load is None:
            load = self._loads[uid] = ReplicaLoad(as_of=now)
            self._views.clear()
        if (replica := self._replicas.get(uid)) is not None:
            self.speeds.rest(uid, now)
            self._pace(replica, load)
        load.reported(keys, own, now)
        if keys.kv_tokens_total:
            self.prefixes.reported(uid, int(keys.kv_tokens_total / self._length(uid)))
        if keys.engine_boot != self._boots.get(uid):
            if uid in self._boots:
                self.reuse.forget(uid)  # another engine, with an empty cache
                self.prefixes.forget(uid)
                load.evicts = False
            self._boots[uid] = keys.engine_boot

    def has_reports(self) -> bool:
        """Whether the load of any replica is known."""
        return bool(self._loads)

    def down(self, uid: str) -> None:
        """The replica's stream is down: its load is unknown."""
        if self._loads.pop(uid, None) is not None:
            self._views.clear()

    def keep(self, uids: Container[str]) -> None:
        """Forgets pods that are gone."""
        for uid in [uid for uid in self._boots if uid not in uids]:
            del self._boots[uid]
            self._replicas.pop(uid, None)
            self.down(uid)
            self.reuse.forget(uid)
        self.prefixes.keep(uids)
        self.speeds.keep(uids)

    def pick(
        self,
        replicas: Sequence[Replica],
        in_flight: Mapping[str, int],
        prompt: Prompt,
        now: float,
        *,
        rotation: int = 0,
        waits: Mapping[str, float] | None = None,
        home: str | None = None,
        alone: bool = False,
        held: Mapping[str, int] | None = None,
    ) -> Pick | None:
        """The replica with the fewest seconds; None: there is no choice, or no load is known, and another rule
        decides. `rotation`: a growing number that spreads requests over equals; `waits`: seconds for the adapter, by
        uid; `home`: uid of the adapter's home, to which the heads of its prompts belong; `alone`: a single replica has
        a score too; `held`: tokens of the prompt that replicas have, by uid, in place of what is known here
        (prefixes.py)."""
        if len(replicas) < 2 and not (alone and replicas):
            return None
        view = self._view(replicas) if home is None else self._new_view(replicas)
        count = len(view.uids)
        if not count:
            return None
        trust, length = self.reuse.trust(view.model_uid), 1.0
        if points := prompt.points:
            if trust.length != 1.0:
                prompt = prompt.measured(int(trust.length * tokens_of(points[-1])), trust.length)
            if held is None:
                held, length = self.prefixes.held(points), trust.length
        known, home_uid, home_worth, base = self._knowledge(view, prompt, home, held, length, trust)
        if count <= MOST_CANDIDATES:
            order: Sequence[int] = _TURNS[count][rotation % count]
        else:
            order = _sample(count, rotation, [view.at[uid] for uid in known])
            if held and len(held) > MOST_HELD:
                # Of the sample it counts as well what so many have.
                more = [uid for at in order if (uid := view.uids[at]) not in known]
                self.reuse.expect(prompt, more, known, trust, held=held, length=length)
        uids, loads, tokens, eviction = view.uids, view.loads, prompt.tokens, trust.eviction
        unknown = work(tokens, base)
        best, second = -1, -1
        lowest = next_lowest = math.inf
        cached, rest_of_prompt = -1.0, 0.0
        costs: CostNumbers | None = None
        next_costs: CostNumbers | None = None
        # Every request comes through here: one pass, without an object or a call per replica.
        for at in order:
            load, uid = loads[at], uids[at]
            if load.unreported and now - load.unreported_at > TOLD_SECONDS:
                load.lapse()
            per_token = load.per_token
            ahead = load.waiting if load.waiting > load.own else load.own
            if ahead:
                if now > load.as_of:
                    ahead -= (now - load.as_of) / per_token
                if ahead < 0.0:
                    ahead = 0.0
            busy = load.busy - load.own_requests + in_flight.get(uid, 0)
            if busy < 0:
                busy = 0
            guess, evict = known.get(uid), eviction if load.evicts else 0.0
            step = slots = over = barrier = wait = home_tokens = 0.0
            rest = per_token * (ahead + busy * BATCH_TOKENS)
            if busy:
                step = load.step
                rest += step
            if load.kv_total:
                # The barrier of the KV cache. What is cached there takes no more space.
                # What was in use when the last report came is given back evenly, as those requests end.
                ended = (now - load.reported_at) / load.stay
                share = load.kv_taken - (load.kv_reported if ended > 1.0 else ended * load.kv_reported)
                share = (share + (tokens if guess is None else tokens - guess[0])) / load.kv_total
                if share > 1.0:
                    over = load.stay * (share - 1.0)
                    rest += over
                if share > FULLEST:
                    share = FULLEST
                scale = KV_STAY * load.stay
                barrier = (scale if scale < KV_SECONDS else KV_SECONDS) * share / (1.0 - share)
                rest += barrier
            if load.max_running is not None and busy >= load.max_running:
                slots = load.slots(busy)
                rest += slots
            if waits is not None:
                wait = waits.get(uid, 0.0)
                rest += wait
            if guess is not None:
                # Here the prompt costs less. Several replicas often have as much of it.
                if guess[0] != cached:
                    cached = guess[0]
                    rest_of_prompt = work(tokens, cached if cached > base else base)
                prefill = rest_of_prompt
                if uid == home_uid:
                    home_tokens = home_worth
                seconds = rest + per_token * (prefill * (1.0 + evict + OTHERS * busy) - home_tokens)
            else:
                prefill = unknown
                seconds = rest + per_token * prefill * (1.0 + evict + OTHERS * busy)
            if seconds < next_lowest:
                looked_at = per_token, prefill, evict, ahead, busy, step, slots, over + barrier, wait, home_tokens
                if seconds < lowest:
                    second, next_lowest, next_costs = best, lowest, costs
                    best, lowest, costs = at, seconds, looked_at
                else:
                    second, next_lowest, next_costs = at, seconds, looked_at
        if costs is None:
            return None
        guess = known.get(uids[best])
        expected = NOTHING if guess is None else Expected(*guess)
        if expected.tokens < base:
            expected = Expected(base, min(tokens - 1, prompt.system_tokens), "shared")
        runner_up = view.replicas[second].name if second >= 0 else None
        return Pick(view.replicas[best], prompt, expected, costs[3], now, lowest, costs, runner_up, next_costs)

    def sent(self, pick: Pick) -> None:
        """The pick is carried out: the prompt goes to the replica."""
        uid, prompt = pick.replica.uid, pick.prompt
        load = self._loads.get(uid)
        if load is not None:
            cached = pick.expected.tokens
            pick.mark = load.sent(pick.at, work(prompt.tokens, cached), prompt.tokens - cached)
        self.reuse.sent(prompt, uid, self.reuse.trust(pick.replica.model_uid))
        self._prefix_sent(uid, prompt.points, load)

    def told(self, uid: str, points: Points, at: float | None = None) -> None:
        """Another gateway sent a prompt with these points to a replica. One that never reported is unknown. `at`: when
        the gateway said so, just after it sent the prompt; None: it may have been long ago, and is no load any more."""
        if uid not in self._boots or not points:
            return
        load = self._loads.get(uid)
        if at is not None and load is not None:
            # No prompt is longer than the KV cache, whatever is said.
            length = self._length(uid)
            tokens = min(int(length * tokens_of(points[-1])), load.kv_total or PRIOR_TOKENS)
            held = min(tokens - 1, int(length * self.prefixes.held_by(uid, points)))
            load.told(at, work(tokens, held), tokens - held)
        self._prefix_sent(uid, points, load)

    def _prefix_sent(self, uid: str, points: Points, load: ReplicaLoad | None) -> None:
        self.prefixes.sent(uid, points)
        cost = self.prefixes.eviction_cost(uid)
        if cost is not None and load is not None:
            load.evicts = True
            if (replica := self._replicas.get(uid)) is not None:
                self.reuse.trust(replica.model_uid).evicted(cost)

    def began(self, pick: Pick, now: float) -> None:
        """The first token of the answer came."""
        load = self._loads.get(pick.replica.uid)
        if load is not None:
            load.began(now, pick.mark)

    def answered(
        self,
        pick: Pick,
        *,
        first: float | None,
        prompt: int | None,
        cached: int | None,
        answer: int | None,
        ended: float | None = None,
    ) -> None:
        """The answer is complete. `first`: when its first token came, `ended`: when its last one came; tokens as the
        engine counted them. None: unknown."""
        if prompt is None:
            return
        replica = pick.replica
        uid = replica.uid
        trust = self.reuse.trust(replica.model_uid)
        if cached is not None:
            trust.observe(pick.expected, cached)
        if pick.prompt.points:
            trust.counted(tokens_of(pick.prompt.points[-1]), prompt)
        self.reuse.answered(pick.prompt, uid, prompt + (answer or 0))
        if first is None:
            return
        found = pick.expected.tokens if cached is None else cached
        now = first if ended is None else ended
        self.speeds.observe(
            uid, replica.model_uid, replica.gpu_class, pick.ahead + work(prompt, found), first - pick.at, now
        )
        if ended is not None and answer is not None:
            self.speeds.ran(uid, replica.model_uid, replica.gpu_class, answer, ended - first, now)
        if (load := self._loads.get(uid)) is not None:
            self._pace(replica, load)

    def observe(self, replica: Replica, *, prompt: int, cached: int, seconds: float, now: float) -> None:
        """An answer of a replica that another rule chose: its first token came after so many seconds."""
        uid = replica.uid
        self.speeds.observe(uid, replica.model_uid, replica.gpu_class, work(prompt, cached), seconds, now)
        if (load := self._loads.get(uid)) is not None:
            self._pace(replica, load)

    def _pace(self, replica: Replica, load: ReplicaLoad) -> None:
        load.paced(self.speeds.pace(replica.uid, replica.model_uid, replica.gpu_class))

    def _length(self, uid: str) -> float:
        """Tokens of a replica's Model per estimated one."""
        replica = self._replicas.get(uid)
        return 1.0 if replica is None else self.reuse.trust(replica.model_uid).length

    def _view(self, replicas: Sequence[Replica]) -> _View:
        model = replicas[0].model_uid
        view = self._views.get(model)
        if view is None or view.source is not replicas:
            view = self._views[model] = self._new_view(replicas)
        return view

    def _new_view(self, replicas: Sequence[Replica]) -> _View:
        view = _View(replicas, self._loads)
        for replica, load in zip(view.replicas, view.loads, strict=True):
            if replica.uid not in self._replicas:
                self._replicas[replica.uid] = replica
                self._pace(replica, load)
        return view

    def _knowledge(
        self,
        view: _View,
        prompt: Prompt,
        home: str | None,
        held: Mapping[str, int] | None,
        length: float,
        trust: Trust,
    ) -> tuple[dict[str, Guess], str | None, float, float]:
        """What some replicas probably have of the prompt in the cache, by uid; which of them is its head's home, and
        what that is worth in tokens; and what all replicas probably have, in tokens."""
        known: dict[str, Guess] = {}
        head, system = prompt.head, prompt.system
        if head is None and home is None and not held:
            return known, None, 0.0, 0.0
        reuse, at, uids = self.reuse, view.at, view.uids
        places, systems = reuse.places(head), None if system is None else reuse.systems(system)
        head_home = at.get(home) if home is not None else None if head is None else view.home(head)
        system_home = head_home if home is not None else None if system is None else view.home(system)
        base = 0.0
        wanted: set[int] = set()
        if head_home is not None:
            wanted.add(head_home)
        if system_home is not None:
            wanted.add(system_home)
        if places is not None:
            for uid in places:
                if (each := at.get(uid)) is not None:
                    wanted.add(each)
        if systems is not None and len(systems) >= len(uids):
            base = min(prompt.tokens - 1, prompt.system_tokens) * trust.of["shared"]
        elif systems is not None:
            wanted.update([at[uid] for uid in systems if uid in at])
        if held:
            for uid in _best_of(held):
                if (each := at.get(uid)) is not None:
                    wanted.add(each)
        home_uid = None if head_home is None else uids[head_home]
        reuse.expect(
            prompt,
            map(uids.__getitem__, wanted),
            known,
            trust,
            places=places,
            systems=systems,
            held=held,
            length=length,
            home=home_uid,
            system_home=None if system_home is None else uids[system_home],
        )
        return known, home_uid, HOME_TOKENS * trust.recurring, base


def _best_of(held: Mapping[str, int]) -> Collection[str]:
    """The replicas that have most of a prompt. A beginning that many have is no reason to score them all."""
    if len(held) <= MOST_HELD:
        return held.keys()
    common = min(held.values())
    more = [(tokens, uid) for uid, tokens in held.items() if tokens > common]
    return [uid for _, uid in (more if len(more) <= MOST_HELD else nlargest(MOST_HELD, more))]


def _sample(count: int, rotation: int, known: Collection[int]) -> Sequence[int]:
    """Indexes of the replicas to score, of many. The best of several at random is almost as good as the best of all,
    and gateways do not all send to the same one between two reports."""
    found = dict.fromkeys(known)
    step = 1 + (rotation * 0x9E3779B1) % (count - 1)
    while math.gcd(step, count) != 1:  # else it would come to the same few again
        step = step % (count - 1) + 1
    at = (rotation * 0x85EBCA6B) % count
    for _ in range(MOST_CANDIDATES):
        found[at] = None
        at = (at + step) % count
    return list(found)
