# SPDX-License-Identifier: Apache-2.0
"""Write the page of results, its plots, and the tables of the documentation, from the files beside this one.

    python -m vllm_ppd.benchmarks.results.page

NAME.json has the results, NAME.md their title and what a reader should know. A table of README.md or of a file in docs/
stands between `<!-- results: NAME -->` and `<!-- end -->`; sections.headlines has the names.
"""

from __future__ import annotations

import re
from pathlib import Path

from vllm_ppd.benchmarks.results import drawing
from vllm_ppd.benchmarks.results.sections import Section, all_sections, headlines

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent.parent
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """Those that have a table of results."""
    return [
        path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARKED.search(path.read_text())
    ]


def page(sections: list[Section], introduction: str) -> str:
    """The page: a section a file of results."""
    blocks = [introduction]
    for section in sections:
        plots = [f"![{section.title}]({path})" for path in section.plots]
        blocks.append("\n\n".join(filter(None, [f"## {section.title}", section.note, *plots, section.text])) + "\n")
    return "\n".join(blocks)


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
    sections, tables = all_sections(RESULTS), headlines(RESULTS)
    for document in documents():
        document.write_text(with_tables(document, tables))
    (RESULTS / "README.md").write_text(page(sections, (RESULTS / "introduction.md").read_text()))
    plots = {path: plot for section in sections for path, plot in section.plots.items()}
    (RESULTS / "plots").mkdir(exist_ok=True)
    for old in (RESULTS / "plots").glob("*.svg"):
        if f"plots/{old.name}" not in plots:
            old.unlink()
    for path, plot in plots.items():
        (RESULTS / path).write_text(drawing.svg(plot))
    print(f"wrote {RESULTS / 'README.md'} and {len(plots)} plots")


if __name__ == "__main__":
    main()
