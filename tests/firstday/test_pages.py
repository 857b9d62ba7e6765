"""What is read of a page's commands: how many there are, and when a script comes to one."""

import subprocess

import pytest

from tests.firstday.pages import lines, marked, times

BLOCK = """make it       # everything
curl -sf http://x#y \\
  -d '{"a": 1}'

# a remark
until true; do sleep 1; done
kill %1
"""


def test_commands_are_counted_as_they_are_entered() -> None:
    assert [line.partition(" ")[0] for line in lines(BLOCK)] == ["make", "curl", "until", "kill"]


def test_a_script_tells_when_it_comes_to_a_line() -> None:
    done = subprocess.run(
        ["bash", "-c", marked("printf {}\necho done\n", ("done", "echo done"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("{}\n== done 1"), "an answer may end without a line break"
    assert done.stdout.endswith("done\n")
    assert times(done.stdout).keys() == {"done"}


@pytest.mark.parametrize("script", ["true\n", "kill %1\nkill %1\n"])
def test_a_line_that_is_not_there_once_is_an_error(script: str) -> None:
    with pytest.raises(LookupError):
        marked(script, ("gone", "kill %1"))
