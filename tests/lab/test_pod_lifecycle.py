"""The pod life cycle, as it was observed on a real kubelet: order, and lower bounds; never an upper bound in time.

All scenarios run side by side, once, and then one by one those that lay hands on the node; each test then reads its own
pod's timeline.
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Generator

import pytest

from shoal.manifests.pod import HAND_ON, SETTLE
from shoal_dev.lab import api
from tests.support.lab import make_lab
from tests.support.podlife import Cluster, Node, Timeline, drain

pytestmark = [pytest.mark.lab, pytest.mark.timeout(int(os.environ.get("SHOAL_LIFECYCLE_TIMEOUT", "1200")))]

Scenario = Callable[[Cluster, str], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}
ALONE: dict[str, Scenario] = {}
"""One after the other, when the others are over: they stop the node or its kubelet."""
FAILED: dict[str, BaseException] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__.replace("_", "-")] = function
    return function


def alone(function: Scenario) -> Scenario:
    ALONE[function.__name__.replace("_", "-")] = function
    return function


def node_of(lab: api.Lab, name: str) -> Node:
    def kill() -> None:
        lab.kill_node(name)

    def start() -> None:
        lab.start_node(name)

    return Node(name, lambda: lab.restart_kubelet(name), kill, start)


def cluster_of(lab: api.Lab, name: str, collector: str) -> Cluster:
    cluster = Cluster(str(lab.state.binaries / "kubectl"), lab.environment(), node_of(lab, name))
    cluster.collector_selector = {"kubernetes.io/hostname": collector}
    return cluster


@pytest.fixture(scope="module")
def timelines() -> Generator[dict[str, Timeline]]:
    if name := os.environ.get("SHOAL_LIFECYCLE_LAB"):
        given = api.Lab.get(name)
        yield asyncio.run(run_all(cluster_of(given, os.environ["SHOAL_LIFECYCLE_NODE"], "cpu-1")))
        return
    kubeconfig = os.environ.get("SHOAL_LIFECYCLE_KUBECONFIG")
    if kubeconfig:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            pytest.skip("no kubectl on PATH")
        yield asyncio.run(run_all(Cluster(kubectl, os.environ | {"KUBECONFIG": kubeconfig})))
        return
    lab = make_lab({"nodes": [{"name": "cpu-1"}, {"name": "cpu-2"}]}, faults=True)
    try:
        yield asyncio.run(run_all(cluster_of(lab, "cpu-2", "cpu-1")))
    finally:
        lab.down()


async def run_all(cluster: Cluster) -> dict[str, Timeline]:
    places = asyncio.Semaphore(int(os.environ.get("SHOAL_LIFECYCLE_PARALLEL", "100")))

    async def one(name: str, run: Scenario) -> None:
        try:
            async with places:
                await run(cluster, name)
        except Exception as error:
            FAILED[name] = error

    await cluster.start()
    try:
        names = list(SCENARIOS.items())
        chosen = os.environ.get("SHOAL_LIFECYCLE_ONLY", "").split()
        await asyncio.gather(*(one(name, run) for name, run in names if not chosen or name in chosen))
        for name, run in ALONE.items():
            if cluster.node is not None and (not chosen or name in chosen):
                await one(name, run)
        await asyncio.sleep(1)
    finally:
        await cluster.stop()
    return cluster.timelines


@pytest.fixture
def timeline(timelines: dict[str, Timeline], request: pytest.FixtureRequest) -> Timeline:
    """Of the scenario named as the test."""
    name = request.node.name.removeprefix("test_").replace("_", "-")
    if name in ALONE and name not in timelines and name not in FAILED:
        pytest.skip("the nodes of this cluster cannot be laid hands on")
    if name in FAILED:
        raise AssertionError(f"{FAILED[name]}\n{timelines.get(name)}") from FAILED[name]
    return timelines[name]


async def delete_when_ready(cluster: Cluster, pod: dict[str, object], *options: str) -> None:
    name = pod["metadata"]["name"]  # type: ignore[index]
    await cluster.create(pod)
    await cluster.until(lambda: cluster.ready(name), f"{name} Ready")
    await cluster.delete(name, *options)
    await cluster.gone(name)


def service(name: str) -> dict[str, object]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


# --- deletion: the hook ---------------------------------------------------------------------------------------------


HOOK_BEGAN_SECONDS = 8
"""After a deletion: a busy node hears of it late, and what happens during a hook must not happen before it. What
a container tells of itself is read only at the end, so it cannot be waited for. The hooks last 20 s or more."""


@scenario
async def hook_then_term(cluster: Cluster, name: str) -> None:
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(2)), grace=30))


def test_hook_then_term(timeline: Timeline) -> None:
    steps = [("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM"), ("engine", "exit")]
    timeline.in_order(*steps, ("agent", "SIGTERM"), ("api", "phase: Succeeded"), ("api", "DELETED"))
    assert "kube-lifecycle/" in str(timeline)
    timeline.never("event", "FailedPreStopHook")


def test_a_draining_pod_stays_ready(timelines: dict[str, Timeline]) -> None:
    timeline = timelines["hook-then-term"]
    end = timeline.at("engine", "exit")  # readiness is probed on, and the dead engine does not answer
    unready = [time for time in timeline.find("api", "Ready: False") if time > timeline.at("api", "Ready: True")]
    assert all(time >= end for time in unready), str(timeline)


def test_no_single_containers_end_is_reported(timelines: dict[str, Timeline]) -> None:
    timeline = timelines["hook-then-term"]
    ended = timeline.find("api", "engine: terminated")
    assert all(time >= timeline.at("api", "phase: Succeeded") for time in ended), str(timeline)


@scenario
async def hook_longer_than_grace(cluster: Cluster, name: str) -> None:
    slow_to_end = {"TERM_DELAY": 100}
    pod = cluster.pod(name, [cluster.agent(slow_to_end)], cluster.engine(slow_to_end, drain(60)), grace=8)
    await delete_when_ready(cluster, pod)


def test_hook_longer_than_grace(timeline: Timeline) -> None:
    begin = timeline.at("agent", "drain-begin")
    for container in ("engine", "agent"):
        assert timeline.at(container, "SIGTERM") - begin >= 6.5  # of 8: the hook's call may be heard late
    timeline.never("agent", "drain-end")
    timeline.never("engine", "exit")  # it died of SIGKILL, and had at least two seconds before
    assert timeline.at("api", "DELETED") - timeline.at("engine", "SIGTERM") >= 1.9
    gone = timeline.find("agent", "drain-client-gone")
    assert all(time >= timeline.at("engine", "SIGTERM") for time in gone), str(timeline)


@scenario
async def hook_with_headers(cluster: Cluster, name: str) -> None:
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(0, X_Token="abc"))))


def test_hook_with_headers(timeline: Timeline) -> None:
    timeline.in_order(("agent", "drain-begin"), ("engine", "SIGTERM"))
    assert "token=abc" in str(timeline)


@scenario
async def evicted(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(5)), grace=30))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.evict(name)
    await cluster.gone(name)


def test_evicted(timeline: Timeline) -> None:
    """An eviction is a deletion to the pod: hook, and all of its grace period."""
    steps = [("test", "evicts"), ("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM")]
    timeline.in_order(*steps, ("agent", "SIGTERM"), ("api", "DELETED"))


@scenario
async def hook_answers_500(cluster: Cluster, name: str) -> None:
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(1, 500))))


def test_hook_answers_500(timeline: Timeline) -> None:
    timeline.in_order(("agent", "drain-end"), ("engine", "SIGTERM"), ("agent", "SIGTERM"), ("api", "DELETED"))
    timeline.never("event", "FailedPreStopHook")


@scenario
async def hook_is_refused(cluster: Cluster, name: str) -> None:
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(1, port=9111))))


def test_hook_is_refused(timeline: Timeline) -> None:
    timeline.in_order(("engine", "SIGTERM"), ("engine", "exit"), ("agent", "SIGTERM"), ("api", "DELETED"))
    assert timeline.find("event", "FailedPreStopHook: PreStopHook failed"), str(timeline)


@scenario
async def hook_and_term_share_the_grace(cluster: Cluster, name: str) -> None:
    engine = cluster.engine({"TERM_DELAY": 100}, drain(8))
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], engine, grace=20))


def test_hook_and_term_share_the_grace(timeline: Timeline) -> None:
    begin, term = timeline.at("agent", "drain-begin"), timeline.at("engine", "SIGTERM")
    killed = timeline.at("agent", "SIGTERM")  # the sidecar's turn comes when the engine is dead
    assert killed - begin >= 18.5
    assert killed - term < 20, f"the hook's eight seconds must count:\n{timeline}"


@scenario
async def deleted_with_shorter_grace(cluster: Cluster, name: str) -> None:
    pod = cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(30)), grace=60)
    await delete_when_ready(cluster, pod, "--grace-period=6")


def test_deleted_with_shorter_grace(timeline: Timeline) -> None:
    assert timeline.at("engine", "SIGTERM") - timeline.at("agent", "drain-begin") >= 4.5
    timeline.never("agent", "drain-end")


@scenario
async def second_delete_does_not_cut_the_hook(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(20)), grace=60))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.delete(name)
    await asyncio.sleep(HOOK_BEGAN_SECONDS)
    await cluster.delete(name, "--grace-period=2")
    await cluster.gone(name)


def test_second_delete_does_not_cut_the_hook(timeline: Timeline) -> None:
    timeline.in_order(("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM"))


@scenario
async def sidecar_dies_during_the_hook(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(40)), grace=60))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.delete(name)
    await asyncio.sleep(HOOK_BEGAN_SECONDS)
    await cluster.tell(name, 9000, "/exit?code=1")
    await cluster.gone(name)


def test_sidecar_dies_during_the_hook(timeline: Timeline) -> None:
    timeline.in_order(("agent", "drain-begin"), ("agent", "exit code=1"), ("engine", "SIGTERM"))
    assert len(timeline.find("agent", "start")) == 1, "a terminating pod restarts nothing"
    assert timeline.find("event", "FailedPreStopHook"), str(timeline)


@scenario
async def engine_dies_during_its_hook(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(20)), grace=60))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.delete(name)
    await asyncio.sleep(HOOK_BEGAN_SECONDS)
    await cluster.tell(name, 8000, "/exit?code=1")
    await cluster.gone(name)


def test_engine_dies_during_its_hook(timeline: Timeline) -> None:
    timeline.in_order(("engine", "exit code=1"), ("agent", "drain-end"), ("agent", "SIGTERM"), ("api", "phase: Failed"))


@scenario
async def sleep_hook(cluster: Cluster, name: str) -> None:
    engine = cluster.engine(hook={"sleep": {"seconds": 6}})
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], engine))


def test_sleep_hook(timeline: Timeline) -> None:
    assert timeline.at("engine", "SIGTERM") - timeline.at("test", "deletes") >= 5.9


@scenario
async def exec_hook(cluster: Cluster, name: str) -> None:
    tell = "import urllib.request as u; u.urlopen('http://127.0.0.1:9000/drain?delay=1')"
    engine = cluster.engine(hook={"exec": {"command": ["python3", "-c", tell]}})
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent()], engine, grace=30))


def test_exec_hook(timeline: Timeline) -> None:
    timeline.in_order(("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM"))


@scenario
async def forced(cluster: Cluster, name: str) -> None:
    pod = cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(20)))
    await delete_when_ready(cluster, pod, "--grace-period=0", "--force")
    await asyncio.sleep(4)


def test_forced(timeline: Timeline) -> None:
    """The object is gone at once; the processes still get their hook and SIGTERM."""
    timeline.in_order(("agent", "drain-begin"), ("engine", "SIGTERM"))
    timeline.at("api", "DELETED")
    timeline.never("agent", "drain-end")


# --- deletion: sidecars ---------------------------------------------------------------------------------------------


@scenario
async def sidecar_with_hook(cluster: Cluster, name: str) -> None:
    agent = cluster.agent(lifecycle={"preStop": drain(1)})
    await delete_when_ready(cluster, cluster.pod(name, [agent], cluster.engine({"TERM_DELAY": 3})))


def test_sidecar_with_hook(timeline: Timeline) -> None:
    """Its hook begins at once, its SIGTERM waits for the engine."""
    timeline.in_order(("agent", "drain-begin"), ("engine", "exit"), ("agent", "SIGTERM"))


@scenario
async def sidecar_hook_is_longer(cluster: Cluster, name: str) -> None:
    agent = cluster.agent(lifecycle={"preStop": drain(10)})
    await delete_when_ready(cluster, cluster.pod(name, [agent], cluster.engine({"TERM_DELAY": 1}), grace=40))


def test_sidecar_hook_is_longer(timeline: Timeline) -> None:
    timeline.in_order(("engine", "exit"), ("agent", "drain-end"), ("agent", "SIGTERM"))


@scenario
async def sidecars_end_in_reverse(cluster: Cluster, name: str) -> None:
    agents = [cluster.sidecar(f"s{number}", 9000 + number, {"TERM_DELAY": 1}) for number in (1, 2)]
    await delete_when_ready(cluster, cluster.pod(name, agents, cluster.engine({"TERM_DELAY": 1}), grace=30))


def test_sidecars_end_in_reverse(timeline: Timeline) -> None:
    timeline.in_order(("engine", "exit"), ("s2", "SIGTERM"), ("s2", "exit"), ("s1", "SIGTERM"), ("s1", "exit"))


@scenario
async def engine_uses_up_the_grace(cluster: Cluster, name: str) -> None:
    pod = cluster.pod(name, [cluster.agent({"TERM_DELAY": 100})], cluster.engine({"TERM_DELAY": 100}), grace=8)
    await delete_when_ready(cluster, pod)


def test_engine_uses_up_the_grace(timeline: Timeline) -> None:
    """The sidecar has its two seconds nevertheless."""
    assert timeline.at("agent", "SIGTERM") - timeline.at("engine", "SIGTERM") >= 6.5
    assert timeline.at("api", "DELETED") - timeline.at("agent", "SIGTERM") >= 1.9
    timeline.never("agent", "exit")


# --- readiness and slices -------------------------------------------------------------------------------------------


@scenario
async def slice_while_draining(cluster: Cluster, name: str) -> None:
    await cluster.create(service(name))
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(20)), grace=60))
    await cluster.until(lambda: cluster.timelines[name].find("slice", "ready=1"), "endpoint ready")
    await cluster.delete(name)
    await asyncio.sleep(HOOK_BEGAN_SECONDS)
    await cluster.tell(name, 8000, "/set?ready=0")
    await cluster.gone(name)
    await asyncio.sleep(1)


def test_slice_while_draining(timeline: Timeline) -> None:
    draining, unready = "ready=0 serving=1 terminating=1", "ready=0 serving=0 terminating=1"
    # readiness is probed during termination too
    timeline.in_order(("slice", draining), ("engine", "set ready=False"), ("slice", unready), ("agent", "drain-end"))
    removed = [time for time in timeline.find("slice", "none") if time > timeline.at("slice", unready)]
    assert removed, f"the endpoint must go:\n{timeline}"
    assert removed[0] >= timeline.at("engine", "exit")


LIVE = {
    # The delay: on a busy machine the process may need more than two probes until it listens.
    **{"httpGet": {"port": 8000, "path": "/ready"}, "initialDelaySeconds": 15},
    **{"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 2},
}


@scenario
async def liveness_stops_at_deletion(cluster: Cluster, name: str) -> None:
    engine = cluster.engine(hook=drain(20), livenessProbe=LIVE)
    await cluster.create(cluster.pod(name, [cluster.agent()], engine, grace=60))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.delete(name)
    await cluster.until(lambda: "deletionTimestamp" in cluster.pods[name]["metadata"], "deletion")
    await cluster.tell(name, 8000, "/set?ready=0")
    await cluster.gone(name)


def test_liveness_stops_at_deletion(timeline: Timeline) -> None:
    timeline.in_order(("engine", "set ready=False"), ("agent", "drain-end"), ("engine", "SIGTERM"))
    assert len(timeline.find("engine", "SIGTERM")) == 1


@scenario
async def deletion_during_a_liveness_restart(cluster: Cluster, name: str) -> None:
    engine = cluster.engine(hook=drain(10), livenessProbe=LIVE)
    await cluster.create(cluster.pod(name, [cluster.agent()], engine, grace=80))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.tell(name, 8000, "/set?ready=0")
    killing = "Killing: Container engine failed liveness probe, will be restarted"
    await cluster.until(lambda: cluster.timelines[name].find("event", killing), "the liveness kill")
    await cluster.delete(name)
    await cluster.gone(name)


def test_deletion_during_a_liveness_restart(timeline: Timeline) -> None:
    """The restart is finished first, and then the new engine is ended, with a hook call of its own."""
    stop = [("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM"), ("engine", "exit")]
    moments = [timeline.at(*step, nth) for nth in (0, 1) for step in stop]
    assert moments == sorted(moments), str(timeline)
    assert timeline.at("test", "deletes") < moments[1], "the first hook was still running"
    assert len(timeline.find("engine", "start")) == len(timeline.find("agent", "drain-begin")) == 2
    timeline.in_order(("test", "deletes"), ("agent", "SIGTERM"), ("api", "DELETED"))
    assert timeline.at("agent", "SIGTERM") >= moments[-1]
    assert len(timeline.find("agent", "start")) == 1, "the sidecar is kept"


# --- start and restart ----------------------------------------------------------------------------------------------


@scenario
async def startup_probe_holds_the_engine(cluster: Cluster, name: str) -> None:
    await delete_when_ready(cluster, cluster.pod(name, [cluster.agent({"LISTEN_AFTER": 3})], cluster.engine()))


def test_startup_probe_holds_the_engine(timeline: Timeline) -> None:
    timeline.in_order(("agent", "start"), ("agent", "listen"), ("engine", "start"), ("api", "Ready: True"))
    assert timeline.at("engine", "start") - timeline.at("agent", "start") >= 3


@scenario
async def readiness_does_not_hold_the_engine(cluster: Cluster, name: str) -> None:
    agent = cluster.agent(
        {"READY": 0}, readinessProbe={"httpGet": {"port": 9000, "path": "/ready"}, "periodSeconds": 1}
    )
    await cluster.create(cluster.pod(name, [agent], cluster.engine(), grace=3))
    await cluster.until(lambda: cluster.status(name, "engine")["ready"], "engine ready")
    assert not cluster.ready(name)
    await cluster.tell(name, 9000, "/set?ready=1")
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.delete(name)
    await cluster.gone(name)


def test_readiness_does_not_hold_the_engine(timeline: Timeline) -> None:
    timeline.in_order(("engine", "start"), ("agent", "set ready=True"), ("api", "Ready: True"))


@scenario
async def sidecar_crash(cluster: Cluster, name: str) -> None:
    await cluster.create(service(name))
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(), grace=3))
    await cluster.until(lambda: cluster.timelines[name].find("slice", "ready=1"), "endpoint ready")
    await cluster.tell(name, 9000, "/exit?code=1")
    await cluster.until(lambda: cluster.status(name, "agent")["restartCount"] == 1 and cluster.ready(name), "again")
    await cluster.delete(name)
    await cluster.gone(name)


def test_sidecar_crash(timeline: Timeline) -> None:
    crash = timeline.at("agent", "exit code=1")
    assert len(timeline.find("engine", "start")) == 1, "the engine is untouched"
    assert [time for time in timeline.find("api", "Ready: False") if time > crash], str(timeline)
    assert [time for time in timeline.find("slice", "ready=0") if time > crash], str(timeline)


@scenario
async def engine_crash_backs_off(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(1)), grace=3))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.tell(name, 8000, "/exit?code=3")
    await cluster.until(lambda: cluster.status(name, "engine")["restartCount"] == 1 and cluster.ready(name), "again")
    await cluster.tell(name, 8000, "/exit?code=3")
    await cluster.until(lambda: cluster.status(name, "engine")["restartCount"] == 2 and cluster.ready(name), "again")
    last = cluster.status(name, "engine")["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (3, "Error")
    await cluster.delete(name)
    await cluster.gone(name)


def test_engine_crash_backs_off(timeline: Timeline) -> None:
    timeline.at("api", "engine: waiting CrashLoopBackOff  back-off 10s restarting failed container=engine")
    assert timeline.at("engine", "start", 2) - timeline.at("engine", "exit code=3", 1) >= 9.9
    assert len(timeline.find("agent", "start")) == 1, "the sidecar is kept"
    assert len(timeline.find("agent", "drain-begin")) == 1, "no hook for an exit of its own, one for the deletion"


@scenario
async def liveness_failure(cluster: Cluster, name: str) -> None:
    await cluster.create(
        cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(1), livenessProbe=LIVE), grace=30)
    )
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.tell(name, 8000, "/set?ready=0")
    await cluster.until(lambda: cluster.status(name, "engine")["restartCount"] == 1 and cluster.ready(name), "again")
    await cluster.delete(name)
    await cluster.gone(name)


def test_liveness_failure(timeline: Timeline) -> None:
    steps = [("engine", "set ready=False"), ("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM")]
    timeline.in_order(*steps, ("engine", "exit"))
    assert len(timeline.find("agent", "start")) == 1, "the sidecar is kept"
    assert timeline.find("event", "Killing: Container engine failed liveness probe, will be restarted")
    assert timeline.find("event", "Unhealthy: Liveness probe failed: HTTP probe failed with statuscode: 503")


@scenario
async def never_started_engine(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent({"LISTEN_AFTER": 100})], cluster.engine(hook=drain(20))))
    await cluster.until(lambda: cluster.status(name, "agent")["state"].get("running"), "agent runs")
    await asyncio.sleep(5)  # an interpreter that still starts ignores SIGTERM
    await cluster.delete(name)
    await cluster.gone(name)


def test_never_started_engine(timeline: Timeline) -> None:
    timeline.in_order(("agent", "start"), ("agent", "SIGTERM"), ("api", "DELETED"))
    timeline.never("engine", "start")
    timeline.never("agent", "drain-begin")


@scenario
async def policy_never(cluster: Cluster, name: str) -> None:
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(), grace=5, restartPolicy="Never"))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.tell(name, 8000, "/exit?code=3")
    await cluster.until(lambda: cluster.pods[name]["status"]["phase"] == "Failed", "Failed")


def test_policy_never(timeline: Timeline) -> None:
    timeline.in_order(("engine", "exit code=3"), ("agent", "SIGTERM"), ("api", "phase: Failed"))
    timeline.never("api", "DELETED")


@scenario
async def init_containers_run_in_order(cluster: Cluster, name: str) -> None:
    write = "import os; n = '/shared/tries'; k = os.path.exists(n); open(n, 'w'); raise SystemExit(0 if k else 4)"
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    flaky = {"name": "flaky", "image": cluster.image, "command": ["python3", "-c", write], "volumeMounts": mounts}
    pod = cluster.pod(name, [cluster.agent(), flaky], cluster.engine(), volumes=[{"name": "shared", "emptyDir": {}}])
    await cluster.create(pod)
    await cluster.until(lambda: cluster.ready(name), "Ready")
    assert cluster.status(name, "flaky")["restartCount"] == 1
    assert cluster.status(name, "flaky")["state"]["terminated"]["reason"] == "Completed"
    before = cluster.status(name, "flaky")["lastState"]["terminated"]  # a watch may miss it: the restart comes at once
    assert (before["reason"], before["exitCode"]) == ("Error", 4)
    await cluster.delete(name)
    await cluster.gone(name)


def test_init_containers_run_in_order(timeline: Timeline) -> None:
    timeline.in_order(("agent", "listen"), ("engine", "start"))


@scenario
async def local_volume(cluster: Cluster, name: str) -> None:
    """As the node cache's: who fills it writes by a hostPath, and engines see it through a read-only `local` volume."""
    folder, volume, mounts = f"/run/{cluster.namespace}", cluster.namespace, [{"name": "weights", "mountPath": "/data"}]
    fill = "import pathlib; pathlib.Path('/data/weights').write_text('whole')"
    writer = {"name": "fill", "image": cluster.image, "command": ["python3", "-c", fill], "volumeMounts": mounts}
    path = {"name": "weights", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    as_root = writer | {"securityContext": {"runAsUser": 0}}
    await cluster.create(cluster.pod(f"{name}-writer", [as_root], cluster.engine(), grace=1, volumes=[path]))
    await cluster.until(lambda: cluster.ready(f"{name}-writer"), "Ready")
    where = {"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.node_of(f"{name}-writer")]}
    shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    spec = shared | {
        "capacity": {"storage": "1Gi"},
        "mountOptions": ["ro"],
        "local": {"path": folder},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [where]}]}},
    }
    claim = shared | {"volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
    await cluster.create(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights"}, "spec": claim},
    )
    try:
        look = (
            "import errno, pathlib\n"
            "assert pathlib.Path('/data/weights').read_text() == 'whole'\n"
            "try: pathlib.Path('/data/mine').touch()\n"
            "except OSError as error: raise SystemExit(0 if error.errno == errno.EROFS else 3)\n"
            "raise SystemExit(4)"
        )
        reader = {"name": "look", "image": cluster.image, "command": ["python3", "-c", look], "volumeMounts": mounts}
        volumes = [{"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}]
        # Twice: what lies there outlives the pods that read it, and their end takes nothing along.
        for number in (1, 2):
            one = f"{name}-{number}"
            as_user = reader | {"securityContext": {"runAsUser": 65532}}
            pod = cluster.pod(one, [as_user], cluster.engine(), grace=1, volumes=volumes, restartPolicy="Never")
            await cluster.create(pod)
            await cluster.until(lambda one=one: cluster.ready(one), "Ready")
            cluster.timelines.setdefault(name, Timeline()).add("test", f"read {number}")
            await cluster.delete(one)
            await cluster.gone(one)
    finally:
        await cluster.kubectl("delete", "persistentvolume", volume, "--wait=false", check=False)


def test_local_volume(timeline: Timeline) -> None:
    timeline.in_order(("test", "read 1"), ("test", "read 2"))


@scenario
async def deleted_while_it_starts(cluster: Cluster, name: str) -> None:
    """The kubelet then stops containers in the first milliseconds of their lives. Started as an engine pod's are."""
    await asyncio.gather(*(_deleted_so_soon(cluster, f"{name}-{tenths}", tenths / 10) for tenths in range(0, 20, 3)))
    cluster.timelines.setdefault(name, Timeline()).add("test", "all gone")


async def _deleted_so_soon(cluster: Cluster, name: str, seconds: float) -> None:
    agent, engine = cluster.agent(lifecycle={"preStop": SETTLE}), cluster.engine(hook=drain(1))
    for container in (agent, engine):
        container["command"] = ["sh", "-c", HAND_ON, container["name"], *container["command"]]
    await cluster.create(cluster.pod(name, [agent], engine, grace=600))
    await cluster.until(lambda: cluster.pods[name]["spec"]["nodeName"], "a node")
    await asyncio.sleep(seconds)
    await cluster.delete(name)
    await cluster.gone(name)  # waits less than the grace period


def test_deleted_while_it_starts(timeline: Timeline) -> None:
    timeline.at("test", "all gone")


# --- the node -------------------------------------------------------------------------------------------------------


@alone
async def kubelet_restart_while_serving(cluster: Cluster, name: str) -> None:
    assert cluster.node is not None
    engine = cluster.engine(hook=drain(1), livenessProbe=LIVE)
    await cluster.create(cluster.pod(name, [cluster.agent()], engine, grace=20))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await asyncio.to_thread(cluster.node.restart_kubelet)
    cluster.timelines[name].add("test", "kubelet restarted")
    await asyncio.sleep(8)
    await cluster.until(lambda: cluster.ready(name), "Ready still, or again")
    await cluster.tell(name, 8000, "/set?ready=0")  # the new kubelet probes
    await cluster.until(
        lambda: cluster.status(name, "engine")["restartCount"] == 1 and cluster.ready(name), "a restart"
    )
    await cluster.delete(name)
    await cluster.gone(name)


def test_kubelet_restart_while_serving(timeline: Timeline) -> None:
    """Containers run on, and no hook is called; the new kubelet probes them."""
    restarted, unready = timeline.at("test", "kubelet restarted"), timeline.at("engine", "set ready=False")
    assert not [time for time in timeline.find("agent", "drain-begin") if restarted <= time <= unready], str(timeline)
    assert len(timeline.find("agent", "start")) == 1, "the sidecar is kept"
    assert len(timeline.find("engine", "start")) == 2, "started again by the failed probe alone"
    timeline.in_order(("engine", "set ready=False"), ("agent", "drain-begin"), ("engine", "SIGTERM"))


@alone
async def kubelet_restart_during_the_hook(cluster: Cluster, name: str) -> None:
    assert cluster.node is not None
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(120)), grace=25))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    await cluster.delete(name)
    await asyncio.sleep(HOOK_BEGAN_SECONDS)
    await asyncio.to_thread(cluster.node.restart_kubelet)
    await cluster.gone(name)


def test_kubelet_restart_during_the_hook(timeline: Timeline) -> None:
    """The hook's connection breaks, and no SIGTERM follows: it is called again, with all of the grace period."""
    first, second = timeline.at("agent", "drain-begin"), timeline.at("agent", "drain-begin", 1)
    assert first < timeline.at("agent", "drain-client-gone") <= second
    assert timeline.at("engine", "SIGTERM") - second >= 23, str(timeline)
    timeline.never("agent", "drain-end")


@alone
async def drained_node(cluster: Cluster, name: str) -> None:
    assert cluster.node is not None
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(5)), grace=30))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    selector = f"--pod-selector=app={name}"
    try:
        # A pod without an owner is only taken by force; its grace period is its own all the same.
        await cluster.kubectl("drain", cluster.node.name, selector, "--force", "--timeout=60s")
        cluster.timelines[name].add("test", "node drained")
    finally:
        await cluster.kubectl("uncordon", cluster.node.name)
    await cluster.gone(name)


def test_drained_node(timeline: Timeline) -> None:
    """`kubectl drain` returns when the hook is over and the pod is gone."""
    steps = [("agent", "drain-begin"), ("agent", "drain-end"), ("engine", "SIGTERM"), ("agent", "SIGTERM")]
    timeline.in_order(*steps, ("test", "node drained"))


@alone
async def node_that_loses_power(cluster: Cluster, name: str) -> None:
    assert cluster.node is not None
    await cluster.create(cluster.pod(name, [cluster.agent()], cluster.engine(hook=drain(30)), grace=20))
    await cluster.until(lambda: cluster.ready(name), "Ready")
    cluster.timelines[name].add("test", "power off")
    await asyncio.to_thread(cluster.node.kill)
    await cluster.until(lambda: not cluster.ready(name), "the pod found unready")
    await asyncio.to_thread(cluster.node.start)
    await cluster.until(
        lambda: (
            (name not in cluster.pods) or (cluster.status(name, "engine")["restartCount"] >= 1 and cluster.ready(name))
        ),
        "the pod's second life, or its end by eviction",
        seconds=120,
    )
    if name in cluster.pods:
        await cluster.delete(name, "--grace-period=2")
    await cluster.gone(name)


def test_node_that_loses_power(timeline: Timeline) -> None:
    """Nobody is told: no hook, no SIGTERM. The control plane finds out."""
    off = timeline.at("test", "power off")
    unready = [time for time in timeline.find("api", "Ready: False") if time > off]
    assert unready, str(timeline)
    for what in ("drain-begin", "SIGTERM"):
        assert not [time for time in timeline.find("agent", what) if off <= time <= unready[0]], str(timeline)
