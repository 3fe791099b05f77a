# SPDX-License-Identifier: Apache-2.0
"""How vLLM's launches reach our kernels, views of memory, and the arithmetic of ragged batches.

A kernel here takes vLLM's parameters by their names, without `_ptr`, and only those
that it needs.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy import ndarray

MAX_ROWS = (
    1 << 16
)  # of a table behind a pointer; only rows that exist are touched


def by_name(
    parameters: Iterable[str], kernel: Callable[..., None]
) -> Callable[..., None]:
    """A launch of vLLM's kernel that calls ours with the arguments that it names.

    Tensors become numpy views, except where a parameter is annotated as a torch.Tensor.

    Args:
        parameters: names of vLLM's parameters, in order.
        kernel: our kernel.
    """
    wanted = []
    ours = inspect.signature(kernel).parameters
    for place, name in enumerate(parameters):
        parameter = ours.get(name.removesuffix("_ptr"))
        if parameter is not None:
            as_tensor = parameter.annotation is torch.Tensor
            wanted.append((place, name, parameter.name, as_tensor))

    @functools.wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> None:
        arguments = {}
        for place, name, own_name, as_tensor in wanted:
            if place < len(args):
                value = args[place]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            if isinstance(value, torch.Tensor) and not as_tensor:
                value = value.numpy()
            arguments[own_name] = value
        kernel(**arguments)

    return launch


def bytes_at(pointer: int, number: int) -> Any:
    """The bytes that begin at an address."""
    return (ctypes.c_uint8 * number).from_address(int(pointer))


@functools.lru_cache(maxsize=256)
def table_at(pointer: int, num_columns: int) -> ndarray:
    """The int32 table [MAX_ROWS, num_columns] that begins at an address."""
    size = MAX_ROWS * int(num_columns)
    table = np.frombuffer(bytes_at(pointer, 4 * size), dtype=np.int32)
    return table.reshape(MAX_ROWS, -1)


def lengths_between(starts: ndarray, items: ndarray) -> ndarray:
    """The lengths of the items, given where they begin and the last ends: [items]."""
    return np.diff(starts[: len(items) + 1])


def spans(lengths: ndarray) -> tuple[ndarray, ndarray]:
    """The items of consecutive spans.

    Args:
        lengths: [spans].

    Returns:
        (the span of each item, its index within that span), both [sum of lengths].
    """
    owners = np.repeat(np.arange(len(lengths)), lengths)
    first_items = np.cumsum(lengths) - lengths
    return owners, np.arange(len(owners)) - first_items[owners]


def unpacked(words: ndarray, count: int) -> ndarray:
    """The first bits of packed int32 words [words], from the lowest on: [count] bool."""
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    return bits.view(bool)
