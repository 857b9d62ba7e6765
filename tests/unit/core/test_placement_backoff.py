"""Classes on which a Model has no luck: remembered for a while, taken last, and named."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

import pytest

from shoal.api.model import ModelSpec
from shoal.core.enginerevision import EngineRevision, engine_revision
from shoal.core.facts import Container, Pod
from shoal.core.placement import Held, Moves, ReplicaState, plan
from shoal.core.placement.backoff import RETRY_SECONDS, ClassBackoff, counting, observe, other_than_gpus
from tests.support.fleets import candidate, demand, standing, supply

START = datetime(2026, 1, 1, tzinfo=UTC)
L4, H100 = candidate("l4-24gb", cost="0.43"), candidate("h100-80gb", cost="2.49")
NO_CPU = (
    "0/5 nodes are available: 2 Insufficient cpu, 3 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/5 nodes are available: 5 Preemption is not helpful for scheduling."
)
WHY = "a replica there was not ready after 15 min, three cold starts"


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def pod(gpu_class: str = "l4-24gb", node: str | None = "n", *, ready: bool = False, **more: object) -> Pod:
    fields: dict[str, object] = {
        "namespace": "chat", "name": f"p-{gpu_class}", "uid": "u", "node": node, "finished": False, "deleting": False,
        "ready": ready, "requests": {"nvidia.com/gpu": 1}, "model_uid": "m", "gpu_class": gpu_class, "created": START,
        "was_ready": ready,
    }  # fmt: skip
    return Pod(**(fields | more))  # type: ignore[arg-type]


def startup_timeout(_gpu_class: str) -> float:
    return 900.0


def revision(*args: str, **spec: object) -> EngineRevision:
    fields = {"source": {"uri": "hf://org/model"}, "engine": {"extraArgs": args}} | spec
    return engine_revision(ModelSpec.model_validate(fields), "l4-24gb", None, None)


BROKEN, MENDED = revision("--mem-fraction-static=0.99"), revision("--mem-fraction-static=0.8")


def seen(
    *pods: Pod,
    of: EngineRevision = BROKEN,
    after: float = 900,
    known: Mapping[str, ClassBackoff] = {},
    rolling: bool = False,
) -> dict[str, ClassBackoff]:
    """What is known so many seconds after the start, where the Deployment runs the revision `of`."""
    classes = {"l4-24gb"}
    applied = dict.fromkeys(classes, of)
    rolls = classes if rolling else ()
    return observe(known, pods, now=at(after), timeout=startup_timeout, rolling=rolls, applied=applied)


def test_a_replica_that_is_not_ready_after_three_cold_starts_puts_the_class_in_backoff() -> None:
    assert seen(pod(template="t1"), after=899) == {}
    backoff = ClassBackoff(WHY, at(900 + RETRY_SECONDS), revision=BROKEN, template="t1")
    assert seen(pod(template="t1")) == {"l4-24gb": backoff}


@pytest.mark.parametrize(
    "harmless",
    [pod(ready=True), pod(was_ready=True), pod(deleting=True), pod(finished=True), pod(created=None)],
    ids=["ready", "was ready", "going", "finished", "of unknown age"],
)
def test_what_causes_no_backoff(harmless: Pod) -> None:
    assert seen(harmless, after=10_000) == {}


def test_a_class_works_where_another_replica_is_ready_and_a_rollout_is_not_its_fault() -> None:
    assert seen(pod(), pod(ready=True, name="other"), after=10_000) == {}
    assert seen(pod(), after=10_000, rolling=True) == {}


def test_a_backoff_holds_for_an_hour_and_no_longer() -> None:
    known = seen(pod())
    assert observe(known, [], now=at(900 + RETRY_SECONDS - 1), timeout=startup_timeout) == known
    assert observe(known, [], now=at(900 + RETRY_SECONDS), timeout=startup_timeout) == {}


def test_a_pod_that_lacks_cpu_on_the_nodes_with_gpus_puts_the_class_in_backoff_and_one_that_lacks_gpus_is_not() -> None:
    stuck = pod(node=None, unschedulable=NO_CPU)
    assert observe({}, [stuck], now=at(299), timeout=startup_timeout) == {}
    why = "for 5 min no node there had room for a replica: Insufficient cpu on 2 node(s)"
    assert observe({}, [stuck], now=at(300), timeout=startup_timeout) == {
        "l4-24gb": ClassBackoff(why, at(300 + RETRY_SECONDS))
    }
    full = "0/2 nodes are available: 2 Insufficient cpu, 2 Insufficient nvidia.com/gpu."
    assert observe({}, [pod(node=None, unschedulable=full)], now=at(10_000), timeout=startup_timeout) == {}


def test_the_schedulers_sentence() -> None:
    assert other_than_gpus(NO_CPU) == "Insufficient cpu on 2 node(s)"
    assert other_than_gpus("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 Insufficient memory.") == (
        "Insufficient memory on 2 node(s)"
    )
    assert other_than_gpus("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.") is None
    assert other_than_gpus("") is None


# --- what the plan makes of it --------------------------------------------------------------------------------------


def silent(name: str) -> ReplicaState:
    return ReplicaState(1, 1, {f"{name}-0": Held(1, 0)}, 1)


def test_a_replica_that_never_starts_goes_to_the_next_class_and_the_status_says_why() -> None:
    model = demand("chat/a", L4, H100, standing={"l4-24gb": silent("l4-24gb")}, backoffs={"l4-24gb": WHY})
    found = plan([model], [supply("l4-24gb", 3, of=4), supply("h100-80gb", 8)])["chat/a"]
    assert {v.gpu_class: v.replicas for v in found.variants} == {"h100-80gb": 1, "l4-24gb": 0}
    assert found.message == f"1 on h100-80gb, 1 GPU each; not on l4-24gb: {WHY}"
    after = demand("chat/a", L4, H100, backoffs={"l4-24gb": WHY})
    found = plan([after], [supply("l4-24gb", 4), supply("h100-80gb", 8)])["chat/a"]
    assert [(e.gpu_class, e.reason, e.why) for e in found.excluded] == [
        ("l4-24gb", "InBackoff", f"{WHY}; it is the last choice for a while")
    ]


def test_without_another_place_it_stays_where_it_is() -> None:
    model = demand("chat/a", L4, H100, standing={"l4-24gb": silent("l4-24gb")}, backoffs={"l4-24gb": WHY})
    found = plan([model], [supply("l4-24gb", 3, of=4), supply("h100-80gb", 0, of=8)])["chat/a"]
    assert {v.gpu_class: v.replicas for v in found.variants} == {"l4-24gb": 1}
    unbound = demand("chat/a", L4, standing={"l4-24gb": ReplicaState(1, 1, {}, 1)}, backoffs={"l4-24gb": WHY})
    assert plan([unbound], [supply("l4-24gb", 4)])["chat/a"].variants[0].replicas == 1


def test_what_serves_on_a_class_in_backoff_stays() -> None:
    mixed = ReplicaState(2, 1, {"l4-24gb-0": Held(2, 1)}, 2)
    model = demand("chat/a", L4, H100, wanted=2, standing={"l4-24gb": mixed}, backoffs={"l4-24gb": WHY})
    found = plan([model], [supply("l4-24gb", 2, of=4), supply("h100-80gb", 8)])["chat/a"]
    assert {v.gpu_class: v.replicas for v in found.variants} == {"l4-24gb": 1, "h100-80gb": 1}


def test_a_move_that_never_ends_is_given_up_and_its_slot_is_free_again() -> None:
    serves = standing(1, 1, name="h100-80gb")
    stuck = demand("chat/a", L4, H100, standing={"h100-80gb": serves, "l4-24gb": silent("l4-24gb")})
    other = demand("chat/b", L4, H100, age=1, standing={"h100-80gb": serves})
    room = [supply("l4-24gb", 3, of=4), supply("h100-80gb", 6, of=8)]
    one = Moves(in_flight=1)
    found = plan([stuck, other], room, moves=one)
    assert (found["chat/a"].reason, found["chat/b"].reason) == ("Moving", "Placed")
    given_up = demand("chat/a", L4, H100, standing=stuck.replica_states, backoffs={"l4-24gb": WHY})
    found = plan([given_up, other], room, moves=one)
    assert {v.gpu_class: v.replicas for v in found["chat/a"].variants} == {"h100-80gb": 1, "l4-24gb": 0}
    assert found["chat/b"].reason == "Moving"


# --- engines that crash or hang -------------------------------------------------------------------------------------


def crashing(template: str = "t1", restarts: int = 3) -> Pod:
    said = "Loading weights\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    engine = Container("engine", False, restarts, "CrashLoopBackOff", None, 1, "Error", said, running=False)
    return pod(name=f"p-{template}", containers=(engine,), template=template)


def hanging(template: str = "t1") -> Pod:
    """Its engine runs and never answers; or it has ended, but not often."""
    return pod(name=f"p-{template}", template=template)


NOT_STARTING = pytest.mark.parametrize(
    ("not_starting", "after"),
    [(crashing, 60.0), (hanging, 900.0), (lambda template="t1": crashing(template, restarts=2), 900.0)],
    ids=["crashing", "hanging", "ended twice"],
)
"""A pod of a template whose engine does not start, and when this shows."""


def test_an_engine_that_ends_again_and_again_puts_the_class_in_backoff_long_before_three_cold_starts() -> None:
    assert seen(crashing(restarts=2), after=60) == {}
    found = seen(crashing(), after=60)
    assert found["l4-24gb"].why == (
        "the engine of a replica there ended 3 times with exit code 1: "
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert found["l4-24gb"].crashes
    assert not seen(hanging())["l4-24gb"].crashes, "it is slow, and a node of another class costs money"
    assert not seen(crashing(restarts=2))["l4-24gb"].crashes, "it may start yet"


@NOT_STARTING
def test_an_engine_that_does_not_start_is_no_backoff_while_nobody_knows_its_revision(
    not_starting: Callable[..., Pod], after: float
) -> None:
    """After a start of the operator, until it has looked at the Deployment."""
    assert observe({}, [not_starting()], now=at(10 * after), timeout=startup_timeout) == {}


@NOT_STARTING
def test_a_backoff_counts_for_the_revision_that_did_not_start(not_starting: Callable[..., Pod], after: float) -> None:
    known = seen(not_starting(), after=after)
    assert list(counting(known, lambda _: BROKEN)) == ["l4-24gb"]
    assert counting(known, lambda _: MENDED) == {}


def test_what_the_cluster_refuses_counts_for_every_revision() -> None:
    refused = seen(pod(node=None, unschedulable=NO_CPU), after=300)
    assert list(counting(refused, lambda _: MENDED)) == ["l4-24gb"]


@NOT_STARTING
def test_who_goes_back_to_the_revision_that_did_not_start_has_its_backoff_again(
    not_starting: Callable[..., Pod], after: float
) -> None:
    known = seen(not_starting(), after=after)
    later = seen(of=MENDED, after=after, known=known)
    assert list(counting(later, lambda _: BROKEN)) == ["l4-24gb"]
    assert counting(later, lambda _: MENDED) == {}


@NOT_STARTING
def test_a_revision_that_does_not_start_either_has_a_backoff_of_its_own(
    not_starting: Callable[..., Pod], after: float
) -> None:
    known = seen(not_starting(), after=after)
    for template in ("t2", "t1"):  # the change has replaced the pod, or it replaces none
        found = seen(not_starting(template), of=MENDED, after=after, known=known)
        assert found["l4-24gb"].revision == MENDED


@NOT_STARTING
def test_a_rollout_is_no_excuse_where_the_revision_before_it_did_not_start_either(
    not_starting: Callable[..., Pod], after: float
) -> None:
    """The replica would stay on a class where nothing ever worked: a rollout ends when its replicas are ready."""
    known = seen(not_starting(), after=after)

    def rollout(*pods: Pod, known: Mapping[str, ClassBackoff] = known) -> dict[str, ClassBackoff]:
        return seen(*pods, of=MENDED, after=after, known=known, rolling=True)

    assert rollout(not_starting("t1")) == known, "the former replica fails on"
    assert rollout(not_starting("t1"), not_starting("t2"))["l4-24gb"].revision == MENDED
    assert rollout(not_starting("t2"), known={}) == {}, "the class may have worked"
    works = pod(ready=True, name="former", template="t1")
    assert rollout(works, not_starting("t2")) == known, "the class works"


@NOT_STARTING
def test_what_the_cluster_refuses_a_mended_model_is_seen_though_its_former_revision_did_not_start(
    not_starting: Callable[..., Pod], after: float
) -> None:
    known = seen(not_starting(), after=after)
    stuck = pod(node=None, unschedulable=NO_CPU)
    found = seen(stuck, of=MENDED, after=after + 300, known=known)
    assert "Insufficient cpu" in found["l4-24gb"].why


@pytest.mark.parametrize(
    "same",
    [
        {"scaling": {"minReplicas": 2, "maxReplicas": 9}},
        {"priority": 10},
        {"variants": [{"class": "l4-24gb", "maxReplicas": 3}]},
        {"servedNames": ["chat"]},
    ],
)
def test_another_number_of_replicas_or_place_is_no_other_revision(same: dict[str, object]) -> None:
    assert revision(**same) == revision()


def test_each_class_has_its_revision() -> None:
    def of(gpu_class: str) -> tuple[EngineRevision, ...]:
        variants = ({"class": "h100-80gb"}, {"class": "h100-80gb", "quantization": "FP8"})
        specs = ({"source": {"uri": "hf://org/model"}, "variants": [each]} for each in variants)
        return tuple(engine_revision(ModelSpec.model_validate(s), gpu_class, None, None) for s in specs)

    assert len(set(map(str, of("l4-24gb")))) == 1
    assert len(set(map(str, of("h100-80gb")))) == 2


def test_a_class_in_backoff_is_the_last_choice_for_preemption_too() -> None:
    """Even where less would go for it: a replica does not start there, so its GPUs would be taken for nothing."""
    high = demand("ns/high", candidate("a"), candidate("b"), priority=10, backoffs={"a": "its engine crashes there"})
    spare = demand("ns/spare", candidate("a"), minimum=0, standing={"a": standing(1, 1, name="a")})
    needed = demand("ns/needed", candidate("b"), minimum=1, standing={"b": standing(1, 1, name="b")})

    placed = plan([high, spare, needed], [supply("a", 0, of=1), supply("b", 0, of=1)])

    assert {v.gpu_class: v.waiting for v in placed["ns/high"].variants if v.replicas} == {"b": 1}
    assert placed["ns/spare"].missing == 0
