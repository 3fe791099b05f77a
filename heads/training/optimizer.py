# SPDX-License-Identifier: Apache-2.0
"""The optimizers of `ppd train`: AdamW, or Muon for matrices and AdamW for other parameters."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vllm_ppd.heads.training.target import cpu_computes_bfloat16


class InFloat32(TorchFunctionMode):
    """A context in which tensors are not converted to bfloat16. torch's Muon multiplies
    matrices in it, which takes 30 times as long on CPUs that emulate it.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.bfloat16:
            function = Tensor.clone
        return function(*args, **(kwargs or {}))


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
        """One update of all parameters that have a gradient; those of matrices are
        cleared.
        """
        assert closure is None
        for group in self.param_groups:
            stacks = [
                p
                for p in group["params"]
                if group["muon"] and p.grad is not None and p.dim() >= 2
            ]
            if stacks:
                self._step_matrices(stacks, group)
            for parameter in stacks:
                parameter.grad = None  # AdamW skips parameters without a gradient
        return super().step()

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
        on_cpu = matrices[0][0].device.type == "cpu"
        emulated = on_cpu and not cpu_computes_bfloat16()
        with InFloat32() if emulated else nullcontext():
            muon.step()
