"""Routes in a storm: shares of the traffic, also for an adapter, a canary that is broken now and then, fallbacks for a
Model at zero and for requests that may cost too much, a mirror, and an external target that is killed and comes back.

All Models among their targets are of one base, as is the external one, so an answer has the same words whichever of
them gives it; which one it was is told by the usage records (`routed.py`). An answer of the adapter has words of its
own.
"""

from typing import Any, Final

import yaml

from shoal.api.meta import GROUP
from shoal_dev.lab import network
from tests.storm.journals import Routed

FRONT: Final = "storm-front"
"""Shares its requests among the steady Model and the next one, and mirrors most of them to the shadow. Of those for the
next one, about half may cost too much there and go to the steady one."""
TRIAL: Final = "storm-trial"
"""Of the bursty Model, with the next one as its canary. While the bursty Model is at zero, the steady one answers."""
NEXT: Final = "storm-next"
"""A Model with one replica."""
SHADOW: Final = "storm-shadow"
"""A Model with one replica that gets copies only: what its engine computes was asked by no client."""
OUT: Final = "storm-out"
"""Goes to the external target; while that is away, the steady Model answers."""
OUTSIDE: Final = "storm-outside"
"""The external target: a simulated engine that is none of Shoal's, in a pod and behind a Service of this name."""
EXTERNAL: Final = "outside"
"""Its name in the route."""
_PORT: Final = 8000
_MODEL_PATH: Final = "/opt/shoal/models/tiny-chat"
PERCENT: Final = 30
MIRROR_PERCENT: Final = 80
_LEAVE_SECONDS: Final = 2
_ABOVE: Final = "0.00045"
"""45 tokens at the next Model. A prompt has some 35, and answers that are no streams have less than ten."""


def front(namespace: str, steady: str, adapter: str | None = None) -> dict[str, Any]:
    """The route with shares, one of which is the adapter's."""
    targets: list[dict[str, Any]] = [{**_model(steady), "weight": 3}, _model(NEXT)]
    if adapter is not None:
        targets.append({"adapter": {"name": adapter}})
    mirror = {**_model(SHADOW), "percent": MIRROR_PERCENT}
    fallback = {**_fallback(steady), "whenCostAbove": {"amount": _ABOVE, "currency": "USD"}}
    return _route(namespace, FRONT, {"targets": targets, "fallback": fallback, "mirror": mirror})


def prices(namespace: str, steady: str) -> str:
    """A price list by which a request costs ten times as much at the next Model as at the steady one."""
    entries = ({"model": f"{namespace}/{NEXT}", "input": "10"}, {"model": f"{namespace}/{steady}", "input": "1"})
    listed = [{**each, "cached": each["input"], "output": each["input"]} for each in entries]
    return yaml.safe_dump({"currency": "USD", "effectiveFrom": "2026-01-01", "prices": listed})


def trial(namespace: str, steady: str, bursty: str, percent: int = PERCENT) -> dict[str, Any]:
    """The route with the canary. With another `percent` it is another canary, which is not halted."""
    canary = {"target": _model(NEXT), "percent": percent}
    return _route(namespace, TRIAL, {"targets": [_model(bursty)], "canary": canary, "fallback": _fallback(steady)})


def out(namespace: str, steady: str) -> dict[str, Any]:
    """The route with the external target."""
    outside = {
        "name": EXTERNAL,
        "url": f"http://{_host(namespace)}:{_PORT}/v1",
        "model": "theirs",
        "endpoints": ["/v1/chat/completions", "/v1/completions"],
        "timeouts": {"firstByteSeconds": 20},
    }
    rule = {"targets": [{"external": {"name": EXTERNAL}}], "fallback": {"targets": [_model(steady)]}}
    return _route(namespace, OUT, rule, externalTargets=[outside])


def allowed(namespace: str) -> dict[str, Any]:
    """The chart's value for the host of the external target."""
    return {"host": _host(namespace), "port": _PORT, "plainHttp": True, "networks": [network.SERVICE_RANGE]}


def outside(namespace: str, image: str, node: str, journal: str) -> list[dict[str, Any]]:
    """The external target. A kubelet starts it again after it was killed. `journal`: its folder inside the pod."""
    model = (f"--model-path={_MODEL_PATH}", "--served-model-name=theirs", "--enable-cache-report")
    container = {
        "name": OUTSIDE,
        "image": image,
        "command": ["shoal", "sim", "engine", *model, "--host=0.0.0.0", f"--port={_PORT}"],
        "env": [
            {"name": "SHOAL_SIM_JOURNAL", "value": journal},
            {"name": "SHOAL_SIM_GPU", "value": "l4"},
            {"name": "SHOAL_SIM_KV", "value": "llama-3.1-8b"},
            {"name": "SHOAL_SIM_LOAD_SECONDS", "value": "1"},
        ],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 1},
    }
    labels = {"app": OUTSIDE}
    pod = {"containers": [container], "nodeSelector": {"kubernetes.io/hostname": node}}
    metadata = {"name": OUTSIDE, "namespace": namespace}
    service = {"selector": labels, "ports": [{"port": _PORT, "targetPort": _PORT}]}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "labels": labels}, "spec": pod},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
    ]


def asked(namespace: str, steady: str, bursty: str, adapter: str | None = None) -> dict[str, Routed]:
    """By the name that clients use: the route, and what may answer."""
    external = f"{namespace}/{OUT}/{EXTERNAL}"
    adapters = () if adapter is None else (f"{namespace}/{adapter}",)

    def routed(name: str, *models: str, **more: Any) -> Routed:
        return Routed(f"{namespace}/{name}", tuple(f"{namespace}/{model}" for model in models), **more)

    return {
        FRONT: routed(FRONT, steady, NEXT, mirror=f"{namespace}/{SHADOW}", adapters=adapters),
        TRIAL: routed(TRIAL, steady, bursty, NEXT),
        OUT: routed(OUT, steady, f"{OUT}/{EXTERNAL}", external=external),
    }


def _host(namespace: str) -> str:
    return f"{OUTSIDE}.{namespace}.svc.cluster.local"


def _fallback(model: str) -> dict[str, Any]:
    return {"targets": [_model(model)], "whenWaitSeconds": _LEAVE_SECONDS}


def _model(name: str) -> dict[str, Any]:
    return {"model": {"name": name}}


def _route(namespace: str, name: str, rule: dict[str, Any], **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    spec = {"rules": [rule], **spec}
    return {"apiVersion": f"{GROUP}/v1alpha1", "kind": "ModelRoute", "metadata": metadata, "spec": spec}
