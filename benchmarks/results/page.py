# SPDX-License-Identifier: Apache-2.0
"""Write the page of results, and the tables and plots of the documentation, from the files beside this one.

    python -m vllm_ppd.benchmarks.results.page               # refuses results that have become older than the code
    python -m vllm_ppd.benchmarks.results.page --outdated    # lists them in outdated.json, and on the page

NAME.json has the results, NAME.md their title and notes for the reader. A table of README.md or of a file in docs/
is between `<!-- results: NAME -->` and `<!-- end -->`; headlines() has the names.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ppd.benchmarks.acceptance import run as acceptance
from vllm_ppd.benchmarks.decode import table as decode_table
from vllm_ppd.benchmarks.harness.estimates import with_quartiles
from vllm_ppd.benchmarks.harness.results import Measured, stored
from vllm_ppd.benchmarks.results import outdated
from vllm_ppd.benchmarks.results.claims import claims
from vllm_ppd.benchmarks.results.headlines import plots, tables
from vllm_ppd.benchmarks.serve import table as serve_table
from vllm_ppd.heads.in_words import table as markdown

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parent.parent
MARKED = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Section = Callable[[Path, dict[str, Any]], str]  # Markdown from a file's path and content


def page(folder: Path, introduction: str) -> str:
    """The page, with a section per JSON file in the order of SECTIONS; without a NAME.md the name is the title."""
    files = [(path, json.loads(path.read_text())) for path in outdated.results_in(folder)]
    older = outdated.known(folder)
    blocks = [introduction]
    for path, data in sorted(files, key=lambda file: list(SECTIONS.values()).index(_section(file[1]))):
        about = path.with_suffix(".md")
        title, _, note = about.read_text().partition("\n") if about.exists() else (path.stem.replace("_", " "), "", "")
        age = outdated.note(path, older.get(path.stem, {}))
        section = [f"## {title.removeprefix('# ')}", note.strip(), age, _section(data)(path, data)]
        blocks.append("\n\n".join(filter(None, section)) + "\n")
    return "\n".join(blocks)


def _section(data: dict[str, Any]) -> Section:
    return SECTIONS.get(data.get("benchmark", ""), rows)


def headlines(folder: Path) -> dict[str, str]:
    """Tables of documents, by the names that these use."""
    return tables(folder) | {"claims": claims(folder)}


def _source(run: dict[str, Any]) -> str:
    """The command, date and commit of a run."""
    return f"`{quoted(run['command'])}`, {run['time'][:10]}, commit {str(run['git'])[:7]}"


def quoted(command: str) -> str:
    """A stored command as a shell takes it: NAME={JSON} and {JSON} in quotes.

    Older results have the words without quotes.
    """
    if "'" in command:
        return command
    words = []
    for part in re.split(r" (?=--)", command):
        words += _words(part)
    return shlex.join(words)


def _words(part: str) -> list[str]:
    """A flag and its values; each JSON object ends a value, whose name may have spaces."""
    flag, _, rest = part.partition(" ")
    if "{" not in rest:
        return part.split(" ")
    words, depth, begin = [flag], 0, 0
    for at, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if character == "}" and depth == 0:
            words.append(rest[begin : at + 1].strip())
            begin = at + 1
    return words


def _runs(body: Callable[[Measured], str], legend: str) -> Section:
    """The section of a benchmark with turns, from its table."""

    def section(path: Path, data: dict[str, Any]) -> str:
        texts = [
            f"{_source(measured.run)}.\n\n{body(measured)}"
            + "\n\nThe newest run was stopped before its end." * (not measured.run["finished"])
            for measured in stored(path)
        ]
        return "\n\n".join([*texts, legend])

    return section


def acceptances(path: Path, data: dict[str, Any]) -> str:
    everything = stored(path)
    runs = [run for measured in everything for run in (*measured.earlier, measured.run)]
    commands = list(dict.fromkeys(map(_source, runs)))
    return "\n\n".join([*(f"{command}." for command in commands), acceptance.report(everything)])


def rows(path: Path, data: dict[str, Any]) -> str:
    """The section of any other file: its rows as stored."""
    every = data.get("rows", [])
    columns = list(dict.fromkeys(name for row in every for name in row))
    table = markdown(columns, [[_cell(row.get(name)) for name in columns] for row in every])
    facts = [data[key] for key in ("model", "machine") if key in data]
    return f"{', '.join([*facts, _source(data)])}.\n\n{table}" if "command" in data else table


def _cell(value: Any) -> Any:
    """A table cell for a value; lists are medians with quartiles."""
    return "-" if value is None else with_quartiles(value, 2) if isinstance(value, list) else value


# By the value of "benchmark" in a file.
SECTIONS: dict[str, Section] = {
    "decode": _runs(decode_table.body, decode_table.LEGEND),
    "serve": _runs(serve_table.body, serve_table.LEGEND),
    "acceptance": acceptances,
    "rows": rows,
}


def documents() -> list[Path]:
    """The documents that have a table of results."""
    return [
        path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARKED.search(path.read_text())
    ]


def with_tables(document: Path, tables: dict[str, str]) -> str:
    """A document's text with its tables made again.

    Raises:
        SystemExit: if it asks for an unknown table.
    """

    def fill(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise SystemExit(f"{document} asks for results {match[2]!r}; there are {', '.join(tables)}")
        return f"{match[1]}{tables[match[2]]}\n{match[4]}"

    return MARKED.sub(fill, document.read_text())


def main() -> None:
    older, listed = outdated.outdated(RESULTS), outdated.known(RESULTS)
    new = sorted(outdated.names(older) - outdated.names(listed))
    if new and "--outdated" not in sys.argv:
        lines = "\n".join(f"{file}: {name}, of commit {commit}" for file, commit, name in new)
        ways = "measure them again (make evidence), or list them with --outdated"
        sys.exit(f"these results are older than the code; {ways}:\n{lines}")
    if outdated.names(older) != outdated.names(listed):
        (RESULTS / outdated.LIST).write_text(json.dumps(older, indent=1) + "\n")
    for document in documents():
        document.write_text(with_tables(document, headlines(RESULTS)))
    for name, chart in plots(RESULTS).items():
        (RESULTS / "plots" / name).write_text(chart)
    (RESULTS / "README.md").write_text(page(RESULTS, (RESULTS / "introduction.md").read_text()))
    print(f"wrote {RESULTS / 'README.md'}")


if __name__ == "__main__":
    main()
