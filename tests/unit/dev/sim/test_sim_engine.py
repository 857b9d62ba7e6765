"""Faults, journal and answers of the simulator, through its HTTP surface in this process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shoal_dev.sim.answers import SimulatedAnswer
from shoal_dev.sim.tokenizer import ModelFolder, WordTokenizer
from tests.support.sim_rig import ADMIN, journal, running


async def test_the_same_seed_and_prompt_give_the_same_readable_answer(tmp_path: Path):
    texts: list[str] = []
    for seed in ("1", "1", "2"):
        async with running(tmp_path, "--sim-seed", seed) as rig:
            texts.append((await rig.complete(max_tokens=60, ignore_eos=True)).json["choices"][0]["text"])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("Hello from Shoal.")
    assert texts[0].isascii()


def test_an_answer_ends_by_itself_and_goes_on_for_those_who_ignore_the_end():
    answer = SimulatedAnswer(WordTokenizer(), (1, 2, 3), seed=0, choice=0)
    ends = [i for i in range(400) if answer.token(i)[2]]
    assert len(ends) == 1
    assert answer.token(ends[0])[:2] == (0, "")
    assert answer.token(399)[1]


def test_a_model_without_files_gets_words_for_tokens(tmp_path: Path):
    folder = ModelFolder.load(str(tmp_path))
    text = "One two, three."
    assert folder.tokenizer.decode(folder.tokenizer.encode(text)) == text
    assert folder.context_length == 8192


def test_a_template_may_refuse_a_conversation(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        ModelFolder.load(str(tmp_path)).chat_prompt([{"role": "user", "content": "x"}], None)


async def test_fault_503_strikes_as_often_as_asked(tmp_path: Path):
    async with running(tmp_path) as rig:
        assert (await rig.fault(kind="503", count=2)).json["armed"][0]["count"] == 2
        replies = [await rig.complete() for _ in range(3)]
        assert [reply.status for reply in replies] == [503, 503, 200]
        assert replies[0].json["message"] == "The request queue is full."
    assert [entry["outcome"] for entry in journal(tmp_path)] == ["503", "503", "length"]


async def test_fault_sse_error_comes_first_or_after_some_tokens(tmp_path: Path):
    async with running(tmp_path) as rig:
        for tokens in (0, 3):
            await rig.fault(kind="sse_error", after_tokens=tokens, message="out of luck", status=500)
            reply = await rig.complete(stream=True, ignore_eos=True)
            blocks = reply.body.decode().split("\n\n")
            assert reply.status == 200
            assert blocks[0].startswith('data: {"error"') == (tokens == 0)
            assert '"message": "out of luck"' in blocks[-3]
            assert blocks[-2] == "data: [DONE]"
    assert [entry["completion_tokens"] for entry in journal(tmp_path)] == [0, 3]


@pytest.mark.parametrize("tokens", [0, 3])
async def test_fault_hang_lasts_until_the_client_leaves_and_spares_others(tmp_path: Path, tokens: int):
    async with running(tmp_path) as rig:
        await rig.fault(kind="hang", after_tokens=tokens)
        hung = asyncio.create_task(rig.complete(stream=True, ignore_eos=True))
        await asyncio.sleep(0.2)
        assert not hung.done()
        assert (await rig.complete()).status == 200
        rig.leave.set()
        await hung
        assert not rig.engine.busy
    outcomes = {entry["outcome"]: entry["completion_tokens"] for entry in journal(tmp_path)}
    assert outcomes == {"hang": tokens, "length": 8}


async def test_fault_stall_stops_everybody_until_cleared(tmp_path: Path):
    async with running(tmp_path) as rig:
        await rig.fault(kind="stall")
        first, second = asyncio.create_task(rig.complete()), asyncio.create_task(rig.complete())
        await asyncio.sleep(0.2)
        assert not first.done()
        assert not second.done()
        assert (await rig.call("GET", "/sim/faults", headers=ADMIN)).json["stalled"] is True
        assert not await rig.engine.health(generate=True, timeout=0.01)
        assert rig.engine.status == "UnHealthy"
        assert (await rig.call("GET", "/ready")).status == 503
        await rig.call("DELETE", "/sim/faults", headers=ADMIN)
        assert (await first).status == (await second).status == 200


async def test_fault_slow_delays_every_chunk(tmp_path: Path):
    async with running(tmp_path) as rig:
        await rig.fault(kind="slow", delay_seconds=0.05)
        before = asyncio.get_running_loop().time()
        assert (await rig.complete(stream=True)).finished
        assert asyncio.get_running_loop().time() - before >= 0.05


async def test_fault_throttled_makes_every_step_longer_until_cleared(tmp_path: Path):
    async with running(tmp_path) as rig:
        assert rig.engine.faults.slowdown == 1
        await rig.fault(kind="throttled", factor=4)
        assert rig.engine.faults.slowdown == 4
        assert (await rig.complete()).status == 200, "no request uses it up"
        assert rig.engine.faults.slowdown == 4
        await rig.call("DELETE", "/sim/faults", headers=ADMIN)
        assert rig.engine.faults.slowdown == 1


async def test_fault_garbled_changes_greedy_answers_alone(tmp_path: Path):
    async with running(tmp_path) as rig:

        async def texts() -> tuple[str, str]:
            answers = [await rig.complete(temperature=temperature) for temperature in (0, 1)]
            return answers[0].json["choices"][0]["text"], answers[1].json["choices"][0]["text"]

        greedy, other = await texts()
        await rig.fault(kind="garbled")
        assert await texts() == await texts()
        garbled, same = await texts()
        assert garbled[:12] != greedy[:12]
        assert same == other
        await rig.call("DELETE", "/sim/faults", headers=ADMIN)
        assert await texts() == (greedy, other)


async def test_fault_crash_kills_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running(tmp_path) as rig:
        crashed = asyncio.Event()
        monkeypatch.setattr(rig.engine, "crash", crashed.set)
        await rig.fault(kind="crash", after_tokens=2)
        task = asyncio.create_task(rig.complete(stream=True, ignore_eos=True))
        async with asyncio.timeout(10):
            await crashed.wait()
        rig.leave.set()
        await task


@pytest.mark.parametrize(
    "body", [{"kind": "earthquake"}, {"kind": "503", "count": 0}, {"kind": "hang", "when": "now"}, {}]
)
async def test_a_fault_that_is_none_is_refused(tmp_path: Path, body: dict[str, Any]):
    async with running(tmp_path) as rig:
        assert (await rig.fault(**body)).status == 400
        assert (await rig.complete()).status == 200


async def test_faults_need_the_admin_key(tmp_path: Path):
    async with running(tmp_path) as rig:
        for key in ({}, {"authorization": "Bearer wrong"}):
            assert (await rig.call("POST", "/sim/faults", {"kind": "503"}, key)).status == 401


async def test_the_journal_tells_tokens_and_times_but_no_prompt(tmp_path: Path):
    async with running(tmp_path) as rig:
        for rid in ("a", "b"):
            await rig.complete(prompt="a most secret prompt", rid=rid, model="team/x", stream=rid == "b")
    text = (tmp_path / "journal.jsonl").read_text()
    assert "secret" not in text
    first, second = journal(tmp_path)
    assert (first["rid"], first["path"], first["model"], first["outcome"]) == (
        "a",
        "/v1/completions",
        "team/x",
        "length",
    )
    assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (4, 0, 8)
    assert second["cached_tokens"] == 3
    assert second["prompt_sha256"] == first["prompt_sha256"]
    assert first["arrived"] <= first["first_token"] <= first["finished"]


async def test_a_client_that_leaves_a_stream_frees_its_place(tmp_path: Path):
    async with running(tmp_path, "--sim-speed", "1") as rig:
        task = asyncio.create_task(rig.complete(stream=True, ignore_eos=True, max_tokens=5000))
        async with asyncio.timeout(10):
            while not rig.engine.scheduler.running:
                await asyncio.sleep(0.01)
        rig.leave.set()
        await task
        assert rig.engine.scheduler.idle
        assert rig.engine.scheduler.kv.used == 0
    assert journal(tmp_path)[0]["outcome"] == "abort"


NGRAM = ("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=4")
TELL = {"return_spec_tokens_details": True, "ignore_eos": True}


def drafts(extension: dict[str, Any]) -> Any:
    """Correct and proposed tokens of each answer, without a list around those of a single one."""
    told = extension["sglext"]["spec_tokens_details"]

    def of(one: dict[str, Any]) -> tuple[int, int]:
        return one["spec_num_correct_drafts"], one["spec_num_proposed_drafts"]

    return [of(one) for one in told] if isinstance(told, list) else of(told)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_drafts_are_told_who_asks_and_none_is_accepted(tmp_path: Path, path: str):
    asked = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with running(tmp_path, *NGRAM) as rig:

        async def call(**more: Any) -> Any:
            return await rig.call("POST", path, {**asked, "max_tokens": 8, **more})

        assert drafts((await call(**TELL)).json) == (0, 21)
        assert drafts((await call(**TELL, n=2)).json) == [(0, 21), (0, 21)]
        assert "sglext" not in (await call()).json
        assert "sglext" not in (await call(**TELL | {"max_tokens": 1})).json
        for usage, after in (({}, 1), ({"include_usage": True}, 2)):
            reply = await call(**TELL, stream=True, stream_options=usage)
            blocks = reply.body.decode().split("\n\n")[:-2]
            event = json.loads(blocks[-after].removeprefix("data: "))
            assert (event["choices"], event["usage"], drafts(event)) == ([], None, (0, 21))
            assert sum("sglext" in block for block in blocks) == 1


async def test_an_engine_without_speculation_tells_of_no_drafts(tmp_path: Path):
    async with running(tmp_path) as rig:
        assert "sglext" not in (await rig.complete(**TELL)).json
        assert b"sglext" not in (await rig.complete(**TELL, stream=True)).body
