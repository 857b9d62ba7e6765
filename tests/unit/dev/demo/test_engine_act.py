"""The demo's act on engines: the answers of two engines through three APIs, and the bill that must come to them."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
import yaml

from shoal.api.model import Model
from shoal.api.tenant import Tenant
from shoal_dev.demo import engineact
from tests.support.gateway import gateway, replica, tenant
from tests.support.routes import served
from tests.support.scripted_engine import ScriptedEngine
from tests.support.vllm_engine import VLLMWords

Sums = dict[str, tuple[int, ...]]
RUN: Sums = {"engines/on-sglang": (21, 9), "engines/on-vllm": (120, 9)}


class Ledger:
    """A cluster whose ledger says these sums, one after the other."""

    def __init__(self, *told: Sums) -> None:
        self._told = list(told)
        self.tools = SimpleNamespace(run=self._run)

    def _run(self, _program: Path, args: tuple[str, ...], *_: object) -> str:
        # A real ledger refuses to show a tenant of whom it has no usage, as at the begin of the act.
        assert args[2:] == ("usage", "--by", "tenant,model", "-o", "json")
        sums = self._told.pop(0) if len(self._told) > 1 else self._told[0]
        rows = [
            {"tenant": tenant, "model": name, "inputTokens": a, "outputTokens": b}
            for name, (a, b) in sums.items()
            for tenant in (engineact.TENANT, "another")
        ]
        return json.dumps({"rows": rows})


def until_billed(ledger: Ledger, timeout: float) -> None:
    cluster = cast("Any", ledger)
    before = engineact._billed(cluster)  # pyright: ignore[reportPrivateUsage]
    engineact._until_billed(cluster, before, RUN, timeout)  # pyright: ignore[reportPrivateUsage]


def grown(times: int) -> Sums:
    return {name: tuple(times * tokens for tokens in sums) for name, sums in RUN.items()}


def test_the_bill_must_grow_by_what_this_run_was_told() -> None:
    until_billed(Ledger({}, {}, grown(1)), 60)
    until_billed(Ledger(grown(3), grown(3), grown(4)), 60)
    with pytest.raises(click.ClickException, match="the ledger has"):
        until_billed(Ledger(grown(3)), 0)
    with pytest.raises(click.ClickException, match="the ledger has"):
        until_billed(Ledger({}, {**grown(1), "engines/on-vllm": (120, 8)}), 0)


def test_the_example_has_the_models_and_the_tenant_of_the_act() -> None:
    objects = list(yaml.safe_load_all(engineact.FILE.read_text()))
    models = [Model.model_validate(one) for one in objects if one["kind"] == "Model"]
    assert {model.metadata.name: model.spec.engine.type for model in models} == engineact.MODELS
    assert {model.metadata.namespace for model in models} == {engineact.NAMESPACE}
    (payer,) = [Tenant.model_validate(one) for one in objects if one["kind"] == "Tenant"]
    assert payer.metadata.name == engineact.TENANT


async def test_three_apis_are_answered_by_both_engines_and_metered_as_told(tmp_path: Path) -> None:
    sglang, vllm = ScriptedEngine(), ScriptedEngine()
    words = VLLMWords()
    async with gateway(tmp_path, sglang, vllm) as it:
        models = {name: served(f"{engineact.NAMESPACE}/{name}") for name in engineact.MODELS}
        it.pods.clear()
        for number, (name, model) in enumerate(models.items(), 1):
            it.models[model.key] = model
            it.pods[f"{model.key}-{number}"] = replica(number, model, engine=engineact.MODELS[name])
        it.tenants["umbrella"] = tenant("umbrella", engineact.KEY, tuple(model.key for model in models.values()))
        words.adapters = lambda: {f"{engineact.NAMESPACE}/on-vllm"}
        vllm.behave = words.behave
        it.changed()
        await asyncio.to_thread(engineact._until_known, it.url)  # pyright: ignore[reportPrivateUsage]
        asks = engineact._APIS.values()  # pyright: ignore[reportPrivateUsage]
        told = [await asyncio.to_thread(ask, it.url, model.key) for model in models.values() for ask in asks]
        assert (len(sglang.requests), len(vllm.requests)) == (3, 3)
        records = await it.records(count=6)
        assert sorted(told) == sorted((each.data.input_tokens, each.data.output_tokens) for each in records)
