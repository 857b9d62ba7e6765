"""The external target of a storm: what it is asked by a gateway, what it answers and writes down, and its objects."""

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from shoal.api.config import ExternalHost
from shoal.api.modelroute import ModelRoute
from shoal_dev.demo import steps
from tests.storm import routes, swaps
from tests.storm.apis import TRANSLATED
from tests.storm.ground import MODEL_PATH, STEADY, STORM
from tests.storm.journals import read_engines
from tests.storm.load import check
from tests.storm.plan import Answers, Ask, Target, asks
from tests.storm.wire import Clients, exchange
from tests.support.controlplane import free_ports
from tests.support.gateway import API_KEY
from tests.support.provider import HOST, Provider, beside
from tests.support.routes import target
from tests.support.scripted_engine import ScriptedEngine

(POD, SERVICE) = routes.outside(STORM, steps.LAB_IMAGE, "cpu-1", "/storm/outside")
(CONTAINER,) = POD["spec"]["containers"]


class OutsideProcess(Provider):
    """The container's own command, on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(port=free_ports(1)[0])
        self.folder = folder
        self.folder.mkdir()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Provider]:
        given = {"--host": "127.0.0.1", "--port": str(self.port), "--model-path": str(MODEL_PATH)}
        own = [part.partition("=") for part in CONTAINER["command"][1:]]
        command = [name if not sep else f"{name}={given.get(name, value)}" for name, sep, value in own]
        env = {one["name"]: one["value"] for one in CONTAINER["env"]} | {"SHOAL_SIM_JOURNAL": str(self.folder)}
        env |= {"SHOAL_SIM_LOAD_SECONDS": "0", "SHOAL_SIM_SPEED": "1000"}
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "shoal", *command, env=os.environ | env)
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(60):
                while not await self._answers(session):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            yield self
        finally:
            process.kill()
            await process.wait()

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"http://127.0.0.1:{self.port}/health") as answer:
                return answer.status == 200
        return False


async def test_each_kind_of_request_gets_what_a_model_would_answer_and_is_in_its_journal(tmp_path: Path) -> None:
    outside = OutsideProcess(tmp_path / "outside")
    (declared,) = routes.out(STORM, STEADY)["spec"]["externalTargets"]
    changed = {**declared, "url": f"http://{HOST}:{outside.port}/v1", "credentials": None, "caBundle": None}
    rule = {"targets": [{"external": {"name": routes.EXTERNAL}}], "fallback": {"targets": [target("llama")]}}
    allowed = [ExternalHost(host=HOST, port=outside.port, plain_http=True)]
    llama, answers = ScriptedEngine(), Answers(MODEL_PATH, swaps.folders())
    around = beside(tmp_path, outside, llama, rule, changed=changed, allowed=allowed, credential=None)
    kinds: Counter[str] = Counter()
    places = asyncio.Semaphore(16)
    async with around as it:
        url = urlsplit(it.url)
        clients = Clients(url.hostname or "", url.port or 0, API_KEY)

        async def one(ask: Ask) -> None:
            async with places:
                wire = await clients.wire(reuse=True)
                assert wire is not None
                end = await exchange(clients, wire, ask, ask.id, lambda _: None)
            check(end, ask, answers)
            assert end.outcome == "answered" or (ask.kind, end.outcome) == ("leaver", "cancelled"), (ask, end)
            kinds[ask.kind] += 1

        await asyncio.gather(*(one(ask) for ask in asks(5, 150, 1000.0, (Target("front", 1.0),), long=0.02)))
        clients.close()
        records = await it.records("final", sum(kinds.values()) - kinds["attack"])
    assert not llama.requests
    assert (
        min(kinds[kind] for kind in ("short", "chat", "stream", "long", "leaver", "wrong", "attack", *TRANSLATED)) > 0
    )
    assert {record.data.model for record in records} == {"chat/front/outside"}
    sequences, _ = read_engines(outside.folder)
    gave = Counter[tuple[int | None, int | None]](one.tokens for one in sequences if one.tokens is not None)
    claimed = Counter(
        (record.data.input_tokens, record.data.output_tokens)
        for record in records
        if (record.data.outcome, record.data.count_source) == ("answered", "final")
    )
    assert not claimed - gave
    assert claimed.total() >= sum(kinds.values()) - kinds["attack"] - kinds["wrong"] - kinds["leaver"]


def test_its_objects_are_what_the_product_takes() -> None:
    for item in (
        routes.front(STORM, STEADY, swaps.STILL),
        routes.trial(STORM, STEADY, "storm-bursty"),
        routes.out(STORM, STEADY),
    ):
        ModelRoute.model_validate(item)
    host = ExternalHost.model_validate(routes.allowed(STORM))
    (declared,) = routes.out(STORM, STEADY)["spec"]["externalTargets"]
    url = urlsplit(declared["url"])
    assert (url.hostname, url.port) == (host.host, host.port)
    assert host.plain_http
    assert POD["metadata"]["labels"] == SERVICE["spec"]["selector"]
    assert host.host == f"{SERVICE['metadata']['name']}.{SERVICE['metadata']['namespace']}.svc.cluster.local"
    asked = routes.asked(STORM, STEADY, "storm-bursty", swaps.STILL)
    assert asked[routes.OUT].external in asked[routes.OUT].models
    assert asked[routes.FRONT].adapters == (f"{STORM}/{swaps.STILL}",)
