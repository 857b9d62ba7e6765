"""CPU, memory, GPUs and disk of an engine pod's containers, and whether the node cache fetches the weights."""

from typing import Final

from shoal.api.cache import CACHED_SCHEMES
from shoal.api.sources import parse_source
from shoal.core import quantity
from shoal.manifests.pool import engine_memory
from shoal.manifests.shape import VariantShape

_STORAGE: Final = "ephemeral-storage"
_MI: Final = 2**20


def engine_resources(shape: VariantShape, *, with_gpus: bool) -> dict[str, dict[str, str]]:
    """Requests and limits of the engine container. Devices are claimed beside them (`devices.py`)."""
    own, engines = shape.model.spec.pod.resources, shape.config.engines
    memory = quantity.memory(quantity.parse(engines.memory_per_gpu) * shape.gpus + engine_memory(shape))
    requests = {"cpu": quantity.cpu(quantity.parse(engines.cpu_per_gpu) * shape.gpus), "memory": memory}
    limits = {"memory": memory}
    requests |= {name: _canonical(name, amount) for name, amount in own.requests.items()}
    limits |= {name: _canonical(name, amount) for name, amount in own.limits.items()}
    for name, amount in own.requests.items():
        # A Model that requests more memory than the chart's value needs a higher limit too: a limit below the request
        # is invalid.
        if name in limits and name not in own.limits:
            limits[name] = _canonical(name, amount)
    for name, amount in own.limits.items():
        if name in requests and name not in own.requests and quantity.parse(requests[name]) > quantity.parse(amount):
            requests[name] = _canonical(name, amount)
    if with_gpus and (resource := shape.gpu_class.spec.extended_resource) is not None:
        gpus = {resource: str(shape.gpus)}
        requests, limits = requests | gpus, limits | gpus
    return {"requests": requests, "limits": limits}


def stage_resources(shape: VariantShape) -> dict[str, dict[str, str]]:
    """The engine's resources without GPUs: the pod reserves them anyway, since only the largest init container counts.

    Weights in the pod's own emptyDir need disk space on the node: 1.1 times the files.
    """
    found = {kind: dict(amounts) for kind, amounts in engine_resources(shape, with_gpus=False).items()}
    facts = shape.facts
    fetched = parse_source(shape.model.spec.source.uri).scheme in CACHED_SCHEMES
    if fetched and not cached(shape) and facts is not None and facts.file_bytes:
        mib = -(-facts.file_bytes * 11 // 10 // _MI)
        found["requests"] = {_STORAGE: f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"} | found["requests"]
    return found


def cached(shape: VariantShape) -> bool:
    """Whether the node cache fetches the weights."""
    return shape.config.cache.enabled and parse_source(shape.model.spec.source.uri).scheme in CACHED_SCHEMES


def _canonical(name: str, amount: str) -> str:
    """The amount as the API server writes it; otherwise the stored object would always differ from the applied one."""
    number = quantity.parse(amount)
    return quantity.cpu(number) if name == "cpu" else quantity.memory(number) if name == "memory" else str(amount)
