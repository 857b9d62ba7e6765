"""Limits that four gateways share: how far a burst goes over them beside the stated bound, and what a request costs.

python -m tests.bench.bench_quota [--requests 1000] [--gateways 4]

The gateways are real ones that hear each other over their streams; they, the clients and the engine share this process.
Each line is a burst of requests at a time, evenly over the gateways: first on a fresh limit, then on one of which a
tenth is left and all know it. The engine keeps every request until the burst is over. The bound is that of
`core/quota/share.py` for one share per gateway; (n - 1) times the reservation of one request.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from shoal.api.demand import TenantUse
from shoal.api.tenant import Tenant
from shoal.core.access import KeyIdentity, index_keys
from shoal.core.quota.peerusage import GatewayPeer
from shoal.core.quota.share import ROUND_SECONDS, overshoot
from shoal.gateway.quota import Quotas
from shoal.gateway.tenantdemand import TenantUsageState
from shoal.metering.meter import Meter
from tests.support.gateway import MODEL
from tests.support.quota_gateways import Crew, crew

BODY: Final[dict[str, Any]] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
COST: Final = len(b'{"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}') // 4 + 50
"""Tokens that are reserved for one."""
LARGE: Final = COST - 50 + 5000
"""The same, of one with a long answer: larger than a gateway's share of five of them."""
USAGE: Final = b'{"prompt_tokens":300,"completion_tokens":100,"prompt_tokens_details":{"cached_tokens":200}}'


async def refused(it: Crew, running: asyncio.Task[Counter[int]], at_least: int) -> None:
    """Waits until so many were refused; the others are at the engine."""
    while it.refused < at_least and not running.done():
        await asyncio.sleep(0.02)


async def burst(
    spec: dict[str, Any], body: dict[str, Any], most: int, cost: int, requests: int, gateways: int
) -> tuple[int, int, int]:
    """Requests that passed on a fresh limit; and those that passed when a tenth was left, and how much that was."""
    with tempfile.TemporaryDirectory() as folder:
        async with crew(Path(folder), gateways) as it:
            it.limit(**spec)
            running = asyncio.create_task(it.burst(requests, body))
            await refused(it, running, requests - most // cost - gateways)
            await asyncio.sleep(0.5)
            fresh = it.used
            it.release.set()
            await running
    with tempfile.TemporaryDirectory() as folder:
        async with crew(Path(folder), gateways) as it:
            it.limit(**spec)
            before = (most * 9 // 10) // cost
            # A share at a time, as one uses a limit up that does not come all at once.
            waiting: list[asyncio.Task[Counter[int]]] = []
            while it.used < before:
                left = before - it.used
                part = max(1, min(left, (most // cost - it.used) // gateways * gateways * 9 // 10))
                waiting.append(asyncio.create_task(it.burst(part, body)))
                await asyncio.sleep(ROUND_SECONDS)
            used, sent = it.used, it.refused
            running = asyncio.create_task(it.burst(requests, body))
            await refused(it, running, sent + requests - (most // cost - used) - gateways)
            await asyncio.sleep(0.5)
            passed = it.used - used
            it.release.set()
            await asyncio.gather(running, *waiting)
            return fresh, passed, most // cost - used


async def overshoots(requests: int, gateways: int) -> None:
    kinds: dict[str, tuple[dict[str, Any], int, int]] = {
        "requests per minute": ({"limits": {"requestsPerMinute": 402}}, 402, 1),
        "tokens per minute": ({"limits": {"tokensPerMinute": 402 * COST}}, 402 * COST, COST),
        "requests at a time": ({"limits": {"concurrentRequests": 402}}, 402, 1),
        "budget in tokens": ({"budget": {"tokens": 402 * COST}}, 402 * COST, COST),
        "tokens, large requests": ({"limits": {"tokensPerMinute": 5 * LARGE}}, 5 * LARGE, LARGE),
    }
    print(f"{requests} requests at a time over {gateways} gateways (1 request reserves {COST} tokens)")
    print(f"{'limit':22}{'most':>8}{'fresh: used':>14}{'over':>7}{'near: left':>13}{'used':>8}{'over':>7}{'bound':>8}")
    for name, (spec, most, cost) in kinds.items():
        body = {**BODY, "max_tokens": 5000} if cost == LARGE else BODY
        fresh, passed, left = await burst(spec, body, most, cost, requests, gateways)
        bound = overshoot(most, gateways, cost)
        over, late = max(0, fresh * cost - most), max(0, (passed - left) * cost)
        line = f"{name:22}{most:8}{fresh * cost:14}{over:7}{left * cost:13}{passed * cost:8}{late:7}{bound:8}"
        print(line + ("" if max(over, late) <= bound else "   OVER THE BOUND"))


def identity(**spec: Any) -> KeyIdentity:
    key = {"name": "k", "sha256": "0" * 64}
    (found,) = index_keys(
        [Tenant.model_validate({"metadata": {"name": "acme"}, "spec": {"keys": [key], **spec}})]
    ).values()
    return found


def seconds(times: int, work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter() - began) / times)
    return best


def costs(times: int = 5000) -> None:
    """CPU of what a request does here, the best of five rounds; it has an engine's counts, and three other gateways."""
    every = {
        "without limits": {},
        "requests per minute": {"limits": {"requestsPerMinute": 10_000_000}},
        "all limits and a budget": {
            "limits": {"requestsPerMinute": 10_000_000, "tokensPerMinute": 10**12, "concurrentRequests": 1_000_000},
            "budget": {"tokens": 10**15},
        },
    }
    print("\nCPU of limits per request: reserve, headers, settle")
    for name, spec in every.items():
        who = identity(**spec)
        book = TenantUsageState(boot="me")
        others = [GatewayPeer(f"g{n}", time.monotonic() + 3600) for n in range(3)]
        for peer in others:
            book.peer_reported(peer.boot or "", peer.boot or "", {"acme": TenantUse(requests=1, tokens=10, booked=10)})
        quotas = Quotas(book, peers=lambda others=others: others)
        meter = Meter("id", "shoal", who, MODEL, endpoint="/v1/chat/completions", model_name="llama", stream=False)
        meter.count(USAGE, "final")
        meter.tokens()

        def request(quotas: Quotas = quotas, who: KeyIdentity = who, meter: Meter = meter) -> None:
            quota = quotas.of(who)
            if quota is not None:
                reserved = quota.reserve(MODEL, None, 900, 1, 200)
                quota.header_lines()
                reserved.settle(meter)

        print(f"{name:26}{seconds(times, request) * 1e6:8.2f} us")
    account = TenantUsageState().of("acme")

    def told() -> None:
        orjson.dumps(account.own_use().model_dump(by_alias=True, exclude_defaults=True))

    row = seconds(times, told)
    print(f"{'a tenant in a message':26}{row * 1e6:8.2f} us, once a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--gateways", type=int, default=4)
    given = parser.parse_args()
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(), wrapper_class=structlog.make_filtering_bound_logger(40)
    )
    asyncio.run(overshoots(given.requests, given.gateways))
    costs()


if __name__ == "__main__":
    main()
