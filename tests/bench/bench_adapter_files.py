"""First use of an adapter that is nowhere yet: from an object store to the first token, by stage.

python -m tests.bench.bench_adapter_files                       # with the simulator
python -m tests.bench.bench_adapter_files --engine sglang --times 5

An S3 server (moto, a process of its own, which sends some 30 MB/s), a node cache and the engine are on this machine and
share its cores: the figures show where the time goes, not what a network and a real store make of it.

`list` asks the store what there is (and proves that it did not change), `fetch` brings the files, `check` reads config
and header and compares them with pool and base, `place` brings them to disk and renames the folder; `load` is the
engine's own call, `first token` a request of one token after it. Through the node cache everything up to the renamed
folder is `staged`. Adapters of the shapes of Llama-3.1-8B have no engine here: only the tiny ones are loaded.
"""

import argparse
import asyncio
import json
import math
import os
import secrets
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp.test_utils import unused_port

from shoal.agent.stage.adapter import stage_adapter
from shoal.api import names
from shoal.api.adapters import AdapterSettings, AdapterWanted
from shoal.api.artifact import LayerWidths
from shoal.artifacts import Settings, StoreCredentials, adapter, folders, open_source
from shoal.core.lora.format.check import check_adapter, of_settings
from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.client import SGLangClient
from shoal.engine.sglang.pool import RULES
from shoal.runtime import logs
from tests.bench.bench_cache import wait_for_file
from tests.support.adapters import ALL, make_adapter
from tests.support.engines import ADMIN_KEY, API_KEY, LORA, MODEL, SERVED, EngineProcess, running_engine
from tests.support.s3pod import BUCKET, KEYS, PREFIX
from tests.support.sources import LOCAL

LLAMA: Final = LayerWidths(layers=32, hidden=4096, query=4096, key=1024, feed_forward=14336)
TINY: Final = LayerWidths(layers=2, hidden=64, query=64, key=32, feed_forward=128)
T = TypeVar("T")


@dataclass(slots=True)
class Rows:
    """Seconds by row and stage."""

    taken: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])

    async def time(self, row: str, stage: str, call: Awaitable[T]) -> T:
        begun = time.perf_counter()
        result = await call
        self.taken.setdefault(row, defaultdict(list))[stage].append(time.perf_counter() - begun)
        return result

    def show(self) -> None:
        for row, stages in self.taken.items():
            middle = {stage: 1000 * statistics.median(seconds) for stage, seconds in stages.items()}
            parts = "  ".join(f"{stage} {ms:.1f}" for stage, ms in middle.items())
            totals = sorted(1000 * sum(parts) for parts in zip(*stages.values(), strict=True))
            print(f"{row:34} total {statistics.median(totals):8.1f} ms (worst {totals[-1]:.1f})  {parts}")


def llama_adapter(folder: Path, rank: int) -> Path:
    """The shapes of an adapter of Llama-3.1-8B in bfloat16; its weights are noise."""
    shapes = {"q": (4096, 4096), "k": (4096, 1024), "v": (4096, 1024), "o": (4096, 4096),
              "gate": (4096, 14336), "up": (4096, 14336), "down": (14336, 4096)}  # fmt: skip
    header: dict[str, Any] = {}
    end = 0
    for layer in range(LLAMA.layers):
        for name, (reads, writes) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{'self_attn' if len(name) == 1 else 'mlp'}.{name}_proj"
            for side, shape in (("A", (rank, reads)), ("B", (writes, rank))):
                start, end = end, end + 2 * math.prod(shape)
                header[f"{path}.lora_{side}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / adapter.WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(0, end, 1 << 20):
            file.write(secrets.token_bytes(min(1 << 20, end)))
        file.truncate(8 + len(text) + end)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(ALL)}
    (folder / adapter.CONFIG).write_text(json.dumps(said))
    return folder


def settings(widths: LayerWidths) -> AdapterSettings:
    return AdapterSettings(
        pool="bench/pool", slots=4, cached=8, max_rank=64, target_modules=ALL, max_bytes=1 << 30,
        credentials=(f"s3://{BUCKET}/",), widths=widths,
    )  # fmt: skip


@dataclass(slots=True)
class Ground:
    """The processes that stand around."""

    folder: Path
    endpoint: str
    cache: Path

    @property
    def credentials(self) -> StoreCredentials:
        return StoreCredentials({**KEYS, "AWS_ENDPOINT_URL": self.endpoint}, given=True)

    def uri(self, name: str) -> str:
        return f"s3://{BUCKET}/{PREFIX}/{name}"

    async def revision(self, name: str) -> str:
        async with open_source(self.uri(name), self.credentials, Settings(network=LOCAL)) as source:
            return (await source.manifest()).digest


@contextmanager
def ground(folder: Path, files: Path) -> Generator[Ground]:
    """The store with all of `files` in it, and a node cache. Ends both."""
    port = unused_port()
    with ExitStack() as stack:
        run = [sys.executable, "-m", "tests.support.s3pod", str(port), str(files)]
        store = stack.enter_context(subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        stack.callback(store.kill)
        assert store.stdout is not None
        if store.stdout.readline() != b"ready\n":
            raise SystemExit("the bench's object store did not start")
        run = [sys.executable, "-m", "tests.bench.cache_process", str(folder / "c"), "http://127.0.0.1:1", "bench"]
        cache = stack.enter_context(subprocess.Popen(run))
        stack.callback(cache.kill)
        place = folder / "c" / "namespaces" / "bench"
        wait_for_file(place / names.CACHE_SOCKET)
        place_of_secret = folder / "secrets" / "0"
        place_of_secret.mkdir(parents=True)
        endpoint = f"http://127.0.0.1:{port}"
        for key, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            (place_of_secret / key).write_text(value)
        yield Ground(folder, endpoint, place)


async def from_store(at: Ground, name: str, told: AdapterSettings, rows: Rows) -> Path:
    """What `stage_adapter` does, stage by stage."""
    row, work, place = f"{name}, from the store", at.folder / ".work", at.folder / "adapters" / name
    await asyncio.to_thread(work.mkdir)
    async with open_source(at.uri(name), at.credentials, Settings(network=LOCAL)) as source:
        manifest = await rows.time(row, "list", source.manifest())
        await rows.time(row, "fetch", adapter.fetch_adapter(source, manifest, work, told.max_bytes))
    facts = await rows.time(row, "check", asyncio.to_thread(adapter.read_folder, work, name, manifest.digest))
    if (problem := check_adapter(facts, *of_settings(told, RULES))) is not None:
        raise SystemExit(f"the bench's own adapter is refused: {problem.message}")

    def finish() -> None:
        folders.sync(work)
        place.parent.mkdir(exist_ok=True)
        os.rename(work, place)

    await rows.time(row, "place", asyncio.to_thread(finish))
    return place


async def from_cache(at: Ground, name: str, told: AdapterSettings, rows: Rows, row: str) -> Path:
    """As an agent does it."""
    revision = await at.revision(name)
    wanted = AdapterWanted(name=f"bench.a@{revision[7:19]}", revision=revision, uri=at.uri(name))
    place = at.folder / "adapters" / wanted.name
    staging = stage_adapter(
        wanted, place, told, rules=RULES, secrets=at.folder / "secrets", cache=at.cache, sources=Settings(network=LOCAL)
    )
    await rows.time(f"{name}, {row}", "staged", staging)
    return place


async def first_token(engine: EngineProcess, name: str, place: Path, row: str, rows: Rows) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        calls = SGLangAdapters(SGLangClient(session, engine.url, api_key=API_KEY, admin_key=ADMIN_KEY))
        await rows.time(row, "load", calls.load(name, str(place)))

        async def ask() -> None:
            body = {"model": SERVED, "prompt": "one two", "max_tokens": 1, "lora_path": name, "temperature": 0}
            headers = {"Authorization": f"Bearer {API_KEY}"}
            async with session.post(engine.url + "/v1/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                await response.read()

        await rows.time(row, "first token", ask())
        await calls.unload(name)


async def measure(at: Ground, kind: str, times: int) -> Rows:
    rows = Rows()
    with ExitStack() as stack:
        engine = stack.enter_context(running_engine(kind, at.folder / "engine", *LORA)) if kind != "none" else None  # pyright: ignore[reportArgumentType]
        for name, told in {"tiny r8": TINY, "llama-8b r16": LLAMA, "llama-8b r64": LLAMA}.items():
            key = name.replace(" ", "-")
            for number in range(times):
                place = await from_store(at, key, settings(told), rows)
                if engine is not None and told is TINY:
                    await first_token(engine, f"a{number}", place, f"{key}, from the store", rows)
                await asyncio.to_thread(shutil.rmtree, place)
            for number in range(times + 1):
                row = "second pod of a node" if number else "first pod of a node"
                place = await from_cache(at, key, settings(told), rows, row)
                await asyncio.to_thread(shutil.rmtree, place)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "sglang", "none"), default="sim")
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    logs.configure("error")
    with tempfile.TemporaryDirectory(prefix="ad-") as folder:
        files = Path(folder, "files")
        make_adapter(files / "tiny-r8", base=MODEL)
        for rank in (16, 64):
            llama_adapter(files / f"llama-8b-r{rank}", rank)
        for path in sorted(files.iterdir()):
            size = sum(file.stat().st_size for file in path.iterdir())
            print(f"{path.name}: {size / 2**20:.1f} MiB")
        with ground(Path(folder), files) as at:
            print(f"engine: {options.engine}; {options.times} times each, medians")
            asyncio.run(measure(at, options.engine, options.times)).show()


if __name__ == "__main__":
    main()
