"""The form of a transcription: the client's is read strictly, and the engine gets one that the gateway writes.

The engine's form has the known fields alone, a boundary that nobody can guess, and a file name that says the kind of
file; the client's name of the file goes nowhere. The audio is not copied: the engine's form has a view of it, so the
client's body is what is held.
"""

import secrets
from typing import Any, Final, NamedTuple, cast

from shoal.core.fields import multipart
from shoal.core.fields.check import FORWARDED
from shoal.core.fields.images import UnreadableError
from shoal.core.fields.kinds import FieldProblem
from shoal.core.fields.multipart import FILE, MultipartError, NotMultipart
from shoal.core.fields.recordings import TYPES, Recording, recording
from shoal.core.fields.table import TABLE, TRANSCRIBE
from shoal.core.fields.transcription import typed, unmeasured
from shoal.core.transcripts import TranscriptEvents
from shoal.gateway.body import Parsed
from shoal.gateway.dialects import Dialect
from shoal.gateway.upstream import PartedBody
from shoal.net.errors import ApiError

_KINDS: Final = {name: field.kind for name, field in TABLE[TRANSCRIBE].items() if name != FILE}
STREAM: Final = Dialect(
    TRANSCRIBE, dict, lambda answer, _: dict(answer), TranscriptEvents, lambda error, _: error.body()
)
"""Of streams alone: engines write chunks of a chat, and clients of OpenAI read its events of transcripts."""


class AudioForm(NamedTuple):
    """A form whose file was recognised. The audio is `raw[start:end]`."""

    parsed: Parsed
    recording: Recording
    start: int
    end: int


class EngineForm(NamedTuple):
    body: PartedBody
    content_type: str


def read(content_type: bytes | None, raw: bytes) -> AudioForm:
    """Reads the client's form. `checked` validates its fields, once the Model is known.

    Raises:
        ApiError: 415, it is no form; 400, with the field at fault in `param`.
    """
    try:
        form = multipart.parse(content_type, raw)
    except NotMultipart as error:
        raise ApiError(415, str(error), "unsupported_media_type") from None
    except MultipartError as error:
        raise ApiError(400, str(error), "invalid_form", param=error.param) from None
    fields = typed(form.texts, _KINDS)
    if isinstance(fields, FieldProblem):
        raise _refused(fields)
    name = fields.get("model")
    if not isinstance(name, str):
        raise ApiError(400, "You must provide `model`.", "missing_model", param="model")
    try:
        found = recording(memoryview(raw)[form.start : form.end])
    except UnreadableError as error:
        raise ApiError(400, f"`{FILE}` must be {error}.", "audio_not_supported", param=FILE) from None
    fields[FILE] = found
    if (problem := unmeasured(fields, found.milliseconds)) is not None:
        raise _refused(problem)
    streams = fields.get("stream") is True
    return AudioForm(
        Parsed(fields, name, streams, wants_usage=False, wants_continuous=False), found, form.start, form.end
    )


def engine_form(form: AudioForm, raw: bytes, engine_name: str) -> EngineForm:
    """The engine's form, with the engine's name of the model."""
    boundary = f"shoal-{secrets.token_hex(16)}"
    head: list[bytes] = []
    for name, value in (form.parsed.fields | {"model": engine_name}).items():
        if name == FILE or name not in FORWARDED[TRANSCRIBE]:
            continue
        for one in cast(list[Any], value) if isinstance(value, list) else (value,):
            text = str(one).lower() if isinstance(one, bool) else str(one)
            one_head = f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'
            head += (one_head.encode(), text.encode(), b"\r\n")
    kind = form.recording.kind
    head.append(
        f'--{boundary}\r\ncontent-disposition: form-data; name="{FILE}"; filename="audio.{kind}"\r\n'
        f"content-type: {TYPES[kind]}\r\n\r\n".encode()
    )
    body = PartedBody(b"".join(head), memoryview(raw)[form.start : form.end], f"\r\n--{boundary}--\r\n".encode())
    return EngineForm(body, f"multipart/form-data; boundary={boundary}")


def loggable(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields for the request log, which keeps no audio."""
    found = cast(Recording, fields[FILE])
    return fields | {FILE: f"[{TYPES[found.kind]}, {found.size} bytes, not logged]"}


def _refused(problem: FieldProblem) -> ApiError:
    return ApiError(400, problem.message, problem.code, param=problem.param)
