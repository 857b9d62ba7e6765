"""What is done to a fleet in a storm. Each fault is a function with a name; its docstring says what it stands for.

A fault writes into its journal what it kills, and within which time requests can tell of it: every answer that broke
must find its kill there. It also says which signal sources cannot be heard meanwhile.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import orjson
import yaml

from shoal.api import names
from shoal_dev.demo import healthact
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.lab.addons import keda
from shoal_dev.lab.errors import LabError
from tests.storm import nodes, rests, routes, sick
from tests.storm.ground import BURSTY, STEADY, STORM, Ground
from tests.storm.journals import DriverUpgrade, Halt, Kill, Sickness, SilentPeriod
from tests.storm.provider import REPORTER

SILENT_SECONDS: Final = 13.0
"""A stream that says nothing for 12 s is down; what it said before may be acted on until then."""
CUT_SECONDS: Final = 40.0
"""Of streams."""
HALT_SECONDS: Final = 90.0
"""Within which a broken canary must be halted: it is asked for half of each minute."""
_AWAY_SECONDS: Final = 60.0
_NOTICE_SECONDS: Final = 30.0
"""From the notice to the end of a spot machine: GKE's and Azure's 30 s; EC2 gives 120."""
_DRAIN: Final = ("--ignore-daemonsets", "--delete-emptydir-data")
_SPOT_NOTICE: Final = "aws-node-termination-handler/spot-itn"


@dataclass(slots=True)
class Storm:
    """What faults work with. `pace` shortens the long ones, for a short storm."""

    ground: Ground
    random: random.Random
    journal: Path
    pace: float = 1.0
    over: Callable[[], bool] = lambda: False
    """Whether the load has ended."""
    revision: int = 0

    def say(
        self,
        text: str,
        kills: Iterable[Kill] = (),
        silent_periods: Iterable[SilentPeriod] = (),
        halts: Iterable[Halt] = (),
        sicknesses: Iterable[Sickness] = (),
        upgrades: Iterable[DriverUpgrade] = (),
    ) -> None:
        """One line of the faults' journal."""
        line = {
            "at": time.time(),
            "text": text,
            "kills": [asdict(k) for k in kills],
            "silent_periods": [
                asdict(s) | {"models": None if s.models is None else sorted(s.models)} for s in silent_periods
            ],
            "halts": [asdict(h) for h in halts],
            "sicknesses": [asdict(s) for s in sicknesses],
            "upgrades": [asdict(u) for u in upgrades],
        }
        with self.journal.open("ab", buffering=0) as file:
            file.write(orjson.dumps(line) + b"\n")
        print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)

    def some_engine(self, model: str | None = None) -> str | None:
        pods = sorted(p["metadata"]["name"] for p in self.ground.engines(model))
        return self.random.choice(pods) if pods else None

    def some_node(self) -> str | None:
        """One with replicas, of those that are always there."""
        named = sorted({p["spec"]["nodeName"] for p in self.ground.engines()})
        fixed = [name for name in named if not name.startswith(nodes.PREFIX)]
        return self.random.choice(fixed) if fixed else None

    def some_gateway(self) -> str | None:
        pods = sorted(self.ground.pods(names.COMPONENT_GATEWAY))
        return self.random.choice(pods) if pods else None

    def wait(self, seconds: float) -> None:
        time.sleep(seconds * self.pace)


Fault = Callable[[Storm], None]


def pod_deleted(storm: Storm) -> None:
    """kubectl delete pod: the replica finishes, and goes."""
    if pod := storm.some_engine():
        storm.say(f"pod_deleted: {pod}")
        storm.ground.kubectl("delete", "pod", pod, "-n", STORM, "--wait=false")


def pod_killed(storm: Storm) -> None:
    """kubectl delete pod --force --grace-period=0: gone at once."""
    if pod := storm.some_engine():
        since = time.time()
        storm.ground.kubectl("delete", "pod", pod, "-n", STORM, "--force", "--grace-period=0", "--wait=false")
        storm.say(f"pod_killed: {pod}", [Kill("engine", pod, since, since + 40, "pod_killed")])


def engine_killed(storm: Storm) -> None:
    """SIGKILL to the engine inside its pod; the kubelet starts another."""
    if pod := storm.some_engine():
        since = time.time()
        storm.ground.lab.signal_container(f"{STORM}/{pod}:{names.CONTAINER_ENGINE}", signal.SIGKILL)
        storm.say(f"engine_killed: {pod}", [Kill("engine", pod, since, time.time() + 5, "engine_killed")])


def agent_killed(storm: Storm) -> None:
    """SIGKILL to the agent of an engine that serves: while it loads or retires an adapter, or does not."""
    if pod := storm.some_engine():
        storm.ground.lab.signal_container(f"{STORM}/{pod}:{names.CONTAINER_AGENT}", signal.SIGKILL)
        storm.say(f"agent_killed: {pod}")


def engine_hung(storm: Storm) -> None:
    """SIGSTOP to the engine: it accepts connections and says nothing, until liveness restarts it."""
    if pod := storm.some_engine(STEADY):
        first = storm.ground.lab.first_process(f"{STORM}/{pod}:{names.CONTAINER_ENGINE}")
        since = time.time()
        for pid in _descendants(first):
            _signal(pid, signal.SIGSTOP)
        silent_periods = [SilentPeriod(since + SILENT_SECONDS, since + 30, "engine_hung", frozenset({STEADY}))]
        storm.say(f"engine_hung: {pod}", [Kill("engine", pod, since, since + 240, "engine_hung")], silent_periods)


def engine_refuses(storm: Storm) -> None:
    """The engine answers 503, before the first byte, as one whose queue is full."""
    if pod := storm.some_engine():
        storm.say(f"engine_refuses: {pod}, 60 times")
        _arm(storm, pod, {"kind": "503", "count": 60})


def engine_errors(storm: Storm) -> None:
    """The engine's first event is an error."""
    if pod := storm.some_engine():
        storm.say(f"engine_errors: {pod}, 40 times")
        _arm(storm, pod, {"kind": "sse_error", "count": 40})


def engine_hangs_up(storm: Storm) -> None:
    """The engine breaks connections before it has answered anything."""
    if pod := storm.some_engine():
        storm.say(f"engine_hangs_up: {pod}, 20 times")
        _arm(storm, pod, {"kind": "close", "count": 20})


def node_killed(storm: Storm) -> None:
    """The node's power fails: no process says goodbye, no connection is reset. It comes back after a while."""
    node = storm.some_node()
    if node is None:
        return
    with _power_off(storm, node) as (named, since):
        storm.ground.lab.kill_node(node)
        kills = [Kill("engine", pod, since, since + 150, "node_killed") for pod in named]
        storm.say(f"node_killed: {node} with {', '.join(named)}", kills)
        # Longer than any client would wait for a word from there.
        storm.wait(75)
    storm.ground.lab.start_node(node)
    storm.say(f"node_killed: {node} is back")


def node_drained(storm: Storm) -> None:
    """kubectl drain, as before maintenance; then uncordon."""
    node = storm.some_node()
    if node is None:
        return
    storm.say(f"node_drained: {node}")
    try:
        storm.ground.kubectl("drain", node, *_DRAIN, "--timeout=120s", timeout=150)
        storm.say(f"node_drained: {node} is empty")
    finally:
        storm.ground.kubectl("uncordon", node)


def spot_interrupted(storm: Storm) -> None:
    """A spot machine is taken away: a notice, which a termination handler makes a taint and a drain of; then the power
    is off, and the Node goes. Later another machine comes."""
    node = storm.some_node()
    if node is None:
        return
    storm.say(f"spot_interrupted: notice for {node}")
    left = _notice(storm, node)
    since = time.time()
    storm.ground.lab.kill_node(node)
    storm.ground.kubectl("delete", "node", node, "--wait=false")
    kills = [Kill("engine", pod, since, since + 60, "spot_interrupted") for pod in left]
    storm.say(f"spot_interrupted: {node} is gone with {', '.join(left) or 'no replica'}", kills)
    storm.wait(30)
    storm.ground.lab.replace_node(node)
    storm.say(f"spot_interrupted: {node} is another machine")


def gateways_restarted(storm: Storm) -> None:
    """kubectl rollout restart of the gateways: each finishes what it has."""
    storm.say("gateways_restarted")
    target = ("statefulset/shoal-gateway", "-n", NAMESPACE)
    storm.ground.kubectl("rollout", "restart", *target)
    storm.ground.kubectl("rollout", "status", *target, "--timeout=240s", timeout=250)
    storm.say("gateways_restarted: both are new")


def gateway_killed(storm: Storm) -> None:
    """SIGKILL to a gateway: what it held is cut, nothing else."""
    if pod := storm.some_gateway():
        since = time.time()
        storm.ground.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGKILL)
        storm.say(f"gateway_killed: {pod}", [Kill("gateway", pod, since, time.time() + 3, "gateway_killed")])


def ledger_killed(storm: Storm) -> None:
    """SIGKILL to the ledger: what it has not answered comes again."""
    for pod in storm.ground.pods(names.COMPONENT_LEDGER):
        since = time.time()
        storm.ground.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGKILL)
        storm.say(f"ledger_killed: {pod}", [Kill("ledger", pod, since, time.time() + 3, "ledger_killed")])


def ledger_away(storm: Storm) -> None:
    """The ledger is away for a minute: records wait in the spools, and everybody is served."""
    storm.say("ledger_away")
    storm.ground.kubectl("scale", "statefulset/shoal-ledger", "-n", NAMESPACE, "--replicas=0")
    try:
        storm.wait(_AWAY_SECONDS)
    finally:
        storm.ground.kubectl("scale", "statefulset/shoal-ledger", "-n", NAMESPACE, "--replicas=1")
    storm.say("ledger_away: it comes back")


def gateway_paused(storm: Storm) -> None:
    """A gateway stands still for some seconds, with requests in its hands, while a replica is deleted: it acts on what
    it knew before, unless the drain waits for its word."""
    gateway, engine = storm.some_gateway(), storm.some_engine(STEADY)
    if gateway is None or engine is None:
        return
    pid = storm.ground.lab.first_process(f"{NAMESPACE}/{gateway}")
    storm.say(f"gateway_paused: {gateway}, and {engine} is deleted")
    _signal(pid, signal.SIGSTOP)
    try:
        storm.ground.kubectl("delete", "pod", engine, "-n", STORM, "--wait=false")
        time.sleep(6)
    finally:
        _signal(pid, signal.SIGCONT)
    storm.say(f"gateway_paused: {gateway} goes on")


def operator_killed(storm: Storm) -> None:
    """SIGKILL to the operator that leads."""
    if pod := _leader(storm):
        storm.say(f"operator_killed: {pod}")
        storm.ground.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGKILL)


def operator_frozen(storm: Storm) -> None:
    """The operator that leads stands still, wakes up, and still believes that it leads."""
    if pod := _leader(storm):
        storm.say(f"operator_frozen: {pod}")
        storm.ground.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGSTOP)
        try:
            storm.wait(45)
        finally:
            storm.ground.lab.signal_container(f"{NAMESPACE}/{pod}", signal.SIGCONT)
        storm.say(f"operator_frozen: {pod} goes on")


def api_server_away(storm: Storm) -> None:
    """The API server is away for a minute."""
    storm.say("api_server_away")
    storm.ground.lab.kill("kube-apiserver")
    try:
        storm.wait(_AWAY_SECONDS)
    finally:
        storm.ground.lab.start("kube-apiserver")
        storm.say("api_server_away: it is started again")
    _reachable(storm)


def etcd_restarted(storm: Storm) -> None:
    """etcd is away for five seconds."""
    storm.say("etcd_restarted")
    storm.ground.lab.kill("etcd")
    time.sleep(5)
    storm.ground.lab.start("etcd")
    _reachable(storm)


def streams_cut(storm: Storm) -> None:
    """Gateways and operators reach no agent and no peer for a while; requests still flow."""
    seconds = CUT_SECONDS * storm.pace
    numbers = (names.AGENT_PORT, names.OPS_PORT, names.AGENT_TLS_PORT, names.OPS_TLS_PORT)
    ports = f"{{ {', '.join(map(str, numbers))} }}"
    rules = f"""
table inet storm {{
  chain out {{
    type filter hook output priority 0;
    tcp dport {ports} reject with tcp reset
  }}
}}"""
    pids = [
        storm.ground.lab.first_process(f"{NAMESPACE}/{pod}")
        for component in (names.COMPONENT_GATEWAY, names.COMPONENT_OPERATOR)
        for pod in storm.ground.pods(component)
    ]
    since = time.time()
    storm.say(f"streams_cut: for {seconds:.0f} s")
    for pid in pids:
        _nft(pid, rules)
    try:
        time.sleep(seconds)
    finally:
        until = time.time()
        for pid in pids:
            with contextlib.suppress(LabError):
                _nft(pid, "delete table inet storm\n")
    storm.say(
        "streams_cut: they flow again", silent_periods=[SilentPeriod(since + SILENT_SECONDS, until, "streams_cut")]
    )


def rolled_out(storm: Storm) -> None:
    """A new revision of a Model, under load."""
    model = storm.random.choice((STEADY, BURSTY))
    storm.revision += 1
    storm.say(f"rolled_out: {model}, revision {storm.revision}")
    _patch(storm, model, {"pod": {"env": [{"name": "STORM_REVISION", "value": str(storm.revision)}]}})


def engine_changed(storm: Storm) -> None:
    """A Model goes from SGLang to vLLM or back, under load."""
    model = storm.random.choice((STEADY, BURSTY))
    now = storm.ground.kubectl("get", "model", model, "-n", STORM, "-o", "jsonpath={.spec.engine.type}")
    then = "SGLang" if now == "vLLM" else "vLLM"
    storm.say(f"engine_changed: {model}, from {now} to {then}")
    _patch(storm, model, {"engine": {"type": then}})


def bad_revision(storm: Storm) -> None:
    """A revision that never becomes ready, taken back after a while."""
    storm.say(f"bad_revision: {STEADY}")
    # By the environment: an argument that the engine does not have would be refused, and nothing rolled.
    _patch(storm, STEADY, {"pod": {"env": [{"name": "SHOAL_SIM_LOAD_SECONDS", "value": "100000"}]}})
    storm.wait(30)
    _patch(storm, STEADY, {"pod": {"env": None}})
    storm.say("bad_revision: taken back")


def scaled(storm: Storm) -> None:
    """More replicas for a while, and fewer again."""
    storm.say(f"scaled: {STEADY} to 4")
    _patch(storm, STEADY, {"scaling": {"minReplicas": 4}})
    storm.wait(25)
    _patch(storm, STEADY, {"scaling": {"minReplicas": 2}})
    storm.say(f"scaled: {STEADY} back to 2")


def _notice(storm: Storm, node: str) -> list[str]:
    """The notice of a spot machine, and what a termination handler does with it. Returns when the machine is empty, or
    its time is over; then with the pods that are still there, also those that were not done."""
    storm.ground.kubectl("taint", "node", node, f"{_SPOT_NOTICE}:NoSchedule")
    with contextlib.suppress(click.ClickException):  # what is not done by the end of the notice is cut off
        limit = f"--timeout={_NOTICE_SECONDS:.0f}s"
        storm.ground.kubectl("drain", node, *_DRAIN, limit, timeout=_NOTICE_SECONDS + 30)
    return _there(storm, node)


def _there(storm: Storm, node: str) -> list[str]:
    """Names of the replicas on a node, whatever they do."""
    return [p["metadata"]["name"] for p in _pods_on(storm, node)]


def _pods_on(storm: Storm, node: str) -> list[dict[str, Any]]:
    return storm.ground.get("pods", "-n", STORM, "--field-selector", f"spec.nodeName={node}")


@contextlib.contextmanager
def _power_off(storm: Storm, node: str) -> Generator[tuple[list[str], float]]:
    """A machine without power: no packet from it, and none to it. Yields the names of its replicas, and the time."""
    there = _pods_on(storm, node)
    addresses = [p["status"]["podIP"] for p in there if p["status"].get("podIP")]
    drops = "".join(f"    ip saddr {a} drop\n    ip daddr {a} drop\n" for a in addresses)
    wires = f"table bridge storm {{\n  chain f {{\n    type filter hook forward priority 0\n{drops}  }}\n}}\n"
    since = time.time()
    # Processes that are killed close their connections; a machine without power does not.
    _nft(storm.ground.lab.state.pid, wires)
    try:
        yield [p["metadata"]["name"] for p in there], since
    finally:
        _nft(storm.ground.lab.state.pid, "delete table bridge storm\n")


ALL: Final[dict[str, Fault]] = {
    f.__name__: f
    for f in (
        pod_deleted,
        pod_killed,
        engine_killed,
        agent_killed,
        engine_hung,
        engine_refuses,
        engine_errors,
        engine_hangs_up,
        node_killed,
        node_drained,
        spot_interrupted,
        gateways_restarted,
        gateway_killed,
        gateway_paused,
        ledger_killed,
        ledger_away,
        operator_killed,
        operator_frozen,
        api_server_away,
        etcd_restarted,
        streams_cut,
        rolled_out,
        engine_changed,
        bad_revision,
        scaled,
    )
}


# --- with routes ------------------------------------------------------------------------------------------------------


def canary_broken(storm: Storm) -> None:
    """The engine of a route's canary refuses everything: the canary must be halted by itself, and get nothing more."""
    pod = storm.some_engine(routes.NEXT)
    if pod is None:
        return
    storm.revision += 1
    percent = routes.PERCENT + storm.revision % 10  # another canary: what was halted before begins again
    storm.ground.apply(routes.trial(STORM, STEADY, BURSTY, percent))
    began = time.time()
    _arm(storm, pod, {"kind": "503", "count": 1_000_000})
    storm.say(f"canary_broken: {pod} refuses everything; percent is {percent}")
    since, why = None, ""
    try:
        while since is None and time.time() - began < HALT_SECONDS and not storm.over():
            with contextlib.suppress(click.ClickException):
                state, why = storm.ground.canary()
                since = time.time() if state == "Halted" else None
            time.sleep(0.5)
    finally:
        with contextlib.suppress(LabError):
            _arm(storm, pod, None)
    if since is not None:
        storm.wait(20)  # now it would answer
    until = time.time()
    halt = Halt(f"{STORM}/{routes.TRIAL}", f"{STORM}/{routes.NEXT}", since, until, (since or until) - began)
    told = "was not halted" if since is None else f"halted after {halt.seconds:.1f} s: {why}"
    storm.say(f"canary_broken: {told}; {pod} serves again", halts=[halt])


def outside_killed(storm: Storm) -> None:
    """SIGKILL to the external target of a route; it comes back by itself."""
    since = time.time()
    storm.ground.lab.signal_container(f"{STORM}/{routes.OUTSIDE}:{routes.OUTSIDE}", signal.SIGKILL)
    storm.say("outside_killed", [Kill("external", routes.OUTSIDE, since, time.time() + 5, "outside_killed")])


ROUTES: Final[dict[str, Fault]] = {fault.__name__: fault for fault in (canary_broken, outside_killed)}


# --- GPUs that sicken -------------------------------------------------------------------------------------------------

_SICK_SECONDS: Final = 240.0
"""Within which a sick GPU must be out of use, and its replica replaced."""
_THROTTLE: Final = 6.0
"""Times as long for a token; three times is far slower."""
_UPGRADE_SECONDS: Final = 40.0
"""From the end of a driver to the next one's slices: longer than a signal has to last."""
_COUNTED_SECONDS: Final = 60.0
"""Within which the GPUs of a node whose driver was replaced must be counted again."""


def node_sickens(storm: Storm) -> None:
    """A problem detector says that a GPU of a node has failed. It is repaired once the replicas there are replaced."""
    if pod := _of_class(storm, STEADY):
        node = healthact.node_of(pod)
        _sickened(
            storm,
            "node_sickens",
            pod,
            (node, ""),
            lambda: healthact.report(storm.ground, node, sick=True),
            lambda: healthact.report(storm.ground, node, sick=False),
        )


def device_tainted(storm: Storm) -> None:
    """A DRA driver taints a device that a replica holds; the taint goes once the replica is replaced."""
    for pod in _shuffled(storm, storm.ground.engines(sick.MODEL)):
        # The lab taints a node's last devices.
        node = healthact.node_of(pod)
        device = f"gpu.nvidia.com/{node}/gpu-{sick.GPUS_PER_NODE - 1}"
        if _device(storm, pod) == device:
            healthy = partial(storm.ground.lab.gpu_health, node)
            sicken, heal = (
                partial(healthy, healthy=sick.GPUS_PER_NODE - 1),
                partial(healthy, healthy=sick.GPUS_PER_NODE),
            )
            _sickened(storm, "device_tainted", pod, (node, device), sicken, heal)
            return


def devices_sicken(storm: Storm) -> None:
    """Every node's driver taints a device, and all but one node with a device plugin are said to have failed GPUs: a
    driver upgrade, or a monitor that is wrong. Most of them must stay in use."""
    dra = sorted({slice_["spec"]["nodeName"] for slice_ in storm.ground.get("resourceslices")})
    plugin = sorted({p["spec"]["nodeName"] for p in storm.ground.engines(STEADY) + storm.ground.engines(BURSTY)})
    storm.say(f"devices_sicken: a device of {', '.join(dra)}, and all of {', '.join(plugin)}")
    try:
        for node in dra:
            storm.ground.lab.gpu_health(node, healthy=sick.GPUS_PER_NODE - 1)
        for node in plugin:
            healthact.report(storm.ground, node, sick=True)
        storm.wait(60)
    finally:
        for node in plugin:
            healthact.report(storm.ground, node, sick=False)
        for node in dra:
            with contextlib.suppress(LabError):
                storm.ground.lab.gpu_health(node, healthy=sick.GPUS_PER_NODE)
    storm.say("devices_sicken: all are well")


def replica_throttled(storm: Storm) -> None:
    """A GPU runs hot: everything that its replica computes takes many times as long."""
    _own_word(storm, "replica_throttled", {"kind": "throttled", "factor": _THROTTLE})


def replica_garbled(storm: Storm) -> None:
    """A GPU computes wrong: its replica answers the canary otherwise than the others."""
    _own_word(storm, "replica_garbled", {"kind": "garbled"})


def driver_upgraded(storm: Storm) -> None:
    """The DRA driver of a node is replaced: its slices vanish for a while, and come back with the next generation. The
    replicas there go on serving, and none of them is replaced."""
    node = _healthy_node(storm)
    if node is None:
        storm.say("driver_upgraded: there is no node with a replica and with healthy GPUs only")
        return
    serving = storm.ground.engines(sick.MODEL)
    pods = tuple(sorted(p["metadata"]["name"] for p in serving if healthact.node_of(p) == node))
    capacity = _status_of(storm, sick.CLASS)["gpus"]["capacity"]
    least, gone, called = capacity, set[str](), set[str]()

    def look() -> int:
        """How many GPUs the class has now."""
        nonlocal least
        gone.update(set(pods) - _staying(storm, sick.MODEL))
        status = _status_of(storm, sick.CLASS)
        least = min(least, now := status["gpus"]["capacity"])
        for each in status.get("quarantined", ()):
            if (each["node"], each["by"]) == (node, "Shoal"):
                called.add(f"{sick.unit_name(node, each.get('device') or '')}: {each['reason']}")
        return now

    since = time.time()
    storm.say(f"driver_upgraded: {node} with {', '.join(pods)}; the class has {capacity} GPUs")
    try:
        storm.ground.lab.dra_driver(node, there=False)
        _again_and_again(storm, _UPGRADE_SECONDS * storm.pace, look)
    finally:
        with contextlib.suppress(LabError):
            storm.ground.lab.dra_driver(node, there=True)
    back = time.time()
    counted = _within(storm, _COUNTED_SECONDS, lambda: look() >= capacity)
    # A replacement that began while they were away would end a replica here by then.
    _again_and_again(storm, back + _COUNTED_SECONDS / 2 - time.time(), look)
    found = DriverUpgrade(
        node,
        sick.MODEL,
        since,
        time.time(),
        pods,
        tuple(sorted(gone)),
        tuple(sorted(called)),
        counted or storm.over(),
        len(serving),
        _floor(sick.MODEL),
    )
    all_counted = (
        "all GPUs are" if counted else "the load ended before all GPUs were" if found.counted else "not all are"
    )
    told = f"gone: {', '.join(found.gone) or 'none'}; {all_counted} counted again"
    storm.say(
        f"driver_upgraded: {node}, after {back - since:.1f} s; at least {least} GPUs were; {told}", upgrades=[found]
    )


SICK: Final[dict[str, Fault]] = {
    f.__name__: f
    for f in (node_sickens, device_tainted, devices_sicken, replica_throttled, replica_garbled, driver_upgraded)
}


def _own_word(storm: Storm, fault: str, armed: dict[str, Any]) -> None:
    pod = _of_class(storm, sick.MODEL)
    device = None if pod is None else _device(storm, pod)
    if pod is None or device is None:
        return
    name = pod["metadata"]["name"]
    _sickened(
        storm,
        fault,
        pod,
        (healthact.node_of(pod), device),
        lambda: _arm(storm, name, armed),
        lambda: _arm(storm, name, None),
    )


def _sickened(
    storm: Storm,
    fault: str,
    pod: dict[str, Any],
    unit: tuple[str, str],
    sicken: Callable[[], None],
    heal: Callable[[], None],
) -> None:
    """Until the unit is out of use, other replicas serve and this one goes; then it heals."""
    model, name = pod["metadata"]["labels"][names.LABEL_MODEL], pod["metadata"]["name"]
    gpu_class = pod["metadata"]["labels"][names.LABEL_GPU_CLASS]
    before = len(storm.ground.engines(model))
    told = sick.unit_name(*unit)
    since, taken, replaced, gone, others = time.time(), None, None, None, 0
    storm.say(f"{fault}: {told}, under {name}")
    sicken()
    try:
        while time.time() - since < _SICK_SECONDS and not storm.over() and None in (taken, replaced, gone):
            with contextlib.suppress(click.ClickException, LabError):
                serving = {p["metadata"]["name"] for p in storm.ground.engines(model)}
                left = len(serving - {name})
                if gone is None and name not in serving:
                    gone, others = time.time(), left
                if replaced is None and left >= min(before, _floor(model)):
                    replaced = time.time()
                if taken is None and unit in storm.ground.out_of_use(gpu_class):
                    taken = time.time()
            time.sleep(0.3)
    finally:
        with contextlib.suppress(click.ClickException, LabError):
            heal()
    until = time.time()
    if taken is None and (storm.over() or gone is not None):
        storm.say(f"{fault}: {name} went, or the load ended, before its GPU was judged")
        return
    found = Sickness(fault, told, model, name, since, until, taken, replaced, gone, others, before, _floor(model))
    seconds = {"out of use": taken, "replaced": replaced, "gone": gone}
    text = ", ".join(f"{what} after {at - since:.1f} s" for what, at in seconds.items() if at is not None)
    storm.say(f"{fault}: {told}: {text or 'nothing happened'}; healed", sicknesses=[found])


def _healthy_node(storm: Storm) -> str | None:
    """One with replicas on devices, none of which was called sick lately: for those, a replica may still go. If
    possible one with a free device: the class counts that one no more while its slice is gone."""
    found: list[str] = []

    def choose() -> bool:
        called = {each["node"] for each in _status_of(storm, sick.CLASS).get("quarantined", ())}
        serving = Counter(healthact.node_of(pod) for pod in storm.ground.engines(sick.MODEL))
        candidates = sorted(serving.keys() - called)
        if candidates:
            free = [node for node in candidates if serving[node] < sick.GPUS_PER_NODE]
            found.append(storm.random.choice(free or candidates))
        return bool(found)

    return found[0] if _within(storm, _NODE_SECONDS, choose) else None


def _status_of(storm: Storm, gpu_class: str) -> dict[str, Any]:
    found = storm.ground.get("gpuclasses")
    return next(each for each in found if each["metadata"]["name"] == gpu_class)["status"]


def _staying(storm: Storm, model: str) -> set[str]:
    """Names of a Model's replicas that have not begun to go, ready or not."""
    found = storm.ground.get("pods", "-n", STORM, "-l", f"{names.LABEL_MODEL}={model}")
    return {
        p["metadata"]["name"]
        for p in found
        if "deletionTimestamp" not in p["metadata"] and p["status"].get("phase") not in ("Failed", "Succeeded")
    }


def _floor(model: str) -> int:
    return {STEADY: 2, sick.MODEL: sick.REPLICAS}[model]


def _shuffled(storm: Storm, pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(pods, key=lambda pod: pod["metadata"]["name"])
    return storm.random.sample(ordered, len(ordered))


def _of_class(storm: Storm, model: str) -> dict[str, Any] | None:
    return next(iter(_shuffled(storm, storm.ground.engines(model))), None)


def _device(storm: Storm, pod: dict[str, Any]) -> str | None:
    """Name of the device that a replica holds."""
    uid = pod["metadata"]["uid"]
    for claim in storm.ground.get("resourceclaims", "-n", STORM):
        status = claim.get("status", {})
        if any(user["uid"] == uid for user in status.get("reservedFor", ())):
            (result,) = status["allocation"]["devices"]["results"]
            return f"{result['driver']}/{result['pool']}/{result['device']}"
    return None


# --- nodes that come and go -------------------------------------------------------------------------------------------

_NODE_SECONDS: Final = 75.0
"""Within which a node comes, and within which the status of a Model says why none does. Longer than the pause of the
Model that has its nodes to itself."""
_EMPTIED_SECONDS: Final = 240.0
"""Within which one of two nodes that are half empty is emptied and goes, also when a request came between."""
_HOLDER: Final = "storm-holder"
_LOST_SECONDS: Final = 40.0
"""Until the cloud says of a machine without power that it is gone."""


def nodes_wanted(storm: Storm) -> None:
    """More replicas than there are nodes for, and then no more than before: nodes come, and go empty."""
    before = len(storm.ground.provider.nodes())
    storm.say(f"nodes_wanted: {nodes.MODEL} to {nodes.REPLICAS}, with {before} nodes")
    _patch(storm, nodes.MODEL, {"scaling": {"minReplicas": nodes.REPLICAS}})
    try:
        came = _within(storm, _NODE_SECONDS, lambda: len(storm.ground.provider.nodes()) > before)
        storm.wait(15)
    finally:
        _patch(storm, nodes.MODEL, {"scaling": {"minReplicas": 0}})
    storm.ground.provider.note("fault", why="nodes_wanted", good=came or before > 1)
    storm.say(f"nodes_wanted: {len(storm.ground.provider.nodes())} nodes; {nodes.MODEL} may go to zero again")


def spot_node_taken(storm: Storm) -> None:
    """A spot machine that came for a replica is taken away with a notice; another one comes where it is needed."""
    if node := _node_to_take(storm, "spot_node_taken"):
        _take_with_notice(storm, node, "spot_node_taken")


def spot_node_lost(storm: Storm) -> None:
    """A spot machine that came for a replica is off without a notice, and its Node goes some time later."""
    node = _node_to_take(storm, "spot_node_lost")
    if node is None:
        return
    provider = storm.ground.provider
    with _power_off(storm, node) as (named, since):
        storm.ground.lab.kill_node(node)
        kills = [Kill("engine", pod, since, since + 150, "spot_node_lost") for pod in named]
        storm.say(f"spot_node_lost: {node} is off, with {', '.join(named)}", kills)
        storm.wait(_LOST_SECONDS)
        provider.forget(node, "power", named)
        # Longer than any client would wait for a word from there.
        storm.wait(75 - _LOST_SECONDS)
    storm.say(f"spot_node_lost: the Node {node} is gone")


def stock_out(storm: Storm) -> None:
    """There are no spot machines for a while, one is taken away, and more replicas are wanted than there are machines
    for: some wait, or go to another class."""
    node = _node_to_take(storm, "stock_out")
    if node is None:
        return
    provider = storm.ground.provider
    provider.set_stock(False)
    _patch(storm, nodes.MODEL, {"scaling": {"minReplicas": nodes.REPLICAS}})
    try:
        _take_with_notice(storm, node, "stock_out")
        quoted = _within(storm, _NODE_SECONDS, lambda: bool(_quotes(storm)))
        if quoted:
            model, text = _quotes(storm)[0]
            provider.note("quoted", pods=[model])
            storm.say(f"stock_out: the status of {model} says: {text}")
        # After this time the class is the second Model's last choice.
        storm.wait(2 * nodes.PROVISION_SECONDS)
        _within(storm, _NODE_SECONDS, lambda: bool(storm.ground.engines(nodes.EITHER)))
    finally:
        provider.set_stock(True)
        _patch(storm, nodes.MODEL, {"scaling": {"minReplicas": 0}})
    found = sorted({p["spec"]["nodeName"] for p in storm.ground.engines(nodes.EITHER)})
    storm.say(f"stock_out: there are machines again; {nodes.EITHER} is on {', '.join(found) or 'no node'}")


def node_thinned(storm: Storm) -> None:
    """A Model that rests and one that works are set apart, each on a node of its own: the node of the one that rests is
    emptied, and goes."""
    provider = storm.ground.provider
    apart = _set_apart(storm)
    provider.note("fault", why="node_thinned", good=apart)
    if not apart:
        storm.say(f"node_thinned: {rests.WORKS} and {rests.RESTS} could not be set apart")
        return
    before = _on_their_nodes(storm)
    storm.say(f"node_thinned: {rests.WORKS} and {rests.RESTS} are on {' and '.join(sorted(before))}")
    last: tuple[str, datetime] | None = None

    def one_went() -> bool:
        nonlocal last
        now = _emptied(storm)
        if last is not None and now != last and last[0] in provider.nodes():
            provider.note("kept", last[0])
            storm.say(f"node_thinned: {last[0]} is in use again")
        if now is not None and now != last:
            node, since = now
            there = _there(storm, node)
            provider.note("emptying", node, there, at=since.timestamp())
            storm.say(f"node_thinned: {node} is being emptied, with {', '.join(there)}")
        last = now
        return not before <= set(provider.nodes())

    gone = _within(storm, _EMPTIED_SECONDS, one_went)
    storm.say(f"node_thinned: {'a node went' if gone else 'both nodes are still there'}")


NODES: Final[dict[str, Fault]] = {f.__name__: f for f in (nodes_wanted, spot_node_taken, spot_node_lost, stock_out)}
RESTS: Final[dict[str, Fault]] = {node_thinned.__name__: node_thinned}


def _set_apart(storm: Storm) -> bool:
    """Whether the replica of the Model that rests came to a node of its own: it went to zero, and somebody else had its
    GPU when it was to come again."""
    ground = storm.ground
    if not (there := ground.engines(rests.WORKS)):
        return False
    node = there[0]["spec"]["nodeName"]
    _patch(storm, rests.RESTS, {"scaling": {"minReplicas": 0}})
    try:
        if not _within(storm, _NODE_SECONDS, lambda: not _of_model(storm, rests.RESTS)):
            return False
        ground.apply(_holder(node))
        _patch(storm, rests.RESTS, {"scaling": {"minReplicas": 1}})
        return (
            _within(storm, _NODE_SECONDS, lambda: bool(ground.engines(rests.RESTS))) and len(_on_their_nodes(storm)) > 1
        )
    finally:
        _patch(storm, rests.RESTS, {"scaling": {"minReplicas": 1}})
        gone = ("--ignore-not-found", "--wait=false", "--force", "--grace-period=0")
        ground.kubectl("delete", "pod", _HOLDER, "-n", STORM, *gone)


def _on_their_nodes(storm: Storm) -> set[str]:
    """Nodes of the two Models."""
    return {p["spec"]["nodeName"] for name in (rests.WORKS, rests.RESTS) for p in storm.ground.engines(name)}


def _of_model(storm: Storm, model: str) -> list[dict[str, Any]]:
    """Engine pods that have not gone yet."""
    return storm.ground.get("pods", "-n", STORM, "-l", f"{names.LABEL_MODEL}={model}")


def _holder(node: str) -> dict[str, Any]:
    """Somebody else's pod that has a GPU. Nobody has its image, which changes nothing about the GPU."""
    container = {"name": "train", "image": "train:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {
        "nodeName": node,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [container],
    }
    metadata = {"name": _HOLDER, "namespace": STORM}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _emptied(storm: Storm) -> tuple[str, datetime] | None:
    """The node that Shoal empties, and when it was chosen."""
    shown = "{.status.consolidation.node} {.status.consolidation.since}"
    node, _, since = storm.ground.kubectl("get", "gpuclasses", nodes.CLASS, "-o", f"jsonpath={shown}").partition(" ")
    return (node, datetime.fromisoformat(since)) if node else None


def _node_to_take(storm: Storm, fault: str) -> str | None:
    """A node with a replica, which nobody else takes away any more. Waits for one."""
    found: list[str] = []

    def choose() -> bool:
        serving = {p["spec"]["nodeName"] for p in storm.ground.engines()}
        candidates = [name for name in storm.ground.provider.nodes() if name in serving]
        if candidates and storm.ground.provider.notice(node := storm.random.choice(candidates)):
            found.append(node)
        return bool(found)

    _within(storm, _NODE_SECONDS, choose)
    storm.ground.provider.note("fault", why=fault, good=bool(found))
    if not found:
        storm.say(f"{fault}: there is no node with a replica to take away")
    return found[0] if found else None


def _take_with_notice(storm: Storm, node: str, fault: str) -> None:
    provider = storm.ground.provider
    there = _there(storm, node)
    provider.note("noticed", node, there)
    storm.say(f"{fault}: notice for {node} with {', '.join(there)}")
    left = _notice(storm, node)
    since = time.time()
    provider.take(node, "notice", left)
    kills = [Kill("engine", pod, since, since + 60, fault) for pod in left]
    storm.say(f"{fault}: {node} is gone with {', '.join(left) or 'no replica'}", kills)


def _quotes(storm: Storm) -> list[tuple[str, str]]:
    """Models whose status quotes the autoscaler, with what it says."""
    found: list[tuple[str, str]] = []
    for model in storm.ground.get("models.shoal.dev", "-n", STORM):
        for condition in model.get("status", {}).get("conditions", ()):
            message = condition.get("message", "")
            if f"{REPORTER}: pod didn't trigger scale-up" in message:
                found.append((model["metadata"]["name"], message))
    return found


def _within(storm: Storm, seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it came true in that time, before the load ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not storm.over():
        with contextlib.suppress(click.ClickException, LabError):
            if condition():
                return True
        time.sleep(0.7)
    return False


def _again_and_again(storm: Storm, seconds: float, look: Callable[[], object]) -> None:
    """For so long, or until the load ends."""

    def looked() -> bool:
        look()
        return False

    _within(storm, seconds, looked)


# --- with the driver KEDA ---------------------------------------------------------------------------------------------


def keda_killed(storm: Storm) -> None:
    """SIGKILL to KEDA's operator; the kubelet starts another."""
    _kill_keda(storm, "keda-operator")


def keda_adapter_killed(storm: Storm) -> None:
    """SIGKILL to KEDA's metrics adapter: HPAs hear nothing until there is another."""
    _kill_keda(storm, "keda-metrics-apiserver")


def keda_away(storm: Storm) -> None:
    """KEDA's operator is away for a minute."""
    storm.say("keda_away")
    _scale_keda(storm, 0)
    try:
        storm.wait(_AWAY_SECONDS)
    finally:
        _scale_keda(storm, 1)
        storm.say("keda_away: it is back")


def scaled_object_deleted(storm: Storm) -> None:
    """Somebody deletes the ScaledObject of a Model that serves."""
    if found := _scaled_object(storm):
        storm.say(f"scaled_object_deleted: {found}")
        storm.ground.kubectl("delete", SCALED_OBJECTS, found, "-n", STORM, "--wait=false")


def scaled_object_edited(storm: Storm) -> None:
    """Somebody sets the bounds of a ScaledObject to nothing."""
    if found := _scaled_object(storm):
        storm.say(f"scaled_object_edited: {found}")
        body = orjson.dumps({"spec": {"minReplicaCount": 0, "maxReplicaCount": 1, "cooldownPeriod": 0}}).decode()
        storm.ground.kubectl("patch", SCALED_OBJECTS, found, "-n", STORM, "--type=merge", "-p", body)


def driver_switched(storm: Storm) -> None:
    """A Model goes from KEDA to the built-in driver and back."""
    model = storm.random.choice((STEADY, BURSTY))
    storm.say(f"driver_switched: {model} to BuiltIn")
    _patch(storm, model, {"scaling": {"driver": "BuiltIn"}})
    storm.wait(30)
    _patch(storm, model, {"scaling": {"driver": "KEDA"}})
    storm.say(f"driver_switched: {model} back to KEDA")


SCALED_OBJECTS: Final = "scaledobjects.keda.sh"
KEDA: Final[dict[str, Fault]] = {
    f.__name__: f
    for f in (
        keda_killed,
        keda_adapter_killed,
        keda_away,
        scaled_object_deleted,
        scaled_object_edited,
        driver_switched,
    )
}


# --- between two versions ---------------------------------------------------------------------------------------------


def upgraded(storm: Storm) -> None:
    """helm upgrade of a serving fleet, from the earlier version to this one; engines roll after it."""
    storm.say("upgraded: begins")
    storm.ground.install()
    storm.say("upgraded: operators, gateways and ledger are this version's")


def rolled_back(storm: Storm) -> None:
    """helm rollback to the revision before, with the kinds of this version left as they are."""
    storm.say("rolled_back: begins")
    storm.ground.helm("rollback", "shoal", "--namespace", NAMESPACE, "--wait")
    storm.say("rolled_back: operators, gateways and ledger are the earlier version's")


VERSIONS: Final[dict[str, Fault]] = {f.__name__: f for f in (upgraded, rolled_back)}
BETWEEN_VERSIONS: Final = (
    "upgraded",
    "operator_killed",
    "pod_deleted",
    "gateway_killed",
    "rolled_back",
    "pod_deleted",
    "engine_killed",
    "operator_killed",
)
"""In this order, unless others are asked for: what meets two versions side by side."""
EVERY: Final = ALL | ROUTES | SICK | NODES | RESTS | KEDA | VERSIONS


# --- inside -----------------------------------------------------------------------------------------------------------


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *_descendants(child))]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _nft(pid: int, rules: str) -> None:
    command = ["nsenter", "--target", str(pid), "--net", "nft", "-f", "-"]
    done = subprocess.run(command, input=rules, text=True, check=False, timeout=10, capture_output=True)
    if done.returncode:
        raise LabError(f"nft: {done.stderr.strip()}")


def _arm(storm: Storm, pod: str, fault: dict[str, Any] | None) -> None:
    """Through the engine's own port, with its admin key, from within its pod: others reach serving paths only. None:
    nothing is armed any more."""
    found = [p for p in storm.ground.engines() if p["metadata"]["name"] == pod]
    if not found:
        return
    volumes = found[0]["spec"]["volumes"]
    secret = next(v["secret"]["secretName"] for v in volumes if v["name"] == "engine-key")
    data = orjson.loads(storm.ground.kubectl("get", "secret", secret, "-n", STORM, "-o", "json"))["data"]
    key = yaml.safe_load(b64decode(data["engine.yaml"]))["admin-api-key"]
    url = f"http://127.0.0.1:{names.ENGINE_PORT}/sim/faults"
    # The key comes in by standard input: arguments are printed when a command fails.
    config = f'header = "Authorization: Bearer {key}"\nheader = "Content-Type: application/json"\n'
    pid = storm.ground.lab.first_process(f"{STORM}/{pod}:{names.CONTAINER_ENGINE}")
    command = ["nsenter", "--target", str(pid), "--net", "curl", "-fsS", "--max-time", "5", "-K", "-"]
    command += ["-X", "DELETE", url] if fault is None else ["-d", orjson.dumps(fault).decode(), url]
    done = subprocess.run(command, input=config, text=True, check=False, timeout=20, capture_output=True)
    if done.returncode:
        raise LabError(f"the fault was not armed: {done.stderr.strip()}")


def _leader(storm: Storm) -> str | None:
    lease = orjson.loads(storm.ground.kubectl("get", "lease", names.LEASE_NAME, "-n", NAMESPACE, "-o", "json"))
    return lease["spec"].get("holderIdentity") or None


def _patch(storm: Storm, model: str, spec: dict[str, Any]) -> None:
    body = orjson.dumps({"spec": spec}).decode()
    storm.ground.kubectl("patch", "models.shoal.dev", model, "-n", STORM, "--type=merge", "-p", body)


def _kill_keda(storm: Storm, deployment: str) -> None:
    pods = storm.ground.get("pods", "-n", keda.NAMESPACE, "-l", f"app={deployment}")
    for pod in (p["metadata"]["name"] for p in pods if p["status"].get("phase") == "Running"):
        storm.say(f"SIGKILL to {pod}")
        storm.ground.lab.signal_container(f"{keda.NAMESPACE}/{pod}", signal.SIGKILL)


def _scale_keda(storm: Storm, replicas: int) -> None:
    storm.ground.kubectl("scale", "deployment/keda-operator", "-n", keda.NAMESPACE, f"--replicas={replicas}")


def _scaled_object(storm: Storm) -> str | None:
    found = sorted(o["metadata"]["name"] for o in storm.ground.get(SCALED_OBJECTS, "-n", STORM))
    return storm.random.choice(found) if found else None


def _reachable(storm: Storm) -> None:
    """Waits for the API server, so that the next fault finds one."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with contextlib.suppress(LabError):
            storm.ground.lab.kubectl("get", "--raw", "/readyz", timeout=10)
            return
        time.sleep(1)
