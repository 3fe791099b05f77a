# SPDX-License-Identifier: Apache-2.0
"""Heads on the Hub by name, ORGANIZATION/NAME[@REVISION], or in the subfolder `ppd` of
their target's repository, ORGANIZATION/NAME[@REVISION]:ppd.

huggingface_hub fetches their files into its cache, so its offline mode, tokens and
endpoint apply.
"""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import NamedTuple

from vllm_ppd.heads.errors import HeadsError, MissingFile
from vllm_ppd.heads.text import StrPath, quoted

SUBFOLDER = "ppd"  # of a model, for heads that travel with it
_NAME = re.compile(
    rf"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?(?::({SUBFOLDER}))?", re.ASCII
)
_token: ContextVar[str | bool | None] = ContextVar(
    "vllm_ppd_hub_token", default=None
)


class HubName(NamedTuple):
    """A repository of the Hub, a branch, tag or commit of it (None: its main branch),
    and a subfolder (None: its top).
    """

    repo: str
    revision: str | None = None
    subfolder: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        subfolder = "" if self.subfolder is None else f":{self.subfolder}"
        return f"{self.repo}{revision}{subfolder}"


def hub_name(name: StrPath) -> HubName | None:
    """Parse a name on the Hub; None for a local path and for anything that cannot be
    such a name.
    """
    text = os.fspath(name)
    match = _NAME.fullmatch(text)
    if match is None or os.path.lexists(text) or text.endswith(".gguf"):
        return None
    return HubName(*match.groups())


@contextmanager
def token(value: str | bool | None) -> Iterator[None]:
    """Use another token than that of the environment or of `hf auth login`, such as
    vLLM's --hf-token.
    """
    before = _token.set(value)
    try:
        yield
    finally:
        _token.reset(before)


def folder_of(name: StrPath, file: str) -> str:
    """The folder of heads on this disk, with one of their files.

    Args:
        name: a folder, which is returned as it is, or a name on the Hub.
        file: fetched from the Hub if the cache lacks it.

    Raises:
        MissingFile: if heads on the Hub lack the file.
        HeadsError: if the Hub has no such heads, refuses access, or cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    repository = hub_name(name)
    if repository is None:
        return os.fspath(name)
    with _errors_in_a_line(repository):
        path = hf_hub_download(
            repository.repo,
            file,
            subfolder=repository.subfolder,
            revision=repository.revision,
            token=_token.get(),
        )
    return os.path.dirname(path)


def whole_folder(
    name: StrPath,
    files: Sequence[str] = ("*.json", "*.safetensors"),
) -> str:
    """The folder of heads on this disk, with all of their files.

    Args:
        name: a folder, which is returned as it is, or a name on the Hub.
        files: patterns of the names of files.

    Raises:
        HeadsError: as folder_of.
    """
    from huggingface_hub import snapshot_download

    repository = hub_name(name)
    if repository is None:
        return os.fspath(name)
    subfolder = repository.subfolder or ""
    with _errors_in_a_line(repository):
        folder = snapshot_download(
            repository.repo,
            revision=repository.revision,
            allow_patterns=[os.path.join(subfolder, file) for file in files],
            # The base model that the full recipe writes
            ignore_patterns=os.path.join(subfolder, "*/*"),
            token=_token.get(),
        )
    return os.path.join(folder, subfolder)


def pinned(name: StrPath) -> str:
    """The name with its current commit, so that every process loads the same heads.

    Raises:
        HeadsError: as folder_of.
    """
    repository = hub_name(name)
    if repository is None:
        return os.fspath(name)
    folder = Path(folder_of(name, "config.json"))
    commit = folder.name if repository.subfolder is None else folder.parent.name
    return str(repository._replace(revision=commit))


def pinned_within(seconds: float, name: StrPath) -> str:
    """The same as pinned, but in limited time.

    Raises:
        HeadsError: as folder_of, or if the Hub has not answered in time.
    """
    answer: Future[str] = Future()
    context = copy_context()  # with the token

    def ask() -> None:
        try:
            answer.set_result(context.run(pinned, name))
        except HeadsError as error:
            answer.set_exception(error)

    # huggingface_hub's own limit is for each address of a host
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise HeadsError(
            f"the Hub has not answered for {quoted(str(name))} within {seconds:g} s"
        ) from None


@contextmanager
def _errors_in_a_line(repository: HubName) -> Iterator[None]:
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        yield
    except Exception as error:  # also of huggingface_hub's HTTP client
        is_missing = isinstance(error, RemoteEntryNotFoundError)
        kind = MissingFile if is_missing else HeadsError
        raise kind(
            f"{quoted(str(repository))} is not a folder, and cannot be read from the "
            f"Hub: {error}"
        ) from None
