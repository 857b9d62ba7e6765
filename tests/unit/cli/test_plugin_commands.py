"""The plugin that krew installs has the commands for people only."""

import sys

import pytest
from click.testing import CliRunner

from shoal.cli.main import main

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
