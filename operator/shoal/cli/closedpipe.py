"""The end of a command whose output nobody reads any more, as after `| head`."""

import io
import os
import sys
from typing import Any, Final

ENDED: Final = 141
"""128 + 13, the number of SIGPIPE. kubectl and the tools of Unix are ended by that signal, and scripts with
`set -o pipefail` that allow for it know this status. The signal itself would also end a command at a connection to the
cluster that breaks, so Python ignores it."""


class _Output(io.FileIO):
    """Standard output. The process ends where it is closed: an exception would be taken for one of the network, and
    the last flush is after all handlers."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os._exit(ENDED)


def end_quietly() -> None:
    """From now on, a closed standard output ends this process without a message. Not where a test has replaced it."""
    before = sys.stdout
    if os.name != "posix" or before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):
        return
    before.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(before.fileno(), "w", closefd=False)),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering or before.write_through,  # PYTHONUNBUFFERED: no line waits for the next
    )
