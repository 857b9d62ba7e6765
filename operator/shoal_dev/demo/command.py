"""The demo's two commands: `up` runs the whole line, `down` removes what it made."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from shoal.api.meta import GROUP
from shoal_dev.demo import enginecpu, fakegpus, fleetact, steps
from shoal_dev.demo.ask import PROMPT, DemoAnswer, ask
from shoal_dev.demo.clusters import NAMESPACE, CurrentCluster, DemoCluster, LabCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import wait_until_ready
from shoal_dev.lab import binaries, fleet
from shoal_dev.lab.addons import choice, keda
from shoal_dev.lab.api import Lab, require_root
from shoal_dev.lab.api import down as lab_down
from shoal_dev.lab.errors import LabError


@click.group()
def command() -> None:
    """Serve two Models end to end and ask one a question."""


@command.command()
@click.option(
    "--engine",
    type=click.Choice(["simulator", "sglang"]),
    default="simulator",
    show_default=True,
    help="The engine simulator, or the real SGLang on the CPU.",
)
@click.option(
    "--cluster",
    "where",
    type=click.Choice(["lab", "current"]),
    default="lab",
    show_default=True,
    help="A lab on this machine (needs root), or the cluster that kubectl points to.",
)
@click.option("--name", default="demo", show_default=True, help="Name of the lab.")
@click.option(
    "--image", default="shoal:dev", show_default=True, help="Shoal's image, for --cluster current (see `make image`)."
)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for the Models.")
@click.option(
    "--gateway",
    "gateway_url",
    help="URL of the gateway, where an Ingress or load balancer leads to it; default: kubectl port-forward.",
)
@click.option(
    "--with",
    "addons",
    default="",
    metavar="keda,prometheus",
    help="What else is installed in the lab. keda: the act on scaling is driven by KEDA and its HPA.",
)
def up(
    engine: steps.EngineChoice,
    where: str,
    name: str,
    image: str,
    timeout: float,
    gateway_url: str | None,
    addons: str,
) -> None:
    """Start (or reuse) a cluster, install Shoal, apply examples/, ask a question, and leave everything up."""
    console = Console(highlight=False)
    logging.getLogger().setLevel(logging.WARNING)  # the SDK's HTTP client tells of every request
    stages = Stages(console)
    if engine == "sglang" and where == "current":
        raise click.UsageError("--engine sglang runs SGLang from this machine's disk: only with --cluster lab")
    try:
        chosen = choice.parse(addons)
        cluster = _current(stages, gateway_url) if where == "current" else _lab(stages, name, engine, chosen)
        simulated = cluster if isinstance(cluster, LabCluster) and engine == "simulator" else None
        with stages.stage("Shoal installed with helm"):
            steps.install(cluster, engine, steps.LAB_IMAGE if where == "lab" else image)
        with stages.stage("Examples applied"):
            steps.apply_examples(cluster)
            if simulated is not None:
                steps.apply_devices(simulated)  # they start while the others do
        with stages.stage("Models Ready", spin=False):
            models = wait_until_ready(cluster, steps.DEMO_NAMESPACE, console, timeout)
        served: str = models[0]["metadata"]["name"]
        with cluster.gateway() as url:
            console.print(f'\n[bold]openai.OpenAI(base_url="{url}/v1")[/], model [bold]{served}[/]: {PROMPT}')
            with stages.stage("Answer", spin=False):
                answer = ask(url, steps.DEMO_KEY, served, console)
        with stages.stage("Usage record"):
            record = steps.usage_record(cluster, answer.request_id)
        console.print(_served_by(answer, record))
        if simulated is not None:
            from shoal_dev.demo import healthact  # its clients need an SDK too

            healthact.run(simulated, stages, timeout)  # before other Models run on these nodes
            fleetact.run(cluster, stages, timeout)
        else:
            # Its sums need the lab's nodes, and a real engine of its own for each Model is more than this machine has.
            console.print("\nThe act on a mixed fleet needs the lab and the simulator: left out.")
        from shoal_dev.demo import (  # their SDK is not part of an installation
            engineact,
            loraact,
            routeact,
            scaleact,
            tenantact,
        )

        if engine == "simulator":
            scaleact.run(cluster, stages, timeout, "KEDA" if "keda" in chosen else "BuiltIn")
            loraact.run(cluster, stages, timeout)
            engineact.run(cluster, stages, timeout)
            routeact.run(cluster, stages, timeout)
        else:
            console.print(
                "The acts on scaling, adapters, two engines and routes need the simulator: three real engines are more "
                "than this machine has, and only the simulator signs its answers."
            )
        tenantact.run(cluster, stages, timeout)
        console.print(stages.summary())
        _try_it(
            console,
            cluster,
            served,
            down="make demo-down" + (" CLUSTER=current" if where == "current" else _named(name)),
        )
    except LabError as e:
        raise click.ClickException(str(e)) from e


@command.command()
@click.option("--cluster", "where", type=click.Choice(["lab", "current"]), default="lab", show_default=True)
@click.option("--name", default="demo", show_default=True, help="Name of the lab.")
def down(where: str, name: str) -> None:
    """Remove everything that `up` made."""
    if where == "lab":
        try:
            lab_down(name)
        except LabError as e:
            raise click.ClickException(str(e)) from e
        return
    cluster = CurrentCluster()
    examples = (
        *reversed(steps.EXAMPLE_FILES),
        steps.SCALING_FILE,
        steps.LORA_FILE,
        steps.TENANTS_FILE,
        steps.ENGINES_FILE,
        steps.CANARY_FILE,
    )
    files = [arg for file in examples for arg in ("-f", str(steps.EXAMPLES / file))]
    cluster.kubectl("delete", "--ignore-not-found", "--wait=true", *files, timeout=300)
    for release in ("shoal", "shoal-crds"):
        cluster.helm("uninstall", release, "--namespace", NAMESPACE, "--ignore-not-found", "--wait")
    crds = [
        f"{plural}.{GROUP}"
        for plural in ("loraadapters", "lorapools", "modelroutes", "models", "tenants", "gpuclasses")
    ]
    cluster.kubectl("delete", "crd", "--ignore-not-found", *crds, timeout=120)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout=300)
    fakegpus.undo(cluster)


def _current(stages: Stages, gateway_url: str | None) -> DemoCluster:
    """The cluster that kubectl points to, with GPUs made up where it has none."""
    cluster = CurrentCluster(gateway_url)
    stages.console.print(f"Cluster: [bold]{cluster.context}[/]")
    if not fakegpus.present(cluster):
        with stages.stage("Fake GPUs, since no node has any (demo-down takes them away)"):
            told = fakegpus.pretend(cluster)
        for line in told:
            stages.console.print(f"  {line}")
    return cluster


def _lab(stages: Stages, name: str, engine: steps.EngineChoice, addons: Sequence[choice.AddOn]) -> DemoCluster:
    """A lab with all that its containers run. The build of Kubernetes, where one is needed, begins first and runs
    beside the rest."""
    require_root()

    def announce(line: str) -> None:
        stages.console.print(f"  {line}", markup=False)

    with ThreadPoolExecutor(1) as background:
        programs = background.submit(binaries.find_or_build, None, announce)
        with stages.stage("Tiny models", spin=False):
            subprocess.run([sys.executable, str(steps.ROOT / "images" / "shoal" / "make_models.py")], check=True)
        if engine == "sglang":
            with stages.stage("SGLang for the CPU", spin=False):
                enginecpu.install(steps.ROOT)
        with stages.stage("Programs of Kubernetes, and helm", spin=False):
            programs.result()
    if "keda" in addons:
        with stages.stage("Programs of KEDA", spin=False):
            keda.find_or_build(announce)
    more = f", with {' and '.join(addons)}" if addons else ""
    wanted = fleet.load(None)
    if engine == "simulator":
        wanted = steps.with_devices(wanted)
    nodes = sum(group.count for group in wanted.nodes)
    with stages.stage(f"Lab {name!r}: a Kubernetes control plane and {nodes} nodes{more}", spin=False):
        images = {"sglang": enginecpu.image()} if engine == "sglang" else {}
        return LabCluster(Lab.up(name, fleet_data=wanted, extra_images=images, addons=addons, announce=announce))


def _served_by(answer: DemoAnswer, record: dict[str, Any]) -> Table:
    data = record["data"]
    table = Table(title="Usage record", show_header=False, show_edge=False, title_justify="left")
    cached = "unknown" if data.get("cachedTokens") is None else data["cachedTokens"]
    for key, value in (
        ("served by", f"{data['replica']} on {data['node']}, class {data['gpuClass']}"),
        ("tenant / key", f"{record['subject']} / {data['keyName']}"),
        ("model", f"{data['model']} (asked for as {data['modelRequested']!r})"),
        ("tokens", f"{data['inputTokens']} in ({cached} cached), {data['outputTokens']} out"),
        ("outcome", f"{data['outcome']}, counts {data['countSource']}, {data['attempts']} attempt(s)"),
        ("time", f"first byte {data['ttftMs']:.0f} ms, all {data['durationMs']:.0f} ms (at the gateway)"),
        ("request", data["requestId"]),
    ):
        table.add_row(f"[bold]{key}[/]", str(value))
    return table


def _named(name: str) -> str:
    return "" if name == "demo" else f" NAME={name}"


def _try_it(console: Console, cluster: DemoCluster, served: str, *, down: str) -> None:
    body = json.dumps({"model": served, "messages": [{"role": "user", "content": "Hello"}], "stream": True})
    console.print("\n[bold]Try it yourself[/]")
    for line in (
        *cluster.try_it(),
        f"kubectl get models,gpuclasses,tenants,pods -n {steps.DEMO_NAMESPACE}",
        *(["kubectl shoal status -A", "kubectl shoal top -A"] if isinstance(cluster, LabCluster) else []),
        f"kubectl describe model {served} -n {steps.DEMO_NAMESPACE}",
        f"curl -N $GATEWAY/v1/chat/completions -H 'Authorization: Bearer {steps.DEMO_KEY}' -d '{body}'",
        down,
    ):
        console.print(f"  {line}", markup=False, soft_wrap=True)
