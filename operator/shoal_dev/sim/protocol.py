"""Requests as SGLang takes them, and answers as it gives them: fields, order and quirks included.

Requests are validated with pydantic, since SGLang's messages are pydantic's. Answers are built as dicts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

DEFAULT_MODEL: Final = "default"
_ROLES: Final = ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root", "user")


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Generation(BaseModel):
    """What chat and completions share. Fields that change nothing here are checked and then ignored."""

    model: str = DEFAULT_MODEL
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    min_tokens: int = 0
    top_k: int | None = None
    min_p: float | None = None
    regex: str | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    lora_path: str | list[str | None] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_spec_tokens_details: bool = False
    rid: list[str] | str | None = None
    priority: int | None = None
    user: str | None = None


class CompletionRequest(_Generation):
    prompt: list[int] | list[list[int]] | str | list[str]
    json_schema: str | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0

    @field_validator("max_tokens")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("max_tokens must be positive")
        return value


class Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: str = "function"
    function: Function


class ChatMessage(BaseModel):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("role")
    @classmethod
    def _known(cls, value: str) -> str:
        if value.lower() not in _ROLES:
            known = ", ".join(f"'{role}'" for role in _ROLES[:-1])
            raise ValueError(f"'role' must be one of {known} (case-insensitive).")
        return value.lower()

    def text(self) -> str:
        """The text parts, joined by blanks as SGLang joins them for templates that want plain text."""
        if not isinstance(self.content, list):
            return self.content or ""
        return " ".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")


class ChatRequest(_Generation):
    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "required", "none"] | dict[str, Any] = "auto"
    continue_final_message: bool = False


def without_begun(messages: list[dict[str, Any]], *, continues: bool) -> tuple[list[dict[str, Any]], str]:
    """The messages of a chat, and the text with which the answer begins. SGLang ends no chat with what the assistant
    said: the last message is that text, or else the user's."""
    if not messages or messages[-1]["role"] != "assistant":
        return messages, ""
    *before, last = messages
    return (before, last["content"]) if continues else ([*before, {**last, "role": "user"}], "")


class EmbeddingRequest(BaseModel):
    input: list[int] | list[list[int]] | str | list[str]
    model: str = DEFAULT_MODEL
    lora_path: str | list[str | None] | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    rid: list[str] | str | None = None


class RerankRequest(BaseModel):
    """It has no model: SGLang ignores the field."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = True

    @field_validator("top_n")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("Value error, parameter top_n should be larger than 0.")
        return value


class ScoreRequest(BaseModel):
    query: str | list[int] | None = None
    items: str | list[str] | list[list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool = False
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    return_token_logprobs: bool = False
    item_first: bool = False
    model: str = DEFAULT_MODEL


class ClassifyRequest(BaseModel):
    input: str | list[str] | list[int]
    model: str = DEFAULT_MODEL
    rid: list[str] | str | None = None


class TokenizeRequest(BaseModel):
    model: str = DEFAULT_MODEL
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Exactly one of 'prompt' or 'messages' must be provided.")
        return self


class DetokenizeRequest(BaseModel):
    model: str = DEFAULT_MODEL
    tokens: list[int] | list[list[int]]
    skip_special_tokens: bool = True


class SamplingParams(BaseModel):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1


class GenerateRequest(BaseModel):
    """SGLang's native /generate, for one prompt."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    stream: bool = False
    lora_path: str | None = None
    rid: str | None = None


def validation_message(error: ValidationError) -> str:
    """SGLang's text for a body that does not fit its schema."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        shown = {
            "type": item["type"],
            "loc": ("body", *item["loc"]),
            "msg": item["msg"],
            "input": item["input"],
        }
        lines.append(f"  {shown}")
    plural = "s" if len(lines) > 1 else ""
    return f"{len(lines)} validation error{plural}:\n" + "\n".join(lines)


def error_body(message: str, *, kind: str = "BadRequestError", code: int = 400) -> dict[str, Any]:
    """SGLang's flat error of the OpenAI routes."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    """The usage block; `cached` None where it is not reported."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def spec_details(tokens: int, draft_tokens: int) -> dict[str, Any] | None:
    """What became of the drafts of one answer: the simulator accepts none. None: no draft was checked, for the first
    token comes without."""
    checks = tokens - 1
    proposed = checks * (draft_tokens - 1)
    if proposed <= 0:
        return None
    return {
        "spec_accept_rate": 0.0,
        "spec_accept_length": tokens / checks,
        "spec_cap_length": 0.0,
        "spec_block_accept_length": 0.0,
        "spec_num_correct_drafts": 0,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": checks,
        "spec_correct_drafts_histogram": [checks],
        "spec_cap_lens_histogram": [],
    }


def weight_versions(tokens: int) -> dict[str, Any]:
    """`metadata` of answers that are not streamed."""
    return {"weight_version": "default", "weight_versions": [{"version": "default", "start": 0, "end": tokens}]}


def stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return tuple(s for s in found if s)


def may_stop(text: str, stop: Sequence[str]) -> bool:
    """Whether the end of a text may be the beginning of a stop string: SGLang sends nothing of it until that is
    decided."""
    return any(text.endswith(word[:size]) for word in stop for size in range(1, len(word) + 1))


def sampling_complaint(max_new: int | None, temperature: float | None, top_p: float | None) -> str | None:
    """SGLang's message for parameters outside their range."""
    if temperature is not None and not (temperature >= 0 and temperature != float("inf")):
        return f"temperature must be a non-negative finite number, got {temperature}."
    if top_p is not None and not 0 < top_p <= 1:
        return f"top_p must be in (0, 1], got {top_p}."
    if max_new is not None and max_new < 0:
        return f"max_new_tokens must be at least 0, got {max_new}."
    return None


NO_EMBEDDING_MODEL: Final = (
    "This model does not appear to be an embedding model by default. Please add `--is-embedding` when launching the "
    "server or try another model."
)


def dimensions_complaint(dimensions: int, path: str, hidden: int, config: Mapping[str, Any]) -> str | None:
    """SGLang's message for an embedding's length that the model's config does not allow."""
    allowed: list[int] = config.get("matryoshka_dimensions") or []
    if not allowed and not config.get("is_matryoshka"):
        return (
            f"Model '{path}' does not support matryoshka representation, changing output dimensions will lead to poor "
            "results."
        )
    if dimensions < 1:
        return "Requested dimensions must be greater than 0"
    if allowed and dimensions not in allowed:
        return (
            f"Model '{path}' only supports {allowed} matryoshka dimensions, using other output dimensions will lead to "
            "poor results."
        )
    if dimensions > hidden:
        return f"Provided dimensions are greater than max embedding dimension: {hidden}"
    return None


def rerank_complaint(request: RerankRequest) -> str | None:
    """SGLang's message for texts that it does not rank."""
    if not request.query:
        return "Query cannot be empty"
    if request.query.isspace():
        return "Query cannot be empty or whitespace only"
    if not request.documents:
        return "Documents cannot be empty"
    for document in request.documents:
        if not document:
            return "Each document must be a non-empty string"
        if document.isspace():
            return "Each document cannot be empty or whitespace only"
    return None


def score_complaint(request: ScoreRequest, *, generates: bool, vocabulary: int | None) -> str | None:
    """SGLang's message for items that it does not score."""
    labels = request.label_token_ids
    if request.temperature != 1.0 and not request.apply_softmax:
        return "temperature requires apply_softmax=True"
    if request.return_token_logprobs and not generates:
        return "return_token_logprobs is only supported for CausalLM models"
    if generates and labels is None:
        return "label_token_ids is required for generation (CausalLM) models."
    if request.items is None:
        return "items must be provided"
    if generates and request.items:
        if not labels:
            return "label_token_ids must be a nonempty list"
        if min(labels) < 0:
            return "label_token_ids must contain nonnegative integers"
        if len(set(labels)) != len(labels):
            return "label_token_ids must not contain duplicate tokens"
        if vocabulary is not None and max(labels) >= vocabulary:
            return f"Token ID {max(labels)} is out of vocabulary (vocab size: {vocabulary})"
    return None


_ADAPTER = re.compile(r"[^:]*:\s*(?P<adapter>.*\S)\s*$")


Adapters = str | list[str | None] | None
"""The adapter of a request, or of each of its prompts; None and an empty name stand for the base model."""


def adapter_of(model: str, served: str, lora_path: Adapters) -> Adapters:
    """The adapter that a request names: what stands behind the first colon of `model`, else `lora_path`."""
    if model != served:
        text = model[len(served) :] if model.startswith(served + ":") else model
        match = _ADAPTER.match(text)
        if match is not None:
            return match["adapter"]
    return lora_path


def first_adapter(adapters: Adapters) -> str | None:
    """One that is named; None where none is."""
    if isinstance(adapters, list):
        return next((name for name in adapters if name), None)
    return adapters or None
