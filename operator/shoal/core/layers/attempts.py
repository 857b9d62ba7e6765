"""Why a gateway's attempt at a replica failed."""

from collections.abc import Mapping
from typing import Final

from shoal.core.layers.layer import Layer

FAILURES: Final[Mapping[str, tuple[Layer, str]]] = {
    "connect": (Layer.ENGINE, "its engine took no connection"),
    "lost": (Layer.ENGINE, "the connection to its engine broke"),
    "stalled": (Layer.ENGINE, "its engine had stalled"),
    "unavailable": (Layer.ENGINE, "its engine took no requests, or had died before"),
    "aborted": (Layer.ENGINE, "its engine gave the request up"),
    "adapter": (Layer.ENGINE, "its engine did not have the adapter"),
    "wrong_model": (Layer.ENGINE, "its engine served another model"),
    "unsupported": (Layer.ENGINE, "its engine does not do what the request asks for"),
    "endpoint": (Layer.ENGINE, "its engine does not serve the endpoint"),
    "unknown_engine": (Layer.CONTROL, "this gateway does not know its engine"),
    "unauthorized": (Layer.CONTROL, "its engine did not accept the gateway's key"),
    "no_key": (Layer.CONTROL, "the gateway had no key for its engine"),
}
"""Failure of an attempt (`shoal_gateway_retries_total`) -> its layer, and words for people. A test compares the keys
with the gateway's source."""
UNKNOWN: Final = (Layer.ENGINE, "it failed in a way that this command does not know")
"""Of a failure that a newer gateway tells."""
