"""/v1/chat/completions, /v1/completions, /v1/embeddings and SGLang's /generate."""

import asyncio
import base64
import hashlib
import json
import random
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import orjson
from pydantic import BaseModel, ValidationError

from shoal_dev.sim import protocol as p
from shoal_dev.sim.deaths import consequence
from shoal_dev.sim.engine import QUEUE_FULL, RequestBatch, Sampling, SimEngine
from shoal_dev.sim.http import Exchange, until_gone
from shoal_dev.sim.limits import BadRequestError
from shoal_dev.sim.scheduler import QueueFullError, Sequence

_M = TypeVar("_M", bound=BaseModel)
_NOTICE_SECONDS = 2.0
"""Interval at which SGLang polls for a client that has disconnected; in a stream SGLang notices it at once."""


class RefusedError(Exception):
    """The request is answered with an error of this status and body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class UnhandledError(Exception):
    """SGLang itself fails on the request, and answers 500 as plain text."""


@dataclass(slots=True)
class Job:
    """A validated request."""

    prompts: list[tuple[int, ...]]
    n: int
    sampling: Sampling
    rid: str | list[str] | None
    model: str
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    adapters: p.Adapters = None
    salt: tuple[str, str] = ("", "")
    """`extra_key` and `cache_salt` of the request."""
    echo: list[str] = field(default_factory=list[str])
    draft_tokens: int = 0
    """Tokens of a draft, if the request wants to know what became of its drafts and the engine has any."""
    created: int = field(default_factory=lambda: int(time.time()))


class OpenAI:
    """The generation routes of one engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.ChatRequest, exchange, body)
        self._needs_generation()
        if not request.messages:
            raise RefusedError(400, p.error_body("Messages cannot be empty."))
        if not request.tools and (request.tool_choice == "required" or isinstance(request.tool_choice, dict)):
            what = "required" if request.tool_choice == "required" else "a specific tool"
            raise RefusedError(400, p.error_body(f"Tools cannot be empty if tool choice is set to {what}."))
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
        messages, begun = p.without_begun(
            [{"role": m.role, "content": m.text()} for m in request.messages], continues=request.continue_final_message
        )
        try:
            prompt = self._engine.model.chat_prompt(messages, tools or None)
        except ValueError as error:
            raise RefusedError(400, p.error_body(str(error), kind="BadRequest")) from None
        tokens = tuple(self._encode(prompt) + self._encode(begun))
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        job = self._job(request, [tokens], limit, request.temperature, request.top_p)
        await self._run(exchange, job, _ChatWriter)

    async def completions(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.CompletionRequest, exchange, body)
        self._needs_generation()
        prompts = self._prompts(request.prompt, "Prompt cannot be empty")
        job = self._job(request, prompts, request.max_tokens, request.temperature, request.top_p)
        listed = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        if listed and job.n == 1 and isinstance(job.rid, str):
            job.rid = [f"{job.rid}_{place}" for place in range(len(prompts))]
        if request.echo:
            job.echo = [self._engine.model.tokenizer.decode(prompt) for prompt in prompts]
        await self._run(exchange, job, _CompletionWriter)

    async def generate(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.GenerateRequest, exchange, body)
        if request.text is None and request.input_ids is None:
            message = "Either text, input_ids or input_embeds should be provided."
            raise RefusedError(400, {"error": {"message": message}})
        self._needs_generation()
        params = request.sampling_params
        prompt = request.input_ids if request.text is None else self._encode(request.text)
        sampling = Sampling(
            params.max_new_tokens,
            p.stops(params.stop),
            frozenset(params.stop_token_ids or ()),
            params.ignore_eos,
            greedy=params.temperature == 0,
        )
        adapters = self._adapters(p.DEFAULT_MODEL, request.lora_path)
        job = Job([tuple(prompt or ())], params.n, sampling, request.rid, p.DEFAULT_MODEL, request.stream)
        job.adapters = adapters
        await self._run(exchange, job, _NativeWriter)

    async def embeddings(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = parse(p.EmbeddingRequest, exchange, body)
        if not self._engine.embeds:
            raise RefusedError(400, p.error_body(p.NO_EMBEDDING_MODEL))
        prompts = self._prompts(request.input, "Input cannot be empty")
        if request.dimensions is not None:
            path, hidden = self._engine.args.model_path, self._engine.model.hidden_size
            complaint = p.dimensions_complaint(request.dimensions, path, hidden, self._engine.config)
            if complaint is not None:
                raise RefusedError(400, p.error_body(complaint))
        job = Job(prompts, 1, Sampling(0), request.rid, request.model, stream=False)
        job.adapters = self._adapters(request.model, request.lora_path)

        async def work() -> None:
            async with self._batch(exchange, job) as batch:
                with self._engine.traced(exchange.headers, batch):
                    await self._wait(exchange, batch, job)
                await exchange.json(self._embeddings(batch, request))

        await self._guarded(exchange, job, work)

    # --- inside -------------------------------------------------------------------------------------------------

    def _needs_generation(self) -> None:
        if self._engine.embeds:
            # A generation request kills the scheduler of a SGLang that does not generate.
            self._engine.crash()

    def _encode(self, text: str) -> list[int]:
        return self._engine.model.tokenizer.encode(text)

    def _prompts(self, prompt: list[int] | list[list[int]] | str | list[str], empty: str) -> list[tuple[int, ...]]:
        items = [prompt] if isinstance(prompt, str) else prompt
        if items and isinstance(items[0], int):
            items = [cast(list[int], items)]
        prompts = [tuple(self._encode(item) if isinstance(item, str) else cast(list[int], item)) for item in items]
        if not prompts or not all(prompts):
            raise RefusedError(400, p.error_body(empty))
        return prompts

    def _job(
        self,
        request: p.ChatRequest | p.CompletionRequest,
        prompts: list[tuple[int, ...]],
        limit: int | None,
        temperature: float | None,
        top_p: float | None,
    ) -> Job:
        adapters = self._adapters(request.model, request.lora_path)
        complaint = p.sampling_complaint(limit, temperature, top_p)
        if complaint is not None:
            raise RefusedError(400, p.error_body(complaint))
        if request.n < 1:
            raise RefusedError(400, p.error_body("range() arg 3 must not be zero", kind="BadRequest"))
        match consequence(request, self._engine.model.config.get("vocab_size")):
            case "dies":
                self._engine.crash()
            case "stalls":
                self._engine.loop.stall()
            case None:
                pass
        options = request.stream_options or p.StreamOptions()
        return Job(
            prompts=prompts,
            n=request.n,
            sampling=Sampling(
                limit,
                p.stops(request.stop),
                frozenset(request.stop_token_ids or ()),
                request.ignore_eos,
                request.seed,
                greedy=temperature == 0,
            ),
            rid=request.rid,
            model=request.model,
            adapters=adapters,
            salt=(request.extra_key or "", request.cache_salt or ""),
            stream=request.stream,
            include_usage=bool(options.include_usage) or self._engine.args.include_usage_by_default,
            continuous_usage=bool(options.continuous_usage_stats),
            draft_tokens=self._engine.args.draft_tokens if request.return_spec_tokens_details else 0,
        )

    def _adapters(self, model: str, lora_path: p.Adapters) -> p.Adapters:
        adapters = p.adapter_of(model, self._engine.args.served_model_name, lora_path)
        first = p.first_adapter(adapters)
        if first is not None and self._engine.lora is None:
            raise RefusedError(
                400,
                p.error_body(
                    f"LoRA adapter '{first}' was requested, but LoRA is not enabled. Please launch the server with "
                    "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
                ),
            )
        return adapters

    def _batch(self, exchange: Exchange, job: Job) -> Any:
        return self._engine.generate(
            job.prompts,
            n=job.n,
            sampling=job.sampling,
            rid=job.rid,
            path=exchange.path,
            model=job.model,
            stream=job.stream,
            adapters=job.adapters,
            salt=job.salt,
        )

    async def _run(self, exchange: Exchange, job: Job, writer: "type[_Writer]") -> None:
        async def work() -> None:
            write = writer(job, report_cache=self._engine.args.enable_cache_report)
            async with self._batch(exchange, job) as batch:
                with self._engine.traced(exchange.headers, batch):
                    if job.stream:
                        await self._stream(exchange, batch, job, write)
                    else:
                        await self._wait(exchange, batch, job)
                        await exchange.json(write.whole(batch.sequences))

        await self._guarded(exchange, job, work)

    async def _guarded(self, exchange: Exchange, job: Job, work: Callable[[], Any]) -> None:
        try:
            await until_gone(exchange, work(), notice_after=0.0 if job.stream else _NOTICE_SECONDS)
        except BadRequestError as error:
            raise RefusedError(400, p.error_body(str(error))) from None
        except QueueFullError:
            await self._fail(exchange, job, 503, QUEUE_FULL)
        except _FaultError as error:
            if exchange.status is None and not error.stream:
                body = p.error_body(error.message, kind=str(error.status), code=error.status)
                raise RefusedError(error.status, body) from None
            await self._fail(exchange, job, error.status, error.message)

    async def _wait(self, exchange: Exchange, batch: RequestBatch, job: Job) -> None:
        while not batch.finished:
            if batch.struck:
                await self._strike(exchange, batch, job)
            await batch.change()
        if batch.fault is not None and batch.fault.kind == "slow":
            await asyncio.sleep(batch.fault.delay_seconds)

    async def _stream(self, exchange: Exchange, batch: RequestBatch, job: Job, write: "_Writer") -> None:
        sent: dict[int, tuple[int, int]] = {}
        done: set[int] = set()
        while len(done) < len(batch.sequences):
            for index, sequence in enumerate(batch.sequences):
                tokens, offset = len(sequence.output), sent.get(index, (0, 0))[1]
                if index in done or (sent.get(index, (0, 0))[0] == tokens and sequence.finish is None):
                    continue
                if sequence.finish is None and p.may_stop(sequence.text, sequence.stop):
                    continue
                if exchange.status is None:
                    await exchange.begin_stream()
                if batch.fault is not None and batch.fault.kind == "slow":
                    await asyncio.sleep(batch.fault.delay_seconds)
                    tokens = len(sequence.output)
                text = sequence.text
                # A stop string inside one token may have cut what was already sent.
                for chunk in write.chunks(index, sequence, text[min(offset, len(text)) :]):
                    await exchange.event(chunk)
                sent[index] = (tokens, len(text))
                if sequence.finish is not None and tokens == len(sequence.output):
                    done.add(index)
            if batch.struck:
                await self._strike(exchange, batch, job)
            if len(done) < len(batch.sequences):
                await batch.change()
        for chunk in write.last(batch.sequences):
            await exchange.event(chunk)
        await exchange.event(b"[DONE]")
        await exchange.end_stream()

    async def _strike(self, exchange: Exchange, batch: RequestBatch, job: Job) -> None:
        """Carries out the fault when its token is reached. Returns only if the fault does not affect the request."""
        fault = batch.fault
        if fault is None:
            return
        self._engine.strike(batch)
        if fault.kind in ("503", "sse_error"):
            raise _FaultError(fault.status, fault.message, stream=job.stream and fault.kind == "sse_error")
        if fault.kind == "close":
            exchange.break_connection()
        # Held sequences make no further progress: the request waits for its client to leave.
        await asyncio.Event().wait()

    async def _fail(self, exchange: Exchange, job: Job, status: int, message: str) -> None:
        """Reports a refusal by the scheduler as SGLang does: by a status, or, in a stream, by an event after 200."""
        if not job.stream:
            raise RefusedError(status, p.error_body(message, kind=str(status), code=status))
        if exchange.status is None:
            await exchange.begin_stream()
        kind = {503: "SERVICE_UNAVAILABLE", 500: "INTERNAL_SERVER_ERROR"}.get(status, "BAD_REQUEST")
        await exchange.event(json.dumps({"error": p.error_body(message, kind=kind, code=status)}).encode())
        if job.include_usage:
            writer = _ChatWriter if exchange.path.endswith("/chat/completions") else _CompletionWriter
            for chunk in writer(job, report_cache=self._engine.args.enable_cache_report).last([]):
                await exchange.event(chunk)
        await exchange.event(b"[DONE]")
        await exchange.end_stream()

    def _embeddings(self, batch: RequestBatch, request: p.EmbeddingRequest) -> dict[str, Any]:
        data: list[dict[str, Any]] = []
        for index, sequence in enumerate(batch.sequences):
            size = request.dimensions or self._engine.model.hidden_size
            vector = _vector(sequence.prompt, self._engine.args.seed, size)
            embedding: Any = vector
            if request.encoding_format == "base64":
                embedding = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            data.append({"embedding": embedding, "index": index, "object": "embedding"})
        return {
            "data": data,
            # SGLang returns its --model-path here, not the model that was requested.
            "model": self._engine.args.model_path,
            "object": "list",
            "usage": p.usage(sum(len(s.prompt) for s in batch.sequences), 0, None),
        }


class _FaultError(Exception):
    """A fault that is answered with an error."""

    def __init__(self, status: int, message: str, *, stream: bool) -> None:
        super().__init__(message)
        self.status, self.message, self.stream = status, message, stream


class _Writer:
    """Builds the responses of one route."""

    kind = ""

    def __init__(self, job: Job, *, report_cache: bool) -> None:
        self._job = job
        self._report_cache = report_cache
        self._latest: str | None = None

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        raise NotImplementedError

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        raise NotImplementedError

    def last(self, sequences: list[Sequence]) -> list[bytes]:
        raise NotImplementedError

    def _usage(self, sequences: list[Sequence]) -> dict[str, Any]:
        """Usage of all choices: each prompt is counted once. A sequence that was never admitted counts nothing."""
        firsts = [s for s in sequences[:: self._job.n] if s.admitted is not None]
        return p.usage(
            sum(len(s.prompt) for s in firsts),
            sum(len(s.output) for s in sequences),
            sum(s.cached or 0 for s in firsts) if self._report_cache else None,
        )

    def _head(self, rid: str, kind: str) -> dict[str, Any]:
        return {"id": rid, "object": kind, "created": self._job.created, "model": self._job.model}

    def _closing_rid(self) -> str:
        """The id of the closing chunks of a stream: that of the choice which sent the last text, as in SGLang."""
        if self._latest is not None:
            return self._latest
        return self._job.rid if isinstance(self._job.rid, str) else uuid.uuid4().hex

    def _answer(self, sequences: list[Sequence], kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head(sequences[0].rid, kind),
            "choices": choices,
            "usage": self._usage(sequences),
            "metadata": p.weight_versions(len(sequences[0].output)),
            **self._extension(sequences),
        }

    def _extension(self, sequences: list[Sequence]) -> dict[str, Any]:
        """`sglext`, if the request asked for it and there is something to tell. Answers without a step after their
        first token are left out, and of several prompts with one answer each, all but the first."""
        found = [p.spec_details(len(s.output), self._job.draft_tokens) for s in sequences if self._job.draft_tokens]
        known = [details for details in found if details is not None]
        if not known:
            return {}
        return {"sglext": {"spec_tokens_details": known if self._job.n > 1 else known[0]}}

    def _extension_chunk(self, sequences: list[Sequence], kind: str) -> list[bytes]:
        if not (extension := self._extension(sequences)):
            return []
        return [orjson.dumps({**self._head(self._closing_rid(), kind), "choices": [], "usage": None, **extension})]


def _reason(sequence: Sequence) -> tuple[str | None, str | int | None]:
    return (None, None) if sequence.finish is None else (sequence.finish.type, sequence.finish.matched)


class _CompletionWriter(_Writer):
    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            reason, matched = _reason(sequence)
            echo = self._job.echo[index // self._job.n] if self._job.echo else ""
            choices.append(_choice(index, {"text": echo + sequence.text}, reason, matched))
        return self._answer(sequences, "text_completion", choices)

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        self._latest = sequence.rid
        reason, matched = _reason(sequence)
        usage = p.usage(len(sequence.prompt), len(sequence.output), None) if self._job.continuous_usage else None
        return [
            orjson.dumps(
                {
                    **self._head(sequence.rid, "text_completion"),
                    "choices": [_choice(index, {"text": text}, reason, matched)],
                    "usage": usage,
                }
            )
        ]

    def last(self, sequences: list[Sequence]) -> list[bytes]:
        found = self._extension_chunk(sequences, "text_completion")
        if not self._job.include_usage:
            return found
        usage = {key: value for key, value in self._usage(sequences).items() if value is not None}
        rid = self._closing_rid()
        return [*found, orjson.dumps({**self._head(rid, "text_completion"), "choices": [], "usage": usage})]


class _ChatWriter(_Writer):
    def __init__(self, job: Job, *, report_cache: bool) -> None:
        super().__init__(job, report_cache=report_cache)
        self._begun: dict[int, Sequence] = {}
        self._ended: list[int] = []

    def whole(self, sequences: list[Sequence]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            message = {"role": "assistant", "content": sequence.text, "reasoning_content": None}
            choices.append(_choice(index, {"message": message}, *_reason(sequence)))
        return self._answer(sequences, "chat.completion", choices)

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        self._latest = sequence.rid
        found: list[bytes] = []
        if index not in self._begun:
            self._begun[index] = sequence
            found.append(self._chunk(index, sequence.rid, {"role": "assistant", "content": ""}))
        if text:
            cached = (sequence.cached or 0) if self._report_cache else None
            usage = p.usage(len(sequence.prompt), len(sequence.output), cached) if self._job.continuous_usage else None
            found.append(self._chunk(index, sequence.rid, {"content": text}, usage=usage))
        if sequence.finish is not None:
            self._ended.append(index)
        return found

    def last(self, sequences: list[Sequence]) -> list[bytes]:
        # Finish reasons come after the text of all choices, in the order in which the choices ended.
        found = [
            self._chunk(index, self._closing_rid(), {}, reason=_reason(self._begun[index])) for index in self._ended
        ]
        found += self._extension_chunk(sequences, "chat.completion.chunk")
        if self._job.include_usage:
            rid = self._closing_rid()
            head = self._head(rid, "chat.completion.chunk")
            found.append(orjson.dumps({**head, "choices": [], "usage": self._usage(sequences)}))
        return found

    def _chunk(
        self,
        index: int,
        rid: str,
        delta: dict[str, Any],
        *,
        reason: tuple[str | None, str | int | None] = (None, None),
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        choice = _choice(index, {"delta": {"reasoning_content": None, **delta}}, *reason)
        body = {**self._head(rid, "chat.completion.chunk"), "choices": [choice]}
        return orjson.dumps(body if usage is None else {**body, "usage": usage})


class _NativeWriter(_Writer):
    def whole(self, sequences: list[Sequence]) -> Any:
        answers = [self._content(sequence) for sequence in sequences]
        return answers[0] if len(answers) == 1 else answers

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        content = self._content(sequence)
        # Unlike the OpenAI routes, every event repeats the whole text.
        return [orjson.dumps(content if self._job.n == 1 else {**content, "index": index})]

    def last(self, sequences: list[Sequence]) -> list[bytes]:
        return []

    def _content(self, sequence: Sequence) -> dict[str, Any]:
        finish: dict[str, Any] | None = None
        if sequence.finish is not None:
            finish = {"type": sequence.finish.type}
            if sequence.finish.type == "length":
                finish["length"] = len(sequence.output)
            elif sequence.finish.matched is not None:
                finish["matched"] = sequence.finish.matched
        return {
            "text": sequence.text,
            "output_ids": sequence.output,
            "meta_info": {
                "id": sequence.rid,
                "finish_reason": finish,
                "prompt_tokens": len(sequence.prompt),
                "weight_version": "default",
                "num_retractions": sequence.retractions,
                "reasoning_tokens": 0,
                "completion_tokens": len(sequence.output),
                "cached_tokens": sequence.cached or 0,
                "cached_tokens_details": {"device": sequence.cached or 0, "host": 0},
                "dp_rank": None,
            },
        }


def _choice(index: int, content: dict[str, Any], reason: str | None, matched: str | int | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason, "matched_stop": matched}


def parse(kind: type[_M], exchange: Exchange, body: bytes) -> _M:
    """Validates a body. Raises RefusedError with SGLang's message, and UnhandledError where SGLang itself fails."""
    content_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = (
            "1 validation error:\n  {'loc': ['header', 'content-type'], 'msg': "
            "\"Unsupported Media Type: Only 'application/json' is allowed\", 'type': 'value_error'}"
        )
        raise RefusedError(400, p.error_body(message, kind="Bad Request"))
    if not body:
        message = "1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}"
        raise RefusedError(400, p.error_body(message, kind="Bad Request"))
    try:
        loaded = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        detail = {
            "type": "json_invalid",
            "loc": ("body", error.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error.msg},
        }
        raise RefusedError(400, p.error_body(f"1 validation error:\n  {detail}", kind="Bad Request")) from None
    if kind is p.ChatRequest and not isinstance(loaded, dict):
        raise UnhandledError
    try:
        return kind.model_validate(loaded)
    except ValidationError as error:
        raise RefusedError(400, p.error_body(p.validation_message(error), kind="Bad Request")) from None


def _vector(prompt: tuple[int, ...], seed: int, size: int) -> list[float]:
    """A unit vector that depends on the prompt and the seed only."""
    digest = hashlib.blake2b(repr((seed, prompt)).encode(), digest_size=8).digest()
    source = random.Random(digest)  # noqa: S311 - reproducible on purpose
    values = [source.gauss(0, 1) for _ in range(size)]
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]
