# SPDX-License-Identifier: Apache-2.0
"""Commands that measure files of results anew, where the one that is kept with them is of an older edition."""

from __future__ import annotations

_LOOP = "--model build/inflated100/model --heads build/inflated100/heads/* --data build/corpus/validation.jsonl"
_RESULTS = "benchmarks/results"
_COMMANDS = {
    "closed_loop": f"ppd bench closed-loop {_LOOP} --plain none --steps 12 --warm-up 48 --rounds 2",
    "open_loop": f"ppd bench open-loop {_LOOP} --requests 24",
    "plan_check": f"decode.plan_check {_RESULTS}/plan_check.turns.json",
    "step_breakdown_early": "decode.step_breakdown --methods early --batch 1 8 --turns 6",
    "step_breakdown_heads": "decode.step_breakdown --methods cp dynamo --layers 24 --hidden 1024 --vocab 32768 "
    "--turns 6 --steps 20",
}
AGAIN = {
    name: ("" if command.startswith("ppd ") else "python -m vllm_ppd.benchmarks.")
    + f"{command} --out {_RESULTS}/{name}.json"
    for name, command in _COMMANDS.items()
}
