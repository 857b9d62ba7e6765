"""The meter of one request: collects the content of its usage record, and builds the record's rows.

Rows are plain dicts, because two are built per request; a test validates them against `record.py`. Prompts, answers and
keys never get here.
"""

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.core.access import KeyIdentity
from shoal.core.fields.mediasize import AUDIO_TOKENS_PER_SECOND, NO_MEDIA, MediaSize
from shoal.core.hold.capacity import BYTES_PER_TOKEN
from shoal.core.quota.abandoned import is_exact
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedAdapter, ServedModel
from shoal.metering.record import EVENT_TYPE, CountSource, Outcome, RecordKind
from shoal.metering.spoolfile import Row

_MOST_SECONDS: Final = 10**6
KEEP_ALIVE_SECONDS: Final = 300.0
"""A request without new counts for this long writes a checkpoint nevertheless: the ledger closes the open requests of a
gateway that sends nothing."""


class Units(NamedTuple):
    """Units beside tokens."""

    documents: int = 0
    images: int = 0
    audio_ms: int = 0


NO_UNITS: Final = Units()
_UNITS: Final = ("documents", "images", "audioMs")
"""Fields of the record."""


class Meter:
    """Collects the usage of one accepted request."""

    __slots__ = (
        "_accepted",
        "_admitted",
        "_base",
        "_checkpointed_at",
        "_checkpoints",
        "_choices",
        "_estimate",
        "_estimated_answer",
        "_heard_ms",
        "_per_prompt",
        "_sent_at",
        "_source",
        "_started",
        "_tokens",
        "_usage",
        "_written",
        "adapter_missed",
        "attempts",
        "cold",
        "count_source",
        "deaths",
        "engine_boot",
        "first_byte",
        "free",
        "held_seconds",
        "id",
        "media",
        "model",
        "outcome",
        "repeated_bytes",
        "replica",
        "slot",
        "status",
        "tenant",
    )

    def __init__(
        self,
        id: str,
        source: str,
        identity: KeyIdentity,
        model: ServedModel,
        *,
        endpoint: str,
        model_name: str,
        stream: bool,
        client_request_id: str | None = None,
        gateway: str | None = None,
        route: str | None = None,
        mirror_of: str | None = None,
    ) -> None:
        self.id = id
        self.model = model.key
        self.tenant = identity.tenant
        self._source = source
        self._started = time.monotonic()
        self._usage: bytes | None = None
        self._accepted: int | None = None
        self._choices: dict[int, bytes] | None = None
        self._per_prompt = 1
        self._tokens: dict[str, int | None] | None = None
        self._estimate: int | None = 0
        self._estimated_answer: int | None = None
        self._heard_ms: int | None = None
        self.media = NO_MEDIA
        self.deaths = 0
        """Replicas that died while they had the request, of all its targets."""
        self.free = False
        """No model computes anything for the request."""
        self.repeated_bytes = 0
        """Bytes that the engine reads beyond those of the body."""
        self._checkpoints = 0
        self._written: object = "none"
        self._checkpointed_at = self._sent_at = self._started
        self.slot = 0
        """The meter's slot in `Checkpoints`."""
        self._admitted = admitted = datetime.now(UTC)
        self._base: dict[str, Any] = {
            "requestId": id,
            "tenant": identity.tenant,
            "keyName": identity.key_name,
            "gateway": gateway,
            "admittedAt": admitted,
            "endpoint": endpoint,
            "model": model.key,
            "modelRequested": model_name,
            "stream": stream,
        }
        # Unknown fields are left out: the row is smaller, and an absent field reads as None.
        if client_request_id is not None:
            self._base["clientRequestId"] = client_request_id
        if identity.external_id is not None:
            self._base["externalId"] = identity.external_id
        if identity.plan is not None:
            self._base["plan"] = identity.plan
        if route is not None:
            self._base["route"] = route
        if mirror_of is not None:
            self._base["mirrorOf"] = mirror_of
        if model.adapter is not None:
            self.use(model.adapter)
        self.adapter_missed: bool | None = None
        """No replica had the adapter loaded when the request came; None: it is for none, or that is unknown."""
        self.cold = False
        """The request came while its target had no replica yet, and one could come; or it is for an adapter that no
        replica had loaded, and waited for that."""
        self.outcome: Outcome | None = None
        self.status: int | None = None
        self.attempts = 0
        self.replica: Replica | None = None
        self.engine_boot: str | None = None
        self.first_byte: float | None = None
        self.held_seconds: float | None = None
        self.count_source: CountSource = "none"

    @property
    def fields(self) -> Mapping[str, Any]:
        """The record's fields that are known at admission."""
        return self._base

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def seconds_to_first_byte(self) -> float | None:
        return None if self.first_byte is None else self.first_byte - self._started

    @property
    def sent_at(self) -> float:
        """When the last replica got the request (time.monotonic)."""
        return self._sent_at

    @property
    def seconds_at_replica(self) -> float:
        """Seconds since the last replica got the request."""
        return time.monotonic() - self._sent_at

    def use(self, adapter: ServedAdapter) -> None:
        """Sets the adapter and its revision."""
        self._base["adapter"] = adapter.key
        self._base["adapterRevision"] = adapter.revision

    def reroute(self, model: ServedModel) -> None:
        """The request goes to another Model, because none of its former one's replicas took it."""
        self.forget_counts()
        self.model = self._base["model"] = model.key
        self._base.pop("adapter", None)
        self._base.pop("adapterRevision", None)
        if model.adapter is not None:
            self.use(model.adapter)
        self.outcome = self.status = self.adapter_missed = None
        self.cold = False

    def sees(self, media: MediaSize) -> None:
        """Sets the images and sounds in the request's messages."""
        self.media = media
        if media.images:
            self._base["images"] = media.images
        if media.sounds and media.sound_ms is not None:
            self._base["audioMs"], self._base["audioSource"] = media.sound_ms, "measured"

    def hears(self, most_seconds: float, milliseconds: int | None) -> None:
        """The request is audio to be transcribed. `most_seconds`: what a decoder makes of it at most; `milliseconds`:
        its length as measured, None where only the engine knows it. Tokens are not estimated."""
        self._heard_ms = math.ceil(most_seconds * 1000)
        if milliseconds is not None:
            self._base["audioMs"], self._base["audioSource"] = milliseconds, "measured"

    @property
    def heard_tokens(self) -> int:
        """What audio to be transcribed counts for in limits: engines read it as tokens of which they report none."""
        if self._heard_ms is None:
            return 0
        return self._tokens_of(self._base.get("audioMs", self._heard_ms))

    def read_bytes(self, body_bytes: int) -> int:
        """Bytes of text of which an engine would read about as much as of the request."""
        if self._heard_ms is not None:
            return self._tokens_of(self._heard_ms) * BYTES_PER_TOKEN
        if self.media is NO_MEDIA:
            return body_bytes + self.repeated_bytes
        return self.media.text_bytes(body_bytes) + self.repeated_bytes

    @staticmethod
    def _tokens_of(milliseconds: int) -> int:
        return milliseconds * AUDIO_TOKENS_PER_SECOND // 1000

    def reads(self, documents: int, repeated_bytes: int) -> None:
        """Sets the number of texts that the engine reads together with the query, and the bytes by which this makes the
        prompts longer than the body."""
        self._base["documents"] = documents
        self.repeated_bytes = repeated_bytes

    def sent(self, body_bytes: int) -> None:
        """Notes that a replica gets the request. Usage is estimated from its size until the engine reports counts."""
        self._estimate = None if self._heard_ms is not None else max(1, self.read_bytes(body_bytes) // BYTES_PER_TOKEN)
        self._sent_at = time.monotonic()
        self._tokens = self._estimated_answer = None
        self.count_source = "none" if self.free else "estimated"

    def not_taken(self) -> None:
        """Notes that the replica computed nothing: it was not reached, or it refused the request."""
        if self.count_source == "estimated":
            self.count_source = "none"
            self._tokens = None

    def estimate_answer(self, tokens: int) -> None:
        """Sets the estimated tokens of an answer whose sender counts none."""
        self._estimated_answer = tokens
        self._tokens = None

    def disbelieve(self) -> None:
        """Drops the sender's counts in favour of the estimate."""
        self._usage = self._choices = self._tokens = None
        self.count_source = "estimated"

    def count(self, usage: bytes, source: CountSource) -> None:
        """Stores the engine's usage block (JSON), to be parsed once at the end."""
        self._usage = usage
        self._tokens = None
        self.count_source = source
        if self._heard_ms is not None:
            self._hear(usage, self._heard_ms)

    def _hear(self, usage: bytes, most: int) -> None:
        """Takes the engine's seconds where nothing was measured, or where they are so different that the file is not
        what it says, or is damaged. Nothing is longer than a decoder can make it."""
        told, measured = _seconds(usage), self._base.get("audioMs")
        if told and (measured is None or abs(told * 1000 - measured) >= 2000):
            self._base["audioMs"], self._base["audioSource"] = min(told * 1000, most), "engine"
        elif measured is None:
            self.count_source = "estimated"

    def accept(self, tokens: int | None) -> None:
        """Sets the accepted tokens of drafts that the engine tells apart from its usage; None: it does not know."""
        self._accepted = tokens
        self._tokens = None

    def count_cancelled(self, usage: bytes) -> None:
        """Stores the usage of an answer that the engine ended because the client left, if it reports what was
        computed."""
        if is_exact(parse_usage(usage)["inputTokens"]):
            self.count(usage, "final")

    def count_choice(self, usage: bytes, choice: int, per_prompt: int) -> None:
        """Stores the usage of one of several streaming answers: engines count each answer separately until the closing
        block. `per_prompt` is the number of answers to each prompt, which share the prompt's tokens."""
        if self._choices is None:
            self._choices = {}
        self._choices[choice] = usage
        self._per_prompt = max(1, per_prompt)
        self.count(usage, "continuous")

    def forget_counts(self) -> None:
        """Drops the counts before another replica starts from the beginning."""
        self._usage = self._choices = self._tokens = self._accepted = None
        self.count_source = "none"
        self.replica = self.engine_boot = None

    def answer_began(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic()
        if self._heard_ms is not None and self.count_source == "estimated" and "audioMs" in self._base:
            # A stream of a transcript has no usage, and the engine has read the audio by now.
            self.count_source = "continuous"

    def units(self) -> Units:
        """What the request has besides tokens. Of audio to be transcribed whose length is not known, the most that it
        can be; of sounds of a chat whose length is not known, none, as on bills."""
        base = self._base
        if self._heard_ms is None and base.keys().isdisjoint(_UNITS):
            return NO_UNITS
        return Units(base.get("documents") or 0, base.get("images") or 0, base.get("audioMs", self._heard_ms) or 0)

    def units_read(self) -> Units:
        """What an engine has read of them, as bills count it; audio of an unknown length is none."""
        base = self._base
        if self.count_source == "none" or base.keys().isdisjoint(_UNITS):
            return NO_UNITS
        return Units(base.get("documents") or 0, base.get("images") or 0, base.get("audioMs") or 0)

    def tokens(self) -> dict[str, int | None]:
        """The counts so far; None where the engine reported nothing."""
        if self._tokens is None:
            if self.count_source == "none":
                return _NO_COUNTS
            if self._usage is None:
                self._tokens = {
                    **_NO_COUNTS,
                    "inputTokens": self._estimate,
                    "outputTokens": self._estimated_answer,
                }
            elif self._choices is not None and self.count_source == "continuous":
                self._tokens = sum_choices(self._choices, self._per_prompt)
            else:
                self._tokens = parse_usage(self._usage)
            if self._accepted is not None and self._usage is not None:
                accepted = _part(self._tokens["outputTokens"], self._accepted)
                self._tokens = {**self._tokens, "acceptedTokens": accepted}
        return self._tokens

    def open_row(self) -> Row:
        return self._row("open", f"{self.id}:open", _NO_COUNTS)

    def checkpoint_row(self) -> Row:
        self._checkpoints += 1
        return self._row("checkpoint", f"{self.id}:checkpoint:{self._checkpoints}", self.tokens())

    def next_checkpoint(self, now: float) -> Row | None:
        """A checkpoint if, at `now` (time.monotonic), counts are in no row yet or KEEP_ALIVE_SECONDS have passed."""
        state = self.count_source if self._usage is None else self._usage
        if state == self._written and now - self._checkpointed_at < KEEP_ALIVE_SECONDS:
            return None
        self._written, self._checkpointed_at = state, now
        return self.checkpoint_row()

    def attempt_row(self) -> Row:
        """The row of a failed attempt whose answer was not delivered; call it before `forget_counts`."""
        return self._row("attempt", f"{self.id}:attempt:{self.attempts}", self.tokens())

    def final_row(self) -> Row:
        if self._heard_ms is not None and self.count_source == "continuous":
            if self.outcome == "answered":
                self.count_source = "final"
            elif self.outcome == "failed":
                self.count_source = "estimated"  # an unknown part of the transcript is missing
        return self._row("final", f"{self.id}:final", self.tokens())

    def _row(self, kind: RecordKind, id: str, counts: dict[str, int | None]) -> Row:
        data: dict[str, Any] = self._base.copy()
        data["kind"] = kind
        data["countSource"] = self.count_source
        if kind == "attempt":
            data["attempt"] = self.attempts
        if kind != "open":
            data["attempts"] = self.attempts
            data["durationMs"] = milliseconds(time.monotonic() - self._started)
            if counts is not _NO_COUNTS:
                data |= {name: value for name, value in counts.items() if value is not None}
            if self.outcome is not None:
                data["outcome"] = self.outcome
            if self.status is not None:
                data["status"] = self.status
            if (replica := self.replica) is not None:
                data["replica"] = replica.key
                data["node"] = replica.node
                data["gpuClass"] = replica.gpu_class
                data["engineBoot"] = self.engine_boot
            if self.held_seconds is not None:
                data["holdMs"] = milliseconds(self.held_seconds)
            if self.first_byte is not None:
                data["ttftMs"] = milliseconds(self.first_byte - self._started)
        record = {
            "specversion": "1.0",
            "id": id,
            "source": self._source,
            "type": EVENT_TYPE,
            "subject": self._base["tenant"],
            "time": self._admitted if kind == "open" else datetime.now(UTC),
            "data": data,
        }
        return (id, self.id, kind, orjson.dumps(record))


def milliseconds(seconds: float) -> float:
    """With three decimals. Rounding to a whole number first is ten times as fast as `round(..., 3)`, which writes the
    number as text."""
    return round(seconds * 1_000_000) / 1000


_NO_COUNTS: Final[dict[str, int | None]] = {
    "inputTokens": None,
    "cachedTokens": None,
    "outputTokens": None,
    "reasoningTokens": None,
    "imageTokens": None,
    "audioTokens": None,
    "acceptedTokens": None,
}
_OF_THE_PROMPT: Final = ("inputTokens", "cachedTokens", "imageTokens", "audioTokens")
_OF_THE_ANSWER: Final = ("outputTokens", "reasoningTokens", "acceptedTokens")


def parse_usage(usage: bytes) -> dict[str, int | None]:
    """Counts of an engine's usage block; None where it has no value. SGLang reports cached tokens in the closing block,
    and for chat also while it streams. A part is never more than the whole."""
    try:
        decoded: object = orjson.loads(usage)
    except orjson.JSONDecodeError:
        return _NO_COUNTS
    if not isinstance(decoded, dict):
        return _NO_COUNTS
    # Every request comes through here: blocks rarely have more than the first of these details.
    block = cast("dict[str, object]", decoded)
    whole, output = _number(block.get("prompt_tokens")), _number(block.get("completion_tokens"))
    reasoning = _number(block.get("reasoning_tokens"))
    cached = image = audio = accepted = None
    if details := _details(block.get("prompt_tokens_details")):
        cached = _part(whole, _number(details.get("cached_tokens")))
        if len(details) > 1 or cached is None:
            image, audio = _part(whole, _of_medium(details, "image")), _part(whole, _of_medium(details, "audio"))
    if details := _details(block.get("completion_tokens_details")):
        if reasoning is None:
            reasoning = _number(details.get("reasoning_tokens"))
        accepted = _part(output, _number(details.get("accepted_prediction_tokens")))
    return {
        "inputTokens": whole,
        "cachedTokens": cached,
        "outputTokens": output,
        "reasoningTokens": reasoning,
        "imageTokens": image,
        "audioTokens": audio,
        "acceptedTokens": accepted,
    }


def _part(whole: int | None, part: int | None) -> int | None:
    return part if part is None or whole is None else min(part, whole)


def _seconds(usage: bytes) -> int | None:
    """Seconds of audio of an engine's usage block, which are rounded up. None: it has none."""
    try:
        decoded: object = orjson.loads(usage)
    except orjson.JSONDecodeError:
        return None
    value = cast("dict[str, object]", decoded).get("seconds") if isinstance(decoded, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return math.ceil(value) if 0 <= value <= _MOST_SECONDS else None


def sum_choices(choices: Mapping[int, bytes], per_prompt: int) -> dict[str, int | None]:
    """Sum of the counts of concurrent answers, by index: each prompt counts once, and each answer adds its own
    tokens."""
    total: dict[str, int | None] = dict.fromkeys(_NO_COUNTS, 0)
    prompts: set[int] = set()
    for index, usage in sorted(choices.items()):
        counts = parse_usage(usage)
        names = _OF_THE_ANSWER
        if (prompt := index // per_prompt) not in prompts:
            prompts.add(prompt)
            names = _OF_THE_ANSWER + _OF_THE_PROMPT
        for name in names:
            so_far, more = total[name], counts[name]
            total[name] = None if so_far is None or more is None else so_far + more
    return total


def _number(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None  # the exact type: True is no number


def _details(value: object) -> dict[str, object] | None:
    return cast("dict[str, object]", value) if type(value) is dict else None


def _of_medium(details: dict[str, object], medium: str) -> int | None:
    """Tokens of images or sounds. Engines say `image_tokens`, or `multimodal_tokens` by medium."""
    found = _number(details.get(f"{medium}_tokens"))
    if found is None and (of_media := _details(details.get("multimodal_tokens"))):
        found = _number(of_media.get(medium))
    return found
