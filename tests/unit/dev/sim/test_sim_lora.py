"""Adapters of the simulator beyond what the contract suite shows: faults, the journal, times, arguments."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shoal_dev.sim import args as arguments
from shoal_dev.sim.loraargs import LoRAPath
from shoal_dev.sim.signatures import signature, signatures_in
from tests.support.adapters import make_adapter
from tests.support.engines import LORA, MODEL
from tests.support.sim_rig import ADMIN, Reply, Rig, journal, running

ENGINE = ("--model-path", str(MODEL), "--max-total-tokens", "20000", *LORA)


async def load(rig: Rig, name: str, folder: Path) -> Reply:
    return await rig.call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, ADMIN)


async def unload(rig: Rig, name: str) -> Reply:
    return await rig.call("POST", "/unload_lora_adapter", {"lora_name": name}, ADMIN)


async def arm(rig: Rig, **fault: Any) -> None:
    assert (await rig.call("POST", "/sim/faults", fault, ADMIN)).status == 200


async def clear(rig: Rig) -> None:
    await rig.call("DELETE", "/sim/faults", headers=ADMIN)


async def names(rig: Rig) -> list[str]:
    return [card["id"] for card in (await rig.call("GET", "/v1/models")).json["data"][1:]]


async def test_a_stream_of_an_adapter_is_signed_from_its_first_words(tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    async with running(tmp_path, *ENGINE) as rig:
        assert (await load(rig, "a", folder)).status == 200
        stream = await rig.complete(lora_path="a", stream=True, max_tokens=14, ignore_eos=True)
        assert signatures_in(stream.text) == (signature(folder),)
        assert signatures_in((await rig.complete(stream=True, max_tokens=300, ignore_eos=True)).text) == ()


async def test_the_journal_says_whose_weights_answered(tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    async with running(tmp_path, *ENGINE) as rig:
        await load(rig, "a", folder)
        await rig.complete(lora_path="a")
        await rig.complete()
    assert [(line["adapter"], line["signature"]) for line in journal(tmp_path)] == [
        ("a", signature(folder)),
        (None, None),
    ]


async def test_two_adapters_with_other_files_sign_differently(tmp_path: Path):
    first, second, same = (make_adapter(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 2, 1)))
    assert signature(first) == signature(same) != signature(second)


async def test_a_load_that_fails_leaves_the_name_free(tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    async with running(tmp_path, *ENGINE) as rig:
        await arm(rig, kind="load_fail", message="CUDA out of memory")
        answer = await load(rig, "a", folder)
        assert (answer.status, answer.json["error_message"]) == (400, "CUDA out of memory")
        assert await names(rig) == []
        assert (await load(rig, "a", folder)).status == 200


async def test_a_load_that_hangs_stops_everybody_until_it_is_cleared(tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    async with running(tmp_path, *ENGINE) as rig:
        await arm(rig, kind="load_hang")
        loading = asyncio.create_task(load(rig, "a", folder))
        while not rig.engine.loop.stalled:
            await asyncio.sleep(0)
        asked = asyncio.create_task(rig.complete())
        second = asyncio.create_task(load(rig, "b", folder))
        await asyncio.sleep(0.1)
        assert not loading.done()
        assert not asked.done()
        assert not second.done()
        await clear(rig)
        assert [(await task).status for task in (loading, asked, second)] == [200, 200, 200]


async def test_an_unload_that_deadlocks_takes_the_engine_with_it(tmp_path: Path):
    """github.com/sgl-project/sglang/issues/36894: the call never returns, nothing is scheduled, the process lives."""
    folder = make_adapter(tmp_path / "a")
    async with running(tmp_path, *ENGINE) as rig:
        await load(rig, "a", folder)
        await arm(rig, kind="unload_deadlock")
        tasks = [asyncio.create_task(unload(rig, "a"))]
        while not rig.engine.loop.stalled:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(rig.complete()))
        await asyncio.sleep(0.1)
        assert await names(rig) == []
        assert (await rig.call("GET", "/ready")).status == 200
        assert not any(task.done() for task in tasks)
        await clear(rig)
        assert [(await task).status for task in tasks] == [200, 200]


async def test_faults_of_loads_leave_requests_alone_and_the_other_way_round(tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    async with running(tmp_path, *ENGINE) as rig:
        await arm(rig, kind="load_fail", message="no")
        await arm(rig, kind="503")
        assert (await rig.complete()).status == 503
        assert (await load(rig, "a", folder)).status == 400
        assert (await load(rig, "a", folder)).status == 200
        assert (await rig.complete(lora_path="a")).status == 200


async def test_a_request_for_an_adapter_that_must_be_loaded_again_meets_the_fault_of_loading(tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    async with running(tmp_path, *ENGINE) as rig:
        await load(rig, "a", folder)
        await unload(rig, "a")
        await arm(rig, kind="load_fail", message="disk gone")
        answer = await rig.complete(lora_path="a")
        assert answer.status == 400
        assert answer.json["message"] == "Failed to implicitly load LoRA adapter a: disk gone"


async def test_a_larger_adapter_takes_the_engine_longer(tmp_path: Path):
    slow = ("--sim-speed", "0.01")
    folder = make_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    async with running(tmp_path, *ENGINE, *slow) as rig:
        began = rig.engine.clock.now()
        await load(rig, "a", folder)
        # 1.5 ms and the bytes at 3 GB/s, a hundred times as slow.
        assert rig.engine.clock.now() - began >= 100 * (0.0015 + weights.stat().st_size / 3e9)


async def test_bodies_that_are_no_load_are_refused(tmp_path: Path):
    async with running(tmp_path, *ENGINE) as rig:
        for path in ("/load_lora_adapter", "/unload_lora_adapter"):
            answer = await rig.call("POST", path, {"name": "a"}, ADMIN)
            assert answer.status == 400
            assert "lora_name" in answer.json["message"]
            assert (await rig.call("POST", path, {"lora_name": "a", "lora_path": "b"})).status == 401


async def test_metrics_count_the_adapters_that_run(tmp_path: Path):
    async with running(tmp_path, *ENGINE) as rig:
        text = (await rig.call("GET", "/metrics")).body.decode()
        assert "sglang:lora_pool_slots_used{" in text
        assert 'sglang:lora_pool_slots_total{engine_type="unified"' in text
        loads = (await rig.call("GET", "/v1/loads")).json["loads"][0]
        assert loads["lora"] == {"slots_used": 0, "slots_total": 3, "utilization": 0.0}
    async with running(tmp_path, "--model-path", str(MODEL)) as rig:
        assert b"lora_pool" not in (await rig.call("GET", "/metrics")).body
        assert "lora" not in (await rig.call("GET", "/v1/loads")).json["loads"][0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--enable-lora",), "you need to specify both --max-lora-rank and --lora-target-modules"),
        (("--enable-lora", "--max-lora-rank", "8"), "you need to specify both"),
        ((*LORA, "--max-loaded-loras", "2"), "max_loaded_loras should be greater than or equal to max_loras_per_batch"),
        (("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all", "q_proj"), "the only module"),
        (("--lora-paths", "a", "b", "c", "--max-loras-per-batch", "2", "--max-loaded-loras", "2"), "should not exceed"),
        ((*LORA, "--served-model-name", "a:b"), "cannot contain a colon"),
        (("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "proj"), "invalid choice"),
    ],
)
def test_arguments_that_sglang_refuses_are_refused(argv: tuple[str, ...], said: str, capsys: Any):
    with pytest.raises(SystemExit):
        arguments.parse(["--model-path", "/m", *argv], {})
    assert said in capsys.readouterr().err


def test_adapters_of_the_start_may_be_named_in_three_ways():
    item = json.dumps({"lora_name": "c", "lora_path": "/c", "pinned": True})
    found = arguments.parse(["--model-path", "/m", "--lora-paths", "/a", "b=/b", item], {}).lora
    assert found is not None
    assert found.paths == (LoRAPath("/a", "/a"), LoRAPath("b", "/b"), LoRAPath("c", "/c", pinned=True))


async def test_an_engine_whose_first_adapter_cannot_be_read_does_not_start(tmp_path: Path):
    async with running(tmp_path, "--model-path", str(MODEL), "--lora-paths", "a=/nowhere") as rig:
        assert rig.engine.lora is not None
        with pytest.raises(ValueError, match="Repo id must be in the form"):
            await rig.engine.lora.preload()


async def test_limits_are_those_of_the_adapters_of_the_start_where_none_are_given(tmp_path: Path):
    small, large = make_adapter(tmp_path / "s", rank=4), make_adapter(tmp_path / "l", rank=16)
    async with running(tmp_path, "--model-path", str(MODEL), "--lora-paths", f"small={small}") as rig:
        assert rig.engine.lora is not None
        await rig.engine.lora.preload()
        assert (await load(rig, "large", large)).status == 400
        assert (await load(rig, "small-2", small)).status == 200
