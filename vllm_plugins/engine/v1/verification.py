# SPDX-License-Identifier: Apache-2.0
"""Changes to vLLM's V1 runners that verify drafts: steps without drafts, seeds, and chosen logprobs.

**Steps without any draft** are prepared as in an engine without speculation. vLLM computes metadata of drafts, and runs
its rejection sampler, in every step of a speculative engine, since models with a recurrent state need that. It takes a
twentieth of a small model's step, so other models skip it.

**Requests with a seed** emit what they would emit without drafts. vLLM's rejection sampler draws other random numbers,
and more of them, for a token that follows drafts than its sampler draws for a token that does not, so the output of a
request with a seed would depend on which of its steps had drafts, so on other requests, preemptions and the prefix
cache. Here each token of such a request is drawn by vLLM's sampler from the target's distribution, one draw of the
request's generator a token, and a draft is accepted if it is the token drawn. A draft x is then accepted with
probability p(x), as a greedy draft is by the rejection sampler, and the output is that of vLLM without speculation. A
generator has made as many draws as its request has tokens, so it is set back where vLLM drops the output of a step
whose requests were preempted while it ran, as happens between pipeline stages.

**Log-probabilities of chosen tokens** (`logprob_token_ids` of a request) are returned in steps that verify drafts, too.
vLLM's V1 sampler returns them instead of the most likely tokens of every other request in the batch, and its rejection
sampler does not return them at all, or fails on their shape. Here each request gets its own: the samplers are asked for
the most likely tokens of every row, and the rows of such a request are filled with the tokens that it chose.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

from vllm_ppd.vllm_plugins.engine.temporary import temporarily


class Verification:
    """Mixed into GPUModelRunner or CPUModelRunner (V1)."""

    speculative_config: Any
    input_batch: Any
    sampler: Any  # vLLM's; its rejection sampler also gathers through it
    requests: dict[str, Any]
    model_config: Any
    device: Any

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        prepare = super()._prepare_inputs  # type: ignore[misc]
        drafts = bool(scheduler_output.scheduled_spec_decode_tokens)
        budgets = self.input_batch.thinking_budget_state_holder
        if budgets is not None:
            budgets.in_spec_mode = drafts  # without drafts a step has one row of logits per request
        if drafts or self.model_config.has_inner_state:
            return prepare(scheduler_output, *args, **kwargs)
        with temporarily(self, speculative_config=None):
            return prepare(scheduler_output, *args, **kwargs)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None  # we enforce length limits per request

    def _update_states(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            request = self.requests[req_id]
            if request.generator is not None and tokens < len(request.output_token_ids):
                request.generator.manual_seed(request.sampling_params.seed)
                advance(request.generator, tokens, self.sampler.topk_topp_sampler, self._any_logits())
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        counts = [] if spec_decode_metadata is None or logits is None else spec_decode_metadata.num_draft_tokens
        with self._gathering_chosen_tokens(), self._drawing_with_seeds(counts):
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]

    @contextmanager
    def _drawing_with_seeds(self, counts: Sequence[int]) -> Iterator[None]:
        """Let requests with a seed accept the drafts that they would have drawn; counts of drafts by batch row."""
        generators: dict[int, torch.Generator] = self.input_batch.sampling_metadata.generators
        drafted = {row: generator for row, generator in generators.items() if row < len(counts) and counts[row]}
        if not drafted:
            yield
            return
        draw, any_logits = self.sampler.topk_topp_sampler, self._any_logits()
        draws = {row: Draws(generator, counts[row], draw, any_logits) for row, generator in drafted.items()}
        with temporarily(rejection_sampler, rejection_sample=verify(rejection_sampler.rejection_sample, draws)):
            yield

    @contextmanager
    def _gathering_chosen_tokens(self) -> Iterator[None]:
        """Let the samplers return the log-probabilities of the tokens that requests chose."""
        metadata = self.input_batch.sampling_metadata
        chosen = metadata.logprob_token_ids
        if not chosen:
            yield
            return
        requests, gather = self.input_batch.num_reqs, self.sampler.gather_logprobs

        def gather_chosen(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
            gathered = gather(logprobs, num_logprobs, token_ids)
            fill(gathered, logprobs, chosen, len(logprobs) // requests)
            return gathered

        columns = max(metadata.max_num_logprobs or 0, *map(len, chosen.values()))
        widened = dataclasses.replace(metadata, logprob_token_ids=None, max_num_logprobs=columns)
        with (
            temporarily(self.sampler, gather_logprobs=gather_chosen),
            temporarily(self.input_batch, sampling_metadata=widened),
        ):
            yield

    def _any_logits(self) -> torch.Tensor:
        return torch.zeros(1, self.model_config.get_vocab_size(), device=self.device)


def advance(generator: torch.Generator, tokens: int, sample: Callable[..., Any], logits: torch.Tensor) -> None:
    """Advance a generator by the draws of some tokens.

    Args:
        generator: of a request.
        tokens: whose draws are made.
        sample: vLLM's TopKTopPSampler, which draws.
        logits: [1, vocabulary], arbitrary: the random numbers depend only on the size.
    """
    for _ in range(tokens):
        sample(logits.clone(), {0: generator}, None, None)


class Draws:
    """The draws of a request's generator in a step, one for each draft and one for the token after them.

    The generator is advanced to the last draw, which vLLM's sampler makes before drafts are verified.

    Args:
        generator: of the request.
        drafts: of the request in this step.
        sample: vLLM's TopKTopPSampler, (logits, generators, top-k, top-p) -> (token IDs, logits or None).
        logits: [1, vocabulary], arbitrary; see advance.
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
        """Set the generator to after the draws of the tokens that the request emits."""
        self.generator.set_state(self._states[emitted])


def verify(rejection_sample: Callable[..., torch.Tensor], draws: dict[int, Draws]) -> Callable[..., torch.Tensor]:
    """vLLM's rejection_sample, except that requests of some batch rows accept the drafts that they would have drawn.

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
        # Draws.end restores these requests' generators afterwards.
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


def fill(gathered: Any, logprobs: torch.Tensor, chosen: Mapping[int, Sequence[int]], rows_each: int) -> None:
    """Write the chosen tokens of some requests into vLLM's LogprobsTensors, after the sampled token.

    Args:
        gathered: token ids and log-probabilities, [requests * rows_each, 1 + columns] each; changed in place.
        logprobs: [requests * rows_each, vocabulary].
        chosen: batch row of a request -> its tokens, at most as many as there are columns.
        rows_each: rows of logits a request.
    """
    for request, tokens in chosen.items():
        rows = slice(request * rows_each, (request + 1) * rows_each)
        ids = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)
        gathered.logprob_token_ids[rows, 1 : 1 + len(tokens)] = ids.to(gathered.logprob_token_ids.dtype)
        gathered.logprobs[rows, 1 : 1 + len(tokens)] = logprobs[rows].index_select(1, ids)
