"""How many requests of keep-alive clients break while the gateways are rolled out again and again, on the lab (root).

    python -m tests.bench.bench_rollouts [--rollouts 100]

24 clients without retries ask through the Service of two gateways, with pauses of 0 to 4 s, so that many of their
connections are idle when a gateway stops. Each rollout replaces both gateways.
`tests/unit/gateway/test_gateway_rollouts.py` is the small version, without a lab.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shoal_dev.demo.clusters import NAMESPACE
from tests.storm.ground import KEY, STEADY, STORM, Ground


class Clients:
    """The process with all clients, and the last that it said of them."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._seen: dict[str, Any] = {"answered": 0, "refused": 0, "broken": {}}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._seen = json.loads(line)

    def end(self) -> None:
        """Lets them end what they do not wait for any more."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(10)

    def __str__(self) -> str:
        broken: dict[str, int] = self._seen["broken"]
        lines = [f"  {count} x {what}" for what, count in sorted(broken.items())]
        head = (
            f"{self._seen['answered']} answered, {self._seen['refused']} refused with Retry-After, "
            f"{sum(broken.values())} broken"
        )
        return "\n".join([head, *lines])


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
        module = [sys.executable, "-m", "tests.bench.rollout_clients"]
        clients = Clients([*ground.lab.enter_command(), *module, f"http://{host}:{port}", KEY, f"{STORM}/{STEADY}"])
        began = time.monotonic()
        try:
            time.sleep(5)
            for number in range(1, wanted + 1):
                ground.kubectl("rollout", "restart", *target)
                ground.kubectl("rollout", "status", *target, "--timeout=300s", timeout=310)
                print(f"{number} rollouts of two gateways in {time.monotonic() - began:.0f} s: {clients}", flush=True)
            time.sleep(20)  # the last ones that stop
        finally:
            clients.end()
            print(f"in all: {clients}")


if __name__ == "__main__":
    main()
