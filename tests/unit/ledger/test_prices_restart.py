"""Price lists that were accepted stay in force after a restart of the ledger whose files are refused."""

from pathlib import Path

import pytest
from sqlalchemy import select

from shoal.ledger import prices
from shoal.ledger.schema import price_lists
from shoal.ledger.store import LedgerStore
from tests.support.ledger import Served, served, server, store, until, url
from tests.support.queryapi import MID_NOVEMBER, OCTOBER

__all__ = ["server", "url"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "REFRESH_SECONDS", 0.02)


def write(folder: Path, **lists: str) -> None:
    """Puts these lists, and no others, into the ledger's folder."""
    (folder / "prices").mkdir(exist_ok=True)
    for path in (folder / "prices").iterdir():
        path.unlink()
    for name, text in lists.items():
        (folder / "prices" / f"{name}.yaml").write_text(text)


def names(it: Served) -> list[str]:
    return [one.prices.list for one in it.process.prices.schedule.lists]


async def stored(from_: LedgerStore) -> dict[str, str]:
    found = await from_.read(lambda connection: connection.execute(select(price_lists)).all())
    return dict(tuple(row) for row in found)


async def kept(it: Served) -> dict[str, str]:
    """What the database has once the accepted lists are in it."""
    await until(lambda: not it.process.prices.unkept)
    return await stored(it.process.store)


async def test_the_lists_before_a_refused_one_stay_in_force_after_a_restart(url: str, tmp_path: Path) -> None:
    write(tmp_path, demo=OCTOBER)
    async with served(url, tmp_path) as it:
        assert await kept(it) == {"demo.yaml": OCTOBER}
        write(tmp_path, demo=OCTOBER, mine=OCTOBER)
        await until(lambda: it.process.prices.error)
        assert names(it) == ["demo"]
    async with served(url, tmp_path) as it:
        assert "mine.yaml:2: begins when demo.yaml does" in str(it.process.prices.error)
        assert names(it) == ["demo"]
        async with it.totals() as message:
            first = await message()
            assert first["prices"]["list"] == "demo"
            assert first["pricesRefused"].startswith("mine.yaml:2: begins when demo.yaml does")
            write(tmp_path, demo=OCTOBER, mine=MID_NOVEMBER)
            await until(lambda: it.process.prices.error is None)
            while (said := await message()).get("pricesRefused", "") is not None:
                pass
            assert said["full"]
        assert await kept(it) == {"demo.yaml": OCTOBER, "mine.yaml": MID_NOVEMBER}
        assert names(it) == ["demo", "mine"]


async def test_a_restart_with_valid_files_uses_these(url: str, tmp_path: Path) -> None:
    write(tmp_path, demo=OCTOBER)
    async with served(url, tmp_path) as it:
        await kept(it)
    write(tmp_path, other=OCTOBER)
    async with served(url, tmp_path) as it:
        assert names(it) == ["other"]
        assert await kept(it) == {"other.yaml": OCTOBER}


async def test_lists_that_were_taken_away_do_not_come_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    write(tmp_path, demo=OCTOBER)
    async with served(url, tmp_path) as it:
        await kept(it)
        write(tmp_path)
        await until(lambda: not names(it))
        assert await kept(it) == {}
    write(tmp_path, bad="currency: x\n")
    async with served(url, tmp_path) as it:
        assert names(it) == []


async def test_kept_lists_that_this_version_refuses_do_not_stop_the_ledger(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    async with store(url) as rig:
        row = [{"file": "old.yaml", "text": "currency: x\n"}]
        await rig.store.write(lambda connection: connection.execute(price_lists.insert(), row) and None)
    write(tmp_path, bad="currency: x\n")
    async with served(url, tmp_path) as it:
        assert (names(it), it.process.missing()) == ([], {})


async def test_lists_that_are_too_large_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those of before: older prices than the last accepted ones are worse than none."""
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    write(tmp_path, demo=OCTOBER)
    async with served(url, tmp_path) as it:
        await kept(it)
        monkeypatch.setattr(prices, "MOST_KEPT", len(OCTOBER))
        write(tmp_path, demo=OCTOBER, mine=MID_NOVEMBER)
        await until(lambda: len(names(it)) == 2)
        assert await kept(it) == {}
