"""Builds and checks what a release publishes. `.github/workflows/release.yml` runs these commands for a tag, and
`make release-dry-run` runs them here: `python -m shoal_dev.release --help`.

| file | what it makes or checks |
|---|---|
| `project.py` | names: registry, repository, image, platforms; the version |
| `versions.py` | one version in every file that names it, and what a tag needs |
| `notes.py` | the release notes, cut from CHANGELOG.md |
| `python.py` | wheels and source distributions of `shoal` and `shoal-dev` |
| `charts.py` | the charts as packages, pushed and signed |
| `plugin.py` | the kubectl plugin as one archive per platform |
| `krew.py` | the plugin's manifest for krew |
| `sbom.py` | the list of dependencies, CycloneDX |
| `image.py` | what can be checked of the image without a builder |
| `checksums.py` | SHA-256 of every file |
| `dryrun.py` | all of it on this machine, without network |

It works in a checkout only and is in no wheel.
"""
