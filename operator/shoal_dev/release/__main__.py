"""The command: `python -m shoal_dev.release`."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from shoal_dev.release import charts as charts_
from shoal_dev.release import checksums as checksums_
from shoal_dev.release import dryrun, image, project, versions
from shoal_dev.release import krew as krew_
from shoal_dev.release import notes as notes_
from shoal_dev.release import plugin as plugin_
from shoal_dev.release import python as python_
from shoal_dev.release import sbom as sbom_

P = ParamSpec("P")
R = TypeVar("R")

_dist = click.option(
    "--dist", type=click.Path(path_type=Path, file_okay=False), default=Path("dist"), show_default=True,
    help="The folder of the release's files.",
)  # fmt: skip


def _clear_errors(function: Callable[P, R]) -> Callable[P, R]:
    """A ReleaseError is for the maintainer; anything else is a bug and keeps its traceback."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except project.ReleaseError as error:
            raise click.ClickException(str(error)) from error

    return wrapped


def _made(dist: Path) -> Path:
    dist.mkdir(parents=True, exist_ok=True)
    return dist.resolve()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Build and check what a release publishes."""


@main.command()
@click.option("--tag", help="Also check that this tag can be released.")
@_clear_errors
def check(tag: str | None) -> None:
    """Fail unless every file names the same version, and the image can be built from what is there."""
    root = project.root()
    found = versions.disagreements(root) if tag is None else versions.tag_problems(root, tag)
    if found := [*found, *image.problems(root)]:
        raise project.ReleaseError("\n".join(found))
    click.echo(f"{project.version(root)} in every file that names it")


@main.command()
@click.argument("number")
@_clear_errors
def version(number: str) -> None:
    """Write the version NUMBER into every file that names it."""
    for file in versions.write(project.root(), number):
        click.echo(f"wrote {file}")


@main.command()
@_dist
@_clear_errors
def python(dist: Path) -> None:
    """Build wheels and source distributions."""
    _report(python_.build(project.root(), _made(dist)))


@main.command()
@click.option("--image", metavar="REPOSITORY@DIGEST", help="The image that the chart installs.")
@_dist
@_clear_errors
def charts(image: str | None, dist: Path) -> None:
    """Package the charts."""
    _report(charts_.package(project.root(), _made(dist), image))


@main.command("push-charts")
@click.option("--to", "registry", default=project.CHART_REGISTRY, show_default=True)
@click.option("--sign/--no-sign", default=True, show_default=True, help="Sign what was pushed with cosign, by digest.")
@click.option("--plain-http", is_flag=True, help="For a registry on this machine.")
@_dist
@_clear_errors
def push_charts(registry: str, sign: bool, plain_http: bool, dist: Path) -> None:
    """Push the packaged charts and sign them."""
    for reference in charts_.push(project.root(), _made(dist), registry, plain_http=plain_http, sign=sign):
        click.echo(reference)


@main.command()
@_dist
@_clear_errors
def plugin(dist: Path) -> None:
    """Build the kubectl plugin's archive for this platform, from the wheel."""
    _report([plugin_.build(project.root(), _made(dist))])


@main.command()
@_dist
@_clear_errors
def krew(dist: Path) -> None:
    """Write the plugin's manifest for krew, from the archives of all platforms."""
    _report([krew_.build(project.root(), _made(dist), every_platform=True)[0]])


@main.command()
@_dist
@_clear_errors
def sbom(dist: Path) -> None:
    """Write the list of dependencies (CycloneDX)."""
    _report([sbom_.build(project.root(), _made(dist))])


@main.command()
@_clear_errors
def notes() -> None:
    """Print the release notes of this version."""
    root = project.root()
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    click.echo(notes_.release_notes(changelog, project.version(root)), nl=False)


@main.command()
@_dist
@_clear_errors
def checksums(dist: Path) -> None:
    """Write SHA-256 of every file of the release."""
    _report([checksums_.build(_made(dist))])


@main.command("dry-run")
@_dist
@_clear_errors
def dry_run(dist: Path) -> None:
    """Build and check all of it on this machine; sign and publish nothing."""
    dryrun.run(project.root(), dist.resolve(), click.echo)


def _report(paths: list[Path]) -> None:
    for path in paths:
        click.echo(path)


if __name__ == "__main__":
    main(prog_name="python -m shoal_dev.release")
