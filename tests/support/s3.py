"""A real S3-compatible server (moto's) that checks signatures and permissions."""

import contextlib
import json
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "models"


@dataclass(frozen=True, slots=True)
class S3:
    """The server, one bucket of it, and the keys of a user who may do everything."""

    endpoint: str
    keys: Mapping[str, str]
    client: Any
    bucket: str = BUCKET

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def put(self, prefix: str, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            self.client.put_object(Bucket=self.bucket, Key=f"{prefix}/{name}" if prefix else name, Body=content)

    def user(self, name: str, *actions: str) -> dict[str, str]:
        """Keys of a new user who may do only these `actions`, such as s3:ListBucket."""
        return _user(self.endpoint, self.keys, name, actions)

    def role(self, name: str, *actions: str) -> str:
        """ARN of a new role that any web identity may assume, and which may do only these `actions`."""
        iam = _client("iam", self.endpoint, self.keys)
        trust = {"Effect": "Allow", "Principal": {"Federated": "*"}, "Action": "sts:AssumeRoleWithWebIdentity"}
        policy = {"Version": "2012-10-17", "Statement": [trust]}
        made = iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(policy))
        iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=json.dumps(_policy(actions)))
        return made["Role"]["Arn"]

    @contextlib.contextmanager
    def anonymous(self) -> Generator[None]:
        """Takes requests without a signature meanwhile: what checks signatures cannot do without one."""
        _ask(self.endpoint, "reset-auth", b"inf")
        try:
            yield
        finally:
            _ask(self.endpoint, "reset-auth", b"0")

    def secret(self, keys: Mapping[str, str] | None = None, endpoint: str | None = None) -> dict[str, bytes]:
        """The Secret that `spec.source.secretRef` would name."""
        content = {**(self.keys if keys is None else keys), "AWS_ENDPOINT_URL": endpoint or self.endpoint}
        return {name: value.encode() for name, value in content.items()}


@contextlib.contextmanager
def s3_server() -> Generator[S3]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        # What it holds belongs to the process, and outlives the server before.
        _ask(endpoint, "reset", b"")
        _ask(endpoint, "reset-auth", b"inf")
        admin = _user(endpoint, {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}, "admin", ("*",))
        client = _client("s3", endpoint, admin)
        client.create_bucket(Bucket=BUCKET)
        _ask(endpoint, "reset-auth", b"0")  # from here on, signatures and policies are checked
        yield S3(endpoint, admin, client)
    finally:
        server.stop()


def _ask(endpoint: str, what: str, body: bytes) -> None:
    request = urllib.request.Request(f"{endpoint}/moto-api/{what}", body, {"Content-Type": "text/plain"})
    with urllib.request.urlopen(request, timeout=10):
        pass


def _client(service: str, endpoint: str, keys: Mapping[str, str]) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
    )


def _policy(actions: tuple[str, ...]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": list(actions), "Resource": "*"}]}


def _user(endpoint: str, keys: Mapping[str, str], name: str, actions: tuple[str, ...]) -> dict[str, str]:
    iam = _client("iam", endpoint, keys)
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=json.dumps(_policy(actions)))
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}
