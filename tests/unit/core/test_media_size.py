"""About how many tokens the images and sounds of a chat are."""

from base64 import b64encode
from typing import Any

import pytest

from shoal.core.fields import mediasize
from shoal.core.fields.media import MOST_MEDIA
from shoal.core.fields.mediasize import (
    BYTES_PER_PAGE,
    LEAST_IMAGE_TOKENS,
    MOST_IMAGE_TOKENS,
    MOST_PAGES,
    NO_MEDIA,
    PAGE_TOKENS,
    MediaSize,
    media_size,
)
from shoal.core.fields.recordings import recording
from tests.support import recordings
from tests.support.pictures import data_url, jpeg_segment, made, mp3, png, wav


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, *parts]}]}


def tokens(*parts: Any) -> int:
    return media_size(chat(*parts)).tokens


@pytest.mark.parametrize(("width", "height", "engine"), [(1000, 800, 1044), (1400, 1120, 2000)])
def test_an_image_counts_about_as_an_engine_counts_it(width: int, height: int, engine: int) -> None:
    """Qwen2-VL on SGLang counted 1,044 tokens for 1,000 x 800 pixels."""
    assert tokens(image(data_url("image/png", png(width, height)))) == pytest.approx(engine, rel=0.05)


def test_the_bytes_of_a_file_do_not_count() -> None:
    loud = made("JPEG", 800, 700, quality=95)
    dark = png(800, 700)
    assert len(loud) > 100 * len(dark)
    assert tokens(image(data_url("image/jpeg", loud))) == tokens(image(data_url("image/png", dark))) == 714


def test_small_and_huge_images_are_bounded_as_processors_bound_them() -> None:
    assert tokens(image(data_url("image/png", png(8, 6)))) == LEAST_IMAGE_TOKENS
    assert tokens(image(data_url("image/png", png(8000, 4000)))) == MOST_IMAGE_TOKENS


@pytest.mark.parametrize("lengths", [(3_000,), (20_000,), (60_000, 60_000)])
def test_a_size_behind_long_notes_of_a_camera_is_found(lengths: tuple[int, ...]) -> None:
    """The first kilobytes end within the notes, or within what follows them."""
    plain = made("JPEG", 800, 700)
    noted = plain[:2] + b"".join(jpeg_segment(0xE2, bytes(length)) for length in lengths) + plain[2:]
    assert tokens(image(data_url("image/jpeg", noted))) == 714


def test_frames_that_move_count_as_one_image() -> None:
    assert tokens(image(data_url("image/gif", made("GIF", 800, 700, frames=3)))) == 714


def test_a_second_of_sound_is_fifty_tokens() -> None:
    data = data_url("audio/wav", wav(3.0))
    sound = {"type": "input_audio", "input_audio": {"data": data.partition(",")[2], "format": "wav"}}
    assert tokens(sound, {"type": "audio_url", "audio_url": {"url": data}}) == 300


def sound(data: bytes, kind: str = "audio/wav") -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(kind, data)}}


@pytest.mark.parametrize(
    ("parts", "milliseconds"),
    [
        ([], 0),
        ([image(data_url("image/png", png(8, 6)))], 0),
        ([sound(wav(0.0005))], 1),
        ([sound(wav(1.25)), image(data_url("image/png", png(8, 6))), sound(mp3(10), "audio/mpeg")], 1_490),
        ([sound(recordings.wav(2.0, stated=32_000))], 1_000),
        ([sound(wav(1.0) + b"LIST\x04\0\0\0note")], 1_000),
        ([sound(mp3(10) + b"TAG" + bytes(125), "audio/mp3")], 240),
        # Of one of them it is not known how long it is.
        ([sound(wav(1.0)), {"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}], None),
        ([sound(b"RIFF"), sound(wav(1.0))], None),
        ([sound(wav(1.0)), sound(b"OggS", "audio/ogg")], None),
        ([sound(wav(1.0), "audio/mpeg")], None),
        ([sound(wav(1.0) + b"data\x02\0\0\0ab")], None),
        ([*[image(data_url("image/png", png(8, 6)))] * MOST_MEDIA, sound(wav(1.0))], None),
    ],
)
def test_sounds_are_as_long_as_what_they_play(parts: list[Any], milliseconds: int | None) -> None:
    assert media_size(chat(*parts)).sound_ms == milliseconds


@pytest.mark.parametrize("data", [recordings.wav(2.0, stated=32_000), recordings.wav(0.3331), mp3(7)])
def test_a_sound_of_a_chat_is_as_long_as_the_same_to_be_transcribed(data: bytes) -> None:
    kind = "audio/wav" if data.startswith(b"RIFF") else "audio/mpeg"
    assert media_size(chat(sound(data, kind))).sound_ms == recording(data).milliseconds


def file(data: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data}}


def pdf(pages: int, size: int = 0) -> bytes:
    page = b"%d 0 obj\n<< /Type /Page /Parent 2 0 R >>\nendobj\n"
    return (
        b"%PDF-1.4\n2 0 obj\n<</Type/Pages/Count 1>>\nendobj\n" + page * pages % (*range(3, 3 + pages),) + bytes(size)
    )


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (data_url("application/pdf", pdf(3)), 3 * PAGE_TOKENS),
        # A page that was scanned, and a book.
        (data_url("application/pdf", pdf(1, 5_000_000)), PAGE_TOKENS),
        (data_url("application/pdf", pdf(700)), MOST_PAGES * PAGE_TOKENS),
        (b64encode(pdf(2)).decode(), 2 * PAGE_TOKENS),
        # Pages that are compressed with others, and other files.
        (data_url("application/pdf", pdf(0, BYTES_PER_PAGE * 8)), 8 * PAGE_TOKENS),
        (data_url("application/pdf", pdf(0, BYTES_PER_PAGE * 500)), MOST_PAGES * PAGE_TOKENS),
        (data_url("application/zip", bytes(BYTES_PER_PAGE * 2)), 2 * PAGE_TOKENS),
        ("data:application/pdf;base64,JVBERi&", PAGE_TOKENS),
        ("", PAGE_TOKENS),
        (data_url("text/csv", b"1,2,3,4\n" * 1_000), 2_000),
    ],
)
def test_a_file_counts_by_its_pages_and_not_by_its_base64(data: str, found: int) -> None:
    size = media_size(chat(file(data)))
    assert (size.tokens, size.files, size.images, size.sounds) == (found, 1, 0, 0)
    assert size.characters == len(data.rpartition(",")[2])


PAGE = b"9 0 obj\n<</Type/Page/Parent 2 0 R>>\nendobj\n"


@pytest.mark.parametrize(
    ("data", "least", "most"),
    [
        # An image of 4 MiB, and then its page.
        (pdf(0, 1 << 22) + PAGE, 1, 1),
        # A page for each 64 KiB, and all of them at one end.
        (pdf(0) + (PAGE + bytes(1 << 16)) * 90, 80, 95),
        (pdf(0, 1 << 22) + PAGE * 24, 24, 24),
        # What is far from both ends is not read: the size counts.
        (pdf(0, 1 << 22) + PAGE * 2 + bytes(1 << 22), (1 << 23) // BYTES_PER_PAGE, (1 << 23) // BYTES_PER_PAGE),
        (b"%PDF-" + b"/Type   /Pagf " * 300_000, 32, 32),
    ],
)
def test_of_a_large_pdf_the_beginning_and_the_end_are_read(data: bytes, least: int, most: int) -> None:
    assert least <= tokens(file(data_url("application/pdf", data))) / PAGE_TOKENS <= most


def test_the_pdfs_of_a_request_share_what_is_read() -> None:
    """Otherwise many of them would take the time that a large one does not."""
    inside = file(data_url("application/pdf", pdf(0, 400_000) + PAGE * 5 + bytes(600_000)))
    assert tokens(inside) == 5 * PAGE_TOKENS
    assert tokens(*[inside] * 4) == 4 * (1_000_000 // BYTES_PER_PAGE) * PAGE_TOKENS
    bill = file(data_url("application/pdf", pdf(0, 1_000_000) + PAGE))
    assert tokens(*[bill] * 16) == 16 * PAGE_TOKENS


def reads_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The types of files that are read from here on."""
    found: list[str] = []
    read = getattr(mediasize, name)

    def counted(kind: str, data: bytes) -> Any:
        found.append(kind)
        return read(kind, data)

    monkeypatch.setattr(mediasize, name, counted)
    return found


def test_more_images_than_a_check_lets_pass_are_not_read_and_count_as_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route asks before the check, and native APIs of providers take more."""
    read = reads_of(monkeypatch, "image_size")
    size = media_size(chat(*[image(data_url("image/png", png(800, 700)))] * 100))
    assert (size.images, size.tokens, len(read)) == (100, 71_400, MOST_MEDIA)


@pytest.mark.parametrize(("data", "most"), [(b"RIFF", 1), (wav(500.0, rate=8000), 2)])
def test_no_sound_is_read_after_what_a_check_refuses(monkeypatch: pytest.MonkeyPatch, data: bytes, most: int) -> None:
    """An MP3 has tens of thousands of frames to walk through."""
    read = reads_of(monkeypatch, "sound_length")
    url = data_url("audio/wav", data)
    assert media_size(chat(*[{"type": "audio_url", "audio_url": {"url": url}}] * 8)).sounds == 8
    assert len(read) == most


def test_a_sound_that_is_not_there_yet_counts_as_the_smallest_image() -> None:
    assert tokens({"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}) == LEAST_IMAGE_TOKENS


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png", "data:image/png;base64,AAAA", "data:image/png;base64,&", "data:", "", 7, None]
)
def test_what_is_not_there_or_cannot_be_read_counts_as_the_smallest(url: Any) -> None:
    assert media_size(chat(image(url))).tokens == LEAST_IMAGE_TOKENS


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": None},
        {"messages": ["a", None, {"content": "text"}, {"content": [3, None, {"type": "image_url"}, {"type": []}]}]},
        {"prompt": "a fox"},
    ],
)
def test_a_request_without_media_has_none(fields: dict[str, Any]) -> None:
    assert media_size(fields) is NO_MEDIA
    assert NO_MEDIA.text_bytes(4000) == 4000


def test_of_a_body_the_media_count_by_what_they_are() -> None:
    size = MediaSize(images=1, sounds=1, characters=1_000_000, tokens=1_000)
    assert size.text_bytes(1_000_400) == 400 + 4_000
    assert size.text_bytes(10) == 4_000
    assert size.each == 2_000
