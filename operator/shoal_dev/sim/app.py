"""The ASGI application: routes, keys, and the errors that belong to no route."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import structlog

from shoal_dev.sim.adapters import AdapterRoutes
from shoal_dev.sim.admin import Admin
from shoal_dev.sim.engine import SimEngine
from shoal_dev.sim.http import ClientGoneError, Exchange, Receive, Scope, Send
from shoal_dev.sim.openai import RefusedError, UnhandledError
from shoal_dev.sim.scoring import Scoring
from shoal_dev.sim.speech import Speech
from shoal_dev.sim.tokenizing import Tokenizing

Level = Literal["api", "admin"]
Handler = Callable[[Exchange], Awaitable[None]]

_log = structlog.get_logger()
_OPEN: Final = ("/health", "/ready", "/metrics")
_MODEL: Final = "/v1/models/{model:path}"


class App:
    """One engine's HTTP surface."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        openai, admin, adapters = Scoring(engine), Admin(engine), AdapterRoutes(engine)
        tokenizing = Tokenizing(engine)
        self._routes: dict[str, dict[str, tuple[Handler, Level]]] = {}

        def route(path: str, methods: str, handler: Handler, level: Level = "api") -> None:
            for method in methods.split():
                self._routes.setdefault(path, {})[method] = (handler, level)

        route("/health", "GET", admin.health)
        route("/health_generate", "GET", admin.health)
        route("/ready", "GET", admin.ready)
        route("/ping", "GET", admin.ping)
        route("/metrics", "GET", admin.metrics)
        route("/", "GET", admin.root)
        route("/v1/models", "GET", admin.models)
        route(_MODEL, "GET", admin.model)
        route("/v1/loads", "GET", admin.loads)
        route("/model_info", "GET", admin.model_info)
        route("/get_model_info", "GET", admin.model_info)
        route("/server_info", "GET", admin.server_info)
        route("/get_server_info", "GET", admin.server_info)
        route("/v1/chat/completions", "POST", openai.chat)
        route("/v1/completions", "POST", openai.completions)
        route("/v1/embeddings", "POST", openai.embeddings)
        route("/v1/rerank", "POST", openai.rerank)
        route("/v1/score", "POST", openai.score)
        route("/v1/classify", "POST", openai.classify)
        route("/v1/tokenize", "POST", tokenizing.tokenize)
        route("/v1/detokenize", "POST", tokenizing.detokenize)
        route("/v1/audio/transcriptions", "POST", Speech(engine).transcribe)
        route("/generate", "POST PUT", openai.generate)
        route("/flush_cache", "GET POST", admin.flush_cache, "admin")
        route("/abort_request", "POST", admin.abort_request, "admin")
        route("/pause_generation", "POST", admin.pause, "admin")
        route("/continue_generation", "POST", admin.resume, "admin")
        route("/load_lora_adapter", "POST", adapters.load, "admin")
        route("/unload_lora_adapter", "POST", adapters.unload, "admin")
        route("/sim/faults", "POST", admin.arm_fault, "admin")
        route("/sim/faults", "GET", admin.faults, "admin")
        route("/sim/faults", "DELETE", admin.clear_faults, "admin")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        exchange = Exchange(scope, receive, send)
        path = _MODEL if exchange.path.startswith("/v1/models/") else exchange.path
        methods = self._routes.get(path, {})
        handler, level = methods.get(exchange.method, (None, "api"))
        if not self._allowed(exchange, level):
            await exchange.json({"error": "Unauthorized"}, 401)
            return
        self._engine.metrics.arrived(path, exchange.method)
        try:
            if handler is None:
                status, detail = (405, "Method Not Allowed") if methods else (404, "Not Found")
                await exchange.json({"detail": detail}, status)
            else:
                await handler(exchange)
        except RefusedError as error:
            await exchange.json(error.body, error.status)
        except UnhandledError:
            await exchange.answer(b"Internal Server Error", "text/plain; charset=utf-8", 500)
        except ClientGoneError:
            _log.debug("client gone", path=path)
        finally:
            self._engine.metrics.answered(path, exchange.method, exchange.status)

    def _allowed(self, exchange: Exchange, level: Level) -> bool:
        args = self._engine.args
        if exchange.method == "OPTIONS" or exchange.path.startswith(_OPEN):
            return True
        # With an admin key set, only that one opens the administration; else the API key does, if there is one.
        key = (args.admin_api_key or args.api_key) if level == "admin" else args.api_key
        if key is None:
            return True
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())
