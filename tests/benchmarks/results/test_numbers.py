# SPDX-License-Identifier: Apache-2.0
"""Numbers in README, docs and CHANGELOG: what was measured is made of results, and the rest has a source."""

import re

import pytest
from conftest import ROOT

from vllm_ppd.benchmarks.results.page import MARKED

DOCUMENTS = ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
ENDS = {
    "CHANGELOG.md": "## First edition",
    "docs/papers.md": "## Coverage of the papers",
}  # test_papers.py reads the rest
NUMBER = r"\d+(?:\.\d+)?"
UNITS = "x|%|times as|ms|s|seconds?|minutes|hours|tokens/s|tokens a second|microseconds|milliseconds"
MEASURED = re.compile(rf"(?<![\w.`])\d[\d,]*(?:\.\d+)?\s?(?:{UNITS})(?![\w-])|(?<![\w.])\d\.\d{{3}}(?![\w.])")

# Settings that look measured, and the file that says so; EXAMPLE is a line of a log.
EXAMPLE = "docs/getting-started.md"
SOURCES: dict[str, dict[str, str]] = {
    "docs/getting-started.md": {
        "50% [####": EXAMPLE,
        "50 % of 60 minutes": EXAMPLE,
        "step costs measured in 2.5 s": EXAMPLE,
        "1 request 6.7 ms": EXAMPLE,
        "block found in 60 seconds": EXAMPLE,
    },
    "docs/heads.md": {
        "| data | 50 % |": "heads/fitting/state.py",
        "| training | 35 % |": "heads/fitting/state.py",
        "| calibration | 13 % |": "heads/fitting/state.py",
        "| plan | 2 % |": "heads/fitting/state.py",
        "accepted (by 0.1 %)": "heads/training/options.py",
    },
    "docs/methods.md": {
        "99 % of the text": "heads/draft_vocabulary.py",
        "less than 1 % of the tokens": "tests/unit/plugin/test_scheduled_drafts.py",
    },
}  # fmt: skip


def text_of(document: str) -> str:
    """A document's lines in one, without what is made of results, and without what other tests read."""
    text = (ROOT / document).read_text().partition(ENDS.get(document, "\0"))[0]
    return " ".join(MARKED.sub("", text).split())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_number_has_a_source(document: str) -> None:
    text = text_of(document)
    for phrase, source in SOURCES.get(document, {}).items():
        assert phrase in text, f"{document} no longer says {phrase!r}"
        said = set(re.findall(NUMBER, (ROOT / source).read_text()))
        for number in re.findall(NUMBER, phrase):
            assert {number, f"{float(number) / 100:g}"} & said, (
                f"{document}: {source} does not say {number} of {phrase!r}"
            )
        text = text.replace(phrase, "")
    left = [text[max(0, match.start() - 60) : match.end() + 20] for match in MEASURED.finditer(text)]
    assert not left, f"{document}: {left}: make a table of results of it (results/headlines.py), or name its source"
