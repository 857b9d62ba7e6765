"""The kubelet's side of the spawner: start a container, run something in it, learn when it ended."""

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from shoal_dev.lab.node.rootfs import ContainerSpec, User
from shoal_dev.lab.node.spawner import MAX_MESSAGE

START_SECONDS = 30.0
"""Mounting and exec take milliseconds; this bounds a machine in trouble."""


class StartError(Exception):
    """The container's program could not be started. The message is the container's status message."""


class ContainerProcess:
    """A container's main process, or one started in it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        """128 + signal when a signal ended it."""
        self._ended = asyncio.Event()
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None  # ended already; the message is on its way

    async def wait(self) -> int:
        await self._ended.wait()
        return -1 if self.exit_code is None else self.exit_code

    def send_signal(self, number: int) -> None:
        """To this process alone, as a container runtime does: not to its process group."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def pidfd(self) -> int:
        """Raises StartError when the process has ended."""
        if self._pidfd is None:
            raise StartError("container not running")
        return self._pidfd

    def ended(self, code: int) -> None:
        self.exit_code = code
        self._ended.set()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Runtime:
    """Owns the socket to the spawner."""

    def __init__(self, spawner: socket.socket) -> None:
        self._socket = spawner
        self._socket.setblocking(False)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._processes: dict[int, ContainerProcess] = {}
        self._next = 0
        self._writable = asyncio.Lock()
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    async def sandbox(self, key: str, hostname: str) -> str:
        """Makes a pod's namespaces; returns the path of its network namespace."""
        answer = await self._ask({"do": "sandbox", "sandbox": key, "hostname": hostname[:63]})
        return answer["network"]

    async def drop(self, key: str) -> None:
        """The pod's namespaces go when its last process has gone."""
        await self._ask({"do": "drop", "sandbox": key})

    async def start(self, spec: ContainerSpec, output: int) -> ContainerProcess:
        """Starts a container whose stdout and stderr go to `output`. Raises StartError."""
        return await self._ask({"do": "start", "spec": spec}, (output, output))

    async def exec(
        self,
        container: ContainerProcess,
        argv: Sequence[str],
        env: dict[str, str],
        cwd: str,
        user: User,
        streams: Sequence[int],
        tty: bool = False,
    ) -> ContainerProcess:
        """Runs a command in a running container; `streams` are stdout and stderr, or stdin before them."""
        request = {"do": "exec", "argv": list(argv), "env": env, "cwd": cwd, "user": user, "tty": tty}
        return await self._ask(request, (container.pidfd, *streams))

    async def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        self._next += 1
        number = self._next
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        message = json.dumps(request | {"id": number}).encode()
        if len(message) > MAX_MESSAGE:
            raise StartError(f"environment and arguments are too long ({len(message)} bytes)")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with asyncio.timeout(START_SECONDS), self._writable:
            while True:
                try:
                    self._socket.sendmsg([message], rights)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(START_SECONDS):
            return await asyncio.shield(answer)

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            if not data:  # PID 1 is gone, and so will be this process
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                return
            self._handle(json.loads(data))

    def _handle(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            process = self._processes.pop(message["exited"], None)
            if process is not None:  # else an orphan of an exec, adopted by PID 1
                process.ended(message["code"])
            return
        answer = self._answers.pop(message["id"])
        result: Any = message
        if "pid" in message:
            # registered here and not by the waiter: the next message may be its end
            result = self._processes[message["pid"]] = ContainerProcess(message["pid"])
        if answer.done():
            return
        if "error" in message:
            answer.set_exception(StartError(message["error"]))
        else:
            answer.set_result(result)
