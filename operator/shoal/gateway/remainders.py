"""The rest of external targets' streams whose clients left. A provider tells the tokens of a stream at its end only, so
the rest is read for a while and thrown away: with the provider's own counts the request is billed."""

import asyncio
from collections import Counter
from typing import Final

from shoal.gateway.cancellations import MAX_CANCELLATIONS, SECONDS
from shoal.gateway.upstream import AbortHandle

MOST: Final = MAX_CANCELLATIONS
"""Streams that are read on at one time: each keeps its place at the target and in its tenant's counts."""
MOST_OF_TENANT: Final = 16
"""Of these, for one tenant: it shares the targets with others."""
_MOST_BYTES: Final = 1024 * 1024
"""Of the rest of one stream: two seconds of a fast provider."""


class Remainders:
    """Bounds how many there are."""

    def __init__(self) -> None:
        self._of_tenant = Counter[str]()

    @property
    def running(self) -> int:
        return self._of_tenant.total()

    def begin(self, tenant: str, abort: AbortHandle) -> "Remainder | None":
        """Lets a stream go on whose client left. None: there are too many. The caller calls `end`."""
        if self._of_tenant[tenant] >= MOST_OF_TENANT or self.running >= MOST:
            return None
        return Remainder(self._of_tenant, tenant, abort)


class Remainder:
    """The rest of one stream, which is cut off after `SECONDS` or too many bytes."""

    __slots__ = ("_abort", "_left", "_of_tenant", "_tenant", "_timer")

    def __init__(self, of_tenant: Counter[str], tenant: str, abort: AbortHandle) -> None:
        self._of_tenant, self._tenant, self._abort = of_tenant, tenant, abort
        self._left = _MOST_BYTES
        self._timer = asyncio.get_running_loop().call_later(SECONDS, abort.cut)
        of_tenant[tenant] += 1

    def took(self, size: int) -> None:
        """So many bytes of it have arrived."""
        self._left -= size
        if self._left < 0:
            self._abort.cut()

    def end(self) -> None:
        """The stream has ended."""
        self._timer.cancel()
        self._of_tenant[self._tenant] -= 1
        if not self._of_tenant[self._tenant]:
            del self._of_tenant[self._tenant]
