"""Time to a served answer in the lab: `make demo`, from nothing and again.

python -m tests.bench.bench_lab            # binaries cached: a new lab, then the same lab again
python -m tests.bench.bench_lab --cold     # also with empty caches: 12 CPU minutes more
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping


def demo(*args: str, env: Mapping[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one `shoal demo`; CPU of the command, not of the lab that it leaves behind."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "demo", *args], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"shoal demo {' '.join(args)} failed:\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - start, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", action="store_true", help="also with empty caches (compiles Kubernetes)")
    options = parser.parse_args()
    name = f"bench-{os.getpid()}"
    rows: list[tuple[str, float, float]] = []
    try:
        if options.cold:
            with tempfile.TemporaryDirectory() as cache:
                env = os.environ | {"XDG_CACHE_HOME": cache, "GOCACHE": f"{cache}/go"}
                rows.append(("nothing cached (Go modules are)", *demo("up", "--name", name, env=env)))
                demo("down", "--name", name, env=env)
        rows.append(("binaries cached, new lab", *demo("up", "--name", name, env=os.environ)))
        rows.append(("lab is up", *demo("up", "--name", name, env=os.environ)))
    finally:
        demo("down", "--name", name, env=os.environ)
    print(f"\nTime to a served answer ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})")
    print(f"{'':34}{'wall s':>8}{'CPU s':>8}")
    for title, wall, cpu in rows:
        print(f"{title:34}{wall:8.1f}{cpu:8.1f}")


if __name__ == "__main__":
    main()
