# SPDX-License-Identifier: Apache-2.0
"""Damage to files: what it makes of bytes, and what it does to a heads folder at random, each saying so."""

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in half": lambda data: data[: len(data) // 2],
    "cut by one": lambda data: data[:-1],
    "empty": lambda _: b"",
    "longer": lambda data: data + b"\0" * 8,
    "a byte flipped": lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
    "zeros": lambda data: b"\0" * len(data),
}
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 1.5, math.nan, math.inf, 10**30, "", "x" * 5000, "\ud800", "a\n\x1b[31mb", [], {},
    [[]], [None], {"a": 1}, [1, 1], [3.0], ["3"], list(range(5000)),
)  # fmt: skip


def cut(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice(["config.json", "model.safetensors"])
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])
    return f"{path.name} is cut"


def flip(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice(["config.json", "model.safetensors"])
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 20])):
        data[rng.randrange(min(len(data), 4096))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"bits of {path.name} are flipped"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(value: Any, path: Sequence[Any], new: Any) -> None:
    """Set what stands at a path of nested dicts and lists; an Ellipsis deletes it."""
    *parents, last = path
    for key in parents:
        value = value[key]
    if new is ...:
        del value[last]
    else:
        value[last] = new


def other_value(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    path_of_value = rng.choice(list(places(data)))
    value = ... if rng.random() < 0.2 else rng.choice(ODD)
    put(data, path_of_value, value)
    told = "deleted" if value is ... else repr(value)[:40]
    path.write_text(json.dumps(data))
    return f"{'.'.join(map(str, path_of_value))} is {told}"


def whole_config(folder: Path, rng: random.Random) -> str:
    whole = (folder / "config.json").read_bytes()
    content = rng.choice([
        b"", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf" + whole,
        b'{"a": ' + b"9" * 5000 + b"}", b"[" * 1500 + b"]" * 1500, b'{"a":' * 1500 + b"1" + b"}" * 1500,
        b" " * (2 << 20),
        whole[:-3] + b', "more": "' + b"a" * (3 << 20) + b'"}', rng.randbytes(300),
    ])  # fmt: skip
    (folder / "config.json").write_bytes(content)
    return f"config.json is {content[:20]!r} of {len(content)} bytes"


def other_tensor(folder: Path, rng: random.Random) -> str:
    path = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    name = rng.choice(sorted(tensors))
    value, how = tensors[name], rng.choice(["name", "dtype", "shape", "value", "order", "missing", "more"])
    if how == "name":
        tensors[f"{name}x"] = tensors.pop(name)
    elif how == "dtype":
        names = ("int64", "int8", "bool", "float64", "bfloat16", "complex64", "float8_e4m3fn")
        tensors[name] = value.to(getattr(torch, rng.choice(names)))
    elif how == "shape":
        tensors[name] = value[None].contiguous() if rng.random() < 0.5 else value[:-1].contiguous()
    elif how == "value":
        odd = (math.nan, math.inf, -math.inf, 1.0) if value.is_floating_point() else (-1, 1 << 30, 2)
        number = rng.choice(odd)
        value.view(-1)[rng.randrange(value.numel())] = number
    elif how == "order":
        tensors[name] = value.flip(0).contiguous()
    elif how == "missing":
        del tensors[name]
    else:
        tensors["something.else"] = torch.full((3,), math.nan)
    save_file(tensors, path)
    return f"tensor {name}: {how}"


def no_file(folder: Path, rng: random.Random) -> str:
    path = folder / rng.choice(["config.json", "model.safetensors"])
    how = rng.choice(["missing", "folder", "fifo", "zero", "null", "loop", "dangling", "link", "proc"])
    kept = folder / "kept"
    path.rename(kept)
    put: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "zero": lambda: path.symlink_to("/dev/zero"),
        "null": lambda: path.symlink_to("/dev/null"),
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
        "link": lambda: path.symlink_to(kept),  # as in the Hub's cache
        "proc": lambda: path.symlink_to("/proc/self/mem"),
    }
    put[how]()
    return f"{path.name}: {how}"


def pickled(folder: Path, rng: random.Random) -> str:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return "a pickle"


RULES = (cut, flip, other_value, other_value, other_value, whole_config, other_tensor, other_tensor, no_file, pickled)
