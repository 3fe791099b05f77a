# SPDX-License-Identifier: Apache-2.0
"""Write the page of results, its plots, and the tables of the documentation, from the JSON files beside this one.

    python -m vllm_ppd.benchmarks.results.page
    python -m vllm_ppd.benchmarks.results.page --png /tmp/plots     # the plots alone, to look at

A table of README.md or of a file in docs/ stands between `<!-- results: NAME -->` and `<!-- end -->`, NAME.json being
where it comes from.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from vllm_ppd.benchmarks.results import drawing, sections

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent.parent
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
INTRODUCTION = """\
# Results

Made by `python -m vllm_ppd.benchmarks.results.page` from the JSON files in this folder, which have every turn, the
versions and the settings. Ratios are of turns in the same round; machines differ, and so do models: each section says
its own.
"""


def documents() -> list[Path]:
    """Those that have a table of results."""
    return [
        path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARKED.search(path.read_text())
    ]


def contents(made: list[sections.Section]) -> dict[str, str]:
    """What the page and the plots hold, by path under the folder of results."""
    pages = [INTRODUCTION]
    found: dict[str, str] = {}
    for section in made:
        blocks = [f"## {section.title}"]
        for number, plot in enumerate(section.plots):
            path = f"plots/{_name(section, number)}.svg"
            found[path] = drawing.svg(plot)
            blocks.append(f"![{section.title}]({path})")
        blocks.append(section.text)
        pages.append("\n\n".join(blocks) + "\n")
    found["README.md"] = "\n".join(pages)
    return found


def _name(section: sections.Section, number: int) -> str:
    return section.name + (f"-{number + 1}" if len(section.plots) > 1 else "")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write the plots there as PNG, and nothing else")
    args = parser.parse_args()
    made = sections.all_sections(RESULTS)
    if args.png is not None:
        args.png.mkdir(parents=True, exist_ok=True)
        for section in made:
            for number, plot in enumerate(section.plots):
                drawing.png(plot, args.png / f"{_name(section, number)}.png")
        return
    tables = all_tables(made, RESULTS)
    for document in documents():
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
