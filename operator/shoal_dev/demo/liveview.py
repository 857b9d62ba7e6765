"""What a Model does over time, as the operator tells it: a live view, and one line at the end."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.api.decisions import ModelScaling
from shoal.cli.client import Unreachable
from shoal.cli.scaling.totals import line
from shoal.cli.services import OperatorClient
from shoal.kube.errors import KubeError

INTERVAL_SECONDS: Final = 0.25
BARS: Final = " ▂▄▆█"
STRIP: Final = 70
"""Frames that the strip shows."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at the Model."""

    at: float
    """Seconds since the view began."""
    metrics: ModelScaling


class LiveView:
    """Looks at one Model again and again: an async context manager, for as long as its body runs."""

    def __init__(self, operator: OperatorClient, namespace: str, name: str, console: Console):
        self.frames: list[Frame] = []
        self._operator, self._namespace, self._name, self._console = operator, namespace, name, console
        self._began = time.monotonic()
        self._problem = ""
        self._doing = ""
        self._live: Live | None = None
        self._printed = ""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def until(
        self,
        done: Callable[[ModelScaling], bool],
        within: float,
        doing: str,
        beside: "asyncio.Task[object] | None" = None,
    ) -> Frame:
        """The first frame from now on of which `done` holds. Raises ClickException with what the Model says instead
        when that takes more than `within` seconds, and what ended the task `beside`."""
        self._doing = doing
        deadline, seen = self.seconds + within, len(self.frames)
        while True:
            while seen < len(self.frames):
                if done(self.frames[seen].metrics):
                    return self.frames[seen]
                seen += 1
            for task in (self._task, beside):
                if task is not None and task.done() and (problem := task.exception()):
                    raise problem
            if self.seconds > deadline:
                raise click.ClickException(f"not within {within:.0f} s: {doing}. {self._message()}")
            await asyncio.sleep(INTERVAL_SECONDS / 2)

    async def _run(self) -> None:
        if not self._console.is_terminal:
            await self._follow()
            return
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            self._live = live
            try:
                await self._follow()
            finally:
                self._live = None

    async def _follow(self) -> None:
        while True:
            try:
                answer = await self._operator.one(self._namespace, self._name)
            except (Unreachable, KubeError) as error:  # the view goes on; whoever waits has a deadline
                self._problem = str(error)
            else:
                self._problem = ""
                self.frames.append(Frame(self.seconds, answer.models[0]))
            self._show()
            await asyncio.sleep(INTERVAL_SECONDS)

    def _message(self) -> str:
        if not self.frames:
            return self._problem or "the operator has told nothing of it yet"
        last = self.frames[-1].metrics
        stale = f"; stale signals: {', '.join(last.stale)}" if last.stale else ""
        return f"It has {last.ready_replicas} of {last.wanted} replicas; {last.reason}: {last.message}{stale}" + (
            f"; {self._problem}" if self._problem else ""
        )

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(picture(self.frames, self._doing, self._problem), refresh=True)
        elif self.frames:
            # A line only when something changed: a log, not a live view.
            last = self.frames[-1].metrics
            now = f"{last.ready_replicas}/{last.wanted} replicas, {last.reason}"
            if now != self._printed:
                self._printed = now
                self._console.print(f"  {self.seconds:5.1f} s  {now}", markup=False)


def picture(frames: Sequence[Frame], doing: str, problem: str = "") -> Group:
    """Figures of now, and replicas that serve over time."""
    table = Table(show_edge=False, box=None, pad_edge=False)
    for heading in ("  replicas", "held", "in flight", "queue", "KV %", "req/s", "tok/s", "cost/h"):
        table.add_column(heading, justify="right")
    table.add_column("why", overflow="ellipsis", no_wrap=True)
    if frames:
        model = frames[-1].metrics
        now = line([model])
        kv = "?" if now.kv_percent is None else now.kv_percent
        table.add_row(
            f"{now.ready}/{now.wanted}",
            *(one.text() for one in (now.held, now.in_flight, now.queue)),
            kv if isinstance(kv, str) else f"{kv:.0f}",
            now.requests.text(lambda value: f"{value:.1f}"),
            now.tokens.text(),
            now.cost.text(lambda value: f"{value:.2f}"),
            Text(f"{model.reason}: {model.message}"),
        )
    notes = [Text(f"  {problem}", style="yellow")] if problem else []
    return Group(Text(f"  {doing}", style="bold"), table, Text(f"  {strip(frames)}", style="green"), *notes)


def strip(frames: Sequence[Frame]) -> str:
    """Replicas that serve, a character per frame, the last ones."""
    shown = [frame.metrics.ready_replicas for frame in frames[-STRIP:]]
    most = max([*(frame.metrics.ready_replicas for frame in frames), 1])
    return "".join(BARS[-(-ready * (len(BARS) - 1) // most)] for ready in shown)


def history(frames: Sequence[Frame]) -> str:
    """Replicas that serve, with the second at which they changed: `1, 9 s: 0, 14 s: 1`."""
    parts: list[str] = []
    before: int | None = None
    for frame in frames:
        if (ready := frame.metrics.ready_replicas) != before:
            parts.append(f"{ready}" if before is None else f"{frame.at:.0f} s: {ready}")
            before = ready
    return ", ".join(parts)
