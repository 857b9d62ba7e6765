"""What a LoRAAdapter and a LoRAPool are told: who may join, which revision answers, what the conditions say."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api import reasons
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter, LoRAAdapterStatus
from shoal.api.lorapool import AdapterCounts, LoRAPool
from shoal.api.model import Model
from shoal.api.tenant import TenantSpec
from shoal.core.lora.format.basename import other_base
from shoal.core.lora.joining import may_join
from shoal.core.lora.lifecycle import revisions
from shoal.core.lora.lifecycle.revisions import Revisions
from shoal.core.routing.consent import not_granted
from shoal.core.routing.servednames import served_names
from shoal.core.status import poolstatus
from shoal.core.status.adapterstatus import Held, Seen, status
from shoal.core.status.conditions import find
from shoal.core.status.observed import ModelProblem, ServedNames
from tests.support.lora_fleet import adapter, pool, revision_of

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
V1 = AdapterRevision(revision=revision_of("v1"), uri="s3://a/v1", rank=16, size_bytes=27)
V2 = AdapterRevision(revision=revision_of("v2"), uri="s3://a/v2", rank=16, size_bytes=27)
CORRUPT = ModelProblem(reasons.CORRUPT, "the header of adapter_model.safetensors is broken")


def lora(name: str = "poet", *, age: int = 0, namespace: str = "chat", **spec: Any) -> LoRAAdapter:
    body = adapter(namespace, name, **spec)
    metadata = {"uid": name, "generation": 1, "creationTimestamp": NOW - timedelta(seconds=age)}
    return LoRAAdapter.model_validate(body | {"metadata": body["metadata"] | metadata})


def the_pool(name: str = "pool", *, age: int = 0, **spec: Any) -> LoRAPool:
    body = pool("chat", name, **spec)
    metadata = {"uid": name, "creationTimestamp": NOW - timedelta(seconds=age)}
    return LoRAPool.model_validate(body | {"metadata": body["metadata"] | metadata})


def told(one: LoRAAdapter | None = None, **seen: Any) -> LoRAAdapterStatus:
    known: dict[str, Any] = {"served": ServedNames(("poet",), ()), "revisions": Revisions(V1)}
    return status(Seen(one or lora(), **known | seen), NOW)


def base(source: str) -> Model:
    spec = {"source": {"uri": source}}
    return Model.model_validate({"metadata": {"name": "base", "namespace": "chat", "uid": "base"}, "spec": spec})


def said(found: LoRAAdapterStatus) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in found.conditions}


# --- who may join ---------------------------------------------------------------------------------------------------


def test_an_adapter_joins_from_where_the_pool_allows() -> None:
    def problem(theirs: LoRAPool, namespace: str, labels: dict[str, str] | None = None) -> str | None:
        found = may_join(lora(namespace=namespace), theirs, pool_problem=None, labels=labels)
        return found.reason if found else None

    assert problem(the_pool(), "chat") is None
    assert problem(the_pool(), "other") == reasons.NAMESPACE_NOT_ALLOWED
    assert problem(the_pool(allowedNamespaces={"from": "All"}), "other") is None
    chosen = the_pool(allowedNamespaces={"from": "Selector", "selector": {"matchLabels": {"team": "a"}}})
    assert problem(chosen, "other", {"team": "a", "more": "x"}) is None
    assert problem(chosen, "other", {"team": "b"}) == reasons.NAMESPACE_NOT_ALLOWED
    assert problem(chosen, "other", None) == reasons.PENDING, "labels that are not known are no refusal"
    assert problem(chosen, "chat", None) is None


def test_a_pool_that_is_not_there_or_not_accepted_is_named() -> None:
    lost = may_join(lora(), None, pool_problem=None, labels={})
    assert lost is not None
    assert (lost.reason, "there is no LoRAPool chat/pool" in lost.message) == (reasons.POOL_NOT_FOUND, True)
    refuses = ModelProblem(reasons.ENGINE_REFUSES, "with --dp-size SGLang loads no adapters")
    refused = may_join(lora(), the_pool(), pool_problem=refuses, labels={})
    assert refused is not None
    assert refused.reason == reasons.ENGINE_REFUSES
    assert "--dp-size" in refused.message


def test_a_short_name_belongs_to_the_oldest_model_or_adapter() -> None:
    young, old = lora("young", age=1, servedNames=["fine", "mine"]), lora("old", age=9, servedNames=["fine"])
    served = served_names(young, [young, old])
    assert served.owned == ("mine",)
    assert served.lost == (("fine", "the older LoRAAdapter chat/old"),)
    found = told(served=served)
    assert said(found)[reasons.ACCEPTED] == ("True", reasons.NAME_CLAIMED)
    assert found.served_names == ("mine",)


def test_tenants_that_are_listed_and_do_not_grant_it_are_named_and_no_more_is_told_of_them() -> None:
    specs = {name: TenantSpec.model_validate(spec) for name, spec in GRANTING.items()}
    many = tuple(f"t{n}" for n in range(9))
    listed = ("*", "acme", "globex", "nobody", *many)
    missing = not_granted(listed, specs.get, adapter="chat/poet", model="chat/base")
    assert missing == ("globex", "nobody", *many), "one that does not exist is as one that does not grant it"
    found = told(not_granted=missing)
    assert said(found)[reasons.ACCEPTED] == ("True", reasons.NOT_GRANTED)
    accepted = find(found.conditions, reasons.ACCEPTED)
    assert accepted is not None
    assert accepted.message.startswith("for globex, nobody, t0, t1, t2 and 6 more it does not exist: a Tenant that is")
    named = told(not_granted=("globex",), served=ServedNames((), (("poet", "Model chat/poet"),)))
    accepted = find(named.conditions, reasons.ACCEPTED)
    assert accepted is not None
    assert accepted.reason == reasons.NAME_CLAIMED
    assert "for globex it does not exist" in accepted.message


GRANTING: dict[str, dict[str, Any]] = {
    "acme": {"models": [{"namespace": "chat", "name": "base"}]},
    "globex": {"models": [{"namespace": "chat", "name": "base", "adapters": "None"}]},
}


# --- revisions ------------------------------------------------------------------------------------------------------


def test_the_first_revision_answers_at_once_and_a_newer_one_comes_beside_it() -> None:
    first = revisions.found(Revisions(), V1, "k1")
    assert (first.current, first.next) == (V1, None)
    both = revisions.found(first, V2, "k2")
    assert (both.current, both.next, both.read_by) == (V1, V2, "k2")
    assert revisions.switched(both).current == V2
    back = revisions.found(both, V1, "k3")
    assert (back.current, back.next) == (V1, None), "who goes back keeps what answers"
    moved = V1.model_copy(update={"uri": "s3://a/v1-copied"})
    same = revisions.found(first, moved, "k4")
    assert (same.current, same.next) == (moved, None), "nothing is loaded, and the former files may go"


def test_a_bad_newer_revision_leaves_the_one_that_answers() -> None:
    bad = revisions.refused(Revisions(V1, None, "k1"), CORRUPT, "k2", revision=V2.revision)
    assert (bad.current, bad.next) == (V1, None)
    found = told(revisions=bad)
    assert said(found)[reasons.AVAILABLE][0] == "True"
    assert said(found)[reasons.READY] == ("False", reasons.CORRUPT)
    assert said(found)[reasons.STALLED] == ("True", reasons.CORRUPT)
    ready = next(c for c in found.conditions if c.type == reasons.READY)
    assert "goes on answering" in ready.message


def test_a_revision_that_no_longer_fits_its_pool_stops_answering() -> None:
    gone = revisions.refused(
        Revisions(V1, None, "k1"), ModelProblem(reasons.RANK_TOO_HIGH, "16 > 8"), "k2", revision=V1.revision
    )
    assert gone.current is None
    assert told(revisions=gone).revision is None


def test_what_was_read_is_known_after_a_restart_also_what_was_refused() -> None:
    good = told(revisions=Revisions(V1, V2, "k2"))
    assert revisions.stored(lora().model_copy(update={"status": good})) == Revisions(V1, V2, "k2")
    bad = told(revisions=Revisions(None, None, "k1", CORRUPT))
    known = revisions.stored(lora().model_copy(update={"status": bad}))
    assert known == Revisions(None, None, "k1", CORRUPT)


def test_a_refusal_that_another_problem_hides_is_read_again() -> None:
    """Else the adapter would be taken for a good one when its pool comes back."""
    lost = ModelProblem(reasons.POOL_NOT_FOUND, "there is no LoRAPool")
    assert told(revisions=Revisions(V1, None, "k2", CORRUPT), problem=lost).read_by is None
    assert told(revisions=Revisions(V1, None, "k1"), problem=lost).read_by == "k1"


def test_what_is_read_depends_on_what_is_asked_and_not_on_how_many_there_may_be() -> None:
    one = lora()
    key = revisions.read_key(one, "rank 64")
    assert revisions.read_key(lora(residency="Pinned"), "rank 64") == key
    assert revisions.read_key(one, "rank 8") != key
    assert revisions.read_key(lora(uri="s3://a/v2"), "rank 64") != key


# --- conditions -----------------------------------------------------------------------------------------------------


def test_an_adapter_on_demand_says_nothing_of_where_it_is() -> None:
    quiet = told(held=Held())
    assert said(quiet)[reasons.READY] == ("True", reasons.ON_DEMAND)
    for held in (Held(replicas=3), Held(replicas=3, loaded=2), Held(replicas=2, stale=2)):
        assert told(held=held) == quiet


def test_one_that_is_kept_says_whether_it_is_where_it_should_be() -> None:
    warm = lora(residency="Warm", minCopies=2)

    def ready(**held: Any) -> tuple[str, str]:
        return said(told(warm, held=Held(**held)))[reasons.READY]

    assert ready() == ("True", reasons.WAITS_FOR_REPLICA), "without a replica it waits for nobody"
    assert ready(replicas=3, loaded=1) == ("False", reasons.LOADING_ADAPTER)
    assert ready(replicas=3, loaded=2) == ("True", reasons.RESIDENT)
    assert ready(replicas=1, loaded=1) == ("True", reasons.RESIDENT)
    full = ModelProblem(reasons.NO_ROOM, "9 are pinned and a replica takes 7")
    assert ready(replicas=3, loaded=1, no_room=full) == ("False", reasons.NO_ROOM)


def test_a_replica_that_is_not_heard_changes_nothing() -> None:
    warm = lora(residency="Warm", minCopies=2)
    before = told(warm, held=Held(replicas=2, loaded=2))
    known = warm.model_copy(update={"status": before})
    assert told(known, held=Held(replicas=2, stale=2)) == before
    assert told(known, held=Held(stale=1)) == before, "not even which replicas there are is known yet"
    assert said(told(known, held=Held(replicas=2, loaded=1)))[reasons.READY] == ("False", reasons.LOADING_ADAPTER)


def test_a_load_that_fails_everywhere_is_told_and_one_that_works_elsewhere_is_not() -> None:
    failure = ModelProblem(reasons.LOAD_FAILED, "the engine's words (replica chat/base-1)")
    nowhere = told(held=Held(replicas=2, failure=failure))
    assert said(nowhere)[reasons.AVAILABLE] == ("False", reasons.LOAD_FAILED)
    assert said(nowhere)[reasons.READY] == ("False", reasons.LOAD_FAILED)
    assert said(told(held=Held(replicas=2, loaded=1, failure=failure)))[reasons.READY][0] == "True"


def test_a_newer_revision_that_does_not_load_is_told_while_the_old_one_answers() -> None:
    failure = ModelProblem(reasons.LOAD_HANGS, "no answer for 120 s (replica chat/base-1)")
    found = told(revisions=Revisions(V1, V2, "k2"), held=Held(replicas=1, loaded=1, next_failure=failure))
    assert said(found)[reasons.READY] == ("False", reasons.LOAD_HANGS)
    assert said(found)[reasons.AVAILABLE][0] == "True"
    assert (found.revision, found.next) == (V1.revision, V2)


def test_a_source_that_is_away_is_tried_again_and_one_that_is_broken_waits_for_a_person() -> None:
    away = told(revisions=Revisions(), failure=ModelProblem(reasons.SOURCE_UNREACHABLE, "s3: no answer"))
    assert said(away)[reasons.RECONCILING] == ("True", reasons.SOURCE_UNREACHABLE)
    broken = told(revisions=Revisions(None, None, "k1", CORRUPT))
    assert said(broken)[reasons.STALLED] == ("True", reasons.CORRUPT)
    reading = told(revisions=Revisions(), waiting="its source is being read")
    assert said(reading)[reasons.ACCEPTED] == ("Unknown", reasons.READING_ADAPTER)
    assert said(reading)[reasons.AVAILABLE][0] == "False"


# --- pools ----------------------------------------------------------------------------------------------------------


def test_the_oldest_pool_has_the_model() -> None:
    old, young = the_pool("old", age=9), the_pool("young", age=1)
    assert poolstatus.claimed(old, old) is None
    problem = poolstatus.claimed(young, old)
    assert problem is not None
    seen = poolstatus.Seen(young, problem, AdapterCounts(total=0, available=0, failed=0))
    found = {c.type: (c.status, c.reason) for c in poolstatus.status(seen, NOW).conditions}
    assert found[reasons.ACCEPTED] == ("False", reasons.POOL_CLAIMED)
    assert found[reasons.STALLED] == ("True", reasons.POOL_CLAIMED)


def test_a_pool_says_that_its_model_is_being_replaced() -> None:
    counts = AdapterCounts(total=3, available=2, failed=1)
    rolling = poolstatus.Seen(the_pool(), None, counts, rolling="replicas start with the pool's arguments: base-l4")
    found = poolstatus.status(rolling, NOW)
    assert {c.type: c.reason for c in found.conditions}[reasons.READY] == reasons.ROLLING
    assert found.adapters == counts
    ready = poolstatus.status(poolstatus.Seen(the_pool(), None, counts), NOW)
    assert {c.type: (c.status, c.reason) for c in ready.conditions}[reasons.READY] == ("True", reasons.POOL_READY)


# --- the base that its config names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "source", "names"),
    [
        (None, "hf://meta-llama/Llama-3.1-8B", []),
        ("meta-llama/Llama-3.1-8B", "hf://meta-llama/Llama-3.1-8B@main", []),
        ("/data/models/llama-3.1-8b/", "hf://meta-llama/Llama-3.1-8B", []),
        ("Llama-3.1-8B", "s3://models/Llama-3.1-8B/", []),
        ("base", "file:///models/anything", []),  # the Model's name
        ("unsloth/Llama-3.1-8B-bnb-4bit", "hf://meta-llama/Llama-3.1-8B", ["Llama-3.1-8B-bnb-4bit"]),
    ],
)
def test_a_name_of_the_same_base_is_no_warning(named: str | None, source: str, names: list[str]) -> None:
    assert other_base(named, the_pool(baseNames=names), base(source)) == ""


def test_an_adapter_that_names_another_base_is_accepted_with_a_warning() -> None:
    warning = other_base("/opt/models/tiny-chat", the_pool(), base("hf://acme/tiny-code"))
    assert warning == (
        "its adapter_config.json names the base /opt/models/tiny-chat, and Model chat/base serves hf://acme/tiny-code: "
        "the shapes agree, so the adapter loads, but on another base its answers are wrong. If both are the same "
        "model, add /opt/models/tiny-chat to spec.baseNames of pool chat/pool"
    )
    found = told(other_base=warning)
    assert said(found)[reasons.ACCEPTED] == ("True", reasons.BASE_NAME_DIFFERS)
    assert said(found)[reasons.READY][0] == "True"
    # The name of the current revision is kept, so that a restart does not read the files again.
    kept = told(revisions=Revisions(V1.model_copy(update={"base": "tiny-chat"})))
    assert kept.base == "tiny-chat"
    assert lora().model_copy(update={"status": kept}).current == V1.model_copy(update={"base": "tiny-chat"})
