"""How many requests of keep-alive clients break while the gateways are rolled out again and again, on the lab (root).

    python -m tests.bench.bench_rollouts [--rollouts 100]

24 clients without retries ask through the Service of two gateways, with pauses of 0 to 4 s, so that many of their
connections are idle when a gateway stops. Each rollout replaces both gateways.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal_dev.demo.clusters import NAMESPACE
from tests.storm.ground import KEY, STEADY, STORM, Ground


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=100)
    wanted = parser.parse_args().rollouts
    target = ("statefulset/shoal-gateway", "-n", NAMESPACE)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-rollouts-") as folder,
        Ground.up(Path(folder), None, 60, 3600, adapters=False) as ground,
    ):
        host, port = ground.address()
        command = [
            sys.executable,
            "-m",
            "tests.bench.rollout_clients",
            f"http://{host}:{port}",
            KEY,
            f"{STORM}/{STEADY}",
        ]
        clients = subprocess.Popen(
            [*ground.lab.enter_command(), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        began = time.monotonic()
        try:
            time.sleep(5)
            for number in range(1, wanted + 1):
                ground.kubectl("rollout", "restart", *target)
                ground.kubectl("rollout", "status", *target, "--timeout=300s", timeout=310)
                if number % 10 == 0:
                    print(f"{number} rollouts after {time.monotonic() - began:.0f} s", flush=True)
            time.sleep(20)  # the last ones that stop
            out, _ = clients.communicate("", timeout=90)
        finally:
            clients.kill()
            clients.wait()
    found = json.loads(out)
    print(
        f"{wanted} rollouts of two gateways in {time.monotonic() - began:.0f} s: {found['answered']} answered, "
        f"{found['refused']} refused with Retry-After, {sum(found['broken'].values())} broken"
    )
    for what, count in sorted(found["broken"].items()):
        print(f"  {count} x {what}")


if __name__ == "__main__":
    main()
