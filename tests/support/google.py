"""Google Cloud Storage: fake-gcs-server keeps and serves the objects, a door before it checks who asks.

fake-gcs-server itself lets everybody in. The door does what the cloud does with a service account's key: it verifies
the signature of the JWT that the client made of it, and what that account may do.
"""

import asyncio
import base64
import contextlib
import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from yarl import URL

from shoal_dev.lab import gobuild
from tests.support.controlplane import free_ports

BUCKET = "models"
_SOURCES = Path(__file__).parent / "go"
_SERVER = gobuild.Module(
    "fake-gcs-server",
    ("github.com/fsouza/fake-gcs-server",),
    "github.com/fsouza/fake-gcs-server",
    "-s -w",
    2,
    program="fake-gcs-server",
)


@dataclass
class Google:
    """One bucket, accounts with what each may do ("list", "read"), and buckets that everybody may read."""

    endpoint: str
    """Of the door."""
    behind: str
    """Of fake-gcs-server."""
    _accounts: dict[str, tuple[rsa.RSAPublicKey, frozenset[str]]] = field(default_factory=dict)
    tokens: dict[str, frozenset[str]] = field(default_factory=dict)
    """Access tokens as a metadata server gives them, and what each may do."""
    public: set[str] = field(default_factory=set)
    _admin: str = ""
    bucket: str = BUCKET

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def put(self, prefix: str, files: Mapping[str, bytes], bucket: str = BUCKET) -> None:
        for name, content in files.items():
            key = urllib.parse.quote(f"{prefix}/{name}" if prefix else name, safe="")
            self._post(f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={key}", content)

    def make_bucket(self, name: str, *, public: bool = False) -> None:
        self._post("/storage/v1/b", json.dumps({"name": name}).encode())
        if public:
            self.public.add(name)

    def _post(self, path: str, body: bytes) -> None:
        request = urllib.request.Request(self.behind + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30):
            pass

    def key(self, *may: str) -> str:
        """The JSON key of a new service account that may do only this."""
        private = rsa.generate_private_key(65537, 2048)
        name = f"key-{len(self._accounts)}"
        self._accounts[name] = (private.public_key(), frozenset(may))
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps(
            {
                "type": "service_account",
                "client_email": f"{name}@project.iam.gserviceaccount.com",
                "private_key_id": name,
                "private_key": pem.decode(),
            }
        )

    def secret(self, key: str | None = None, endpoint: str | None = None) -> dict[str, bytes]:
        """The Secret that `spec.source.secretRef` would name."""
        if key is None:
            key = self._admin = self._admin or self.key("list", "read")
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": key.encode(), **self.place(endpoint)}

    def place(self, endpoint: str | None = None) -> dict[str, bytes]:
        """A Secret that says no more than where the bucket is."""
        return {"GOOGLE_BASE_URL": (endpoint or self.endpoint).encode()}

    def may(self, authorization: str, bucket: str, what: str) -> int:
        """200, or how the cloud refuses it."""
        if not authorization:
            return 200 if bucket in self.public else 401
        token = authorization.removeprefix("Bearer ")
        rights = self.tokens[token] if token in self.tokens else self._rights(token)
        if rights is None:
            return 401
        return 200 if what in rights else 403

    def _rights(self, token: str) -> frozenset[str] | None:
        try:
            head, claims, signature = (_decoded(part) for part in token.split("."))
            public, rights = self._accounts[json.loads(head)["kid"]]
            public.verify(signature, token.rpartition(".")[0].encode(), padding.PKCS1v15(), hashes.SHA256())
            return rights if json.loads(claims)["exp"] > time.time() else None
        except (ValueError, KeyError, InvalidSignature):
            return None


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


@contextlib.contextmanager
def google_server() -> Generator[Google]:
    gobuild.build(_SOURCES, (_SERVER,), print)
    (port,) = free_ports(1)
    program = gobuild.cached(_SOURCES, _SERVER) / _SERVER.program
    address = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [program, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
         "-public-host", address, "-log-level", "error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _await(process, f"http://{address}/_internal/healthcheck")
        with _door(address) as google:
            google.make_bucket(BUCKET)
            yield google
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
        time.sleep(0.05)


@contextlib.contextmanager
def _door(address: str) -> Generator[Google]:
    """The door runs in a thread, so that tests of any loop share it."""
    (port,) = free_ports(1)
    google = Google(f"http://127.0.0.1:{port}", f"http://{address}")
    loop = asyncio.new_event_loop()
    up = threading.Event()
    ended = asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            app = web.Application()
            app.router.add_get("/{bucket}{path:/?.*}", _Door(google, session).answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            up.set()
            await ended.wait()
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    up.wait(30)
    try:
        yield google
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


@dataclass(frozen=True)
class _Door:
    google: Google
    session: aiohttp.ClientSession

    async def answer(self, request: web.Request) -> web.StreamResponse:
        bucket, path = request.match_info["bucket"], request.match_info["path"].strip("/")
        status = self.google.may(request.headers.get("Authorization", ""), bucket, "read" if path else "list")
        if status != 200:
            return _error(status, "AccessDenied" if status == 403 else "AuthenticationRequired")
        headers = {k: v for k, v in request.headers.items() if k == "Range"}
        url = URL(self.google.behind + request.raw_path, encoded=True)
        async with self.session.request(request.method, url, headers=headers) as behind:
            if behind.status >= 400 and not path:
                return _error(404, "NoSuchBucket")  # fake-gcs-server calls it an error of its own
            # The cloud holds an object against the ETag that is asked for; fake-gcs-server does not.
            wanted = request.headers.get("If-Match")
            if wanted and wanted.strip('"') != behind.headers.get("ETag", "").strip('"'):
                return _error(412, "PreconditionFailed")
            kept = ("content-type", "content-length", "content-range", "etag", "last-modified")
            answer = web.StreamResponse(
                status=behind.status, headers={k: v for k, v in behind.headers.items() if k.lower() in kept}
            )
            await answer.prepare(request)
            if request.method != "HEAD":
                with contextlib.suppress(ConnectionError):  # of a client that left
                    async for chunk in behind.content.iter_chunked(1 << 16):
                        await answer.write(chunk)
            return answer


def _error(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")
