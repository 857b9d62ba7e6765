"""Routing on four real engines: SGLang on the CPU with the tiny model, behind Shoal's gateway, smg and simple rules.

    python -m tests.bench.bench_replicas [--traffic chat|prompts|unique|mooncake|adapters ...]

- `chat`: conversations of several turns, which begin with one of a few system prompts, and do not fit into all caches
  together.
- `prompts`: single questions behind one of a few long system prompts.
- `unique`: single questions that share nothing.
- `mooncake`: the public trace of Moonshot, in which a block of 512 tokens has become one of a few words: what
  prompts share is the trace's own.
- `adapters`, `adapters-zipf`: conversations with 2,000 LoRA adapters, each with a system prompt of its own, of which
  some come much more often than others (`replica_adapters.py`).

Each rule has two routers, which take turns, and begins with empty caches. "By conversation" sends all turns of one to
one replica and knows the system prompts: about the best that a rule can do with equal replicas. The tiny model reads a
prompt in no time, so the share of prompt tokens from the cache says more than seconds do. Needs
7 GB, and images/engine-cpu/install.sh: without it nothing is measured.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import aiohttp

from shoal.core.capabilities import Capability
from shoal.core.routing.prefixes import points_of
from shoal.core.routing.resolve import ServedModel
from shoal.engine.sglang.client import SGLangClient
from shoal.gateway.prefixes import TELL_SECONDS
from shoal.net.installkey import KeyRing
from shoal.runtime import logs
from tests.bench import replica_adapters
from tests.bench.replica_adapters import Adapters
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
MOONCAKE: Final = "mooncake_conversation_trace.jsonl"
BLOCK_WORDS: Final = 3
"""What a block of the trace becomes: its longest prompt, of 240 blocks, still fits into the context."""
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
    names_adapter: Literal["lora_path", "model"] = "lora_path"
    """The field that does."""
    ended: Callable[[str], None] = lambda _url: None
    answers: list[Answer] = field(default_factory=list[Answer])
    failed: int = 0


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


@dataclass(frozen=True, slots=True)
class Talk:
    """What one client says, turn by turn; the answers come between."""

    number: int
    conversation: int
    group: int
    """Of those that begin in the same way."""
    system: str | None
    turns: tuple[str, ...]
    adapter: str | None = None


def chat(asked: argparse.Namespace, dice: random.Random) -> list[Talk]:
    systems = [text(dice, asked.system_words) for _ in range(asked.systems)]
    talks: list[Talk] = []
    for number in range(asked.conversations):
        own = random.Random(1000 * asked.seed + number)  # noqa: S311 - every rule gets the same
        group = own.randrange(len(systems))
        said = tuple(text(own, own.randrange(30, 90)) for _ in range(asked.turns))
        talks.append(Talk(number, number, group, systems[group], said))
    return talks


def prompts(asked: argparse.Namespace, dice: random.Random) -> list[Talk]:
    systems = [text(dice, 2 * asked.system_words) for _ in range(2 * asked.systems)]
    groups = [dice.randrange(len(systems)) for _ in range(asked.requests)]
    return [Talk(n, n, at, systems[at], (text(dice, dice.randrange(30, 90)),)) for n, at in enumerate(groups)]


def unique(asked: argparse.Namespace, dice: random.Random) -> list[Talk]:
    return [Talk(n, n, n, None, (text(dice, dice.randrange(50, 500)),)) for n in range(asked.requests)]


def mooncake(asked: argparse.Namespace, dice: random.Random) -> list[Talk]:
    words: dict[int, str] = {}
    talks: list[Talk] = []
    with (asked.traces / MOONCAKE).open() as lines:
        for number, line in zip(range(asked.requests), lines, strict=False):
            blocks: list[int] = json.loads(line)["hash_ids"]
            said = " ".join(words.setdefault(block, text(dice, BLOCK_WORDS)) for block in blocks)
            begins = blocks[min(1, len(blocks) - 1)]
            talks.append(Talk(number, begins, begins, None, (said,)))
    return talks


def with_adapters(asked: argparse.Namespace, dice: random.Random, *, zipf: bool = False) -> list[Talk]:
    systems: dict[int, str] = {}
    talks: list[Talk] = []
    for number, one in enumerate(replica_adapters.conversations(asked.requests, asked.seed, zipf=zipf)):
        system = systems.setdefault(one.adapter, text(dice, one.system))
        said = tuple(text(dice, words) for words in one.questions)
        talks.append(Talk(number, number, one.adapter, system, said, replica_adapters.short_name(one.adapter)))
    return talks


TRAFFIC: Final[dict[str, Callable[[argparse.Namespace, random.Random], list[Talk]]]] = {
    "chat": chat,
    "prompts": prompts,
    "unique": unique,
    "mooncake": mooncake,
    "adapters": with_adapters,
    "adapters-zipf": partial(with_adapters, zipf=True),
}


async def converse(session: aiohttp.ClientSession, rule: Rule, talk: Talk, dice: random.Random) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": talk.system}] if talk.system else []
    for turn, said in enumerate(talk.turns):
        messages.append({"role": "user", "content": said})
        url = rule.url(talk.number * len(talk.turns) + turn, talk.conversation, talk.group)
        try:
            answer = await ask(session, url, rule, messages, talk.adapter)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if not rule.failed:
                print(f"{rule.name}: {type(error).__name__} {error}", file=sys.stderr)
            rule.failed += 1
            return
        finally:
            rule.ended(url)
        rule.answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        if turn + 1 < len(talk.turns):
            await asyncio.sleep(dice.random() * 2.0)


async def ask(
    session: aiohttp.ClientSession, url: str, rule: Rule, messages: Sequence[dict[str, str]], adapter: str | None
) -> Answer:
    body: dict[str, Any] = {
        "model": rule.model,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if adapter is not None:
        body[rule.names_adapter] = adapter
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


async def run(
    session: aiohttp.ClientSession, rule: Rule, engines: Sequence[EngineProcess], talks: Sequence[Talk], at_once: int
) -> str:
    loads = replica_adapters.Loads(engines)
    for engine in engines:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with session.post(f"{engine.url}/flush_cache", headers=headers) as response:
            await response.read()
    slots = asyncio.Semaphore(at_once)

    async def one(talk: Talk) -> None:
        async with slots:
            await converse(session, rule, talk, random.Random(talk.number))  # noqa: S311 - every rule gets the same

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for talk in talks:
            group.create_task(one(talk))
    waits = sorted(answer.seconds for answer in rule.answers)
    if not waits:
        return f"| {rule.name} | no answers, {rule.failed} failed |"
    hits = sum(a.cached for a in rule.answers) / sum(a.prompt for a in rule.answers)
    return (
        f"| {rule.name} | {100 * hits:.1f} % | {waits[len(waits) // 2]:.3f} | {waits[int(len(waits) * 0.99)]:.3f} "
        f"| {time.monotonic() - began:.0f} | {len(waits)} | {rule.failed} |{f' {loads} |' if talks[0].adapter else ''}"
    )


class OneKey(KeyRing):
    """The engines have a key of their own, to which no install key leads."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None, frozenset(get_args(Capability)))


@contextlib.asynccontextmanager
async def gateways(
    folder: Path,
    engines: Sequence[EngineProcess],
    adapters: Adapters | None,
    *,
    routing: str,
    shared: bool,
) -> AsyncGenerator[list[GatewayUnderTest]]:
    """Two gateways that see the load of the engines, and with `shared` each other's prompts; with adapters they hear it
    from agents."""
    async with contextlib.AsyncExitStack() as stack:
        found: list[GatewayUnderTest] = []
        for number in range(ROUTERS):
            own = folder / f"gateway-{routing}-{shared}-{number}"
            own.mkdir()
            it = await stack.enter_async_context(gateway(own, name=f"gateway-{number}", routing=routing))
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

            it.prompt_sent = told
        looking: list[asyncio.Task[None]] = []
        if adapters is not None:
            pods = await stack.enter_async_context(replica_adapters.agents(folder, engines, adapters))
            for it in found:
                await stack.enter_async_context(replica_adapters.listening(it, pods, adapters))
        else:
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
        Rule("by conversation", lambda _n, conversation, system: urls[(system + 2 * (conversation % 2)) % len(urls)]),
    ]


async def main(options: argparse.Namespace) -> None:
    if options.kind != "sim":
        try:
            sglang_launcher()
        except FileNotFoundError as error:
            print(f"not measured: {error}")
            return
    logs.configure("error")
    for tuned in (False, True):
        if chosen := [each for each in options.traffic if each.startswith("adapters") == tuned]:
            await measure(options, chosen, tuned=tuned)


async def measure(options: argparse.Namespace, traffics: Sequence[str], *, tuned: bool) -> None:
    """All rules with these kinds of traffic; `tuned`: on engines with adapters."""
    arguments = (*MORE, *(replica_adapters.arguments(options.slots) if tuned else ()))
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as stack:
        folder = Path(at)
        logged = replica_adapters.logging_of(folder)
        engines = [
            stack.enter_context(
                running_engine(options.kind, folder / f"engine-{n}", *arguments, wait=False, environment=logged)
            )
            for n in range(ENGINES)
        ]
        for engine in engines:
            engine.wait_ready(START_SECONDS)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            found = await replica_adapters.published(folder / "adapters", options.slots) if tuned else None
            for traffic in traffics:
                dice = random.Random(options.seed)  # noqa: S311 - every rule gets the same
                talks = TRAFFIC[traffic](options, dice)
                print(
                    f"\n{traffic}: {sum(len(talk.turns) for talk in talks)} requests, {options.at_once} at once, ",
                    end="",
                )
                print(f"{ENGINES} engines, {ROUTERS} routers\n")
                columns = "rule | prompt tokens from the cache | TTFT p50 s | p99 s | whole run s | answers | failed"
                if found is not None:
                    asked = {talk.adapter for talk in talks if talk.adapter is not None}
                    seconds = await replica_adapters.introduce(session, engines, found, asked)
                    print(f"{len(found.declared):,} adapters, {len(asked)} of them asked for; ", end="")
                    print(f"an engine loads one in {1000 * seconds:.0f} ms\n")
                    columns += " | loads | evictions from slots"
                print(f"| {columns} |\n|{'---|' * len(columns.split('|'))}", flush=True)
                await all_rules(folder, session, engines, talks, options.at_once, found)


async def all_rules(
    folder: Path,
    session: aiohttp.ClientSession,
    engines: Sequence[EngineProcess],
    talks: Sequence[Talk],
    at_once: int,
    adapters: Adapters | None,
) -> None:
    async def row(rule: Rule) -> None:
        print(await run(session, rule, engines, talks, at_once), flush=True)
        if adapters is not None:
            await replica_adapters.unload_all(session, engines)

    for rule in simple(engines):
        await row(rule)
    for policy in ("cache_aware", "least_load"):
        try:
            async with smg(folder, engines, policy) as urls:
                await row(Rule(f"smg {policy}", lambda n, _c, _s, urls=urls: urls[n % len(urls)]))
        except (OSError, TimeoutError) as error:
            print(f"| smg {policy} | not measured: {type(error).__name__} |", flush=True)
    for name, routing, shared in (
        ("Shoal PrefixHeads", "PrefixHeads", False),
        ("Shoal Seconds, heads only", "Seconds", False),
        ("Shoal Seconds", "Seconds", True),
    ):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            async with gateways(Path(own), engines, adapters, routing=routing, shared=shared) as found:
                urls = [it.url for it in found]
                await row(Rule(name, lambda n, _c, _s, urls=urls: urls[n % len(urls)], API_KEY, "tiny", "model"))


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for. Traffic of a trace that is not there is left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=get_args(Kind), default="sglang", help="sim: the simulator, to try this out")
    parser.add_argument("--traffic", choices=tuple(TRAFFIC), nargs="+", default=["chat"])
    where = Path(os.environ.get("SHOAL_TRACES") or "traces")
    parser.add_argument("--traces", type=Path, default=where, help="has mooncake's trace")
    parser.add_argument("--requests", type=int, default=160, help="of all traffic but chat")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--systems", type=int, default=6)
    parser.add_argument("--system-words", type=int, default=300)
    parser.add_argument("--slots", type=int, default=8, help="of an engine, for adapters")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    if "mooncake" in chosen.traffic and not (chosen.traces / MOONCAKE).exists():
        print(f"mooncake: {MOONCAKE} is not in --traces or SHOAL_TRACES, so it is left out")
        chosen.traffic = [each for each in chosen.traffic if each != "mooncake"]
    return chosen


if __name__ == "__main__":
    asyncio.run(main(options_of()))
