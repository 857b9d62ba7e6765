"""The model that the engines of `bench_replicas` serve: the tiny one made larger by repeating its weights. It says
nothing sensible, as the tiny one, but an engine has to compute: to read a prompt is most of its work."""

import json
import shutil
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import TensorSpec, deserialize, serialize

from tests.support.adapters import layer_widths
from tests.support.engines import MODEL, make_models

_WEIGHTS: Final = "model.safetensors"
_LAYER: Final = "model.layers."


def make_larger(folder: Path, sizes: Mapping[str, int]) -> Path:
    """Writes the model into `folder`, and returns that. `sizes`: fields of config.json that differ."""
    make_models()
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    given = dict(deserialize((folder / _WEIGHTS).read_bytes()))
    hidden, widths = config["hidden_size"], layer_widths(config)
    made: dict[str, tuple[list[int], array[float]]] = {}
    for name, tensor in given.items():
        if not name.startswith(_LAYER):
            made[name] = _repeated(tensor, hidden)
    layers = {name.removeprefix(_LAYER).partition(".")[0] for name in given if name.startswith(_LAYER)}
    for layer in range(config["num_hidden_layers"]):
        begin = f"{_LAYER}{layer % len(layers)}."
        for name, tensor in given.items():
            if name.startswith(begin):
                reads, writes = widths.get(name.split(".")[-2], (hidden, None))  # else a norm, which has one row
                made[f"{_LAYER}{layer}.{name.removeprefix(begin)}"] = _repeated(tensor, reads, writes)
    specs = {
        name: TensorSpec(
            dtype="float32", shape=shape, data_ptr=values.buffer_info()[0], data_len=len(values) * values.itemsize
        )
        for name, (shape, values) in made.items()
    }
    (folder / _WEIGHTS).write_bytes(serialize(specs, {"format": "pt"}))
    return folder


def _repeated(tensor: Mapping[str, Any], columns: int, rows: int | None = None) -> "tuple[list[int], array[float]]":
    """The tensor's shape and values with so many columns; with as many rows as before unless `rows` says how many."""
    values, shape = array("f", bytes(tensor["data"])), list[int](tensor["shape"])
    had, wide = (shape[0] if len(shape) == 2 else 1), shape[-1]
    made: array[float] = array("f")
    for row in range(rows or had):
        at = row % had * wide
        made += (values[at : at + wide] * -(-columns // wide))[:columns]
    return ([rows or had, columns] if len(shape) == 2 else [columns]), made
