"""What became of each request, from all journals together (invariant 1), and what else must hold. Pure.

| the client saw | and | verdict |
|---|---|---|
| the whole answer, right words, or the engine's own 400 where that is right | | answered |
| a 400 of the gateway that names the field with which the request attacks an engine | | answered |
| 429 or 503 with Retry-After 1..60; in a held stream an error event with retry_after | | refused |
| it left by its own plan | | cancelled |
| after the first byte: an error event | its engine, or external target, was killed then | failed |
| before any answer: 502 `replica_lost_twice`, or an event that says so | two engines that had it were killed | failed |
| the connection ended without a word | its gateway was killed then | cut |
| the same, after the first byte | its engine was killed then | failed |
| the same, before any answer | no gateway has a record of it: never accepted | not counted |
| anything else | | lost |
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tests.storm import nodes, rests, routed, routes, sick
from tests.storm.journals import WRONG, Attempt, Journals, Kill, KillOf, Sequence, UsageRow, by_client
from tests.storm.ledgerrows import LedgerContents
from tests.storm.metered import Account, account
from tests.storm.wire import LOST_TWICE

Outcome = Literal["answered", "refused", "cancelled", "failed", "cut", "lost", "unaccepted"]
COUNTED: Final[tuple[Outcome, ...]] = ("answered", "refused", "cancelled", "failed", "cut", "lost")
SLACK_SECONDS: Final = 1.0
"""Between a signal and what the journals say of it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    why: str


@dataclass(slots=True)
class Findings:
    """The result of a storm. `violations` are of other invariants; each names its own."""

    verdicts: dict[str, Verdict]
    violations: list[str] = field(default_factory=list[str])
    account: Account | None = None
    """Of usage (invariant 5); None: there is no ledger."""

    @property
    def totals(self) -> Counter[str]:
        return Counter(v.outcome for v in self.verdicts.values())

    @property
    def sent(self) -> int:
        """Requests without those that no gateway ever accepted."""
        return sum(1 for v in self.verdicts.values() if v.outcome != "unaccepted")

    @property
    def good(self) -> bool:
        return self.totals["lost"] == 0 and not self.violations and (self.account is None or self.account.good)

    @property
    def wrong(self) -> int:
        """Of the lost: answers with other words than their own, of other weights, of another prompt, or with words
        missing (invariant 3)."""
        return sum(v.outcome == "lost" and v.why.startswith(WRONG) for v in self.verdicts.values())

    def weights(self, attempts: Mapping[str, Attempt], adapters: Collection[str]) -> str:
        """How many answers were of adapters, by these names, and how many were wrong."""
        answered = sum(self.verdicts[id].outcome == "answered" and a.model in adapters for id, a in attempts.items())
        return f"answers {self.totals['answered']}, of adapters {answered}, wrong {self.wrong}"

    def line(self) -> str:
        """The last line of a storm."""
        totals = self.totals
        return ", ".join([f"sent {self.sent}", *(f"{name} {totals[name]}" for name in COUNTED)])

    def lost(self) -> list[str]:
        return [id for id, v in self.verdicts.items() if v.outcome == "lost"]


@dataclass(frozen=True, slots=True)
class Trail:
    """What gateways and engines know of one request id."""

    rows: tuple[UsageRow, ...]
    sequences: tuple[Sequence, ...]
    external: bool = False
    """It was sent to an external target."""

    @property
    def gateways(self) -> set[str]:
        return {row.gateway for row in self.rows}

    @property
    def engines(self) -> set[str]:
        named = {row.replica.rpartition("/")[2] for row in self.rows if row.replica}
        return named | {s.engine for s in self.sequences}


def trails(journals: Journals) -> dict[str, Trail]:
    """By the client's request id."""
    rows = by_client(journals.rows)
    sequences: dict[str, list[Sequence]] = {}
    for sequence in journals.sequences:
        sequences.setdefault(sequence.rid, []).append(sequence)
    found: dict[str, Trail] = {}
    for id, attempt in journals.attempts.items():
        own = tuple(rows.get(id, ()))
        requests = {row.request for row in own} | ({attempt.gateway_id} if attempt.gateway_id else set())
        external = any(row.model in journals.externals for row in own)
        found[id] = Trail(own, tuple(s for r in sorted(requests) for s in sequences.get(r, ())), external)
    return found


def judge(journals: Journals, contents: LedgerContents | None = None, cached: int | None = None) -> Findings:
    """Everything that the journals of one storm say, and the ledger's contents where there are any. `cached`: adapters
    that a replica may hold."""
    known = trails(journals)
    kills: dict[str, list[Kill]] = {}
    for kill in journals.kills:
        kills.setdefault(kill.pod, []).append(kill)
    verdicts = {id: verdict(attempt, known[id], kills) for id, attempt in journals.attempts.items()}
    _never_accepted(journals.attempts, verdicts)
    findings = Findings(verdicts)
    findings.violations += sent_again(journals, known)
    findings.violations += stopped_in_flight(journals, kills)
    findings.violations += lowered_in_silence(journals)
    findings.violations += records(journals.attempts, known)
    findings.violations += crowded(journals, cached)
    findings.violations += routed.violations(journals, contents)
    findings.violations += sick.violations(journals)
    findings.violations += nodes.violations(journals)
    findings.violations += rests.violations(journals)
    if contents is not None:
        findings.account = account(
            contents,
            journals.attempts,
            journals.sequences,
            spools=journals.rows,
            kills=journals.kills,
            copies={sequence.rid for sequence in journals.copies()},
            externals=journals.externals,
        )
        findings.violations += findings.account.violations()
    return findings


def verdict(attempt: Attempt, trail: Trail, kills: Mapping[str, Iterable[Kill]]) -> Verdict:
    """Of one request id."""
    outcome, ended = attempt.outcome, attempt.ended
    if outcome is None or ended is None:
        return Verdict("lost", "its client has no end of it")
    if outcome in ("answered", "refused", "cancelled"):
        return Verdict(outcome, attempt.why)
    if outcome == "lost":
        return Verdict("lost", attempt.why)
    engine = killed(trail.engines, "engine", attempt.sent, ended, kills)
    if engine is None and trail.external:
        engine = killed((routes.OUTSIDE,), "external", attempt.sent, ended, kills)
    if outcome == "failed" and attempt.why == LOST_TWICE:
        both = deaths(trail.engines, attempt.sent, ended, kills)
        if len(both) >= 2:
            told = ", ".join(f"{kill.fault} of {kill.pod}" for kill in both)
            return Verdict("failed", f"{LOST_TWICE} ({told})")
        return Verdict("lost", f"{LOST_TWICE}, with {len(both)} kills of engines that had it")
    if outcome == "failed":
        if engine:
            return Verdict("failed", f"{attempt.why} ({engine.fault} of {engine.pod})")
        return Verdict("lost", f"failed without a kill: {attempt.why}")
    gateway = killed(trail.gateways, "gateway", attempt.sent, ended, kills)
    if gateway:
        return Verdict("cut", f"{attempt.why} ({gateway.fault} of {gateway.pod})")
    if attempt.first is not None and engine:
        return Verdict("failed", f"{attempt.why} ({engine.fault} of {engine.pod})")
    if attempt.head is None and not trail.rows:
        return Verdict("unaccepted", attempt.why)
    return Verdict("lost", f"broken without a kill: {attempt.why}")


def killed(
    pods: Iterable[str],
    what: KillOf,
    sent: float,
    ended: float,
    kills: Mapping[str, Iterable[Kill]],
) -> Kill | None:
    """The kill of one of these pods that fell into the request's life and before its end. No connection outlives its
    gateway, however late a busy client hears of it; a request whose engine was killed may go on at another one."""
    least = sent if what == "gateway" else max(sent, ended - 1)
    for pod in pods:
        for kill in kills.get(pod, ()):
            if kill.what == what and kill.since <= ended + SLACK_SECONDS and kill.until >= least:
                return kill
    return None


def deaths(pods: Iterable[str], sent: float, ended: float, kills: Mapping[str, Iterable[Kill]]) -> list[Kill]:
    """The kills of engines of these pods that fell into the request's life."""
    return [
        kill
        for pod in sorted(pods)
        for kill in kills.get(pod, ())
        if kill.what == "engine" and kill.since <= ended + SLACK_SECONDS and kill.until >= sent - SLACK_SECONDS
    ]


def _never_accepted(attempts: Mapping[str, Attempt], verdicts: dict[str, Verdict]) -> None:
    """Who was turned away by broken connections every time, as often as an SDK tries, was not served either."""
    by_ask: dict[str, list[str]] = {}
    for id, attempt in attempts.items():
        by_ask.setdefault(attempt.ask, []).append(id)
    for ids in by_ask.values():
        if len(ids) > 2 and all(verdicts[id].outcome == "unaccepted" for id in ids):
            verdicts[ids[-1]] = Verdict("lost", "no gateway accepted it in three tries")


def sent_again(journals: Journals, known: Mapping[str, Trail]) -> list[str]:
    """Invariant 2: no request goes to an engine again after its first byte went to the client."""
    found: list[str] = []
    for id, attempt in journals.attempts.items():
        if attempt.first is None:
            continue
        late = [s for s in known[id].sequences if s.asked > attempt.first]
        found += [
            f"invariant 2: {id} went to {s.engine} {s.asked - attempt.first:.3f} s after its first byte" for s in late
        ]
    return found


def stopped_in_flight(journals: Journals, kills: Mapping[str, Iterable[Kill]]) -> list[str]:
    """Invariant 12: an engine is told to stop only when nothing is in flight there. Requests whose client has left do
    not count, nor do engines that a fault ended."""
    by_boot: dict[tuple[str, str], list[Sequence]] = {}
    for sequence in journals.sequences:
        by_boot.setdefault((sequence.engine, sequence.boot), []).append(sequence)
    found: list[str] = []
    for life in journals.lives:
        at = life.sigterm
        if at is None or any(
            k.since - SLACK_SECONDS <= at <= k.until + SLACK_SECONDS for k in kills.get(life.engine, ())
        ):
            continue
        for sequence in by_boot.get((life.engine, life.boot), ()):
            if sequence.canary or (sequence.outcome == "abort" and sequence.asked <= at):
                continue
            if sequence.asked > at:
                found.append(
                    f"invariant 12: {sequence.rid} came to {life.engine} {sequence.asked - at:.3f} s after SIGTERM"
                )
            elif sequence.finished is None or sequence.finished > at:
                found.append(f"invariant 12: {life.engine} got SIGTERM while {sequence.rid} was in flight there")
    return found


def lowered_in_silence(journals: Journals) -> list[str]:
    """Invariant 6: with any signal source of a Model missing, its replicas do not go down."""
    found: list[str] = []
    last: dict[str, dict[str, int]] = {}
    for scale in sorted(journals.scales, key=lambda s: s.at):
        model = last.setdefault(scale.model, {})
        before = sum(model.values())
        model[scale.deployment] = scale.replicas
        after = sum(model.values())
        for silence in journals.silent_periods:
            heard_of = silence.models is None or scale.model in silence.models
            if after < before and heard_of and silence.since <= scale.at <= silence.until:
                found.append(
                    f"invariant 6: {scale.model} went from {before} to {after} replicas during `{silence.fault}`"
                )
    return found


def crowded(journals: Journals, cached: int | None) -> list[str]:
    """Invariant 10: no more adapters in an engine than its replica may hold, and leases for no more than its slots but
    one."""
    found: list[str] = []
    for said in journals.residencies:
        if cached is not None and len(said.adapters) > cached:
            found.append(f"invariant 10: {said.pod} has {len(said.adapters)} adapters in its engine, of {cached}")
        if said.slots is not None and (said.leased or 0) > said.slots:
            found.append(f"invariant 10: {said.pod} has leases for {said.leased} adapters, of {said.slots}")
    return found


def records(attempts: Mapping[str, Attempt], known: Mapping[str, Trail]) -> list[str]:
    """Every accepted request has exactly one final usage record in the spools, and every answered one was accepted. (An
    attack is refused before that.)
    Spools keep final rows for a while after the ledger has them, other rows not."""
    found: list[str] = []
    for id, attempt in attempts.items():
        rows = known[id].rows
        finals = Counter(row.request for row in rows if row.kind == "final")
        accepted = {row.request for row in rows}
        found += [f"usage: {id} ({r}) has {finals[r]} final records" for r in sorted(accepted) if finals[r] != 1]
        if attempt.outcome == "answered" and attempt.kind != "attack" and not accepted:
            found.append(f"usage: {id} was answered and no gateway has a record of it")
    return found
