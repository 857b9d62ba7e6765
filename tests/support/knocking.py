"""Knocks at several gateways, again and again, and notes when what they answer changes.

As a program it runs inside the lab's network, where single pods can be reached: the key comes by the standard input,
and each change of a gateway's answer is a line of JSON.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PAUSE = 0.02
ROOT = Path(__file__).resolve().parents[2]


class Knocks:
    """What was answered so far, by address."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.since: dict[str, float] = {}
        """When the answer changed to what it is; `time.time()`."""

    def heard(self, line: str) -> None:
        change: dict[str, Any] = json.loads(line)
        self.last[change["address"]] = change["status"]
        self.since[change["address"]] = change["at"]

    def all_say(self, status: int, count: int) -> bool:
        return len(self.last) == count and set(self.last.values()) == {status}


@contextmanager
def knocking(prefix: Sequence[str], addresses: Sequence[str], key: str) -> Generator[Knocks]:
    """Knocks until the context ends; `prefix` is what runs a program in the lab."""
    command = [*prefix, sys.executable, "-m", "tests.support.knocking", *addresses]
    knocks = Knocks()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(key + "\n")
        process.stdin.flush()
        lines = process.stdout
        reader = threading.Thread(target=lambda: [knocks.heard(line) for line in lines])
        reader.start()
        try:
            yield knocks
        finally:
            # Its end, and not a signal: that would only reach the program that entered the lab.
            process.stdin.close()
            process.wait(20)
            reader.join(10)


def _knock(address: str, key: str, say: threading.Lock) -> None:
    last = 0
    connection: http.client.HTTPConnection | None = None
    while True:
        try:
            connection = connection or http.client.HTTPConnection(address, timeout=5)
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection, status = None, -1
        if status != last:
            last = status
            with say:
                print(json.dumps({"address": address, "status": status, "at": time.time()}), flush=True)
        time.sleep(_PAUSE)


def main() -> None:
    key, say = sys.stdin.readline().strip(), threading.Lock()
    threads = [threading.Thread(target=_knock, args=(address, key, say), daemon=True) for address in sys.argv[1:]]
    for thread in threads:
        thread.start()
    sys.stdin.read()  # until nobody listens any more


if __name__ == "__main__":
    main()
