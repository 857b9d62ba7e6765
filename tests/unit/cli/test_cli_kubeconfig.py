"""Every command that needs a cluster says in one line which kubeconfig could not be used, and why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner, Result

from shoal.cli.main import main
from shoal.kube import auth
from tests.support.operators import CONFIG

PROCESSES: Final = {"gateway run", "ledger run", "cache run"}
CHANGED: Final = ("--tenant", "acme", "--apply")
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "explain": ("route", "chat"),
    "status": (),
    "top": (),
    "why": ("model/llama",),
    "cordon gpu": ("node-1", "GPU-1"),
    "cordon node": ("node-1",),
    "uncordon gpu": ("node-1", "GPU-1"),
    "uncordon node": ("node-1",),
    "doctor": (),
    "advise": ("llama",),
    "logs": ("--tenant", "acme"),
    "logs delete": ("--tenant", "acme", "--yes"),
    "adapters": (),
    "wake": ("llama",),
    "keys create": CHANGED,
    "keys disable": ("prod", *CHANGED),
    "keys expire": ("prod", "1h", *CHANGED),
    "keys list": ("--tenant", "acme"),
    "keys remove": ("prod", *CHANGED),
    "keys rotate": ("prod", *CHANGED),
    "usage": (),
    "bill": ("--tenant", "acme"),
    "credits add": ("--tenant", "acme", "--amount", "1"),
    "credits list": (),
    "margin": (),
    "unattributed": (),
    "export focus": (),
    "support bundle": (),
}
"""Each command that takes `--kubeconfig`, with what else it needs."""


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None:
                yield from leaves(found, (*path, name))
        if not command.invoke_without_command:
            return
    yield " ".join(path), command


@pytest.fixture(autouse=True)
def on_no_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "SHOAL_LEDGER_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(auth, "SERVICE_ACCOUNT", tmp_path / "no-pod")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("shoal.runtime.logs.configure", lambda *_: None)  # for the whole process
    monkeypatch.chdir(tmp_path)


def asked(command: str, *options: str) -> Result:
    return CliRunner().invoke(main, [*command.split(), *COMMANDS[command], *options])


def the_one_line(result: Result) -> str:
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ")
    return line


def test_every_command_that_takes_a_kubeconfig_is_here() -> None:
    taking = {path for path, command in leaves(main) if any(each.name == "kubeconfig" for each in command.params)}
    assert taking - PROCESSES == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, broken = tmp_path / "missing", tmp_path / "broken"
    broken.write_text("clusters: [")
    for path, why in (missing, "cannot be read: No such file or directory"), (broken, "is not YAML, line 2: "):
        assert f"{path} {why}" in the_one_line(asked(command, "--kubeconfig", str(path)))
    for path, why in (missing, "does not exist"), (broken, "is not YAML, line 2: "):
        monkeypatch.setenv("KUBECONFIG", str(path))
        assert f"{path} {why}" in the_one_line(asked(command))


def test_without_any_the_default_file_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/home/.kube/config does not exist" in the_one_line(asked("status"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "has no context"),
        ("some text", "is not a kubeconfig: fields with values are needed"),
        ('{"current-context": "prod"}', "no context 'prod'; there is none at all"),
    ],
)
def test_what_a_file_lacks_is_said_of_the_file_that_was_given(
    content: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    (tmp_path / "given").write_text(content)
    line = the_one_line(asked("status", "--kubeconfig", str(tmp_path / "given")))
    assert f"{tmp_path}/given" in line
    assert why in line
    assert "other" not in line


def test_of_several_files_each_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").write_text("")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    assert f"{tmp_path}/a does not exist, {tmp_path}/b has no context, and" in the_one_line(asked("status"))


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_a_process_says_so_in_one_line_too(process: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*process.split(), "--kubeconfig", str(tmp_path)])
    assert f"the kubeconfig {tmp_path} cannot be read: Is a directory" in the_one_line(result)


def test_so_does_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.model_dump_json(by_alias=True))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path))
    result = CliRunner().invoke(main, ["operator", "run", "--config", str(tmp_path / "config.yaml")])
    assert f"the kubeconfig {tmp_path} cannot be read: Is a directory" in the_one_line(result)
