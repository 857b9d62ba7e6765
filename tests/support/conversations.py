"""Chat completions through single gateways. As a program it runs inside the lab's network, where pods can be reached.

The standard input has the key, then one JSON object: an address, bodies, and how many of them to send at a time. The
output is a list of what came of each, in order.
"""

import http.client
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Said:
    """An answer. `request`: its id."""

    status: int
    request: str
    text: str
    prompt: int
    cached: int
    """Of the prompt's tokens, as the engine counted them."""


def say(
    prefix: Sequence[str], address: str, key: str, bodies: Sequence[dict[str, Any]], *, at_once: int = 1
) -> list[Said]:
    """`prefix` is what runs a program in the lab."""
    asked = json.dumps({"address": address, "bodies": list(bodies), "atOnce": at_once})
    command = [*prefix, sys.executable, "-m", "tests.support.conversations"]
    done = subprocess.run(
        command, input=f"{key}\n{asked}\n", capture_output=True, text=True, cwd=_ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Said(**each) for each in json.loads(done.stdout)]


def _ask(address: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        said = json.loads(answer.read())
    finally:
        connection.close()
    usage = said.get("usage", {})
    return {
        "status": answer.status,
        "request": answer.headers.get("x-shoal-request-id", ""),
        "text": said["choices"][0]["message"]["content"] if "choices" in said else json.dumps(said),
        "prompt": usage.get("prompt_tokens", 0),
        "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    }


def main() -> None:
    key, asked = sys.stdin.readline().strip(), json.loads(sys.stdin.readline())
    with ThreadPoolExecutor(asked["atOnce"]) as threads:
        json.dump(list(threads.map(lambda body: _ask(asked["address"], key, body), asked["bodies"])), sys.stdout)


if __name__ == "__main__":
    main()
