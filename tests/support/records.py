"""Meters of requests that nobody made."""

from shoal.core.access import KeyIdentity
from shoal.core.routing.resolve import ServedModel
from shoal.metering.meter import Meter

IDENTITY = KeyIdentity("acme", "cus_1", "prod", None, False, False, frozenset())
MODEL = ServedModel("chat/llama", "u", "chat/llama", (), None)


def meter(id: str = "r1", client_request_id: str | None = None) -> Meter:
    return Meter(
        id,
        "shoal",
        IDENTITY,
        MODEL,
        endpoint="/v1/completions",
        model_name="llama",
        stream=True,
        client_request_id=client_request_id,
        gateway="boot-1",
    )
