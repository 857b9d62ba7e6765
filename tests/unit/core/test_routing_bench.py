"""The benchmarks of routing print what docs/routing.md shows, with and without the traces."""

from pathlib import Path

import pytest

from tests.bench import bench_replicas, bench_routing, routing_decision
from tests.bench.__main__ import BENCHES


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
