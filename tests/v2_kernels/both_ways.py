# SPDX-License-Identifier: Apache-2.0
"""What the cases share: vLLM's own launches, once in Triton's interpreter and once with
our kernels.

A case calls the functions of vLLM that launch the kernels, so that it also tests the
names of their parameters in the installed version.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.triton_utils.dispatcher import KernelOverride

from vllm_ppd.vllm_plugins.engine.cpu.native import KERNELS, by_name

CPU = torch.device("cpu")
ROWS = 9  # of the requests' tables


@contextmanager
def natively() -> Iterator[set[str]]:
    """Launch our kernels within a context; the names of those launched."""
    launched: set[str] = set()

    class Recorded(KernelOverride):
        """vLLM's wrapper of a registered kernel."""

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            launched.add(self.vllm_name)
            return super().__getitem__(grid)

    with pytest.MonkeyPatch.context() as patch:
        for name, ours in KERNELS.items():
            module, _, attribute = name.rpartition(".")
            stock = getattr(resolve_name(module), attribute)
            kernel = Recorded(stock, ours)
            kernel.vllm_name = attribute
            kernel._impl = by_name(kernel.arg_names, ours)
            patch.setattr(name, kernel)
        yield launched


def both_ways(
    *kernels: str, seeds: int = 1, atol: float = 0.0
) -> Callable[..., Any]:
    """Run a case both ways, from the same random numbers; the tensors that it returns
    must be the same.

    Args:
        kernels: names of the kernels that the case must launch.
        seeds: how many times, each from other random numbers.
        atol: greatest difference.
    """

    def decorate(case: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(case)
        def test(**parameters: Any) -> None:
            for seed in range(seeds):
                torch.manual_seed(seed)
                expected = case(**parameters)
                torch.manual_seed(seed)
                with natively() as launched:
                    actual = case(**parameters)
                assert launched >= set(kernels)
                torch.testing.assert_close(
                    actual, expected, rtol=0, atol=atol, equal_nan=True
                )

        return test

    return decorate


def ints(low: int, high: int, *shape: int) -> torch.Tensor:
    """Random int32 numbers."""
    return torch.randint(
        low,
        high,
        shape,
        dtype=torch.int32,
    )


def table(fill: int, rows: torch.Tensor, values: list[int]) -> torch.Tensor:
    """[ROWS] int32 of one number, with others in some rows."""
    numbers = torch.full((ROWS,), fill, dtype=torch.int32)
    numbers[rows] = torch.tensor(values, dtype=torch.int32)
    return numbers


def rows_of(requests: int) -> torch.Tensor:
    """Distinct rows of the requests' tables."""
    return torch.randperm(ROWS)[:requests]


def starts_of(lengths: Any, padding: int = 0) -> torch.Tensor:
    """[requests + 1 + padding] where requests begin, the last value again for padding."""
    padded = [0, *torch.as_tensor(lengths).tolist(), *[0] * padding]
    return torch.tensor(padded).cumsum(0).int()


def places_of(numbers: Any) -> torch.Tensor:
    """The index of each row of logits among its request's rows."""
    return torch.cat([torch.arange(n, dtype=torch.int32) for n in numbers])
