"""Arguments of SGLang that a Model may not set, each with the reason or with what to use instead.

An argument is owned when Shoal sets it from a field, when the pods, keys or routes that Shoal makes would no longer
fit the engine, or when it would change what the engine serves without Shoal knowing.
"""

from collections.abc import Mapping
from typing import Final

from shoal.engine.unserved import ALL_ROLES, CALLS_OTHERS, LOGS_ALL, NO_EVENTS, NO_SLEEP, TRUSTS_SENDERS

_SOURCE = "use spec.source"
_FETCHED = "Shoal fetches the weights before the engine starts; leave it out, and use spec.source"
_NO_SENDER = "the engine would wait for weights that nobody sends; leave it out, and use spec.source"
_NO_WEIGHT_CACHE = (
    "the engine would take its weights from another process, which Shoal neither starts nor watches; leave it out: "
    "spec.prefetch has the weights on nodes before"
)
_FIXED = "Shoal sets it the same for every engine"
_KEYS = "Shoal gives every engine its keys through a file"
_ONE_POD = "a replica is one pod; use spec.engine.parallelism.tensor for its GPUs"
_GPUS = "it changes how many GPUs a replica needs; use spec.engine.parallelism.tensor"
_REPLICAS = "use spec.scaling for more replicas; spec.engine.parallelism.attentionData splits attention inside one"
_ADAPTERS = "a LoRAPool gives the Model its adapters"
_PLAIN = "gateways and probes reach the engine by plain HTTP/1.1 inside the cluster"
_NO_GRPC = "SGLang's gRPC server does not check the engine's keys"
_NO_LOAD_PORT = "it opens a port without a key; leave it out: gateways and operator get the load from the agent"
_PRIORITY = "the order of requests is decided at the gateway"

OWNED: Final[dict[str, str]] = {
    "model-path": _SOURCE,
    "tokenizer-path": _SOURCE,
    "revision": "write the revision into spec.source.uri, as hf://owner/repo@revision",
    "model-checksum": "use spec.source.digest",
    "download-dir": _FETCHED,
    "modelexpress-config": _FETCHED,
    "engine-info-bootstrap-port": _FETCHED,
    "checkpoint-engine-wait-weights-before-ready": _NO_SENDER,
    "delete-ckpt-after-loading": "a restarted engine loads the same files again",
    "served-model-name": "use spec.servedNames",
    "context-length": "use spec.engine.contextLength",
    "tool-call-parser": "use spec.engine.toolCallParser",
    "reasoning-parser": "use spec.engine.reasoningParser",
    "tp-size": "use spec.engine.parallelism.tensor",
    "pp-size": "use spec.engine.parallelism.pipeline",
    "dwdp-size": _GPUS,
    "base-gpu-id": "the GPUs of a pod are chosen by Kubernetes",
    "gpu-id-step": "the GPUs of a pod are chosen by Kubernetes",
    "dp-size": _REPLICAS,
    "enable-dp-attention": _REPLICAS,
    "nnodes": _ONE_POD,
    "node-rank": _ONE_POD,
    "dist-init-addr": _ONE_POD,
    "use-ray": _ONE_POD,
    "host": _FIXED,
    "port": _FIXED,
    "config": _FIXED,
    "enable-metrics": _FIXED,
    "enable-cache-report": _FIXED,
    "fastapi-root-path": _FIXED,
    "api-key": _KEYS,
    "admin-api-key": _KEYS,
    "tokenizer-worker-num": "SGLang does not support keys with more than one tokenizer worker",
    "gated-launch-port": "the engine would wait for a call that nobody makes",
    "grpc-port": _NO_GRPC,
    "grpc-mode": _NO_GRPC,
    "smg-grpc-mode": _NO_GRPC,
    "smg-http-sidecar-port": _NO_GRPC,
    "sidecar": _NO_GRPC,
    "sidecar-args": _NO_GRPC,
    "enable-http2": _PLAIN,
    "enable-ssl-refresh": _PLAIN,
    "language-only": ALL_ROLES,
    "enable-adaptive-dispatch-to-encoder": ALL_ROLES,
    "enable-pd-role-switch": ALL_ROLES,
    "kv-events-config": NO_EVENTS,
    "load-publish-endpoint": _NO_LOAD_PORT,
    "tool-server": CALLS_OTHERS,
    "enable-custom-logit-processor": TRUSTS_SENDERS,
    "trust-request-chat-template": TRUSTS_SENDERS,
    "trust-mm-content-hashes": TRUSTS_SENDERS,
    "crash-dump-folder": LOGS_ALL,
    "msprobe-dump-config": LOGS_ALL,
    "enable-memory-saver": NO_SLEEP,
    "enable-weights-cpu-backup": NO_SLEEP,
    "enable-draft-weights-cpu-backup": NO_SLEEP,
    "enable-priority-scheduling": _PRIORITY,
    "default-priority-value": _PRIORITY,
    "schedule-low-priority-values-first": _PRIORITY,
    "priority-scheduling-preemption-threshold": _PRIORITY,
    "disable-priority-preemption": _PRIORITY,
    "abort-on-priority-when-disabled": _PRIORITY,
    "enable-lora": _ADAPTERS,
    "enable-lora-overlap-loading": _ADAPTERS,
    "experts-shared-outer-loras": _ADAPTERS,
    "max-loaded-loras": _ADAPTERS,
    "max-lora-chunk-size": _ADAPTERS,
    "max-lora-rank": _ADAPTERS,
    "max-loras-per-batch": _ADAPTERS,
}

FAMILIES: Final[tuple[tuple[str, str], ...]] = (
    ("lora-", _ADAPTERS),
    ("ssl-", _PLAIN),
    ("http2-", _PLAIN),
    ("disaggregation-", ALL_ROLES),
    ("decoupled-spec-", ALL_ROLES),
    ("encoder-", ALL_ROLES),
    ("remote-instance-weight-loader-", _FETCHED),
    ("elastic-ep-", _ONE_POD),
    ("weight-cache-", _NO_WEIGHT_CACHE),
    ("log-requests", LOGS_ALL),
    ("debug-tensor-dump-", LOGS_ALL),
    # Its parameters of a request include the prompt.
    ("export-metrics-to-file", LOGS_ALL),
)
"""Beginnings of names."""

_OF_VLLM: Final[Mapping[str, str]] = {
    "max-model-len": "set spec.engine.contextLength of the Model",
    "gpu-memory-utilization": "Shoal sizes the GPU's memory by itself; SGLang's is --mem-fraction-static",
    "max-num-seqs": "SGLang's is --max-running-requests",
    "max-num-batched-tokens": "SGLang's is --chunked-prefill-size",
    "enable-prefix-caching": "SGLang's prefix cache is on by default",
    "no-enable-prefix-caching": "SGLang's is --disable-radix-cache",
    "enforce-eager": "SGLang's is --disable-cuda-graph",
    "lora-modules": "make a LoRAAdapter for each",
    "enable-auto-tool-choice": "set spec.engine.toolCallParser of the Model",
    "swap-space": "SGLang has nothing of the kind: leave it out",
    "guided-decoding-backend": "SGLang's is --grammar-backend",
    "limit-mm-per-prompt": "SGLang's is --limit-mm-data-per-request",
}
FOREIGN: Final = {name: ("vLLM", instead) for name, instead in _OF_VLLM.items()}
"""Argument of another engine -> that engine, and what to do instead."""
