"""Faults that change a Model: what they change is accepted, or the fault does nothing."""

import random
from pathlib import Path
from typing import Any

import orjson

from shoal.api.model import Model
from shoal_dev.sim.args import parse
from tests.storm import faults
from tests.storm.faults import Storm
from tests.storm.ground import MODEL_PATH


class Patches:
    """A cluster that takes what is patched."""

    def __init__(self) -> None:
        self.specs: list[dict[str, Any]] = []

    def kubectl(self, *args: str) -> str:
        self.specs.append(orjson.loads(args[args.index("-p") + 1])["spec"])
        return ""


def test_a_bad_revision_is_a_start_that_takes_for_ever(tmp_path: Path) -> None:
    patches = Patches()
    ground: Any = patches
    faults.bad_revision(Storm(ground, random.Random(1), tmp_path / "faults.jsonl", pace=0.0))  # noqa: S311
    bad, good = patches.specs
    model = Model.model_validate({"metadata": {"name": "m"}, "spec": {"source": {"uri": "hf://o/m"}} | bad})
    assert model.spec.engine.extra_args == (), "arguments that the engine does not have are refused"
    environ = {each.name: each.value or "" for each in model.spec.pod.env}
    assert parse(["--model-path", str(MODEL_PATH)], environ).load_seconds > 3600
    assert good == {"pod": {"env": None}}
