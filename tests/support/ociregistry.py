"""An OCI registry in this process, as much of the distribution protocol as helm uses to push and pull."""

import hashlib
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class OciRegistry:
    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(
        default_factory=dict[tuple[str, str], tuple[str, bytes]]
    )
    """(repository, tag or digest) -> (media type, content)."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextmanager
def serving() -> Generator[OciRegistry]:
    registry = OciRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if found := re.fullmatch(r"/v2/(.+)/blobs/(sha256:\w+)", path):
                content = registry.blobs.get(found[2])
                media_type = "application/octet-stream"
            elif found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", path):
                media_type, content = registry.manifests.get((found[1], found[2]), ("", None))
            else:
                return self.answer(200 if path == "/v2/" else 404)
            if content is None:
                return self.answer(404)
            return self.answer(200, content, Content_Type=media_type, Docker_Content_Digest=digest_of(content))

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.body()
            repository = urlsplit(self.path).path.removesuffix("/blobs/uploads/")
            self.answer(202, Location=f"{repository}/blobs/uploads/one")

        def do_PUT(self) -> None:
            parts, content = urlsplit(self.path), self.body()
            digest = digest_of(content)
            if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", parts.path):
                row = (self.headers["Content-Type"], content)
                registry.manifests[found[1], found[2]] = registry.manifests[found[1], digest] = row
            elif parse_qs(parts.query).get("digest") == [digest]:
                registry.blobs[digest] = content
            else:
                return self.answer(400)
            return self.answer(201, Location=parts.path, Docker_Content_Digest=digest)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
