# SPDX-License-Identifier: Apache-2.0
"""A small Hub on the loopback interface: repositories with revisions, HEAD and ranges,
private and gated ones.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_of_the_tests"


class Hub:
    """Repositories by name, each a folder by revision; what was asked of it is in `requests`."""

    def __init__(self) -> None:
        self.revisions: dict[
            str, dict[str, Path]
        ] = {}  # repository -> branch or tag -> folder
        self.private: set[str] = set()
        self.broken = False  # answers 503
        self.requests: list[tuple[str, str]] = []  # repository, file
        self.sent: dict[str, int] = {}  # bytes of bodies by file
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, repo: str, folder: Path, revision: str = "main") -> None:
        self.revisions.setdefault(repo, {})[revision] = folder

    def commit(self, repo: str, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit itself; None if there is none."""
        for name in self.revisions[repo]:
            commit = hashlib.sha1(f"{repo}@{name}".encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def folder(self, repo: str, commit: str) -> Path:
        for name, folder in self.revisions[repo].items():
            if self.commit(repo, name) == commit:
                return folder
        raise KeyError(commit)


class _Handler(BaseHTTPRequestHandler):
    """/ORG/NAME/resolve/REVISION/FILE, and /api/models/ORG/NAME/{revision,tree}/REVISION."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/").removeprefix("api/models/")
        organisation, name, *rest = path.split("/")
        repo = f"{organisation}/{name}"
        verb = rest[0] if rest else ""
        revision = rest[1] if len(rest) > 1 else "main"
        file = "/".join(rest[2:])
        self.hub.requests.append((repo, file))
        is_allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.hub.broken:
            return self.refuse(503, "")
        if repo not in self.hub.revisions or (
            repo in self.hub.private and not is_allowed
        ):
            return self.refuse(401, "RepoNotFound")
        commit = self.hub.commit(repo, revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        folder = self.hub.folder(repo, commit)
        if verb == "resolve":
            if not (folder / file).is_file():
                return self.refuse(404, "EntryNotFound", commit)
            return self.send_file(folder / file, commit)
        sizes = {
            path.name: path.stat().st_size
            for path in folder.iterdir()
            if path.is_file()
        }
        answer: Any = {
            "id": repo,
            "sha": commit,
            "siblings": [{"rfilename": name} for name in sizes],
        }
        if verb == "tree":
            answer = [
                {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                for name, size in sizes.items()
            ]
        return self.send(
            200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
        )

    def send_file(self, path: Path, commit: str) -> None:
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        status = 200
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first)
            stop = min(int(last or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data = data[start:stop]
            status = 206
        if self.command == "HEAD":
            return self.send(status, headers | {"Content-Length": str(len(data))}, b"")
        self.hub.sent[path.name] = self.hub.sent.get(path.name, 0) + len(data)
        return self.send(status, headers, data)

    def refuse(self, status: int, code: str, commit: str = "") -> None:
        self.send(status, {"X-Error-Code": code, "X-Repo-Commit": commit}, b"")

    def send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT sets."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )


def use(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process use a Hub, as HF_ENDPOINT and HF_HOME would, with an empty
    cache and without a token.
    """
    at(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # vLLM keeps a client with the endpoint of its first use, and lists of files.
    if vllm := sys.modules.get("vllm.transformers_utils.repo_utils"):
        monkeypatch.setattr(vllm, "_hf_api", None)
        vllm.list_repo_files.cache_clear()
