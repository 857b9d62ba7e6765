"""A hub with a repository for each thing that goes wrong, as a process:
`python -m tests.support.faultyhub PORT DIR [ADAPTER]`.

DIR has the files of a model that an engine can serve; each repository is that model with one fault. ADAPTER has those
of an adapter for it.
"""

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tests.support.sources import HubServer

TOKEN = "right"
FIRST, REWRITTEN = "a" * 40, "b" * 40
WEIGHTS = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
SLOW_FILE = "merges.txt"
"""Fetched with the model, and read by no Job for its facts."""
_PIECES = 32


@dataclass
class SlowRepository(HubServer):
    """One file of it comes in pieces, with a pause after each."""

    pause: float = 0.0
    begun: int = 0
    """How often that file was begun."""

    async def _file(self, request: web.Request) -> web.StreamResponse:
        answer = await super()._file(request)
        if request.match_info["path"] != SLOW_FILE or request.method != "GET" or answer.status >= 400:
            return answer
        assert isinstance(answer, web.Response)
        body = answer.body
        assert isinstance(body, bytes)
        self.begun += 1
        response = web.StreamResponse(status=answer.status)
        if "Content-Range" in answer.headers:
            response.headers["Content-Range"] = answer.headers["Content-Range"]
        response.content_length = len(body)
        await response.prepare(request)
        step = max(1, len(body) // _PIECES)
        for at in range(0, len(body), step):
            await response.write(body[at : at + step])
            await asyncio.sleep(self.pause)
        return response


@dataclass
class ChangingRepository(HubServer):
    """Its files are others once it is `changed`."""

    later: dict[str, bytes] = field(default_factory=dict)
    changed: bool = False

    async def _info(self, request: web.Request) -> web.Response:
        self._change()
        return await super()._info(request)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        self._change()
        return await super()._file(request)

    def _change(self) -> None:
        if self.changed:
            self.files = self.later


def repositories(files: dict[str, bytes]) -> dict[str, HubServer]:
    """By name; each is private to one fault."""
    weights = files[WEIGHTS]
    unknown = json.dumps({"architectures": ["NeverSeenForCausalLM"], "model_type": "neverseen"}).encode()
    found = {
        "moving": HubServer(files),
        "no-config": HubServer({name: body for name, body in files.items() if name != "config.json"}),
        "truncated": HubServer({**files, WEIGHTS: weights[:-1]}),
        "corrupt": HubServer(files, corrupt={WEIGHTS: weights[:-1] + bytes([weights[-1] ^ 1])}),
        "unknown": HubServer({**files, "config.json": unknown}),
        "gated": HubServer(files, gated=True, token=TOKEN),
        "hung": HubServer(files),
        "busy": HubServer(files, status=429),
        "broken": HubServer(files, status=503),
        "slow": SlowRepository({**files, SLOW_FILE: bytes(2 << 20)}),
    }
    return found


def adapters(files: dict[str, bytes]) -> dict[str, HubServer]:
    """Repositories of an adapter, by name."""
    cut = {name: body[: len(body) // 2] if name.endswith(".safetensors") else body for name, body in files.items()}
    later = {
        name: body[:-1] + bytes([body[-1] ^ 1]) if name.endswith(".safetensors") else body
        for name, body in files.items()
    }
    dora = json.dumps(json.loads(files[ADAPTER_CONFIG]) | {"use_dora": True}).encode()
    return {
        "adapter-cut": HubServer(cut),
        "adapter-dora": HubServer({**files, ADAPTER_CONFIG: dora}),
        "adapter-stale": ChangingRepository(files, later=later),
        "adapter-forced": HubServer(files),
    }


class FaultyHub:
    """`POST /control/NAME` sets attributes of a repository from JSON, and answers with how often it was begun."""

    def __init__(self, files: dict[str, bytes], adapter: dict[str, bytes] | None = None) -> None:
        self._repositories = repositories(files) | (adapters(adapter) if adapter else {})
        for name, repository in self._repositories.items():
            repository.repo = f"team/{name}"

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/control/{name}", self._control)
        app.router.add_get("/api/models/{owner}/{name}", self._info)
        app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self._info)
        app.router.add_route("*", "/{owner}/{name}/resolve/{revision}/{path:.*}", self._file)
        return app

    def _repository(self, request: web.Request) -> HubServer:
        found = self._repositories.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        return found

    async def _control(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        for name, value in (await request.json()).items():
            setattr(repository, name, value)
        return web.json_response({"begun": getattr(repository, "begun", None), "fetched": repository.fetched})

    async def _info(self, request: web.Request) -> web.Response:
        if request.match_info["name"] == "hung":
            await asyncio.sleep(3600)
        return await self._repository(request)._info(request)  # pyright: ignore[reportPrivateUsage]

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return await self._repository(request)._file(request)  # pyright: ignore[reportPrivateUsage]


def main() -> None:
    model, *adapter = (
        {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
        for folder in sys.argv[2:]
    )
    web.run_app(FaultyHub(model, *adapter).app(), port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
