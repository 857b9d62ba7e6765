"""Identifies the gateway pod that sends a batch by its projected ServiceAccount token (`kube/podtokens.py`)."""

import structlog

from shoal.api import names
from shoal.kube.podtokens import PodTokens
from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest

log = structlog.get_logger()


class Senders:
    """Used for each batch; verified tokens are cached."""

    def __init__(self, tokens: PodTokens) -> None:
        self._tokens = tokens
        self._logged = ""

    async def pod_of(self, request: ShellRequest) -> str:
        """Name of the sending pod. Raises Problem if it is not verified: the gateway keeps its records and sends them
        again."""
        token = request.headers.get(names.HEADER_POD_TOKEN, "").strip()
        verdict = await self._tokens.pod_of(token)
        if verdict.allowed:
            return verdict.pod
        if verdict.message != self._logged:
            self._logged = verdict.message
            log.warning("records are not taken: their sender is not proven", reason=verdict.message)
        raise Problem(verdict.status, verdict.message, verdict.headers)
