"""Loading and unloading LoRA adapters in one engine, as SGLang's HTTP API does it. No policy.

What the engine does with these calls decides how they may be used:

- A load stops the decoding of all requests on the replica while the files are read.
- An unload first waits until the last request of the adapter has ended, however long that takes, and every other load
  and unload waits behind it.
- A call that its caller gave up is still carried out: after EngineTimeout, ask `loaded` what became of it.
- An unloaded adapter stays known: the next request that names it loads it again from its old folder.
- Its messages name the adapters of all tenants. `message` is therefore only for readers who may see them all.
"""

from collections.abc import Mapping
from typing import Final, cast

from shoal.engine.http import json_object
from shoal.engine.models import MODELS_PATH, parse_models
from shoal.engine.port import (
    AdapterRejected,
    AlreadyLoaded,
    EngineRefused,
    IncompleteUnload,
    LoadedAdapter,
    LoRADisabled,
    NotLoaded,
    TooManyPinned,
)
from shoal.engine.sglang.client import SGLangClient

LOAD_SECONDS: Final = 60.0
UNLOAD_SECONDS: Final = 60.0
LIST_SECONDS: Final = 5.0

_ALREADY: Final = ("because it is already loaded", "already exists. Loaded LoRAs")
_UNKNOWN: Final = "does not exist. Loaded LoRAs"
_INCOMPLETE: Final = "has an incomplete unload"
_PINNED: Final = "as a pinned adapter"
_DISABLED: Final = "LoRA is not enabled"


class SGLangAdapters:
    """The adapters of one engine. Every call has a deadline and raises EngineError, nothing else."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client

    async def load(
        self, name: str, path: str, *, pinned: bool = False, seconds: float = LOAD_SECONDS
    ) -> dict[str, str]:
        """Loads the adapter of the folder `path`, as the engine sees it; returns what is loaded now, path by name.

        Raises AlreadyLoaded, IncompleteUnload, TooManyPinned, LoRADisabled, AdapterRejected for what is wrong with the
        files, EngineTimeout after `seconds`, EngineUnreachable.
        """
        wanted = {"lora_name": name, "lora_path": path, "pinned": pinned}
        return await self._update("/load_lora_adapter", name, wanted, seconds)

    async def unload(self, name: str, *, seconds: float = UNLOAD_SECONDS) -> dict[str, str]:
        """Unloads an adapter; returns what is loaded now. Raises NotLoaded, EngineTimeout while a request of it runs,
        and else as `load`."""
        return await self._update("/unload_lora_adapter", name, {"lora_name": name}, seconds)

    async def loaded(self) -> tuple[LoadedAdapter, ...]:
        """What /v1/models lists, the least recently used first. A name that is being unloaded is gone already."""
        return parse_models(await self._client.get(MODELS_PATH, LIST_SECONDS, auth="api"))

    async def _update(self, path: str, name: str, body: Mapping[str, object], seconds: float) -> dict[str, str]:
        status, answer = await self._client.call("POST", path, seconds, auth="admin", body=body)
        if status not in (200, 400):
            raise EngineRefused(path, status)
        result = json_object(answer, path)
        if status == 200 and result.get("success") is True:
            return _paths(result.get("loaded_adapters"))
        message = result.get("error_message")
        if not isinstance(message, str):
            raise EngineRefused(path, status)
        raise rejection(name, message)


def rejection(name: str, message: str) -> AdapterRejected:
    """The error that the engine's text stands for."""
    kinds: tuple[tuple[type[AdapterRejected], tuple[str, ...]], ...] = (
        (AlreadyLoaded, _ALREADY),
        (NotLoaded, (_UNKNOWN,)),
        (IncompleteUnload, (_INCOMPLETE,)),
        (TooManyPinned, (_PINNED,)),
        (LoRADisabled, (_DISABLED,)),
    )
    for kind, texts in kinds:
        if any(text in message for text in texts):
            return kind(name, message)
    return AdapterRejected(name, message)


def _paths(value: object) -> dict[str, str]:
    entries = cast("dict[object, object]", value) if isinstance(value, dict) else {}
    return {str(name): str(path) for name, path in entries.items()}
