"""A stand-in for an API server that answers from a table, for tests of what a person sees on the command line."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml


class CannedApi:
    """What is answered, by path, with its query or without: a JSON object, a text, or a status with a message or a
    body."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.answers: dict[str, Any] = answers or {}
        self.asked: list[str] = []
        """Paths with their queries."""
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        """Method, path with its query, and headers (names in lower case), of everything but PATCH."""
        self.patches: list[tuple[str, dict[str, Any]]] = []
        """Path with its query, and body, of each PATCH. They are answered like a GET, or with `on_patch`."""
        self.on_patch: tuple[int, str] | None = None
        self.changes: list[tuple[str, Any]] = []
        """Path and new answer: changes that others make, one before each PATCH, which is then a conflict."""

    @contextmanager
    def kubeconfig(self, folder: Path) -> Generator[Path]:
        """Serves until the context ends; yields a kubeconfig for it, with the namespace `chat`."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                api.calls.append((self.command, unquote(self.path), headers))
                self._answer()

            do_DELETE = do_GET  # noqa: N815 - the base class's way to name methods

            def do_POST(self) -> None:
                # A token of an account: an installation that has no such account asks for none.
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(asked=False)

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                api.patches.append((unquote(self.path), json.loads(body)))
                if api.changes:
                    path, changed = api.changes.pop(0)
                    api.answers[path] = changed
                    self._answer((409, "the object has been modified"))
                    return
                self._answer(api.on_patch)

            def _answer(self, given: tuple[int, str] | None = None, *, asked: bool = True) -> None:
                whole = unquote(self.path)
                path = whole.partition("?")[0]
                if asked:
                    api.asked.append(whole)
                unknown = (404, "the server could not find the requested resource")
                answer = given or api.answers.get(whole, api.answers.get(path, unknown))
                status, body = (200, answer) if not isinstance(answer, tuple) else answer
                if status >= 400 and isinstance(body, str):
                    reason = "Forbidden" if status == 403 else ""
                    body = {"kind": "Status", "code": status, "message": body, "reason": reason}
                raw = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if isinstance(body, dict) else "text/plain")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(_config(f"http://127.0.0.1:{server.server_port}")))
        try:
            yield path
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _config(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "me", "namespace": "chat"}}],
    }
