"""Arguments of vLLM that a Model may not set, each with the reason or with what to use instead.

An argument is owned when Shoal sets it from a field, when the pods, keys or routes that Shoal makes would no longer
fit the engine, or when it would change what the engine serves without Shoal knowing.
"""

from collections.abc import Mapping
from typing import Final

from shoal.engine.unserved import ALL_ROLES, CALLS_OTHERS, LOGS_ALL, NO_EVENTS, NO_SLEEP, TRUSTS_SENDERS

_SOURCE = "use spec.source"
_FIXED = "Shoal sets it the same for every engine"
_KEYS = "Shoal gives every engine its keys through a file"
_ONE_POD = "a replica is one pod; use spec.engine.parallelism.tensor for its GPUs"
_GPUS = "it changes how many GPUs a replica needs; use spec.engine.parallelism.tensor"
_REPLICAS = "use spec.scaling for more replicas; spec.engine.parallelism.attentionData makes groups inside one"
_POD_GPUS = "the GPUs of a pod are chosen by Kubernetes"
_ADAPTERS = "a LoRAPool gives the Model its adapters"
_PLAIN = "gateways and probes reach the engine by plain HTTP/1.1 inside the pod"
_NO_GRPC = "vLLM's gRPC server does not check the engine's keys"
_PRIORITY = "the order of requests is decided at the gateway"
_TASK = "what the engine does follows from the weights"
_OBSERVED = "the agent reads the engine's load and progress from it"
_STOP = "spec.drainSeconds says how long requests may take to end"

OWNED: Final[dict[str, str]] = {
    "model": _SOURCE,
    "tokenizer": _SOURCE,
    "hf-config-path": _SOURCE,
    "revision": "write the revision into spec.source.uri, as hf://owner/repo@revision",
    "code-revision": "write the revision into spec.source.uri, as hf://owner/repo@revision",
    "tokenizer-revision": "write the revision into spec.source.uri, as hf://owner/repo@revision",
    "hf-token": "use spec.source.secretRef",
    "download-dir": "Shoal fetches the weights before the engine starts",
    "served-model-name": "use spec.servedNames",
    "max-model-len": "use spec.engine.contextLength",
    "tool-call-parser": "use spec.engine.toolCallParser",
    "enable-auto-tool-choice": "use spec.engine.toolCallParser",
    "reasoning-parser": "use spec.engine.reasoningParser",
    "tensor-parallel-size": "use spec.engine.parallelism.tensor",
    "pipeline-parallel-size": "use spec.engine.parallelism.pipeline",
    "prefill-context-parallel-size": _GPUS,
    "device-ids": _POD_GPUS,
    "enable-elastic-ep": _REPLICAS,
    "elastic-ep-max-dp-size": _REPLICAS,
    "nnodes": _ONE_POD,
    "node-rank": _ONE_POD,
    "master-addr": _ONE_POD,
    "master-port": _ONE_POD,
    "distributed-executor-backend": _ONE_POD,
    "headless": _ONE_POD,
    "host": _FIXED,
    "port": _FIXED,
    "uds": _FIXED,
    "config": _FIXED,
    "root-path": _FIXED,
    "middleware": _FIXED,
    "api-server-count": "adapters and the agent's counters need one API server",
    "enable-prompt-tokens-details": _FIXED,
    "enable-request-id-headers": _FIXED,
    "disable-fastapi-docs": _FIXED,
    "enable-offline-docs": _FIXED,
    "enable-scale-out": "it opens paths that bypass the gateway",
    "profiler-config": "it opens paths that start a profiler, which slows the requests of all tenants; leave it out",
    "tool-server": CALLS_OTHERS,
    "api-key": _KEYS,
    "enable-ssl-refresh": _PLAIN,
    "disable-log-stats": _OBSERVED,
    "enable-server-load-tracking": _OBSERVED,
    "enable-mfu-metrics": _OBSERVED,
    "shutdown-timeout": _STOP,
    "scheduling-policy": _PRIORITY,
    "enable-sleep-mode": NO_SLEEP,
    "runner": _TASK,
    "convert": _TASK,
    "allowed-local-media-path": TRUSTS_SENDERS,
    "trust-request-chat-template": TRUSTS_SENDERS,
    "trust-request-mm-kwargs": TRUSTS_SENDERS,
    "enable-prompt-embeds": TRUSTS_SENDERS,
    "enable-mm-embeds": TRUSTS_SENDERS,
    "enable-log-requests": LOGS_ALL,
    "enable-log-outputs": LOGS_ALL,
    "tokens-only": ALL_ROLES,
    "mm-encoder-only": ALL_ROLES,
    "kv-transfer-config": ALL_ROLES,
    "kv-events-config": NO_EVENTS,
    "ec-transfer-config": ALL_ROLES,
    "ec-manager-config": ALL_ROLES,
    "weight-transfer-config": "a restarted engine loads the same files again",
    "enable-lora": _ADAPTERS,
    "enable-tower-connector-lora": _ADAPTERS,
    "enable-mixed-moe-lora-format": _ADAPTERS,
    "enable-moe-shared-loras": _ADAPTERS,
    "fully-sharded-loras": _ADAPTERS,
    "specialize-active-lora": _ADAPTERS,
    "default-mm-loras": _ADAPTERS,
    "max-loras": _ADAPTERS,
    "max-cpu-loras": _ADAPTERS,
    "max-lora-rank": _ADAPTERS,
    "max-lora-cls-labels": _ADAPTERS,
}

MAY_BE_OFF: Final = frozenset({"enable-log-requests", "enable-log-outputs"})
"""Off by default, and users write that they are to be off."""

FAMILIES: Final[tuple[tuple[str, str], ...]] = (
    ("lora-", _ADAPTERS),
    ("data-parallel-", _REPLICAS),
    ("dp-supervisor-", _REPLICAS),
    ("ssl-", _PLAIN),
    ("sleep-", NO_SLEEP),
    ("grpc", _NO_GRPC),
)
"""Beginnings of names."""

_OF_SGLANG: Final[Mapping[str, str]] = {
    "model-path": "use spec.source",
    "context-length": "set spec.engine.contextLength of the Model",
    "tp-size": "set spec.engine.parallelism.tensor of the Model",
    "tp": "set spec.engine.parallelism.tensor of the Model",
    "dp-size": "use spec.scaling for more replicas",
    "mem-fraction-static": "vLLM's is --gpu-memory-utilization, a share of all of the GPU's memory",
    "max-running-requests": "vLLM's is --max-num-seqs",
    "max-queued-requests": "vLLM's is --max-num-queued-reqs, which counts running ones too",
    "max-total-tokens": "vLLM's is --kv-cache-memory-bytes",
    "chunked-prefill-size": "vLLM's is --max-num-batched-tokens",
    "max-prefill-tokens": "vLLM's is --max-num-batched-tokens",
    "page-size": "vLLM's is --block-size",
    "disable-radix-cache": "vLLM's is --no-enable-prefix-caching",
    "disable-cuda-graph": "vLLM's is --enforce-eager",
    "cuda-graph-max-bs": "vLLM's is --max-cudagraph-capture-size",
    "cuda-graph-max-bs-decode": "vLLM's is --max-cudagraph-capture-size",
    "enable-metrics": "vLLM's metrics are always on",
    "enable-cache-report": "Shoal sets vLLM's --enable-prompt-tokens-details",
    "is-embedding": "vLLM's --runner=pooling is set by Shoal, from the weights",
    "grammar-backend": "vLLM's is --structured-outputs-config.backend",
    "limit-mm-data-per-request": "vLLM's is --limit-mm-per-prompt",
    "ep-size": "set spec.engine.parallelism.expert of the Model",
    "speculative-algorithm": "set spec.engine.speculation of the Model",
    "speculative-num-draft-tokens": "set spec.engine.speculation.draftTokens of the Model",
    "speculative-draft-model-path": "set spec.engine.speculation.draftPath of the Model",
    "json-model-override-args": "vLLM's is --hf-overrides",
    "random-seed": "vLLM's is --seed",
    "stream-response-default-include-usage": "vLLM's is --enable-force-include-usage",
    "lora-paths": "make a LoRAAdapter for each",
    "max-loras-per-batch": "a LoRAPool gives the Model its adapters",
    "max-loaded-loras": "a LoRAPool gives the Model its adapters",
    "enable-trace": "set tracing.engines of the chart",
    "admin-api-key": "vLLM has one kind of key, which Shoal gives it through a file",
}
FOREIGN: Final = {name: ("SGLang", instead) for name, instead in _OF_SGLANG.items()}
"""Argument of another engine -> that engine, and what to do instead."""
