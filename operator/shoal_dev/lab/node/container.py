"""One container: start, probes, restart with back-off, stop."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from shoal_dev.lab.kubeapi import KubeAPIError
from shoal_dev.lab.node import fields, hooks, images, launch, memory, probes
from shoal_dev.lab.node.env import ConfigError
from shoal_dev.lab.node.launch import Launch
from shoal_dev.lab.node.logs import LogWriter, tail_of
from shoal_dev.lab.node.objects import MissingObject
from shoal_dev.lab.node.runtime import ContainerProcess, StartError
from shoal_dev.lab.node.status import ContainerRecord, Kind, terminated, timestamp

if TYPE_CHECKING:
    from shoal_dev.lab.node.pod import NodePod

Json = dict[str, Any]

FIRST_BACKOFF = 10.0
LONGEST_BACKOFF = 300.0
HEALTHY_SECONDS = 600.0
"""A run of this length resets the back-off."""
RESTART_SECONDS = 1.0
"""A kubelet notices an exit at its next relist; the first restart comes after this."""
CONFIG_RETRY_SECONDS = 2.0
MINIMUM_STOP_SECONDS = 2.0
"""A process has so long after SIGTERM even when hooks used up the grace period."""
FORCED_STOP_SECONDS = 0.5
KILL_SECONDS = 10.0
_MESSAGE_BYTES = 4096
_LOG_MESSAGE_BYTES = 2048


class GraceBudget:
    """The grace period that all containers of a pod share, and that a later deletion may shorten."""

    def __init__(self, seconds: float, minimum: float = MINIMUM_STOP_SECONDS) -> None:
        self._end = time.monotonic() + seconds
        self.minimum = minimum
        self.shortened = asyncio.Event()

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def shorten(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        if end < self._end:
            self._end = end
            self.shortened.set()
            self.shortened = asyncio.Event()


class NodeContainer:
    """Implements `probes.Target`."""

    def __init__(self, pod: "NodePod", spec: Json, kind: Kind) -> None:
        self.pod = pod
        self.spec = spec
        self.name: str = spec["name"]
        self.kind: Kind = kind
        has_inits = bool(pod.spec.get("initContainers"))
        waiting = "PodInitializing" if has_inits else "ContainerCreating"
        self.record = ContainerRecord(self.name, spec["image"], kind, {"waiting": {"reason": waiting}})
        self.process: ContainerProcess | None = None
        self.launch: Launch | None = None
        self.up = asyncio.Event()
        """Started: running and past its startup probe."""
        self.done = asyncio.Event()
        """Will not be started again."""
        self.exit: Json | None = None
        """How it ended while the pod terminates; reported with the pod's last status."""
        self._killing: asyncio.Task[None] | None = None
        self._calling: asyncio.Task[None] | None = None
        """The hook under way."""
        self._watching: asyncio.Task[None] | None = None
        """Its probes."""
        self.no_restart_due = asyncio.Event()
        """Cleared from a failed probe's kill until the container runs again: the pod's end waits for that."""
        self.no_restart_due.set()
        self._backoff = 0.0
        self._out_of_memory = False
        """The present process was killed at the memory limit."""
        self._began = time.monotonic()
        self._started_at = ""

    # --- probes.Target ----------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self.pod.address

    @property
    def http(self) -> aiohttp.ClientSession:
        return self.pod.node.http

    async def exec(self, argv: list[str], streams: tuple[int, ...], tty: bool = False) -> ContainerProcess:
        """Raises StartError."""
        if self.process is None or self.launch is None or self.process.exit_code is not None:
            raise StartError("container not running")
        made = self.launch.spec
        return await self.pod.node.runtime.exec(
            self.process, argv, made["env"], made["cwd"], made["user"], streams, tty
        )

    # --- the life of a container ------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        policy = self.pod.spec.get("restartPolicy", "Always")
        if self.kind == "sidecar":
            return "Always"
        return "OnFailure" if self.kind == "init" and policy == "Always" else policy

    async def run(self) -> None:
        """Starts the container again and again, as its restart policy says, until then or until the pod ends."""
        try:
            while self._may_start():
                process = await self._start()
                if process is not None:
                    await self._attend(process)
                    if self.pod.terminating:
                        return
                if not await self._restarts():
                    return
        finally:
            self.no_restart_due.set()
            self.done.set()

    def _may_start(self) -> bool:
        """Not in a pod that ends, but for a restart that a probe began before: a kubelet first finishes that."""
        return not self.pod.ending or not (self.pod.terminating or self.no_restart_due.is_set())

    async def _start(self) -> ContainerProcess | None:
        """The running process; None when it failed to start and the record says how it ended."""
        pull = 0.0
        while self._may_start():
            self._started_at, self._began = timestamp(), time.monotonic()
            try:
                self.launch = await launch.prepare(self)
                return await self._launch(self.launch)
            except images.UnknownImage as error:
                self.event("Failed", str(error), "Warning")
                self._wait_state("ErrImagePull", str(error))
                if pull:
                    self.event("BackOff", f'Back-off pulling image "{self.spec["image"]}"')
                    self._wait_state("ImagePullBackOff", f'Back-off pulling image "{self.spec["image"]}": {error}')
                pull = min(pull * 2, LONGEST_BACKOFF) or FIRST_BACKOFF
                await self.pod.pause(pull)
            except (ConfigError, MissingObject) as error:
                self.event("Failed", f"Error: {error}", "Warning")
                self._wait_state("CreateContainerConfigError", str(error))
                await self.pod.pause(CONFIG_RETRY_SECONDS)
            except launch.CreateError as error:
                self.event("Failed", f"Error: {error}", "Warning")
                self._wait_state("CreateContainerError", str(error))
                await self.pod.pause(FIRST_BACKOFF)
            except (KubeAPIError, aiohttp.ClientError, TimeoutError, OSError):
                await self.pod.pause(
                    CONFIG_RETRY_SECONDS
                )  # the API server is away, or the machine is short of something
            except StartError as error:
                message = f"failed to create containerd task: failed to start container process: {error}"
                self.event("Failed", f"Error: {message}", "Warning")
                self.record.state = {"terminated": terminated(128, self._started_at, "", message, "StartError")}
                self.pod.changed()
                return None
            finally:
                self.no_restart_due.set()
        return None

    async def _launch(self, made: Launch) -> ContainerProcess:
        image = self.spec["image"]
        self.event("Pulled", f'Container image "{image}" already present on machine')
        writer = LogWriter(made.log)
        try:
            process = await self.pod.node.runtime.start(made.spec, writer.output)
        except BaseException:
            writer.started()
            writer.close()
            raise
        writer.started()
        self.event("Created", f"Container created: {self.name}")
        self.event("Started", f"Container started: {self.name}")
        self.process = process
        record = self.record
        record.container_id = f"process://{self.pod.uid}/{self.name}/{record.restarts}"
        record.state = {"running": {"startedAt": self._started_at}}
        record.started = "startupProbe" not in self.spec
        # an init container is "ready" when it has completed
        record.ready = record.started and "readinessProbe" not in self.spec and self.kind != "init"
        if record.started:
            self.up.set()
        self._write_enter_file(made, process)
        self.pod.changed()
        return process

    async def _attend(self, process: ContainerProcess) -> None:
        """Until the process has ended; then the record says how."""
        watching = self._watching = asyncio.create_task(probes.watch(self, self._reactions()))
        measuring = self._enforce_memory(process)
        try:
            code = await process.wait()
            if self.pod.terminating:
                # like a kubelet: readiness is probed on, and no single container's end is reported
                self.exit = self._terminated(code)
                self.pod.keep(self._watching or watching)
                return
            self._stop_watching()
            if self._killing is not None:
                await asyncio.wait([self._killing])
                self._killing = None
            self.record.state = {"terminated": self._terminated(code)}
            if self.pod.terminating:
                self.exit = self.record.state["terminated"]
                return
            self.record.started = False
            self.record.ready = self.kind == "init" and code == 0
            self.up.clear()
            self.pod.changed()
        finally:
            if measuring is not None:
                measuring.cancel()
            if not self.pod.terminating:
                self._stop_watching()
            self._enter_file.unlink(missing_ok=True)

    def _enforce_memory(self, process: ContainerProcess) -> asyncio.Task[None] | None:
        """Kills the container above its memory limit, where the pod asks for that; None: it does not."""
        self._out_of_memory = False
        limit = memory.limit_of(self.pod.metadata, self.spec)
        if limit is None:
            return None

        def kill() -> None:
            self._out_of_memory = True
            process.send_signal(signal.SIGKILL)

        return asyncio.create_task(memory.enforce(process.pid, limit, kill))

    async def _restarts(self) -> bool:
        """Waits as long as the back-off says; False when the container is not to be started again."""
        record = self.record
        end = record.terminated
        if end is None or self.policy == "Never" or (self.policy == "OnFailure" and end["exitCode"] == 0):
            return False
        if time.monotonic() - self._began > HEALTHY_SECONDS:
            self._backoff = 0.0
        if self.no_restart_due.is_set():  # else the kubelet killed it itself, and starts it in the same breath
            await self.pod.pause(RESTART_SECONDS)
        record.last = {"terminated": end}
        if self._backoff and not self.pod.ending:
            metadata = self.pod.metadata
            who = f"container={self.name} pod={metadata['name']}_{metadata['namespace']}({self.pod.uid})"
            self._wait_state("CrashLoopBackOff", f"back-off {_duration(self._backoff)} restarting failed {who}")
            name = f"{metadata['name']}_{metadata['namespace']}({self.pod.uid})"
            self.event("BackOff", f"Back-off restarting failed container {self.name} in pod {name}", "Warning")
            await self.pod.pause(self._backoff)
        if not self._may_start():
            return False
        record.restarts += 1
        self._backoff = min(self._backoff * 2, LONGEST_BACKOFF) or FIRST_BACKOFF
        return True

    def _reactions(self) -> probes.Reactions:
        def started() -> None:
            self.record.started = True
            self.up.set()
            self.pod.changed()

        def ready(value: bool) -> None:
            if self.record.ready != value:
                self.record.ready = value
                self.pod.changed()

        def unhealthy(kind: probes.Kind, message: str) -> None:
            self.event("Unhealthy", f"{kind.capitalize()} probe failed: {message}", "Warning")

        def restart(kind: probes.Kind) -> None:
            if not self.pod.ending and self._killing is None:
                self.no_restart_due.clear()
                self.event("Killing", f"Container {self.name} failed {kind} probe, will be restarted")
                probe: Json = self.spec[f"{kind}Probe"]
                seconds = probe.get("terminationGracePeriodSeconds") or self.pod.grace
                self._killing = asyncio.create_task(self.stop(GraceBudget(seconds), quiet=True))

        return probes.Reactions(started, ready, unhealthy, restart, lambda: self.pod.terminating)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def kubelet_restarted(self) -> None:
        """Lost: what probes have counted, a kill that one has begun, the connection of a hook. The container runs on,
        and what had been found of it stays in the status."""
        if self._killing is not None:
            self._killing.cancel()
            self._killing = None
            self.no_restart_due.set()
        if self._calling is not None:
            self._calling.cancel()
        if self._watching is not None and not (self.process is None or self.process.exit_code is not None):
            self._watching.cancel()
            again = probes.watch(self, self._reactions(), started=self.record.started)
            self._watching = asyncio.create_task(again)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def stop(
        self, budget: GraceBudget, turn: Callable[[], Awaitable[None]] | None = None, quiet: bool = False
    ) -> None:
        """preStop hook, then the turn (sidecars), then SIGTERM, then SIGKILL; all out of one budget."""
        process = self.process
        if process is None or process.exit_code is not None:
            return
        if not quiet:
            self.event("Killing", f"Stopping container {self.name}")
        hook: Json | None = fields.mapping(self.spec, "lifecycle").get("preStop")
        if hook:
            # the hook is not cut when the time is up: a kubelet leaves its connection open
            task = self._calling = asyncio.create_task(self._hook(hook))
            self.pod.keep(task)
            await asyncio.wait([task], timeout=budget.left())
        if turn is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(budget.left()):
                    await turn()
        if process.exit_code is not None:
            return
        process.send_signal(signal.SIGTERM)
        await self._wait_end(process, budget)
        if process.exit_code is None:
            process.send_signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    await process.wait()

    async def _wait_end(self, process: ContainerProcess, budget: GraceBudget) -> None:
        floor = time.monotonic() + budget.minimum
        while process.exit_code is None:
            left = max(budget.left(), floor - time.monotonic())
            if left <= 0:
                return
            tasks = [asyncio.create_task(process.wait()), asyncio.create_task(budget.shortened.wait())]
            await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _hook(self, hook: Json) -> None:
        try:
            await hooks.run(self, hook)
        except hooks.HookFailed:
            self.event("FailedPreStopHook", "PreStopHook failed", "Warning")

    def settle(self) -> None:
        """The record's last state, when the pod is over."""
        record = self.record
        record.ready = record.started = False
        if self.exit is not None:
            record.state = {"terminated": self.exit}
        elif record.terminated is None and self.kind != "init":
            # never started, or waiting to be started again: it ends as a kubelet reports such a container
            reason = "The container could not be located when the pod was terminated"
            record.state = {"terminated": terminated(137, "", "", reason, "ContainerStatusUnknown")}
            record.state["terminated"]["startedAt"] = None

    def _terminated(self, code: int) -> Json:
        reason = "OOMKilled" if self._out_of_memory else ""
        return terminated(code, self._started_at, self.record.container_id, self._message(code), reason)

    def _message(self, code: int) -> str:
        if self.launch is None:
            return ""
        try:
            with self.launch.message.open("rb") as file:
                text = file.read(_MESSAGE_BYTES).decode(errors="replace")
        except OSError:
            text = ""
        if not text and code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            text = tail_of(self.launch.log, _LOG_MESSAGE_BYTES)
        return text

    # --- small things -----------------------------------------------------------------------------------------------

    def event(self, reason: str, message: str, kind: str = "Normal") -> None:
        self.pod.event(reason, message, kind, self.name)

    def _wait_state(self, reason: str, message: str) -> None:
        self.record.state = {"waiting": {"reason": reason, "message": message}}
        self.record.ready = False
        self.pod.changed()

    @property
    def _enter_file(self) -> Path:
        metadata = self.pod.metadata
        folder = self.pod.node.config.run_dir / "containers"
        return folder / f"{metadata['namespace']}_{metadata['name']}_{self.name}.json"

    def _write_enter_file(self, made: Launch, process: ContainerProcess) -> None:
        """For `enter.py`. By the mount namespace's number, which means the same in every pid namespace."""
        try:
            namespace = os.readlink(f"/proc/{process.pid}/ns/mnt")
        except OSError:
            return  # it has ended already
        content = {"mountNamespace": namespace, "env": made.spec["env"], "cwd": made.spec["cwd"], **made.spec["user"]}
        self._enter_file.parent.mkdir(parents=True, exist_ok=True)
        self._enter_file.touch(0o600)
        self._enter_file.write_text(json.dumps(content))


def _duration(seconds: float) -> str:
    """As Go prints it: 10s, 1m20s, 5m0s."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
