"""The request's body: read under limits, checked, and made into the engine's."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.gateway.errors import ApiError, unavailable

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

# What reaches the engine: OpenAI's fields that SGLang 0.5.23 knows, and those of its extensions that act on this one
# request only. Left out on purpose: who the request is (rid, priority, extra_key, cache_salt, custom_labels), which
# weights or ranks serve it (lora_path, routed_dp_rank, data_parallel_rank, bootstrap_*, disagg_prefill_dp_rank,
# ngram_corpus_id), code (custom_logit_processor, custom_params), engine-wide sessions (session_id, session_params),
# and the model's insides (return_hidden_states, return_routed_experts, return_meta_info, input_ids).
_SAMPLING: Final = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "response_format",
        "top_k",
        "min_p",
        "min_tokens",
        "regex",
        "ebnf",
        "repetition_penalty",
        "stop_token_ids",
        "stop_regex",
        "no_stop_trim",
        "ignore_eos",
        "skip_special_tokens",
        "return_cached_tokens_details",
        "return_token_ids",
        "images_config",
    }
)
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "/v1/chat/completions": _SAMPLING
    | frozenset(
        {
            "messages",
            "top_logprobs",
            "max_completion_tokens",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "reasoning",
            "reasoning_effort",
            "task",
            "continue_final_message",
            "separate_reasoning",
            "stream_reasoning",
            "chat_template_kwargs",
            "max_dynamic_patch",
            "min_dynamic_patch",
            "use_audio_in_video",
            "return_prompt_token_ids",
        }
    ),
    "/v1/completions": _SAMPLING | frozenset({"prompt", "best_of", "echo", "suffix", "json_schema"}),
    "/v1/embeddings": frozenset({"input", "encoding_format", "dimensions", "user"}),
}


class Disconnected(Exception):
    """The client left before its body was whole."""


class Parsed(NamedTuple):
    fields: dict[str, Any]
    word: str
    """What the client put in `model`."""
    stream: bool
    wants_usage: bool
    """The client asked for the closing usage chunk."""
    wants_continuous: bool
    """The client asked for usage in every chunk."""


class Budget:
    """Bytes of request bodies that the process holds at one time; without a bound a burst of large ones kills it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """
        Raises:
            ApiError: 503, no room now.
        """
        if self.held + size > self.limit:
            raise unavailable("The gateway holds too many request bodies. Try again.", "overloaded", 2)
        self.held += size

    def give(self, size: int) -> None:
        self.held -= size


async def read_body(receive: Receive, declared: bytes | None, limit: int, budget: Budget) -> bytes:
    """The whole body. Its size is taken from `budget`; the caller gives it back. How long a client may take is the
    server's to bound (`BoundedProtocol.sweep`): a timeout here would cost each request more than its parsing.

    Raises:
        ApiError: 413 over `limit` bytes, 503 over the budget.
        Disconnected: the client left.
    """
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    size = 0
    parts: list[bytes] = []
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part: bytes = message.get("body", b"")
            if size + len(part) > limit:
                raise too_large(limit)
            budget.take(len(part))
            size += len(part)
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)
    except BaseException:
        budget.give(size)
        raise


def parse(raw: bytes, endpoint: str) -> Parsed:
    """Checks what the gateway itself needs; the rest is the engine's to judge.

    Raises:
        ApiError: 400, with the field at fault in `param`.
    """
    try:
        decoded: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(decoded, dict):
        raise ApiError(400, "The body must be a JSON object.", "invalid_json")
    body = cast(dict[str, Any], decoded)
    word = body.get("model")
    if word is None or word == "":
        raise ApiError(400, "You must provide `model`.", "missing_model", param="model")
    if not isinstance(word, str):
        raise _invalid("model", "a string")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _invalid("stream", "true or false")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _invalid("stream_options", "an object")
    streams = bool(stream) and endpoint != "/v1/embeddings"
    asked = cast(dict[str, Any], options or {})
    continuous = asked.get("continuous_usage_stats") is True and asked.get("include_usage") is True
    return Parsed(
        fields=body,
        word=word,
        stream=streams,
        wants_usage=asked.get("include_usage") is True,
        wants_continuous=continuous,
    )


def prompts(fields: Mapping[str, Any]) -> int:
    """How many prompts a body has: /v1/completions takes a list of texts, or of lists of tokens."""
    several: object = fields.get("prompt")
    if not isinstance(several, list):
        return 1
    listed = cast(list[object], several)
    return len(listed) if listed and isinstance(listed[0], str | list) else 1


_SHORT_BY_DEFAULT: Final = 16
"""Tokens of an answer of /v1/completions where the client names no bound: OpenAI's, and the engine's."""


def bound_answer(fields: dict[str, Any], endpoint: str, cap: int | None) -> int | None:
    """Longest answer in tokens that a request asks for; None: it does not say. With a cap of the Model a larger bound
    is lowered to it, in `fields`, and a request without one gets it.

    Raises:
        ApiError: 400, the Model has a cap and the bound is no positive whole number: what an engine would make of it
            may be no bound.
    """
    if cap is not None and endpoint != "/v1/embeddings":
        _lower(fields, endpoint, cap)
    newer, older = fields.get("max_completion_tokens"), fields.get("max_tokens")
    # Which of two an engine goes by is its own affair.
    if type(newer) is not int:
        return older if type(older) is int else None
    return max(newer, older) if type(older) is int else newer


def _lower(fields: dict[str, Any], endpoint: str, cap: int) -> None:
    chat, named = endpoint == "/v1/chat/completions", False
    for name in ("max_completion_tokens", "max_tokens"):
        bound = fields.get(name)
        if bound is None:
            continue
        if type(bound) is not int or bound < (1 if chat else 0):
            raise _invalid(name, "a whole number of at least 1")
        fields[name], named = min(bound, cap), True
    if not named:
        fields["max_tokens"] = cap if chat else min(cap, _SHORT_BY_DEFAULT)


def engine_body(parsed: Parsed, endpoint: str, engine_name: str, rid: str) -> bytes:
    """The body for the engine: allow-listed fields, its own name of the model, our id, usage always on.

    Raises:
        ApiError: 400, it is nested more deeply than JSON can be written again.
    """
    allowed = ALLOWED[endpoint]
    body = {name: value for name, value in parsed.fields.items() if name in allowed}
    body["model"] = engine_name
    if endpoint != "/v1/embeddings":
        body["rid"] = rid
    if parsed.stream:
        # Overwritten, not filled in: a client that sends include_usage=false must be metered all the same.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    else:
        body.pop("stream_options", None)
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        # It was read, so its values are JSON's own: what is left is depth, of which orjson reads more than it writes.
        raise ApiError(400, "The body is nested too deeply.", "invalid_json") from None


def too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413, f"The body is larger than {limit} bytes.", "request_too_large", headers=((b"connection", b"close"),)
    )


def _invalid(field: str, must_be: str) -> ApiError:
    return ApiError(400, f"`{field}` must be {must_be}.", "invalid_type", param=field)
