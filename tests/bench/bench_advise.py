"""How near the advice comes to the truth: the engine model serves traffic by one rule, the advice sees what gateways
would have kept of it, and the same model then really serves the traffic by the other rule, or with the larger cache."""

import argparse
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import orjson

from shoal.api.tenant import Tenant
from shoal.core.access import index_keys
from shoal.core.advice.marks import prompt_marks
from shoal.core.advice.replay import WARM_UP
from shoal.core.advice.report import LARGER, AdviceReport, NotEnoughTraffic, advise
from shoal.core.routing import replica as routing_replica
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.prepared import Prepared
from shoal.gateway.traffic import TrafficSample
from shoal.metering.meter import Meter
from tests.bench import bench_routing
from tests.bench.advice_traffic import class_fact, window
from tests.bench.bench_routing import Fleet, loads
from tests.bench.routing_engine import Asked, Replica, Running
from tests.bench.routing_policies import Rule
from tests.bench.scaling_engine import Params

SERVED_BY = "Shoal before"
"""The rule whose traffic the advice sees."""


class Recorder:
    """A rule that also keeps where each request went."""

    def __init__(self, rule: Rule, placed: dict[int, Replica], done: dict[int, Running]) -> None:
        self._rule, self._placed, self._done = rule, placed, done
        self.reported, self.choose, self.began = rule.reported, rule.choose, rule.began
        self.heard = rule.heard

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        self._placed[asked.number] = replica
        self._rule.sent(asked, replica, now)

    def ended(self, one: Running, replica: Replica) -> None:
        if one.asked is not None:
            self._done[one.asked.number] = one
        self._rule.ended(one, replica)


@dataclass(frozen=True, slots=True)
class Served:
    placed: Sequence[Replica]
    done: Sequence[Running]
    hit: float
    """Of the prompt tokens after the warm-up."""


def serve(asked: Sequence[Asked], rule: str, fleet: Fleet, gateways: int, larger: int = 1) -> Served:
    placed: dict[int, Replica] = {}
    done: dict[int, Running] = {}
    make = bench_routing.RULES[rule]
    normal: Callable[[Fleet, int], Params] = bench_routing._params
    bench_routing._params = lambda f, n: replace(normal(f, n), kv_tokens=larger * normal(f, n).kv_tokens)
    try:
        bench_routing.replay(asked, lambda n, of: Recorder(make(n, of), placed, done), fleet, gateways)
    finally:
        bench_routing._params = normal
    runs = [done[one.number] for one in asked]
    cold = int(len(asked) * WARM_UP)
    hit = sum(run.cached for run in runs[cold:]) / sum(one.prompt for one in asked[cold:])
    return Served([placed[one.number] for one in asked], runs, hit)


def unlimited(asked: Sequence[Asked], done: Sequence[Running]) -> float:
    """Of one cache that forgets nothing: a block is there once a prompt with it was read, or an answer ended."""
    known: dict[int, float] = {}
    for one, run in zip(asked, done, strict=True):
        for name, _ in one.blocks:
            known[name] = min(known.get(name, run.first), run.first)
        known[one.answer[0]] = run.done
    found = 0
    cold = int(len(asked) * WARM_UP)
    for one in asked[cold:]:
        tokens = 0
        for name, size in one.blocks:
            if known[name] > one.at:
                break
            tokens += size
        found += min(one.prompt - 1, tokens)
    return found / sum(one.prompt for one in asked[cold:])


def cost() -> None:
    """CPU of the request path, the least of several runs."""

    def text(size: int) -> str:
        return "lorem ipsum " * (size // 12)

    turns = [{"role": "system", "content": text(1200)}]
    for _ in range(5):
        turns += [{"role": "user", "content": text(300)}, {"role": "assistant", "content": text(900)}]
    chats = {
        "200 characters": [{"role": "user", "content": text(200)}],
        "system prompt and question, 1,600": [turns[0], {"role": "user", "content": text(400)}],
        "five turns, 6,000": turns[:-1],
        "one of 50,000": [{"role": "user", "content": text(50_000)}],
        "one of 500,000": [{"role": "user", "content": text(500_000)}],
        "127 messages, 127,000": [
            {"role": "assistant" if number % 2 else "user", "content": text(1000)} for number in range(127)
        ],
    }
    sample, meter = TrafficSample(65_536), _meter()
    print("| prompt | marks | marks, CPU us | row, CPU us | bytes kept | JSON decoding, CPU us |")
    print("|---|---|---|---|---|---|")
    for name, messages in chats.items():
        fields: dict[str, object] = {"model": "bench", "messages": messages}
        found = prompt_marks(7, fields) or b""
        prepared = Prepared("/v1/chat/completions", "bench", True, False, False, _MODEL, None, 1, 1, marks=found)
        raw = orjson.dumps(fields)
        marks = _cpu_us(partial(prompt_marks, 7, fields))
        row = _cpu_us(partial(sample.add, meter, prepared))
        decoding = _cpu_us(partial(orjson.loads, raw))
        kept = sys.getsizeof(sample.newest(_MODEL.key, 0.0, 1)[1][0])
        print(f"| {name} | {len(found) // 8} | {marks:.1f} | {row:.1f} | {kept} | {decoding:.1f} |", flush=True)


_MODEL = ServedModel("bench/model", "uid", "bench/model", ("bench",), None)


def _meter() -> Meter:
    tenant = Tenant.model_validate({"metadata": {"name": "t"}, "spec": {"keys": [{"name": "key", "sha256": "0" * 64}]}})
    (identity,) = index_keys([tenant]).values()
    meter = Meter("id", "bench", identity, _MODEL, endpoint="/v1/chat/completions", model_name="bench", stream=True)
    meter.replica = routing_replica.Replica(
        "uid", "ns", "pod", "bench/model", "uid", "10.0.0.1", True, False, None, "l40s", None
    )
    meter.count(b'{"prompt_tokens": 100, "completion_tokens": 10}', "final")
    meter.outcome = "answered"
    meter.answer_began()
    return meter


def _cpu_us(work: Callable[[], object]) -> float:
    once = min(timeit.repeat(work, number=1, repeat=5, timer=time.process_time))
    number = max(20, min(20_000, int(0.02 / max(1e-7, once))))
    return min(timeit.repeat(work, number=number, repeat=9, timer=time.process_time)) / number * 1e6


def show(name: str, estimate: float | None, truth: float) -> None:
    known = "?" if estimate is None else f"{100 * estimate:.1f} %"
    off = "" if estimate is None else f"{100 * (estimate - truth):+.1f}"
    print(f"| {name} | {known} | {100 * truth:.1f} % | {off} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--cost", action="store_true", help="only what a request costs the gateway")
    parser.add_argument("--only", default="", help="traffic whose name contains this")
    options = parser.parse_args()
    cost()
    if options.cost:
        return
    for name, (asked, fleet) in loads(options.requests, options.gateways).items():
        if options.only not in name:
            continue
        served = serve(asked, SERVED_BY, fleet, options.gateways)
        seen = window(asked, served.done, served.placed, turns="Mooncake" not in name)
        classes = {at.gpu_class: class_fact(at) for at in served.placed}
        began = time.process_time()
        report = advise(seen, classes)
        seconds = time.process_time() - began
        print(f"\n{name}: {len(asked):,} requests; the advice took {seconds:.1f} s of CPU")
        if isinstance(report, NotEnoughTraffic):
            print(report.message)
            continue
        compare(report, asked, fleet, served, options.gateways)


def compare(report: AdviceReport, asked: Sequence[Asked], fleet: Fleet, served: Served, gateways: int) -> None:
    shares = report.shares
    print("| share of prompt tokens | advice | truth | off by |\n|---|---|---|---|")
    show("all reuse that there is", shares.unlimited, unlimited(asked, served.done))
    show("delivered, replayed", shares.replayed, served.hit)
    least = serve(asked, "least in flight", fleet, gateways).hit
    show("least in flight", shares.least_in_flight, least)
    show("round robin", shares.round_robin, serve(asked, "round robin", fleet, gateways).hit)
    show("saved by routing", report.saved.share if report.saved else None, served.hit - least)
    larger = serve(asked, SERVED_BY, fleet, gateways, LARGER).hit
    show("larger KV cache", shares.larger_kv, larger)
    for each in report.classes:
        slopes = {at.params.t1 for at in served.placed if at.gpu_class == each.gpu_class}
        rate = "?" if each.prefill_rate is None else f"{each.prefill_rate:,.0f}"
        truth = ", ".join(f"{1e3 / slope:,.0f}" for slope in sorted(slopes))
        print(f"prefill rate of {each.gpu_class}: {rate} tokens/s; the model's at short prompts: {truth}")
    print(f"pools: {report.pools.most_gain}; long: {report.long}; adapters: {report.adapters}")
    for note in report.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
