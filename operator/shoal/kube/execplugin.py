"""Credentials from an exec plugin of a kubeconfig: a command prints an ExecCredential of client.authentication.k8s.io.

The plugin's output never appears in a log or an error; what it writes to standard error does.
"""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.api.meta import JsonObject
from shoal.kube.kubeconfig import KubeconfigCluster, PluginCommand, problems

SECONDS: Final = 30.0
INTERACTIVE_SECONDS: Final = 300.0
"""A plugin that may talk with the person at the terminal, who logs in somewhere."""
OUTPUT_LIMIT: Final = 1 << 20
"""Bytes of a plugin's standard output."""
SHOWN: Final = 500
"""Characters of a plugin's standard error in our own."""
CONFIG_EXTENSION: Final = "client.authentication.k8s.io/exec"
"""The extension of a cluster that is for its plugins."""


class PluginCredentials(BaseModel):
    """The status of an ExecCredential."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    token: str | None = None
    certificate: str | None = Field(None, alias="clientCertificateData")
    """PEM."""
    key: str | None = Field(None, alias="clientKeyData")
    expires: AwareDatetime | None = Field(None, alias="expirationTimestamp")

    @model_validator(mode="after")
    def _some(self) -> "PluginCredentials":
        if bool(self.certificate) != bool(self.key):
            raise ValueError("has only one of clientCertificateData and clientKeyData")
        if not self.token and not self.certificate:
            raise ValueError("has neither a token nor a client certificate")
        return self

    def seconds(self, now: datetime | None = None) -> float | None:
        """For how long they are good; None: until the API server refuses them."""
        return None if self.expires is None else (self.expires - (now or datetime.now(UTC))).total_seconds()


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    kind: Literal["ExecCredential"]
    api_version: str = Field(alias="apiVersion")
    status: PluginCredentials


async def run(
    plugin: PluginCommand, field: str, folder: Path, cluster: KubeconfigCluster, ca: bytes | None
) -> PluginCredentials:
    """Runs the command once. `field` is where the kubeconfig has it, `folder` that of the file.

    Raises:
        ValueError: the command is missing, failed, or its answer cannot be used.
        TimeoutError: the command did not end in time. It is killed.
    """
    interactive = _interactive(plugin, field)
    status, output, complaint = await _output(plugin, field, folder, _info(plugin, cluster, ca, interactive))
    if status != 0:
        raise ValueError(f"{field}: the command {plugin.command!r} ended with status {status}{complaint}")
    try:
        answer = _Answer.model_validate(orjson.loads(output))
    except orjson.JSONDecodeError:
        raise ValueError(f"{field}: the command {plugin.command!r} printed something else than JSON") from None
    except ValidationError as error:
        what = problems(error)
        raise ValueError(f"{field}: the command {plugin.command!r} printed no ExecCredential: {what}") from None
    if answer.api_version != plugin.api_version:
        raise ValueError(
            f"{field}: the command {plugin.command!r} answers in another version than apiVersion, {plugin.api_version}"
        )
    return answer.status


def _interactive(plugin: PluginCommand, field: str) -> bool:
    """Whether the command may read from the terminal."""
    terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    if plugin.interactive_mode == "Always" and not terminal:
        raise ValueError(f"{field}: the command {plugin.command!r} needs a terminal (interactiveMode: Always)")
    return terminal and plugin.interactive_mode != "Never"


def _info(plugin: PluginCommand, cluster: KubeconfigCluster, ca: bytes | None, interactive: bool) -> JsonObject:
    """KUBERNETES_EXEC_INFO."""
    spec: JsonObject = {"interactive": interactive}
    if plugin.provide_cluster_info:
        config = next((each.extension for each in cluster.extensions if each.name == CONFIG_EXTENSION), None)
        about = {
            "server": cluster.server,
            "tls-server-name": cluster.tls_server_name,
            "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify or None,
            "certificate-authority-data": base64.b64encode(ca).decode() if ca else None,
            "proxy-url": cluster.proxy_url,
            "config": config,
        }
        spec["cluster"] = {key: value for key, value in about.items() if value is not None}
    return {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}


async def _output(plugin: PluginCommand, field: str, folder: Path, info: JsonObject) -> tuple[int, bytes, str]:
    """Exit status, standard output, and the standard error in words that follow an error's."""
    interactive: bool = info["spec"]["interactive"]
    environment = {**os.environ, **{each.name: each.value for each in plugin.env}}
    # A name is looked up in PATH; a path is relative to the kubeconfig, and never to the current directory.
    bare = os.sep not in plugin.command
    program = shutil.which(plugin.command, path=environment.get("PATH")) if bare else str(folder / plugin.command)
    hint = f". {plugin.install_hint.strip()}" if plugin.install_hint.strip() else ""
    if program is None:
        raise ValueError(f"{field}: there is no command {plugin.command!r} in PATH{hint or '; install it'}")
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *plugin.args,
            stdin=None if interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if interactive else asyncio.subprocess.PIPE,
            env={**environment, "KUBERNETES_EXEC_INFO": orjson.dumps(info).decode()},
            start_new_session=not interactive,
        )
    except OSError as error:
        raise ValueError(f"{field}: the command {program!r} cannot be run: {error.strerror}{hint}") from error
    seconds = INTERACTIVE_SECONDS if interactive else SECONDS
    ended = False
    try:
        async with asyncio.timeout(seconds):
            output, complaint = await asyncio.gather(
                _read(process.stdout, f"{field}: the command {plugin.command!r} printed"), _beginning(process.stderr)
            )
            status = await process.wait()
            ended = True
    except TimeoutError:
        raise TimeoutError(f"{field}: the command {plugin.command!r} did not end within {seconds:.0f} s") from None
    finally:
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                # With a session of its own, also what the command has started, which holds its pipes open.
                process.kill() if interactive else os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    said = " ".join(complaint.decode(errors="replace").split())[:SHOWN]
    return status, output, f": {said}" if said else ""


async def _read(stream: asyncio.StreamReader | None, what: str) -> bytes:
    data = bytearray()
    while stream is not None and (chunk := await stream.read(1 << 16)):
        data += chunk
        if len(data) > OUTPUT_LIMIT:
            raise ValueError(f"{what} more than {OUTPUT_LIMIT} bytes")
    return bytes(data)


async def _beginning(stream: asyncio.StreamReader | None) -> bytes:
    """The first bytes of a stream, which is read to its end."""
    data = b""
    while stream is not None and (chunk := await stream.read(1 << 16)):
        data = (data + chunk)[: 4 * SHOWN]
    return data
