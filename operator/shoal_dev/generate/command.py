"""The command: writes what `files.py` makes, or compares."""

import difflib
from pathlib import Path

import click

from shoal_dev.generate.files import generated_files


def repository_root() -> Path:
    """The checkout that this package lies in.

    Raises:
        click.ClickException: the package is installed somewhere else, where there is nothing to generate.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file() or not (root / "charts").is_dir():
        raise click.ClickException("shoal generate works in a checkout of Shoal only")
    return root


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a file is not what the code says.")
def command(*, check: bool) -> None:
    """Write crds/, chart schemas and reference docs."""
    root = repository_root()
    stale: list[str] = []
    for name, text in generated_files(root).items():
        path = root / name
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if old == text:
            continue
        stale.append(name)
        if check:
            diff = difflib.unified_diff(old.splitlines(), text.splitlines(), name, "generated", lineterm="", n=1)
            click.echo("\n".join(list(diff)[:40]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            click.echo(f"wrote {name}")
    if check and stale:
        raise click.ClickException(f"run `shoal generate` and commit: {', '.join(stale)}")
