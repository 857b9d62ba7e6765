"""A replica that speaks as vLLM 0.32.0 does: paths, ids, names of models, chunks, usage, errors."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripted_engine import Behaviour, EngineRequest, ScriptedEngine

BASE = "chat/llama"
PREFIXES = {
    "/v1/chat/completions": "chatcmpl",
    "/v1/completions": "cmpl",
    "/v1/embeddings": "embd",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/classify": "classify",
}
USAGE = {
    "prompt_tokens": 40,
    "total_tokens": 43,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32},
}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def error(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    return compact({"error": {"message": message, "type": kind, "param": param, "code": status}})


def unknown_model(name: str) -> bytes:
    return error(404, f"The model `{name}` does not exist. Valid aliases: {BASE}.", "NotFoundError", "model")


NOT_FOUND = b'{"detail":"Not Found"}'
SHUT_DOWN = error(500, "cannot schedule new futures after shutdown", "InternalServerError")
DIED = error(
    500,
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "InternalServerError",
)
BUSY = error(503, "The engine is currently busy. Please try again later.", "Service Unavailable")


def error_event(body: bytes) -> bytes:
    """Errors in a stream are written with blanks."""
    return b"data: " + json.dumps(json.loads(body)).encode() + b"\n\n"


def answer_id(request: EngineRequest) -> str:
    return f"{PREFIXES.get(request.path, 'x')}-{request.headers['x-request-id']}"


@dataclass
class VLLMWords:
    """What such an engine knows; `behave` is for `ScriptedEngine`."""

    adapters: Callable[[], Collection[str]] = frozenset
    """Names of loaded adapters."""
    named: str | None = None
    """The name in its answers, where it is not that of the request."""
    chunks: list[list[dict[str, Any]]] = field(
        default_factory=lambda: [
            [{"role": "assistant", "content": ""}],
            [{"reasoning": "hm"}],
            [{"content": "a b"}, {"content": " c"}],
        ]
    )
    """Deltas of a stream, by event of the network."""

    def model_of(self, request: EngineRequest) -> str:
        return self.named or request.model

    async def behave(self, request: EngineRequest) -> None:
        if request.model not in {BASE, *self.adapters()}:
            await request.answer(404, unknown_model(request.model))
        elif request.body.get("stream"):
            await self.stream(request)
        else:
            answer = self.whole(request)
            await request.answer(*((404, NOT_FOUND) if answer is None else (200, compact(answer))))

    def whole(self, request: EngineRequest) -> dict[str, Any] | None:
        head = {"id": answer_id(request), "created": 1, "model": self.model_of(request)}
        pooled = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None}
        match request.path:
            case "/v1/chat/completions":
                message = {
                    "role": "assistant",
                    "content": f'a b c "model":"{BASE}" "usage":{{',
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": "hm",
                }
                choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
                choice |= {"stop_reason": None, "token_ids": None}
                rest = {"usage": USAGE, "prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
                return {**head, "object": "chat.completion", "choices": [choice], "service_tier": None, **rest}
            case "/v1/completions":
                choice = {"index": 0, "text": "a b c", "logprobs": None, "finish_reason": "length"}
                return {**head, "object": "text_completion", "choices": [choice], "usage": USAGE}
            case "/v1/embeddings":
                data = [{"index": 0, "object": "embedding", "embedding": [0.1, 0.2]}]
                return {**head, "object": "list", "data": data, "usage": pooled}
            case "/v1/rerank":
                results = [
                    {"index": 1, "document": {"text": "two", "multi_modal": None}, "relevance_score": 0.9},
                    {"index": 0, "document": {"text": "one", "multi_modal": None}, "relevance_score": 0.1},
                ]
                return {**head, "usage": {"prompt_tokens": 9, "total_tokens": 9}, "results": results}
            case "/v1/score":
                data = [{"index": n, "object": "score", "score": n / 4} for n, _ in enumerate(request.body["items"])]
                return {**head, "object": "list", "data": data, "usage": pooled}
            case "/classify":
                data = [{"index": 0, "label": "cat", "probs": [0.75, 0.25], "num_classes": 2}]
                return {**head, "object": "list", "data": data, "usage": pooled}
            case "/tokenize":
                return {"count": 2, "max_model_len": 4096, "tokens": [1, 2], "token_strs": None}
            case "/detokenize":
                return {"prompt": "a b"}
            case _:
                return None

    async def stream(self, request: EngineRequest) -> None:
        await request.begin_stream()
        for number, deltas in enumerate(self.chunks):
            await request.chunk(b"".join(self.chunk(request, delta, number) for delta in deltas))
        await request.chunk(self.closing(request))
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    def chunk(self, request: EngineRequest, delta: dict[str, Any], tokens: int) -> bytes:
        usage = {"prompt_tokens": 40, "total_tokens": 40 + tokens, "completion_tokens": tokens}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(request, [choice], usage)

    def closing(self, request: EngineRequest) -> bytes:
        return self._event(request, [], USAGE)

    def _event(self, request: EngineRequest, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        head = {"id": answer_id(request), "object": "chat.completion.chunk", "created": 1}
        return (
            b"data: " + compact({**head, "model": self.model_of(request), "choices": choices, "usage": usage}) + b"\n\n"
        )


def vllm_engine(behave: Behaviour | None = None) -> ScriptedEngine:
    return ScriptedEngine(behave or VLLMWords().behave, ready_path="/health")


def says(status: int, body: bytes) -> Behaviour:
    async def behave(request: EngineRequest) -> None:
        await request.answer(status, body)

    return behave
