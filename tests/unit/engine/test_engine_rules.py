"""The rules of the API server on `spec.engine`, evaluated as it does: they refuse what the status would refuse of a
spec alone, and nothing else."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel  # pyright: ignore[reportMissingModuleSource]

from shoal.api.model import Model
from shoal.engine.kinds import KINDS
from shoal.engine.sglang.arguments import ARGUMENTS as SGLANG
from shoal.engine.vllm.arguments import ARGUMENTS as VLLM

CRD = Path(__file__).resolve().parents[3] / "crds" / "models.shoal.dev.yaml"
ARGUMENTS = {"SGLang": SGLANG, "vLLM": VLLM}
LONGEST_MESSAGE = 2048
"""Of a rule, by the API server."""


@cache
def compiled() -> list[tuple[Any, str]]:
    """The rules of `spec.engine` in the CustomResourceDefinition."""
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    engine = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["engine"]
    env = cel.NewEnv(variables={"self": cel.Type.DYN})
    return [(env.compile(rule["rule"]), rule["message"]) for rule in engine["x-kubernetes-validations"]]


def refused(engine: dict[str, Any]) -> list[str]:
    """What the API server says of it."""
    given = {"self": {"type": "SGLang", **engine}}
    return [message for rule, message in compiled() if not rule.eval(data=given).plain_value()]


def told(engine: dict[str, Any]) -> list[str]:
    """What the status would say of it, before the weights are known."""
    spec = {"source": {"uri": "hf://a/b"}, "engine": engine}
    model = Model.model_validate({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec})
    pod = KINDS[model.spec.engine.type].pod
    version = pod.versions[-1]
    return [*pod.extra_args_problems(version, model.spec.engine.extra_args), *pod.problems(model, version, None)]


VLLM_ONLY = {"type": "vLLM"}
PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"extraArgs": ["--tp-size=2"]}, "use spec.engine.parallelism.tensor"),
    ({"extraArgs": ["--lora-paths=a"]}, "a LoRAPool gives the Model its adapters"),
    ({**VLLM_ONLY, "extraArgs": ["--max-model-len=4096"]}, "use spec.engine.contextLength"),
    ({**VLLM_ONLY, "extraArgs": ["--no-enable-lora"]}, "a LoRAPool gives the Model its adapters"),
    ({**VLLM_ONLY, "extraArgs": ["--kv-transfer-config.kv_role=kv_both"]}, "use spec.engine.parallelism"),
    ({**VLLM_ONLY, "extraArgs": ["--data-parallel-size=2"]}, "makes groups inside one"),
    ({"extraArgs": ["--log-requests"]}, "use the request log of a Tenant"),
    ({"extraArgs": ["--debug-tensor-dump-layers=1"]}, "use the request log of a Tenant"),
    ({**VLLM_ONLY, "extraArgs": ["--enable-log-requests"]}, "use the request log of a Tenant"),
    ({"extraArgs": ["--weight-cache-mode=daemon"]}, "leave it out: spec.prefetch"),
    ({**VLLM_ONLY, "extraArgs": ["--profiler-config.profiler=torch"]}, "which slows the requests of all tenants"),
    ({"extraArgs": ["--speculative-algorithm=EAGLE"]}, "use `speculation.method`"),
    ({"extraArgs": ["--quantization=fp8"]}, "use `quantization.weights`"),
    ({"extraArgs": ["--quantization=awq"], "quantization": {"weights": "FP8"}}, "use `quantization.weights`"),
    (
        {"extraArgs": ["--attn-dp-size=2"], "parallelism": {"tensor": 2, "attentionData": 2}},
        "use `parallelism.attentionData`",
    ),
    ({**VLLM_ONLY, "extraArgs": ["--speculative-config.method=ngram"]}, "use `speculation`"),
    ({**VLLM_ONLY, "extraArgs": ["--kv-cache-dtype=fp8_e4m3"]}, "use `quantization.kvCache`"),
    ({**VLLM_ONLY, "extraArgs": ["--enable-expert-parallel"]}, "use `parallelism.expert`"),
    ({"parallelism": {"pipeline": 2}, "extraArgs": ["--enable-pdmux"]}, "leave one of them out"),
    ({"parallelism": {"pipeline": 2}, "speculation": {"method": "MTP"}}, "leave out `speculation` or"),
    ({**VLLM_ONLY, "parallelism": {"pipeline": 2}, "extraArgs": ["--enable-dbo"]}, "leave one of them out"),
    ({"speculation": {"method": "NGram"}}, "set `isolation: Shared`"),
    (
        {"speculation": {"method": "NGram", "isolation": "Shared"}, "parallelism": {"tensor": 2, "attentionData": 2}},
        "leave one of them out",
    ),
]
FITS: list[dict[str, Any]] = [
    {},
    {**VLLM_ONLY, "extraArgs": ["--no-enable-log-requests", "--no-enable-log-outputs"]},
    VLLM_ONLY,
    {"extraArgs": ["--quantization=awq", "--mem-fraction-static=0.8"]},
    {**VLLM_ONLY, "extraArgs": ["--gpu-memory-utilization=0.8", "--kv-cache-dtype=fp8_e5m2"]},
    {**VLLM_ONLY, "speculation": {"method": "NGram"}, "parallelism": {"pipeline": 2}},
    {**VLLM_ONLY, "extraArgs": ["--enable-dbo"]},
    {"parallelism": {"pipeline": 2}},
    {"speculation": {"method": "NGram", "isolation": "Shared"}},
    {"speculation": {"method": "MTP"}, "parallelism": {"tensor": 2, "attentionData": 2}},
    # An argument that only begins like one that is owned.
    {"extraArgs": ["--model-impl=sglang"]},
]


@pytest.mark.parametrize(("engine", "remedy"), PAIRS)
def test_what_the_spec_alone_forbids_is_refused_with_the_remedy(engine: dict[str, Any], remedy: str) -> None:
    said = refused(engine)
    assert said
    assert any(remedy in message for message in said), said
    assert told(engine), "the status says it too, for Models that were stored before"


@pytest.mark.parametrize("engine", FITS)
def test_what_the_status_takes_is_not_refused(engine: dict[str, Any]) -> None:
    assert refused(engine) == []
    assert told(engine) == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_spelling_of_an_argument_that_shoal_owns_is_refused_and_no_other(kind: str) -> None:
    arguments = ARGUMENTS[kind]
    table = arguments.table(arguments.versions[-1])
    assert table is not None
    for spelling, argument in table.items():
        for arg in (f"--{spelling}", f"--{spelling}=x"):
            why = arguments.owner(argument.name)
            said = [one for one in refused({"type": kind, "extraArgs": [arg]}) if why is not None and why in one]
            owned = why is not None and not arguments.is_harmless(spelling, argument)
            assert bool(said) == owned, (arg, why)


def test_the_messages_are_short_enough_for_an_api_server() -> None:
    assert all(len(message) < LONGEST_MESSAGE and "\n" not in message for _, message in compiled())
