"""The commands: what each of them wants changed. A key is never an argument: those end in shells' histories."""

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import click

from shoal.api.keys import hash_api_key
from shoal.api.meta import JsonObject
from shoal.cli.keys import edit, when
from shoal.cli.keys.carry import Change, Where, run
from shoal.cli.keys.listing import listing
from shoal.cli.keys.mint import SHORTEST, mint
from shoal.cli.options import kubeconfig_options

P = ParamSpec("P")
R = TypeVar("R")
OVERLAP: Final = "7d"


@click.group(name="keys")
def command() -> None:
    """Make, rotate, disable and list the API keys of Tenants.

    Nothing is written unless --apply (the cluster) or --write (the file of -f) says so: what is printed is a patch for
    Git, with hashes only.
    """


def _options(function: Callable[P, R]) -> Callable[P, R]:
    for option in (
        kubeconfig_options,
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

    run(Where(**where), decide, key_file)


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

    run(Where(**where), decide, key_file)


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

    run(Where(**where), decide)


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

    run(Where(**where), decide)


@command.command("remove")
@click.argument("name")
@_options
def remove(name: str, **where: Any) -> None:
    """Take the key NAME off the list."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        said = (f"key '{name}' is gone; usage records go on naming it", *_last(tenant, entry, now))
        return Change(edit.remove(entry), said)

    run(Where(**where), decide)


command.add_command(listing)


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


def _last(tenant: JsonObject, entry: edit.KeyEntry, now: datetime) -> tuple[str, ...]:
    """Warns who is about to lock a tenant out."""

    def works(e: edit.KeyEntry) -> bool:
        return not e.disabled and (e.expires is None or e.expires > now + timedelta(seconds=1))

    if works(entry) and not any(works(e) for e in edit.entries(tenant) if e.name != entry.name):
        return (f"it is the last key of {edit.name_of(tenant)} that works: without it every request is refused",)
    return ()
