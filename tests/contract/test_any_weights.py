"""Which weights answered? Those of an engine that has nothing but this adapter, after every kind of swap.

On the real engine the log-probabilities of a prompt's continuation decide, on the simulator the words.
"""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Client
from tests.support.adapters import make_adapter
from tests.support.behaviour import WORDS
from tests.support.engines import Kind, running_engine

PROMPT = "kubernetes pods serve models"
ADAPTERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
NEAR = 2e-4
"""Of a log-probability: the order of additions differs with the batch."""


async def answer(client: Client, adapter: str | None) -> tuple[str, list[float]]:
    """A greedy answer and its tokens' log-probabilities (none from the simulator)."""
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 1}
    (choice,) = (await client.post("/v1/completions", client.words.select(adapter) | body)).json["choices"]
    return choice["text"], [] if choice["logprobs"] is None else choice["logprobs"]["token_logprobs"]


def same(a: tuple[str, list[float]], b: tuple[str, list[float]]) -> bool:
    return a[0] == b[0] and a[1] == pytest.approx(b[1], abs=NEAR)


async def test_each_adapter_answers_as_in_an_engine_of_its_own(any_kind: Kind, lora: Client, tmp_path: Path):
    words = WORDS[any_kind]
    folders = {name: make_adapter(tmp_path / name, seed=seed) for name, seed in ADAPTERS.items()}
    expected: dict[str | None, tuple[str, list[float]]] = {}
    # Of "one" and "two": each start of the real engine takes its time.
    for name in ("one", "two"):
        begun = (words.adapters_at_start, f"{name}={folders[name]}")
        with running_engine(any_kind, tmp_path / f"only-{name}", *words.lora, *begun) as own:
            async with aiohttp.ClientSession() as session:
                expected[name] = await answer(Client(own, session), name)
                expected[None] = await answer(Client(own, session), None)
    assert not same(expected["one"], expected["two"])
    assert not same(expected["one"], expected[None])
    assert (len(expected["one"][1]) > 0) == (any_kind in ("sglang", "vllm"))

    # Loaded, used by turns with the others, in more adapters than there are slots and places in memory.
    for name in ADAPTERS:
        assert (await lora.load_adapter(name, folders[name])).status == 200
    for _ in range(2):
        for name in (None, *ADAPTERS):
            found = await answer(lora, name)
            if name in expected:
                assert same(found, expected[name]), name
    # Unloaded and loaded again; another one's files under the name.
    await lora.unload_adapter("two")
    if words.differences.after_unload != 200:
        assert (await lora.load_adapter("two", folders["two"])).status == 200
    assert same(await answer(lora, "two"), expected["two"])
    await lora.unload_adapter("two")
    assert (await lora.load_adapter("two", folders["one"])).status == 200
    assert same(await answer(lora, "two"), expected["one"])
    assert same(await answer(lora, None), expected[None])


@pytest.fixture
async def lora(any_kind: Kind, tmp_path: Path) -> Any:
    """An engine of the same kind as the ones beside it."""
    with running_engine(any_kind, tmp_path / "shared", *WORDS[any_kind].lora) as engine:
        async with aiohttp.ClientSession() as session:
            yield Client(engine, session)
