"""The benchmark of routes by cost measures what its rows say."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import cost_routes
from tests.bench.bench_routes import ROWS, Row
from tests.support.gateway import MODEL, gateway, replica, tenant
from tests.support.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_the_model_that_answers_a_request_of_a_row(tmp_path: Path, row: Row) -> None:
    async with gateway(tmp_path, ScriptedEngine(), ScriptedEngine()) as it:
        names = ("model", cost_routes.SMALL)
        it.models.clear()
        it.pods.clear()
        for number, name in enumerate(names, 1):
            claims = ("bench/model" if name == "model" else name,)
            model = replace(MODEL, key=f"bench/{name}", uid=f"uid-{name}", claims=claims)
            it.models[model.key], it.pods[f"bench/{number}"] = model, replica(number, model=model)
        limits = cost_routes.LIMITS if row.key == cost_routes.LIMITED_KEY else {}
        it.tenants["acme"] = tenant(models=[f"bench/{name}" for name in names], **limits)
        it.routes |= cost_routes.routes()
        it.app.quotas.ledger = cost_routes.prices()
        it.changed()
        it.hear(2)
        body = row.request(1).partition(b"\r\n\r\n")[2]
        headers = {"content-type": "application/json"}
        response = await it.post(body, headers=headers)
        assert response.status == 200, await response.text()
        (record,) = await it.records()
        leaves = row.route == cost_routes.LEAVES
        assert record.data.model == f"bench/{cost_routes.SMALL if leaves else 'model'}"
