# SPDX-License-Identifier: Apache-2.0
"""The page of results is what its command makes of the committed files, and shows each file by its schema."""

import json
import shlex
from pathlib import Path

from vllm_ppd.benchmarks.decode.options import DecodeOptions
from vllm_ppd.benchmarks.decode.table import body
from vllm_ppd.benchmarks.harness.contenders import BASE, contenders
from vllm_ppd.benchmarks.harness.results import Results
from vllm_ppd.benchmarks.results import outdated, page
from vllm_ppd.benchmarks.results.headlines import plots


def test_committed_page_is_what_the_command_makes() -> None:
    hint = "run python -m vllm_ppd.benchmarks.results.page"
    for document in page.documents():
        made = page.with_tables(document, page.headlines(page.RESULTS))
        assert made == document.read_text(), f"{document} is old; {hint}"
    for name, chart in plots(page.RESULTS).items():
        assert (page.RESULTS / "plots" / name).read_text() == chart, f"{name} is old; {hint}"
    made = page.page(page.RESULTS, (page.RESULTS / "introduction.md").read_text())
    assert made == (page.RESULTS / "README.md").read_text(), f"the page is old; {hint}"


def test_results_that_are_older_than_the_code_are_listed() -> None:
    """A change to code that results were measured with lists them, or measures them again."""
    now, listed = (outdated.names(of(page.RESULTS)) for of in (outdated.outdated, outdated.known))
    hint = "measure again (make evidence), or run python -m vllm_ppd.benchmarks.results.page --outdated"
    assert now == listed, f"{sorted(now ^ listed)}: {hint}"


def test_a_note_about_turns_of_the_same_work(tmp_path: Path) -> None:
    """Two contenders on an engine that always drafted differ by noise, which the table tells; others do not."""
    also = ('cp={"method": "ppd"}', 'cp, all drafts={"shares": "cp", "adaptive": false}')
    options = DecodeOptions(model="m", data=("d",), plain="none", out=str(tmp_path / "speeds.json"), also=also)
    results = Results(options, contenders(options))
    counts = ("accepted_tokens", "same_tokens", "compared_tokens", "repeated_4_grams", "all_4_grams")
    for name, seconds in ((BASE, 1.0), ("cp", 0.5), ("cp, all drafts", 0.4)):
        results.add({
            "contender": name, "batch": 2, "group": 0, "round": 0, "window_tokens": 20, "steps": 10, "peak_bytes": 5,
            "window_seconds": seconds, "step_seconds": 0.1, "worker_seconds": None, "draft_seconds": None,
            "drafts": 20, "draft_tokens": 60, **dict.fromkeys(counts, 9),
        })  # fmt: skip
    told = '"cp" and "cp, all drafts" both drafted in every step, on the same engine: they differ by up to 25%'
    assert told in body(results)
    results.run["turns"][1]["drafts"] = 19
    assert told not in body(results)


def test_commands_can_be_pasted() -> None:
    for path in outdated.results_in(page.RESULTS):
        data = json.loads(path.read_text())
        for run in data.get("runs", [data]):
            words = shlex.split(page.quoted(run["command"]))
            assert " ".join(words) == run["command"]
            for word in (word for word in words if "{" in word):
                json.loads(word[word.index("{") :])
    assert page.quoted("ppd --also 'a b={}' --x") == "ppd --also 'a b={}' --x"


def test_results_of_older_code_say_so(tmp_path: Path) -> None:
    options = DecodeOptions(model="model", data=("d",), plain="none", out=str(tmp_path / "speeds.json"))
    results = Results(options, contenders(options))
    results.add({"contender": BASE, "batch": 1})
    assert outdated.outdated(tmp_path) == {}
    results.run["contenders"][BASE]["sources"]["digest"] = "of older code"
    results.write()
    ((commit, of_commit),) = outdated.outdated(tmp_path)["speeds"].items()
    assert of_commit["contenders"] == [BASE] and commit == results.run["git"][:7]
    assert f"measured at commit {commit};" in outdated.note(Path(options.out), {commit: of_commit})
