"""Requests as vLLM takes them, and its errors: fields, words and order included.

Fields that vLLM does not know are ignored: it warns in its log, and answers.
"""

import json
from typing import Any, Final, Literal, cast

from pydantic import BaseModel, ValidationError

Adapter = str
NO_MESSAGES: Final = "Cannot apply chat template to an empty conversation. Provide at least one message."
_SHOWN: Final = 10
"""Errors of one body that are told."""


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Generation(BaseModel):
    """What chat and completions share. Fields that change nothing here are checked and then ignored."""

    model: str | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int = 0
    user: str | None = None
    max_tokens: int | None = None

    @property
    def schema_asked(self) -> Any:
        """The JSON schema of the answer; None: there is none."""
        wanted: Any = (self.response_format or {}).get("json_schema")
        found: Any = cast(dict[str, Any], wanted).get("schema") if isinstance(wanted, dict) else None
        given: Any = (self.structured_outputs or {}).get("json", found)
        try:
            return json.loads(given) if isinstance(given, str) else given
        except ValueError:
            return None


class CompletionRequest(Generation):
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    max_tokens: int | None = 16


class ChatMessage(BaseModel):
    role: str
    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Its parts, one a line."""
        if not isinstance(self.content, list):
            return self.content or ""
        return "\n".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")

    @property
    def media(self) -> bool:
        return isinstance(self.content, list) and any(part.get("type") != "text" for part in self.content)


class ChatRequest(Generation):
    messages: list[ChatMessage]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizePrompt(BaseModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class TokenizeMessages(BaseModel):
    model: str | None = None
    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: list[int]


class LoadAdapter(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(BaseModel):
    lora_name: str


class RegisterAdapter(BaseModel):
    name: str
    src: str


class EmbeddingRequest(BaseModel):
    model: str | None = None
    input: list[int] | list[list[int]] | str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    request_id: str | None = None


class RerankRequest(BaseModel):
    model: str | None = None
    query: str
    documents: list[str]
    top_n: int = 0


class ScoreRequest(BaseModel):
    model: str | None = None
    queries: str | list[str] | None = None
    text_1: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    text_2: str | list[str] | None = None


class ClassifyRequest(BaseModel):
    model: str | None = None
    input: list[int] | list[list[int]] | str | list[str]


class RefusedError(Exception):
    """The request is answered with an error of this status."""

    def __init__(self, status: int, message: str, *, kind: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, status, kind=kind, param=param)


def error_body(message: str, status: int, *, kind: str | None = None, param: str | None = None) -> dict[str, Any]:
    """vLLM's nested error."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "Service Unavailable"}
    found = kind or kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": found, "param": param, "code": status}}


def wrong(message: str, param: str, value: object) -> RefusedError:
    """A parameter outside its range; the message repeats it."""
    return RefusedError(400, f"{message} (parameter={param}, value={value})", param=param)


def invalid(error: ValidationError) -> RefusedError:
    """vLLM's words for a body that does not fit its schema."""
    found = error.errors(include_url=False)
    lines: list[str] = []
    for item in found[:_SHOWN]:
        place = ".".join(("body", *(str(part) for part in item["loc"])))
        shown = {"type": item["type"], "loc": place, "msg": item["msg"], "input": _input(item["input"])}
        lines.append(f"  {shown}")
    if len(found) > _SHOWN:
        lines.append(f"  ...and {len(found) - _SHOWN} more errors")
    plural = "s" if len(found) > 1 else ""
    param = ".".join(("body", *(str(part) for part in found[0]["loc"])))
    return RefusedError(
        400, f"{len(found)} validation error{plural}:\n" + "\n".join(lines), kind="Bad Request", param=param
    )


def _input(value: object) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return str(value)


def usage(prompt: int, completion: int, details: dict[str, Any] | None) -> dict[str, Any]:
    """The usage block; `details` None where they are not reported."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }
