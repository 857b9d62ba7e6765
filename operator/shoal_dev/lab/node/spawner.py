"""PID 1 of a node: forks containers, reaps them, and takes everything along when it ends.

The node is three processes. The one the lab started waits; its child is PID 1 of a new pid namespace (this loop); the
kubelet is a child of that. Whichever of them dies, PID 1 dies, and the kernel kills all that is left in the namespace:
no container outlives its node, however it ended. Mounts are in a mount namespace of the same life.

This process stays small and single-threaded, because it forks: a container costs a fork of a few MiB, not a new
interpreter. It speaks one JSON message per packet with the kubelet, file descriptors beside them.
"""

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import termios
from collections.abc import Callable
from typing import Any, NoReturn

from shoal_dev.lab.node import linux, rootfs

MAX_MESSAGE = 1 << 20
"""Bytes. A container's spec with its whole environment."""
_NAMESPACES = linux.CLONE_NEWNET | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC
_NAMESPACE_FILES = ("net", "uts", "ipc")


def start_node(kubelet: Callable[[socket.socket], None]) -> int:
    """Runs a node until it ends; returns the exit code for the process. `kubelet` runs in the innermost process."""
    linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS)
    # slave: mounts that this machine makes later appear, ours never leave
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_SLAVE)
    orphaned, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        linux.die_with_parent()
        if select.select([orphaned], [], [], 0)[0]:
            os._exit(1)  # end of file: the parent died between fork and prctl
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        _init(kubelet)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: os.kill(pid, signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda number, _frame: os.kill(pid, number))
    _, status = os.waitpid(pid, 0)
    return max(os.waitstatus_to_exitcode(status), 0)


def _init(kubelet: Callable[[socket.socket], None]) -> NoReturn:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, MAX_MESSAGE)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ours.close()
            kubelet(theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    code = Spawner(ours, pid).loop()
    os._exit(code)


class Spawner:
    """Serves the kubelet's requests. One at a time: each takes milliseconds."""

    def __init__(self, kubelet: socket.socket, kubelet_pid: int) -> None:
        self._kubelet = kubelet
        self._kubelet_pid = kubelet_pid
        self._sandboxes: dict[str, list[int]] = {}

    def loop(self) -> int:
        """Until the kubelet ends; its exit code."""
        wake, alarm = os.pipe()
        os.set_blocking(alarm, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: os.kill(self._kubelet_pid, signal.SIGTERM))
        signal.signal(signal.SIGHUP, lambda number, _frame: os.kill(self._kubelet_pid, number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        poll.register(self._kubelet, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._kubelet.fileno() in ready and not self._serve():
                poll.unregister(self._kubelet)  # the kubelet is gone; its SIGCHLD follows
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                code = self._reap()
                if code is not None:
                    return code

    def _serve(self) -> bool:
        """False at the end of the kubelet."""
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        data, ancillary, _, _ = self._kubelet.recvmsg(MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            return False
        request = json.loads(data)
        try:
            answer = getattr(self, f"_do_{request['do']}")(request, list(fds))
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        finally:
            for fd in fds:
                os.close(fd)
        self._send({"id": request["id"], **answer})
        return True

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._kubelet.send(json.dumps(message).encode())

    def _reap(self) -> int | None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            code = os.waitstatus_to_exitcode(status)
            if pid == self._kubelet_pid:
                return max(code, 0)
            self._send({"exited": pid, "code": code if code >= 0 else 128 - code})

    # --- requests: each returns the answer, or raises OSError with a sentence for the pod's status -------------------

    def _do_sandbox(self, request: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """A pod's network, host name and IPC namespaces, kept by open files: no process, no name to clean up."""
        own = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _NAMESPACE_FILES]
        try:
            linux.unshare(_NAMESPACES)
            made = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _NAMESPACE_FILES]
            socket.sethostname(request["hostname"])
            # as container runtimes do: a non-root user may listen on port 80
            with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w") as file:
                file.write("0")
        finally:
            for fd in own:
                linux.setns(fd, 0)
                os.close(fd)
        self._sandboxes[request["sandbox"]] = made
        return {"network": f"/proc/{os.getpid()}/fd/{made[0]}"}

    def _do_drop(self, request: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        for fd in self._sandboxes.pop(request["sandbox"], ()):
            os.close(fd)
        return {}

    def _do_start(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """A container: stdout and stderr are the given files."""
        spec: rootfs.ContainerSpec = request["spec"]
        for name in ("upper", "work", "root"):
            os.makedirs(f"{spec['folder']}/{name}", exist_ok=True)

        def in_child() -> None:
            for fd in self._sandboxes[spec["sandbox"]]:
                linux.setns(fd, 0)
            rootfs.build(spec)
            rootfs.become(spec["user"])
            rootfs.run(spec["argv"], spec["env"], spec["cwd"])

        return self._fork(in_child, fds, linux.CLONE_NEWPID | linux.CLONE_NEWNS)

    def _do_exec(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """A further process in a running container. The first given file is the container's pidfd."""
        pidfd, *streams = fds

        def in_child() -> None:
            linux.setns(pidfd, linux.CLONE_NEWNS | _NAMESPACES)
            if request["tty"]:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            rootfs.become(request["user"])
            rootfs.run(request["argv"], request["env"], request["cwd"])

        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        try:
            linux.setns(pidfd, linux.CLONE_NEWPID)  # of this process's next children, not of itself
            return self._fork(in_child, streams, 0)
        finally:
            linux.setns(own, linux.CLONE_NEWPID)
            os.close(own)

    def _fork(self, in_child: Callable[[], None], fds: list[int], unshare: int) -> dict[str, Any]:
        """Forks a child that runs `in_child`, which must exec. Answers when it has: with its pid, or its error."""
        own = os.open("/proc/self/ns/pid", os.O_RDONLY) if unshare & linux.CLONE_NEWPID else None
        errors, report = os.pipe()  # close-on-exec: end of file means that exec succeeded
        try:
            if own is not None:
                linux.unshare(linux.CLONE_NEWPID)  # the next child is PID 1 of a new namespace
            pid = os.fork()
            if pid == 0:  # here, because a finally of the spawner must not run in the child
                self._child(in_child, fds, unshare & ~linux.CLONE_NEWPID, report)
        finally:
            if own is not None:
                linux.setns(own, linux.CLONE_NEWPID)
                os.close(own)
        os.close(report)
        error = b""
        with os.fdopen(errors, "rb") as file:
            error = file.read()
        if error:
            os.waitpid(pid, 0)
            return {"error": error.decode(errors="replace")}
        return {"pid": pid}

    def _child(self, in_child: Callable[[], None], fds: list[int], unshare: int, report: int) -> NoReturn:
        try:
            os.setsid()
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            stdin, stdout, stderr = fds if len(fds) == 3 else (os.open("/dev/null", os.O_RDONLY), *fds)
            for number, fd in enumerate((stdin, stdout, stderr)):
                os.dup2(fd, number)
            if unshare:
                linux.unshare(unshare)
            in_child()
        except BaseException as error:  # the child must never return into the spawner's loop
            text = str(error.strerror or error) if isinstance(error, OSError) else repr(error)
            os.write(report, text.encode()[:4000])
        finally:
            os._exit(127)
