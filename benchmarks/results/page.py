# SPDX-License-Identifier: Apache-2.0
"""Write the page of results, its plots, and the tables of the README, from the JSON files beside this one.

    python benchmarks/results/page.py

A table of the README stands between `<!-- results: NAME -->` and `<!-- end -->`, NAME.json being where it comes from.
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
README = RESULTS.parent.parent / "README.md"
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
INTRODUCTION = """\
# Results

Made by `python benchmarks/results/page.py` from the JSON files in this folder, which have every turn, the versions and
the settings. Ratios are of turns in the same round; machines differ, and so do models: each section says its own.
"""


def contents(results: Path, readme: str) -> dict[str, str]:
    """What the page and the plots hold, by path under the folder of results, and under "README" the README rewritten.

    Raises:
        SystemExit: if the README asks for a table that is not there.
    """
    made = sections.all_sections(results)
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
    tables = {section.name: section.table for section in made}

    def fill(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise SystemExit(f"{README} asks for results {match[2]!r}; there are {', '.join(tables)}")
        return f"{match[1]}{tables[match[2]]}\n{match[4]}"

    found["README"] = MARKED.sub(fill, readme)
    return found


def main() -> None:
    made = contents(RESULTS, README.read_text())
    README.write_text(made.pop("README"))
    (RESULTS / "plots").mkdir(exist_ok=True)
    for old in (RESULTS / "plots").glob("*.svg"):
        if f"plots/{old.name}" not in made:
            old.unlink()
    for path, text in made.items():
        (RESULTS / path).write_text(text)
        print(f"wrote {RESULTS / path}")


if __name__ == "__main__":
    main()
