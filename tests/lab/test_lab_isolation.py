"""Nothing of a lab is left behind, and labs do not meet."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from shoal_dev.lab import api
from shoal_dev.lab.state import start_time
from tests.support.lab import apply, eventually, get, make_lab

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]

_ONE_NODE = {"nodes": [{"name": "only"}]}


def _traces(name: str) -> list[str]:
    """Processes, mounts and files on this machine that mention the lab."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"/{name}/" in command and int(process.name) != os.getpid():
            found.append(command)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"/{name}/" in line]
    return found


def _sleeper(name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "shoal", "command": ["sleep", "31415"]}],
        },
    }


_SLEEPER = orjson.dumps(_sleeper("after")).decode()


def test_two_labs_side_by_side_do_not_meet(lab: api.Lab) -> None:
    other = make_lab(_ONE_NODE)
    try:
        apply(other, _sleeper("here"))
        eventually(lambda: get(other, "pod", "here", "-n", "default")["status"]["phase"] == "Running", "the pod")
        assert [p["metadata"]["name"] for p in get(lab, "pods", "-n", "default")["items"]] == []
        assert other.state.api_port != lab.state.api_port
        # The same address is another API server in each of them.
        assert "here" in other.exec("kubectl", "get", "pods", "--server=https://10.200.0.1:6443")
        assert "here" not in lab.exec("kubectl", "get", "pods", "--server=https://10.200.0.1:6443")
        one, two = (os.readlink(f"/proc/{each.state.pid}/ns/net") for each in (lab, other))
        assert len({one, two, os.readlink("/proc/self/ns/net")}) == 3
    finally:
        other.down()
    assert [n["metadata"]["name"] for n in get(lab, "nodes")["items"]] == ["cpu-1", "l4-1", "l4-2"]


@pytest.mark.parametrize("how", ["supervisor killed", "down"])
def test_nothing_stays_behind(how: str) -> None:
    made = make_lab(_ONE_NODE)
    name, paths = made.state.name, made.paths
    try:
        apply(made, _sleeper("s"))
        eventually(lambda: get(made, "pod", "s", "-n", "default")["status"]["phase"] == "Running", "the pod")
        assert _traces(name), "the check itself must see a running lab"
        if how == "supervisor killed":
            os.kill(made.state.pid, signal.SIGKILL)
            eventually(lambda: start_time(made.state.pid) is None, "the supervisor's end")
            assert not _traces(name)
            with pytest.raises(api.LabError, match="has ended by itself or was killed"):
                api.Lab.get(name)
    finally:
        made.down()
    assert start_time(made.state.pid) is None
    assert not _traces(name)
    assert not paths.state.exists()
    assert not paths.run.exists()
    assert api.down(name) is False


def test_status_tells_of_a_component_that_died_and_up_refuses_to_pretend() -> None:
    made = make_lab(_ONE_NODE)
    try:
        scheduler = next(p for p in made.status().processes if p.name == "kube-scheduler")
        made.exec("kill", "-9", str(scheduler.pid))
        dead = eventually(lambda: made.status().dead(), "the report of its death")
        assert [(p.name, p.exit_code) for p in dead] == [("kube-scheduler", 137)]
        with pytest.raises(api.LabError, match="but kube-scheduler ended: `shoal lab down` removes it"):
            made._must_be(made.state.fleet_digest)
    finally:
        made.down()


def test_api_server_can_be_killed_and_started_again_and_the_cluster_goes_on() -> None:
    made = make_lab(_ONE_NODE)
    try:
        made.kill("kube-apiserver")
        status = made.status()
        assert not status.dead(), "what the user killed has not died by itself"
        assert [p.name for p in status.processes if not p.running] == ["kube-apiserver"]
        with pytest.raises(api.LabError):
            made.kubectl("get", "namespaces", "--request-timeout=3s")
        made.start("kube-apiserver")
        eventually(lambda: made.kubectl("get", "namespaces"), "the API server's return")
        # Scheduler, node and controllers find back by themselves, within client-go's back-off of up to 30 s each.
        eventually(lambda: not made.kubectl("apply", "-f", "-", stdin=_SLEEPER) or True, "a pod's acceptance", 90)
        eventually(lambda: get(made, "pod", "after", "-n", "default")["status"]["phase"] == "Running", "the pod", 150)
    finally:
        made.down()


def test_node_switch(lab: api.Lab) -> None:
    def ready() -> str:
        conditions = get(lab, "node", "l4-2")["status"]["conditions"]
        return next(c["status"] for c in conditions if c["type"] == "Ready")

    lab.kill_node("l4-2")
    try:
        with pytest.raises(api.LabError, match="node-l4-2 does not run"):
            lab.kill_node("l4-2")
        eventually(lambda: ready() == "Unknown", "NotReady of a node that is off", 120)
    finally:
        lab.start_node("l4-2")
    eventually(lambda: ready() == "True", "Ready again", 120)
    with pytest.raises(api.LabError, match="no process 'node-none' in this lab; there are: etcd, "):
        lab.kill_node("none")


def test_needs_root_and_says_so_at_once() -> None:
    program = "from shoal_dev.lab.cli import command; command(['up'])"
    # The interpreter's own folder may be closed to others, so the uid changes after Python has started.
    done = subprocess.run(
        [sys.executable, "-c", f"import shoal_dev.lab.cli, os; os.setgid(65534); os.setuid(65534); {program}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Error: the lab needs root: it makes network namespaces and mounts" in done.stderr
    assert "Traceback" not in done.stderr
