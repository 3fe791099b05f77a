# SPDX-License-Identifier: Apache-2.0
"""A small Hub on the loopback interface: repositories with revisions, HEAD and ranges, private and gated ones."""

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
        self.revisions: dict[str, dict[str, Path]] = {}  # repository -> branch or tag -> folder
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.broken = False  # answers 503
        self.requests: list[tuple[str, str, str]] = []  # method, repository, file
        self.sent: dict[str, int] = {}  # bytes of bodies by file
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
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
        return next(folder for name, folder in self.revisions[repo].items() if self.commit(repo, name) == commit)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = path[:2] == ["api", "models"]
        if api:
            path = path[2:]
        repo, rest = "/".join(path[:2]), path[2:]
        # /ORG/NAME/resolve/REVISION/FILE, or /api/models/ORG/NAME[/revision/REVISION | /tree/REVISION[/...]]
        verb, revision, file = (*rest, "", "", "")[:1][0], (rest[1:2] or ["main"])[0], "/".join(rest[2:])
        self.hub.requests.append((self.command, repo, file if not api else f"api:{verb}"))
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.hub.broken:
            return self.refuse(503, "")
        if repo not in self.hub.revisions or (repo in self.hub.private and not allowed):
            return self.refuse(401, "RepoNotFound")
        if repo in self.hub.gated and not allowed and not api:
            return self.refuse(403, "GatedRepo")
        commit = self.hub.commit(repo, revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if api:
            return self.api(verb, repo, commit)
        path_of = self.hub.folder(repo, commit) / file
        if not path_of.is_file():
            return self.refuse(404, "EntryNotFound", commit)
        self.send_file(path_of, commit, body)

    def api(self, verb: str, repo: str, commit: str) -> None:
        folder = self.hub.folder(repo, commit)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if verb == "tree":
            answer: Any = [{"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40}
                          for name in files]  # fmt: skip
        else:
            answer = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def send_file(self, path: Path, commit: str, body: bool) -> None:
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, wanted = 200, self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        if not body:
            return self.send(status, headers | {"Content-Length": str(len(data))}, b"")
        self.hub.sent[path.name] = self.hub.sent.get(path.name, 0) + len(data)
        self.send(status, headers, data)

    def refuse(self, status: int, code: str, commit: str | None = None) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self.send(status, headers | ({"X-Repo-Commit": commit} if commit else {}), b"")

    def send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
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
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def use(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process use a Hub, as HF_ENDPOINT and HF_HOME would, with an empty cache and without a token."""
    at(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # vLLM keeps a client with the endpoint of its first use, and lists of files.
    if vllm := sys.modules.get("vllm.transformers_utils.repo_utils"):
        monkeypatch.setattr(vllm, "_hf_api", None)
        vllm.list_repo_files.cache_clear()
