"""The install key: gateways wait for it, so it is made when the operator begins to lead."""

import asyncio
import base64
from typing import Any

from shoal.api.meta import JsonObject
from shoal.controllers import installkey
from shoal.controllers.installkey import InstallKeySource
from shoal.kube.errors import NotFound, Unavailable


class Secrets:
    """The API server as far as one Secret goes; refuses the first calls."""

    def __init__(self, refusals: int = 0) -> None:
        self.secret: JsonObject | None = None
        self.refusals = refusals

    async def get(self, *_: Any) -> JsonObject:
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("not now")
        if self.secret is None:
            raise NotFound("no such Secret")
        return self.secret

    async def create(self, _resource: Any, body: JsonObject) -> JsonObject:
        self.secret = body
        return body


async def made_by(server: Secrets) -> InstallKeySource:
    source = InstallKeySource(server, "shoal-system")  # type: ignore[arg-type]
    task = asyncio.create_task(source.run())
    async with asyncio.timeout(20):
        while source.keys is None:
            await asyncio.sleep(0.01)
    task.cancel()
    return source


async def test_made_at_once_with_no_model_there_to_ask_for_it():
    server = Secrets()
    source = await made_by(server)
    assert source.keys is not None
    assert server.secret is not None
    assert base64.b64decode(server.secret["data"]["current"]) == source.keys.current


async def test_tried_again_soon_while_there_is_none(monkeypatch: Any):
    monkeypatch.setattr(installkey, "RETRY_SECONDS", 0.01)
    assert (await made_by(Secrets(refusals=3))).keys is not None
