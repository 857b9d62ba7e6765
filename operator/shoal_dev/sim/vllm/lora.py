"""vLLM's registry of LoRA adapters, with the behaviour that a control plane has to know.

The registry holds names, without a limit; an unload forgets the name at once and tells the engine nothing. The engine
keeps the weights of the adapters used last in host memory. It reads an adapter that is not there again from its path,
inside the step that needs it. If the files are gone, the engine ends, for everybody.
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from shoal_dev.sim.adapterfiles import AdapterFiles, AdapterFilesError, BaseDimensions
from shoal_dev.sim.faults import Faults
from shoal_dev.sim.loop import EngineLoop
from shoal_dev.sim.lora import SimAdapter
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.adapterfiles import CONFIG, AdapterMissingError, read
from shoal_dev.sim.vllm.args import AdapterArgs
from shoal_dev.sim.vllm.scheduler import VLLMSlots

_log = structlog.get_logger()
_LOAD_SECONDS = 0.0015
_READ_BYTES_PER_SECOND = 3e9


class AdapterLostError(Exception):
    """A step needs an adapter whose files cannot be read any more."""


@dataclass(slots=True, eq=False)
class VLLMAdapter(SimAdapter):
    """One load of an adapter. `prefixes` is what its cached prefixes are known by: its name and its path, and not its
    files."""

    reread: bool = False
    """Loaded in place: read in each step that uses it."""
    prefixes: str = field(default="")

    def __post_init__(self) -> None:
        self.prefixes = f"lora {self.name} {self.path}"


class HostAdapters(VLLMSlots):
    """The slots, and the host memory behind them."""

    def __init__(self, slots: int, cached: int, read_again: Callable[[VLLMAdapter], AdapterFiles]) -> None:
        super().__init__(slots)
        self._cached = cached
        self._read_again = read_again
        self._host: OrderedDict[str, VLLMAdapter] = OrderedDict()
        self._loads: dict[str, VLLMAdapter] = {}

    def keep(self, adapter: VLLMAdapter) -> None:
        """An adapter was read; the one used least recently makes room."""
        self._loads[adapter.id] = adapter
        self.add(adapter.id, adapter.files.bytes, pinned=False)
        self._touch(adapter)

    def load_of(self, adapter: str) -> VLLMAdapter:
        """The load with this id; it is remembered after its name was forgotten."""
        return self._loads[adapter]

    def prepare(self, batch: "frozenset[str | None] | set[str | None]") -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises AdapterLostError."""
        seconds = 0.0
        for adapter in [self._loads[one] for one in sorted(one for one in batch if one is not None)]:
            if adapter.reread or adapter.id not in self._host:
                try:
                    files = self._read_again(adapter)
                except AdapterFilesError as error:
                    raise AdapterLostError(f"{adapter.name}: {error}") from None
                seconds += _LOAD_SECONDS + files.bytes / _READ_BYTES_PER_SECOND
            self._touch(adapter)
        return seconds + super().prepare(batch)

    def _touch(self, adapter: VLLMAdapter) -> None:
        self._host[adapter.id] = adapter
        self._host.move_to_end(adapter.id)
        while len(self._host) > self._cached:
            gone, _ = self._host.popitem(last=False)
            self._resident.pop(gone, None)


class VLLMRegistry:
    """The adapters of one engine that was started with LoRA enabled."""

    def __init__(
        self, args: AdapterArgs, base: BaseDimensions, names: Set[str], loop: EngineLoop, faults: Faults
    ) -> None:
        self.args = args
        self.slots = HostAdapters(args.slots, args.cached, lambda adapter: self._read(adapter.path))
        self._base = base
        self._names = names
        self._loop = loop
        self._faults = faults
        self._registry: dict[str, VLLMAdapter] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def adapters(self) -> list[VLLMAdapter]:
        """What /v1/models lists."""
        return list(self._registry.values())

    def named(self, name: str) -> VLLMAdapter | None:
        return self._registry.get(name)

    async def preload(self) -> None:
        """Loads --lora-modules. Raises ValueError for the first that fails."""
        for name, path in self.args.at_start:
            try:
                files = self._read(path)
            except AdapterFilesError as error:
                raise ValueError(f"Loading lora {name} failed: {error}") from None
            self._register(name, path, files)

    async def load(self, name: str, path: str, *, inplace: bool = False) -> None:
        """Raises RefusedError."""
        if not name or not path:
            raise p.RefusedError(400, "Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if name in self._names:
            message = f"The lora adapter '{name}' conflicts with a served base model."
            raise p.RefusedError(400, message, kind="InvalidUserInput")
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._registry and not inplace:
                raise p.RefusedError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    kind="InvalidUserInput",
                )
            try:
                files = await self._load(path)
            except AdapterMissingError as error:
                message = f"Loading lora {name} failed: No adapter found for {_hidden(str(error))}"
                raise p.RefusedError(404, message) from None
            except AdapterFilesError as error:
                message = (
                    f"Call to add_lora method failed: Worker failed with error '{error}', please check the stack trace "
                    "above for the root cause"
                )
                raise p.RefusedError(500, message) from None
            self._register(name, path, files, reread=inplace)

    def unload(self, name: str) -> None:
        """Raises RefusedError."""
        if self._registry.pop(name, None) is None:
            raise p.RefusedError(404, f"The lora adapter '{name}' cannot be found.")
        self._locks.pop(name, None)
        _log.info("adapter forgotten", adapter=name)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _load(self, path: str) -> AdapterFiles:
        """Reads the files between two steps: nobody is served meanwhile."""
        if not (Path(path) / CONFIG).exists():
            raise AdapterMissingError(path)
        found: list[AdapterFiles | AdapterFilesError] = []

        async def work() -> float:
            fault = self._faults.take("load")
            if fault is not None and fault.kind == "load_hang":
                self._loop.stall()
                await self._loop.recovered()
            if fault is not None and fault.kind == "load_slow":
                await asyncio.sleep(fault.delay_seconds)
            try:
                if fault is not None and fault.kind == "load_fail":
                    raise AdapterFilesError(fault.message)
                found.append(await asyncio.to_thread(self._read, path))
            except AdapterFilesError as error:
                found.append(error)
                return 0.0
            return _LOAD_SECONDS

        await self._loop.interrupt(work)
        if isinstance(found[0], AdapterFilesError):
            raise found[0]
        return found[0]

    def _read(self, path: str) -> AdapterFiles:
        return read(path, self._base, self.args.max_rank)

    def _register(self, name: str, path: str, files: AdapterFiles, *, reread: bool = False) -> None:
        adapter = VLLMAdapter(name, path, pinned=False, files=files, id=uuid.uuid4().hex, reread=reread)
        self._registry[name] = adapter
        self.slots.keep(adapter)
        _log.info("adapter loaded", adapter=name, bytes=files.bytes)


def _hidden(path: str) -> str:
    """Paths are not told, unless they are short."""
    return "<path>" if path.count("/") > 1 else path
