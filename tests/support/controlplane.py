"""A real control plane on loopback without root and without nodes: etcd, API server, controllers, scheduler.

Nodes are objects, pods are bound by the real scheduler, and `StatusKubelet` says of them what a kubelet would say.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Final

import yaml

from shoal.api.meta import JsonObject
from shoal.kube.client import KubeClient
from shoal.kube.errors import Conflict, KubeError, NotFound
from shoal.kube.reflector import Reflector
from shoal.kube.resources import (
    GPUCLASSES,
    LORA_ADAPTERS,
    LORA_POOLS,
    MODEL_ROUTES,
    MODELS,
    NODES,
    PODS,
    TENANTS,
    Resource,
)
from shoal_dev.lab import binaries as lab_binaries
from shoal_dev.lab import controlplane as lab_controlplane
from shoal_dev.lab import pki

CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
ROOT = Path(__file__).resolve().parents[2]
_OWN: Final = {r.kind: r for r in (MODELS, GPUCLASSES, TENANTS, LORA_POOLS, LORA_ADAPTERS, MODEL_ROUTES)}


_TEMPORARY: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 10_000


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has. Not of those that the system itself gives to connections: any connection of
    any process would take one between this call and its use, or while a server is started again."""
    end = int(_TEMPORARY.read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            s = stack.enter_context(socket.socket())
            port = random.randrange(_LOWEST_PORT, end) if end > _LOWEST_PORT else 0  # noqa: S311
            with contextlib.suppress(OSError):  # somebody has it
                s.bind(("127.0.0.1", port))
                found.append(s.getsockname()[1])
    return found


class ControlPlane:
    """Start it, use `kubeconfig`, stop it. Nothing of it survives `stop`."""

    def __init__(self, directory: Path, binaries: lab_binaries.Binaries) -> None:
        self.directory = directory
        self._binaries = binaries
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.api_port, self._etcd, self._peer = free_ports(3)
        self.url = f"https://127.0.0.1:{self.api_port}"
        self.kubeconfig = directory / "kubeconfig"
        self.audit = directory / "audit.log"

    def audited(self) -> list[JsonObject]:
        """The API server's own record of writes, and of all that Shoal's accounts asked.

        A line that it is just writing is not there yet."""
        return [json.loads(line) for line in self.audit.read_text().split("\n")[:-1]]

    @property
    def kubectl(self) -> Path:
        return self._binaries.path("kubectl")

    def start(self, *, controllers: bool = True) -> None:
        """Without controllers: etcd and the API server only."""
        addresses = pki.Addresses(self.url, self.url, ["127.0.0.1", "10.96.0.1", "localhost"], "127.0.0.1")
        pki.write(self.directory / "pki", addresses, [], self.kubeconfig)
        (self.directory / "audit.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "audit.k8s.io/v1",
                    "kind": "Policy",
                    "omitStages": ["RequestReceived", "ResponseStarted"],
                    "rules": [
                        # Shoal's own accounts with all that they ask: verbs granted are verbs used.
                        {"level": "Metadata", "userGroups": ["system:serviceaccounts:shoal-system"]},
                        {"level": "None", "verbs": ["get", "list", "watch"]},
                        {"level": "Metadata"},
                    ],
                }
            )
        )
        etcd = f"http://127.0.0.1:{self._etcd}"
        self._spawn(
            "etcd",
            "--name=t",
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{self._peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{self._peer}",
            f"--initial-cluster=t=http://127.0.0.1:{self._peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        self.start_api_server()
        if not controllers:
            return
        for name in ("kube-controller-manager", "kube-scheduler"):
            config = f"{self.directory}/pki/{name}.kubeconfig"
            extra: list[str] = []
            if name == "kube-controller-manager":
                extra = [
                    # Nodes here have no kubelet that renews a lease. Who tests an HPA stands for it.
                    "--controllers=*,-node-lifecycle-controller,-horizontal-pod-autoscaler-controller",
                    "--use-service-account-credentials=true",
                    f"--service-account-private-key-file={self.directory}/pki/sa.key",
                    f"--root-ca-file={self.directory}/pki/ca.crt",
                    "--allocate-node-cidrs=false",
                    "--concurrent-deployment-syncs=20",
                    "--concurrent-replicaset-syncs=20",
                    "--concurrent-gc-syncs=20",
                ]
            self._spawn(
                name,
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                "--bind-address=127.0.0.1",
                "--secure-port=0" if name == "kube-scheduler" else f"--secure-port={free_ports(1)[0]}",
                "--leader-elect=false",
                "--kube-api-qps=300",
                "--kube-api-burst=600",
                *extra,
            )
        self._wait("/api/v1/namespaces/default/serviceaccounts/default")

    def start_api_server(self) -> None:
        d = self.directory / "pki"
        gates, served = lab_controlplane.taint_rules(lab_binaries.minor(self._binaries))
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.api_port}",
            "--authorization-mode=Node,RBAC",
            f"--client-ca-file={d}/ca.crt",
            f"--tls-cert-file={d}/apiserver.crt",
            f"--tls-private-key-file={d}/apiserver.key",
            f"--service-account-key-file={d}/sa.pub",
            f"--service-account-signing-key-file={d}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--audit-policy-file={self.directory}/audit.yaml",
            f"--audit-log-path={self.audit}",
            "--audit-log-mode=blocking",
            *gates,
            *served,
        )
        self._wait("/readyz")

    def kill_api_server(self) -> None:
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def run_kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            [self.kubectl, *args],
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(args)}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def _spawn(self, name: str, *args: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [self._binaries.path(name), *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait(self, path: str) -> None:
        deadline = time.monotonic() + 180
        while not self._raw(path):
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended; its last words are in {self.directory / name}.log"
            assert time.monotonic() < deadline, f"{path} is not there"
            time.sleep(0.1)

    def _raw(self, path: str) -> str:
        done = subprocess.run(
            [self.kubectl, "get", "--raw", path, "--request-timeout=5s"],
            text=True,
            capture_output=True,
            timeout=30,
            check=False,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
        )
        return done.stdout if done.returncode == 0 else ""


@contextlib.contextmanager
def control_plane(directory: Path) -> Generator[ControlPlane]:
    """Uses the lab's binaries. Raises LabError where there are none."""
    plane = ControlPlane(directory, lab_binaries.find_or_build())
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def install_crds(client: KubeClient) -> None:
    """Returns when all of Shoal's kinds are served."""
    crds = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    for crd in crds:
        await client.apply(CRDS, crd, manager="test")
    kinds = {crd["spec"]["names"]["plural"] for crd in crds}
    async with asyncio.timeout(60):
        while not kinds <= await client.discover("shoal.dev", "v1alpha1"):
            await asyncio.sleep(0.1)


async def remove_crds(client: KubeClient, group: str, *names: str) -> None:
    """Returns when none of the group's kinds is served any more. The API server removes their objects first, and tries
    again later and later where it is busy."""
    for name in names:
        await client.delete(CRDS, name)
    async with asyncio.timeout(180):
        while await client.discover(group, "v1alpha1"):
            await asyncio.sleep(0.1)


async def add_node(
    client: KubeClient, name: str, labels: dict[str, str], gpus: int, *, resource: str = "nvidia.com/gpu"
) -> None:
    """A node as its kubelet and the device plugin would report it; without GPUs it takes any pod."""
    taints = [{"key": resource, "value": "present", "effect": "NoSchedule"}] if gpus else []
    node: JsonObject = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels | {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
        "spec": {"taints": taints},
    }
    await client.create(NODES, node)
    amounts = {"cpu": "192", "memory": "2Ti", "pods": "1000", "ephemeral-storage": "100Ti"}
    amounts |= {resource: str(gpus)} if gpus else {}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastTransitionTime": now}
    status: JsonObject = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
    await client.merge_patch(NODES, name, None, status, manager="kubelet", subresource="status")
    await client.merge_patch(NODES, name, None, {"spec": {"taints": taints}}, manager="kubelet")


FACTS: Final[JsonObject] = {
    "source": "file:///models/tiny",
    "architecture": "LlamaForCausalLM",
    "parameters": 8_030_261_248,
    "weightBytes": 16_060_522_496,
    "fileBytes": 16_069_000_000,
    "dtype": "bfloat16",
    "contextLength": 8192,
    "attentionHeads": 32,
    "vocabulary": 128256,
    "task": "Generate",
    "kv": {"kind": "Full", "layers": 32, "kvHeads": 8, "headDim": 128},
    "kvBytesPerToken": 131072,
}
"""What the Job that reads a source's metadata is made to say: a model of 8 billion parameters."""


class StatusKubelet:
    """Says of bound pods that they run and are ready, and takes deleted ones away after `linger` seconds. While `hold`
    is set it leaves engine pods as they are. Pods that read a source's metadata end with `said`: (exit code,
    termination message)."""

    def __init__(self, client: KubeClient, *, hold: bool = False) -> None:
        self._client = client
        self._hold = hold
        self._held: list[JsonObject] = []
        self.linger = 0.0
        self.pod_ips: Iterator[str] = repeat("10.244.0.10")
        """Of the pods, one after the other: nobody answers there, unless the test has put somebody."""
        self.said: tuple[int, JsonObject] = (0, {"facts": FACTS})
        self.prefetch_said: Callable[[JsonObject], tuple[int, JsonObject]] = lambda _pod: (0, {})
        """What the pod of a Job that asks a node's cache ends with."""
        self.adapters_said: Callable[[JsonObject], tuple[int, JsonObject]] = lambda _pod: (1, {})
        """What the pod of a Job that reads adapters ends with."""
        self._todo: asyncio.Queue[JsonObject] = asyncio.Queue()
        self._reflector = Reflector(client, PODS, on_event=self._heard)
        self._done: set[tuple[str, bool]] = set()

    @property
    def hold(self) -> bool:
        return self._hold

    @hold.setter
    def hold(self, hold: bool) -> None:
        self._hold = hold
        held, self._held = self._held, []
        for pod in held:
            self._todo.put_nowait(pod)

    def _heard(self, kind: str, pod: JsonObject) -> None:
        if kind == "upsert" and pod["spec"].get("nodeName"):
            self._todo.put_nowait(pod)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reflector.run())
            for _ in range(8):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            pod = await self._todo.get()
            metadata = pod["metadata"]
            deleting = "deletionTimestamp" in metadata
            step = (metadata["uid"], deleting)
            component = metadata.get("labels", {}).get("app.kubernetes.io/component")
            reads = component in ("facts", "adapter-facts", "prefetch")
            if step in self._done:
                continue
            if self._hold and not deleting and not reads:
                self._held.append(pod)
                continue
            self._done.add(step)
            try:
                if deleting:
                    await asyncio.sleep(self.linger)
                    await self._client.delete(PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"])
                    await _force(self._client, metadata)
                else:
                    await self._client.merge_patch(
                        PODS,
                        metadata["name"],
                        metadata["namespace"],
                        {
                            "status": ended(pod, *self._said(component, pod))
                            if reads
                            else running(pod, next(self.pod_ips))
                        },
                        manager="kubelet",
                        subresource="status",
                    )
            except (NotFound, Conflict):
                pass
            except KubeError:
                self._done.discard(step)
                await asyncio.sleep(0.5)
                self._todo.put_nowait(pod)

    def _said(self, component: str, pod: JsonObject) -> tuple[int, JsonObject]:
        said = {"facts": lambda _: self.said, "prefetch": self.prefetch_said}
        return said.get(component, self.adapters_said)(pod)


async def _force(client: KubeClient, metadata: JsonObject) -> None:
    """Grace period 0: what a kubelet sends once the containers have ended."""
    body: JsonObject = {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "gracePeriodSeconds": 0,
        "preconditions": {"uid": metadata["uid"]},
    }
    path = PODS.path(namespace=metadata["namespace"], name=metadata["name"])
    with contextlib.suppress(NotFound, Conflict):
        await client._call("delete", PODS, "DELETE", path, body=body, idempotent=True)


def running(pod: JsonObject, pod_ip: str) -> JsonObject:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def started(container: JsonObject) -> JsonObject:
        return {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }

    spec = pod["spec"]
    init = [
        started(c)
        if c.get("restartPolicy") == "Always"
        else started(c)
        | {"started": False, "state": {"terminated": {"exitCode": 0, "startedAt": now, "finishedAt": now}}}
        for c in spec.get("initContainers", [])
    ]
    return {
        "phase": "Running",
        "podIP": pod_ip,
        "startTime": now,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "initContainerStatuses": init,
        "containerStatuses": [started(c) for c in spec["containers"]],
    }


def ended(pod: JsonObject, code: int, said: JsonObject) -> JsonObject:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    over = {"exitCode": code, "message": json.dumps(said), "startedAt": now, "finishedAt": now}
    return {
        "phase": "Failed" if code else "Succeeded",
        "startTime": now,
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}],
        "containerStatuses": [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"terminated": over},
            }
            for c in pod["spec"]["containers"]
        ],
    }


@dataclass(slots=True)
class Fleet:
    """A cluster with two classes, two nodes and a kubelet that says that everything runs."""

    plane: ControlPlane
    client: KubeClient
    kubelet: StatusKubelet
    namespace: str

    @property
    def kubeconfig(self) -> str:
        return str(self.plane.kubeconfig)

    async def apply(self, obj: JsonObject) -> JsonObject:
        """As a person does it."""
        return await self.client.apply(_OWN[obj["kind"]], obj, manager="person")

    async def all(self, resource: object, **kw: str) -> list[JsonObject]:
        return [o async for o in self.client.list(resource, **kw)]  # type: ignore[arg-type]
