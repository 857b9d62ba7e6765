"""A storm over the tenant plane alone: load, SIGKILLs of gateways and of the ledger in turn, then the contents."""

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import orjson
from pydantic import TypeAdapter

from shoal.metering.spool import FILE_NAME as SPOOL
from tests.storm import journals, ledgerrows
from tests.storm.journals import Journals, Kill
from tests.storm.ledgerrows import Tokens
from tests.storm.load import LoadConfig
from tests.storm.metered import Account, account
from tests.storm.plan import Target
from tests.storm.tenants import localfleet
from tests.storm.tenants.children import Child
from tests.storm.tenants.localfleet import KEY, NAMESPACE, ONE_MODEL, LocalFleet
from tests.storm.verdict import Findings, judge
from tests.support.engines import MODEL, ROOT, Kind
from tests.support.postgres import postgres

ENDED: Final = "ended.json"
_ANSWER_SECONDS: Final = 2.0
"""How long a kill waits for the moment between a commit and its answer."""
_AWAY_SECONDS: Final = 0.7
_BEGIN_SECONDS: Final = 60.0
_END_SECONDS: Final = 330.0
_SHIP_SECONDS: Final = 60.0
_HEAR_SECONDS: Final = 30.0
"""Until the ledger has heard the engines' last counters: agents read them every 2 s."""
_KEPT: Final = 3600.0


Move = Literal["gateway", "ledger", "gateway at answer", "ledger at answer", "both"]
"""At some moment; `at answer`: when a batch is committed and its answer on the way; both: the ledger, and then a
gateway while it is away, so that what is not shipped is in that spool alone. The last are two kills."""
Database = Literal["sqlite", "postgresql"]
DATABASES: Final[tuple[Database, ...]] = get_args(Database)
MOVES: Final[tuple[Move, ...]] = get_args(Move)


@dataclass(frozen=True, slots=True)
class TenantStormConfig:
    kills: int
    rate: float = 12.0
    """Requests per second, open loop."""
    seed: int = 1
    pause: float = 1.0
    """Seconds between two kills, on average; both processes serve again before the next one."""
    long: float = 0.04
    """Share of long answers, of some seconds: what a killed gateway has checkpoints of."""
    engine: Kind = "sim"
    speed: float = 3.0
    """Times that of an L4; of the simulator."""
    moves: tuple[Move, ...] = MOVES
    """In turn."""
    database: Database = "sqlite"
    """Of the ledger. postgresql: a real server of its own."""
    mutation: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """What was asked for while the fleet still ran."""

    database_url: str
    counted: Tokens
    """The engines' own counters at the end."""
    idle: Tokens
    """The same before the load."""
    booked: ledgerrows.Booked


@dataclass(frozen=True, slots=True)
class Outcome:
    findings: Findings
    account: Account

    @property
    def good(self) -> bool:
        return self.findings.good and self.account.good

    def lines(self) -> list[str]:
        return [*self.account.lines(), self.findings.line()]


async def run(config: TenantStormConfig, folder: Path, say: Callable[[str], None] = print) -> Outcome:
    """Plays it and judges it. All journals stay in `folder`."""
    with postgres() if config.database == "postgresql" else contextlib.nullcontext() as server:
        return await _run(config, folder, say, None if server is None else server.database())


async def _run(
    config: TenantStormConfig, folder: Path, say: Callable[[str], None], database_url: str | None
) -> Outcome:
    async with localfleet.up(folder, database_url, config.mutation, kind=config.engine, speed=config.speed) as fleet:
        idle = await fleet.counted()
        async with _load(fleet, config) as load:
            await _until(lambda: _asked(folder), _BEGIN_SECONDS, "no answer at all", load)
            await _kills(fleet, config, load, say)
            load.terminate()  # no further requests; those that run come to their end
            async with asyncio.timeout(_END_SECONDS):
                await load.wait()
        await fleet.all_serve()
        counted = await _quiet(fleet, config)
        booked = await fleet.booked()
        ended = Ended(fleet.database_url, counted, idle, booked)
        await asyncio.to_thread((folder / ENDED).write_bytes, TypeAdapter(Ended).dump_json(ended))
        for child in (*fleet.gateways, fleet.ledger):
            code = await child.stop()
            assert code == 0 or config.mutation, f"{child.name} ended with {code}: {child.tail()}"
        _copy_spools(fleet)
    return judge_folder(folder, ended)


def judge_folder(folder: Path, ended: Ended) -> Outcome:
    """Judges the journals of a storm."""
    sequences: list[journals.Sequence] = []
    lives: list[journals.EngineLife] = []
    pods = sorted((folder / "engines").iterdir())
    for pod in pods:
        work, alive = journals.read_engines(pod)
        for one in (*work, *alive):
            one.engine = pod.name
        sequences += work
        lives += alive
    kills, _, notes = journals.read_faults(folder / "faults.jsonl")
    attempts = journals.read_attempts(folder / "client.jsonl")
    spools = journals.read_spools(folder / "spools")
    read = Journals(attempts, spools, sequences, lives, kills, faults=notes)
    kept = ledgerrows.read(ended.database_url)
    kept.booked = ended.booked
    told = account(kept, attempts, sequences, spools=spools, kills=kills, counted=ended.counted, idle=ended.idle)
    outcome = Outcome(judge(read), told)
    violations = [*outcome.findings.violations, *told.violations()]
    (folder / "violations.txt").write_text("\n".join(violations))
    return outcome


# --- load -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _load(fleet: LocalFleet, config: TenantStormConfig) -> AsyncGenerator[asyncio.subprocess.Process]:
    (host, port), *others = fleet.addresses
    plan = LoadConfig(
        host=host,
        port=port,
        others=tuple(others),
        key=KEY,
        model_path=MODEL,
        journal=fleet.folder / "client.jsonl",
        seed=config.seed,
        requests=round(_KEPT * config.rate),
        rate=config.rate,
        sdk_rate=0.0,
        long=config.long,
        words=config.engine == "sim",
        targets=(Target(f"{NAMESPACE}/{ONE_MODEL}", 1.0),),
    )
    file = fleet.folder / "load.json"
    file.write_text(plan.model_dump_json())
    with (fleet.folder / "load.log").open("wb") as out:
        load = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.storm.load", str(file), cwd=ROOT, stdout=out, stderr=out
        )
    try:
        yield load
    finally:
        if load.returncode is None:
            load.kill()
            await load.wait()


def _asked(folder: Path) -> bool:
    return any(line["event"] == "first" for line in journals.lines(folder / "client.jsonl"))


async def _until(
    condition: Callable[[], bool], within: float, what: str, process: asyncio.subprocess.Process | None = None
) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {within:.0f} s"
        assert process is None or process.returncode is None, f"{what}: the process has ended"
        await asyncio.sleep(0.1)


# --- kills ------------------------------------------------------------------------------------------------------------


async def _kills(
    fleet: LocalFleet, config: TenantStormConfig, load: asyncio.subprocess.Process, say: Callable[[str], None]
) -> None:
    """The moves in turn, each time with another gateway."""
    source = random.Random(config.seed)  # noqa: S311 - reproducible on purpose
    began = time.monotonic()
    moves = itertools.cycle(config.moves)
    gateways = itertools.cycle(fleet.gateways)
    done = 0
    while done < config.kills:
        assert load.returncode is None, "the load has ended"
        await asyncio.sleep(config.pause * source.uniform(0.5, 1.5))
        move = next(moves)
        victims = [fleet.ledger] if move.startswith("ledger") else [next(gateways)]
        if move == "both":
            since = time.time()
            fleet.ledger.strike()
            await asyncio.sleep(_AWAY_SECONDS)
            victims.append(fleet.ledger)
            _note(fleet.folder, fleet.ledger, since, "at some moment")
        since, met = time.time(), False
        if move.endswith("at answer"):
            met = await fleet.line.at_next_answer(victims[0].strike, _ANSWER_SECONDS)
        if not met:
            victims[0].strike()
        for victim in victims:
            await fleet.restart(victim)
        away = ", while the ledger is away" if move == "both" else ""
        moment = "between a commit and its answer" if met else f"at some moment{away}"
        _note(fleet.folder, victims[0], since, moment)
        for victim in victims:
            await victim.serves(fleet.session)
        if (done + len(victims)) // 10 > done // 10:
            say(f"{done + len(victims)} SIGKILLs in {time.monotonic() - began:.0f} s")
        done += len(victims)


def _note(folder: Path, victim: Child, since: float, moment: str) -> None:
    kind = "ledger" if victim.name.startswith("shoal-ledger") else "gateway"
    kill = Kill(kind, victim.name, since, time.time(), "killed")
    line = {"at": time.time(), "text": f"SIGKILL of {victim.name}, {moment}", "kills": [asdict(kill)]}
    with (folder / "faults.jsonl").open("ab") as file:
        file.write(orjson.dumps(line) + b"\n")


# --- the end ----------------------------------------------------------------------------------------------------------


async def _quiet(fleet: LocalFleet, config: TenantStormConfig) -> Tokens:
    """Waits until all that is known has come to the ledger; returns the engines' own counters."""
    # Without one of its protections a fleet may never come to rest.
    with contextlib.suppress(AssertionError) if config.mutation else contextlib.nullcontext():
        await _until(
            lambda: not any(_unshipped(fleet, gateway) for gateway in fleet.gateways), _SHIP_SECONDS, "not shipped"
        )
    deadline = time.monotonic() + (0 if config.mutation else _HEAR_SECONDS)
    while (counted := await fleet.counted()) != await asyncio.to_thread(ledgerrows.heard, fleet.database_url):
        if time.monotonic() > deadline:
            break  # the judge says so
        await asyncio.sleep(0.5)
    return counted


def _unshipped(fleet: LocalFleet, gateway: Child) -> int:
    return journals.unshipped(fleet.spool(gateway) / SPOOL)


def _copy_spools(fleet: LocalFleet) -> None:
    for gateway in fleet.gateways:
        journals.copy_spool(fleet.spool(gateway) / SPOOL, fleet.folder / "spools" / gateway.name)
