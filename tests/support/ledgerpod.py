"""An API server that knows one ledger's pod and passes calls on to it, for tests of the command line.

It has no rights of its own: a test says what the user of the command may (`accounts`, `refuse`).
"""

import base64
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from shoal.api import keys
from tests.support.gateway import INSTALL_KEY
from tests.support.rolereviews import RoleReviews

ROOT = "/api/v1/namespaces/shoal-system"
PROXY = f"{ROOT}/pods/shoal-ledger-0:8500/proxy"
SERVICE = f"{ROOT}/services/shoal-ledger"
SERVICE_PROXY = f"{ROOT}/services/shoal-ledger:8500/proxy"


class LedgerPod:
    """`refuse` has statuses and messages by the beginning of a path; the pod may be missing or not ready."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ready = True
        self.there = True
        self.refuse: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str]] = []
        self.reviews: RoleReviews | None = None
        """Issues the tokens that the ledger knows; None: the installation has no roles."""
        self.accounts: set[tuple[str, str]] = set()
        """Namespace and name of the accounts of which the user may have tokens."""
        self.shown: list[str] = []
        """What the ledger was shown."""
        self.kubeconfig = Path()

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        self.asked.append((request.method, path))
        for begins, (status, message) in self.refuse.items():
            if path.startswith(begins):
                reason = {403: "Forbidden", 404: "NotFound"}.get(status, "")
                return web.json_response(
                    {"kind": "Status", "code": status, "message": message, "reason": reason}, status=status
                )
        if path == f"{ROOT}/secrets/shoal-key-billing":
            said = keys.derive(INSTALL_KEY, "billing", keys.LEDGER)
            return web.json_response({"data": {"key": base64.b64encode(said.encode()).decode()}})
        if path == "/apis/authentication.k8s.io/v1/selfsubjectreviews":
            return web.json_response({"status": {"userInfo": {"username": "finance@example.com"}}})
        if path.endswith("/token"):
            return await self._token(request)
        if path == SERVICE:
            return web.json_response({"metadata": {}, "spec": {"ports": [{"port": 8500}]}})
        if path == f"{ROOT}/pods":
            assert request.query["labelSelector"] == "app.kubernetes.io/component=ledger"
            return web.json_response({"metadata": {}, "items": [self._pod()] if self.there else []})
        if (proxy := next((each for each in (PROXY, SERVICE_PROXY) if path.startswith(each)), None)) is not None:
            # As the API server does it, Authorization stays behind.
            headers = {n: v for n, v in request.headers.items() if n.lower() in ("x-shoal-key", "content-type")}
            self.shown.append(headers.get("x-shoal-key", ""))
            target = self.url + request.raw_path[len(proxy) :]
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, target, headers=headers, data=await request.read()) as answer,
            ):
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
        return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound", "message": path}, status=404)

    async def _token(self, request: web.Request) -> web.Response:
        """As TokenRequest: who may not have it learns nothing of the account."""
        _, _, _, _, namespace, _, name, _ = request.path.split("/")
        spec = (await request.json())["spec"]
        if self.reviews is None or (namespace, name) not in self.accounts:
            said = {"code": 403, "reason": "Forbidden", "message": f"cannot create serviceaccounts/token of {name}"}
            return web.json_response({"kind": "Status", **said}, status=403)
        (audience,) = spec["audiences"]
        token = self.reviews.issue(name, namespace, audience=audience, seconds=spec["expirationSeconds"])
        return web.json_response({"status": {"token": token}})

    def _pod(self) -> dict[str, Any]:
        status = "True" if self.ready else "False"
        return {
            "metadata": {"name": "shoal-ledger-0"},
            "status": {"conditions": [{"type": "Ready", "status": status}]},
        }


@contextlib.asynccontextmanager
async def ledger_pod(url: str, folder: Path) -> AsyncGenerator[LedgerPod]:
    """Serves, and writes a kubeconfig into `folder`."""
    pod = LedgerPod(url)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pod.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pod.kubeconfig = folder / "kubeconfig"
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    pod.kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "me", "user": {"token": "t"}}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "me", "namespace": "chat"}}],
            }
        )
    )
    try:
        yield pod
    finally:
        await runner.cleanup()
