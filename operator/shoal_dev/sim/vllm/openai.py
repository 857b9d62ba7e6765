"""/v1/chat/completions and /v1/completions of vLLM, and what every generating or pooling route shares."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from shoal.core.fields.schemas import CIRCULAR, reference_problem
from shoal_dev.sim.engine import RequestBatch, Sampling
from shoal_dev.sim.http import Exchange, until_gone
from shoal_dev.sim.protocol import stops
from shoal_dev.sim.scheduler import QueueFullError
from shoal_dev.sim.tokenizer import ModelFolder
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.engine import DEAD, STOPPING, VLLMEngine
from shoal_dev.sim.vllm.lora import VLLMAdapter
from shoal_dev.sim.vllm.writers import ChatWriter, CompletionWriter, Writer, error_event

_M = TypeVar("_M", bound=BaseModel)
_BUSY = "The engine is currently busy and cannot accept new requests. Please retry later."
_MAX_LOGPROBS = 20


@dataclass(slots=True)
class Job:
    """A validated request."""

    prompts: list[tuple[int, ...]]
    sampling: Sampling
    rid: str
    model: str
    """As the answer names it."""
    adapter: VLLMAdapter | None = None
    n: int = 1
    stream: bool = False
    salt: str = ""
    options: p.StreamOptions | None = None
    echo: list[str] = field(default_factory=list[str])
    labels: list[int] = field(default_factory=list[int])
    """Tokens whose log probabilities the answer has."""
    empty_grammar: bool = False
    """The grammar of the answer allows no token at all."""


class _BrokenError(Exception):
    """A request that the engine took fails."""

    def __init__(self, status: int, message: str, *, stream: bool = True) -> None:
        super().__init__(message)
        self.status, self.message, self.stream = status, message, stream


class Generating:
    """These routes of one engine."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    async def chat(self, exchange: Exchange) -> None:
        request = parse(p.ChatRequest, exchange, await exchange.body())
        adapter = self._engine.named(request.model)
        self._check(request)
        self._check_tools(request)
        if not request.messages:
            raise p.RefusedError(400, p.NO_MESSAGES)
        if any(message.media for message in request.messages):
            raise p.RefusedError(400, f"{self._engine.args.served_model_name} is not a multimodal model")
        prompt = rendered(self._engine.model, request, request.tools)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        self._check_sampled(request, request.top_logprobs if request.logprobs else None)
        job = self._job(exchange, request, [tuple(self._encode(prompt))], limit, adapter)
        await self._run(exchange, job, ChatWriter)

    async def completions(self, exchange: Exchange) -> None:
        request = parse(p.CompletionRequest, exchange, await exchange.body())
        adapter = self._engine.named(request.model)
        self._check(request)
        self._check_sampled(request, request.logprobs)
        labels = request.logprob_token_ids
        if labels:
            self._check_labels(labels, request.logprobs)
        if request.prompt is None or request.prompt == "":
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise p.RefusedError(400, message, param="prompt")
        prompts = self.prompts(request.prompt)
        job = self._job(exchange, request, prompts, request.max_tokens, adapter)
        if labels:
            job.labels = labels
        if request.echo:
            job.echo = [self._engine.model.tokenizer.decode(prompt) for prompt in prompts]
        await self._run(exchange, job, CompletionWriter)

    # --- for the routes that pool, too --------------------------------------------------------------------------------

    def prompts(self, given: str | list[str] | list[int] | list[list[int]]) -> list[tuple[int, ...]]:
        """Raises RefusedError."""
        items: list[Any] = [given] if isinstance(given, str) else given
        if items and isinstance(items[0], int):
            items = [items]
        if not items:
            raise p.RefusedError(400, "You must pass at least one prompt")
        prompts = [tuple(self._encode(item) if isinstance(item, str) else cast("list[int]", item)) for item in items]
        vocabulary = self._engine.model.config.get("vocab_size")
        for prompt in prompts:
            if not prompt:
                raise p.RefusedError(400, "The decoder prompt cannot be empty")
            outside = [token for token in prompt if token < 0 or (vocabulary is not None and token >= vocabulary)]
            if outside:
                raise p.RefusedError(400, f"Token id {outside[0]} is out of vocabulary")
            self.fits(prompt)
        return prompts

    def fits(self, prompt: tuple[int, ...]) -> None:
        """Raises RefusedError for a prompt that leaves no room for an answer."""
        longest = self._engine.context_length
        if len(prompt) > longest or (len(prompt) == longest and not self._engine.embeds):
            raise p.wrong(
                f"This model's maximum context length is {longest} tokens. However, your prompt contains at least "
                f"{longest + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                "the length of the input prompt.",
                "input_tokens",
                longest + 1,
            )

    async def answer(self, exchange: Exchange, job: Job, content: Callable[[RequestBatch], Any]) -> None:
        """Runs a request that is answered whole."""

        async def work() -> None:
            async with self._batch(exchange, job) as batch:
                with self._engine.traced(exchange.headers, batch):
                    await self._wait(exchange, batch, job)
                await exchange.json(content(batch))

        await self._guarded(exchange, job, work)

    async def stream(self, exchange: Exchange, job: Job, write: Writer) -> None:
        """Runs a request that is answered in chunks."""

        async def work() -> None:
            async with self._batch(exchange, job) as batch:
                with self._engine.traced(exchange.headers, batch):
                    await self._stream(exchange, batch, job, write)

        await self._guarded(exchange, job, work)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return self._engine.model.tokenizer.encode(text)

    def _check_tools(self, request: p.ChatRequest) -> None:
        if request.chat_template is not None:
            raise p.RefusedError(
                400,
                "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request "
                "with untrusted chat template.",
            )
        if request.tool_choice not in (None, "none", "auto") and not request.tools:
            message = "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)"
            raise p.RefusedError(400, message, param="tool_choice")
        if request.tools and request.tool_choice in (None, "auto") and not self._engine.vllm.tools:
            message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            raise p.RefusedError(400, message)

    def _check(self, request: p.Generation) -> None:
        temperature, longest = request.temperature, self._engine.context_length
        given = getattr(request, "max_completion_tokens", None)
        limit = request.max_tokens if given is None else given
        if request.stream_options is not None and not request.stream:
            message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
            raise p.RefusedError(400, message, param="stream_options")
        if limit is not None and limit < 1:
            raise p.wrong(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
        if limit is not None and limit > longest:
            message = f"max_tokens={limit} cannot be greater than max_model_len={longest}. Please request fewer output "
            raise p.wrong(message + "tokens.", "max_tokens", limit)
        most = self._engine.vllm.most_stops
        if isinstance(request.stop, list) and len(request.stop) > most:
            raise p.wrong(f"List should have at most {most} items after validation", "stop", len(request.stop))
        if request.n < 1:
            raise p.RefusedError(400, f"n must be at least 1, got {request.n}.")
        if temperature is not None and temperature < 0:
            raise p.wrong(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
        if request.top_p is not None and not 0 < request.top_p <= 1:
            raise p.wrong(f"top_p must be in (0, 1], got {request.top_p}.", "top_p", request.top_p)
        if request.n > 1 and temperature == 0:
            raise p.RefusedError(400, f"n must be 1 when using greedy sampling, got {request.n}.")

    def _check_sampled(self, request: p.Generation, logprobs: int | None) -> None:
        """What the engine could not look up in the tensor of one step is refused before it gets there."""
        if (logprobs or 0) > _MAX_LOGPROBS:
            message = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {_MAX_LOGPROBS}"
            raise p.wrong(message, "logprobs", logprobs)
        size = self._engine.model.config.get("vocab_size")
        given = request.stop_token_ids or ()
        outside = [token for token in given if token < 0 or (size is not None and token >= size)]
        if outside:
            message = f"token_id(s) {outside} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: {size}"
            raise p.wrong(message, "stop_token_ids", outside)

    def _check_labels(self, labels: list[int], logprobs: int | None) -> None:
        if logprobs is None:
            message = "when using `logprob_token_ids`, `logprobs` must be set. (parameter=logprob_token_ids)"
            raise p.RefusedError(400, message, param="logprob_token_ids")
        if len(labels) > _MAX_LOGPROBS:
            message = f"Requested sample logprobs of {len(labels)}, which is greater than max allowed: {_MAX_LOGPROBS}"
            raise p.wrong(message, "logprobs", len(labels))
        size = self._engine.model.config.get("vocab_size")
        outside = [label for label in labels if label < 0 or (size is not None and label >= size)]
        if outside:
            message = (
                f"token_id(s) {outside} in logprob_token_ids contain out-of-vocab token ids. Vocabulary size: {size}"
            )
            raise p.wrong(message, "logprob_token_ids", outside)

    def _job(
        self,
        exchange: Exchange,
        request: p.Generation,
        prompts: list[tuple[int, ...]],
        limit: int | None,
        adapter: VLLMAdapter | None,
    ) -> Job:
        for prompt in prompts:
            self.fits(prompt)
        sampling = Sampling(
            limit,
            stops(request.stop),
            frozenset(request.stop_token_ids or ()),
            request.ignore_eos,
            request.seed,
            greedy=request.temperature == 0,
        )
        return Job(
            prompts=prompts,
            sampling=sampling,
            rid=exchange.headers.get("x-request-id") or request.request_id or uuid.uuid4().hex[:16],
            model=self._engine.args.served_model_name if adapter is None else adapter.name,
            adapter=adapter,
            n=request.n,
            stream=bool(request.stream),
            salt=request.cache_salt or "",
            options=request.stream_options,
            empty_grammar=_allows_nothing(request.schema_asked),
        )

    def _batch(self, exchange: Exchange, job: Job) -> Any:
        self._engine.check()
        if self._engine.draining:
            raise p.RefusedError(500, STOPPING)
        return self._engine.generate(
            job.prompts, n=job.n, sampling=job.sampling, rid=job.rid, path=exchange.path, model=job.model,
            stream=job.stream, adapters=None if job.adapter is None else job.adapter.id, salt=("", job.salt),
        )  # fmt: skip

    async def _run(self, exchange: Exchange, job: Job, kind: type[Writer]) -> None:
        options = job.options or p.StreamOptions()
        args = self._engine.args
        write = kind(
            rid=job.rid,
            model=job.model,
            created=int(time.time()),
            n=job.n,
            echo=job.echo,
            labels=job.labels,
            cache=args.enable_cache_report,
            usage=bool(options.include_usage) or args.include_usage_by_default,
            each=bool(options.continuous_usage_stats),
        )
        if not job.stream:
            await self.answer(exchange, job, lambda batch: write.whole(batch.sequences))
            return
        await self.stream(exchange, job, write)

    async def _guarded(self, exchange: Exchange, job: Job, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await until_gone(exchange, work(), notice_after=0.0)
        except QueueFullError:
            self._engine.metrics.refused()
            raise p.RefusedError(503, _BUSY) from None
        except _BrokenError as error:
            if exchange.status is None and not (error.stream and job.stream):
                raise p.RefusedError(error.status, error.message) from None
            if exchange.status is None:
                await exchange.begin_stream()
            await exchange.event(error_event(error.message, error.status))
            await exchange.event(b"[DONE]")
            await exchange.end_stream()

    async def _wait(self, exchange: Exchange, batch: RequestBatch, job: Job) -> None:
        while not batch.finished:
            await self._watch(exchange, batch, job)
            await batch.change()
        self._alive()
        if batch.fault is not None and batch.fault.kind == "slow":
            await asyncio.sleep(batch.fault.delay_seconds)

    async def _stream(self, exchange: Exchange, batch: RequestBatch, job: Job, write: Writer) -> None:
        # The 200 comes at once, before the first token.
        await self._watch(exchange, batch, job)
        await exchange.begin_stream()
        sent: dict[int, tuple[int, int]] = {}
        done: set[int] = set()
        while len(done) < len(batch.sequences):
            for index, sequence in enumerate(batch.sequences):
                tokens, offset = len(sequence.output), sent.get(index, (0, 0))[1]
                if index in done or (sent.get(index, (0, 0))[0] == tokens and sequence.finish is None):
                    continue
                if batch.fault is not None and batch.fault.kind == "slow":
                    await asyncio.sleep(batch.fault.delay_seconds)
                    tokens = len(sequence.output)
                text = sequence.text
                if sequence.finish is None:
                    # As many characters as a stop string could have begun with are never sent before the end.
                    text = text[: max(offset, len(text) - max((len(word) - 1 for word in sequence.stop), default=0))]
                for chunk in write.chunks(index, sequence, text[min(offset, len(text)) :]):
                    await exchange.event(chunk)
                sent[index] = (tokens, len(text))
                if sequence.finish is not None and tokens == len(sequence.output):
                    done.add(index)
            await self._watch(exchange, batch, job)
            if len(done) < len(batch.sequences):
                await batch.change()
        for chunk in write.last(batch.sequences):
            await exchange.event(chunk)
        await exchange.event(b"[DONE]")
        await exchange.end_stream()

    def _alive(self) -> None:
        if self._engine.died.is_set() or self._engine.cut:
            raise _BrokenError(500, DEAD)

    async def _watch(self, exchange: Exchange, batch: RequestBatch, job: Job) -> None:
        """Raises _BrokenError when the engine has ended, and carries out the request's fault when it is its time."""
        if job.empty_grammar:
            # The grammar refuses the first token: the scheduler gives up this request, and no other one.
            raise _BrokenError(500, "Internal server error")
        if not batch.finished:
            self._alive()
        fault = batch.fault
        if fault is None or not batch.struck:
            return
        self._engine.strike(batch)
        if fault.kind in ("503", "sse_error"):
            raise _BrokenError(fault.status, fault.message, stream=fault.kind == "sse_error")
        if fault.kind == "close":
            exchange.break_connection()
        self._alive()
        # A held sequence makes no further progress: it waits for its client to leave, or for the engine's end.
        while True:
            await batch.change()
            self._alive()


def _allows_nothing(schema: Any) -> bool:
    return isinstance(schema, dict) and (
        (found := reference_problem(cast(dict[str, Any], schema), "")) is not None and found.code == CIRCULAR
    )


def rendered(
    model: ModelFolder, chat: p.ChatRequest | p.TokenizeMessages, tools: list[dict[str, Any]] | None = None
) -> str:
    """The prompt of a chat. Raises RefusedError."""
    plain = [{"role": message.role, "content": message.text()} for message in chat.messages]
    if chat.continue_final_message and chat.add_generation_prompt:
        raise p.RefusedError(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    try:
        if chat.continue_final_message:
            return model.continued_prompt(plain, tools or None)
        return model.chat_prompt(plain, tools or None, opens=chat.add_generation_prompt)
    except ValueError as error:
        raise p.RefusedError(400, str(error)) from None


def parse(kind: type[_M], exchange: Exchange, body: bytes) -> _M:
    """Validates a body. Raises RefusedError with vLLM's message."""
    loaded = loaded_from(exchange, body)
    try:
        return kind.model_validate(loaded, from_attributes=True)
    except ValidationError as error:
        raise p.invalid(error) from None


def loaded_from(exchange: Exchange, body: bytes) -> object:
    """The body as JSON. Raises RefusedError."""
    content_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise p.RefusedError(400, message, kind="Bad Request")
    if not body:
        detail = {"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}
        raise p.RefusedError(400, f"1 validation error:\n  {detail}", kind="Bad Request", param="body")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        place = f"body.{error.pos}"
        detail = {
            "type": "json_invalid", "loc": place, "msg": "JSON decode error", "input": "<dict of 0 items>",
            "ctx": {"error": error.msg},
        }  # fmt: skip
        raise p.RefusedError(400, f"1 validation error:\n  {detail}", kind="Bad Request", param=place) from None
