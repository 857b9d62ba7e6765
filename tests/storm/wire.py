"""One request as the `openai` SDK puts it on the wire, and every way in which it can end, told apart.

Raw HTTP/1.1 by h11: a client library would retry, pool and paper over exactly what is to be seen.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import h11
import orjson

from tests.storm import apis
from tests.storm.plan import STREAMS, Ask, attacked_field

RawOutcome = Literal["answered", "refused", "cancelled", "failed", "broken", "lost"]
"""As the client saw it. broken: the connection ended without a word; the other journals tell whether it was cut."""
_CONNECT_SECONDS: Final = 5.0
_REACH_SECONDS: Final = 90.0
"""How long a client goes on dialling when nobody listens: nothing was accepted yet, and every SDK tries again."""
_DIALS: Final = 64
"""At a time: a thousand clients that all dial at once would keep each other from it."""
_IDLE_SECONDS: Final = 4.0
"""As httpx: connections that were idle longer are not used again."""
ANSWER_SECONDS: Final = 300.0
"""Longer than any hold, drain and stall of the storm: whoever waits so long was forgotten."""
_CHUNK: Final = 65536
_RETRY_AFTER_MAX: Final = 60
LOST_TWICE: Final = "replica_lost_twice"
"""What a gateway says of a request under which two replicas died; the judge wants to see both kills."""
_LOST_TWICE_TEXT: Final = "Two replicas were lost while they had this request"


@dataclass(slots=True)
class End:
    """How one try ended. Times are Unix seconds."""

    outcome: RawOutcome
    why: str
    status: int | None = None
    first: float | None = None
    """When the first byte of the answer itself came; comments of a held stream are none."""
    head: float | None = None
    gateway_id: str | None = None
    comments: int = 0
    text: str = ""
    usage: tuple[int, int] | None = None
    """Prompt and answer tokens, where the answer says them."""
    weights: tuple[str, ...] = ()
    """Whose words a whole answer has: names of adapters, or "" for the base; short ones may be of several."""


@dataclass(slots=True)
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    idle_since: float = 0.0
    used: int = 0

    @property
    def port(self) -> int:
        return self.writer.get_extra_info("sockname")[1]

    def hang_up(self) -> None:
        self.writer.transport.abort()


@dataclass(slots=True)
class Clients:
    """Connections to the gateways' Service, kept as an HTTP client keeps them. With `others` each new one goes to the
    next address, as a Service spreads them."""

    host: str
    port: int
    key: str
    others: tuple[tuple[str, int], ...] = ()
    _idle: deque[Wire] = field(default_factory=deque[Wire])
    _dialling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_DIALS))
    dials_failed: int = 0
    _turn: int = 0

    async def wire(self, reuse: bool) -> Wire | None:
        """A connection; None when nobody could be reached for _REACH_SECONDS."""
        while reuse and self._idle:
            wire = self._idle.pop()
            if time.monotonic() - wire.idle_since < _IDLE_SECONDS and not wire.reader.at_eof():
                return wire
            wire.hang_up()
        began, pause = time.monotonic(), 0.25
        while True:
            addresses = ((self.host, self.port), *self.others)
            self._turn += 1
            host, port = addresses[self._turn % len(addresses)]
            try:
                async with self._dialling, asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(host, port)
                return Wire(reader, writer, h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20))
            except (OSError, TimeoutError):
                self.dials_failed += 1
                if time.monotonic() - began > _REACH_SECONDS:
                    return None
                pause = min(2 * pause, 4.0)
                await asyncio.sleep(pause)

    def keep(self, wire: Wire) -> None:
        """Puts a connection back if HTTP allows to use it again."""
        if wire.http.our_state is h11.DONE and wire.http.their_state is h11.DONE:
            wire.http.start_next_cycle()
            wire.idle_since = time.monotonic()
            wire.used += 1
            self._idle.append(wire)
            while len(self._idle) > 64:
                self._idle.popleft().hang_up()
        else:
            wire.hang_up()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().hang_up()

    def head(self, ask: Ask, attempt_id: str, length: int) -> h11.Request:
        return h11.Request(
            method="POST",
            target=ask.path,
            headers=[
                ("host", f"{self.host}:{self.port}"),
                ("accept", "application/json"),
                ("accept-encoding", "identity"),
                ("connection", "keep-alive"),
                ("content-type", "application/json"),
                ("user-agent", "OpenAI/Python 2.0.0"),
                ("x-stainless-lang", "python"),
                ("x-stainless-retry-count", "0"),
                ("authorization", f"Bearer {self.key}"),
                ("x-request-id", attempt_id),
                ("content-length", str(length)),
            ],
        )


async def exchange(clients: Clients, wire: Wire, ask: Ask, attempt_id: str, on_first: Callable[[End], None]) -> End:
    """Sends the request and reads to the end of the answer, or leaves when the plan says so. Never raises OSError."""
    end = End("lost", "nothing came")
    try:
        async with asyncio.timeout(ask.leave_after if ask.leave_after is not None else ANSWER_SECONDS):
            await _exchange(clients, wire, ask, attempt_id, end, on_first)
    except TimeoutError:
        wire.hang_up()
        if ask.leave_after is not None:
            end.outcome, end.why = "cancelled", f"left after {ask.leave_after:.2f} s"
        else:
            end.outcome, end.why = "lost", f"no end within {ANSWER_SECONDS:.0f} s"
        return end
    except (OSError, h11.RemoteProtocolError) as error:
        wire.hang_up()
        phase = "before the answer" if end.head is None else "while held" if end.first is None else "in the answer"
        end.outcome, end.why = "broken", f"{phase}: {type(error).__name__}: {error}"
        return end
    clients.keep(wire)
    return end


async def _exchange(
    clients: Clients, wire: Wire, ask: Ask, attempt_id: str, end: End, on_first: Callable[[End], None]
) -> None:
    body = ask.body()
    data = wire.http.send(clients.head(ask, attempt_id, len(body))) or b""
    data += wire.http.send(h11.Data(data=body)) or b""
    data += wire.http.send(h11.EndOfMessage()) or b""
    wire.writer.write(data)
    await wire.writer.drain()
    response: h11.Response | None = None
    events = Events()
    parts: list[bytes] = []
    while True:
        event = wire.http.next_event()
        if event is h11.NEED_DATA:
            received = await wire.reader.read(_CHUNK)
            if not received and response is None:
                raise ConnectionResetError("closed without a word")
            wire.http.receive_data(received)
        elif isinstance(event, h11.Response):
            response, end.head, end.status = event, time.time(), event.status_code
            end.gateway_id = header(response, b"x-shoal-request-id")
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
            if events.feed(bytes(event.data)) and end.first is None:
                end.first = time.time()
                on_first(end)
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            raise ConnectionResetError("closed without a word")
    if response is None:
        raise ConnectionResetError("no response")
    end.comments = events.comments
    judge(end, ask, b"".join(parts), events, header(response, b"retry-after"))


def header(response: h11.Response, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in response.headers if key == name), None)


class Events:
    """Server-sent events, as far as they matter: data, errors, comments. JSON bodies count as content at once."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.comments = 0
        self._rest = b""
        self._json: bool | None = None

    def feed(self, raw: bytes) -> bool:
        """Whether something of the answer itself has come (an error event is none)."""
        if self._json is None:
            self._json = raw[:1] in (b"{", b"[")
        if self._json:
            return True
        *lines, self._rest = (self._rest + raw).split(b"\n")
        content = False
        for line in lines:
            if line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"data:"):
                payload = line[5:].strip()
                self.data.append(payload)
                content = content or not payload.startswith((b'{"error"', b'{"type":"error"'))
        return content


def judge(end: End, ask: Ask, raw: bytes, events: Events, retry_after: str | None) -> None:
    """What a whole answer means. Sets outcome and why."""
    status = end.status
    if status in (429, 503):
        good = retry_after is not None and retry_after.isdigit() and 1 <= int(retry_after) <= _RETRY_AFTER_MAX
        end.outcome, end.why = ("refused", _message(raw)) if good else ("lost", f"{status}, Retry-After {retry_after}")
    elif ask.kind == "wrong":
        end.outcome = "answered" if status == 400 else "lost"
        end.why = "the engine's own 400" if status == 400 else f"{status} where the engine says 400: {_message(raw)}"
    elif ask.kind == "attack":
        field, refused = attacked_field(ask), _error(raw).get("param")
        end.outcome = "answered" if (status, refused) == (400, field) else "lost"
        end.why = f"{status}, which names {refused!r}, where the gateway refuses {field!r} with 400"
    elif status == 502 and _lost_twice(_error(raw)):
        end.outcome, end.why = "failed", LOST_TWICE
    elif status != 200:
        end.outcome, end.why = "lost", f"{status}: {_message(raw)}"
    elif ask.kind in STREAMS:
        _judge_stream(end, ask, events)
    else:
        try:
            said = apis.whole(ask.kind, orjson.loads(raw))
            end.text, end.usage = said.text, said.usage
        except (orjson.JSONDecodeError, LookupError, TypeError):
            end.outcome, end.why = "lost", f"no answer in the body: {raw[:200]!r}"
        else:
            end.outcome, end.why = "answered", ""


def _judge_stream(end: End, ask: Ask, events: Events) -> None:
    done = False
    for payload in events.data:
        if payload == b"[DONE]":
            done = True
            continue
        try:
            chunk: dict[str, Any] = orjson.loads(payload)
        except orjson.JSONDecodeError:
            end.outcome, end.why = "lost", f"an event that is no JSON: {payload[:200]!r}"
            return
        if (error := apis.error_in(chunk)) is not None:
            wait = error.get("retry_after")
            if end.first is None and isinstance(wait, int) and 1 <= wait <= _RETRY_AFTER_MAX:
                end.outcome, end.why = "refused", str(error.get("message"))
            elif end.first is None and _lost_twice(error):
                end.outcome, end.why = "failed", LOST_TWICE
            elif end.first is None:
                end.outcome, end.why = "lost", f"an error event before the answer, retry_after {wait}: {payload!r}"
            else:
                end.outcome, end.why = "failed", str(error.get("message"))
            return
        said = apis.heard(ask.kind, chunk)
        end.text += said.text
        end.usage = said.usage or end.usage
        done = done or said.done
    if done:
        end.outcome, end.why = "answered", ""
    else:
        end.outcome, end.why = "broken", "the stream ended in good order, but without its last event"


def _error(raw: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return dict(orjson.loads(raw)["error"])
    return {}


def _lost_twice(error: Mapping[str, Any]) -> bool:
    """Anthropic's errors have no code."""
    return error.get("code") == LOST_TWICE or str(error.get("message")).startswith(_LOST_TWICE_TEXT)


def _message(raw: bytes) -> str:
    return str(_error(raw).get("message") or repr(raw[:200]))
