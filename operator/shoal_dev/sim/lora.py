"""SGLang's registry of LoRA adapters, with the behaviour that a control plane has to know.

One lock serializes all loads and unloads. A load runs inside the scheduler, so decoding stops meanwhile. An unload
removes the name at once and then waits for the adapter's last request, still under the lock. A name once loaded stays
known, and a request for it loads the adapter again. Beyond --max-loaded-loras the least recently used adapter is
unloaded, even if requests use it.
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from shoal_dev.sim.adapterfiles import (
    AdapterConfig,
    AdapterFiles,
    AdapterFilesError,
    BaseDimensions,
    config_of,
    normalized,
    weights_of,
)
from shoal_dev.sim.faults import Faults
from shoal_dev.sim.loop import EngineLoop
from shoal_dev.sim.loraargs import LoRAArgs, LoRAPath
from shoal_dev.sim.slots import Slots

_log = structlog.get_logger()

DISABLED: Final = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
_LOAD_SECONDS: Final = 0.0015
_READ_BYTES_PER_SECOND: Final = 3e9
"""Rate of reading files from a local disk or the page cache into host memory."""


class AdapterUnavailableError(ValueError):
    """A request names an adapter that cannot be used; SGLang answers 400 with this message."""


@dataclass(slots=True, eq=False)
class SimAdapter:
    """One load of an adapter. A further load of the same adapter gets a new id, for which no prefixes are cached."""

    name: str
    path: str
    pinned: bool
    files: AdapterFiles
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    users: int = 0
    """Requests that use the adapter and have not ended."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The response to a load or an unload."""

    success: bool
    error: str | None
    loaded: dict[str, str] | None
    """Paths by name of the adapters in the scheduler; None: the scheduler was not asked."""


class SimLoRA:
    """The adapters of one engine that was started with LoRA enabled."""

    def __init__(self, args: LoRAArgs, base: BaseDimensions, loop: EngineLoop, faults: Faults) -> None:
        self.slots = Slots(args.slots)
        self._args = args
        self._base = base
        self._loop = loop
        self._faults = faults
        self._max_rank = args.max_rank
        self._modules = frozenset({"all"}) if "all" in args.modules else normalized(args.modules)
        self._lock = asyncio.Lock()
        self._registry: OrderedDict[str, SimAdapter] = OrderedDict()
        """Adapters that requests can use, by name, the least recently used first."""
        self._held: dict[str, SimAdapter] = {}
        """Adapters in the scheduler, by id, including those that wait to be unloaded."""
        self._known: dict[str, LoRAPath] = {}

    def adapters(self) -> list[SimAdapter]:
        """The adapters that /v1/models lists."""
        return list(self._registry.values())

    async def preload(self) -> None:
        """Loads --lora-paths. Raises ValueError for the first adapter that fails, as SGLang does at its start."""
        try:
            configs = [config_of(path.path, self._base) for path in self._args.paths]
        except AdapterFilesError as error:
            raise ValueError(str(error)) from None
        if self._max_rank is None:
            self._max_rank = max((config.rank for config in configs), default=0)
        self._modules = self._modules or frozenset[str]().union(*(config.modules for config in configs))
        for path in self._args.paths:
            outcome = await self._read(path)
            if isinstance(outcome, str):
                raise ValueError(f"Failed to load LoRA adapter {path.name}: {outcome}")
            self._add(path, outcome)

    async def load(self, path: LoRAPath) -> Outcome:
        """Loads an adapter after all loads and unloads that were requested before."""
        async with self._lock:
            found: list[AdapterFiles | str] = []

            async def work() -> float:
                files = await self._load(path)
                found.append(files)
                return 0.0 if isinstance(files, str) else _LOAD_SECONDS + files.bytes / _READ_BYTES_PER_SECOND

            await self._loop.interrupt(work)
            files = found[0]
            if isinstance(files, str):
                return Outcome(False, files, self._paths())
            self._add(path, files)
            loaded = self._paths()
            while self._args.cached is not None and len(self._registry) > self._args.cached:
                victim = next((a.name for a in self._registry.values() if not a.pinned), None)
                if victim is None:
                    message = f"Didn't find any LoRA adapters when trying to evict LRU LoRA adapter. {self._names()}"
                    return Outcome(False, message, None)
                await self._unload(victim)
                loaded.pop(victim, None)
            return Outcome(True, "", loaded)

    async def unload(self, name: str) -> Outcome:
        """Unloads an adapter when its last request has ended."""
        async with self._lock:
            if name not in self._registry:
                return Outcome(False, f"LoRA with name {name} does not exist. Loaded LoRAs: {self._names()}", None)
            await self._unload(name)
            return Outcome(True, "", self._paths())

    async def acquire(self, names: Sequence[str | None]) -> list[SimAdapter | None]:
        """The adapters that a request uses until `release`. A known adapter that is not loaded is loaded again.

        Raises AdapterUnavailableError.
        """
        wanted = set(names)
        if self._args.cached is not None and len(wanted) > self._args.cached:
            raise AdapterUnavailableError(
                f"Received request with {len(wanted)} unique loras requested but max loaded loras is "
                f"{self._args.cached}"
            )
        missing = [name for name in wanted if name is not None and not self._touch(name)]
        for name in missing:
            if name not in self._known:
                raise AdapterUnavailableError(
                    f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {self._known.keys()}."
                )
            outcome = await self.load(self._known[name])
            if not outcome.success and "already loaded" not in (outcome.error or ""):
                raise AdapterUnavailableError(f"Failed to implicitly load LoRA adapter {name}: {outcome.error}")
        for name in names:
            if name is not None and not self._touch(name):
                raise AdapterUnavailableError(
                    f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: {self._names()}."
                )
        used = [None if name is None else self._registry[name] for name in names]
        for adapter in used:
            if adapter is not None:
                adapter.users += 1
                adapter.unused.clear()
        return used

    def release(self, adapters: Sequence[SimAdapter | None]) -> None:
        """Ends the use of adapters that `acquire` returned."""
        for adapter in adapters:
            if adapter is not None:
                adapter.users -= 1
                if adapter.users == 0:
                    adapter.unused.set()

    # --- inside -------------------------------------------------------------------------------------------------

    def _touch(self, name: str) -> bool:
        if name in self._registry:
            self._registry.move_to_end(name)
        return name in self._registry

    async def _load(self, path: LoRAPath) -> AdapterFiles | str:
        """Reads the files, inside the scheduler; returns them, or the error message."""
        fault = self._faults.take("load")
        if fault is not None and fault.kind == "load_hang":
            self._loop.stall()
            await self._loop.recovered()
        if fault is not None and fault.kind == "load_slow":
            await asyncio.sleep(fault.delay_seconds)
        if fault is not None and fault.kind == "load_fail":
            return fault.message
        return await self._read(path)

    async def _read(self, path: LoRAPath) -> AdapterFiles | str:
        try:
            config = await asyncio.to_thread(config_of, path.path, self._base)
            refusal = self._refusal(path, config)
            if refusal is not None:
                return refusal
            return await asyncio.to_thread(weights_of, path.path, config, self._base, self._modules)
        except AdapterFilesError as error:
            return str(error)

    def _refusal(self, path: LoRAPath, config: AdapterConfig) -> str | None:
        unsupported = "because LoRA serving currently doesn't support"
        if config.adds_tokens:
            return f"Failed to load {path.name} {unsupported} adapters that add tokens to the vocabulary"
        if config.dora:
            return f"Failed to load {path.name} {unsupported} DoRA adapters"
        if any(adapter.name == path.name for adapter in self._held.values()):
            return f"Failed to load LoRA adapter {path.name} because it is already loaded"
        outside = "all" not in self._modules | config.modules and not config.modules <= self._modules
        if config.rank > (self._max_rank or 0) or outside:
            return (
                f"LoRA adapter {path.name} with rank {config.rank} is incompatible with the current LoRA memory pool "
                "configuration. Please ensure that the LoRA adapter's rank is within the configured "
                "`--max-lora-rank` and that the target modules are included in `--lora-target-modules`."
            )
        if path.pinned and self.slots.pinned >= self.slots.total - 1:
            return (
                f"Failed to load LoRA adapter {path.name} as a pinned adapter. It is not allowed to pin all slots in "
                "the LoRA memory pool to avoid starvation for unpinned adapters and base models. Please increase your "
                "`--max-loras-per-batch` or load it as unpinned LoRA adapters."
            )
        return None

    def _add(self, path: LoRAPath, files: AdapterFiles) -> None:
        adapter = SimAdapter(path.name, path.path, path.pinned, files)
        self._held[adapter.id] = adapter
        self.slots.add(adapter.id, files.bytes, pinned=path.pinned)
        self._registry[path.name] = adapter
        self._known[path.name] = path
        _log.info("adapter loaded", adapter=path.name, bytes=files.bytes, pinned=path.pinned)

    async def _unload(self, name: str) -> None:
        adapter = self._registry.pop(name)
        if adapter.users:
            await adapter.unused.wait()
        fault = self._faults.take("unload")
        if fault is not None:
            self._loop.stall()

        async def work() -> float:
            self._held.pop(adapter.id, None)
            self.slots.remove(adapter.id)
            return 0.0

        # A scheduler that hangs never runs this, so the lock stays held.
        await self._loop.interrupt(work)
        _log.info("adapter unloaded", adapter=name)

    def _paths(self) -> dict[str, str]:
        return {adapter.name: adapter.path for adapter in self._held.values()}

    def _names(self) -> str:
        return f"odict_keys({list(self._registry)})"
