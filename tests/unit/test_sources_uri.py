"""What a source URI means."""

import re

import pytest

from shoal.api import names
from shoal.api.sources import SourceUri, engine_model_path, parse_source, shown
from shoal.artifacts import secret_advice


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
