"""A `multipart/form-data` body (RFC 7578) with one file: its texts, and where the file is.

Strict, because two readers of one body must not understand it differently: the gateway writes what engines get anew.
Nothing is copied but the texts. The work is linear in the body, whatever the boundary is.
"""

import re
from dataclasses import dataclass
from typing import Final

FILE: Final = "file"
MOST_PARTS: Final = 32
MOST_HEAD: Final = 2_048
"""Bytes of a part's headers."""
MOST_HEADERS: Final = 8
MOST_TEXT: Final = 65_536
"""Bytes of a text."""
_MOST_TYPE: Final = 512
"""Bytes of the header `Content-Type` of the request."""
_REST: Final = 1_024
"""Bytes after the last boundary."""
_TYPE: Final = re.compile(rb"\s*multipart/form-data\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_PARAMETER: Final = re.compile(rb'\s*;\s*([A-Za-z0-9_*-]{1,32})=(?:"((?:[^"\\\r\n]|\\[^\r\n])*)"|([^\s";,]+))')
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER: Final = re.compile(rb"([A-Za-z0-9-]{1,64}):[ \t]*([^\0\r\n]*)")
_AS_IT_IS: Final = (b"", b"7bit", b"8bit", b"binary")


class MultipartError(Exception):
    """Why a body is refused, as a sentence. `param`: the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotMultipart(MultipartError):
    """The request's `Content-Type` is another one."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form. The file is `raw[start:end]`."""

    texts: dict[str, list[str]]
    """By name, in the order of the body."""
    start: int
    end: int


def parse(content_type: bytes | None, raw: bytes) -> Form:
    """Reads a body with exactly one file, named `file`.

    Raises:
        MultipartError: it is not such a form, or exceeds a bound.
        NotMultipart: it is no form at all.
    """
    delimiter = b"\r\n--" + _boundary(content_type)
    if not raw.startswith(delimiter[2:]):
        raise MultipartError("The body does not begin with the boundary of its Content-Type.")
    texts: dict[str, list[str]] = {}
    file: tuple[int, int] | None = None
    at = len(delimiter) - 2
    for _ in range(MOST_PARTS + 1):
        if raw.startswith(b"--", at):
            if raw[at + 2 : at + 3 + _REST].strip():
                raise MultipartError("Something follows the last boundary of the body.")
            if file is None:
                raise MultipartError(f"You must provide `{FILE}`.", FILE)
            return Form(texts, *file)
        name, is_file, start = _part(raw, at)
        end = raw.find(delimiter, start)
        if end < 0:
            raise MultipartError("The body is incomplete: it has no last boundary.")
        if not is_file:
            texts.setdefault(name, []).append(_text(raw, start, end, name))
        elif name != FILE or file is not None:
            raise MultipartError(f"The body must have one file, named `{FILE}`.", name[:64])
        else:
            file = start, end
        at = end + len(delimiter)
    raise MultipartError(f"The body has more than {MOST_PARTS} parts.")


def _boundary(content_type: bytes | None) -> bytes:
    given = content_type or b""
    found = _TYPE.fullmatch(given) if len(given) <= _MOST_TYPE else None
    if found is None:
        raise NotMultipart("This endpoint takes a form: send it as multipart/form-data.")
    boundary = _parameters(found[1] or b"").get("boundary", b"")
    if _BOUNDARY.fullmatch(boundary) is None:
        raise MultipartError("The Content-Type has no valid boundary.")
    return boundary


def _parameters(text: bytes) -> dict[str, bytes]:
    """Parameters of a header. Raises MultipartError where one is there twice, or is none."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(text):
        one = _PARAMETER.match(text, at)
        if one is None:
            if text[at:].strip(b" \t;"):
                raise MultipartError("A header of the form is not valid.")
            break
        name = one[1].decode().lower()
        if name in found:
            raise MultipartError("A header of the form has a parameter twice.")
        found[name] = one[3] if one[2] is None else one[2]
        at = one.end()
    return found


def _part(raw: bytes, at: int) -> tuple[str, bool, int]:
    """(name, whether it is a file, first byte of its content) of the part whose boundary ends at `at`."""
    if not raw.startswith(b"\r\n", at):
        raise MultipartError("A boundary in the body is not followed by the end of its line.")
    stop = raw.find(b"\r\n\r\n", at + 2, at + MOST_HEAD)
    if stop < 0:
        raise MultipartError(f"A part of the body has no end of its headers within {MOST_HEAD} bytes.")
    headers: dict[bytes, bytes] = {}
    lines = raw[at + 2 : stop].split(b"\r\n")
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None or header[1].lower() in headers or len(lines) > MOST_HEADERS:
            raise MultipartError("The headers of a part of the body are not valid.")
        headers[header[1].lower()] = header[2].strip()
    if headers.get(b"content-type", b"").lower().startswith(b"multipart/"):
        raise MultipartError("A part of the body has parts of its own, which is not accepted.")
    if headers.get(b"content-transfer-encoding", b"").lower() not in _AS_IT_IS:
        raise MultipartError("A part of the body is encoded, which is not accepted: send it as it is.")
    kind, _, rest = headers.get(b"content-disposition", b"").partition(b";")
    if kind.strip().lower() != b"form-data":
        raise MultipartError("A part of the body has no Content-Disposition of form-data.")
    parameters = _parameters(b";" + rest)
    name = parameters.get("name")
    if name is None:
        raise MultipartError("A part of the body has no name.")
    return name.decode("utf-8", "replace"), "filename" in parameters or "filename*" in parameters, stop + 4


def _text(raw: bytes, start: int, end: int, name: str) -> str:
    if end - start > MOST_TEXT:
        raise MultipartError(f"`{name[:64]}` is longer than {MOST_TEXT} bytes.", name[:64])
    try:
        return raw[start:end].decode()
    except UnicodeDecodeError:
        raise MultipartError(f"`{name[:64]}` is not UTF-8.", name[:64]) from None
