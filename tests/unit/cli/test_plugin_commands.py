"""The plugin that krew installs has the commands for people only."""

import sys

import pytest
from click.testing import CliRunner

from shoal.cli.main import complete, kubectl, main

PROCESSES = ("operator", "gateway", "ledger", "agent", "cache")


def test_an_installation_has_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "frozen", raising=False)
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(f"  {name} " in shown for name in (*PROCESSES, "status", "why"))


def test_the_plugin_leaves_them_out_and_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    shown = CliRunner().invoke(main, ["--help"]).output
    assert not any(f"  {name} " in shown for name in PROCESSES)
    assert all(f"  {name} " in shown for name in ("status", "why", "explain", "support"))
    refused = CliRunner().invoke(main, ["gateway"])
    assert refused.exit_code == 2
    assert "`gateway` is a process of Shoal: it is in the image" in refused.output


@pytest.mark.parametrize(
    ("args", "some", "directive"),
    [
        (["wh"], ["why\tExplain what is wrong"], ":4"),
        (["usage", "-o", ""], ["json", "yaml", "csv", "table"], ":4"),
        (["keys", "cr"], ["create\t"], ":4"),
        (["-n", "chat", "status", "--all"], ["--all-namespaces"], ":4"),
        (["explain", "-f", ""], [], ":0"),
        (["no-such-command", ""], [], ":4"),
        ([], ["status\t"], ":4"),
    ],
)
@pytest.mark.parametrize("program", ["kubectl_complete-shoal", "/home/me/.local/bin/kubectl_complete-shoal"])
def test_kubectl_completes_the_plugins_arguments(
    program: str,
    args: list[str],
    some: list[str],
    directive: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [program, *args])
    (kubectl if "/" in program else complete)()  # the plugin of krew is one program under two names
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == directive
    assert all(any(line.startswith(each) for line in lines) for each in some), lines
