# SPDX-License-Identifier: Apache-2.0
"""Requests with a seed emit what they would emit without drafts.

vLLM's rejection sampler draws other random numbers, and more of them, for a token that follows drafts than its sampler
draws for a token that does not, so the output of a request with a seed would depend on which of its steps had drafts:
on its company, on preemptions and on the prefix cache. Here each token of such a request is drawn by vLLM's sampler
from the target's distribution, one draw of the request's generator a token, and a draft is accepted if it is the token
drawn. A draft x is then accepted with probability p(x), as a greedy draft is by the rejection sampler, and the output
is that of vLLM without speculation.

A generator has made as many draws as its request has tokens, so it is set back where vLLM drops the output of a step
whose requests were preempted while it ran, as happens between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

Generators = dict[int, torch.Generator]  # by batch row


class SeededRequests:
    """Mixed into GPUModelRunner or CPUModelRunner (V1)."""

    input_batch: Any
    sampler: Any
    requests: dict[str, Any]
    model_config: Any
    device: Any

    def _update_states(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            request = self.requests[req_id]
            if request.generator is not None and tokens < len(request.output_token_ids):
                request.generator.manual_seed(request.sampling_params.seed)
                advance(request.generator, tokens, self._draw, self._any_logits())
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    @property
    def _draw(self) -> Callable[..., Any]:
        return self.sampler.topk_topp_sampler

    def _any_logits(self) -> torch.Tensor:
        return torch.zeros(1, self.model_config.get_vocab_size(), device=self.device)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        stock = super()._sample  # type: ignore[misc]
        counts = [] if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        generators: Generators = self.input_batch.sampling_metadata.generators
        drafted = {row: generator for row, generator in generators.items() if row < len(counts) and counts[row]}
        if not drafted or logits is None:
            return stock(logits, spec_decode_metadata)
        any_logits = self._any_logits()
        draws = {row: Draws(generator, counts[row], self._draw, any_logits) for row, generator in drafted.items()}
        rejection_sample = rejection_sampler.rejection_sample
        rejection_sampler.rejection_sample = verify(rejection_sample, draws)
        try:
            return stock(logits, spec_decode_metadata)
        finally:
            rejection_sampler.rejection_sample = rejection_sample


def advance(generator: torch.Generator, tokens: int, sample: Callable[..., Any], logits: torch.Tensor) -> None:
    """Have a generator make the draws of some tokens.

    Args:
        generator: of a request.
        tokens: whose draws are made.
        sample: vLLM's TopKTopPSampler, which draws.
        logits: [1, vocabulary] any: what is drawn depends on their number alone.
    """
    for _ in range(tokens):
        sample(logits.clone(), {0: generator}, None, None)


class Draws:
    """The draws of a request's generator in a step, one for each draft and one for the token behind them.

    The generator is advanced to the last of them, which vLLM's sampler takes before drafts are verified.

    Args:
        generator: of the request.
        drafts: of the request in this step.
        sample: vLLM's TopKTopPSampler, (logits, generators, top-k, top-p) -> (token IDs, logits or None).
        logits: [1, vocabulary] any; see advance.
    """

    def __init__(
        self, generator: torch.Generator, drafts: int, sample: Callable[..., Any], logits: torch.Tensor
    ) -> None:
        self.generator, self.sample = generator, sample
        self._states = [generator.get_state()]  # before each draw
        for _ in range(drafts):
            advance(generator, 1, sample, logits)
            self._states.append(generator.get_state())

    def tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """The tokens drawn at the drafts' positions.

        Args:
            logits: [drafts, vocabulary] of the target, with the request's temperature, top-k and top-p applied.
        """
        last = self.generator.get_state()
        self.generator.set_state(self._states[0])
        sampled, _ = self.sample(logits.clone(), dict.fromkeys(range(len(logits)), self.generator), None, None)
        self._states.append(last)
        return sampled

    def end(self, emitted: int) -> None:
        """Leave the generator behind the draws of the tokens that the request emits."""
        self.generator.set_state(self._states[emitted])


def verify(rejection_sample: Callable[..., torch.Tensor], draws: dict[int, Draws]) -> Callable[..., torch.Tensor]:
    """vLLM's rejection_sample, in which the requests of some batch rows accept the drafts that they would have drawn.

    Args:
        rejection_sample: vLLM's.
        draws: of these requests, by batch row.
    """

    def rejection_sample_seeded(
        draft_token_ids: torch.Tensor,  # [drafts]
        num_draft_tokens: list[int],  # by batch row
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,  # [drafts, vocabulary]
        bonus_token_ids: torch.Tensor,  # [requests, 1]
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        ends = torch.tensor(num_draft_tokens).cumsum(0).tolist()
        places = {row: slice(ends[row] - num_draft_tokens[row], ends[row]) for row in draws}
        sampled = {row: draws[row].tokens(target_logits[place]) for row, place in places.items()}
        # What it draws from these requests' generators is taken back by Draws.end.
        output = rejection_sample(
            draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
            bonus_token_ids, *args, **kwargs,
        )  # fmt: skip
        for row, place in places.items():
            matching = (sampled[row] == draft_token_ids[place]).cumprod(0)
            emitted = int(matching.sum()) + 1
            tokens = torch.cat([sampled[row], bonus_token_ids[row].to(sampled[row].dtype)])
            output[row] = rejection_sampler.PLACEHOLDER_TOKEN_ID
            output[row, :emitted] = tokens[:emitted].to(output.dtype)
            draws[row].end(emitted)
        return output

    return rejection_sample_seeded
