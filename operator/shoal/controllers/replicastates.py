"""What runs of a Model, as the planner reads it: Deployments, their pods, and what is promised to it."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.controllers.reservations import Reservations
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.health import Unit, signals
from shoal.core.placement import Held, ReplicaState
from shoal.core.placement.types import BROKEN
from shoal.core.podquota import CLAIM_SECONDS, refusal
from shoal.core.status.healthstatus import out_of_use


def place(world: World, pod: facts.Pod) -> str | None:
    """Where the planner sees the pod."""
    return f"{pod.node}{BROKEN}" if pod.node and is_sick(world, pod) else pod.node


def is_sick(world: World, pod: facts.Pod) -> bool:
    """Whether a replica holds a GPU that its kubelet calls unhealthy, or that is out of use. One on a node that is out
    of use as a whole is on no node of its class already.

    A device plugin offers what it calls unhealthy to nobody else, so the replica goes at the kubelet's word. A driver's
    device is left out of claims only once the class has it out of use: a replica that went before took the signal
    along, and the next one was given the same device. Where a kubelet does not say which claimed device it means,
    nothing can be taken out of use, so its word alone counts there too.
    """
    claimed = claimed_devices(world, pod) if pod.broken_device else frozenset[str]()
    if pod.broken_device and (not claimed or signals.is_unnamed(pod, claimed)):
        return True
    custom = world.classes.get(pod.gpu_class or "")
    if custom is None or custom.object is None or pod.node is None:
        return False
    out = out_of_use(custom.object)
    return bool(out) and any(Unit(pod.node, device) in out for device in held_devices(world, pod))


def claimed_devices(world: World, pod: facts.Pod) -> frozenset[str]:
    """The devices in a pod's claims, as `driver/pool/device`."""
    return frozenset(str(device) for claim in world.resource_claims.by("pod", pod.uid) for device in claim.devices)


def held_devices(world: World, pod: facts.Pod) -> frozenset[str]:
    """Names of the devices that a pod holds, as its claims say; without claims, as its kubelet does. A kubelet has
    other names for devices that are claimed."""
    return claimed_devices(world, pod) or frozenset(device.id for device in pod.devices)


def observe(world: World, model_uid: str, reservations: Reservations) -> dict[str, ReplicaState]:
    """Class -> what runs there, is being applied, or is promised to the Model."""
    pods: dict[str, list[facts.Pod]] = {}
    for pod in world.pods.by("model", model_uid):
        if pod.gpu_class and not pod.finished:
            pods.setdefault(pod.gpu_class, []).append(pod)
    found = {
        d.gpu_class: _replica_state(world, d, pods.pop(d.gpu_class, []))
        for c in world.deployments_of(model_uid)
        if (d := c.deployment) is not None and not d.deleting
    }
    for name, left in pods.items():
        # Their Deployment is deleted, so these pods will be deleted too, and hold their GPUs until the garbage
        # collector deletes them. Counted as replicas they would recreate the Deployment, again and again.
        going = {node: Held(0, 0, held.pods + held.terminating) for node, held in _on(world, left).items()}
        found[name] = ReplicaState(0, max(_gpus(p) for p in left), going, pods=0)
    # The number that was sent to KEDA counts: its HPA may write it at any moment, and a plan that did not count it
    # would give the same GPUs away.
    coming = {name: (each.replicas, each.gpus) for name, each in reservations.of(model_uid, "keda").items()}
    for child in world.scaled_objects.by("model", model_uid):
        # Of a term before this one: an HPA goes to its minimum whatever it is answered.
        if (scaled := child.scaled) is not None and not scaled.deleting and scaled.gpu_class in found:
            before = coming.get(scaled.gpu_class, (0, found[scaled.gpu_class].gpus))
            coming[scaled.gpu_class] = (max(before[0], scaled.minimum), before[1])
    for name, each in reservations.of(model_uid, "apply").items():
        coming[name] = (max(each.replicas, coming.get(name, (0, 0))[0]), each.gpus)
    for name, each in reservations.of(model_uid, "wake").items():
        before = coming.get(name, (0, each.gpus))
        coming[name] = (max(before[0], each.replicas), before[1])
    for name, (replicas, gpus) in coming.items():
        seen = found.get(name)
        if seen is None:
            found[name] = ReplicaState(replicas, gpus, {})
        elif replicas > seen.replicas:
            found[name] = replace(seen, replicas=replicas, gpus=gpus)
    return found


def _replica_state(world: World, deployment: facts.Deployment, pods: list[facts.Pod]) -> ReplicaState:
    alive = sum(not p.deleting for p in pods)
    refusals = {p.name: r.message for p in pods if not p.deleting and (r := _rejection(p)) is not None}
    # Amid a rollout the pod cannot be made anew: where the Deployment shrinks, a replica that serves may go instead.
    rejected = {} if deployment.has_old_pods else refusals
    return ReplicaState(
        replicas=deployment.replicas,
        gpus=deployment.gpus_per_replica,
        by_node=_on(world, pods),
        pods=alive,
        # Refused pods do not exist: they are what the Deployment lacks.
        gated=sum((p.gated or _lacks_claim(world, p)) and not p.deleting for p in pods)
        + (max(0, deployment.replicas - alive) if deployment.refused and refusal(deployment.refused) else 0),
        rejected=len(rejected),
        rejection=rejected[min(rejected)] if rejected else "",
        settled=deployment.rolled_out,
        announced=sum(p.node_announced and p.node is None and not p.deleting for p in pods),
        keeps=next((p.keeps for p in sorted(pods, key=lambda p: p.name) if p.keeps and p.node and not p.deleting), ""),
    )


def _rejection(pod: facts.Pod) -> facts.NodeRefusal | None:
    """Why Kueue has given a pod up, where no node of its class could be had."""
    return pod.queue_wait.refusal if pod.gates and pod.queue_wait is not None else None


def _lacks_claim(world: World, pod: facts.Pod) -> bool:
    """Whether a pod without its ResourceClaim waits for longer than it takes to make one, and why is not read yet. An
    operator that has just started must not take GPUs from others for a pod that a quota may hold back."""
    if not pod.lacks_claim or pod.claim_refusal is not None or pod.node is not None or pod.created is None:
        return False
    return (world.now() - pod.created).total_seconds() >= CLAIM_SECONDS


def _on(world: World, pods: Iterable[facts.Pod]) -> dict[str, Held]:
    counted: dict[str, list[int]] = {}
    for pod in pods:
        where = place(world, pod)
        if where is None:
            continue
        count = counted.setdefault(where, [0, 0, 0])
        if pod.deleting:
            count[2] += 1
        else:
            count[0] += 1
            count[1] += pod.ready
    return {where: Held(*count) for where, count in counted.items()}


def _gpus(pod: facts.Pod) -> int:
    return max(pod.requests.values(), default=0)
