# SPDX-License-Identifier: Apache-2.0
"""Heads by name: ORGANISATION/NAME[@REVISION] on the Hub. Each file is fetched when it is needed, into the Hub's cache.

huggingface_hub does all of it, so that its cache, offline mode, tokens and endpoint are those that its users know.
"""

from __future__ import annotations

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
    """What a name means on the Hub; None for a path of this disk, and for what cannot be a name there."""
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
        file, files: which it must have.
        also: files that are taken where they can be had.

    Raises:
        MissingFile: if heads on the Hub lack a file.
        HeadsError: if the Hub has no such heads, does not give them, or cannot be reached.
    """
    repository = hub_name(name)
    if repository is None:
        return os.fspath(name)
    folder = Path(_fetched(repository, file)).parent
    commit = HubName(repository.repo, folder.name)
    for name in files:
        _fetched(commit, name)
    for name in also:
        with suppress(HeadsError):
            _fetched(commit, name)
    return str(folder)


def cached(name: str | os.PathLike[str], file: str) -> str | None:
    """The path of a file that is in the Hub's cache; the Hub is not asked."""
    from huggingface_hub import try_to_load_from_cache

    repository = hub_name(name)
    if repository is None:
        return None
    path = try_to_load_from_cache(repository.repo, file, revision=repository.revision)
    return path if isinstance(path, str) else None


def pinned(name: str | os.PathLike[str], file: str) -> str:
    """The name with the commit that it means now, so that every process has the same heads; a folder as it is.

    Raises:
        HeadsError: as folder_of.
    """
    repository = hub_name(name)
    return os.fspath(name) if repository is None else str(HubName(repository.repo, Path(folder_of(name, file)).name))


def remote_tensors(name: str, file: str) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each tensor of a safetensors file on the Hub, by the file's header alone.

    Raises:
        MissingFile: if there is no such file.
        HeadsError: as folder_of, or if it is not safetensors.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    repository = hub_name(name)
    assert repository is not None
    with _errors_in_a_line(repository, file):
        try:
            header = HfApi(token=_token.get()).parse_safetensors_file_metadata(
                repository.repo, file, revision=repository.revision
            )
        except SafetensorsParsingError:
            raise HeadsError(
                f"{file} of {quoted(str(repository))} on the Hub is truncated or not safetensors"
            ) from None
    return {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in header.tensors.items()}


def _fetched(repository: HubName, file: str) -> str:
    """The path of a file in the cache, fetched if it is not there or if the revision has another now."""
    from huggingface_hub import hf_hub_download

    with _errors_in_a_line(repository, file):
        return hf_hub_download(repository.repo, file, revision=repository.revision, token=_token.get())


@contextmanager
def _errors_in_a_line(repository: HubName, file: str) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import HfHubHTTPError

    name, log_in = quoted(str(repository)), "log in (`hf auth login` or HF_TOKEN)"
    try:
        yield
    except hub.GatedRepoError:
        raise HeadsError(f"{name} is gated on the Hub: ask for access on its page, and {log_in}") from None
    except hub.RepositoryNotFoundError:
        raise HeadsError(
            f"{name} is neither a folder nor a repository on {constants.ENDPOINT} that you may read; check the name, "
            f"or {log_in}"
        ) from None
    except hub.RevisionNotFoundError:
        raise HeadsError(f"{name}: the Hub has no such revision; give a branch, tag or commit of it") from None
    except hub.RemoteEntryNotFoundError:
        raise MissingFile(f"{name} on the Hub has no {file}; is this the right repository?") from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        if constants.is_offline_mode():
            raise HeadsError(
                f"{name} is no folder, and its {file} is not in the Hub's cache; unset HF_HUB_OFFLINE, or run "
                f"`hf download {repository.repo}` first"
            ) from None
        raise HeadsError(_unreachable(name, error.__cause__ or error)) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise HeadsError(f"{name}: the Hub answers with HTTP {status} for {file}; try again later") from None
    except hub.HFValidationError:
        raise HeadsError(f"{name} is neither a folder nor a name on the Hub (ORGANISATION/NAME)") from None
    except HeadsError:
        raise
    except OSError as error:
        problem = shortened(error.strerror or str(error), LONGEST_VALUE)
        raise HeadsError(f"{name}: {file} cannot be kept in the Hub's cache ({problem})") from None
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # huggingface_hub passes its client's errors on
            raise
        raise HeadsError(_unreachable(name, error)) from None


def _unreachable(name: str, error: BaseException) -> str:
    from huggingface_hub import constants

    problem = shortened(str(error) or type(error).__name__, LONGEST_VALUE)
    return (
        f"{name} is no folder, and the Hub at {constants.ENDPOINT} cannot be reached ({problem}); HF_HUB_OFFLINE=1 "
        "takes what is cached"
    )
