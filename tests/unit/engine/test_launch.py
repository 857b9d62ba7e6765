"""The engine's command line, and what a person reads whose extraArgs are refused."""

from pathlib import Path

import pytest

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Model
from shoal.api.sources import engine_model_path, parse_source
from shoal.core.architectures import facts_of
from shoal.engine.port import EngineLaunch
from shoal.engine.sglang import owned
from shoal.engine.sglang.arguments import arguments_of, check_extra_args, known_versions
from shoal.engine.sglang.launch import engine_args
from shoal.engine.sglang.wire import NO_PREFIX_CACHE
from shoal_dev.sim import args as sim_args

VERSION = "0.5.23"


def make_model(**engine: object) -> Model:
    return Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "team-a"},
            "spec": {"source": {"uri": "file:///models/tiny"}, "engine": engine},
        }
    )


def test_arguments_name_the_model_by_namespace_and_hide_the_keys():
    args = engine_args(EngineLaunch(make_model(), VERSION, model_path="/shoal/models/model", port=30000, gpus=2))
    assert args == (
        "--model-path=/shoal/models/model",
        "--served-model-name=team-a/chat",
        "--host=0.0.0.0",
        "--port=30000",
        "--tp-size=2",
        "--config",
        "/shoal/keys/engine.yaml",
        "--enable-metrics",
        "--enable-cache-report",
    )


def test_fields_become_arguments_and_extra_args_come_last():
    model = make_model(
        contextLength=8192, toolCallParser="qwen25", reasoningParser="auto", extraArgs=["--mem-fraction-static=0.8"]
    )
    args = engine_args(EngineLaunch(model, VERSION, model_path="/m", port=1, gpus=1, platform_args=("--device=cpu",)))
    assert args[-5:] == (
        "--context-length=8192",
        "--tool-call-parser=qwen25",
        "--reasoning-parser=auto",
        "--device=cpu",
        "--mem-fraction-static=0.8",
    )


def facts(architecture: str, **config: object) -> ArtifactFacts:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    return facts_of({"architectures": [architecture], "model_type": "x", **sizes, **config}, source="hf://a/b")


@pytest.mark.parametrize(
    ("architecture", "given", "added"),
    [
        ("LlamaForCausalLM", [], []),
        ("Qwen2ForSequenceClassification", [], ["--is-embedding", "--disable-radix-cache"]),
        ("Qwen3Model", ["--is-embedding"], ["--disable-radix-cache"]),
        ("WhisperForConditionalGeneration", [], ["--disable-radix-cache"]),
        (
            "XLMRobertaForSequenceClassification",
            [],
            ["--is-embedding", "--chunked-prefill-size=-1", "--disable-radix-cache"],
        ),
        ("XLMRobertaForSequenceClassification", ["--is-embedding", "--chunked-prefill-size=-1"], [NO_PREFIX_CACHE]),
        ("BertModel", ["--is-embedding", "--chunked-prefill-size=-1", NO_PREFIX_CACHE], []),
    ],
)
def test_weights_that_generate_nothing_get_what_sglang_needs(architecture: str, given: list[str], added: list[str]):
    model = make_model(extraArgs=given)
    plain = engine_args(EngineLaunch(make_model(), VERSION, model_path="/m", port=1, gpus=1))
    args = engine_args(EngineLaunch(model, VERSION, model_path="/m", port=1, gpus=1, facts=facts(architecture)))
    assert args == (*plain, *added, *given)


def test_what_an_encoder_computed_is_never_reused_even_where_tenants_share():
    """It depends on the rest of the text."""
    shared = Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "team-a"},
            "spec": {"source": {"uri": "hf://a/b"}, "prefixCache": {"isolation": "Shared"}},
        }
    )
    both: list[bool] = []
    for name in ("Qwen3Model", "XLMRobertaModel"):
        args = engine_args(EngineLaunch(shared, VERSION, model_path="/m", port=1, gpus=1, facts=facts(name)))
        both.append(NO_PREFIX_CACHE in args)
    assert both == [False, True]


def test_the_simulator_takes_the_same_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tmp_path / "engine.yaml"
    config.write_text("api-key: client\nadmin-api-key: admin\n")
    monkeypatch.setattr("shoal.api.names.ENGINE_CONFIG_FILE", str(config))
    model = make_model(contextLength=2048, toolCallParser="qwen25", reasoningParser="auto")
    parsed = sim_args.parse(engine_args(EngineLaunch(model, VERSION, model_path=str(tmp_path), port=30000, gpus=2)), {})
    assert (parsed.api_key, parsed.admin_api_key) == ("client", "admin")
    assert (parsed.served_model_name, parsed.context_length, parsed.tp_size) == ("team-a/chat", 2048, 2)


@pytest.mark.parametrize(
    "arg",
    [
        "--mem-fraction-static=0.8",
        "--trust-remote-code",
        "--quantization=fp8",
        "--enable-hicache",  # another spelling of --enable-hierarchical-cache
        "--no-enable-tf32-matmul",
        "--chat-template=/x/y=z.jinja",
    ],
)
def test_arguments_that_are_the_models_own_business_pass(arg: str):
    assert check_extra_args(VERSION, [arg]) == []


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--tp-size=2", "--tp-size is owned by Shoal: use spec.engine.parallelism.tensor"),
        ("--tensor-parallel-size=2", "--tensor-parallel-size is owned by Shoal: use spec.engine.parallelism.tensor"),
        (
            "--tp=2",
            "--tp is an abbreviation of --tp-size, which is owned by Shoal: use spec.engine.parallelism.tensor",
        ),
        (
            "--api=k",
            "--api is an abbreviation of --api-key, which is owned by Shoal: "
            "Shoal gives every engine its keys through a file",
        ),
        ("--model=x", "--model is owned by Shoal: use spec.source"),
        ("--api-key=k", "--api-key is owned by Shoal: Shoal gives every engine its keys through a file"),
        (
            "--disaggregation-mode=prefill",
            "--disaggregation-mode is owned by Shoal: Shoal does not separate prefill, decode and encoders; leave it "
            "out, and use spec.engine.parallelism or spec.scaling for more GPUs",
        ),
        *(
            (
                arg,
                f"{arg.partition('=')[0]} is owned by Shoal: Shoal does not separate prefill, decode and encoders; "
                "leave it out, and use spec.engine.parallelism or spec.scaling for more GPUs",
            )
            for arg in (
                "--encoder-urls=http://10.0.0.1:9000",
                "--encoder-bootstrap-port=9001",
                "--encoder-transfer-backend=mooncake",
                "--enable-adaptive-dispatch-to-encoder",
            )
        ),
        *(
            (
                arg,
                f"{arg.partition('=')[0]} is owned by Shoal: Shoal fetches the weights before the engine starts; "
                "leave it out, and use spec.source",
            )
            for arg in (
                "--remote-instance-weight-loader-seed-instance-ip=10.0.0.1",
                "--remote-instance-weight-loader-send-weights-group-ports=[9000]",
                "--engine-info-bootstrap-port=6789",
                '--modelexpress-config={"url":"10.0.0.1:8001"}',
            )
        ),
        (
            "--load-publish-endpoint=tcp://*:6000",
            "--load-publish-endpoint is owned by Shoal: it opens a port without a key; leave it out: gateways and "
            "operator get the load from the agent",
        ),
        (
            "--tool-server=10.0.0.1:8000",
            "--tool-server is owned by Shoal: the engine would call other servers in the name of whoever sends a "
            "request; leave it out: clients run their tools",
        ),
        *(
            (
                arg,
                f"{arg} is owned by Shoal: whoever sends a request could bring code, templates or tensors, or name "
                "files and others' images; leave it out",
            )
            for arg in (
                "--enable-custom-logit-processor",
                "--trust-request-chat-template",
                "--trust-mm-content-hashes",
            )
        ),
        *(
            (
                arg,
                f"{arg.partition('=')[0]} is owned by Shoal: it writes prompts or answers of all tenants into logs or "
                "files; leave it out, and use the request log of a Tenant: spec.logging of the Tenant",
            )
            for arg in (
                "--log-requests",
                "--log-requests-level=3",
                "--log-requests-format=json",
                "--log-requests-target=/tmp/requests",
                "--crash-dump-folder=/tmp/dumps",
                "--debug-tensor-dump-output-folder=/tmp/tensors",
                "--debug-tensor-dump-layers=1",
                "--msprobe-dump-config=/tmp/msprobe.json",
                "--export-metrics-to-file",
                "--export-metrics-to-file-dir=/tmp/metrics",
            )
        ),
        (
            "--log=x",
            "--log is an abbreviation of --log-requests, which is owned by Shoal: it writes prompts or answers of all "
            "tenants into logs or files; leave it out, and use the request log of a Tenant: spec.logging of the Tenant",
        ),
        (
            "--checkpoint-engine-wait-weights-before-ready",
            "--checkpoint-engine-wait-weights-before-ready is owned by Shoal: the engine would wait for weights that "
            "nobody sends; leave it out, and use spec.source",
        ),
        ("--tokenizer-path=/x", "--tokenizer-path is owned by Shoal: use spec.source"),
        *(
            (
                arg,
                f"{arg.partition('=')[0]} is owned by Shoal: the engine would take its weights from another process, "
                "which Shoal neither starts nor watches; leave it out: spec.prefetch has the weights on nodes before",
            )
            for arg in ("--weight-cache-mode=client", "--weight-cache-socket=/tmp/x.sock", "--weight-cache-timeout=5")
        ),
        *(
            (
                name,
                f"{name} is owned by Shoal: Shoal does not let engines sleep; leave it out, and use "
                "spec.scaling.minReplicas: 0 to free the GPUs",
            )
            for name in ("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup")
        ),
        (
            '--kv-events-config={"publisher":"zmq"}',
            "--kv-events-config is owned by Shoal: it publishes the tokens of all tenants' prompts on a port without a "
            "key; leave it out: gateways tell each other which prefixes replicas hold",
        ),
        ("--lora-paths=x", "--lora-paths is owned by Shoal: a LoRAPool gives the Model its adapters"),
        ("--chunked-prefill=2", "--chunked-prefill is an abbreviation of --chunked-prefill-size: write it out"),
        (
            "--mem_fraction_static=0.8",
            "SGLang 0.5.23 has no argument --mem_fraction_static; did you mean --mem-fraction-static?",
        ),
        (
            "--max-model-len=8192",
            "SGLang 0.5.23 has no argument --max-model-len, which is vLLM's: set spec.engine.contextLength of the "
            "Model",
        ),
        (
            "--max_num_seqs=64",
            "SGLang 0.5.23 has no argument --max_num_seqs, which is vLLM's: SGLang's is --max-running-requests",
        ),
        ("--enable-warp-drive", "SGLang 0.5.23 has no argument --enable-warp-drive"),
        ("--mem-fraction-static", "--mem-fraction-static needs a value: write --mem-fraction-static=VALUE"),
        ("--mem-fraction-static=lots", "--mem-fraction-static must be a number; got 'lots'"),
        ("--page-size=1.5", "--page-size must be a whole number; got '1.5'"),
        (
            "--mem-fraction-static 0.8",
            "'--mem-fraction-static 0.8' has a blank where '=' belongs: write --mem-fraction-static=0.8",
        ),
        ("--trust-remote-code=true", "--trust-remote-code takes no value: write it without '='"),
        (
            "--dtype=int3",
            "--dtype must be one of auto, bfloat16, float, float16, float32, half; got 'int3'",
        ),
        ("-x", "'-x' is not an argument: write '--name=value' or '--flag', one per item"),
        ("--", "an item of extraArgs has no name: write '--name=value' or '--flag'"),
    ],
)
def test_refused_arguments_say_why_and_what_to_do(arg: str, message: str):
    assert check_extra_args(VERSION, [arg]) == [message]


def test_every_problem_is_told_at_once():
    assert len(check_extra_args(VERSION, ["--port=1", "--nope", "--sleep-on-idle", "--sleep-on-idle"])) == 3


def test_an_unknown_version_is_refused_only_where_extra_args_need_checking():
    assert check_extra_args("9.9.9", []) == []
    assert check_extra_args("9.9.9", ["--sleep-on-idle"]) == [
        "extraArgs cannot be checked for engine version 9.9.9: this release of Shoal knows 0.5.23"
    ]


def test_a_build_of_a_known_version_has_its_arguments():
    assert check_extra_args("0.5.23-cpu", ["--port=1"])
    assert arguments_of("0.5.2") is None


@pytest.mark.parametrize("version", known_versions())
def test_every_owned_argument_exists_under_its_canonical_name(version: str):
    table = arguments_of(version)
    assert table is not None
    assert [name for name in owned.OWNED if name not in table or table[name].name != name] == []


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("pvc://weights", "/shoal/source"),
        ("pvc://weights/", "/shoal/source"),
        ("pvc://weights/llama/8b/", "/shoal/source/llama/8b"),
        ("pvc://weights/.hidden", "/shoal/source/.hidden"),
        ("hf://org/repo@main", "/shoal/models/model"),
        ("https://host/m.tar", "/shoal/models/model"),
        ("file:///models/tiny", "/shoal/models/model"),
    ],
)
def test_the_engine_reads_a_volume_in_place_and_all_else_where_it_was_staged(uri: str, path: str):
    assert engine_model_path(uri) == path


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://host/x", "is not a source"),
        ("hf://only-a-name", "does not name a repository"),
        ("hf://a/b@", "does not name a repository"),
        ("pvc://claim/../other", "does not name a folder of a volume"),
        ("file://models", "three slashes"),
        ("https://host:port/x.tar?sig=s3cret", "^'https://host:port/x.tar' is not a URL"),
        ("https://[::1/x.tar", "is not a URL"),
        ("https://user:pass@host/x.tar", "use `secretRef` for a token"),
    ],
)
def test_a_source_that_makes_no_sense_is_told_so(uri: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_source(uri)
