"""gs:// and az:// against servers that check who asks: fake-gcs-server behind a door, and Azurite."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port

from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import stage
from shoal.api import reasons
from shoal.artifacts import ArtifactError, Manifest, Settings, StoreCredentials, folders, open_source
from tests.support.azure import Azure, azure_server
from tests.support.flaky import Flaky
from tests.support.google import Google, google_server
from tests.support.sources import LOCAL, model_files, safetensors, tar_of, write_files

# A server is built or installed once, which takes minutes on a fresh machine.
pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
QUICK = Settings(network=LOCAL, pause_seconds=0.001)
Store = Google | Azure


@pytest.fixture(scope="module")
def google() -> Iterator[Google]:
    with google_server() as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[Azure]:
    with azure_server() as server:
        yield server


@pytest.fixture(params=["google", "azure"])
def store(request: pytest.FixtureRequest) -> Store:
    server: Store = request.getfixturevalue(request.param)
    server.put("llama", {**model_files(300_000), "README.md": b"#", "original/consolidated.00.pth": b"o"})
    server.put("llama-2", {"config.json": b"{}"})
    return server


def at(store: Store, path: str) -> str:
    return f"{'gs' if isinstance(store, Google) else 'az'}://{path}"


def named(store: Store) -> str:
    """The keys of its Secret, in messages."""
    if isinstance(store, Google):
        return "GOOGLE_SERVICE_ACCOUNT_KEY, GOOGLE_BASE_URL"
    return "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_ENDPOINT"


def credentials(secret: dict[str, bytes]) -> StoreCredentials:
    return StoreCredentials({name: value.decode() for name, value in secret.items()}, given=True)


async def manifest_of(uri: str, secret: dict[str, bytes], settings: Settings = QUICK) -> Manifest:
    async with open_source(uri, credentials(secret), settings) as source:
        return await source.manifest()


async def refusal(uri: str, secret: dict[str, bytes], settings: Settings = QUICK) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await manifest_of(uri, secret, settings)
    return caught.value


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


async def test_what_an_engine_reads_is_staged(store: Store, paths: StagePaths):
    write_files(paths.secret, store.secret())
    await stage(StageRequest(at(store, "models/llama"), settings=QUICK), paths)
    found = {p.relative_to(paths.target).as_posix(): p.read_bytes() for p in folders.regular_files(paths.target)}
    assert found == model_files(300_000)


async def test_many_ranges_at_once_make_the_same_bytes(store: Store, tmp_path: Path):
    settings = replace(QUICK, segment_bytes=7_001, connections=5)
    came: list[int] = []
    async with open_source(at(store, "models/llama"), credentials(store.secret()), settings) as source:
        manifest = await source.manifest()
        file = next(file for file in manifest.files if file.name == "model.safetensors")
        await source.download(file, tmp_path / "x", came.append)
    assert (tmp_path / "x").read_bytes() == model_files(300_000)["model.safetensors"]
    assert sum(came) == file.size


async def test_a_prefix_is_a_folder_and_every_file_has_a_validator(store: Store):
    manifest = await manifest_of(at(store, "models/llama"), store.secret())
    assert [file.name for file in manifest.files] == sorted(model_files())
    assert all(file.validator.startswith("etag:") and len(file.validator) > 6 for file in manifest.files)


async def test_an_archive_in_a_bucket_is_unpacked(store: Store, paths: StagePaths):
    store.put("packed", {"tiny.tar.gz": tar_of(model_files())})
    write_files(paths.secret, store.secret())
    await stage(StageRequest(at(store, "models/packed/tiny.tar.gz"), settings=QUICK), paths)
    assert (paths.target / "model.safetensors").read_bytes() == model_files()["model.safetensors"]


async def test_the_digest_of_the_content_holds_it(store: Store, paths: StagePaths):
    write_files(paths.secret, store.secret())
    request = StageRequest(at(store, "models/llama"), digest="sha256:" + "0" * 64, settings=QUICK)
    with pytest.raises(ArtifactError, match=r"but source\.digest says") as caught:
        await stage(request, paths)
    assert caught.value.reason == reasons.DIGEST_MISMATCH


async def test_a_wrong_key_is_told_with_the_names_of_the_keys(store: Store):
    if isinstance(store, Google):
        # A key of its own for the same account, as after it was revoked.
        other = Google("", "").key("list", "read")
        wrong = store.secret(other.replace('"key-0"', '"key-unknown"'))
    else:
        wrong = store.secret("d3Jvbmc=")
    error = await refusal(at(store, "models/llama"), wrong)
    assert error.reason == reasons.GATED
    assert str(error) == (
        f"{at(store, 'models/llama')} refuses the credentials of source.secretRef: check its keys {named(store)}, and "
        "that they may list the bucket and read its objects"
    )


async def test_who_may_list_may_not_yet_read(store: Store):
    secret = store.secret(store.key("list")) if isinstance(store, Google) else store.shared("l")
    async with open_source(at(store, "models/llama"), credentials(secret), QUICK) as source:
        manifest = await source.manifest()
        with pytest.raises(ArtifactError, match="refuses the credentials") as caught:
            await source.authorise(manifest)
    assert caught.value.reason == reasons.GATED


async def test_a_public_bucket_needs_no_keys_and_another_one_says_which(store: Store):
    open_to_all = f"public{'gs' if isinstance(store, Google) else 'az'}"
    store.make_bucket(open_to_all, public=True)
    store.put("", {"config.json": b"{}"}, bucket=open_to_all)
    async with open_source(at(store, open_to_all), credentials(store.place()), QUICK) as source:
        (file,) = (await source.manifest()).files
        assert await source.read(file, 0, 10) == b"{}"
    error = await refusal(at(store, "models/llama"), store.place())
    assert error.reason == reasons.GATED
    assert f"{at(store, 'models/llama')} is not public: put " in str(error)


async def test_a_bucket_or_prefix_that_is_not_there(store: Store):
    error = await refusal(at(store, "modles/llama"), store.secret())
    assert error.reason == reasons.SOURCE_NOT_FOUND
    bucket = "bucket" if isinstance(store, Google) else "container"
    assert str(error) == f"{at(store, 'modles/llama')}: the {bucket} does not exist; check source.uri"
    error = await refusal(at(store, "models/lama"), store.secret())
    assert str(error) == f"{at(store, 'models/lama')} has no files: check source.uri"
    error = await refusal(at(store, "models/lama.tar"), store.secret())
    assert str(error) == f"{at(store, 'models/lama.tar')}: there is nothing under that name; check source.uri"


async def test_a_server_that_is_not_there_is_explained(store: Store):
    secret = store.secret(endpoint=f"http://127.0.0.1:{unused_port()}")
    error = await refusal(at(store, "models/llama"), secret)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert str(error).startswith(f"{at(store, 'models/llama')} cannot be reached (connection refused): check")


async def test_a_server_that_hangs_is_left_after_the_stall_time(store: Store):
    settings = replace(QUICK, stall_seconds=0.2, attempts=1)
    async with Flaky(store.port, hang_after=0) as flaky:
        error = await refusal(at(store, "models/llama"), store.secret(endpoint=f"http://{flaky.address}"), settings)
    assert error.reason == reasons.SOURCE_UNREACHABLE
    assert "no answer in time" in str(error)


async def test_a_transfer_that_breaks_goes_on_where_it_broke(store: Store, tmp_path: Path):
    content = safetensors(6 << 20)
    store.put("large", {"config.json": b"{}", "model.safetensors": content})
    async with Flaky(store.port) as flaky:
        given = credentials(store.secret(endpoint=f"http://{flaky.address}"))
        async with open_source(at(store, "models/large"), given, replace(QUICK, connections=1)) as source:
            manifest = await source.manifest()
            flaky.cut_after = 3 << 20
            file = max(manifest.files, key=lambda file: file.size)
            before = flaky.carried
            await source.download(file, tmp_path / "x", lambda _: None)
    assert (tmp_path / "x").read_bytes() == content
    assert flaky.carried - before < 1.6 * len(content)


async def test_an_object_that_is_overwritten_meanwhile_is_not_mixed(store: Store, tmp_path: Path):
    store.put("moving", model_files(1000))
    async with open_source(at(store, "models/moving"), credentials(store.secret()), QUICK) as source:
        manifest = await source.manifest()
        store.put("moving", {"model.safetensors": safetensors(1000)[:-1] + b"!"})
        file = next(file for file in manifest.files if file.name == "model.safetensors")
        with pytest.raises(ArtifactError) as caught:
            await source.download(file, tmp_path / "x", lambda _: None)
    assert caught.value.reason == reasons.SOURCE_CHANGED


async def test_a_pinned_bucket_that_was_overwritten_is_refused(store: Store, paths: StagePaths):
    uri = at(store, "models/pinned")
    store.put("pinned", model_files(1000))
    write_files(paths.secret, store.secret())
    pin = (await manifest_of(uri, store.secret())).digest
    await stage(StageRequest(uri, manifest=pin, settings=QUICK), paths)
    store.put("pinned", {"config.json": b'{"model_type": "other"}'})
    paths.marker.unlink()
    with pytest.raises(ArtifactError, match="is not what it was when it was pinned") as caught:
        await stage(StageRequest(uri, manifest=pin, settings=QUICK), paths)
    assert caught.value.reason == reasons.SOURCE_CHANGED


async def test_a_shared_access_signature_reads_whatever_the_pod_is(azure: Azure, monkeypatch: pytest.MonkeyPatch):
    azure.put("llama", model_files())
    for name in ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE"):
        monkeypatch.setenv(name, "a-pod-with-a-workload-identity")
    async with open_source("az://models/llama", credentials(azure.shared("rl")), QUICK) as source:
        await source.authorise(await source.manifest())


async def test_the_token_of_a_pods_identity_reads_a_bucket(google: Google):
    google.put("llama", model_files())
    google.tokens["ya29.of-the-pod"] = frozenset({"list", "read"})
    secret = {"GOOGLE_BEARER_TOKEN": b"ya29.of-the-pod", **google.place()}
    async with open_source("gs://models/llama", credentials(secret), QUICK) as source:
        await source.authorise(await source.manifest())
