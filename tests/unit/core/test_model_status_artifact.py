"""What is known of a source: read once, shared, remembered, and told when it cannot be had."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import Condition
from shoal.api.model import Model, ModelStatus, PodTemplate
from shoal.core.architectures import facts_of
from shoal.core.artifacts import NO_POD_SECONDS, SourceReading, source_key
from shoal.core.artifacts import read as read_at
from shoal.core.facts import Container, MetadataJob, Pod
from shoal.core.routing.resolve import served_model
from shoal.core.status.modelstatus import Observed, ServedNames, status
from shoal.engine.wires import differences_of
from shoal.gateway.modellist import one

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SAID = {"source": "hf://org/m", "revision": "a" * 40, "weightBytes": 16_000_000_000}


@pytest.mark.parametrize(
    ("architecture", "engine", "runs", "able"),
    [
        ("Qwen2VLForConditionalGeneration", {"toolCallParser": "qwen"}, "SGLang", ("generate", "tools", "vision")),
        ("Qwen2VLForConditionalGeneration", {"type": "vLLM"}, "vLLM", ("generate", "score", "vision")),
        ("WhisperForConditionalGeneration", {"type": "vLLM"}, "vLLM", ("transcribe",)),
        ("XLMRobertaModel", {}, "SGLang", ("embed",)),
        (None, {}, "SGLang", ("embed", "generate")),  # the engine judges
    ],
)
def test_the_status_says_what_clients_read_of_the_models_abilities(
    architecture: str | None, engine: dict[str, Any], runs: str, able: tuple[str, ...]
) -> None:
    """The facts are those of this status: gateways see them with it, and list the same."""
    config = {"architectures": [architecture], "model_type": "x", "hidden_size": 64, "num_attention_heads": 4}
    facts = None if architecture is None else facts_of(config | {"num_hidden_layers": 2}, source="hf://org/m")
    declared = {"source": {"uri": "hf://org/m"}, "engine": engine}
    given = Model.model_validate({"metadata": {"name": "m", "namespace": "ns", "uid": "u"}, "spec": declared})
    seen = Observed(
        model=given, problems=(), served=ServedNames(("m",), ()), placement=None, deployments=(), pods=(),
        reading=SourceReading(facts=facts, waiting="" if facts else "a pod"), differences=differences_of(runs),
    )  # fmt: skip
    found = status(seen, NOW)
    assert found.capabilities == able
    answer = json.loads(one("m", served_model(given.model_copy(update={"status": found}), differences_of(runs))))
    assert answer["capabilities"] == list(able)


def read(given: Model, *, later: float = 0.0, **seen: Any) -> SourceReading:
    return read_at(given, **seen, now=NOW + timedelta(seconds=later))


def model(name: str = "chat", *, uri: str = "hf://org/m", status: dict[str, Any] | None = None, **source: Any) -> Model:
    return Model.model_validate(
        {
            "metadata": {"name": name, "namespace": "ns", "uid": name, "generation": 2},
            "spec": {"source": {"uri": uri, **source}},
            **({"status": status} if status else {}),
        }
    )


def with_facts(name: str, **source: Any) -> Model:
    plain = model(name, **source)
    return model(name, status={"artifact": SAID | {"readBy": source_key(plain)}}, **source)


def job(*, failed: str | None = None, deleting: bool = False) -> MetadataJob:
    return MetadataJob(
        "ns", source_key(model()), "j", active=failed is None, failed=failed, deleting=deleting, created=NOW
    )


def pod(code: int | None, message: object = "", *, reason: str | None = None, minutes: int = 0, **more: Any) -> Pod:
    text = message if isinstance(message, str) else json.dumps(message)
    state = Container("facts", False, 0, None, None, code, reason, text, running=code is None)
    return Pod(
        "ns", f"p{minutes}", f"p{minutes}", "n", code is not None, False, False, {}, None,
        created=NOW + timedelta(minutes=minutes), containers=(state,), job=source_key(model()), **more,
    )  # fmt: skip


def test_facts_of_an_ended_job_are_the_facts_and_say_for_which_source_they_were_read() -> None:
    reading = read(model(), same_source=(), job=job(), pods=[pod(0, {"facts": SAID})])
    assert reading.facts == ArtifactFacts.model_validate(SAID | {"readBy": source_key(model())})
    assert not reading.needs_job


def test_a_model_that_has_facts_reads_nothing_again_and_one_with_the_same_source_takes_them() -> None:
    assert read(with_facts("chat"), same_source=(), job=None, pods=()).facts is not None
    shared = read(model("other"), same_source=[with_facts("chat"), model("other")], job=None, pods=())
    assert shared.facts is not None
    assert not shared.needs_job


@pytest.mark.parametrize("change", [{"uri": "hf://org/m@v2"}, {"digest": f"sha256:{'0' * 64}"}])
def test_another_source_is_read_anew(change: dict[str, str]) -> None:
    old = with_facts("chat")
    assert old.status is not None
    new = model("chat", status=old.status.model_dump(by_alias=True), **change)
    reading = read(new, same_source=[new], job=None, pods=())
    assert reading.facts is None
    assert reading.needs_job


def test_why_the_source_cannot_be_read_is_the_jobs_own_sentence() -> None:
    said = {"reason": "Gated", "message": "hf://org/m is gated: create the Secret"}
    reading = read(model(), same_source=(), job=job(), pods=[pod(1, said)])
    assert reading.failure is not None
    assert (reading.failure.reason, reading.failure.message) == ("Gated", said["message"])
    assert reading.failure.waits_for_a_person


def test_the_last_try_counts() -> None:
    first = pod(1, {"reason": "SourceUnreachable", "message": "no answer"})
    assert read(model(), same_source=(), job=job(), pods=[first, pod(0, {"facts": SAID}, minutes=1)]).facts is not None


def test_a_job_that_was_killed_says_how() -> None:
    reading = read(model(), same_source=(), job=job(), pods=[pod(137, reason="OOMKilled")])
    assert reading.failure is not None
    assert reading.failure.reason == "StageFailed"
    assert reading.failure.message == "reading the source's metadata ended with exit code 137: OOMKilled"


def test_facts_that_another_version_wrote_are_told() -> None:
    reading = read(model(), same_source=(), job=job(), pods=[pod(0, {"facts": {"source": 7}})])
    assert reading.failure is not None
    assert reading.failure.message.startswith("the source's facts are not understood: source: ")


def test_a_job_without_a_pod_asks_whether_the_service_account_is_there() -> None:
    given = model(uri="s3://weights/m")
    given = given.model_copy(
        update={"spec": given.spec.model_copy(update={"pod": PodTemplate.model_validate({"serviceAccountName": "sa"})})}
    )
    reading = read(given, same_source=(), job=job(), pods=(), later=10)
    assert reading.waiting.endswith("(spec.pod.serviceAccountName: is there a ServiceAccount sa in namespace ns?)")
    assert "serviceAccountName" not in read(model(), same_source=(), job=job(), pods=(), later=10).waiting


def test_a_job_past_its_deadline_says_so() -> None:
    late = job(failed="DeadlineExceeded: Job was active longer than specified deadline")
    reading = read(model(), same_source=(), job=late, pods=())
    assert reading.failure is not None
    assert reading.failure.message == (
        f"reading the source's metadata: Job {late.key} failed: DeadlineExceeded: Job was active longer than specified "
        f"deadline; it is tried again, and kubectl describe job -n ns {late.name} says more"
    )


def test_while_it_is_tried_again_what_failed_stays_told() -> None:
    placed = Condition(
        type="Placed", status="Unknown", observed_generation=2, last_transition_time=NOW,
        reason="SourceUnreachable", message="no answer from hub",
    )  # fmt: skip
    status = ModelStatus(conditions=(placed,)).model_dump(by_alias=True, mode="json")
    again = read(model(status=status), same_source=(), job=None, pods=())
    assert again.failure is not None
    assert again.failure.message == "no answer from hub"
    assert again.needs_job
    edited = Model.model_validate(
        model(status=status).model_dump(by_alias=True, mode="json") | {"metadata": {"name": "chat", "generation": 3}}
    )
    assert read(edited, same_source=(), job=None, pods=()).failure is None


def test_what_it_waits_for_is_the_schedulers_sentence_or_where_to_look() -> None:
    waits = pod(None, unschedulable='persistentvolumeclaim "weights" not found')
    assert 'persistentvolumeclaim "weights" not found' in read(model(), same_source=(), job=job(), pods=[waits]).waiting
    soon = read(model(), same_source=(), job=job(), pods=())
    assert soon.waiting == f"Job {source_key(model())} reads the source's metadata"
    nothing = read(model(), same_source=(), job=job(), pods=(), later=NO_POD_SECONDS)
    assert nothing.waiting.endswith(f"see kubectl describe job -n ns {source_key(model())}")
    assert read(model(), same_source=(), job=job(deleting=True), pods=()).waiting.startswith("waits for Job")


def test_a_claim_that_does_not_exist_is_a_cause_that_waits_for_a_person_until_it_is_created() -> None:
    lost = model(uri="pvc://weights/llama")
    text = '0/3 nodes are available: persistentvolumeclaim "weights" not found. not found'
    reading = read(lost, same_source=(), job=job(), pods=[pod(None, unschedulable=text)])
    assert reading.failure is not None
    assert reading.failure.message == (
        "spec.source.uri: there is no PersistentVolumeClaim weights in namespace ns; create it, or name another one"
    )
    assert reading.failure.reason == "SourceNotFound"
    assert reading.failure.waits_for_a_person
    assert not reading.needs_job  # its pod starts once the claim is there
    assert read(lost, same_source=(), job=job(), pods=[pod(None)]).failure is None
    # The claim of the node cache is the operator's to make.
    text = text.replace("weights", "shoal-cache")
    assert read(lost, same_source=(), job=job(), pods=[pod(None, unschedulable=text)]).failure is None


def test_what_a_job_said_is_known_after_it_is_gone() -> None:
    reading = read(model(), same_source=(), job=None, pods=(), reported=ArtifactFacts.model_validate(SAID))
    assert reading.facts is not None
    assert reading.facts.read_by == source_key(model())
    assert not reading.needs_job
