"""What the processes of a storm wrote down, read back: clients, gateways (their usage spools), engines, faults."""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from shoal.engine.port import CANARY_ID
from shoal.metering.spool import FILE_NAME as SPOOL


@dataclass(slots=True)
class Attempt:
    """One request id, as its client saw it. Times are Unix seconds everywhere."""

    id: str
    ask: str
    model: str
    kind: str
    sent: float
    first: float | None = None
    head: float | None = None
    ended: float | None = None
    outcome: str | None = None
    """None: the client's journal has no end; the load was killed, or lost track of it."""
    why: str = ""
    status: int | None = None
    gateway_id: str | None = None
    usage: tuple[int, int] | None = None
    """Prompt and answer tokens, where the answer said them."""
    weights: tuple[str, ...] = ()
    """Whose words the whole answer has: names of adapters, or "" for the base; short ones may be of several."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One row of a gateway's spool."""

    gateway: str
    request: str
    client_id: str | None
    kind: str
    at: str
    outcome: str | None
    status: int | None
    attempts: int
    replica: str | None
    """namespace/pod."""
    model: str | None = None
    """namespace/name."""
    route: str | None = None
    """namespace/name of the ModelRoute."""
    admitted: str | None = None
    """When the gateway accepted the request."""
    mirror_of: str | None = None
    """Of a copy for a mirror: the request."""
    adapter: str | None = None
    """namespace/name."""


@dataclass(slots=True)
class Sequence:
    """One request on one engine."""

    rid: str
    engine: str
    """Name of the pod."""
    boot: str
    asked: float
    finished: float | None = None
    outcome: str | None = None
    tokens: tuple[int, int] | None = None
    """Prompt and answer tokens that the engine counts for it. None: it never began to compute, or was killed."""
    live: bool = False
    """The engine counts tokens while requests run."""

    @property
    def canary(self) -> bool:
        """Shoal itself asked: nobody waits for the answer or is billed, and the engine counts its tokens."""
        return self.rid.startswith(CANARY_ID)


@dataclass(slots=True)
class EngineLife:
    """One process of an engine."""

    engine: str
    boot: str
    started: float
    sigterm: float | None = None
    exiting: float | None = None


WRONG: Final = "wrong content"
"""So begins what a client says of an answer with other words than its own."""
KillOf = Literal["engine", "gateway", "ledger", "external"]


@dataclass(frozen=True, slots=True)
class Kill:
    """Something that was ended by force, and the time within which its requests can tell of it."""

    what: KillOf
    pod: str
    """Without its namespace."""
    since: float
    until: float
    fault: str


@dataclass(frozen=True, slots=True)
class SilentPeriod:
    """A signal source that was surely not to be heard in this time: its Model's replicas may not be lowered."""

    since: float
    until: float
    fault: str
    models: frozenset[str] | None = None
    """None: of every Model."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A Deployment's replicas, as a watch told of them."""

    at: float
    deployment: str
    model: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Adapters of a replica, as its agent told of them."""

    at: float
    pod: str
    adapters: tuple[str, ...]
    """In the engine, also on the way there or away."""
    slots: int | None
    """Distinct adapters that leases may cover: one less than the engine's own."""
    leased: int | None


@dataclass(frozen=True, slots=True)
class Routed:
    """A route, as those know it who send requests to it."""

    route: str
    """namespace/name."""
    models: tuple[str, ...]
    """namespace/name of each Model that may answer."""
    mirror: str | None = None
    """namespace/name of the Model that gets copies, and that nobody else asks."""
    adapters: tuple[str, ...] = ()
    """namespace/name of each adapter that may answer."""
    external: str | None = None
    """Which of `models` is an external target."""


@dataclass(frozen=True, slots=True)
class Halt:
    """A canary that was broken, and the time in which it had to be halted."""

    route: str
    model: str
    since: float | None
    """When the route's status said so; None: it did not."""
    until: float
    """It was not started again before."""
    seconds: float
    """For so long it was broken."""


@dataclass(frozen=True, slots=True)
class OutOfUse:
    """What Shoal kept out of use of a class, as a watch of its status told of it."""

    at: float
    gpu_class: str
    capacity: int
    units: tuple[tuple[str, str], ...]
    """(node, device); "" as device: all GPUs of the node."""


@dataclass(frozen=True, slots=True)
class Sickness:
    """A GPU that sickened under a replica, and what became of the two. Times are None for what did not happen."""

    fault: str
    unit: str
    model: str
    pod: str
    since: float
    until: float
    """It healed then."""
    taken: float | None
    """It was out of use."""
    replaced: float | None
    """As many other replicas were ready as there had been replicas."""
    gone: float | None
    """The replica began to go, or was not ready any more."""
    others: int
    """Other replicas that were ready then."""
    before: int
    """Replicas that were ready when it sickened."""
    floor: int
    """Replicas that the Model has at least."""


@dataclass(frozen=True, slots=True)
class DriverUpgrade:
    """The DRA driver of a node was replaced under load, and what became of the replicas and GPUs there."""

    node: str
    model: str
    since: float
    """Its slices were withdrawn."""
    until: float
    """The last look, or the end of the load."""
    pods: tuple[str, ...]
    """Replicas that served there."""
    gone: tuple[str, ...]
    """Those of `pods` that began to go."""
    sick: tuple[str, ...]
    """What of the node was called sick meanwhile, and why."""
    counted: bool
    """The class had as many GPUs as before, or the load ended first."""
    before: int
    """Replicas of the Model that served at `since`."""
    floor: int
    """Replicas that the Model has at least."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """What became of a node that an autoscaler adds; see `tests.storm.nodes`."""

    at: float
    event: str
    node: str
    pods: tuple[str, ...]
    """Who asked for it, or was there."""
    why: str
    good: bool
    """Of `stock`: there is some again. Of a fault: it found a node."""


@dataclass(slots=True)
class Journals:
    """All of them."""

    attempts: dict[str, Attempt]
    rows: list[UsageRow] = field(default_factory=list[UsageRow])
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    lives: list[EngineLife] = field(default_factory=list[EngineLife])
    kills: list[Kill] = field(default_factory=list[Kill])
    silent_periods: list[SilentPeriod] = field(default_factory=list[SilentPeriod])
    scales: list[Scale] = field(default_factory=list[Scale])
    residencies: list[Residency] = field(default_factory=list[Residency])
    faults: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """When, and what was done."""
    routes: dict[str, Routed] = field(default_factory=dict[str, Routed])
    """By the name that clients use; empty: there were none."""
    halts: list[Halt] = field(default_factory=list[Halt])
    outside: list[Sequence] = field(default_factory=list[Sequence])
    """What the external target was sent, by its own journal. It gives requests ids of its own."""
    out_of_use: list[OutOfUse] = field(default_factory=list[OutOfUse])
    sicknesses: list[Sickness] = field(default_factory=list[Sickness])
    upgrades: list[DriverUpgrade] = field(default_factory=list[DriverUpgrade])
    nodes: list[NodeEvent] = field(default_factory=list[NodeEvent])
    """Empty: no nodes were to come."""

    @property
    def externals(self) -> frozenset[str]:
        """Names of external targets, as records have them in place of a Model's."""
        return frozenset(one.external for one in self.routes.values() if one.external is not None)

    def copies(self) -> list[Sequence]:
        """What engines of mirrors were sent: no client waits for it."""
        mirrors = [one.mirror.partition("/")[2] for one in self.routes.values() if one.mirror is not None]
        return [s for s in self.sequences if any(s.engine.startswith(f"{name}-") for name in mirrors)]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a journal; the last one may have been cut by a kill."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield orjson.loads(raw)


def read_attempts(path: Path) -> dict[str, Attempt]:
    found: dict[str, Attempt] = {}
    for line in lines(path):
        id = line["attempt"]
        if line["event"] == "send":
            found[id] = Attempt(id, line["ask"], line["model"], line["kind"], line["at"])
        elif line["event"] == "first":
            found[id].first, found[id].gateway_id = line["at"], line["gateway_id"]
        else:
            attempt = found[id]
            attempt.ended, attempt.outcome, attempt.why = line["at"], line["outcome"], line["why"]
            attempt.status, attempt.head, attempt.gateway_id = line["status"], line["head"], line["gateway_id"]
            attempt.first = line["first"]
            attempt.usage = tuple(line["usage"]) if line.get("usage") else None
            attempt.weights = tuple(line.get("weights", ()))
    return found


def read_engines(folder: Path) -> tuple[list[Sequence], list[EngineLife]]:
    """All engines' journals, one file per process."""
    sequences: list[Sequence] = []
    lives: list[EngineLife] = []
    for path in sorted(folder.glob("*.jsonl")):
        running: dict[str, Sequence] = {}
        life: EngineLife | None = None
        live = False
        for line in lines(path):
            event = line["event"]
            if event == "asked":
                # A gateway that sends a request again says so behind a dot: an engine may still have the first one.
                request = line["rid"].partition(".")[0]
                running[line["rid"]] = sequence = Sequence(
                    request, line["engine"], line["boot"], line["arrived"], live=live
                )
                sequences.append(sequence)
            elif event == "finished":
                if (sequence := running.pop(line["rid"], None)) is not None:
                    sequence.finished, sequence.outcome = line["finished"], line["outcome"]
                    if line["cached_tokens"] is not None:  # else it never left the queue
                        sequence.tokens = (line["prompt_tokens"], line["completion_tokens"])
            elif event == "started":
                life = EngineLife(line["engine"], line["boot"], line["at"])
                lives.append(life)
                live = line.get("live", False)
            elif life is not None and event == "sigterm":
                life.sigterm = life.sigterm or line["at"]
            elif life is not None and event == "exiting":
                life.exiting = line["at"]
    return sequences, lives


def unshipped(file: Path) -> int:
    """Rows of a spool that the ledger has not taken; also while a gateway writes it."""
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
        sql = "SELECT count(*) FROM records WHERE seq > (SELECT shipped FROM position)"
        return connection.execute(sql).fetchone()[0]


def copy_spool(file: Path, folder: Path) -> None:
    """A spool or the ledger's database, into a folder of its own: reading a copy writes nothing beside the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("", "-wal"):
        source = file.with_name(file.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source, folder / source.name)


def read_spools(folder: Path) -> list[UsageRow]:
    """Of all gateways; each has a folder of its name."""
    rows: list[UsageRow] = []
    for file in sorted(folder.glob(f"*/{SPOOL}")):
        connection = sqlite3.connect(file)
        try:
            bodies = connection.execute("SELECT body FROM records WHERE kind != 'checkpoint' ORDER BY seq")
            rows += [_row(file.parent.name, orjson.loads(body)) for (body,) in bodies]
        finally:
            connection.close()
    return rows


def _row(gateway: str, record: dict[str, Any]) -> UsageRow:
    data = record["data"]
    return UsageRow(
        gateway=gateway,
        request=data["requestId"],
        client_id=data.get("clientRequestId"),
        kind=data["kind"],
        at=record["time"],
        outcome=data.get("outcome"),
        status=data.get("status"),
        attempts=data.get("attempts", 0),
        replica=data.get("replica"),
        model=data.get("model"),
        route=data.get("route"),
        admitted=data.get("admittedAt"),
        mirror_of=data.get("mirrorOf"),
        adapter=data.get("adapter"),
    )


def read_faults(path: Path) -> tuple[list[Kill], list[SilentPeriod], list[tuple[float, str]]]:
    kills: list[Kill] = []
    silent_periods: list[SilentPeriod] = []
    notes: list[tuple[float, str]] = []
    for line in lines(path):
        notes.append((line["at"], line["text"]))
        kills += [Kill(**kill) for kill in line.get("kills", ())]
        for silence in line.get("silent_periods", ()):
            models = silence["models"]
            silent_periods.append(SilentPeriod(**silence | {"models": None if models is None else frozenset(models)}))
    return kills, silent_periods, notes


def read_halts(path: Path) -> list[Halt]:
    """From the faults' journal."""
    return [Halt(**halt) for line in lines(path) for halt in line.get("halts", ())]


def read_routes(path: Path) -> dict[str, Routed]:
    if not path.exists():
        return {}
    found: dict[str, Any] = orjson.loads(path.read_bytes())
    return {
        name: Routed(
            one["route"],
            tuple(one["models"]),
            one.get("mirror"),
            tuple(one.get("adapters", ())),
            one.get("external"),
        )
        for name, one in found.items()
    }


def read_scales(path: Path) -> list[Scale]:
    return [Scale(line["at"], line["deployment"], line["model"], line["replicas"]) for line in lines(path)]


def read_residencies(path: Path) -> list[Residency]:
    return [
        Residency(line["at"], line["pod"], tuple(line["adapters"]), line["slots"], line["leased"])
        for line in lines(path)
    ]


def by_client(rows: Iterable[UsageRow]) -> dict[str, list[UsageRow]]:
    found: dict[str, list[UsageRow]] = {}
    for row in rows:
        if row.client_id is not None:
            found.setdefault(row.client_id, []).append(row)
    return found
