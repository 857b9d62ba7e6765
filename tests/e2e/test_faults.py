"""Bad input, and what the user reads: a condition with a reason and what to do, and nobody else disturbed."""

import pytest

from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def test_unknown_class(fleet: Fleet) -> None:
    fleet.make_model("bad-class", variants=[{"class": "b300-288gb"}])
    message = fleet.expect("bad-class", "Accepted", "ClassNotFound")
    assert "b300-288gb" in message
    assert fleet.condition("bad-class", "Ready")["status"] == "False"
    fleet.delete_model("bad-class")


def test_more_gpus_than_any_node_has(fleet: Fleet) -> None:
    fleet.make_model("too-wide", engine={"parallelism": {"tensor": 16}}, variants=[{"class": "h100-80gb"}])
    message = fleet.expect("too-wide", "Placed", "NoFit")
    assert "`tensor` is 16, and the largest node has 8 GPUs" in message
    fleet.delete_model("too-wide")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--tp=2", "parallelism"),
        ("--chunked-prefill=4096", "--chunked-prefill-size"),
        ("--no-such-thing", "--no-such-thing"),
    ],
)
def test_extra_args_that_shoal_owns_or_nobody_knows(fleet: Fleet, argument: str, says: str) -> None:
    fleet.make_model("bad-args", engine={"extraArgs": [argument]})
    message = fleet.expect("bad-args", "Accepted", "ArgumentsRefused")
    assert says in message
    fleet.delete_model("bad-args")


def test_unreachable_source(fleet: Fleet) -> None:
    fleet.make_model("no-host", source={"uri": "https://nowhere.invalid/model.tar"})
    assert "nowhere.invalid" in fleet.expect("no-host", "Ready", "SourceUnreachable")
    fleet.delete_model("no-host")


def test_source_that_is_not_there(fleet: Fleet) -> None:
    fleet.make_model("no-path", source={"uri": "file:///opt/shoal/models/absent"})
    assert "/opt/shoal/models/absent" in fleet.expect("no-path", "Ready", "SourceNotFound")
    fleet.delete_model("no-path")


def test_wrong_digest_names_both(fleet: Fleet) -> None:
    wanted = "sha256:" + "0" * 64
    fleet.make_model("bad-digest", source={"uri": "file:///opt/shoal/models/tiny-chat", "digest": wanted})
    message = fleet.expect("bad-digest", "Ready", "DigestMismatch")
    assert "0" * 12 in message
    fleet.delete_model("bad-digest")


def test_missing_secret(fleet: Fleet) -> None:
    fleet.make_model("no-secret", source={"uri": "hf://meta/gated", "secretRef": {"name": "hub-token"}})
    message = fleet.expect("no-secret", "Accepted", "SecretNotFound")
    assert "hub-token" in message
    fleet.delete_model("no-secret")


def test_a_served_name_belongs_to_the_oldest_model(fleet: Fleet) -> None:
    fleet.make_model("late-comer", servedNames=["tiny-chat", "late"])
    message = fleet.expect("late-comer", "Accepted", "NameClaimed")
    assert "tiny-chat" in message
    assert "demo/late-comer" in message
    assert fleet.model("late-comer")["status"]["servedNames"] == ["late"]
    assert fleet.model("tiny-chat")["status"]["servedNames"] == ["tiny-chat"]
    fleet.delete_model("late-comer")


def test_an_engine_that_exits_shows_its_own_last_lines(fleet: Fleet) -> None:
    fleet.make_model("bad-engine", pod={"env": [{"name": "SHOAL_SIM_GPU", "value": "abacus"}]})
    message = fleet.expect("bad-engine", "Ready", "EngineFailed")
    assert "abacus" in message
    fleet.delete_model("bad-engine")


def test_a_model_deleted_while_its_engine_loads_gives_its_gpus_back_at_once(fleet: Fleet) -> None:
    fleet.make_model("deleted-early", pod={"env": [{"name": "SHOAL_SIM_LOAD_SECONDS", "value": "300"}]})
    selector = ("-n", "demo", "-l", "shoal.dev/model=deleted-early")

    def loads() -> bool:
        statuses = [s for p in fleet.get("pods", *selector) for s in p["status"].get("containerStatuses", [])]
        return any("running" in s["state"] for s in statuses)

    until(loads, 120, lambda: fleet.kubectl("get", "pods", *selector))
    fleet.delete_model("deleted-early")
    until(lambda: not fleet.get("pods", *selector), 120, lambda: fleet.kubectl("get", "pods", *selector))
