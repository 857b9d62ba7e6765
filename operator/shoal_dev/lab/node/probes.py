"""Startup, readiness and liveness probes, with a kubelet's defaults."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import aiohttp

from shoal_dev.lab.node import fields
from shoal_dev.lab.node.runtime import ContainerProcess, StartError

Json = dict[str, Any]
Kind = Literal["startup", "readiness", "liveness"]
USER_AGENT = "kube-probe/1.36"
_OUTPUT_BYTES = 10_000


class ProbeTarget(Protocol):
    """The container as probes and hooks see it."""

    @property
    def spec(self) -> Json: ...
    @property
    def address(self) -> str: ...
    @property
    def http(self) -> aiohttp.ClientSession: ...
    async def exec(self, argv: list[str], streams: tuple[int, int]) -> ContainerProcess: ...


def port_number(spec: Json, port: int | str) -> int:
    """A probe's port by number or by a container port's name. Raises ValueError."""
    if isinstance(port, int):
        return port
    for declared in fields.items(spec, "ports"):
        if declared.get("name") == port:
            return declared["containerPort"]
    if port.isdigit():
        return int(port)
    raise ValueError(f'couldn\'t find port: "{port}"')


def url(spec: Json, action: Json, address: str) -> str:
    scheme = action.get("scheme", "HTTP").lower()
    path: str = action.get("path") or "/"
    host = action.get("host") or address
    return f"{scheme}://{host}:{port_number(spec, action['port'])}{path if path.startswith('/') else '/' + path}"


def headers(action: Json, agent: str) -> dict[str, str]:
    given = {header["name"]: header["value"] for header in fields.items(action, "httpHeaders")}
    return {"User-Agent": agent, "Accept": "*/*"} | given


async def check(target: ProbeTarget, probe: Json) -> str | None:
    """Probes once; None is success, else the message of the event."""
    seconds = int(probe.get("timeoutSeconds") or 1)
    try:
        async with asyncio.timeout(seconds):
            if "httpGet" in probe:
                return await _http(target, probe["httpGet"])
            if "tcpSocket" in probe:
                return await _tcp(target, probe["tcpSocket"])
            if "exec" in probe:
                return await run_command(target, fields.words(probe["exec"], "command"))
            return "the lab's nodes probe by httpGet, tcpSocket and exec"
    except TimeoutError:
        return f"command timed out after {seconds}s" if "exec" in probe else "context deadline exceeded"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return str(error) or type(error).__name__


async def _http(target: ProbeTarget, action: Json) -> str | None:
    address = url(target.spec, action, target.address)
    async with target.http.get(
        address, headers=headers(action, USER_AGENT), allow_redirects=False, ssl=False
    ) as answer:
        if 200 <= answer.status < 400:
            return None
        return f"HTTP probe failed with statuscode: {answer.status}"


async def _tcp(target: ProbeTarget, action: Json) -> str | None:
    host = action.get("host") or target.address
    _, writer = await asyncio.open_connection(host, port_number(target.spec, action["port"]))
    writer.close()
    return None


async def run_command(target: ProbeTarget, argv: list[str]) -> str | None:
    """Runs a command in the container; None for exit code 0, else its output. Kills it when cancelled."""
    read, write = os.pipe()
    process: ContainerProcess | None = None
    try:
        try:
            process = await target.exec(argv, (write, write))
        except StartError as error:
            return str(error)
        finally:
            os.close(write)
        code = await process.wait()
        os.set_blocking(read, False)
        try:
            output = os.read(read, _OUTPUT_BYTES).decode(errors="replace").strip()
        except BlockingIOError:
            output = ""
        return None if code == 0 else output or f"command exited with code {code}"
    finally:
        if process is not None and process.exit_code is None:
            process.send_signal(9)
        os.close(read)


@dataclass(slots=True)
class Reactions:
    """What the container does about results."""

    started: Callable[[], None]
    ready: Callable[[bool], None]
    unhealthy: Callable[[Kind, str], None]
    """One failed probe."""
    restart: Callable[[Kind], None]
    """The threshold of a startup or liveness probe is reached."""
    terminating: Callable[[], bool]


async def watch(target: ProbeTarget, reactions: Reactions, *, started: bool = False) -> None:
    """Runs the container's probes until cancelled; startup first, unless it is known to have `started`; the others
    after it."""
    spec = target.spec
    if "startupProbe" in spec and not started:
        if not await _repeat(target, "startup", spec["startupProbe"], reactions):
            return
        reactions.started()
        if "readinessProbe" not in spec:
            reactions.ready(True)
    loops: list[Awaitable[bool]] = [
        _repeat(target, kind, spec[f"{kind}Probe"], reactions)
        for kind in ("readiness", "liveness")
        if f"{kind}Probe" in spec
    ]
    await asyncio.gather(*loops)


async def _repeat(target: ProbeTarget, kind: Kind, probe: Json, reactions: Reactions) -> bool:
    """True when a startup probe has passed; False when there is nothing more to probe."""
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    good = bad = 0
    while True:
        # during termination a kubelet goes on with readiness only
        if reactions.terminating() and kind != "readiness":
            return False
        message = await check(target, probe)
        if reactions.terminating() and kind != "readiness":
            return False
        if message is None:
            good, bad = good + 1, 0
            if good >= int(probe.get("successThreshold") or 1):
                if kind == "startup":
                    return True
                if kind == "readiness":
                    reactions.ready(True)
        else:
            good, bad = 0, bad + 1
            reactions.unhealthy(kind, message)
            if bad >= int(probe.get("failureThreshold") or 3):
                if kind == "readiness":
                    reactions.ready(False)
                else:
                    reactions.restart(kind)
                    return False
        await asyncio.sleep(int(probe.get("periodSeconds") or 10))
