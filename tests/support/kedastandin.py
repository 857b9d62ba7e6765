"""Something that stands for KEDA and its HPA on a control plane that has neither: the same objects, writes and
arithmetic (`tests/support/hpa.py`), by the rules of KEDA 2.21. It asks the operator in the test's own process.

The real ones are in the tests of their own lane.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, Final

from shoal.api.meta import JsonObject
from shoal.controllers.keda.answers import Answers
from shoal.core.keda import Bounds
from shoal.kube.client import KubeClient
from shoal.kube.errors import Conflict, KubeError, NotFound
from shoal.kube.resources import DEPLOYMENTS, HPAS, SCALEDOBJECTS, TRIGGERAUTHENTICATIONS, Resource
from tests.support.controlplane import CRDS, remove_crds
from tests.support.hpa import hpa, keda

FINALIZER: Final = "finalizer.keda.sh"
_ANY: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_COUNT: Final = {"type": "integer", "format": "int32", "minimum": 0}
_SPEC: Final[JsonObject] = {
    "type": "object",
    "required": ["scaleTargetRef", "triggers"],
    "properties": {
        "scaleTargetRef": _ANY,
        "pollingInterval": _COUNT,
        "cooldownPeriod": _COUNT,
        "initialCooldownPeriod": _COUNT,
        "minReplicaCount": _COUNT,
        "maxReplicaCount": _COUNT,
        "advanced": _ANY,
        "triggers": {"type": "array", "items": _ANY},
    },
}


def crd(resource: Resource, spec: JsonObject) -> JsonObject:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {"plural": resource.plural, "kind": resource.kind},
            "versions": [
                {
                    "name": resource.version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": _ANY}}},
                }
            ],
        },
    }


async def install_keda_crds(client: KubeClient, *, without: str | None = None) -> None:
    """`without`: a field of the ScaledObject's spec that this version of KEDA does not have."""
    properties = {k: v for k, v in _SPEC["properties"].items() if k != without}
    await client.apply(CRDS, crd(SCALEDOBJECTS, _SPEC | {"properties": properties}), manager="keda")
    await client.apply(CRDS, crd(TRIGGERAUTHENTICATIONS, _ANY), manager="keda")
    kinds = {SCALEDOBJECTS.plural, TRIGGERAUTHENTICATIONS.plural}
    async with asyncio.timeout(60):
        while not kinds <= await client.discover("keda.sh", "v1alpha1"):
            await asyncio.sleep(0.1)


async def remove_keda_crds(client: KubeClient) -> None:
    for obj in [o async for o in client.list(SCALEDOBJECTS)]:
        await _unpin(client, obj)
    kinds = [f"{resource.plural}.{resource.group}" for resource in (SCALEDOBJECTS, TRIGGERAUTHENTICATIONS)]
    await remove_crds(client, "keda.sh", *kinds)


async def _unpin(client: KubeClient, obj: JsonObject) -> None:
    metadata = obj["metadata"]
    with contextlib.suppress(NotFound, Conflict):
        await client.merge_patch(
            SCALEDOBJECTS, metadata["name"], metadata["namespace"], {"metadata": {"finalizers": None}}, manager="keda"
        )


class StandIn:
    """`running` it; the flags say what is broken."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self.answers: Answers | None = None
        """The operator that leads; None: nobody answers."""
        self.tolerant = False
        """The API server drops the HPA's tolerance, as those before 1.35 do."""
        self.metrics = True
        """The metrics adapter works."""
        self.refusing: str | None = None
        """What KEDA says of every ScaledObject instead of Ready."""
        self.slow = asyncio.Event()
        """While set, the HPA looks nowhere."""
        self.written: dict[str, list[int]] = {}
        """Deployment's name -> replicas as KEDA and its HPA wrote them."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """KEDA's operator, while it runs."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            try:
                for obj in [o async for o in self._client.list(SCALEDOBJECTS)]:
                    with contextlib.suppress(NotFound, Conflict):
                        await self._one(obj)
            except KubeError:
                pass
            await asyncio.sleep(0.2)  # the API server has other work to do

    async def _one(self, obj: JsonObject) -> None:
        metadata, spec = obj["metadata"], obj["spec"]
        name, namespace = metadata["name"], metadata["namespace"]
        hpa_name = f"keda-hpa-{name}"
        paused = [k for k in metadata.get("annotations", {}) if k.startswith("autoscaling.keda.sh/paused")]
        if "deletionTimestamp" in metadata or paused:
            await self._client.delete(HPAS, hpa_name, namespace)
            if not paused:
                await _unpin(self._client, obj)
            return
        if FINALIZER not in metadata.get("finalizers", []):
            body = {"metadata": {"finalizers": [FINALIZER], "labels": {"scaledobject.keda.sh/name": name}}}
            await self._client.merge_patch(SCALEDOBJECTS, name, namespace, body, manager="keda")
        bounds = Bounds(spec["minReplicaCount"], spec["maxReplicaCount"])
        await self._hpa(obj, hpa_name, bounds)
        await self._status(obj, self.refusing)
        if self.refusing:
            return
        answer = self.answers.answer(namespace, name) if self.answers is not None else None
        if self.answers is not None:
            self.answers.polled(namespace, name)
        live = await self._client.get(DEPLOYMENTS, name, namespace)
        current, exist = live["spec"]["replicas"], (live.get("status") or {}).get("replicas", 0)
        active = answer is not None and answer.active
        replicas = keda(current, active=active, failed=answer is None, bounds=bounds)
        await self._write(name, namespace, current, replicas, "keda")
        if active:
            await self._status(obj, None, active=True)
        if self.slow.is_set() or not replicas:
            return
        if answer is None or not self.metrics:
            wanted = min(max(replicas, 1, bounds.minimum), bounds.maximum)
        else:
            tolerance = 0.1 if self.tolerant else 0.0
            wanted = hpa(
                replicas, exist, metric=answer.metric, target=answer.target, tolerance=tolerance, bounds=bounds
            )
        await self._write(name, namespace, replicas, wanted, "kube-controller-manager")

    async def _write(self, name: str, namespace: str, before: int, replicas: int, manager: str) -> None:
        if replicas != before:
            path = DEPLOYMENTS.path(namespace=namespace, name=name, subresource="scale")
            scale = await self._client._call("get", DEPLOYMENTS, "GET", path, idempotent=True)
            scale["spec"]["replicas"] = replicas
            params = {"fieldManager": manager}
            await self._client._call("patch", DEPLOYMENTS, "PUT", path, body=scale, params=params, idempotent=False)
            self.written.setdefault(name, []).append(replicas)

    async def _hpa(self, obj: JsonObject, name: str, bounds: Bounds) -> None:
        metadata, spec = obj["metadata"], obj["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        if self.tolerant:
            behavior = {way: {k: v for k, v in rules.items() if k != "tolerance"} for way, rules in behavior.items()}
        owner = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "controller": True}
        metric = {
            "type": "External",
            "external": {"metric": {"name": "s0-replicas"}, "target": {"type": "AverageValue", "averageValue": "1"}},
        }
        wanted: JsonObject = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {
                "name": name,
                "namespace": metadata["namespace"],
                "labels": metadata["labels"],
                "ownerReferences": [owner | {"name": metadata["name"], "uid": metadata["uid"]}],
            },
            "spec": {
                "scaleTargetRef": spec["scaleTargetRef"],
                "minReplicas": max(1, bounds.minimum),
                "maxReplicas": bounds.maximum,
                "metrics": [metric],
                "behavior": behavior,
            },
        }
        await self._client.apply(HPAS, wanted, manager="keda")
        await self._client.apply(
            HPAS,
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": {"name": name, "namespace": metadata["namespace"]},
                "status": {"desiredReplicas": 0, "conditions": [self._active()]},
            },
            manager="kube-controller-manager",
            subresource="status",
        )

    def _active(self) -> JsonObject:
        if self.metrics:
            return {"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound", "message": "fine"}
        words = "the HPA was unable to compute the replica count: unable to get external metric"
        return {"type": "ScalingActive", "status": "False", "reason": "FailedGetExternalMetric", "message": words}

    async def _status(self, obj: JsonObject, refusing: str | None, *, active: bool = False) -> None:
        ready: JsonObject = {"type": "Ready", "status": "True", "reason": "ScaledObjectReady", "message": "fine"}
        if refusing is not None:
            ready |= {"status": "False", "reason": "ScaledObjectCheckFailed", "message": refusing}
        status: dict[str, Any] = {"conditions": [ready]}
        if active:
            status["lastActiveTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        before = obj.get("status") or {}
        if any(before.get(k) != v for k, v in status.items()):
            metadata = obj["metadata"]
            await self._client.merge_patch(
                SCALEDOBJECTS,
                metadata["name"],
                metadata["namespace"],
                {"status": status},
                manager="keda",
                subresource="status",
            )
