"""The routes that load and unload LoRA adapters."""

from typing import Any

from pydantic import BaseModel, ValidationError

from shoal_dev.sim import protocol as p
from shoal_dev.sim.engine import SimEngine
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.lora import DISABLED, Outcome
from shoal_dev.sim.loraargs import LoRAPath


class _Load(BaseModel):
    lora_name: str
    lora_path: str
    pinned: bool = False


class _Unload(BaseModel):
    lora_name: str


class AdapterRoutes:
    """These routes of one engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    async def load(self, exchange: Exchange) -> None:
        body = await exchange.body()
        try:
            wanted = _Load.model_validate_json(body)
        except ValidationError as error:
            await exchange.json(p.error_body(p.validation_message(error), kind="Bad Request"), 400)
            return
        lora = self._engine.lora
        path = LoRAPath(wanted.lora_name, wanted.lora_path, wanted.pinned)
        await _answer(exchange, Outcome(False, DISABLED, None) if lora is None else await lora.load(path))

    async def unload(self, exchange: Exchange) -> None:
        body = await exchange.body()
        try:
            wanted = _Unload.model_validate_json(body)
        except ValidationError as error:
            await exchange.json(p.error_body(p.validation_message(error), kind="Bad Request"), 400)
            return
        lora = self._engine.lora
        await _answer(exchange, Outcome(False, DISABLED, None) if lora is None else await lora.unload(wanted.lora_name))


async def _answer(exchange: Exchange, outcome: Outcome) -> None:
    content: dict[str, Any] = {
        "rid": None,
        "http_worker_ipc": None,
        "success": outcome.success,
        "error_message": outcome.error,
        "loaded_adapters": outcome.loaded,
    }
    await exchange.json(content, 200 if outcome.success else 400)
