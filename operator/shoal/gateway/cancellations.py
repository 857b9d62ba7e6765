"""Cancellation of non-streaming requests whose client left. The engine is asked to end the request, because it then
returns the tokens that it computed, which are billed.

The replica's agent forwards the abort (`replica.Abort`): it needs an engine key that no gateway may have. If the engine
cannot be asked or does not answer in time, the connection is closed and the usage is estimated.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from shoal.api.names import ABORT_PATH
from shoal.gateway.upstream import AbortHandle, Upstream, UpstreamError, agent_request
from shoal.net.stream import StreamPeer

if TYPE_CHECKING:
    from shoal.gateway.replicapool import ReplicaPool

log = structlog.get_logger()

SECONDS: Final = 2.0
"""How long a cancelled request is kept to get its counts. A stopping gateway and a draining agent wait for it."""
MAX_CANCELLATIONS: Final = 256
"""Cancellations at one time: each keeps its body and its place in the replica's and the tenant's counts."""
_AGAIN_SECONDS: Final = 0.1
"""First pause before the engine is asked again; it doubles each time. An engine that has not read the request yet
ignores its id."""
_MOST_BYTES: Final = 64 * 1024


class Cancellations:
    """`client` is the HTTP client towards agents."""

    def __init__(self, fleet: "ReplicaPool", client: Upstream) -> None:
        self._fleet = fleet
        self._client = client
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, uid: str, rid: str, prompts: int, abort: AbortHandle) -> asyncio.Task[None] | None:
        """Starts a task that asks a pod's agent to end a request, and closes the connection if that fails. None: the
        agent cannot be asked. The caller ends the task with `end`."""
        stream = self._fleet.streams.get(uid)
        if stream is None or len(self._running) >= MAX_CANCELLATIONS:
            return None
        task = asyncio.create_task(self._run(stream.peer, rid, prompts, abort), name=f"cancels {rid}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @staticmethod
    async def end(task: asyncio.Task[None]) -> None:
        """The request has ended."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _run(self, peer: StreamPeer, rid: str, prompts: int, abort: AbortHandle) -> None:
        asked, pause = False, _AGAIN_SECONDS
        try:
            async with asyncio.timeout(SECONDS):
                while await self._ask(peer, rid, prompts) or asked:
                    asked = True
                    await asyncio.sleep(pause)
                    pause *= 2
        except TimeoutError:
            log.debug("the engine did not end a request", request=rid, pod=peer.name)
        finally:
            abort.cut()

    async def _ask(self, peer: StreamPeer, rid: str, prompts: int) -> bool:
        content = orjson.dumps({"rid": rid, "prompts": prompts})
        try:
            answer = await self._client.start(*agent_request(peer, ABORT_PATH, content), AbortHandle())
            try:
                await answer.read_all(_MOST_BYTES)
                status = answer.status
            finally:
                answer.release()
        except UpstreamError as error:
            log.debug("the agent did not abort a request", request=rid, pod=peer.name, reason=str(error))
            return False
        if status >= 300:
            # 404: an agent of an older version.
            log.debug("the agent did not abort a request", request=rid, pod=peer.name, reason=f"status {status}")
        return status < 300
