"""The `keys` commands: each decides a change. A key is never an argument: arguments end up in shell histories."""

import secrets
import string
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import click

from shoal.api.keys import hash_api_key
from shoal.api.meta import JsonObject
from shoal.cli.keys import edit, when
from shoal.cli.keys.carry import Change, ChangeTarget, run
from shoal.cli.keys.listing import listing
from shoal.cli.options import kubeconfig_options

P = ParamSpec("P")
R = TypeVar("R")
OVERLAP: Final = "7d"
PREFIX: Final = "sk-shoal-"
"""Prefix by which people and secret scanners recognise a key."""
_ALPHABET: Final = string.ascii_letters + string.digits
_LENGTH: Final = 43
"""62^43 > 2^256. Letters and digits only: a double click selects the whole key, and shells and URLs do not change
it."""
SHORTEST: Final = 32
"""Minimum length of a key that was made elsewhere: a shorter one might be guessed from its hash."""


def mint() -> str:
    """A new key with 256 bits from the operating system."""
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


@click.group(name="keys")
def command() -> None:
    """Create, rotate, disable and list the API keys of Tenants.

    Nothing is written without --apply (the cluster) or --write (the file of -f): the output is a patch for Git, which
    contains only hashes. With -o json, yaml or csv it has a new key too, unless --key-file takes it.
    """


def _options(function: Callable[P, R]) -> Callable[P, R]:
    for option in (
        kubeconfig_options,
        click.option(
            "-o",
            "--output",
            type=click.Choice(["patch", "json", "yaml", "csv"]),
            default="patch",
            show_default=True,
            help="json, yaml, csv: for programs; they have a new key in them. csv has no patch.",
        ),
        click.option("--apply", is_flag=True, help="Change the Tenant in the cluster too."),
        click.option("--write", is_flag=True, help="Change the file of -f; comments are kept."),
        click.option(
            "-f",
            "--file",
            type=click.Path(path_type=Path),
            help="File with the Tenant; no cluster is used.",
        ),
        click.option("--tenant", help="Name of the Tenant; with -f only needed if the file has several."),
    ):
        function = option(function)
    return function


_NEW_KEY_OPTIONS = (
    click.option("--expires", metavar="TIME", help="90d, 12h, 2027-06-01 or a full time. Default: never."),
    click.option("--key-file", type=click.Path(path_type=Path), help="Write the key into this new file (mode 0600)."),
)


def _new_key_options(function: Callable[P, R]) -> Callable[P, R]:
    for option in _NEW_KEY_OPTIONS:
        function = option(function)
    return function


@command.command("create")
@click.option("--name", help="Name of the key, copied to usage records. Default: key- and the date.")
@click.option("--from-stdin", is_flag=True, help="Read an existing key from standard input.")
@_new_key_options
@_options
def create(name: str | None, from_stdin: bool, expires: str | None, key_file: Path | None, **target: Any) -> None:
    """Create a key. It is printed once and not stored.

    Give it to the tenant, and commit the patch, which contains its hash.
    """
    if from_stdin and str(target["file"]) == "-":
        raise click.UsageError("the standard input cannot be both the key and the file of -f")
    given = _key_from_stdin() if from_stdin else None

    def decide(tenant: JsonObject, now: datetime) -> Change:
        chosen = name or _unused_name(tenant, f"key-{now:%Y-%m-%d}")
        until = when.future(expires, now) if expires else None
        key = given or mint()
        operations = edit.add(tenant, chosen, hash_api_key(key), until)
        lasts = f"until {edit.stamp(until)}" if until else "until it is disabled or removed"
        return Change(operations, (f"key '{chosen}' is valid {lasts}",), chosen, None if given else key, until)

    run(ChangeTarget(**target), decide, key_file)


@command.command("rotate")
@click.argument("old")
@click.option("--name", help="Name of the new key. Default: key- and the date.")
@click.option("--overlap", default=OVERLAP, show_default=True, metavar="TIME", help="How long the old key stays valid.")
@_new_key_options
@_options
def rotate(old: str, name: str | None, overlap: str, expires: str | None, key_file: Path | None, **target: Any) -> None:
    """Create a key that replaces OLD, which expires after --overlap."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, old)
        if entry.disabled or (entry.expires is not None and entry.expires <= now):
            raise edit.KeysError(f"key '{old}' is not valid any more: `create` makes a new one, `remove` deletes it")
        ends = when.future(overlap, now)
        ends = min(ends, entry.expires) if entry.expires else ends
        chosen = name or _unused_name(tenant, f"key-{now:%Y-%m-%d}")
        until = when.future(expires, now) if expires else None
        key = mint()
        operations = edit.add(tenant, chosen, hash_api_key(key), until)
        operations += edit.change(entry, "expires", edit.stamp(ends))
        messages = (
            f"key '{chosen}' replaces '{old}'; both are valid until {edit.stamp(ends)}",
            f"after that remove the old one: kubectl shoal keys remove {old} --tenant {tenant['metadata']['name']}",
        )
        return Change(operations, messages, chosen, key, until)

    run(ChangeTarget(**target), decide, key_file)


@command.command("disable")
@click.argument("name")
@_options
def disable(name: str, **target: Any) -> None:
    """Disable the key NAME. It stays listed, for the records that name it."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        if entry.disabled:
            raise edit.KeysError(f"key '{name}' is disabled already")
        messages = (
            f"key '{name}' is refused as soon as gateways see the change",
            *_last_key_warning(tenant, entry, now),
        )
        return Change(edit.change(entry, "disabled", True), messages, name, expires=entry.expires)

    run(ChangeTarget(**target), decide)


@command.command("expire")
@click.argument("name")
@click.argument("at", metavar="TIME")
@_options
def expire(name: str, at: str, **target: Any) -> None:
    """Set the expiry of the key NAME: 30d, 2027-06-01, a full time, or now."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        ends = now if at == "now" else when.future(at, now)
        messages = (f"key '{name}' is valid until {edit.stamp(ends)}", *_last_key_warning(tenant, entry, now))
        return Change(edit.change(entry, "expires", edit.stamp(ends)), messages, name, expires=ends)

    run(ChangeTarget(**target), decide)


@command.command("remove")
@click.argument("name")
@_options
def remove(name: str, **target: Any) -> None:
    """Remove the key NAME from the list."""

    def decide(tenant: JsonObject, now: datetime) -> Change:
        entry = edit.find(tenant, name)
        messages = (
            f"key '{name}' is removed; usage records still contain its name",
            *_last_key_warning(tenant, entry, now),
        )
        return Change(edit.remove(entry), messages, name, expires=entry.expires)

    run(ChangeTarget(**target), decide)


command.add_command(listing)


def _key_from_stdin() -> str:
    key = sys.stdin.read().strip()
    if len(key) < SHORTEST or len(key.split()) != 1:
        raise click.UsageError(
            f"the standard input must hold one key of at least {SHORTEST} characters: a shorter one could be guessed "
            "from its hash"
        )
    return key


def _unused_name(tenant: JsonObject, name: str) -> str:
    taken = {e.name for e in edit.entries(tenant)}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, edit.MOST_KEYS + 2))) if n not in taken)


def _last_key_warning(tenant: JsonObject, entry: edit.KeyEntry, now: datetime) -> tuple[str, ...]:
    """A warning if the change leaves the tenant without a valid key."""

    def valid(e: edit.KeyEntry) -> bool:
        return not e.disabled and (e.expires is None or e.expires > now + timedelta(seconds=1))

    if valid(entry) and not any(valid(e) for e in edit.entries(tenant) if e.name != entry.name):
        return (f"it is the last valid key of {edit.name_of(tenant)}: without it every request is refused",)
    return ()
