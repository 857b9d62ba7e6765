"""One storm from beginning to end: ground, load, faults, journals, findings."""

import contextlib
import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import orjson

from shoal.api.model import Driver
from shoal_dev.demo import steps
from shoal_dev.lab.errors import LabError
from tests.storm import faults, journals, ledgerrows, nodes, rests, routed, routes, sick, story, swaps, versions
from tests.storm.ground import BURSTY, KEY, LEDGER, MODEL_PATH, STEADY, STORM, Ground
from tests.storm.kills import killing
from tests.storm.load import LoadConfig
from tests.storm.plan import LONG, Phase, Target
from tests.storm.verdict import Findings, judge
from tests.support.waiting import until

_ROUTES = "routes.json"
"""File of the routes, in the folder of the journals."""
_STORIES_SHOWN = 10
_VIOLATIONS_SHOWN = 20
_FLOWS_SECONDS = 60.0
"""Until the first answer: the clients are a process that has to start."""
_END_SECONDS = 330.0
"""Until the last client has heard, after the last request was sent: longer than a client waits."""


@dataclass(frozen=True, slots=True)
class StormConfig:
    """What kind of storm."""

    requests: int
    rate: float
    seed: int
    faults: Sequence[str]
    """Names, in order; they are played, shuffled by the seed, and then again, while the load lasts."""
    once: bool = False
    """Each fault once: then the load goes on without any."""
    gap: float = 15.0
    """Seconds between the end of one fault and the next, on average."""
    pace: float = 1.0
    sdk_rate: float = 1.0
    burst_period: float = 60.0
    """Seconds from one burst of the bursty Model to the next; half of it nobody asks. 0: no ebb."""
    drain_seconds: int = 60
    """Of both Models. Longer than the longest answer, so that no drain runs out of it."""
    idle_seconds: int = 10
    """Of the bursty Model."""
    long: float = LONG
    """Share of long answers."""
    adapters: bool = True
    """A quarter of the requests asks for adapters, one of which changes all the time."""
    shuffled: bool = True
    one_by_one: bool = False
    """Each fault waits until what the one before broke is whole again."""
    mutation: str | None = None
    driver: Driver = "BuiltIn"
    """Who writes the Models' replicas."""
    since: str | None = None
    """The version that is installed first, as git knows it; `upgraded` goes on from there."""
    routes: bool = False
    """More than half of the requests goes to routes: with shares, a canary, fallbacks and an external target."""
    sick: bool = False
    """A quarter of the requests goes to a Model on devices of a DRA driver, and GPUs sicken."""
    nodes: bool = False
    """Two more Models, on a class whose nodes come because replicas are pending, and go."""
    rests: bool = False
    """Two more Models on such a class, whose nearly empty nodes Shoal empties; one of them rests between bursts."""
    kills: int = 0
    """SIGKILLs of gateways and the ledger in turn, beside the faults."""


def run(config: StormConfig, folder: Path) -> Findings:
    """Plays a storm and judges it. All journals stay in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if config.routes:
        asked = {name: dataclasses.asdict(one) for name, one in _asked(config).items()}
        (folder / _ROUTES).write_bytes(orjson.dumps(asked))
    with _ground(config, folder) as ground:
        print(f"the fleet is up; journals are in {folder}", flush=True)
        with ground.watched_scales(folder / "scales.jsonl"), _load(ground, config, folder) as load:
            over = lambda: load.poll() is not None  # noqa: E731
            storm = faults.Storm(ground, _source(config), folder / "faults.jsonl", config.pace, over)
            with contextlib.ExitStack() as beside:
                if config.adapters:
                    beside.enter_context(swaps.swapping(ground.kubectl, STORM, storm.say))
                    beside.enter_context(ground.heard_agents(folder / "agents.jsonl"))
                if config.sick:
                    beside.enter_context(ground.watched_classes(folder / "classes.jsonl"))
                if config.kills:
                    beside.enter_context(killing(ground, config.kills, _seconds(config), storm.say))
                _faults(storm, config, load)
            with contextlib.suppress(subprocess.TimeoutExpired):
                load.wait(_END_SECONDS + config.requests / config.rate)
        ground.settle(storm.say)
        ground.copy_spools(folder / "spools")
        ground.copy_ledger(folder / "ledger")
    findings = judge_folder(folder)
    if config.adapters and not journals.read_residencies(folder / "agents.jsonl"):
        findings.violations.append("invariant 10 was not judged: no agent was heard")
    return findings


@contextlib.contextmanager
def _ground(config: StormConfig, folder: Path) -> Generator[Ground]:
    with contextlib.ExitStack() as stack:
        earlier = stack.enter_context(versions.earlier(config.since)) if config.since is not None else None
        ground = Ground.up(
            folder,
            config.mutation,
            config.drain_seconds,
            config.idle_seconds,
            adapters=config.adapters,
            driver=config.driver,
            earlier=earlier,
            routed=config.routes,
            sickening=config.sick,
            coming=config.nodes,
            resting=config.rests,
        )
        yield stack.enter_context(ground)


def judge_folder(folder: Path) -> Findings:
    """Judges the journals of a storm, also of one that is long over, and prints what it finds."""
    found = collect(folder)
    ledger = folder / "ledger" / LEDGER
    findings = judge(found, ledgerrows.read(f"sqlite:///{ledger}") if ledger.exists() else None, swaps.CACHED)
    show(found, findings, folder)
    return findings


def collect(folder: Path) -> journals.Journals:
    sequences, lives = journals.read_engines(folder / "engines")
    kills, silent_periods, notes = journals.read_faults(folder / "faults.jsonl")
    return journals.Journals(
        attempts=journals.read_attempts(folder / "client.jsonl"),
        rows=journals.read_spools(folder / "spools"),
        sequences=sequences,
        lives=lives,
        kills=kills,
        silent_periods=silent_periods,
        scales=journals.read_scales(folder / "scales.jsonl"),
        faults=notes,
        residencies=journals.read_residencies(folder / "agents.jsonl"),
        routes=journals.read_routes(folder / _ROUTES),
        halts=journals.read_halts(folder / "faults.jsonl"),
        outside=journals.read_engines(folder / "engines" / routes.OUTSIDE)[0],
        out_of_use=sick.read_out_of_use(folder / "classes.jsonl"),
        sicknesses=sick.read_sicknesses(folder / "faults.jsonl"),
        upgrades=sick.read_upgrades(folder / "faults.jsonl"),
        nodes=nodes.read_events(folder / nodes.FILE),
    )


def show(found: journals.Journals, findings: Findings, folder: Path) -> None:
    """Violations and stories, then the one line."""
    told = list(story.stories(found, findings))
    (folder / "lost.txt").write_text("\n\n".join(told))
    (folder / "violations.txt").write_text("\n".join(findings.violations))
    for text in told[:_STORIES_SHOWN]:
        print(f"LOST {text}")
    if len(told) > _STORIES_SHOWN:
        print(f"... and {len(told) - _STORIES_SHOWN} more: {folder / 'lost.txt'}")
    for text in findings.violations[:_VIOLATIONS_SHOWN]:
        print(f"VIOLATION {text}")
    if len(findings.violations) > _VIOLATIONS_SHOWN:
        print(f"... and {len(findings.violations) - _VIOLATIONS_SHOWN} more: {folder / 'violations.txt'}")
    print(_stats(found, findings))
    print(findings.weights(found.attempts, swaps.ADAPTERS))
    if found.routes:
        print(routed.line(found))
    if found.out_of_use:
        print(sick.line(found))
    if found.nodes:
        print(nodes.line(found))
        print(rests.line(found))
    if findings.account is not None:
        print("\n".join(findings.account.lines()))
    print(findings.line(), flush=True)


def _stats(found: journals.Journals, findings: Findings) -> str:
    """How it was for the clients, in one line: not judged, but a storm that answers after minutes is worth a look."""
    waits = sorted(
        a.first - a.sent
        for id, a in found.attempts.items()
        if a.first is not None and findings.verdicts[id].outcome == "answered"
    )
    if not waits:
        return "nothing was answered"
    p50, p99 = (waits[min(len(waits) - 1, int(len(waits) * q))] for q in (0.5, 0.99))
    again = sum(1 for row in found.rows if row.kind == "final" and row.attempts > 1)
    began, ended = min(a.sent for a in found.attempts.values()), max(a.sent for a in found.attempts.values())
    return (
        f"{len(found.attempts) / max(ended - began, 1.0):.0f} requests/s; first byte p50 {p50:.2f} s, p99 {p99:.2f} s, "
        f"longest {waits[-1]:.1f} s; {again} tried at more than one replica; "
        f"{findings.totals['unaccepted']} never accepted (connections that broke before any gateway had a record)"
    )


@contextlib.contextmanager
def _load(ground: Ground, config: StormConfig, folder: Path) -> Generator["subprocess.Popen[bytes]"]:
    host, port = ground.address()
    burst_period = Phase(config.burst_period, config.burst_period / 2, 0.0)
    adapters = swaps.folders() if config.adapters else {}
    plan = LoadConfig(
        host=host,
        port=port,
        key=KEY,
        model_path=MODEL_PATH,
        journal=folder / "client.jsonl",
        seed=config.seed,
        requests=config.requests,
        rate=config.rate,
        sdk_rate=config.sdk_rate,
        long=config.long,
        attacks=config.since is None,
        targets=(
            *_models(config, burst_period),
            *(Target(name, 0.25 / len(adapters)) for name in adapters),
        ),
        adapters=adapters,
        mixed={name: tuple(a.partition("/")[2] for a in one.adapters) for name, one in _asked(config).items()},
    )
    file = folder / "load.json"
    file.write_text(plan.model_dump_json())
    command = [*ground.lab.enter_command(), sys.executable, "-m", "tests.storm.load", str(file)]
    with subprocess.Popen(command, cwd=steps.ROOT) as load:
        try:
            yield load
        finally:
            if load.poll() is None:
                load.send_signal(signal.SIGTERM)
                try:
                    load.wait(60)
                except subprocess.TimeoutExpired:
                    load.kill()


def _models(config: StormConfig, bursts: Phase) -> Iterator[Target]:
    """What is asked beside adapters. The bursty Model is asked through its route, where there are routes."""
    rest = 0.5 if config.adapters else 0.75
    if config.sick:
        rest -= 0.2
        yield Target(sick.MODEL, 0.2)
    if config.nodes:
        # Longer bursts and pauses than the others': a node has to come, and to go.
        yield from (Target(nodes.MODEL, 0.12, Phase(100.0, 55.0)), Target(nodes.EITHER, 0.08))
    if config.rests:
        yield from (Target(rests.WORKS, 0.08), Target(rests.RESTS, 0.08, Phase(90.0, 25.0)))
    if not config.routes:
        yield from (Target(STEADY, rest), Target(BURSTY, 0.25, bursts))
    else:
        shares = {STEADY: rest - 0.35, routes.FRONT: 0.25, routes.OUT: 0.1}
        yield from (Target(name, share) for name, share in shares.items() if share > 0)
        yield Target(routes.TRIAL, 0.25, bursts)


def _asked(config: StormConfig) -> dict[str, journals.Routed]:
    """The routes, by the names that clients use."""
    if not config.routes:
        return {}
    return routes.asked(STORM, STEADY, BURSTY, swaps.STILL if config.adapters else None)


def _source(config: StormConfig) -> random.Random:
    return random.Random(config.seed)  # noqa: S311 - reproducible on purpose


def _seconds(config: StormConfig) -> float:
    """While the load lasts, nearly."""
    return config.requests / (config.rate + config.sdk_rate) * 0.95


def _faults(storm: faults.Storm, config: StormConfig, load: "subprocess.Popen[bytes]") -> None:
    """One fault after the other until the load ends; each failure of a fault itself is said and not fatal."""
    source, over = storm.random, storm.over
    with contextlib.suppress(AssertionError):  # where nothing is ever answered, the judge says so
        until(lambda: _answers(storm.journal.parent) or over(), _FLOWS_SECONDS)
    storm.say("the storm begins")
    ends = time.monotonic() + _seconds(config)
    if not config.faults:
        _pause(_seconds(config), load)
    while time.monotonic() < ends and config.faults:
        names = list(config.faults)
        if config.shuffled:
            source.shuffle(names)
        for name in names:
            _pause(min(config.gap * source.uniform(0.5, 1.5), ends - time.monotonic()), load)
            if config.one_by_one:
                with contextlib.suppress(AssertionError):
                    until(lambda: storm.ground.whole() or over(), max(0.0, ends - time.monotonic()))
            if time.monotonic() > ends or over():
                return
            storm.ground.revive(storm.say)
            try:
                faults.EVERY[name](storm)
            except (LabError, click.ClickException) as error:
                # A fault that could not be done is a weaker storm, not a lost request.
                storm.say(f"{name} could not be done: {error}")
        if config.once:
            _pause(ends - time.monotonic(), load)
            return


def _answers(folder: Path) -> bool:
    """Whether a client has read the first byte of an answer: until then a fault meets nobody."""
    return any(line["event"] == "first" for line in journals.lines(folder / "client.jsonl"))


def _pause(seconds: float, load: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        load.wait(max(0.0, seconds))
