"""vLLM's answers of chat and completions, whole and in chunks."""

import json
import math
import random
from collections.abc import Sequence as Seqs
from typing import Any, Final

import orjson

from shoal_dev.sim.scheduler import Sequence
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.args import VERSION

FINGERPRINT: Final = f"vllm-{VERSION}-5ea11a4d"
_REST: Final[dict[str, Any]] = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class Writer:
    """Builds the answers of one request."""

    kind = ""
    prefix = ""

    def __init__(
        self, *, rid: str, model: str, created: int, n: int, echo: list[str], labels: list[int], cache: bool,
        usage: bool, each: bool,
    ) -> None:  # fmt: skip
        self._id = self.prefix + rid
        self._model, self._created, self._n, self._echo = model, created, n, echo
        self._labels = labels
        self._cache = cache
        """Whether cached tokens are reported."""
        self._usage_last, self._usage_each = usage, usage and each

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        raise NotImplementedError

    def last(self, sequences: list[Sequence]) -> list[bytes]:
        """The closing chunk, of all choices."""
        if not self._usage_last:
            return []
        usage = self._usage(sequences, {"cached_tokens": self._cached(sequences), **self._created_tokens()})
        usage = {name: value for name, value in usage.items() if value is not None}
        body: dict[str, Any] = {**self._head(), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
        return [orjson.dumps(body)]

    def _head(self, kind: str | None = None) -> dict[str, Any]:
        return {"id": self._id, "object": kind or self.kind, "created": self._created, "model": self._model}

    def _created_tokens(self) -> dict[str, Any]:
        return {}

    def _cached(self, sequences: list[Sequence]) -> int:
        return sum(sequence.cached or 0 for sequence in sequences[:: self._n])

    def _usage(self, sequences: list[Sequence], details: dict[str, Any]) -> dict[str, Any]:
        """Each prompt is counted once, however many choices it has."""
        prompts = sum(len(sequence.prompt) for sequence in sequences[:: self._n])
        answers = sum(len(sequence.output) for sequence in sequences)
        return p.usage(prompts, answers, details if self._cache else None)

    def _answer(self, sequences: list[Sequence], choices: list[dict[str, Any]], created: int | None) -> dict[str, Any]:
        details = {
            "cached_tokens": self._cached(sequences), "created_cache_tokens": created, "multimodal_tokens": None,
        }  # fmt: skip
        return {
            **self._head(),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self._usage(sequences, details),
        }


def _reason(sequence: Sequence) -> dict[str, Any]:
    """A stop by the end of the text has no stop_reason; one by a string or a token names it."""
    if sequence.finish is None:
        return {"finish_reason": None, "stop_reason": None}
    matched = sequence.finish.matched
    if isinstance(matched, int) and matched not in sequence.stop_token_ids:
        matched = None
    return {"finish_reason": sequence.finish.type, "stop_reason": matched}


def _of_labels(sequence: Sequence, labels: list[int]) -> dict[str, Any]:
    """Log probabilities of these tokens in place of the first one of an answer, by its prompt alone."""
    source = random.Random(repr(sequence.prompt).encode())  # noqa: S311 - reproducible on purpose
    weights = [source.random() for _ in range(max(labels) + 1)]
    logs = {label: math.log(weights[label] / (1 + sum(weights))) for label in labels}
    sampled = sequence.output[0]
    shown = {f"token_id:{token}": log for token, log in {sampled: -0.5, **logs}.items()}
    first = f"token_id:{sampled}"
    return {"text_offset": [0], "token_logprobs": [shown[first]], "tokens": [first], "top_logprobs": [shown]}


class CompletionWriter(Writer):
    kind = "text_completion"
    prefix = "cmpl-"

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            echo = self._echo[index // self._n] if self._echo else ""
            rest = {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
            text = echo + sequence.text
            logprobs = _of_labels(sequence, self._labels) if self._labels else None
            choices.append({"index": index, "text": text, "logprobs": logprobs, **_reason(sequence), **rest})
        return {**self._answer(sequences, choices, None), **_REST}

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        choice = {"index": index, "text": text, "logprobs": None, **_reason(sequence)}
        choice |= {"prompt_token_ids": None, "token_ids": None}
        body: dict[str, Any] = {**self._head(), "choices": [choice]}
        if self._usage_each:
            body["usage"] = _plain(sequence)
        if sequence.finish is not None and not self._usage_last:
            body["system_fingerprint"] = FINGERPRINT
        return [orjson.dumps(body)]


class ChatWriter(Writer):
    kind = "chat.completion"
    prefix = "chatcmpl-"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._begun: set[int] = set()

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            message = {
                "role": "assistant", "content": sequence.text, "refusal": None, "annotations": None, "audio": None,
                "function_call": None, "reasoning": None,
            }  # fmt: skip
            rest = {"token_ids": None, "routed_experts": None}
            choices.append({"index": index, "message": message, "logprobs": None, **_reason(sequence), **rest})
        nothing = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return {**self._answer(sequences, choices, 0), **nothing, **_REST}

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        found: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            body = {**self._head("chat.completion.chunk"), "choices": [first]}
            if self._usage_each:
                tokens = len(sequence.prompt)
                body["usage"] = _counts(tokens, 0) | {"completion_tokens_details": None}
            found.append(orjson.dumps({**body, "prompt_token_ids": None, "prompt_text": None}))
        choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        if sequence.finish is not None:
            choice |= _reason(sequence)
        body = {**self._head("chat.completion.chunk"), "choices": [{**choice, "token_ids": None}]}
        if self._usage_each:
            body["usage"] = _plain(sequence) | {"completion_tokens_details": None}
        if sequence.finish is not None and not self._usage_last:
            body["system_fingerprint"] = FINGERPRINT
        return [*found, orjson.dumps(body)]

    def last(self, sequences: list[Sequence]) -> list[bytes]:
        return [
            chunk.replace(b'"object":"chat.completion"', b'"object":"chat.completion.chunk"')
            for chunk in super().last(sequences)
        ]

    def _created_tokens(self) -> dict[str, Any]:
        return {"created_cache_tokens": 0}


def _counts(prompt: int, answer: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}


def _plain(sequence: Sequence) -> dict[str, Any]:
    """Usage in a chunk: of its own choice, without cached tokens."""
    return _counts(len(sequence.prompt), len(sequence.output))


def error_event(message: str, status: int) -> bytes:
    """The data of an error in a stream; vLLM writes these with blanks."""
    return json.dumps(p.error_body(message, status)).encode()


def prompts_of(sequences: Seqs[Sequence]) -> int:
    """Prompt tokens of all."""
    return sum(len(sequence.prompt) for sequence in sequences)
