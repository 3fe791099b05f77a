# SPDX-License-Identifier: Apache-2.0
"""Values for unset options, from the target, the heads and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ppd.vllm_plugins.config.options import DraftingOptions
from vllm_ppd.vllm_plugins.config.refusals import refuse_options
from vllm_ppd.vllm_plugins.config.resolved import DraftingConfig
from vllm_ppd.vllm_plugins.registry import METHODS

if TYPE_CHECKING:
    from vllm_ppd.heads.base import HeadsConfig


# Default number of requests up to which a worker group runs; larger loads fill the
# pipeline with batches.
GROUP_CUT_OFF = 8
SHORTEST_MATCH = 2  # tokens of a lookup
# Defaults of prompt lookup alone
LOOKUP: dict[str, Any] = {
    "prompt_lookup_min": SHORTEST_MATCH,
    "num_speculative_tokens": 5,
    "draft_sample_method": "greedy",  # there is nothing to draw from
}


def resolve(
    options: DraftingOptions,
    num_layers: int,
    heads: HeadsConfig | None = None,
    on_cpu: bool = True,
    learns: bool = False,
) -> DraftingConfig:
    """Fill in values that depend on the target (L layers), the heads and the machine.

    Raises:
        OptionError: if an exit layer is outside 1..L-1 or has no head, if more drafts
            are asked than the heads make, or if options contradict each other.
    """
    given = options.model_fields_set
    method = METHODS[options.method]
    defaults: dict[str, Any] = {}
    # Tokens of a group and unverified tokens are final
    verifies = options.verify and method.stages == 1
    if verifies:
        defaults["prompt_lookup_min"] = SHORTEST_MATCH
    if method.looks_up_alone and not learns:
        defaults = dict(LOOKUP)
    if "exit_layer" in method.options:
        # On a GPU a shallow pass is bound by launches, and fewer layers have fewer
        # launches.
        defaults["exit_layer"] = max(1, num_layers // (2 if on_cpu else 4))
    if heads is not None:
        defaults |= heads.recommended
        if not options.verify:
            # Drafts are the output, which needs the whole vocabulary
            defaults["draft_vocab_size"] = None
        serving = defaults.get("exit_layer")
        if isinstance(serving, list):
            # The best one comes first; only the policy chooses among several
            several = options.adaptive and len(serving) > 1
            defaults["exit_layer"] = sorted(serving) if several else serving[0]
    if method.stages > 1:
        # The stages' split d_bar is at least d/2 (PPD, Theorem 4.1)
        half = (num_layers + 1) // 2
        exits = [
            layer for layer in getattr(heads, "exit_layers", ()) if layer >= half
        ]
        defaults["exit_layer"] = min(exits, default=half)
        # The first stage has a copy of the whole LM head
        defaults["draft_vocab_size"] = None
        defaults["disable_by_batch_size"] = GROUP_CUT_OFF

    values = options.model_dump()
    values |= {
        name: value for name, value in defaults.items() if name not in given
    }
    if (
        heads is not None
        and values["draft_vocab_size"] == heads.target.vocab_size
    ):
        values["draft_vocab_size"] = None
    config = DraftingConfig.model_construct(
        **values
        | {
            "num_layers": num_layers,
            "learns": learns,
            "cuts": method.cuts or bool(getattr(heads, "layers", ())),
            "heads_summary": "" if heads is None else heads.describe(),
            "adaptive": verifies and options.adaptive,
        }
    )
    refuse_options(options, config, heads)
    return config
