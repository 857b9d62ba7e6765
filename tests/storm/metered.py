"""Invariant 5, from the journals of clients, gateways and engines, and from the ledger's contents. Pure.

| somebody saw | and the ledger has | verdict |
|---|---|---|
| an answer's first byte, an open row in a spool, or the request at an engine | no final row | lost |
| one request | two final rows, or its tokens twice in the sums | double |
| an answer whole | counts other than those the client read, or none of the engine's closing ones | wrong |
| the engine's own count of the request | `final`: other counts; `continuous`: more than that | wrong |

What the engines counted and nobody is billed for is `unattributed`: of streams whose gateway was killed what came after
their last checkpoint, of its other requests everything, and attempts that nobody got an answer of.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.storm.journals import Attempt, Kill, Sequence, UsageRow
from tests.storm.ledgerrows import NOTHING, LedgerContents, LedgerRow, Tokens

_WARM_UP: Final = Tokens(64, 16)
"""More than an engine counts of its own before it serves."""


@dataclass(slots=True)
class Account:
    """The result."""

    requests: int = 0
    """Accepted ones."""
    lost: list[str] = field(default_factory=list[str])
    double: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])
    engines: Tokens = NOTHING
    """What the engines counted themselves."""
    billed: Tokens = NOTHING
    """Of what the engines counted."""
    outside: Tokens = NOTHING
    """Billed too, and counted by external targets."""
    attempts: Tokens = NOTHING
    """Of attempt rows: nobody pays for them."""
    idle: Tokens = NOTHING
    """What engines counted before anybody asked them: they warm up. Nothing where nobody looked."""
    kills: Counter[str] = field(default_factory=Counter[str])
    """By what was killed."""

    @property
    def unattributed(self) -> Tokens:
        return self.engines.minus(self.billed)

    @property
    def share(self) -> float | None:
        """Of `unattributed` in all that the engines counted; None: they counted nothing."""
        return self.unattributed.total / self.engines.total if self.engines.total else None

    @property
    def good(self) -> bool:
        return not (self.lost or self.double or self.wrong)

    def violations(self) -> list[str]:
        named = (("lost", self.lost), ("double", self.double), ("wrong", self.wrong))
        return [f"invariant 5: {name}: {text}" for name, found in named for text in found]

    def lines(self) -> list[str]:
        """The table."""
        killed = ", ".join(f"{what} {count}" for what, count in sorted(self.kills.items()))
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        sources = ", ".join(f"{name} {count}" for name, count in sorted(self.sources.items()))
        rows = [
            ("the engines' own counters", self.engines),
            ("billed", self.billed),
            ("unattributed", self.unattributed),
            ("  of it attempts", self.attempts),
        ]
        if self.idle != NOTHING:
            rows.append(("  of it warm-ups", self.idle))
        if self.outside != NOTHING:
            rows.append(("billed, of external targets", self.outside))
        share = {
            name: f"{tokens.total / self.engines.total:.3%}" if self.engines.total else "" for name, tokens in rows
        }
        table = [f"{'TOKENS':<27} {'PROMPT':>12} {'ANSWER':>12} {'SHARE':>9}"]
        table += [f"{name:<27} {tokens.prompt:>12,} {tokens.answer:>12,} {share[name]:>9}" for name, tokens in rows]
        return [
            f"SIGKILLs {self.kills.total()}" + (f" ({killed})" if killed else ""),
            f"usage records of {self.requests} accepted requests: {outcomes}; counts {sources}",
            *table,
            f"records lost {len(self.lost)}, double {len(self.double)}, wrong {len(self.wrong)}; "
            f"unattributed {'unknown' if self.share is None else f'{self.share:.3%}'} of what the engines counted",
        ]


def account(
    contents: LedgerContents,
    attempts: Mapping[str, Attempt],
    sequences: Iterable[Sequence],
    *,
    spools: Iterable[UsageRow] = (),
    kills: Iterable[Kill] = (),
    counted: Tokens | None = None,
    idle: Tokens = NOTHING,
    copies: Collection[str] = (),
    externals: Collection[str] = (),
) -> Account:
    """Judges the contents.

    `counted`: the engines' own counters as somebody else read them at the end, when all of them still ran; None: only
    the ledger has them, and of killed engines their last readings. `idle`: the same before the load. `copies`: requests
    that gateways made for mirrors, which have attempt rows at most. `externals`: names of external targets, whose
    tokens no engine of the fleet counts; what they say themselves is compared in routed.py.
    """
    kills = list(kills)
    found = Account(kills=Counter(kill.what for kill in kills), idle=idle)
    at_engines: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        at_engines.setdefault(sequence.rid, []).append(sequence)
    finals: dict[str, list[LedgerRow]] = {}
    for row in contents.rows:
        if row.attempt == 0 and row.ended:
            finals.setdefault(row.request, []).append(row)
    canaries = {id for id, own in at_engines.items() if own[0].canary}
    seen = _accepted(contents, attempts, at_engines.keys() - copies - canaries, spools)
    found.requests = len(seen)
    for request, why in sorted(seen.items()):
        if request not in finals:
            left_open = any(row.request == request and not row.ended for row in contents.rows)
            found.lost.append(f"{request} ({why}) has {'an open' if left_open else 'no'} row and no final one")
    found.double += [f"{request} has {len(rows)} final rows" for request, rows in finals.items() if len(rows) > 1]
    found.double += _twice(finals)
    found.double += _sums(contents)
    found.wrong += [f"kept aside: {reason}" for reason in contents.aside]
    for rows in finals.values():
        found.outcomes[rows[0].outcome or "none"] += 1
        found.sources[rows[0].source] += 1
    found.wrong += _as_engines_say([row for row in contents.rows if row.model not in externals], at_engines)
    found.wrong += _as_clients_read(finals, attempts, bool(kills))
    billed = [row for row in contents.rows if row.billed]
    found.billed = Tokens.sum(row.tokens for row in billed if row.model not in externals)
    found.outside = Tokens.sum(row.tokens for row in billed if row.model in externals)
    found.attempts = Tokens.sum(row.tokens for row in contents.rows if row.attempt and row.counted)
    heard = Tokens.sum(reading.tokens for reading in contents.readings)
    found.engines = counted or heard
    computed = Tokens.sum(Tokens(*s.tokens) for own in at_engines.values() for s in own if s.tokens)
    if counted is not None and heard != counted:
        found.wrong.append(f"the ledger heard of {tuple(heard)} tokens, the engines say {tuple(counted)}")
    if counted is not None and at_engines and counted.minus(idle) != computed:
        found.wrong.append(f"engines counted {tuple(counted.minus(idle))} tokens, their journals {tuple(computed)}")
    if counted is None:
        found.wrong += _heard(contents, at_engines)
    found.wrong += _booked(contents, found)
    return found


def _accepted(
    contents: LedgerContents,
    attempts: Mapping[str, Attempt],
    at_engines: Iterable[str],
    spools: Iterable[UsageRow],
) -> dict[str, str]:
    """Every accepted request, and who saw it."""
    seen = {row.request: "open in the ledger" for row in contents.rows if row.attempt == 0}
    seen |= {row.request: "open in a spool" for row in spools if row.kind == "open"}
    seen |= dict.fromkeys(at_engines, "an engine had it")
    known = {row.client_id for row in contents.rows}
    for id, attempt in attempts.items():
        if attempt.kind == "attack":
            continue  # its 400 comes before a request is accepted
        begun = attempt.first is not None and attempt.outcome != "refused"  # refusals come before a request is accepted
        if attempt.outcome == "answered" or begun:
            if attempt.gateway_id is not None:
                seen[attempt.gateway_id] = f"client {id}: {attempt.outcome}"
            elif id not in known:
                seen[id] = f"client: {attempt.outcome}"
    return seen


def _twice(finals: Mapping[str, list[LedgerRow]]) -> list[str]:
    """One try of a client is one request."""
    by_client = Counter(rows[0].client_id for rows in finals.values() if rows[0].client_id is not None)
    return [f"client {id} has {count} requests" for id, count in by_client.items() if count > 1]


def _sums(contents: LedgerContents) -> list[str]:
    """The hours must say what the rows say."""
    found: list[str] = []
    for billed in (True, False):
        rows = [row for row in contents.rows if row.ended and row.billed == billed]
        in_rows = Tokens.sum(row.tokens for row in rows)
        in_hours = Tokens.sum(hour.tokens for hour in contents.hours if hour.billed == billed)
        if in_rows != in_hours:
            which = "billed" if billed else "not billed"
            found.append(f"{which}: rows say {tuple(in_rows)} tokens, the hours' sums {tuple(in_hours)}")
    requests, summed = _requests(contents.rows), sum(hour.requests for hour in contents.hours)
    if requests != summed:
        found.append(f"rows are of {requests} requests, the hours' sums of {summed}")
    return found


def _requests(rows: Iterable[LedgerRow]) -> int:
    return sum(1 for row in rows if row.ended and row.attempt == 0)


def _as_engines_say(rows: Iterable[LedgerRow], at_engines: Mapping[str, list[Sequence]]) -> list[str]:
    """Counts of each request beside the engines' own of it."""
    if not at_engines:  # an engine without a journal: its sums must do
        return []
    found: list[str] = []
    claimed: dict[str, Tokens] = {}
    for row in rows:
        if not row.ended or not row.counted:
            continue
        name = row.request if row.attempt == 0 else f"{row.request}, attempt {row.attempt}"
        own = at_engines.get(row.request, [])
        if not any(_fits(row, sequence) for sequence in own):
            says = ", ".join(str(sequence.tokens) for sequence in own) or "nothing"
            found.append(f"{name}: {row.source} {tuple(row.tokens)}, its engine says {says}")
        claimed[row.request] = claimed.get(row.request, Tokens()).plus(row.tokens)
    for request, tokens in claimed.items():
        own = at_engines.get(request, [])
        if all(sequence.finished is not None for sequence in own):
            computed = Tokens.sum(Tokens(*sequence.tokens) for sequence in own if sequence.tokens)
            if tokens.prompt > computed.prompt or tokens.answer > computed.answer:
                found.append(f"{request}: {tuple(tokens)} in all its rows, {tuple(computed)} computed")
    return found


def _fits(row: LedgerRow, sequence: Sequence) -> bool:
    if sequence.finished is None:
        # The engine was killed at it, and kept no count; or right after its last byte, before it wrote that down: what
        # the client read of it is compared with a final row in any case.
        return row.source in ("continuous", "final")
    if sequence.tokens is None or row.input != sequence.tokens[0]:
        return False
    return row.output == sequence.tokens[1] if row.source == "final" else (row.output or 0) <= sequence.tokens[1]


def _as_clients_read(finals: Mapping[str, list[LedgerRow]], attempts: Mapping[str, Attempt], killed: bool) -> list[str]:
    """Who read the whole answer read its usage, too; so must the gateway have, unless it was killed before it wrote."""
    found: list[str] = []
    by_client = {rows[0].client_id: rows[0] for rows in finals.values()}
    for id, attempt in attempts.items():
        row = by_client.get(id)
        if row is None or attempt.outcome != "answered" or attempt.kind == "wrong":
            continue
        if row.outcome == "cut" and killed:
            continue
        if row.outcome != "answered":
            found.append(f"{row.request}: its client has the answer, the ledger says {row.outcome}")
        elif row.source != "final":
            found.append(f"{row.request}: answered with {row.source} counts")
        elif attempt.usage is not None and attempt.usage != tuple(row.tokens):
            found.append(f"{row.request}: its client read {attempt.usage}, the ledger says {tuple(row.tokens)}")
    return found


def _heard(contents: LedgerContents, at_engines: Mapping[str, list[Sequence]]) -> list[str]:
    """No engine was heard to have counted more than its journal says, but for its warm-up. Of one that counts while
    requests run and was killed under some, nobody knows how much of them it had counted."""
    own: dict[str, Tokens] = {}
    uncertain: set[str] = set()
    for sequence in (sequence for several in at_engines.values() for sequence in several):
        if sequence.live and sequence.finished is None:
            uncertain.add(sequence.engine)
        if sequence.tokens is not None:
            own[sequence.engine] = own.get(sequence.engine, NOTHING).plus(Tokens(*sequence.tokens))
    heard: dict[str, Tokens] = {}
    for reading in contents.readings:
        pod = reading.replica.rpartition("/")[2]
        heard[pod] = heard.get(pod, NOTHING).plus(reading.tokens.minus(_WARM_UP))
    found: list[str] = []
    for pod, said in heard.items() if own else ():
        tokens = own.get(pod, NOTHING)
        if pod not in uncertain and (said.prompt > tokens.prompt or said.answer > tokens.answer):
            found.append(f"{pod}: the ledger heard of {tuple(said)} tokens, its journal says {tuple(tokens)}")
    return found


def _booked(contents: LedgerContents, found: Account) -> list[str]:
    """What the ledger answers is what its rows and the engines' counters come to."""
    said = contents.booked
    if said is None:
        return []
    pairs = (
        ("engines' counters", said.engines, found.engines),
        ("billed", said.billed, found.billed),
        ("unattributed", said.unattributed, found.unattributed),
    )
    wrong = [f"{name}: the ledger says {tuple(s)}, it is {tuple(own)}" for name, s, own in pairs if s != own]
    requests = found.outcomes.total() - found.sources["estimated"]
    if said.requests != requests:  # estimates count for no budget
        wrong.append(f"the ledger tells gateways of {said.requests} requests, it has {requests}")
    return wrong
