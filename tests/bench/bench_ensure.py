"""What the agent adds to the engine's own loading of an adapter: HTTP, the decision, the queue, the stream.

python -m tests.bench.bench_ensure                   # the simulator, and SGLang where it is installed
python -m tests.bench.bench_ensure --engine sim --times 200

One engine with the tiny model on this machine, an agent beside it. Each `ensure` is for an adapter that is not loaded,
while all places are taken: one is retired and unloaded for it, and nobody has to acknowledge that. `added` is what is
left of the whole call without fetching, the engine's unload and the engine's load; `resident` is an ensure of an
adapter that is loaded.
"""

import argparse
import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from shoal.api import names
from shoal.api.adapters import AdapterSettings, AdapterWanted
from shoal.core import drain
from tests.support.adapters import ALL, make_adapter
from tests.support.agentpod import KEYS, Pod
from tests.support.engines import (
    ADMIN_KEY,
    API_KEY,
    LORA,
    LORA_LOADED,
    LORA_RANK,
    LORA_SLOTS,
    Kind,
    running_engine,
    sglang_launcher,
)

POOL = AdapterSettings(
    pool="bench/pool", slots=LORA_SLOTS, cached=LORA_LOADED, max_rank=LORA_RANK, target_modules=ALL, max_bytes=1 << 24
)


def _wanted(number: int) -> AdapterWanted:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return AdapterWanted(name=f"bench.a{number}@{digest[:12]}", revision=f"sha256:{digest}", uri="file:///bench")


async def measure(kind: Kind, times: int) -> dict[str, list[float]]:
    """Seconds, by what took them."""
    taken: dict[str, list[float]] = {"ensure with a load": [], "load by the engine": [], "added": [], "resident": []}
    with tempfile.TemporaryDirectory() as at, running_engine(kind, Path(at) / "engine", *LORA) as engine:
        source = make_adapter(Path(at) / "source", seed=1)

        async def bring(_: AdapterWanted, folder: Path) -> None:
            await asyncio.to_thread(shutil.copytree, source, folder)

        pod = Pod(Path(at), engine_url=engine.url, pool=POOL, bring=bring)
        pod.keys.write_text(json.dumps(KEYS | {"engine": API_KEY, "admin": ADMIN_KEY}))
        pod.boot("boot-1")
        async with pod.running(), pod.stream("operator-key") as stream, aiohttp.ClientSession() as session:
            while stream.state.get("adapters") is None:
                await stream.message()
            for number in range(times + LORA_LOADED):
                unloads = _sum(pod, "shoal_agent_adapter_unload_seconds")
                whole, lease = await _ensure(session, pod, stream.boot, _wanted(number))
                if number >= LORA_LOADED:  # the first ones find free places
                    unloading = _sum(pod, "shoal_agent_adapter_unload_seconds") - unloads
                    taken["ensure with a load"].append(whole)
                    taken["load by the engine"].append(lease["loadSeconds"])
                    taken["added"].append(whole - lease["loadSeconds"] - lease["stagedSeconds"] - unloading)
                taken["resident"].append((await _ensure(session, pod, stream.boot, _wanted(number)))[0])
    return taken


def _sum(pod: Pod, name: str) -> float:
    assert pod.adapters is not None
    samples = [sample for metric in pod.adapters.metrics.collect() for sample in metric.samples]
    return next(sample.value for sample in samples if sample.name == f"{name}_sum")


async def _ensure(
    session: aiohttp.ClientSession, pod: Pod, boot: str, wanted: AdapterWanted
) -> tuple[float, dict[str, float]]:
    body = wanted.model_dump(by_alias=True) | {"gateway": "bench", "boot": "b", "agentBoot": boot}
    headers = {"Authorization": "Bearer operator-key"}
    begun = time.perf_counter()
    url = f"{pod.url}{names.ADAPTERS_PATH}/{wanted.name}/ensure"
    async with session.post(url, json=body, headers=headers) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
    return time.perf_counter() - begun, answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "sglang", "both"), default="both")
    parser.add_argument("--times", type=int, default=100, help="loads; default 100")
    options = parser.parse_args()
    # An agent unloads nothing in its first seconds: it does not know yet who sends.
    drain.RESTART_SECONDS = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    kinds: list[Kind] = ["sim", "sglang"] if options.engine == "both" else [options.engine]
    if options.engine == "both":
        try:
            sglang_launcher()
        except FileNotFoundError as error:
            print(f"the simulator only: {error}", file=sys.stderr)
            kinds = ["sim"]
    print(f"{'engine':7} {'milliseconds':32} {'n':>5} {'p50':>9} {'p99':>9} {'max':>9}")
    for kind in kinds:
        for what, seconds in asyncio.run(measure(kind, options.times)).items():
            ordered = sorted(seconds)
            p50, p99 = (1000 * ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.99))
            print(f"{kind:7} {what:32} {len(ordered):5} {p50:9.2f} {p99:9.2f} {1000 * ordered[-1]:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
