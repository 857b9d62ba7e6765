"""Programs that the lab builds once from Go modules."""

import fcntl
from pathlib import Path

import pytest

from shoal_dev.lab import gobuild

MODULE = gobuild.Module("tool", ("example.com/tool",), "example.com/tool", "-s -w", 1, program="tool")


def test_what_is_built_waits_for_no_build_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "sources" / MODULE.source
    source.mkdir(parents=True)
    (source / "go.mod").write_text("module example.com/tool\n\ngo 1.25\n\nrequire example.com/tool v1.0.0\n")
    program = gobuild.cached(source.parent, MODULE) / MODULE.program
    program.parent.mkdir(parents=True)
    program.touch()
    said: list[str] = []
    with (gobuild.cache_root() / "build.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # for minutes
        gobuild.build(source.parent, [MODULE], said.append)
    assert not said
