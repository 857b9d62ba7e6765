"""Chats with images: what an engine counts of them, and what the gateway in front of it writes into the record."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import CHAT
from tests.contract.conftest import REAL_KINDS, Answer, Client
from tests.contract.test_gateway_scoring import counted, in_front
from tests.support import pictures
from tests.support.behaviour import words_of
from tests.support.engines import CONTEXT, SERVED, EngineProcess, Kind
from tests.support.gateway import GatewayUnderTest
from tests.support.vision_engine import running_vision_engine

PLACE = "<|image_pad|>"
"""What the model's template writes for an image."""


@pytest.fixture(scope="module", params=REAL_KINDS)
def seer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    kind: Kind = request.param
    with running_vision_engine(kind, tmp_path_factory.mktemp(f"seer-{kind}")) as engine:
        yield engine


def image(seed: int) -> bytes:
    """112 x 112 pixels of noise."""
    return pictures.made("PNG", 112, 112, seed=seed)


def chat(*images: bytes, text: str = "hi", **more: Any) -> dict[str, Any]:
    urls = [pictures.data_url("image/png", data) for data in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "ignore_eos": True} | more


async def ask(engine: EngineProcess, body: dict[str, Any], seconds: float = 60) -> Answer | None:
    """None: no answer."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session:
        try:
            return await Client(engine, session).post(CHAT, {**body, "model": SERVED})
        except TimeoutError:
            return None


async def settled(it: GatewayUnderTest, engine: EngineProcess, tokens: float) -> None:
    """A counter may be written a moment after the answer."""
    async with asyncio.timeout(10):
        while await counted(it, engine) != tokens:
            await asyncio.sleep(0.05)


async def test_where_the_usage_has_the_tokens_of_images(seer: EngineProcess, tmp_path: Path) -> None:
    path = words_of(seer).differences.image_tokens.strip("`").split(".")
    prompts: list[int] = []
    async with in_front(seer, tmp_path, "generate", media=frozenset({"image"})) as it:
        for body, tokens in ((chat(), None), (chat(image(0)), 16)):
            usage = (await (await it.post(body)).json())["usage"]
            prompts.append(usage["prompt_tokens"])
            found = usage["prompt_tokens_details"]
            for name in path:
                found = (found or {}).get(name)
            assert found == tokens
    # The image, and a mark on each side of it.
    assert prompts[1] - prompts[0] == 16 + 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("images", "tokens"),
    [
        ([(56, 56)], 4),
        ([(280, 140)], 50),
        ([(112, 112), (112, 112)], 32),
        ([(1000, 800)], None),
    ],
    ids=["small", "wide", "two", "large"],
)
async def test_the_record_has_what_the_engine_counted(
    seer: EngineProcess, tmp_path: Path, images: list[tuple[int, int]], tokens: int | None, stream: bool
) -> None:
    async with in_front(seer, tmp_path, "generate", media=frozenset({"image"})) as it:
        before = await counted(it, seer)
        response = await it.post(chat(*[pictures.png(*size) for size in images], stream=stream))
        assert response.status == 200, await response.text()
        await response.read()
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source, data.output_tokens) == ("answered", "final", 4)
        expected = words_of(seer).differences.large_image if tokens is None else tokens
        assert (data.images, data.image_tokens, data.audio_tokens) == (len(images), expected, None)
        await settled(it, seer, before + (data.input_tokens or 0))


async def test_the_prefix_cache_knows_an_image_by_its_pixels(seer: EngineProcess, tmp_path: Path) -> None:
    async with in_front(seer, tmp_path, "generate", media=frozenset({"image"})) as it:
        cached: list[int] = []
        for seed in (7, 7, 8):
            answer = await (await it.post(chat(image(seed), temperature=0))).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        before_the_image = 8
        assert [found > before_the_image for found in cached] == [False, True, False]


async def test_what_no_engine_can_decode_is_refused_before_it(seer: EngineProcess, tmp_path: Path) -> None:
    broken = chat(b"no image at all")
    answer = await ask(seer, broken)
    assert answer is not None
    assert answer.status == 400
    async with in_front(seer, tmp_path, "generate", media=frozenset({"image"})) as it:
        response = await it.post(broken)
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "messages[0].content[0].image_url.url")


def test_the_gateway_refuses_a_place_without_a_medium() -> None:
    facts = Facts(vocabulary=512, context_length=CONTEXT, media=frozenset({"image"}))
    problem = check(chat(image(0), text=PLACE), CHAT, facts)
    assert problem is not None
    assert problem.code == "token_not_allowed"


async def test_without_the_check_a_place_without_a_medium_ends_at_most_the_request_itself(seer: EngineProcess) -> None:
    """The last test: SGLang keeps the request."""
    seen = chat(image(0), max_tokens=2)
    assert await ask(seer, seen) is not None
    lone = await ask(seer, chat(image(0), text=PLACE, max_tokens=2), 20)
    assert ("is never answered" if lone is None else str(lone.status)) == words_of(seer).differences.lone_place
    after = await ask(seer, seen)
    assert after is not None
    assert after.status == 200
