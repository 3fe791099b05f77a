# SPDX-License-Identifier: Apache-2.0
"""The optimizers of `ppd train`: AdamW, or Muon for matrices and AdamW for other parameters."""

from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.AdamW):
    """torch.optim.Muon for matrices, and for each matrix of a stack of them; AdamW for
    vectors and gates.

    Muon's updates are scaled to the root mean square that AdamW's typically have, so
    one learning rate fits both. The states of a language model lie mostly in few
    directions; Muon, whose update has equal singular values, learns the others as fast.

    Args:
        groups: parameter groups, with the learning rate of each in "lr" when step is
            called; "muon": False leaves all of a group to AdamW: gates of few rows,
            embeddings.
        betas: AdamW's; the first is also Muon's momentum.
        weight_decay: of both.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        groups = [{"muon": True, **group} for group in groups]
        super().__init__(
            groups, betas=betas, weight_decay=weight_decay, fused=True
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        assert closure is None
        gradients: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            stacks = [
                p
                for p in group["params"]
                if group["muon"] and p.grad is not None and p.dim() >= 2
            ]
            if stacks:
                self._step_matrices(stacks, group)
                gradients |= {p: p.grad for p in stacks}
        for parameter in gradients:
            parameter.grad = None  # AdamW skips parameters without a gradient
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return None

    def _step_matrices(self, stacks: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's update of matrices that are views of the parameters, with moments that
        are views of our state.
        """
        momentum = group["betas"][0]
        matrices = []
        for stack in stacks:
            assert stack.grad is not None
            state: dict[str, Tensor] = self.state[stack]
            if "momentum_buffer" not in state:
                # AdamW expects a step count for every parameter when it loads.
                state |= {
                    "step": torch.zeros(()),
                    "momentum_buffer": torch.zeros_like(stack),
                }
            tensors = (stack.detach(), stack.grad, state["momentum_buffer"])
            stacked = (t.reshape(-1, *t.shape[-2:]) for t in tensors)
            for matrix, gradient, buffer in zip(*stacked, strict=True):
                parameter = nn.Parameter(matrix)
                parameter.grad = gradient
                matrices.append((parameter, buffer))
        muon = torch.optim.Muon(
            [parameter for parameter, _ in matrices],
            lr=group["lr"],
            momentum=momentum,
            weight_decay=group["weight_decay"],
            adjust_lr_fn="match_rms_adamw",
        )
        for parameter, buffer in matrices:
            muon.state[parameter]["momentum_buffer"] = buffer
        muon.step()
