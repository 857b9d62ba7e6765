"""Everything that happened to some objects of a namespace while something was done: watch events, recorded."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson


class Recorder:
    """Watches while the context lasts.

    `paths`: plural -> the API's path of the list, such as `/api/v1/namespaces/demo/pods`.
    """

    def __init__(self, kubectl: Path, environment: Mapping[str, str], paths: Mapping[str, str], folder: Path) -> None:
        self._kubectl = kubectl
        self._environment = environment
        self._paths = paths
        self._folder = folder
        self._watches: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for plural, path in self._paths.items():
            with (self._folder / plural).open("wb") as file:
                command = [str(self._kubectl), "get", "--raw", f"{path}?watch=true&timeoutSeconds=600"]
                self._watches.append(subprocess.Popen(command, stdout=file, env=dict(self._environment)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watch in self._watches:
            watch.kill()
            watch.wait(10)

    def events(self, plural: str) -> list[tuple[str, dict[str, Any]]]:
        """Kind of event (ADDED, MODIFIED, DELETED) and object, in order; what was there at first is ADDED, too."""
        *lines, _cut = (self._folder / plural).read_bytes().split(b"\n")
        parsed = [orjson.loads(line) for line in lines if line]
        return [(event["type"], event["object"]) for event in parsed]

    def wait_for(self, plural: str, names: Sequence[str], within: float = 30) -> None:
        """Until the watch has told of these objects."""
        deadline = time.monotonic() + within
        while not set(names) <= {item["metadata"]["name"] for _, item in self.events(plural)}:
            assert time.monotonic() < deadline, f"the watch of {plural} does not tell of {names}"
            time.sleep(0.1)
