"""Where a storm happens: a lab with Shoal in it, two Models, one tenant, and a folder for all journals."""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal.api.model import Driver
from shoal.metering.spool import FILE_NAME as SPOOL
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import GATEWAY_SERVICE, NAMESPACE, LabCluster
from shoal_dev.lab import images
from shoal_dev.lab.api import Lab
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.fleet import FleetFile
from shoal_dev.lab.node.config import Bind, ImageConfig
from shoal_dev.lab.volumes import FOLDER
from tests.storm import journals, nodes, rests, routes, sick, swaps, versions
from tests.storm.listener import ListenerConfig
from tests.storm.provider import NodeProvider
from tests.storm.versions import Earlier
from tests.support.waiting import until

STORM: Final = "storm"
"""Namespace of the Models, and name of the tenant."""
KEY: Final = "sk-storm-0d5b1e7a42"
STEADY: Final = "storm-steady"
"""Always asked; never at zero."""
BURSTY: Final = "storm-bursty"
"""Asked now and then; at zero in between."""
MODEL_PATH: Final = steps.ROOT / "images" / "shoal" / "rootfs" / "opt" / "shoal" / "models" / "tiny-chat"
LEDGER: Final = "ledger.sqlite"
_HEARD_SECONDS: Final = 9.0
"""After the last request: agents read the engines' counters every 2 s, the ledger keeps them every 5 s."""
_BACKOFF_SECONDS: Final = 420.0
"""A container that was killed again and again is started after five minutes at the latest, and then has to start."""
_INSIDE: Final = "/storm"
_SIMULATOR: Final[dict[str, Any]] = {
    "enabled": True,
    # Slow steps: answers last long enough to be hit by a fault, at no cost in CPU.
    "env": [
        {"name": "SHOAL_SIM_GPU", "value": "l4"},
        {"name": "SHOAL_SIM_KV", "value": "llama-3.1-8b"},  # a tiny model's own cache would never fill
        {"name": "SHOAL_SIM_LOAD_SECONDS", "value": "1"},
        {"name": "SHOAL_SIM_DRAIN_POLL_SECONDS", "value": "1"},
    ],
    "args": [],
}


def _fleet(count: int, *more: Mapping[str, Any]) -> dict[str, Any]:
    """So many nodes with two GPUs each, and `more`."""
    gpus = {"gpus": 2, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068}
    return {"nodes": [{"name": "cpu-{n}", "count": 2}, {"name": "l40s-{n}", "count": count, **gpus}, *more]}


def models(
    drain_seconds: int,
    idle_seconds: int,
    driver: Driver,
    *,
    routed: bool = False,
    sickening: bool = False,
    coming: bool = False,
    resting: bool = False,
) -> list[dict[str, Any]]:
    spec: dict[str, Any] = {
        "source": {"uri": "file:///opt/shoal/models/tiny-chat"},
        "variants": [{"class": "l40s-48gb"}],
        "drainSeconds": drain_seconds,
        "stallSeconds": 30,
        "hold": {"timeoutSeconds": 90},
    }
    scaling: dict[str, dict[str, Any]] = {
        STEADY: {"minReplicas": 2, "maxReplicas": 4, "stabilizationSeconds": 20},
        BURSTY: {"minReplicas": 0, "maxReplicas": 3, "stabilizationSeconds": 10, "idleSeconds": idle_seconds},
    }
    if routed:
        scaling |= {name: {"minReplicas": 1, "maxReplicas": 1} for name in (routes.NEXT, routes.SHADOW)}
    own: dict[str, dict[str, Any]] = {}
    if sickening:
        scaling[sick.MODEL] = {"minReplicas": sick.REPLICAS, "maxReplicas": sick.REPLICAS + 1}
        # A GPU that is far slower still ends its answers.
        own[sick.MODEL] = {"variants": [{"class": sick.CLASS}], "drainSeconds": max(drain_seconds, 300)}
    if coming:
        scaling[nodes.MODEL] = {"minReplicas": 0, "maxReplicas": nodes.REPLICAS} | {
            "stabilizationSeconds": 10,
            "idleSeconds": 10,
        }
        scaling[nodes.EITHER] = {"minReplicas": 1, "maxReplicas": 2, "stabilizationSeconds": 20}
        spot, fixed = {"class": nodes.CLASS}, {"class": "l40s-48gb"}
        own |= {nodes.MODEL: {"variants": [spot]}, nodes.EITHER: {"variants": [spot, fixed]}}
    if resting:
        scaling |= {
            name: {"minReplicas": 1, "maxReplicas": 1, "idleSeconds": 10} for name in (rests.WORKS, rests.RESTS)
        }
        own |= {name: {"variants": [{"class": nodes.CLASS}]} for name in (rests.WORKS, rests.RESTS)}
    return [
        {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name, "namespace": STORM},
            # Not for the default: an earlier version may not know the field.
            "spec": spec
            | {"scaling": scaling[name] | ({} if driver == "BuiltIn" else {"driver": driver})}
            | own.get(name, {}),
        }
        for name in scaling
    ]


def tenant(granted: Sequence[str], *, routed: bool = False) -> dict[str, Any]:
    """With the right to ask these Models, and with `routed` all routes."""
    grants = [{"namespace": STORM, "name": name} for name in granted]
    keys = [{"name": "storm", "sha256": hash_api_key(KEY)}]
    metadata = {"name": STORM}
    spec: dict[str, Any] = {"keys": keys, "models": grants}
    if routed:
        spec["routes"] = [{"namespace": STORM}]  # an external target exists only for whom it is granted to
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": metadata, "spec": spec}


class Ground(LabCluster):
    """The lab, and what faults and the load ask of it."""

    def __init__(self, lab: Lab, folder: Path, earlier: Earlier | None = None, *, routed: bool = False) -> None:
        super().__init__(lab)
        self.folder = folder
        self.provider = NodeProvider(lab, folder, random.Random(0))  # noqa: S311 - reproducible on purpose
        """Adds nodes and removes them, where some are to come and go."""
        self._earlier = earlier
        self._routed = routed

    # --- making it ----------------------------------------------------------------------------------------------------

    @classmethod
    @contextlib.contextmanager
    def up(
        cls,
        folder: Path,
        mutation: str | None,
        drain_seconds: int,
        idle_seconds: int,
        *,
        adapters: bool,
        driver: Driver = "BuiltIn",
        earlier: Earlier | None = None,
        routed: bool = False,
        sickening: bool = False,
        coming: bool = False,
        resting: bool = False,
    ) -> Generator["Ground"]:
        """A lab with Shoal and all Models ready; it is gone afterwards, `folder` stays.

        `mutation`: a protection that is switched off (`tests.storm.mutants`). `driver`: who writes replicas. `earlier`:
        the version that is installed first. `routed`: with routes, and two more Models for them. `sickening`: with
        nodes whose GPUs are devices, a Model on them, and an operator that takes less time to judge GPUs. `coming`:
        with nodes that come and go, and two Models on them. `resting`: with such nodes, two Models that rest on them,
        and an operator that waits less from one node that it empties to the next.
        """
        engines = folder / "engines"
        engines.mkdir(parents=True, exist_ok=True)
        engines.chmod(0o777)  # engines run as another user
        if routed:
            outside = engines / routes.OUTSIDE
            outside.mkdir(exist_ok=True)
            outside.chmod(0o777)
        rows = {images.SHOAL: _image(engines, mutation, hurried=sickening or resting)}
        if earlier is not None:
            rows[versions.REPOSITORY] = _with_journal(earlier.row(), engines, earlier.root)
        more = [*([sick.NODES] if sickening else []), *([nodes.GROUP_OF_NODES] if coming or resting else [])]
        lab = Lab.up(
            f"storm-{os.getpid()}",
            fleet_data=FleetFile.model_validate(_fleet(5 if routed else 4, *more)),
            faults=True,
            addons=("keda",) if driver == "KEDA" else (),
            extra_images=rows,
        )
        try:
            ground = cls(lab, folder, earlier, routed=routed)
            wanted = models(
                drain_seconds, idle_seconds, driver,
                routed=routed, sickening=sickening, coming=coming, resting=resting,
            )  # fmt: skip
            tuned = swaps.objects(STORM, STEADY, STORM) if adapters else []
            classes = [sick.gpu_class()] if sickening else []
            if coming or resting:
                classes.append(nodes.gpu_class(rests.AFTER_SECONDS if resting else None))
            with ground.provider.running() if coming or resting else contextlib.nullcontext():
                ground._begin(wanted, tuned, classes, routed=routed)
                yield ground
        finally:
            lab.down()

    def install(self, *, earlier: bool = False) -> None:
        """Installs this version, or the earlier one, or upgrades to it; returns when its own pods are up."""
        values = {"engines": {"simulator": _SIMULATOR, "cpuPerGPU": "100m", "memoryPerGPU": "512Mi"}}
        values |= {"cache": {"enabled": False}}
        # Final records stay in the spools: the judge compares.
        kept = {"name": "SHOAL_GATEWAY_SPOOL_KEEP_SECONDS", "value": "864000"}
        external = {"external": {"allowedHosts": [routes.allowed(STORM)]}} if self._routed else {}
        priced = {"prices": {"storm.yaml": routes.prices(STORM, STEADY)}} if self._routed else {}
        values |= {"gateway": {"extraEnv": [kept], **external}, "ledger": {"enabled": True, **priced}}
        if earlier and self._earlier is not None:
            steps.install(self, "simulator", versions.IMAGE, values, self._earlier.root)
        else:
            steps.install(self, "simulator", steps.LAB_IMAGE, values)

    def _begin(
        self,
        models: list[dict[str, Any]],
        adapters: list[dict[str, Any]],
        classes: list[dict[str, Any]],
        *,
        routed: bool,
    ) -> None:
        self.install(earlier=True)
        self.kubectl("create", "namespace", STORM)
        self.kubectl("apply", "-f", str(steps.EXAMPLES / "gpuclasses.yaml"))
        adapter = swaps.STILL if adapters else None
        pair = (
            (
                *routes.outside(STORM, steps.LAB_IMAGE, "cpu-1", f"{_INSIDE}/{routes.OUTSIDE}"),
                routes.front(STORM, STEADY, adapter),
                routes.trial(STORM, STEADY, BURSTY),
                routes.out(STORM, STEADY),
            )
            if routed
            else ()
        )
        # The pool first: a Model that gets one later rolls.
        names_of_models = [model["metadata"]["name"] for model in models]
        for item in (*classes, *adapters, *models, *pair, tenant(names_of_models, routed=routed)):
            self.apply(item)
        # One is at zero, on nodes that come when it is asked.
        for name in (each for each in names_of_models if each != nodes.MODEL):
            self.kubectl("wait", "--for=condition=Ready", f"model/{name}", "-n", STORM, "--timeout=240s", timeout=250)
        if adapters:
            lora = ("loraadapters", "--all", "-n", STORM)
            self.kubectl("wait", "--for=condition=Available", *lora, "--timeout=120s", timeout=130)
        if routed:
            outside = ("--for=condition=Ready", f"pod/{routes.OUTSIDE}", "-n", STORM)
            self.kubectl("wait", *outside, "--timeout=60s", timeout=70)
            both = ("modelroutes", "--all", "-n", STORM)
            self.kubectl("wait", "--for=condition=Ready", *both, "--timeout=60s", timeout=70)

    # --- asking it ----------------------------------------------------------------------------------------------------

    def apply(self, item: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(item))

    def engines(self, model: str | None = None) -> list[dict[str, Any]]:
        """Engine pods that serve and are not going."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
        selector += f",{names.LABEL_MODEL}={model}" if model else ""
        return [p for p in self.get("pods", "-n", STORM, "-l", selector) if _ready(p)]

    def canary(self) -> tuple[str, str]:
        """State and message of the canary that is declared now; empty while the status is of another."""
        found = json.loads(self.kubectl("get", "modelroutes", routes.TRIAL, "-n", STORM, "-o", "json"))
        status = found.get("status", {})
        if status.get("observedGeneration") != found["metadata"]["generation"] or not status.get("canaries"):
            return "", ""
        one = status["canaries"][0]
        return one["state"], one.get("message", "")

    def out_of_use(self, gpu_class: str) -> set[tuple[str, str]]:
        """(node, device) of what Shoal keeps out of use of a class."""
        found = json.loads(self.kubectl("get", "gpuclasses", gpu_class, "-o", "json"))
        entries = found.get("status", {}).get("quarantined", [])
        return {(each["node"], each.get("device") or "") for each in entries if each["state"] == "Quarantined"}

    def whole(self) -> bool:
        """Whether both Models have at least the replicas that they have when they are asked a little."""
        return len(self.engines(STEADY)) >= 2 and bool(self.engines(BURSTY))

    def pods(self, component: str) -> list[str]:
        """Names of Shoal's own pods that run."""
        return [pod["metadata"]["name"] for pod in self._running(component)]

    def _running(self, component: str) -> list[dict[str, Any]]:
        found = self.get("pods", "-n", NAMESPACE, "-l", f"{names.LABEL_COMPONENT}={component}")
        return [pod for pod in found if _ready(pod)]

    def serving(self, component: str) -> list[str]:
        """Names of those pods to which their Service sends. After an outage of the API server the cluster's controllers
        may take two minutes to see who is ready and who is gone."""
        slices = self.get("endpointslices", "-n", NAMESPACE, "-l", f"kubernetes.io/service-name=shoal-{component}")
        reached = {
            address
            for one in slices
            for endpoint in one.get("endpoints") or ()
            if endpoint["conditions"].get("ready")
            for address in endpoint["addresses"]
        }
        return [pod["metadata"]["name"] for pod in self._running(component) if pod["status"].get("podIP") in reached]

    def address(self) -> tuple[str, int]:
        """The gateways' Service, inside the lab."""
        service = json.loads(self.kubectl("get", "service", GATEWAY_SERVICE, "-n", NAMESPACE, "-o", "json"))
        return service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]

    def wanted(self, component: str) -> int:
        """How many pods of gateways or of the ledger there should be."""
        found = json.loads(self.kubectl("get", "sts", f"shoal-{component}", "-n", NAMESPACE, "-o", "json"))
        return int(found["spec"]["replicas"])

    def revive(self, say: Callable[[str], None]) -> None:
        """Starts processes of the lab again that ended by themselves. A lab does not; a kubelet does, when the
        scheduler ends itself over a cache that it does not believe any more."""
        with contextlib.suppress(LabError):
            for process in self.lab.status().dead():
                say(f"{process.name} ended by itself, and is started again")
                self.lab.start(process.name)

    def settle(self, say: Callable[[str], None]) -> None:
        """Waits until every gateway has opened its spool again, which closes what a killed one left open, and until the
        ledger has all of it."""

        def there(component: str, want: int) -> bool:
            self.revive(say)
            return len(self.pods(component)) == want

        for component in (names.COMPONENT_GATEWAY, names.COMPONENT_LEDGER):
            # Without it the judge has fewer spools to read and says so: half an hour of journals is worth a verdict.
            with contextlib.suppress(AssertionError):
                until(partial(there, component, self.wanted(component)), _BACKOFF_SECONDS)
        # What was not shipped is lost to the ledger: the judge says so.
        with contextlib.suppress(AssertionError):
            until(lambda: not any(journals.unshipped(file) for file in self._spools()), 60)
        time.sleep(_HEARD_SECONDS)

    def copy_spools(self, folder: Path) -> None:
        """What all gateways have recorded."""
        for file in self._spools():
            journals.copy_spool(file, folder / file.parent.name.split("_")[1].removeprefix("spool-"))

    def copy_ledger(self, folder: Path) -> None:
        """The ledger's database."""
        for file in self.lab.paths.node_data.glob(f"*/disk{FOLDER}/{NAMESPACE}_shoal-ledger_*/{LEDGER}"):
            journals.copy_spool(file, folder)

    def _spools(self) -> list[Path]:
        pattern = f"*/disk{FOLDER}/{NAMESPACE}_spool-shoal-gateway-*/{SPOOL}"
        return sorted(self.lab.paths.node_data.glob(pattern))

    @contextlib.contextmanager
    def heard_agents(self, journal: Path) -> Generator[None]:
        """Writes down which adapters each replica says it has, and for how many it has given leases."""
        config = ListenerConfig(namespace=STORM, shoal_namespace=NAMESPACE, journal=journal)
        file = self.folder / "agents.json"
        file.touch(0o600)
        file.write_text(config.model_dump_json())
        env = os.environ | {"KUBECONFIG": str(self.lab.paths.admin_kubeconfig)}
        command = [*self.lab.enter_command(), sys.executable, "-m", "tests.storm.listener", str(file)]
        with (self.folder / "agents.log").open("wb") as out:
            listener = subprocess.Popen(command, cwd=steps.ROOT, stdout=out, stderr=out, env=env)
        try:
            yield
        finally:
            listener.terminate()
            try:
                listener.wait(30)
            except subprocess.TimeoutExpired:
                listener.kill()
                listener.wait()
            file.unlink()

    @contextlib.contextmanager
    def watched_scales(self, path: Path) -> Generator[None]:
        """Writes down each change of a Deployment's replicas, also across restarts of the API server."""
        with self._watched(self._watch_scales, path):
            yield

    @contextlib.contextmanager
    def watched_classes(self, path: Path) -> Generator[None]:
        """Writes down each change of what is out of use, also across restarts of the API server."""
        with self._watched(self._watch_classes, path):
            yield

    @contextlib.contextmanager
    def _watched(self, watch: Callable[[Path, threading.Event], None], path: Path) -> Generator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=watch, args=(path, stop), name=path.stem)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(30)

    def _watch_scales(self, path: Path, stop: threading.Event) -> None:
        columns = "NAME:.metadata.name,MODEL:.metadata.labels.shoal\\.dev/model,REPLICAS:.spec.replicas"
        last: dict[str, int] = {}
        with path.open("ab", buffering=0) as file:
            options = ("deployments", "-n", STORM, "--no-headers", "-o", f"custom-columns={columns}")
            for line in self._lines(options, stop):
                name, model, replicas = line.split()
                if last.get(name) != int(replicas):
                    last[name] = int(replicas)
                    entry = {"at": time.time(), "deployment": name, "model": model, "replicas": int(replicas)}
                    file.write(orjson.dumps(entry) + b"\n")

    def _watch_classes(self, path: Path, stop: threading.Event) -> None:
        shown = "{.metadata.name} {.status.gpus.capacity} {.status.quarantined}{'\\n'}"
        last: dict[str, Any] = {}
        with path.open("ab", buffering=0) as file:
            for line in self._lines(("gpuclasses", "-o", f"jsonpath={shown}"), stop):
                seen = sick.observed(line, time.time())
                if seen is not None and last.get(seen["gpu_class"]) != seen | {"at": 0}:
                    last[seen["gpu_class"]] = seen | {"at": 0}
                    file.write(orjson.dumps(seen) + b"\n")

    def _lines(self, options: Sequence[str], stop: threading.Event) -> Iterator[str]:
        """What `kubectl get -w` prints, begun again whenever it ends."""
        command = [str(self.tools.kubectl), "get", "-w", *options]
        while not stop.is_set():
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | dict(self.tools.env)
            ) as watch:
                killer = threading.Thread(target=lambda w=watch: (_wait_end(w, stop), w.kill()))
                killer.start()
                assert watch.stdout is not None
                for line in watch.stdout:
                    yield line.decode()
                killer.join()
            stop.wait(1)


def _wait_end(watch: "subprocess.Popen[bytes]", stop: threading.Event) -> None:
    while watch.poll() is None and not stop.is_set():
        stop.wait(0.5)


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _image(engines: Path, mutation: str | None, *, hurried: bool = False) -> ImageConfig:
    """Shoal's row of the lab's image table, with the engines' journal; mutants come first on PATH."""
    row = _with_journal(images.defaults()[images.SHOAL], engines, steps.ROOT)
    if mutation is None and not hurried:
        return row
    prepend = (str(Path(__file__).parent / "bin"), *row.path_prepend)
    env = {"SHOAL_STORM_MUTATION": mutation or "", "SHOAL_STORM_HURRY": "1" if hurried else ""}
    return row.model_copy(update={"env": dict(row.env) | env, "path_prepend": prepend})


def _with_journal(row: ImageConfig, engines: Path, root: Path) -> ImageConfig:
    """`root`: the very checkout whose code runs, wherever the virtual environment's own is."""
    env = dict(row.env) | {"SHOAL_SIM_JOURNAL": _INSIDE, "PYTHONPATH": f"{root / 'operator'}:{root}"}
    bind = Bind(host=engines, container=_INSIDE, read_only=False)
    return row.model_copy(update={"env": env, "binds": (*row.binds, bind)})
