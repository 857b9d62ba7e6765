"""The replica's phase: a pure function of what the agent has seen."""

from enum import Enum
from typing import Final

from shoal.api.replica import Phase, StageProgress

SILENT_LIMIT: Final = 3
"""So many unanswered probes in a row make the phase unknown; a busy engine may miss one."""


class Probe(Enum):
    """What asking the engine's /ready came to."""

    READY = "ready"
    NOT_READY = "not ready"
    """503: it is starting, or was told to stop."""
    CLOSED = "closed"
    """Nothing listens."""
    SILENT = "silent"
    """Something listens and gives no usable answer."""


def phase(
    stage: StageProgress | None,
    engine_boot: str | None,
    probe: Probe | None,
    *,
    was_ready: bool,
    silent: int,
    before: Phase | None,
    stalled: bool = False,
    draining: bool = False,
) -> Phase | None:
    """The phase, or None when it is unknown.

    `probe` is the last one of this engine boot, `was_ready` whether this boot ever was ready, `silent` how many probes
    in a row went unanswered, `before` the phase until now. `stalled` and `draining` are what the agent has decided:
    gateways turn away from both, so neither may give way to what a probe shows.
    """
    if stalled:
        return "stalled"
    if draining:
        return "draining"
    if engine_boot is None:
        if stage is None:
            return None
        return "loading" if stage.state == "done" else "fetching"
    match probe:
        case Probe.READY:
            return "ready"
        case Probe.NOT_READY:
            # SGLang turns 503 the moment it is told to stop, while it finishes what runs.
            return "draining" if was_ready else "loading"
        case Probe.SILENT if was_ready:
            return before if silent < SILENT_LIMIT else None
        case Probe.CLOSED | Probe.SILENT | None:
            return "loading"
