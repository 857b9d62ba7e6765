"""Types of staging: request, paths, result."""

from dataclasses import dataclass, field
from pathlib import Path

from shoal.api import names
from shoal.artifacts import Settings


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A source to stage."""

    uri: str
    digest: str | None = None
    """Required digest of the content, `sha256:...` (api/model.py, Source.digest)."""
    revision: str | None = None
    """hf: commit that the source was pinned to; None: the branch's current commit."""
    manifest: str | None = None
    """Digest of the manifest that the source was pinned to, `sha256:...` (artifacts/manifest.py)."""
    settings: Settings = field(default_factory=Settings)
    identity: bool = False
    """Whether the pod's ServiceAccount identity is used for a bucket without keys in the Secret."""


@dataclass(frozen=True, slots=True)
class StagePaths:
    """Paths that the stage container reads and writes."""

    target: Path = Path(names.MODEL_PATH)
    source: Path = Path(names.SOURCE_DIR)
    secret: Path = Path(names.SOURCE_SECRET_DIR)
    progress: Path = Path(names.STAGE_PROGRESS_FILE)
    cache: Path | None = None
    """The namespace's folder of the node cache; None: there is no cache, and the pod fetches itself."""

    @property
    def cache_model(self) -> Path:
        """For the agent: key of the cached model that this pod uses."""
        return self.progress.with_name(Path(names.CACHE_MODEL_FILE).name)

    @property
    def work(self) -> Path:
        return self.target.with_name(".partial")

    @property
    def files(self) -> Path:
        return self.work / "files"

    @property
    def archive(self) -> Path:
        return self.work / "archive"

    @property
    def marker(self) -> Path:
        return self.target.with_name(".staged.json")


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of a successful staging."""

    digest: str | None
    """As defined by `Source.digest`; None: it was not requested and not computed."""
    bytes: int
    seconds: float
    commit: str | None = None
    """hf: commit that was fetched."""
