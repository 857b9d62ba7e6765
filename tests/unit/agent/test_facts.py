"""The facts of a source: what is read of it, from where, and what each failure says."""

import io
import json
import random
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from shoal.agent.facts import FactsRequest, facts_message, read_facts, run_facts
from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import stage
from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts, KVGeometry
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, inside, open_source
from tests.support.flaky import Flaky
from tests.support.s3 import s3_server
from tests.support.sources import (
    LOCAL,
    LOCAL_ENV,
    ArchiveServer,
    HubServer,
    localhost_tls,
    tar_of,
    weights,
    write_files,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
ONE = weights(embed=("BF16", (100, 64)), scale=("F32", (64,)))
TWO = weights(head=("BF16", (100, 64)))
INDEX = {
    "metadata": {"total_size": 25856},
    "weight_map": {"embed": "model-1.safetensors", "scale": "model-1.safetensors", "head": "model-2.safetensors"},
}
MODEL = {
    "config.json": json.dumps(CONFIG).encode(),
    "model-1.safetensors": ONE,
    "model-2.safetensors": TWO,
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "tokenizer.json": b"{}",
}
LARGE = {**MODEL, "model-2.safetensors": weights(head=("BF16", (4 << 20,)))}
PARAMETERS, WEIGHT_BYTES = 2 * 6400 + 64, 2 * 12800 + 256


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.fixture
async def hub() -> AsyncGenerator[tuple[HubServer, int]]:
    server = HubServer({**MODEL, "README.md": b"#"})
    running = TestServer(server.app())
    await running.start_server()
    assert running.port is not None
    yield server, running.port
    await running.close()


HERE = Settings(network=LOCAL)


def at(port: int | str, **more: float) -> Settings:
    address = port if isinstance(port, str) else f"127.0.0.1:{port}"
    return replace(Settings(network=LOCAL, hub_endpoint=f"http://{address}", pause_seconds=0.001), **more)


def check(facts: ArtifactFacts) -> None:
    assert (facts.architecture, facts.parameters, facts.weight_bytes) == ("LlamaForCausalLM", PARAMETERS, WEIGHT_BYTES)
    assert (facts.context_length, facts.attention_heads, facts.task) == (2048, 4, "Generate")
    assert (facts.kv.kind, facts.kv.layers, facts.kv.kv_heads, facts.kv.head_dim) == ("Full", 2, 2, 16)
    assert facts.digest is not None


async def refusal(request: FactsRequest) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await read_facts(request)
    assert caught.value.reason in reasons.STAGE_REASONS
    return caught.value


# --- a repository ---------------------------------------------------------------------------------------------------


async def test_a_repository_is_known_without_its_weights(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    server.files = LARGE
    async with Flaky(port) as counter:
        facts = await read_facts(FactsRequest("hf://team/tiny@main", secret=secret, settings=at(counter.address)))
        carried = counter.carried
    assert facts.revision == "a" * 40
    assert facts.parameters == 6400 + 64 + (4 << 20)
    assert facts.file_bytes == sum(map(len, LARGE.values())) > 8 << 20
    assert carried < 1 << 20


async def test_a_header_longer_than_the_first_look_is_read_whole(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    many = weights(**{f"layers.{i}.a_rather_long_name_of_a_tensor": ("U8", (1,)) for i in range(4000)})
    server.files = {"config.json": MODEL["config.json"], "model.safetensors": many}
    facts = await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert facts.parameters == 4000


async def test_a_moving_branch_is_pinned_and_a_rewritten_one_refused(
    hub: tuple[HubServer, int], secret: Path, tmp_path: Path
):
    server, port = hub
    facts = await read_facts(FactsRequest("hf://team/tiny@main", secret=secret, settings=at(port)))
    pinned = StageRequest("hf://team/tiny@main", None, facts.revision, facts.digest, at(port))
    (tmp_path / "run").mkdir()
    paths = StagePaths(tmp_path / "models" / "model", tmp_path, secret, tmp_path / "run" / "stage.json")
    server.branches = {"main": "b" * 40, "old": "a" * 40}
    assert (await stage(pinned, paths)).commit == "a" * 40
    again = StagePaths(tmp_path / "again" / "model", tmp_path, secret, tmp_path / "run" / "stage.json")
    server.branches = {"main": "b" * 40}
    with pytest.raises(ArtifactError) as caught:
        await stage(pinned, again)
    assert caught.value.reason == reasons.SOURCE_CHANGED
    assert str(caught.value) == (
        f"team/tiny has no commit {'a' * 40} any more, to which main was pinned: its history was rewritten. "
        "Edit source.uri to take what is there now"
    )


async def test_a_commit_with_other_files_is_refused(hub: tuple[HubServer, int], secret: Path, tmp_path: Path):
    server, port = hub
    facts = await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    server.files = {**MODEL, "model-2.safetensors": TWO[:-1] + b"!"}
    (tmp_path / "run").mkdir()
    paths = StagePaths(tmp_path / "models" / "model", tmp_path, secret, tmp_path / "run" / "stage.json")
    with pytest.raises(ArtifactError, match="is not what it was when it was pinned") as caught:
        await stage(StageRequest("hf://team/tiny", None, facts.revision, facts.digest, at(port)), paths)
    assert caught.value.reason == reasons.SOURCE_CHANGED


async def test_a_shard_that_arrives_corrupt_is_refused(hub: tuple[HubServer, int], secret: Path, tmp_path: Path):
    server, port = hub
    server.corrupt = {"model-2.safetensors": TWO[:-1] + b"!"}
    (tmp_path / "run").mkdir()
    paths = StagePaths(tmp_path / "models" / "model", tmp_path, secret, tmp_path / "run" / "stage.json")
    with pytest.raises(ArtifactError, match=r"model-2\.safetensors arrived twice with another content") as caught:
        await stage(StageRequest("hf://team/tiny", settings=at(port)), paths)
    assert caught.value.reason == reasons.DIGEST_MISMATCH
    assert server.fetched.count("model-2.safetensors") == 2
    assert server.fetched.count("model-1.safetensors") == 1


async def test_a_gated_repository_that_lists_itself_to_everyone_is_refused(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    server.gated = True
    error = await refusal(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert error.reason == reasons.GATED
    assert str(error).startswith(
        "team/tiny is gated, private or does not exist (401): put a hub token into key `token`"
    )
    write_files(secret, {"token": b"hub-token"})
    check(await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port))))


async def test_a_hub_whose_files_never_come_is_told_after_the_stall_time(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    server.silent_file = "config.json"
    error = await refusal(FactsRequest("hf://team/tiny", secret=secret, settings=at(port, stall_seconds=0.2)))
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error) == "127.0.0.1 did not answer in time: check source.uri and the chart's proxy settings"
    assert server.fetched == ["config.json"] * 3


async def test_a_hub_that_fails_is_asked_again(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    server.fail_file = "config.json"
    error = await refusal(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error) == "the hub answered 500 for team/tiny; trying again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": None}, "hf://team/tiny is not a model: it has no config.json (found: model-1.safetensors, "),
        ({"config.json": b"{"}, "hf://team/tiny: config.json is not JSON: "),
        ({"config.json": b"[]"}, "hf://team/tiny: config.json is not a JSON object"),
        ({"config.json": b"{}"}, "hf://team/tiny: "),
        ({"model-2.safetensors": None}, "1 of 2 weight files are missing, the first is model-2.safetensors"),
        ({"model-2.safetensors": TWO[:-1]}, "model-2.safetensors has "),
        ({"model-2.safetensors": b"short"}, "model-2.safetensors is not a whole safetensors file"),
        ({"model-2.safetensors": b"\x02" + bytes(7) + b"xy"}, "a header that is not that of a safetensors file"),
    ],
)
async def test_what_is_not_a_model_is_told_before_any_gpu_waits_for_it(
    hub: tuple[HubServer, int], secret: Path, change: dict[str, bytes | None], message: str
):
    server, port = hub
    server.files = {name: content for name, content in {**MODEL, **change}.items() if content is not None}
    error = await refusal(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert error.reason == reasons.SOURCE_INVALID
    assert message in str(error)


async def test_an_unknown_architecture_is_no_failure(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    config = {"architectures": ["NeverSeenForCausalLM"], "model_type": "neverseen"}
    server.files = {**MODEL, "config.json": json.dumps(config).encode()}
    left: list[str] = []
    request = FactsRequest("hf://team/tiny", secret=secret, settings=at(port))
    facts = await read_facts(request)
    left.append(facts_message(facts))
    assert json.loads(left[0])["facts"]["kv"]["kind"] == "Unknown"
    assert (facts.architecture, facts.weight_bytes) == ("NeverSeenForCausalLM", WEIGHT_BYTES)


async def test_older_weights_count_by_their_files(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    server.files = {"config.json": MODEL["config.json"], "pytorch_model.bin": bytes(5000)}
    facts = await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert (facts.parameters, facts.weight_bytes) == (None, 5000)


async def test_only_weights_that_an_engine_loads_count(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    extra = weights(more=("BF16", (1000,)))
    server.files = {**MODEL, "2_Dense/model.safetensors": extra, "unlisted.safetensors": extra}
    check(await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port))))
    server.files = {"config.json": MODEL["config.json"], "model.safetensors": ONE, "2_Dense/model.safetensors": extra}
    facts = await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert (facts.parameters, facts.file_bytes) == (6464, sum(map(len, server.files.values())))


async def test_quantization_may_stand_in_a_file_of_its_own(hub: tuple[HubServer, int], secret: Path):
    server, port = hub
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    server.files = {**MODEL, "hf_quant_config.json": json.dumps(own).encode()}
    facts = await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert facts.quantization is not None


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({}, False),
        ({"tokenizer_config.json": b'{"model_max_length": 8}'}, False),
        ({"tokenizer_config.json": b'{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}, True),
    ],
)
async def test_the_tokenizer_tells_whether_there_is_a_chat_template(
    hub: tuple[HubServer, int], secret: Path, files: dict[str, bytes], known: bool
):
    server, port = hub
    server.files = {**MODEL, **files}
    facts = await read_facts(FactsRequest("hf://team/tiny", secret=secret, settings=at(port)))
    assert facts.chat_template is known


# --- other places ---------------------------------------------------------------------------------------------------


async def test_a_bucket_is_known_without_its_weights(tmp_path: Path):
    with s3_server() as s3:
        s3.put("tiny", MODEL)
        secret = write_files(tmp_path / "secret", s3.secret())
        facts = await read_facts(FactsRequest("s3://models/tiny", secret=secret, settings=HERE))
        check(facts)
        async with open_source("s3://models/tiny", StoreCredentials.read(secret), HERE) as source:
            assert (await source.manifest()).digest == facts.digest


@pytest.mark.parametrize(("uri", "folder"), [("pvc://weights/llama", "llama"), ("oci://registry/llama:1", "")])
async def test_a_mounted_volume_is_read_in_place(tmp_path: Path, secret: Path, uri: str, folder: str):
    write_files(tmp_path / "mount" / folder, MODEL)
    request = FactsRequest(uri, tmp_path / "mount", secret, settings=HERE)
    facts = await read_facts(request)
    check(facts)
    write_files(tmp_path / "mount" / folder, {"notes.md": b"of no importance"})
    assert (await read_facts(request)).digest == facts.digest
    write_files(tmp_path / "mount" / folder, {"tokenizer.json": b'{"a": 1}'})
    assert (await read_facts(request)).digest != facts.digest


async def test_a_volume_that_is_not_there_is_told_so(tmp_path: Path, secret: Path):
    error = await refusal(FactsRequest("pvc://weights/llama", tmp_path / "mount", secret))
    assert (error.reason, str(error)) == (
        reasons.SOURCE_NOT_FOUND,
        "the volume of claim weights has no folder llama: check source.uri",
    )
    error = await refusal(FactsRequest("oci://registry/llama:1", tmp_path / "mount", secret))
    assert str(error) == "the image of oci://registry/llama:1 is not mounted: the cluster has to support image volumes"


async def test_copies_of_a_folder_have_one_digest(tmp_path: Path, secret: Path):
    one, two = (write_files(tmp_path / name, MODEL) for name in ("one", "two"))
    digests = [
        (await read_facts(FactsRequest(f"file://{folder}", secret=secret, settings=HERE))).digest
        for folder in (one, two)
    ]
    assert digests[0] == digests[1]


# --- archives -------------------------------------------------------------------------------------------------------


Serve = Callable[[ArchiveServer], Awaitable[int]]
"""Starts a server and returns its port."""


@pytest.fixture
async def archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Callable[[ArchiveServer], object]]:
    context, certificate = localhost_tls(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    servers: list[TestServer] = []

    async def start(archive: ArchiveServer) -> int:
        server = TestServer(archive.app(), scheme="https")
        await server.start_server(ssl=context)
        servers.append(server)
        assert server.port is not None
        return server.port

    yield start
    for server in servers:
        await server.close()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


def zip_with(flags: int = 0, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of a model whose first file has these flags and this method, in its header and in the directory."""
    content = bytearray(zip_of(MODEL))
    for at in (content.find(b"PK\x03\x04") + 6, content.find(b"PK\x01\x02") + 8):
        content[at], content[at + 2] = flags, method
    return bytes(content)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz"])
async def test_an_archive_is_looked_into(archives: Serve, secret: Path, kind: str, wrapped: bool, ranges: bool):
    files = {f"./tiny-1/{name}": content for name, content in MODEL.items()} if wrapped else MODEL
    body = tar_of(files, {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}[kind])
    port = await archives(ArchiveServer(body, ranges=ranges))
    facts = await read_facts(FactsRequest(f"https://localhost:{port}/x.{kind}", secret=secret, settings=HERE))
    check(facts)
    assert facts.file_bytes == len(body) + sum(map(len, MODEL.values()))


async def test_a_zip_is_looked_into(archives: Serve, secret: Path):
    port = await archives(ArchiveServer(zip_of({f"tiny/{name}": content for name, content in MODEL.items()})))
    check(await read_facts(FactsRequest(f"https://localhost:{port}/x.zip", secret=secret, settings=HERE)))


async def test_the_weights_in_a_plain_tar_are_skipped(archives: Serve, secret: Path):
    body = tar_of(LARGE, "w")
    port = await archives(ArchiveServer(body))
    async with Flaky(port) as counter:
        address = counter.address.replace("127.0.0.1", "localhost")
        await read_facts(FactsRequest(f"https://{address}/x.tar", secret=secret, settings=HERE))
        assert counter.carried < len(body) / 4


async def test_a_plain_tar_is_read_wherever_its_ranges_end(
    archives: Serve, secret: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where one ends in the midst of a member's header."""
    monkeypatch.setattr(inside, "_AHEAD", (1000, 1000))
    port = await archives(ArchiveServer(tar_of(MODEL, "w")))
    facts = await read_facts(FactsRequest(f"https://localhost:{port}/x.tar", secret=secret, settings=HERE))
    assert facts.architecture == "LlamaForCausalLM"


async def test_a_compressed_archive_is_read_to_a_limit(archives: Serve, secret: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inside, "COMPRESSED_LIMIT", 100_000)
    noise = weights(head=("U8", (400_000,)))[:-400_000] + random.Random(1).randbytes(400_000)  # noqa: S311
    first = {"config.json": MODEL["config.json"], "model.safetensors": noise, "tokenizer.json": b"{}"}
    port = await archives(ArchiveServer(tar_of(first)))
    facts = await read_facts(FactsRequest(f"https://localhost:{port}/x.tar.gz", secret=secret, settings=HERE))
    assert (facts.architecture, facts.parameters, facts.weight_bytes) == ("LlamaForCausalLM", None, None)
    last = {"model.safetensors": noise, "config.json": MODEL["config.json"]}
    port = await archives(ArchiveServer(tar_of(last)))
    error = await refusal(FactsRequest(f"https://localhost:{port}/x.tar.gz", secret=secret, settings=HERE))
    assert error.reason == reasons.SOURCE_INVALID
    assert "is compressed and has no config.json within its first" in str(error)
    assert "pack it as a plain .tar (weights hardly compress), or with config.json first" in str(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"not an archive", "is not a whole tar or zip archive"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "is compressed with zstd: use .tar, .tar.gz or .zip"),
        (tar_of({"readme.txt": b"x"}), "is not a model: it has no config.json (found: readme.txt)"),
        (tar_of(LARGE)[:-40], "is not a whole tar or zip archive"),
        (zip_with(flags=1), ": 'config.json' is encrypted"),
        (zip_with(flags=0x20), "cannot be read here (compressed patched data (flag bit 5)): pack it as a plain .tar"),
        (zip_with(method=9), "cannot be read here (That compression method is not supported): pack it as a plain .tar"),
        (zip_with(method=zipfile.ZIP_BZIP2), "cannot be read here (That compression method is not supported)"),
    ],
    ids=["noise", "zstd", "no model", "cut off", "encrypted", "patched", "deflate64", "bzip2"],
)
async def test_an_archive_that_holds_no_model_is_told_so(archives: Serve, secret: Path, body: bytes, message: str):
    port = await archives(ArchiveServer(body))
    error = await refusal(FactsRequest(f"https://localhost:{port}/x.tar.gz?sig=s3cret", secret=secret, settings=HERE))
    assert error.reason == reasons.SOURCE_INVALID
    assert message in str(error)
    assert "s3cret" not in str(error)


async def test_a_text_that_unpacks_to_more_than_its_zip_says_takes_no_memory(archives: Serve, secret: Path):
    said, real = 1000, 200_000_000
    content = bytearray(zip_of({"config.json": b" " * real}))
    for at in (content.find(b"PK\x03\x04") + 22, content.find(b"PK\x01\x02") + 24):
        assert int.from_bytes(content[at : at + 4], "little") == real
        content[at : at + 4] = said.to_bytes(4, "little")
    port = await archives(ArchiveServer(bytes(content)))
    tracemalloc.start()
    try:
        error = await refusal(FactsRequest(f"https://localhost:{port}/x.zip", secret=secret, settings=HERE))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.reason == reasons.SOURCE_INVALID
    assert peak < real / 10


# --- the container --------------------------------------------------------------------------------------------------


def longest(source: str) -> ArtifactFacts:
    big, name = 2**62, "n" * 128
    kv: dict[str, Any] = {
        field: name if "str" in str(info.annotation) else big
        for field, info in KVGeometry.model_fields.items()
        if field != "kind"
    }
    facts: dict[str, Any] = {
        field: name if "str" in str(info.annotation) else big
        for field, info in ArtifactFacts.model_fields.items()
        if field not in ("source", "digest", "kv", "task", "multimodal")
    }
    facts |= {"source": source, "digest": "sha256:" + "0" * 64, "task": "Generate", "multimodal": True}
    return ArtifactFacts.model_construct(**facts, kv=KVGeometry.model_construct(kind="SlidingWindow", **kv))


@pytest.mark.parametrize("source", ["s3://b/" + "x" * 1017, "s3://b/" + "鯨" * 1017, 's3://b/"\\' + "\\" * 1015])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_longest_facts_fit_a_termination_message(source: str):
    message = facts_message(longest(source))
    assert len(message.encode()) <= 4096
    content = json.loads(message)["facts"]
    assert content["kv"]["kind"] == "SlidingWindow"
    assert source.startswith(content["source"])
    assert content["digest"]


def test_a_failure_fits_a_termination_message():
    message = facts_message(ArtifactError(reasons.SOURCE_INVALID, "鯨" * 5000))
    assert len(message.encode()) <= 4096
    assert json.loads(message)["reason"] == "SourceInvalid"


def test_the_container_ends_with_a_code_and_a_message(tmp_path: Path, secret: Path):
    folder = write_files(tmp_path / "tiny", MODEL)
    left: list[str] = []
    assert run_facts(FactsRequest(f"file://{folder}", secret=secret, settings=HERE), left.append) == 0
    assert run_facts(FactsRequest("file:///nowhere", secret=secret, settings=HERE), left.append) == 1
    check(ArtifactFacts.model_validate(json.loads(left[0])["facts"]))
    assert json.loads(left[1]) == {
        "reason": "SourceNotFound",
        "message": "file:///nowhere does not exist: file:// names a folder inside the image of the stage container",
    }


def test_the_command_reads_what_the_environment_names(tmp_path: Path):
    folder, log = write_files(tmp_path / "tiny", MODEL), tmp_path / "termination-log"
    done = subprocess.run(
        [
            sys.executable, "-c", "from shoal.cli.main import main; main()", "agent", "facts",
            f"--termination-log={log}", f"--secret-dir={tmp_path / 'secret'}",
        ],
        env={"SHOAL_STAGE_URI": f"file://{folder}", "PATH": "/usr/bin:/bin", **LOCAL_ENV},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(ArtifactFacts.model_validate(json.loads(log.read_text())["facts"]))
