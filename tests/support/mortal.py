"""A client of the API server that dies at a write, and takes its operator with it."""

from typing import Any

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and no further call goes out."""


class MortalClient(KubeClient):
    """Dies before or after its k-th write. Leases and events do not count: losing one costs nothing."""

    die_at: int | None = None
    after = False
    written = 0
    dead = False

    async def _call(self, verb: Any, resource: Any, method: str, path: str, **kw: Any) -> JsonObject:
        if self.dead:
            raise Killed
        counts = verb not in ("get", "list") and resource.plural not in ("leases", "events")
        mine = 0  # writes may overlap
        if counts:
            self.written += 1
            mine = self.written
            if mine == self.die_at and not self.after:
                self.dead = True
                raise Killed
        answer = await super()._call(verb, resource, method, path, **kw)
        if self.dead or (counts and mine == self.die_at):
            self.dead = True
            raise Killed
        return answer
