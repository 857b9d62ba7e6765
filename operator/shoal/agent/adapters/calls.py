"""Calls to the engine, and their results as changes of the registry."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from shoal.agent.adapters.files import NAME, AdapterFolder
from shoal.agent.adapters.metrics import Timings
from shoal.api import reasons
from shoal.core.lora.lifecycle.planstep import List, Load, Unload
from shoal.core.lora.lifecycle.registry import Registry
from shoal.engine.port import (
    AdapterRejected,
    AlreadyLoaded,
    EngineAdapters,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    IncompleteUnload,
    LoadedAdapter,
    NotLoaded,
)

LOAD_SECONDS: Final = 30.0
"""Timeout of a load, which is then reported as hanging. The engine continues it."""
UNLOAD_SECONDS: Final = 30.0
_TEXT: Final = 300
"""Characters of an engine's message that are passed on at most."""
_LISTS: Final = ("Loaded LoRAs", "All loaded adapters", "loaded_adapters")
"""Phrases after which an engine's message lists the adapters of other tenants."""

log = structlog.get_logger()


class Calls:
    """Executes calls one at a time and reports each result to `registry`."""

    def __init__(
        self,
        registry: Registry,
        files: AdapterFolder,
        timings: Timings,
        clock: Callable[[], float] = time.monotonic,
        *,
        files_first: bool = True,
    ) -> None:
        """`files_first`: see `AgentSide.files_before_unload`."""
        self._registry = registry
        self._files_first = files_first
        self._files = files
        self._timings = timings
        self._clock = clock

    async def execute(self, engine: EngineAdapters, call: Load | Unload | List) -> list[str]:
        """Executes one call. Returns the adapters whose files are no longer needed."""
        registry, boot = self._registry, self._registry.boot
        try:
            match call:
                case Load():
                    return await self._load(engine, call.name, boot)
                case Unload():
                    return await self._unload(engine, call.name, boot)
                case List():
                    return await self._list(engine, boot)
        finally:
            registry.busy = False

    async def _load(self, engine: EngineAdapters, name: str, boot: str | None) -> list[str]:
        registry, began = self._registry, self._clock()
        error: EngineError | None = None
        try:
            await engine.load(name, str(self._files.path(name)), seconds=LOAD_SECONDS)
        except AlreadyLoaded:
            pass  # a call of this agent or its predecessor was executed but not answered
        except EngineError as failed:
            error = failed
        now = self._clock()
        if registry.boot != boot:
            return []
        if error is None:
            registry.loaded(name, now - began, now)
            self._timings.load.observe(now - began)
            log.info("adapter.loaded", adapter=name, seconds=round(now - began, 4))
            return []
        log.warning("adapter.load_failed", adapter=name, kind=type(error).__name__, problem=shown_error(error))
        match error:
            case EngineUnreachable():
                registry.set_state(name, "staged")
                registry.load_broke_off(name, now)
                registry.call_broke(now)
            case EngineTimeout():
                registry.set_state(name, "load_unknown")
                text = f"the engine did not finish loading it within {LOAD_SECONDS:g} s"
                registry.failed(name, reasons.LOAD_HANGS, text, now, keep=True)
            case IncompleteUnload():
                registry.set_state(name, "unload_pending")
            case _:
                registry.failed(name, reasons.LOAD_FAILED, shown_error(error), now)
                if not isinstance(error, AdapterRejected):
                    registry.load_broke_off(name, now)
                return [name]
        return []

    async def _unload(self, engine: EngineAdapters, name: str, boot: str | None) -> list[str]:
        registry, began = self._registry, self._clock()
        error: EngineError | None = None
        if self._files_first:
            # From here on a stray request cannot make the engine load the adapter again, and a restarted agent can tell
            # that an unload may be in progress.
            try:
                await self._files.hide(name)
            except OSError as failed:
                log.error("adapter.files_stay", adapter=name, problem=failed.strerror)
        if registry.boot != boot:
            return [name]
        try:
            await engine.unload(name, seconds=UNLOAD_SECONDS)
        except NotLoaded:
            pass
        except EngineError as failed:
            error = failed
        now = self._clock()
        if registry.boot != boot:
            return [name]
        if error is None:
            registry.unloaded(name)
            self._timings.unload.observe(now - began)
            log.info("adapter.unloaded", adapter=name, seconds=round(now - began, 4))
            return [name]
        log.warning("adapter.unload_failed", adapter=name, kind=type(error).__name__, problem=shown_error(error))
        registry.set_state(name, "unload_pending")
        if isinstance(error, EngineUnreachable):
            registry.call_broke(now)
        elif isinstance(error, EngineTimeout):
            text = f"the engine did not finish unloading it within {UNLOAD_SECONDS:g} s"
            registry.failed(name, reasons.LOAD_HANGS, text, now, keep=True)
        else:
            registry.failed(name, reasons.LOAD_FAILED, shown_error(error), now, keep=True)
        return []

    async def _list(self, engine: EngineAdapters, boot: str | None) -> list[str]:
        registry = self._registry
        try:
            found = await engine.loaded()
        except EngineError as error:
            log.debug("adapter.list_failed", kind=type(error).__name__, problem=shown_error(error))
            if registry.boot == boot:
                registry.call_broke(self._clock())
            return []
        complete = await self._files.complete(each.name for each in found if NAME.fullmatch(each.name))
        if registry.boot != boot:
            return []
        ours = {each.name: each.name in complete and self._is_ours(each) for each in found if NAME.fullmatch(each.name)}
        useless = registry.listing(ours, len(found) - len(ours), self._clock())
        for name in useless:
            text = "is listed, but its files are missing" if name in ours else "is not listed"
            log.warning("adapter.disagrees", adapter=name, engine=text)
        return useless

    def _is_ours(self, found: LoadedAdapter) -> bool:
        return Path(found.path) == self._files.path(found.name)


def shown_error(error: EngineError) -> str:
    """An engine's error message without the names of other adapters."""
    text = error.message if isinstance(error, AdapterRejected) else str(error)
    for phrase in _LISTS:
        text = text.partition(phrase)[0]
    return " ".join(text.split())[:_TEXT] or type(error).__name__
