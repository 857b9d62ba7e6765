"""`shoal explain` on both engines: which one fits, which holds more, and what of it is an estimate."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from shoal.cli.explain.settings import chart_defaults
from shoal.cli.main import main
from tests.support import model_configs as configs

GI = 2**30


def run(
    folder: Path,
    engine: dict[str, Any],
    config: dict[str, Any],
    *more: str,
    gib: int = 15,
    rank: int | None = None,
    **spec: Any,
) -> str:
    """`rank`: that of the Model's LoRAPool; None: it has none. `spec`: further fields of the Model."""
    model = {
        "apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "metadata": {"name": "m", "namespace": "a"},
        "spec": {
            "source": {"uri": "hf://a/b"}, "engine": {"contextLength": 8192} | engine,
            "sizing": {"weightBytes": f"{gib}Gi"},
        } | spec,
    }  # fmt: skip
    classes = [
        {
            "apiVersion": "shoal.dev/v1alpha1", "kind": "GPUClass", "metadata": {"name": name},
            "spec": {"nodeSelector": {"gpu": name}, "memoryPerGPU": memory},
        }
        for name, memory in (("h100", "80Gi"), ("l4", "24Gi"))
    ]  # fmt: skip
    pool = {
        "apiVersion": "shoal.dev/v1alpha1", "kind": "LoRAPool", "metadata": {"name": "pool", "namespace": "a"},
        "spec": {"modelRef": {"name": "m"}, "maxRank": rank, "slotsPerReplica": 8},
    }  # fmt: skip
    (folder / "model.yaml").write_text(yaml.safe_dump_all([model] if rank is None else [model, pool]))
    (folder / "fleet.yaml").write_text(yaml.safe_dump_all(classes))
    (folder / "config.json").write_text(json.dumps(config))
    files = ["-f", str(folder / "model.yaml"), "--fleet", str(folder / "fleet.yaml")]
    facts = ["--facts", f"a/m={folder / 'config.json'}"]
    done = CliRunner(catch_exceptions=False).invoke(main, ["explain", *files, *facts, *more])
    assert done.exit_code in (0, 1), done.output
    return done.output


def other(folder: Path, engine: dict[str, Any], config: dict[str, Any], *more: str, **given: Any) -> dict[str, Any]:
    report = json.loads(run(folder, engine, config, "-o", "json", *more, **given))
    (found,) = report["models"][0]["otherEngines"]
    return found


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_the_other_engine_is_sized_with_its_own_defaults(tmp_path: Path) -> None:
    found = other(tmp_path, {"extraArgs": ["--mem-fraction-static=0.5"]}, configs.LLAMA_8B)
    assert found["engine"] == "vLLM"
    fits = {c["gpuClass"]: c for c in found["classes"]}
    assert fits["h100"]["kvTokensPerReplica"] > 400_000, "SGLang's own arguments do not bind it"
    assert fits["h100"]["estimates"] == ["overhead", "activations", "graphs"]
    assert "vLLM holds more; besides weights, adapters and KV cache vLLM takes" in found["summary"]
    assert "(of it estimated: overhead, activations, graphs)" in found["summary"]
    assert found["summary"].startswith("vLLM instead, without the Model's extraArgs: fits on 2 classes, SGLang on ")
    assert "extraArgs" not in other(tmp_path, {}, configs.LLAMA_8B)["summary"]


def test_the_other_engine_is_sized_with_the_arguments_of_its_platform(tmp_path: Path) -> None:
    settings = chart_defaults().model_dump(mode="json", by_alias=True)
    table = settings["engines"]["vllm"]
    table["versions"][table["defaultVersion"]]["args"] = ["--gpu-memory-utilization=0.5"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    found = other(tmp_path, {}, configs.LLAMA_8B, "--config", str(tmp_path / "config.yaml"))
    assert found["classes"][0]["kvTokensPerReplica"] < 300_000


def test_an_engine_that_needs_mutual_tls_says_so(tmp_path: Path) -> None:
    assert "; vLLM needs mutual TLS" in other(tmp_path, {}, configs.LLAMA_8B)["summary"]
    assert "mutual TLS" not in other(tmp_path, {"type": "vLLM"}, configs.LLAMA_8B)["summary"]
    settings = chart_defaults().model_dump(mode="json", by_alias=True)
    settings["transport"]["mtls"]["enabled"] = False
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    shown = run(tmp_path, {}, configs.LLAMA_8B, "--config", str(tmp_path / "config.yaml"))
    assert "vLLM instead: would be refused (spec.engine.type: vLLM needs mutual TLS, which is off" in shown


def test_what_the_model_would_do_there_and_not_here_is_told(tmp_path: Path) -> None:
    assert "; there the Model would also score" in other(tmp_path, {}, configs.LLAMA_8B)["summary"]
    assert "; there the Model would not score" in other(tmp_path, {"type": "vLLM"}, configs.LLAMA_8B)["summary"]
    embeds = other(tmp_path, {"extraArgs": ["--is-embedding"]}, configs.LLAMA_8B)["summary"]
    assert "; there the Model would also generate and score, and not embed" in embeds
    shared = other(tmp_path, {}, configs.LLAMA_8B, prefixCache={"isolation": "Shared"})["summary"]
    assert "there the Model would" not in shared


def test_images_that_one_engine_alone_reads_are_told(tmp_path: Path) -> None:
    there = other(tmp_path, {}, configs.GEMMA3_4B)["summary"]
    assert "; there the Model would also read images and score;" in there
    asked = other(tmp_path, {"extraArgs": ["--enable-multimodal"]}, configs.GEMMA3_4B)["summary"]
    assert "; there the Model would also score;" in asked
    back = other(tmp_path, {"type": "vLLM"}, configs.GEMMA3_4B)["summary"]
    assert back.endswith("; there the Model would not read images and score")
    parsers = {"toolCallParser": "llama3", "reasoningParser": "qwen3"}
    assert "; there the Model would also score;" in other(tmp_path, parsers, configs.LLAMA_8B)["summary"]


def test_a_refused_model_is_sized_without_its_arguments_and_says_so(tmp_path: Path) -> None:
    found = other(tmp_path, {"extraArgs": ["--max-num-seqs=64"]}, configs.LLAMA_8B)["summary"]
    assert found.startswith("vLLM instead, without the Model's extraArgs: would take it, fits on 2 classes; ")
    assert "; vLLM needs mutual TLS" in found


def test_a_model_of_vllm_says_that_its_tokens_are_the_least(tmp_path: Path) -> None:
    text = run(tmp_path, {"type": "vLLM"}, configs.LLAMA_8B, "--sums")
    assert "≥ " in text
    assert "activations" in text
    assert "(estimated)" in text
    assert "SGLang instead: fits on 2 classes, vLLM on 2;" in text


def test_fields_of_both_engines_hold_for_both(tmp_path: Path) -> None:
    plain = other(tmp_path, {}, configs.LLAMA_8B)["classes"][0]["kvTokensPerReplica"]
    halved = other(tmp_path, {"quantization": {"kvCache": "FP8"}}, configs.LLAMA_8B)["classes"][0]
    assert halved["kvTokensPerReplica"] == pytest.approx(2 * plain, rel=0.01)


def test_what_only_one_engine_reads_fits_on_it_alone(tmp_path: Path) -> None:
    config = configs.LLAMA_8B | {"quantization_config": {"quant_method": "bitsandbytes"}}
    found = other(tmp_path, {}, config, gib=6)
    assert "only SGLang fits on" in found["summary"]
    assert {c["message"] for c in found["classes"]} == {"vLLM does not read bitsandbytes weights"}


def test_what_fits_nowhere_says_why(tmp_path: Path) -> None:
    found = other(tmp_path, {}, configs.LLAMA_8B, gib=5000)
    assert found["summary"].startswith("vLLM instead: fits on 0 classes, SGLang on 0 (on 8 GPUs with")


def test_a_field_that_the_engine_refuses_is_told_before_anything_is_sized(tmp_path: Path) -> None:
    refused = run(tmp_path, {"speculation": {"method": "NGram"}}, configs.LLAMA_8B)
    assert "not looked at: spec.engine.speculation: NGram of SGLang guesses from the answers to all tenants" in refused
    assert "not looked at" not in run(tmp_path, {"type": "vLLM", "speculation": {"method": "NGram"}}, configs.LLAMA_8B)
    shared = {"speculation": {"method": "NGram", "isolation": "Shared"}}
    assert "not looked at" not in run(tmp_path, shared, configs.LLAMA_8B)


def test_an_engine_that_would_refuse_the_model_is_no_alternative(tmp_path: Path) -> None:
    config = configs.LLAMA_8B | {"architectures": ["Qwen3ForRewardModel"]}
    summary = other(tmp_path, {"toolCallParser": "qwen25"}, config)["summary"]
    said = "no endpoint is for Qwen3ForRewardModel with vLLM: use SGLang"
    assert summary == f"vLLM instead: would be refused (spec.engine.type: {said})"
    guessing = {"type": "vLLM", "contextLength": 8192, "speculation": {"method": "NGram"}}
    assert "guesses from the answers to all tenants" in other(tmp_path, guessing, configs.LLAMA_8B)["summary"]


def test_an_engine_that_would_refuse_the_pool_is_not_sized(tmp_path: Path) -> None:
    found = other(tmp_path, {}, configs.LLAMA_8B, rank=1024)
    said = "Model a/m: vLLM serves adapters up to rank 512, and the pool's spec.maxRank is 1024"
    assert found["summary"] == f"vLLM instead: would not serve LoRAPool a/pool ({said})"
    assert found["classes"] == []


def test_a_pool_that_only_the_other_engine_serves_counts_there(tmp_path: Path) -> None:
    found = other(tmp_path, {"type": "vLLM"}, configs.LLAMA_8B, rank=1024)
    without = other(tmp_path, {"type": "vLLM"}, configs.LLAMA_8B)["classes"][0]["kvTokensPerReplica"]
    (tokens,) = (c["kvTokensPerReplica"] for c in found["classes"] if c["fits"])
    assert tokens < 100_000 < 400_000 < without
    assert "SGLang instead: fits on 1 classes with LoRAPool a/pool, vLLM on 2 without; " in found["summary"]
    assert ": only SGLang serves the pool; " in found["summary"]
    assert "holds more" not in found["summary"]


def test_a_pool_that_both_serve_counts_on_both(tmp_path: Path) -> None:
    for engine in ({}, {"type": "vLLM"}):
        without = other(tmp_path, engine, configs.LLAMA_8B)["classes"][0]["kvTokensPerReplica"]
        found = other(tmp_path, engine, configs.LLAMA_8B, rank=64)
        assert found["classes"][0]["kvTokensPerReplica"] < without
        assert "LoRAPool" not in found["summary"]


def test_a_pool_that_fits_no_engine_counts_on_none(tmp_path: Path) -> None:
    found = other(tmp_path, {}, configs.GEMMA2_9B, rank=64)
    assert found["classes"], "it is compared without the pool, as it is run"
    assert "LoRAPool" not in found["summary"]


def test_a_model_that_its_own_engine_refuses_is_sized_for_the_other(tmp_path: Path) -> None:
    guessing = {"speculation": {"method": "NGram"}}
    found, taken = other(tmp_path, guessing, configs.LLAMA_8B), other(tmp_path, {}, configs.LLAMA_8B)
    assert [c["fits"] for c in found["classes"]] == [True, True]
    held = found["classes"][0]["kvTokensPerReplica"]
    assert held == pytest.approx(taken["classes"][0]["kvTokensPerReplica"], rel=0.01)
    said = f"vLLM instead: would take it, fits on 2 classes; at least {held:,} KV tokens on h100; besides weights"
    assert found["summary"].startswith(said)
    assert "SGLang" not in found["summary"]
    shown = run(tmp_path, guessing, configs.LLAMA_8B)
    assert "not looked at" in shown
    assert said in shown


def test_a_model_that_both_engines_refuse_says_why_of_both(tmp_path: Path) -> None:
    config = configs.LLAMA_8B | {"architectures": ["Qwen3ForRewardModel"]}
    found = other(tmp_path, {"speculation": {"method": "NGram"}}, config)
    assert (
        "vLLM instead: would be refused (spec.engine.type: no endpoint is for Qwen3ForRewardModel" in found["summary"]
    )


def test_what_no_engine_could_mend_is_said_once(tmp_path: Path) -> None:
    report = json.loads(run(tmp_path, {}, configs.LLAMA_8B, "-o", "json", variants=[{"class": "gone"}]))
    assert "there is no GPUClass 'gone'" in report["models"][0]["message"]
    assert report["models"][0]["otherEngines"] == []


def test_a_refused_model_says_what_becomes_of_its_pool(tmp_path: Path) -> None:
    guessing = {"speculation": {"method": "NGram"}}
    served = other(tmp_path, guessing, configs.LLAMA_8B, rank=64)["summary"]
    assert "would take it with LoRAPool a/pool, fits on 2 classes; " in served
    left_out = other(tmp_path, guessing, configs.LLAMA_8B, rank=1024)["summary"]
    assert "would take it without LoRAPool a/pool (Model a/m: vLLM serves adapters up to rank 512" in left_out


def test_a_refused_model_that_fits_nowhere_says_why(tmp_path: Path) -> None:
    found = other(tmp_path, {"speculation": {"method": "NGram"}}, configs.LLAMA_8B, gib=5000)
    assert found["summary"].startswith("vLLM instead: would take it, fits on 0 classes (on 8 GPUs with")
