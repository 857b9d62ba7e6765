"""Where the external scaler gets its answers."""

from collections.abc import Callable
from typing import Protocol

from shoal.core.keda import ScalerAnswer

Changed = Callable[[str, str], None]
"""Called with namespace and name of a ScaledObject whose answer has changed."""


class Answers(Protocol):
    """What is decided, by ScaledObject. Reads memory only."""

    def answer(self, namespace: str, name: str) -> ScalerAnswer | None:
        """None: no variant of a Model whose driver is KEDA has this ScaledObject, or nothing is decided of it yet; KEDA
        gets UNAVAILABLE, and keeps the current replicas."""
        ...

    def polled(self, namespace: str, name: str) -> None:
        """KEDA has just asked about it."""
        ...


class ScalerEndpoint(Protocol):
    """Where KEDA is answered."""

    @property
    def ca(self) -> str | None:
        """PEM of the CA by which KEDA knows this operator; "": any that it trusts already; None: there is no
        certificate yet."""
        ...

    @property
    def problem(self) -> str | None:
        """Why this operator cannot answer KEDA, with what to do; None: it can, or need not."""
        ...

    def need(self) -> None:
        """There is a Model whose replicas KEDA writes."""
        ...
