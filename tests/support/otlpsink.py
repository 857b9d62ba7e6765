"""A collector of traces as a pod: OTLP over HTTP, kept in memory, and handed out again at /taken.

A program of its own, with nothing but the standard library: tests put its text into a ConfigMap.
"""

import base64
import gzip
import http.server
import json
import threading
from typing import Final

PORT: Final = 4318
_LOCK: Final = threading.Lock()
_TAKEN: Final[list[str]] = []


class Sink(http.server.BaseHTTPRequestHandler):
    """Takes everything that comes to /v1/traces."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One batch of spans."""
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/traces":
            self._answer(404, b"")
            return
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        with _LOCK:
            _TAKEN.append(base64.b64encode(body).decode())
        self._answer(200, b"")

    def do_GET(self) -> None:
        """All batches so far, as JSON: a list of base64."""
        with _LOCK:
            text = json.dumps(_TAKEN)
        self._answer(200, text.encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("0.0.0.0", PORT), Sink).serve_forever()
