"""What `bench_routes` asks for: two Models with prices, and a route as it is without conditions on costs and with one
that never holds, or always."""

from typing import Any, Final

from shoal.api.modelroute import ModelRoute
from shoal.core.quota.month import PICO
from shoal.core.routing.routes import DeclaredRoute, declared_route
from tests.support.pricelist import PriceList, flat

SMALL: Final = "small"
"""The cheaper Model, of the namespace `bench`; its requests cost a tenth."""
LIMITED_KEY: Final = "sk-bench-limited"
"""Of a tenant with limits of each kind and a budget, none of which is met."""
LIMITS: Final[dict[str, Any]] = {
    "limits": {"requestsPerMinute": 10_000_000, "tokensPerMinute": 10**12, "concurrentRequests": 1_000_000},
    "budget": {"amount": "1000000", "currency": "USD"},
}
PLAIN, STAYS, LEAVES = "plain", "stays", "leaves"
"""Names of the routes: without a condition, and what the condition does to a request of a few hundred tokens."""
_ABOVE: Final = {PLAIN: None, STAYS: "1", LEAVES: "0.0001"}
"""A token costs a millionth."""


def prices() -> PriceList:
    """A ledger that has sent its price list."""
    return PriceList(flat("bench/model", PICO // 10**6), flat(f"bench/{SMALL}", PICO // 10**7))


def routes() -> dict[str, DeclaredRoute]:
    """By their keys."""
    found = [_route(name, above) for name, above in _ABOVE.items()]
    return {one.key: one for one in found}


def _route(name: str, above: str | None) -> DeclaredRoute:
    fallback: dict[str, Any] = {"targets": [{"model": {"name": SMALL}}]}
    if above is not None:
        fallback["whenCostAbove"] = {"amount": above, "currency": "USD"}
    metadata = {
        "name": name,
        "namespace": "bench",
        "uid": f"uid-{name}",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    rule = {"targets": [{"model": {"name": "model"}}], "fallback": fallback}
    return declared_route(ModelRoute.model_validate({"metadata": metadata, "spec": {"rules": [rule]}}))
