# SPDX-License-Identifier: Apache-2.0
"""What the cases share: vLLM's own launches, once in Triton's interpreter and once with
our kernels.

A case calls the functions of vLLM that launch the kernels, so that it also tests the
order of their arguments in the installed version.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.triton_utils.dispatcher import KernelOverride

from vllm_ppd.vllm_plugins.engine.cpu.native import KERNELS

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@contextmanager
def natively() -> Iterator[set[str]]:
    """Launch our kernels within a context; the names of those launched."""
    launched: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name, ours in KERNELS.items():
            module, _, attribute = name.rpartition(".")
            stock = getattr(resolve_name(module), attribute)
            patch.setattr(
                name, Recorded(stock, ours, lambda name=name: launched.add(name))
            )
        yield launched


class Recorded(KernelOverride):
    """vLLM's wrapper of a registered kernel."""

    def __init__(
        self, stock: Any, ours: Callable[..., Any], launch: Callable[[], None]
    ) -> None:
        super().__init__(stock, ours)
        self._record = launch

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self._record()
        return super().__getitem__(grid)


def compare(
    case: Callable[[torch.Generator], Tensors],
    seed: int,
    *kernels: str,
    atol: float = 0.0,
) -> None:
    """Run a case both ways, from the same random numbers; every tensor that it returns
    must be the same.

    Args:
        case: builds its arguments, calls vLLM and returns what the kernels wrote.
        seed: of the random numbers.
        kernels: ends of the names of the kernels that the case is of.
        atol: greatest difference.
    """
    expected = case(torch.Generator().manual_seed(seed))
    with natively() as launched:
        actual = case(torch.Generator().manual_seed(seed))
    for kernel in kernels:
        assert any(name.endswith(kernel) for name in launched), kernel
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=0,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: n + m,
        )


def integers(
    generator: torch.Generator,
    low: int,
    high: int,
    *shape: int,
    dtype: Any = torch.int32,
) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def starts_of(lengths: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """[requests + 1 + padding] where requests begin, the last value again for padding."""
    starts = torch.zeros(len(lengths) + 1 + padding, dtype=torch.int32)
    starts[1 : len(lengths) + 1] = lengths.cumsum(0)
    starts[len(lengths) + 1 :] = starts[len(lengths)]
    return starts


def rows_of(
    generator: torch.Generator, requests: int, all_rows: int, dtype: Any = torch.int64
) -> torch.Tensor:
    """Distinct rows of the requests' tables."""
    return torch.randperm(all_rows, generator=generator)[:requests].to(dtype)
