"""Faults on request: `POST /sim/faults` arms one, `DELETE` clears all."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["hang", "stall", "503", "sse_error", "slow", "crash", "close"]


class Fault(BaseModel):
    """One armed fault; it strikes the next `count` generation requests."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    """hang: the request never gets a further token. stall: the whole engine stops computing, for everybody, until
    cleared. 503: refused like a full queue. sse_error: an error event in the stream. slow: every chunk is late.
    crash: the process dies by SIGKILL. close: the connection breaks."""
    count: int = Field(1, ge=1)
    after_tokens: int = Field(0, ge=0)
    """The fault strikes when this many tokens were sent; 0: before the first."""
    delay_seconds: float = Field(1.0, gt=0)
    """For slow: before every chunk."""
    status: int = Field(503, ge=400, le=599)
    """For 503 and sse_error."""
    message: str = "The request queue is full."
    """For 503 and sse_error."""


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

    def take(self) -> Fault | None:
        """The fault for the next request, which uses it up."""
        if not self._armed:
            return None
        fault = self._armed[0]
        if fault.count == 1:
            self._armed.pop(0)
        else:
            self._armed[0] = fault.model_copy(update={"count": fault.count - 1})
        return fault
