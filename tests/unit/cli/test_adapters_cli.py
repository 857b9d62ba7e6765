"""`shoal adapters`: what a person sees of pools and adapters, and what is said when they cannot be had."""

import csv
import io
import json
from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from shoal.api.adapterstats import AdapterStats, AdapterStatsAnswer, PoolStats, ReplicaAdapters
from shoal.cli.adapters import hit_rate, ordered, render
from shoal.cli.main import main
from shoal.controllers.lora.serve import add_routes
from shoal.net.shell import Shell
from tests.support.cannedapi import CannedApi
from tests.support.shells import call

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
LEASE = "/apis/coordination.k8s.io/v1/namespaces/shoal-system/leases/shoal-operator"
POD = "/api/v1/namespaces/shoal-system/pods/shoal-operator-1:9090/proxy/v1/adapters"
POET = AdapterStats(
    adapter="chat/poet",
    residency="Warm",
    revision="0123456789ab",
    next="ba9876543210",
    rank=16,
    ready="True",
    reason="Resident",
    wanted=2,
    resident=("base-1",),
    desired=("base-1", "base-2"),
    in_flight=3,
    held=0,
    arrivals=1000,
    misses=20,
    last_used=NOW - timedelta(seconds=34),
)
PINNED = AdapterStats(
    adapter="chat/pinned",
    residency="Pinned",
    revision="0123456789ab",
    ready="False",
    reason="NoRoom",
    message="9 are pinned and a replica takes 7",
    wanted=2,
    arrivals=0,
    misses=0,
    in_flight=None,
)
POOL = PoolStats(
    pool="chat/pool",
    model="chat/base",
    slots=7,
    cached=64,
    ready="True",
    stale=("shoal-gateway-1",),
    replicas=(
        ReplicaAdapters(pod="base-1", ready=True, live=True, slots=7, leased=2, loaded=5, loads=40, evictions=3),
        ReplicaAdapters(pod="base-2", ready=True, live=False),
    ),
    adapters=(POET, PINNED),
)


def answer(*pools: PoolStats) -> AdapterStatsAnswer:
    return AdapterStatsAnswer(operator="shoal-operator-1", time=NOW, pools=pools)


def shown(found: AdapterStatsAnswer, **kw: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(found, **kw))  # type: ignore[arg-type]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_it_shows_slots_residency_hits_swaps_and_why_one_has_no_place() -> None:
    lines = shown(answer(POOL)).splitlines()
    assert lines[0] == (
        "chat/pool on Model chat/base: 7 adapters at a time and 64 in memory on each replica, 2 adapters, hits 98.0%"
    )
    assert "shoal-gateway-1" in lines[1]
    first, second = (
        next(line.split() for line in lines if line.strip().startswith(pod)) for pod in ("base-1", "base-2")
    )
    assert first == ["base-1", "2/7", "5", "?", "?", "40", "3"]
    assert second == ["base-2", *"??????"]
    poet = next(line for line in lines if "chat/poet" in line)
    assert poet.split() == [
        "chat/poet", "0123456789ab", "->", "ba9876543210", "16", "1/2", "2/2", "3", "0", "1,000", "98.0%", "34", "s",
        "Resident",
    ]  # fmt: skip
    assert "NoRoom: 9 are pinned and a replica takes 7" in next(line for line in lines if "chat/pinned" in line)


def test_wide_names_the_replicas_that_have_each_adapter_and_those_that_lack_it() -> None:
    lost = PINNED.model_copy(update={"adapter": "chat/stale", "resident": None})
    lines = shown(answer(POOL.model_copy(update={"adapters": (POET, PINNED, lost)})), wide=True).splitlines()
    ends = {name: next(line for line in lines if f"chat/{name} " in line) for name in ("poet", "pinned", "stale")}
    assert ends["poet"].endswith(" base-1, base-2 (to load)")
    assert ends["pinned"].endswith(" -")
    assert ends["stale"].endswith(" ?")
    assert "base-2 (to load)" not in shown(answer(POOL))


def test_hits_are_unknown_where_nobody_tells() -> None:
    assert hit_rate([]) == "-"
    assert hit_rate([POET.model_copy(update={"arrivals": None})]) == "?"
    assert hit_rate([POET]) == "98.0%"


def test_the_most_used_come_first_and_what_is_left_out_is_said() -> None:
    assert [a.adapter for a in ordered([PINNED, POET], "used")] == ["chat/poet", "chat/pinned"]
    assert [a.adapter for a in ordered([PINNED, POET], "requests")] == ["chat/poet", "chat/pinned"]
    assert "and 1 more" in shown(answer(POOL), limit=1)


@pytest.fixture
def cluster(tmp_path: Path) -> Generator[tuple[CannedApi, Path]]:
    api = CannedApi(
        {LEASE: {"spec": {"holderIdentity": "shoal-operator-1"}}, POD: answer(POOL).model_dump(mode="json")}
    )
    with api.kubeconfig(tmp_path) as kubeconfig:
        yield api, kubeconfig


def run(kubeconfig: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["adapters", "--kubeconfig", str(kubeconfig), *args])


def test_it_asks_the_leader_for_one_pool_and_prints_json(cluster: tuple[CannedApi, Path]) -> None:
    api, kubeconfig = cluster
    done = run(kubeconfig, "--pool", "pool", "-o", "json")
    assert done.exit_code == 0, done.output
    assert [each["adapter"] for each in json.loads(done.output)["pools"][0]["adapters"]] == ["chat/pinned", "chat/poet"]
    assert any(asked.endswith("/v1/adapters?namespace=chat&pool=pool") for asked in api.asked)
    assert "base-2 (to load)" in run(kubeconfig, "--pool", "pool", "-o", "wide").output


@pytest.mark.parametrize("output", ["json", "yaml", "csv"])
def test_programs_get_the_order_and_the_number_that_were_asked_for(
    cluster: tuple[CannedApi, Path], output: str
) -> None:
    api, kubeconfig = cluster
    many = tuple(PINNED.model_copy(update={"adapter": f"chat/a{n:02d}"}) for n in reversed(range(60)))
    api.answers[POD] = answer(POOL.model_copy(update={"adapters": (*many, POET)})).model_dump(mode="json")

    def printed(*args: str) -> list[str]:
        done = run(kubeconfig, "-o", output, *args)
        assert done.exit_code == 0, done.output
        if output == "csv":
            return [row["adapter"] for row in csv.DictReader(done.stdout.splitlines())]
        return [each["adapter"] for each in yaml.safe_load(done.stdout)["pools"][0]["adapters"]]

    assert printed() == [*(f"chat/a{n:02d}" for n in range(60)), "chat/poet"], "by name, and all"
    assert printed("--sort", "requests", "--limit", "2") == ["chat/poet", "chat/a00"]
    assert "and 11 more; --limit shows them" in run(kubeconfig).output


def test_a_pool_that_is_not_there_is_told_in_one_line(cluster: tuple[CannedApi, Path]) -> None:
    api, kubeconfig = cluster
    api.answers[POD] = (404, {"reason": "PoolUnknown", "message": "there is no LoRAPool nope in namespace chat"})
    done = run(kubeconfig, "--pool", "nope")
    assert done.exit_code == 1
    assert done.output.strip() == "Error: there is no LoRAPool nope in namespace chat"


class FakePlacer:
    def pool_keys(self, namespace: str | None, pool: str | None) -> list[str]:
        return ["chat/pool"] if namespace in (None, "chat") and pool in (None, "pool") else []

    def adapters(self, pool_key: str) -> Iterator[AdapterStats]:
        yield from POOL.adapters

    def pool(self, pool_key: str, adapters: list[AdapterStats]) -> PoolStats:
        return POOL.model_copy(update={"adapters": tuple(adapters)})


async def test_the_leader_answers_and_another_one_names_it() -> None:
    async def ask(path: str, *, leads: bool = True) -> tuple[int, str]:
        shell = Shell("the operator")
        add_routes(shell, FakePlacer(), operator="op-1", leads=lambda: leads, leader=lambda: "op-2")  # type: ignore[arg-type]
        path, _, query = path.partition("?")
        answered = await call(shell, path, query=query.encode())
        return answered.status, answered.body.decode()

    status, text = await ask("/v1/adapters?namespace=chat&pool=pool")
    assert status == 200
    assert [a.adapter for a in AdapterStatsAnswer.model_validate_json(text).pools[0].adapters] == [
        "chat/poet",
        "chat/pinned",
    ]
    assert (await ask("/v1/adapters?pool=nope"))[0] == 404
    status, text = await ask("/v1/adapters", leads=False)
    assert status == 503
    assert json.loads(text)["leader"] == "op-2"
