"""`shoal explain` and `shoal render` print the same of the same files as before: sizes, places, manifests."""

from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from shoal.cli.main import main
from tests.golden.recorded import compare

INPUTS: Final = Path(__file__).parent / "inputs"
FACTS: Final = {
    "demo/llama-8b": "llama-8b.json",
    "demo/llama-70b": "llama-70b.json",
    "demo/qwen-7b-awq": "qwen-7b-awq.json",
    "demo/giant": "llama-70b.json",
    "demo/base": "llama-8b.json",
}


def printed(*command: str) -> str:
    facts = [part for name, file in FACTS.items() for part in ("--facts", f"{name}={INPUTS / file}")]
    files = ["-f", str(INPUTS / "models.yaml"), "--fleet", str(INPUTS / "fleet.yaml")]
    done = CliRunner(catch_exceptions=False).invoke(main, [*command, *files, *facts])
    assert done.exit_code == 1, done.output  # giant fits nowhere
    return done.stdout.replace(INPUTS.as_uri(), "file:///inputs")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("explain", "--sums"), "explain.txt"),
        (("explain", "-o", "json"), "explain.json"),
        (("render",), "render.yaml"),
    ],
)
def test_it_prints_what_it_printed_before(command: tuple[str, ...], file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    compare(file, printed(*command))
