"""The catalogue of models: what it records is right, its manifests are valid, and its page is what `explain` says."""

import copy
import json
import re
import socket
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from shoal.api import reasons
from shoal.api.model import Model
from shoal.api.schema import root_schema
from shoal.cli.catalog import built_in
from shoal.cli.main import main
from shoal.core.fields.table import TABLE
from shoal.engine.sglang.arguments import arguments_of, known_versions
from shoal_dev.generate.catalogue import MODELS, CatalogueModel, catalogue_files, catalogue_page
from shoal_dev.generate.catalogue.page import explained, served
from tests.support.parameter_counts import count

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "examples" / "catalogue"
PAGE = ROOT / "docs" / "reference" / "catalogue.md"
GI = 2**30

GIB = {
    "qwen2-5-0-5b": 0.92, "bge-m3": 2.1, "bge-reranker-v2-m3": 2.1, "whisper-large-v3-turbo": 1.5,
    "e5-mistral-7b": 13.2, "mistral-7b": 13.5, "llama-3-1-8b": 15.0, "qwen3-8b": 15.3, "qwen2-5-vl-7b": 15.4,
    "gemma-2-9b": 17.2, "phi-4": 27.3, "gpt-oss-20b": 12.8, "qwen3-30b-a3b": 56.9, "qwen3-32b": 61.0,
    "qwen2-5-coder-32b": 61.0, "mixtral-8x7b": 87.0, "llama-3-3-70b": 131.4, "gpt-oss-120b": 60.8,
    "llama-3-1-405b": 756.0, "deepseek-r1": 641.3,
}  # fmt: skip
"""Sizes of the weights that these models are known for."""

each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def manifest(model: CatalogueModel) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{model.name}.yaml").read_text())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_more: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def report(*models: CatalogueModel) -> dict[str, dict[str, Any]]:
    """What the command prints of the manifests, by name."""
    files = [part for model in models for part in ("-f", str(FOLDER / f"{model.name}.yaml"))]
    done = CliRunner(catch_exceptions=False).invoke(main, ["explain", *files, "-o", "json"])
    assert done.exit_code in (0, 1), done.output
    return {one["model"].removeprefix("default/"): one for one in json.loads(done.output)["models"]}


# --- what is recorded


def test_the_catalogue_has_twenty_models_of_all_kinds_and_sizes_smallest_first() -> None:
    assert len(MODELS) == len({model.name for model in MODELS}) == len({model.repository for model in MODELS}) == 20
    assert {model.kind for model in MODELS} == {"Chat", "Code", "Vision", "Embedding", "Rerank", "Speech"}
    sizes = [model.parameters for model in MODELS]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.5e9 < 400e9 < sizes[-1]


@each_model
def test_recorded_sizes_follow_from_the_recorded_shapes(model: CatalogueModel) -> None:
    counted = count(model.config)
    assert counted.parameters == model.parameters
    # A pickle is a little larger than its tensors.
    slack = 0 if model.counted or model.config.get("quantization_config") else 200_000
    assert counted.bytes <= model.weight_bytes <= counted.bytes + slack


@each_model
def test_weights_have_the_size_that_the_model_is_known_for(model: CatalogueModel) -> None:
    assert model.weight_bytes / GI == pytest.approx(GIB[model.name], rel=0.01)


def test_a_wrong_number_in_a_config_is_found() -> None:
    llama = next(model for model in MODELS if model.name == "llama-3-1-8b")
    assert count(llama.config | {"num_key_value_heads": 16}).parameters != llama.parameters


# --- the manifests


def _closed(node: Any) -> Any:
    """A schema that refuses fields which it does not have, as `kubectl apply` does."""
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: _closed(value) for key, value in node.items()}
    if "properties" in node and "additionalProperties" not in node and "type" in node:
        found["additionalProperties"] = False
    return found


@cache
def _schema() -> jsonschema.Draft202012Validator:
    schema = copy.deepcopy(root_schema(Model))
    return jsonschema.Draft202012Validator(_closed({"type": "object", "properties": schema["properties"]}))


@each_model
def test_manifest_passes_the_schema_of_the_api_server_and_the_code(model: CatalogueModel) -> None:
    found = manifest(model)
    assert [error.message for error in _schema().iter_errors({k: found[k] for k in ("spec", "status")})] == []
    read = Model.model_validate(found)
    assert read.status is not None
    assert read.status.artifact == model.facts
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True)["spec"] == found["spec"]


def test_the_check_of_the_schema_can_fail() -> None:
    found = manifest(MODELS[0])
    found["spec"]["engine"]["contextLenght"] = 1
    found["status"]["artifact"]["kv"]["layers"] = "many"
    assert len(list(_schema().iter_errors({k: found[k] for k in ("spec", "status")}))) == 2


@each_model
def test_parsers_of_the_manifest_are_those_of_every_engine_version(model: CatalogueModel) -> None:
    engine = manifest(model)["spec"].get("engine", {})
    given = {"tool-call-parser": engine.get("toolCallParser"), "reasoning-parser": engine.get("reasoningParser")}
    for version in known_versions():
        table = arguments_of(version) or {}
        assert {name for name, value in given.items() if value and value not in table[name].choices} == set()


@each_model
def test_an_engine_for_embeddings_is_started_as_one(model: CatalogueModel) -> None:
    arguments = manifest(model)["spec"].get("engine", {}).get("extraArgs", [])
    assert ("--is-embedding" in arguments) == (model.kind in ("Embedding", "Rerank"))
    assert (model.facts.task == "Embed") == (model.kind in ("Embedding", "Rerank"))
    assert model.facts.multimodal == (model.kind in ("Vision", "Speech"))


def test_no_manifest_is_there_that_the_catalogue_does_not_make() -> None:
    made = {name for name in catalogue_files() if name.startswith("examples/")}
    assert {path.relative_to(ROOT).as_posix() for path in FOLDER.glob("*.yaml")} == made


# --- explain, and the page


def test_explain_sizes_every_manifest_on_every_built_in_class_without_network(offline: None) -> None:
    for name, found in report(*MODELS).items():
        assert {row["gpuClass"] for row in found["classes"]} == built_in().keys(), name
        for row in found["classes"]:
            if row["fits"]:
                if found["contextLength"]:
                    assert row["concurrentRequests"] >= 1
                else:
                    assert row["concurrentRequests"] is None, "how many depends on their length"
                assert row["bytesPerGPU"]["kv"] > 0
            else:
                assert row["reason"] in (reasons.NO_FIT, reasons.SIZE_UNKNOWN)
                assert row["message"]


def _tables() -> list[list[list[str]]]:
    """Rows of the page's tables, without their headings."""
    parts = re.findall(r"^\|.*\n\|[-:|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    return [[[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in p.splitlines()] for p in parts]


def test_the_page_says_what_the_command_says(offline: None) -> None:
    models, fits, why = _tables()
    printed = report(*MODELS)
    assert len(models) == len(fits) - 1 == len(MODELS)
    wanted: set[tuple[str, str, str]] = set()
    for model, cells, row in zip(MODELS, fits[1:], models, strict=True):
        found = printed[model.name]
        rows = {each["gpuClass"]: each for each in found["classes"]}
        shown = [
            f"{r['gpusPerReplica']} ({r['concurrentRequests'] or '?'})" if r["fits"] else "-"
            for r in map(rows.get, built_in())
            if r
        ]
        assert cells == [model.title, *shown]
        assert row[6] == (f"{found['contextLength']:,}" if found["contextLength"] else "unknown")
        wanted |= {
            (model.title, r["gpuClass"], f"`{r['reason']}`: {r['message']}") for r in rows.values() if not r["fits"]
        }
    listed = {
        (title, name, text)
        for title, names, text in why
        for name in (built_in() if names == "every class" else [names])
    }
    assert listed == wanted


def test_what_is_not_served_is_shown_as_such() -> None:
    for model, found, row in zip(MODELS, explained(MODELS), _tables()[0], strict=True):
        assert row[7] == served(model, found)
        assert row[7].startswith("yes") == (model.endpoint in TABLE and found.placed)
    shown = {row[0]: row[7] for row in _tables()[0]}
    whisper = next(text for name, text in shown.items() if "whisper" in name)
    assert whisper == "yes, `/v1/audio/transcriptions`"


def test_the_page_and_the_manifests_are_those_of_the_catalogue() -> None:
    for name, text in catalogue_files().items():
        assert (ROOT / name).read_text() == text, f"{name}: run `make generate`"


def test_a_changed_record_changes_manifest_and_page() -> None:
    other = MODELS[0].model_copy(update={"config": MODELS[0].config | {"num_hidden_layers": 48}})
    assert other.facts != MODELS[0].facts
    assert catalogue_page((other,)) != catalogue_page(MODELS[:1])


@pytest.mark.parametrize("page", [PAGE, FOLDER / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
