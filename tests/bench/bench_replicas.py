"""Routing on four real engines: SGLang on the CPU with the tiny model, behind Shoal's gateway, smg and simple rules.

    python -m tests.bench.bench_replicas [--conversations 40] [--kind sglang]

Conversations of several turns begin with one of a few system prompts, and do not fit into all caches together. Each
rule has two routers, which take turns, and begins with empty caches. "By conversation" sends all turns of one to one
replica and knows the system prompts: about the best that a rule can do with equal replicas. The tiny model reads a
prompt in no time, so the share of prompt tokens from the cache says more than seconds do. Needs
7 GB, and images/engine-cpu/install.sh: without it nothing is measured.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast, get_args

import aiohttp

from shoal.core.capabilities import Capability
from shoal.core.routing.prefixes import points_of
from shoal.core.routing.resolve import ServedModel
from shoal.engine.sglang.client import SGLangClient
from shoal.gateway.prefixes import TELL_SECONDS
from shoal.net.installkey import KeyRing
from tests.support.controlplane import free_ports
from tests.support.engines import ADMIN_KEY, SERVED, EngineProcess, Kind, running_engine, sglang_launcher
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, replica, tenant

ENGINES: Final = 4
ROUTERS: Final = 2
LOOK_SECONDS: Final = 0.5
"""Between two looks of an agent at a busy engine."""
START_SECONDS: Final = 900.0
MORE = ("--max-running-requests", "16", "--max-queued-requests", "256", "--context-length", "4096")
WORDS: Final = (
    "river",
    "stone",
    "cloud",
    "paper",
    "engine",
    "window",
    "garden",
    "letter",
    "market",
    "bridge",
    "winter",
)


@dataclass(frozen=True, slots=True)
class Answer:
    seconds: float
    """Until the first token."""
    prompt: int
    cached: int
    text: str


@dataclass(slots=True)
class Rule:
    """Where requests of one kind of router go: `url` of a request, by its number, conversation and system prompt."""

    name: str
    url: Callable[[int, int, int], str]
    key: str = ENGINE_KEY
    model: str = SERVED
    ended: Callable[[str], None] = lambda _url: None
    answers: list[Answer] = field(default_factory=list[Answer])
    failed: int = 0


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


async def converse(
    session: aiohttp.ClientSession, rule: Rule, number: int, system: tuple[int, str], turns: int, dice: random.Random
) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": system[1]}]
    for turn in range(turns):
        messages.append({"role": "user", "content": text(dice, dice.randrange(30, 90))})
        url = rule.url(number * turns + turn, number, system[0])
        try:
            answer = await ask(session, url, rule, messages)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if not rule.failed:
                print(f"{rule.name}: {type(error).__name__} {error}", file=sys.stderr)
            rule.failed += 1
            return
        finally:
            rule.ended(url)
        rule.answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        await asyncio.sleep(dice.random() * 2.0)


async def ask(session: aiohttp.ClientSession, url: str, rule: Rule, messages: Sequence[dict[str, str]]) -> Answer:
    body = {
        "model": rule.model,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, said, usage = time.monotonic(), 0.0, "", dict[str, Any]()
    headers = {"authorization": f"Bearer {rule.key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"{response.status} {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            choices = cast("list[dict[str, Any]]", event.get("choices") or [])
            for choice in choices:
                if content := choice.get("delta", {}).get("content"):
                    first = first or time.monotonic()
                    said += content
            usage = event.get("usage") or usage
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    return Answer((first or time.monotonic()) - began, usage["prompt_tokens"], details.get("cached_tokens") or 0, said)


async def run(session: aiohttp.ClientSession, rule: Rule, engines: Sequence[EngineProcess], asked: Any) -> str:
    for engine in engines:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with session.post(f"{engine.url}/flush_cache", headers=headers) as response:
            await response.read()
    dice = random.Random(asked.seed)  # noqa: S311 - every rule gets the same
    systems = [(n, text(dice, asked.system_words)) for n in range(asked.systems)]
    slots = asyncio.Semaphore(asked.at_once)

    async def one(number: int) -> None:
        own = random.Random(1000 * asked.seed + number)  # noqa: S311
        async with slots:
            await converse(session, rule, number, systems[own.randrange(len(systems))], asked.turns, own)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(asked.conversations):
            group.create_task(one(number))
    waits = sorted(answer.seconds for answer in rule.answers)
    if not waits:
        return f"| {rule.name} | no answers, {rule.failed} failed |"
    hits = sum(a.cached for a in rule.answers) / sum(a.prompt for a in rule.answers)
    return (
        f"| {rule.name} | {100 * hits:.1f} % | {waits[len(waits) // 2]:.3f} | {waits[int(len(waits) * 0.99)]:.3f} "
        f"| {time.monotonic() - began:.0f} | {len(waits)} | {rule.failed} |"
    )


class OneKey(KeyRing):
    """The engines have a key of their own, to which no install key leads."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None, frozenset(get_args(Capability)))


@contextlib.asynccontextmanager
async def gateways(
    folder: Path, engines: Sequence[EngineProcess], *, routing: str, shared: bool
) -> AsyncGenerator[list[GatewayUnderTest]]:
    """Two gateways that see the load of the engines, and with `shared` each other's prompts."""
    async with contextlib.AsyncExitStack() as stack:
        found: list[GatewayUnderTest] = []
        for number in range(ROUTERS):
            own = folder / f"gateway-{routing}-{shared}-{number}"
            own.mkdir()
            it = await stack.enter_async_context(gateway(own, routing=routing))
            it.models[SERVED] = MODEL
            it.tenants["acme"] = tenant(models=[SERVED])
            for at, engine in enumerate(engines, 1):
                it.pods[f"{SERVED}-{at}"] = replace(replica(at, MODEL), engine="SGLang")
                it.ports[f"pod-{at}"] = engine.port
            it.app.key_ring = OneKey(own)
            it.changed()
            found.append(it)
        for it in found:
            others = [other.fleet.scores for other in found if other is not it]
            if not shared and it.fleet.scores is not None:
                # As before: the prompts' heads alone.
                it.fleet.scores.prefixes.sent = lambda uid, points: None
                continue

            def told(uid: str, marks: bytes, others: Any = others) -> None:
                def hear() -> None:
                    for scores in others:
                        scores.told(uid, points_of(marks), time.monotonic())

                asyncio.get_running_loop().call_later(TELL_SECONDS, hear)

            it.fleet.prompt_sent = told
        looking = [asyncio.create_task(look(found, at, engine)) for at, engine in enumerate(engines, 1)]
        try:
            await asyncio.sleep(2 * LOOK_SECONDS)
            yield found
        finally:
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)


async def look(found: Sequence[GatewayUnderTest], at: int, engine: EngineProcess) -> None:
    """What the agent of one engine reports."""
    async with aiohttp.ClientSession() as session:
        client = SGLangClient(session, engine.url, api_key=ENGINE_KEY, admin_key=None)
        while True:
            with contextlib.suppress(Exception):
                loads = await client.loads()
                for it in found:
                    it.hear(
                        at,
                        running=loads.running,
                        waiting=loads.waiting,
                        waiting_tokens=loads.waiting_tokens,
                        kv_tokens_used=loads.kv_tokens_used,
                        kv_tokens_total=loads.kv_tokens_total,
                        max_running=loads.max_running,
                    )
            await asyncio.sleep(LOOK_SECONDS)


@contextlib.asynccontextmanager
async def smg(folder: Path, engines: Sequence[EngineProcess], policy: str) -> AsyncGenerator[list[str]]:
    """Two routers of smg; yields their addresses."""
    program = Path(sys.executable).parent / "smg"
    started: list[asyncio.subprocess.Process] = []
    urls: list[str] = []
    try:
        for number in range(ROUTERS):
            port, metrics = free_ports(2)
            log = (folder / f"smg-{policy}-{number}.log").open("wb")
            started.append(
                await asyncio.create_subprocess_exec(
                    str(program),
                    *("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy),
                    *("--prometheus-port", str(metrics), "--log-level", "warn", "--api-key", ENGINE_KEY),
                    *("--worker-urls", *(engine.url for engine in engines)),
                    stdout=log,
                    stderr=log,
                )
            )
            urls.append(f"http://127.0.0.1:{port}")
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(180):
                for url in urls:
                    while not await _ready(session, url):
                        await asyncio.sleep(0.5)
        yield urls
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{url}/readiness") as response:
            return response.status == 200
    return False


def simple(engines: Sequence[EngineProcess]) -> list[Rule]:
    """Rules that need no router."""
    urls = [engine.url for engine in engines]
    flying = dict.fromkeys(urls, 0)

    def least(_number: int, _conversation: int, _system: int) -> str:
        url = min(urls, key=lambda each: flying[each])
        flying[url] += 1
        return url

    def ended(url: str) -> None:
        flying[url] -= 1

    return [
        Rule("round robin", lambda number, _c, _s: urls[number % len(urls)]),
        Rule("least in flight", least, ended=ended),
        Rule("by conversation", lambda _n, conversation, system: urls[(system + conversation % 2) % len(urls)]),
    ]


async def main(options: argparse.Namespace) -> None:
    if options.kind != "sim":
        try:
            sglang_launcher()
        except FileNotFoundError as error:
            print(f"not measured: {error}")
            return
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as stack:
        folder = Path(at)
        engines = [
            stack.enter_context(running_engine(options.kind, folder / f"engine-{n}", *MORE, wait=False))
            for n in range(ENGINES)
        ]
        for engine in engines:
            engine.wait_ready(START_SECONDS)
        what = f"{options.conversations} conversations of {options.turns} turns, {options.at_once} at once"
        print(f"{what}, {ENGINES} engines, {ROUTERS} routers")
        print("| rule | prompt tokens from the cache | TTFT p50 s | p99 s | whole run s | answers | failed |")
        print("|---|---|---|---|---|---|---|", flush=True)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for rule in simple(engines):
                print(await run(session, rule, engines, options), flush=True)
            for policy in ("cache_aware", "least_load"):
                try:
                    async with smg(folder, engines, policy) as urls:
                        rule = Rule(f"smg {policy}", lambda n, _c, _s, urls=urls: urls[n % len(urls)])
                        print(await run(session, rule, engines, options), flush=True)
                except (OSError, TimeoutError) as error:
                    print(f"| smg {policy} | not measured: {type(error).__name__} |", flush=True)
            for name, routing, shared in (
                ("Shoal PrefixHeads", "PrefixHeads", False),
                ("Shoal Seconds, heads only", "Seconds", False),
                ("Shoal Seconds", "Seconds", True),
            ):
                async with gateways(folder, engines, routing=routing, shared=shared) as found:
                    urls = [it.url for it in found]
                    rule = Rule(name, lambda n, _c, _s, urls=urls: urls[n % len(urls)], API_KEY, "tiny")
                    print(await run(session, rule, engines, options), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=get_args(Kind), default="sglang", help="sim: the simulator, to try this out")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--systems", type=int, default=6)
    parser.add_argument("--system-words", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(main(parser.parse_args()))
