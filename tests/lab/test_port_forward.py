"""kubectl port-forward, to a pod and to a Service."""

import re
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from shoal_dev.lab import api
from tests.support.lab import apply, eventually

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

SERVER = """
import http.server, socketserver, threading
class Counter(socketserver.StreamRequestHandler):
    def handle(self):
        total = 0
        while data := self.rfile.read1(65536):
            total += len(data)
        self.wfile.write(str(total).encode())
class Web(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"x" * int(self.path.strip("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
counter = socketserver.ThreadingTCPServer(("127.0.0.1", 9000), Counter)
threading.Thread(target=counter.serve_forever, daemon=True).start()
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Web).serve_forever()
"""


@pytest.fixture
def server(lab: api.Lab, namespace: str) -> str:
    """A pod that answers HTTP on 8000, and counts bytes on 9000 of its own localhost; a Service of it, port 80."""
    main = {
        "name": "main", "image": "shoal", "command": ["python3", "-u", "-c", SERVER],
        "ports": [{"name": "web", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"port": 8000, "path": "/1"}, "periodSeconds": 1},
    }  # fmt: skip
    metadata = {"name": "server", "namespace": namespace, "labels": {"app": "server"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    ports = [{"port": 80, "targetPort": "web"}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
    apply(
        lab,
        pod | {"spec": {"containers": [main], "terminationGracePeriodSeconds": 1}},
        service | {"spec": {"selector": {"app": "server"}, "ports": ports}},
    )
    lab.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/server", "--timeout=120s", timeout=130)
    return namespace


@contextmanager
def forwarded(lab: api.Lab, namespace: str, target: str, port: int) -> Generator[tuple[int, list[str]]]:
    """The local port, and what kubectl says meanwhile."""
    kubectl = lab.state.binaries / "kubectl"
    command = [str(kubectl), "-n", namespace, "port-forward", target, f":{port}"]
    process = subprocess.Popen(
        command, env=lab.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        said.extend(iter(process.stdout.readline, ""))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        eventually(lambda: said, f"port-forward to {target}")
        match = re.match(r"Forwarding from 127.0.0.1:(\d+) -> ", said[0])
        assert match, said
        yield int(match[1]), said
    finally:
        process.terminate()
        process.wait(10)
        listener.join(10)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(("target", "port"), [("pod/server", 8000), ("service/server", 80)])
def test_many_connections_at_once(lab: api.Lab, server: str, target: str, port: int) -> None:
    with forwarded(lab, server, target, port) as (local, said):
        sizes = [1, 100_000, 3_000_000] * 4
        got: dict[int, int] = {}

        def ask(index: int, size: int) -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{local}/{size}", timeout=60) as answer:
                got[index] = len(answer.read())

        threads = [threading.Thread(target=ask, args=each) for each in enumerate(sizes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert [got.get(index) for index in range(len(sizes))] == sizes
        assert not [line for line in said if "rror" in line]


def test_what_only_listens_on_the_pods_localhost_and_reads_to_the_end(lab: api.Lab, server: str) -> None:
    with forwarded(lab, server, "pod/server", 9000) as (local, _), socket.create_connection(("127.0.0.1", local)) as s:
        s.settimeout(60)
        s.sendall(b"z" * 2_000_000)
        s.shutdown(socket.SHUT_WR)
        assert s.recv(100) == b"2000000"


def test_a_port_on_which_nothing_listens(lab: api.Lab, server: str) -> None:
    with forwarded(lab, server, "pod/server", 7777) as (local, said):
        with socket.create_connection(("127.0.0.1", local), timeout=30) as s:
            assert s.recv(10) == b""
        eventually(lambda: any("error forwarding port 7777 to pod server_" in line for line in said), "the reason")
        reason = next(line for line in said if "7777 to pod" in line)
        assert "failed to connect to localhost:7777 in the pod: [Errno 111]" in reason
