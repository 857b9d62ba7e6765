"""`shoal lab`: a real Kubernetes on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from shoal_dev.lab import api, binaries, fleet, images, network
from shoal_dev.lab.addons import choice, keda, prometheus
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.state import LabForward, Paths, known_labs

P = ParamSpec("P")
R = TypeVar("R")


def _clear_errors(function: Callable[P, R]) -> Callable[P, R]:
    """A LabError is for the user; anything else is a bug and keeps its traceback."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except LabError as error:
            raise click.ClickException(str(error)) from error

    return wrapped


def _announce(line: str) -> None:
    click.echo(line, err=True)


_with = click.option(
    "--with",
    "addons",
    default="",
    metavar="LIST",
    help=f"What people have beside Shoal, separated by commas: {', '.join(choice.KNOWN)}.",
)
_name = click.option("--name", default=api.DEFAULT_NAME, show_default=True, help="Which lab; several run side by side.")


@click.group()
def command() -> None:
    """A real Kubernetes on this machine, without Docker.

    A real control plane (etcd, API server, controllers, scheduler) and nodes that run each container as local
    processes, with network, probes, logs and signals as a kubelet has them. GPU nodes only claim their GPUs. Needs
    root.
    """


@command.command()
@_name
@click.option(
    "--fleet", "fleet_file", type=click.Path(path_type=Path), help="Nodes and images (YAML); see --print-fleet."
)
@click.option("--print-fleet", is_flag=True, help="Print the default fleet file and end.")
@click.option(
    "--binaries",
    "folder",
    type=click.Path(path_type=Path),
    help=f"Folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl and helm "
    f"(or set {binaries.BINARIES_ENV}). Left out: built once and cached.",
)
@click.option(
    "--with-status-nodes",
    type=click.IntRange(0, 5000),
    default=0,
    help="So many more 8-GPU nodes whose pods turn Ready without a process.",
)
@click.option(
    "--faults", is_flag=True, help="Dead nodes are noticed after 10 s instead of 40 s, and evicted 3 s later."
)
@_with
@click.option(
    "--hpa-sync",
    type=click.FloatRange(0.1, 60),
    metavar="SECONDS",
    help="How often HorizontalPodAutoscalers are looked at; Kubernetes' own way is every 15 s.",
)
@click.option(
    "--forward",
    "forwards",
    multiple=True,
    metavar="NAMESPACE/SERVICE:PORT[=HOSTPORT]",
    help="A port on 127.0.0.1 that leads to a Service. Always there: the API server and Shoal's gateway.",
)
@click.option(
    "--image",
    "image_rows",
    multiple=True,
    metavar="NAME=/FOLDER[:/FOLDER]",
    help="How containers of an image repository run: with these folders first on PATH.",
)
@_clear_errors
def up(
    name: str,
    fleet_file: Path | None,
    print_fleet: bool,
    folder: Path | None,
    with_status_nodes: int,
    faults: bool,
    addons: str,
    hpa_sync: float | None,
    forwards: tuple[str, ...],
    image_rows: tuple[str, ...],
) -> None:
    """Start a lab and wait until its nodes are Ready."""
    if print_fleet:
        click.echo(fleet.default_fleet_text(), nl=False)
        return
    api.require_root()
    lab = api.Lab.up(
        name,
        fleet_file=fleet_file,
        binaries_folder=folder,
        status_nodes=with_status_nodes,
        faults=faults,
        addons=choice.parse(addons),
        hpa_sync_seconds=hpa_sync,
        forwards=[LabForward.parse(text) for text in forwards],
        extra_images=dict(images.parse_row(text) for text in image_rows),
        announce=_announce,
    )
    _print_ways_in(lab)


def _print_ways_in(lab: api.Lab) -> None:
    named = "" if lab.state.name == api.DEFAULT_NAME else f" --name {lab.state.name}"
    click.echo(f"export KUBECONFIG={lab.kubeconfig}")
    click.echo(f"export PATH={lab.state.binaries}:{lab.state.helm.parent}:$PATH  # kubectl, helm")
    for forward in lab.state.forwards:
        click.echo(f"# http://127.0.0.1:{forward.host_port} leads to {forward.target()}")
    click.echo(f"# shoal lab status{named}; shoal lab exec{named} -- COMMAND; shoal lab down{named}")


@command.command()
@_name
@click.option("--all", "every", is_flag=True, help="Every lab of this user.")
@_clear_errors
def down(name: str, every: bool) -> None:
    """Stop a lab and remove all that it made. Says so when there is none."""
    api.require_root()
    for each in list(known_labs()) if every else [name]:
        click.echo(f"lab {each!r} is gone" if api.down(each) else f"there is no lab {each!r}")


@command.command()
@_name
@_clear_errors
def status(name: str) -> None:
    """Show the lab's processes and ways in. Exit code 1 when something has died."""
    lab = api.Lab.get(name)
    current = lab.status()
    now = time.time()
    click.echo(f"lab {name!r}: {'up' if current.ready else 'coming up'}, supervisor pid {lab.state.pid}")
    for process in current.processes:
        if process.running:
            text = f"running for {now - process.started:.0f} s"
        else:
            since = now - (process.ended or now)
            how = "switched off" if process.killed_by_user else f"ENDED with exit code {process.exit_code}"
            text = f"{how} {since:.0f} s ago; see `shoal lab logs {process.name}`"
        click.echo(f"  {process.name:26} {text}")
    _print_ways_in(lab)
    if current.dead():
        sys.exit(1)


@command.command()
@_name
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come.")
@click.option("-n", "--lines", default=50, show_default=True, help="How many of the last lines.")
@click.argument("what", required=False, metavar="[COMPONENT | NAMESPACE/POD[:CONTAINER]]")
@_clear_errors
def logs(name: str, follow: bool, lines: int, what: str | None) -> None:
    """Show the log of a component or of a pod; without argument, list the components' logs.

    Works on the files, so also when the lab has died.
    """
    paths = Paths.of(name)
    if not paths.logs.is_dir():
        raise LabError(f"there is no lab {name!r}")
    known = sorted(path.stem for path in paths.logs.glob("*.log"))
    if what is None:
        click.echo("\n".join(known))
        return
    if what in keda.WORKLOADS:
        what = f"{keda.NAMESPACE}/deployment/{what}"
    if "/" in what:
        lab = api.Lab.get(name)
        namespace, _, rest = what.partition("/")
        pod, _, container = rest.partition(":")
        command = [str(lab.state.binaries / "kubectl"), "logs", f"--namespace={namespace}", pod, f"--tail={lines}"]
        command += [f"--container={container}"] if container else ["--all-containers"]
        os.execvpe(command[0], [*command, *(["--follow"] if follow else [])], lab.environment())  # noqa: S606
    if what not in known:
        raise LabError(f"no log of {what!r}; there are: {', '.join(known)}")
    os.execvp("tail", ["tail", f"--lines={lines}", *(["-F"] if follow else []), str(paths.logs / f"{what}.log")])  # noqa: S606


@command.command()
@_name
@_clear_errors
def kubeconfig(name: str) -> None:
    """Print the path of the kubeconfig for this machine."""
    click.echo(api.Lab.get(name).kubeconfig)


@command.command("binaries")
@click.option("--binaries", "folder", type=click.Path(path_type=Path), help="Check this folder instead of the cache.")
@_with
@_clear_errors
def binaries_command(folder: Path | None, addons: str) -> None:
    """Find the lab's programs, or build them (about 12 CPU minutes, once; KEDA 20 more). Needs no root."""
    chosen = choice.parse(addons)
    found = binaries.find_or_build(folder, _announce)
    if "keda" in chosen:
        click.echo(f"{'keda':26} {keda.find_or_build(_announce)}")
    if "prometheus" in chosen:
        network.require_programs(_announce, prometheus.PACKAGES)
    for program, version in binaries.versions(found).items():
        click.echo(f"{program:26} {version}")
    click.echo(f"folders: {found.search_path()}")


@command.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_name
@click.option("--pod", metavar="NAMESPACE/NAME[:CONTAINER]", help="Inside this running container, as its user.")
@click.argument("command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARGS]...")
@_clear_errors
def exec_(name: str, pod: str | None, command_line: tuple[str, ...]) -> None:
    """Run a command inside the lab's network (Services and their DNS names work there), or inside a container."""
    api.require_root()
    lab = api.Lab.get(name)
    if pod is None:
        argv = [*lab.enter_command(), *command_line]
        os.execvpe(argv[0], argv, lab.inside_environment())  # noqa: S606
    sys.exit(subprocess.run(lab.pod_command(pod, command_line), env=lab.inside_environment(), check=False).returncode)


@command.command("kill-node")
@_name
@click.argument("node")
@_clear_errors
def kill_node(name: str, node: str) -> None:
    """Switch a node off: it and all its containers are gone at once, as if the power had failed."""
    api.Lab.get(name).kill_node(node)
    click.echo(f"node {node} is off; `shoal lab start-node {node}` switches it on")


@command.command("start-node")
@_name
@click.argument("node")
@_clear_errors
def start_node(name: str, node: str) -> None:
    """Switch a node on again."""
    api.Lab.get(name).start_node(node)
    click.echo(f"node {node} is starting")


@command.command("restart-kubelet")
@_name
@click.argument("node")
@_clear_errors
def restart_kubelet(name: str, node: str) -> None:
    """Restart a node's kubelet; its containers run on."""
    api.Lab.get(name).restart_kubelet(node)
    click.echo(f"the kubelet of node {node} is starting again")


@command.command("replace-node")
@_name
@click.argument("node")
@_clear_errors
def replace_node(name: str, node: str) -> None:
    """Put another machine in a node's place: same name, empty disk, labels and taints as at `up`."""
    api.Lab.get(name).replace_node(node)
    click.echo(f"node {node} is another machine now, and is starting")


@command.command("gpu-health")
@_name
@click.option("--healthy", type=int, required=True, metavar="N", help="So many of its GPUs work.")
@click.argument("node")
@_clear_errors
def gpu_health(name: str, healthy: int, node: str) -> None:
    """Let GPUs of a node fail, or work again. Pods keep those that they have, as with a real device plugin."""
    api.Lab.get(name).gpu_health(node, healthy=healthy)
    click.echo(f"node {node} offers {healthy} GPUs")
