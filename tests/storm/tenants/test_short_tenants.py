"""A short storm over the tenant plane: every record exactly once, whoever is killed; and what it finds when one of the
protections is off (invariant 5)."""

from pathlib import Path

import pytest

from tests.storm.tenants.run import DATABASES, Database, TenantStormConfig, run

pytestmark = pytest.mark.timeout(240)

KILLS = 6
"""Each kind once: a gateway and the ledger at some moment, each between a commit and its answer, and both."""


@pytest.mark.parametrize("database", DATABASES)
async def test_no_record_is_lost_or_counted_twice(tmp_path: Path, database: Database) -> None:
    outcome = await run(TenantStormConfig(KILLS, pause=0.5, database=database), tmp_path / "storm")
    assert outcome.account.violations() == []
    assert outcome.findings.violations == []
    assert outcome.findings.lost() == []
    account = outcome.account
    assert account.kills == {"gateway": 3, "ledger": 3}
    # It was a storm: some streams were cut with what they had at their last checkpoint, most were answered.
    assert account.outcomes["answered"] > account.requests / 2
    assert account.outcomes["cut"] > 0
    assert account.billed.total > 0
    assert account.billed.plus(account.unattributed) == account.engines
    assert account.share is not None
    assert 0 <= account.share < 0.5


@pytest.mark.mutation
async def test_a_batch_marked_before_the_ledgers_answer_is_lost(tmp_path: Path) -> None:
    outcome = await run(
        TenantStormConfig(2, pause=1.5, moves=("ledger",), speed=8, mutation="early-mark"), tmp_path / "storm"
    )
    assert outcome.account.lost


@pytest.mark.mutation
async def test_records_that_come_again_are_double_without_dedupe(tmp_path: Path) -> None:
    # More than one: what is sent again after the first may hold no final row.
    outcome = await run(
        TenantStormConfig(4, pause=0.5, moves=("gateway at answer",), speed=8, mutation="no-dedupe"), tmp_path / "storm"
    )
    assert any("the hours' sums" in text for text in outcome.account.double)


@pytest.mark.mutation
async def test_what_a_killed_gateway_held_has_no_final_record_where_nobody_closes_it(tmp_path: Path) -> None:
    outcome = await run(
        TenantStormConfig(2, pause=1.5, moves=("gateway",), long=0.3, speed=8, mutation="no-close-open"),
        tmp_path / "storm",
    )
    assert any("an open row and no final one" in text for text in outcome.account.lost)
