"""What `shoal why` can be asked about."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import click
from rich.console import RenderableType

from shoal.cli.options import Installation
from shoal.kube.client import KubeClient

SUBJECTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    # kind: (module with `answer`, other names of the kind)
    "model": ("shoal.cli.why.model", ("models", "mdl")),
    "adapter": ("shoal.cli.why.adapter", ("adapters", "loraadapter", "loraadapters")),
    "pool": ("shoal.cli.why.pool", ("pools", "lorapool", "lorapools")),
    "route": ("shoal.cli.why.route", ("routes", "modelroute", "modelroutes", "mroute")),
    "tenant": ("shoal.cli.why.tenant", ("tenants",)),
    "pod": ("shoal.cli.why.pod", ("pods", "po")),
    "gpuclass": ("shoal.cli.why.gpuclass", ("gpuclasses", "class")),
    "node": ("shoal.cli.why.node", ("nodes", "no")),
}

OF_THE_CLUSTER: Final = ("tenant", "gpuclass", "node")
"""Kinds that are in no namespace."""


@dataclass(frozen=True, slots=True)
class WhyQuestion:
    """What a subject's module gets."""

    client: KubeClient
    installation: Installation
    namespace: str
    """Of the option, else of the kubeconfig's context."""
    name: str
    last: int
    """Decisions to show at most."""


@dataclass(frozen=True, slots=True)
class WhyAnswer:
    """What a subject's module answers, in each format."""

    document: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    """For CSV."""
    columns: Sequence[str]
    shown: RenderableType


def joined(words: Sequence[str]) -> str:
    """`model/llama` of what was typed: as one word, or as `model llama`. Raises click.UsageError."""
    if len(words) > 2 or (len(words) == 2 and "/" in words[0]):
        raise click.UsageError(f"one subject at a time, not {' '.join(words)!r}")
    return "/".join(words)


def parse(target: str) -> tuple[str, str]:
    """(kind, name) of `model/llama`; a name alone is a Model's. Raises click.UsageError."""
    kind, slash, name = target.partition("/")
    if not slash:
        kind, name = "model", target
    for known, (_, aliases) in SUBJECTS.items():
        if kind.lower() in (known, *aliases) and name:
            return known, name
    raise click.UsageError(f"{target!r}: write KIND/NAME, where KIND is one of {', '.join(SUBJECTS)}")


async def answer(kind: str, question: WhyQuestion) -> WhyAnswer:
    """The answer of the subject's module. Raises KubeError, ServiceError where the subject itself cannot be read."""
    work: Callable[[WhyQuestion], Awaitable[WhyAnswer]] = import_module(SUBJECTS[kind][0]).answer
    return await work(question)
