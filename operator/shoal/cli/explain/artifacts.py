"""Facts of a Model's weights without a cluster: from a file, from the Model's status, or from its source."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import click
import pydantic

from shoal.agent.facts import summary
from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.sources import parse_source, shown
from shoal.artifacts import ArtifactError, Settings, StoreCredentials, open_source
from shoal.artifacts.metadata import read_metadata
from shoal.cli.explain import inputs
from shoal.core.architectures import UnknownConfig, facts_of
from shoal.core.network import EVERYWHERE

SECONDS: Final = 120.0
"""Timeout for reading the facts of one source, in seconds."""
AT_ONCE: Final = 8
_PREFIXES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Prefixes of the environment variables that contain a user's credentials for a bucket."""
_LOGIN: Final = {"hf": "; outside a cluster your own login counts (HF_TOKEN, or `hf auth login`)"} | {
    scheme: f"; outside a cluster the {prefix}... variables of your environment count"
    for scheme, prefix in _PREFIXES.items()
}


def from_file(path: Path) -> ArtifactFacts:
    """Facts from a file: as `shoal agent facts` or a Model's status has them, or a model's config.json.

    With a config.json, the size of the weights is taken from model.safetensors.index.json beside it. Raises
    click.UsageError.
    """
    raw = inputs.document(path)
    raw = cast("JsonObject", raw["facts"]) if isinstance(raw.get("facts"), dict) else raw
    try:
        if "kv" in raw or "weightBytes" in raw:
            return ArtifactFacts.model_validate({"source": f"file://{path.absolute()}"} | raw)
        return facts_of(raw, source=f"file://{path.absolute()}", weight_bytes=_total(path))
    except (UnknownConfig, pydantic.ValidationError) as error:
        raise click.UsageError(f"{path}: neither facts nor a model's config.json: {error}") from None


def _total(config: Path) -> int | None:
    index = config.with_name("model.safetensors.index.json")
    if not index.is_file():
        single = config.with_name("model.safetensors")
        return single.stat().st_size if single.is_file() else None
    metadata: object = inputs.document(index).get("metadata")
    total = cast("JsonObject", metadata).get("total_size") if isinstance(metadata, dict) else None
    return int(total) if isinstance(total, int | float) else None


def of_models(models: Sequence[Model], given: Mapping[str, ArtifactFacts]) -> dict[str, ArtifactFacts | str]:
    """Model -> its facts, or the sentence that says why they are unknown.

    `given` are the facts of --facts, by Model. Models with the same source are read once.
    """
    found: dict[str, ArtifactFacts | str] = {}
    unread: dict[str, list[Model]] = {}
    for model in models:
        status = model.status.artifact if model.status else None
        if model.key in given:
            found[model.key] = given[model.key]
        elif status is not None and status.source == shown(model.spec.source.uri):
            found[model.key] = status
        else:
            unread.setdefault(model.spec.source.uri, []).append(model)
    if unread:
        read = asyncio.run(_read_all([of[0] for of in unread.values()]))
        for result, of in zip(read, unread.values(), strict=True):
            found |= dict.fromkeys((m.key for m in of), result)
    return found


async def _read_all(models: Sequence[Model]) -> list[ArtifactFacts | str]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(model: Model) -> ArtifactFacts | str:
        async with gate:
            return await _read(model)

    return await asyncio.gather(*(one(model) for model in models))


async def _read(model: Model) -> ArtifactFacts | str:
    """Reads the facts as the cluster's Job does, with the user's credentials in place of a Secret."""
    uri = model.spec.source.uri
    try:
        source = parse_source(uri)
    except ValueError as error:
        return f"spec.source.uri: {error}"
    if source.scheme in ("pvc", "oci"):
        return f"{shown(uri)} cannot be read from outside a cluster: name the facts or the config.json with --facts"
    # This runs on the user's machine with the user's credentials, so every reachable address is allowed.
    settings = Settings(hub_endpoint=os.environ.get("HF_ENDPOINT"), attempts=2, network=EVERYWHERE)
    try:
        async with asyncio.timeout(SECONDS), open_source(uri, await _credentials(source.scheme), settings) as opened:
            manifest = await opened.manifest()
            return summary(manifest, await read_metadata(opened, manifest))
    except ArtifactError as error:
        here = _LOGIN.get(source.scheme, "") if error.reason == reasons.GATED else ""
        other = "" if error.reason == reasons.SOURCE_INVALID else "; --facts reads them from a file"
        return f"{error}{here}{other}"
    except TimeoutError:
        return f"{shown(uri)} did not answer within {SECONDS:.0f} s; --facts reads them from a file"
    except OSError as error:
        return f"{shown(uri)} cannot be read: {error.strerror or error}; --facts reads them from a file"


async def _credentials(scheme: str) -> StoreCredentials:
    """The user's credentials, by the names of a Secret's keys: the hub's login for hf://, environment variables for
    buckets.

    An https:// source gets none: the host that a token belongs to is unknown here.
    """
    values: dict[str, str] = {}
    if scheme == "hf":
        from huggingface_hub import get_token

        token = await asyncio.to_thread(get_token)
        values = {"token": token} if token else {}
    elif prefix := _PREFIXES.get(scheme):
        values = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    return StoreCredentials(values, given=bool(values))
