"""What to stage, where, and what came of it."""

from dataclasses import dataclass, field
from pathlib import Path

from shoal.api import names
from shoal.artifacts import Settings


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What to stage."""

    uri: str
    digest: str | None = None
    """`sha256:...` that the content must have (api/model.py, Source.digest)."""
    revision: str | None = None
    """hf: the commit to which the source was pinned; None: what its branch leads to now."""
    manifest: str | None = None
    """`sha256:...` of the manifest to which the source was pinned (artifacts/manifest.py)."""
    settings: Settings = field(default_factory=Settings)
    identity: bool = False
    """Whether a bucket that no key of the Secret opens is read as the pod's ServiceAccount."""


@dataclass(frozen=True, slots=True)
class StagePaths:
    """Where the stage container reads and writes."""

    target: Path = Path(names.MODEL_PATH)
    source: Path = Path(names.SOURCE_DIR)
    secret: Path = Path(names.SOURCE_SECRET_DIR)
    progress: Path = Path(names.STAGE_PROGRESS_FILE)
    cache: Path | None = None
    """The namespace's folder of the node cache; None: there is no cache, and the pod fetches for itself."""

    @property
    def cache_model(self) -> Path:
        """For the agent: the key of the cached model that this pod uses."""
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
    """A finished staging."""

    digest: str | None
    """As `Source.digest` defines it; None where it was neither asked for nor came along."""
    bytes: int
    seconds: float
    commit: str | None = None
    """hf: the commit that was fetched."""
