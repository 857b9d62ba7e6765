"""The real Envoy in front of a gateway that decides on its requests by external processing."""

from pathlib import Path

from tests.support.extproc import in_front_of
from tests.support.gateway import gateway
from tests.support.scripted_engine import ScriptedEngine

CHAT = {"model": "chat/llama", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_chat_completion_is_answered_and_metered_once(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it, in_front_of(it) as envoy:
        async with await envoy.post(CHAT, headers={"x-secret": "1"}) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.json()
        assert body["model"] == "chat/llama"
        (record,) = await it.records()
        assert (record.outcome, record.input_tokens, record.output_tokens) == ("answered", 7, 3)
        (request,) = engine.requests
        assert "x-secret" not in request.headers
