"""How fast weights come from a source on this machine, beside a plain copy of the same file.

python -m tests.bench.bench_fetch              # 1 GiB
python -m tests.bench.bench_fetch --gib 4

Both ends are on this machine and share its cores: the figures show what the fetching itself costs, not a network. `cp`
is followed by fsync, as a fetch is. The file is in the page cache.
"""

import argparse
import asyncio
import hashlib
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from aiohttp.test_utils import unused_port

from shoal.artifacts import Settings, StoreCredentials, open_source
from tests.support.sources import LOCAL


def make(folder: Path, size: int) -> str:
    """A model whose one file of weights has `size` bytes. Returns their SHA-256."""
    (folder / "config.json").write_bytes(b"{}")
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    hasher = hashlib.sha256()
    block = random.Random(1).randbytes(1 << 24)  # noqa: S311
    with (folder / "model.safetensors").open("wb") as file:
        parts = [struct.pack("<Q", len(header)), header, *(block for _ in range(size >> 24))]
        for part in parts:
            file.write(part)
            hasher.update(part)
    return hasher.hexdigest()


async def fetch(uri: str, credentials: StoreCredentials, settings: Settings, folder: Path) -> None:
    async with open_source(uri, credentials, settings) as source:
        for file in (await source.manifest()).files:
            await source.download(file, folder / file.name, lambda _: None)


def copy(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        subprocess.run(["cp", str(path), str(folder)], check=True)
        descriptor = os.open(folder / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(run: Callable[[Path], None], where: Path) -> tuple[float, float]:
    """Wall and own CPU seconds; the best of two, so that the first look at a folder does not count."""
    best = (float("inf"), 0.0)
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            os.sync()
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            run(Path(folder))
            wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
            best = min(best, (wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return best


def wait_for(url: str) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the bench's server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary folder)")
    options = parser.parse_args()
    size = int(options.gib * 2**30) >> 24 << 24
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        model, out = Path(root, "model"), Path(root, "out")
        model.mkdir()
        out.mkdir()
        digest = make(model, size)
        port = unused_port()
        server = subprocess.Popen([sys.executable, "-m", "tests.bench.fetch_process", str(model), digest, str(port)])
        try:
            endpoint = f"http://127.0.0.1:{port}"
            wait_for(f"{endpoint}/models")
            keys = StoreCredentials(
                {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": endpoint}, given=True
            )
            hub = Settings(network=LOCAL, hub_endpoint=endpoint)
            sources = (
                ("hf:// (ranges, SHA-256 verified)", "hf://team/m", StoreCredentials(), hub),
                ("s3:// (ranges)", "s3://models/m", keys, Settings(network=LOCAL)),
                ("file://", f"file://{model}", StoreCredentials(), Settings(network=LOCAL)),
            )
            rows.append(("cp and fsync", *measure(lambda folder: copy(model, folder), out)))
            for title, uri, credentials, settings in sources:

                def run(
                    folder: Path, uri: str = uri, given: StoreCredentials = credentials, s: Settings = settings
                ) -> None:
                    asyncio.run(fetch(uri, given, s, folder))

                rows.append((title, *measure(run, out)))
        finally:
            server.terminate()
            server.wait(10)
    plain = rows[0][1]
    load = os.getloadavg()[0]
    print(f"\nFetching {size / 2**30:.1f} GiB ({os.cpu_count()} cores shared with the server, load {load:.1f})")
    print(f"{'':36}{'seconds':>9}{'MiB/s':>8}{'own CPU s':>11}{'of cp':>8}")
    for title, wall, cpu in rows:
        print(f"{title:36}{wall:9.2f}{size / 2**20 / wall:8.0f}{cpu:11.2f}{plain / wall:8.0%}")


if __name__ == "__main__":
    main()
