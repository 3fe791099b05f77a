# SPDX-License-Identifier: Apache-2.0
"""Requests of a turn, drawn from a seed, as vLLM's load generator reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from vllm_ppd.benchmarks.harness.prompts import load_tokenizer, read_prompts
from vllm_ppd.benchmarks.serve.options import SHORTEST, ServeOptions
from vllm_ppd.heads.data.special_tokens import SpecialTokens


class Workload:
    """Prompts of the data in an order drawn from the seed; lengths of answers are drawn, too.

    Attributes:
        prompts: texts, without the beginning that the server's tokenizer adds to a prompt by itself.
    """

    def __init__(self, options: ServeOptions) -> None:
        """Read the data, unless vLLM reads it.

        Raises:
            BenchError, TrainingError: if a file is missing or malformed, or no prompt fits half of the context.
        """
        self.options = options
        self.prompts: list[str] = []
        if options.dataset is not None:
            return
        trust = options.trust_remote_code
        tokenizer = load_tokenizer(options.tokenizer, trust)
        added = SpecialTokens.of(tokenizer)
        prompts = read_prompts(options.data, options.tokenizer, options.context // 2, None, trust)
        self.prompts = [tokenizer.decode(added.bare(ids)) for ids in prompts]

    def write(self, folder: Path, *seed: int) -> list[str]:
        """The flags of `vllm bench serve` that name the requests of a turn; the same seed gives the same requests.

        Args:
            folder: where a file of them is written.
            seed: of the turn; a prompt comes again after all others.
        """
        options = self.options
        if options.dataset is not None:
            return ["--dataset-name", options.dataset, "--dataset-path", *options.data, "--output-len",
                    str(options.new_tokens)]  # fmt: skip
        rng = np.random.default_rng([options.seed, *seed])
        rounds = [rng.permutation(len(self.prompts)) for _ in range(-(-options.requests // len(self.prompts)))]
        drawn = options.new_tokens * np.exp(options.new_spread * rng.standard_normal(options.requests))
        lengths = np.clip(drawn.astype(int), SHORTEST, options.context // 2).tolist()
        path = folder / "requests.jsonl"
        with path.open("w") as file:
            for prompt, length in zip(np.concatenate(rounds)[: options.requests], lengths, strict=True):
                file.write(json.dumps({"prompt": self.prompts[prompt], "output_tokens": length}) + "\n")
        return ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "-1",
                "--skip-chat-template", "--disable-shuffle"]  # fmt: skip
