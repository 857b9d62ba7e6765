"""Carries a change of a Tenant's keys to where the person said, and tells what was done.

What goes to Git is on the standard output, everything else, a new key too, on the error output: so `> patch.yaml` never
takes a key along.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import click
import yaml

from shoal.api.meta import JsonObject
from shoal.cli.client import run_command
from shoal.cli.keys import edit, source
from shoal.kube.client import KubeClient

Decide = Callable[[JsonObject, datetime], "Change"]


@dataclass(frozen=True, slots=True)
class Change:
    """What a command wants done to a Tenant."""

    operations: Sequence[JsonObject]
    said: tuple[str, ...]
    """For the person, after it was printed or written."""
    name: str = ""
    """Of the new key."""
    key: str | None = None
    """The new key itself; None where none was made."""
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class Where:
    """Which Tenant, and what is to happen to it."""

    tenant: str | None
    file: Path | None
    write: bool
    apply: bool
    output: Literal["patch", "json"]
    kubeconfig: str | None
    context: str | None


def run(where: Where, decide: Decide, key_file: Path | None = None) -> None:
    if where.file is None and where.tenant is None:
        raise click.UsageError("name the Tenant with --tenant, or a file with -f")
    if where.write and (where.file is None or str(where.file) == "-"):
        raise click.UsageError("--write changes the file of -f: name one")
    if where.apply and where.file is not None:
        raise click.UsageError("--apply changes the cluster, -f is for a file: use one of them, or --write and kubectl")
    if key_file is not None and key_file.exists():
        raise click.UsageError(f"{key_file} is there already: a key is only written into a new file")
    try:
        run_command(_change(where, decide, key_file))
    except edit.KeysError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        return


async def _change(where: Where, decide: Decide, key_file: Path | None) -> None:
    now = datetime.now(UTC)
    if where.file is not None:
        tenant = source.in_file(where.file, where.tenant)
        change = _decided(decide, tenant, now)
        if where.write:
            source.write_file(where.file, tenant, change.operations)
        _tell(where, tenant, change, key_file, f"{where.file} is changed: commit it" if where.write else None)
        return
    async with await KubeClient.from_environment(kubeconfig=where.kubeconfig, context=where.context) as client:
        tenant = await source.in_cluster(client, where.tenant or "")
        change = _decided(decide, tenant, now)
        done = None
        if where.apply:
            tool = await source.write_cluster(client, tenant, change.operations)
            done = f"Tenant {where.tenant} is changed in the cluster"
            if tool is not None:
                done += f"; {tool} writes it too and may undo that: commit the patch as well"
    _tell(where, tenant, change, key_file, done)


def _decided(decide: Decide, tenant: JsonObject, now: datetime) -> Change:
    try:
        change = decide(tenant, now)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    source.checked(tenant, change.operations)
    return change


def _tell(where: Where, tenant: JsonObject, change: Change, key_file: Path | None, done: str | None) -> None:
    name = tenant["metadata"]["name"]
    if change.key is not None and key_file is not None:
        descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(change.key + "\n")
        click.echo(f"the key is in {key_file}, and stored nowhere else", err=True)
    elif change.key is not None and where.output == "patch":
        click.echo(f"The key, shown this once and stored nowhere:\n\n  {change.key}\n", err=True)
    for line in (*change.said, *((done,) if done else ())):
        click.echo(line, err=True)
    if where.output == "json":
        told: JsonObject = {"tenant": name, "patch": list(change.operations)}
        if change.name:
            told |= {"name": change.name, "expires": edit.stamp(change.expires) if change.expires else None}
        if change.key is not None and key_file is None:
            told["key"] = change.key
        click.echo(json.dumps(told, indent=2))
    elif done is None or where.apply:
        if not done:
            click.echo("", err=True)
        click.echo(f"# kubectl patch tenant {name} --type=json --patch-file FILE; or a patch of a kustomization")
        click.echo(yaml.safe_dump(list(change.operations), sort_keys=False).rstrip())
