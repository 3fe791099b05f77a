# SPDX-License-Identifier: Apache-2.0
"""`ppd inspect DIR`: what heads these are, for which target, and whether they will load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_ppd.vllm_plugins.quote import quoted


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("inspect", help="describe a heads folder and check it")
    parser.add_argument("folder", metavar="DIR", help="heads folder")
    parser.add_argument("--model", help="target to check against (default: the one that the heads name)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describe, then check as the server would; exit code 2 if it would refuse."""
    from vllm_ppd.heads.checkpoint import WEIGHTS_NAME, HeadsError, check_weights, load_config

    config = load_config(args.folder)
    lines: dict[str, Any] = {"kind": f"{config.kind} ({config.architecture})", "target": config.verifier}
    lines |= {f"target {name}": value for name, value in config.target.model_dump().items()}
    own = config.to_json()
    lines |= {
        name: json.dumps(value)
        for name, value in own.items()
        if name in type(config).model_fields and name not in ("fingerprint", "target", "layer_tensors")
    }
    lines["num_speculative_tokens"] = config.num_speculative_tokens
    check_weights(config, args.folder)
    weights = Path(args.folder) / WEIGHTS_NAME
    numbers = sum(_product(shape) for shape in config.shapes().values())
    lines["weights"] = f"{numbers:,} numbers in {len(config.shapes())} tensors, {weights.stat().st_size / 1e6:.2f} MB"
    lines |= _provenance(Path(args.folder))
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    target = args.model or config.verifier
    try:
        print(f"will load: {_check(config, args.folder, target)}")
    except HeadsError as error:
        print("will load: no")
        raise error
    return 0


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _check(config: Any, folder: str, target: str) -> str:
    """The server's own checks against a target that is on this disk."""
    from transformers import AutoConfig

    from vllm_ppd.heads.checkpoint import check_target
    from vllm_ppd.heads.fingerprint import fingerprint

    try:
        text = AutoConfig.from_pretrained(target, local_files_only=True).get_text_config()
    except (OSError, ValueError):
        return (
            f"the folder is sound; target {quoted(target)} is not on this disk, so it was not compared (give --model)"
        )
    check_target(
        config, folder, hidden_size=text.hidden_size, vocab_size=text.vocab_size,
        num_hidden_layers=text.num_hidden_layers, fingerprint=fingerprint(target),
    )  # fmt: skip
    return f"yes, with {target}"


def _provenance(folder: Path) -> dict[str, str]:
    try:
        facts = json.loads((folder / "provenance.json").read_text())
        return {
            "trained": f"{facts['time']}, {facts['tokens']:,} tokens in {facts['seconds']:.0f} s ({facts['command']})"
        }
    except (OSError, ValueError, KeyError):
        return {}
