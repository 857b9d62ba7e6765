"""Probes, facts, metrics, text to tokens, adapters, and the faults of the simulation."""

import time
import uuid
from typing import Any

from pydantic import ValidationError

from shoal_dev.sim.faults import Fault
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.metrics import CONTENT_TYPE
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.args import VERSION
from shoal_dev.sim.vllm.engine import VLLMEngine
from shoal_dev.sim.vllm.lora import VLLMRegistry
from shoal_dev.sim.vllm.openai import loaded_from, parse, rendered


class VLLMRoutes:
    """These routes of one engine."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    async def health(self, exchange: Exchange) -> None:
        """It knows death only: not a drain, not a hang, not a pause."""
        await exchange.answer(status=503 if self._engine.died.is_set() else 200)

    async def metrics(self, exchange: Exchange) -> None:
        if not self._engine.args.enable_metrics:
            await exchange.json({"detail": "Not Found"}, 404)
            return
        await exchange.answer(self._engine.metrics.render(), CONTENT_TYPE)

    async def version(self, exchange: Exchange) -> None:
        await exchange.json({"version": VERSION})

    async def load(self, exchange: Exchange) -> None:
        await exchange.json({"server_load": self._engine.load if self._engine.vllm.load_tracking else 0})

    async def models(self, exchange: Exchange) -> None:
        args = self._engine.args
        cards = [_card(name, args.model_path, None, self._engine.context_length) for name in self._engine.vllm.names]
        adapters = [] if self._engine.adapters is None else self._engine.adapters.adapters()
        cards += [_card(adapter.name, adapter.path, args.served_model_name, None) for adapter in adapters]
        await exchange.json({"object": "list", "data": cards})

    async def tokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        loaded = loaded_from(exchange, body)
        tokenizer = self._engine.model.tokenizer
        if isinstance(loaded, dict) and "messages" in loaded:
            chat = parse(p.TokenizeMessages, exchange, body)
            self._engine.named(chat.model)
            if not chat.messages:
                raise p.RefusedError(400, p.NO_MESSAGES)
            tokens = tokenizer.encode(rendered(self._engine.model, chat))
        else:
            try:
                wanted = p.TokenizePrompt.model_validate(loaded)
            except ValidationError as error:
                raise _either(error) from None
            self._engine.named(wanted.model)
            tokens = tokenizer.encode(wanted.prompt, special=wanted.add_special_tokens)
        longest = self._engine.context_length
        await exchange.json({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    async def detokenize(self, exchange: Exchange) -> None:
        request = parse(p.DetokenizeRequest, exchange, await exchange.body())
        self._engine.named(request.model)
        for at, token in enumerate(request.tokens):
            if token < 0:
                place = f"body.tokens.{at}"
                detail = {
                    "type": "greater_than_equal", "loc": place, "msg": "Input should be greater than or equal to 0",
                    "input": str(token), "ctx": {"ge": 0},
                }  # fmt: skip
                message = f"1 validation error:\n  {detail}"
                raise p.RefusedError(400, message, kind="Bad Request", param=place)
        try:
            text = self._engine.model.tokenizer.decode(request.tokens, special=True)
        except OverflowError as error:
            raise p.RefusedError(400, str(error)) from None
        await exchange.json({"prompt": text})

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, exchange: Exchange) -> None:
        request = parse(p.LoadAdapter, exchange, await exchange.body())
        await self._adapters().load(request.lora_name, request.lora_path, inplace=request.load_inplace)
        await _text(exchange, f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload_adapter(self, exchange: Exchange) -> None:
        request = parse(p.UnloadAdapter, exchange, await exchange.body())
        if self._engine.adapters is None:
            raise p.RefusedError(404, f"The lora adapter '{request.lora_name}' cannot be found.")
        self._adapters().unload(request.lora_name)
        await _text(exchange, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    async def register_adapter(self, exchange: Exchange) -> None:
        """The twin that wants no key."""
        request = parse(p.RegisterAdapter, exchange, await exchange.body())
        await self._adapters().load(request.name, request.src)
        await _text(exchange, f"Adapter {request.name} registered")

    def _adapters(self) -> VLLMRegistry:
        adapters = self._engine.adapters
        if adapters is None:
            raise p.RefusedError(
                500,
                "Call to add_lora method failed: Worker failed with error 'LoRA is not enabled. Use --enable-lora to "
                "enable LoRA.', please check the stack trace above for the root cause",
            )
        self._engine.check()
        return adapters

    # --- the simulation's own -----------------------------------------------------------------------------------------

    async def arm_fault(self, exchange: Exchange) -> None:
        try:
            self._engine.faults.arm(Fault.model_validate_json(await exchange.body()))
        except ValidationError as error:
            await exchange.json({"error": {"message": str(error)}}, 400)
            return
        await self.faults(exchange)

    async def clear_faults(self, exchange: Exchange) -> None:
        self._engine.faults.clear()
        self._engine.loop.recover()
        await self.faults(exchange)

    async def faults(self, exchange: Exchange) -> None:
        armed = [fault.model_dump() for fault in self._engine.faults.armed()]
        await exchange.json({"armed": armed, "stalled": self._engine.loop.stalled})


def _card(name: str, root: str, parent: str | None, longest: int | None) -> dict[str, Any]:
    now = int(time.time())
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}", "object": "model_permission", "created": now,
        "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
        "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
    return {
        "id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root, "parent": parent,
        "max_model_len": longest, "permission": [permission],
    }  # fmt: skip


def _either(error: ValidationError) -> p.RefusedError:
    """A body that is neither a prompt nor messages: both are told."""
    first = p.invalid(error)
    message: str = first.body["error"]["message"]
    given = error.errors(include_url=False)[0]
    whole = given["input"] if given["type"] == "missing" else {"prompt": given["input"]}
    shown = f"<dict of {len(whole)} items>"
    detail = {"type": "missing", "loc": "body.messages", "msg": "Field required", "input": shown}
    lines = message.partition("\n")[2]
    return p.RefusedError(
        400, f"2 validation errors:\n{lines}\n  {detail}", kind="Bad Request", param=first.body["error"]["param"]
    )


async def _text(exchange: Exchange, message: str) -> None:
    await exchange.answer(message.encode())
