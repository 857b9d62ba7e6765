"""A provider of an OpenAI-compatible API over TLS, as a pod's process: `python -m tests.support.providerpod PORT FILE`.
FILE has its certificate and key. Its answer is a fingerprint of the API key that it got, and it logs the same with the
host that it was asked for."""

import hashlib
import json
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def fingerprint(header: str) -> str:
    """Of a header with a key."""
    return hashlib.sha256(header.encode()).hexdigest()[:12]


class Provider(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        seen = fingerprint(self.headers.get("x-api-key", ""))
        print(f"asked host={self.headers['host'].partition(':')[0]} key={seen}", flush=True)
        message = {"role": "assistant", "content": f"{seen} {asked['model']}"}
        answer = {
            "id": "c-1",
            "object": "chat.completion",
            "created": 1,
            "model": "theirs-2026",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the connection's own thread: a probe that says nothing must not keep the others waiting.
        with self.context.wrap_socket(request, server_side=True) as secured:
            Provider(secured, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # probes


def main() -> None:
    server = Server(("0.0.0.0", int(sys.argv[1])), Provider)
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.context.load_cert_chain(sys.argv[2])
    server.serve_forever()


if __name__ == "__main__":
    main()
