"""Requests that a gateway refuses, and the tenants that send them."""

import hashlib
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.core.layers.advice import LayerAdvice
from shoal.core.layers.layer import Layer
from shoal.core.layers.refusals import REFUSALS
from tests.faults.lab.objects import SPACE, Json, named

CHAT: Final = "/v1/chat/completions"
PICTURE: Final = "data:image/png;base64,AA"
SAYS: Final = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class RefusedInLab:
    """A request, the code with which it is refused, and what that means."""

    name: str
    layer: Layer
    code: str
    do: str
    tenant: str | None = "good"
    path: str = CHAT
    body: Json | bytes = field(default_factory=lambda: {"model": f"{SPACE}/base", "messages": SAYS, "max_tokens": 4})

    @property
    def advice(self) -> LayerAdvice:
        return REFUSALS[self.code]


def key(tenant: str) -> str:
    return f"sk-faults-{tenant}"


def tenant(name: str, *, keys: dict[str, Any] | None = None, **spec: Any) -> Json:
    digest = hashlib.sha256(key(name).encode()).hexdigest()
    models = [{"namespace": SPACE, "name": each} for each in ("base", "unknown")]
    mine = [{"name": "k", "sha256": digest, **(keys or {})}]
    return named("Tenant", f"client-{name}", None, models=models, keys=mine, **spec)  # fmt: skip


TENANTS: Final = (
    tenant("good"),
    tenant("locked", suspended=True),
    tenant("off", keys={"disabled": True}),
    tenant("late", keys={"expires": "2026-01-01T00:00:00Z"}),
    tenant("busy", limits={"requestsPerMinute": 1}),
    tenant("spent", budget={"tokens": 1}),
)


def chat(**more: Any) -> Json:
    return {"model": f"{SPACE}/base", "messages": SAYS, "max_tokens": 4} | more


REQUESTS: Final = (
    RefusedInLab("a request without a key", Layer.CLIENT, "missing_api_key", "header Authorization", None),
    RefusedInLab("a wrong key", Layer.CLIENT, "invalid_api_key", "listed in a Tenant", "nobody"),
    RefusedInLab("a disabled key", Layer.CLIENT, "disabled_api_key", "enable this one", "off"),
    RefusedInLab("an expired key", Layer.CLIENT, "expired_api_key", "shoal keys create", "late"),
    RefusedInLab("a suspended tenant's request", Layer.CLIENT, "tenant_suspended", "suspended", "locked"),
    RefusedInLab("a model that nobody serves", Layer.CLIENT, "model_not_found", "GET /v1/models", body=chat(model="x")),
    RefusedInLab("more requests than a minute may have", Layer.CLIENT, "rate_limit_exceeded", "higher limit", "busy"),
    RefusedInLab("a budget that is used up", Layer.CLIENT, "insufficient_quota", "larger budget", "spent"),
    RefusedInLab("a prompt that is too long", Layer.CLIENT, "context_length_exceeded", "fewer tokens",
                 body=chat(messages=[{"role": "user", "content": "word " * 60_000}])),
    RefusedInLab("a body that is no JSON", Layer.CLIENT, "invalid_json", "valid JSON", body=b'{"model": '),
    RefusedInLab("a path that does not exist", Layer.CLIENT, "unknown_path", "URL", path="/v1/nothing"),
    RefusedInLab("a picture for a model of text", Layer.CLIENT, "media_not_supported", "does not have it", body=chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]
    )),
    RefusedInLab("embeddings of a model that chats", Layer.CLIENT, "wrong_endpoint", "endpoint", path="/v1/embeddings",
                 body={"model": f"{SPACE}/base", "input": "x"}),
    RefusedInLab("a Model whose engine does not start", Layer.CONTROL, "model_unavailable",
                 f"Begin with what is wrong with Model {SPACE}/unknown",
                 body=chat(model=f"{SPACE}/unknown")),
)  # fmt: skip


def refusal(base: str, refused: RefusedInLab) -> tuple[str, str] | None:
    """The code of the error, and the id of the request; None: it was answered."""
    headers = {"Content-Type": "application/json"}
    if refused.tenant is not None:
        headers["Authorization"] = f"Bearer {key(refused.tenant)}"
    body = refused.body if isinstance(refused.body, bytes) else json.dumps(refused.body).encode()
    request = urllib.request.Request(f"{base}{refused.path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["error"]["code"]), error.headers["x-shoal-request-id"]
