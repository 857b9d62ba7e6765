"""The simulator's command line."""

from pathlib import Path

import pytest

from shoal_dev.sim.args import EngineArgs, canonical_gpu, parse

BASE = ["--model-path", "/model"]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(argv, environ or {})
    assert caught.value.code == 2
    return capsys.readouterr().err


def given(*argv: str, **environ: str) -> EngineArgs:
    return parse([*BASE, *argv], environ)


def test_defaults_are_those_of_the_engine():
    args = given()
    assert (args.host, args.port, args.tp_size) == ("127.0.0.1", 30000, 1)
    assert args.served_model_name == "/model"
    assert (args.api_key, args.admin_api_key) == (None, None)
    assert not args.enable_metrics
    assert not args.enable_cache_report
    assert args.gpu == "h100_sxm:bfloat16"


def test_arguments_that_change_nothing_here_are_taken_if_the_engine_knows_them():
    args = given("--attention-backend", "fa3", "--trust-remote-code", "--cuda-graph-max-bs-decode", "256")
    assert args.given["trust_remote_code"] is True


def test_an_argument_that_the_engine_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "unrecognized arguments: --no-such-thing" in refused([*BASE, "--no-such-thing"], capsys)


def test_the_model_path_is_required(capsys: pytest.CaptureFixture[str]):
    assert "--model-path" in refused([], capsys)


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("32k", 32000), ("1.5k", 1500), ("32Ki", 32768)])
def test_numbers_of_tokens_take_units(text: str, tokens: int):
    assert given("--context-length", text).context_length == tokens
    assert given("--max-total-tokens", text).max_total_tokens == tokens


@pytest.mark.parametrize("text", ["many", "32K", "1.5Ki", "-1", "500m"])
def test_a_context_length_without_sense(text: str, capsys: pytest.CaptureFixture[str]):
    assert f"--context-length: invalid value: '{text}'" in refused([*BASE, f"--context-length={text}"], capsys)


def test_a_config_file_gives_way_to_the_command_line(tmp_path: Path):
    config = tmp_path / "engine.yaml"
    config.write_text(
        "api-key: -secret\nadmin_api_key: other\nport: 1\nenable-metrics: true\nenable-cache-report: false\n"
    )
    args = given("--config", str(config), "--port", "2")
    assert (args.api_key, args.admin_api_key, args.port) == ("-secret", "other", 2)
    assert args.enable_metrics
    assert not args.enable_cache_report


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("engine.txt", "", "Config file must be YAML format, got: .txt"),
        ("engine.yaml", None, "Config file not found"),
        ("engine.yaml", "- a\n- b\n", "Config file must contain a dictionary at root level"),
        ("engine.yaml", "no-such-key: 1\n", "unrecognized arguments: --no-such-key=1"),
    ],
)
def test_a_config_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert message in refused([*BASE, "--config", str(path)], capsys)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h100", "h100_sxm:bfloat16"),
        ("H100_SXM:fp8", "h100_sxm:fp8"),
        ("l4", "l4:bfloat16"),
        ("l40s:bf16", "l40s:bfloat16"),
    ],
)
def test_gpus_have_short_names(name: str, gpu: str):
    assert canonical_gpu(name) == gpu


def test_an_unknown_gpu_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    message = refused([*BASE, "--sim-gpu", "abacus"], capsys)
    assert "unknown GPU 'abacus'; known: l40s:bfloat16" in message


def test_the_environment_gives_way_to_the_command_line(capsys: pytest.CaptureFixture[str]):
    environ = {"SHOAL_SIM_GPU": "l4", "SHOAL_SIM_SPEED": "8", "SHOAL_SIM_LOAD_SECONDS": "0.5"}
    args = given(**environ)
    assert (args.gpu, args.speed, args.load_seconds) == ("l4:bfloat16", 8.0, 0.5)
    assert given("--sim-speed", "2", **environ).speed == 2.0
    assert "SHOAL_SIM_SPEED must be a number, got 'fast'" in refused(BASE, capsys, {"SHOAL_SIM_SPEED": "fast"})
    assert "--sim-speed must be above 0" in refused([*BASE, "--sim-speed", "0"], capsys)


def test_it_traces_only_where_it_knows_how(capsys: pytest.CaptureFixture[str]):
    traced = [*BASE, "--enable-trace", "--otlp-traces-endpoint=http://otel:4318/v1/traces"]
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert parse(BASE, protocol).traces_endpoint is None
    args = parse(traced, protocol)
    assert (args.traces_endpoint, args.traces_service) == ("http://otel:4318/v1/traces", "sglang")
    assert "set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in refused(traced, capsys)
    assert "must be a URL, such as http://" in refused([*BASE, "--enable-trace"], capsys, protocol)
