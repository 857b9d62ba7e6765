"""The examples by the same models that the operator reads them with."""

import hashlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import CustomResource
from shoal.api.model import Model
from shoal.api.schema import KINDS
from shoal.api.sources import parse_source
from shoal.api.tenant import Tenant
from shoal_dev.demo import loraact, routeact, scaleact, steps, tenantact
from shoal_dev.generate.command import repository_root

ROOT = repository_root() / "examples"
# Price lists are no objects of Kubernetes.
EXAMPLES = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "prices")


def _objects(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def _kinds(path: Path) -> list[CustomResource]:
    known = {kind.kind_name: kind for kind in KINDS}
    return [known[one["kind"]].model_validate(one) for one in _objects(path) if one["kind"] in known]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_validates_and_says_nothing_that_is_ignored(path: Path) -> None:
    for one in _objects(path):
        kind = next((k for k in KINDS if k.kind_name == one["kind"]), None)
        if kind is None:
            assert one["kind"] == "Namespace"
            continue
        read = kind.model_validate(one).model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert read["spec"] == one["spec"]


def test_the_two_tenants_of_the_demo_have_the_keys_that_its_act_uses() -> None:
    found = {one.metadata.name: one for one in _kinds(ROOT / steps.TENANTS_FILE) if isinstance(one, Tenant)}

    assert found.keys() == tenantact.KEYS.keys()
    for name, tenant in found.items():
        assert tenant.spec.keys[0].sha256 == hashlib.sha256(tenantact.KEYS[name].encode()).hexdigest()


def test_sources_of_the_examples_parse() -> None:
    sources = [parse_source(m.spec.source.uri).scheme for p in EXAMPLES for m in _kinds(p) if isinstance(m, Model)]

    assert set(sources) == {"file", "hf", "pvc", "https"}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("tenant.yaml", steps.DEMO_KEY),
        ("scaling.yaml", scaleact.KEY),
        ("lora.yaml", loraact.KEY),
        (steps.CANARY_FILE, routeact.KEY),
    ],
)
def test_a_demo_tenant_has_the_key_that_its_comment_tells_and_the_demo_uses(file: str, key: str) -> None:
    path = repository_root() / "examples" / file
    told = next(line.split()[-1] for line in path.read_text().splitlines() if "is public" in line)
    (tenant,) = [one for one in _kinds(path) if isinstance(one, Tenant)]

    assert told == key
    assert tenant.spec.keys[0].sha256 == hashlib.sha256(told.encode()).hexdigest()


def test_the_demos_tenant_may_use_the_demos_models() -> None:
    folder = repository_root() / "examples"
    models = {m.key for m in _kinds(folder / "models.yaml") if isinstance(m, Model)}
    (tenant,) = _kinds(folder / "tenant.yaml")

    assert isinstance(tenant, Tenant)
    assert {f"{grant.namespace}/{grant.name}" for grant in tenant.spec.models} == models


def test_the_adapters_of_an_example_have_their_pool_their_tenants_and_their_files() -> None:
    objects = _kinds(repository_root() / "examples" / "lora.yaml")
    pools = {f"{p.metadata.namespace}/{p.metadata.name}": p for p in objects if isinstance(p, LoRAPool)}
    models = {m.key for m in objects if isinstance(m, Model)}
    tenants = {t.metadata.name: t for t in objects if isinstance(t, Tenant)}
    adapters = [a for a in objects if isinstance(a, LoRAAdapter)]
    made = runpy.run_path(str(repository_root() / "images" / "shoal" / "make_models.py"))
    folders = {f"file:///opt/shoal/adapters/{spec.name}" for spec in made["ADAPTERS"]}

    assert [a.spec.residency for a in adapters] == ["Pinned", "Warm", "OnDemand"]
    assert {p.model_key for p in pools.values()} <= models
    for adapter in adapters:
        assert adapter.pool_key in pools
        assert set(adapter.spec.tenants) <= {*tenants, "*"}
    assert {a.spec.source.uri for a in adapters} | {loraact.NEXT_SOURCE} == folders
    # The pinned one and a slot for the others: more could never be used at once.
    pinned = sum(a.spec.residency == "Pinned" for a in adapters)
    assert all(pinned < p.spec.slots for p in pools.values())
    assert all(p.spec.max_rank >= made["RANK"] for p in pools.values())


def test_classes_that_the_examples_name_are_there() -> None:
    classes = {c.metadata.name for c in _kinds(repository_root() / "examples" / "gpuclasses.yaml")}
    classes |= {one.metadata.name for p in EXAMPLES for one in _kinds(p) if one.kind_name == "GPUClass"}
    named = {v.gpu_class for p in EXAMPLES for m in _kinds(p) if isinstance(m, Model) for v in m.spec.variants}

    assert named <= classes
