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
versions and the settings; [Benchmarking](../../docs/benchmarking.md) describes how speeds are measured. Ratios are of
turns in the same round. Machines and models differ: each section names its own, with command and commit. Commits up
to 14afcf8 are of the first edition, which chose the number of drafts and ran DynaMo's layers in other ways: what they
show of adaptive drafting holds for that edition. Models and heads are made by `make inflated` and `make bytes`;
"vLLM, again" is a second engine of vLLM alone, so what it differs by is noise.
"""
# What a reader should know of a section, by the name of its file.
NOTES = {
    "decode": (
        "Adaptive drafting is on. Medusa, EAGLE and the draft model were trained on the same texts. The text is "
        "Python and repeats itself, and greedy text of a small model does so even more, which favours every "
        "lookup. Batches of 8 keep two cores busy without drafts: contenders that draft regardless lose there."
    ),
    "smollm_decode": (
        "SmolLM2-135M-Instruct on prompts of Spec-Bench (256 of up to 256 tokens, as token IDs), runner V1, compiled; "
        "adaptive drafting is on. EAGLE was trained on a third of what `cp` was trained on."
    ),
    "gpu_decode": (
        "SmolLM2-135M-Instruct with its hidden size times 6 (`python -m vllm_ppd.benchmarks.models.inflate --model "
        "build/smollm/model --parameters 4B --out build/smollm-4b`), 256 prompts of Spec-Bench of up to 256 tokens as "
        "token IDs. Engines start together (`--alive 12 --together`). Of each batch two rounds: the spread of a cell "
        "is that of two turns, and `cp, again` is `cp`. **At this commit drafting on vLLM 0.32 was scheduled "
        "synchronously, vLLM alone asynchronously**: a step with drafts waits for the host. No method gained. Since "
        "then runner V2 schedules asynchronously here, too, which has not been measured yet. `early` has fewer equal "
        "tokens than the others, since its two stacks are compiled apart from the whole model and bfloat16 rounds "
        "otherwise between them. A CPU shows the same: of greedy texts of SmolLM2 in bfloat16 it keeps 100 % without "
        "compilation, and compiled 81 % at batch 1 and 58 % at 4, `cp` 96, 100, 90 and 100 % (`ppd bench decode --also "
        "... --batch-sizes 1,4 --rounds 3 --new-tokens 96 --dtype bfloat16`, `--eager` and without, commit dfc5ed1)."
    ),
    "gpu_acceptance": (
        "192 of the prompts, in float32 without TF32 (`TRITON_F32_DEFAULT=ieee`): runner V1 without compilation, "
        "runner V2 compiled and with CUDA graphs. vLLM alone says the same on both runners, on 192 of 192. Early "
        "drafting on V2 with CUDA graphs and Triton attention gave wrong output at this commit (fixed since, not run "
        "on a GPU again); without graphs its tests passed on this GPU."
    ),
    "closed_loop": (
        "Where drafts do not pay, an engine with heads is slower than vLLM alone by its host's work in a step "
        "without drafts and by its exploration. Both weigh most on a small model whose heads hardly pay, as here."
        " Two processes were measured: temperature 1 at batches of 2 and more had other work beside it, which the"
        " engines of vLLM alone show."
    ),
    "open_loop": (
        "At four requests a second requests begin to queue, and a small difference in computing time becomes a "
        "larger one in waiting. Latency is less certain than its interval says: an engine that is a little later "
        "takes a prompt in with the next one."
    ),
    "soak": (
        "The demo model in float32 and its heads, runner V1, compiled, two cores; the requests and what is compared: "
        "[Benchmarking](../../docs/benchmarking.md#ten-thousand-requests). Grown: MiB that the memory of the engine's "
        "processes grew in the second half; spread: between the smallest and the largest sample there."
    ),
    "serve": "Greedy, the demo model of bytes, two rounds of 8 requests at each load.",
    "plan_check": 'Drafts are made in every step. "Length" counts texts as equally long, as the calibration does.',
    "group": (
        "The base is vLLM's own two stages. The theorem assumes that two stages computing at once are each as "
        'fast as alone; here they share the machine\'s memory ("stage slowed"). The second run shared the cores '
        "with other work."
    ),
    "acceptance": (
        "`cp` is the head of this repository, trained on 3.2 million tokens. All others saw the first million of "
        "these, `cp, 1M tokens` among them, which this repository had up to commit b483c9f. `+ lookup` looks drafts up "
        "first (`prompt_lookup_min` 2, three drafts). All drafts of a step are of one source: with `adaptive: false` "
        "it takes them only where each request of the batch, 16 here, has one, which is seldom."
    ),
    "cp_conditions": (
        "52 of the prompts, the 13 categories in turns. `none-r1`, `token-r1`, `chain-r1` and `none-r3`: one pass over "
        "a million tokens and a quarter of the positions ([commands](../smollm/README.md#what-a-cp-head-reads)), "
        "drafts from 8,192 tokens. `chain-r3` is `cp, 1M tokens` above: three such passes, drafts from 3,072."
    ),
    "tables": (
        'The demo model inflated, on texts ("given data"). These tables are of an edition before tasks had names: '
        "compute / greedy of PPD's Table 3 followed from the match rate and was not counted, its Tables 7 and 8 are of "
        "the same texts, and (C) in DynaMo's Table 10 is a copied layer at the heads' own rate."
    ),
    "tables_smollm": (
        "`ppd bench tables --model build/smollm/model --task spec-bench=FILE gsm8k=FILE chats=FILE --prompts 26 "
        "--new-tokens 64 --longest 512 --rounds 4 --batch 8` with our early heads, DynaMo's and CP's "
        "`none-r1` and `none-r3` ([commands](../smollm/README.md)); chats: 32 that the target wrote and no head was "
        "trained on. Other work ran beside it, so speeds (PPD 3, ParaDecode 1 and Fig. 6, CP 1 and 3, DynaMo 4) are "
        "rough; engines are compiled and bfloat16, where near-ties may round differently."
    ),
    "cp_from_scratch": (
        "CP, section 3.1, at a small size: Llamas of 4 layers and 345,024 parameters over bytes "
        "(`train --vocabulary 257 --layers 4 --hidden 96 --steps 0`), 123K tokens of the standard library each. The "
        "joint loss falls with the rank and the next token's hardly changes, as in the paper's Figure 2. So young a "
        "model knows little more than how frequent bytes are, and so do its drafts: the accepted ones (of three) say "
        "nothing of the paper's +30 %. Rank 8 with whole classifiers was not trained."
    ),
    "cp_balance": (
        "As above, rank 8, 31K tokens each; cp-scratch-8 has the default of 0.1. With 0 and 0.01 one expert serves all "
        "tokens. After so few tokens the joint losses do not tell the weights apart."
    ),
    "cp_jointly": (
        "The base model of rank 1 from scratch, above, trained on for 41K tokens with a head of each rank and form."
    ),
    "group_cut_off": "Above its cut-off a worker group is vLLM's own pipeline.",
    "step_breakdown_early": (
        "The formula leaves out the reads of the LM head at the exit. At batch 8 this processor is compute-bound."
    ),
    "step_breakdown_heads": "The heads are random: what they cost does not depend on their output.",
}


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
        if section.name in NOTES:
            blocks.append(NOTES[section.name])
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
