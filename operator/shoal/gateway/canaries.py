"""The canaries of routes: how their last requests ended, here and at the other gateways, and which are halted.

Each gateway publishes in its demand stream what it has counted, and judges the counts of the others together with its
own requests. So gateways of which each sees too few failures halt a canary as soon as one gateway with all the requests
would, and a second later at most.

A halt holds from the moment in which one gateway decides it. The others, and the operator, hear of it by the demand
stream; the operator writes it into the route's status, from which gateways that start later know it. It ends when the
canary's specification changes, because that gives it another revision.
"""

from collections.abc import Callable, Iterable, Mapping

import structlog

from shoal.core.routing.canary import CanaryCounts, CanaryHalt, CanaryWindow
from shoal.core.routing.routes import DeclaredCanary, DeclaredRoute
from shoal.gateway.canarycounts import CanaryCountState
from shoal.metering.meter import Meter

log = structlog.get_logger()


class Canaries:
    """Windows and halts by revision of the canary. `changed` is called when a halt was added or removed. `counts`:
    what is published to the other gateways."""

    def __init__(self, changed: Callable[[], None] = lambda: None, counts: CanaryCountState | None = None) -> None:
        self._changed = changed
        self._counts = CanaryCountState() if counts is None else counts
        self._canaries: dict[str, DeclaredCanary] = {}
        self._windows: dict[str, CanaryWindow] = {}
        self._halts: dict[str, CanaryHalt] = {}

    @property
    def halts(self) -> Mapping[str, CanaryHalt]:
        """Halted canaries."""
        return self._halts

    def is_halted(self, canary: DeclaredCanary) -> bool:
        """Whether no request may go to the canary."""
        return canary.halted or canary.revision in self._halts

    def ended(self, canary: DeclaredCanary, meter: Meter, *, doubtful: bool = False) -> None:
        """A request to the canary has ended, or went on to another target. `doubtful`: if it failed, it may be the
        reason itself."""
        if self.is_halted(canary) or canary.revision not in self._canaries:
            return
        window = self._window(canary)
        # The wait for the first replica, or for an adapter's load, says nothing of how fast the canary is.
        timed = meter.fields["stream"] and not meter.cold
        ttft = meter.seconds_to_first_byte if timed else None
        waited = meter.seconds if timed and ttft is None else None
        halt = window.note(meter.outcome, ttft, waited_seconds=waited, doubtful=doubtful)
        self._counts.put(canary.revision, window.counts)
        self._judged(canary, halt)

    def counted(self, boot: str, counts: Mapping[str, CanaryCounts]) -> None:
        """The process of another gateway has counted this since it started, by revision."""
        for revision, count in counts.items():
            canary = self._canaries.get(revision)
            if canary is not None and not self.is_halted(canary):
                self._judged(canary, self._window(canary).heard(boot, count))

    def heard(self, halts: Mapping[str, CanaryHalt]) -> None:
        """Another gateway has halted these."""
        new = {revision: halt for revision, halt in halts.items() if revision in self._canaries.keys() - self._halts}
        if new:
            self._halts |= new
            self._changed()

    def follow(self, routes: Iterable[DeclaredRoute]) -> None:
        """Keeps what belongs to the canaries of these routes."""
        found = (rule.canary for route in routes for rule in route.rules)
        self._canaries = {canary.revision: canary for canary in found if canary is not None}
        self._windows = {at: window for at, window in self._windows.items() if at in self._canaries}
        self._counts.retain(self._canaries.keys())
        kept = {at: halt for at, halt in self._halts.items() if at in self._canaries}
        if kept != self._halts:
            self._halts = kept
            self._changed()

    def _window(self, canary: DeclaredCanary) -> CanaryWindow:
        window = self._windows.get(canary.revision)
        if window is None:
            window = self._windows[canary.revision] = CanaryWindow(canary.limits)
        return window

    def _judged(self, canary: DeclaredCanary, halt: CanaryHalt | None) -> None:
        if halt is not None:
            log.warning("canary halted", canary=str(canary.ref), reason=halt.reason, bad=halt.bad, of=halt.of)
            self._halts[canary.revision] = halt
            self._changed()
