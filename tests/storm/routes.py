"""Routes in a storm: shares of the traffic, a canary that is broken now and then, fallbacks for a Model at zero, and
a mirror.

All their targets are of one base, so an answer has the same words whichever of them gives it; which one it was is told
by the usage records (`routed.py`).
"""

from typing import Any, Final

from shoal.api.meta import GROUP
from tests.storm.journals import Routed

FRONT: Final = "storm-front"
"""Shares its requests among the steady Model and the next one, and mirrors most of them to the shadow."""
TRIAL: Final = "storm-trial"
"""Of the bursty Model, with the next one as its canary. While the bursty Model is at zero, the steady one answers."""
NEXT: Final = "storm-next"
"""A Model with one replica."""
SHADOW: Final = "storm-shadow"
"""A Model with one replica that gets copies only: what its engine computes was asked by no client."""
PERCENT: Final = 30
MIRROR_PERCENT: Final = 80
_LEAVE_SECONDS: Final = 2


def front(namespace: str, steady: str) -> dict[str, Any]:
    """The route with shares."""
    targets = [{**_model(steady), "weight": 3}, _model(NEXT)]
    mirror = {**_model(SHADOW), "percent": MIRROR_PERCENT}
    return _route(namespace, FRONT, {"targets": targets, "fallback": _fallback(steady), "mirror": mirror})


def trial(namespace: str, steady: str, bursty: str, percent: int = PERCENT) -> dict[str, Any]:
    """The route with the canary. With another `percent` it is another canary, which is not halted."""
    canary = {"target": _model(NEXT), "percent": percent}
    return _route(namespace, TRIAL, {"targets": [_model(bursty)], "canary": canary, "fallback": _fallback(steady)})


def asked(namespace: str, steady: str, bursty: str) -> dict[str, Routed]:
    """By the name that clients use: the route, and the Models that may answer."""
    models = {FRONT: (steady, NEXT), TRIAL: (steady, bursty, NEXT)}
    mirrors = {FRONT: f"{namespace}/{SHADOW}"}
    return {
        name: Routed(f"{namespace}/{name}", tuple(f"{namespace}/{model}" for model in found), mirrors.get(name))
        for name, found in models.items()
    }


def _fallback(model: str) -> dict[str, Any]:
    return {"targets": [_model(model)], "whenWaitSeconds": _LEAVE_SECONDS}


def _model(name: str) -> dict[str, Any]:
    return {"model": {"name": name}}


def _route(namespace: str, name: str, rule: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": f"{GROUP}/v1alpha1", "kind": "ModelRoute", "metadata": metadata, "spec": {"rules": [rule]}}
