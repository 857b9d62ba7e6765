"""Whatever is loaded, unloaded and asked at once: answers are signed by the adapter that was named, nobody waits for
ever, and neither memory nor slots hold more than they have."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_dev.sim.signatures import signature, signatures_in
from shoal_dev.sim.slots import Slots
from tests.support.adapters import make_adapter
from tests.support.engines import LORA, LORA_LOADED, LORA_SLOTS, MODEL
from tests.support.sim_rig import ADMIN, Rig, running

NAMES = ("a", "b", "c", "d", "e", "f")
ENGINE = ("--model-path", str(MODEL), "--max-total-tokens", "20000", "--sim-speed", "1000", *LORA)
Act = tuple[Literal["load", "unload", "ask", "wait"], str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(at / name, seed=i, rank=2) for i, name in enumerate(NAMES)}


@given(acts=st.lists(st.tuples(st.sampled_from(["load", "unload", "ask", "ask", "wait"]), st.sampled_from(NAMES))))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_are_those_of_the_adapter_that_was_named(acts: Sequence[Act], folders: dict[str, Path], tmp_path: Path):
    asyncio.run(_all(acts, folders, tmp_path))


async def _all(acts: Sequence[Act], folders: dict[str, Path], tmp_path: Path) -> None:
    async with running(tmp_path, *ENGINE) as rig, asyncio.timeout(20):
        tasks: list[asyncio.Task[None]] = []
        for name in NAMES[:LORA_LOADED]:
            await _load(rig, name, folders[name])
        for act, name in acts:
            if act == "wait":
                await asyncio.gather(*tasks)
                tasks.clear()
            elif act == "load":
                tasks.append(asyncio.create_task(_load(rig, name, folders[name])))
            elif act == "unload":
                tasks.append(asyncio.create_task(_unload(rig, name)))
            else:
                tasks.append(asyncio.create_task(_ask(rig, name, signature(folders[name]))))
        await asyncio.gather(*tasks)
        assert rig.engine.lora is not None
        assert len(rig.engine.lora.adapters()) <= LORA_LOADED
        assert all(adapter.users == 0 for adapter in rig.engine.lora.adapters())
        assert rig.engine.scheduler.idle


async def _load(rig: Rig, name: str, folder: Path) -> None:
    reply = await rig.call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, ADMIN)
    assert reply.status == 200 or "already loaded" in reply.json["error_message"]


async def _unload(rig: Rig, name: str) -> None:
    reply = await rig.call("POST", "/unload_lora_adapter", {"lora_name": name}, ADMIN)
    assert reply.status == 200 or "does not exist" in reply.json["error_message"]


async def _ask(rig: Rig, name: str, signed: str) -> None:
    reply = await rig.complete(lora_path=name, max_tokens=14)
    if reply.status == 200:
        assert signatures_in(reply.json["choices"][0]["text"]) == (signed,)
        return
    # Never loaded yet, or evicted between its own load and the request: SGLang refuses both.
    assert reply.status == 400
    assert "never been loaded" in reply.json["message"] or "are not loaded" in reply.json["message"]


@given(
    pinned=st.sets(st.sampled_from(NAMES), max_size=LORA_SLOTS - 1),
    batches=st.lists(st.sets(st.sampled_from([None, *NAMES]), min_size=1, max_size=LORA_SLOTS + 1)),
)
def test_slots_hold_what_a_batch_needs_and_never_more_than_there_are(pinned: set[str], batches: list[set[str | None]]):
    slots = Slots(LORA_SLOTS)
    for name in NAMES:
        slots.add(name, 1, pinned=name in pinned)
    placed: set[str] = set()
    for batch in batches:
        if not slots.fit(batch):
            continue
        slots.prepare(batch)
        # What is in a slot costs nothing a second time; and once there, a pinned adapter is there for good.
        assert slots.prepare(batch) == 0
        placed |= {name for name in batch if name in pinned}
        assert len(slots.resident()) <= LORA_SLOTS
        assert placed | batch <= slots.resident()
