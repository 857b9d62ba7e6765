"""The tiny models that the demo and the tests serve."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors import deserialize
from tokenizers import Tokenizer

from shoal.api.artifact import LayerWidths
from shoal.api.lorapool import LINEAR
from shoal.artifacts import adapter
from shoal.core.lora.format.check import BaseModelFacts, Limits, check_adapter
from shoal.engine.sglang.pool import RULES

SCRIPT = Path(__file__).parents[2] / "images" / "shoal" / "make_models.py"


def make(folder: Path) -> dict[str, bytes]:
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True, timeout=60)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_they_are_the_same_bytes_each_time_small_and_readable_by_all(tmp_path: Path):
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    assert first == second
    assert {name.split("/")[0] for name in first} == {"tiny-chat", "tiny-code"}
    assert first["tiny-chat/model.safetensors"] != first["tiny-code/model.safetensors"]
    assert sum(map(len, first.values())) < 1_500_000
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o004, f"{path} must be readable by an engine that runs as another user"


def test_weights_fit_the_configuration(tmp_path: Path):
    files = make(tmp_path)
    config = json.loads(files["tiny-chat/config.json"])
    assert config["head_dim"] == 32, "with a smaller one vLLM on a CPU starts and dies of the first request"
    tensors = dict(deserialize(files["tiny-chat/model.safetensors"]))
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert f"model.layers.{config['num_hidden_layers'] - 1}.mlp.up_proj.weight" in tensors
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny-chat" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= config["vocab_size"]
    text = "any text: Käse, 魚, \n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_adapters_are_made_beside_the_models_when_they_are_asked_for(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "models"), str(tmp_path / "adapters")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    widths = LayerWidths(layers=2, hidden=64, query=64, key=32, feed_forward=128)
    found: dict[str, bytes] = {}
    for folder in (tmp_path / "adapters").iterdir():
        facts = adapter.read_folder(folder, folder.name, f"sha256:{'0' * 64}")
        assert check_adapter(facts, Limits("pool", 8, LINEAR, RULES), BaseModelFacts(widths, 512)) is None
        assert all(path.stat().st_mode & 0o004 for path in folder.iterdir())
        found[folder.name] = (folder / adapter.WEIGHTS).read_bytes()
    assert set(found) == {"support-v1", "support-v2", "legal", "poet"}
    assert len(set(found.values())) == 4
