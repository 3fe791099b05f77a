# SPDX-License-Identifier: Apache-2.0
"""`ppd train early|cp|dynamo`: from a model and text to a heads folder that vLLM can serve."""

from __future__ import annotations

import argparse
import os
from typing import Any

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.vllm_plugins.cli.arguments import add_fields, options_from


def add(subparsers: Any) -> None:
    subparsers.add_parser(
        "train", help="train heads", description="Train heads for a target model.", add_arguments=_add_arguments
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_ppd.heads.kinds import KINDS

    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{" + ",".join(KINDS) + "}")
    for kind, config in KINDS.items():
        options = config.options
        description = (options.__doc__ or "").strip().replace("%", "%%")
        sub = kinds.add_parser(kind, help=description.split(": ", 1)[-1], description=description)
        add_fields(sub, options)
        sub.add_argument(
            "--ray-workers", type=int, default=0, metavar="N", help="train in N processes of a Ray cluster (Ray Train)"
        )
        sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_ppd.heads.kinds import KINDS

    options = options_from(KINDS[args.kind].options, args)
    check_data(options.data)  # torch takes seconds to import

    from vllm_ppd.heads.training.loop import train

    if args.ray_workers:
        from vllm_ppd.heads.training.parallel import over_ray

        over_ray(train, options, args.ray_workers)
    else:
        facts = train(options)
        if int(os.environ.get("RANK", "0")):  # torchrun and accelerate start as many of us as there are GPUs
            return 0
        _show(facts)
    print(f"wrote {options.out}: `ppd inspect {options.out}` describes it, `ppd calibrate` measures it")
    return 0


def _show(facts: dict[str, Any]) -> None:
    from vllm_ppd.heads.in_words import in_words

    print(f"{facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds']:.0f} s; held out, before -> after:")
    for name, after in facts["held_out_after"].items():
        print(f"  {name}: {in_words(facts['held_out_before'].get(name))} -> {in_words(after)}")
