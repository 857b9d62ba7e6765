"""In which order an adapter is unloaded and its files are put away: engines differ, and the wrong order ends one."""

from pathlib import Path

import pytest

from shoal.agent.adapters.calls import Calls
from shoal.agent.adapters.files import AdapterFolder
from shoal.agent.adapters.metrics import Timings
from shoal.core.lora.lifecycle.planstep import Unload
from shoal.core.lora.lifecycle.registry import Registry, RegistryEntry
from shoal.engine.kinds import KINDS
from shoal.engine.port import EngineTimeout, LoadedAdapter

NAME = "team.a@0123456789ab"


class Engine:
    """Sees at its unload whether the files are there."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.files_there = folder, error, False

    async def load(self, name: str, path: str, *, seconds: float) -> None:
        raise AssertionError("nothing is loaded here")

    async def unload(self, name: str, *, seconds: float) -> None:
        self.files_there = (self.folder / name).is_dir()
        if self.error is not None:
            raise self.error

    async def loaded(self) -> tuple[LoadedAdapter, ...]:
        return ()


async def unloaded(folder: Path, kind: str, error: Exception | None = None) -> tuple[Engine, list[str]]:
    (folder / NAME).mkdir()
    engine = Engine(folder, error)
    registry = Registry(4, 2, 0.0)
    registry.observed("boot", 0.0, up=True)
    registry.entries[NAME] = RegistryEntry("unloading", 0.0)
    side = KINDS[kind].agent
    calls = Calls(registry, AdapterFolder(folder), Timings(), files_first=side.files_before_unload)
    return engine, await calls.execute(engine, Unload(NAME))


@pytest.mark.parametrize(("kind", "there"), [("SGLang", False), ("vLLM", True)])
async def test_files_go_before_the_unload_only_where_a_late_request_would_load_them_again(
    tmp_path: Path, kind: str, there: bool
) -> None:
    engine, discarded = await unloaded(tmp_path, kind)
    assert engine.files_there is there
    assert discarded == [NAME]


async def test_an_engine_that_reads_the_files_again_keeps_them_while_it_is_not_known_to_be_through(
    tmp_path: Path,
) -> None:
    engine, discarded = await unloaded(tmp_path, "vLLM", EngineTimeout("no answer"))
    assert engine.files_there
    assert discarded == []
    assert (tmp_path / NAME).is_dir()
