"""The command line of the simulator as vLLM."""

from pathlib import Path

import pytest

from shoal_dev.sim.vllm.args import VLLMArgs, parse, whole


def args(*words: str, **environ: str) -> VLLMArgs:
    return parse(["/models/m", *words], environ)


def test_defaults_are_vllms():
    found = args()
    assert (found.engine.model_path, found.names) == ("/models/m", ("/models/m",))
    assert (found.engine.host, found.engine.port) == ("0.0.0.0", 8000)
    assert (found.engine.max_running_requests, found.engine.chunked_prefill_size) == (1024, 8192)
    assert (found.shutdown_timeout, found.ready_timeout, found.adapters) == (0, 600, None)
    assert args("--sim-gpu", "l4").engine.max_running_requests == 256


@pytest.mark.parametrize(
    "words",
    [("--max-num-seqs", "4"), ("--max_num_seqs=4",), ("--max-num-se", "4"), ("--max-num-seqs=8", "--max-num-seqs=4")],
)
def test_a_name_may_be_spelt_in_several_ways_and_the_last_wins(words: tuple[str, ...]):
    assert args(*words).engine.max_running_requests == 4


def test_the_model_may_stand_behind_its_name():
    assert parse(["--port", "1", "--model", "/m"], {}).engine.model_path == "/m"
    assert parse(["--model=/m", "--served-model-name", "a", "b"], {}).names == ("a", "b")


def test_fields_of_a_json_argument_make_one_value():
    given = args("--compilation-config.mode", "3", "--compilation-config.a.b=x").engine.given
    assert given["compilation_config"] == '{"mode": "3", "a": {"b": "x"}}'


def test_a_config_file_counts_in_two_words_only(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("api-key: [k1, k2]\nmax-num-seqs: 3\nenable-lora: true\n")
    found = args("--config", str(file), "--max-num-seqs", "4")
    assert found.api_keys == ("k1", "k2")
    assert found.engine.max_running_requests == 4, "the command line wins"
    assert found.adapters is not None
    ignored = args(f"--config={file}")
    assert (ignored.api_keys, ignored.adapters) == ((), None)


def test_adapters_have_limits_and_the_runtime_routes_a_variable():
    found = args("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "5", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    assert found.adapters is not None
    assert (found.adapters.slots, found.adapters.cached, found.adapters.max_rank) == (2, 5, 16)
    assert found.adapter_routes
    plain = args("--enable-lora", "--lora-modules", "a=/a")
    assert plain.adapters is not None
    assert (plain.adapter_routes, plain.adapters.at_start) == (False, (("a", "/a"),))
    # The real engine has these paths then, and refuses what is sent to them.
    none = args(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    assert (none.adapter_routes, none.adapters) == (True, None)


@pytest.mark.parametrize(
    "words",
    [("--no-such",), ("--enable-lora", "--max-lora-rank", "12"),
     ("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "2"), ("--config",),
     ("--kv-cache-memory-bytes", "much"), ("--runner", "task")],
)  # fmt: skip
def test_what_vllm_refuses_ends_with_code_2(words: tuple[str, ...]):
    with pytest.raises(SystemExit) as caught:
        args(*words)
    assert caught.value.code == 2


def test_no_model_is_refused():
    with pytest.raises(SystemExit):
        parse(["--port", "1"], {})
    with pytest.raises(SystemExit):
        parse(["--served-model-name", "a", "--port", "1"], {})


def test_numbers_have_suffixes():
    assert [whole(text) for text in ("32k", "32K", "1.5k", "7")] == [32000, 32768, 1500, 7]
    for wrong in ("1.5", "1.5K", "x", ""):
        with pytest.raises(ValueError, match="invalid value"):
            whole(wrong)
