"""A bucket that is read as the pod's ServiceAccount: what the clouds are asked, and what comes of it."""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from shoal.agent.stage.request import StagePaths, StageRequest
from shoal.agent.stage.run import stage
from shoal.api import reasons
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, open_source
from shoal.artifacts.identity import credentials_of, with_identity
from tests.support.cache import running, short_folder
from tests.support.s3 import S3, s3_server
from tests.support.sources import LOCAL, model_files, write_files

QUICK = Settings(network=LOCAL, pause_seconds=0.001)
CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "GCE_")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of no cloud."""
    for name in [name for name in os.environ if name.startswith(CLOUDS)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        server.put("llama", model_files(20_000))
        yield server


@dataclass
class Cloud:
    """What a pod's environment leads to: metadata server, token service. It notes what it was asked."""

    status: int = 200
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path, and the form or the headers that matter."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/computeMetadata/v1/instance/service-accounts/default/token", self._google)
        app.router.add_post("/{tenant}/oauth2/v2.0/token", self._azure)
        app.router.add_get("/v1/credentials", self._eks)
        return app

    async def _google(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, {"flavor": request.headers.get("Metadata-Flavor", "")}))
        return web.json_response({"access_token": "g-t0ken", "expires_in": 3599}, status=self.status)

    async def _azure(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, {k: str(v) for k, v in (await request.post()).items()}))
        return web.json_response({"access_token": "a-t0ken", "expires_in": 3599}, status=self.status)

    async def _eks(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, {"authorization": request.headers.get("Authorization", "")}))
        keys = {"AccessKeyId": "AKI", "SecretAccessKey": "s", "Token": "t", "Expiration": "2030-01-01T00:00:00Z"}
        return web.json_response(keys, status=self.status)


@pytest.fixture
async def cloud() -> AsyncGenerator[tuple[Cloud, str]]:
    it = Cloud()
    async with TestServer(it.app()) as server:
        yield it, f"{server.host}:{server.port}"


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("a.projected.jwt\n")
    return str(path)


@pytest.fixture
async def sts(s3: S3) -> AsyncGenerator[str]:
    """moto's token service. It wants a signature, which this call does not have in the cloud."""

    def forward(body: bytes) -> bytes:
        with s3.anonymous(), urllib.request.urlopen(s3.endpoint, body, timeout=10) as answer:
            return answer.read()

    async def answer(request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers
        return web.Response(body=await asyncio.to_thread(forward, await request.read()), content_type="text/xml")

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


def irsa(sts: str, role: str, token: str) -> dict[str, str]:
    return {
        "AWS_ROLE_ARN": role,
        "AWS_WEB_IDENTITY_TOKEN_FILE": token,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_STS": sts,
    }


async def test_a_role_of_aws_reads_its_bucket(
    s3: S3, sts: str, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in irsa(sts, s3.role("reader", "s3:ListBucket", "s3:GetObject"), token).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "models").mkdir()
    (tmp_path / "run").mkdir()
    paths = StagePaths(
        target=tmp_path / "models" / "model",
        secret=write_files(tmp_path / "secret", {"AWS_ENDPOINT_URL": s3.endpoint.encode()}),
        progress=tmp_path / "run" / "stage.json",
    )
    await stage(StageRequest("s3://models/llama", identity=True, settings=QUICK), paths)
    assert (paths.target / "model.safetensors").read_bytes() == model_files(20_000)["model.safetensors"]


async def test_a_role_that_may_not_read_is_told_by_its_name(s3: S3, sts: str, token: str) -> None:
    role = s3.role("lister", "s3:ListBucket")
    place = StoreCredentials({"AWS_ENDPOINT_URL": s3.endpoint}, given=True)
    found = await with_identity("s3://models/llama", place, QUICK, irsa(sts, role, token))
    async with open_source("s3://models/llama", found, QUICK) as source:
        manifest = await source.manifest()
        with pytest.raises(ArtifactError) as caught:
            await source.authorise(manifest)
    assert caught.value.reason == reasons.GATED
    assert str(caught.value) == (
        f"s3://models/llama refuses role {role}: let it list the bucket and read its objects (its keys end by "
        "themselves, mostly after an hour: a fetch that takes longer goes on with new ones at the next try)"
    )


async def test_the_node_cache_asks_as_whoever_asked_it(s3: S3, sts: str, token: str) -> None:
    place = StoreCredentials({"AWS_ENDPOINT_URL": s3.endpoint}, given=True)
    reader = irsa(sts, s3.role("cached", "s3:ListBucket", "s3:GetObject"), token)
    found = await with_identity("s3://models/llama", place, QUICK, reader)
    with short_folder() as root:
        async with running(root, open_source, "a", "b", settings=QUICK) as cache:
            done = await cache.fetch("a", "s3://models/llama", credentials=found)
            assert cache.content("a", done) == model_files(20_000)
            stranger = irsa(sts, s3.role("stranger", "s3:ListBucket"), token)
            other = await with_identity("s3://models/llama", place, QUICK, stranger)
            with pytest.raises(ArtifactError) as caught:
                await cache.fetch("b", "s3://models/llama", credentials=other)
    assert caught.value.reason == reasons.GATED
    assert "refuses role arn:aws:iam::" in str(caught.value)


async def test_eks_pod_identity(cloud: tuple[Cloud, str], token: str) -> None:
    asked, address = cloud
    environment = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{address}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": token,
        "AWS_REGION": "eu-west-1",
    }
    found = await with_identity("s3://b/m", StoreCredentials(), QUICK, environment)
    assert dict(found.values) == {
        "AWS_ACCESS_KEY_ID": "AKI",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SESSION_TOKEN": "t",
        "AWS_REGION": "eu-west-1",
    }
    assert asked.asked == [("/v1/credentials", {"authorization": "a.projected.jwt"})]


async def test_the_metadata_server_of_gke(cloud: tuple[Cloud, str]) -> None:
    asked, address = cloud
    found = await with_identity("gs://b/m", StoreCredentials(), QUICK, {"GCE_METADATA_HOST": address})
    assert dict(found.values) == {"GOOGLE_BEARER_TOKEN": "g-t0ken"}
    assert asked.asked[0][1] == {"flavor": "Google"}


async def test_outside_of_gke_a_bucket_is_read_without_credentials() -> None:
    nowhere = {"GCE_METADATA_HOST": f"127.0.0.1:{unused_port()}"}
    assert await with_identity("gs://b/m", StoreCredentials(), QUICK, nowhere) == StoreCredentials()


async def test_azure_workload_identity(cloud: tuple[Cloud, str], token: str) -> None:
    asked, address = cloud
    environment = {
        "AZURE_CLIENT_ID": "c-1",
        "AZURE_TENANT_ID": "t-1",
        "AZURE_FEDERATED_TOKEN_FILE": token,
        "AZURE_AUTHORITY_HOST": f"http://{address}/",
    }
    account = StoreCredentials({"AZURE_STORAGE_ACCOUNT_NAME": "acme"}, given=True)
    found = await with_identity("az://c/m", account, QUICK, environment)
    assert dict(found.values) == {"AZURE_STORAGE_ACCOUNT_NAME": "acme", "AZURE_STORAGE_TOKEN": "a-t0ken"}
    ((path, form),) = asked.asked
    assert path == "/t-1/oauth2/v2.0/token"
    assert form == {
        "grant_type": "client_credentials",
        "client_id": "c-1",
        "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
        "client_assertion": "a.projected.jwt",
        "scope": "https://storage.azure.com/.default",
    }


@pytest.mark.parametrize("uri", ["gs://b/m", "az://c/m"])
async def test_a_token_is_sent_to_the_bucket(uri: str) -> None:
    heard: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append(request.headers.get("Authorization", ""))
        return web.Response(status=403)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        where = str(server.make_url("")).rstrip("/")
        values = {
            "gs": {"GOOGLE_BASE_URL": where, "GOOGLE_BEARER_TOKEN": "t0ken"},
            "az": {
                "AZURE_ENDPOINT": where,
                "AZURE_STORAGE_ACCOUNT_NAME": "acme",
                "AZURE_STORAGE_TOKEN": "t0ken",
            },
        }[uri[:2]]
        with pytest.raises(ArtifactError) as caught:
            async with open_source(uri, StoreCredentials(values, identity="client c-1"), QUICK) as source:
                await source.manifest()
    assert set(heard) == {"Bearer t0ken"}
    assert caught.value.reason == reasons.GATED
    assert str(caught.value).startswith(f"{uri} refuses client c-1: let it list the bucket")
    assert "t0ken" not in str(caught.value)


async def test_a_cloud_that_refuses_says_what_to_look_at(cloud: tuple[Cloud, str], token: str) -> None:
    asked, address = cloud
    asked.status = 401
    environment = {
        "AZURE_CLIENT_ID": "c-1",
        "AZURE_TENANT_ID": "t-1",
        "AZURE_FEDERATED_TOKEN_FILE": token,
        "AZURE_AUTHORITY_HOST": f"http://{address}",
    }
    with pytest.raises(ArtifactError) as caught:
        await with_identity("az://c/m", StoreCredentials(), QUICK, environment)
    assert caught.value.reason == reasons.GATED
    assert str(caught.value) == (
        f"the cloud does not give the pod the identity of client c-1 of tenant t-1 ({address} answered 401): check the "
        "annotations of the ServiceAccount in spec.pod.serviceAccountName and that the identity trusts its namespace "
        "and name"
    )


async def test_a_token_service_that_is_away_is_tried_again(cloud: tuple[Cloud, str], token: str) -> None:
    asked, address = cloud
    asked.status = 503
    environment = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{address}/v1/credentials"}
    with pytest.raises(ArtifactError) as caught:
        await with_identity("s3://b/m", StoreCredentials(), QUICK, environment)
    assert caught.value.reason == reasons.SOURCE_UNREACHABLE
    assert len(asked.asked) == QUICK.attempts


async def test_a_token_that_is_not_there_is_told(tmp_path: Path) -> None:
    environment = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "gone")}
    with pytest.raises(ArtifactError, match="the ServiceAccount's token cannot be read from") as caught:
        await with_identity("s3://b/m", StoreCredentials(), QUICK, environment)
    assert caught.value.reason == reasons.GATED


async def test_keys_of_the_secret_go_before_the_identity(cloud: tuple[Cloud, str]) -> None:
    asked, address = cloud
    keys = StoreCredentials({"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({})}, given=True)
    assert await with_identity("gs://b/m", keys, QUICK, {"GCE_METADATA_HOST": address}) is keys
    assert not asked.asked


async def test_a_secret_that_lacks_a_key_is_told_and_not_passed_over(token: str) -> None:
    half = StoreCredentials({"AWS_ACCESS_KEY_ID": "a"}, given=True)
    environment = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": token}
    found = await with_identity("s3://b/m", half, QUICK, environment)
    with pytest.raises(ArtifactError, match="has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_source("s3://b/m", found, QUICK)


async def test_without_a_service_account_nobody_is_asked(
    cloud: tuple[Cloud, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, address = cloud
    monkeypatch.setenv("GCE_METADATA_HOST", address)
    assert await credentials_of("gs://b/m", tmp_path / "none", QUICK, identity=False) == StoreCredentials()
    assert not asked.asked
    assert (await credentials_of("gs://b/m", tmp_path / "none", QUICK, identity=True)).identity
