"""What routing is worth: time to first token, prefix hits and throughput by routing rule, over traffic with and without
structure. Virtual time; the rules of other routers are models of them. The folder in SHOAL_TRACES has the traces. Rows
of a trace that is not there are left out.

`--held-out`: the same over traffic, seeds and engines by which no weight was chosen, several seeds each
(routing_heldout.py).
"""

import argparse
import math
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core.routing.prefixes import MOST_OF_ALL, PrefixIndex
from tests.bench import routing_heldout as heldout
from tests.bench import routing_policies as rules
from tests.bench.routing_decision import decisions
from tests.bench.routing_engine import Asked, Replica, Running
from tests.bench.routing_engine import engine as new_engine
from tests.bench.routing_exact import Exact, Told
from tests.bench.routing_loads import conversations, mooncake
from tests.bench.routing_policies import Report, Rule, uid_of
from tests.bench.scaling_engine import Params, params

TRACES = Path(os.environ.get("SHOAL_TRACES") or "traces")
CONVERSATION, SYNTHETIC = "mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"
CODE = "azure_llm_2023_code.csv"
REPORT_SECONDS = 1.0
"""Between two reports of an agent; a queue that begins or a jump of the KV cache is reported sooner."""
SOON_SECONDS = 0.5
"""Between two looks of an agent at a busy engine."""


@dataclass(frozen=True, slots=True)
class Fleet:
    gpus: tuple[str, ...]
    slow: tuple[int, ...] = ()
    """Replicas of half the speed."""
    events: tuple[tuple[float, str, int], ...] = ()
    """(when, "join" or "leave", which replica)."""
    places: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    hit: float
    p50: float
    p99: float
    mean: float
    tokens_per_second: float
    loads: int
    cold: float
    """p99 of the first tenth of the requests, which is in no other figure."""


class Fresh:
    """When each engine was reported last, and how."""

    def __init__(self, number: int) -> None:
        self.next = REPORT_SECONDS * (0.1 + number * 0.37 % 1.0)
        self.at = 0.0
        self.waiting = 0
        self.kv = 0.0
        self.generated = 0

    def due(self, replica: Replica, now: float) -> bool:
        if now >= self.next:
            return True
        if now - self.at < SOON_SECONDS:
            return False
        return (
            bool(replica.waiting) != bool(self.waiting)
            or abs(replica.kv_used / replica.params.kv_tokens - self.kv) > 0.02
        )


def replay(
    asked: Sequence[Asked],
    make: Callable[[int, int], Rule],
    fleet: Fleet,
    gateways: int,
    seen: Callable[[Running, Sequence[Rule]], None] = lambda _sent, _kinds: None,
) -> Result:
    """`seen` is called after each request with the rules of the gateways."""
    engines: list[Replica] = []
    fresh: dict[int, Fresh] = {}
    events = sorted(fleet.events)
    joins = {which for _, what, which in events if what == "join"}

    def start(number: int, now: float) -> None:
        engines.append(
            new_engine(number, _params(fleet, number), fleet.gpus[number].partition(":")[0], now, fleet.places)
        )
        fresh[number] = Fresh(number)
        fresh[number].next += now
        fresh[number].at = now

    for number in range(len(fleet.gpus)):
        if number not in joins:
            start(number, 0.0)
    kinds = [make(n, gateways) for n in range(gateways)]
    sent: list[Running] = []
    for one in asked:
        while events and events[0][0] <= one.at:
            when, what, which = events.pop(0)
            if what == "join":
                start(which, when)
            else:
                next(e for e in engines if e.number == which).leaving = True
        for engine in engines:
            advance(engine, one.at, kinds, fresh[engine.number])
            kinds[one.gateway].heard(engine, one.at)
        able = [e for e in engines if not e.leaving]
        kind = kinds[one.gateway]
        replica = kind.choose(one, able, one.at)
        sent.append(replica.send(one, one.at))
        kind.sent(one, replica, one.at)
        seen(sent[-1], kinds)
    for engine in engines:
        advance(engine, 1e9, kinds, fresh[engine.number])
    return result(asked, sent, engines)


def _params(fleet: Fleet, number: int) -> Params:
    gpu, _, size = fleet.gpus[number].partition("/")
    found = params(gpu)
    if size:
        found = _SIZES[size](found)
    return found.scaled(2.0) if number in fleet.slow else found


def _resized(by: Params, step: float, context: float, prefill: float, kv_tokens: int) -> Params:
    return replace(
        by,
        t0=by.t0 * step,
        t1=by.t1 * step,
        t2=by.t2 * step,
        kd=by.kd * context,
        kp=by.kp * prefill,
        kv_tokens=kv_tokens,
    )


_SIZES: dict[str, Callable[[Params], Params]] = {
    # Llama-3.1-70B over four GPUs: 8.8 times the weights, 80 layers of 64 heads in place of 32 of 32; 85 % of the
    # speed of four.
    "70b-tp4": lambda by: _resized(by, 8.8 / 3.4, 2.5 / 3.4, 5.0 / 3.4, 430_000),
    # Llama-3.2-1B: 0.15 times the weights, 16 layers of heads of half the size.
    "1b": lambda by: _resized(by, 0.154, 0.25, 0.25, 500_000),
    # A KV cache that holds half a dozen long prompts.
    "small": lambda by: replace(by, kv_tokens=20_000, max_running=16),
}


def advance(engine: Replica, now: float, kinds: Sequence[Rule], fresh: Fresh) -> None:
    engine.advance(now)
    for one in engine.began:
        if one.asked is not None:
            kinds[one.asked.gateway].began(one, engine)
    for one in engine.ended:
        if one.asked is not None:
            kinds[one.asked.gateway].ended(one, engine)
    engine.began.clear()
    engine.ended.clear()
    if fresh.due(engine, now) and now < 1e9:
        passed = max(1e-3, now - fresh.at)
        known = Report(
            now,
            engine.running,
            len(engine.waiting) + len(engine.loading),
            engine.uncached_waiting,
            engine.kv_used,
            engine.params.kv_tokens,
            engine.params.max_running,
            (engine.generated_tokens - fresh.generated) / passed,
            frozenset(engine.adapters) if engine.places else frozenset(),
        )
        fresh.next, fresh.at, fresh.waiting = now + REPORT_SECONDS, now, len(engine.waiting)
        fresh.kv, fresh.generated = engine.kv_used / engine.params.kv_tokens, engine.generated_tokens
        for kind in kinds:
            kind.reported(uid_of(engine), known)


def result(asked: Sequence[Asked], sent: Sequence[Running], engines: Sequence[Replica]) -> Result:
    cold = len(asked) // 10  # caches and what was learned are empty at first, for every rule
    waits = sorted(one.first - a.at for one, a in zip(sent[cold:], asked[cold:], strict=True))
    prompt = sum(a.prompt for a in asked)
    tokens = prompt + sum(a.answer[1] for a in asked)
    last = max(one.done for one in sent)
    return Result(
        sum(one.cached for one in sent[cold:]) / sum(a.prompt for a in asked[cold:]),
        waits[len(waits) // 2],
        waits[int(len(waits) * 0.99)],
        sum(waits) / len(waits),
        tokens / (last - asked[0].at),
        sum(e.loads for e in engines),
        sorted(one.first - a.at for one, a in zip(sent[:cold], asked[:cold], strict=True))[int(cold * 0.99)],
    )


RULES: dict[str, Callable[[int, int], Rule]] = {
    "round robin": rules.RoundRobin,
    "least in flight": rules.LeastInFlight,
    "smg cache_aware (model)": rules.CacheAware,
    "smg least_load (model)": rules.LeastLoad,
    "Shoal before": rules.Before,
    "Shoal, heads only": rules.Scored,
    "Shoal, KV events": Exact,
    "Shoal": Told,
    "ideal": rules.Ideal,
}


def loads(count: int, gateways: int, seed: int = 3) -> dict[str, tuple[list[Asked], Fleet]]:
    """Traffic and the fleet for it, by name. The weights were chosen with seed 3."""
    l40s = ("l40s:bfloat16",) * 8
    h100 = "h100_sxm:bfloat16"
    found: dict[str, tuple[list[Asked], Fleet]] = {}
    if (TRACES / CONVERSATION).exists():
        found["Mooncake conversation"] = (mooncake(TRACES, 4 * count, 1.0, gateways, seed=seed + 4), Fleet((h100,) * 6))
    chat = conversations(
        count,
        36.0,
        gateways,
        systems=50,
        system_tokens=(0, 60, 400),
        turns=5,
        question=(20, 1500),
        answers=(50, 600),
        seed=seed,
    )
    found["multi-turn, as ShareGPT"] = (chat, Fleet(l40s))
    shared = conversations(
        count,
        22.0,
        gateways,
        systems=100,
        system_tokens=(1500, 3000, 6000),
        turns=1,
        question=(20, 400),
        answers=(20, 300),
        seed=seed,
    )
    found["shared system prompts"] = (shared, Fleet(l40s))
    adapters = conversations(
        count,
        24.0,
        gateways,
        systems=2000,
        system_tokens=(200, 800, 1500),
        turns=2,
        question=(20, 400),
        answers=(20, 300),
        adapters=2000,
        seed=seed,
    )
    found["2,000 adapters"] = (adapters, Fleet(l40s, places=200))
    unique = conversations(
        count,
        24.0,
        gateways,
        systems=1,
        system_tokens=(0,),
        turns=0.01,
        question=(300, 4000),
        answers=(20, 400),
        seed=seed,
    )
    found["unique single-turn"] = (unique, Fleet(l40s))
    found["multi-turn, one at half speed"] = (chat, Fleet(l40s, slow=(3,)))
    found["unique, one at half speed"] = (unique, Fleet(l40s, slow=(3,)))
    end = chat[-1].at
    moves = ((end * 0.25, "leave", 1), (end * 0.4, "join", 8), (end * 0.6, "leave", 4), (end * 0.7, "join", 9))
    found["multi-turn, joins and leaves"] = (chat, Fleet((*l40s, *l40s[:2]), events=moves))
    found["multi-turn, L40S and H100"] = (chat, Fleet((*l40s[:4], h100)))
    return found


def held_out(count: int, gateways: int, seed: int) -> dict[str, tuple[list[Asked], Fleet]]:
    """Traffic and fleets that are no part of `loads`."""
    l40s, h100, l4 = "l40s:bfloat16", "h100_sxm:bfloat16", "l4:bfloat16"
    eight = Fleet((l40s,) * 8)
    found = {
        "agent loops": (heldout.agents(2.5)(count, gateways, seed), eight),
        "jobs and chat": (heldout.jobs_and_chat(count, gateways, seed), eight),
        "shuffled documents": (heldout.documents(count, gateways, seed), eight),
        "chat in bursts": (heldout.bursts(count, gateways, seed), eight),
        "70B on 4 H100, chat": (heldout.chat(30.0)(count, gateways, seed), Fleet((f"{h100}/70b-tp4",) * 6)),
        "70B on 4 H100, agent loops": (heldout.agents(6.0)(count, gateways, seed), Fleet((f"{h100}/70b-tp4",) * 6)),
        "1B on L4, chat": (heldout.chat(45.0)(count, gateways, seed), Fleet(("l4:bfloat16/1b",) * 8)),
        "1B on L4, unique": (heldout.short(70.0)(count, gateways, seed), Fleet(("l4:bfloat16/1b",) * 8)),
        "L4, L40S and H100, chat": (heldout.chat(24.0)(count, gateways, seed), Fleet((l4, l4, l40s, l40s, l40s, h100))),
        "L4, L40S and H100, unique": (
            heldout.short(30.0)(count, gateways, seed),
            Fleet((l4, l4, l40s, l40s, l40s, h100)),
        ),
        "unique, short and very long": (heldout.lengths(count, gateways, seed), Fleet((h100,) * 6)),
        "shared prompts, small caches": (
            heldout.behind_prompts(14.0)(count, gateways, seed),
            Fleet((f"{l40s}/small",) * 4),
        ),
        "40 replicas, chat": (heldout.chat(150.0)(3 * count, gateways, seed), Fleet((l40s,) * 40)),
    }
    if (TRACES / CODE).exists():
        found["Azure code, unique"] = (heldout.coding(TRACES, 6.0)(count, gateways, seed), eight)
    if (TRACES / SYNTHETIC).exists():
        found["Mooncake synthetic"] = (heldout.questions(TRACES, 1.0)(4000, gateways, seed), Fleet((h100,) * 6))
    return found


def compare(options: argparse.Namespace, chosen: dict[str, Callable[[int, int], Rule]]) -> None:
    """The part `--held-out`: mean over the seeds, with the least and the most."""
    for gateways in options.gateways:
        print(
            f"\n{gateways} gateways, {options.requests:,} requests, seeds {options.seeds}: p99 of the TTFT in seconds"
        )
        print("'to smg' is p99 to the better of its rules, 'first' p99 of the first tenth to the better of its rules.")
        print(f"| traffic | {' | '.join(chosen)} | hits | to smg | first |")
        print(f"|---|{'---|' * (3 + len(chosen))}")
        by_seed = [
            {
                **{f"{name}, other seeds": each for name, each in loads(options.requests, gateways, seed).items()},
                **held_out(options.requests, gateways, seed),
            }
            for seed in options.seeds
        ]
        kept: dict[str, dict[str, list[Result]]] = {}
        for name in by_seed[0]:
            if options.only not in name:
                continue
            rows = {
                rule: [replay(traffic[name][0], make, traffic[name][1], gateways) for traffic in by_seed]
                for rule, make in chosen.items()
            }
            kept[name] = rows
            ours, smg = rows.get("Shoal", []), [found for rule, found in rows.items() if rule.startswith("smg")]
            cells = [_spread([one.p99 for one in found], 3) for found in rows.values()]
            hits = f"{100 * sum(one.hit for one in ours) / max(1, len(ours)):.0f} %"
            to_smg = [one.p99 / min(found[at].p99 for found in smg) for at, one in enumerate(ours) if smg]
            first = [one.cold / min(found[at].cold for found in smg) for at, one in enumerate(ours) if smg]
            print(f"| {name} | {' | '.join(cells)} | {hits} | {_spread(to_smg, 2)} | {_spread(first, 2)} |", flush=True)
        _knowledge(gateways, kept)


def _knowledge(gateways: int, rows: dict[str, dict[str, list[Result]]]) -> None:
    """What the kinds of knowledge of prefix caches are worth: median and hits of the rules that have some, and what
    `Shoal` has in the mean and in throughput."""
    known = ("smg", "Shoal", "ideal")
    names = [rule for rule in RULES if rule.startswith(known) and all(rule in found for found in rows.values())]
    print(f"\n{gateways} gateways: p50 of the TTFT in seconds, and prompt tokens from the cache")
    print(
        "'tokens/s' is throughput of Shoal to that of smg's least_load, 'mean' its mean TTFT to that of the best other."
    )
    print(f"| traffic | {' | '.join(names)} | tokens/s | mean |")
    print(f"|---|{'---|' * (2 + len(names))}")
    for name, found in rows.items():
        cells = [
            f"{_mean(one.p50 for one in found[rule]):.3f}, {100 * _mean(one.hit for one in found[rule]):.0f} %"
            for rule in names
        ]
        ours, least_load = found.get("Shoal", []), found.get("smg least_load (model)", [])
        others = [
            each for rule, each in found.items() if not rule.startswith("Shoal,") and rule not in ("Shoal", "ideal")
        ]
        speeds = [a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, least_load, strict=False)]
        means = [one.mean / min(other[at].mean for other in others) for at, one in enumerate(ours) if others]
        print(f"| {name} | {' | '.join(cells)} | {_spread(speeds, 2)} | {_spread(means, 2)} |", flush=True)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean, least and most."""
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def costs() -> None:
    """The part `--cost`: CPU and memory of what gateways know of prefix caches, and a gateway that starts again."""
    dice = random.Random(1)  # noqa: S311
    index, keys = PrefixIndex(), [dice.getrandbits(31) for _ in range(MOST_OF_ALL // 20)]
    prompts = [[n * 2000 << 32 | key ^ n for n in range(1, 21)] for key in keys]
    tracemalloc.start()
    for at, prompt in enumerate(prompts):
        index.reported(f"pod-{at % 40}", 10**9)
        index.sent(f"pod-{at % 40}", prompt)
    megabytes = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    print(f"{len(index):,} marks of 40 replicas: {megabytes:.0f} MiB. CPU of a prompt of 20 marks, best of 7:")
    calls: dict[str, Callable[[int], object]] = {
        "found at one replica": lambda n: index.held(prompts[n]),
        "not found": lambda n: index.held([point ^ 1 << 20 for point in prompts[n]]),
        "sent again": lambda n: index.sent(f"pod-{n % 40}", prompts[n]),
        "sent, full index": lambda n: index.sent("pod-1", [point ^ dice.getrandbits(31) for point in prompts[n]]),
    }
    for name, call in calls.items():
        best = math.inf
        for _ in range(7):
            began = time.process_time()
            for n in range(1000):
                call(n)
            best = min(best, (time.process_time() - began) * 1e3)
        print(f"  {name}: {best:.1f} us")
    decisions()
    for traffic in ("multi-turn, as ShareGPT", "agent loops"):
        for gateways in (2, 8):
            print(f"{traffic}, {gateways} gateways, one starts again: {_restarted(traffic, gateways)}")


def _restarted(traffic: str, gateways: int) -> str:
    """Share of prompt tokens from the cache at a gateway that starts again, in hundreds of its requests."""
    asked, fleet = {**loads(4000, gateways, 201), **held_out(4000, gateways, 201)}[traffic]
    own: list[Running] = []
    count = 0

    def seen(sent: Running, kinds: Sequence[Rule]) -> None:
        nonlocal count
        count += 1
        if count == len(asked) // 2 and isinstance(first := kinds[0], Told):
            first.restart()
        if sent.asked is not None and sent.asked.gateway == 0 and len(asked) // 4 < count:
            own.append(sent)

    replay(asked, Told, fleet, gateways, seen)
    half = sum(1 for one in own if one.asked is not None and one.asked.number < len(asked) // 2)
    parts = {"before": own[:half], "first 50": own[half : half + 50], "rest": own[half + 50 :]}
    return ", ".join(
        f"{name} {100 * sum(one.cached for one in part) / max(1, sum(one.prompt for one in part)):.0f} %"
        for name, part in parts.items()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--gateways", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--only", default="", help="traffic whose name contains this")
    parser.add_argument("--rules", default="", help="rules whose name contains one of these, comma-separated")
    parser.add_argument("--held-out", action="store_true", help="traffic by which no weight was chosen")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103], help="of the part --held-out")
    parser.add_argument("--cost", action="store_true", help="CPU, memory, and a gateway that starts again")
    options = parser.parse_args(arguments)
    random.seed(1)
    for trace in (CONVERSATION, CODE, SYNTHETIC) if options.held_out else () if options.cost else (CONVERSATION,):
        if not (TRACES / trace).exists():
            print(f"routing: {trace} is not in the folder that SHOAL_TRACES names, so its rows are left out")
    if options.cost:
        costs()
        return
    chosen = {rule: make for rule, make in RULES.items() if any(word in rule for word in options.rules.split(","))}
    if options.held_out:
        compare(options, chosen)
        return
    for gateways in options.gateways:
        for name, (asked, fleet) in loads(options.requests, gateways).items():
            if options.only not in name:
                continue
            print(f"\n{name}: {len(asked):,} requests, {len(fleet.gpus)} replicas, {gateways} gateways")
            print("| rule | hits | TTFT p50 | p99 | mean | tokens/s | p99 to best other | CPU s |")
            print("|---|---|---|---|---|---|---|---|")
            results: dict[str, Result] = {}
            seconds: dict[str, float] = {}
            for rule, make in chosen.items():
                began = time.process_time()
                results[rule] = replay(asked, make, fleet, gateways)
                seconds[rule] = time.process_time() - began
            for rule, one in results.items():
                others = [r.p99 for n, r in results.items() if n != "ideal" and n != rule]
                ratio = f"{one.p99 / min(others):.2f}" if others else ""
                print(
                    f"| {rule} | {100 * one.hit:.1f} % | {one.p50:.3f} s | {one.p99:.3f} s | {one.mean:.3f} s "
                    f"| {one.tokens_per_second:,.0f} | {ratio} | {seconds[rule]:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
