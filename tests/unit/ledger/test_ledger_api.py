"""The ledger's API: keys, bounds, errors, and what it says of itself."""

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import zstandard

from shoal.api import keys
from tests.support.ledger import INSTALL_KEY, Served, record, served, until
from tests.support.rolekeys import give


@pytest.fixture
async def ledger(tmp_path: Path) -> Any:
    async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, max_body_bytes=20_000) as it:
        yield it


async def test_a_batch_is_answered_after_its_commit(ledger: Served) -> None:
    status, answer = await ledger.send(record("r1", "open"), record("r1"), {"no": "record"})
    assert (status, answer["new"], answer["known"], answer["aside"]) == (200, 2, 0, 1)
    status, answer = await ledger.send(record("r1"))
    assert (status, answer["new"], answer["known"]) == (200, 0, 1)


async def test_a_compressed_batch(ledger: Served) -> None:
    body = zstandard.compress(orjson.dumps([record(f"r{n}") for n in range(10)]))
    headers = ledger.headers() | {"Content-Encoding": "zstd"}
    status, answer = await ledger.call("POST", "/v1/records", body, **headers)
    assert (status, answer["new"]) == (200, 10)


@pytest.mark.parametrize(
    ("body", "encoding", "status", "message"),
    [
        (b"{not json", "", 400, "the body is not JSON"),
        (b'{"id": 1}', "", 400, "not a JSON array of usage records"),
        (b"nothing of the kind", "zstd", 400, "not zstd"),
        (zstandard.compress(b"[" + b" " * 100_000 + b"]"), "zstd", 413, "larger than 20000 bytes when decompressed"),
        (b" " * 20_001, "", 413, "larger than 20000 bytes: send it in parts"),
        (b"[]", "br", 415, "Content-Encoding br is not known here: zstd or none"),
    ],
)
async def test_a_body_that_is_none(ledger: Served, body: bytes, encoding: str, status: int, message: str) -> None:
    headers = ledger.headers() | ({"Content-Encoding": encoding} if encoding else {})
    got, answer = await ledger.call("POST", "/v1/records", body, **headers)
    assert got == status
    assert message in answer["error"]["message"]


async def test_a_body_without_a_length_is_bounded_too(ledger: Served) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 1_000

    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{ledger.url}/v1/records", data=endless(), headers=ledger.headers()) as answer,
    ):
        assert answer.status == 413


async def test_who_may_call(ledger: Served) -> None:
    body = orjson.dumps([record("r1")])
    for headers in (
        {"X-Nothing": "1"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {keys.derive(INSTALL_KEY, 'gateway', keys.LEDGER)}"},
        ledger.headers(install_key=b"another installation's"),
        {"Authorization": f"Bearer {keys.derive(INSTALL_KEY, 'gateway', keys.DEMAND)}"},
    ):
        status, answer = await ledger.call("POST", "/v1/records", body, **headers)
        assert status == 401, headers
        assert "a key of this installation is needed" in answer["error"]["message"]
        assert answer["headers"]["www-authenticate"] == "Bearer"
    # Of a role that has no business here the ledger does not even know the key.
    for role in ("admin", "operator", "logs"):
        assert (await ledger.call("POST", "/v1/records", body, **ledger.headers(role)))[0] == 401
    for role in ("billing", "ledger"):
        status, answer = await ledger.call("POST", "/v1/records", body, **ledger.headers(role))
        assert status == 403
        assert answer["error"]["message"] == f"the key of role {role} may not do this: gateway may"
    key = keys.derive(INSTALL_KEY, "gateway", keys.LEDGER)
    assert (await ledger.call("POST", "/v1/records", body, **{"x-shoal-key": key}))[0] == 200


async def test_both_install_keys_are_valid_while_there_are_two(ledger: Served, tmp_path: Path) -> None:
    give(tmp_path / "install-key", b"the one before", "ledger", "previous")
    ledger.process.key_ring.refresh()
    body = orjson.dumps([record("r1")])
    for key in (INSTALL_KEY, b"the one before"):
        assert (await ledger.call("POST", "/v1/records", body, **ledger.headers(install_key=key)))[0] == 200


async def test_unknown_paths_and_methods(ledger: Served) -> None:
    status, answer = await ledger.call("GET", "/v2/records")
    assert (status, answer["error"]["message"]) == (404, "the ledger has no /v2/records")
    status, answer = await ledger.call("DELETE", "/v1/records")
    assert (status, answer["headers"]["allow"], answer["error"]["message"]) == (405, "POST", "/v1/records takes POST")


async def test_ready_only_with_a_database_and_an_install_key(tmp_path: Path) -> None:
    async with (
        served(f"sqlite:///{tmp_path}/no/such/dir\0/x.sqlite".replace("\0", ""), tmp_path) as ledger,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"{ledger.ops}/readyz") as answer:
            assert answer.status == 200
        (tmp_path / "install-key" / "current").unlink()
        ledger.process.key_ring.refresh()
        async with session.get(f"{ledger.ops}/readyz") as answer:
            assert answer.status == 503
            assert "no keys in" in (await answer.json())["installKey"]
        async with session.get(f"{ledger.ops}/healthz") as answer:
            assert answer.status == 200
        status, _ = await ledger.send(record("r1"))
        assert status == 401


async def test_metrics(ledger: Served) -> None:
    await ledger.send(record("r1"), record("r1"), {"no": "record"})
    async with aiohttp.ClientSession() as session, session.get(f"{ledger.ops}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    assert 'shoal_ledger_records_total{result="new"} 1.0' in lines
    assert 'shoal_ledger_records_total{result="known"} 1.0' in lines
    assert 'shoal_ledger_records_total{result="aside"} 1.0' in lines
    assert "shoal_ledger_database_up 1.0" in lines
    assert not any("acme" in line for line in lines), "no tenant in a metric"
    assert not any(line.startswith("shoal_ledger_open_requests") for line in lines), "not counted yet is not zero"


async def test_a_folder_that_cannot_be_made_is_told_and_not_acknowledged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here be no folder")
    url = f"sqlite:///{tmp_path}/file/ledger.sqlite"
    async with served(url, tmp_path, ready=False) as ledger:
        await until(lambda: "File exists" in (ledger.process.store.error or ""))
        status, answer = await ledger.send(record("r1"))
        assert status == 503
        assert answer["headers"]["retry-after"] == "1"
        assert "File exists" in answer["error"]["message"]
        assert "File exists" in ledger.process.missing()["database"]
        (tmp_path / "file").unlink()
        await until(lambda: ledger.process.store.error is None)
        assert (await ledger.send(record("r1")))[0] == 200


async def test_a_part_that_fails_keeps_no_record_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []

    async def fails(*_: Any) -> None:
        failed.append(1)
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("shoal.ledger.process.maintenance.retain", fails)
    monkeypatch.setattr("shoal.ledger.process._AGAIN_SECONDS", 0.01)
    async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as ledger:
        await until(lambda: len(failed) > 2)
        assert (await ledger.send(record("r1")))[0] == 200
