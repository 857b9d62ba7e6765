"""The external scaler and the real KEDA, in a lab: from a push to 1 replica, and what many ScaledObjects cost.

sudo python -m tests.bench.bench_keda [--wakes 50] [--many 500] [--seconds 60] [--lab NAME]
"""

import json
import statistics
import sys
from typing import Any

import click

from shoal_dev.lab.api import Lab
from shoal_dev.lab.fleet import FleetFile
from tests.bench.keda_process import SPACE

_NAME = "bench-keda"
_FLEET = {"nodes": [{"name": "cpu-1"}]}
_PLAIN = "KEDA with a scaler of a few lines and its two programs as plain processes, 4 times: 11 to 23 ms"
"""Measured once on a machine like this one, before there was an external scaler of Shoal's: what KEDA itself takes."""


def percentile(values: list[float], share: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * len(ordered)))]


def _print_wakes(when: str, wakes: list[float]) -> None:
    milli = [w * 1000 for w in wakes]
    print(
        f"push {when} -> 1 replica seen by a watch, {len(milli)} times: p50 {statistics.median(milli):.0f} ms, "
        f"p99 {percentile(milli, 0.99):.0f} ms, all {min(milli):.0f} to {max(milli):.0f} ms"
    )


def _print(found: dict[str, Any]) -> None:
    _print_wakes("at any moment", found["wakes"])
    print(f"  beside it: {_PLAIN}")
    _print_wakes("right after KEDA wrote zero, most of which the operator has to repeat", found["wakes_at_once"])
    if "many" in found:
        print(
            f"{found['many']:.0f} ScaledObjects at zero, polled every 5 s: {found['calls_per_second']:.0f} calls/s, "
            f"{found['streams']:.0f} streams, {100 * found['cpu']:.1f} % of a CPU in the scaler"
        )


@click.command()
@click.option("--wakes", default=50, show_default=True)
@click.option("--many", default=500, show_default=True, help="ScaledObjects; 0: leave that out.")
@click.option("--seconds", default=60.0, show_default=True, help="How long those are watched.")
@click.option("--lab", "name", help="A lab that is up with KEDA; else one is made and removed.")
def main(wakes: int, many: int, seconds: float, name: str | None) -> None:
    """Prints both."""
    lab = (
        Lab.get(name)
        if name
        else Lab.up(_NAME, fleet_data=FleetFile.model_validate(_FLEET), addons=("keda",), announce=print)
    )
    try:
        arguments = [f"--wakes={wakes}", f"--many={many}", f"--seconds={seconds}"]
        command = (sys.executable, "-m", "tests.bench.keda_process", f"--kubeconfig={lab.paths.admin_kubeconfig}")
        found = json.loads(lab.exec(*command, *arguments, timeout=1800).splitlines()[-1])
        _print(found)
    finally:
        if name:
            lab.kubectl("delete", "namespace", SPACE, "--ignore-not-found", timeout=120)
        else:
            lab.down()


if __name__ == "__main__":
    main()
