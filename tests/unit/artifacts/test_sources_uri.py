"""What a source URI means."""

import re
from dataclasses import replace

import pytest

from shoal.api import names, sources
from shoal.api.sources import SourceUri, engine_model_path, parse_source, shown
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, open_source, secret_advice
from shoal.artifacts.web import Web
from shoal.core.lora.format.sources import credentials_for
from shoal.core.network import SourceNetwork
from tests.support.hostile import Server, listening, telling


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("hf://team/tiny", SourceUri("hf", "hf://team/tiny", repo="team/tiny")),
        ("hf://team/tiny@v1", SourceUri("hf", "hf://team/tiny@v1", repo="team/tiny", revision="v1")),
        ("s3://models", SourceUri("s3", "s3://models", bucket="models")),
        ("s3://models/a//b/", SourceUri("s3", "s3://models/a//b/", bucket="models", path="a/b")),
        ("gs://models/a", SourceUri("gs", "gs://models/a", bucket="models", path="a")),
        ("az://container/a", SourceUri("az", "az://container/a", bucket="container", path="a")),
        ("oci://ghcr.io/team/llama:1", SourceUri("oci", "oci://ghcr.io/team/llama:1", image="ghcr.io/team/llama:1")),
        (
            "oci://ghcr.io/team/llama@sha256:0",
            SourceUri("oci", "oci://ghcr.io/team/llama@sha256:0", image="ghcr.io/team/llama@sha256:0"),
        ),
        ("pvc://weights/./a/", SourceUri("pvc", "pvc://weights/./a/", claim="weights", path="a")),
        ("file:///models//a/", SourceUri("file", "file:///models//a/", path="/models/a")),
        ("https://xn--bcher-kva.example/x", SourceUri("https", "https://xn--bcher-kva.example/x")),
        ("https://[fd00::1]/x", SourceUri("https", "https://[fd00::1]/x")),
    ],
)
def test_a_source_is_taken_apart(uri: str, expected: SourceUri):
    assert parse_source(uri) == expected


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://host/x", "is not a source: write hf://owner/repo, s3://bucket/prefix (or gs://, az://), "),
        ("s3://", "is not a source"),
        ("s3:///models", "does not name a bucket and a prefix: write s3://bucket/prefix"),
        ("gs://models/../others", "does not name a bucket and a prefix: write gs://bucket/prefix"),
        ("az://key@container/a", "does not name a bucket and a prefix: write az://bucket/prefix"),
        ("oci://llama", "does not name an image: write oci://registry/image:tag"),
        ("oci://user@host/llama", "does not name an image"),
        ("oci://host/lla ma", "does not name an image"),
        ("pvc://claim/../x", "does not name a folder of a volume"),
        ("https://user:s3cret@host/x", "carries no user or password"),
        ("https://host@/x", "carries no user or password"),
        ("https://host.example\\@attacker.example/x", "which no source has"),
        ("https://host/a\nb", "which no source has"),
        ("https://h\u00f6st/x", "has a host that is no name of DNS"),
        ("https://\uff11\uff12\uff17.0.0.1/x", "has a host that is no name of DNS"),
        ("https://xn--0.com/x", "has a host that is no name of DNS"),
        ("https://host/team-a/../team-b/x", "has a path that does not stand for itself"),
        ("https://host/team-a/%2e%2e/team-b/x", "has a path that does not stand for itself"),
        ("https://host/team-a/..%2fteam-b/x", "has a path that does not stand for itself"),
        ("https://host/%252e%252e/x", "has a path that does not stand for itself"),
        ("https://host:0/x", "names a host"),
        ("https://host:99999/x", "is not a URL"),
        ("hf://team/../x", "does not name a repository"),
        ("hf://team/tiny@../../x", "does not name a repository"),
        ("hf://team/tiny?x", "does not name a repository"),
        ("hf://t%2fx/tiny", "does not name a repository"),
        ("s3://buck%2fet/x", "does not name a bucket and a prefix"),
        ("s3://attacker.example#/x", "does not name a bucket and a prefix"),
        ("s3://models/%2e%2e/x", "does not name a bucket and a prefix"),
        ("file:///models/../etc", "has no absolute path"),
        ("oci://host/../x", "does not name an image"),
    ],
)
def test_what_makes_no_sense_is_told(uri: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_source(uri)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("hf://team/tiny", names.MODEL_PATH),
        ("s3://models/a", names.MODEL_PATH),
        ("file:///models/a", names.MODEL_PATH),
        ("pvc://weights", names.SOURCE_DIR),
        ("pvc://weights/a/b", f"{names.SOURCE_DIR}/a/b"),
        ("oci://ghcr.io/team/llama:1", names.SOURCE_DIR),
    ],
)
def test_the_engine_reads_what_is_mounted_or_staged(uri: str, path: str):
    assert engine_model_path(uri) == path


def test_what_is_signed_is_not_shown():
    assert shown("https://host/x.tar?X-Signature=s3cret#y") == "https://host/x.tar"
    assert shown("s3://models/a") == "s3://models/a"


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("hf://team/tiny", "create it with the key `token`"),
        ("https://host/x.tar", "create it with the key `token`"),
        ("s3://models/tiny", "create it with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("gs://models/tiny", "create it with the keys GOOGLE_SERVICE_ACCOUNT_KEY"),
        ("az://models/tiny", "create it with the keys AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or "),
        ("pvc://weights/tiny", "pvc:// uses none: leave secretRef out"),
    ],
)
def test_a_missing_secret_is_asked_for_with_the_keys_of_its_source(uri: str, advice: str):
    assert secret_advice(uri).startswith(advice)


# --- what the patterns are for --------------------------------------------------------------------------------------

NOTHING = re.compile(r"(?!)")
QUICK = Settings(network=SourceNetwork(allowed_hosts=("127.0.0.1",)), attempts=1, connect_seconds=5, stall_seconds=5)


@pytest.mark.parametrize("climbing", ["team-a/../team-b/x.tar", "team-a/%2e%2e/team-b/x.tar"])
async def test_if_a_path_might_climb_one_teams_token_would_fetch_what_is_anothers(
    climbing: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "_has_dot_segments", lambda _: False)
    monkeypatch.setattr(sources, "_CODED", NOTHING)
    uri, prefix = f"https://models.example/{climbing}", "https://models.example/team-a"
    parse_source(uri)
    assert credentials_for(uri, [prefix]) == 0
    async with Server(telling(b"what is another's")).running() as server:
        opened = Web(QUICK, "token of team-a", lambda url, status, _: None)
        await opened.open()
        try:
            assert await opened.text(server.url(f"/{climbing}"), 100) == b"what is another's"
        finally:
            await opened.close()
    assert server.paths == ["/team-b/x.tar"]
    assert server.asked[0]["authorization"] == "Bearer token of team-a"


async def test_if_a_repository_might_climb_the_mirror_would_be_asked_for_anything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "_hub", lambda uri, rest: SourceUri("hf", uri, repo=rest))
    async with Server(telling(b"{}")).running() as mirror:
        settings = replace(QUICK, hub_endpoint=mirror.url(""))
        async with open_source(
            "hf://../../private/keys#", StoreCredentials({"token": "t"}, given=True), settings
        ) as source:
            with pytest.raises(ArtifactError):
                await source.manifest()
    assert mirror.paths == ["/private/keys"]


async def test_if_a_bucket_might_be_any_text_it_would_be_an_address_inside(monkeypatch: pytest.MonkeyPatch):
    """Where the bucket is a part of the host's name, what follows it is cut off."""
    monkeypatch.setattr(sources, "_BUCKET", re.compile(r"[^/]+"))
    values = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}
    async with (
        listening() as (port, began),
        open_source(f"s3://127.0.0.1:{port}#/x", StoreCredentials(values, given=True), QUICK) as source,
    ):
        with pytest.raises(ArtifactError):
            await source.manifest()
    assert len(began) == 1
