"""Which gateway's pod sends a batch: by the token that the kubelet made for it (`kube/podtokens.py`)."""

import structlog

from shoal.api import names
from shoal.kube.podtokens import PodTokens
from shoal.ledger.service import LedgerProblem, LedgerRequest

log = structlog.get_logger()


class Senders:
    """Asked for each batch; a proven token costs nothing."""

    def __init__(self, tokens: PodTokens) -> None:
        self._tokens = tokens
        self._logged = ""

    async def pod_of(self, request: LedgerRequest) -> str | None:
        """The pod; None where the caller has a key of before the role keys: such a gateway knows of no token, and its
        rows must not be lost in an upgrade. The key ends when the last pod that was made with it is gone.

        Raises:
            Problem: it is not proven. The gateway keeps its rows and sends them again.
        """
        if request.old_key:
            return None
        token = request.headers.get(names.HEADER_POD_TOKEN.encode(), b"").decode("latin-1").strip()
        verdict = await self._tokens.pod_of(token)
        if verdict.allowed:
            return verdict.pod
        if verdict.message != self._logged:
            self._logged = verdict.message
            log.warning("records are not taken: their sender is not proven", reason=verdict.message)
        headers = tuple((name.lower().encode(), value.encode()) for name, value in verdict.headers.items())
        raise LedgerProblem(verdict.status, verdict.message, headers)
