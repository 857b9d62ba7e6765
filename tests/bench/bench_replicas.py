"""Routing on four real engines: SGLang on the CPU with the tiny model, behind Shoal's gateways, smg and simple rules.

    python -m tests.bench.bench_replicas [--traffic chat|prompts|unique|mooncake|adapters ...] [--rounds 2]

- `chat`: conversations of several turns, which begin with one of a few system prompts, and do not fit into all caches
  together.
- `prompts`: single questions behind one of a few long system prompts.
- `unique`: single questions that share nothing.
- `mooncake`: the public trace of Moonshot, in which a block of 512 tokens has become one of a few words: what
  prompts share is the trace's own.
- `adapters`, `adapters-zipf`: conversations with 2,000 LoRA adapters, each with a system prompt of its own, of which
  some come much more often than others (`replica_adapters.py`).

Each rule has two routers, which clients take in turns. Clients run in this process, and nothing else does. Each
router, each engine, and Shoal's agents together are a process in a session of its own, to which Linux gives the same
share of a CPU. Each engine computes with one thread: with more, engines that share cores wait for each other's
threads and burn ten times as much CPU. The simple rules have a small proxy (`replica_proxy`); "by conversation"
sends all turns of one to one replica and knows the system prompts: about the best that a rule can do with equal
replicas.

First the engines are warmed up. Then come rounds: in each all rules, one after the other, with empty caches, routers
that have just started, and the same traffic, which differs between rounds. A row has the answers of all rounds
together; *settled* leaves out the first tenth of the requests of each round, as `bench_routing` does: all clients begin
at once, so these meet empty caches and routers that know nothing. A row's CPU is that of all processes that the rule
has beside the engines. Each engine has 0.4 of a core and no more (`cpu_quota`, which needs root): else a rule that
sends all to one engine would not lack the cores of the others.

The model is the tiny one made larger (`replica_model`): to read a prompt is most of an engine's work then, as on a GPU.
With the tiny one itself an engine spends more on HTTP and on making tokens of text, of the same CPU. On two cores it
reads 4,000 tokens a second, and a step of the answer takes 13 ms.
Needs 7 GB, and images/engine-cpu/install.sh: without it nothing is measured.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_args

import aiohttp

from shoal.runtime import logs
from tests.bench import replica_adapters
from tests.bench.cpu_quota import CPUQuota, NoQuota, cpu_quota
from tests.bench.replica_clients import Answer, Entrance, all_ask, session_of_clients
from tests.bench.replica_model import make_larger
from tests.bench.replica_processes import NotStarted
from tests.bench.replica_routers import ROUTERS, RULES, Fleet, Rule
from tests.bench.replica_traffic import MOONCAKE, TRAFFIC, Talk, talks_of
from tests.support.engines import ADMIN_KEY, MODEL, EngineProcess, Kind, running_engine, sglang_launcher

ENGINES: Final = 4
START_SECONDS: Final = 900.0
MORE: Final = ("--max-running-requests", "16", "--max-queued-requests", "256", "--context-length", "4096")
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Of an engine's environment."""
WARM_UP: Final = 1000
"""The number of the round that is not measured."""
WARM_UP_TALKS: Final = 48
FLUSH_SECONDS: Final = 60.0
COLUMNS: Final = (
    "rule",
    "prompt tokens from the cache",
    "TTFT p50 s",
    "p90 s",
    "p99 s",
    "settled p99 s",
    "all rounds s",
    "router CPU ms per request",
    "answers",
    "failed",
)
TUNED_COLUMNS: Final = ("loads", "evictions from slots")


@dataclass(slots=True)
class Result:
    """Of one rule, over all rounds."""

    answers: list[Answer] = field(default_factory=list[Answer])
    settled: list[float] = field(default_factory=list[float])
    """Seconds until the first token, without the first tenth of the requests of each round."""
    failed: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    loads: int = 0
    evictions: int = 0
    missing: str | None = None
    """Why it is not measured."""

    def take(self, answers: Sequence[Answer], failed: int, *, seconds: float, cpu_seconds: float) -> None:
        """What one round gave."""
        self.answers += answers
        begun = sorted(answers, key=lambda answer: answer.began)
        self.settled += (answer.seconds for answer in begun[len(begun) // 10 :])
        self.failed += failed
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds

    def cells(self, *, tuned: bool) -> list[str]:
        if self.missing is not None:
            return [f"not measured: {self.missing}"]
        if not self.answers:
            return [f"no answers, {self.failed} failed"]
        waits = sorted(answer.seconds for answer in self.answers)
        hits = sum(a.cached for a in self.answers) / sum(a.prompt for a in self.answers)
        return [
            f"{100 * hits:.1f} %",
            *(f"{waits[int(len(waits) * part)]:.3f}" for part in (0.5, 0.9, 0.99)),
            f"{sorted(self.settled)[int(len(self.settled) * 0.99)]:.3f}",
            f"{self.seconds:.1f}",
            f"{1000 * self.cpu_seconds / len(waits):.1f}",
            str(len(waits)),
            str(self.failed),
            *((str(self.loads), str(self.evictions)) if tuned else ()),
        ]


async def empty_caches(session: aiohttp.ClientSession, engines: Sequence[EngineProcess]) -> None:
    """Raises TimeoutError: an engine still computes."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with asyncio.timeout(FLUSH_SECONDS):
        for engine in engines:
            while True:
                async with session.post(f"{engine.url}/flush_cache", headers=headers) as response:
                    await response.read()
                if response.status == 200:
                    break
                await asyncio.sleep(0.2)


async def run(
    rule: Rule, result: Result, folder: Path, session: aiohttp.ClientSession, fleet: Fleet, talks: Sequence[Talk],
    at_once: int,
) -> None:  # fmt: skip
    """One rule in one round."""
    await empty_caches(session, fleet.engines)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            async with rule.running(Path(own), fleet) as routers:
                loads = replica_adapters.Loads(fleet.engines)
                cpu, began = routers.cpu_seconds(), time.monotonic()
                answers, failed = await all_ask(session, routers.entrance, talks, at_once, len(fleet.engines))
                seconds, cpu = time.monotonic() - began, routers.cpu_seconds() - cpu
        except (NotStarted, OSError) as error:
            print(f"{rule.name}: {error}", file=sys.stderr)
            result.missing = type(error).__name__
            return
    result.take(answers, failed, seconds=seconds, cpu_seconds=cpu)
    if fleet.adapters is not None:
        loaded, evicted = loads.counted()
        result.loads += loaded
        result.evictions += evicted
        await replica_adapters.unload_all(session, fleet.engines)
    print(f"{rule.name}: {seconds:.1f} s, {len(answers)} answers", file=sys.stderr)


async def warm_up(session: aiohttp.ClientSession, fleet: Fleet, talks: Sequence[Talk], at_once: int) -> None:
    """Not measured, and without routers."""
    await all_ask(session, Entrance(tuple(fleet.urls)), talks[:WARM_UP_TALKS], at_once, len(fleet.engines))
    if fleet.adapters is not None:
        await replica_adapters.unload_all(session, fleet.engines)


async def measure(options: argparse.Namespace, traffic: str, folder: Path, fleet: Fleet) -> None:
    """All rules with this kind of traffic."""
    rounds = [talks_of(traffic, options, number) for number in range(options.rounds)]
    results = {rule: Result() for rule in RULES if rule.name in options.rules}
    count = sum(len(talk.turns) for talks in rounds for talk in talks)
    print(f"\n{traffic}: {count} requests in {options.rounds} rounds, {options.at_once} at once, ", end="")
    print(f"{ENGINES} engines, {ROUTERS} routers\n", flush=True)
    async with session_of_clients() as session:
        if fleet.adapters is not None:
            warming = talks_of(traffic, options, WARM_UP)
            asked = {talk.adapter for talks in (*rounds, warming) for talk in talks if talk.adapter is not None}
            seconds = await replica_adapters.introduce(session, fleet.engines, fleet.adapters, asked)
            print(f"{replica_adapters.ADAPTERS:,} adapters, {len(asked)} of them asked for; ", end="")
            print(f"an engine loads one in {1000 * seconds:.0f} ms\n", flush=True)
        await warm_up(session, fleet, talks_of(traffic, options, WARM_UP), options.at_once)
        for number, talks in enumerate(rounds, 1):
            print(f"{traffic}, round {number}", file=sys.stderr)
            for rule, result in results.items():
                if result.missing is None:
                    await run(rule, result, folder, session, fleet, talks, options.at_once)
    tuned = fleet.adapters is not None
    columns = (*COLUMNS, *(TUNED_COLUMNS if tuned else ()))
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for rule, result in results.items():
        print(f"| {rule.name} | {' | '.join(result.cells(tuned=tuned))} |", flush=True)


async def measure_all(options: argparse.Namespace, traffics: Sequence[str], folder: Path, fleet: Fleet) -> None:
    for traffic in traffics:
        await measure(options, traffic, folder, fleet)


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """In which the engines' model differs from the tiny one; empty: it is that, or there is the simulator."""
    if options.kind != "sglang" or not options.layers:
        return {}
    return {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": options.layers}


def quotas_of(stack: contextlib.ExitStack, cpus: float) -> list[CPUQuota]:
    """One for each engine; none where the machine has none."""
    try:
        return [stack.enter_context(cpu_quota(f"engine-{n}", cpus)) for n in range(ENGINES)] if cpus else []
    except NoQuota as error:
        print(f"the engines share the machine's CPU: {error}")
        return []


def with_engines(options: argparse.Namespace, traffics: Sequence[str], *, tuned: bool) -> None:
    """All rules with these kinds of traffic; `tuned`: on engines with adapters."""
    sizes = sizes_of(options)
    arguments = (*MORE, *(replica_adapters.arguments(options.slots) if tuned else ()))
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as stack:
        folder = Path(at)
        model = make_larger(folder / "model", sizes) if sizes else MODEL
        environment = {**ONE_THREAD, **replica_adapters.logging_of(folder)}
        quotas = quotas_of(stack, options.engine_cpus)
        engines = [
            stack.enter_context(
                running_engine(
                    options.kind,
                    folder / f"engine-{n}",
                    *arguments,
                    wait=False,
                    environment=environment,
                    model=model,
                )
            )
            for n in range(ENGINES)
        ]
        for engine in engines:
            engine.wait_ready(START_SECONDS)
        for engine, quota in zip(engines, quotas, strict=False):
            quota.take_session(engine.process.pid)
        adapters = asyncio.run(replica_adapters.published(folder / "adapters", options.slots, model)) if tuned else None
        asyncio.run(measure_all(options, traffics, folder, Fleet(engines, adapters)))


def main(options: argparse.Namespace) -> None:
    if options.kind != "sim":
        try:
            sglang_launcher()
        except FileNotFoundError as error:
            print(f"not measured: {error}")
            return
    logs.configure("error")
    for tuned in (False, True):
        if chosen := [each for each in options.traffic if each.startswith("adapters") == tuned]:
            with_engines(options, chosen, tuned=tuned)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for. Traffic of a trace that is not there is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=get_args(Kind), default="sglang", help="sim: the simulator, to try this out")
    parser.add_argument("--traffic", choices=tuple(TRAFFIC), nargs="+", default=["chat"])
    names = [rule.name for rule in RULES]
    parser.add_argument("--rules", choices=names, nargs="+", default=names, metavar="RULE", help=f"of {names}")
    where = Path(os.environ.get("SHOAL_TRACES") or "traces")
    parser.add_argument("--traces", type=Path, default=where, help="has mooncake's trace")
    parser.add_argument("--rounds", type=int, default=2, help="in each all rules, one after the other")
    parser.add_argument("--requests", type=int, default=160, help="in a round, of all traffic but chat")
    parser.add_argument("--conversations", type=int, default=40, help="in a round of chat")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--systems", type=int, default=6)
    parser.add_argument("--system-words", type=int, default=300)
    parser.add_argument("--slots", type=int, default=8, help="of an engine, for adapters")
    parser.add_argument("--engine-cpus", type=float, default=0.4, help="what one engine has at most; 0: no bound")
    parser.add_argument("--layers", type=int, default=4, help="of the model; 0: the tiny model")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    if "mooncake" in chosen.traffic and not (chosen.traces / MOONCAKE).exists():
        print(f"mooncake: {MOONCAKE} is not in --traces or SHOAL_TRACES, so it is left out")
        chosen.traffic = [each for each in chosen.traffic if each != "mooncake"]
    return chosen


if __name__ == "__main__":
    main(options_of())
