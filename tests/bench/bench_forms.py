"""What forms with audio hold in the gateway's memory while their engine takes them, plain and over mutual TLS.

    python -m tests.bench.bench_forms [--forms 16] [--mib 15]

All forms are sent at once. The engine takes nothing of any of them until the gateway's memory does not grow any more
(`waiting`), and then takes and answers them all (`peak`: the most of the whole run). Each figure is above what the
process had before, and beside it are the bodies themselves: what the gateway must hold, since a form may be sent to
another replica until the first byte of an answer.
"""

import argparse
import asyncio
import contextlib
import os
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.bench.bench_gateway import LOAD_CORE, PROXY_CORE, free_port, started
from tests.bench.gateway_process import API_KEY
from tests.support.mutual import InstallationPKI, model, process
from tests.support.recordings import TYPE, asked, wav

_ANSWER: Final = b'{"text":"a fox","usage":{"type":"duration","seconds":1}}'
_MIB: Final = 1024 * 1024


class Engine:
    """Takes nothing until it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.begun = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            self.begun += 1
            await self.may.wait()
            left = int(head.partition(b"content-length:")[2].split()[0])
            while left and (data := await reader.read(_MIB)):
                left -= len(data)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)
            writer.write(head + _ANSWER)
            await writer.drain()
        writer.close()


def memory(pid: int, name: str) -> float:
    """MiB: `VmRSS`, what a process has; `VmHWM`, the most that it had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:")) / 1024


async def send(port: int, body: bytes) -> int:
    """The answer's status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-type: %b\r\n"
        b"content-length: %d\r\n\r\n" % (API_KEY.encode(), TYPE, len(body))
    )
    view = memoryview(body)
    for at in range(0, len(body), 65_536):
        writer.write(view[at : at + 65_536])
        await writer.drain()
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def settled(pid: int) -> float:
    before = -1.0
    while (now := memory(pid, "VmRSS")) - before > 1.0:
        before = now
        await asyncio.sleep(1.0)
    return now


async def measure(folder: Path, forms: int, body: bytes, *, tls: bool) -> tuple[float, float]:
    """(waiting, peak) in MiB."""
    engine, port, context = Engine(), free_port(), None
    if tls:
        pki, own = InstallationPKI(), folder / "engine"
        pki.write(folder / "tls", process("gateway"))
        pki.write(own, model("uid"))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=own / "ca.crt")
        context.load_cert_chain(own / "tls.crt", own / "tls.key")
        os.environ["BENCH_TLS_DIR"] = str(folder / "tls")
    os.environ["SHOAL_GATEWAY_MAX_HELD_BODY_BYTES"] = str(4 * forms * len(body))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=context)
    upstream = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-m", "tests.bench.gateway_process", str(upstream), str(port), str(folder / "gateway")]
    running = started(command, port, folder / "gateway.log", PROXY_CORE)
    pid = await asyncio.to_thread(running.__enter__)
    try:
        engine.may.set()
        # Until records can be written, the gateway refuses.
        while (status := await send(port, asked(wav(0.1), model="bench"))) == 503:
            await asyncio.sleep(0.1)
        if status != 200:
            raise SystemExit(f"a small form is answered with {status}")
        engine.may.clear()
        engine.begun = 0
        before = memory(pid, "VmRSS")
        sending = [asyncio.create_task(send(port, body)) for _ in range(forms)]
        while engine.begun < forms:
            await asyncio.sleep(0.1)
        waiting = await settled(pid)
        engine.may.set()
        if (statuses := set(await asyncio.gather(*sending))) != {200}:
            raise SystemExit(f"forms were answered with {statuses}")
        return waiting - before, memory(pid, "VmHWM") - before
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)
        server.close()
        os.environ.pop("BENCH_TLS_DIR", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--forms", type=int, default=16, help="at one time")
    parser.add_argument("--mib", type=float, default=15.0, help="of each")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    body = asked(wav(arguments.mib * _MIB / 32_000), model="bench")
    bodies = arguments.forms * len(body) / _MIB
    print(f"{'MiB':<14}{'bodies':>10}{'waiting':>10}{'peak':>10}{'of the bodies':>16}")
    for name, tls in (("plain", False), ("mutual TLS", True)):
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            waiting, peak = asyncio.run(measure(Path(folder), arguments.forms, body, tls=tls))
        print(f"{name:<14}{bodies:>10.0f}{waiting:>10.0f}{peak:>10.0f}{peak / bodies:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
