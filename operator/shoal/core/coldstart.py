"""How long each stage of a replica's start took, from its pod's own times, and what would shorten it.

| stage | from | to |
|---|---|---|
| schedule | the pod is created, or a quota has room for it | it is bound to a node |
| pull | it is bound, and again when the weights are there | a container starts: images and volumes are there |
| fetch | the stage container starts | it ends: the weights are there, complete and checked |
| load | the engine starts | the pod is Ready: weights are on the GPU, graphs are captured |
| first token | the engine is ready, or a later first request is sent | the first token of the first answer |

Of `load`, an engine may say for how long it captured CUDA graphs. Where it does not, that is unknown. So is the first
token until a gateway that saw the engine become ready has sent a request whose answer shows one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from shoal.api import names
from shoal.api.model import StartStages
from shoal.core.facts import Node, Pod

KEPT: Final = 5
"""Starts of which the median is taken."""
_SHORT_SECONDS: Final = 10
"""A start that is no longer needs no advice."""
STAGES: Final = ("schedule", "pull", "fetch", "load")
"""What a pod's own times tell: until it is Ready."""
GRAPH_CAPTURE: Final = "graph_capture"
FIRST_TOKEN: Final = "first_token"  # noqa: S105 - a stage
"""Stages as a metric names them, beside STAGES."""
ADVICE: Final = {
    "schedule": "keep nodes of the class free, or raise minReplicas, so that no replica waits for a node",
    "pull": "have the images on the nodes before: a mirror of the registry, or images that are pulled in advance",
    "fetch": "put the weights on the nodes before: spec.prefetch, or a source that is nearer",
    "load": "load less: quantized weights, more GPUs per replica, a faster disk, fewer CUDA graphs in extraArgs",
    GRAPH_CAPTURE: "capture fewer CUDA graphs: a smaller largest batch for them in extraArgs, or none for prefill",
    FIRST_TOKEN: "have the engine warm up before it is Ready, by its arguments for that in extraArgs; a long first "
    "prompt takes long in any case",
}
"""Stage -> what makes it shorter."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds of each stage of one start, or of the median of several."""

    schedule: int
    pull: int
    fetch: int
    load: int
    graphs: int | None = None
    """Of `load`: captures of CUDA graphs; None: the engine does not say."""
    first_token: int | None = None
    """After `load`: until the first answer begins; None: no gateway saw it."""
    pod: str = field(default="", compare=False)
    """Uid of the pod; "": of several."""

    @property
    def total(self) -> int:
        """Until the pod is Ready."""
        return self.schedule + self.pull + self.fetch + self.load

    @property
    def longest(self) -> str:
        """The stage that takes most; of equals the earlier."""
        return max((*STAGES, FIRST_TOKEN), key=lambda stage: getattr(self, stage) or 0)

    @property
    def bottleneck(self) -> tuple[str, int] | None:
        """What to shorten first, with its seconds: the longest stage, or the capture of graphs where that is most of
        it. None: the start is short."""
        if self.total + (self.first_token or 0) <= _SHORT_SECONDS:
            return None
        if self.longest == "load" and self.graphs is not None and 2 * self.graphs > self.load:
            return GRAPH_CAPTURE, self.graphs
        return self.longest, getattr(self, self.longest)

    def with_graphs(self, seconds: float) -> "ColdStart":
        """With what the engine says. It cannot be more than all of `load`."""
        return replace(self, graphs=min(self.load, round(seconds)))

    def with_first_token(self, seconds: float | None) -> "ColdStart":
        """With what a gateway saw."""
        return replace(self, first_token=None if seconds is None else max(0, round(seconds)))


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The first request that one gateway sent to a replica whose engine it saw become ready."""

    after: float
    """Seconds from the engine's readiness until the request was sent: of several gateways the smallest was first."""
    seconds: float | None
    """Until its first token; None: its answer did not show it."""
    counted: bool = field(default=False, compare=False)
    """Whether the metric has this start already."""


def of_pod(pod: Pod) -> ColdStart | None:
    """The stages of a pod that is Ready; None: a time is missing, or a container restarted, so that times are mixed."""
    stage, engine = pod.container(names.CONTAINER_STAGE), pod.container(names.CONTAINER_ENGINE)
    if stage is None or engine is None or stage.restarts or engine.restarts:
        return None
    ready, created, bound = pod.ready_since, pod.created, pod.scheduled
    if ready is None or created is None or bound is None:
        return None
    if stage.started is None or stage.ended is None or engine.started is None:
        return None
    begun = bound if pod.waited_for_quota else created
    return ColdStart(
        schedule=_seconds(begun, bound),
        pull=_seconds(bound, stage.started) + _seconds(stage.ended, engine.started),
        fetch=_seconds(stage.started, stage.ended),
        load=_seconds(engine.started, ready),
        pod=pod.uid,
    )


def measured(stages: StartStages) -> ColdStart:
    """A start as a Model's status has it."""
    return ColdStart(stages.schedule, stages.pull, stages.fetch, stages.load, stages.graph_capture, stages.first_token)


def node_wait(pod: Pod, node: Node) -> int | None:
    """Seconds for which a pod waited for its node to be added; None: the node was there before, or a time is missing.
    Of a pod of a queue, or whose claim was refused, it is unknown, since it also waited for quota."""
    if pod.created is None or pod.scheduled is None or node.created is None or pod.waited_for_quota:
        return None
    return _seconds(pod.created, pod.scheduled) if node.created > pod.created else None


def median(starts: Sequence[ColdStart]) -> ColdStart | None:
    """Stage by stage; None: there are none."""
    if not starts:
        return None

    def of(stage: str) -> int | None:
        """Of the starts of which it is known."""
        known = [seconds for start in starts if (seconds := getattr(start, stage)) is not None]
        return round(statistics.median(known)) if known else None

    until_ready = [of(stage) or 0 for stage in STAGES]
    return ColdStart(*until_ready, graphs=of("graphs"), first_token=of("first_token"))


def describe(gpu_class: str, last: ColdStart, usual: ColdStart | None = None) -> str:
    """A cold start as a sentence, with what would shorten it."""
    shown = usual or last
    parts = ", ".join(f"{stage} {getattr(last, stage)} s" for stage in STAGES)
    parts += f", of which graph capture {_known(last.graphs)}"
    text = f"cold start on {gpu_class}: {last.total} s ({parts}), then the first token: {_known(last.first_token)}"
    if usual is not None and usual != last:
        text += f"; usually {usual.total} s"
        if usual.first_token is not None:
            text += f", then {usual.first_token} s"
    advice = advise(shown)
    return text if advice is None else f"{text}; {advice}"


def advise(usual: ColdStart) -> str | None:
    """Which stage takes most, and what would shorten it; None: the start is short. The text has no seconds, so that it
    changes only with the stage."""
    if (found := usual.bottleneck) is None:
        return None
    return f"most is {usual.longest.replace('_', ' ')}: {ADVICE[found[0]]}"


def _known(seconds: int | None) -> str:
    return "unknown" if seconds is None else f"{seconds} s"


def _seconds(begin: datetime, end: datetime) -> int:
    return max(0, round((end - begin).total_seconds()))
