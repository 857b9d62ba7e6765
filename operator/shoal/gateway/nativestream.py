"""The events of a streamed answer of an API that an external target serves itself, on their way to the client."""

from collections.abc import Callable
from typing import Final, Protocol

import orjson

from shoal.core.nativeapi import NativeApi, NativeEvents
from shoal.core.routing.external import Cause, cause_of, status_of_event
from shoal.gateway import sse
from shoal.gateway.externalwire import DECLINED
from shoal.gateway.reply import Reply
from shoal.metering.meter import Meter
from shoal.net import errors

_BYTES_PER_TOKEN: Final = 4


class Relay(Protocol):
    """What an answer's relay knows."""

    answering: bool
    cause: Cause | None

    def holds(self, size: int) -> None:
        """Counts bytes of the answer in memory. Raises ApiError."""
        ...


class BrokenStream(Exception):
    """What arrived is no event of this API, or an error before the first event."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NativeStream:
    """Names the client's model in the events, counts, and replaces errors. Events with no name are passed on as they
    are."""

    __slots__ = ("_meter", "_relay", "_reply", "_splitter", "_written", "done", "events", "failed")

    def __init__(self, relay: Relay, api: NativeApi, model_name: str, meter: Meter, reply: Reply) -> None:
        self._relay, self._meter, self._reply = relay, meter, reply
        self._splitter = sse.Splitter(sse.MAX_EXTERNAL_EVENT_BYTES)
        self.events: NativeEvents = api.events(model_name)
        self._written = 0
        self.done = False
        self.failed = False

    def taker(self, part: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """A function that edits what arrived and writes it with `part`. False: wait until the client takes more."""

        def take(data: bytes) -> bool:
            out = self.edited(data)
            return part(out) if out else True

        return take

    def edited(self, data: bytes) -> bytes:
        """What the client gets of the bytes that arrived.

        Raises:
            BrokenStream: nothing of it may go to the client.
            EventTooLarge: an event does not end.
            ApiError: it takes more memory than there is for answers.
        """
        out: list[bytes] = []
        for event in self._splitter.feed(data):
            if self.done or self.failed:
                break
            if event.startswith(b":"):
                if self._relay.answering or out:
                    out.append(event)
                continue
            if (edited := self._one(event, first=not self._relay.answering and not out)) is not None:
                out.append(edited)
        if self._splitter.held > sse.SMALL_EVENT_BYTES:
            self._relay.holds(self._splitter.held)
        if not out:
            return b""
        out.append(b"")
        return b"\n\n".join(out)

    def _one(self, event: bytes, *, first: bool) -> bytes | None:
        decoded = sse.payload(event)
        if decoded is None:
            if b"data:" not in event:
                return None  # by the format, no event
            if sse.is_done(event):
                return None  # some say so after the last event
            raise BrokenStream("lost")
        events, reply = self.events, self._reply
        try:
            changed, text = events.take(decoded)
            kind = decoded.get("type")
            edited = sse.written(kind, decoded) if changed and isinstance(kind, str) else event
        except orjson.JSONEncodeError:
            raise BrokenStream("lost") from None
        self.done, self.failed = events.complete, events.failed or _is_error(decoded)
        if self.failed:
            self._relay.cause = cause = cause_of(status_of_event(decoded))
            if first:
                raise BrokenStream("unavailable" if cause == "target" else DECLINED)
        self._count(text)
        if reply.log is not None and (text or events.complete):
            reply.log.wrote(text, events.finish)
        if reply.spans is not None and events.complete and events.finish is not None:
            reply.spans.observe_answer(orjson.dumps({"finish_reason": events.finish}))
        # The provider's own words about its failure are not for clients.
        if self.failed:
            return events.error(errors.external_broken().failure(self._meter.id)).rstrip(b"\n")
        return edited

    def _count(self, text: str) -> None:
        """The provider's counts where the answer is complete. Until then it may have written more than it has counted,
        so the answer is estimated from its text."""
        meter, events = self._meter, self.events
        self._written += len(text.encode(errors="surrogatepass"))
        meter.estimate_answer(self.tokens)
        usage = events.usage
        if usage is None:
            return
        if events.complete:
            meter.count(orjson.dumps(usage), "final")
            return
        usage["completion_tokens"] = max(usage["completion_tokens"], self.tokens)
        meter.count(orjson.dumps(usage), "estimated")

    @property
    def tokens(self) -> int:
        """Estimated tokens of the answer so far."""
        return -(-self._written // _BYTES_PER_TOKEN)


def _is_error(event: dict[str, object]) -> bool:
    """Whether an event has the shape of a chat's error, which some write into the stream of any API."""
    return "type" not in event and isinstance(event.get("error"), dict)
