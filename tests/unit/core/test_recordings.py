"""Sound files to be transcribed: their kind, their length, and what a decoder would make of them."""

import time

import pytest

from shoal.core.fields.images import UnreadableError
from shoal.core.fields.kinds import Facts
from shoal.core.fields.recordings import MOST_SAMPLES, MOST_SECONDS, Recording, RecordingField, recording
from tests.support.recordings import (
    block,
    cluster,
    element,
    flac,
    matroska,
    mp3,
    ogg,
    opus,
    track,
    vorbis,
    wav,
    webm,
)

PACKET = b"\x08\0\0"
"""Of Opus: 20 ms."""


def two_of_samples(first: bytes, stated: int | None = None) -> bytes:
    """A WAV with two chunks of samples, which FFmpeg plays one after the other. `stated`: the length of the first, if
    other bytes follow it."""
    whole = wav(5)
    return whole[:36] + b"data" + (stated or len(first)).to_bytes(4, "little") + first + whole[36:]


def refused(found: Recording) -> str | None:
    problem = RecordingField().check(found, "file", Facts())
    return None if problem is None else problem.code


@pytest.mark.parametrize(
    ("data", "kind", "milliseconds"),
    [
        (wav(3.2), "wav", 3_200),
        (wav(0.0005, rate=48_000, channels=2), "wav", 1),
        # A reader takes what is there, or what is stated, whichever is less.
        (wav(2, stated=32_000), "wav", 1_000),
        (wav(1, stated=0xFFFFFFFF), "wav", 1_000),
        (wav(1, stated=0), "wav", 1_000),
        # After the samples: a note that speaks of data, and bytes that are no chunks.
        (wav(1) + b"LIST\x05\0\0\0data!\0", "wav", 1_000),
        (wav(1) + b"note" + bytes(9_000) + b"LISTnote", "wav", 1_000),
        (flac(10, block=4096), "flac", 5_120),
        (flac(200, block=4096, total=0), "flac", 102_400),
        (flac(10, block=4096, total=5), "flac", None),
        (opus(50), "ogg", 994),
        (opus(50, end=47_500), "ogg", 983),
        (opus(50, end=10), "ogg", None),
        (opus(50, end=999_999), "ogg", None),
        (vorbis(9), "ogg", None),
        # 312 samples of the beginning do not count.
        (webm(50), "webm", 994),
        (webm(50, live=False), "webm", 994),
        (webm(50, doctype=b"matroska"), "mkv", 994),
        (webm(120, live=False, tracks=[track(2)]), "webm", 2_394),
        (matroska(cluster(0, *([block([PACKET] * 3, at * 60, lacing=2) for at in range(4)]))), "webm", 234),
        (matroska(cluster(0, block([PACKET, PACKET + bytes(300), PACKET], lacing=1))), "webm", 54),
        (matroska(cluster(0, block([PACKET + bytes(9), PACKET, PACKET * 90, PACKET], lacing=3))), "webm", 74),
        (matroska(cluster(0, block([PACKET]), block([PACKET], 20, discarded=10_000_000))), "webm", 24),
        (matroska(cluster(0, block([PACKET]), block([PACKET], 300))), "webm", 34),
        # A gap, which only some decoders fill; an end that is not the end.
        (matroska(cluster(0, block([PACKET]), block([PACKET], 600))), "webm", None),
        (matroska(cluster(0, block([PACKET], discarded=10_000_000), block([PACKET], 20))), "webm", None),
        (matroska(cluster(0, block([PACKET], discarded=10_000_000_000))), "webm", None),
        (mp3(100), "mp3", 3_600),
        (mp3(100) + b"TAG" + bytes(125), "mp3", 3_600),
        (mp3(100) + b"\0\0" + mp3(10), "mp3", None),
    ],
)
def test_the_length_is_that_of_the_frames(data: bytes, kind: str, milliseconds: int | None) -> None:
    found = recording(data)
    assert (found.kind, found.milliseconds, found.size) == (kind, milliseconds, len(data))
    assert refused(found) is None
    assert recording(memoryview(data)) == found


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("an hour and more in 10 KiB of FLAC", flac(600)),
        ("the same with a header that says a second", flac(600, total=8_000)),
        ("frames out of order", flac(1) + flac(600)[42:] + flac(600)[42:]),
        ("an hour of Opus", opus(31_000, toc=b"\x0b\x06", samples=5_760)),
        ("Opus that says it has ended", opus(31_000, toc=b"\x0b\x06", samples=5_760, end=48_000)),
        ("Vorbis with the longest blocks", vorbis(8_000)),
        ("MP3", mp3(101_000)),
        ("WebM", webm(31_000, toc=b"\x0b\x06", milliseconds=120)),
        (
            "WebM with packets in one another's place",
            matroska(*[cluster(0, *[block([b"\x0b\x06"] * 256, lacing=2)] * 4)] * 31),
        ),
    ],
)
def test_a_few_bytes_that_decode_to_hours_are_refused(name: str, data: bytes) -> None:
    found = recording(data)
    assert found.most_seconds > MOST_SECONDS, name
    assert refused(found) == "too_much_work"


def test_many_channels_count() -> None:
    found = recording(flac(500, channels=8, rate=48_000))
    assert found.most_seconds < MOST_SECONDS
    assert found.samples > MOST_SAMPLES
    assert refused(found) == "too_much_work"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"text",
        b"\0\0\0\x20ftypM4A " + bytes(100),
        b"\x1aE\xdf\xa3" + bytes(100),
        webm(3)[:-1],
        webm(3, live=False)[:-1],
        webm(3, live=False) + b"\0",
        webm(3, end=element(0xA3, b"x")),
        webm(3, live=False, end=webm(3)),
        webm(3, tracks=[]),
        webm(3, tracks=[track(), track()]),
        webm(3, tracks=[track(kind=1)]),
        webm(3, tracks=[track(codec=b"A_AAC")]),
        webm(3, tracks=[track(channels=9)]),
        webm(3, tracks=[track(1, b"A_OPUS", 2, 312, element(0x6D80, b"zlib"))]),
        webm(3, tracks=[element(0xAE, *[element(0xAE, b"")] * 3)]),
        webm(3, toc=b"\x03\x00"),
        matroska(cluster(0, block([PACKET], track=2))),
        matroska(cluster(0, block([b""]))),
        matroska(cluster(0, element(0xA3, b"\x81"))),
        matroska(cluster(0, element(0xAF, b"\x81\0\0\0" + PACKET))),
        matroska(cluster(0, element(0xA3, b"\x81\0\0\2\xff" + PACKET))),
        matroska(cluster(0, element(0xA3, b"\x81\0\0\4\x01" + PACKET))),
        matroska(cluster(0, element(0xA3, b"\x81\0\0\6\x02\x81\x80" + PACKET))),
        matroska(element(0x1F43B675, b"x", size=0)),
        matroska(element(0x1F43B675, PACKET, size=(1 << 56) - 2)),
        matroska(cluster(0, element(0xA0, element(0xA1, b"", unknown=True)))),
        matroska(element(0x1F43B675, element(0x1F43B675, element(0xE7, b"")))),
        b"RIFF\0\0\0\0AVI " + bytes(100),
        wav()[:40],
        two_of_samples(b"ab"),
        two_of_samples(b"abc\0", 3),
        two_of_samples(b"abc"),
        two_of_samples(b"abLIST\x05\0\0\0note!\0", 2),
        # Another after more chunks than are walked.
        two_of_samples(b"ab" + b"LIST\0\0\0\0" * 300, 2),
        wav(rate=1),
        wav(channels=9),
        b"fLaC",
        flac(3)[:42],
        flac(3, rate=1),
        b"fLaC\x04" + flac(3)[5:],
        b"OggS",
        opus(3)[:-1],
        opus(3)[:-4],
        opus(3)[:-3] + b"\xff",
        opus(3)[:30],
        opus(3, toc=b"\x03\x00"),
        opus(3) + opus(3),
        opus(3) + b"\0",
        opus(3).replace(b"OpusTags", b"OpusTagz"),
        # A page that a reader would skip, with others inside.
        opus(3) + ogg([b"x" + opus(3)[:200]], [0])[:-1] + b"y",
        ogg([b"fishead\0" + bytes(40), b"x"], [0, 0]),
        b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + mp3(2),
        mp3(2) + bytes(5_000),
    ],
)
def test_what_is_no_sound_file_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        recording(data)


@pytest.mark.parametrize(
    "data",
    [
        flac(3) + b"\xff\xf8" * 4_000_000,
        flac(3) + b"\xff\xf8\x70\x08" * 4_000_000,
        opus(3)[:200] + b"OggS\0\0" * 2_000_000,
        ogg([b"OpusHead\x01\x01" + bytes(9)], [0])
        + (b"OggS\0\0" + bytes(8) + b"\x07\0\0\0" + bytes(8) + b"\0") * 600_000,
        b"RIFF\0\0\0\0WAVE" + b"LIST\0\0\0\0" * 2_000_000,
        two_of_samples(b"ab" + b"LIST\0\0\0\0" * 2_000_000, 2),
        b"\xff" * 16_000_000,
        webm(3) + b"\xec\x80" * 8_000_000,
        matroska(cluster(0, b"\xec\x80" * 4_000_000)),
        matroska(cluster(0, *[block([b"\x08"] * 256, lacing=2)] * 40_000)),
        matroska(cluster(0, element(0xA3, b"\x81\0\0\2\xff" + b"\xff" * 8_000_000))),
    ],
)
def test_the_work_is_bounded_whatever_the_bytes_are(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(UnreadableError):
        recording(data)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("beginning", "name"),
    [
        (b"\0\0\0\x20ftypM4A \0\0\0\0", "M4A"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "MP4"),
        (b"\0\0\0\x14ftypqt  \0\0\0\0", "QuickTime"),
        (b"\0\0\0\x18ftyp3gp4\0\0\0\0", "3GP"),
        (b"\xff\xf1\x50\x80\x00\x1f\xfc", "AAC (ADTS)"),
        (b"caff\x00\x01\x00\x00desc", "CAF"),
    ],
)
def test_what_phones_and_browsers_record_is_named_with_what_is_accepted(beginning: bytes, name: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        recording(beginning + bytes(4000))
    text = str(caught.value)
    assert text.startswith("a sound file: WAV, MP3, FLAC, Ogg or WebM, and it is " + name)
    assert "ffmpeg -i FILE -vn -c:a libopus FILE.ogg" in text


def test_other_bytes_are_named_as_nothing() -> None:
    for data in (b"", b"text", b"\0\0\0\x20ftyp", b"\x1aE", bytes(100)):
        with pytest.raises(UnreadableError) as caught:
            recording(data)
        assert str(caught.value).startswith("a sound file: WAV, MP3, FLAC, Ogg or WebM")
