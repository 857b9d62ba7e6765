"""The mounted folder of price lists: followed as a ConfigMap changes, never left without the last good lists."""

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from shoal.ledger.prices import PriceFolder, PriceMetrics
from tests.support.ledger import served
from tests.support.queryapi import MID_NOVEMBER, NOW, OCTOBER, ms, price_folder


def names(folder: PriceFolder) -> list[str]:
    return [one.prices.list for one in folder.schedule.lists]


def stats(folder: PriceFolder) -> tuple[float | None, float | None]:
    registry = CollectorRegistry()
    registry.register(PriceMetrics(folder))
    value = registry.get_sample_value
    return value("shoal_ledger_price_lists"), value("shoal_ledger_price_lists_refused")


def mount(folder: Path, version: str, **files: str) -> None:
    """As a kubelet brings a ConfigMap's new state: a folder of its own, a link to it replaced in one step."""
    (folder / version).mkdir(parents=True)
    for name, text in files.items():
        (folder / version / f"{name}.yaml").write_text(text)
        if not (folder / f"{name}.yaml").is_symlink():
            (folder / f"{name}.yaml").symlink_to(Path("..data") / f"{name}.yaml")
    (folder / "..data_tmp").symlink_to(version)
    os.replace(folder / "..data_tmp", folder / "..data")
    for path in folder.glob("*.yaml"):
        if path.stem not in files:
            path.unlink()


async def test_the_list_in_force_is_the_one_of_the_moment(tmp_path: Path) -> None:
    folder = price_folder(tmp_path / "prices", october=OCTOBER, november=MID_NOVEMBER)
    current, before, first = folder.current(), folder.at(ms("2026-11-14T23:59")), folder.at(ms("2026-09-01"))
    assert (current and current.list, before and before.list, first) == ("november", "october", None)
    assert stats(folder) == (2, 0)


async def test_the_same_list_stays_the_same_object(tmp_path: Path) -> None:
    folder = price_folder(tmp_path / "prices", october=OCTOBER)
    before = folder.current()
    os.utime(tmp_path / "prices" / "october.yaml", ns=(1, 1))
    assert not await folder.refresh()
    assert folder.current() is before


async def test_a_configmap_that_changes_is_followed(tmp_path: Path) -> None:
    mount(tmp_path / "prices", "..2026_11_01", october=OCTOBER)
    folder = PriceFolder(tmp_path / "prices", lambda: ms(NOW) / 1000)
    assert await folder.refresh()
    assert names(folder) == ["october"]
    mount(tmp_path / "prices", "..2026_11_02", october=OCTOBER, november=MID_NOVEMBER)
    assert await folder.refresh()
    assert names(folder) == ["october", "november"]
    mount(tmp_path / "prices", "..2026_11_03", november=MID_NOVEMBER)
    assert await folder.refresh()
    assert names(folder) == ["november"]


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("november.yaml", MID_NOVEMBER.replace('"15"', "-1"), "november.yaml:4: `prices.output`: '-1' is not a price"),
        ("november.yaml", OCTOBER, "october.yaml:2: begins when november.yaml does"),
        (
            "november.yaml",
            MID_NOVEMBER.replace("EUR", "USD"),
            "november.yaml:1: prices in USD, but those of october.yaml",
        ),
        ("november.txt", MID_NOVEMBER, "november.txt:1: is no .yaml file: this folder is for price lists"),
    ],
)
async def test_bad_lists_are_refused_as_a_whole_and_the_last_good_ones_stay(
    tmp_path: Path, file: str, text: str, error: str
) -> None:
    folder = price_folder(tmp_path / "prices", october=OCTOBER)
    before = folder.current()
    (tmp_path / "prices" / file).write_text(text)
    assert not await folder.refresh()
    assert folder.error is not None
    assert error in folder.error
    assert folder.current() is before
    assert stats(folder) == (1, 1)
    (tmp_path / "prices" / file).unlink()
    assert not await folder.refresh()
    assert (folder.error, stats(folder)) == (None, (1, 0))


async def test_a_mistake_in_one_file_hides_no_conflict_between_others(tmp_path: Path) -> None:
    """Whoever corrects the lists sees all mistakes at once."""
    dollars = MID_NOVEMBER.replace("EUR", "USD")
    folder = price_folder(tmp_path / "prices", october=OCTOBER, november=dollars, december="prices: many")
    assert folder.error is not None
    lines = folder.error.splitlines()
    assert any(line.startswith("december.yaml:1: ") for line in lines)
    assert any("prices in USD, but those of october.yaml" in line for line in lines)
    assert folder.refused == tuple(lines)


async def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    folder = price_folder(tmp_path / "prices", october=OCTOBER)
    (tmp_path / "prices" / "x.yaml").write_bytes(b"\xff\xfe\x00")
    await folder.refresh()
    assert folder.error == "x.yaml:1: not UTF-8"


async def test_without_a_folder_nothing_has_a_price(tmp_path: Path) -> None:
    folder = PriceFolder(tmp_path / "none")
    await folder.refresh()
    assert (folder.current(), folder.error, stats(folder)) == (None, None, (0, 0))


async def test_others_hear_of_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.ledger.prices.REFRESH_SECONDS", 0.01)
    folder = price_folder(tmp_path / "prices", october=OCTOBER)
    heard = asyncio.Event()
    following = asyncio.create_task(folder.follow(heard.set))
    try:
        (tmp_path / "prices" / "november.yaml").write_text(MID_NOVEMBER)
        async with asyncio.timeout(10):
            await heard.wait()
    finally:
        following.cancel()
    assert names(folder) == ["october", "november"]


async def test_a_ledger_with_bad_lists_is_ready_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "bad.yaml").write_text("currency: x\n")
    async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as it:
        ops = it.ops
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{ops}/readyz") as answer:
                assert (answer.status, (await answer.json())["status"]) == (200, "ok")
                assert "bad.yaml:1: `currency`" in (await answer.json())["prices"]
            async with session.get(f"{ops}/metrics") as answer:
                assert "shoal_ledger_price_lists_refused 1.0" in await answer.text()
