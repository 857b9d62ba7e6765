"""vLLM's command line, and the check of a Model's arguments."""

import json
from typing import Any

import pytest

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.fields.table import MOST_STOPS
from shoal.core.sizing import AdapterSlots, VLLMTuning
from shoal.engine.port import EngineLaunch
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.kind import VLLM

VERSION = "0.32.0"
EMBEDS = ArtifactFacts(source="x", architecture="Qwen2Model", task="Embed")


def model(*, spec: dict[str, Any] | None = None, **engine: Any) -> Model:
    return Model.model_validate(
        {
            "metadata": {"name": "chat", "namespace": "team-a"},
            "spec": {"source": {"uri": "hf://a/b"}, "engine": {"type": "vLLM", **engine}, **(spec or {})},
        }
    )


def pool(**spec: Any) -> LoRAPool:
    whole = {"modelRef": {"name": "chat"}, **spec}
    return LoRAPool.model_validate({"metadata": {"name": "p", "namespace": "team-a"}, "spec": whole})


def args(given: Model, **more: Any) -> list[str]:
    whole: dict[str, Any] = {"model_path": "/models/m", "port": 30000, "gpus": 2, **more}
    return list(VLLM.pod.args(EngineLaunch(given, VERSION, **whole)))


def test_the_command_line() -> None:
    given = model(contextLength=8192, toolCallParser="hermes", reasoningParser="qwen3", extraArgs=["--block-size=32"])
    assert args(given, host="127.0.0.1", platform_args=("--dtype=bfloat16",), quantization="FP8") == [
        "/models/m",
        "--served-model-name=team-a/chat",
        "--host=127.0.0.1",
        "--port=30000",
        "--tensor-parallel-size=2",
        "--config",
        "/shoal/keys/engine.yaml",
        "--shutdown-timeout=900",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--enable-mfu-metrics",
        "--disable-fastapi-docs",
        "--max-num-seqs=256",
        "--max-model-len=8192",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--reasoning-parser=qwen3",
        "--dtype=bfloat16",
        "--quantization=fp8_per_tensor",
        "--block-size=32",
    ]


def test_all_that_shoal_sets_is_known_to_vllm_and_owned_or_the_models_to_change() -> None:
    table = ARGUMENTS.table(VERSION)
    assert table is not None
    changeable = {"max-num-seqs", "quantization", "kv-cache-dtype", "enable-expert-parallel", "speculative-config"}
    changeable |= {"enable-prefix-caching"}
    given = model(
        toolCallParser="hermes",
        reasoningParser="qwen3",
        contextLength=512,
        quantization={"weights": "FP8", "kvCache": "FP8"},
        parallelism={"expert": True},
        speculation={"method": "NGram"},
    )
    words = [*args(given, pool=pool()), *args(model(), facts=EMBEDS)]
    names = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    assert names <= table.keys()
    assert {name for name in names if ARGUMENTS.owner(table[name].name) is None} <= changeable | {
        f"no-{name}" for name in changeable
    }


def test_the_agent_is_told_what_vllm_does_not_say() -> None:
    assert VLLM.pod.max_running(args(model())) == 256
    assert VLLM.pod.max_running(args(model(extraArgs=["--max-num-seqs=64"]))) == 64
    assert VLLM.pod.max_running(args(model(), platform_args=("--max-num-seqs=32",))) == 32


def test_weights_that_embed_are_pooled_and_their_prompts_not_kept_for_others() -> None:
    assert args(model(), facts=EMBEDS)[-2:] == ["--runner=pooling", "--no-enable-prefix-caching"]
    shared = model(spec={"prefixCache": {"isolation": "Shared"}})
    assert args(shared, facts=EMBEDS)[-1] == "--runner=pooling"


@pytest.mark.parametrize("facts", [EMBEDS, ArtifactFacts(source="x", architecture="WhisperForConditionalGeneration")])
def test_a_prefix_cache_without_salts_needs_the_tenants_consent(facts: ArtifactFacts) -> None:
    def found(**spec: Any) -> list[str]:
        asked = model(extraArgs=["--enable-prefix-caching"], spec=spec)
        return VLLM.pod.problems(asked, VERSION, facts)

    (problem,) = found()
    assert "set spec.prefixCache.isolation to Shared" in problem
    assert found(prefixCache={"isolation": "Shared"}) == []
    assert VLLM.pod.problems(model(extraArgs=["--enable-prefix-caching"]), VERSION, None) == [], "it may generate"


def test_a_pool_takes_a_rank_of_vllms_list_and_no_slot_for_the_base() -> None:
    found = args(model(), pool=pool(maxRank=100, slotsPerReplica=4, cachedPerReplica=20))
    assert found[-4:] == ["--enable-lora", "--max-lora-rank=128", "--max-loras=3", "--max-cpu-loras=23"]
    assert VLLM.pod.adapters_in_memory(pool(slotsPerReplica=4, cachedPerReplica=20)) == 23
    assert "--lora-target-modules" not in found


def test_adapters_load_only_where_a_pool_is() -> None:
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in VLLM.pod.environment(pool=False)
    # As many stops as gateways let through.
    assert VLLM.pod.environment(pool=False)["VLLM_MAX_STOP_STRINGS"] == str(MOST_STOPS)
    assert VLLM.pod.environment(pool=True)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, None),
        ({"enable-dbo": ""}, "--enable-dbo"),
        ({"runner": "pooling"}, "embeds"),
        ({"speculative-config.enable_adaptive_verification": "true"}, "adaptive"),
        ({"speculative-config": '{"enable_adaptive_verification":true}'}, "adaptive"),
    ],
)
def test_what_does_not_go_with_adapters(given: dict[str, str], why: str | None) -> None:
    found = VLLM.pod.pool_problem(pool(), given, {})
    assert found is None if why is None else why in (found or "")
    assert "up to rank 512" in (VLLM.pod.pool_problem(pool(maxRank=513), {}, {}) or "")
    assert VLLM.pod.pool_problem(pool(maxRank=512), {}, {}) is None
    assert not [arg for arg in args(model(), pool=pool(maxRank=513)) if "lora" in arg], "no rank of None"


@pytest.mark.parametrize(
    "arg",
    [
        "--gpu-memory-utilization=0.8",
        "--max-num-batched-tokens=32k",
        "--kv-cache-memory-bytes=4G",
        "--trust-remote-code",
        "--no-enable-prefix-caching",
        "--compilation-config.mode=3",
        "--limit-mm-per-prompt.image=2",
        "--speculative-config.method=ngram",
        "--device-memory-utilization=0.8",  # another spelling
        "--max-log-len=100",
    ],
)
def test_arguments_that_are_the_models_own_business_pass(arg: str) -> None:
    assert ARGUMENTS.problems(VERSION, [arg]) == []


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("--tensor-parallel-size=2", "--tensor-parallel-size is owned by Shoal: use spec.engine.parallelism.tensor"),
        ("--no-enable-lora", "--no-enable-lora is owned by Shoal: a LoRAPool gives the Model its adapters"),
        (
            "--api-k=x",
            "--api-k is an abbreviation of --api-key, which is owned by Shoal: "
            "Shoal gives every engine its keys through a file",
        ),
        (
            "--kv-transfer-config.kv_role=kv_both",
            "--kv-transfer-config.kv_role is owned by Shoal: Shoal does not separate prefill, decode and encoders; "
            "leave it out, and use spec.engine.parallelism or spec.scaling for more GPUs",
        ),
        (
            "--enable-sleep-mode",
            "--enable-sleep-mode is owned by Shoal: Shoal does not let engines sleep; leave it out, and use "
            "spec.scaling.minReplicas: 0 to free the GPUs",
        ),
        (
            "--sleep-mode-offload-cudagraph",
            "--sleep-mode-offload-cudagraph is owned by Shoal: Shoal does not let engines sleep; leave it out, and use "
            "spec.scaling.minReplicas: 0 to free the GPUs",
        ),
        *(
            (
                arg,
                f"{arg} is owned by Shoal: it writes prompts or answers of all tenants into logs or files; leave it "
                "out, and use the request log of a Tenant: spec.logging of the Tenant",
            )
            for arg in ("--enable-log-requests", "--enable-log-outputs")
        ),
        *(
            (
                arg,
                f"{arg.partition('=')[0]} is owned by Shoal: it opens paths that start a profiler, which slows the "
                "requests of all tenants; leave it out",
            )
            for arg in ('--profiler-config={"profiler":"torch"}', "--profiler-config.profiler=torch")
        ),
        ("--max-num-batched=2", "--max-num-batched is an abbreviation of --max-num-batched-tokens: write it out"),
        ("--max_num_seqs=64", "write --max_num_seqs with dashes: --max-num-seqs"),
        # Not the argument that switches it on.
        ("--no_enable_prefix_caching", "write --no_enable_prefix_caching with dashes: --no-enable-prefix-caching"),
        ("--no_enable_log_requests", "write --no_enable_log_requests with dashes: --no-enable-log-requests"),
        (
            "--disable-log-requests",
            "vLLM 0.32.0 has no argument --disable-log-requests; did you mean --no-enable-log-requests?",
        ),
        ("--no-enable-prefix", "--no-enable-prefix is an abbreviation of --no-enable-prefix-caching: write it out"),
        ("--api_key=x", "--api_key is owned by Shoal: Shoal gives every engine its keys through a file"),
        (
            "--mem-fraction-static=0.8",
            "vLLM 0.32.0 has no argument --mem-fraction-static, which is SGLang's: "
            "vLLM's is --gpu-memory-utilization, a share of all of the GPU's memory",
        ),
        ("--max-num-batched-tokens=32T", "--max-num-batched-tokens must be from 1 to 10000000; got '32T'"),
        ("--gpu-memory-utilization=1.5", "--gpu-memory-utilization must be a number from 0 to 1; got '1.5'"),
        ("--compilation-config.mode", "--compilation-config.mode needs a value: write --compilation-config.mode=VALUE"),
        ("--host.a=1", "vLLM 0.32.0 has no argument --host.a; did you mean --host?"),
        ("-tp=2", "'-tp=2' is not an argument: write '--name=value' or '--flag', one per item"),
        ("---tp=2", "vLLM 0.32.0 has no argument ---tp"),
        ("--trust-remote-code=yes", "--trust-remote-code takes no value: write it without '='"),
    ],
)
def test_refused_arguments_say_why_and_what_to_do(arg: str, message: str) -> None:
    assert ARGUMENTS.problems(VERSION, [arg]) == [message]


def test_a_member_given_twice_is_told_and_two_members_are_not() -> None:
    twice = ["--speculative-config.method=ngram", "--speculative-config.method=mtp"]
    assert ARGUMENTS.problems(VERSION, twice) == ["--speculative-config.method is given twice"]
    both = ["--speculative-config.method=ngram", "--speculative-config.num_speculative_tokens=3"]
    assert ARGUMENTS.problems(VERSION, both) == []


def test_every_owned_argument_exists_under_its_canonical_name() -> None:
    for version in ARGUMENTS.versions:
        table = ARGUMENTS.table(version)
        assert table is not None
        assert [name for name in ARGUMENTS.owned if name not in table or table[name].name != name] == []
        assert [name for name in ARGUMENTS.bounds if name not in table] == []
        assert [name for name in ARGUMENTS.foreign if name in table] == []


def test_fields_become_arguments() -> None:
    given = model(speculation={"method": "EAGLE3", "draftPath": "heads/e3"}, quantization={"kvCache": "FP8"})
    found = args(given)
    config = next(word for word in found if word.startswith("--speculative-config="))
    assert json.loads(config.partition("=")[2]) == {
        "method": "eagle3", "model": "/models/m/heads/e3", "num_speculative_tokens": 4,
    }  # fmt: skip
    assert "--kv-cache-dtype=fp8" in found


def test_what_a_field_says_is_not_said_again() -> None:
    given = model(speculation={"method": "NGram"}, extraArgs=["--speculative-config.method=mtp"])
    assert VLLM.pod.problems(given, VERSION, None) == [
        "spec.engine.extraArgs: --speculative-config is owned by Shoal: use spec.engine.speculation"
    ]
    # Alone it is refused too: one of its methods guesses from the answers to all tenants.
    assert VLLM.pod.problems(model(extraArgs=["--speculative-config.method=suffix"]), VERSION, None) != []


def test_the_arguments_choose_vllms_arithmetic() -> None:
    extra = ["--gpu-memory-utilization=0.5", "--enforce-eager", "--max-num-batched-tokens=4k"]
    found = VLLM.pod.tuning(extra, pool=pool(maxRank=9, slotsPerReplica=5), engine=model().spec.engine)
    assert isinstance(found, VLLMTuning)
    assert (found.gpu_memory_utilization, found.graphs, found.max_num_batched_tokens) == (0.5, False, 4000)
    assert found.max_running_requests == 256
    assert found.adapters == AdapterSlots(4, 16, ())
