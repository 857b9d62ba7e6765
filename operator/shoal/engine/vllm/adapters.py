"""Loading and unloading LoRA adapters in one engine, as vLLM's HTTP API does it. No policy.

What the engine does with these calls decides how they may be used:

- A load stops the decoding of all requests on the replica while the files are read.
- An unload only forgets the name, at once; requests that run end unchanged. The weights stay in slot and host cache
  until others take their place.
- The files are read again, inside a step of the engine, when an adapter was evicted from the host cache. If they are
  gone, the whole engine dies: they must stay as long as the adapter is loaded.
- An adapter of the same name and path finds the prefix cache of the one before it: each revision needs a name or path
  of its own, which Shoal's have.
- `load_inplace` is never used: the engine would read the files at every step. Neither is `/adapters`, a twin of these
  calls that checks no key.
- Its messages can name the paths of files. `message` is therefore only for readers who may see them all.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from shoal.engine.models import MODELS_PATH, parse_models
from shoal.engine.port import (
    AdapterRejected,
    AlreadyLoaded,
    EngineRefused,
    LoadedAdapter,
    LoRADisabled,
    NotLoaded,
)
from shoal.engine.vllm.client import VLLMClient

LOAD_SECONDS: Final = 60.0
UNLOAD_SECONDS: Final = 60.0
LIST_SECONDS: Final = 5.0
_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"
_ALREADY: Final = "has already been loaded"
_UNKNOWN: Final = "cannot be found"
_BAD_FILES: Final = "add_lora"
"""In the text of a 500 that is about the adapter: the engine goes on unharmed."""
_DISABLED: Final = "LoRA is not enabled"
"""In the same 500, of an engine that has the route and no room for adapters: it says nothing about this one."""
_NO_ROUTE: Final = "the engine does not load adapters while it runs"


class VLLMAdapters:
    """The adapters of one engine. Every call has a deadline and raises EngineError, nothing else."""

    def __init__(self, client: VLLMClient) -> None:
        self._client = client

    async def load(self, name: str, path: str, *, seconds: float = LOAD_SECONDS) -> None:
        """Loads the adapter of the folder `path`, as the engine sees it.

        Raises AlreadyLoaded, LoRADisabled, AdapterRejected for what is wrong with the files, EngineTimeout after
        `seconds`, EngineUnreachable.
        """
        await self._update(_LOAD, name, {"lora_name": name, "lora_path": path}, seconds)

    async def unload(self, name: str, *, seconds: float = UNLOAD_SECONDS) -> None:
        """Unloads an adapter. Raises NotLoaded, and else as `load`."""
        await self._update(_UNLOAD, name, {"lora_name": name}, seconds)

    async def loaded(self) -> tuple[LoadedAdapter, ...]:
        """What /v1/models lists."""
        return parse_models(await self._client.get(MODELS_PATH, LIST_SECONDS, auth="api"))

    async def _update(self, path: str, name: str, body: Mapping[str, object], seconds: float) -> None:
        status, answer = await self._client.call("POST", path, seconds, auth="api", body=body)
        if status == 200:
            return
        message = _message(answer)
        if status == 404 and message is None:
            raise LoRADisabled(name, _NO_ROUTE)
        if message is None or not (status in (400, 404) or (status == 500 and _BAD_FILES in message)):
            raise EngineRefused(path, status)
        raise rejection(name, message)


def rejection(name: str, message: str) -> AdapterRejected:
    """The error that the engine's text stands for."""
    kinds: tuple[tuple[type[AdapterRejected], str], ...] = (
        (AlreadyLoaded, _ALREADY), (NotLoaded, _UNKNOWN), (LoRADisabled, _DISABLED),
    )  # fmt: skip
    return next((kind(name, message) for kind, text in kinds if text in message), AdapterRejected(name, message))


def _message(body: bytes) -> str | None:
    """The text of an error; None: the answer has none, as one of a path that is not there."""
    try:
        answer: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = cast("dict[str, Any]", answer).get("error") if isinstance(answer, dict) else None
    message = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None
