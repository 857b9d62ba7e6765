"""GPUs of a class: what is there, what is taken, what still fits."""

from shoal.api.gpuclass import GPUClassSpec
from shoal.core.facts import Node, Pod, Taint
from shoal.core.gpus import held_by_node, usage
from shoal.kube import projections

GPU = "nvidia.com/gpu"
SPEC = GPUClassSpec.model_validate(
    {
        "nodeSelector": {"product": "L4"},
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "memoryPerGPU": "24Gi",
    }
)
TAINT = Taint(GPU, "present", "NoSchedule")


def node(name: str, gpus: int = 4, *, ready: bool = True, cordoned: bool = False, taints: tuple[Taint, ...] = (TAINT,)):
    return Node(name, {"product": "L4"}, ready, cordoned, taints, {GPU: gpus}, {GPU: gpus})


def pod(name: str, on: str | None, gpus: int, *, finished: bool = False, deleting: bool = False) -> Pod:
    return Pod("ns", name, name, on, finished, deleting, True, {GPU: gpus}, None)


def count(nodes: list[Node], pods: list[Pod]) -> tuple[int, int, int, tuple[int, ...]]:
    found = usage(SPEC, nodes, held_by_node(pods))
    return found.capacity, found.allocatable, found.allocated, found.free


def test_every_pod_counts_and_a_terminating_one_until_it_is_gone() -> None:
    pods = [
        pod("a", "n1", 1),
        pod("b", "n1", 2, deleting=True),
        pod("c", "n2", 1, finished=True),
        pod("d", None, 4),
    ]
    assert count([node("n1"), node("n2")], pods) == (8, 8, 3, (4, 1))


def test_a_cordoned_dead_or_otherwise_tainted_node_offers_nothing_but_what_it_holds_counts() -> None:
    broken = Taint("maintenance", "", "NoExecute")
    nodes = [node("n1", cordoned=True), node("n2", ready=False), node("n3", taints=(TAINT, broken)), node("n4")]
    assert count(nodes, [pod("a", "n1", 3)]) == (16, 4, 3, (4,))


def test_a_node_with_more_pods_than_gpus_has_none_free() -> None:
    assert count([node("n1", 2)], [pod("a", "n1", 4)]) == (2, 2, 4, ())


def test_other_nodes_are_not_counted() -> None:
    other = Node("n9", {"product": "H100"}, True, False, (), {GPU: 8}, {GPU: 8})
    assert count([other], []) == (0, 0, 0, ())


def test_a_pod_asks_for_its_largest_init_container_or_all_others_with_their_sidecars() -> None:
    def container(gpus: int, **more: str) -> dict:
        return {"resources": {"limits": {GPU: str(gpus)}}, **more}

    spec = {"containers": [container(2), container(1)], "initContainers": [container(4), container(1)]}
    assert projections.pod_requests(spec) == {GPU: 4}
    spec["initContainers"] = [container(2), container(2, restartPolicy="Always")]
    assert projections.pod_requests(spec) == {GPU: 5}
    assert projections.pod_requests({"containers": [{"resources": {"requests": {"cpu": "1"}}}]}) == {}
