"""`shoal explain` reads the facts of a source with the credentials of whoever calls it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import yaml
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from shoal.cli.main import main
from tests.support.s3 import s3_server
from tests.support.sources import HubServer, weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
MODEL = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": weights(embed=("BF16", (1000, 640))),
}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[HubServer]:
    server = HubServer(MODEL)
    running = TestServer(server.app())
    await running.start_server()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.port}")
    yield server
    await running.close()


async def explain(folder: Path, uri: str) -> Result:
    path = folder / "m.yaml"
    source = {"uri": uri}
    metadata = {"name": "m", "namespace": "chat"}
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "shoal.dev/v1alpha1",
                "kind": "Model",
                "metadata": metadata,
                "spec": {"source": source, "engine": {"contextLength": 512}},
            }
        )
    )
    return await asyncio.to_thread(CliRunner(catch_exceptions=False).invoke, main, ["explain", "-f", str(path)])


async def test_a_repository_of_the_hub_is_read_at_the_commit_of_its_branch(hub: HubServer, tmp_path: Path) -> None:
    done = await explain(tmp_path, "hf://team/tiny@main")
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM" in done.output
    assert "revision aaaaaaaaaaaa" in done.output
    assert "0.6 M parameters; weights 1.2 MiB (bfloat16)" in done.output


async def test_a_gated_repository_needs_the_callers_own_login(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated = True
    refused = await explain(tmp_path, "hf://team/tiny")
    assert refused.exit_code == 1
    assert "outside a cluster your own login counts (HF_TOKEN, or `hf auth login`)" in refused.output
    monkeypatch.setenv("HF_TOKEN", hub.token)
    allowed = await explain(tmp_path, "hf://team/tiny")
    assert allowed.exit_code == 0, allowed.output
    assert hub.token not in allowed.output


async def test_a_bucket_is_read_with_the_variables_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as s3:
        s3.put("llama", MODEL)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
        for name, value in s3.user("stranger", "iam:GetUser").items():
            monkeypatch.setenv(name, value)
        refused = await explain(tmp_path, f"s3://{s3.bucket}/llama")
        assert refused.exit_code == 1
        assert "outside a cluster the AWS_... variables of your environment count" in refused.output
        for name, value in s3.keys.items():
            monkeypatch.setenv(name, value)
        allowed = await explain(tmp_path, f"s3://{s3.bucket}/llama")
    assert allowed.exit_code == 0, allowed.output
    assert "LlamaForCausalLM" in allowed.output
    assert s3.keys["AWS_SECRET_ACCESS_KEY"] not in allowed.output


async def test_a_source_that_is_not_there_is_told(hub: HubServer, tmp_path: Path) -> None:
    done = await explain(tmp_path, "hf://team/other")
    assert done.exit_code == 1
    assert "team/other" in done.output
    assert "--facts reads them from a file" in done.output


async def test_what_is_no_model_does_not_ask_for_facts(hub: HubServer, tmp_path: Path) -> None:
    hub.files = {**MODEL, "config.json": b"{}"}
    done = await explain(tmp_path, "hf://team/tiny")
    assert done.exit_code == 1
    assert "config.json names no `architectures`" in done.output
    assert "--facts" not in done.output


async def test_tries_on_the_way_are_not_told_as_logs(tmp_path: Path, hub: HubServer) -> None:
    """What goes into a pipe is for people too, or for jq: stderr has no JSON lines of a process."""
    hub.status = 503
    path = tmp_path / "m.yaml"
    source = {"source": {"uri": "hf://team/tiny"}}
    meta = {"name": "m", "namespace": "chat"}
    path.write_text(
        yaml.safe_dump({"apiVersion": "shoal.dev/v1alpha1", "kind": "Model", "metadata": meta, "spec": source})
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shoal", "explain", "-f", str(path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(90):
        out, errors = await process.communicate()
    assert b"503" in out + errors
    assert b"{" not in errors, errors.decode()
