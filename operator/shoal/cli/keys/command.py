"""The commands: what goes to Git on the standard output, everything else, the key too, on the error output.

So `> patch.yaml` never takes a key along. A key is never an argument: those end in shells' histories.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

import click
import yaml

from shoal.api.keys import hash_api_key
from shoal.api.meta import JsonObject
from shoal.cli.keys import edit, source, when
from shoal.cli.keys.listing import listing
from shoal.cli.keys.mint import SHORTEST, mint
from shoal.cli.scaling.reach import told
from shoal.kube.client import Client

P = ParamSpec("P")
R = TypeVar("R")
Decide = Callable[[JsonObject, datetime], "Change"]
OVERLAP: Final = "7d"


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


@click.group(name="keys")
def command() -> None:
    """Make, rotate, disable and list the API keys of Tenants.

    Nothing is written unless --apply (the cluster) or --write (the file of -f) says so: what is printed is a patch for
    Git, with hashes only.
    """


def _options(function: Callable[P, R]) -> Callable[P, R]:
    for option in (
        click.option("--context", help="The context of the kubeconfig to use."),
        click.option("--kubeconfig", help="Default: KUBECONFIG, else ~/.kube/config."),
        click.option(
            "-o",
            "--output",
            type=click.Choice(["patch", "json"]),
            default="patch",
            show_default=True,
            help="json also holds a new key: for programs.",
        ),
        click.option("--apply", is_flag=True, help="Change the Tenant in the cluster too."),
        click.option("--write", is_flag=True, help="Change the file of -f; its comments stay."),
        click.option(
            "-f",
            "--file",
            type=click.Path(path_type=Path),
            help="A file with the Tenant, instead of the cluster: works without one.",
        ),
        click.option("--tenant", help="Name of the Tenant; with -f, where the file has several."),
    ):
        function = option(function)
    return function


_NEW = (
    click.option("--expires", metavar="TIME", help="90d, 12h, 2027-06-01 or a full time. Default: never."),
    click.option("--key-file", type=click.Path(path_type=Path), help="Write the key into this new file (mode 0600)."),
)


def _new(function: Callable[P, R]) -> Callable[P, R]:
    for option in _NEW:
        function = option(function)
    return function


@command.command("create")
@click.option("--name", help="Name of the key; it stands on usage records. Default: key- and the date.")
@click.option("--from-stdin", is_flag=True, help="Take a key that was made elsewhere from the standard input.")
@_new
@_options
def create(name: str | None, from_stdin: bool, expires: str | None, key_file: Path | None, **where: Any) -> None:
    """Make a key: it is printed once, and stored nowhere.

    Hand it to the tenant; commit the patch, which holds its hash.
    """
    if from_stdin and str(where["file"]) == "-":
        raise click.UsageError("the standard input cannot be both the key and the file of -f")
    given = _given() if from_stdin else None

    def decide(tenant: JsonObject, now: datetime) -> Change:
        chosen = name or _free(tenant, f"key-{now:%Y-%m-%d}")
        until = when.future(expires, now) if expires else None
        key = given or mint()
        operations = edit.add(tenant, chosen, hash_api_key(key), until)
        lasts = f"until {edit.stamp(until)}" if until else "until it is disabled or removed"
        return Change(operations, (f"key '{chosen}' works {lasts}",), chosen, None if given else key, until)

    _run(Where(**where), decide, key_file)


@command.command("rotate")
@click.argument("old")
@click.option("--name", help="Name of the new key. Default: key- and the date.")
@click.option(
    "--overlap", default=OVERLAP, show_default=True, metavar="TIME", help="How long the old key goes on working."
)
@_new
@_options
def rotate(old: str, name: str | None, overlap: str, expires: str | None, key_file: Path | None, **where: Any) -> None:
    """Make a key in place of OLD, which expires after --overlap."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, old)
        if entry.disabled or (entry.expires is not None and entry.expires <= now):
            raise edit.KeysError(
                f"key '{old}' does not work any more: `create` makes a new one, `remove` takes it away"
            )
        ends = when.future(overlap, now)
        ends = min(ends, entry.expires) if entry.expires else ends
        chosen = name or _free(tenant, f"key-{now:%Y-%m-%d}")
        until = when.future(expires, now) if expires else None
        key = mint()
        operations = edit.add(tenant, chosen, hash_api_key(key), until)
        operations += edit.change(entry, "expires", edit.stamp(ends))
        said = (
            f"key '{chosen}' takes the place of '{old}'; both work until {edit.stamp(ends)}",
            f"after that remove the old one: kubectl shoal keys remove {old} --tenant {tenant['metadata']['name']}",
        )
        return Change(operations, said, chosen, key, until)

    _run(Where(**where), decide, key_file)


@command.command("disable")
@click.argument("name")
@_options
def disable(name: str, **where: Any) -> None:
    """Refuse the key NAME from now on; it stays listed, for the records that name it."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        if entry.disabled:
            raise edit.KeysError(f"key '{name}' is disabled already")
        said = (f"key '{name}' is refused as soon as gateways hear of it", *_last(tenant, entry, now))
        return Change(edit.change(entry, "disabled", True), said)

    _run(Where(**where), decide)


@command.command("expire")
@click.argument("name")
@click.argument("at", metavar="TIME")
@_options
def expire(name: str, at: str, **where: Any) -> None:
    """Refuse the key NAME from TIME on: 30d, 2027-06-01, a full time, or now."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        ends = now if at == "now" else when.future(at, now)
        said = (f"key '{name}' works until {edit.stamp(ends)}", *_last(tenant, entry, now))
        return Change(edit.change(entry, "expires", edit.stamp(ends)), said)

    _run(Where(**where), decide)


@command.command("remove")
@click.argument("name")
@_options
def remove(name: str, **where: Any) -> None:
    """Take the key NAME off the list."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        said = (f"key '{name}' is gone; usage records go on naming it", *_last(tenant, entry, now))
        return Change(edit.remove(entry), said)

    _run(Where(**where), decide)


command.add_command(listing)


def _run(where: Where, decide: Decide, key_file: Path | None = None) -> None:
    if where.file is None and where.tenant is None:
        raise click.UsageError("name the Tenant with --tenant, or a file with -f")
    if where.write and (where.file is None or str(where.file) == "-"):
        raise click.UsageError("--write changes the file of -f: name one")
    if where.apply and where.file is not None:
        raise click.UsageError("--apply changes the cluster, -f is for a file: use one of them, or --write and kubectl")
    if key_file is not None and key_file.exists():
        raise click.UsageError(f"{key_file} is there already: a key is only written into a new file")
    try:
        asyncio.run(told(_change(where, decide, key_file)))
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
    async with await Client.from_environment(kubeconfig=where.kubeconfig, context=where.context) as client:
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


def _given() -> str:
    key = sys.stdin.read().strip()
    if len(key) < SHORTEST or len(key.split()) != 1:
        raise click.UsageError(
            f"the standard input must hold one key of at least {SHORTEST} characters: a shorter one could be guessed "
            "from its hash"
        )
    return key


def _free(tenant: JsonObject, name: str) -> str:
    taken = {e.name for e in edit.entries(tenant)}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, edit.MOST_KEYS + 2))) if n not in taken)


def _last(tenant: JsonObject, entry: edit.Entry, now: datetime) -> tuple[str, ...]:
    """Warns who is about to lock a tenant out."""

    def works(e: edit.Entry) -> bool:
        return not e.disabled and (e.expires is None or e.expires > now + timedelta(seconds=1))

    if works(entry) and not any(works(e) for e in edit.entries(tenant) if e.name != entry.name):
        return (f"it is the last key of {edit.name_of(tenant)} that works: without it every request is refused",)
    return ()
