"""Faults on request: `POST /sim/faults` arms one, `DELETE` clears all."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal[
    "hang", "stall", "503", "sse_error", "slow", "crash", "close", "load_hang", "load_slow", "load_fail",
    "unload_deadlock", "core_death", "throttled", "garbled",
]  # fmt: skip
Call = Literal["generate", "load", "unload"]
_LASTING: Final = frozenset({"throttled", "garbled"})
"""Of the whole engine until cleared: no request uses them up."""


class Fault(BaseModel):
    """One armed fault; it strikes the next `count` requests of its kind: those whose kind begins with `load_` or
    `unload_` strike that call, the others generation."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    """hang: the request never gets a further token. stall: the whole engine stops computing, for everybody, until
    cleared. 503: refused like a full queue. sse_error: an error event in the stream. slow: every chunk is late.
    crash: the process dies by SIGKILL. core_death: as the engine ends itself when its scheduler does. close: the
    connection breaks. load_hang: an adapter's files cannot be read to the end, and since the scheduler reads them
    nobody is served until cleared. load_slow: they take `delay_seconds` more. load_fail: refused with `message`.
    unload_deadlock: the unload never answers and the scheduler stands still until cleared
    (github.com/sgl-project/sglang/issues/36894); vLLM's unload asks nobody, so it has none. throttled: each step of the
    engine takes `factor` times as long, until cleared. garbled: answers to greedy requests have other words, until
    cleared."""
    count: int = Field(1, ge=1)
    after_tokens: int = Field(0, ge=0)
    """The fault strikes when this many tokens were sent; 0: before the first."""
    delay_seconds: float = Field(1.0, gt=0)
    """For slow: before every chunk. For load_slow: of the load."""
    factor: float = Field(10.0, ge=1, le=1000)
    """For throttled."""
    status: int = Field(503, ge=400, le=599)
    """For 503 and sse_error."""
    message: str = "The request queue is full."
    """For 503, sse_error and load_fail."""

    @property
    def call(self) -> Call:
        """What it strikes."""
        word = self.kind.partition("_")[0]
        return "load" if word == "load" else "unload" if word == "unload" else "generate"


class Faults:
    """Armed faults, first in first out."""

    def __init__(self) -> None:
        self._armed: list[Fault] = []

    def arm(self, fault: Fault) -> None:
        self._armed.append(fault.model_copy())

    def clear(self) -> None:
        self._armed.clear()

    def armed(self) -> list[Fault]:
        return list(self._armed)

    @property
    def slowdown(self) -> float:
        """By which a step takes longer; 1: as long as it should."""
        return max((fault.factor for fault in self._armed if fault.kind == "throttled"), default=1.0)

    @property
    def garbles(self) -> bool:
        return any(fault.kind == "garbled" for fault in self._armed)

    def take(self, call: Call = "generate") -> Fault | None:
        """The fault for the next such call, which uses it up."""
        for at, fault in enumerate(self._armed):
            if fault.call != call or fault.kind in _LASTING:
                continue
            if fault.count == 1:
                del self._armed[at]
            else:
                self._armed[at] = fault.model_copy(update={"count": fault.count - 1})
            return fault
        return None
