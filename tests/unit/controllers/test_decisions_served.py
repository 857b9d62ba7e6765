"""`GET /v1/decisions`: the leader tells, another one says who leads."""

from datetime import UTC, datetime

from shoal.api.decisions import DecisionRecord, Decisions, ModelScaling
from shoal.controllers.scaling.serve import add_routes
from shoal.net.shell import Shell
from tests.support.shells import call


class FakeHistory:
    """Two Models, one with a decision."""

    def __init__(self) -> None:
        told = {"wanted": 1, "ready_replicas": 1, "reason": "ReplicasReady", "message": ""}
        decision = DecisionRecord(
            time=datetime(2026, 1, 1, tzinfo=UTC), before=0, wanted=1, reason="Waking", message="1 held"
        )
        self.models = {
            key: ModelScaling.model_validate({"model": key, "decisions": (decision,)} | told)
            for key in ("code/b", "chat/a")
        }

    def stats(self, namespace: str | None = None) -> list[ModelScaling]:
        return [m for key, m in self.models.items() if namespace in (None, key.partition("/")[0])]

    def model(self, key: str) -> ModelScaling | None:
        return self.models.get(key)


async def ask(path: str, *, leads: bool = True, leader: str = "op-1") -> tuple[int, str]:
    shell = Shell("the operator")
    add_routes(shell, FakeHistory(), operator="op-1", leads=lambda: leads, leader=lambda: leader)
    path, _, query = path.partition("?")
    answer = await call(shell, path, query=query.encode())
    return answer.status, answer.body.decode()


async def test_the_leader_tells_of_every_model_by_name() -> None:
    status, text = await ask("/v1/decisions")
    said = Decisions.model_validate_json(text)
    assert status == 200
    assert (said.operator, said.leads) == ("op-1", True)
    assert [m.model for m in said.models] == ["chat/a", "code/b"]


async def test_it_can_be_asked_for_one_namespace() -> None:
    _, text = await ask("/v1/decisions?namespace=code")
    assert [m.model for m in Decisions.model_validate_json(text).models] == ["code/b"]


async def test_one_model_comes_with_its_decisions() -> None:
    _, text = await ask("/v1/decisions/chat/a")
    (model,) = Decisions.model_validate_json(text).models
    assert model.decisions[0].reason == "Waking"


async def test_a_model_that_is_not_there_is_a_404_that_names_it() -> None:
    status, text = await ask("/v1/decisions/chat/none")
    assert status == 404
    assert "has decided nothing on a Model chat/none yet" in text


async def test_one_that_does_not_lead_names_the_leader() -> None:
    for path in ("/v1/decisions", "/v1/decisions/chat/a"):
        status, text = await ask(path, leads=False, leader="op-2")
        assert status == 503
        assert "op-1 does not lead: op-2 leads" in text


async def test_one_that_knows_of_no_leader_says_so() -> None:
    status, text = await ask("/v1/decisions", leads=False, leader="")
    assert status == 503
    assert "nobody is known to lead" in text
