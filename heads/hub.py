# SPDX-License-Identifier: Apache-2.0
"""Heads on the Hub by name, ORGANISATION/NAME[@REVISION]; files are fetched into the Hub's cache when needed.

huggingface_hub does all of it, so its cache, offline mode, tokens and endpoint apply.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.quote import LONGEST_VALUE, quoted, shortened

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
LONGEST_NAME = 300
_token: ContextVar[str | bool | None] = ContextVar("vllm_ppd_hub_token", default=None)


class HubName(NamedTuple):
    """A repository of the Hub, and a branch, tag or commit of it (None: its main branch)."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(name: str | os.PathLike[str]) -> HubName | None:
    """Parse a name on the Hub; None for a local path and for anything that cannot be such a name."""
    text = os.fspath(name)
    match = _NAME.fullmatch(text) if len(text) <= LONGEST_NAME else None
    if match is None or os.path.lexists(text) or "--" in match[1] or ".." in text or text.endswith(".gguf"):
        return None
    return HubName(match[1], match[2])


@contextmanager
def token(value: str | bool | None) -> Iterator[None]:
    """A token other than that of the environment or of `hf auth login`, such as vLLM's --hf-token."""
    before = _token.set(value)
    try:
        yield
    finally:
        _token.reset(before)


def folder_of(name: str | os.PathLike[str], file: str, *files: str, also: Iterable[str] = ()) -> str:
    """The folder of heads on this disk, with some of their files.

    Args:
        name: a folder, which is returned as it is, or a name on the Hub.
        file, files: that it must have.
        also: files that are fetched if they exist.

    Raises:
        MissingFile: if heads on the Hub lack a file.
        HeadsError: if the Hub has no such heads, refuses access, or cannot be reached.
    """
    repository = hub_name(name)
    if repository is None:
        return os.fspath(name)
    folder = Path(_fetched(repository, file)).parent
    commit = HubName(repository.repo, folder.name)
    for other in files:
        _fetched(commit, other)
    for other in also:
        with suppress(HeadsError):
            _fetched(commit, other)
    return str(folder)


def cached(name: str | os.PathLike[str], file: str) -> str | None:
    """The path of a file in the Hub's cache, without a request to the Hub."""
    from huggingface_hub import try_to_load_from_cache

    repository = hub_name(name)
    path = repository and try_to_load_from_cache(repository.repo, file, revision=repository.revision)
    return path if isinstance(path, str) else None


def pinned(name: str | os.PathLike[str], file: str) -> str:
    """The name with its current commit, so that every process loads the same heads; a folder is returned as it is.

    Raises:
        HeadsError: as folder_of.
    """
    repository = hub_name(name)
    return os.fspath(name) if repository is None else str(HubName(repository.repo, Path(folder_of(name, file)).name))


def remote_tensors(name: str, file: str) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each tensor of a safetensors file on the Hub, from the file's header alone.

    Raises:
        MissingFile, HeadsError: as folder_of, or if it is not safetensors.
    """
    from huggingface_hub import HfApi

    repository = hub_name(name)
    assert repository is not None
    with _errors_in_a_line(repository, file):
        api = HfApi(token=_token.get())
        header = api.parse_safetensors_file_metadata(repository.repo, file, revision=repository.revision)
    return {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in header.tensors.items()}


def _fetched(repository: HubName, file: str) -> str:
    """The path of a file in the cache, fetched if it is missing or the revision has changed."""
    from huggingface_hub import hf_hub_download

    with _errors_in_a_line(repository, file):
        return hf_hub_download(repository.repo, file, revision=repository.revision, token=_token.get())


@contextmanager
def _errors_in_a_line(repository: HubName, file: str) -> Iterator[None]:
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        yield
    except Exception as error:
        problem = _problem(error, repository, file)
        if problem is None:
            raise
        kind = MissingFile if isinstance(error, RemoteEntryNotFoundError) else HeadsError
        raise kind(f"{quoted(str(repository))} {problem}") from None


def _problem(error: Exception, repository: HubName, file: str) -> str | None:
    """The end of a message about a repository; None if the error is not one of huggingface_hub's."""
    from huggingface_hub import constants, errors

    log_in, hub = "log in (`hf auth login` or HF_TOKEN)", constants.ENDPOINT
    problems: dict[type[Exception], str] = {
        errors.GatedRepoError: f"is gated on the Hub: ask for access on its page, and {log_in}",
        errors.RepositoryNotFoundError: f"is neither a folder nor a repository on {hub} that you may read; check the "
        f"name, or {log_in}",
        errors.RevisionNotFoundError: "has no such revision on the Hub; give an existing branch, tag or commit",
        errors.RemoteEntryNotFoundError: f"on the Hub has no {file}; is this the right repository?",
        errors.SafetensorsParsingError: f"on the Hub has a {file} that is truncated or not safetensors",
        errors.HFValidationError: "is neither a folder nor a name on the Hub (ORGANISATION/NAME)",
    }
    for kind, problem in problems.items():
        if isinstance(error, kind):
            return problem
    is_absent = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    if is_absent and constants.is_offline_mode():
        fetch = f"run `hf download {repository.repo}` first"
        return f"is not a folder, and its {file} is not in the Hub's cache; unset HF_HUB_OFFLINE, or {fetch}"
    cause = error.__cause__ or error if is_absent else error
    reason = shortened(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__, LONGEST_VALUE)
    # huggingface_hub passes on errors of its HTTP client.
    if is_absent or isinstance(error, errors.HfHubHTTPError) or type(error).__module__.startswith("httpx"):
        return f"is not a folder, and {hub} cannot be reached ({reason}); HF_HUB_OFFLINE=1 uses the Hub's cache"
    return f"has a {file} that cannot be saved in the Hub's cache ({reason})" if isinstance(error, OSError) else None
