"""The pods of a Model whose engine is vLLM, and where they are refused."""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import yaml

from shoal.api import keys, reasons
from shoal.api.config import MTLS, EngineTable, EngineVersion, NamedValue, OperatorConfig, TransportConfig
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.architectures import facts_of
from shoal.engine.kinds import kind_of
from shoal.engine.vllm.wire import WIRE
from shoal.manifests import model as manifests
from shoal.manifests import pod, sidecar
from shoal.manifests.pod import hand_on
from shoal.manifests.shape import VariantShape, engine_problems, engine_version
from tests.support import model_configs as configs
from tests.support.operators import CONFIG as SGLANG_ONLY
from tests.unit.manifests.test_manifests import CLASS, containers, pod_spec

CONFIG = SGLANG_ONLY.model_copy(
    update={
        "engines": SGLANG_ONLY.engines.model_copy(
            update={
                "vllm": EngineTable(
                    default_version="0.32.0", versions={"0.32.0": EngineVersion(image="vllm/vllm-openai:v0.32.0")}
                )
            }
        ),
        "transport": TransportConfig(mtls=MTLS(enabled=True)),
    }
)
LLAMA = facts_of(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    },
    source="x",
)  # fmt: skip


def shape(config: OperatorConfig = CONFIG, pool: LoRAPool | None = None, **engine: Any) -> VariantShape:
    model = Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u-1", "generation": 1},
            "spec": {"source": {"uri": "hf://org/model"}, "engine": {"type": "vLLM", **engine}},
        }
    )
    version = engine_version(model, config)
    return VariantShape(model, CLASS, 1, version, config, "abcd1234", mtls=True, pool=pool, facts=LLAMA)


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container["env"]}


@pytest.mark.parametrize(
    ("engine", "row", "compiled"),
    [
        ({}, {}, False),
        ({"toolCallParser": "hermes"}, {}, False),
        ({"toolCallParser": "mistral"}, {}, True),
        ({"toolCallParser": "hermes", "extraArgs": ["--tool-strict-level=function"]}, {}, True),
        ({"toolCallParser": "hermes"}, {"args": ("--tool-strict-level", "function")}, True),
        ({"type": "SGLang", "toolCallParser": "mistral"}, {}, False),
        ({"type": "SGLang", "toolCallParser": "hermes"}, {"env": (NamedValue(name="SGLANG_TOOL_STRICT_LEVEL"),)}, True),
    ],
)
def test_a_pod_says_whether_its_engine_makes_grammars_of_tools(
    engine: dict[str, Any], row: dict[str, Any], compiled: bool
) -> None:
    engines = CONFIG.engines
    sglang = {version: known.model_copy(update=row) for version, known in engines.versions.items()}
    vllm = {version: known.model_copy(update=row) for version, known in engines.vllm.versions.items()}
    tables = {"versions": sglang, "vllm": engines.vllm.model_copy(update={"versions": vllm})}
    config = CONFIG.model_copy(update={"engines": engines.model_copy(update=tables)})
    annotations = pod.template(shape(config, **engine))["metadata"]["annotations"]
    assert (annotations.get("shoal.dev/tools") == "compiled") == compiled


@pytest.mark.parametrize(
    ("engine", "config", "args", "row", "told"),
    [
        ("SGLang", configs.GEMMA3_4B, (), (), "none"),
        ("SGLang", configs.LLAMA4_SCOUT, (), (), "none"),
        ("SGLang", configs.GEMMA3_4B, ("--enable-multimodal",), (), None),
        ("SGLang", configs.GEMMA3_4B, (), ("--enable-multimodal",), None),
        ("SGLang", configs.QWEN25_VL_7B, (), (), None),
        ("SGLang", configs.QWEN25_VL_7B, ("--language-model-only",), (), "none"),
        ("vLLM", configs.GEMMA3_4B, (), (), None),
        ("vLLM", configs.GEMMA3_4B, ("--language-model-only",), (), "none"),
        ("vLLM", configs.GEMMA3_4B, (), ("--language-model-only",), "none"),
        ("vLLM", configs.GEMMA3_4B, ("--no-language-model-only",), ("--language-model-only",), None),
        # Text with any engine and arguments: nothing is written, so that no pod is replaced for it.
        ("SGLang", configs.LLAMA_8B, ("--language-model-only",), (), None),
        ("vLLM", configs.LLAMA_8B, (), (), None),
        ("SGLang", None, ("--language-model-only",), (), None),
    ],
)
def test_a_pod_says_that_its_engine_reads_no_images(
    engine: str, config: dict[str, Any] | None, args: Sequence[str], row: tuple[str, ...], told: str | None
) -> None:
    engines = CONFIG.engines
    sglang = {version: known.model_copy(update={"args": row}) for version, known in engines.versions.items()}
    vllm = {version: known.model_copy(update={"args": row}) for version, known in engines.vllm.versions.items()}
    tables = {"versions": sglang, "vllm": engines.vllm.model_copy(update={"versions": vllm})}
    rows = CONFIG.model_copy(update={"engines": engines.model_copy(update=tables)})
    facts = None if config is None else facts_of(config, source="x")
    made = replace(shape(rows, type=engine, extraArgs=args), facts=facts)
    assert pod.template(made)["metadata"]["annotations"].get("shoal.dev/media") == told


def test_the_engine_container_is_vllms() -> None:
    found = containers(shape())
    engine, agent = found["engine"], found["agent"]
    assert engine["image"] == "vllm/vllm-openai:v0.32.0"
    assert engine["command"][-2:] == ["vllm", "serve"]
    assert hand_on(3) in engine["command"][2]
    assert engine["args"][0] == "/shoal/models/model"
    assert "--host=127.0.0.1" in engine["args"]
    assert {probe["httpGet"]["path"] for probe in (engine["startupProbe"], engine["readinessProbe"])} == {"/health"}
    assert environment(engine) == {
        "HOME": "/shoal/home",
        "TMPDIR": "/tmp",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_MAX_STOP_STRINGS": "32",
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1024",
        "VLLM_MAX_AUDIO_DECODE_DURATION_S": "3600",
        "VLLM_MAX_AUDIO_DECODE_BYTES": str(512 << 20),
    }
    told = environment(agent)
    assert (told["SHOAL_AGENT_ENGINE"], told["SHOAL_AGENT_MAX_RUNNING"]) == ("vLLM", "256")


def test_the_rest_of_the_pod_signals_once() -> None:
    for name, container in containers(shape()).items():
        if name != "engine":
            assert "sleep 3" not in json.dumps(container["command"]), name


def test_a_table_row_has_its_own_command_and_environment() -> None:
    row = EngineVersion(image="x", command=("vllm-cpu",), env=(NamedValue(name="TMPDIR", value="/t"),))
    table = EngineTable(default_version="0.32.0", versions={"0.32.0": row})
    engines = CONFIG.engines.model_copy(update={"vllm": table})
    engine = containers(shape(CONFIG.model_copy(update={"engines": engines})))["engine"]
    assert engine["command"][-1] == "vllm-cpu"
    assert environment(engine)["TMPDIR"] == "/t"


def test_its_keys_are_in_a_secret_of_their_own() -> None:
    """During a rollout from SGLang a Model has pods of both engines, and each refuses the other's file."""
    install = keys.InstallKey(b"k" * 64)
    vllm, sglang = shape().model, shape(type="SGLang").model
    mine, theirs = manifests.keys_secret(vllm, install), manifests.keys_secret(sglang, install)
    assert mine["metadata"]["name"] == f"{theirs['metadata']['name']}-vllm"
    content = yaml.safe_load(base64.b64decode(mine["data"]["engine.yaml"]))
    assert content == {"api-key": keys.derive(b"k" * 64, "gateway", "u-1")}
    mounted = next(v["secret"] for v in pod_spec(shape())["volumes"] if v["name"] == "engine-key")
    assert mounted["secretName"] == "chat-keys-abcd1234-vllm"


def test_the_sidecar_opens_what_gateways_ask_for_and_nothing_else() -> None:
    listeners = sidecar.bootstrap(CONFIG, kind_of(shape().model).pod)["static_resources"]["listeners"]
    opened: dict[str, set[str]] = {}
    for listener in listeners:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        routes = manager["route_config"]["virtual_hosts"][0]["routes"]
        opened[listener["name"]] = {route["match"]["path"] for route in routes if "route" in route}
    assert opened == {"serving": {*WIRE.paths.values(), "/health"}, "probes": {"/health"}}
    closed = {"/invocations", "/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics", "/load"}
    assert opened["serving"].isdisjoint(closed)


def test_a_pool_makes_the_routes_and_the_memory_for_its_adapters() -> None:
    pool = LoRAPool.model_validate(
        {"metadata": {"name": "p", "namespace": "ns"}, "spec": {"modelRef": {"name": "chat"}, "slotsPerReplica": 4}}
    )
    engine = containers(shape(pool=pool))["engine"]
    assert environment(engine)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--max-loras=3" in engine["args"]


def test_without_mutual_tls_it_is_refused_with_what_to_do() -> None:
    off = CONFIG.model_copy(update={"transport": TransportConfig()})
    (problem,) = engine_problems(shape().model, off)
    assert problem.reason == reasons.ENGINE_NEEDS_MTLS
    assert "/invocations" in problem.message
    assert "transport.mtls.enabled" in problem.message
    assert engine_problems(shape().model, CONFIG) == ()
    assert engine_problems(shape(type="SGLang").model, off) == ()


def test_each_engine_has_its_own_versions() -> None:
    assert engine_version(shape().model, CONFIG) == "0.32.0"
    assert engine_version(shape(type="SGLang").model, CONFIG) == "0.5.23"
    wrong = CONFIG.engines.model_copy(update={"vllm": EngineTable(default_version="1.0.0")})
    assert wrong.undefined_default() == "engines.vllm.defaultVersion '1.0.0' is not one of engines.vllm.versions: "
    assert CONFIG.engines.undefined_default() is None
    assert SGLANG_ONLY.engines.undefined_default() is None


@pytest.mark.parametrize("tracing", [True, False])
def test_spans_are_sent_where_engines_trace(tracing: bool) -> None:
    found = CONFIG.tracing.model_copy(update={"endpoint": "http://otel:4318", "engines": tracing})
    engine = containers(shape(CONFIG.model_copy(update={"tracing": found})))["engine"]
    assert ("--otlp-traces-endpoint=http://otel:4318/v1/traces" in engine["args"]) is tracing
    sent = {each["name"]: each.get("value") for each in engine["env"] if each["name"].startswith("OTEL_")}
    http, sampled = "http/protobuf", "parentbased_always_off"
    assert sent == ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": http, "OTEL_TRACES_SAMPLER": sampled} if tracing else {})
    assert "--enable-trace" not in engine["args"]
