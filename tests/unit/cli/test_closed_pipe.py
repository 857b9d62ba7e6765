"""A closed standard output ends a command as it ends other tools: quietly, with the status of SIGPIPE."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli import closedpipe
from shoal.cli.main import main

TENANT = """\
apiVersion: shoal.dev/v1alpha1
kind: Tenant
metadata: {name: acme}
spec:
  keys: [{name: prod, sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08}]
"""


def test_a_shell_that_reads_no_candidates_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from shoal.cli.main import complete; complete()", ""]
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)

    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["explain", "-f", "examples/catalogue/qwen3-8b.yaml"],
        ["keys", "disable", "prod", "-f", "TENANT"],  # prints where errors of the network are handled
    ],
    ids=" ".join,
)
def test_a_closed_output_is_no_error(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "tenant.yaml").write_text(TENANT)
    args = [str(tmp_path / "tenant.yaml") if arg == "TENANT" else arg for arg in args]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shoal", *args]
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)

    assert done.returncode == 141, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith(("Nothing is changed", "once applied"))]
    assert not any(errors)


@pytest.mark.parametrize(
    ("command", "quietly"), [("explain", True), ("usage", True), ("gateway", False), ("agent", False), ("lab", False)]
)
def test_what_starts_processes_or_is_one_ends_in_its_own_order(
    command: str, quietly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lab that is cut off leaves its processes, and a gateway its requests."""
    calls: list[bool] = []
    monkeypatch.setattr(closedpipe, "end_quietly", lambda: calls.append(True))
    assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0
    assert bool(calls) is quietly
