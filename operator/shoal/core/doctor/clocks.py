"""Clocks: tokens, certificates and signals are judged by them."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread

DIFFERS: Final = "ClockDiffers"
AHEAD: Final = "NodeClockAhead"
SILENT: Final = "NodeLeaseLate"
TOLERATED: Final = timedelta(seconds=5)
_MUCH: Final = timedelta(seconds=60)
"""Tokens and certificates that were just made are not valid yet for a clock that differs by this."""


def check(seen: DoctorSnapshot, now: datetime) -> Iterator[DoctorResult]:
    """The reader's clock against the API server's, and those of nodes against it."""
    yield _reader(seen)
    yield from _nodes(seen, now)


def _reader(seen: DoctorSnapshot) -> DoctorResult:
    name, clock = "clock", seen.clock
    if isinstance(clock, Unread):
        return unread(name, Layer.CONTROL, clock)
    if clock is None or clock.server is None:
        return result(name, "unknown", "NoDate", Layer.CONTROL, "the API server's answers have no date",
                      "Compare the clocks by hand.")  # fmt: skip
    # The header has whole seconds: the server's time is within the second that follows it.
    early, late = clock.before - clock.server - timedelta(seconds=1), clock.server - clock.after
    off = max(early, late)
    if off <= TOLERATED:
        return ok(name, Layer.CONTROL, "this clock and the API server's agree")
    side = "ahead of" if early > late else "behind"
    text = f"the clock of this machine is {off.total_seconds():.0f} s {side} the API server's"
    outcome = "error" if off >= _MUCH else "warning"
    return result(name, outcome, DIFFERS, Layer.CONTROL, text, "Let a time service set both clocks (NTP).")


def _nodes(seen: DoctorSnapshot, now: datetime) -> Iterator[DoctorResult]:
    name = "clocks of nodes"
    if isinstance(seen.node_leases, Unread):
        yield unread(name, Layer.CONTAINER, seen.node_leases)
        return
    clock = seen.clock
    server = now
    if clock is not None and not isinstance(clock, Unread) and clock.server is not None:
        server = clock.server + (now - clock.after)
    ahead, late = list[str](), list[str]()
    for lease in seen.node_leases:
        if lease.renewed is None:
            continue
        if lease.renewed - server > TOLERATED:
            ahead.append(f"{lease.node} ({(lease.renewed - server).total_seconds():.0f} s)")
        elif server - lease.renewed > timedelta(seconds=lease.seconds) + TOLERATED:
            late.append(f"{lease.node} ({(server - lease.renewed).total_seconds():.0f} s)")
    if ahead:
        text = f"nodes whose clock is ahead of the API server's: {some(ahead)}"
        yield result(name, "warning", AHEAD, Layer.HARDWARE, text, "Let a time service set the nodes' clocks (NTP).")
    if late:
        text = f"nodes that have not renewed their Lease: {some(late)}"
        do = "Check the machines: they are off, cut off, or their clocks are behind."
        yield result(name, "warning", SILENT, Layer.HARDWARE, text, do)
    if not ahead and not late:
        yield ok(name, Layer.HARDWARE, f"{len(seen.node_leases)} nodes renew their Leases in time")
