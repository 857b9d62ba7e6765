"""One conversation with Envoy's external processing filter, without I/O: what Envoy says becomes one request and one
answer, and what the gateway decides becomes Envoy's mutations, in the order that the protocol asks for.

Both bodies are FULL_DUPLEX_STREAMED: Envoy sends what arrives without waiting, and passes on only what it is sent back.
So a request reaches no replica before `forward`, and no byte of an answer reaches the client that was not sent here.

    REQUEST -> forward -> FORWARDED -> answer's head -> ANSWERED -> begin, part ... -> ENDED
       |                      |                            |
       +----------------------+----------------------------+-- refuse: an answer of the gateway itself
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, cast

Headers = Sequence[tuple[bytes, bytes]]

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, with the replica that the request goes to: `ip:port`."""
SERVED: Final = "x-gateway-destination-endpoint-served"
"""Key of the metadata with the endpoint that Envoy sent the request to."""
LOAD_BALANCING: Final = "envoy.lb"
"""Namespace of the metadata by which Envoy chooses an endpoint."""
SUBSET: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
MOST_HEADERS: Final = 256
MOST_SUBSET: Final = 4096
"""Endpoints of a subset that are read."""
PART_BYTES: Final = 60 * 1024
"""Bytes of one part of a body: Envoy recommends less than 64 KiB."""
_KEPT_OF_REQUEST: Final = frozenset(
    {b"host", b"connection", b"content-length", b"transfer-encoding", b"te", b"upgrade", b"expect", b"keep-alive"}
)
_KEPT_OF_ANSWER: Final = frozenset({b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"date"})
"""What belongs to the connection, and not to the message."""
_NOT_SET: Final = frozenset({b"host", b"connection", b"content-length", b"transfer-encoding"})


class ProtocolBroken(Exception):
    """Envoy said something that does not belong here: its filter is set up in another way, or it is no Envoy."""


# --- what Envoy says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str
    path: str
    """Without the query."""
    query: bytes
    headers: Headers
    """Without those of HTTP/2 that begin with a colon; `:authority` is `host`."""
    ended: bool
    """There is no body."""
    subset: frozenset[str] | None = None
    """The endpoints that Envoy would send the request to; None: it does not say."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    status: int
    headers: Headers
    ended: bool
    served: str | None = None
    """The endpoint that Envoy sent the request to; None: it does not say."""


# --- what goes to Envoy ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestMutation:
    """The head of the request to a replica."""

    endpoint: str
    set: Headers
    remove: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AnswerMutation:
    """The head of the answer to the client."""

    set: Headers
    remove: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BodyPart:
    """A part of a body: of the request's, else of the answer's."""

    of_request: bool
    data: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class TrailersRemoved:
    """Trailers came, and none of them goes on."""

    of_request: bool
    remove: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Immediate:
    """An answer of the gateway itself, instead of what comes from a replica."""

    status: int
    headers: Headers
    body: bytes


Message = RequestMutation | AnswerMutation | BodyPart | TrailersRemoved | Immediate


class State(Enum):
    REQUEST = auto()
    """The request has not left."""
    FORWARDED = auto()
    """A replica has the request; the head of its answer has not come."""
    ANSWERED = auto()
    """The head of the answer has come; the client has nothing yet."""
    ANSWERING = auto()
    """The client has the head of its answer."""
    ENDED = auto()
    """The client has all of it, or never will."""


class Conversation:
    """What was said, and what may be said next."""

    __slots__ = ("_answer_done", "_answer_names", "_names", "_request_done", "_trailers", "state")

    def __init__(self) -> None:
        self.state = State.REQUEST
        self._names: tuple[bytes, ...] = ()
        self._answer_names: tuple[bytes, ...] = ()
        self._trailers: dict[bool, tuple[bytes, ...]] = {}
        self._request_done = False
        self._answer_done = False

    # --- from Envoy -------------------------------------------------------------------------------------------------

    def request_head(self, raw: Headers, ended: bool, metadata: Mapping[str, object]) -> RequestHead:
        """The first message. Raises ProtocolBroken."""
        if self._names:
            raise ProtocolBroken("the head of the request came twice")
        plain, pseudo = _split(raw)
        method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        if not method or not path.startswith(b"/"):
            raise ProtocolBroken("a request without a method or a path")
        if (authority := pseudo.get(b":authority")) is not None and all(name != b"host" for name, _ in plain):
            plain = [(b"host", authority), *plain]
        # The order of the first ones is of no importance, so each name once is enough.
        self._names = (b":path", *dict.fromkeys(name for name, _ in plain))
        self._request_done = ended
        target, _, query = path.partition(b"?")
        return RequestHead(method.decode("latin-1"), target.decode("latin-1"), query, plain, ended, subset_of(metadata))

    def request_part(self, last: bool) -> None:
        """A part of the request's body came. Raises ProtocolBroken."""
        if not self._names or self._request_done:
            raise ProtocolBroken("a body where none is due")
        self._request_done = last

    def answer_head(self, raw: Headers, ended: bool, metadata: Mapping[str, object]) -> AnswerHead:
        """The head of an answer: of a replica, or of Envoy where it could not reach the replica. Raises
        ProtocolBroken."""
        if self.state is not State.FORWARDED:
            raise ProtocolBroken("an answer to a request that was not sent on")
        plain, pseudo = _split(raw)
        status = pseudo.get(b":status", b"")
        if not (status.isdigit() and len(status) == 3):
            raise ProtocolBroken("an answer without a status")
        self.state = State.ANSWERED
        self._answer_names = tuple(dict.fromkeys(name for name, _ in plain))
        self._answer_done = ended
        return AnswerHead(int(status), plain, ended, served_of(metadata))

    def answer_part(self, last: bool) -> None:
        """A part of the answer's body came. What was on its way when the gateway answered itself is of no use. Raises
        ProtocolBroken."""
        if self.state is State.ENDED:
            return
        if self.state is State.FORWARDED:
            raise ProtocolBroken("the body of an answer came without its head: response_header_mode has to be SEND")
        if self.state not in (State.ANSWERED, State.ANSWERING) or self._answer_done:
            raise ProtocolBroken("a part of an answer where none is due")
        self._answer_done = last

    def trailers(self, of_request: bool, raw: Headers) -> None:
        """A body has ended with trailers. Raises ProtocolBroken."""
        if of_request:
            self.request_part(last=True)
        else:
            self.answer_part(last=True)
        self._trailers[of_request] = tuple(dict.fromkeys(name for name, _ in _split(raw)[0]))

    @property
    def answer_comes(self) -> bool:
        """Part of the replica's answer has come, and the rest of it is awaited."""
        return self.state in (State.ANSWERED, State.ANSWERING) and not self._answer_done

    # --- to Envoy ---------------------------------------------------------------------------------------------------

    def forward(
        self, endpoint: str, path: str, headers: Headers, body: bytes, before: Iterable[bytes] = ()
    ) -> Iterator[Message]:
        """Sends the request on: with these headers and this body, and nothing of what the client sent. Once. `before`:
        parts of the body that come before `body`, made as they are sent."""
        if self.state is not State.REQUEST or not self._request_done:
            raise ProtocolBroken("a request is sent on once, and when all of it is here")
        self.state = State.FORWARDED
        wanted = [
            (b":path", path.encode()),
            (DESTINATION.encode(), endpoint.encode()),
            *((name, value) for name, value in headers if name not in _NOT_SET),
        ]
        yield RequestMutation(endpoint, wanted, _others(self._names, wanted, _KEPT_OF_REQUEST))
        for part in before:
            yield from self._parts(True, part, last=False)
        yield from self._parts(True, body, last=True)

    def refuse(self, status: int, headers: Headers, body: bytes) -> Iterator[Message]:
        """An answer of the gateway itself; possible until the client has the head of another one."""
        if self.state in (State.ANSWERING, State.ENDED):
            raise ProtocolBroken("the client has an answer already")
        self.state = State.ENDED
        yield Immediate(status, [pair for pair in headers if pair[0] not in _NOT_SET], body)

    def begin(self, status: int, headers: Headers) -> Iterator[Message]:
        """The head of the answer to the client, in place of the replica's."""
        if self.state is not State.ANSWERED:
            raise ProtocolBroken("an answer begins when the replica's has come, and once")
        self.state = State.ANSWERING
        wanted = [(b":status", b"%d" % status), *(pair for pair in headers if pair[0] != b"connection")]
        yield AnswerMutation(wanted, _others(self._answer_names, wanted, _KEPT_OF_ANSWER))

    def part(self, data: bytes, *, last: bool) -> Iterator[Message]:
        """A part of the answer's body."""
        if self.state is not State.ANSWERING:
            raise ProtocolBroken("a part belongs to an answer that has begun")
        if last:
            self.state = State.ENDED
        if data or last:
            yield from self._parts(False, data, last=last)

    def _parts(self, of_request: bool, data: bytes, *, last: bool) -> Iterator[Message]:
        trailers = self._trailers.get(of_request)
        at = 0
        while len(data) - at > PART_BYTES:
            yield BodyPart(of_request, data[at : at + PART_BYTES], False)
            at += PART_BYTES
        yield BodyPart(of_request, data[at:], last and trailers is None)
        if last and trailers is not None:
            yield TrailersRemoved(of_request, trailers)


def _others(names: tuple[bytes, ...], wanted: Headers, kept: frozenset[bytes]) -> tuple[bytes, ...]:
    """Names that came and that nothing replaces."""
    told = {name for name, _ in wanted}
    return tuple(name for name in names if name not in told and name not in kept)


def _split(raw: Headers) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    if len(raw) > MOST_HEADERS:
        raise ProtocolBroken(f"more than {MOST_HEADERS} headers")
    plain: list[tuple[bytes, bytes]] = []
    pseudo: dict[bytes, bytes] = {}
    for name, value in raw:
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            plain.append((name.lower(), value))
    return plain, pseudo


def subset_of(metadata: Mapping[str, object]) -> frozenset[str] | None:
    """The endpoints that Envoy would send the request to: `metadata` is what it has of the request, by namespace. A
    list that is not one of texts allows none: the protocol forbids to choose outside of it."""
    hint = metadata.get(SUBSET)
    if not isinstance(hint, Mapping) or SUBSET_KEY not in hint:
        return None
    listed = cast(Mapping[str, object], hint)[SUBSET_KEY]
    if isinstance(listed, str):
        listed = listed.split(",")
    if not isinstance(listed, Sequence):
        return frozenset()
    found = cast(Sequence[object], listed)[:MOST_SUBSET]
    return frozenset(each.strip() for each in found if isinstance(each, str) and each.strip())


def served_of(metadata: Mapping[str, object]) -> str | None:
    """The endpoint that Envoy sent the request to."""
    balancing = metadata.get(LOAD_BALANCING)
    served = cast(Mapping[str, object], balancing).get(SERVED) if isinstance(balancing, Mapping) else None
    return served if isinstance(served, str) and len(served) <= 256 else None


def endpoint(host: str, port: int) -> str:
    """An endpoint as the protocol writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
