"""Proof that a gateway admitted a request that a proxy brings to an engine.

A proxy has no certificate and no key of Shoal. The gateway gives the request a proof, and the replica's agent takes it
once: for one pod, one path, and a short time. Both know the key, which is made of the engine's.
"""

import hashlib
import hmac
from collections import OrderedDict
from typing import Final, Literal

HEADER: Final = "x-shoal-admission"
LIFE_SECONDS: Final = 30
SKEW_SECONDS: Final = 15
"""By which the clocks of two nodes may differ."""
MOST_REMEMBERED: Final = 65_536
"""Proofs that were taken and have not expired. One replica does not serve as many in a minute."""
_VERSION: Final = "v1"
_MOST_BYTES: Final = 256

Verdict = Literal["admitted", "malformed", "forged", "expired", "used", "full"]


def proof(engine_key: str, host: str, path: str, nonce: str, now: float) -> str:
    """A proof for one request. `host`: the pod's address; `path`: that of the engine; `nonce`: never the same."""
    until = int(now) + LIFE_SECONDS
    return f"{_VERSION}.{until}.{nonce}.{_mac(engine_key, host, path, until, nonce)}"


class Admissions:
    """The proofs that one pod has taken."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._used: OrderedDict[str, int] = OrderedDict()

    def take(self, engine_key: str, path: str, told: str, now: float) -> Verdict:
        """Whether a request may go on. A proof that is admitted is used up."""
        version, *rest = told.split(".") if len(told) <= _MOST_BYTES else [""]
        if version != _VERSION or len(rest) != 3 or not rest[1] or not rest[0].isascii() or not rest[0].isdigit():
            return "malformed"
        until, nonce = int(rest[0]), rest[1]
        expected = _mac(engine_key, self._host, path, until, nonce)
        if not hmac.compare_digest(expected.encode(), rest[2].encode("utf-8", "replace")):
            return "forged"
        if not now - SKEW_SECONDS <= until <= now + LIFE_SECONDS + SKEW_SECONDS:
            return "expired"
        self._forget(now)
        if nonce in self._used:
            return "used"
        if len(self._used) >= MOST_REMEMBERED:
            return "full"
        self._used[nonce] = until
        return "admitted"

    def _forget(self, now: float) -> None:
        """Drops what can no longer be used again. Proofs come about in the order in which they expire."""
        while self._used:
            nonce, until = next(iter(self._used.items()))
            if until >= now - SKEW_SECONDS:
                return
            del self._used[nonce]


def _mac(engine_key: str, host: str, path: str, until: int, nonce: str) -> str:
    own = hmac.digest(engine_key.encode(), b"admission", hashlib.sha256)
    said = "\0".join((host, path, str(until), nonce)).encode("utf-8", "replace")
    return hmac.digest(own, said, hashlib.sha256).hex()
