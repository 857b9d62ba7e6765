"""2,000 LoRA adapters for `bench_replicas`: their files, the engines' arguments, and what is asked of them.

An engine has slots, one of them the base model's, and eight times as many adapters in host memory as slots, which is a
LoRAPool's default; none of them at first. For Shoal's gateways an agent (`replica_agents`) stages what a gateway
asks for, loads it, grants leases, and unloads what was used longest ago. No operator places anything. The other rules
know nothing of adapters: each engine was told of all that will be asked for, and loads one itself when a request names
it, as SGLang does with one that it evicted.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final

import aiohttp

from shoal.api.adapters import AdapterSettings
from shoal.artifacts import Settings, StoreCredentials, open_source
from shoal.core.routing.resolveadapters import DeclaredAdapter
from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.client import SGLangClient
from tests.bench.adapter_loads import SLOPE
from tests.bench.routing_loads import length
from tests.support.adapter_agents import adapter
from tests.support.adapters import ALL, make_adapter
from tests.support.engines import ADMIN_KEY, API_KEY, LORA_MODULES, LORA_RANK, SERVED, EngineProcess
from tests.support.sources import LOCAL

ADAPTERS: Final = 2000
CACHED_PER_SLOT: Final = 8
NAMESPACE: Final = SERVED.partition("/")[0]
POOL: Final = f"{NAMESPACE}/pool"
_DIGESTS: Final = "digests.json"
_SYSTEM_TOKENS: Final = (200, 800, 1500)
_QUESTION_TOKENS: Final = (20, 400)
_MOST_TURNS: Final = 8
"""A conversation has to fit into the context."""
_WORD_TOKENS: Final = 5
_LOADED, _EVICTED = b"LoRA adapter loading completes", b"Evicting LoRA"
"""What SGLang logs of a load into host memory, and of an adapter that another one puts out of a slot."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """What the engines serve beside their base model."""

    folder: Path
    slots: int

    def settings(self) -> AdapterSettings:
        """Of an agent."""
        return AdapterSettings(
            pool=POOL,
            slots=self.slots,
            cached=CACHED_PER_SLOT * self.slots,
            max_rank=LORA_RANK,
            target_modules=ALL,
            max_bytes=1 << 24,
        )

    def declared(self) -> dict[str, DeclaredAdapter]:
        """As gateways know them, by key."""
        digests: dict[str, str] = json.loads((self.folder / _DIGESTS).read_text())
        found: dict[str, DeclaredAdapter] = {}
        for name, digest in digests.items():
            one = adapter(name, NAMESPACE, revision=digest)
            assert one.current is not None
            found[one.key] = replace(one, current=replace(one.current, uri=f"file://{self.folder / name}"))
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation, in words: of the adapter's system prompt, and of each question."""

    adapter: int
    system: int
    questions: tuple[int, ...]


def conversations(requests: int, seed: int, *, zipf: bool) -> list[Asked]:
    """As "2,000 adapters" in `routing_loads`, where four of ten conversations are with one adapter; with `zipf` the
    popularity is that of a trace of 874 adapters."""
    dice = random.Random(seed)  # noqa: S311 - every rule gets the same
    systems = [dice.choice(_SYSTEM_TOKENS) // _WORD_TOKENS for _ in range(ADAPTERS)]
    weights = list(accumulate((rank + 1) ** -SLOPE for rank in range(ADAPTERS)))
    found: list[Asked] = []
    count = 0
    while count < requests:
        if zipf:
            (which,) = dice.choices(range(ADAPTERS), cum_weights=weights)
        else:
            which = min(int(dice.paretovariate(0.8)) - 1, 1 << 30) % ADAPTERS
        turns = min(_MOST_TURNS, requests - count, max(1, round(dice.expovariate(1 / 2))))
        said = tuple(max(1, length(dice, _QUESTION_TOKENS) // _WORD_TOKENS) for _ in range(turns))
        found.append(Asked(which, systems[which], said))
        count += turns
    return found


def arguments(slots: int) -> tuple[str, ...]:
    """Of an engine."""
    cached = str(CACHED_PER_SLOT * slots)
    return (
        "--enable-lora", "--max-lora-rank", str(LORA_RANK), "--lora-target-modules", *LORA_MODULES,
        "--max-loras-per-batch", str(slots), "--max-loaded-loras", cached, "--lora-backend", "torch_native",
    )  # fmt: skip


def short_name(number: int) -> str:
    return f"a{number}"


async def published(folder: Path, slots: int, model: Path) -> Adapters:
    """Makes the adapters of the model in `folder`. They share their weights, which routing does not look at."""
    weights = await asyncio.to_thread(make_adapter, folder / "weights", seed=1, base=model)
    config = json.loads((weights / "adapter_config.json").read_text())
    digests: dict[str, str] = {}
    for number in range(ADAPTERS):
        name = short_name(number)
        place = folder / name
        place.mkdir()
        os.link(weights / "adapter_model.safetensors", place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16 + number}))
        async with open_source(f"file://{place}", StoreCredentials(), Settings(network=LOCAL)) as source:
            digests[name] = (await source.manifest()).digest
    (folder / _DIGESTS).write_text(json.dumps(digests))
    return Adapters(folder, slots)


def logging_of(folder: Path) -> dict[str, str]:
    """The environment in which SGLang logs what `Loads` counts."""
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "[%(asctime)s] %(message)s"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "root": {"level": "INFO", "handlers": ["out"]},
        "loggers": {"sglang.srt.lora.mem_pool": {"level": "DEBUG"}},
    }
    path = folder / "logging.json"
    path.write_text(json.dumps(settings))
    return {"SGLANG_LOGGING_CONFIG_PATH": str(path)}


class Loads:
    """Counts from now on, in the logs of the engines. The simulator logs none."""

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self._from = {engine.log: engine.log.stat().st_size for engine in engines if engine.kind == "sglang"}

    def counted(self) -> tuple[int, int]:
        """Loads into host memory, and evictions from slots."""
        told = [path.read_bytes()[begin:] for path, begin in self._from.items()]
        return sum(text.count(_LOADED) for text in told), sum(text.count(_EVICTED) for text in told)


async def introduce(
    session: aiohttp.ClientSession, engines: Sequence[EngineProcess], adapters: Adapters, names: Collection[str]
) -> float:
    """Tells each engine where adapters are, by their short names; returns the median of the seconds of a load."""

    async def one(engine: EngineProcess) -> list[float]:
        calls, taken = _calls(session, engine), list[float]()
        for name in sorted(names):
            began = time.monotonic()
            await calls.load(name, str(adapters.folder / name))
            taken.append(time.monotonic() - began)
        return taken

    taken = await asyncio.gather(*(one(engine) for engine in engines))
    await unload_all(session, engines)
    return statistics.median(seconds for each in taken for seconds in each)


async def unload_all(session: aiohttp.ClientSession, engines: Sequence[EngineProcess]) -> None:
    for engine in engines:
        calls = _calls(session, engine)
        for one in await calls.loaded():
            await calls.unload(one.name)


def _calls(session: aiohttp.ClientSession, engine: EngineProcess) -> SGLangAdapters:
    return SGLangAdapters(SGLangClient(session, engine.url, api_key=API_KEY, admin_key=ADMIN_KEY))
