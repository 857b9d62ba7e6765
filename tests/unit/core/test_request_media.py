"""Images and sounds that unpack to more than they look like are refused by their headers; without that, Pillow, which
engines decode with, would unpack them."""

import base64
import contextlib
import io
import random
import warnings
from typing import Any

import pytest
from PIL import Image

from shoal.api.model import Model
from shoal.core.architectures import names
from shoal.core.fields import media
from shoal.core.fields.check import check
from shoal.core.fields.images import READERS, UnreadableError, image_size
from shoal.core.fields.kinds import Facts, FieldProblem, Medium
from shoal.core.fields.media import MOST_PIXELS, MOST_SECONDS
from shoal.core.fields.sounds import sound_seconds
from shoal.core.fields.table import CHAT
from shoal.core.routing.resolve import served_model
from tests.support import operators, pictures
from tests.support.limited import MI, counted, run

ALL: frozenset[Medium] = frozenset({"image", "audio"})
FACTS = Facts(vocabulary=512, context_length=4096, media=ALL)
JPEG = pictures.made("JPEG")


def asked(*parts: dict[str, Any], facts: Facts = FACTS, **fields: Any) -> FieldProblem | None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "what"}, part]} for part in parts]
    return check({"model": "m", "messages": messages, **fields}, CHAT, facts)


def image(data: bytes, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": pictures.data_url(kind, data), **more}}


def sound(data: bytes, kind: str = "audio/wav") -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": pictures.data_url(kind, data)}}


def inside(segment: bytes) -> bytes:
    return JPEG[:2] + segment + JPEG[2:]


HIDDEN: dict[str, tuple[str, bytes]] = {
    # What a reader that takes the first header for the only one is told, and what Pillow takes.
    "a second header": ("image/png", pictures.png(2, 2, pictures.ihdr(9000, 9000))),
    "a second header of a JPEG": (
        "image/jpeg",
        inside(pictures.jpeg_segment(0xC0, b"\x08\0\x02\0\x02\x03\x01\x11\0\x02\x11\0\x03\x11\0")),
    ),
    "a frame that sticks out": ("image/gif", pictures.gif(2, 2, pictures.gif_frame(9000, 8999, 2, 2))),
    "a frame behind an empty extension": (
        "image/gif",
        pictures.gif(2, 2, b"!\x01\0\x0e," + bytes(8) + b"\0\x02\0\x00;\0", pictures.gif_frame(9000, 8999, 2, 2)),
    ),
    "other data between blocks": ("image/gif", pictures.gif(2, 2, b"junk", pictures.gif_frame(0, 0, 2, 2))),
    "other data between segments": ("image/jpeg", JPEG[:2] + b"\xff\xe0\0\x02junk" + JPEG[2:]),
}
BOMBS: dict[str, tuple[str, bytes]] = {
    **HIDDEN,
    "PNG": ("image/png", pictures.png(8000, 8000)),
    "WebP": ("image/webp", pictures.webp_canvas(8000, 8000)),
    "lossless WebP": ("image/webp", b"RIFF\0\0\0\0WEBPVP8L\x0a\0\0\0\x2f\xff\xff\xff\x0f" + bytes(9)),
    "GIF": ("image/gif", pictures.gif(8000, 8000, pictures.gif_frame(0, 0, 1, 1))),
    "frames of a GIF": ("image/gif", pictures.gif(1000, 1000, pictures.gif_frame(0, 0, 1, 1) * 40)),
    "frames of a WebP": ("image/webp", pictures.webp_canvas(1000, 1000, *[b"ANMF" + bytes(4)] * 40)),
    "frames of a PNG": (
        "image/png", pictures.png(1000, 1000, pictures.chunk(b"acTL", b"\0\0\0\x28" + bytes(4))),
    ),
    "a line": ("image/png", pictures.png(16_000, 1)),
    "a side": ("image/png", pictures.png(20_000, 200)),
    "no pixels": ("image/gif", pictures.gif(0, 0)),
    "scans": ("image/jpeg", pictures.many_scans(64, 64, 1000)),
    "segments": ("image/jpeg", inside(pictures.jpeg_segment(0xE1, b"") * 1000)),
    "EXIF": ("image/jpeg", inside(pictures.jpeg_segment(0xE1, b"Exif\0\0" + pictures.exif(5000, 65_000)))),
    "EXIF in parts": ("image/jpeg", inside(pictures.jpeg_segment(0xE1, b"Exif\0\0a") * 2)),
    "EXIF of a PNG": ("image/png", pictures.png(2, 2, pictures.chunk(b"eXIf", pictures.exif(5000, 65_000)))),
    "EXIF of a WebP": (
        "image/webp", pictures.webp_canvas(2, 2, b"EXIF\xe8\xfd\0\0" + pictures.exif(5000, 65_000)),
    ),
    "compressed texts": ("image/png", pictures.png(2, 2, *[pictures.chunk(b"zTXt", b"a\0\0")] * 17)),
    "chunks": ("image/png", pictures.png(2, 2, *[pictures.chunk(b"tEXt", b"a\0")] * 10_000)),
    "comments": ("image/gif", pictures.gif(2, 2, b"!\xfe" + b"\x01a" * 70_000 + b"\0")),
    "blocks": ("image/gif", pictures.gif(2, 2, b"!\x01" + b"\x01a" * 70_000 + b"\0")),
    "another format": ("image/png", JPEG),
    "a format that is not taken": ("image/png", b"BM" + bytes(60)),
    "nothing": ("image/png", b""),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_image_that_unpacks_large_is_refused_by_its_headers(bomb: str) -> None:
    kind, data = BOMBS[bomb]
    assert len(data) < 200_000
    found = asked(image(data, kind))
    assert found is not None
    assert found.param in ("messages[0].content[1].image_url.url", "messages")
    assert found.code in ("media_not_supported", "too_much_work")


@pytest.mark.parametrize("bomb", ["PNG", "GIF"])
def test_without_the_check_a_few_kib_take_an_engine_hundreds_of_mib(bomb: str) -> None:
    data = BOMBS[bomb][1]
    assert len(data) < 8192
    given = base64.b64encode(data).decode()
    assert run(pictures.unpacked, given, memory=64 * MI).ended == "memory"
    # The largest that passes; the bound is of a whole request.
    largest = pictures.png(8192, MOST_PIXELS // 8192)
    assert asked(image(largest)) is None
    assert run(pictures.unpacked, base64.b64encode(largest).decode(), memory=400 * MI).ended == "done"


def test_without_the_check_a_line_grows_as_it_is_scaled() -> None:
    given = base64.b64encode(BOMBS["a line"][1]).decode()
    assert run(pictures.scaled, given, memory=512 * MI).ended == "memory"


def test_without_the_check_scans_take_as_long_as_a_client_likes() -> None:
    data = pictures.many_scans(2048, 2048, 50_000)
    assert len(data) < MI
    assert isinstance(asked(image(data, "image/jpeg")), FieldProblem)
    assert run(pictures.unpacked, base64.b64encode(data).decode(), cpu=3).ended == "cpu"


@pytest.mark.parametrize("bomb", ["a second header", "a frame that sticks out", "a frame behind an empty extension"])
def test_pillow_takes_what_a_hidden_header_says(bomb: str) -> None:
    opened = Image.open(io.BytesIO(HIDDEN[bomb][1]))
    assert opened.width * opened.height > MOST_PIXELS


def test_the_images_of_one_request_count_together() -> None:
    one = pictures.png(2500, 2500)
    assert asked(*[image(one)] * 5) is None
    found = asked(*[image(one)] * 6)
    assert found is not None
    assert (found.param, found.code) == ("messages", "too_much_work")
    small = image(pictures.png(2, 2), max_dynamic_patch=40)
    assert asked(*[small] * 3) is None
    assert asked(*[small] * 4) == media.too_much_media(media.Load(4, patches=40), "messages")
    # An engine takes the figure that one image names for all of them.
    assert asked(small, *[image(pictures.png(2, 2))] * 3) is not None
    assert asked(*[image(pictures.png(2, 2))] * 3, max_dynamic_patch=64) is not None


@pytest.mark.parametrize("kind", READERS)
def test_what_encoders_write_passes_with_its_true_size(kind: str) -> None:
    form = kind.partition("/")[2].upper()
    options: list[dict[str, Any]] = [
        {}, {"progressive": True}, {"lossless": True}, {"interlace": True}, {"comment": b"hello"},
    ]  # fmt: skip
    for more in options:
        assert image_size(kind, pictures.made(form, 40, 30, **more)).pixels == 1200
    if form != "JPEG":
        assert image_size(kind, pictures.made(form, 40, 30, frames=5)).frames == 5
    exif = Image.Exif()
    exif[274] = 6
    assert image_size(kind, pictures.made(form, 40, 30, exif=exif)).width == 40
    picture = pictures.made(form, 40, 30)
    assert asked(image(picture, kind)) is None
    # A phone puts a film behind its picture.
    if form == "JPEG":
        assert image_size(kind, picture + random.Random(1).randbytes(100_000)).pixels == 1200  # noqa: S311


@pytest.mark.parametrize("kind", READERS)
def test_pillow_never_unpacks_more_than_the_headers_that_were_read(kind: str) -> None:
    form = kind.partition("/")[2].upper()
    pick = random.Random(form)  # noqa: S311
    frames = (1,) if form == "JPEG" else (1, 3)
    seeds = [pictures.made(form, 9, 7, n, seed=n, **more) for n in frames for more in ({}, {"progressive": True})]
    taken = opened = 0
    for _ in range(4000):
        data = bytearray(pick.choice(seeds))
        for _ in range(pick.choice((1, 1, 2, 5))):
            at = pick.randrange(len(data)) if pick.random() < 0.5 else pick.randrange(min(len(data), 120))
            if pick.random() < 0.7:
                data[at] = pick.choice((0, 1, 0xFF, 0x2C, 0x21, 0xDA, 0xC0, pick.randrange(256)))
            elif pick.random() < 0.5:
                del data[at : at + pick.choice((1, 4, 12, 30))]
            else:
                data[at:at] = data[pick.randrange(len(data)) :][: pick.choice((1, 4, 25, 40))]
        try:
            size = image_size(kind, bytes(data))
        except UnreadableError:
            continue
        taken += 1
        if size.pixels > 100_000:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = Image.open(io.BytesIO(data), formats=[form])
                found.load()
                pixels = found.width * found.height
                with_frames = pixels * getattr(found, "n_frames", 1)
        except (OSError, SyntaxError, ValueError, IndexError):
            continue
        opened += 1
        assert pixels <= size.width * size.height, bytes(data)
        if form != "JPEG":  # Of a JPEG with others behind it, engines take the first.
            assert with_frames <= size.pixels, bytes(data)
    assert taken > 500
    assert opened > 200


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("image/gif", pictures.gif(2, 2, b"!\x01" + b"\x01a" * 3 * MI + b"\0")),
        ("image/jpeg", b"\xff\xd8" + b"\xff" * 6 * MI),
        ("image/jpeg", JPEG[:-2] + b"\xff" * 6 * MI),
        ("image/png", pictures.png(2, 2)[:33] + bytes(6 * MI)),
        ("image/webp", pictures.webp_canvas(2, 2) + bytes(6 * MI)),
        ("audio/wav", b"RIFF\0\0\0\0WAVE" + bytes(6 * MI)),
        ("audio/mpeg", pictures.mp3(65_000)),
    ],
)
def test_reading_headers_costs_little_whatever_the_file(kind: str, data: bytes) -> None:
    def work() -> None:
        with contextlib.suppress(UnreadableError):
            image_size(kind, data) if kind in READERS else sound_seconds(kind, data)

    assert counted(work).lines < 700_000


def test_sounds_pass_by_their_length() -> None:
    assert asked(sound(pictures.wav(2))) is None
    assert asked(sound(pictures.mp3(100), "audio/mpeg")) is None
    assert sound_seconds("audio/wav", pictures.wav(2.5, channels=2, bits=24)) == pytest.approx(2.5)
    assert sound_seconds("audio/mpeg", b"ID3\4\0\0\0\0\1\0" + bytes(128) + pictures.mp3(10) + b"TAG" + bytes(125)) == (
        pytest.approx(0.24)
    )
    half = sound(pictures.wav(MOST_SECONDS / 2 + 1, rate=8000, bits=8))
    assert asked(half) is None
    found = asked(half, half)
    assert found is not None
    assert found.code == "too_much_work"
    given = base64.b64encode(pictures.wav(1)).decode()
    assert asked({"type": "input_audio", "input_audio": {"data": given, "format": "wav"}}) is None
    assert asked({"type": "input_audio", "input_audio": {"data": given, "format": "mp3"}}) is not None


FALSE_SOUNDS: dict[str, tuple[str, bytes]] = {
    # A reader brings it to 16,000 samples a second: sixteen thousand times as many.
    "a sample a second": ("audio/wav", pictures.wav(1000, rate=1)),
    "compressed WAV": ("audio/wav", pictures.wav(1, code=0x11)),
    "channels": ("audio/wav", pictures.wav(1, channels=64)),
    "FLAC": ("audio/flac", b"fLaC" + bytes(60)),
    "FLAC as WAV": ("audio/wav", b"fLaC" + bytes(60)),
    "Ogg": ("audio/ogg", b"OggS" + bytes(60)),
    "a film": ("audio/mpeg", b"\0\0\0\x20ftypisom" + bytes(60)),
    "a film as MP3": ("audio/mpeg", b"\xff\xfb\x14\xc4ftyp" + pictures.mp3(10)[8:]),
    "frames that are no longer than they like": ("audio/mpeg", b"\xff\xfb\x04\xc4" * 1000),
    "a file behind MP3": ("audio/mpeg", pictures.mp3(1) + bytes(10_000)),
    "two headers": ("audio/wav", pictures.wav(1)[:36] + pictures.wav(1)[12:]),
}


@pytest.mark.parametrize("name", FALSE_SOUNDS)
def test_a_sound_whose_length_its_bytes_do_not_bound_is_refused(name: str) -> None:
    kind, data = FALSE_SOUNDS[name]
    found = asked(sound(data, kind))
    assert found is not None
    assert found.param == "messages[0].content[1].audio_url.url"


def test_a_model_is_sent_only_what_it_reads() -> None:
    picture, noise = image(pictures.png(2, 2)), sound(pictures.wav(1))
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    cases: list[tuple[frozenset[Medium], dict[str, Any], str]] = [
        (frozenset(), picture, "text only"),
        (frozenset(), noise, "text only"),
        (frozenset({"image"}), noise, "does not read sound: it reads text and images."),
        (frozenset({"audio"}), picture, "does not read images: it reads text and sound."),
        (ALL, video, "videos are not accepted"),
    ]
    for reads, part, says in cases:
        found = asked(part, facts=Facts(media=reads))
        assert found is not None
        assert (found.code, found.param) == ("media_not_supported", "messages[0].content[1]")
        assert says in found.message
    able = Facts(capabilities=("generate", "score", "tools"))
    refused = asked(picture, facts=able)
    assert refused is not None
    assert refused.message == (
        "This model does not read images: it reads text only. Its capabilities are generate, score, tools."
    )
    assert asked(picture, facts=Facts(media=frozenset({"image"}))) is None
    assert asked(noise, facts=Facts(media=frozenset({"audio"}))) is None
    assert names.HEARS_ONLY < names.HEARS < names.MULTIMODAL


@pytest.mark.parametrize(
    ("architecture", "reads"),
    [
        ("Qwen2VLForConditionalGeneration", {"image"}),
        ("Qwen2AudioForConditionalGeneration", {"audio"}),
        ("Qwen3OmniMoeForConditionalGeneration", {"image", "audio"}),
        ("LlamaForCausalLM", set()),
    ],
)
def test_what_a_model_reads_is_told_by_its_architecture(architecture: str, reads: set[str]) -> None:
    resource = operators.model("chat", "team-a")
    artifact = {"source": "x", "architecture": architecture, "multimodal": architecture in names.MULTIMODAL}
    model = Model.model_validate(resource | {"status": {"artifact": artifact}})
    assert served_model(model).facts.media == reads


@pytest.mark.parametrize(
    ("architecture", "text", "fine"),
    [
        ("Qwen2_5_VLForConditionalGeneration", 'a page with <img src="x"> and <img> and </video>, [IMG]', True),
        ("Qwen2_5_VLForConditionalGeneration", "<|image_pad|>", False),
        ("Qwen3VLMoeForConditionalGeneration", "<image>", True),
        ("InternVLChatModel", "<img>", False),
        ("LlavaForConditionalGeneration", "<image>", False),
    ],
)
def test_what_looks_like_html_is_text_where_no_place_of_an_image_does(architecture: str, text: str, fine: bool) -> None:
    resource = operators.model("chat", "team-a")
    artifact = {"source": "x", "architecture": architecture, "multimodal": True}
    facts = served_model(Model.model_validate(resource | {"status": {"artifact": artifact}})).facts
    parts = [image(pictures.png(2, 2)), {"type": "text", "text": text}]
    found = check({"model": "m", "messages": [{"role": "user", "content": parts}]}, CHAT, facts)
    assert (found and found.code) == (None if fine else "token_not_allowed")


@pytest.mark.parametrize(
    "text",
    ["<|image_pad|>", "<|video_pad|>", "<image>", "<IMG_CONTEXT>", "[IMG]", "a<|audio|>b", "<|image>", "<image|>"],
)
def test_beside_media_no_text_names_the_place_of_one(text: str) -> None:
    """An engine would never answer, and keep the images."""
    picture = image(pictures.png(2, 2))
    said = {"type": "text", "text": text}
    found = check({"model": "m", "messages": [{"role": "user", "content": [picture, said]}]}, CHAT, FACTS)
    assert found is not None
    assert (found.param, found.code) == ("messages", "token_not_allowed")
    parts = [{"type": "text", "text": half} for half in (text[:3], text[3:])]
    for messages in (
        [{"role": "user", "content": [picture, *parts]}],
        [{"role": "system", "content": text}, {"role": "user", "content": [picture]}],
        [{"role": "assistant", "content": "", "reasoning_content": text}, {"role": "user", "content": [picture]}],
    ):
        assert check({"model": "m", "messages": messages}, CHAT, FACTS) == found
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {"type": "object"}}}
    assert (asked(picture, tools=[tool]) or found).param == "tools"
    hidden = {"type": "object", "properties": {"image_url": {"description": text}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": hidden}}
    assert (asked(picture, tools=[tool]) or found).param == "tools"
    written = "".join(f"\\u{ord(character):04x}" for character in text)
    for arguments in ({"text": text}, f'{{"x": "{written}"}}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": [picture]}]
        assert check({"model": "m", "messages": messages}, CHAT, FACTS) == found
    assert (asked(picture, chat_template_kwargs={"x": text}) or found).param == "chat_template_kwargs"
    assert check({"model": "m", "messages": [{"role": "user", "content": text}]}, CHAT, FACTS) is None


def test_beside_media_texts_of_people_pass() -> None:
    for text in ("a < b | c > d", "<p>hello</p>", "![image](x)", "f(x)[0]", "List<String>", "1 <2| 3>"):
        assert asked({"type": "text", "text": text}, image(pictures.png(2, 2))) is None
