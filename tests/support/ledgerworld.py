"""A ledger with some usage, reached directly or through an API server, and the commands that ask it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shoal.cli.main import main
from tests.support.ledgerpod import LedgerPod, ledger_pod
from tests.support.queryapi import ADMIN, OCTOBER, Ledger, gpu_hour, hour, ledger

MILLION = 1_000_000


@dataclass
class World:
    books: Ledger
    url: str
    pod: LedgerPod

    async def shoal(self, *args: str, direct: bool = True) -> Result:
        where = (
            ["--ledger-url", self.url, "--ledger-key", ADMIN] if direct else ["--kubeconfig", str(self.pod.kubeconfig)]
        )
        return await run(*args, *where)


async def run(*args: str) -> Result:
    # A command runs an event loop of its own.
    return await asyncio.to_thread(CliRunner().invoke, main, list(args), env={"COLUMNS": "200"})


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with (
        ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path, october=OCTOBER) as books,
        books.served() as url,
        ledger_pod(url, tmp_path) as pod,
    ):
        await books.fill(
            hour("2026-11-01T00:00", requests=1200, input_tokens=2 * MILLION, cached_tokens=MILLION, output_tokens=5),
            hour("2026-11-02T05:00", adapter="chat/sql", input_tokens=7, unknown_cached_input=7, unknown_requests=1),
            hour("2026-11-02T05:00", model="chat/new", input_tokens=42),
            hour("2026-11-03T00:00", "globex", requests=2, input_tokens=30),
            engines=(gpu_hour("2026-11-01T00:00"),),
        )
        yield World(books, url, pod)
