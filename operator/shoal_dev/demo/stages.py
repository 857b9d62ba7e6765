"""What the demo shows of its progress: a line per stage with its time, and a table while it waits."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass
class Stages:
    """Times the stages of a run and tells of them as they pass."""

    console: Console
    times: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    @contextmanager
    def stage(self, title: str, *, spin: bool = True) -> Generator[None]:
        """Runs one stage. `spin=False` for stages that print progress of their own."""
        start = time.monotonic()
        try:
            if spin and self.console.is_terminal:
                with self.console.status(title):
                    yield
            else:
                if self.console.is_terminal:
                    self.console.print(f"[bold]{title}[/]")
                yield
        except BaseException:
            self.console.print(f"[red]✗[/] {title} ({time.monotonic() - start:.1f} s)")
            raise
        seconds = time.monotonic() - start
        self.times.append((title, seconds))
        self.console.print(f"[green]✓[/] {title} ({seconds:.1f} s)")

    def summary(self) -> Table:
        """How long each stage took."""
        table = Table(title="Time", show_edge=False, title_justify="left")
        table.add_column("stage")
        table.add_column("s", justify="right")
        for title, seconds in self.times:
            table.add_row(title, f"{seconds:.1f}")
        table.add_row("[bold]in all[/]", f"[bold]{sum(s for _, s in self.times):.1f}[/]")
        return table
