"""Which Model a client's `model` means, among those that its tenant may use."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from shoal.api.model import Model

_FAR = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the request path knows of a Model."""

    key: str
    """`namespace/name`."""
    uid: str
    engine_name: str
    """What the engine calls it."""
    claims: tuple[str, ...]
    """Short names that it asks for."""
    created: datetime | None
    embeds: bool = False
    """Whether the engine was started for embeddings. Such an engine makes nothing else, and SGLang dies of a chat or
    completion request then: one client's mistake would take the replica from everybody."""


def served_model(model: Model) -> ServedModel:
    return ServedModel(
        key=model.key,
        uid=model.metadata.uid,
        engine_name=model.engine_model_name,
        claims=model.claimed_names,
        created=model.metadata.creation_timestamp,
        embeds="--is-embedding" in model.spec.engine.extra_args,
    )


def names_for(grants: Collection[str], models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
    """Every word that a tenant with these grants can put in `model`.

    `namespace/name` always means that object. A short name belongs to the oldest claimant (creationTimestamp, then
    uid) among the Models that the tenant may use, so that nobody outside its grants can take a name from it.
    """
    granted = [models[key] for key in grants if key in models]
    names: dict[str, ServedModel] = {}
    for model in sorted(granted, key=_age):
        for claim in model.claims:
            names.setdefault(claim, model)
    for model in granted:
        names[model.key] = model
    return names


def listed(names: Mapping[str, ServedModel]) -> Iterable[tuple[str, ServedModel]]:
    """What a list of models shows: the short names, and `namespace/name` where a Model owns no short name."""
    short = [(word, model) for word, model in names.items() if word != model.key]
    named = {model.key for _, model in short}
    bare = [(word, model) for word, model in names.items() if word == model.key and model.key not in named]
    return sorted(short + bare, key=lambda pair: pair[0])


def _age(model: ServedModel) -> tuple[datetime, str]:
    return (model.created or _FAR, model.uid)
