"""Units beside tokens, from records to bills and exports."""

import csv
import io
import re
from pathlib import Path
from typing import Any

from shoal.ledger.queries import bills
from shoal.ledger.schema import hours
from tests.support.ledger import record, server, store, url
from tests.support.ledgerworld import World, world
from tests.support.queryapi import OCTOBER, hour, ledger, ms, price_folder

__all__ = ["server", "url", "world"]

UNITS = OCTOBER + (
    '  - {model: chat/rerank, input: "1", cached: "1", output: "1", documents: "2000"}\n'
    '  - {model: chat/whisper, input: "0", cached: "0", output: "0", audioSeconds: "100"}\n'
)
NO_TOKENS: dict[str, Any] = dict.fromkeys(("inputTokens", "cachedTokens", "outputTokens", "reasoningTokens"))


async def test_what_engines_read_is_billed_and_the_rest_is_not(url: str, tmp_path: Path) -> None:
    prices = price_folder(tmp_path, october=UNITS)
    clip: dict[str, Any] = {
        "endpoint": "/v1/audio/transcriptions", "model": "chat/whisper", "audioMs": 3_200, **NO_TOKENS
    }  # fmt: skip
    async with store(url) as rig:
        await rig.take(
            record(
                "a", model="chat/rerank", adapter=None, documents=300, inputTokens=1000, cachedTokens=0, outputTokens=0
            ),
            record("a", model="chat/rerank", adapter=None, documents=300),
            record("b", "attempt:1", model="chat/rerank", documents=300),
            record("c", model="chat/rerank", documents=50, countSource="estimated"),
            record(
                "d", model="chat/rerank", documents=50, countSource="none", attempts=0, outcome="refused", **NO_TOKENS
            ),
            record("e", audioSource="measured", **clip),
            record("f", audioSource="engine", **dict(clip, audioMs=4_000)),
            record("g", audioSource="measured", countSource="none", attempts=0, outcome="refused", **clip),
        )
        await rig.balanced()
        found = await rig.store.read(
            lambda c: bills.statement(c, "acme", "2026-11", prices.schedule, ms("2026-12-05T00:00"))
        )
        assert (await rig.usage("e"))["audio_source"] == "measured"
    ranked, heard = found.lines
    assert (ranked.documents, ranked.exact, ranked.rate.documents) == (300, "0.601", "2000.00")
    assert (heard.audio_ms, heard.exact, heard.rate.audio_seconds) == (7_200, "0.00072", "100.00")
    assert (heard.unknown_requests, heard.requests) == (0, 3), "its usage is known, though it has no tokens"
    assert (ranked.unpriced_units, heard.unpriced_units, found.unpriced) == ((), (), ())


async def test_sounds_of_chats_cost_in_addition_to_their_tokens(url: str, tmp_path: Path) -> None:
    """The price of a second is the same as of a transcription. A chat without tokens is unknown, whatever it hears."""
    prices = price_folder(
        tmp_path, october=UNITS + '  - {model: chat/omni, input: "1", cached: "1", output: "1", audioSeconds: "100"}\n'
    )
    heard: dict[str, Any] = {"adapter": None, "audioMs": 1_500, "audioSource": "measured"}
    async with store(url) as rig:
        await rig.take(
            record("a", model="chat/omni", **heard, inputTokens=1000, cachedTokens=0, outputTokens=0),
            record("b", "attempt:1", model="chat/omni", **heard),
            record("c", model="chat/omni", **heard, countSource="estimated"),
            record("d", model="chat/omni", **heard, countSource="none", outcome="refused", attempts=0, **NO_TOKENS),
            record("e", model="chat/deaf", **heard, countSource="none", outcome="failed", attempts=1, **NO_TOKENS),
            record("f", model="chat/whisper", **heard, inputTokens=0, cachedTokens=0, outputTokens=0),
        )
        await rig.balanced()
        found = await rig.store.read(
            lambda c: bills.statement(c, "acme", "2026-11", prices.schedule, ms("2026-12-05T00:00"))
        )
    priced = {line.model: line for line in found.lines}
    assert (priced["chat/omni"].audio_ms, priced["chat/omni"].exact) == (1_500, "0.00115")
    assert (priced["chat/whisper"].audio_ms, priced["chat/whisper"].exact) == (1_500, "0.00015")
    unknown = [(one.model, one.unknown_requests, one.audio_ms) for one in (*found.lines, *found.unpriced)]
    assert [one for one in unknown if one[1]] == [("chat/deaf", 1, 0)]


async def test_records_of_before_have_no_units(url: str) -> None:
    async with store(url) as rig:
        assert await rig.take(record("old")) == (1, 0, 0)
        (row,) = await rig.rows(hours)
        assert [row[name] for name in ("documents", "images", "audio_ms", "image_tokens", "accepted_tokens")] == [0] * 5


async def test_a_count_that_no_request_has_is_quarantined(url: str) -> None:
    async with store(url) as rig:
        bad = [
            record("a", audioMs=-1),
            record("b", images=10**13),
            record("c", imageTokens=-5),
            record("d", audioSource="?"),
        ]
        assert await rig.take(*bad) == (0, 0, 4)


async def test_focus_has_a_row_per_unit(tmp_path: Path) -> None:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, october=UNITS) as books:
        await books.fill(
            hour("2026-11-01T00:00", model="chat/rerank", input_tokens=1000, documents=300),
            hour("2026-11-01T00:00", model="chat/whisper", audio_ms=3_200),
            hour("2026-11-01T00:00", input_tokens=10, images=2),
        )
        answer = await books.get("/v1/focus", from_="2026-11-01", to="2026-11-02")
        rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    shown = [
        (row["SkuMeter"], row["ConsumedUnit"], row["PricingQuantity"], row["ContractedUnitPrice"], row["BilledCost"])
        for row in rows
    ]
    assert shown == [
        ("Input Tokens", "Tokens", "10.0", "0.000003", "0.00003"),
        ("Images", "", "", "", "0.0"),
        ("Input Tokens", "Tokens", "1000.0", "0.000001", "0.001"),
        ("Documents", "Documents", "300.0", "0.002", "0.6"),
        ("Audio Seconds", "Seconds", "3.2", "0.0001", "0.00032"),
    ]
    images = rows[1]
    assert (images["SkuPriceId"], images["x_ConsumedQuantity"], images["x_ConsumedUnit"]) == ("", "2.0", "Images")
    assert (images["x_ConsumedTokens"], images["ChargeDescription"]) == ("", "Images of chat/llama")


async def test_focus_tells_the_kinds_of_tokens_once(tmp_path: Path) -> None:
    """They are in the input or the output, whose prices they have."""
    names = ("SkuMeter", "x_ImageTokens", "x_AudioTokens", "x_ReasoningTokens", "x_AcceptedTokens")
    told: dict[str, Any] = {"image_tokens": 7, "audio_tokens": 5, "reasoning_tokens": 3, "accepted_tokens": 2}
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, october=UNITS) as books:
        await books.fill(
            hour("2026-11-01T00:00", input_tokens=30, cached_tokens=10, output_tokens=9, images=1, **told),
            hour("2026-11-01T00:00", model="chat/seen", input_tokens=10, cached_tokens=10, image_tokens=7),
        )
        answer = await books.get("/v1/focus", from_="2026-11-01", to="2026-11-02")
        rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("Input Tokens", "7", "5", "", ""),
        ("Cached Input Tokens", "", "", "", ""),
        ("Output Tokens", "", "", "3", "2"),
        ("Images", "", "", "", ""),
        ("Cached Input Tokens", "7", "", "", ""),
    ]


async def test_margin_without_a_price_of_audio_is_unknown(tmp_path: Path) -> None:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, october=UNITS) as books:
        await books.fill(
            hour("2026-11-01T00:00", audio_ms=3_200, gpu_class="a"),
            hour("2026-11-01T00:00", model="chat/whisper", audio_ms=3_200, gpu_class="b"),
            hour("2026-11-01T00:00", input_tokens=10, images=2, gpu_class="c"),
            hour("2026-11-01T00:00", input_tokens=10, audio_ms=3_200, gpu_class="d"),
        )
        rows = (await books.get("/v1/margin", from_="2026-11")).json["rows"]
    assert [(row["class"], row["revenue"], row["unpricedAudioMs"]) for row in rows] == [
        ("a", "0", 3_200),
        ("b", "0.00032", 0),
        ("c", "0.00003", 0),
        ("d", "0.00003", 0),  # a chat with sounds is billed by its tokens
    ]


async def test_units_in_tables(world: World) -> None:
    await world.books.fill(
        hour("2026-11-04T00:00", "units", documents=300, input_tokens=1000),
        hour("2026-11-04T00:00", "units", model="chat/whisper", audio_ms=3_200),
        hour("2026-11-04T00:00", "units", adapter="chat/sql", audio_ms=800, input_tokens=1000),
    )
    usage = (
        await world.shoal("usage", "--tenant", "units", "--by", "model", "--from", "2026-11", "--to", "2026-12")
    ).output
    assert {"DOCUMENTS", "AUDIO SECONDS"} <= set(re.split(r" {2,}", usage.splitlines()[1].strip()))
    assert "3.2" in usage
    assert "IMAGES" not in usage, "nobody sent any"
    bill = (await world.shoal("bill", "--tenant", "units", "--month", "2026-11")).output
    assert (
        "Not priced: 300 documents of chat/llama: the price list has no `documents` for it; only tokens are billed."
        in bill
    )
    heard = (
        "Not priced: 0.8 seconds of audio of chat/llama, adapter chat/sql: the price list has no `audioSeconds` for it;"
    )
    assert f"{heard} only tokens are billed." in bill
    assert "Not priced: 0 tokens, 3.2 seconds of audio of chat/whisper: no price list has a price for it" in bill
