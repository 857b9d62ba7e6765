"""What the lab needs of the machine is installed, also on a machine that has no package lists yet."""

from pathlib import Path

import pytest

from shoal_dev.lab import network
from shoal_dev.lab.errors import LabError

APT = """#!/bin/sh
here=$(dirname "$0")
echo "$1" >> "$here/calls"
case $1 in
  update) touch "$here/lists";;
  install) [ -e "$here/lists" ] || { echo "Unable to locate package nftables" >&2; exit 100; }
           printf '#!/bin/sh\\n' > "$here/nft"; chmod 755 "$here/nft";;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ip", "nsenter", "mount"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name in ("env", "sh", "dirname", "touch", "chmod", "printf", "echo"):
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, name).exists():
                (tmp_path / name).symlink_to(Path(folder, name))
                break
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_package_lists_are_fetched_when_the_package_is_unknown(machine: Path) -> None:
    (machine / "apt-get").write_text(APT)
    (machine / "apt-get").chmod(0o755)
    said: list[str] = []
    network.require_programs(said.append)
    assert (machine / "calls").read_text().split() == ["install", "update", "install"]
    assert said == ["installing nftables with apt-get"]


def test_without_apt_the_package_is_named(machine: Path) -> None:
    with pytest.raises(LabError, match="nftables"):
        network.require_programs(lambda _: None)
