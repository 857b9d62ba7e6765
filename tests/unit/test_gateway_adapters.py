"""Adapters as a client of the gateway sees them."""

from pathlib import Path

from tests.support.adapter_agents import AdapterAgent, name_of, tuned


async def test_an_adapter_is_loaded_with_its_first_request_and_answers(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        response = await it.ask("support")
        assert response.status == 200, await response.text()
        assert (await response.json())["model"] == "support"
        sent = it.engines[0].requests[0].body
        assert (sent["model"], sent["lora_path"]) == ("chat/llama", name_of())
        (record,) = await it.it.records()
        assert (record.data.model, record.data.adapter) == ("chat/llama", "chat/support")
        assert len(agent.ensured) == 1
        for _ in range(5):
            assert (await it.ask("chat/support")).status == 200
        assert len(agent.ensured) == 1  # the lease is kept: no call in the request's way
