"""What the node cache costs and saves: a pod's staging with and without it, first and second on a node.

python -m tests.bench.bench_cache              # 1 GiB
python -m tests.bench.bench_cache --gib 4

Source, cache and pods are on this machine and share its cores: the figures show what Shoal itself costs, not a network.
Every row is what a stage container waits for, from its request to the folder that the engine reads, its Python's start
not counted. `cp` is followed by fsync, as a fetch is. The source is in the page cache.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp.test_utils import unused_port

from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import stage
from shoal.api import names
from shoal.artifacts import Settings
from shoal.runtime import logs
from tests.bench.bench_fetch import copy, make, wait_for
from tests.support.sources import LOCAL

URI = "hf://team/m"


def timed(run: Callable[[], object]) -> float:
    os.sync()
    start = time.monotonic()
    run()
    return time.monotonic() - start


def pod(folder: Path, cache: Path | None) -> StagePaths:
    for name in ("models", "run"):
        (folder / name).mkdir(parents=True)
    target, progress = folder / "models" / "model", folder / "run" / "stage.json"
    return StagePaths(target=target, secret=folder / "secret", progress=progress, cache=cache)


def wait_for_file(path: Path) -> None:
    for _ in range(200):
        if path.exists():
            return
        time.sleep(0.05)
    raise SystemExit("the bench's cache did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary folder)")
    options = parser.parse_args()
    size = int(options.gib * 2**30) >> 24 << 24
    logs.configure("warning")
    rows: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-") as folder:
        root = Path(folder)
        model, out = root / "model", root / "out"
        model.mkdir()
        out.mkdir()
        digest = make(model, size)
        port = unused_port()
        endpoint = f"http://127.0.0.1:{port}"
        start = [sys.executable, "-m"]
        source = subprocess.Popen([*start, "tests.bench.fetch_process", str(model), digest, str(port)])
        cache = subprocess.Popen([*start, "tests.bench.cache_process", str(root / "node"), endpoint, "a", "b"])
        try:
            wait_for(f"{endpoint}/models")
            shares = {name: root / "node" / "namespaces" / name for name in ("a", "b")}
            wait_for_file(shares["b"] / names.CACHE_SOCKET)
            request = StageRequest(URI, settings=Settings(network=LOCAL, hub_endpoint=endpoint))
            rows.append(("cp and fsync", timed(lambda: copy(model, out))))
            for title, share in (
                ("without the cache, each pod", None),
                ("first pod on the node", shares["a"]),
                ("second pod on the node", shares["a"]),
                ("first pod of another namespace", shares["b"]),
            ):
                paths = pod(root / title.replace(" ", "-"), share)
                rows.append((title, timed(lambda paths=paths: asyncio.run(stage(request, paths)))))
        finally:
            for process in (cache, source):
                process.terminate()
                process.wait(20)
    seconds = dict(rows)
    print(f"\nStaging {size / 2**30:.1f} GiB ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})")
    print(f"{'':34}{'seconds':>9}{'MiB/s':>9}{'speed of cp':>13}")
    for title, wall in rows:
        print(f"{title:34}{wall:9.2f}{size / 2**20 / wall:9.0f}{rows[0][1] / wall:12.0%}")
    first, second = seconds["first pod on the node"], seconds["second pod on the node"]
    print(f"second start over first start: {second / first:.1%}")


if __name__ == "__main__":
    main()
