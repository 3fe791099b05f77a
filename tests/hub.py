# SPDX-License-Identifier: Apache-2.0
"""A small Hub on the loopback interface: repositories with revisions, private ones among
them.
"""

import hashlib
import json
import re
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
from huggingface_hub.utils import disable_progress_bars

TOKEN = "hf_of_the_tests"
PATH = re.compile(
    r"(?:/api/models)?/([^/]+/[^/]+)(?:/(resolve|revision|tree)/([^/]+)(?:/(.*))?)?"
)


class Hub:
    """Repositories by name and revision; `requests` has the file of each request."""

    def __init__(self) -> None:
        # By repository and a branch, a tag or a commit: the commit and its folder
        self.folders: dict[tuple[str, str], tuple[str, Path]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []

    def add(self, repo: str, folder: Path, revision: str = "main") -> None:
        commit = hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()
        for name in (revision, commit):
            self.folders[repo, name] = (commit, folder)

    def commit(self, repo: str, revision: str) -> str:
        return self.folders[repo, revision][0]

    def answer(
        self, path: str, token: str | None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        match = PATH.fullmatch(path)
        assert match is not None, path
        repo, verb, revision, file = match.groups()
        self.requests.append(file)
        is_allowed = repo not in self.private or token == f"Bearer {TOKEN}"
        if not is_allowed or repo not in {name for name, _ in self.folders}:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if (repo, revision or "main") not in self.folders:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit, folder = self.folders[repo, revision or "main"]
        headers = {"X-Repo-Commit": commit}
        if verb == "resolve":
            if not (folder / file).is_file():
                return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
            data = (folder / file).read_bytes()
            return 200, headers | {"ETag": hashlib.sha256(data).hexdigest()}, data
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file()
        }
        content: Any = {
            "id": repo,
            "sha": commit,
            "siblings": [{"rfilename": name} for name in sizes],
        }
        if verb == "tree":
            content = [
                {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                for name, size in sizes.items()
            ]
        return 200, headers, json.dumps(content).encode()


@contextmanager
def running_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process uses, as HF_ENDPOINT and HF_HOME would have it, with an
    empty cache and without a token.
    """
    hub = Hub()
    disable_progress_bars()  # so that a refusal stands alone

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            authorization = self.headers.get("Authorization")
            status, headers, body = hub.answer(path, authorization)
            self.send_response(status)
            for name, value in (
                headers | {"Content-Length": str(len(body))}
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # vLLM keeps a client with the endpoint of its first use, and lists of files.
    if vllm := sys.modules.get("vllm.transformers_utils.repo_utils"):
        monkeypatch.setattr(vllm, "_hf_api", None)
        vllm.list_repo_files.cache_clear()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
