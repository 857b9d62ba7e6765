"""Whatever stands in what users, sources and peers write: it is understood or refused, within little memory and time.

`SHOAL_FUZZ_OBJECTS` and `SHOAL_FUZZ_SEED` say how many objects of each target, and which.
"""

import asyncio
import json
import math
import re
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import orjson
import pytest
from pydantic import ValidationError

from shoal.agent.facts import facts_message, summary
from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model, Sizing
from shoal.api.modelroute import ModelRoute
from shoal.api.replica import ReplicaKeys
from shoal.api.tenant import Tenant
from shoal.artifacts import ArtifactError, File, Manifest, modelmetadata, safetensors
from shoal.artifacts.metadata import read_metadata
from shoal.artifacts.modelmetadata import Metadata
from shoal.core import artifacts, quantity
from shoal.core.architectures import UnknownConfig, config, facts_of
from shoal.core.facts import Pod
from shoal.core.lora.format import facts as adapter_answers
from shoal.core.lora.format import peft
from shoal.core.rating import files
from shoal.core.rating.files import parse as parse_prices
from shoal.core.rating.problems import PricesRefused
from shoal.core.routing.resolve import served_model
from shoal.core.routing.routes import RequestFacts, decide, declared_route
from shoal.core.sizing import GPU, Misfit, Sized, gpu_of, size
from shoal.core.status import conditions
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.core.status.diagnosis import diagnose
from shoal.engine.sglang.arguments import check_extra_args
from shoal.engine.sglang.tuning import tuning_of
from shoal.kube import kedaviews, projections
from shoal.ledger import parse as ledger
from shoal.net.stream import Follower, ListenerIdentity, StreamBroken, StreamPeer
from shoal.signals.demand import DemandStream
from shoal.signals.replica import ReplicaStream
from tests.support.controlplane import FACTS
from tests.support.fuzzing import OBJECTS, TARGETS, fuzz, target
from tests.support.limited import MI, Outcome, run
from tests.support.model_configs import ALL
from tests.support.mutants import Mutants, nested
from tests.support.operators import gpu_class, model

GI = 2**30
VERSION = "0.5.23"
H100 = GPU("h100", 80 * GI, largest_node=8)


def text_of(value: Any) -> bytes:
    """As a file may have it: NaN, Infinity and lone surrogates are in it."""
    return json.dumps(value).encode()


def short(text: str | bytes, most: int) -> None:
    """What people are told has an end."""
    assert len(text) <= most


# --- specs ----------------------------------------------------------------------------------------------------------

ARGS = ["--mem-fraction-static", "--chunked-prefill-size", "--max-running-requests", "--max-total-tokens",
        "--page-size", "--attn-dp-size", "--ep-size", "--cpu-offload-gb", "--swa-full-tokens-ratio",
        "--mamba-full-memory-ratio",
        "--cuda-graph-max-bs-decode", "--cuda-graph-bs-decode", "--cuda-graph-config", "--dtype", "--quantization",
        "--kv-cache-dtype", "--speculative-algorithm", "--nope", "--tp", "--lora-paths"]  # fmt: skip


@target
def extra_args_and_sizing(mutants: Mutants, number: int) -> None:
    """Of any number of arguments with any values, on any model and GPU."""
    pick = mutants.random
    args: list[str] = []
    for _ in range(pick.choice([1, 3, 64, 200])):
        value = mutants.value()
        said = value if isinstance(value, str) else json.dumps(value)
        args.append(f"{pick.choice(ARGS)}={said}" if pick.random() < 0.9 else said)
    problems = check_extra_args(VERSION, args)
    assert len("; ".join(problems)) < 8_192
    facts = facts_of(ALL[pick.choice(sorted(ALL))], source="x", parameters=10**10, weight_bytes=2 * 10**10)
    overrides = Sizing(weight_bytes=pick.choice([None, "1Gi"]), kv_bytes_per_token=pick.choice([None, 1, 10**9]))
    gpu = GPU(
        "a", pick.choice([1, 24 * GI, 2**48]), pick.choice([None, 0, 2**48]), largest_node=pick.choice([None, 64])
    )
    tensor, context = pick.choice([None, 1, 64]), pick.choice([None, 128, 10**7])
    found = size(facts, gpu, tensor=tensor, context_length=context, overrides=overrides, tuning=tuning_of(args))
    assert isinstance(found, Sized | Misfit)
    if isinstance(found, Misfit):
        assert len(found.why) < 2_048


@target
def quantities(mutants: Mutants, number: int) -> None:
    value = mutants.value()
    text: Any = value if isinstance(value, str | int | float) else str(value)[:100_000]
    try:
        found = quantity.parse(text)
    except ValueError as error:
        short(str(error), 512)
        return
    assert abs(found) <= quantity.MOST
    int(found)
    assert len(quantity.money(found)) < 300


_MODEL: Any = model(
    "chat", "ns", servedNames=["chat"], priority=5, drainSeconds=10, 
    variants=[{"class": "l4", "tensor": 1, "maxReplicas": 3}],
    engine={"extraArgs": ["--page-size=1"], "contextLength": 4096, "parallelism": {"tensor": 2}},
    scaling={"minReplicas": 1, "maxReplicas": 3}, sizing={"weightBytes": "15Gi", "kvBytesPerToken": 1000},
    hold={"maxBytes": "1Mi", "timeoutSeconds": 5}, limits={"maxOutputTokens": 9},
    pod={"labels": {"a": "b"}, "env": [{"name": "A", "value": "b"}], "resources": {"limits": {"memory": "1Gi"}}},
)  # fmt: skip
_KINDS: Any = {
    Model: _MODEL | {"status": {"artifact": FACTS, "replicas": {"desired": 1, "ready": 1}, "conditions": [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "R",
         "message": "m"}]}},
    GPUClass: gpu_class("l4", "L4", cost="0.43"),
    Tenant: {"metadata": {"name": "acme"}, "spec": {
        "keys": [{"name": "a", "sha256": "a" * 64}], "models": [{"namespace": "ns", "name": "chat"}],
        "limits": {"requestsPerMinute": 5}}},
    LoRAPool: {"metadata": {"name": "p", "namespace": "ns"}, "spec": {
        "modelRef": {"name": "chat"}, "slotsPerReplica": 4, "maxRank": 16, "targetModules": ["q_proj"]}},
    LoRAAdapter: {"metadata": {"name": "a", "namespace": "ns"}, "spec": {
        "poolRef": {"name": "p"}, "source": {"uri": "hf://a/b"}}},
    ModelRoute: {"metadata": {"name": "r", "namespace": "ns"}, "spec": {"servedNames": ["chat"], "rules": [
        {"name": "long", "matches": [{"headers": [{"name": "x-a", "value": "1"}], "promptTokens": {"atLeast": 9}}],
         "targets": [{"model": {"name": "chat"}, "weight": 3}, {"adapter": {"name": "a", "namespace": "ns"}}],
         "sessionAffinity": {"type": "Header", "header": "x-session"},
         "fallback": {"targets": [{"model": {"name": "b"}}], "whenWaitSeconds": 9, "whenBudgetPercent": 80,
                      "whenCostAbove": {"amount": "0.05", "currency": "USD"}}}],
        "limits": {"maxOutputTokens": 9, "requestSeconds": 60, "requestsPerMinute": 5}}},
}  # fmt: skip


@target
def custom_objects(mutants: Mutants, number: int) -> None:
    """That passed no admission: what a stored object says to a controller, and to a gateway."""
    kind: Any = mutants.random.choice(sorted(_KINDS, key=str))
    raw = mutants.of(_KINDS[kind])
    if isinstance(raw, dict):
        raw = {**raw, "metadata": {"name": "n", "namespace": "ns", "uid": "u", "resourceVersion": "1"}}
        custom = projections.custom(kind, raw)
        assert len(custom.error) < 4_096
        if isinstance(custom.object, Model):
            try:
                served_model(custom.object)
            except ValueError:
                return  # a reflector leaves it out
        if isinstance(custom.object, ModelRoute):
            one = declared_route(custom.object)
            sent = RequestFacts("acme", "/v1/chat/completions", {b"x-a": b"1", b"x-session": b"s"}, 100)
            decide(one, sent, lambda _: True, mutants.random.random())
        if isinstance(custom.object, GPUClass):
            try:
                assert gpu_of(custom.object, ()).memory_bytes < 2**60
            except ValueError:
                return  # a class that is not counted with


_POD: Any = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {
        "app.kubernetes.io/component": "engine", "shoal.dev/model-uid": "m", "shoal.dev/gpu-class": "l4"},
        "annotations": {"controller.kubernetes.io/pod-deletion-cost": "5"},
        "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"nodeName": "n", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}],
             "initContainers": [{"restartPolicy": "Always", "resources": {"requests": {"nvidia.com/gpu": "1"}}}]},
    "status": {"phase": "Running", "podIP": "10.0.0.1", "startTime": "2026-01-01T00:00:00Z",
               "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
               "containerStatuses": [{"name": "facts", "ready": True, "restartCount": 0,
                                      "state": {"terminated": {"exitCode": 0, "message": "{}"}}}]},
}  # fmt: skip
_NODE: Any = {"metadata": {"name": "n", "uid": "u", "labels": {"nvidia.com/gpu.memory": "24564"}},
              "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]},
              "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"},
                         "conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip
_SCALED: Any = {"metadata": {"name": "s", "namespace": "ns", "uid": "u", "labels": {"shoal.dev/gpu-class": "l4"},
                             "ownerReferences": [{"uid": "m", "controller": True}]},
                "spec": {"minReplicaCount": 0, "maxReplicaCount": 3,
                         "scaleTargetRef": {"kind": "Deployment", "name": "d"}},
                "status": {"conditions": [{"type": "Ready", "status": "True", "message": "m"}]}}  # fmt: skip


@target
def views_of_other_objects(mutants: Mutants, number: int) -> None:
    """Nodes, pods, ScaledObjects: what a table cannot read, it leaves out and goes on (`Table.upsert`)."""
    from shoal.kube.store import Table

    project, good = mutants.random.choice(
        [(projections.node, _NODE), (projections.pod, _POD), (kedaviews.scaled_object, _SCALED),
         (projections.deployment, _SCALED), (projections.job, _SCALED), (kedaviews.autoscaler, _SCALED)]
    )  # fmt: skip
    raw = mutants.of(good)
    if not isinstance(raw, dict) or not isinstance(raw.get("metadata"), dict):
        return
    raw["metadata"] |= {"name": "n", "namespace": "ns", "uid": "u", "resourceVersion": "1", "generation": 1}
    table: Table[Any] = Table(cast("Any", project))
    table.upsert(raw)
    found = table.get("ns/n")
    if found is not None and project is projections.node:
        assert all(count <= projections.MOST_DEVICES for count in found.capacity.values())
        gpu = gpu_of(GPUClass.model_validate(gpu_class("l4", "L4")), [found])
        assert gpu.memory_bytes <= 2**48


# --- files of a source ----------------------------------------------------------------------------------------------


@target
def config_json(mutants: Mutants, number: int) -> None:
    name = mutants.random.choice(sorted(ALL))
    content = text_of(mutants.of(ALL[name]))
    index = text_of(mutants.of({"metadata": {"total_size": 5}, "weight_map": {"a": "model.safetensors"}}))
    if mutants.random.random() < 0.2:
        content = mutants.bytes_of(content)
    metadata = Metadata(
        {"config.json": len(content), "model.safetensors": 5},
        {"config.json": content, "model.safetensors.index.json": index},
    )
    try:
        found = summary(Manifest("hf://a/b", "hf", "r", ()), metadata)
    except ArtifactError as error:
        short(facts_message(error).encode(), 4096)
        return
    said = facts_message(found)
    assert len(said.encode(errors="replace")) <= 4096
    heard = artifacts.facts_of(_ended(said))
    assert heard is not None
    again = size(heard, H100, tensor=None, context_length=None, overrides=Sizing(), tuning=tuning_of([]))
    assert isinstance(again, Sized | Misfit)


def _ended(message: str) -> Pod:
    raw = json.loads(json.dumps(_POD))
    raw["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = message
    pod = projections.pod(raw)
    assert pod is not None
    return pod


def _staged(message: str) -> Pod:
    """A replica whose stage container ended with this."""
    raw = json.loads(json.dumps(_POD))
    stage = {"name": names.CONTAINER_STAGE, "state": {"terminated": {"exitCode": 1, "message": message}}}
    raw["status"] |= {"initContainerStatuses": [stage], "conditions": []}
    pod = projections.pod(raw)
    assert pod is not None
    return pod


@target
def termination_messages(mutants: Mutants, number: int) -> None:
    """Of a pod that anybody in its namespace may have made."""
    good = {"facts": FACTS}
    adapters = {"shapes": [{"modules": {"q_proj": [1, 1]}, "layers": 2, "targets": ["q_proj"], "base": None}],
                "adapters": [{"key": "a" * 16, "revision": "b" * 64, "rank": 8, "alpha": 16, "bytes": 5, "files": 6,
                              "shape": 0}]}  # fmt: skip
    pick = mutants.random
    said = pick.choice([text_of(mutants.of(good)), text_of(mutants.of(adapters)), b"[" * 5_000, b'{"a":' * 3_000])
    text = mutants.bytes_of(said).decode(errors="replace") if pick.random() < 0.3 else said.decode()
    pod = _ended(text)
    found = artifacts.facts_of(pod)
    if found is not None:
        size(found, H100, tensor=None, context_length=None, overrides=Sizing(), tuning=tuning_of([]))
    cause = artifacts._failure(pod)
    assert cause is None or len(cause.message) < 8_192
    shown = diagnose([_staged(text)])
    assert shown is not None
    assert len(shown.message) < 8_192
    for result in adapter_answers.parse(pod.containers[0].exit_message or "").values():
        assert len(str(result)) < 100_000


_TENSORS = {
    "a.lora_A.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]},
    "__metadata__": {"format": "pt"},
}


def _header(value: Any) -> bytes:
    return text_of(value)


@target
def safetensors_headers(mutants: Mutants, number: int) -> None:
    header = _header(mutants.of(_TENSORS))
    if mutants.random.random() < 0.2:
        header = mutants.bytes_of(header)
    prefix = struct.pack("<Q", mutants.random.choice([len(header), 0, 2**63, 2**64 - 1]))
    size_of_file = mutants.random.choice([8 + len(header) + 64, 0, 2**60])
    try:
        safetensors.header_bytes(prefix, size_of_file, "x")
        found = safetensors.tensors(header, size_of_file, "x")
    except ArtifactError as error:
        short(str(error), 4_096)
        return
    assert found.bytes >= 0


_ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none",
            "base_model_name_or_path": "meta", "rank_pattern": {}, "init_lora_weights": True}  # fmt: skip
_MATRICES = {
    f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight": {
        "dtype": "F32", "shape": [8, 4] if side == "A" else [4, 8], "data_offsets": [0, 128]}
    for layer in (0, 1) for module in ("q_proj", "v_proj") for side in "AB"
}  # fmt: skip


@target
def adapter_configs(mutants: Mutants, number: int) -> None:
    pick = mutants.random
    config = mutants.of(_ADAPTER) if pick.random() < 0.7 else _ADAPTER
    matrices = _header(mutants.of(_MATRICES) if pick.random() < 0.5 else _MATRICES)
    tokens = mutants.of({"<x>": 5}) if pick.random() < 0.3 else {}
    if not isinstance(config, dict) or not isinstance(tokens, dict):
        return  # `json_object` refuses it
    try:
        entries = safetensors.entries(matrices, 8 + len(matrices) + 128, "x")
    except ArtifactError:
        return
    tensors = {name: peft.Tensor(e.dtype, e.shape, e.bytes) for name, e in entries.items()}
    found = peft.facts_of(peft.RevisionFiles(f"sha256:{'a' * 64}", None, 5, 5, config, tensors, tokens))
    assert len(adapter_answers.message([("a" * 16, found)]).encode()) <= 4096


# --- prices and records ---------------------------------------------------------------------------------------------

_PRICES = {"currency": "EUR", "effectiveFrom": "2026-11-01", "unknownCached": "Cached", "name": "list",
           "prices": [{"plan": "gold", "model": "chat/llama", "input": "3", "cached": "0.30", "output": "15.000001"},
                      {"model": "*", "input": 1, "cached": 0, "output": 2}]}  # fmt: skip
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9)
)


@target
def price_lists(mutants: Mutants, number: int) -> None:
    texts = [LAUGHS, "a: &a [*a]", "[" * 20_000, "- " * 20_000, "x" * 2_000_000, "{a: 1e999999}", "? " * 5_000]
    if number < len(texts):
        text = texts[number]
    else:
        text = json.dumps(mutants.of(_PRICES))
        if mutants.random.random() < 0.3:
            text = mutants.bytes_of(text.encode()).decode(errors="replace")
    try:
        parse_prices("f.yaml", text)
    except PricesRefused as refused:
        short(str(refused), 64_000)


_RECORD: Any = {
    "specversion": "1.0", "id": "r1:final", "source": "shoal", "type": "dev.shoal.usage.v1", "subject": "acme",
    "time": "2026-11-01T00:00:00Z", "data": {
        "requestId": "r1", "kind": "final", "tenant": "acme", "keyName": "prod", "endpoint": "/v1/completions",
        "model": "chat/llama", "modelRequested": "llama", "stream": False, "outcome": "answered", "status": 200,
        "inputTokens": 5, "cachedTokens": 1, "outputTokens": 7, "countSource": "final", "attempts": 1, "holdMs": 1.5,
        "admittedAt": "2026-11-01T00:00:00Z"},
}  # fmt: skip


@target
def usage_records(mutants: Mutants, number: int) -> None:
    """One element of a batch: it counts, or is kept aside; nothing else."""
    body = text_of(mutants.of(_RECORD))
    try:
        element = orjson.loads(body)
    except orjson.JSONDecodeError:
        return  # the batch is no JSON
    found = ledger.parse(element, 1_800_000_000_000)
    if isinstance(found, ledger.Bad):
        assert len(found.reason) <= 2_000
    else:
        assert all(v is None or not isinstance(v, float) or math.isfinite(v) for v in found.row)
        assert all(not isinstance(v, int) or abs(v) < 2**63 for v in found.row)


# --- peers ----------------------------------------------------------------------------------------------------------

_REPLICA: Any = {"boot": "b", "seq": 0, "full": True, "keys": {
    "phase": "ready", "engineBoot": "e", "running": 1, "waiting": 2, "waitingTokens": 3, "kvTokensUsed": 4,
    "kvTokensTotal": 5, "maxRunning": 6, "adapterSlots": 2,
    "adapters": {"ns.a@0123456789ab": {"state": "loaded"}}}}  # fmt: skip
_DEMAND: Any = {"boot": "b", "seq": 0, "full": True, "currency": "EUR",
                "models": {"u": {"arrivals": 1, "inFlight": 2, "held": 3, "heldTokens": 4, "oldestSeconds": 0.5}},
                "adapters": {"a": {"model": "u", "arrivals": 1, "inFlight": 1, "held": 0, "misses": 0}},
                "tenants": {"acme": {"requests": 1, "tokens": 2, "spent": 3, "inFlight": 1}}}  # fmt: skip


def _takes(stream: Follower, mutants: Mutants, good: Any) -> None:
    for seq in range(3):
        said = good | {"seq": seq} if not seq else {**good, "seq": seq, "full": False}
        body = text_of(mutants.of(said) if mutants.random.random() < 0.8 else said)
        try:
            stream.take(mutants.bytes_of(body) if mutants.random.random() < 0.2 else body)
        except StreamBroken as error:
            short(str(error), 512)
            return


@target
def agents_messages(mutants: Mutants, number: int) -> None:
    heard: list[Any] = []
    stream = ReplicaStream(
        StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda _uid, keys: heard.append(keys), ListenerIdentity()
    )
    _takes(stream, mutants, _REPLICA)
    for keys in heard:
        stats = [v for v in (keys.model_dump() if keys else {}).values() if isinstance(v, int)]
        assert all(0 <= figure < 2**53 for figure in stats)


@target
def gateways_messages(mutants: Mutants, number: int) -> None:
    stream = DemandStream(
        StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda *_: None, ListenerIdentity(), lambda *_: None
    )
    _takes(stream, mutants, _DEMAND)
    for told in stream.models.values():
        assert 0 <= told.demand.held < 2**53
        assert math.isfinite(told.demand.oldest_seconds)


# --- what it found --------------------------------------------------------------------------------------------------


def test_a_type_of_model_that_is_a_list_is_told() -> None:
    assert facts_of(ALL["llama-8b"] | {"model_type": ["llama"]}, source="x").architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**9), ("hidden_size", 10**400), ("vocab_size", 10**13), ("num_attention_heads", 2**63)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_no_model_has_is_refused(key: str, value: int) -> None:
    with pytest.raises(UnknownConfig):
        facts_of(ALL["llama-8b"] | {key: value}, source="x")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5, "32", [32], None, True])
def test_a_size_that_is_no_number_is_as_if_it_were_not_there(value: object) -> None:
    assert facts_of(ALL["llama-8b"] | {"num_hidden_layers": value}, source="x").kv.kind == "Unknown"


LAYERS = 10**9
LENGTHS = [2**53] * 300_000
"""Of one tensor. Each is a size that a tensor may have; their product is not to be computed."""


def facts_without_end(walls: bool) -> str:
    """In a child: a config.json of a kilobyte."""
    if not walls:
        cast("Any", config).MOST_LAYERS = 10**18
    try:
        return str(facts_of(ALL["deepseek-v3.2"] | {"num_hidden_layers": LAYERS}, source="x").architecture)
    except UnknownConfig as error:
        return str(error)


def header_without_end(walls: bool) -> str:
    """In a child: one tensor with so many dimensions."""
    if not walls:
        cast("Any", safetensors)._DIMENSIONS = len(LENGTHS)
    header = _header({"a": {"dtype": "F32", "shape": LENGTHS, "data_offsets": [0, 0]}})
    try:
        return hex(safetensors.tensors(header, 8 + len(header), "x").parameters)[:9]
    except ArtifactError as error:
        return str(error)


class Claiming:
    """A source whose files are as long as it says, and all of zeros."""

    def __init__(self, name: str) -> None:
        small = () if name == "config.json" else (File("config.json", 8, ""),)
        self.files = (*small, File(name, 2**36, ""))

    async def read(self, file: File, start: int, length: int) -> bytes:
        prefix = struct.pack("<Q", 2**35) if not start else b""
        return prefix + bytes(min(length, file.size - start) - len(prefix))


def file_without_end(given: list[Any]) -> str:
    """In a child: a source's file that says that it, or its header, is of gigabytes."""
    name, walls = given
    if not walls:
        cast("Any", modelmetadata).TEXT_LIMIT = 2**40
        cast("Any", safetensors.header_bytes).__defaults__ = (2**40,)
    source = Claiming(name)
    try:
        return str(asyncio.run(read_metadata(cast("Any", source), Manifest("x", "x", None, source.files))))
    except ArtifactError as error:
        return str(error)


def prices_without_end(walls: bool) -> str:
    """In a child: a price list of so many bytes."""
    if not walls:
        cast("Any", files).LARGEST_BYTES = 2**40
        files._MOST_NODES = 10**12
    try:
        parse_prices("f.yaml", "prices: [" + "{a: 1}, " * 1_000_000 + "]")
    except PricesRefused as refused:
        return str(refused)
    return ""


WITHOUT_END: list[tuple[Callable[[Any], str], list[Any], str]] = [
    (facts_without_end, [], "no model has more than"),
    (header_without_end, [], "not that of a safetensors file"),
    (file_without_end, ["config.json"], "which no config has"),
    (file_without_end, ["model.safetensors"], "which no model has"),
    (prices_without_end, [], "larger than"),
]
NAMES = ["config", "tensor", "file", "header", "prices"]


def ended(work: Callable[[Any], str], given: list[Any], walls: bool) -> Outcome:
    return run(work, [*given, walls] if given else walls, memory=256 * MI, cpu=3)


@pytest.mark.parametrize(("work", "given", "told"), WITHOUT_END, ids=NAMES)
def test_what_would_have_no_end_is_refused(work: Callable[[Any], str], given: list[Any], told: str) -> None:
    outcome = ended(work, given, walls=True)
    assert outcome.ended == "done"
    assert told in outcome.value


@pytest.mark.parametrize(("work", "given", "told"), WITHOUT_END, ids=NAMES)
def test_without_its_bound_it_has_none(work: Callable[[Any], str], given: list[Any], told: str) -> None:
    assert ended(work, given, walls=False).ended in ("memory", "cpu")


# --- quantities -----------------------------------------------------------------------------------------------------

ENDLESS = ["1e999999", "9" * 999_999 + "e999999", "-1e999999Ei"]


def counts(given: list[Any]) -> str:
    """In a child: a quantity of a few letters, such as of a node's GPUs or of an argument, as a whole number."""
    text, walls = given
    if not walls:
        cast("Any", quantity)._QUANTITY = re.compile(quantity._QUANTITY.pattern.replace("{1,2}", "+"))
        cast("Any", quantity)._LONGEST = cast("Any", quantity).MOST = math.inf
    try:
        return str(quantity.count(text) > 0)
    except ValueError as error:
        return str(error)
    except ArithmeticError as error:
        return type(error).__name__


@pytest.mark.parametrize("text", ENDLESS, ids=["exponent", "digits", "unit"])
def test_a_quantity_with_an_endless_exponent_is_refused_at_once(text: str) -> None:
    outcome = run(counts, [text, True], memory=64 * MI, cpu=3)
    assert outcome.ended == "done"
    assert "is not a quantity" in outcome.value
    assert len(outcome.value) < 256


def test_without_the_bound_on_exponents_eight_letters_take_the_processor() -> None:
    assert run(counts, ["1e999999", False], memory=64 * MI, cpu=3).ended in ("memory", "cpu")


@pytest.mark.parametrize("text", ENDLESS[1:], ids=["digits", "unit"])
def test_without_the_bounds_a_quantity_raises_what_nobody_expects(text: str) -> None:
    """Who parses one expects a ValueError: anything else ends the plan of the object."""
    assert run(counts, [text, False], memory=256 * MI, cpu=30).value == "Overflow"


# --- messages of Jobs and stages ------------------------------------------------------------------------------------


def test_a_message_of_a_job_that_is_nested_a_thousand_times_is_no_facts() -> None:
    assert artifacts.facts_of(_ended("[" * 4_000)) is None
    cause = artifacts._failure(_ended('{"a":' * 800))
    assert cause is not None
    with pytest.raises(RecursionError):  # what reading it raises: no ValueError, as of all other damage
        json.loads("[" * 4_000)


@pytest.mark.parametrize("deep", ["[" * 4_000, '{"reason": "StageFailed", "message": ' + "[" * 4_000])
def test_a_message_of_a_stage_that_is_nested_a_thousand_times_is_shown_as_text(deep: str) -> None:
    found = diagnose([_staged(deep)])
    assert found is not None
    assert found.reason == reasons.STAGE_FAILED
    assert "[[[" in found.message


def reported(message: str) -> str:
    """What a Model's status comes to say of a Job that ended with this message."""
    ended = _ended(message)
    cause = artifacts._failure(ended)
    assert cause is not None
    finding = ConditionUpdate(reasons.PLACED, "Unknown", cause.reason, cause.message)
    (condition,) = merge((), [finding], generation=1, now=datetime(2026, 1, 1, tzinfo=UTC))
    return condition.message


LONG = ["x" * 4_090, "x" * 2**20, json.dumps({"reason": reasons.SOURCE_NOT_FOUND, "message": "y" * 2**20})]


@pytest.mark.parametrize("message", LONG)
def test_a_long_message_of_a_job_is_shortened_in_the_status(message: str) -> None:
    assert len(reported(message)) <= conditions.LONGEST_MESSAGE


@pytest.mark.parametrize("message", LONG)
def test_without_the_bounds_the_status_cannot_be_written(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "shorten", lambda text: text)
    monkeypatch.setattr(projections, "LONGEST_MESSAGE", 2**30)
    with pytest.raises(ValidationError, match="at most 4096 characters"):
        reported(message)


def kept_of(message: str) -> int:
    """Letters that the operator keeps of a pod's message."""
    return len(_ended(message).containers[0].exit_message or "")


def test_of_a_message_no_more_is_kept_than_a_kubelet_leaves() -> None:
    assert kept_of("x" * 2**20) == 4_096


def test_without_that_bound_each_pod_takes_what_its_status_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "LONGEST_MESSAGE", 2**30)
    assert kept_of("x" * 2**20) == 2**20


def test_an_adapters_line_that_names_an_endless_shape_is_left_out() -> None:
    row = {"key": "a" * 16, "revision": "b" * 64, "rank": 8, "alpha": 1, "bytes": 5, "files": 6, "shape": math.inf}
    assert adapter_answers.parse(json.dumps({"shapes": [], "adapters": [row]})) == {}


@pytest.mark.parametrize("shape", [[math.inf], [10**5] * 10_000, [True], ["8"], [-1], [2**60]])
def test_a_tensor_of_no_size_makes_no_whole_file(shape: list[Any]) -> None:
    header = _header({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    with pytest.raises(ArtifactError):
        safetensors.tensors(header, 8 + len(header), "x")


def test_a_record_that_is_nested_too_deeply_is_kept_aside_and_the_others_count() -> None:
    deep = _RECORD | {"extra": nested(400)}
    found = [ledger.parse(orjson.loads(json.dumps(each)), 1_800_000_000_000) for each in (deep, _RECORD)]
    assert [type(each) for each in found] == [ledger.Bad, ledger.Good]
    with pytest.raises(TypeError):  # without it the whole batch is answered with an error, again and again
        orjson.dumps(orjson.loads(json.dumps(deep)))


def test_a_record_that_took_for_ever_is_kept_aside() -> None:
    record = _RECORD | {"data": _RECORD["data"] | {"holdMs": "Infinity"}}
    assert isinstance(ledger.parse(record, 1_800_000_000_000), ledger.Bad)


def laughs(walls: bool) -> str:
    """In a child: nine lines of a price list that are a thousand million values."""
    if not walls:
        files._MOST_NODES = 10**12
    try:
        parse_prices("f.yaml", LAUGHS)
    except PricesRefused as refused:
        return str(refused)
    return ""


def test_a_price_list_of_aliases_of_aliases_is_refused() -> None:
    outcome = run(laughs, True, memory=256 * MI, cpu=30)
    assert outcome.ended == "done"
    assert "aliases counted each time" in outcome.value


def test_without_a_bound_on_values_it_takes_all_memory() -> None:
    assert run(laughs, False, memory=256 * MI, cpu=60).ended in ("memory", "cpu")


def made_up() -> int:
    """Letters that are kept of keys that an agent makes up."""
    stream = ReplicaStream(StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda *_: None, ListenerIdentity())
    stream.take(text_of(_REPLICA))
    for seq in range(1, 50):
        stream.take(text_of({"boot": "b", "seq": seq, "keys": {f"x{seq}": "y" * 1_000, "running": seq}}))
    assert stream.keys is not None
    assert stream.keys.running == 49
    return len(json.dumps({k: v for k, v in stream._reported.items() if k != "adapters"}))


def test_keys_that_an_agent_makes_up_are_not_kept() -> None:
    assert made_up() < 1_000


def test_if_all_keys_were_kept_they_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(f"x{seq}" for seq in range(50)) | {"running"}
    monkeypatch.setattr("shoal.signals.replica._KNOWN_KEYS", known)
    assert made_up() > 49_000


class Believed(ReplicaKeys):
    """What an agent says, without its bounds."""

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> "Believed":
        return cls.model_construct(**obj)


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch) -> ReplicaStream:
    monkeypatch.setattr("shoal.signals.replica.api.ReplicaKeys", Believed)
    return ReplicaStream(StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda *_: None, ListenerIdentity())


@pytest.mark.parametrize("value", [math.nan, -1, 1e308, 2**60, "9" * 30, [1]])
def test_what_an_agent_cannot_have_counted_makes_it_unknown(value: Any) -> None:
    stream = ReplicaStream(StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda *_: None, ListenerIdentity())
    with pytest.raises(StreamBroken):
        stream.take(text_of({**_REPLICA, "keys": _REPLICA["keys"] | {"waiting": value}}))
    assert not stream.live


@pytest.mark.parametrize("value", [-1, 1e308, 2**60])
def test_without_bounds_it_would_be_known(value: Any, believing: ReplicaStream) -> None:
    believing.take(text_of({**_REPLICA, "keys": _REPLICA["keys"] | {"waiting": value}}))
    assert believing.keys is not None
    assert believing.keys.waiting == value


def test_more_adapters_than_a_replica_holds_are_not_believed() -> None:
    stream = ReplicaStream(StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda *_: None, ListenerIdentity())
    many = {f"ns.a{i}@0123456789ab": {"state": "loaded"} for i in range(10_000)}
    with pytest.raises(StreamBroken):
        stream.take(text_of({**_REPLICA, "keys": _REPLICA["keys"] | {"adapters": many}}))


def test_without_that_bound_they_are(believing: ReplicaStream) -> None:
    many = {f"ns.a{i}@0123456789ab": {"state": "loaded"} for i in range(10_000)}
    believing.take(text_of({**_REPLICA, "keys": _REPLICA["keys"] | {"adapters": many}}))
    assert believing.keys is not None
    assert believing.keys.adapters == many


def named_by_a_gateway(count: int) -> DemandStream:
    stream = DemandStream(
        StreamPeer("u", "p", "h", "k"), cast("Any", None), lambda *_: None, ListenerIdentity(), lambda *_: None
    )
    stream.take(text_of({**_DEMAND, "models": {}}))
    for seq in range(count):
        said = {"boot": "b", "seq": seq + 1, "models": {f"u{seq}": _DEMAND["models"]["u"]}}
        stream.take(text_of(said))
    return stream


def test_more_models_than_there_can_be_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.signals.demand.api.MOST_NAMED", 100)
    assert len(named_by_a_gateway(100).models) == 100
    with pytest.raises(StreamBroken):
        named_by_a_gateway(101)


def test_without_the_bound_each_message_adds_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.signals.demand.api.MOST_NAMED", 100)
    monkeypatch.setattr("shoal.signals.demand._require_few", lambda _: None)
    assert len(named_by_a_gateway(200).models) == 200


def boasting() -> int:
    """GPUs of a node that says that it has a thousand million."""
    raw = json.loads(json.dumps(_NODE))
    raw["status"] |= {"capacity": {"nvidia.com/gpu": "1000000000"}, "allocatable": {"nvidia.com/gpu": "1000000000"}}
    return projections.node(raw).allocatable["nvidia.com/gpu"]


def test_a_node_that_says_a_thousand_million_gpus_is_taken_for_one_that_has_very_many() -> None:
    assert boasting() == projections.MOST_DEVICES


def test_without_the_bound_it_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "MOST_DEVICES", 10**18)
    assert boasting() == 10**9


# --- the fuzz -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_nothing_ends_a_reader(name: str, record_property: Any) -> None:
    report = fuzz(__name__, name)
    record_property("objects", report.objects)
    print(f"{name}: {report.objects} objects, {report.peak_bytes / MI:.0f} MiB")
    assert report.findings == []
    assert report.objects == OBJECTS
