"""What a LoRAPool makes of its Model's engines: arguments, pods, memory, and why some cannot have one."""

import json
from typing import Any

import pytest

from shoal.api import names, reasons
from shoal.api.adapters import ADAPTERS_ENV, AdapterSettings
from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core import quantity
from shoal.core.architectures import facts_of
from shoal.core.lora import pool as pools
from shoal.core.lora.format.layers import fused, largest_adapter
from shoal.core.sizing import GPU, Misfit, SGLangTuning, Sized, size
from shoal.engine.port import EngineLaunch
from shoal.engine.sglang.launch import engine_args
from shoal.engine.sglang.tuning import tuning_of
from shoal.manifests import model as manifests
from shoal.manifests.pool import applied, pool_problem
from shoal.manifests.shape import VariantShape
from shoal_dev.sim import args as sim_args
from tests.support.model_configs import ALL, BGE_M3, E5_MISTRAL, LLAMA_8B, LLAMA_70B, MIXTRAL, QWEN3_235B_FP8
from tests.support.operators import CONFIG
from tests.unit.manifests.test_manifests import CLASS

VERSION = "0.5.23"
MI, GI = 2**20, 2**30
MERGE = "so that no adapter can be checked against it: merge the fine-tune, and serve it as a Model"
LLAMA = facts_of(LLAMA_8B, source="hf://org/model", parameters=8_030_261_248, weight_bytes=16_060_522_496)


def make_pool(**spec: Any) -> LoRAPool:
    return LoRAPool.model_validate(
        {
            "metadata": {"name": "pool", "namespace": "ns", "uid": "p-1", "generation": 1},
            "spec": {"modelRef": {"name": "chat"}, **spec},
        }
    )


def make_model(*extra: str, env: dict[str, str] | None = None, **spec: Any) -> Model:
    return Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u-1", "generation": 1},
            "spec": {
                "source": {"uri": "hf://org/model"},
                "engine": {"extraArgs": list(extra)},
                "pod": {"env": [{"name": k, "value": v} for k, v in (env or {}).items()]},
                **spec,
            },
        }
    )


def pod(pool: LoRAPool | None, *, gpus: int = 1, facts: ArtifactFacts = LLAMA, **spec: Any) -> dict[str, Any]:
    shape = VariantShape(make_model(**spec), CLASS, gpus, VERSION, CONFIG, "abcd1234", facts, pool=pool)
    return manifests.deployment(shape, surge=False)["spec"]["template"]["spec"]


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in spec["initContainers"] + spec["containers"]}


def told(spec: dict[str, Any]) -> AdapterSettings | None:
    content = next((e["value"] for e in containers(spec)["agent"]["env"] if e["name"] == ADAPTERS_ENV), None)
    return None if content is None else AdapterSettings.model_validate_json(content)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_the_engine_starts_without_any_adapter_and_with_room_for_them() -> None:
    pool = make_pool(maxRank=32, targetModules=["q_proj", "v_proj"], slotsPerReplica=4, cachedPerReplica=16)
    model = make_model("--mem-fraction-static=0.8")
    args = engine_args(EngineLaunch(model, VERSION, model_path="/m", port=1, gpus=1, pool=pool))

    assert args[-8:] == (
        "--enable-lora",
        "--max-lora-rank=32",
        "--lora-target-modules",
        "q_proj",
        "v_proj",
        "--max-loras-per-batch=4",
        "--max-loaded-loras=16",
        "--mem-fraction-static=0.8",
    )
    assert not any("lora" in arg for arg in engine_args(EngineLaunch(model, VERSION, model_path="/m", port=1, gpus=1)))


def test_the_simulator_reads_them_as_sglang_does(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("api-key: client\nadmin-api-key: admin\n")
    monkeypatch.setattr("shoal.api.names.ENGINE_CONFIG_FILE", str(config))
    args = engine_args(
        EngineLaunch(make_model(), VERSION, model_path=str(tmp_path), port=30000, gpus=1, pool=make_pool())
    )

    given = sim_args.parse(args, {}).given

    assert given["lora_target_modules"] == list(make_pool().spec.target_modules)
    assert (given["max_loras_per_batch"], given["max_loaded_loras"]) == (8, 64)


# --- the pod ----------------------------------------------------------------------------------------------------------


def test_the_agent_alone_writes_the_folder_and_sees_the_credentials() -> None:
    pool = make_pool(
        credentials=[
            {"uriPrefix": "s3://adapters/", "secretRef": {"name": "read"}},
            {"uriPrefix": "hf://acme/", "secretRef": {"name": "hub"}},
        ]
    )
    spec = pod(pool)
    agent, engine, stage = (containers(spec)[name] for name in ("agent", "engine", "stage"))

    assert {"name": "adapters", "mountPath": names.ADAPTERS_DIR} in agent["volumeMounts"]
    assert {"name": "adapters", "mountPath": names.ADAPTERS_DIR, "readOnly": True} in engine["volumeMounts"]
    secrets = [m for m in agent["volumeMounts"] if m["mountPath"].startswith(names.ADAPTER_SECRETS_DIR)]
    assert [(m["mountPath"], m["readOnly"]) for m in secrets] == [
        (f"{names.ADAPTER_SECRETS_DIR}/0", True),
        (f"{names.ADAPTER_SECRETS_DIR}/1", True),
    ]
    by_name = {v["name"]: v for v in spec["volumes"]}
    assert [by_name[m["name"]]["secret"]["secretName"] for m in secrets] == ["read", "hub"]
    settings = told(spec)
    assert settings is not None
    assert settings.credentials == ("s3://adapters/", "hf://acme/")
    for other in (engine, stage):
        assert not any("adapter-secret" in m["name"] for m in other["volumeMounts"])


def test_a_missing_secret_keeps_no_replica_from_starting() -> None:
    pool = make_pool(credentials=[{"uriPrefix": "s3://adapters/", "secretRef": {"name": "read"}}])
    (volume,) = [v for v in pod(pool)["volumes"] if v["name"] == "adapter-secret-0"]

    assert volume["secret"] == {"secretName": "read", "optional": True}


def test_the_agent_is_told_what_it_checks_adapters_against() -> None:
    settings = told(pod(make_pool(maxRank=16, slotsPerReplica=4)))

    assert settings is not None
    assert settings.pool == "ns/pool"
    assert (settings.slots, settings.cached, settings.max_rank) == (4, 32, 16)
    assert settings.architecture == "LlamaForCausalLM"
    assert settings.widths is not None
    assert settings.widths.model_dump(by_alias=False) == {
        "layers": 32, "hidden": 4096, "query": 4096, "key": 1024, "feed_forward": 14336,
    }  # fmt: skip
    # 41.9 million parameters at rank 16, in 32 bits, and a little for the headers.
    assert settings.max_bytes == 41_943_040 * 4 + MI


def test_disk_and_memory_follow_from_what_is_kept() -> None:
    def amounts(cached: int, gpus: int = 1) -> tuple[int, int, int, int]:
        spec = pod(make_pool(maxRank=16, slotsPerReplica=2, cachedPerReplica=cached), gpus=gpus)
        by_name = {v["name"]: v for v in spec["volumes"]}
        agent, engine = containers(spec)["agent"]["resources"], containers(spec)["engine"]["resources"]
        assert engine["requests"]["memory"] == engine["limits"]["memory"]
        return (
            int(quantity.parse(by_name["adapters"]["emptyDir"]["sizeLimit"])),
            int(quantity.parse(agent["requests"]["ephemeral-storage"])),
            int(quantity.parse(agent["limits"]["memory"])),
            int(quantity.parse(engine["limits"]["memory"])),
        )

    plain = int(quantity.parse(containers(pod(None))["engine"]["resources"]["limits"]["memory"]))
    limit, disk, agent, engine = amounts(10)
    assert disk == 800 * MI
    assert limit == 20 * (41_943_040 * 4 + MI)
    assert agent > quantity.parse(containers(pod(None))["agent"]["resources"]["limits"]["memory"])
    assert engine == plain + 800 * MI
    # Each of the processes of an engine on several GPUs keeps the adapters whole.
    assert amounts(10, gpus=2)[3] == 2 * plain + 1600 * MI
    assert amounts(20)[1] == 2 * disk


def test_a_models_own_memory_request_is_meant() -> None:
    spec = pod(make_pool(), pod={"resources": {"requests": {"memory": "96Gi"}}})

    assert containers(spec)["engine"]["resources"]["limits"]["memory"] == "96Gi"


def test_without_a_pool_nothing_is_there() -> None:
    text = json.dumps(pod(None))

    assert "adapter" not in text
    assert "lora" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"maxRank": 32},
        {"slotsPerReplica": 9},
        {"cachedPerReplica": 65},
        {"targetModules": ["q_proj"]},
        {"credentials": [{"uriPrefix": "s3://adapters/", "secretRef": {"name": "read"}}]},
    ],
    ids=str,
)
def test_a_change_of_the_pool_rolls_the_model(change: dict[str, Any]) -> None:
    one, other = make_pool(), make_pool(**change)

    assert pod(one) != pod(other)
    assert not pools.same_engines(one, other)


@pytest.mark.parametrize("change", [{"allowedNamespaces": {"from": "All"}}, {"baseNames": ["org/base"]}], ids=str)
def test_who_may_join_and_what_the_base_is_called_roll_nothing(change: dict[str, Any]) -> None:
    one, other = make_pool(), make_pool(**change)

    assert pod(one) == pod(other)
    assert pools.same_engines(one, other)
    assert not pools.same_engines(one, None)


# --- what does not go together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "env", "message"),
    [
        (
            ["--attn-dp-size=2"],
            {},
            "with parallelism.attentionData (--attn-dp-size) SGLang runs only adapters that are never evicted: leave "
            "it out",
        ),
        (
            ["--load-format=runai_streamer"],
            {},
            "--load-format=runai_streamer is how SGLang would read adapters too, and it cannot: "
            "use auto, safetensors, fastsafetensors or instanttensor",
        ),
        (
            ["--speculative-algorithm=LOOKAHEAD"],
            {},
            "--speculative-algorithm=LOOKAHEAD does not go with adapters: "
            "use NGRAM, EAGLE, NEXTN, EAGLE3, DFLASH or DSPARK, or leave it out",
        ),
        (
            ["--speculative-algorithm=EAGLE", "--speculative-adaptive"],
            {},
            "--speculative-adaptive does not go with adapters: leave it out",
        ),
        (
            ["--speculative-algorithm=DSPARK"],
            {"SGLANG_RAGGED_VERIFY_MODE": "compact"},
            "SGLANG_RAGGED_VERIFY_MODE must be 'static' for DSPARK with adapters",
        ),
        (
            ["--moe-runner-backend=lora_triton"],
            {},
            "--moe-runner-backend=lora_triton needs another LoRA backend than SGLang's default: leave it out",
        ),
        (["--is-embedding"], {}, "it embeds, and adapters are served for generation only"),
        (
            ["--startup-weight-load-mode=overlap"],
            {},
            "--startup-weight-load-mode=overlap does not go with adapters: leave it out",
        ),
        (
            ["--dllm-algorithm=LowConfidence"],
            {},
            "with --dllm-algorithm SGLang starts without adapters: leave it out",
        ),
        (
            ["--speculative-algorithm=NGRAM", "--speculative-moe-runner-backend=lora_triton"],
            {},
            "--speculative-moe-runner-backend=lora_triton is for adapters, which the draft has not: leave it out",
        ),
        (
            ["--speculative-algorithm=EAGLE", "--moe-runner-backend=experimental_sgl_trtllm"],
            {},
            "the MoE runner experimental_sgl_trtllm does not go with adapters and --speculative-algorithm=EAGLE: "
            "leave it out",
        ),
        (
            ["--speculative-algorithm=EAGLE3"],
            {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM does not go with adapters and --speculative-algorithm=EAGLE3: "
            "leave it out",
        ),
    ],
)
def test_an_engine_that_refuses_adapters_says_so_on_the_pool(
    extra: list[str], env: dict[str, str], message: str
) -> None:
    model = make_model(*extra, env=env)
    found = pool_problem(make_pool(), model, LLAMA, CONFIG)

    assert found is not None
    assert (found.reason, found.message) == (reasons.ENGINE_REFUSES, f"Model ns/chat: {message}")
    assert applied(make_pool(), model, LLAMA, CONFIG) is None


@pytest.mark.parametrize("extra", [["--dp-size=2"], ["--tokenizer-worker-num=4"]])
def test_arguments_of_the_platform_count_too(extra: list[str]) -> None:
    # A Model may not set these at all: they are owned.
    row = CONFIG.engines.versions[CONFIG.engines.default_version].model_copy(update={"args": tuple(extra)})
    versions = {CONFIG.engines.default_version: row}
    config = CONFIG.model_copy(update={"engines": CONFIG.engines.model_copy(update={"versions": versions})})
    found = pool_problem(make_pool(), make_model(), LLAMA, config)

    assert found is not None
    assert extra[0].partition("=")[0] in found.message


@pytest.mark.parametrize(
    ("config", "spec", "message"),
    [
        (MIXTRAL, {}, "MixtralForCausalLM has experts, whose adapters are not supported: "
         "set spec.targetModules to those of attention, q_proj, k_proj, v_proj and o_proj"),
        (ALL["deepseek-v3"], {}, f"DeepseekV3ForCausalLM keeps a latent in place of keys and values (MLA), {MERGE}"),
        (ALL["deepseek-v3.2"], {}, f"DeepseekV32ForCausalLM keeps a latent in place of keys and values (MLA), {MERGE}"),
        (ALL["qwen3-next-80b"], {}, "some layers of Qwen3NextForCausalLM keep a state in place of keys and values "
         f"(Mamba, linear attention), {MERGE}"),
        (ALL["nemotron-h-8b"], {}, "some layers of NemotronHForCausalLM keep a state in place of keys and values "
         f"(Mamba, linear attention), {MERGE}"),
        (LLAMA_8B | {"architectures": ["BrandNewForCausalLM"]}, {},
         f"Shoal does not know the layers of BrandNewForCausalLM, {MERGE}"),
        (LLAMA_8B | {"v_head_dim": 64}, {},
         "the config of LlamaForCausalLM does not say how wide its layers are, or they are of several widths, "
         f"{MERGE}"),
        (BGE_M3, {}, "it embeds, and adapters are served for generation only"),
        (E5_MISTRAL, {}, "it embeds, and adapters are served for generation only"),
        (LLAMA_8B | {"intermediate_size": [8192, 16384]}, {},
         "LlamaForCausalLM has feed-forward layers of several widths, whose adapters are not supported: "
         "set spec.targetModules to those of attention, q_proj, k_proj, v_proj and o_proj"),
        (LLAMA_8B, {"targetModules": ["q_proj", "kv_b_proj"]},
         "LlamaForCausalLM has no kv_b_proj: take it out of spec.targetModules"),
    ],
)  # fmt: skip
def test_a_base_without_the_pools_layers_says_which(config: dict[str, Any], spec: dict[str, Any], message: str) -> None:
    found = pool_problem(make_pool(**spec), make_model(), facts_of(config, source="x"), CONFIG)

    assert found is not None
    assert found.message == f"Model ns/chat: {message}"


def test_attention_of_a_model_with_experts_may_have_adapters() -> None:
    pool = make_pool(targetModules=["q_proj", "k_proj", "v_proj", "o_proj"])
    facts = facts_of(QWEN3_235B_FP8, source="x")

    assert applied(pool, make_model("--speculative-algorithm=EAGLE3"), facts, CONFIG) is pool


def test_before_the_facts_are_read_nothing_is_wrong_and_nothing_rolls() -> None:
    assert pool_problem(make_pool(), make_model(), None, CONFIG) is None
    assert applied(make_pool(), make_model(), None, CONFIG) is None


# --- sizing -----------------------------------------------------------------------------------------------------------


def sized(facts: ArtifactFacts, pool: LoRAPool | None, *, memory: int = 80 * GI, tensor: int = 1) -> Sized | Misfit:
    args = engine_args(EngineLaunch(make_model(), VERSION, model_path="/m", port=1, gpus=tensor, pool=pool))
    return size(
        facts,
        GPU("c", memory),
        tensor=tensor,
        context_length=8192,
        overrides=make_model().spec.sizing,
        tuning=tuning_of(args),
    )


@pytest.mark.parametrize(("rank", "gib"), [(16, 0.63), (64, 2.5)])
def test_the_places_are_taken_from_the_kv_cache(rank: int, gib: float) -> None:
    plain, pooled = sized(LLAMA, None), sized(LLAMA, make_pool(maxRank=rank))

    assert isinstance(plain, Sized)
    assert isinstance(pooled, Sized)
    assert pooled.breakdown.adapters / GI == pytest.approx(gib, abs=0.006)
    assert plain.breakdown.kv - pooled.breakdown.kv == pooled.breakdown.adapters
    s = pooled.breakdown
    assert s.overhead + s.reserve + s.weights + s.images + s.state + s.adapters + s.kv == s.memory


def test_several_gpus_share_the_places() -> None:
    facts = facts_of(LLAMA_70B, source="x", parameters=70_553_706_496, weight_bytes=141_107_412_992)
    pooled = sized(facts, make_pool(maxRank=64), tensor=4)

    assert isinstance(pooled, Sized)
    assert pooled.breakdown.adapters / GI == pytest.approx(6.4, abs=0.06)


def test_a_class_that_the_places_make_too_small_says_so() -> None:
    found = sized(LLAMA, make_pool(maxRank=256), memory=24 * GI)

    assert isinstance(found, Misfit)
    assert "places for adapters 10 GiB" in found.why
    assert isinstance(sized(LLAMA, None, memory=24 * GI), Sized)


def test_what_the_places_take_is_never_guessed() -> None:
    facts = facts_of(ALL["deepseek-v3"], source="x", parameters=1_000_000, weight_bytes=2_000_000)
    found = sized(facts, make_pool())

    assert isinstance(found, Misfit)
    assert found.reason == reasons.SIZE_UNKNOWN
    assert "DeepseekV3ForCausalLM" in found.why


def test_engines_without_adapters_have_no_places() -> None:
    assert tuning_of(["--max-lora-rank=64", "--lora-target-modules", "q_proj"]).adapters is None
    assert tuning_of([]) == SGLangTuning()


def test_the_largest_adapter_changes_all_that_it_may() -> None:
    assert LLAMA.widths is not None
    linear = make_pool().spec.target_modules

    assert largest_adapter(LLAMA.widths, None, linear, 16) == 41_943_040
    # One of the three opens the layer that they share.
    assert fused(["k_proj"]) == fused(["q_proj", "v_proj"]) == {"qkv_proj"}
    assert largest_adapter(LLAMA.widths, None, ["qkv_proj"], 8) == largest_adapter(LLAMA.widths, None, ["k_proj"], 8)
    every = largest_adapter(LLAMA.widths, LLAMA.vocabulary, ["all"], 16)
    assert every == 41_943_040 + 16 * 2 * (128256 + 4096)
