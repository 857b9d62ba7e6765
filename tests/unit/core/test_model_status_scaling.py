"""What a Model says of its replicas: at zero, on the way up, in rollouts, and of starts that failed."""

from dataclasses import replace

from shoal.api.meta import Condition
from shoal.core.facts import Container, Deployment, NodeRefusal, Pod, QueueWait
from shoal.core.placement import Excluded, Placement, VariantPlan
from shoal.core.scaling import ScalingDecision
from shoal.core.status.conditions import find
from shoal.core.status.modelstatus import Observed, status
from shoal.core.status.readiness import TRIED_AGAIN
from tests.unit.core.test_model_status import NOW, deployment, observed

ZERO = Placement((VariantPlan("l4", 0, 1, "0"),), (), 0, "Placed", "no replica is wanted")
IDLE = ScalingDecision(0, 1, "ScaledToZero", "no request for 600 s; the next one wakes class l4")
WAKING = ScalingDecision(1, 0, "Waking", "1 request held, 100 tokens; wakes class l4")
UP = ScalingDecision(3, 2, "ScalingUp", "14 queued on 2 replicas, target 4")
ONE = Placement((VariantPlan("l4", 1, 1, "0.43"),), (), 0, "Placed", "1 on l4, 1 GPU each")
THREE = Placement((VariantPlan("l4", 3, 1, "1.29"),), (), 0, "Placed", "3 on l4, 1 GPU each")


def at(replicas: int, **more) -> Deployment:
    return replace(deployment(ready=0, updated=0, total=0), replicas=replicas, **more)


def pod(name: str = "new", *, ready: bool = False, **more) -> Pod:
    return Pod("ns", name, name, "n1", False, False, ready, {}, "u", gpu_class="l4", was_ready=ready, **more)


def crashing() -> Pod:
    engine = Container("engine", False, 4, "CrashLoopBackOff", None, 1, "Error", "CUDA out of memory", running=False)
    return pod(containers=(engine,))


def says(seen: Observed, kind: str = "Ready") -> Condition | None:
    return find(status(seen, NOW).conditions, kind)


def ready(seen: Observed) -> tuple[str, str, str]:
    found = says(seen)
    assert found is not None
    return found.status, found.reason, found.message


def after(seen: Observed, **changes) -> Observed:
    """The next look, with the status that this one left."""
    return replace(seen, model=seen.model.model_copy(update={"status": status(seen, NOW)}), **changes)


def test_at_zero_a_model_is_ready_and_says_what_the_next_request_does() -> None:
    seen = observed(placement=ZERO, wanted=0, scaling=IDLE, deployments=(at(0),))
    assert ready(seen) == ("True", "ScaledToZero", IDLE.message)
    assert says(seen, "Stalled") is says(seen, "Reconciling") is None
    found = status(seen, NOW)
    assert (found.replicas.desired, found.replicas.ready) == (0, 0) if found.replicas else False


def test_at_zero_the_sentence_stays_whoever_looks_again() -> None:
    seen = after(observed(placement=ZERO, wanted=0, scaling=IDLE, deployments=(at(0),)))
    another = replace(seen, scaling=ScalingDecision(0, 0, "ScaledToZero", "no request; the next one wakes class l4"))
    assert status(another, NOW) == another.model.status  # another operator: no write


def test_at_zero_the_measured_cold_start_is_still_told() -> None:
    found = status(observed(placement=ZERO, wanted=0, cold_starts={"l4": 42}, deployments=(at(0),)), NOW)
    assert found.cold_start_seconds == 42
    waits = observed(placement=ZERO, wanted=0, cold_starts={"l4": 42}, node_waits={"l4": 250}, deployments=(at(0),))
    assert status(waits, NOW).cold_start_seconds == 292, "the next replica may have to wait for a node"


def test_clients_wait_for_no_node_of_a_class_that_gets_none_where_another_class_is_used() -> None:
    seconds = {"cold_starts": {"l4": 42, "h100": 60}, "node_waits": {"l4": 900, "h100": 120}}
    both = Placement((VariantPlan("l4", 0, 1, "0"), VariantPlan("h100", 0, 1, "0")), (), 0, "Placed", "none is wanted")
    asleep = observed(placement=both, wanted=0, deployments=(at(0),), **seconds)
    assert status(asleep, NOW).cold_start_seconds == 942
    out = replace(asleep, outages=frozenset({"l4"}))
    assert status(out, NOW).cold_start_seconds == 180, "l4 has at most GPUs of nodes that exist"
    alone = observed(placement=ZERO, wanted=0, deployments=(at(0),), cold_starts={"l4": 42}, node_waits={"l4": 900})
    assert status(replace(alone, outages=frozenset({"l4"})), NOW).cold_start_seconds == 942, (
        "it asks there all the same"
    )
    # With replicas it is the class that the plan has taken, whatever else was used before.
    left = Excluded("l4", "no stock", "InBackoff")
    on = replace(ONE, variants=(VariantPlan("h100", 1, 1, "2.49"),), excluded=(left,))
    wakes = observed(placement=on, wanted=1, deployments=(at(0),), outages=frozenset({"l4"}), **seconds)
    assert status(wakes, NOW).cold_start_seconds == 180
    asks = replace(wakes, placement=ONE)
    assert status(asks, NOW).cold_start_seconds == 942, "the plan waits there for want of another class"


def test_waking_is_told_with_how_far_it_is() -> None:
    seen = observed(placement=ONE, wanted=1, scaling=WAKING, deployments=(at(1),), pods=(pod(),))
    assert ready(seen) == ("False", "Waking", f"{WAKING.message}; 0 of 1 replicas ready; 1 scheduled")


def test_more_replicas_on_their_way_leave_a_model_ready_until_one_that_was_there_is_missing() -> None:
    live = deployment(ready=2, updated=3, total=3)
    one, other = pod("one", ready=True), pod("other", ready=True)
    seen = observed(
        placement=THREE, wanted=3, scaling=UP, deployments=(replace(live, replicas=3),), pods=(one, other, pod())
    )
    assert ready(seen) == ("True", "ScalingUp", f"{UP.message}; 2 of 3 replicas ready; 1 scheduled")
    lost = replace(seen, deployments=(replace(live, replicas=3, ready=1),), pods=(one, pod()))
    assert ready(lost)[:2] == ("False", "Starting")


def test_a_model_that_never_served_does_not_look_ready_at_zero_until_others_were_tried() -> None:
    failing = observed(placement=ONE, wanted=1, deployments=(at(1),), pods=(crashing(),))
    assert ready(failing)[1] == "EngineFailed"
    asleep = after(failing, placement=ZERO, wanted=0, scaling=IDLE, deployments=(at(0),), pods=())
    assert ready(asleep)[:2] == ("False", "EngineFailed")
    assert ready(asleep)[2].endswith(f"CUDA out of memory{TRIED_AGAIN}")
    later = after(asleep)
    assert status(later, NOW) == later.model.status
    waking = after(later, placement=ONE, wanted=1, scaling=WAKING, deployments=(at(1),), pods=(pod(),))
    assert ready(waking)[1] == "Waking"
    serves = after(waking, deployments=(deployment(),), pods=(pod(ready=True),), scaling=None)
    assert ready(after(serves, placement=ZERO, wanted=0, scaling=IDLE, deployments=(at(0),), pods=()))[0] == "True"


def test_an_engine_that_keeps_ending_is_for_a_person_only_when_no_other_class_is_left_to_try() -> None:
    """Stalled ends the hold of waiting requests, and a GitOps tool's patience."""
    failing = observed(
        placement=ONE, wanted=1, deployments=(at(1),), pods=(crashing(),), untried=frozenset({"l4", "h100"})
    )
    assert ready(failing)[1] == "EngineFailed"
    assert says(failing, "Stalled") is None
    assert says(failing, "Reconciling") is not None
    for untried in (frozenset({"l4"}), frozenset({"h100"}), frozenset[str]()):
        assert says(replace(failing, untried=untried), "Stalled") is not None
    moved = replace(ONE, variants=(replace(ONE.variants[0], replicas=0), replace(ONE.variants[0], gpu_class="h100")))
    assert says(replace(failing, placement=moved, untried=frozenset({"h100"})), "Stalled") is None


def test_a_paused_model_waits_for_a_person_unless_somebody_elses_autoscaler_writes_its_replicas() -> None:
    """Of a stalled Model gateways hold no request, and at zero this one's own autoscaler would wake it."""
    asleep = observed(placement=ZERO, wanted=1, deployments=(at(0),), paused=True)
    assert says(asleep, "Stalled") is not None
    scaled = replace(asleep, scaled_by="HorizontalPodAutoscaler keda-hpa-chat")
    assert says(scaled, "Stalled") is None
    assert "replicas are those of HorizontalPodAutoscaler keda-hpa-chat" in ready(scaled)[2]


def test_a_revision_that_does_not_become_ready_is_a_stalled_rollout_with_the_engines_last_words() -> None:
    rolling = replace(deployment(ready=1, updated=1, total=2), replacing=True)
    seen = observed(deployments=(rolling,), wanted=1, pods=(pod("old", ready=True), crashing()))
    found, reason, message = ready(seen)
    assert (found, reason) == ("False", "RolloutStalled")
    assert message.startswith(
        "the new revision on l4 does not become ready, the one before goes on serving with 1 of 1 replicas: "
    )
    assert message.endswith("CUDA out of memory")
    assert says(seen, "Stalled") is not None
    available = says(seen, "Available")
    assert available is not None
    assert available.status == "True"


def test_a_rollout_past_its_deadline_is_stalled_though_nothing_says_why() -> None:
    late = replace(deployment(ready=1, updated=1, total=2), replacing=True, overdue='ReplicaSet "x" has timed out.')
    seen = observed(deployments=(late,), wanted=1, pods=(pod("old", ready=True), pod()))
    assert ready(seen)[1] == "RolloutStalled"
    assert ready(seen)[2].endswith('ReplicaSet "x" has timed out.')
    first = replace(deployment(ready=0), overdue='ReplicaSet "x" has timed out.')
    assert ready(observed(deployments=(first,), wanted=1, pods=(pod(),)))[1] == "EngineFailed"


def test_a_replica_that_never_gets_ready_and_says_nothing_is_for_a_person_once_every_class_was_tried() -> None:
    late = replace(deployment(ready=0), overdue='ReplicaSet "x" has timed out progressing.')
    hanging = observed(placement=ONE, wanted=1, deployments=(late,), pods=(pod(),), untried=frozenset({"l4", "h100"}))
    assert ready(hanging) == (
        "False",
        "EngineFailed",
        'no replica on l4 becomes ready: ReplicaSet "x" has timed out progressing.',
    )
    assert says(hanging, "Stalled") is None, "another class is about to be tried, and requests are worth holding"
    assert says(hanging, "Reconciling") is not None
    tried = says(replace(hanging, untried=frozenset()), "Stalled")
    assert tried is not None
    assert tried.reason == "EngineFailed"


def test_a_replica_that_got_no_node_is_for_no_person_since_it_asks_again() -> None:
    refused = NodeRefusal("StockOut", "no stock", everyone=True, repeated=True)
    wait = QueueWait("AdmissionRejected", "no stock", refused, NOW)
    gated = pod(gates=("kueue.x-k8s.io/admission",), queue="serving", queue_managed=True, queue_wait=wait)
    gone = replace(gated, node=None)
    seen = observed(placement=ONE, wanted=1, deployments=(at(1),), pods=(gone,), untried=frozenset({"l4", "h100"}))
    assert ready(seen)[1] == "AdmissionRejected"
    assert says(seen, "Stalled") is None, "it is about to go to another class"
    assert says(replace(seen, untried=frozenset({"h100"})), "Stalled") is None, "a new pod asks when nodes are expected"
    by_hand = replace(gone, queue_wait=QueueWait("AdmissionRejected", "its Workload is deactivated"))
    assert says(replace(seen, pods=(by_hand,)), "Stalled") is not None


def test_a_rollouts_replica_that_got_no_node_is_for_a_person_while_replicas_of_before_serve() -> None:
    """No plan makes it anew: a Deployment that shrinks amid a rollout may take away a replica that serves."""
    refused = NodeRefusal("StockOut", "no stock", everyone=True, repeated=True)
    wait = QueueWait("AdmissionRejected", "no stock", refused, NOW)
    gone = replace(
        pod(gates=("kueue.x-k8s.io/admission",), queue="serving", queue_managed=True, queue_wait=wait), node=None
    )
    rolling = replace(deployment(ready=1, updated=1, total=2), replacing=True, surges=False)
    seen = observed(
        placement=ONE,
        wanted=2,
        deployments=(rolling,),
        pods=(pod("old", ready=True), gone),
        untried=frozenset({"l4", "h100"}),
    )
    assert ready(seen)[1:] == (
        "AdmissionRejected",
        "pod ns/new is not admitted by queue ns/serving: no stock; delete the pod to ask again",
    )
    assert says(seen, "Stalled") is not None
    waits = says(seen, "QuotaWait")
    assert waits is not None
    assert waits.message.endswith("delete the pod to ask again")
    # All pods are of the new revision: the plan may shrink the Deployment.
    last = replace(deployment(ready=0), replacing=True, surges=False)
    seen = observed(placement=ONE, wanted=1, deployments=(last,), pods=(gone,))
    assert ready(seen)[2].endswith("; a new pod asks again once nodes of l4 are expected")
    assert says(seen, "Stalled") is None


def test_of_listed_classes_one_that_disappears_is_named_and_the_others_are_used() -> None:
    gone = Excluded("l4", "there is no GPUClass of this name", "ClassNotFound")
    found = says(observed(placement=replace(ONE, excluded=(gone,)), wanted=1), "Accepted")
    assert found is not None
    assert (found.status, found.reason) == ("True", "ClassNotFound")
    assert found.message == "spec.variants: there is no GPUClass 'l4'; the others that are listed are used"
    serving = replace(ONE.variants[0], retired=True, why="there is no GPUClass of this name")
    still = says(observed(placement=replace(ONE, variants=(serving,)), wanted=1), "Accepted")
    assert still is not None
    assert still.message == found.message


def test_a_rollout_without_a_free_gpu_says_that_it_replaces_in_place() -> None:
    rolling = replace(deployment(ready=0), replacing=True, surges=False)
    found = ready(observed(deployments=(rolling,), wanted=1, pods=(pod(),)))
    assert found[1] == "ReplacingInPlace"
    assert found[2] == (
        "no GPU was free for one replica more, so each goes before its successor comes; "
        "0 of 1 replicas ready; 1 scheduled"
    )


def test_a_model_that_fits_nowhere_waits_for_a_person() -> None:
    nowhere = Placement((), (), 1, "NoFit", "fits on no GPU class: l4: needs 30 GiB, has 24")
    seen = observed(placement=nowhere, wanted=1, deployments=())
    stalled = says(seen, "Stalled")
    assert stalled is not None
    assert stalled.reason == "NoFit"


def test_a_replica_on_a_node_that_does_not_answer_is_not_loading() -> None:
    containers = tuple(Container(n, True, 0, None, None, None, None, None, running=True) for n in ("engine", "agent"))
    lost = replace(pod(containers=containers), was_ready=True)
    (variant,) = status(observed(wanted=1, deployments=(deployment(ready=0),), pods=(lost,)), NOW).variants
    assert variant.step == "Waiting"
