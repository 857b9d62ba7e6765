"""Tiny models that classify: tiny-chat's layers with a head of labels in place of its output layer."""

import importlib.util
import json
import random
import shutil
import sys
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.engines import MODEL, ROOT, make_models


def make_classifier(folder: Path, labels: tuple[str, ...], **config: Any) -> Path:
    """A model for sequence classification that both engines can load; one label makes a reranker. `config` overrides
    config.json."""
    make_models()
    maker = _maker()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    base: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
    known = {
        "architectures": ["Qwen2ForSequenceClassification"],
        "model_type": "qwen2",
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "pad_token_id": base["eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps({**base, **known, **config}))
    spec = maker.Spec(MODEL.name, 3, "")
    weights = dict(maker.make_weights(maker.Tokenizer.from_file(str(folder / "tokenizer.json")), spec))
    del weights["lm_head.weight"]
    for layer in range(maker.LAYERS):
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = maker.shapes(spec.heads)[f"self_attn.{name}"][0]
            weights[f"model.layers.{layer}.self_attn.{name}.bias"] = ([rows], array("f", [0.0] * rows))
    head = maker.noise(random.Random(4), len(labels), maker.HIDDEN, 0.48)  # noqa: S311 - reproducible on purpose
    weights["score.weight"] = ([len(labels), maker.HIDDEN], head)
    weights["score.bias"] = ([len(labels)], array("f", [0.0] * len(labels)))
    maker.write_weights(folder / "model.safetensors", weights)
    return folder


def _maker() -> ModuleType:
    """images/shoal/make_models.py, which is no package."""
    if (known := sys.modules.get("make_models")) is not None:
        return known
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "images" / "shoal" / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_models"] = module
    spec.loader.exec_module(module)
    return module
