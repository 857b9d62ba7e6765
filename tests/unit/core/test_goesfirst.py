"""Which pods go first when a Deployment shrinks."""

from dataclasses import replace

from shoal.core.facts import NodeRefusal, Pod, QueueWait
from shoal.core.goesfirst import GOES_FIRST, deletion_costs
from shoal.core.scaling import Load

UID = "uid-1"


def pod(name: str, *, ready: bool = True, node: str | None = "n", cost: int = 0) -> Pod:
    return Pod("ns", name, name, node, False, False, ready, {}, UID, gpu_class="l4", deletion_cost=cost)


def test_the_cheapest_loss_goes_first() -> None:
    loads = {
        "busy": Load(running=9, prompt_tokens_total=10),
        "warm": Load(running=1, prompt_tokens_total=90_000),
        "cold": Load(running=1, prompt_tokens_total=500),
        "stale": None,
    }

    def first(count: int, *pods: Pod, forced: dict[str, int] | None = None) -> list[str]:
        changes = deletion_costs(pods, {"n": count}, forced or {}, loads.get)
        return [change.pod.name for change in changes if change.cost == GOES_FIRST]

    serving = [pod(name) for name in ("busy", "cold", "stale", "warm")]
    assert first(1, *serving) == ["cold"]
    assert first(3, *serving) == ["cold", "warm", "busy"]
    assert first(1, *serving, pod("starting", ready=False)) == ["starting"]
    # Whoever was chosen once stays chosen: a load that changes costs no write.
    assert first(1, *serving[1:], pod("busy", cost=GOES_FIRST)) == []
    # A node that has to be left is left, whatever the loads.
    assert first(1, *serving, pod("there", node="n2"), forced={"n2": 1}) == ["there"]


def goes(
    pods: list[Pod], count: int, others: dict[str, int], loads: dict[str, Load] | None = None, gpus: int = 1
) -> dict[str, str]:
    """Pod -> why, of a class whose nodes an autoscaler removes."""
    found = deletion_costs(pods, {"n0": count}, {}, (loads or {}).get, others=others, gpus=gpus)
    return {change.pod.name: change.why for change in found if change.cost == GOES_FIRST}


def test_on_nodes_of_an_autoscaler_the_replica_goes_whose_node_becomes_empty() -> None:
    pods = [pod("a", node="n1"), pod("b", node="n1"), pod("c", node="n2")]
    loads = {
        "a": Load(running=0, prompt_tokens_total=0),
        "b": Load(running=1, prompt_tokens_total=5),
        "c": Load(running=7, prompt_tokens_total=90_000),
    }
    assert goes(pods, 1, {"n1": 0, "n2": 0}, loads) == {"c": "node n2 becomes empty, and an autoscaler removes it"}
    # Of a class whose nodes stay, it is the one that costs least.
    plain = deletion_costs(pods, {"n1": 1}, {}, loads.get)
    assert [change.pod.name for change in plain] == ["a"]


def test_a_node_that_somebody_else_keeps_is_not_emptied_and_of_those_the_nearest_to_empty_loses_one() -> None:
    pods = [pod("a", node="n1"), pod("b", node="n1"), pod("c", node="n2")]
    assert goes(pods, 1, {"n1": 0, "n2": 4}) == {"a": "node n1 is nearest to empty"}
    assert goes(pods, 2, {"n1": 0, "n2": 1}).keys() == {"a", "b"}, "two of n1 empty it, one of n2 would not"
    # Of replicas with two GPUs each, the sum of what stays held counts.
    assert goes(pods, 1, {"n1": 1, "n2": 1}, gpus=2) == {"c": "node n2 is nearest to empty"}


def test_as_many_nodes_are_emptied_as_the_number_allows() -> None:
    pods = [pod(f"{node}-{i}", node=node) for node, n in (("n1", 3), ("n2", 1), ("n3", 2)) for i in range(n)]
    alone = {"n1": 0, "n2": 0, "n3": 0}
    assert goes(pods, 3, alone).keys() == {"n2-0", "n3-0", "n3-1"}
    assert goes(pods, 5, alone).keys() == {"n2-0", "n3-0", "n3-1", "n1-0", "n1-1"}


def test_of_nodes_that_become_empty_alike_the_cheapest_loss_decides() -> None:
    """One replica per node: nothing is won by the name of a node."""
    pods = [pod("a", node="n1"), pod("b", node="n2"), pod("c", node="n3")]
    loads = {name: Load(running=n, prompt_tokens_total=0) for name, n in (("a", 3), ("b", 2), ("c", 0))}
    assert goes(pods, 1, {"n1": 0, "n2": 0, "n3": 0}, loads).keys() == {"c"}
    assert goes(pods, 2, {"n1": 0, "n2": 0, "n3": 0}, loads).keys() == {"b", "c"}


def test_what_does_not_serve_or_was_chosen_before_goes_before_a_node_is_emptied() -> None:
    pods = [pod("a", node="n1"), pod("b", node="n1", ready=False), pod("c", node="n2")]
    assert goes(pods, 1, {"n1": 0, "n2": 0}).keys() == {"b"}
    # It counts: without it the other one of its node is alone there.
    assert goes(pods, 2, {"n1": 0, "n2": 1}).keys() == {"a", "b"}
    marked = [pod("a", node="n1", cost=GOES_FIRST), pod("b", node="n1"), pod("c", node="n2")]
    assert goes(marked, 1, {"n1": 0, "n2": 0}) == {}, "no mark goes to and fro"
    # A node that has to be left is left first.
    forced = deletion_costs([pod("a", node="n1"), pod("c", node="n2")], {"n1": 1}, {"n1": 1}, others={"n2": 0})
    assert [(change.pod.name, change.why) for change in forced] == [("a", "its node or GPU has to be left")]


def test_of_replicas_in_a_queue_the_one_goes_first_that_kueue_has_given_up() -> None:
    """A ReplicaSet would otherwise delete the youngest, and the one that waits would lose its place in the queue."""
    waits = replace(pod("waits", ready=False, node=None), gates=("kueue.x-k8s.io/admission",))
    waits = replace(waits, queue_wait=QueueWait("QuotaWait", "insufficient unused quota"))
    given_up = QueueWait(
        "AdmissionRejected", "no stock", NodeRefusal("Failed", "no stock", everyone=True, repeated=True)
    )
    no_node = replace(waits, name="no-node", uid="no-node", queue_wait=given_up)
    changes = deletion_costs([pod("serves"), waits, no_node], {}, {})
    assert [(change.pod.name, change.cost) for change in changes] == [("no-node", GOES_FIRST)]
    marked = replace(no_node, deletion_cost=GOES_FIRST)
    assert deletion_costs([pod("serves"), waits, marked], {}, {}) == [], "it keeps the mark, without another write"
    # A replica that serves and has to leave its node is marked beside it.
    changes = deletion_costs([pod("serves"), waits, marked], {"n": 1}, {})
    assert [(change.pod.name, change.cost) for change in changes] == [("serves", GOES_FIRST)]
    # Admitted after all, by a person who activated its Workload again, it is as any other.
    admitted = replace(marked, gates=(), queue_wait=None)
    assert [(change.pod.name, change.cost) for change in deletion_costs([waits, admitted], {}, {})] == [("no-node", 0)]
