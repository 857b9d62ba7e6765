"""Questions to a Prometheus: a blocking client, in a thread, with a deadline."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from requests.exceptions import RequestException
from urllib3.util.retry import Retry

from shoal.api.config import Prometheus

_WAITS: Final = 4
"""requests bounds each wait for bytes; the answers as a whole may take this many times as long."""

T = TypeVar("T")


class NotAnswered(Exception):
    """Prometheus did not answer, or not as it should: a sentence for a person."""


class Client(Protocol):
    """The part of PrometheusConnect that is used."""

    headers: dict[str, str] | None

    def custom_query(self, query: str, params: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """An instant query's samples."""
        ...

    def __enter__(self) -> "Client": ...

    def __exit__(self, *_: object) -> None: ...


def connect(settings: Prometheus) -> Client:
    """A client; nothing is sent yet."""
    # Whoever asks will ask again: retries within would only hide for how long there was no answer.
    retry = Retry(total=0, raise_on_status=False)
    client = PrometheusConnect(settings.url.rstrip("/"), retry=retry, timeout=settings.timeout_seconds)
    return cast(Client, client)


async def ask(client: Client, settings: Prometheus, question: Callable[[Client, Prometheus], T]) -> T:
    """Runs a function that asks, in a thread. Raises NotAnswered."""
    try:
        async with asyncio.timeout(_WAITS * settings.timeout_seconds):
            return await asyncio.to_thread(_ask, client, settings, question)
    except TimeoutError:
        raise NotAnswered(f"no answer within {_WAITS * settings.timeout_seconds} s") from None


def _ask(client: Client, settings: Prometheus, question: Callable[[Client, Prometheus], T]) -> T:
    try:
        if settings.token_file:
            # Read each time: such tokens are renewed in place.
            client.headers = {"Authorization": f"Bearer {Path(settings.token_file).read_text().strip()}"}
        return question(client, settings)
    except (RequestException, OSError) as error:
        raise NotAnswered(f"{type(error).__name__}: {error}") from None
    except PrometheusApiClientException as error:
        raise NotAnswered(str(error)[:300]) from None
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise NotAnswered(f"not an answer of Prometheus ({type(error).__name__})") from None
