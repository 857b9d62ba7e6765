"""Which gateway's pod sends a batch: by the token that the kubelet made for it (`kube/podtokens.py`)."""

import structlog

from shoal.api import names
from shoal.kube.podtokens import PodTokens
from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest

log = structlog.get_logger()


class Senders:
    """Asked for each batch; a proven token costs nothing."""

    def __init__(self, tokens: PodTokens) -> None:
        self._tokens = tokens
        self._logged = ""

    async def pod_of(self, request: ShellRequest) -> str:
        """The pod. Raises Problem where it is not proven: the gateway keeps its rows and sends them again."""
        token = request.headers.get(names.HEADER_POD_TOKEN, "").strip()
        verdict = await self._tokens.pod_of(token)
        if verdict.allowed:
            return verdict.pod
        if verdict.message != self._logged:
            self._logged = verdict.message
            log.warning("records are not taken: their sender is not proven", reason=verdict.message)
        raise Problem(verdict.status, verdict.message, verdict.headers)
