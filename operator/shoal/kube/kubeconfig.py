"""Kubeconfig files: read, merged and selected from as client-go does it.

KUBECONFIG may name several files; the first file with an entry of a name, or with a current-context, has the last word.
Paths inside a file are relative to its folder. Every error names the file and the field, and never shows a value.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from yaml import SafeLoader
else:
    try:
        from yaml import CSafeLoader as SafeLoader
    except ImportError:  # a PyYAML that was built without libyaml: slower, the same otherwise
        from yaml import SafeLoader

FILE_LIMIT: Final = 4 << 20
"""Bytes of a kubeconfig: a thousand clusters with their certificates."""
DEFAULT_FILE: Final = "~/.kube/config"


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None


Base64 = Annotated[bytes, BeforeValidator(_decoded)]


class _Part(BaseModel):
    """A part of a kubeconfig. Fields that are not known here are left alone; a field that is null reads as absent."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="ignore",
        alias_generator=lambda name: name.replace("_", "-"),
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: each for key, each in cast("dict[object, object]", value).items() if each is not None}
        return value


class NamedExtension(_Part):
    name: str
    extension: Any = None


class KubeconfigCluster(_Part):
    """Where an API server is, and how its certificate is verified."""

    server: str = Field(pattern="^https?://")
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool = False
    certificate_authority: str | None = None
    certificate_authority_data: Base64 | None = None
    proxy_url: str | None = None
    extensions: list[NamedExtension] = []


class PluginVariable(_Part):
    name: str
    value: str = ""


class PluginCommand(_Part):
    """A command that prints credentials, `user.exec`."""

    api_version: Literal["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"] = Field(
        alias="apiVersion"
    )
    command: str = Field(min_length=1)
    args: list[str] = []
    env: list[PluginVariable] = []
    install_hint: str = Field("", alias="installHint")
    provide_cluster_info: bool = Field(False, alias="provideClusterInfo")
    interactive_mode: Literal["Never", "IfAvailable", "Always"] = Field("IfAvailable", alias="interactiveMode")


class AuthProvider(_Part):
    name: str
    config: dict[str, str] = {}


class KubeconfigUser(_Part):
    """By what the API server knows a user."""

    client_certificate: str | None = None
    client_certificate_data: Base64 | None = None
    client_key: str | None = None
    client_key_data: Base64 | None = None
    token: str | None = None
    token_file: str | None = Field(None, alias="tokenFile")
    username: str | None = None
    password: str | None = None
    impersonated: str | None = Field(None, alias="as")
    auth_provider: AuthProvider | None = None
    plugin: PluginCommand | None = Field(None, alias="exec")


NOBODY: Final = KubeconfigUser.model_validate({})
"""A user without credentials."""


class KubeconfigContext(_Part):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(_Part):
    name: str
    cluster: KubeconfigCluster


class _NamedUser(_Part):
    name: str
    user: KubeconfigUser = NOBODY


class _NamedContext(_Part):
    name: str
    context: KubeconfigContext = KubeconfigContext()


class _File(_Part):
    current_context: str = ""
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []


@dataclass(frozen=True, slots=True, repr=False)
class Selection:
    """What one context of the merged files says. Holds credentials: hence no repr."""

    namespace: str | None
    cluster: KubeconfigCluster | None
    """None: the context names none, and stands for the cluster of the pod that this process runs in."""
    cluster_field: str
    """The file and the field where the cluster is, for errors."""
    user: KubeconfigUser
    user_field: str
    user_folder: Path
    """Of the file that has the user."""


def select(kubeconfig: str | None, context: str | None) -> Selection | None:
    """What `context`, else the current context, says; None where no file has a context at all.

    `kubeconfig` is one file that must be there. Without it, the files of KUBECONFIG, else `~/.kube/config`, are taken,
    as far as they are there. Blocks for the files.

    Raises:
        ValueError: a file cannot be understood, or what it refers to is missing.
        OSError: a file cannot be read.
    """
    paths = _paths(kubeconfig)
    files = [(path, _read(path)) for path in paths if kubeconfig or path.exists()]
    contexts = _merged([(path, {each.name: each.context for each in file.contexts}) for path, file in files])
    tried = ", ".join(map(str, paths))
    if not context and not any(file.current_context for _, file in files):
        if not contexts:
            return None
        raise ValueError(
            f"{tried}: current-context is not set; choose a context: kubectl config use-context NAME. There are: "
            f"{', '.join(sorted(contexts))}"
        )
    name = context or next(file.current_context for _, file in files if file.current_context)
    if name not in contexts:
        known = f"there are: {', '.join(sorted(contexts))}" if contexts else "there is none at all"
        raise ValueError(f"{tried}: no context {name!r}; {known}")
    path, chosen = contexts[name]
    cluster, cluster_field = None, ""
    if chosen.cluster:
        clusters = _merged([(path, {each.name: each.cluster for each in file.clusters}) for path, file in files])
        at, cluster = _referred(clusters, chosen.cluster, path, f"contexts[{name}].context.cluster")
        cluster_field = f"{at}: clusters[{chosen.cluster}].cluster"
        cluster = _absolute(cluster, at.parent, "certificate_authority")
    user, user_field, folder = NOBODY, "", path.parent
    if chosen.user:
        users = _merged([(path, {each.name: each.user for each in file.users}) for path, file in files])
        at, user = _referred(users, chosen.user, path, f"contexts[{name}].context.user")
        user_field, folder = f"{at}: users[{chosen.user}].user", at.parent
        user = _absolute(user, folder, "client_certificate", "client_key", "token_file")
    return Selection(chosen.namespace or None, cluster, cluster_field, user, user_field, folder)


def looked(kubeconfig: str | None) -> str:
    """Which files were read, and what they lack, where none of them has a context. Blocks for the files."""
    return ", ".join(f"{path} {'has no context' if path.exists() else 'does not exist'}" for path in _paths(kubeconfig))


def bounded(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises ValueError, OSError."""
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes, which it should not be")
    return raw


def problems(error: ValidationError) -> str:
    """Which fields are wrong, and how; without their values, which may be secrets."""
    found = [(_field(each["loc"]), _text(each["type"], each["msg"])) for each in error.errors(include_input=False)[:3]]
    return "; ".join(f"{field}: {text}" if field else text for field, text in found)


def _paths(kubeconfig: str | None) -> list[Path]:
    if kubeconfig:
        return [Path(kubeconfig).expanduser().absolute()]
    named = [each for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    return [Path(each).expanduser().absolute() for each in dict.fromkeys(named or [DEFAULT_FILE])]


def _read(path: Path) -> _File:
    try:
        raw = bounded(path, FILE_LIMIT)
    except OSError as error:
        raise type(error)(f"the kubeconfig {path} cannot be read: {error.strerror}") from error
    try:
        found: object = yaml.load(raw, SafeLoader)
        return _File.model_validate({} if found is None else found)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path} is not YAML{where}: {getattr(error, 'problem', None) or 'it is no text'}") from None
    except ValidationError as error:
        raise ValueError(f"{path} is not a kubeconfig: {problems(error)}") from None


T = TypeVar("T")
P = TypeVar("P", bound=_Part)


def _merged(files: Sequence[tuple[Path, Mapping[str, T]]]) -> dict[str, tuple[Path, T]]:
    """Each name's entry in the first file that has it, whole."""
    found: dict[str, tuple[Path, T]] = {}
    for path, entries in files:
        for name, entry in entries.items():
            found.setdefault(name, (path, entry))
    return found


def _referred(entries: Mapping[str, tuple[Path, T]], name: str, path: Path, field: str) -> tuple[Path, T]:
    if name not in entries:
        raise ValueError(f"{path}: {field} is {name!r}, which no file defines")
    return entries[name]


def _absolute(part: P, folder: Path, *fields: str) -> P:
    return part.model_copy(update={field: str(folder / path) for field in fields if (path := getattr(part, field))})


def _field(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in location).removeprefix(".")


def _text(kind: str, message: str) -> str:
    if kind == "model_type":
        return "fields with values are needed"  # pydantic's own text names a class
    return message.removeprefix("Value error, ")
