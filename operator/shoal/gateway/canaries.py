"""The canaries of routes at this gateway: how their last requests ended, and which of them are halted.

A halt holds from the moment in which one gateway decides it. The others, and the operator, hear of it by the demand
stream; the operator writes it into the route's status, from which gateways that start later know it. It ends when the
canary's specification changes, because that gives it another revision.
"""

from collections.abc import Callable, Iterable, Mapping

import structlog

from shoal.core.routing.canary import CanaryHalt, CanaryWindow
from shoal.core.routing.routes import DeclaredCanary, DeclaredRoute
from shoal.metering.meter import Meter

log = structlog.get_logger()


class Canaries:
    """Windows and halts by revision of the canary. `changed` is called when a halt was added or removed."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._windows: dict[str, CanaryWindow] = {}
        self._halts: dict[str, CanaryHalt] = {}
        self._known: frozenset[str] = frozenset()

    @property
    def halts(self) -> Mapping[str, CanaryHalt]:
        """Halted canaries."""
        return self._halts

    def is_halted(self, canary: DeclaredCanary) -> bool:
        """Whether no request may go to the canary."""
        return canary.halted or canary.revision in self._halts

    def ended(self, canary: DeclaredCanary, meter: Meter) -> None:
        """A request to the canary has ended, or went on to another target."""
        if self.is_halted(canary) or canary.revision not in self._known:
            return
        window = self._windows.get(canary.revision)
        if window is None:
            window = self._windows[canary.revision] = CanaryWindow(canary.limits)
        ttft = meter.seconds_to_first_byte if meter.fields["stream"] else None
        halt = window.note(meter.outcome, ttft)
        if halt is not None:
            log.warning("canary halted", canary=str(canary.ref), reason=halt.reason, bad=halt.bad, of=halt.of)
            self._halts[canary.revision] = halt
            self._changed()

    def heard(self, halts: Mapping[str, CanaryHalt]) -> None:
        """Another gateway has halted these."""
        new = {revision: halt for revision, halt in halts.items() if revision in self._known - self._halts.keys()}
        if new:
            self._halts |= new
            self._changed()

    def follow(self, routes: Iterable[DeclaredRoute]) -> None:
        """Keeps what belongs to the canaries of these routes."""
        self._known = frozenset(
            rule.canary.revision for route in routes for rule in route.rules if rule.canary is not None
        )
        self._windows = {at: window for at, window in self._windows.items() if at in self._known}
        kept = {at: halt for at, halt in self._halts.items() if at in self._known}
        if kept != self._halts:
            self._halts = kept
            self._changed()
