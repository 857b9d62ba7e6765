"""Applies a change of a Tenant's keys to a file or the cluster, and prints the result.

The patch for Git is on standard output; everything else, including a new key, is on standard error. `> patch.yaml`
therefore never contains a key, unless a program's format is asked for.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import click
import yaml

from shoal.api.meta import JsonObject
from shoal.cli.client import run_command
from shoal.cli.keys import edit, source
from shoal.cli.output import emit
from shoal.kube.client import KubeClient

Decide = Callable[[JsonObject, datetime], "Change"]
_COLUMNS: Final = ("tenant", "keyName", "expires", "key")
_PATCH_COMMAND: Final = "kubectl patch tenant {} --type=json --patch-file FILE"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a Tenant, decided by a command."""

    operations: Sequence[JsonObject]
    messages: tuple[str, ...]
    """Messages for the user, printed after the change."""
    name: str
    """Name of the new key, or of the one that changes."""
    key: str | None = None
    """The new key itself; None: none was created."""
    expires: datetime | None = None
    """When that key expires; None: never."""


@dataclass(frozen=True, slots=True)
class ChangeTarget:
    """The Tenant, and where its change goes."""

    tenant: str | None
    file: Path | None
    write: bool
    apply: bool
    output: Literal["patch", "json", "yaml", "csv"]
    kubeconfig: str | None
    context: str | None


def run(target: ChangeTarget, decide: Decide, key_file: Path | None = None) -> None:
    if target.file is None and target.tenant is None:
        raise click.UsageError("name the Tenant with --tenant, or a file with -f")
    if target.write and (target.file is None or str(target.file) == "-"):
        raise click.UsageError("--write changes the file of -f: name one")
    if target.apply and target.file is not None:
        raise click.UsageError("--apply changes the cluster, -f is for a file: use one of them, or --write and kubectl")
    if key_file is not None and key_file.exists():
        raise click.UsageError(f"{key_file} exists already: a key is only written to a new file")
    try:
        run_command(_change(target, decide, key_file))
    except edit.KeysError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        return


async def _change(target: ChangeTarget, decide: Decide, key_file: Path | None) -> None:
    now = datetime.now(UTC)
    if target.file is not None:
        tenant = source.in_file(target.file, target.tenant)
        change = _decide_checked(decide, tenant, now)
        if target.write:
            source.write_file(target.file, tenant, change.operations)
        done = f"{target.file} is changed, the cluster is not yet: commit and apply it" if target.write else None
        _report(target, tenant, change, key_file, done)
        return
    async with await KubeClient.from_environment(kubeconfig=target.kubeconfig, context=target.context) as client:
        tenant = await source.in_cluster(client, target.tenant or "")
        change = _decide_checked(decide, tenant, now)
        done = None
        if target.apply:
            tool = await source.write_cluster(client, tenant, change.operations)
            done = f"Tenant {target.tenant} is changed in the cluster"
            if tool is not None:
                done += f"; {tool} writes it too and may undo that: commit the patch as well"
    _report(target, tenant, change, key_file, done)


def _decide_checked(decide: Decide, tenant: JsonObject, now: datetime) -> Change:
    try:
        change = decide(tenant, now)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    source.checked(tenant, change.operations)
    return change


def _report(target: ChangeTarget, tenant: JsonObject, change: Change, key_file: Path | None, done: str | None) -> None:
    name = tenant["metadata"]["name"]
    if done is None:
        click.echo(_nothing_changed(target, change, name), err=True)
    if change.key is not None and key_file is not None:
        descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(change.key + "\n")
        click.echo(f"the key is in {key_file}, and stored nowhere else", err=True)
    elif change.key is not None and target.output == "patch":
        click.echo(f"The key, shown this once and stored nowhere:\n\n  {change.key}\n", err=True)
    for line in change.messages:
        click.echo(line if target.apply else f"once applied: {line}", err=True)
    if done is not None:
        click.echo(done, err=True)
    if target.output != "patch":
        result: JsonObject = {
            "tenant": name,
            "keyName": change.name,
            "expires": edit.stamp(change.expires) if change.expires else None,
            "patch": list(change.operations),
        }
        if change.key is not None and key_file is None:
            click.echo("The output has the key: do not commit it.", err=True)
            result["key"] = change.key
        emit(target.output, result, [result], _COLUMNS)
    elif done is None or target.apply:
        if not done:
            click.echo("", err=True)
            click.echo(f"# {_PATCH_COMMAND.format(name)}; or a patch of a kustomization")
        click.echo(yaml.safe_dump(list(change.operations), sort_keys=False).rstrip())


def _nothing_changed(target: ChangeTarget, change: Change, name: str) -> str:
    """What is said first where only a patch is printed, and how the change is made."""
    option = "--apply" if target.file is None else "--write"
    another = "" if change.key is None else ", which makes another key"
    patch = "" if target.output == "csv" else f"apply the patch ({_PATCH_COMMAND.format(name)}), or "
    return f"Nothing is changed yet: {patch}run this command with {option}{another}."
