"""Sends an accepted request to an external target, once, and relays the answer. Whatever fails before the first byte is
an error with which the request goes to a fallback of its route."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal

import structlog

from shoal.api.names import HEADER_HOPS
from shoal.core.fields.table import EMBEDDINGS
from shoal.core.routing.external import Cause, begins_within, cause_of, cause_of_silence, retry_after_of
from shoal.core.routing.resolve import ServedExternal
from shoal.engine.wire import EngineCall
from shoal.gateway.accepted import AcceptedRequest
from shoal.gateway.externals import ExternalUnusable
from shoal.gateway.externalwire import DECLINED, ExternalRewriter, ExternalWire
from shoal.gateway.relay import AnswerRelay, Retry
from shoal.gateway.remainders import Remainder
from shoal.gateway.upstream import (
    Aborted,
    AnswerTooLarge,
    ConnectFailed,
    GivenUp,
    UpstreamAnswer,
    UpstreamError,
)
from shoal.gateway.waiter import ClientGone
from shoal.net import errors
from shoal.net.errors import ApiError

log = structlog.get_logger()

Outcome = Literal["answered", "rejected", "declined", "broken"]
_MOST_ERROR: Final = 64 * 1024
MOST_TOKENS: Final = 10_000_000
"""Of one request. A usage object that says more is not believed: a tenant pays by it."""
_DEFAULT_RETRY: Final = 10
_ANTHROPIC_VERSION: Final = "anthropic-version: 2023-06-01\r\n"
"""Of Anthropic's API, which answers no request without it."""
_ENDED_WITH: Final[Mapping[Cause | None, Outcome]] = {
    "request": "rejected",
    "either": "declined",
    "target": "broken",
    None: "broken",
}
"""How a request ended, by what the error is about that is the last event of its stream."""
_IDENTITY: Final = (b"", b"identity")


class ExternalDispatch:
    """The one attempt of a request at an external target."""

    def __init__(self, request: AcceptedRequest) -> None:
        external = request.prepared.model.external
        assert external is not None  # noqa: S101 - the caller
        app = request.app
        self._app, self._request, self._meter = app, request, request.meter
        self._external = external
        self._relay = AnswerRelay(request.prepared, request.meter, request.reply, app.memory.answer, app.answer_budget)

    @property
    def doubtful(self) -> bool:
        """Whether the target ended its stream with an error of which the request may be the reason."""
        return self._relay.cause in ("request", "either")

    async def run(self) -> None:
        """
        Raises:
            ApiError: the error that the client gets, or with which the request goes to a fallback.
            ClientGone: the client left.
        """
        app, request, meter = self._app, self._request, self._meter
        key = request.prepared.model.key
        try:
            async with app.externals.place(key, self._external, meter.tenant):
                await self._attempt()
        except ExternalUnusable as unusable:
            app.metrics.external.labels(unusable.outcome).inc()
            log.debug("external target failed", request=meter.id, target=key, reason=unusable.outcome)
            if not unusable.sent:
                meter.not_taken()
            elif meter.count_source != "none":
                app.spool.put(meter.attempt_row())  # it may have computed; nobody got it, so nobody pays
                meter.forget_counts()
            meter.outcome = "refused"
            after = _DEFAULT_RETRY if unusable.retry_after is None else math.ceil(unusable.retry_after)
            raise errors.unavailable(
                f"The model `{request.prepared.model_name}` cannot serve right now: {unusable.text}. Try again.",
                "external_unavailable",
                after,
                outcome=unusable.outcome,
            ) from None

    async def _attempt(self) -> None:
        request, meter, external = self._request, self._meter, self._external
        abort, prepared = request.abort, request.prepared
        if abort.aborted:
            raise ClientGone
        meter.attempts += 1
        meter.sent(len(request.raw))
        abort.given_up = abort.sent = False
        wire = ExternalWire(stream=prepared.stream, token=request.app.externals.token(external))
        self._relay.attempt(wire, EngineCall(prepared.path, external.model, None, meter.id, 1))
        timer = _Timer(request, external)
        spans = request.spans
        if spans is not None:
            spans.attempt_outside(
                external.host, external.port, prepared.native.provider if prepared.native else "openai"
            )
        failure: str | None = None
        try:
            await self._send(timer)
        except ExternalUnusable as unusable:
            failure = unusable.outcome
            raise
        except ApiError as error:
            failure = error.code
            if timer.remainder is not None:
                raise ClientGone from None  # nobody reads the error
            raise
        except (asyncio.CancelledError, ClientGone) as end:
            failure = self._cut_off(timer, client_left=isinstance(end, ClientGone))
            raise
        finally:
            timer.stop()
            abort.given_up = False
            abort.cancel = None
            self._complete_counts()
            if timer.remainder is not None:
                timer.remainder.end()
                exact = "exact" if meter.count_source == "final" else "estimated"
                request.app.metrics.cancellations.labels(exact).inc()
            if spans is not None:
                spans.attempt_over(failure)
        if timer.remainder is not None:
            raise ClientGone

    async def _send(self, timer: "_Timer") -> None:
        """Raises ExternalUnusable, ClientGone and ApiError."""
        app, request, external = self._app, self._request, self._external
        abort = request.abort
        try:
            answer = await app.externals.start(external, self._head(), request.raw, abort)
            try:
                await self._answered(_TimedAnswer(answer, timer), timer)
            finally:
                answer.release()
        except Aborted:
            raise ClientGone from None
        except ConnectFailed as failed:
            if "TLS" in str(failed):
                raise ExternalUnusable("certificate", "its external target does not prove its name by TLS") from None
            raise ExternalUnusable("connect", "its external target is not there") from None
        except GivenUp:
            raise ExternalUnusable("too_slow", "its external target did not answer in time", sent=True) from None
        except UpstreamError:
            raise ExternalUnusable("lost", "the connection to its external target broke", sent=abort.sent) from None
        except Retry as retry:
            if retry.reason == "stalled":
                text = "its external target did not answer in time"
                raise ExternalUnusable("too_slow", text, sent=True) from None
            if retry.reason == DECLINED:
                raise ExternalUnusable("declined", "its external target declined this request") from None
            text = "its external target broke off, or failed"
            raise ExternalUnusable("lost", text, sent=retry.reason == "lost") from None

    async def _answered(self, answer: "_TimedAnswer", timer: "_Timer") -> None:
        status = answer.status
        if 300 <= status < 400:
            raise ExternalUnusable("redirect", "its external target redirects, and redirects are not followed")
        if status == 429 or status == 503:
            after = retry_after_of(answer.retry_after, datetime.now(UTC))
            raise ExternalUnusable("busy", "its external target takes no more requests now", retry_after=after)
        if status == 401:
            raise ExternalUnusable("unauthorized", "its external target refuses the installation's key")
        cause = None if status == 200 else "target" if status < 400 else cause_of(status)
        if cause == "either":
            raise ExternalUnusable("declined", f"its external target declined this request with status {status}")
        if cause == "target" or answer.encoding.lower() not in _IDENTITY:
            raise ExternalUnusable("failed", f"its external target answered with status {status}")
        if status != 200:
            self._meter.not_taken()
            self._ended("rejected")
            raise self._relay.error_of(status, await _error_of(answer))
        try:
            await self._relay.run(answer, (), lambda: self._began(timer))
        except ApiError as error:
            if self._relay.answering:
                self._ended("broken")
                raise errors.external_broken() from None
            if self._relay.cause == "request":
                self._ended("rejected")
            raise error
        if self._meter.outcome != "failed":
            self._ended("answered")
        else:
            # It ended its stream with an error.
            self._ended(_ENDED_WITH[self._relay.cause])

    def _ended(self, outcome: Outcome) -> None:
        """Notes how a request ended that the target has answered, at least in part."""
        app, key = self._app, self._request.prepared.model.key
        if outcome in ("answered", "rejected"):
            app.externals.answered(key, self._external, self._meter.tenant)
        else:
            app.externals.failed(key, self._external, self._meter.tenant, outcome)
        app.metrics.external.labels(outcome).inc()

    def _cut_off(self, timer: "_Timer", *, client_left: bool) -> str | None:
        """The request has ended before the target answered: its client left, or its time is over. Returns the outcome,
        if that says something of the target."""
        app, request = self._app, self._request
        if timer.waited is None or not (client_left or request.deadline.passed):
            return None
        whole, stream = request.deadline.seconds, request.prepared.stream
        cause = cause_of_silence(timer.waited, timer.left, whole, stream=stream, client_left=client_left)
        if cause is None:
            return None
        outcome, key = "too_slow", request.prepared.model.key
        app.externals.failed(key, self._external, self._meter.tenant, outcome, doubtful=cause == "either")
        app.metrics.external.labels(outcome).inc()
        return outcome

    def _began(self, timer: "_Timer") -> None:
        abort = self._request.abort
        timer.began()
        abort.answering = True
        if self._request.prepared.stream:
            abort.cancel = lambda: self._read_on(timer)
        self._meter.answer_began()

    def _read_on(self, timer: "_Timer") -> bool:
        """Called when the client leaves in the middle of a stream. Returns whether its rest is read, for the usage."""
        meter = self._meter
        if meter.count_source == "estimated":
            timer.remainder = self._app.remainders.begin(meter.tenant, self._request.abort)
        return timer.remainder is not None

    def _complete_counts(self) -> None:
        """Estimates what the target did not count, and what it cannot have counted."""
        meter, prepared, rewriter = self._meter, self._request.prepared, self._relay.rewriter
        if meter.count_source in ("none", "estimated"):
            believed = all((count or 0) <= MOST_TOKENS for count in meter.tokens().values())
        else:
            counts = meter.tokens()
            needed = ("inputTokens",) if prepared.path == EMBEDDINGS else ("inputTokens", "outputTokens")
            # A count that is missing, negative or no whole number reads as None.
            believed = all(counts[name] is not None for name in needed) and all(
                (count or 0) <= MOST_TOKENS for count in counts.values()
            )
        if not believed:
            meter.disbelieve()
        elif meter.count_source == "continuous" and meter.outcome == "answered":
            # Some tell the usage of the whole answer in its last chunks, and have no closing one.
            meter.count_source = "final"
        if meter.count_source == "estimated" and prepared.native is None and isinstance(rewriter, ExternalRewriter):
            meter.estimate_answer(rewriter.tokens)

    def _head(self) -> bytes:
        prepared, external = self._request.prepared, self._external
        path = f"{external.base}{prepared.path.removeprefix('/v1')}"
        token = self._app.externals.token(external)
        key = "" if token is None else f"{external.key_prefix}{token}\r\n"
        if prepared.native is not None and prepared.native.provider == "anthropic":
            key += _ANTHROPIC_VERSION
        # Nothing of the client's headers: its key, its cookies and its traces are not for others.
        return (
            f"POST {path} HTTP/1.1\r\nhost: {external.authority}\r\n{key}"
            f"content-type: application/json\r\n"
            f"accept: {'text/event-stream' if prepared.stream else 'application/json'}\r\n"
            f"accept-encoding: identity\r\nuser-agent: shoal\r\n{HEADER_HOPS}: {self._request.hops + 1}\r\n"
            f"content-length: {len(self._request.raw)}\r\n\r\n"
        ).encode()


class _Timer:
    """Ends an attempt whose next part does not come in time."""

    __slots__ = ("_abort", "_at", "_external", "_first", "_handle", "_leaving", "_loop", "_since", "left", "remainder")

    def __init__(self, request: AcceptedRequest, external: ServedExternal) -> None:
        self._abort, self._external = request.abort, external
        self._loop = asyncio.get_running_loop()
        self._first = True
        self.left = request.deadline.left()
        """Seconds of the request that were left when it was sent."""
        self._since = self._loop.time()
        self._at = self._since + external.first_byte_seconds
        self._handle: asyncio.TimerHandle | None = self._loop.call_at(self._at, self._check)
        can, whole = request.can_fall_back if request.prepared.stream else None, request.deadline.seconds
        within = begins_within(external.first_byte_seconds, self.left, whole, leaves=can is not None)
        self._leaving: asyncio.Task[None] | None = None
        if can is not None and within < external.first_byte_seconds:
            self._leaving = asyncio.create_task(self._leave(within, can), name="leaves for a fallback")
        self.remainder: Remainder | None = None
        """The client has left, and the rest is read for the usage."""

    @property
    def waited(self) -> float | None:
        """Seconds without an answer; None: it has begun."""
        return self._loop.time() - self._since if self._first else None

    def began(self) -> None:
        """The answer has begun: from now on pauses count."""
        self._first = False
        self.touch()

    def touch(self, size: int = 0) -> None:
        """A part of so many bytes has arrived."""
        if self.remainder is not None:
            self.remainder.took(size)
        if not self._first:
            self._at = self._loop.time() + self._external.idle_seconds
            if self._handle is not None and self._handle.when() > self._at:
                self._handle.cancel()
                self._handle = self._loop.call_at(self._at, self._check)

    def pause(self) -> None:
        """The client takes nothing: that is no pause of the target."""
        if not self._first:
            self._at = math.inf

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    async def _leave(self, within: float, can_fall_back: Callable[[], Awaitable[bool]]) -> None:
        """Ends an attempt whose answer has not begun after `within` seconds, if a fallback can take the request.
        Otherwise the target keeps its time: without it, the request would only fail earlier."""
        await asyncio.sleep(within)
        if self._first and await can_fall_back() and self._first:
            self._abort.expire()

    def _check(self) -> None:
        if self._handle is None:
            return
        now = self._loop.time()
        if now < self._at:
            wait = min(self._at, now + self._external.idle_seconds)
            self._handle = self._loop.call_at(wait, self._check)
        else:
            self._handle = None
            self._abort.expire()


class _TimedAnswer:
    """An answer whose parts are timed."""

    def __init__(self, answer: UpstreamAnswer, timer: _Timer) -> None:
        self._answer, self._timer = answer, timer

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def content_type(self) -> bytes:
        return self._answer.content_type

    @property
    def retry_after(self) -> bytes:
        return self._answer.retry_after

    @property
    def encoding(self) -> bytes:
        return self._answer.encoding

    async def read(self) -> bytes:
        data = await self._answer.read()
        self._timer.touch(len(data))
        return data

    async def relay(self, take: Callable[[bytes], bool], drained: Callable[[], Awaitable[None]]) -> None:
        timer = self._timer

        def taken(data: bytes) -> bool:
            timer.touch(len(data))
            return take(data)

        async def waited() -> None:
            timer.pause()
            try:
                await drained()
            finally:
                timer.touch()

        await self._answer.relay(taken, waited)

    async def read_all(self, limit: int, grown: Callable[[int], None] = lambda _size: None) -> bytes:
        timer = self._timer
        timer.began()  # a whole answer has begun with its head

        def more(size: int) -> None:
            timer.touch()
            grown(size)

        return await self._answer.read_all(limit, more)

    def release(self) -> None:
        self._answer.release()


async def _error_of(answer: _TimedAnswer) -> bytes:
    try:
        return await answer.read_all(_MOST_ERROR)
    except AnswerTooLarge:
        return b""
