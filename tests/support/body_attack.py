"""Clients that send bodies full of empty objects to a gateway, all at once, in a process of their own: `python -m
tests.support.body_attack FOLDER BODIES MIB [open]` prints what came of it as JSON. `open`: without the bounds."""

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.core.hold.limits import Limits
from tests.support.gateway import API_KEY, gateway

HEAD = b'{"model":"llama","messages":[{"role":"user","content":['
UNBOUNDED = dict.fromkeys(("max_body_values", "max_body_containers", "max_body_strings"), 10**9)


async def attack(folder: Path, bodies: int, mib: int, **settings: Any) -> dict[str, Any]:
    body = HEAD + b"{}," * (mib * 1024 * 1024 // 3 - 100) + b"{}]}]}"
    lag = 0.0

    async def watch() -> None:
        nonlocal lag
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lag = max(lag, time.monotonic() - before - 0.01)

    async with gateway(folder, **settings) as it:
        it.model(limits=Limits(max_requests=0))  # there is no replica: a good request is refused at once
        assert (await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}]})).status == 503
        before = peak()
        watching = asyncio.create_task(watch())

        async def one() -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
            view = memoryview(body)
            for at in range(0, len(body), 65536):
                writer.write(view[at : at + 65536])
                await writer.drain()
            status = int((await reader.readline()).split()[1])
            writer.close()
            return status

        statuses = Counter(await asyncio.gather(*(one() for _ in range(bodies))))
        watching.cancel()
        return {"statuses": statuses, "mib": peak() - before, "longest_stop_seconds": round(lag, 3)}


def peak() -> int:
    """MiB. `getrusage` would count what the process that started this one had."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) // 1024


if __name__ == "__main__":
    open_door = UNBOUNDED if "open" in sys.argv[4:] else {}
    Path(sys.argv[1]).mkdir(exist_ok=True)
    found = asyncio.run(attack(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), **open_door))
    sys.stdout.write(json.dumps(found) + "\n")
