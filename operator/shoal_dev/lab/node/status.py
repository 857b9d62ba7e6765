"""What the node reports of a pod: pure functions from what is known of its containers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from shoal_dev.lab.node import fields

Json = dict[str, Any]
Kind = Literal["init", "sidecar", "main"]


def timestamp() -> str:
    """Now, as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class ContainerRecord:
    """What is known of one container; the pod's status is made of these."""

    name: str
    image: str
    kind: Kind
    state: Json
    last: Json = field(default_factory=dict[str, Any])
    restarts: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""

    @property
    def terminated(self) -> Json | None:
        return self.state.get("terminated")

    @property
    def running(self) -> bool:
        return "running" in self.state

    def status(self) -> Json:
        """As in `status.containerStatuses`."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"process://{self.image}" if self.container_id else "",
            "containerID": self.container_id,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }


def terminated(code: int, started: str, container_id: str, message: str = "", reason: str = "") -> Json:
    """The `terminated` part of a container state."""
    state: Json = {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "startedAt": started,
        "finishedAt": timestamp(),
        "containerID": container_id,
    }
    if code > 128 and not reason:
        state["signal"] = code - 128
    return state | ({"message": message} if message else {})


def phase(records: Sequence[ContainerRecord], policy: str, terminating: bool) -> str:
    """Pending, Running, Succeeded or Failed. `policy` is the pod's restartPolicy."""
    mains = [record for record in records if record.kind == "main"]
    ends = [record.terminated for record in mains]
    init_failed = policy == "Never" and any(
        record.kind == "init" and record.terminated and record.terminated["exitCode"] != 0 for record in records
    )
    if init_failed and not any(record.running for record in records):
        return "Failed"
    codes = [end["exitCode"] for end in ends if end is not None]
    if len(codes) == len(mains):
        for_good = terminating or policy == "Never" or (policy == "OnFailure" and not any(codes))
        if for_good and not any(record.running for record in records):
            return "Failed" if any(codes) else "Succeeded"
        return "Running"
    if any(record.running or record.terminated or record.restarts or record.last for record in mains):
        return "Running"
    return "Pending"


def conditions(records: Sequence[ContainerRecord], current: str, sandbox: bool, previous: Sequence[Json]) -> list[Json]:
    """The pod's conditions; a transition time changes only with the value."""
    inits = [record for record in records if record.kind != "main"]
    initialized = all(record.started if record.kind == "sidecar" else record.ready for record in inits)
    # once the mains have run, a restarting sidecar does not take "Initialized" back
    initialized = initialized or any(r.running or r.terminated or r.last for r in records if r.kind == "main")
    unready = [record.name for record in records if record.kind != "init" and not record.ready]
    ready = not unready and current == "Running"
    why: Json = {}
    if current in ("Succeeded", "Failed"):
        why = {"reason": "PodCompleted" if current == "Succeeded" else "PodFailed"}
    elif unready:
        names = " ".join(unready)
        why = {"reason": "ContainersNotReady", "message": f"containers with unready status: [{names}]"}
    values: list[tuple[str, bool, Json]] = [
        ("PodReadyToStartContainers", sandbox, {}),
        ("PodScheduled", True, {}),
        ("Initialized", initialized, {} if initialized else {"reason": "ContainersNotInitialized"}),
        ("ContainersReady", ready, why),
        ("Ready", ready, why),
    ]
    before = {condition["type"]: condition for condition in previous}
    result: list[Json] = []
    for kind, value, reason in values:
        word = "True" if value else "False"
        old = before.get(kind)
        since = old["lastTransitionTime"] if old and old["status"] == word else timestamp()
        # explicit null: a strategic merge patch would keep an old reason
        result.append(
            {"type": kind, "status": word, "lastTransitionTime": since, "reason": None, "message": None} | reason
        )
    return result


def readiness(pod_status: Json) -> str | None:
    """The value of the pod's Ready condition; None before there is one."""
    return next((c["status"] for c in fields.items(pod_status, "conditions") if c["type"] == "Ready"), None)


def disruption(message: str) -> Json:
    """The condition by which a Job tells an eviction by the node from a failure of the program."""
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "message": message,
        "lastTransitionTime": timestamp(),
    }
