"""The benchmark of endpoints has each endpoint, and its requests are ones that a gateway answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from shoal.core.capabilities import Capability
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import TABLE
from shoal.gateway.dialects import DIALECTS
from tests.bench.bench_endpoints import ENDPOINTS, Endpoint
from tests.support.gateway import API_KEY, MODEL, gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

FACTS = Facts(vocabulary=151_936, media=frozenset({"image"}))


def test_each_endpoint_is_measured() -> None:
    assert {endpoint.path for endpoint in ENDPOINTS} == TABLE.keys() | DIALECTS.keys()


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if not e.streams], ids=lambda e: e.name)
async def test_its_request_is_answered(tmp_path: Path, endpoint: Endpoint) -> None:
    """As an engine of load.c would answer it."""

    async def answer(request: EngineRequest) -> None:
        await request.answer(200, json.dumps(endpoint.answer).encode())

    async with gateway(tmp_path, ScriptedEngine(answer)) as it:
        it.models[MODEL.key] = replace(MODEL, capabilities=frozenset(get_args(Capability)), facts=FACTS)
        it.changed()
        headers = {"authorization": f"Bearer {API_KEY}", "content-type": endpoint.content_type}
        body = endpoint.body.replace(b"bench/model", MODEL.claims[0].encode())
        async with it.session.post(it.url + endpoint.path, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
