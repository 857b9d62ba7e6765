"""vLLM's paths, which of them want a key, and the errors that belong to no path."""

import hmac
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from shoal_dev.sim.http import ClientGoneError, Exchange, Receive, Scope, Send
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.engine import VLLMEngine
from shoal_dev.sim.vllm.openai import Generating
from shoal_dev.sim.vllm.pooling import Pooling
from shoal_dev.sim.vllm.routes import VLLMRoutes
from shoal_dev.sim.vllm.speech import HEARS, ONLY_HEARS, Speech

Handler = Callable[[Exchange], Awaitable[None]]

_log = structlog.get_logger()
_GUARDED: Final = ("/v1", "/v2", "/inference", "/cohere")
"""What begins with these wants the key. The same inference at other paths does not."""


class App:
    """One engine's HTTP surface."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._routes: dict[str, dict[str, Handler]] = {}
        self._counted: set[str] = set()
        routes = VLLMRoutes(engine)
        for path, handler in (
            ("/health", routes.health), ("/ping", routes.health), ("/metrics", routes.metrics),
            ("/version", routes.version), ("/load", routes.load), ("/v1/models", routes.models),
        ):  # fmt: skip
            self._route(path, "GET", handler)
        self._route("/tokenize", "POST", routes.tokenize)
        self._route("/detokenize", "POST", routes.detokenize)
        if engine.vllm.adapter_routes:
            self._route("/v1/load_lora_adapter", "POST", routes.load_adapter)
            self._route("/v1/unload_lora_adapter", "POST", routes.unload_adapter)
            self._route("/adapters", "POST", routes.register_adapter)
        self._route("/sim/faults", "POST", routes.arm_fault)
        self._route("/sim/faults", "GET", routes.faults)
        self._route("/sim/faults", "DELETE", routes.clear_faults)
        self._inference()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        exchange = Exchange(scope, receive, send)
        methods = self._routes.get(exchange.path, {})
        handler = methods.get(exchange.method)
        if self._engine.vllm.echo_request_id:
            exchange.add_header("x-request-id", exchange.headers.get("x-request-id") or uuid.uuid4().hex)
        if not self._allowed(exchange):
            await exchange.json({"error": "Unauthorized"}, 401)
            return
        counted = exchange.path in self._counted
        self._engine.load += counted
        try:
            if handler is None:
                status, detail = (405, "Method Not Allowed") if methods else (404, "Not Found")
                await exchange.json({"detail": detail}, status)
            else:
                await handler(exchange)
        except p.RefusedError as error:
            await exchange.json(error.body, error.status)
        except ClientGoneError:
            _log.debug("client gone", path=exchange.path)
        finally:
            self._engine.load -= counted
            shown = exchange.path if handler is not None else "none"
            self._engine.metrics.answered(shown, exchange.method, exchange.status)

    def _route(self, path: str, method: str, handler: Handler, *, counted: bool = False) -> None:
        self._routes.setdefault(path, {})[method] = handler
        if counted:
            self._counted.add(path)

    def _inference(self) -> None:
        """An engine has one kind, and only the paths of that kind."""
        engine, generating = self._engine, Generating(self._engine)
        pooling = Pooling(engine, generating)
        found: dict[str, Handler] = {}
        labels = "ForSequenceClassification" in "".join(engine.model.architectures)
        architectures = frozenset(engine.model.architectures)
        if not HEARS.isdisjoint(architectures):
            found |= {"/v1/audio/transcriptions": Speech(engine, generating).transcribe}
        if not (engine.embeds or architectures <= ONLY_HEARS):
            found |= {"/v1/chat/completions": generating.chat, "/v1/completions": generating.completions}
            found |= {"/invocations": generating.completions}
        elif engine.embeds and not labels:
            found |= {"/v1/embeddings": pooling.embeddings}
        if engine.embeds and (not labels or len(engine.model.labels) == 1):
            found |= {"/v1/rerank": pooling.rerank, "/rerank": pooling.rerank, "/v2/rerank": pooling.rerank}
            found |= {"/v1/score": pooling.score, "/score": pooling.score}
        if engine.embeds and labels:
            found |= {"/classify": pooling.classify}
        for path, handler in found.items():
            self._route(path, "POST", handler, counted=True)

    def _allowed(self, exchange: Exchange) -> bool:
        keys = self._engine.vllm.api_keys
        if not keys or exchange.method == "OPTIONS" or not exchange.path.startswith(_GUARDED):
            return True
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and any(hmac.compare_digest(given.strip().encode(), k.encode()) for k in keys)
