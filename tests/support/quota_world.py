"""Gateways that share a tenant's limit, in a network that brings messages late, twice or not at all. It knows what was
really used, whatever the gateways think."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from shoal.api.demand import RecentUse, TenantUse
from shoal.core.quota.limits import Cost, Limit, Limits, Over
from shoal.core.quota.month import MonthlyQuota
from shoal.core.quota.peerusage import GatewayPeer, GatewayPeers
from shoal.core.quota.window import WINDOW_SECONDS
from shoal.gateway.tenantdemand import TenantUsageState

SILENCE = 12.0
SEEN_AFTER = 1.0
"""Seconds after which the others see a new pod."""
TENANT = "acme"


@dataclass
class Process:
    """One boot of a gateway, and what it really used."""

    boot: str
    admitted: list[float] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)
    """When, and with how many tokens."""
    running: dict[int, Cost] = field(default_factory=dict)
    died: float | None = None

    def used(self, limit: Limit, now: float, report: "UsageReport | None" = None) -> int:
        """Now; or as far as a message said."""
        running = [cost.tokens for cost in self.running.values()]
        if report is None:
            report = UsageReport(len(self.admitted), len(self.ended), len(running), sum(running))
        if limit == "concurrent":
            return report.running if self.died is None else 0
        if limit == "requests":
            return sum(_inside(at, now) for at in self.admitted[report.since[0] : report.admitted])
        month = limit == "budget"
        if self.died is not None and not month and not _inside(self.died, now):
            return 0
        used = sum(tokens for at, tokens in self.ended[report.since[1] : report.ended] if month or _inside(at, now))
        return used + report.reserved


@dataclass(frozen=True)
class UsageReport:
    """What a message said: so many of a process's requests."""

    admitted: int
    ended: int
    running: int
    reserved: int
    since: tuple[int, int] = (0, 0)
    """What had been before the listener heard anything of it."""


@dataclass(frozen=True)
class Message:
    arrives: float
    sender: str
    receiver: str
    """Pods."""
    boot: str
    use: TenantUse
    report: UsageReport
    first: bool = False
    """Of a stream: with the last minute by age."""
    gone: dict[str, dict[str, RecentUse]] = field(default_factory=dict)
    gone_reports: dict[str, UsageReport] = field(default_factory=dict)


@dataclass
class Gate:
    """A gateway's pod."""

    pod: str
    process: Process
    book: TenantUsageState
    born: float
    reports: dict[str, UsageReport] = field(default_factory=dict)
    """By boot: what was heard of it last."""
    heard_at: dict[str, float] = field(default_factory=dict)
    """By pod."""
    renewed: float = float("-inf")
    known: int = 0
    own: int = 0
    heard: dict[str, int] = field(default_factory=dict)
    """What it knew of each process when its share was renewed last."""
    sharers: int = 1


class World:
    def __init__(self, limit: Limit, most: int, gates: int) -> None:
        self.limit: Limit = limit
        self.most = most
        each: dict[Limit, int] = {limit: most}
        budget = MonthlyQuota("tokens", most) if limit == "budget" else None
        self.limits = Limits(each.get("requests"), each.get("tokens"), each.get("concurrent"), budget)
        self.now = 1000.0
        self.processes: list[Process] = []
        self.gates: list[Gate] = []
        self.wire: list[Message] = []
        self.begun: set[tuple[str, str]] = set()
        """Streams of which the first message is sent: boots of who sends and who reads."""
        self.cut_off: set[tuple[str, str]] = set()
        """Pods whose stream is down: from, to."""
        self.passed = 0
        self.over: Over | None = None
        """Why the last request was refused; None: it passed."""
        self._pods = self._requests = 0
        for _ in range(gates):
            self.join()

    # --- what happens -------------------------------------------------------------------------------------------------

    def join(self) -> Gate:
        self._pods += 1
        gate = Gate(f"pod-{self._pods}", Process(""), TenantUsageState(), self.now)
        self.gates.append(gate)
        self.boot(gate)
        return self.gates[-1]

    def boot(self, gate: Gate) -> None:
        """Its process starts, anew if it ran."""
        self._die(gate)
        process = Process(f"boot-{len(self.processes)}")
        self.processes.append(process)
        fresh = Gate(
            gate.pod,
            process,
            TenantUsageState(boot=process.boot, clock=lambda: self.now),
            self.now if gate.reports else gate.born,
        )
        self.gates[self.gates.index(gate)] = fresh
        fresh.book.of(TENANT).change(self.limits)
        if gate.process.boot:
            for other in self.gates:
                other.book.peer_lost(gate.pod)

    def cut(self, sender: Gate, receiver: Gate) -> None:
        """The stream from one to the other ends. A later one begins with a first message."""
        self.cut_off.add((sender.pod, receiver.pod))
        self.begun.discard((sender.process.boot, receiver.process.boot))
        receiver.book.peer_lost(sender.pod)

    def leave(self, gate: Gate) -> None:
        self._die(gate)
        self.gates.remove(gate)
        for other in self.gates:
            other.book.retain({each.pod for each in self.gates})

    def ask(self, gate: Gate, tokens: int) -> bool:
        """A request; whether it passed. Checks the bound if it did."""
        account, now = gate.book.of(TENANT), self.now
        knows = self._knows(gate)
        own = gate.process.used(self.limit, now)
        cost = Cost(tokens)
        peers = self.peers(gate)
        over = self.over = account.reserve(now, cost, lambda: peers, month="2026-11")
        share = account._shares[self.limit]  # pyright: ignore[reportPrivateUsage]
        if share.since == now:
            gate.renewed, gate.heard, gate.own = now, knows, own
            gate.sharers = 1 + sum(peer.reported_at is not None for peer in peers)
        if over is not None:
            assert 1 <= over.retry_after <= 60
            return False
        self._requests += 1
        self.passed += 1
        gate.process.running[self._requests] = cost
        gate.process.admitted.append(now)
        whole = account._own(self.limit, now) > share.cap  # pyright: ignore[reportPrivateUsage]
        self.check(gate, whole=whole)
        return True

    def end(self, gate: Gate, tokens: int) -> None:
        """Its oldest request ends, having used so much at most."""
        if gate.process.running:
            cost = gate.process.running.pop(next(iter(gate.process.running)))
            used = min(tokens, cost.tokens)
            gate.process.ended.append((self.now, used))
            gate.book.of(TENANT).settle(self.now, cost, used, used)

    def tell(self, gate: Gate, delays: Sequence[float | None]) -> None:
        """To each other gateway, after a delay; None: it is lost."""
        process = gate.process
        running = [cost.tokens for cost in process.running.values()]
        report = UsageReport(len(process.admitted), len(process.ended), len(running), sum(running))
        use = gate.book.of(TENANT).report(self.now)
        for other, delay in zip((each for each in self.gates if each is not gate), delays, strict=False):
            if delay is None:
                continue
            message = Message(self.now + delay, gate.pod, other.pod, process.boot, use, report)
            stream = process.boot, other.process.boot
            if stream not in self.begun and (gate.pod, other.pod) not in self.cut_off:
                self.begun.add(stream)
                message = self._first(gate, message)
            self.wire.append(message)

    def connect(self, gate: Gate, delay: float) -> None:
        """Sends a first message to each gateway that it has sent none."""
        begun = [(gate.process.boot, other.process.boot) in self.begun for other in self.gates if other is not gate]
        self.tell(gate, [None if known else delay for known in begun])

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = sorted((m for m in self.wire if m.arrives <= self.now), key=lambda m: m.arrives)
        self.wire = [m for m in self.wire if m.arrives > self.now]
        for message in due:
            sender, receiver, boot, report = message.sender, message.receiver, message.boot, message.report
            gate = next((g for g in self.gates if g.pod == receiver), None)
            current = next((g for g in self.gates if g.pod == sender), None)
            if gate is None or current is None or current.process.boot != boot or (sender, receiver) in self.cut_off:
                continue
            before = gate.reports.get(boot)
            if before is not None and (report.admitted, report.ended) < (before.admitted, before.ended):
                continue  # a stream keeps the order
            since = before.since if before is not None else (report.admitted, report.ended)
            if message.first and self.limit != "budget":
                since = (0, 0)
                for gone, known in message.gone_reports.items():
                    if gone not in (gate.process.boot, *gate.reports):
                        gate.reports[gone] = replace(known, running=0)
            gate.reports[boot] = UsageReport(report.admitted, report.ended, report.running, report.reserved, since)
            gate.heard_at[sender] = self.now
            gate.book.peer_reported(sender, boot, {TENANT: message.use}, gone=message.gone)

    def _first(self, gate: Gate, message: Message) -> Message:
        """As the first message of a stream, through JSON as on the wire."""
        recent = gate.book.of(TENANT).recent(self.now, 61)
        use = TenantUse.model_validate({**message.use.model_dump(), "recent": orjson.loads(orjson.dumps(recent))})
        gone = orjson.loads(gate.book.gone(0) or b"{}")
        known = {boot: gate.reports[boot] for boot in gone if boot in gate.reports}
        return replace(message, first=True, use=use, gone=gone, gone_reports=known)

    # --- what is known, and what is true ------------------------------------------------------------------------------

    def peers(self, gate: Gate) -> GatewayPeers:
        peers: list[GatewayPeer] = []
        for other in self.gates:
            if other is gate or self.now - other.born < SEEN_AFTER:
                continue
            at = gate.heard_at.get(other.pod)
            live = at is not None and self.now - at <= SILENCE and (other.pod, gate.pod) not in self.cut_off
            boot = gate.book.boot_of(other.pod)
            heard = max(gate.born, other.born, -SILENCE if at is None else at)
            peers.append(GatewayPeer(boot, at if live else None, not live and self.now - heard <= SILENCE))
        return peers

    def used(self) -> int:
        return sum(process.used(self.limit, self.now) for process in self.processes)

    def check(self, gate: Gate, *, whole: bool) -> None:
        """The bound of `core/quota/share.py`, by what the gateway really knew."""
        others = [p for p in self.processes if p is not gate.process]
        unreported = sum(max(0, p.used(self.limit, self.now) - gate.heard.get(p.boot, 0)) for p in others)
        left = max(0, self.most - gate.own - sum(gate.heard.values()))
        least = min(left, 1 if self.limit == "concurrent" else 0)
        spared = 0 if whole else left - max(least, left // gate.sharers)
        assert self.used() <= self.most + unreported - spared

    def _knows(self, gate: Gate) -> dict[str, int]:
        return {
            p.boot: p.used(self.limit, self.now, gate.reports[p.boot]) for p in self.processes if p.boot in gate.reports
        }

    def _die(self, gate: Gate) -> None:
        """What runs there is taken for used."""
        process = gate.process
        process.died = self.now
        for cost in process.running.values():
            process.ended.append((self.now, cost.tokens))
        process.running = {}


def _inside(at: float, now: float) -> bool:
    """Whether it counts: for 60 s, to the end of that second."""
    return int(now) - int(at) <= WINDOW_SECONDS
