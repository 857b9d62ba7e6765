"""The benchmarks of routing print what docs/routing.md shows, with and without the traces."""

from pathlib import Path

import pytest

from tests.bench import bench_replicas, bench_routing, replica_traffic, routing_decision
from tests.bench.__main__ import BENCHES
from tests.bench.replica_clients import Answer
from tests.bench.replica_proxy import Chooser


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    bench_routing.main(["--requests", "40", "--gateways", "2", "--only", "unique single-turn", *arguments])
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_routing, "TRACES", tmp_path)
    monkeypatch.setenv("SHOAL_TRACES", str(tmp_path))


def test_without_traces_rules_are_compared_on_the_other_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys)
    assert "mooncake_conversation_trace.jsonl is not in the folder that SHOAL_TRACES names" in said
    for rule in bench_routing.RULES:
        assert f"| {rule} | " in said


def test_the_held_out_run_has_the_columns_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "--held-out", "--seeds", "1", "2")
    for trace in ("mooncake_conversation_trace.jsonl", "azure_llm_2023_code.csv"):
        assert f"{trace} is not in" in said
    p99, p50 = (line for line in said.splitlines() if line.startswith("| traffic |"))
    with_knowledge = [rule for rule in bench_routing.RULES if rule not in ("round robin", "least in flight")]
    assert p99 == f"| traffic | {' | '.join(bench_routing.RULES)} | hits | to smg | first |"
    assert p50 == f"| traffic | {' | '.join(with_knowledge)} | tokens/s | mean |"
    rows = [line for line in said.splitlines() if line.startswith("| unique single-turn, other seeds |")]
    assert [row.count("|") for row in rows] == [p99.count("|"), p50.count("|")]


def test_the_rules_of_one_router_alone_keep_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "--held-out", "--seeds", "1", "--rules", "heads only,ideal")
    p50 = said.splitlines()[-3]
    assert p50 == "| traffic | Shoal, heads only | ideal | tokens/s | mean |"


def test_the_cost_of_a_choice_is_beside_that_of_one_by_requests_in_flight(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_decision, "ROUNDS", 1)
    monkeypatch.setattr(routing_decision, "CALLS", 200)
    routing_decision.decisions((8,))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 8 | ")]
    kinds = [routing_decision.PLAIN, "`PrefixHeads`", *(case.name for case in routing_decision.CASES)]
    assert [row.split(" | ")[1] for row in rows] == kinds


@pytest.mark.parametrize("case", [case for case in routing_decision.CASES if not case.new], ids=lambda case: case.name)
def test_prompts_of_that_bench_are_found_where_they_were_sent(case: routing_decision.Case) -> None:
    gateway = routing_decision.Gateway(8, case)
    prompts = range(routing_decision.PROMPTS)
    found = [gateway.choose(number) for number in prompts]
    assert [one.replica for one in found] == [gateway.replicas[number % 8] for number in prompts]
    assert all(one.pick is not None and one.pick.expected.tokens > 0.8 * one.pick.prompt.tokens for one in found)


def test_all_benchmarks_together_ask_the_real_engines_with_every_kind_of_traffic(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (bench,) = (each for each in BENCHES if each.startswith("bench_replicas"))
    asked = bench_replicas.options_of(bench.split()[1:])
    assert sorted([*asked.traffic, "mooncake"]) == sorted(bench_replicas.TRAFFIC)
    assert "mooncake: mooncake_conversation_trace.jsonl is not in" in capsys.readouterr().out


def test_all_rules_are_asked_the_same_in_a_round_and_something_else_in_the_next() -> None:
    asked = bench_replicas.options_of(["--requests", "20", "--conversations", "5"])
    for traffic in sorted(replica_traffic.TRAFFIC.keys() - {"mooncake"}):
        first, again, second = (replica_traffic.talks_of(traffic, asked, number) for number in (0, 0, 1))
        assert first == again
        assert first != second
        assert sum(len(talk.turns) for talk in first) == 20


def test_the_row_of_a_rule_on_real_engines_has_the_answers_of_all_rounds_under_its_columns() -> None:
    result = bench_replicas.Result()
    waits = {0: [0.3] * 9 + [0.9], 50: [0.1] * 10}
    for cached, seconds in waits.items():
        answers = [Answer(-at, each, 100, cached, "") for at, each in enumerate(seconds)]
        result.take(answers, failed=1, seconds=2.0, cpu_seconds=0.01)
    cells = result.cells(tuned=False)
    row = dict(zip(bench_replicas.COLUMNS[1:], cells, strict=True))
    assert row["prompt tokens from the cache"] == "25.0 %"
    assert (row["TTFT p50 s"], row["p99 s"]) == ("0.300", "0.900")
    assert row["settled p99 s"] == "0.300", "without the first that was asked in its round"
    assert (row["all rounds s"], row["router CPU ms per request"]) == ("4.0", "1.0")
    assert (row["answers"], row["failed"]) == ("20", "2")
    assert len(result.cells(tuned=True)) == len(cells) + len(bench_replicas.TUNED_COLUMNS)


def test_routers_of_simple_rules_count_for_themselves() -> None:
    turns = [[router.choose(0) for _ in range(5)] for router in (Chooser("round robin", n, 4) for n in range(2))]
    assert turns == [[0, 1, 2, 3, 0], [2, 3, 0, 1, 2]]
    least = Chooser("least in flight", 0, 4)
    least.in_flight[:] = [2, 1, 3, 1]
    assert {least.choose(0) for _ in range(8)} == {1, 3}
    assert [Chooser("by conversation", 0, 4).choose(home) for home in (3, 1, 3)] == [3, 1, 3]


def test_turns_of_a_conversation_have_one_home_and_a_system_prompt_has_two() -> None:
    asked = bench_replicas.options_of(["--conversations", "60"])
    homes: dict[int, set[int]] = {}
    for talk in replica_traffic.talks_of("chat", asked, 0):
        homes.setdefault(talk.group, set()).add(talk.home(4))
    assert len(homes) == 6
    assert all(len(each) == 2 for each in homes.values())
    assert set().union(*homes.values()) == {0, 1, 2, 3}
