# SPDX-License-Identifier: Apache-2.0
"""A JSON file of results that survives being stopped: what is measured is on disk before the next thing starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_ppd.heads.training.provenance import provenance


class Entries:
    """Entries by name, with the provenance of each run that added some."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or create the file.

        Raises:
            SystemExit: if it holds results of other settings, which must not be mixed.
        """
        self.path = path
        self.content: dict[str, Any] = {"settings": settings, "runs": [], "entries": {}}
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["settings"] != settings:
                different = sorted(k for k in settings if self.content["settings"].get(k) != settings[k])
                raise SystemExit(f"{path} holds results of other settings ({', '.join(different)}); give another --out")
        self.content["runs"].append(provenance())

    def __contains__(self, name: str) -> bool:
        return name in self.content["entries"]

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Write an entry to disk, replacing one of that name."""
        self.content["entries"][name] = {**entry, "run": len(self.content["runs"]) - 1}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(draft, self.path)
