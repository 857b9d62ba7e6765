"""A gateway can write only its own rows: what the ledger takes from which pod, and what it keeps aside."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from sqlalchemy import select

from shoal.api import keys, names
from shoal.ledger import schema
from shoal.ledger.maintenance import retry_quarantined_once
from shoal.ledger.ownrows import NOT_ITS_OWN, bound
from shoal.ledger.parse import Bad, Good, parse
from shoal.metering.record import gateway_boot
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from shoal.metering.spoolreader import SpoolReader
from tests.support.fake_ledger import until
from tests.support.gateway import INSTALL_KEY as GATEWAYS_KEY
from tests.support.gateway_process import ask, readyz, serving
from tests.support.ledger import INSTALL_KEY, NOW_MS, Rig, Served, record, served, server, store, url
from tests.support.podtokens import PodTokenReviews
from tests.support.records import meter
from tests.support.rolekeys import give
from tests.support.scripted_engine import ScriptedEngine

__all__ = ["server", "url"]

MINE, OTHERS = "shoal-gateway-0", "shoal-gateway-1"
MY_BOOT, THEIR_BOOT = f"{MINE}/aaaa", f"{OTHERS}/bbbb"
NOW = datetime.now(UTC)


@contextlib.asynccontextmanager
async def asking(tmp_path: Path, **settings: Any) -> AsyncGenerator[tuple[Served, PodTokenReviews]]:
    """A ledger that asks for pods' tokens, and the API server that knows them."""
    server = PodTokenReviews()
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    given = {"client": server, "gateway_tokens": True, **settings}
    async with served(url, tmp_path, **given) as ledger:
        yield ledger, server


def rows(request: str, boot: str, *kinds: str, **data: Any) -> list[dict[str, Any]]:
    return [record(request, kind, at=NOW, gateway=boot, **data) for kind in kinds]


async def send(ledger: Served, token: str, *records: Any) -> tuple[int, dict[str, Any]]:
    return await ledger.send(*records, **ledger.headers(), **{names.HEADER_POD_TOKEN: token})


async def table(ledger: Served, of: Any) -> list[dict[str, Any]]:
    found = await ledger.process.store.read(lambda c: c.execute(select(of)).all())
    return [dict(row._mapping) for row in found]


# --- at the door ------------------------------------------------------------------------------------------------------


async def test_a_gateway_sends_its_own_rows_and_no_other_ones(tmp_path: Path) -> None:
    async with asking(tmp_path) as (ledger, server):
        token = server.issue(MINE)
        status, answer = await send(
            ledger, token, *rows("r1", MY_BOOT, "open", "final"), *rows("r2", THEIR_BOOT, "final")
        )
        assert (status, answer["new"], answer["aside"]) == (200, 2, 1)
        (row,) = await table(ledger, schema.usage)
        assert (row["request"], row["gateway"]) == ("r1", MY_BOOT)
        (aside,) = await table(ledger, schema.aside)
        assert aside["reason"] == f"sent by {MINE}: {NOT_ITS_OWN}: it says that it is of {OTHERS}"
        assert ledger.process.store.stats.quarantined == 1


async def test_with_the_check_off_the_same_rows_count(tmp_path: Path) -> None:
    async with asking(tmp_path, gateway_tokens=False) as (ledger, server):
        for headers in ({}, {names.HEADER_POD_TOKEN: server.issue(MINE)}):
            batch = rows(f"r{len(headers)}", THEIR_BOOT, "final")
            status, answer = await ledger.send(*batch, **ledger.headers(), **headers)
            assert (status, answer["new"], answer["aside"]) == (200, 1, 0)
        assert server.asked == 0
        assert {row["gateway"] for row in await table(ledger, schema.usage)} == {THEIR_BOOT}


async def test_without_a_proof_nothing_is_taken_and_nothing_is_put_aside(tmp_path: Path) -> None:
    async with asking(tmp_path) as (ledger, server):
        batch = rows("r1", MY_BOOT, "final")
        status, answer = await ledger.send(*batch)
        assert status == 403
        assert "a token of the pod for audience shoal-ledger is needed" in answer["error"]["message"]
        for token in ("forged", server.issue(account="default"), server.issue(audience="vault"), server.issue(None)):
            status, answer = await send(ledger, token, *batch)
            assert status == 403, answer
        # Nor does a token without a key.
        status, _ = await ledger.send(*batch, **{names.HEADER_POD_TOKEN: server.issue(MINE)})
        assert status == 401
        assert await table(ledger, schema.usage) == await table(ledger, schema.aside) == []


async def test_an_api_server_that_is_away_stops_only_tokens_that_nobody_knows(tmp_path: Path) -> None:
    async with asking(tmp_path) as (ledger, server):
        known = server.issue(MINE)
        assert (await send(ledger, known, *rows("r1", MY_BOOT, "final")))[0] == 200
        server.away = True
        status, answer = await send(ledger, server.issue(OTHERS), *rows("r2", THEIR_BOOT, "final"))
        assert (status, "Retry-After" in answer["headers"]) == (503, True)
        assert (await send(ledger, known, *rows("r3", MY_BOOT, "final")))[0] == 200


async def test_a_gateway_of_before_the_role_keys_needs_no_token_while_its_key_is_valid(tmp_path: Path) -> None:
    (old := tmp_path / "old").mkdir()
    other = b"the install key of before"
    (old / "current").write_bytes(other)
    async with asking(tmp_path, install_key_dir=old) as (ledger, _):
        bearer = {"Authorization": f"Bearer {keys.derive_old(other, 'gateway', keys.LEDGER)}"}
        status, answer = await ledger.send(*rows("r1", "cccc", "open"), **bearer)
        assert (status, answer["new"]) == (200, 1)
        # Not with what is derived in two steps, which only newer gateways have.
        assert (await ledger.send(*rows("r2", "cccc", "final")))[0] == 403
        (old / "current").unlink()
        await until(lambda: not ledger.process.key_ring.old_bearers_of("gateway", keys.LEDGER))
        assert (await ledger.send(*rows("r1", "cccc", "final"), **bearer))[0] == 401


# --- whose request ----------------------------------------------------------------------------------------------------


def good(pod: str | None, *records: dict[str, Any]) -> list[Any]:
    parsed = [parse(orjson.loads(orjson.dumps(each)), NOW_MS) for each in records]
    return parsed if pod is None else [bound(each, pod) for each in parsed]


async def taken(rig: Rig, pod: str | None, *records: dict[str, Any]) -> tuple[int, int, int]:
    answer = await rig.store.take(good(pod, *records))
    return answer.new, answer.known, answer.aside


async def test_a_request_is_settled_by_its_own_gateway_alone(url: str) -> None:
    async with store(url) as rig:
        assert await taken(rig, OTHERS, *rows("r1", THEIR_BOOT, "open", "checkpoint:1")) == (2, 0, 0)
        # Under its own name, so the row itself looks right: free of charge, and an attempt that nobody made.
        assert await taken(rig, MINE, *rows("r1", MY_BOOT, "final", inputTokens=0, outputTokens=0)) == (0, 0, 1)
        assert await taken(rig, MINE, *rows("r1", MY_BOOT, "attempt:1")) == (0, 0, 1)
        assert await taken(rig, OTHERS, *rows("r1", THEIR_BOOT, "attempt:1", "final")) == (2, 0, 0)
        assert (await rig.usage("r1"))["output_tokens"] == 10
        # Nor changed afterwards.
        assert await taken(rig, MINE, *rows("r1", MY_BOOT, "final")) == (0, 0, 1)
        reasons = {row["reason"] for row in await rig.rows(schema.aside)}
        assert reasons == {f"sent by {MINE}: {NOT_ITS_OWN}: its request is of gateway {THEIR_BOOT}"}
        await rig.balanced()


async def test_without_a_proof_a_request_is_settled_by_anybody(url: str) -> None:
    async with store(url) as rig:
        await taken(rig, None, *rows("r1", THEIR_BOOT, "open"))
        assert await taken(rig, None, *rows("r1", MY_BOOT, "final", inputTokens=0, outputTokens=0)) == (1, 0, 0)
        assert await taken(rig, None, *rows("r1", THEIR_BOOT, "final")) == (0, 1, 0)
        assert (await rig.usage("r1"))["output_tokens"] == 0


async def test_both_in_one_transaction(url: str) -> None:
    async with store(url) as rig:
        mine, theirs = good(MINE, *rows("r1", MY_BOOT, "final")), good(OTHERS, *rows("r1", THEIR_BOOT, "open", "final"))
        first, second = await asyncio.gather(rig.store.take(theirs), rig.store.take(mine))
        assert (first.new, second.aside) == (2, 1)
        assert (await rig.usage("r1"))["gateway"] == THEIR_BOOT


async def test_the_id_of_another_ones_row_cannot_be_taken(url: str) -> None:
    stolen = {**rows("r2", MY_BOOT, "final")[0], "id": "r1:final"}
    async with store(url) as rig:
        assert await taken(rig, MINE, stolen) == (0, 0, 1)
        assert await taken(rig, OTHERS, *rows("r1", THEIR_BOOT, "final")) == (1, 0, 0)
    # With nobody asked it shuts the row out whose id it is.
    async with store(f"{url}.off" if url.startswith("sqlite") else url) as rig:
        stolen = {**rows("r4", MY_BOOT, "final")[0], "id": "r3:final"}
        assert await taken(rig, None, stolen) == (1, 0, 0)
        assert await taken(rig, None, *rows("r3", THEIR_BOOT, "final")) == (0, 1, 0)


async def test_the_next_process_of_a_pod_ships_what_the_one_before_left(url: str) -> None:
    before, after = f"{MINE}/first", f"{MINE}/second"
    async with store(url) as rig:
        assert await taken(rig, MINE, *rows("r1", before, "open")) == (1, 0, 0)
        left = [*rows("r1", before, "final", outcome="cut"), *rows("r2", after, "open", "final")]
        assert await taken(rig, MINE, *left) == (3, 0, 0)
        assert {row["gateway"] for row in await rig.rows(schema.usage)} == {before, after}
        await rig.balanced()


async def test_rows_of_before_an_upgrade_count_and_become_the_senders(url: str) -> None:
    async with store(url) as rig:
        assert await taken(rig, None, *rows("r1", "cccc", "open")) == (1, 0, 0)  # its gateway knew of no token
        # The pod is another one now and has its volume.
        assert await taken(rig, MINE, *rows("r1", "cccc", "final"), *rows("r2", "cccc", "final")) == (2, 0, 0)
        assert {row["gateway"] for row in await rig.rows(schema.usage)} == {f"{MINE}/cccc"}
        await rig.balanced()
        # A bare boot id is no way around: it is the sender's, and so is the request.
        assert await taken(rig, OTHERS, *rows("r2", "cccc", "final")) == (0, 0, 1)
        await taken(rig, None, *rows("r3", "dddd", "open"))
        assert await taken(rig, OTHERS, *rows("r3", MY_BOOT, "final")) == (0, 0, 1)
        assert await taken(rig, OTHERS, *rows("r3", "eeee", "final")) == (0, 0, 1)
        # A row without one as well.
        nameless = record("r4", at=NOW)
        del nameless["data"]["gateway"]
        assert await taken(rig, MINE, nameless) == (1, 0, 0)
        assert (await rig.usage("r4"))["gateway"] == f"{MINE}/"


async def test_what_is_not_its_own_stays_aside_when_the_ledger_looks_again(url: str) -> None:
    later = {**rows("r3", THEIR_BOOT, "final")[0], "specversion": "2.0"}  # a newer ledger may understand it
    async with store(url) as rig:
        await taken(rig, OTHERS, *rows("r1", THEIR_BOOT, "open"))
        assert await taken(rig, MINE, *rows("r1", MY_BOOT, "final"), *rows("r2", THEIR_BOOT, "final"), later) == (
            0,
            0,
            3,
        )
        assert await retry_quarantined_once(rig.store, 36_500, lambda _: None) == 0

        def understood(connection: Any) -> None:
            body = orjson.dumps({**later, "specversion": "1.0"})
            aside = schema.aside
            connection.execute(aside.update().where(aside.c.reason.contains("specversion")).values(body=body))

        await rig.store.write(understood)
        assert await retry_quarantined_once(rig.store, 36_500, lambda _: None) == 0
        assert await rig.count(schema.aside) == 3
        assert [row["request"] for row in await rig.rows(schema.usage)] == ["r1"]


async def test_a_senders_own_row_that_a_newer_ledger_understands_counts(url: str) -> None:
    later = {**rows("r1", MY_BOOT, "final")[0], "specversion": "2.0"}
    async with store(url) as rig:
        assert await taken(rig, MINE, later) == (0, 0, 1)

        def understood(connection: Any) -> None:
            body = orjson.dumps({**later, "specversion": "1.0"})
            connection.execute(schema.aside.update().values(body=body))

        await rig.store.write(understood)
        assert await retry_quarantined_once(rig.store, 36_500, lambda _: None) == 1
        assert (await rig.usage("r1"))["gateway"] == MY_BOOT


def test_every_row_that_a_gateway_writes_is_its_own() -> None:
    it = meter("r1")
    it._base["gateway"] = gateway_boot(MINE, "aaaa")
    it.attempts = 1
    written = [it.open_row(), it.checkpoint_row(), it.checkpoint_row(), it.attempt_row(), it.final_row()]
    parsed = [parse(orjson.loads(row[3]), NOW_MS) for row in written[:-1]]
    it.outcome = "answered"
    parsed.append(parse(orjson.loads(it.final_row()[3]), NOW_MS))
    assert [isinstance(bound(each, MINE), Good) for each in parsed] == [True] * 5
    assert [isinstance(bound(each, OTHERS), Bad) for each in parsed] == [True] * 5


def test_a_name_that_is_no_pods_is_not_in_the_boot_id() -> None:
    assert gateway_boot("shoal-gateway-0", "aaaa") == "shoal-gateway-0/aaaa"
    for name in ("", 'a"b', "a/b", "Ä"):
        assert gateway_boot(name, "aaaa") == "aaaa"


# --- the gateway's side -----------------------------------------------------------------------------------------------


async def test_a_refused_token_loses_no_row_and_puts_none_aside(tmp_path: Path) -> None:
    (folder := tmp_path / "ledger").mkdir()
    told: list[str] = []
    async with asking(folder) as (ledger, server):
        spool = UsageSpool(tmp_path / "spool")
        spool.start()
        await spool.opened()
        known = [keys.derive(b"one that it does not know", "gateway", keys.LEDGER)]
        known.append(keys.derive(INSTALL_KEY, "gateway", keys.LEDGER))
        shipper = Shipper(spool, ledger.url, lambda: known, token=lambda: told[-1] if told else "")
        task = asyncio.create_task(shipper.run())
        try:
            it = meter("r1")
            it._base["gateway"] = MY_BOOT
            await spool.commit(it.open_row())
            it.outcome, it.status = "answered", 200
            spool.put(it.final_row())
            wanted = "the ledger does not take this gateway's records: a token of the pod for audience"
            await until(lambda: (shipper.error or "").startswith(wanted))
            told.append("forged")
            await until(lambda: "does not know the pod's token" in (shipper.error or ""))
            server.away = True
            told.append(server.issue(MINE))
            await until(lambda: shipper.error == "the ledger answers with status 503")
            server.away = False
            assert await shipper.drain(20), shipper.error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await spool.stop()
        assert (shipper.stats.quarantined, spool.stats.damaged_rows) == (0, 0)
        (row,) = await table(ledger, schema.usage)
        assert (row["ended"], row["gateway"]) == (True, MY_BOOT)


async def test_a_whole_gateway_proves_itself_by_its_mounted_token(tmp_path: Path) -> None:
    (folder := tmp_path / "ledger").mkdir()
    async with asking(folder) as (ledger, server), aiohttp.ClientSession() as session:
        file = tmp_path / "token"
        given: dict[str, Any] = {"ledger_url": ledger.url, "pod_name": MINE, "ledger_token_file": file}
        give(folder / "install-key", GATEWAYS_KEY, "ledger", "previous")
        async with serving(tmp_path, ScriptedEngine(), **given) as process:
            assert process.identity.boot.startswith(f"{MINE}/")
            async with ask(session, process) as answer:
                assert answer.status == 200
            shipper = process.shipper
            assert shipper is not None
            await until(lambda: "a token of the pod" in (shipper.error or ""))
            assert "a token of the pod" in (await readyz(session, process))[1]["ledger"]
            file.write_text(server.issue(MINE))
        reader = SpoolReader(tmp_path / "spool")
        assert all(row.shipped for row in reader.newest(1000))
        reader.close()
        (row,) = await table(ledger, schema.usage)
        assert (row["ended"], row["gateway"]) == (True, process.identity.boot)
        assert await table(ledger, schema.aside) == []
        # By the same id the totals say what they have of this gateway's own counters.
        total = ledger.process.totals.total("acme")
        assert total is not None
        assert list(total.gateways) == [process.identity.boot]
