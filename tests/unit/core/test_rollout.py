"""How a rollout begins: with one replica more where there are GPUs, on another class, in place; never for nothing."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from shoal.core.facts import Deployment, NodeRefusal, Pod, QueueWait
from shoal.core.placement import VariantPlan
from shoal.core.rollout import Beginning, begin, no_node_came

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
L4 = VariantPlan("l4-24gb", 1, 1, "0.43")
STANDING = Deployment(
    namespace="chat", name="a-l4", uid="d", resource_version="1", model_uid="a", gpu_class="l4-24gb",
    gpus_per_replica=1, resource_name="nvidia.com/gpu", generation=1, observed_generation=1, replicas=1,
    replicas_managers=frozenset(), updated=1, ready=1, total=1, refused=None, deleting=False,
)  # fmt: skip


def begins(
    plan: VariantPlan,
    *,
    standing: Deployment = STANDING,
    serving: int = 1,
    others: bool = True,
    known: bool = False,
    room: bool = False,
) -> Beginning:
    return begin(standing, plan, serving=serving, others=others, known=known, reserve_surge=lambda: room)


def test_with_room_for_one_replica_more_it_surges() -> None:
    assert begins(L4, room=True) == "surge"
    assert begins(L4, room=True, known=True) == "surge"


def test_the_only_replica_waits_until_the_plan_has_looked_at_the_other_classes() -> None:
    assert begins(L4) == "wait"
    assert begins(replace(L4, relocated=True), known=True) == "wait"
    assert begins(replace(L4, replicas=0), serving=2, known=True) == "wait"  # its successor serves, so it goes
    assert begins(L4, known=True) == "in place"  # no class has room


def test_a_deployment_without_replicas_is_changed_at_once_and_reserves_nothing() -> None:
    def never() -> bool:
        raise AssertionError

    empty = replace(STANDING, replicas=0, ready=0, total=0)
    none = replace(L4, replicas=0)
    assert begin(empty, none, serving=1, others=True, known=True, reserve_surge=never) == "surge"


def test_what_serves_nobody_or_has_others_beside_it_is_replaced_in_place() -> None:
    assert begins(L4, standing=replace(STANDING, ready=0), serving=0) == "in place"
    assert begins(replace(L4, replicas=3), standing=replace(STANDING, replicas=3, ready=3), serving=3) == "in place"
    assert begins(L4, serving=2) == "in place"
    assert begins(L4, others=False) == "in place"


def test_a_replica_more_for_which_no_node_came_is_given_up() -> None:
    late, soon = (NOW - timedelta(seconds=seconds) for seconds in (600, 599))
    waits = Pod(
        namespace="chat", name="a-1", uid="p", node=None, finished=False, deleting=False, ready=False,
        requests={"nvidia.com/gpu": 1}, model_uid="a", gpu_class="l4-24gb", created=late,
    )  # fmt: skip
    assert no_node_came([waits], 300.0, NOW)
    assert not no_node_came([replace(waits, created=soon)], 300.0, NOW)
    assert not no_node_came([waits], None, NOW)  # no autoscaler: another replica has the GPUs for now
    assert not no_node_came([replace(waits, node="l4-0")], 300.0, NOW)
    # By a request of Kueue: by the same time, or as soon as Kueue gives up.
    held = replace(waits, gates=("kueue.x-k8s.io/admission",), queue_wait=QueueWait("AdmissionCheckPending", "x"))
    assert no_node_came([held], 300.0, NOW)
    assert not no_node_came([replace(held, created=soon)], 300.0, NOW)
    no_room = QueueWait("QuotaWait", "insufficient unused quota", no_room=True)
    assert not no_node_came([replace(held, queue_wait=no_room)], 300.0, NOW)
    given_up = QueueWait("AdmissionRejected", "x", NodeRefusal("NoNodeCame", "no stock", everyone=True))
    assert no_node_came([replace(held, created=soon, queue_wait=given_up)], 300.0, NOW)
    assert not no_node_came([replace(held, queue_wait=QueueWait("AdmissionRejected", "by a person"))], 300.0, NOW)
