"""How long an engine takes to swap adapters, by itself: what everything that Shoal adds is measured against.

python -m tests.bench.bench_swap                     # the simulator, and SGLang where it is installed
python -m tests.bench.bench_swap --engine sim --swaps 200

One engine with the tiny model on this machine, adapters of two ranks, files in the page cache. `load` and `unload` are
the engine's own calls, `reload` is a request for an adapter that was unloaded (SGLang loads it again without being
told), `first use` the request after a load, `warm` the same request again. `gap` is the longest silence in a stream of
the base model while adapters are loaded and unloaded beside it, and without that.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.client import SGLangClient
from tests.support.adapters import make_adapter
from tests.support.engines import ADMIN_KEY, API_KEY, LORA, SERVED, Kind, running_engine, sglang_launcher

RANKS: Final = (8, 64)
WIDE: Final = tuple("64" if LORA[i - 1] == "--max-lora-rank" else text for i, text in enumerate(LORA))
"""The arguments of the tests, for the larger rank."""


@dataclass(slots=True)
class Stats:
    """Seconds, by what took them."""

    taken: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))

    async def time(self, what: str, call: Callable[[], Awaitable[Any]]) -> None:
        begun = time.perf_counter()
        await call()
        self.taken[what].append(time.perf_counter() - begun)

    def show(self, engine: str) -> None:
        for what, seconds in self.taken.items():
            ordered = sorted(seconds)
            p50, p99 = (1000 * ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.99))
            mean = 1000 * statistics.fmean(ordered)
            print(f"{engine:7} {what:32} {len(ordered):5} {mean:9.2f} {p50:9.2f} {p99:9.2f} {1000 * ordered[-1]:9.2f}")


class Swapping:
    """One engine under swaps."""

    def __init__(self, session: aiohttp.ClientSession, url: str, folder: Path) -> None:
        self.adapters = SGLangAdapters(SGLangClient(session, url, api_key=API_KEY, admin_key=ADMIN_KEY))
        self.stats = Stats()
        self._session = session
        self._url = url
        self._folders = {rank: make_adapter(folder / f"r{rank}", seed=rank, rank=rank) for rank in RANKS}

    async def ask(self, adapter: str | None, tokens: int = 1) -> None:
        """A whole answer. Raises RuntimeError for any other status than 200."""
        body = {"model": SERVED, "prompt": "one two", "max_tokens": tokens, "lora_path": adapter, "temperature": 0}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        async with self._session.post(self._url + "/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            await response.read()

    async def swap(self, times: int) -> None:
        for rank, folder in self._folders.items():
            for i in range(times):
                # A name of its own each time, as each revision has: the engine remembers names.
                name = f"a{rank}-{i}"
                await self.stats.time(f"load, rank {rank}", lambda: self.adapters.load(name, str(folder)))  # noqa: B023
                await self.stats.time(f"first use, rank {rank}", lambda: self.ask(name))  # noqa: B023
                await self.stats.time(f"warm, rank {rank}", lambda: self.ask(name))  # noqa: B023
                await self.stats.time(f"unload, rank {rank}", lambda: self.adapters.unload(name))  # noqa: B023
                await self.stats.time(f"reload by a request, rank {rank}", lambda: self.ask(name))  # noqa: B023
                await self.adapters.unload(name)

    async def gaps(self, what: str, beside: Callable[[], Awaitable[Any]]) -> None:
        """The longest silence in each of a few streams while `beside` is done over and over."""
        for _ in range(5):
            stop = asyncio.Event()
            work = asyncio.create_task(_until(stop, beside))
            try:
                self.stats.taken[what].append(await self._longest_silence())
            finally:
                stop.set()
                await work

    async def _longest_silence(self) -> float:
        body = {"model": SERVED, "prompt": "one two", "max_tokens": 300, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        longest, last = 0.0, None
        async with self._session.post(self._url + "/v1/completions", json=body, headers=headers) as response:
            async for _ in response.content.iter_any():
                now = time.perf_counter()
                longest = longest if last is None else max(longest, now - last)
                last = now
        return longest

    async def load_and_unload(self) -> None:
        await self.adapters.load("beside", str(self._folders[RANKS[-1]]))
        await self.adapters.unload("beside")


async def _until(stop: asyncio.Event, work: Callable[[], Awaitable[Any]]) -> None:
    while not stop.is_set():
        await work()


async def measure(kind: Kind, swaps: int) -> Stats:
    with tempfile.TemporaryDirectory() as at, running_engine(kind, Path(at) / "engine", *WIDE) as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            swapping = Swapping(session, engine.url, Path(at))
            await swapping.ask(None)
            await swapping.swap(swaps)
            await swapping.gaps("gap, nothing beside", lambda: asyncio.sleep(0.05))
            await swapping.gaps("gap, swaps of rank 64 beside", swapping.load_and_unload)
            return swapping.stats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "sglang", "both"), default="both")
    parser.add_argument("--swaps", type=int, default=50, help="of each rank; default 50")
    options = parser.parse_args()
    kinds: list[Kind] = ["sim", "sglang"] if options.engine == "both" else [options.engine]
    if options.engine == "both":
        try:
            sglang_launcher()
        except FileNotFoundError as error:
            print(f"the simulator only: {error}", file=sys.stderr)
            kinds = ["sim"]
    print(f"{'engine':7} {'milliseconds':32} {'n':>5} {'mean':>9} {'p50':>9} {'p99':>9} {'max':>9}")
    for kind in kinds:
        asyncio.run(measure(kind, options.swaps)).show(kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
