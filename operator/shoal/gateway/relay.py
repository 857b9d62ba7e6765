"""Relays the engine's answer to the client: reads and strips usage, restores the model's name, converts errors."""

from collections.abc import Callable
from typing import Any, Final, cast

import orjson

from shoal.core.fields.table import GENERATING
from shoal.core.routing.external import Cause, cause_of, status_of_event
from shoal.engine.wire import EngineCall, NotHere, ReadAcceptedDrafts, Rewriter, Wire
from shoal.gateway import sse, wholeanswer
from shoal.gateway.body import BodyBudget
from shoal.gateway.dialects import AnswerEvents
from shoal.gateway.nativestream import BrokenStream, NativeStream
from shoal.gateway.prepared import Prepared
from shoal.gateway.reply import Reply
from shoal.gateway.upstream import Aborted, AnswerTooLarge, GivenUp, UpstreamAnswer, UpstreamError
from shoal.metering.meter import Meter
from shoal.net import errors
from shoal.net.asgi import Headers
from shoal.net.errors import ApiError

_JSON: Final = b"application/json"
_SMALL: Final = 64 * 1024
"""Answers up to this many bytes do not count towards the memory budget."""
LACKS_ADAPTER: Final = "adapter"
"""Reason of a retry: the engine does not have the adapter."""
WRONG_MODEL: Final = "wrong_model"
"""Reason of a retry: the engine serves or answered with another model than the one asked for."""

ABORTED: Final = "aborted"
"""Reason of a retry: the engine gave the request up."""


class Retry(Exception):
    """The replica could not take the request, and the client got nothing of its answer: another replica may be
    tried."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AnswerRelay:
    """Relays the answer of one request."""

    __slots__ = (
        "_budget",
        "_call",
        "_held",
        "_max_bytes",
        "_meter",
        "_prepared",
        "_reply",
        "_size",
        "_wire",
        "accepted_drafts",
        "answering",
        "cause",
        "client_gone",
        "rewriter",
        "rid",
    )

    _wire: Wire
    _call: EngineCall
    rewriter: Rewriter
    """Restores the names of the client in the answer to this attempt."""
    accepted_drafts: ReadAcceptedDrafts | None
    """Takes from this attempt's answer what it says of guessed tokens; None: it says nothing."""

    def __init__(
        self,
        prepared: Prepared,
        meter: Meter,
        reply: Reply,
        max_answer_bytes: int,
        held: BodyBudget,
    ) -> None:
        self._prepared = prepared
        self._meter = meter
        self._reply = reply
        self._max_bytes = max_answer_bytes
        self._budget = held
        """Budget of all non-streaming answers."""
        self._held = self._size = 0
        self.rid: bytes | None = None
        """The engine's id of the request, if it differs from the request's own."""
        self.client_gone = False
        """The engine was asked to end the request; its answer is only read for the token counts."""
        self.answering = False
        """Part of an engine's answer was sent: from then on no other replica may be tried."""
        self.cause: Cause | None = None
        """What the error is about with which an external target ended its stream. None: there was none."""

    def attempt(self, wire: Wire, call: EngineCall) -> None:
        """Called before each attempt is sent."""
        self._wire, self._call = wire, call
        self.rid = wire.sent_id(call)
        self.rewriter = wire.rewriter(call, self._prepared.model_name)
        self.accepted_drafts = wire.accepted_drafts(call)

    async def run(self, answer: UpstreamAnswer, headers: Headers, began: Callable[[], None]) -> None:
        """Relays an answer to its end; calls `began` before its first part is sent.

        `began` is not stored: its owner has a reference to this relay, and a reference cycle would be work for the
        garbage collector.

        Raises:
            Retry: nothing of the answer was sent, and another replica may succeed.
            UpstreamError: as for Retry; but Aborted means that the client left.
            ApiError: the error that the client gets instead.
        """
        if answer.status in (401, 503):
            # 401: the pod's keys are being rotated. Both concern the replica, not the client.
            raise Retry("unauthorized" if answer.status == 401 else "unavailable")
        try:
            if answer.status == 200 and self._prepared.stream and b"event-stream" in answer.content_type:
                await self._stream(answer, headers, began)
            else:
                await self._whole(answer, headers, began)
        except NotHere as elsewhere:
            if self.answering:
                raise engine_lost() from None  # what the client has cannot be taken back
            raise Retry(elsewhere.reason) from None
        finally:
            if self._held:
                self._budget.give(self._meter.tenant, self._held)
            self._held = self._size = 0

    def holds(self, size: int) -> None:
        """A stream keeps so many bytes of its answer in memory. Raises ApiError: 503, the budget is used up."""
        if size > self._size:
            self._grown(size - self._size)

    def _grown(self, size: int) -> None:
        self._size += size
        if self._size <= _SMALL:
            return
        try:
            self._budget.take(self._meter.tenant, self._size - self._held)
        except ApiError:
            self._meter.outcome = "refused"
            raise
        self._held = self._size

    async def _whole(self, answer: UpstreamAnswer, headers: Headers, began: Callable[[], None]) -> None:
        prepared, meter = self._prepared, self._meter
        try:
            body = await answer.read_all(self._max_bytes, self._grown)
        except AnswerTooLarge:
            raise ApiError(502, "The engine's answer is too large.", "answer_too_large") from None
        if self.accepted_drafts is not None and (found := self.accepted_drafts(body)) is not None:
            meter.accept(found.tokens)
            body = found.rest
        if self.client_gone:
            if answer.status == 200 and (span := sse.find_usage(body)) is not None:
                meter.count_cancelled(body[span[0] : span[1]])
            raise Aborted("the client left")
        if answer.status >= 400:
            self._elsewhere(answer.status, body)
            if answer.status < 500:
                meter.not_taken()
            raise self.error_of(answer.status, body)
        if prepared.path in GENERATING and sse.is_aborted(body):
            if (span := sse.find_usage(body)) is not None:
                meter.count(body[span[0] : span[1]], "final")
            raise Retry(ABORTED)
        if self._reply.started:
            raise ApiError(502, "The engine did not answer with a stream.", "no_stream")
        out, usage, content_type, logged, estimate = wholeanswer.read(
            prepared, self._wire, self._call, self.rewriter, body, answer.content_type
        )
        shown = wholeanswer.translated(prepared, out, meter.id) if content_type == _JSON else out
        if estimate is not None:
            meter.estimate_answer(estimate)
        if usage is not None:
            meter.count(usage, "final")
        self.answering = True
        began()
        meter.status = answer.status
        if self._reply.log is not None and logged is not None:
            self._reply.log.answered(logged)
        if self._reply.spans is not None:
            self._reply.spans.observe_answer(out if prepared.native is None else logged or out)
        del body, out, logged  # a slow client must not keep several copies in memory
        if content_type != _JSON:
            await self._reply.page(answer.status, shown, ((b"content-type", content_type), *headers))
        else:
            await self._reply.json(answer.status, self.own_id(shown) if self.rid else shown, headers)
        meter.outcome = "answered"

    def _elsewhere(self, status: int, error: bytes) -> None:
        """Raises Retry where an error of the engine says that another replica may answer."""
        why = self._wire.elsewhere(status, error, self._call.adapter is not None)
        if why is not None:
            raise Retry(why)

    async def _stream(self, answer: UpstreamAnswer, headers: Headers, began: Callable[[], None]) -> None:
        """The events until the first that the client gets are read one after the other, since another replica may still
        be tried. Then the engine's connection writes to the client's, without a task between."""
        prepared, meter, reply = self._prepared, self._meter, self._reply
        events: _Events | NativeStream
        if prepared.native is None:
            events = _Events(self, prepared, meter, reply)
        else:
            events = NativeStream(self, prepared.native, prepared.model_name, meter, reply)
        try:
            while not self.answering:
                if not (data := await answer.read()):
                    break
                if out := events.edited(data):
                    self.answering = True
                    began()
                    meter.status = 200
                    reply.events = events.events
                    await reply.begin_stream_with(out, headers)
            if reply.part is not None:
                await answer.relay(events.taker(reply.part), reply.drained)
            else:
                while data := await answer.read():
                    if out := events.edited(data):
                        await reply.write(out)
        except Aborted:
            if not events.done:
                raise
            # The client has the whole answer and left before the engine's connection ended.
        except (UpstreamError, sse.EventTooLarge, BrokenStream) as error:
            if not self.answering:
                if isinstance(error, BrokenStream):
                    raise Retry(error.reason) from None
                raise Retry("stalled" if isinstance(error, GivenUp) else "lost") from None
            # What comes after the last event is nothing to the client, which has the whole answer, or its error.
            if not events.done and not events.failed:
                raise engine_lost() from None
        if not events.done and not events.failed:
            if self.answering:
                raise engine_lost()
            raise Retry("lost")
        await reply.begin_stream()
        meter.status = 200
        meter.outcome = "failed" if events.failed else "answered"
        await reply.end()

    def error_of(self, status: int, raw: bytes) -> ApiError:
        """The error for the client, of the engine's or an external target's."""
        return errors.from_engine(status, self._wire.plain_error(raw), self._call.model, self._prepared.model_name)

    def own_id(self, data: bytes) -> bytes:
        """Restores the request's own id in the answer of a retry."""
        rid = self.rid or b""
        return data.replace(b'"id":"%b"' % rid, b'"id":"%b"' % rid.partition(b".")[0], 1)

    def engine_error(self, event: bytes, out: list[bytes]) -> ApiError:
        """The error with which the stream ends, by an error event of the engine. Raises it, or Retry, before the first
        byte. `out` are events that go to the client before it."""
        decoded = sse.payload(event) or {}
        outside = self._prepared.model.external is not None
        status = status_of_event(decoded) if outside else errors.engine_status(decoded)
        self.cause = cause_of(status) if outside else None
        error = self.error_of(status, orjson.dumps(decoded))
        if not self.answering and not out:
            if status == 503:
                raise Retry("unavailable")
            self._elsewhere(status, event)
            if status < 500:
                self._meter.not_taken()
            raise error
        if outside:
            # The provider's own words about its failure are not for clients.
            return error if self.cause == "request" else errors.external_broken()
        if self._wire.elsewhere(status, event, self._call.adapter is not None) == "lost":
            error = engine_lost()
        return error

    def given_up(self, out: list[bytes]) -> ApiError:
        """The error with which the stream ends whose request the engine ended, as one that is paused does. Raises Retry
        before the first byte."""
        if not self.answering and not out:
            raise Retry(ABORTED)
        return ApiError(502, "The engine gave the request up; the answer is incomplete.", "replica_lost")


class _Events:
    """The events of one stream on their way from the engine to the client."""

    __slots__ = (
        "_accepted_drafts",
        "_closes",
        "_ended",
        "_failure",
        "_meter",
        "_multiple",
        "_outside",
        "_plain",
        "_prepared",
        "_relay",
        "_reply",
        "_splitter",
        "_usage",
        "done",
        "events",
        "failed",
    )

    def __init__(self, relay: AnswerRelay, prepared: Prepared, meter: Meter, reply: Reply) -> None:
        self._relay = relay
        self._prepared = prepared
        self._meter = meter
        self._reply = reply
        self._outside = prepared.model.external is not None
        self._splitter = sse.Splitter(sse.MAX_EXTERNAL_EVENT_BYTES) if self._outside else sse.Splitter()
        self._multiple = prepared.choices * prepared.prompts > 1
        self._accepted_drafts = relay.accepted_drafts
        dialect = prepared.dialect
        self.events = None if dialect is None else dialect.events(meter.id, prepared.model_name)
        """Of a stream in another API."""
        self._closes = self._outside and prepared.wants_usage and not prepared.wants_continuous and not self._multiple
        """The client gets a closing chunk with the usage, also where the external target puts it into its last
        chunk with choices."""
        self._usage: bytes | None = None
        """The last event with a usage, for that chunk."""
        self._plain = (
            dialect is None
            and not self._multiple
            and not self._closes
            and not prepared.wants_continuous
            and relay.rid is None
            and reply.spans is None
            and (reply.log is None or not reply.log.full)
        )
        """Nothing looks at a chunk, and nothing is changed in it, besides its usage and the model's name."""
        self.done = False
        """The engine said that the stream is complete."""
        self.failed = False
        """The engine ended the stream with an error."""
        self._failure: ApiError | None = None
        """That error."""
        self._ended = False
        """The last event in another API was made."""

    def taker(self, part: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """A function that edits what arrived and writes it with `part`. False: wait until the client takes more."""
        plain, splitter, count = self._plain, self._splitter, self._meter.count
        rewriter = self._relay.rewriter
        rewrite = None if rewriter.same else rewriter.rewrite
        between = plain and splitter.between

        def take(data: bytes) -> bool:
            nonlocal between
            if between and (chunks := sse.plain_chunks(data, rewrite)) is not None:
                out, usage = chunks
                count(usage, "continuous")
                return part(out)
            out = self.edited(data)
            between = plain and splitter.between
            return part(out) if out else True

        return take

    def edited(self, data: bytes) -> bytes:
        """What the client gets of the bytes that arrived. Counts their usage. Raises Retry and ApiError before the
        client got anything, EventTooLarge."""
        prepared, meter, relay = self._prepared, self._meter, self._relay
        out: list[bytes] = []
        for event in self._splitter.feed(data):
            if sse.is_done(event):
                event, self.done = sse.DONE, True
                if not relay.answering and not out and self.events is None:
                    continue
                if self._usage is not None:
                    out.append(sse.closing_usage(self._usage, prepared.model_name))
            elif sse.is_error(event):
                self.failed = True
                self._failure = relay.engine_error(event, out)
                event = self._failure.event().rstrip(b"\n")
            elif sse.is_aborted(event):
                if not self._multiple and (span := sse.find_usage(event)) is not None:
                    meter.count(event[span[0] : span[1]], "continuous")
                self.failed = True
                self._failure = relay.given_up(out)
                event = self._failure.event().rstrip(b"\n")
            elif (span := sse.find_usage(event)) is not None:
                closing = sse.is_closing_usage(event)
                if self._multiple and not closing:
                    # An answer that nobody asked for counts for none: else each event could add another one to the sum.
                    if 0 <= (choice := _choice(event)) < prepared.choices * prepared.prompts:
                        meter.count_choice(event[span[0] : span[1]], choice, prepared.choices)
                else:
                    meter.count(event[span[0] : span[1]], "final" if closing else "continuous")
                if self._closes:
                    self._usage = None if closing else event
                if closing:
                    if not prepared.wants_usage:
                        continue
                elif not prepared.wants_continuous:
                    event = sse.without_usage(event, span)
                event = relay.rewriter.rewrite(event)
            elif event.startswith(b":") and not relay.answering and not out:
                continue  # a comment is not an answer: until the answer begins, another replica can take over
            elif self._accepted_drafts is not None and (found := self._accepted_drafts(event)) is not None:
                meter.accept(found.tokens)
                if not found.rest:
                    continue
                event = relay.rewriter.rewrite(found.rest)
            else:
                event = relay.rewriter.rewrite(event)
            out.append(relay.own_id(event) if relay.rid else event)
        if self._splitter.held > sse.SMALL_EVENT_BYTES:
            relay.holds(self._splitter.held)
        if not out:
            return b""
        reply = self._reply
        if reply.log is not None:
            for event in out:
                reply.log.event(event)
        if reply.spans is not None:
            for event in out:
                reply.spans.observe_answer(event)
        if self.events is not None:
            return self._translated(self.events, out)
        out.append(b"")
        return b"\n\n".join(out)

    def _translated(self, answer: AnswerEvents, chat: list[bytes]) -> bytes:
        """What becomes of a chat's events in the client's API."""
        if self._ended:
            return b""
        # Asked before: an event that is made and not sent would be missing among those that have numbers.
        self._relay.holds(answer.held_after(sum(map(len, chat))))
        out: list[bytes] = []
        for event in chat:
            if event == sse.DONE:
                out.append(answer.end())
                self._ended = True
            elif self._failure is not None and sse.is_error(event):
                out.append(answer.error(self._failure.failure(self._meter.id)))
                self._ended = True
            elif (chunk := sse.payload(event)) is not None:
                out.append(answer.chunk(chunk))
            if self._ended:
                break
        return b"".join(out)


def _choice(event: bytes) -> int:
    """The index of the answer that a chunk belongs to."""
    choices: object = (sse.payload(event) or {}).get("choices")
    first: object = cast(list[object], choices)[0] if isinstance(choices, list) and choices else None
    index: object = cast(dict[str, Any], first).get("index") if isinstance(first, dict) else None
    return index if isinstance(index, int) else 0


def engine_lost() -> ApiError:
    """For a client that has a part of the answer."""
    return ApiError(502, "The replica that was answering was lost; the answer is incomplete.", "replica_lost")
