"""The same requests in the same lab under three drivers: built in, KEDA with Shoal's scaler, KEDA with plain Prometheus
triggers (`policies/keda/model.yaml`): what was lost, how long a wake took, replicas over time, GPU hours, TTFT.

Needs root, the trace (SHOAL_TRACES) and the lab's KEDA (built once). Engines are simulated, all else is real.
Prometheus scrapes every 5 s, the HPA syncs every 15 s as in any cluster.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import yaml

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal_dev.demo import steps
from shoal_dev.demo.clusters import LabCluster
from shoal_dev.lab.addons import prometheus
from shoal_dev.lab.api import Lab
from shoal_dev.lab.fleet import FleetFile
from tests.bench.drivers_load import Ask, Client, Heard, pieces

SPACE: Final = "bench"
MODEL: Final = "traced"
CLASS: Final = "l40s-48gb"
KEY: Final = "sk-bench-of-drivers-71c0"
MODEL_PATH: Final = steps.ROOT / "images" / "shoal" / "rootfs" / "opt" / "shoal" / "models" / "tiny-chat"
POLICY: Final = steps.ROOT / "policies" / "keda" / "model.yaml"
DRIVERS: Final = ("built in", "KEDA, Shoal's scaler", "KEDA, Prometheus")
MOST: Final = 6
IDLE_SECONDS: Final = 15
"""Also the cooldown of the plain policy: the same idle time before zero."""
STEADY_SECONDS: Final = 20
"""Also the stabilisation of the plain policy's HPA, so that the drivers are compared and not two windows."""
LOAD_SECONDS: Final = 5
"""Of a simulated engine: a cold start of about 7 s."""
_FLEET: Final[dict[str, Any]] = {
    "nodes": [
        {"name": "cpu-{n}", "count": 2},
        {"name": "l40s-{n}", "count": 3, "gpus": 2, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068},
    ]
}
_ENGINES: Final[dict[str, Any]] = {
    "cpuPerGPU": "100m",
    "memoryPerGPU": "512Mi",
    "simulator": {
        "enabled": True,
        "env": [
            {"name": "SHOAL_SIM_GPU", "value": "l40s"},
            {"name": "SHOAL_SIM_KV", "value": "llama-3.1-8b"},
            {"name": "SHOAL_SIM_LOAD_SECONDS", "value": str(LOAD_SECONDS)},
        ],
    },
}


@dataclass(slots=True)
class Track:
    """Replicas over time: (seconds, asked for, ready, pods that hold GPUs)."""

    points: list[tuple[float, int, int, int]] = field(default_factory=list[tuple[float, int, int, int]])

    def gpu_hours(self) -> float:
        pairs = zip(self.points, self.points[1:], strict=False)
        return sum(a[3] * (b[0] - a[0]) for a, b in pairs) / 3600


@dataclass(frozen=True, slots=True)
class Result:
    driver: str
    heard: Sequence[Heard]
    track: Track

    def row(self) -> str:
        told = {kind: sum(h.outcome == kind for h in self.heard) for kind in ("answered", "refused", "lost")}
        wakes = [h.first_seconds for h in self.heard if h.ask.wakes and h.first_seconds is not None]
        firsts = sorted(h.first_seconds for h in self.heard if h.first_seconds is not None)
        most = max((p[2] for p in self.track.points), default=0)
        return (
            f"| {self.driver} | {len(self.heard)} | {told['answered']} | {told['refused']} | {told['lost']} "
            f"| {_at(wakes, 0.5)} / {_at(wakes, 0.99)} | {_at(firsts, 0.5)} / {_at(firsts, 0.99)} "
            f"| {self.track.gpu_hours():.3f} | {most} |"
        )


def _at(values: Sequence[float], share: float) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[min(len(ordered) - 1, int(len(ordered) * share))]:.2f}"


def _model(driver: str) -> dict[str, Any]:
    scaling = {
        "driver": "KEDA" if driver == DRIVERS[1] else "BuiltIn",
        "maxReplicas": MOST,
        "idleSeconds": IDLE_SECONDS,
        "stabilizationSeconds": STEADY_SECONDS,
    }
    spec = {
        "source": {"uri": "file:///opt/shoal/models/tiny-chat"},
        "variants": [{"class": CLASS}],
        "scaling": scaling,
        "hold": {"timeoutSeconds": 150, "maxTenantPercent": 100},
        "drainSeconds": 60,
    }
    metadata = {"name": MODEL, "namespace": SPACE}
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": spec}


def _tenant() -> dict[str, Any]:
    spec = {
        "keys": [{"name": "bench", "sha256": hash_api_key(KEY)}],
        "models": [{"namespace": SPACE, "name": MODEL}],
    }
    return {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": SPACE}, "spec": spec}


def _policy(deployment: str) -> dict[str, Any]:
    """The plain policy as it stands, for this Model, with its idle time and window."""
    text = POLICY.read_text().replace("demo/tiny-chat", f"{SPACE}/{MODEL}").replace("tiny-chat", MODEL)
    found: dict[str, Any] = yaml.safe_load(text.replace("namespace: demo", f"namespace: {SPACE}"))
    spec = found["spec"]
    for trigger in spec["triggers"]:
        trigger["metadata"]["query"] = trigger["metadata"]["query"].replace('"demo"', f'"{SPACE}"')
    spec["scaleTargetRef"]["name"] = deployment
    spec |= {"maxReplicaCount": MOST, "cooldownPeriod": IDLE_SECONDS, "initialCooldownPeriod": IDLE_SECONDS}
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    down |= {
        "stabilizationWindowSeconds": STEADY_SECONDS,
        "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}],
    }
    return found


def _holds_gpus(item: dict[str, Any]) -> bool:
    """An engine's pod that has a node."""
    ours = item["metadata"].get("labels", {}).get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE
    return item["kind"] == "Pod" and ours and bool(item["spec"].get("nodeName"))


class Bench(LabCluster):
    """The lab and what a run asks of it."""

    def apply(self, *items: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(items)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def deployment(self) -> dict[str, Any]:
        return self.get("deployments", "-n", SPACE, "-l", f"{names.LABEL_MODEL}={MODEL}")[0]

    @contextlib.contextmanager
    def tracked(self) -> Generator[Track]:
        """Looks once a second, by one call for all: two cores have other things to do."""
        track, enough, began = Track(), threading.Event(), time.monotonic()

        def follow() -> None:
            while not enough.wait(1.0):
                with contextlib.suppress(Exception):  # a look that fails is left out
                    found = self.get("deployments,pods", "-n", SPACE, "-l", f"{names.LABEL_MODEL}={MODEL}")
                    [deployment] = [o for o in found if o["kind"] == "Deployment"]
                    held = sum(_holds_gpus(o) for o in found)
                    asked, ready = deployment["spec"]["replicas"], deployment["status"].get("readyReplicas", 0)
                    track.points.append((time.monotonic() - began, asked, ready, held))

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield track
        finally:
            enough.set()
            thread.join(30)

    def until_zero(self) -> None:
        deadline = time.monotonic() + 240
        while self.deployment()["spec"]["replicas"] or self.get(
            "pods", "-n", SPACE, "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
        ):
            if time.monotonic() > deadline:
                raise click.ClickException("the Model does not go to zero")
            time.sleep(0.5)

    def drive(self, driver: str) -> None:
        """A Model at zero that is scaled by `driver`."""
        self.apply(_model(driver))
        self.kubectl("wait", "--for=condition=Ready", f"model/{MODEL}", "-n", SPACE, "--timeout=120s", timeout=130)
        if driver == DRIVERS[2]:
            self.kubectl("annotate", "model", MODEL, "-n", SPACE, f"{names.ANNOTATION_PAUSED}=true")
            self.apply(_policy(self.deployment()["metadata"]["name"]))
        # Of a Model that nobody ever asked for, gateways tell Prometheus nothing, and the plain policy leaves it alone.
        with self.gateway() as url:
            asyncio.run(Client(url, KEY, f"{SPACE}/{MODEL}", MODEL_PATH).play([Ask(0.0, 8, 2, wakes=False)]))
        self.until_zero()

    def forget(self, driver: str) -> None:
        if driver == DRIVERS[2]:
            self.kubectl("delete", "scaledobjects.keda.sh", "--all", "-n", SPACE, timeout=60)
        self.kubectl("delete", "models.shoal.dev", MODEL, "-n", SPACE, "--wait=true", timeout=240)


def run_one(bench: Bench, driver: str, asks: Sequence[Ask]) -> Result:
    print(f"{driver}: {len(asks)} requests in {asks[-1].at:.0f} s ...", file=sys.stderr, flush=True)
    bench.drive(driver)
    try:
        with bench.gateway() as url, bench.tracked() as track:
            heard = asyncio.run(Client(url, KEY, f"{SPACE}/{MODEL}", MODEL_PATH).play(asks))
    finally:
        bench.forget(driver)
    return Result(driver, heard, track)


def draw(results: Sequence[Result], file: Path) -> None:
    """Ready replicas over time, one line per driver."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (9, 2 * len(results))
    figure, grid = pyplot.subplots(len(results), 1, sharex=True, sharey=True, figsize=size, squeeze=False)
    axes = grid[:, 0]
    for axis, result in zip(axes, results, strict=True):
        seconds = [p[0] for p in result.track.points]
        axis.step(seconds, [p[1] for p in result.track.points], where="post", label="asked for", linewidth=0.8)
        axis.fill_between(seconds, [p[2] for p in result.track.points], step="post", alpha=0.4, label="ready")
        axis.set_ylabel("replicas")
        axis.set_title(f"{result.driver}: {result.track.gpu_hours():.3f} GPU hours", loc="left", fontsize=9)
    axes[0].legend(loc="upper right", fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


@click.command()
@click.option("--pieces", "count", default=3, show_default=True, help="Stretches of the trace, with silence between.")
@click.option("--seconds", default=60.0, show_default=True, help="Length of each.")
@click.option("--silence", default=45.0, show_default=True, help="Seconds without a request before each.")
@click.option("--speed", default=3.0, show_default=True, help="How many times as fast as it was recorded.")
@click.option("--driver", "chosen", multiple=True, type=click.Choice(DRIVERS), help="Only these; default: all three.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draws replicas over time into this file."
)
def main(count: int, seconds: float, silence: float, speed: float, chosen: tuple[str, ...], plot: Path | None) -> None:
    """Prints one row per driver."""
    traces = os.environ.get("SHOAL_TRACES")
    if not traces:
        print("the Azure code trace is not there: name the folder with the published traces in SHOAL_TRACES")
        return
    asks = pieces(Path(traces), speed=speed, count=count, seconds=seconds, silence=silence)
    lab = Lab.up(
        f"drivers-{os.getpid()}",
        fleet_data=FleetFile.model_validate(_FLEET),
        addons=("keda", "prometheus"),
        announce=lambda line: print(line, file=sys.stderr, flush=True),
    )
    results: list[Result] = []
    try:
        bench = Bench(lab)
        values = {"engines": _ENGINES, "cache": {"enabled": False}, **prometheus.values("5s")}
        steps.install(bench, "simulator", steps.LAB_IMAGE, values)
        bench.kubectl("create", "namespace", SPACE)
        bench.kubectl("apply", "-f", str(steps.EXAMPLES / "gpuclasses.yaml"))
        bench.apply(_tenant())
        results.extend(run_one(bench, driver, asks) for driver in chosen or DRIVERS)
    finally:
        lab.down()
    mean = statistics.mean(a.prompt_tokens for a in asks)
    print(
        f"\n{len(asks)} requests, {count} x {seconds:.0f} s of the Azure code trace, {speed:g} times as fast, ", end=""
    )
    print(f"prompts of {mean:.0f} tokens on average; idle {IDLE_SECONDS} s, a cold start loads {LOAD_SECONDS} s\n")
    print(
        "| driver | sent | answered | refused | lost | wake p50 / p99 s | TTFT p50 / p99 s | GPU hours | most ready |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        print(result.row())
    if plot is not None:
        draw(results, plot)
        print(f"\nreplicas over time: {plot}")


if __name__ == "__main__":
    main()
