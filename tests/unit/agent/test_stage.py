"""Staging as the person who wrote the Model sees it: what works, and what each failure says."""

import asyncio
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp.resolver import ThreadedResolver
from aiohttp.test_utils import TestServer, unused_port

from shoal.agent.stage.progress import write_progress
from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import run_stage, stage, termination_message
from shoal.api import reasons
from shoal.api.replica import StageProgress
from shoal.artifacts import Settings, folders
from shoal.artifacts.connect import with_public_roots
from shoal.artifacts.errors import ArtifactError
from shoal.artifacts.manifest import wanted_files
from tests.support.flaky import Flaky
from tests.support.sources import (
    LOCAL,
    LOCAL_ENV,
    ArchiveServer,
    HubServer,
    localhost_tls,
    model_files,
    safetensors,
    tar_of,
    write_files,
)


@pytest.fixture
def paths(tmp_path: Path) -> StagePaths:
    (tmp_path / "models").mkdir()
    (tmp_path / "run").mkdir()
    return StagePaths(
        target=tmp_path / "models" / "model",
        source=tmp_path / "source",
        secret=tmp_path / "secret",
        progress=tmp_path / "run" / "stage.json",
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_files(tmp_path / "tiny", model_files())


def staged_files(paths: StagePaths) -> dict[str, bytes]:
    return {
        path.relative_to(paths.target).as_posix(): path.read_bytes() for path in folders.regular_files(paths.target)
    }


async def failure(request: StageRequest, paths: StagePaths) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await stage(request, paths)
    assert caught.value.reason in reasons.STAGE_REASONS
    progress = StageProgress.model_validate_json(paths.progress.read_bytes())
    assert (progress.state, progress.reason, progress.message) == ("failed", caught.value.reason, str(caught.value))
    assert not paths.target.exists()
    return caught.value


# --- file:// --------------------------------------------------------------------------------------------------------


async def test_a_folder_of_the_image_is_copied_whole(model: Path, paths: StagePaths):
    result = await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    assert staged_files(paths) == model_files()
    assert result.bytes == sum(map(len, model_files().values()))
    progress = StageProgress.model_validate_json(paths.progress.read_bytes())
    assert (progress.state, progress.bytes_done, progress.bytes_total) == ("done", result.bytes, result.bytes)
    assert not paths.work.exists()


async def test_links_inside_the_image_become_files(model: Path, paths: StagePaths, tmp_path: Path):
    (tmp_path / "elsewhere").write_bytes(b"{}")
    (model / "generation_config.json").symlink_to(tmp_path / "elsewhere")
    await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    assert (paths.target / "generation_config.json").read_bytes() == b"{}"
    assert not (paths.target / "generation_config.json").is_symlink()


async def test_a_read_only_folder_becomes_one_that_can_be_moved(model: Path, paths: StagePaths):
    write_files(model, {"sub/a.json": b"{}"})
    for folder in (model, model / "sub"):
        folder.chmod(0o555)
    await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    assert (paths.target.stat().st_mode & 0o200, (paths.target / "sub").stat().st_mode & 0o200) == (0o200, 0o200)
    for folder in (model, model / "sub"):
        folder.chmod(0o755)


async def test_a_finished_stage_is_not_done_again(model: Path, paths: StagePaths):
    first = await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    shutil.rmtree(model)
    again = await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    assert again.bytes == first.bytes


async def test_a_target_without_its_marker_is_not_trusted(model: Path, paths: StagePaths):
    write_files(paths.target, {"config.json": b"{}", "model.safetensors": b"half"})
    await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    assert staged_files(paths) == model_files()


async def test_another_source_replaces_what_was_there(model: Path, paths: StagePaths, tmp_path: Path):
    await stage(StageRequest(f"file://{model}", settings=HERE), paths)
    other = write_files(tmp_path / "other", model_files(128))
    await stage(StageRequest(f"file://{other}", settings=HERE), paths)
    assert staged_files(paths) == model_files(128)


async def test_a_missing_folder_is_told_so(paths: StagePaths):
    error = await failure(StageRequest("file:///nowhere", settings=HERE), paths)
    assert error.reason == reasons.SOURCE_NOT_FOUND
    assert str(error) == (
        "file:///nowhere does not exist: file:// names a folder inside the image of the stage container"
    )


async def test_nonsense_for_a_uri_is_told_so(paths: StagePaths):
    error = await failure(StageRequest("ftp://host/x"), paths)
    assert error.reason == reasons.SOURCE_INVALID
    assert "is not a source" in str(error)


# --- digest ---------------------------------------------------------------------------------------------------------


def shell_digest(folder: Path) -> str:
    """The digest as the API documents it, made by the tools that it names."""
    done = subprocess.run(
        ["sh", "-c", "find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return "sha256:" + done.stdout.split()[0]


async def test_the_digest_of_a_folder_is_the_one_that_the_documented_command_gives(model: Path, paths: StagePaths):
    write_files(model, {"sub/a.json": b"{}", "sub.json": b"{}", "Z.json": b"{}"})
    request = StageRequest(f"file://{model}", digest=shell_digest(model), settings=HERE)
    assert (await stage(request, paths)).digest == request.digest


async def test_a_wrong_digest_tells_both(model: Path, paths: StagePaths):
    wanted = "sha256:" + "0" * 64
    error = await failure(StageRequest(f"file://{model}", digest=wanted, settings=HERE), paths)
    assert error.reason == reasons.DIGEST_MISMATCH
    assert str(error) == (
        f"file://{model} has digest {shell_digest(model)}, but source.digest says {wanted}: "
        "either the source changed, or the digest is not its own"
    )


# --- what is not a model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": None}, "is not a model: it has no config.json (found: model.safetensors, tokenizer.json)"),
        ({"config.json": b"{"}, "config.json is not JSON"),
        ({"config.json": b"[]"}, "config.json is not a JSON object"),
        ({"model.safetensors": None}, "has no weights: expected files named *.safetensors, *.bin"),
        (
            {"model.safetensors": None, "config.json": None, "tiny-q4_k_m.gguf": b"GGUF"},
            "has its weights as GGUF, which engines do not read: name a source with safetensors",
        ),
        ({"model.safetensors": b""}, "model.safetensors is not a whole safetensors file"),
        ({"model.safetensors": b"\xff" * 64}, "model.safetensors is not a whole safetensors file"),
        (
            {"model.safetensors": b"\x02" + b"\0" * 7 + b"xy"},
            "model.safetensors has a header that is not that of a safetensors file",
        ),
        ({"model.safetensors": safetensors()[:-1]}, "where its header promises"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors", "b": "m-2.safetensors"}}'},
            "1 of 2 weight files are missing, the first is m-2.safetensors",
        ),
        ({"model.safetensors.index.json": b"{}"}, "has no weight_map"),
    ],
)
async def test_what_is_not_a_model_is_refused(
    model: Path, paths: StagePaths, change: dict[str, bytes | None], message: str
):
    for name, content in change.items():
        if content is None:
            (model / name).unlink()
        else:
            (model / name).write_bytes(content)
    error = await failure(StageRequest(f"file://{model}", settings=HERE), paths)
    assert error.reason == reasons.SOURCE_INVALID
    assert message in str(error)


# --- pvc:// ---------------------------------------------------------------------------------------------------------


async def test_a_volume_is_verified_where_it_is(paths: StagePaths):
    folder = write_files(paths.source / "llama", model_files())
    result = await stage(StageRequest("pvc://weights/llama", digest=shell_digest(folder)), paths)
    assert result.digest == shell_digest(folder)
    assert not paths.target.exists()


async def test_a_volume_without_that_folder_is_told_so(paths: StagePaths):
    paths.source.mkdir()
    error = await failure(StageRequest("pvc://weights/llama"), paths)
    assert error.reason == reasons.SOURCE_NOT_FOUND
    assert str(error) == "the volume of claim weights has no folder llama: check source.uri"


async def test_a_volume_with_a_wrong_digest_is_refused(paths: StagePaths):
    write_files(paths.source, model_files())
    error = await failure(StageRequest("pvc://weights", digest="sha256:" + "0" * 64), paths)
    assert error.reason == reasons.DIGEST_MISMATCH


# --- https:// -------------------------------------------------------------------------------------------------------

Serve = Callable[[ArchiveServer], Awaitable[str]]
PROBE = "bytes=0-0"
"""How a server is asked for size and version of a file."""


HERE = Settings(network=LOCAL)


def quick(uri: str, *, digest: str | None = None, manifest: str | None = None, attempts: int = 3) -> StageRequest:
    """A request that is not patient."""
    return StageRequest(
        uri, digest, manifest=manifest, settings=Settings(network=LOCAL, pause_seconds=0.001, attempts=attempts)
    )


@pytest.fixture
async def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    context, certificate = localhost_tls(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    servers: list[TestServer] = []

    async def start(archive: ArchiveServer) -> str:
        server = TestServer(archive.app(), scheme="https")
        await server.start_server(ssl=context)
        servers.append(server)
        return f"https://localhost:{server.port}/tiny.tar.gz"

    yield start
    for server in servers:
        await server.close()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [tar_of, lambda files: tar_of(files, "w"), lambda f: tar_of(f, "w:xz"), zip_of])
async def test_an_archive_is_fetched_and_unpacked(serve: Serve, paths: StagePaths, pack: Callable[..., bytes]):
    body = pack(model_files())
    uri = await serve(ArchiveServer(body))
    digest = "sha256:" + hashlib.sha256(body).hexdigest()
    assert (await stage(quick(uri, digest=digest), paths)).digest == digest
    assert staged_files(paths) == model_files()


async def test_an_archive_may_wrap_the_model_in_one_folder(serve: Serve, paths: StagePaths):
    uri = await serve(ArchiveServer(tar_of({f"tiny-1/{name}": data for name, data in model_files().items()})))
    await stage(quick(uri), paths)
    assert staged_files(paths) == model_files()


async def test_a_broken_connection_is_resumed_where_it_broke(serve: Serve, paths: StagePaths):
    body = tar_of(model_files(50_000), "w")
    archive = ArchiveServer(body, break_after=20_000)
    await stage(quick(await serve(archive)), paths)
    assert staged_files(paths) == model_files(50_000)
    assert archive.requested[:3] == [PROBE, None, f"bytes=20000-{len(body) - 1}"]
    assert len(archive.requested) > 3
    assert all(header is not None and not header.startswith("bytes=0-") for header in archive.requested[3:])


async def test_a_restarted_container_goes_on_with_what_an_earlier_one_fetched(serve: Serve, paths: StagePaths):
    body = tar_of(model_files(50_000), "w")
    archive = ArchiveServer(body, break_after=20_000)
    uri = await serve(archive)
    error = await failure(quick(uri, attempts=0), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "the connection to localhost broke off" in str(error)
    archive.break_after = None
    await stage(quick(uri), paths)
    assert staged_files(paths) == model_files(50_000)
    assert archive.requested == [PROBE, None, PROBE, f"bytes=20000-{len(body) - 1}"]


async def test_an_archive_that_changed_meanwhile_is_fetched_anew(serve: Serve, paths: StagePaths):
    archive = ArchiveServer(tar_of(model_files(50_000), "w"), break_after=20_000)
    uri = await serve(archive)
    await failure(quick(uri, attempts=0), paths)
    archive.body, archive.etag, archive.break_after = tar_of(model_files(40_000), "w"), '"v2"', None
    await stage(quick(uri), paths)
    assert staged_files(paths) == model_files(40_000)


async def test_a_server_without_ranges_is_fetched_from_the_start_again(serve: Serve, paths: StagePaths):
    archive = ArchiveServer(tar_of(model_files(50_000), "w"), break_after=20_000, ranges=False)
    uri = await serve(archive)
    error = await failure(quick(uri), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    archive.break_after = None
    await stage(quick(uri), paths)
    assert staged_files(paths) == model_files(50_000)


async def test_a_wrong_digest_of_an_archive_is_told_and_not_kept(serve: Serve, paths: StagePaths):
    archive = ArchiveServer(tar_of(model_files()))
    uri = await serve(archive)
    wanted = "sha256:" + "1" * 64
    error = await failure(quick(uri, digest=wanted), paths)
    assert error.reason == reasons.DIGEST_MISMATCH
    assert wanted in str(error)
    await failure(quick(uri, digest=wanted), paths)
    assert archive.requested == [PROBE, None] * 2


@pytest.mark.parametrize(
    ("status", "token", "reason", "message"),
    [
        (404, None, reasons.SOURCE_NOT_FOUND, "does not exist (404): check source.uri"),
        (
            401,
            None,
            reasons.GATED,
            "wants credentials (401): put a token into key `token` of a Secret and name the Secret in source.secretRef",
        ),
        (403, "t0ken", reasons.GATED, "refused the token of source.secretRef (403): check the Secret's key `token`"),
        (503, None, reasons.SOURCE_UNREACHABLE, "cannot be fetched now: it answered 503"),
    ],
)
async def test_a_server_that_refuses_is_explained(
    serve: Serve, paths: StagePaths, status: int, token: str | None, reason: str, message: str
):
    if token is not None:
        write_files(paths.secret, {"token": token.encode()})
    error = await failure(quick(await serve(ArchiveServer(b"", status=status))), paths)
    assert error.reason == reason
    assert str(error).endswith(message)
    assert "t0ken" not in str(error)


async def test_the_token_of_the_secret_opens_a_private_archive(serve: Serve, paths: StagePaths):
    write_files(paths.secret, {"token": b"s3cret\n"})
    await stage(quick(await serve(ArchiveServer(tar_of(model_files()), token="s3cret"))), paths)
    assert staged_files(paths) == model_files()


async def test_a_secret_without_the_key_is_told_so(serve: Serve, paths: StagePaths):
    paths.secret.mkdir()
    error = await failure(quick(await serve(ArchiveServer(b""))), paths)
    assert error.reason == reasons.GATED
    assert str(error) == ("the Secret of source.secretRef has no key `token`: put the access token under that key")


async def test_a_token_is_not_sent_in_clear(serve: Serve, paths: StagePaths):
    plain = ArchiveServer(tar_of(model_files()))
    server = TestServer(plain.app())
    await server.start_server()
    uri = await serve(ArchiveServer(b"", redirect=f"http://localhost:{server.port}/x"))
    error = await failure(quick(uri), paths)
    await server.close()
    assert "redirects to http://, refused" in str(error)


async def test_an_unreachable_host_is_explained(serve: Serve, paths: StagePaths):
    error = await failure(quick(f"https://localhost:{unused_port()}/x.tar"), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "localhost cannot be reached (Connect call failed" in str(error)
    assert str(error).endswith("check source.uri and the chart's proxy settings")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (socket.EAI_NONAME, "nowhere.invalid cannot be resolved: check source.uri, the cluster's DNS"),
        (socket.EAI_AGAIN, "no name server answered for nowhere.invalid: check the cluster's DNS"),
    ],
)
async def test_a_name_that_does_not_resolve_is_explained(
    serve: Serve, paths: StagePaths, monkeypatch: pytest.MonkeyPatch, code: int, text: str
):
    async def fails(*_: object) -> None:
        raise socket.gaierror(code, "as a resolver says it")

    monkeypatch.setattr(ThreadedResolver, "resolve", fails)
    error = await failure(quick("https://nowhere.invalid/x.tar"), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error).startswith(text)


async def test_an_untrusted_certificate_is_explained(serve: Serve, paths: StagePaths, monkeypatch: pytest.MonkeyPatch):
    uri = await serve(ArchiveServer(tar_of(model_files())))
    monkeypatch.delenv("SSL_CERT_FILE")
    error = await failure(quick(uri), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error) == "the certificate of localhost is not trusted: add its CA to the chart's caBundle"


async def test_a_ca_bundle_adds_to_the_public_roots(serve: Serve, paths: StagePaths, monkeypatch: pytest.MonkeyPatch):
    uri = await serve(ArchiveServer(tar_of(model_files())))
    bundle = Path(os.environ["SSL_CERT_FILE"])
    combined = with_public_roots(bundle, paths.target.with_name(".ca.crt"))
    monkeypatch.setenv("SSL_CERT_FILE", str(combined))
    await stage(quick(uri), paths)
    context = ssl.create_default_context(cafile=str(combined))
    assert len(context.get_ca_certs()) > 50


def test_a_ca_bundle_without_certificates_is_refused(tmp_path: Path):
    (tmp_path / "ca.crt").write_text("hello")
    with pytest.raises(ssl.SSLError):
        with_public_roots(tmp_path / "ca.crt", tmp_path / "combined.crt")


@pytest.mark.parametrize("status", [200, 401, 404, 503])
async def test_the_key_of_a_signed_url_stands_in_no_message_and_no_log(
    serve: Serve, paths: StagePaths, status: int, capsys: pytest.CaptureFixture[str]
):
    uri = await serve(ArchiveServer(b"no archive", status=status)) + "?X-Signature=s3cret"
    error = await failure(quick(uri), paths)
    assert "s3cret" not in str(error)
    out = capsys.readouterr()
    assert "s3cret" not in out.out + out.err


def hostile_tar(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (hostile_tar(member("../evil")), "'../evil' leads out of the archive"),
        (hostile_tar(member("/etc/evil")), "leads out of the archive"),
        (hostile_tar(member("a", tarfile.SYMTYPE, "/etc")), "'a' is neither a file nor a folder"),
        (hostile_tar(member("a", tarfile.LNKTYPE, "../x")), "'a' is neither a file nor a folder"),
        (hostile_tar(member("a", tarfile.CHRTYPE)), "'a' is neither a file nor a folder"),
        (zip_of({"../evil": b"x"}), "'../evil' leads out of the archive"),
        (zip_of({"..\\evil": b"x"}), "leads out of the archive"),
        (b"not an archive", "is not a whole tar or zip archive"),
        (b"", "is not a whole tar or zip archive"),
        (tar_of(model_files(100_000))[:-40], "is not a whole tar or zip archive"),
        (b"\x28\xb5\x2f\xfd" + b"\0" * 600, "is compressed with zstd: use .tar, .tar.gz or .zip"),
    ],
)
async def test_an_archive_that_is_broken_or_hostile_is_refused(
    serve: Serve, paths: StagePaths, tmp_path: Path, body: bytes, message: str
):
    error = await failure(quick(await serve(ArchiveServer(body))), paths)
    assert error.reason == reasons.SOURCE_INVALID
    assert message in str(error)
    assert not [path for path in folders.regular_files(tmp_path) if path.name == "evil"]


# --- hf:// ----------------------------------------------------------------------------------------------------------

COMMIT = "a" * 40
Hub = tuple[HubServer, str]


def at(endpoint: str) -> Settings:
    return Settings(network=LOCAL, hub_endpoint=endpoint, pause_seconds=0.001)


@pytest.fixture
async def hub_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "must-not-be-used")
    hub_server = HubServer({**model_files(), "README.md": b"#", ".gitattributes": b"x", "onnx/model.onnx": b"o"})
    server = TestServer(hub_server.app())
    await server.start_server()
    yield hub_server, f"http://localhost:{server.port}"
    await server.close()


async def test_a_repository_is_fetched_with_what_an_engine_reads(hub_server: Hub, paths: StagePaths):
    server, endpoint = hub_server
    result = await stage(StageRequest("hf://team/tiny", settings=at(endpoint)), paths)
    assert staged_files(paths) == model_files()
    assert result.commit == COMMIT
    assert sorted(server.fetched) == sorted(model_files())


async def test_a_branch_that_moves_is_resolved_once(hub_server: Hub, paths: StagePaths):
    server, endpoint = hub_server
    server.fail_file = "model.safetensors"
    error = await failure(StageRequest("hf://team/tiny@main", settings=at(endpoint)), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    server.fail_file, server.branches = None, {"main": "b" * 40, "old": COMMIT}
    already = set(server.fetched)
    server.fetched.clear()
    result = await stage(StageRequest("hf://team/tiny@main", settings=at(endpoint)), paths)
    assert result.commit == COMMIT
    assert "model.safetensors" in server.fetched
    assert not already & set(server.fetched)


async def test_a_gated_repository_without_secret_names_the_field(hub_server: Hub, paths: StagePaths):
    server, endpoint = hub_server
    server.gated = True
    error = await failure(StageRequest("hf://team/tiny", settings=at(endpoint)), paths)
    assert error.reason == reasons.GATED
    assert str(error) == (
        "team/tiny is gated, private or does not exist (401): put a hub token into key `token` of a Secret and name "
        "the Secret in source.secretRef"
    )


async def test_a_gated_repository_with_a_token_that_is_not_enough(hub_server: Hub, paths: StagePaths):
    server, endpoint = hub_server
    server.gated = True
    write_files(paths.secret, {"token": b"t0ken"})
    error = await failure(StageRequest("hf://team/tiny", settings=at(endpoint)), paths)
    assert error.reason == reasons.GATED
    assert str(error) == (
        "the hub refuses team/tiny to the token of source.secretRef (403): accept the repository's terms with that "
        "account, and check the Secret's key `token`"
    )


@pytest.mark.parametrize("kind", ["gated", "private"])
async def test_the_token_of_the_secret_opens_a_closed_repository(hub_server: Hub, paths: StagePaths, kind: str):
    server, endpoint = hub_server
    setattr(server, kind, True)
    write_files(paths.secret, {"token": b"hub-token\n"})
    await stage(StageRequest("hf://team/tiny", settings=at(endpoint)), paths)
    assert staged_files(paths) == model_files()


async def test_a_private_repository_without_secret_names_the_field(hub_server: Hub, paths: StagePaths):
    server, endpoint = hub_server
    server.private = True
    error = await failure(StageRequest("hf://team/tiny", settings=at(endpoint)), paths)
    assert error.reason == reasons.GATED


async def test_a_repository_or_revision_that_is_not_there(hub_server: Hub, paths: StagePaths):
    _, endpoint = hub_server
    write_files(paths.secret, {"token": b"hub-token"})
    error = await failure(StageRequest("hf://team/typo", settings=at(endpoint)), paths)
    assert error.reason == reasons.SOURCE_NOT_FOUND
    assert str(error) == "the hub has no repository team/typo: check source.uri"
    error = await failure(StageRequest("hf://team/tiny@v9", settings=at(endpoint)), paths)
    assert error.reason == reasons.SOURCE_NOT_FOUND
    assert str(error) == "team/tiny has no revision 'v9': check source.uri"


async def test_a_hub_that_cannot_be_reached(paths: StagePaths):
    request = StageRequest("hf://team/tiny", settings=at(f"http://localhost:{unused_port()}"))
    error = await failure(request, paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error).startswith("the hub cannot be reached for team/tiny (")


async def test_a_hub_that_is_broken(hub_server: Hub, paths: StagePaths):
    server, endpoint = hub_server
    server.status = 500
    error = await failure(StageRequest("hf://team/tiny", settings=at(endpoint)), paths)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "the hub answered 500 for team/tiny" in str(error)


async def test_the_digest_of_a_repository_is_that_of_what_was_fetched(hub_server: Hub, paths: StagePaths, model: Path):
    _, endpoint = hub_server
    request = StageRequest("hf://team/tiny", digest=shell_digest(model), settings=at(endpoint))
    assert (await stage(request, paths)).digest == shell_digest(model)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["pytorch_model.bin", "training_args.bin", "config.json"], ["config.json", "pytorch_model.bin"]),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "q4.gguf"], ["pytorch_model.bin"]),
        (["consolidated.safetensors", "model-1.safetensors"], ["model-1.safetensors"]),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
        (["original/x.pth", "model.safetensors", ".cache/x.json"], ["model.safetensors"]),
        (["1_Pooling/config.json", "tokenizer.model", "x.png"], ["1_Pooling/config.json", "tokenizer.model"]),
    ],
)
def test_of_a_repository_only_what_an_engine_reads_is_wanted(names: list[str], wanted: list[str]):
    assert wanted_files(names) == wanted


# --- the disk -------------------------------------------------------------------------------------------------------


async def test_too_little_room_is_told_before_anything_is_copied(
    model: Path, paths: StagePaths, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))  # pyright: ignore
    error = await failure(StageRequest(f"file://{model}", settings=HERE), paths)
    assert error.reason == reasons.DISK_FULL
    assert "free: give the node more ephemeral storage, or keep the model on a volume and use pvc://" in str(error)


async def test_a_disk_that_fills_up_is_told_so(model: Path, paths: StagePaths, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/shoal/models/x")

    monkeypatch.setattr(os, "pwrite", full)
    error = await failure(StageRequest(f"file://{model}", settings=HERE), paths)
    assert error.reason == reasons.DISK_FULL
    assert re.match(
        r"no space left while fetching \S+: \d+ bytes of it are still to come and .* are free: ", str(error)
    )


# --- the container --------------------------------------------------------------------------------------------------


def test_the_termination_message_fits_and_names_the_reason(model: Path, paths: StagePaths):
    left: list[str] = []
    assert run_stage(StageRequest(f"file://{model}", settings=HERE), paths, left.append) == 0
    assert run_stage(StageRequest("file:///nowhere", settings=HERE), paths, left.append) == 1
    assert json.loads(left[0])["bytes"] > 0
    assert json.loads(left[1])["reason"] == "SourceNotFound"
    long = termination_message(ArtifactError(reasons.GATED, "ü" * 9000))
    assert len(long.encode()) <= 4096
    assert json.loads(long)["reason"] == "Gated"


def test_the_command_stages_and_leaves_a_message(model: Path, tmp_path: Path, paths: StagePaths):
    def command(uri: str, digest: str) -> tuple[int, dict[str, object]]:
        log = tmp_path / "termination-log"
        done = subprocess.run(
            [
                sys.executable, "-c", "from shoal.cli.main import main; main()", "agent", "stage",
                f"--target={paths.target}", f"--progress={paths.progress}", f"--termination-log={log}",
                f"--secret-dir={paths.secret}",
            ],
            env={"SHOAL_STAGE_URI": uri, "SHOAL_STAGE_DIGEST": digest, "PATH": "/usr/bin:/bin", **LOCAL_ENV},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done.returncode, json.loads(log.read_text())

    code, message = command(f"file://{model}", "sha256:" + "0" * 64)
    assert (code, message["reason"]) == (1, "DigestMismatch")
    code, message = command(f"file://{model}", shell_digest(model))
    assert (code, message["digest"]) == (0, shell_digest(model))
    assert staged_files(paths) == model_files()


def test_the_command_leaves_at_once_when_it_is_told_to(tmp_path: Path, paths: StagePaths):
    """As number 1 of its container it would not die of the signal by itself."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = subprocess.Popen(
            [
                sys.executable, "-c", "from shoal.cli.main import main; main()", "agent", "stage",
                f"--uri=https://127.0.0.1:{silent.getsockname()[1]}/x.tar", f"--target={paths.target}",
                f"--progress={paths.progress}", f"--termination-log={tmp_path / 'log'}",
                f"--secret-dir={paths.secret}",
            ], env={**os.environ, **LOCAL_ENV},
        )  # fmt: skip
        try:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait(30)


async def test_a_container_that_is_killed_goes_on_from_its_last_note(tmp_path: Path, paths: StagePaths):
    """SIGKILL in the middle of a file whose source has gone silent; the next container fetches only what is missing."""
    hub = HubServer(model_files(3 << 20))
    server = TestServer(hub.app())
    await server.start_server()
    assert server.port is not None
    async with Flaky(server.port, hang_after=2 << 20) as flaky:
        command = [
            sys.executable, "-c", "from shoal.cli.main import main; main()", "agent", "stage", "--uri=hf://team/tiny",
            f"--target={paths.target}", f"--progress={paths.progress}", f"--termination-log={tmp_path / 'log'}",
            f"--secret-dir={paths.secret}", f"--hub-endpoint=http://{flaky.address}",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command)
        note = paths.files / "model.safetensors.part.json"
        async with asyncio.timeout(60):
            while not note.exists():
                await asyncio.sleep(0.05)
        process.kill()
        await process.wait()
        flaky.hang_after = None
        before = flaky.carried
        process = await asyncio.create_subprocess_exec(*command)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert flaky.carried - before < 2 << 20
    await server.close()
    assert staged_files(paths) == model_files(3 << 20)


def test_the_agent_stays_small():
    """What `serve` imports is resident in every engine pod: the HTTP server, and none of what other processes need."""
    code = (
        "import json, sys, shoal.runtime.agent, shoal.agent.serve, shoal.agent.observe\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    imported = set(json.loads(done.stdout))
    assert "uvicorn" in imported  # the list is of the process that serves
    others = {
        "alembic",
        "google",
        "grpc",
        "huggingface_hub",
        "kopf",
        "obstore",
        "opentelemetry",
        "psycopg",
        "sqlalchemy",
        "yaml",
    }
    assert not imported & others


def test_a_reader_of_the_progress_file_never_sees_half_of_it(tmp_path: Path):
    file = tmp_path / "stage.json"
    write_progress(file, StageProgress(state="fetching", bytes_done=1))
    write_progress(file, StageProgress(state="verifying", bytes_done=2))
    assert [path.name for path in tmp_path.iterdir()] == ["stage.json"]
    assert StageProgress.model_validate_json(file.read_bytes()).state == "verifying"
