"""What Shoal asks an SGLang engine: SGLang's HTTP API as seen from the same pod. No policy, and no data traffic.

The gateway's request path has a client of its own, built for throughput.
"""

from collections.abc import Iterable
from typing import Final, cast

import aiohttp

from shoal.api.meta import MOST_COUNT
from shoal.engine.http import EngineHTTP, json_object
from shoal.engine.port import LONGEST_STEP, STARTUP_SECONDS, Counters, EngineGarbled, EngineRefused, Loads
from shoal.engine.prometheus import samples, whole

READY_SECONDS: Final = 2.0
"""/ready does no generation; /health does, takes over a second, and is never asked."""
LOADS_SECONDS: Final = 2.0
METRICS_SECONDS: Final = 5.0
ABORT_SECONDS: Final = 2.0


class SGLangClient(EngineHTTP):
    """Talks to one engine. Every call has a deadline and raises EngineError, nothing else."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str | None, admin_key: str | None) -> None:
        super().__init__(session, url, {"api": api_key, "admin": admin_key})

    async def ready(self) -> bool:
        """Whether the engine serves. False: it answers 503 while it starts, and from SIGTERM on, while what runs
        ends."""
        try:
            await self.get("/ready", READY_SECONDS, auth=None)
        except EngineRefused as error:
            if error.status == 503:
                return False
            raise
        return True

    async def loads(self) -> Loads:
        """Load now; from shared memory, so cheap and prompt. A busy rank publishes it after each prefill and every 15
        decode steps."""
        return parse_loads(await self.get("/v1/loads", LOADS_SECONDS, auth="api"))

    async def counters(self) -> Counters:
        """Token counters, from /metrics: counted when requests end."""
        return parse_counters(await self.get("/metrics", METRICS_SECONDS, auth=None))

    async def abort(self, rid: str) -> None:
        """Has the engine end every request whose id begins with `rid`; one that it does not have is passed over."""
        if not rid:
            raise ValueError("an empty id begins all ids")
        status, _ = await self.call("POST", "/abort_request", ABORT_SECONDS, auth="admin", body={"rid": rid})
        if status != 200:
            raise EngineRefused("/abort_request", status)


def parse_loads(body: bytes) -> Loads:
    """Reads /v1/loads. A count that one rank leaves out is unknown in the sum. Raises EngineGarbled."""
    answer = json_object(body, "/v1/loads")
    ranks = answer.get("loads")
    if not isinstance(ranks, list) or not ranks:
        raise EngineGarbled("/v1/loads: no loads")
    rows = [cast("dict[str, object]", row) if isinstance(row, dict) else {} for row in cast("list[object]", ranks)]

    def total(name: str) -> int | None:
        return _sum(_count(row.get(name)) for row in rows)

    return Loads(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        waiting_tokens=total("num_waiting_uncached_tokens"),
        kv_tokens_used=total("num_used_tokens"),
        kv_tokens_total=total("max_total_num_tokens"),
        max_running=total("max_running_requests"),
        computed=_sum(_computed(row) for row in rows),
        published=_earliest(row.get("timestamp") for row in rows),
        tokens_per_step=_per_step(row.get("speculative") for row in rows),
    )


def _per_step(sections: Iterable[object]) -> float | None:
    """Mean over the ranks: the engine does not say how many steps each of them made."""
    found: list[float] = []
    for section in sections:
        value = cast("dict[str, object]", section).get("accept_length") if isinstance(section, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= LONGEST_STEP:
            return None
        found.append(float(value))
    return sum(found) / len(found) if found else None


def _computed(row: dict[str, object]) -> int | None:
    """Of one rank. `decode_moments` are sums over decode steps, the last one of tokens; null before the first step."""
    prefill = _count(row.get("total_prefill_uncached_tokens"))
    if prefill is None or "decode_moments" not in row:
        return None
    moments = row["decode_moments"]
    if not isinstance(moments, list) or not moments:
        return prefill
    decoded = cast("list[object]", moments)[-1]
    return prefill + int(decoded) if isinstance(decoded, (int, float)) and 0 <= decoded < 2**63 else None


def _earliest(values: Iterable[object]) -> float | None:
    times = [
        float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v <= MOST_COUNT
    ]
    return min(times) if times else None


_TOKENS: Final = ("sglang:prompt_tokens_total", "sglang:generation_tokens_total")
_HTTP: Final = ("sglang:http_requests_active", "sglang:http_requests_total")
_GRAPHS: Final = "sglang:startup_cuda_graph_time_seconds"
"""Of each phase, of the slowest rank. Set at the end of the start, to 0 where no graphs are captured."""
_ASKED: Final = ('method="POST"', 'method="PUT"')
"""Answers are asked for with these; probes and readings, the agent's own among them, are GETs."""


def parse_counters(body: bytes) -> Counters:
    """Reads what Shoal needs out of Prometheus text, summed over the label sets.

    A token counter appears with its first value, so an absent one is unknown. The HTTP families are there from the
    first request of any kind, which a probe has made long since: then no line of a POST means that there was none.
    """
    sums: dict[str, float] = {}
    for sample in samples(body, (*_TOKENS, *_HTTP, _GRAPHS)):
        asked = sample.name not in _HTTP or any(method in sample.labels for method in _ASKED)
        sums[sample.name] = sums.get(sample.name, 0.0) + (sample.value if asked else 0.0)
    prompt, generation = (whole(sums.get(name)) for name in _TOKENS)
    active, requests = (whole(sums.get(name)) for name in _HTTP)
    return Counters(prompt, generation, active, requests, _seconds(sums.get(_GRAPHS)))


def _seconds(value: float | None) -> float | None:
    return value if value is not None and 0 <= value <= STARTUP_SECONDS else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return whole(total)
