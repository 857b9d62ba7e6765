"""What Shoal asks a vLLM engine: vLLM's HTTP API as seen from the same pod. No policy, and no data traffic.

vLLM has no endpoint for its load: it is read out of /metrics, whose gauges and counters are written at each step of the
engine. An engine that hangs keeps its last figures; only /load, which the HTTP server counts, then goes on.
"""

import asyncio
from typing import Final

import aiohttp

from shoal.engine.http import EngineHTTP, json_object
from shoal.engine.port import LONGEST_STEP, Counters, EngineGarbled, EngineRefused, EngineUnreachable, Loads
from shoal.engine.prometheus import label, samples, whole

READY_SECONDS: Final = 2.0
METRICS_SECONDS: Final = 5.0
LOAD_SECONDS: Final = 2.0

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_USAGE: Final = "vllm:kv_cache_usage_perc"
_CACHE: Final = "vllm:cache_config_info"
_PROMPT: Final = "vllm:prompt_tokens_total"
_GENERATED: Final = "vllm:generation_tokens_total"
_FLOPS: Final = "vllm:estimated_flops_per_gpu_total"
"""Grows with every step, also inside a long prefill (--enable-mfu-metrics); 0 for a model that vLLM cannot estimate."""
_ANSWERED: Final = "http_requests_total"
"""Absent before the first answer. Without probes and readings: vLLM leaves those out."""
_ASKED: Final = ('method="POST"', 'method="PUT"')
_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
_ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_total"
"""Absent in an engine without speculation."""
_LOAD_FAMILIES: Final = (_DRAFTS, _ACCEPTED, _RUNNING, _WAITING, _USAGE, _CACHE, _PROMPT, _GENERATED, _FLOPS)
_COUNTER_FAMILIES: Final = (_PROMPT, _GENERATED, _ANSWERED)


class VLLMClient(EngineHTTP):
    """Talks to one engine. Every call has a deadline and raises EngineError, nothing else."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None, max_running: int | None = None
    ) -> None:
        super().__init__(session, url, {"api": api_key})
        self._max_running = max_running

    async def ready(self) -> bool:
        """Whether the engine serves; never False. The port is closed while it loads, and /health stays 200 to the end
        of a shutdown. Raises EngineUnreachable at 503, which says that the engine is dead: its process ends in
        seconds."""
        try:
            await self.get("/health", READY_SECONDS, auth=None)
        except EngineRefused as error:
            if error.status == 503:
                raise EngineUnreachable("/health: the engine is dead") from None
            raise
        return True

    async def loads(self) -> Loads:
        """Load as of the engine's last step, and the requests that the HTTP server has now."""
        page, active = await asyncio.gather(self.get("/metrics", METRICS_SECONDS, auth=None), self._active())
        return parse_loads(page, active=active, max_running=self._max_running)

    async def counters(self) -> Counters:
        """Token counters as of the engine's last step, and requests."""
        page, active = await asyncio.gather(self.get("/metrics", METRICS_SECONDS, auth=None), self._active())
        return parse_counters(page, active=active)

    async def abort(self, rid: str) -> None:
        """Nothing: vLLM ends a request within a tenth of a second after its connection has closed."""
        if not rid:
            raise ValueError("an empty id begins all ids")

    async def _active(self) -> int:
        value = json_object(await self.get("/load", LOAD_SECONDS, auth=None), "/load").get("server_load")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise EngineGarbled("/load: no server_load")
        return value


def parse_loads(page: bytes, *, active: int, max_running: int | None) -> Loads:
    """Reads the load out of Prometheus text, summed over the engine's ranks. What a page lacks is unknown."""
    sums: dict[str, float] = {}
    used = total = 0
    usage: dict[str | None, float] = {}
    usable: dict[str | None, int] = {}
    for sample in samples(page, _LOAD_FAMILIES):
        rank = label(sample.labels, "engine")
        if sample.name == _USAGE:
            usage[rank] = sample.value
        elif sample.name == _CACHE:
            if (tokens := _usable(sample.labels)) is not None:
                usable[rank] = tokens
        else:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    known = bool(usable) and usage.keys() == usable.keys() and all(0 <= share <= 1 for share in usage.values())
    if known:
        total = sum(usable.values())
        used = sum(round(usage[rank] * tokens) for rank, tokens in usable.items())
    steps = [sums[name] for name in (_PROMPT, _GENERATED, _FLOPS) if name in sums]
    return Loads(
        running=whole(sums.get(_RUNNING)),
        waiting=whole(sums.get(_WAITING)),
        waiting_tokens=None,
        kv_tokens_used=whole(used) if known else None,
        kv_tokens_total=whole(total) if known else None,
        max_running=max_running,
        # Floating-point operations soon outgrow 64 bits; what counts is that they grow.
        computed=int(sum(steps)) if steps and 0 <= sum(steps) < float("inf") else None,
        active=active,
        tokens_per_step=_per_step(sums.get(_DRAFTS), sums.get(_ACCEPTED)),
    )


def _per_step(drafts: float | None, accepted: float | None) -> float | None:
    """A step checks one draft of each request, and adds a token of its own to what it accepts."""
    if drafts is None or accepted is None or drafts <= 0:
        return None
    found = 1 + accepted / drafts
    return found if 1 <= found <= LONGEST_STEP else None


def _usable(labels: str) -> int | None:
    """Tokens of one rank's KV cache that requests can use: one block is never given out."""
    size, block = (_whole_label(labels, name) for name in ("kv_cache_size_tokens", "block_size"))
    return max(0, size - block) if size is not None and block is not None else None


def _whole_label(labels: str, name: str) -> int | None:
    text = label(labels, name)
    return int(text) if text is not None and len(text) <= 18 and text.isdecimal() else None


def parse_counters(page: bytes, *, active: int) -> Counters:
    """Reads the counters out of Prometheus text. A request counts as answered when its answer ends: those that were
    received are these and the active ones."""
    sums: dict[str, float] = {}
    for sample in samples(page, _COUNTER_FAMILIES):
        if sample.name != _ANSWERED or any(method in sample.labels for method in _ASKED):
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    answered = whole(sums.get(_ANSWERED, 0.0))
    return Counters(
        prompt_tokens=whole(sums.get(_PROMPT)),
        generation_tokens=whole(sums.get(_GENERATED)),
        active=active,
        requests=None if answered is None else answered + active,
    )
