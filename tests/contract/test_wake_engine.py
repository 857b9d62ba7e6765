"""From zero: a request that was held is answered by the engine that starts for it, whichever engine that is."""

import asyncio
import json
from pathlib import Path

import pytest

from shoal.api.replica import ReplicaKeys
from shoal.core.routing.resolve import ServedModel
from shoal.net.installkey import KeyRing
from tests.support.agentpod import KEYS, Pod, Stream
from tests.support.behaviour import WORDS
from tests.support.engines import ADMIN_KEY, SERVED, START_SECONDS, Kind, running_engine
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.gateway import GatewayUnderTest, gateway, lines, replica, tenant
from tests.support.waiting import until_async

MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None)
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 8,
    "ignore_eos": True,
    "stream": True,
}


class OneKey(KeyRing):
    """The engine of these tests has a key of its own, which no install key leads to."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


async def hear(it: GatewayUnderTest, stream: Stream) -> None:
    """What the agent says reaches the gateway."""
    while await stream.message() is not None:
        it.fleet.update("pod-1", ReplicaKeys.model_validate(stream.state))


@pytest.mark.timeout(600)
async def test_a_request_at_zero_is_held_until_the_engine_that_starts_for_it_serves(
    any_kind: Kind, tmp_path: Path
) -> None:
    words = WORDS[any_kind]
    async with gateway(tmp_path) as it:
        it.models[SERVED] = MODEL
        it.tenants["acme"] = tenant(models=[SERVED])
        it.app.key_ring = OneKey(tmp_path)
        it.changed()
        post = asyncio.create_task(it.post(CHAT))
        await until_async(lambda: it.app.holds.waiting == 1)
        assert it.app.demand.demand(MODEL.uid).held == 1

        with running_engine(any_kind, tmp_path / "engine", wait=False) as process:
            agent = Pod(tmp_path, engine_url=process.url, kind=words.kind)
            agent.keys.write_text(json.dumps(KEYS | {"engine": ENGINE_KEY, "admin": ADMIN_KEY}))
            agent.stage('{"state": "done"}')
            it.ports["pod-1"] = process.port
            it.pods[f"{SERVED}-1"] = replica(1, MODEL, ready=False, engine=words.name)
            it.changed()
            async with agent.running(), agent.stream() as stream:
                await stream.until(phase="loading")
                assert it.app.holds.waiting == 1, "a replica that loads gets nothing"
                agent.boot("boot-1")
                listening = asyncio.create_task(hear(it, stream))
                try:
                    await asyncio.to_thread(process.wait_ready, START_SECONDS[any_kind])
                    await until_async(lambda: stream.state.get("phase") == "ready", within=60)
                    it.pods[f"{SERVED}-1"] = replica(1, MODEL, engine=words.name)
                    it.changed()
                    response = await post
                    got = [json.loads(line) for line in [line async for line in lines(response)] if line != b"[DONE]"]
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        assert response.status == 200
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in got if event["choices"])
        (record,) = await it.records()
        assert (record.data.outcome, record.data.attempts, record.data.output_tokens) == ("answered", 1, 8)
        assert record.data.hold_ms
