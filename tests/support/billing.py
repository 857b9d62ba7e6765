"""A month of usage at two price lists, on both databases."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.rating import money
from tests.support.queryapi import MID_NOVEMBER, OCTOBER, Ledger, gpu_hour, hour, ledger

MILLION = 1_000_000

ROWS = (
    hour("2026-11-01T00:00", input_tokens=MILLION, cached_tokens=400_000, output_tokens=100_000, requests=3),
    hour("2026-11-14T23:00", input_tokens=MILLION, key_name="batch", gpu_class="l4"),
    hour("2026-11-15T00:00", input_tokens=MILLION),
    hour("2026-11-02T00:00", plan="gold", input_tokens=MILLION, external_id="cus_new"),
    hour("2026-11-02T00:00", adapter="chat/sql", input_tokens=MILLION),
    hour("2026-11-03T00:00", model="chat/new", input_tokens=42, output_tokens=8),
    hour("2026-11-04T00:00", model="chat/new", requests=5),
    hour("2026-11-04T00:00", input_tokens=777, billed=False),
    hour("2026-10-31T23:00", input_tokens=MILLION),
    hour("2026-12-01T00:00", input_tokens=MILLION),
    hour("2026-11-01T00:00", "globex", input_tokens=2 * MILLION),
)
GPUS = (
    gpu_hour("2026-11-01T00:00"),
    gpu_hour("2026-11-02T00:00", gpu_seconds=1800.0, cost=1_250_000_000),
    gpu_hour("2026-11-01T00:00", "l4", currency="USD"),
    gpu_hour("2026-11-01T00:00", "a100", gpu_seconds=7200.0, cost=0, currency=""),
    gpu_hour("2026-11-01T00:00", "idle"),
    gpu_hour("2026-11-01T00:00", "counted", gpu_seconds=0.0, cost=0, prompt_tokens=5),
)


@pytest.fixture
async def books(url: str, tmp_path: Path) -> AsyncGenerator[Ledger]:
    async with ledger(url, tmp_path, october=OCTOBER, november=MID_NOVEMBER) as found:
        await found.fill(*ROWS, engines=GPUS)
        yield found


async def bill(books: Ledger, **query: Any) -> dict[str, Any]:
    answer = await books.get("/v1/bill", **{"tenant": "acme", "month": "2026-11"} | query)
    assert answer.status == 200, answer.body
    return answer.json


def credit(**changes: Any) -> dict[str, Any]:
    return {"id": "c1", "tenant": "acme", "month": "2026-11", "amount": "1.50", "note": "outage"} | changes


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncGenerator[Ledger]:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, october=OCTOBER) as found:
        yield found


def of_cents(count: int, currency: str) -> int:
    """Whole smallest units of a currency as an amount."""
    return count * 10 ** (money.SCALE - money.decimals(currency))
