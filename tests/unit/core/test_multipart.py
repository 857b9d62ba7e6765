"""Forms with a file: what is read of them, and what is refused."""

import contextlib
import time

import pytest

from shoal.core.fields.multipart import MOST_PARTS, MOST_TEXT, MultipartError, NotMultipart, parse
from tests.support.recordings import BOUNDARY, TYPE, form, part

FILE = part("file", b"RIFF\r\n--\r\n", filename="a.wav", head="Content-Type: audio/wav\r\n")


def problem(raw: bytes, content_type: bytes | None = TYPE) -> str:
    with pytest.raises(MultipartError) as refused:
        parse(content_type, raw)
    return str(refused.value)


def test_texts_and_the_file() -> None:
    raw = form(part("model", "llama"), FILE, part("g[]", "word"), part("g[]", "segment"), part("empty", ""))
    found = parse(TYPE, raw)
    assert found.texts == {"model": ["llama"], "g[]": ["word", "segment"], "empty": [""]}
    assert raw[found.start : found.end] == b"RIFF\r\n--\r\n"


@pytest.mark.parametrize(
    "content_type",
    [
        b'multipart/form-data; boundary="' + BOUNDARY + b'"',
        b"Multipart/Form-Data;charset=utf-8;  boundary=" + BOUNDARY,
        b"multipart/form-data; boundary=" + BOUNDARY + b"; charset=utf-8",
    ],
)
def test_a_boundary_may_be_written_in_several_ways(content_type: bytes) -> None:
    assert parse(content_type, form(FILE)).end


@pytest.mark.parametrize(
    "content_type",
    [None, b"", b"application/json", b"text/plain; boundary=x", b"multipart/mixed; boundary=x", b"x" * 9999],
)
def test_another_content_type_is_no_form(content_type: bytes | None) -> None:
    with pytest.raises(NotMultipart):
        parse(content_type, form(FILE))


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=" + b"x" * 71,
        b'multipart/form-data; boundary="a\\"b"',
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=a b",
        b"multipart/form-data; boundary=\xff",
    ],
)
def test_no_valid_boundary(content_type: bytes) -> None:
    with pytest.raises(MultipartError) as refused:
        parse(content_type, form(FILE))
    assert not isinstance(refused.value, NotMultipart)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "does not begin with the boundary"),
        (b"preamble\r\n" + form(FILE), "does not begin with the boundary"),
        (form(), "You must provide `file`"),
        (form(part("model", "x")), "You must provide `file`"),
        (FILE, "incomplete"),
        (form(FILE)[:-4], "the end of its line"),
        (form(FILE)[:60], "no end of its headers"),
        (form(FILE)[:-30], "incomplete"),
        (form(FILE) + b"more", "follows the last boundary"),
        (form(FILE, FILE), "must have one file"),
        (form(part("other", b"x", filename="x")), "must have one file"),
        (form(part("file", b"x")), "You must provide `file`"),
        (form(part("file", b"x", filename='a"; name="model')), "parameter twice"),
        (form(part("file", b"x", filename="a\r\nX: y")), "not valid"),
        (
            form(part("file", b"x", head="Content-Type: multipart/mixed; boundary=y\r\n", filename="a")),
            "parts of its own",
        ),
        (form(part("file", b"x", head="Content-Transfer-Encoding: base64\r\n", filename="a")), "is encoded"),
        (form(part("file", b"x", head="X: y\r\n folded\r\n", filename="a")), "not valid"),
        (form(part("file", b"x", head="X: y\r\nx: z\r\n", filename="a")), "not valid"),
        (form(part("file", b"x", head="X\0: y\r\n", filename="a")), "not valid"),
        (form(part("file", b"x", head="".join(f"X-{n}: y\r\n" for n in range(9)), filename="a")), "not valid"),
        (form(part("file", b"x", head=f"X: {'y' * 3000}\r\n", filename="a")), "no end of its headers"),
        (form(*[part("a", "x")] * (MOST_PARTS + 1), FILE), f"more than {MOST_PARTS} parts"),
        (form(part("a", "x" * (MOST_TEXT + 1)), FILE), f"longer than {MOST_TEXT} bytes"),
        (form(part("a", b"\xff"), FILE), "not UTF-8"),
        (b"--" + BOUNDARY + b"\r\n\r\nx\r\n--" + BOUNDARY + b"--", "no end of its headers"),
        (b"--" + BOUNDARY + b"\r\nX: y\r\n\r\nx\r\n--" + BOUNDARY + b"--", "no Content-Disposition"),
        (
            b"--" + BOUNDARY + b"\r\nContent-Disposition: attachment; name=file\r\n\r\n\r\n--" + BOUNDARY,
            "no Content-Disp",
        ),
        (b"--" + BOUNDARY + b"\r\nContent-Disposition: form-data\r\n\r\nx\r\n--" + BOUNDARY + b"--", "has no name"),
    ],
)
def test_what_is_no_form_is_refused_with_a_reason(raw: bytes, says: str) -> None:
    assert says in problem(raw)


@pytest.mark.parametrize(
    "raw",
    [
        form(FILE).replace(b"RIFF", (b"\r\n--" + BOUNDARY[:-1]) * 500_000),
        form(*[part("a", "")] * 300_000),
        part("file", b"\r\n" * 4_000_000, filename="a"),
        b"--" + BOUNDARY + b"\r\n" + b"a:b\r\n" * 2_000_000,
    ],
)
def test_the_work_is_linear_in_the_body(raw: bytes) -> None:
    began = time.process_time()
    with contextlib.suppress(MultipartError):
        parse(TYPE, raw)
    assert time.process_time() - began < 1
