"""What SGLang tells of the drafts of a request, alone and with the gateway in front."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.routing.resolve import ServedModel
from tests.contract.conftest import Answer, Client
from tests.contract.test_gateway_with_engine import OneKey
from tests.contract.test_vllm_only import connected
from tests.support.engines import SERVED, Kind, running_engine
from tests.support.gateway import GatewayUnderTest, gateway, replica, tenant
from tests.support.shapes import mismatch

NGRAM = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=4")
MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None, speculates=True)
REPEATING: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
PROMPT = {"prompt": "one two three one two three one two three one two"}
CHAT = {"messages": [{"role": "user", "content": "one two three one two three one two three one two"}]}
DETAILS = {
    "spec_accept_rate": float,
    "spec_accept_length": float,
    "spec_cap_length": float,
    "spec_block_accept_length": float,
    "spec_num_correct_drafts": int,
    "spec_num_proposed_drafts": int,
    "spec_verify_ct": int,
    "spec_correct_drafts_histogram": [int],
    "spec_cap_lens_histogram": [int],
}


async def through(front: GatewayUnderTest, path: str, **body: Any) -> tuple[str, Any]:
    """The answer, and the data of its record."""
    before = {record.id for record in await front.records(count=0)}
    answer = await front.post({**REPEATING, "model": "tiny", **body}, path)
    text = await answer.text()
    assert answer.status == 200, text
    records = await front.records(count=len(before) + 1)
    (record,) = [record for record in records if record.id not in before]
    return text, record.data


async def test_accepted_drafts_are_told_recorded_and_taken_out(kind: Kind, tmp_path: Path):
    with running_engine(kind, tmp_path, *NGRAM) as engine:
        async for client in connected(engine):
            asked = {**REPEATING, **PROMPT, "model": SERVED, "return_spec_tokens_details": True}
            for path, prompt in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
                body = {**REPEATING, **prompt, "model": SERVED, "return_spec_tokens_details": True}
                told = (await client.post(path, body)).json["sglext"]
                assert not mismatch(told, {"spec_tokens_details": DETAILS})
                both = (await client.post(path, {**body, "n": 2})).json["sglext"]["spec_tokens_details"]
                assert [mismatch(one, DETAILS) for one in both] == [None, None]
                streamed = (await client.post(path, {**body, "stream": True})).events
                (event,) = [event for event in streamed if event != "[DONE]" and "sglext" in event]
                assert (event["choices"], event["usage"]) == ([], None)
                assert streamed.index(event) == len(streamed) - 2
            assert "sglext" not in (await client.post("/v1/completions", {**asked, "max_tokens": 1})).json
            several = await client.post("/v1/completions", {**asked, "prompt": ["one", "two"]})
            assert isinstance(several.json["sglext"]["spec_tokens_details"], dict), "it tells of both: ask for it"

            async with gateway(tmp_path) as front:
                front.models[SERVED] = MODEL
                front.tenants["acme"] = tenant(models=[SERVED])
                front.pods[f"{SERVED}-1"] = replace(replica(1, MODEL), engine="SGLang")
                front.ports["pod-1"] = engine.port
                front.app.key_ring = OneKey(tmp_path)
                front.changed()
                front.hear(1)
                for path, prompt in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
                    for more in ({}, {"n": 2}, {"stream": True}, {"stream": True, "n": 2}):
                        text, data = await through(front, path, **prompt, **more)
                        assert "spec_" not in text
                        assert "sglext" not in text
                        assert data.output_tokens == 60 * more.get("n", 1)
                        # The second time, SGLang guesses from the first answer. The simulator accepts no guess.
                        assert (0 < data.accepted_tokens < data.output_tokens) == (kind == "sglang")
                        assert data.accepted_tokens is not None
                        if "stream" in more:
                            parts = [part[6:] for part in text.split("\n\n") if part and not part.endswith("[DONE]")]
                            assert all(json.loads(part)["choices"] for part in parts)
                _, data = await through(front, "/v1/completions", **PROMPT, max_tokens=1)
                assert (data.output_tokens, data.accepted_tokens) == (1, None)


async def test_drafts_change_no_answer(client: Client, tmp_path: Path):
    """Drafts branch, several requests are checked in one step, and the second round is guessed from the first."""
    kind = client.engine.kind
    prompts = ["one two three one two three one two", "a b a c a b a d a b", "Once upon a time", "x " * 40]
    bodies = [{**REPEATING, "prompt": prompt, "model": SERVED} for prompt in prompts]
    plain = [(await client.post("/v1/completions", body)).json["choices"][0]["text"] for body in bodies]
    assert len(set(plain)) > 1
    branching = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=8", "--max-queued-requests=8")
    with running_engine(kind, tmp_path, *branching) as engine:
        async for guessing in connected(engine):
            answers: list[Answer] = []
            for _ in range(2):
                asked = [{**body, "return_spec_tokens_details": True} for body in bodies]
                answers = await asyncio.gather(*(guessing.post("/v1/completions", body) for body in asked))
                assert [answer.json["choices"][0]["text"] for answer in answers] == plain
            told = [answer.json["sglext"]["spec_tokens_details"]["spec_num_correct_drafts"] for answer in answers]
            assert [correct > 0 for correct in told] == [kind == "sglang"] * len(prompts), told
