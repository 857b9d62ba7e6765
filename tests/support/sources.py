"""Places from which models come, small enough for a test: a folder, an HTTPS server, a hub."""

import asyncio
import hashlib
import io
import json
import math
import ssl
import struct
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from shoal.core.network import EVERYWHERE
from shoal.net.pki import CertificateAuthority

LOCAL = EVERYWHERE
"""Rules by which a test's own servers on loopback are sources, and its folders."""
LOCAL_ENV = {
    "SHOAL_SOURCES": json.dumps({"allowedHosts": ["127.0.0.1", "localhost"], "folders": ["/"]}),
}
"""The same for a process."""


def safetensors(size: int = 64) -> bytes:
    """A whole safetensors file with one tensor of `size` bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(i % 251 for i in range(size))


def weights(**shapes: tuple[str, tuple[int, ...]]) -> bytes:
    """A safetensors file with these tensors: name=(type, shape)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + math.prod(shape) * {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def model_files(size: int = 64) -> dict[str, bytes]:
    """The files of a small model."""
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors(size),
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def tar_of(files: Mapping[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def localhost_tls(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context for localhost, and the file with the certificate of the CA that vouches for it."""
    now, life = datetime.now(UTC), timedelta(hours=1)
    authority = CertificateAuthority.make("test CA", now, life)
    server = authority.issue_for_hosts(["localhost", "127.0.0.1"], now, life)
    ca_file, cert_file, key_file = folder / "ca.crt", folder / "tls.crt", folder / "tls.key"
    for file, pem in (ca_file, authority.pair.certificate), (cert_file, server.certificate), (key_file, server.key):
        file.write_text(pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    return context, ca_file


@dataclass
class ArchiveServer:
    """Serves one archive under any path, and misbehaves as told."""

    body: bytes
    status: int = 200
    token: str | None = None
    """Asked of every request, if set."""
    break_after: int | None = None
    """Bytes of each answer after which the connection is cut."""
    ranges: bool = True
    etag: str = '"v1"'
    redirect: str | None = None
    requested: list[str | None] = field(default_factory=list)
    """The Range header of each request."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(request.headers.get("Range"))
        if self.redirect is not None:
            raise web.HTTPFound(self.redirect)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if self.status != 200:
            return web.Response(status=self.status)
        start, end, status = 0, len(self.body), 200
        wanted = request.http_range if self.ranges else slice(None)
        if wanted.start is not None and request.headers.get("If-Range") in (None, self.etag):
            start, end, status = wanted.start, min(wanted.stop or len(self.body), len(self.body)), 206
        if status == 206 and start >= len(self.body):
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(self.body)}"})
        rest = self.body[start:end]
        headers = {"ETag": self.etag, "Content-Length": str(len(rest))}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(self.body)}"
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        if self.break_after is not None and self.break_after < len(rest):
            await response.write(rest[: self.break_after])
            await asyncio.sleep(0.05)  # a client's library may drop what came in the same moment as the break
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(rest)
        return response


def described(name: str, content: bytes) -> dict[str, object]:
    """A file as the hub's API tells of it: weights lie in its large file storage, the rest in git."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
    row: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith((".safetensors", ".bin")):
        row["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return row


@dataclass
class HubServer:
    """The part of the Hugging Face hub's API that a download of a repository needs."""

    files: dict[str, bytes]
    repo: str = "team/tiny"
    branches: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False
    """Everything but the repository's description needs `token`."""
    private: bool = False
    token: str = "hub-token"
    status: int | None = None
    """Answered to everything, if set."""
    fail_file: str | None = None
    """A file whose content cannot be had now."""
    silent_file: str | None = None
    """A file that does not come for two seconds."""
    corrupt: dict[str, bytes] = field(default_factory=dict)
    """Files whose content is not the one that the API tells of."""
    fetched: list[str] = field(default_factory=list)
    """Files whose content was sent, by answer."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/{owner}/{name}", self._info)
        app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self._info)
        app.router.add_route("*", "/{owner}/{name}/resolve/{revision}/{path:.*}", self._file)
        return app

    def _refused(self, request: web.Request, *, content: bool) -> web.Response | None:
        if self.status is not None:
            return web.json_response({"error": "no"}, status=self.status)
        authorized = request.headers.get("Authorization") == f"Bearer {self.token}"
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        if name != self.repo:
            status = 404 if request.headers.get("Authorization") else 401
            return web.json_response({"error": "x"}, status=status, headers={"X-Error-Code": "RepoNotFound"})
        if self.private and not authorized:
            return web.json_response({"error": "x"}, status=401, headers={"X-Error-Code": "RepoNotFound"})
        if self.gated and content and not authorized:
            status = 403 if request.headers.get("Authorization") else 401
            return web.json_response({"error": "x"}, status=status, headers={"X-Error-Code": "GatedRepo"})
        return None

    def _commit(self, request: web.Request) -> str | None:
        revision = request.match_info.get("revision", "main")
        return revision if revision in self.branches.values() else self.branches.get(revision)

    async def _info(self, request: web.Request) -> web.Response:
        refused = self._refused(request, content=False)
        if refused is not None:
            return refused
        commit = self._commit(request)
        if commit is None:
            return web.json_response({"error": "x"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [described(name, content) for name, content in self.files.items()]
        return web.json_response(
            {"id": self.repo, "modelId": self.repo, "sha": commit, "siblings": siblings, "private": self.private}
        )

    async def _file(self, request: web.Request) -> web.StreamResponse:
        refused = self._refused(request, content=True)
        if refused is not None:
            return refused
        name, commit = request.match_info["path"], self._commit(request)
        if commit is None or name not in self.files:
            return web.json_response({"error": "x"}, status=404, headers={"X-Error-Code": "EntryNotFound"})
        if request.method == "GET":
            if name == self.fail_file:
                return web.Response(status=500)
            self.fetched.append(name)
            if name == self.silent_file:
                await asyncio.sleep(2)
        content = self.corrupt.get(name, self.files[name])
        span = request.http_range
        if span.start is None:
            return web.Response(body=content)
        stop = min(span.stop or len(content), len(content))
        spanned = {"Content-Range": f"bytes {span.start}-{stop - 1}/{len(content)}"}
        return web.Response(status=206, body=content[span.start : stop], headers=spanned)
