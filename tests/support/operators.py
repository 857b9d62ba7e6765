"""An operator in the test's own process, and objects for it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from shoal.api.config import AgentImage, Engines, EngineVersion, OperatorConfig
from shoal.api.meta import API_VERSION, JsonObject
from shoal.controllers.scaling.signals import ScalingSignals
from shoal.kube.client import KubeClient
from shoal.kube.resources import MODELS, Resource
from shoal.runtime.operator import OperatorProcess
from shoal.runtime.scaler import ScalerPlace

CONFIG = OperatorConfig(
    engines=Engines(
        default_version="0.5.23",
        versions={"0.5.23": EngineVersion(image="lmsysorg/sglang:v0.5.23")},
        cpuPerGPU="1",
        memoryPerGPU="1Gi",
    ),
    agent=AgentImage(image="shoal:test"),
)
NAMESPACE = "shoal-system"


def model(name: str, namespace: str, *, annotations: dict[str, str] | None = None, **spec: Any) -> JsonObject:
    return {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations or {}},
        "spec": {"source": {"uri": "file:///models/tiny"}, **spec},
    }


def gpu_class(name: str, product: str, *, cost: str | None = None, memory: str = "80Gi") -> JsonObject:
    return {
        "apiVersion": API_VERSION,
        "kind": "GPUClass",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"nvidia.com/gpu.product": product},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "memoryPerGPU": memory,
            **({"hourlyCost": {"amount": cost, "currency": "USD"}} if cost else {}),
        },
    }


def condition(obj: JsonObject, kind: str) -> JsonObject:
    found = [c for c in (obj.get("status") or {}).get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


async def eventually(
    read: Callable[[], Any], holds: Callable[[Any], bool], *, seconds: float = 90, what: str = ""
) -> Any:
    """Reads until it holds; the last thing read is in the message when it never does."""
    last: Any = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                last = await read()
                if holds(last):
                    return last
                await asyncio.sleep(0.1)
    except TimeoutError:
        shown = str(last.get("status") or last if isinstance(last, dict) else last)
        raise AssertionError(f"{what or 'it'} did not come true within {seconds:.0f} s; last: {shown[:3000]}") from None


async def settled(read: Callable[[], Any], *, still: float = 5, seconds: float = 90) -> Any:
    """What is read, once it has been the same for `still` seconds: longer than the operator waits with words alone."""
    loop = asyncio.get_running_loop()
    last, since = await read(), loop.time()

    async def at_rest() -> bool:
        nonlocal last, since
        if (now := await read()) != last:
            last, since = now, loop.time()
        return loop.time() - since >= still

    await eventually(at_rest, bool, seconds=seconds, what="a state of rest")
    return last


async def ends_as(read: Callable[[], Any], wanted: Any, what: str) -> None:
    """Waits until what is read is as wanted; fails with the difference when it never is."""
    try:
        await eventually(read, lambda now: now == wanted)
    except AssertionError:
        assert await read() == wanted, what


def writes(client: KubeClient) -> dict[tuple[str, str], int]:
    """What a client has written, but for leases: (verb, kind) -> how often."""
    return {call: count for call, count in client.writes.items() if call[1] != "leases"}


async def writes_at_rest(client: KubeClient) -> dict[tuple[str, str], int]:
    """`writes`, once nothing more is written: counts and events go out in bunches."""

    async def read() -> dict[tuple[str, str], int]:
        return writes(client)

    return await settled(read)


async def with_condition(
    client: KubeClient,
    resource: Resource,
    namespace: str,
    name: str,
    kind: str,
    status: str,
    reason: str | None = None,
    *,
    seconds: float = 90,
) -> JsonObject:
    """Waits for a condition of an object, found for what its spec says now."""

    def holds(obj: JsonObject) -> bool:
        found = condition(obj, kind)
        if found.get("observedGeneration") != obj["metadata"]["generation"]:
            return False
        return found.get("status") == status and reason in (None, found.get("reason"))

    return await eventually(
        lambda: client.get(resource, name, namespace), holds, seconds=seconds, what=f"{kind}={status} ({reason})"
    )


async def model_with(
    client: KubeClient,
    namespace: str,
    name: str,
    kind: str,
    status: str,
    reason: str | None = None,
    *,
    seconds: float = 90,
) -> JsonObject:
    """Waits for a condition of a Model, as `with_condition`."""
    return await with_condition(client, MODELS, namespace, name, kind, status, reason, seconds=seconds)


@contextlib.asynccontextmanager
async def running_operator(
    client: KubeClient,
    kubeconfig: str,
    *,
    config: OperatorConfig = CONFIG,
    identity: str = "test",
    signals: ScalingSignals | None = None,
    scaler: ScalerPlace | None = None,
) -> AsyncGenerator[OperatorProcess]:
    """Runs an operator; stops it and checks that nothing went wrong in it."""
    operator = OperatorProcess(
        client, config, NAMESPACE, identity=identity, kubeconfig=kubeconfig, signals=signals, scaler=scaler
    )
    task = asyncio.create_task(operator.run())
    try:
        yield operator
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
