# SPDX-License-Identifier: Apache-2.0
"""Write the page of results, its plots, and the tables of the documentation, from the JSON files beside this one.

    python benchmarks/results/page.py

A table of the README or of docs/speeds.md stands between `<!-- results: NAME -->` and `<!-- end -->`, NAME.json being
where it comes from.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import plots
import sections

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "speeds.md")
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
INTRODUCTION = """\
# Results

Made by `python benchmarks/results/page.py` from the JSON files in this folder, which have every turn, the versions and
the settings. Ratios are of turns in the same round; machines differ, and so do models: each section says its own.
"""


def contents(made: list[sections.Section]) -> dict[str, str]:
    """What the page and the plots hold, by path under the folder of results."""
    pages = [INTRODUCTION]
    found: dict[str, str] = {}
    for section in made:
        blocks = [f"## {section.title}"]
        for number, plot in enumerate(section.plots):
            path = f"plots/{section.name}{f'-{number + 1}' if len(section.plots) > 1 else ''}.svg"
            found[path] = plots.svg(plot)
            blocks.append(f"![{section.title}]({path})")
        blocks.append(section.text)
        pages.append("\n\n".join(blocks) + "\n")
    found["README.md"] = "\n".join(pages)
    return found


def all_tables(made: list[sections.Section], results: Path) -> dict[str, str]:
    """The tables that a document may ask for."""
    return {section.name: section.table for section in made} | sections.headlines(results)


def with_tables(document: Path, tables: dict[str, str]) -> str:
    """A document's text, its tables made anew.

    Raises:
        SystemExit: if it asks for a table that is not there.
    """

    def fill(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise SystemExit(f"{document} asks for results {match[2]!r}; there are {', '.join(tables)}")
        return f"{match[1]}{tables[match[2]]}\n{match[4]}"

    return MARKED.sub(fill, document.read_text())


def main() -> None:
    made = sections.all_sections(RESULTS)
    tables = all_tables(made, RESULTS)
    for document in DOCUMENTS:
        document.write_text(with_tables(document, tables))
    files = contents(made)
    (RESULTS / "plots").mkdir(exist_ok=True)
    for old in (RESULTS / "plots").glob("*.svg"):
        if f"plots/{old.name}" not in files:
            old.unlink()
    for path, text in files.items():
        (RESULTS / path).write_text(text)
        print(f"wrote {RESULTS / path}")


if __name__ == "__main__":
    main()
