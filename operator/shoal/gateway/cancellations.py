"""Requests whose clients left before an answer that is no stream: the engine is asked to end them, because it then ends
its answer with what it computed, which is billed.

The agent of the replica asks it (`replica.Abort`): the key that this takes is none that a gateway may have. Where it
cannot be asked, or does not answer in time, the connection is cut off, and what the request counts is an estimate.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from shoal.api.names import ABORT_PATH
from shoal.gateway.upstream import AbortHandle, Upstream, UpstreamError, to_agent
from shoal.signals.stream import Peer

if TYPE_CHECKING:
    from shoal.gateway.fleet import Fleet

log = structlog.get_logger()

SECONDS: Final = 2.0
"""So long a request is kept for its counts; a gateway that stops, and an agent that drains, wait for it."""
MOST: Final = 256
"""Such requests at a time: each keeps its body, its place at the replica and at its tenant."""
_AGAIN_SECONDS: Final = 0.1
"""After so long the first time, and twice as long each time, the engine is asked again: one that has not read the
request yet passes over its id."""
_MOST_BYTES: Final = 64 * 1024


class Cancellations:
    """`client` is the one towards agents."""

    def __init__(self, fleet: "Fleet", client: Upstream) -> None:
        self._fleet = fleet
        self._client = client
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, uid: str, rid: str, prompts: int, abort: AbortHandle) -> asyncio.Task[None] | None:
        """Asks for the end of a request at a pod; cuts it off where that fails. None: it cannot be asked for. The
        caller ends the task, by `end`."""
        stream = self._fleet.streams.get(uid)
        if stream is None or len(self._running) >= MOST:
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

    async def _run(self, peer: Peer, rid: str, prompts: int, abort: AbortHandle) -> None:
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

    async def _ask(self, peer: Peer, rid: str, prompts: int) -> bool:
        said = orjson.dumps({"rid": rid, "prompts": prompts})
        try:
            answer = await self._client.start(*to_agent(peer, ABORT_PATH, said), AbortHandle())
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
