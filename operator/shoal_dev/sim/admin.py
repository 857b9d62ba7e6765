"""Probes, facts, load and administration: every route that does not generate."""

import time
from datetime import UTC, datetime
from typing import Any, Final, cast

import orjson
from pydantic import ValidationError

from shoal_dev.sim.args import SGLANG_VERSION
from shoal_dev.sim.engine import SimEngine
from shoal_dev.sim.faults import Fault
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.metrics import CONTENT_TYPE

_SECTIONS: Final = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
_FLUSHED: Final = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    b"operation will not be performed.)\n"
)


class Admin:
    """These routes of one engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._published: dict[str, Any] | None = None
        """The last load while the engine computed."""

    async def health(self, exchange: Exchange) -> None:
        ok = await self._engine.health(generate=True)
        await exchange.answer(status=200 if ok else 503)

    async def ready(self, exchange: Exchange) -> None:
        ok = self._up() and not self._engine.scheduler.paused
        await exchange.answer(status=200 if ok else 503)

    async def ping(self, exchange: Exchange) -> None:
        await exchange.answer(status=200 if self._up() else 503)

    async def root(self, exchange: Exchange) -> None:
        await exchange.json("SGLang is running")

    async def metrics(self, exchange: Exchange) -> None:
        if not self._engine.args.enable_metrics:
            await exchange.json({"detail": "Not Found"}, 404)
            return
        await exchange.answer(self._engine.metrics.render(), CONTENT_TYPE)

    async def models(self, exchange: Exchange) -> None:
        lora = self._engine.lora
        adapters = [] if lora is None else [self._adapter_card(a.name, a.path) for a in lora.adapters()]
        await exchange.json({"object": "list", "data": [self._card(), *adapters]})

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        if name == self._engine.args.served_model_name:
            await exchange.json(self._card())
            return
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        await exchange.json({"error": error}, 404)

    async def model_info(self, exchange: Exchange) -> None:
        args, model = self._engine.args, self._engine.model
        await exchange.json(
            {
                "model_path": args.model_path,
                "served_model_name": args.served_model_name,
                "tokenizer_path": args.model_path,
                "is_generation": not self._engine.embeds,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": "auto",
                "reasoning_parser": args.given.get("reasoning_parser"),
                "tool_call_parser": args.given.get("tool_call_parser"),
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": model.model_type,
                "architectures": list(model.architectures),
            }
        )

    async def server_info(self, exchange: Exchange) -> None:
        engine, args = self._engine, self._engine.args
        # It is the scheduler that is asked.
        await engine.loop.step()
        capacity = engine.scheduler.kv.capacity
        # Keys in clear, as SGLang shows them: whoever proxies this route must know.
        await exchange.json(
            {
                **args.given,
                "model_path": args.model_path,
                "served_model_name": args.served_model_name,
                "tokenizer_path": args.model_path,
                "host": args.host,
                "port": args.port,
                "context_length": args.context_length,
                "tp_size": args.tp_size,
                "dp_size": 1,
                "attn_dp_size": 1,
                "load_balance_method": "round_robin",
                "disaggregation_mode": "null",
                "max_running_requests": args.max_running_requests,
                "max_total_tokens": args.max_total_tokens,
                "chunked_prefill_size": args.chunked_prefill_size,
                "mem_fraction_static": args.mem_fraction_static,
                "api_key": args.api_key,
                "admin_api_key": args.admin_api_key,
                "max_total_num_tokens": capacity,
                "startup_time": engine.started,
                "version": SGLANG_VERSION,
                "internal_states": [
                    {
                        "memory_usage": self._memory(),
                        "effective_max_running_requests_per_dp": engine.max_running,
                        "last_gen_throughput": engine.loop.throughput(),
                    }
                ],
            }
        )

    async def loads(self, exchange: Exchange) -> None:
        include = {part for part in exchange.query.get("include", "all").split(",") if part}
        if not include <= _SECTIONS:
            # SGLang does not handle the ValueError that it raises here.
            await exchange.answer(b"Internal Server Error", "text/plain; charset=utf-8", 500)
            return
        every = "all" in include
        scheduler = self._engine.scheduler
        if self._engine.loop.halted and self._published is not None:
            # A scheduler that hangs publishes nothing: neither its age nor what has come since.
            await exchange.json(self._published)
            return
        kv, totals = scheduler.kv, scheduler.totals
        load: dict[str, Any] = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": scheduler.running,
            "num_waiting_reqs": scheduler.waiting,
            "num_waiting_uncached_tokens": scheduler.waiting_tokens,
            "num_used_tokens": kv.used,
            "num_total_tokens": kv.used + scheduler.waiting_tokens,
            "num_active_tokens": scheduler.active_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": kv.capacity,
            "max_running_requests": self._engine.max_running,
            "token_usage": round(kv.used / kv.capacity, 4),
            "gen_throughput": self._engine.loop.throughput(),
            "cache_hit_rate": round(scheduler.cache_hit_rate, 4),
            "utilization": 0.0,
            "total_prefill_uncached_tokens": totals.prefill_uncached_tokens,
            "total_prefill_busy_us": int(totals.prefill_seconds * 1e6),
            "decode_moments": totals.decode_moments if totals.decode_moments[0] else None,
        }
        if every or "memory" in include:
            load["memory"] = self._memory()
        if (every or "lora" in include) and scheduler.slots is not None:
            used, slots = scheduler.adapters_running, scheduler.slots.total
            load["lora"] = {"slots_used": used, "slots_total": slots, "utilization": used / slots}
        if every or "disagg" in include:
            load["disaggregation"] = {
                "mode": "null",
                "prefill_bootstrap_queue_reqs": 0,
                "prefill_inflight_queue_reqs": 0,
                "decode_prealloc_queue_reqs": 0,
                "decode_transfer_queue_reqs": 0,
                "decode_retracted_queue_reqs": 0,
                "kv_transfer_speed_gb_s": 0.0,
                "kv_transfer_latency_ms": 0.0,
            }
        if every or "queues" in include:
            load["queues"] = {
                "waiting": scheduler.waiting,
                "grammar": 0,
                "paused": scheduler.waiting if scheduler.paused else 0,
                "retracted": scheduler.retracted_waiting,
                "prealloc_ready": 0,
            }
        self._published = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": SGLANG_VERSION,
            "accelerator": self._engine.args.gpu.partition(":")[0],
            "num_accelerators": self._engine.args.tp_size,
            "loads": [load],
        }
        await exchange.json(self._published)

    async def flush_cache(self, exchange: Exchange) -> None:
        if not self._engine.scheduler.idle:
            await exchange.answer(b"Flush cache failed.\n", status=400)
            return
        self._engine.scheduler.kv.flush()
        await exchange.answer(_FLUSHED)

    async def abort_request(self, exchange: Exchange) -> None:
        body = await _object(exchange)
        self._engine.abort(body.get("rid"), everything=bool(body.get("abort_all")))
        await exchange.answer()

    async def pause(self, exchange: Exchange) -> None:
        body = await _object(exchange)
        self._engine.pause(str(body.get("mode") or "abort"))
        await exchange.json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, exchange: Exchange) -> None:
        await exchange.body()
        self._engine.resume()
        await exchange.json({"message": "Generation continued successfully.", "status": "ok"})

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

    # --- inside -------------------------------------------------------------------------------------------------

    def _up(self) -> bool:
        return self._engine.status == "Up" and not self._engine.draining

    def _card(self) -> dict[str, Any]:
        name = self._engine.args.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self._engine.context_length,
        }

    def _adapter_card(self, name: str, path: str) -> dict[str, Any]:
        parent = self._engine.args.served_model_name
        return {**self._card(), "id": name, "root": path, "parent": parent, "max_model_len": None}

    def _memory(self) -> dict[str, Any]:
        capacity = self._engine.scheduler.kv.capacity
        return {
            "weight_gb": round(self._engine.memory.weight_bytes / 2**30, 2),
            "kv_cache_gb": round(self._engine.memory.kv_bytes / 2**30, 2),
            "graph_gb": 0.0,
            "token_capacity": capacity,
        }


async def _object(exchange: Exchange) -> dict[str, Any]:
    """The body as a JSON object; anything else counts as empty."""
    try:
        body: object = orjson.loads(await exchange.body() or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return cast(dict[str, Any], body) if isinstance(body, dict) else {}
