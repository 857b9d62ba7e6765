"""Fetches a repository of a Hugging Face hub (or a mirror of one) through its own client library."""

import errno
import fnmatch
import glob
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from shoal.api import reasons
from shoal.api.sources import SourceUri
from shoal.artifacts.errors import ArtifactError, of_os_error, require_room

API_SECONDS = 30.0
_TEXT = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".yaml", ".yml")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*")
_COPIES = ("original", "onnx", "openvino", "coreml", "metal", "flax")
"""Folders in which repositories keep the same weights once more for other runtimes."""


def wanted_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that an engine reads: safetensors (else the older formats), configs and tokenizer."""
    kept = [
        name
        for name in names
        if not name.startswith(".")
        and PurePosixPath(name).parts[0] not in _COPIES
        and not any(fnmatch.fnmatch(PurePosixPath(name).name, pattern) for pattern in _NOT_WEIGHTS)
    ]
    safetensors = [name for name in kept if name.endswith(".safetensors")]
    # Mistral's repositories hold every weight twice: model-*.safetensors and consolidated*.safetensors.
    sharded = [name for name in safetensors if not PurePosixPath(name).name.startswith("consolidated")]
    weights = sharded or safetensors or [name for name in kept if name.endswith(_OTHER_WEIGHTS)]
    return sorted({*weights, *(name for name in kept if name.endswith(_TEXT))})


def resolve(source: SourceUri, *, token: str | None, endpoint: str | None) -> tuple[str, dict[str, int | None]]:
    """The commit that the revision stands for now, and its wanted files with their sizes. Raises ArtifactError."""
    _prepare()
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=endpoint, token=token or False).model_info(
            source.repo, revision=source.revision, files_metadata=True, timeout=API_SECONDS
        )
    except Exception as error:
        raise explain(error, source, has_token=token is not None) from None
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    if info.sha is None:
        raise ArtifactError(reasons.SOURCE_UNREACHABLE, f"{source.uri}: the hub named no commit; check the mirror")
    return info.sha, {name: sizes[name] for name in wanted_files(sizes)}


def fetch(
    source: SourceUri,
    target: Path,
    *,
    commit: str,
    token: str | None,
    endpoint: str | None,
    on_total: Callable[[int], None],
) -> None:
    """Fetches the wanted files of `commit` into `target`, going on where an earlier run stopped. Blocks.

    Raises ArtifactError.
    """
    _prepare()
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    # Asked again by commit, not kept from before: a restarted container knows no more than the commit.
    pinned = SourceUri("hf", source.uri, repo=source.repo, revision=commit)
    _, sizes = resolve(pinned, token=token, endpoint=endpoint)
    if not sizes:
        raise ArtifactError(reasons.SOURCE_INVALID, f"{source.uri} has no files that an engine could read")
    total = sum(size or 0 for size in sizes.values())
    if None not in sizes.values():
        on_total(total)
    missing = {name: size for name, size in sizes.items() if not (target / name).exists()}
    require_room(target, sum(size or 0 for size in missing.values()))
    try:
        snapshot_download(
            source.repo,
            revision=commit,
            local_dir=target,
            token=token or False,
            endpoint=endpoint,
            # Names, not patterns: what was sized is what is fetched.
            allow_patterns=[glob.escape(name) for name in sizes],
        )
    except Exception as error:
        raise explain(error, source, has_token=token is not None) from None
    short = [
        name
        for name, size in sizes.items()
        if not (target / name).is_file() or (size is not None and (target / name).stat().st_size != size)
    ]
    if short:
        raise ArtifactError(reasons.SOURCE_UNREACHABLE, f"{source.uri}: {short[0]} did not arrive whole")
    shutil.rmtree(target / ".cache", ignore_errors=True)  # the library's own notes are no part of the model


def _prepare() -> None:
    # Read when the library is imported. Its progress bars and its telemetry have no place in a pod.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def explain(error: Exception, source: SourceUri, *, has_token: bool) -> ArtifactError:
    """What an error of the library means for the person who wrote the Model."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, ArtifactError):
        return error
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, RevisionNotFoundError):
            return ArtifactError(
                reasons.SOURCE_NOT_FOUND, f"{source.repo} has no revision {source.revision!r}: check source.uri"
            )
        if not isinstance(cause, HfHubHTTPError):
            continue
        status = cause.response.status_code
        if isinstance(cause, GatedRepoError) or status in (401, 403):
            return ArtifactError(reasons.GATED, _gated(source.repo, status, has_token=has_token))
        if isinstance(cause, RepositoryNotFoundError) or status == 404:
            return ArtifactError(reasons.SOURCE_NOT_FOUND, f"the hub has no repository {source.repo}: check source.uri")
        return ArtifactError(reasons.SOURCE_UNREACHABLE, f"the hub answered {status} for {source.repo}; trying again")
    for cause in chain:
        # An error of the file system names a file; one of the network does not.
        if isinstance(cause, OSError) and (cause.filename is not None or cause.errno == errno.ENOSPC):
            return of_os_error(cause, f"fetching {source.repo}")
    last = chain[-1]
    detail = next(iter(str(last).splitlines()), "") or type(last).__name__
    return ArtifactError(
        reasons.SOURCE_UNREACHABLE,
        f"the hub cannot be reached for {source.repo} ({detail}): check the network, or the chart's hub mirror and "
        "proxy settings",
    )


def _gated(repo: str, status: int, *, has_token: bool) -> str:
    if has_token:
        return (
            f"the hub refuses {repo} to the token of source.secretRef ({status}): accept the repository's terms with "
            "that account, and check the Secret's key `token`"
        )
    return (
        f"{repo} is gated, private or does not exist ({status}): put a hub token into key `token` of a Secret and name "
        "the Secret in source.secretRef"
    )


def _chain(error: BaseException) -> Iterable[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
