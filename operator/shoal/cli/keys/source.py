"""Reads a Tenant from, and writes a change to, a file (whose comments are kept) or the cluster."""

import copy
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import click
import yaml
from pydantic import ValidationError

from shoal.api.meta import API_VERSION, JsonObject
from shoal.api.tenant import Tenant
from shoal.cli.explain import inputs
from shoal.cli.keys import edit
from shoal.kube.client import KubeClient
from shoal.kube.errors import Conflict, NotFound, ObjectInvalid
from shoal.kube.resources import TENANTS

MANAGER: Final = "kubectl-shoal"
_TRIES: Final = 5
_CONCURRENT: Final = "Tenant {} was changed concurrently: nothing was written, try again"
_GITOPS: Final = {
    "argocd.argoproj.io/tracking-id": "Argo CD",
    "argocd.argoproj.io/instance": "Argo CD",
    "kustomize.toolkit.fluxcd.io/name": "Flux",
    "helm.toolkit.fluxcd.io/name": "Flux",
    "meta.helm.sh/release-name": "Helm",
}
"""Labels and annotations that GitOps tools set on their objects."""


def in_file(path: Path, name: str | None) -> JsonObject:
    """The Tenant of this name in the file; without a name, the only one. Raises click.UsageError."""
    found = [o for o in inputs.objects(path) if _is_tenant(o)]
    chosen = [o for o in found if name is None or o.get("metadata", {}).get("name") == name]
    listed = ", ".join(str(o.get("metadata", {}).get("name")) for o in found)
    if not found:
        raise click.UsageError(f"{path}: no Tenant (apiVersion {API_VERSION}) found")
    if not chosen:
        raise click.UsageError(f"{path}: no Tenant {name} found, only {listed}")
    if len(chosen) > 1:
        raise click.UsageError(f"{path}: name one of its Tenants with --tenant: {listed}")
    return chosen[0]


def write_file(path: Path, tenant: JsonObject, operations: Sequence[JsonObject]) -> None:
    """Applies the operations to the file. Comments, order and other documents do not change.

    Raises click.UsageError when that is impossible; the file is then unchanged.
    """
    text = path.read_text(encoding="utf-8")
    refused = f"{path}: cannot be edited in place; apply the patch that is printed without --write"
    # Such a line always separates documents; YAML gives it no other meaning.
    parts = re.split(r"(?m)^(---(?:[ \t].*)?\n)", text)
    name = tenant["metadata"]["name"]
    matching = [i for i, part in enumerate(parts) if _holds(part, name)]
    if len(matching) != 1:
        raise click.UsageError(refused)
    edited = _edited(parts[matching[0]], operations)
    parts[matching[0]] = edited
    wanted = copy.deepcopy(tenant)
    edit.perform(wanted, operations)
    try:
        read_back = cast("JsonObject", yaml.safe_load(edited))
    except yaml.YAMLError:
        raise click.UsageError(refused) from None
    if edit.entries(read_back) != edit.entries(wanted):
        raise click.UsageError(refused)
    path.write_text("".join(parts), encoding="utf-8")


def _holds(part: str, name: str) -> bool:
    try:
        found: Any = yaml.safe_load(part)
    except yaml.YAMLError:
        return False
    if not isinstance(found, dict):
        return False
    tenant = cast("JsonObject", found)
    return _is_tenant(tenant) and tenant["metadata"].get("name") == name


def _edited(text: str, operations: Sequence[JsonObject]) -> str:
    """Edits one document; its comments, quotes and indentation are kept."""
    from ruamel.yaml import YAML, util

    guess = cast("Callable[[str], tuple[Any, int | None, int | None]]", util.load_yaml_guess_indent)  # pyright: ignore[reportUnknownMemberType]
    guessed = guess(text)
    handler: Any = YAML()  # round trip
    handler.preserve_quotes = True
    handler.width = 4096
    handler.indent(mapping=2, sequence=guessed[1] or 2, offset=guessed[2] or 0)
    document = handler.load(text)
    edit.perform(document, operations)
    buffer = io.StringIO()
    handler.dump(document, buffer)
    return buffer.getvalue()


async def in_cluster(client: KubeClient, name: str) -> JsonObject:
    """The Tenant of this name. Raises KeysError when it does not exist."""
    try:
        return await client.get(TENANTS, name)
    except NotFound as error:
        if error.kind_missing:
            raise
        raise edit.KeysError(
            f"there is no Tenant {name}: kubectl get tenants lists them; for one that is not applied yet, name the "
            "file with -f"
        ) from None


async def write_cluster(client: KubeClient, tenant: JsonObject, operations: Sequence[JsonObject]) -> str | None:
    """Applies the operations, unless the Tenant's spec has changed since it was read. The operator writes the status of
    a new Tenant at any time: after that the same change is written on what is there now.

    Returns the GitOps tool that also writes the object, if labels or annotations name one. Raises KeysError.
    """
    metadata = tenant["metadata"]
    name, version = metadata["name"], metadata["resourceVersion"]
    read = copy.deepcopy(tenant["spec"])
    edit.perform(tenant, operations)
    for _ in range(_TRIES):
        patch: JsonObject = {"metadata": {"resourceVersion": version}, "spec": {"keys": tenant["spec"]["keys"]}}
        try:
            await client.merge_patch(TENANTS, name, None, patch, manager=MANAGER)
            break
        except Conflict:
            now = await in_cluster(client, name)
            if now["spec"] != read or now["metadata"]["uid"] != metadata["uid"]:
                raise edit.KeysError(_CONCURRENT.format(name)) from None
            version = now["metadata"]["resourceVersion"]
        except ObjectInvalid as error:
            raise edit.KeysError(f"Tenant {name}: {error.message}") from None
    else:
        raise edit.KeysError(_CONCURRENT.format(name))
    marks: set[str] = {*(metadata.get("labels") or ()), *(metadata.get("annotations") or ())}
    return next((tool for mark, tool in _GITOPS.items() if mark in marks), None)


def checked(tenant: JsonObject, operations: Sequence[JsonObject]) -> None:
    """Raises KeysError if the change makes the Tenant invalid. `tenant` is not modified."""
    after = copy.deepcopy(tenant)
    edit.perform(after, operations)
    try:
        Tenant.model_validate(after)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise edit.KeysError(f"{edit.name_of(tenant)} would not be valid: {where}: {first['msg']}") from None


def _is_tenant(found: JsonObject) -> bool:
    return found.get("kind") == "Tenant" and str(found.get("apiVersion", "")).startswith("shoal.dev/")
